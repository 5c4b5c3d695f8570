"""The structure of the package in numbers, at commits side by side.

    python benchmarks/structure.py [COMMIT ...]

Without commits: of the files as they lie here. Counted are statements without docstrings, imports
between files, files whose code names six or more collectives, places of ``except BackendFailure``,
and
functions with more than seven parameters: those whose parameters torch or JAX prescribes
(``PRESCRIBED``) aside, they are ours to choose, and ``--list`` names them.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meshdist.operation_table import BACKEND_OPERATIONS, OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "meshdist"
NAMES = {
    name
    for name in {*OPERATIONS, *BACKEND_OPERATIONS}
    if name not in ("send", "recv", "isend", "irecv")
}
MOST_OPERATIONS = 5
MOST_PARAMETERS = 7
PRESCRIBED = {
    "meshdist/lax/data_movement.py ragged_all_to_all": "jax.lax.ragged_all_to_all",
    "meshdist/ddp/data_parallel.py __init__": "torch.nn.parallel.DistributedDataParallel",
    "meshdist/ddp/sync_batch_norm.py __init__": "torch.nn.SyncBatchNorm",
    "meshdist/groups/group_calls.py new_group": "torch.distributed.new_group",
    "meshdist/worlds/initialization.py init_process_group": "torch.distributed.init_process_group",
}
"""The functions that have the parameters of another library's."""
FAILURE = re.compile(r"except [^\n]*\bBackendFailure\b")
Sources = Mapping[PurePosixPath, str]


def read_here() -> Sources:
    """The package's files as they lie here."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {PurePosixPath(file.relative_to(ROOT).as_posix()): file.read_text() for file in files}


def read_commit(commit: str) -> Sources:
    """The package's files at a commit."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, PACKAGE]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                found[PurePosixPath(member.name)] = file.read().decode()
    return found


def docstring_of(node: ast.AST) -> ast.Expr | None:
    """The docstring's statement of a module, class or function."""
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first if isinstance(first.value.value, str) else None
    return None


def num_statements(nodes: list[ast.AST]) -> int:
    """How many statements there are, without docstrings."""
    num_docstrings = sum(docstring_of(node) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - num_docstrings


def imported(
    file: PurePosixPath, nodes: list[ast.AST], modules: Mapping[str, PurePosixPath]
) -> set[PurePosixPath]:
    """The files of the package that a file imports."""
    found: set[PurePosixPath | None] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            base = list(file.parts[: len(file.parts) - node.level]) if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            for name in node.names:
                found.add(modules.get(f"{module}.{name.name}") or modules.get(module))
        elif isinstance(node, ast.Import):
            found.update(modules.get(name.name) for name in node.names)
    return {one for one in found if one not in (None, file)}


def num_operations(text: str, nodes: list[ast.AST]) -> int:
    """How many collectives the code names, docstrings and comments aside."""
    lines = text.split("\n")
    for node in nodes:
        if (docstring := docstring_of(node)) is not None:
            for at in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[at] = ""
    words = {*re.findall(r"\w+", "\n".join(line.split("#")[0] for line in lines))}
    return len(words & NAMES)


def long_functions(file: PurePosixPath, nodes: list[ast.AST]) -> Iterator[str]:
    """The functions of ours to choose with more than seven parameters besides ``self``, ``cls``."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(one.arg not in ("self", "cls") for one in given)
            if count > MOST_PARAMETERS and f"{file} {node.name}" not in PRESCRIBED:
                yield f"{file}:{node.lineno} {node.name} ({count})"


def count(sources: Sources) -> tuple[dict[str, int], list[str]]:
    """The numbers of some files, and their functions with many parameters."""
    all_nodes = {file: list(ast.walk(ast.parse(text))) for file, text in sources.items()}
    modules = {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in sources
    }
    many = [text for file, nodes in all_nodes.items() for text in long_functions(file, nodes)]
    numbers = {
        "files": len(sources),
        "lines": sum(text.count("\n") for text in sources.values()),
        "statements": sum(map(num_statements, all_nodes.values())),
        "imports between files": sum(
            len(imported(file, nodes, modules)) for file, nodes in all_nodes.items()
        ),
        "files that name six collectives": sum(
            num_operations(sources[file], nodes) > MOST_OPERATIONS
            for file, nodes in all_nodes.items()
        ),
        "except BackendFailure": sum(len(FAILURE.findall(text)) for text in sources.values()),
        "functions of more than seven parameters, ours to choose": len(many),
    }
    return numbers, many


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commits", nargs="*", help="what to count; the files here if none is given")
    parser.add_argument("--list", action="store_true", help="list functions of many parameters")
    options = parser.parse_args()
    columns = {name: count(read_commit(name)) for name in options.commits}
    if not columns:
        columns["here"] = count(read_here())
    names = list(columns)
    width = max(len(key) for key in columns[names[0]][0])
    print(" " * width, *(f"{name[:10]:>10}" for name in names))
    for key in columns[names[0]][0]:
        print(f"{key:{width}}", *(f"{columns[name][0][key]:>10,}" for name in names))
    if options.list:
        print(*columns[names[-1]][1], sep="\n")


if __name__ == "__main__":
    main()

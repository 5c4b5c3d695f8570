"""Write the tables of pages that are made from the code, the tests' data and reports.

    python packaging/reference_tables.py

A table stands between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``; ``TABLES`` has its text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]

import benchmark_tables  # noqa: E402
from raised_errors import all_errors, cell, table  # noqa: E402

from meshdist import DistributedDataParallel  # noqa: E402
from meshdist.cli import run  # noqa: E402
from meshdist.cli.flags import Parser  # noqa: E402
from meshdist.launching.launcher_variables import (  # noqa: E402
    BY_HAND,
    KUBEFLOW,
    LIGHTNING,
    NAMES,
    STARTERS,
    LauncherVariables,
)

PAGES = {
    name: ROOT / "docs" / name
    for name in (
        "reference/launchers.md",
        "reference/environment_variables.md",
        "reference/errors.md",
        "reference/undetected_mistakes.md",
        "reference/ddp.md",
        "how-to/launch.md",
        "contributing/architecture.md",
        "explanation/benchmarks.md",
    )
}


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(text or " " for text in line) + " |\n" for line in lines)


def _as_markdown(cells: Callable[[], benchmark_tables.Cells]) -> Callable[[], str]:
    return lambda: _markdown(*cells())


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


# -- launchers ----------------------------------------------------------------------------------

_LAUNCHERS = {
    "env": "`meshdist run`, `spawn`, torchrun, DeepSpeed, accelerate, or by hand",
    "Lightning": "Lightning's child processes",
    "Open MPI": "`mpiexec` of Open MPI",
    "Hydra": "`mpiexec` of MPICH, Intel MPI and other MPIs with Hydra",
    "MVAPICH": "`mpirun_rsh` of MVAPICH",
    "jsrun": "`jsrun` of LSF",
    "Flux": "`flux run`",
    "Slurm": "`srun`",
    "PMIx": "`prun` and others that set only PMIx",
    "Kubeflow": "Kubeflow with plain `python`",
}
"""What the page calls each launcher."""


def launchers() -> str:
    """Return the table of launchers in the order in which meshdist looks for them."""
    head = ("launcher", "rank", "world size", "local rank, local size", "hosts", "store of rank 0")
    rows = []
    for row in (BY_HAND, LIGHTNING, *STARTERS, KUBEFLOW):
        rank = _code([row.rank]) or f"host {_code([row.host])} and the local rank"
        hosts = _code([*row.num_hosts, *row.hosts])
        local = _code([row.local_rank, row.local_size])
        size = " or ".join(f"`{name}`" for name in row.size)
        rows.append((_LAUNCHERS[row.name], rank, size, local, hosts, _store(row)))
    return _markdown(head, rows)


def _store(row: LauncherVariables) -> str:
    if row.port:
        return _code([row.address or "MASTER_ADDR", row.port])
    return "first host of the list, port by job and step" if row.hosts else "automatic"


class _MadeError(Exception):
    """The parser of a command, at the moment at which it would parse."""


class _UnusedParser(Parser):
    def parse_args(self, *_: Any, **__: Any) -> NoReturn:
        raise _MadeError(self)


def _parser_of_run() -> Parser:
    with mock.patch.object(run, "Parser", _UnusedParser):
        try:
            run.main([])
        except _MadeError as made:
            parser: Parser = made.args[0]
            return parser
    raise AssertionError("meshdist run parsed no arguments")


def flags() -> str:
    """Return the flags of ``meshdist run``."""
    rows = []
    for action in _parser_of_run()._actions:
        shown = [name for name in action.option_strings if "_" not in name]
        if shown and action.help not in (None, argparse.SUPPRESS) and action.dest != "help":
            value = action.metavar or " or ".join(action.choices or ())
            usage = ", ".join(f"`{f'{name} {value}'.strip()}`" for name in shown)
            rows.append((usage, cell(action.help)))
    return _markdown(("flag", "effect"), rows)


# -- environment variables ----------------------------------------------------------------------


@dataclass(frozen=True)
class Variable:
    """Variables of one row, separated by commas; ``*`` stands for the end of a name."""

    names: str
    default: str
    effect: str

    def is_for(self, name: str) -> bool:
        patterns = [re.escape(each).replace(r"\*", r"\w*") for each in self.names.split(", ")]
        return any(re.fullmatch(pattern, name) for pattern in patterns)


OWN = (
    Variable(
        "MESHDIST_HOST_ID",
        "kernel boot and network namespace",
        "Ranks with equal values run on one host. Set it for example for two containers.",
    ),
    Variable(
        "MESHDIST_STALL_WARNING_S",
        "30",
        "Seconds until a waiting rank logs the [ranks it waits for](../how-to/debug.md); "
        "0 disables the warning.",
    ),
    Variable(
        "MESHDIST_TORCH_LAYOUT",
        "1",
        "With 0, the native core calls Python instead of reading torch's tensor objects. Use it to "
        "test a custom torch build.",
    ),
    Variable(
        "MESHDIST_SHM_VECTORS",
        "widest of this CPU",
        "`avx512`, `avx2` or `baseline`: the instructions that reduce in shared memory. Set the "
        "same value on every rank.",
    ),
)
"""Variables of meshdist that a user may set."""
READ = (
    Variable(
        "TORCH_DISTRIBUTED_DEBUG",
        "OFF",
        "INFO or DETAIL: the [debug level](../how-to/debug.md).",
    ),
    Variable(
        "TORCH_CPP_LOG_LEVEL",
        "unset",
        "INFO, WARNING, ERROR or FATAL: the level of the logger `meshdist`.",
    ),
    Variable("TORCH_SHOW_CPP_STACKTRACES", "unset", "With 1, errors show the stack of each call."),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "loopback on one host; else the address towards the store",
        "Gloo's network interfaces, separated by commas; the same number on every rank.",
    ),
    Variable(
        "TORCH_GLOO_LAZY_INIT",
        "unset",
        "With 1, two ranks connect over Gloo when they first communicate.",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_DESYNC_DEBUG, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_ENABLE_MONITORING, TORCH_NCCL_RETHROW_CUDA_ERRORS, "
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "torch's",
        "Only for torch's own groups: meshdist sets them to 0 while it creates an NCCL group, and "
        "restores them.",
    ),
    Variable(
        "NCCL_SOCKET_IFNAME, NCCL_DEBUG, NCCL_DEBUG_SUBSYS, NCCL_SOCKET_NTHREADS, "
        "NCCL_NSOCKS_PERTHREAD",
        "NCCL's",
        "Read by NCCL: its interfaces, its log, and its threads and sockets.",
    ),
    Variable("CUDA_VISIBLE_DEVICES", "all GPUs", "The GPUs that torch and NCCL can use."),
    Variable(
        "TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT",
        "0",
        "The restarts that `checkpoint.restart_count()` returns.",
    ),
    Variable(
        "TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE",
        "set by torchrun",
        "Whether torchrun started this process, and whether its agent hosts the store.",
    ),
    Variable(
        "PMIX_NAMESPACE, PMI_KVSNAME, FLUX_JOB_ID, SLURM_JOB_ID, SLURM_NTASKS_PER_NODE",
        "set by the launcher",
        "Identify the job and its size, with the variables of its [launcher](launchers.md).",
    ),
    Variable("PET_*", "torchrun's", "Defaults of the flags of `meshdist run`, as for torchrun."),
    Variable(
        "RAY_RAYLET_PID, SUBMITIT_EXECUTOR",
        "set by the scheduler",
        "Identify a worker of [Ray or submitit](../how-to/schedulers.md).",
    ),
)
"""Variables of torch, its libraries and schedulers that meshdist reads or changes."""
SET = (
    Variable("RANK, WORLD_SIZE", "", "The rank in the job, and the number of ranks."),
    Variable("LOCAL_RANK, LOCAL_WORLD_SIZE", "", "The same on this host."),
    Variable("GROUP_RANK, GROUP_WORLD_SIZE", "", "The host's number, and the number of hosts."),
    Variable(
        "ROLE_NAME, ROLE_RANK, ROLE_WORLD_SIZE",
        "",
        "`--role`; the same as `RANK` and `WORLD_SIZE`.",
    ),
    Variable("MASTER_ADDR, MASTER_PORT", "", "The address of rank 0's store."),
    Variable("OMP_NUM_THREADS", "yours", "1 if the host has more than one rank."),
    Variable(
        "THP_MEM_ALLOC_ENABLE",
        "yours",
        "1: torch requests [huge pages](../how-to/launch.md#huge-pages) for large tensors.",
    ),
    Variable("MESHDIST_LAUNCH", "", "Identifies all processes of the launch."),
    Variable("MESHDIST_RUN_ID", "", "On one host: a random hexadecimal number of the job."),
    Variable("MESHDIST_QUESTIONS", "", "The directory in which the launcher asks for stacks."),
    Variable(
        "MESHDIST_DIRECTORY",
        "",
        "On one host without an address: the directory with the store's file.",
    ),
    Variable(
        "MESHDIST_LISTEN_FD",
        "",
        "On one host, for rank 0: an inherited TCP socket, bound to the address of its store.",
    ),
    Variable(
        "OMPI_ALLOW_RUN_AS_ROOT, OMPI_ALLOW_RUN_AS_ROOT_CONFIRM, OMPI_MCA_*, PRTE_MCA_*",
        "yours",
        "Only with `--launcher mpi`: Open MPI runs as root, starts more ranks than cores, and does "
        "not bind ranks to cores.",
    ),
)
"""Variables that ``meshdist run`` sets for its ranks."""
INTERNAL = {"MESHDIST_BENCH_SOCKET", "PYTHONPATH"}
"""Variables between processes of ``meshdist bench`` and ``doctor``, which no user has to know."""


def _variables(rows: Sequence[Variable], *, name: str = "default") -> str:
    shown = [(_code(row.names.split(", ")), row.default, row.effect) for row in rows]
    return _markdown(("variable", name, "effect"), shown)


def names_in_code() -> set[str]:
    """Return the environment variables that meshdist's sources name.

    These are MESHDIST_* and TORCH_*, in any text that is a name, and all names, in the source or
    by a constant of the module, that are looked up in ``os.environ`` or a variable ``environment``.
    """
    found = set()
    for path in (ROOT / "meshdist").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            target.id: texts
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and (texts := _names_of(node.value))
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {*re.findall(r"^(?:MESHDIST|TORCH)_[A-Z0-9_]+$", node.value)}
            for key in _keys_of(node):
                named = constants.get(key.id, set()) if isinstance(key, ast.Name) else set()
                found |= named | _names_of(key)
    for path in (ROOT / "native").glob("*.cpp"):
        found |= {*re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8"))}
    return found


def _names_of(node: ast.expr | None) -> set[str]:
    """Return the text of a node, or the texts of a list."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return set[str]().union(*map(_names_of, node.elts))
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
        return set()
    return {node.value} if re.fullmatch(r"[A-Z][A-Z0-9_]+", node.value) else set()


def _keys_of(node: ast.AST) -> list[ast.expr]:
    """Return the keys that an expression looks up in the environment."""
    if isinstance(node, ast.Subscript) and _is_environment(node.value):
        return [node.slice]
    if isinstance(node, ast.Compare) and any(map(_is_environment, node.comparators)):
        return [node.left]
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and _is_environment(node.func.value):
        return node.args[:1]
    return node.args[1:] if node.args and _is_environment(node.args[0]) else []


def _is_environment(node: ast.expr) -> bool:
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name in ("environ", "environment")


def has_row(name: str) -> bool:
    """Return whether a table of launchers or of variables has the variable."""
    return name in {*NAMES, *INTERNAL} or any(row.is_for(name) for row in (*OWN, *READ, *SET))


# -- errors -------------------------------------------------------------------------------------

_OF_JOINING = ("GroupClosedError", "NotInitializedError", "RendezvousError", "StoreError")
_AREAS = (
    ("Launch and initialize", ("bootstrap", "worlds", "launching", "cli", "bench")),
    ("Meshes, specs and layouts", ("mesh", "arguments", "annotations")),
    ("Collectives and groups", ()),  # and all other folders
    ("Data parallelism", ("ddp", "join")),
    ("Sharded arrays", ("sharding", "arrays", "attention", "experts")),
    ("Axis types", ("typed_mode",)),
    ("Tensor parallelism", ("tensor_parallel", "optim")),
    ("Checkpoints", ("checkpoint",)),
)
"""Headings of the site's page, and the folders of each."""


def errors_of_initialization() -> str:
    """Return the errors that ranks raise while they form a world."""
    kinds = (*_OF_JOINING, "WorldError")
    found = [each for each in all_errors() if each.folder in ("bootstrap", "worlds")]
    return table([each for each in found if each.kind in kinds])


def errors_by_area() -> str:
    """Return the tables of all errors, for the site."""
    listed = {folder for _, folders in _AREAS for folder in folders}
    parts = []
    for title, folders in _AREAS:
        errors = [
            each
            for each in all_errors()
            if each.folder in folders or (not folders and each.folder not in listed)
        ]
        parts.append(f"## {title}\n\n{table(errors)}")
    return "\n".join(parts)


# -- mistakes -----------------------------------------------------------------------------------


def undetected_mistakes() -> str:
    """Return a table for each area: the rows of tests/misuse_rows.json that no error reports."""
    text = (ROOT / "tests" / "misuse_rows.json").read_text(encoding="utf-8")
    areas: dict[str, list[Sequence[str]]] = {}
    for row in json.loads(text)["mistakes"]:
        if row.get("undetected"):
            names = [name for name in row["names"] if name != "DistributedDataParallel"]
            cells = (_code(names), row["mistake"], row["effect"], row["do"])
            areas.setdefault(row["section"], []).append(cells)
    head = ("call", "mistake", "effect", "do this")
    return "\n".join(f"## {area}\n\n{_markdown(head, rows)}" for area, rows in areas.items())


# -- options of DDP -----------------------------------------------------------------------------


def ddp_options() -> str:
    """Return the arguments of DDP with their defaults and, from its docstring, their effects."""
    docstring = inspect.getdoc(DistributedDataParallel) or ""
    section = docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]
    effects: dict[str, str] = {}
    for entry in re.split(r"\n {4}(?! )", "\n" + section)[1:]:
        names, _, effect = entry.partition(":")
        effects |= dict.fromkeys(names.split(", "), effect)
    rows = []
    for name, parameter in inspect.signature(DistributedDataParallel).parameters.items():
        has_default = parameter.default is not parameter.empty
        default = f"`{parameter.default}`" if has_default else "required"
        rows.append((f"`{name}`", default, _sentence(effects.pop(name))))
    if effects:
        raise ValueError(f"the docstring has arguments that DDP lacks: {', '.join(effects)}")
    return _markdown(("argument", "default", "effect"), rows)


def _sentence(text: str) -> str:
    """Return a text of a docstring as Markdown of a cell, without a last full stop."""
    return cell(text.replace("``", "`").strip()).removesuffix(".")


# -- modules ------------------------------------------------------------------------------------


def floors() -> tuple[dict[str, tuple[str, ...]], ...]:
    """Return ``FLOORS`` of tests/test_layering.py, from its source: the site has no pytest."""
    tree = ast.parse((ROOT / "tests" / "test_layering.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FLOORS":
            found: tuple[dict[str, tuple[str, ...]], ...] = ast.literal_eval(node.value or node)
            return found
    raise AssertionError("tests/test_layering.py has no FLOORS")


def modules() -> str:
    """Return all modules in the order of their floors, with the first lines of their docstrings."""
    rows, seen = [], {""}
    for floor, folders in enumerate(floors()):
        for folder, names in folders.items():
            root = "" if folder in ("", *names) else f"{folder}/"
            for name in names:
                path = root + name.replace(".", "/")
                for above in {root: None, path[: path.rfind("/") + 1]: None}:
                    if above not in seen:
                        seen.add(above)
                        rows.append((str(floor), f"**`{above}`**", _first_line(f"{above}__init__")))
                rows.append((str(floor), f"`{path}`", _first_line(path)))
    return _markdown(("floor", "module", "purpose"), rows)


def _first_line(path: str) -> str:
    """Return the first line of the docstring of a module, or of its stub."""
    source = ROOT / "meshdist" / f"{path}.py"
    text = (source if source.exists() else source.with_suffix(".pyi")).read_text(encoding="utf-8")
    return _sentence((ast.get_docstring(ast.parse(text)) or "").partition("\n")[0])


# -- pages --------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "launchers": launchers,
    "flags": flags,
    "own variables": lambda: _variables(OWN),
    "read variables": lambda: _variables(READ),
    "set variables": lambda: _variables(
        [Variable(row.names, row.default or "replaced", row.effect) for row in SET],
        name="if you set it",
    ),
    "errors": errors_of_initialization,
    "undetected mistakes": undetected_mistakes,
    "ddp options": ddp_options,
    "modules": modules,
    **{name: _as_markdown(cells) for name, cells in benchmark_tables.TABLES.items()},
}
_MARKED = re.compile(r"(<!-- ([a-z ]+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with its tables as they are now."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark[2]]()}\n{mark[3]}", page)


def without_tables(page: str) -> str:
    """Return the page without its generated tables."""
    return _MARKED.sub("", page)


def with_all_errors(page: str) -> str:
    """Return the page of errors as the site shows it: with the errors of all areas."""
    return _MARKED.sub(lambda mark: errors_by_area(), page)


if __name__ == "__main__":
    for path in PAGES.values():
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")

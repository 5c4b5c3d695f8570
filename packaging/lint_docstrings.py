"""A lint of the form of docstrings and of names; for their words see ``lint_prose.py``.

    python packaging/lint_docstrings.py [FILE ...]

Without files it reads the whole package. It prints a line for each fault; the exit status is 1 if
there is any.

* No variable, parameter or attribute is called ``one`` or ``ones``, and no docstring begins with
  "What".
* An internal docstring is one sentence of at most 100 characters that begins with a verb or a noun
  and says more than the name. ``Args:`` and ``Attributes:`` may follow, for names that need more
  than their type, ``Raises:``, and an example that the tests execute. Reasons belong in comments,
  protocols in the docstring of the module.

Public are the names that the public API offers (``DOORS``, the ``__all__`` of its modules), and the
methods of such classes and of their bases: their docstrings give shapes, costs and sources, and
have any length.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "meshdist"
DOORS = (
    "lax/__init__.py",
    "ddp/comm_hooks/__init__.py",
    "checkpoint/__init__.py",
    "optim/__init__.py",
    "tensor_parallel/__init__.py",
)  # beside all stubs
LONGEST = 100

_NO_BEGINNING = """
what who whoever whose whom which where when whenever how why whether one ones of for by to from in
on at as with without if and or but so than that this these those it its is are was be because since
"""
_NO_CONTENT = """
a an the of to for in on at by with and or its it is are this that return returns give gives make
makes get gets all each from as
"""
_QUOTED = re.compile(r"``.*?``|`[^`]*`|\"[^\"]*\"", re.DOTALL)
_SENTENCE_ENDS = re.compile(r"[.!?](?=\s+[A-Z`\"])")
_MORE = re.compile(r"\n\s*(?:Args:|Attributes:|Raises:|Example:|Examples:|>>> )")

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public_names(root: Path = ROOT) -> set[tuple[Path, str]]:
    """Return the file and name of each definition that the doors offer, and of their bases."""
    doors = [*root.rglob("*.pyi"), *(root / listener for listener in DOORS)]
    found = set()
    for listener in doors:
        for node in ast.walk(ast.parse(listener.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = listener.parents[node.level - 1]
                room = folder.joinpath(*(node.module or "").split("."))
                file = room / "__init__.py" if room.is_dir() else room.with_suffix(".py")
                found |= {(file, alias.name) for alias in node.names}
                modules = [folder / f"{alias.name}.py" for alias in node.names if not node.module]
                found |= {(file, name) for file in modules for name in _listed_names(file)}
    classes = _classes(root)
    unread = [key for key in found if key in classes]
    while unread:
        for base in classes[unread.pop()].bases:
            name = getattr(base, "id", getattr(base, "attr", None))
            parents = [key for key in classes if key[1] == name and key not in found]
            found |= set(parents)
            unread += parents
    return found


def _listed_names(file: Path) -> list[str]:
    """Return the names in the ``__all__`` of a module; none where it is no literal list."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    lists = [node.value for node in body if ast.unparse(node).startswith("__all__ = ['")]
    return [name for names in lists for name in ast.literal_eval(names)]


def _classes(root: Path) -> dict[tuple[Path, str], ast.ClassDef]:
    return {
        (file, node.name): node
        for file in root.rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }


def faults_of(
    source: str, public: frozenset[str] | set[str] = frozenset()
) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each fault of a source, of which ``public`` names are public."""
    tree = ast.parse(source)
    yield from sorted({*_names(tree), *_docstrings(tree, public)})


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        if name.strip("_") in ("one", "ones"):
            yield node.lineno, f"the name {name!r} says nothing: name the thing"


def _docstrings(tree: ast.Module, public: frozenset[str] | set[str]) -> Iterator[tuple[int, str]]:
    documented = [
        (tree, True, "module"),
        *((*pair, pair[0].name) for pair in _documented(tree, public)),
    ]
    for node, is_public, name in documented:
        text = ast.get_docstring(node)
        if text is None:
            continue
        faults = [*([] if is_public else shape_of(text, name))]
        if text.split(maxsplit=1)[0] == "What":
            faults.append('begins with "What"')
        yield from ((node.body[0].lineno, f"{name}: {fault}") for fault in faults)


def _documented(
    tree: ast.Module, public: frozenset[str] | set[str]
) -> Iterator[tuple[Documented, bool]]:
    def below(
        body: list[ast.stmt], is_public: bool, is_top: bool
    ) -> Iterator[tuple[Documented, bool]]:
        for node in body:
            if isinstance(node, Documented):
                hidden = node.name.startswith("_") and not node.name.startswith("__")
                seen = node.name in public if is_top else is_public and not hidden
                yield node, seen
                yield from below(node.body, seen and isinstance(node, ast.ClassDef), False)
            else:
                for name in ("body", "orelse", "finalbody"):
                    yield from below(getattr(node, name, []), is_public, is_top)

    yield from below(tree.body, False, True)


def shape_of(docstring: str, name: str) -> Iterator[str]:
    """Yield the faults of an internal docstring: sentences, length, its beginning, its content."""
    sentence = _MORE.split(docstring, maxsplit=1)[0].strip()
    one_line = " ".join(sentence.split())
    if "\n\n" in sentence or _SENTENCE_ENDS.search(_QUOTED.sub("x", one_line)):
        yield "more than one sentence: reasons stand in comments"
    elif len(one_line) > LONGEST:
        yield f"{len(one_line)} characters, at most {LONGEST}"
    words = re.findall(r"[a-z]+", one_line.lower())
    if words and words[0] in _NO_BEGINNING.split() and not one_line.startswith("`"):
        yield f"begins with {words[0]!r}, not with a verb or a noun"
    named = {_stem(word) for word in re.findall(r"[a-z]+", _snake(name).lower())}
    if {_stem(word) for word in words} - {*_NO_CONTENT.split()} <= named:
        yield "says no more than the name"


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("_", " ")


def _stem(word: str) -> str:
    return word if len(word) < 4 else re.sub(r"(?:ies|es|s|ed|ing)$", "", word)


def main() -> int:
    """Print the faults of the files that are named, or of the package."""
    files = [Path(name).resolve() for name in sys.argv[1:]] or sorted(ROOT.rglob("*.py"))
    public = public_names()
    count = 0
    for file in files:
        names = {name for room, name in public if room == file}
        for line, fault in faults_of(file.read_text(encoding="utf-8"), names):
            print(f"{file.relative_to(ROOT.parent)}:{line}: {fault}")
            count += 1
    print(f"{count} faults in {len(files)} files", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

"""A name means one thing in the package: classes, modules, and what the public API offers."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import meshdist

ROOT = Path(__file__).resolve().parents[1] / "meshdist"
FILES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__init__.py")

# A collective's name leads to its module in `functional/` and to its JAX name's in `lax/`; each
# backend has a communicator.
SHARED = {"communicator", "data_movement", "reductions", "equality_checks"}


def classes_of(source: str) -> set[str]:
    """Return the names of all classes in a source, without leading underscores."""
    nodes = ast.walk(ast.parse(source))
    return {node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef)}


def named_twice(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what several have, with those that have it."""
    return {name: owners for name, owners in names.items() if len(owners) > 1}


def test_no_two_classes_have_one_name() -> None:
    owners = defaultdict(list)
    for path in FILES:
        for name in classes_of(path.read_text(encoding="utf-8")):
            owners[name].append(str(path.relative_to(ROOT)))
    assert named_twice(owners) == {}


def test_no_two_modules_have_one_name() -> None:
    owners = defaultdict(list)
    for path in FILES:
        owners[path.stem].append(str(path.relative_to(ROOT)))
    assert named_twice(owners).keys() == SHARED


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        (("class A: ...", "class _A: ..."), {"A"}),
        (("class A: ...", "def f():\n    class A: ..."), {"A"}),
        (("if x:\n    class A: ...\nelse:\n    class A: ...", "class B: ..."), set()),
    ],
)
def test_what_counts_as_one_name(sources: tuple[str, str], found: set[str]) -> None:
    owners = defaultdict(list)
    for place, source in enumerate(sources):
        for name in classes_of(source):
            owners[name].append(str(place))
    assert named_twice(owners).keys() == found


def test_no_room_hides_a_public_name() -> None:
    # Python sets an imported submodule as an attribute of its package, over what was there.
    rooms = {path.stem for path in ROOT.glob("*.py")}
    rooms |= {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    shared = {
        "attention",
        "checkpoint",
        "distributed",
        "errors",
        "experts",
        "lax",
        "optim",
        "tensor_parallel",
    }
    assert rooms & set(meshdist.__all__) == shared

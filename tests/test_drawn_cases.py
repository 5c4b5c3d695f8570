"""Hard bodies have drawn cases, which are short and executed."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADING = "Drawn case:"
MOST_LINES = 25
HARD_BODIES = [
    "meshdist/mesh/placement.py",
    "meshdist/sharding/carrying.py",
    "meshdist/sharding/change_steps.py",
    "meshdist/sharding/routes.py",
]
MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "meshdist").rglob("*.py"))
    if HEADING in path.read_text(encoding="utf-8")
]


def test_hard_bodies_have_a_drawn_case() -> None:
    assert set(HARD_BODIES) <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_case_ends_the_docstring_of_its_module_and_is_executed(module: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))
    assert docstring is not None and docstring.count(f"\n{HEADING}") == 1
    case = docstring.partition(f"\n{HEADING}")[2]
    assert len(case.splitlines()) <= MOST_LINES
    assert any(example.want for example in doctest.DocTestParser().get_examples(case))

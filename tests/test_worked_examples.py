"""Hard bodies have worked examples, which are short and executed."""

from __future__ import annotations

import ast
import doctest
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEADING = "Worked example:"
MOST_LINES = 25
HARD_BODIES = [
    "meshdist/checking/fingerprint_table.py",
    "meshdist/ddp/reducer.py",
    "meshdist/ddp/backward_outcome.py",
    "meshdist/annotations/axis_types.py",
    "meshdist/groups/agreement.py",
    "meshdist/mesh/placement.py",
    "meshdist/sharding/executor.py",
    "meshdist/sharding/lowering.py",
    "meshdist/sharding/routes.py",
    "meshdist/typed_mode/casts.py",
]
# Bodies of the core, and the test that executes the numbers of each.
NATIVE = {
    ("reductions.cpp", "reduce_whole"): (
        "test_a_small_all_reduce_is_one_line_or_one_slot_of_each_member"
    ),
    ("reductions.cpp", "reduce_by_halves"): ("test_two_members_reduce_a_half_each_in_three_rounds"),
}
MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "meshdist").rglob("*.py"))
    if HEADING in path.read_text(encoding="utf-8")
]


def test_hard_bodies_have_a_worked_example() -> None:
    assert set(HARD_BODIES) <= {*MODULES}


@pytest.mark.parametrize("module", MODULES)
def test_a_case_ends_the_docstring_of_its_module_and_is_executed(module: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / module).read_text(encoding="utf-8")))
    assert docstring is not None and docstring.count(f"\n{HEADING}") == 1
    case = docstring.partition(f"\n{HEADING}")[2]
    assert len(case.splitlines()) <= MOST_LINES
    assert any(example.want for example in doctest.DocTestParser().get_examples(case))


@pytest.mark.parametrize(("body", "executed_by"), NATIVE.items())
def test_a_case_begins_a_native_body_and_a_test_executes_it(
    body: tuple[str, str], executed_by: str
) -> None:
    file, name = body
    source = (ROOT / "native" / file).read_text(encoding="utf-8")
    lines = source.partition(f"::{name}(Job& job) {{\n")[2].splitlines()
    case = [*takewhile(lambda line: line.startswith("  //"), lines)]
    assert case[0].startswith(f"  // {HEADING} ") and len(case) <= MOST_LINES
    tests = (ROOT / "tests" / "native" / "test_worked_examples.py").read_text(encoding="utf-8")
    assert f"def {executed_by}(" in tests

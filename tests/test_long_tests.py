"""What is left to `make soak` is held by a test that `make test` runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.long_tests import HELD_BY, is_named

TESTS = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", [*dict.fromkeys([*HELD_BY, *HELD_BY.values()])])
def test_each_is_a_test(name: str) -> None:
    file, _, function = name.partition("[")[0].partition("::")
    tree = ast.parse((TESTS / file).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not function or function in functions


def test_each_is_held_by_a_test_that_runs_with_the_whole_suite(
    request: pytest.FixtureRequest,
) -> None:
    tests = request.session.items
    is_whole = len(tests) > 10_000
    assert [name for name in HELD_BY if any(is_named(test, name) for test in tests)] == []
    missing = {name for name in HELD_BY.values() if not any(is_named(test, name) for test in tests)}
    assert not (is_whole and missing)

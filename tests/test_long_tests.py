"""What is left to `make soak` is held by a test that `make test` runs."""

from __future__ import annotations

import pytest

from tests.long_tests import HELD_BY, is_named


def test_each_is_held_by_a_test_that_runs(request: pytest.FixtureRequest) -> None:
    tests = request.session.items
    if len(tests) < 10_000:
        pytest.skip("a part of the suite was chosen")
    assert [name for name in HELD_BY if any(is_named(test, name) for test in tests)] == []
    holders = dict.fromkeys(HELD_BY.values())
    assert [name for name in holders if not any(is_named(test, name) for test in tests)] == []

"""What ranks say of themselves in a join context reaches those that look."""

from __future__ import annotations

from typing import Any

import pytest

import meshdist as md
from meshdist.errors import BackendError
from meshdist.joining.whereabouts import Whereabouts
from tests.inner import get_world


@pytest.mark.parametrize("main", ["a", "b"])
@pytest.mark.parametrize("wire", ["simulated", "gloo"])
def test_what_is_said_is_found(wire: str, main: str, request: pytest.FixtureRequest) -> None:
    def program() -> list[Any]:
        mine = Whereabouts(get_world(), main, range(2))
        before = [mine.has_joined(1), mine.find_left("a")]
        md.barrier()
        if md.get_rank() == 1:
            mine.join()
            error = BackendError("it failed", found="a broken wire")
            mine.leave(["a"], mine.reason_of(error))
        md.barrier()
        if md.get_rank() == 0:  # the first that leaves is the one that is told of
            mine.leave(["a", "b"], mine.reason_of(KeyError("late")))
        md.barrier()
        later = Whereabouts(get_world(), main, range(2))  # of the next context
        return [
            before,
            [mine.has_joined(rank) for rank in range(2)],
            mine.find_left("a"),
            mine.find_left("b"),
            later.has_joined(1) or later.find_left("a"),
        ]

    if wire == "simulated":
        found = md.simulate(program, 2)
    else:
        found = request.getfixturevalue("pool").run(program, 2)
    for before, joined, left, other, later in found:
        assert before == [False, None]
        assert joined == [False, True]
        assert left == {"rank": 1, "reason": "BackendError: it failed: a broken wire"}
        assert other == {"rank": 0, "reason": "KeyError: 'late'"}
        assert not later

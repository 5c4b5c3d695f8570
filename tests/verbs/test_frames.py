"""A blocking call of a verb goes through few functions of Python, on every wire."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks._verbs import BLOCKING
from benchmarks.frames import count_frames, frames_of, most_of
from tests.verbs.cases import WIRES

# Of calls that the native fast path does not take, in the order of BLOCKING.
AT_MOST = {
    "simulated": (73, 73, 71, 77, 74, 78, 87, 97, 119, 93, 92, 66, 136),
    "shm": (15, 15, 17, 19, 21, 21, 33, 37, 57, 33, 32, 17, 66),
    "gloo": (78, 22, 31, 57, 35, 72, 63, 71, 133, 52, 51, 28, 115),
}


def test_frames_are_counted_with_lambdas_and_in_order() -> None:
    def outer() -> None:
        (lambda: inner())()

    def inner() -> None: ...

    entered = [name.rsplit(" ", 1)[1] for name in frames_of(outer)]
    assert entered == ["outer", "<lambda>", "inner"]


@pytest.mark.parametrize("wire", AT_MOST)
def test_a_blocking_call_goes_through_few_frames(wire: str, pool: Any) -> None:
    found = most_of(WIRES[wire](pool, count_frames, 2))
    most = dict(zip(BLOCKING, AT_MOST[wire], strict=True))
    frames = {name: found[f"{name}, in Python"] for name in BLOCKING}
    assert {name: frames[name] for name in most if frames[name] > most[name]} == {}


def test_the_fast_path_is_one_frame(pool: Any) -> None:
    found = most_of(WIRES["shm"](pool, count_frames, 2))
    assert (found["all_reduce"], found["all_gather_into_tensor"], found["all_to_all"]) == (1, 1, 1)

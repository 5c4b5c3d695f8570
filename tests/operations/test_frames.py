"""A blocking call of a collective goes through few functions of Python, on every backend."""

from __future__ import annotations

from typing import Any

import pytest

import meshdist as md
from benchmarks._operations import BLOCKING
from benchmarks.frames import count_frames, frames_of, most_of
from tests.backends.c10d.nccl_stand_in import standing_in
from tests.operations.cases import BACKENDS

# Of calls that the native fast path does not take, in the order of BLOCKING. Over Gloo a collective
# of several steps takes a few more where another member is late.
AT_MOST = {
    "simulated": (44, 44, 45, 44, 49, 47, 49, 56, 68, 85, 64, 63, 42, 93),
    "shm": (16, 16, 16, 18, 21, 21, 21, 31, 34, 50, 33, 32, 17, 44),
    "gloo": (36, 19, 19, 27, 39, 28, 46, 46, 55, 88, 46, 45, 22, 86),
}


def test_frames_are_counted_with_lambdas_and_in_order() -> None:
    def outer() -> None:
        (lambda: inner())()

    def inner() -> None: ...

    entered = [name.rsplit(" ", 1)[1] for name in frames_of(outer)]
    assert entered == ["outer", "<lambda>", "inner"]


@pytest.mark.parametrize("backend", AT_MOST)
def test_a_blocking_call_goes_through_few_frames(backend: str, pool: Any) -> None:
    found = most_of(BACKENDS[backend](pool, count_frames, 2))
    most = dict(zip(BLOCKING, AT_MOST[backend], strict=True))
    frames = {name: found[f"{name}, in Python"] for name in BLOCKING}
    assert {name: frames[name] for name in most if frames[name] > most[name]} == {}


def test_a_work_is_made_waited_for_and_dropped_in_few_frames(pool: Any) -> None:
    found = most_of(BACKENDS["shm"](pool, count_frames, 2))
    more = {
        name: found[f"{name}, async"] - found[f"{name}, in Python"]
        for name in ("all_reduce", "broadcast", "all_gather", "barrier")
    }
    # One checks the flag, two make the Work, two what the backend returns, four wait, one ends it.
    assert {name: number for name, number in more.items() if number > 10} == {}


def test_the_fast_path_is_one_frame(pool: Any) -> None:
    found = most_of(BACKENDS["shm"](pool, count_frames, 2))
    assert (found["all_reduce"], found["all_gather_into_tensor"], found["all_to_all"]) == (1, 1, 1)


def test_plain_calls_over_gloo_go_through_eight_frames_at_most(pool: Any) -> None:
    found = most_of(BACKENDS["gloo"](pool, count_frames, 2))
    plain = set(BLOCKING) - {"send, recv"}
    plain |= {f"{name}, async" for name in plain}
    assert {name: found[name] for name in plain if found[name] > 8} == {}


def count_frames_on_a_stream() -> dict[str, int]:
    with standing_in():
        counts = count_frames(of=md.new_group([0, 1], backend="cpu:nccl"))
        md.barrier()
        return counts


def test_plain_calls_on_a_stream_go_through_eight_frames_at_most(pool: Any) -> None:
    found = most_of(pool.run(count_frames_on_a_stream, 2))
    # A barrier names a device, and NCCL finds the largest of floats by an exchange.
    plain = set(BLOCKING) - {"barrier", "send, recv", "reduce_scatter_tensor MAX"}
    plain |= {f"{name}, async" for name in plain}
    assert {name: found[name] for name in plain if found[name] > 8} == {}
    assert (found["all_reduce"], found["all_reduce AVG"], found["all_reduce MAX"]) == (1, 1, 2)

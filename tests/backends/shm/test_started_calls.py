"""Plain calls that are started take the native way, as those that wait do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import meshdist as md
from tests.backends.started_calls import (
    both_ways,
    copied,
    dropped_after_others_know,
    in_any_order,
    kept_by_works,
    late,
    starts_another_when_it_is_done,
    waited_for_as_another_asks,
    waited_for_behind_the_end,
    waits_again_after_an_interrupt,
    works_of_both_ways,
)
from tests.load import is_within
from tests.pool import Pool


def on(pool: Pool, program: Any, size: int, *args: Any) -> list[Any]:
    return pool.run(program, size, *args, backend="shm")


SMALL, LARGE = (3,), (50_000,)
"""Of what is begun by its caller, and of what a thread of the core does."""


@pytest.mark.parametrize("shape", [SMALL, LARGE, (0,)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_collectives_give_the_same_on_both_ways(
    size: int, shape: tuple[int, ...], pool: Pool
) -> None:
    for found in on(pool, both_ways, size, shape):
        assert all(found)


def test_works_tell_the_same_on_both_ways(pool: Pool) -> None:
    for native, in_python in on(pool, works_of_both_ways, 2):
        assert native == in_python


@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_in_flight_end_in_any_order(size: int, pool: Pool) -> None:
    assert on(pool, in_any_order, size) == [[[1.0]] * 9] * size


def test_an_interrupted_wait_leaves_the_call_in_flight(pool: Pool) -> None:
    assert on(pool, waits_again_after_an_interrupt, 2) == [(True, 6.0)] * 2


def test_two_threads_may_ask_a_work_at_once(pool: Pool) -> None:
    on(pool, waited_for_as_another_asks, 2)


def test_a_work_fails_that_is_waited_for_behind_the_end_of_its_group(pool: Pool) -> None:
    assert on(pool, waited_for_behind_the_end, 2) == [40, 0]


def test_a_work_may_be_copied(pool: Pool) -> None:
    on(pool, copied, 2)


def test_a_wait_that_is_known_of_lets_a_work_be_dropped(pool: Pool) -> None:
    assert on(pool, dropped_after_others_know, 2) == [[], []]


def test_a_wait_that_is_late_says_who_is_missing(pool: Pool) -> None:
    text, _ = on(pool, late, 2)
    assert "all_reduce" in text
    assert "rank 1" in text


def polled_beside_a_killed_member() -> str:
    """The error that a poll finds where the other member has been killed."""
    md.all_reduce(torch.ones(1))
    if md.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = md.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.01)
    return str(work.exception())


def test_a_poll_finds_that_a_member_was_killed(pool: Pool) -> None:
    text, _ = pool.outcomes(polled_beside_a_killed_member, 2, backend="shm")
    assert "rank 1" in text


def goes_on_before_the_other_waits(which: str) -> float:
    """A member that waits needs nothing of one that has only started the same call."""
    md.all_reduce(torch.ones(1))
    if which == "layouts":
        x = torch.arange(16.0).reshape(4, 4)
        x = x.t() if md.get_rank() == 0 else x.t().contiguous()
    else:
        shared = md.shared_empty((8192,))
        x = (shared if md.get_rank() == 0 else torch.empty(8192)).fill_(1.0)
    work = md.all_reduce(x, async_op=True)
    assert work is not None
    if md.get_rank() == 0:
        work.wait()
        md.send(torch.ones(1), 1)
    else:
        md.recv(torch.ones(1), 0)
        work.wait()
    return x.sum().item()


@pytest.mark.parametrize(("which", "total"), [("layouts", 240.0), ("shared memory", 16384.0)])
def test_a_wait_needs_no_wait_of_others(which: str, total: float, pool: Pool) -> None:
    found = on(pool, goes_on_before_the_other_waits, 2, which)
    assert found == [total] * 2


def test_a_wait_is_for_one_call(pool: Pool) -> None:
    assert all(is_within(longest, 30.0) for longest in on(pool, starts_another_when_it_is_done, 2))


def drops_in_a_forked_child() -> bool:
    """A forked child that drops a receive in flight leaves its message to the parent."""
    if md.get_rank() == 1:
        md.barrier()
        md.send(torch.arange(1 << 20), 0)
        return True
    x = torch.zeros(1 << 20, dtype=torch.int64)
    work = md.irecv(x, 1)
    child = os.fork()
    if child == 0:
        del work
        os._exit(0)
    os.waitpid(child, 0)
    md.barrier()
    work.wait()
    return torch.equal(x, torch.arange(1 << 20))


def test_a_forked_child_leaves_messages_alone(pool: Pool) -> None:
    assert on(pool, drops_in_a_forked_child, 2) == [True, True]


def test_a_work_that_is_done_keeps_its_result_alone(pool: Pool) -> None:
    assert on(pool, kept_by_works, 2) == [[False, False]] * 2

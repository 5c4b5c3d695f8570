"""Plain calls that are started take the native way, as those that wait do."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from tests.load import is_within
from tests.pool import Pool
from tests.wires.fast_paths import every_verb, opened, seconds_until_interrupted


def on(pool: Pool, program: Any, size: int, *args: Any) -> list[Any]:
    return pool.run(program, size, *args, backend="shm")


SMALL, LARGE = (3,), (50_000,)
"""Of what is begun by its caller, and of what a thread of the core does."""


def both_ways(shape: tuple[int, ...]) -> list[bool]:
    """Whether all verbs give the same, however many members take the native way."""
    group, spy = opened()
    expected = every_verb(shape)
    path, found = spy.path, []
    for turn in range(1 << group.size()):
        group.fast_path = path if turn >> group.rank() & 1 else None
        found.append(every_verb(shape, goes_on=True) == expected)
    return found


@pytest.mark.parametrize("shape", [SMALL, LARGE, (0,)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_verbs_give_the_same_on_both_ways(
    size: int, shape: tuple[int, ...], pool: Pool
) -> None:
    for found in on(pool, both_ways, size, shape):
        assert all(found)


def works_of_both_ways() -> list[list[Any]]:
    """What a Work says of itself, by the native way and by that of Python."""
    group, spy = opened()
    x, whole = torch.ones(2), torch.zeros(2 * md.get_world_size())
    calls = (
        lambda: md.all_reduce(x, md.ReduceOp.MAX, async_op=True),
        lambda: md.broadcast(x, 0, async_op=True),
        lambda: md.reduce(x, 0, async_op=True),
        lambda: md.all_gather_into_tensor(whole, x, async_op=True),
        lambda: md.all_gather(list(whole.split(2)), x, async_op=True),
        lambda: md.reduce_scatter_tensor(x, whole, async_op=True),
        lambda: md.barrier(async_op=True),
    )
    both = []
    for group.fast_path in (spy.path, None):
        told: list[Any] = []
        for call in calls:
            work = call()
            assert work is not None
            before = repr(work).partition(",")[0]
            done = work.get_future().then(lambda future: len(future.value()))
            told.append((before, [t.shape for t in work.result()], done.wait(), repr(work)))
            told.append((work.is_completed(), work.is_success(), work.exception()))
            with pytest.raises(md.BackendError, match="only a receive has a source rank"):
                work.source_rank()
        both.append(told)
    return both


def test_works_tell_the_same_on_both_ways(pool: Pool) -> None:
    for native, in_python in on(pool, works_of_both_ways, 2):
        assert native == in_python


def in_any_order() -> list[float]:
    """Calls in flight, with others between them, that end in an order of their own."""
    md.all_reduce(torch.ones(1))
    rank, size = md.get_rank(), md.get_world_size()
    xs = [torch.full((n,), rank + 1.0) for n in (1, 9, 2_000, 70_000, 3, 1)]
    works = [md.all_reduce(x, async_op=True) for x in xs]
    between = torch.ones(1)
    md.all_reduce(between)
    for work in works[::-1]:
        assert work is not None
        work.wait()
    polled = torch.full((4,), rank + 1.0)
    work = md.all_reduce(polled, async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    elsewhere = torch.full((4,), rank + 1.0)
    work = md.all_reduce(elsewhere, async_op=True)
    assert work is not None
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    dropped = torch.full((4,), rank + 1.0)
    md.all_reduce(dropped, async_op=True).get_future().wait()  # type: ignore[union-attr]
    total = sum(range(1, size + 1))
    assert between.item() == size
    return [x.div(total).unique().tolist() for x in (*xs, polled, elsewhere, dropped)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_calls_in_flight_end_in_any_order(size: int, pool: Pool) -> None:
    assert on(pool, in_any_order, size) == [[[1.0]] * 9] * size


def waits_again_after_an_interrupt() -> tuple[bool, float]:
    """A wait that a handler's exception ends leaves the call in flight, for a later wait."""
    md.all_reduce(torch.ones(1))
    x = torch.full((2,), md.get_rank() + 1.0)
    if md.get_rank() == 0:
        work = md.all_reduce(x, async_op=True)
        assert work is not None
        took = seconds_until_interrupted(work.wait)
        md.send(torch.ones(1), 1)
        work.wait()
    else:
        took = 0.0
        md.recv(torch.ones(1), 0)
        md.all_reduce(x)
    md.all_reduce(torch.ones(1))  # the group goes on
    return took < 20, x.sum().item()


def test_an_interrupted_wait_leaves_the_call_in_flight(pool: Pool) -> None:
    assert on(pool, waits_again_after_an_interrupt, 2) == [(True, 6.0)] * 2


def late() -> str:
    """The error of a wait for a member that does not come in time."""
    pair = md.new_group([0, 1])
    md.all_reduce(torch.ones(1), group=pair)
    text = ""
    if md.get_rank() == 0:
        work = md.all_reduce(torch.ones(1), group=pair, async_op=True)
        assert work is not None
        with pytest.raises(md.CollectiveTimeoutError) as caught:
            work.wait(timedelta(seconds=0.3))
        text = str(caught.value)
        with pytest.raises(md.CollectiveTimeoutError):
            work.wait()
    md.barrier()
    return text


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


def starts_another_when_it_is_done() -> float:
    """A wait for one call waits for no other that a thread has started meanwhile."""
    large = torch.ones(40_000)
    md.all_reduce(large)
    longest = 0.0
    for _ in range(20):
        if md.get_rank() == 0:
            first = md.all_reduce(large, async_op=True)
            assert first is not None
            started: list[Any] = []

            def start_when_done(first: Any = first, started: list[Any] = started) -> None:
                while not first.is_completed():
                    pass
                started.append(md.all_reduce(torch.ones(2), async_op=True))

            thread = threading.Thread(target=start_when_done)
            thread.start()
            first.wait()
            thread.join()
            begin = time.monotonic()
            md.send(torch.ones(1), 1)
            started[0].wait()
            longest = max(longest, time.monotonic() - begin)
        else:
            md.all_reduce(large)
            md.recv(torch.ones(1), 0)  # which comes once the first call's wait has ended
            md.all_reduce(torch.ones(2))
    return longest


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


def kept_by_works() -> list[bool]:
    """Whether tensors live whose calls are done: in a cycle with a Work; read by a kept Work."""
    md.all_reduce(torch.ones(1))
    x = torch.ones(8)
    in_cycle = weakref.ref(x)
    x.work = md.all_reduce(x, async_op=True)  # type: ignore[attr-defined]
    x.work.wait()  # type: ignore[attr-defined]
    del x
    read = torch.ones(8)
    is_read = weakref.ref(read)
    work = md.all_gather_into_tensor(torch.empty(8 * md.get_world_size()), read, async_op=True)
    assert work is not None
    work.wait()
    del read
    gc.collect()
    return [in_cycle() is not None, is_read() is not None]


def test_a_work_that_is_done_keeps_its_result_alone(pool: Pool) -> None:
    assert on(pool, kept_by_works, 2) == [[False, False]] * 2

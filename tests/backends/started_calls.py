"""Programs that start plain calls, over any backend that starts them natively."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from tests.backends.fast_paths import every_operation, opened, seconds_until_interrupted


def both_ways(shape: tuple[int, ...]) -> list[bool]:
    """Whether all collectives give the same, however many members take the native way."""
    group, spy = opened()
    expected = every_operation(shape)
    path, found = spy.path, []
    for turn in range(1 << group.size()):
        group.fast_path = path if turn >> group.rank() & 1 else None
        found.append(every_operation(shape, goes_on=True) == expected)
    return found


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


def waited_for_as_another_asks() -> None:
    """A thread that is about to wait finds that another thread has asked the Work for more."""
    x = torch.ones(2)
    md.all_reduce(x)
    for asks_late in (False, True):
        work = md.all_reduce(x, async_op=True)
        assert work is not None
        wait = type(work).wait  # as the thread looks it up
        if asks_late:
            wait(work)
        work.is_completed()
        assert wait(work) and type(work).wait is not wait


def copied() -> None:
    """A copy of a Work waits, too."""
    x = torch.ones(2)
    md.all_reduce(x)
    work = md.all_reduce(x, async_op=True)
    assert work is not None
    assert copy.copy(work).wait() and work.wait()


def dropped_after_others_know() -> list[str]:
    """Warnings about Works of which a wait was ended by a handler, or another thread waits."""
    x = torch.ones(2)
    md.all_reduce(x)
    me = md.get_rank()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for is_interrupted in (False, True):
            md.barrier()
            if me != 0:
                time.sleep(0.5)
            work = md.all_reduce(x, async_op=True)
            assert work is not None
            if me != 0:
                work.wait()
            elif is_interrupted:
                seconds_until_interrupted(work.wait)
            else:
                thread = threading.Thread(target=work.wait)
                thread.start()
                time.sleep(0.1)
                work.is_completed()
                thread.join()
                del thread
            del work
            gc.collect()
        md.all_reduce(x)
    return [str(one.message) for one in found]


def waited_for_behind_the_end() -> int:
    """How many Works have failed, of groups that were closed and dropped before."""
    num_failed = 0
    for _ in range(20):
        group, works = md.new_group([0, 1]), []
        md.all_reduce(torch.ones(2), group=group)
        if md.get_rank() == 0:
            works = [md.all_reduce(torch.ones(n), group=group, async_op=True) for n in (2, 90_000)]
        md.destroy_process_group(group)
        del group
        gc.collect()
        for work in works:
            assert work is not None
            try:
                work.wait()
            except md.BackendError:
                num_failed += 1
    return num_failed

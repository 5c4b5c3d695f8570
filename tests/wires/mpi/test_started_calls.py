"""Plain calls that are started over MPI take the native way, as those that wait do."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import meshdist as md
from tests.inner import core, may_be_dropped
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.wires.started_calls import (
    both_ways,
    copied,
    dropped_after_others_know,
    in_any_order,
    kept_by_works,
    late,
    starts_another_when_it_is_done,
    waited_for_as_another_asks,
    waits_again_after_an_interrupt,
    works_of_both_ways,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(core is None, reason="no native core here"),
]


@pytest.mark.parametrize("shape", [(3,), (50_000,), (0,)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_all_verbs_give_the_same_on_both_ways(
    size: int, shape: tuple[int, ...], pool: Pool
) -> None:
    for found in job_of(pool, size).run_in_world(both_ways, shape):
        assert all(found)


def kinds_of_operations() -> set[str]:
    """What Works wait for."""
    md.all_reduce(torch.ones(1))
    size = md.get_world_size()
    x, whole = torch.ones(2), torch.ones(2 * size)
    works = (
        md.all_reduce(x, md.ReduceOp.AVG, async_op=True),
        md.reduce(x, 0, md.ReduceOp.MAX, async_op=True),
        md.reduce_scatter_tensor(x.int(), whole.int(), md.ReduceOp.AVG, async_op=True),
        md.broadcast(x, 0, async_op=True),
        md.all_gather(list(whole.split(2)), x, async_op=True),
        md.all_to_all_single(torch.empty(2 * size), whole, async_op=True),
        md.barrier(async_op=True),
    )
    for work in works:
        assert work is not None
        work.wait()
    return {type(work._operation).__name__ for work in works if work is not None}


def test_works_wait_natively(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(kinds_of_operations) == [{"MpiStarted"}] * 2


def test_works_tell_the_same_on_both_ways(pool: Pool) -> None:
    for native, in_python in job_of(pool, 2).run_in_world(works_of_both_ways):
        assert native == in_python


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_calls_in_flight_end_in_any_order(size: int, pool: Pool) -> None:
    assert job_of(pool, size).run_in_world(in_any_order) == [[[1.0]] * 9] * size


def test_an_interrupted_wait_leaves_the_call_in_flight(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(waits_again_after_an_interrupt) == [(True, 6.0)] * 2


def test_two_threads_may_ask_a_work_at_once(pool: Pool) -> None:
    job_of(pool, 2).run_in_world(waited_for_as_another_asks)


def test_a_work_may_be_copied(pool: Pool) -> None:
    job_of(pool, 2).run_in_world(copied)


def test_a_wait_that_is_known_of_lets_a_work_be_dropped(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(dropped_after_others_know) == [[], []]


def test_a_wait_that_is_late_says_who_is_missing(pool: Pool) -> None:
    text, _ = job_of(pool, 2).run_in_world(late)
    assert "all_reduce" in text
    assert "rank 1" in text


def test_a_wait_is_for_one_call(pool: Pool) -> None:
    assert max(job_of(pool, 2).run_in_world(starts_another_when_it_is_done)) < 30.0


def test_a_work_that_is_done_keeps_its_result_alone(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(kept_by_works) == [[False, False]] * 2


def recoded_in_flight() -> list[list[float]]:
    """Reductions whose numbers travel in scratch memory: many at once, with others between."""
    md.all_reduce(torch.ones(1))
    rank = md.get_rank()
    calls = [
        (n, op, dtype)
        for n in (1, 70_000, 9, 3_000, 2)
        for op in (md.ReduceOp.MAX, md.ReduceOp.MIN, md.ReduceOp.AVG)
        for dtype in (torch.float64, torch.bfloat16, torch.int8)
    ]
    found = []
    for _ in range(2):
        xs = [torch.full((n,), 3 * rank, dtype=dtype) for n, _, dtype in calls]
        works = []
        for x, (_, op, _) in zip(xs, calls, strict=True):
            works.append(md.all_reduce(x, op, async_op=True))
            between = torch.full((5_000,), float(rank))
            md.all_reduce(between, md.ReduceOp.MAX)
            assert between.eq(md.get_world_size() - 1.0).all()
        threads = [threading.Thread(target=work.wait) for work in works[::2] if work is not None]
        for thread in threads:
            thread.start()
        for work in works[::-1]:
            assert work is not None
            work.wait()
        for thread in threads:
            thread.join()
        found.append([x.float().unique().tolist() for x in xs])
    assert found[0] == found[1]
    return [found[0][place] for place in (0, 3, 6)]  # MAX, MIN and AVG


@pytest.mark.parametrize("size", [2, 3])
def test_scratch_memory_is_of_one_call(size: int, pool: Pool) -> None:
    expected = [[3.0 * (size - 1)], [0.0], [1.5 * (size - 1)]]
    assert job_of(pool, size).run_in_world(recoded_in_flight) == [expected] * size


def dropped_works() -> list[Any]:
    """Whether tensors of dropped Works live: in flight, behind later calls, and after an abort."""
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    world = md.group.WORLD
    md.all_reduce(torch.ones(1))
    is_first = md.get_rank() == 0
    refs, answers = [], []
    if is_first:
        x = torch.full((3,), 2.0)
        refs.append(weakref.ref(x))
        work = md.all_reduce(x, md.ReduceOp.MAX, world, async_op=True)
        assert work is not None
        may_be_dropped(work)
        del x, work
        answers.append(refs[0]() is not None)
        md.send(torch.ones(1), 1)
    else:
        md.recv(torch.ones(1), 0)
        md.all_reduce(torch.full((3,), 5.0), md.ReduceOp.MAX)
    for _ in range(3):
        md.all_reduce(torch.ones(3), async_op=True).wait()  # type: ignore[union-attr]
    if is_first:
        answers.append(refs[0]() is not None)
        x = torch.ones(3)
        refs.append(weakref.ref(x))
        work = md.all_reduce(x, md.ReduceOp.AVG, group, async_op=True)  # the other never comes
        assert work is not None
        group.abort("enough")
        with pytest.raises(md.AbortedError):
            work.wait()
        del x, work
    md.barrier()
    group.close()
    if is_first:
        answers.append(refs[1]() is not None)  # MPI may write to it until the process ends
    return answers


def test_tensors_live_as_long_as_mpi_may_use_them(pool: Pool) -> None:
    first, _ = job_of(pool, 2).run_in_world(dropped_works)
    assert first == [True, False, True]


def drops_in_a_forked_child() -> float:
    """A forked child that drops a Work in flight leaves it to its parent."""
    md.all_reduce(torch.ones(1))
    x = torch.full((3,), md.get_rank() + 1.0)
    if md.get_rank() == 1:
        md.recv(torch.ones(1), 0)
        md.all_reduce(x, md.ReduceOp.AVG)
        return x.sum().item()
    work = md.all_reduce(x, md.ReduceOp.AVG, async_op=True)
    child = os.fork()
    if child == 0:
        del work
        os._exit(0)
    os.waitpid(child, 0)
    md.send(torch.ones(1), 1)
    assert work is not None
    work.wait()
    return x.sum().item()


def test_a_forked_child_leaves_calls_alone(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(drops_in_a_forked_child) == [4.5, 4.5]


def polls() -> list[Any]:
    """What polls say of a call to which the other member comes late."""
    md.all_reduce(torch.ones(1))
    x = torch.full((3,), md.get_rank() + 1.0)
    if md.get_rank() == 1:
        md.recv(torch.ones(1), 0)
        md.all_reduce(x, md.ReduceOp.MAX)
        return [x.tolist()]
    work = md.all_reduce(x, md.ReduceOp.MAX, async_op=True)
    assert work is not None
    answers = [work.is_completed()]
    md.send(torch.ones(1), 1)
    while not work.is_completed():
        time.sleep(0.001)
    return [*answers, x.tolist(), work.is_success(), work.exception()]


def test_a_poll_lets_it_go_on(pool: Pool) -> None:
    first, second = job_of(pool, 2).run_in_world(polls)
    assert first == [False, [2.0] * 3, True, None]
    assert second == [[2.0] * 3]

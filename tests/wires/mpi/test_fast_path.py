"""The fast path over MPI does what the slow one does, beside it, or leaves a call alone."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.reduce_ops import ReduceOp
from tests.inner import core
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.wires.fast_paths import (
    NUM_CALLS,
    TOLD,
    both_paths,
    differing,
    goes_on_beside_a_message,
    opened,
    seconds_until_interrupted,
    sums_of_two_halves,
    waits_or_not,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(core is None, reason="no native core here"),
]


@pytest.mark.parametrize(("size", "shape"), [(1, (3,)), (2, (3,)), (3, (2, 1, 2)), (2, (1,) * 6)])
def test_members_on_both_paths_meet(pool: Pool, size: int, shape: tuple[int, ...]) -> None:
    for rank, (results, num_fast, notes) in enumerate(
        job_of(pool, size).run_in_world(both_paths, shape)
    ):
        assert all(result == results[0] for result in results)
        assert num_fast == [NUM_CALLS * (turn >> rank & 1) for turn in range(1 << size)]
        assert all(note == notes[0] for note in notes)
        assert "fast_paths.py" in notes[0][0][2]


def left_alone() -> tuple[list[str], int]:
    group, spy = opened()
    x, size = torch.ones(2, 2), group.size()
    row = torch.ones(size, 2, 2)
    grown = torch.ones(2, 2, requires_grad=True)
    cases = {
        "strided": lambda: spy.broadcast(x[:, 0], 0),
        "a leaf": lambda: spy.broadcast(grown, 0),
        "a parameter": lambda: spy.broadcast(torch.nn.Parameter(x), 0),
        "negated": lambda: spy.broadcast(torch._neg_view(x), 0),
        "complex": lambda: spy.broadcast(x.to(torch.complex64), 0),
        "sparse": lambda: spy.broadcast(x.to_sparse(), 0),
        "meta": lambda: spy.broadcast(x.to("meta"), 0),
        "no element": lambda: spy.broadcast(x[:0], 0),
        "an array": lambda: spy.broadcast(x.numpy(), 0),
        "nothing": lambda: spy.broadcast(None, 0),
        "floats of 8 bits": lambda: spy.all_reduce(x.to(torch.float8_e5m2), ReduceOp.SUM),
        "bits of floats": lambda: spy.reduce(x, ReduceOp.BAND, 0),
        "no op": lambda: spy.reduce(x, "sum", 0),
        "two dtypes": lambda: spy.all_gather_single(row, x.double()),
        "overlapping": lambda: spy.all_gather_single(row, row[0]),
        "rows of another size": lambda: spy.all_gather_single(row.view(size, 4, 1), x),
        "too few": lambda: spy.reduce_scatter_single(x, row[:1, 0], ReduceOp.SUM),
        "no list": lambda: spy.gather(x, row, group.rank()),
        "a short list": lambda: spy.gather(x, [], group.rank()),
        "not in a row": lambda: (
            spy.gather(x, [torch.ones(2, 2) for _ in range(size)][::-1], 0)
            if group.rank() == 0
            else spy.gather(x, [x], 0)
        ),
        "a list elsewhere": lambda: spy.scatter(x, [x], 1 - group.rank()),
        "rows that do not divide": lambda: spy.all_to_all_single(torch.ones(size + 1), row[0, 0]),
        "a list of two sizes": lambda: spy.all_gather([x, x[0]], row[0]),
        "a list over the input": lambda: spy.all_gather(list(row), row[0]),
        "lists over each other": lambda: spy.all_to_all(list(row), list(row)),
        "an empty list": lambda: spy.all_to_all([], []),
        "tuples of no tensors": lambda: spy.all_to_all(((), ()), ((), ())),
        "a list of two dtypes": lambda: spy.all_to_all(list(row), [x, x.double()]),
        "no dim": lambda: spy.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
    }
    before = group.open_channel("cpu").recorder.num_notes
    taken = [name for name, call in cases.items() if call() is not False]
    return taken, group.open_channel("cpu").recorder.num_notes - before


def test_what_is_not_plain_is_left_alone(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(left_alone) == [([], 0)] * 2


@pytest.mark.parametrize(("size", "shape"), [(2, (3,)), (3, (40, 3)), (2, (300, 300))])
def test_who_waits_meets_who_goes_on(pool: Pool, size: int, shape: tuple[int, ...]) -> None:
    assert job_of(pool, size).run_in_world(waits_or_not, shape) == [[True] * 3] * size


def test_16_bit_floats_of_two(pool: Pool) -> None:
    expected = [[2.0 * i + 1.0 for i in range(100)]] * 2
    assert job_of(pool, 2).run_in_world(sums_of_two_halves) == [expected] * 2


def test_what_is_started_goes_on_beside_a_message(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(goes_on_beside_a_message) == [1_200_000.0] * 2


class Interrupted(Exception):
    pass


def interrupted_soon(op: Any) -> list[str]:
    """What ends a call that one member leaves by a signal, before the other comes."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    found = []
    for seconds in (0.00005, 0.0001, 0.0002, 0.0004, 0.2):
        group, x = md.new_group(timeout=timedelta(seconds=3)), torch.ones(1000)
        for _ in range(3):
            md.all_reduce(x, op, group=group)
        md.barrier()
        try:
            if md.get_rank() == 0:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            else:
                time.sleep(max(0.1, 4 * seconds))
            md.all_reduce(x, op, group=group)
            found.append("nothing")
        except (Interrupted, md.MeshdistError) as error:
            found.append(type(error).__name__)
        md.barrier()
    signal.signal(signal.SIGALRM, before)
    return found


@pytest.mark.parametrize("op", [ReduceOp.SUM, pytest.param(ReduceOp.AVG, marks=pytest.mark.soak)])
def test_nobody_waits_in_mpi_for_who_was_interrupted(pool: Pool, op: Any) -> None:
    first, second = job_of(pool, 2).run_in_world(interrupted_soon, op)
    assert first == ["Interrupted"] * 5
    # Where the signal comes before the call has told that it waits, the other waits in vain.
    assert set(second) <= {"AbortedError", "CollectiveTimeoutError"}
    assert second[-1] == "AbortedError"


def partly_even() -> list[Any]:
    """Exchanges in which the first member alone has parts of one size."""
    _, spy = opened()
    rank = md.get_rank()
    sizes = [[1, 1, 1], [1, 2, 0], [1, 0, 5]][rank]
    x = torch.arange(sum(sizes)) + 10 * rank
    found: list[Any] = []
    for goes_on in (False, rank == 0, rank == 1):
        y = torch.zeros_like(x)
        how = {} if rank == 0 else {"output_split_sizes": sizes, "input_split_sizes": sizes}
        work = md.all_to_all_single(y, x, **how, async_op=goes_on)
        if work is not None:
            work.wait()
        found.append(y.tolist())
    return [*found, sum(spy.answers)]


def test_an_exchange_that_is_even_for_one_alone(pool: Pool) -> None:
    parts = [[0, 10, 20], [1, 11, 12], [2, 21, 22, 23, 24, 25]]
    answers = job_of(pool, 3).run_in_world(partly_even)
    assert answers == [[part] * 3 + [2 * (part[0] == 0)] for part in parts]


def many(num_calls: int) -> tuple[float, int]:
    """More calls than the others' words are kept for, while one member comes late now and then."""
    _, spy = opened()
    size = md.get_world_size()
    x, y = torch.ones(size), torch.ones(size)
    for call in range(num_calls):
        if call % 300 == 50 * md.get_rank():
            time.sleep(0.01)
        md.all_to_all_single(y, x)
        md.broadcast(x, call % size)
    return y.sum().item(), sum(spy.answers)


def test_many_calls(pool: Pool) -> None:
    for total, num_fast in job_of(pool, 3).run_in_world(many, 1500):
        assert total == 3.0
        assert num_fast > 2900  # and the others looked for the slowest member


@pytest.mark.parametrize("what", list(TOLD))
def test_a_disagreement_is_told_on_all(pool: Pool, what: str) -> None:
    for text in job_of(pool, 2).run_in_world(differing, what):
        assert "the members of a group disagree about their call" in text
        assert TOLD[what][0] in text
        assert TOLD[what][1] in text


def failing(how: str) -> str:
    group = md.new_group(timeout=timedelta(seconds=0.5 if how == "is late" else 30.0))
    md.all_reduce(torch.ones(1), group=group)
    md.barrier()
    if md.get_rank() == 1:
        time.sleep(0.2)
        if how == "aborts":
            group.abort("enough")
        time.sleep(1.0)
        return ""
    with pytest.raises(md.MeshdistError) as caught:
        md.broadcast(torch.ones(3), 1, group=group)
    assert caught.value.__cause__ is None
    with pytest.raises(md.MeshdistError):
        md.barrier(group=group)  # broken now
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("is late", "CollectiveTimeoutError: broadcast on group of ranks 0-1 was not finished"),
        ("aborts", "AbortedError: broadcast on group of ranks 0-1 was aborted"),
    ],
)
def test_failures_are_told_as_ever(pool: Pool, how: str, told: str) -> None:
    text = job_of(pool, 2).run_in_world(failing, how)[0]
    assert text.startswith(told)
    assert "call 2 on group of ranks 0-1: broadcast((3,) float32, root rank 1) at " in text


def interrupted() -> float:
    group = md.new_group()
    md.all_reduce(torch.ones(1), group=group)
    if md.get_rank() == 1:
        time.sleep(1.0)
        return 0.0
    return seconds_until_interrupted(lambda: md.barrier(group))


def test_ctrl_c_ends_it(pool: Pool) -> None:
    assert job_of(pool, 2).run_in_world(interrupted)[0] < 0.9


def backward_after_writes() -> list[str]:
    opened()
    told = []
    for write in (md.all_reduce, lambda x: md.broadcast(x, 0)):
        weight, x = torch.ones(2, requires_grad=True), torch.ones(2)
        product = (weight * x).sum()
        write(x)
        try:
            product.backward()
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_autograd_learns_of_what_is_written(pool: Pool) -> None:
    root, other = job_of(pool, 2).run_in_world(backward_after_writes)
    assert len(root) == 1  # the source's own tensor is only read
    assert len(other) == 2
    assert all("modified by an inplace operation" in text for text in root + other)

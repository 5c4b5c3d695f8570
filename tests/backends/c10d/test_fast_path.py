"""The fast path over torch's classes gives what Python's way gives, bit for bit, also mixed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.dtypes import DTYPES
from meshdist.reduce_ops import PLAIN_OPS, ReduceKind, find_refusal
from tests.backends.fast_paths import (
    NUM_CALLS,
    TOLD,
    both_paths,
    differing,
    opened,
    seconds_until_interrupted,
    waits_or_not,
)
from tests.load import is_within
from tests.pool import Pool

COUNTS = (0, 1, 7)
LARGE = {
    torch.float32: (40_003,),
    torch.int32: (40_003,),
    torch.bfloat16: (40_003, 300_001),
}
"""Elements of tensors whose parts the core does not reduce; of the last none are gathered."""

IN_EVERY_DTYPE = sorted((dtype for dtype in DTYPES if not dtype.is_complex), key=str)
OFTEN_USED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.bool]
CASES = [(1, OFTEN_USED), (2, IN_EVERY_DTYPE), (3, OFTEN_USED), (5, OFTEN_USED)]

Call = Callable[..., Any]


_MADE: dict[tuple[torch.dtype, int, int, int], torch.Tensor] = {}


def some(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    """Any bits, with zeros of both signs and NaNs among them; equal at each call."""
    key = (dtype, count, seed, md.get_rank())
    if key not in _MADE:  # drawn once for all ways and operations
        _MADE[key] = drawn(dtype, count, seed)
    return _MADE[key].clone()


def drawn(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * seed + md.get_rank())
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=made).bool()
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=made, dtype=torch.uint8)
    values = bits.view(dtype)
    if dtype.is_floating_point and count:
        values[:: 3 + md.get_rank()] = (-0.0, 0.0, 1.5)[seed % 3]
    return values


def reductions(dtype: torch.dtype, op: ReduceKind, count: int) -> Iterator[tuple[str, Call]]:
    """Each reduction, as a call that gives the result."""
    size = md.get_world_size()

    def run(operation: Call, result: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        work = operation(result, *args, op=op, **how)
        if work is not None:
            work.wait()
        return result

    yield "all_reduce", lambda **how: run(md.all_reduce, some(dtype, count, 1), **how)
    yield "reduce", lambda **how: run(md.reduce, some(dtype, count, 2), size - 1, **how)
    yield (
        "reduce_scatter",
        lambda **how: run(
            md.reduce_scatter_tensor,
            torch.zeros(count).to(dtype),
            some(dtype, count * size, 3),
            **how,
        ),
    )


def moves(dtype: torch.dtype, count: int) -> Iterator[tuple[str, Call]]:
    """Each collective that moves, as a call that gives the result."""
    size, root = md.get_world_size(), md.get_world_size() - 1

    def run(operation: Call, results: Any, *args: Any, **how: Any) -> Any:
        work = operation(results, *args, **how)
        if work is not None:
            work.wait()
        return torch.cat([one.view(-1) for one in results]) if type(results) is list else results

    def each(seed: int) -> list[torch.Tensor]:
        return [one.view(1, -1) for one in some(dtype, count * size, seed).view(size, -1).unbind()]

    def at_root(operation: Call, mine: torch.Tensor, lists: list[torch.Tensor], **how: Any) -> Any:
        work = operation(mine, lists if md.get_rank() == root else None, root, **how)
        if work is not None:
            work.wait()
        return torch.cat([mine.view(-1), *(one.view(-1) for one in lists)])

    def mine() -> torch.Tensor:
        return some(dtype, count, 4)

    def whole(*shape: int) -> torch.Tensor:
        return some(dtype, count * size, 5).view(*shape)

    yield "broadcast", lambda **how: run(md.broadcast, mine().view(-1, 1), root, **how)
    yield "all_gather_single", lambda **how: run(md.all_gather_single, whole(-1), mine(), **how)
    yield "stacked", lambda **how: run(md.all_gather_into_tensor, whole(size, -1), mine(), **how)
    yield "all_gather", lambda **how: run(md.all_gather, each(6), mine(), **how)
    yield "gather", lambda **how: at_root(md.gather, mine(), each(7), **how)
    yield "scatter", lambda **how: at_root(md.scatter, mine(), each(8), **how)
    yield (
        "all_to_all_single",
        lambda **how: run(
            md.all_to_all_single,
            whole(size, -1),
            some(dtype, count * size, 9).view(size, -1),
            **how,
        ),
    )
    yield "all_to_all", lambda **how: run(md.all_to_all, each(10), each(11), **how)


def bits_of(result: torch.Tensor) -> bytes:
    return result.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def compare(calls: Iterator[tuple[str, Call]], group: Any, spy: Any) -> tuple[list[str], set[str]]:
    """The calls that give other bits, and those that the fast path has done."""
    different, done = [], set()
    for name, call in calls:
        found = []
        for path, how in (
            (None, {}),
            (spy, {}),
            (spy, {"async_op": True}),
            (None if group.rank() % 2 else spy, {}),
        ):
            group.fast_path = path
            spy.answers.clear()
            if path is spy and how:
                found.append(bits_of(call(**how)))
            else:
                found.append(bits_of(call(**how)))
                if any(spy.answers):
                    done.add(name)
        if len(set(found)) > 1:
            different.append(name)
    group.fast_path = spy
    return different, done


def every_reduction(dtypes: list[torch.dtype]) -> tuple[list[Any], set[Any]]:
    group, spy = opened()
    different, done = [], set()
    for dtype in dtypes:
        for op in PLAIN_OPS:
            if find_refusal(op, dtype) is not None:
                continue
            for count in (*COUNTS, *LARGE.get(dtype, ())):
                found = compare(reductions(dtype, op, count), group, spy)
                different += [(name, dtype, op.name, count) for name in found[0]]
                done |= {(name, dtype, op.name, count) for name in found[1]}
    return different, done


@pytest.mark.parametrize(("size", "dtypes"), CASES, ids=["1", "2", "3", "5"])
def test_reductions_give_the_same_bits(size: int, dtypes: list[torch.dtype], pool: Pool) -> None:
    for different, done in pool.run(every_reduction, size, dtypes, timeout_s=280.0):
        assert different == []
        assert done >= {
            ("all_reduce", dtype, op, count)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32)
            for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT")
            for count in COUNTS[1:]
        }


def every_move(dtypes: list[torch.dtype]) -> tuple[list[Any], set[Any]]:
    group, spy = opened()
    different, done = [], set()
    for dtype in dtypes:
        for count in (*COUNTS, *LARGE.get(dtype, ())):
            found = compare(moves(dtype, count), group, spy)
            different += [(name, dtype, count) for name in found[0]]
            done |= {(name, dtype, count) for name in found[1]}
    return different, done


@pytest.mark.parametrize(("size", "dtypes"), CASES, ids=["1", "2", "3", "5"])
def test_moves_give_the_same_bits(size: int, dtypes: list[torch.dtype], pool: Pool) -> None:
    for different, done in pool.run(every_move, size, dtypes, timeout_s=280.0):
        assert different == []
        names = {"broadcast", "all_gather_single", "stacked", "all_gather", "gather", "scatter"}
        names |= {"all_to_all_single", "all_to_all"}
        assert done >= {(name, torch.bfloat16, count) for name in names for count in COUNTS[1:]}


@pytest.mark.parametrize(("size", "shape"), [(1, (3,)), (2, (3,)), (3, (2, 1, 2)), (2, (1,) * 6)])
def test_members_on_both_paths_meet(pool: Pool, size: int, shape: tuple[int, ...]) -> None:
    for rank, (results, num_fast, notes) in enumerate(pool.run(both_paths, size, shape)):
        assert all(result == results[0] for result in results)
        assert num_fast == [NUM_CALLS * (turn >> rank & 1) for turn in range(1 << size)]
        assert all(note == notes[0] for note in notes)
        assert "fast_paths.py" in notes[0][0][2]


def test_members_that_wait_meet_members_that_go_on(pool: Pool) -> None:
    assert pool.run(waits_or_not, 3, (40, 3)) == [[True] * 3] * 3


@pytest.mark.parametrize("what", list(TOLD))
def test_a_disagreement_is_told_on_all(pool: Pool, what: str) -> None:
    for text in pool.run(differing, 2, what):
        assert "collective mismatch: ranks made different calls as call" in text
        assert TOLD[what][0] in text
        assert TOLD[what][1] in text


def failing(way: str, is_fast: bool) -> str:
    """The error of a call that fails in one way, on the rank that waits."""
    group: Any = md.new_group(timeout=timedelta(seconds=0.7))
    md.all_reduce(torch.ones(1), group=group)
    assert group.fast_path is not None
    if not is_fast:
        group.fast_path = None
    x = torch.ones(3)
    if md.get_rank() == 1:
        time.sleep(0.3)
        if way == "abort":
            group.abort("we stop")
        time.sleep(3)
        group.close()
        return ""

    def poll() -> None:
        work = md.all_reduce(x, md.ReduceOp.MAX, group, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()

    calls: dict[str, Call] = {
        "late": lambda: md.all_reduce(x, md.ReduceOp.MAX, group),
        "late parts": lambda: md.reduce_scatter_tensor(x, torch.ones(6), group=group),
        "late polled": poll,
        "late work": lambda: md.all_reduce(x, md.ReduceOp.AVG, group, async_op=True).wait(),
    }
    with pytest.raises(md.errors.MeshdistError) as caught:
        calls.get(way, calls["late"])()
    assert x.tolist() == [1.0] * 3
    with pytest.raises(md.errors.MeshdistError) as again:
        md.all_reduce(x, group=group)
    group.close()
    return re.sub(r"\d+\.\d+ s|line \d+|:\d+|'[^']*' in ", "", f"{caught.value}\n{again.value}")


@pytest.mark.parametrize("way", ["abort", "late", "late work", "late polled", "late parts"])
def test_a_call_that_fails_is_explained_as_in_python(pool: Pool, way: str) -> None:
    fast, slow = (pool.run(failing, 2, way, is_fast)[0] for is_fast in (True, False))
    assert "reduce" in fast
    assert fast == slow


def interrupted() -> tuple[float, str]:
    opened()
    x = torch.ones(2)
    if md.get_rank() == 0:
        seconds = seconds_until_interrupted(lambda: md.all_reduce(x, md.ReduceOp.MAX))
        return seconds, ""
    time.sleep(1.0)
    with pytest.raises(md.errors.MeshdistError) as caught:
        md.all_reduce(x, md.ReduceOp.MAX)
    return 0.0, str(caught.value)


def test_an_interrupt_ends_the_call_for_all(pool: Pool) -> None:
    (seconds, _), (_, text) = pool.run(interrupted, 2)
    assert is_within(seconds, 1.5)
    assert "KeyboardInterrupt" in text


def waited_for_by_two_threads() -> list[float]:
    """The result is complete on every thread that has waited."""
    opened()
    found = []
    for _ in range(20):
        x = torch.full((5,), md.get_rank() + 1.0)
        work = md.all_reduce(x, md.ReduceOp.MAX, async_op=True)
        seen: list[float] = []
        thread = threading.Thread(target=lambda: (work.wait(), seen.append(x.sum().item())))  # noqa: B023
        thread.start()
        work.wait()
        found.append(x.sum().item())
        thread.join()
        found += seen
    return found


def test_two_threads_may_wait_for_one_work(pool: Pool) -> None:
    assert pool.run(waited_for_by_two_threads, 2) == [[10.0] * 40] * 2


def left_alone() -> tuple[list[str], int]:
    group, spy = opened()
    x = torch.ones(2, 2)
    row = torch.ones(group.size(), 2, 2)
    cases = {
        "strided": lambda: spy.broadcast(x[:, 0], 0),
        "bytes": lambda: spy.broadcast(x.to(torch.uint16), 0),
        "another dtype's bits": lambda: spy.all_reduce(x.to(torch.uint32), md.ReduceOp.SUM),
        "gathered to be reduced": lambda: spy.all_reduce(x.to(torch.uint64), md.ReduceOp.MAX),
        "bits of floats": lambda: spy.all_reduce(x, md.ReduceOp.BAND),
        "narrow floats, many": lambda: spy.all_reduce(torch.ones(1 << 20).half(), md.ReduceOp.SUM),
        "nothing to gather": lambda: spy.all_gather_single(row[:, :0], x[:0]),
        "no narrow floats": lambda: spy.all_reduce(x[:0].half(), md.ReduceOp.SUM),
        "a reduction of another dtype": lambda: spy.reduce(x, md.ReduceOp.MAX, 0),
        "a message": lambda: spy.send(x, 1 - group.rank(), 0),
    }
    before = group.open_device_group("cpu").recorder.num_notes
    taken = [name for name, call in cases.items() if call() is not False]
    return taken, group.open_device_group("cpu").recorder.num_notes - before


def test_it_leaves_alone_what_the_class_does_otherwise(pool: Pool) -> None:
    assert pool.run(left_alone, 2) == [([], 0)] * 2


ROUNDS = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768}
"""The calls before which members on several hosts compare."""


def taken_across_hosts() -> tuple[list[int], list[bool]]:
    """The calls from 2 to 600 that do not take the fast path; whether one does at DETAIL."""
    _, spy = opened()
    for _ in range(2, 601):
        md.all_reduce(torch.ones(2))
    left = [number for number, is_taken in enumerate(spy.answers, 2) if not is_taken]
    md.set_debug_level(md.DebugLevel.DETAIL)
    md.all_reduce(torch.ones(2))
    md.set_debug_level(md.DebugLevel.OFF)
    return left, spy.answers[599:]


def test_a_group_that_spans_hosts_takes_it_but_where_calls_are_compared(pool: Pool) -> None:
    left = sorted(number for number in ROUNDS if 2 <= number <= 600)
    assert pool.run(taken_across_hosts, 3, hosts="ABA") == [(left, [False])] * 3


def test_members_on_both_paths_meet_across_hosts(pool: Pool) -> None:
    own = [range(2 + NUM_CALLS * turn, 2 + NUM_CALLS * (turn + 1)) for turn in range(4)]
    for rank, (results, num_fast, notes) in enumerate(pool.run(both_paths, 2, (3,), hosts="AB")):
        assert all(result == results[0] for result in results)
        fast = [len({*numbers} - ROUNDS) for numbers in own]
        assert num_fast == [fast[turn] * (turn >> rank & 1) for turn in range(4)]
        assert all(note == notes[0] for note in notes)


def late_difference(is_fast: bool) -> str:
    """The error of calls that Gloo carries alike and that differ between hosts."""
    group, _ = opened()
    group.fast_path = group.fast_path if is_fast else None
    x = torch.ones(2, dtype=torch.float32 if md.get_rank() else torch.int32)

    def go_on() -> None:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            md.broadcast(x, 0)

    with pytest.raises(md.MismatchError) as caught:
        go_on()
    return str(caught.value)


@pytest.mark.parametrize("is_fast", [True, False])
def test_calls_that_differ_between_hosts_are_told(is_fast: bool, pool: Pool) -> None:
    for text in pool.run(late_difference, 2, is_fast, hosts="AB"):
        assert text.startswith("collective mismatch: ranks made different calls as call")
        assert "broadcast((2,) int32, root rank 0)" in text

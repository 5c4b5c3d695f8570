"""The fast path of shared memory does what the slow one does, beside it, or leaves a call alone."""

from __future__ import annotations

import logging
import os
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.shm.communicator import ShmBackend
from meshdist.distributed import ProcessGroup
from meshdist.reduce_ops import ReduceKind, ReduceOp
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

pytestmark = pytest.mark.skipif(not ShmBackend().is_available(), reason="no native core here")


SHOWN = ("sequence", "call", "arguments", "where", "waits_for")


def notes_of_both_paths() -> list[dict[str, Any]]:
    x = torch.ones(2, 3, dtype=torch.float64)
    md.all_reduce(x)  # opens the group; from here on the fast path is there
    group = md.group.WORLD
    recorder = group.open_device_group("cpu").recorder
    found = []
    for path in (group.fast_path, None):
        group.fast_path = path
        before = recorder.num_notes, recorder.sequence, recorder.moment
        md.all_reduce(x)
        after = recorder.num_notes, recorder.sequence, recorder.moment
        assert after[:2] == (before[0] + 1, before[1] + 1)
        assert after[2] > before[2]
        call = recorder.find_note()
        found.append({name: getattr(call, name) for name in SHOWN})
    assert found[0].pop("sequence") + 1 == found[1].pop("sequence")
    return found


def test_both_paths_note_the_same(pool: Pool) -> None:
    for fast, slow in pool.run(notes_of_both_paths, 2, backend="shm"):
        assert fast == slow
        assert fast["arguments"] == "(2, 3) float64, SUM"
        assert "in notes_of_both_paths" in fast["where"]


def answers_of_the_fast_path() -> dict[str, bool]:
    warnings.simplefilter("ignore")  # nested tensors are a prototype
    md.all_reduce(torch.ones(1))
    fast = md.group.WORLD.fast_path.all_reduce
    x = torch.ones(2, 2)
    freed = torch.ones(2)
    freed.untyped_storage().resize_(0)
    cases = {
        "plain": x,
        "no element": torch.empty(0, 3),
        "one number": torch.tensor(1.0),
        "a leaf": torch.ones(2, requires_grad=True),
        "with history": (torch.ones(2, requires_grad=True) * 2),
        "a view": x[0],
        "strided": x[:, 0],
        "a parameter": torch.nn.Parameter(x),
        "complex": torch.ones(2, dtype=torch.complex64),
        "negated": torch._neg_view(x),
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor([x, x]),
        "meta": torch.ones(2, device="meta"),
        "no sum in the core": x.to(torch.float8_e5m2),
        "without memory": torch._efficientzerotensor(2),
        "its memory taken away": freed,
        "an array": x.numpy(),
        "nothing": None,
    }
    return {name: fast(tensor, md.ReduceOp.SUM) is None for name, tensor in cases.items()}


def test_it_leaves_alone_what_is_not_plain(pool: Pool) -> None:
    done = {"plain", "no element", "one number", "a view"}
    for answers in pool.run(answers_of_the_fast_path, 2, backend="shm"):
        assert {name for name, is_done in answers.items() if is_done} == done


def reduces(op: ReduceKind, dtype: torch.dtype) -> list[float]:
    x = torch.tensor([1, 6]).to(dtype) + md.get_rank()
    md.all_reduce(torch.ones(1))
    assert md.group.WORLD.fast_path.all_reduce(x, op) is None
    return x.tolist()


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (md.ReduceOp.MAX, torch.float32, [2.0, 7.0]),
        (md.ReduceOp.MIN, torch.int8, [1, 6]),
        (md.ReduceOp.AVG, torch.bfloat16, [1.5, 6.5]),
        (md.ReduceOp.PRODUCT, torch.int64, [2, 42]),
        (md.ReduceOp.BXOR, torch.uint8, [3, 1]),
    ],
)
def test_it_reduces_by_every_op(
    pool: Pool, op: ReduceKind, dtype: torch.dtype, expected: list[float]
) -> None:
    assert pool.run(reduces, 2, op, dtype, backend="shm") == [expected] * 2


def sums(dtype: torch.dtype) -> bool:
    x = torch.arange(5).to(dtype)
    md.all_reduce(torch.ones(1))
    assert md.group.WORLD.fast_path.all_reduce(x, md.ReduceOp.SUM) is None
    return torch.equal(x, torch.arange(5).to(dtype) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_it_sums(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(sums, 2, dtype, backend="shm") == [True] * 2


def sums_of_many_shapes() -> list[float]:
    """One after the other, so that nothing of a call is kept for another one's tensor."""
    md.all_reduce(torch.ones(1))
    fast, group = md.group.WORLD.fast_path.all_reduce, md.group.WORLD
    found = []
    for dtype in (torch.float32, torch.int32, torch.float64):
        for shape in ((2, 3), (3, 2), (6,), (1, 6), (0, 6), (), (2, 3)):
            x = torch.ones(shape, dtype=dtype)
            assert fast(x, md.ReduceOp.SUM) is None
            assert (x == 2).all()
            found.append(group.open_device_group("cpu").recorder.find_note().arguments)
    return found


def test_it_notes_each_shape_and_dtype(pool: Pool) -> None:
    shapes = ["(2, 3)", "(3, 2)", "(6,)", "(1, 6)", "(0, 6)", "()", "(2, 3)"]
    expected = [f"{s} {d}, SUM" for d in ("float32", "int32", "float64") for s in shapes]
    for found in pool.run(sums_of_many_shapes, 2, backend="shm"):
        assert found == expected


def sum_of_a_lazy_copy() -> list[list[float]]:
    md.all_reduce(torch.ones(1))
    x = torch.ones(3)
    y = torch._lazy_clone(x)
    assert md.group.WORLD.fast_path.all_reduce(y, md.ReduceOp.SUM) is None
    return [x.tolist(), y.tolist()]


def test_a_lazy_copy_gets_memory_of_its_own(pool: Pool) -> None:
    assert pool.run(sum_of_a_lazy_copy, 2, backend="shm") == [[[1.0] * 3, [2.0] * 3]] * 2


def backward_after_a_write() -> str:
    md.all_reduce(torch.ones(1))
    weight = torch.ones(2, requires_grad=True)
    x = torch.ones(2)
    product = (weight * x).sum()
    md.all_reduce(x)
    with pytest.raises(RuntimeError) as caught:
        product.backward()
    return str(caught.value)


def test_autograd_learns_of_the_write(pool: Pool) -> None:
    for text in pool.run(backward_after_a_write, 2, backend="shm"):
        assert "modified by an inplace operation" in text


def told(caplog_level: int) -> list[str]:
    md.all_reduce(torch.ones(1))
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("meshdist.collectives")
    log.addHandler(handler)
    log.setLevel(caplog_level)
    md.all_reduce(torch.ones(3))
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)
    md.all_reduce(torch.ones(3))
    return lines


def test_it_gives_way_to_the_log_of_all_collectives(pool: Pool) -> None:
    for (line,) in pool.run(told, 2, 5, backend="shm"):
        assert "all_reduce((3,) float32, SUM)" in line


def differ() -> str:
    md.all_reduce(torch.ones(1))
    with pytest.raises(md.MismatchError) as caught:
        md.all_reduce(torch.ones(3 + md.get_rank()))
    with pytest.raises(md.MeshdistError, match="ranks made different calls as call 2"):
        md.all_reduce(torch.ones(3))  # broken now
    return str(caught.value)


def test_a_disagreement_is_told_as_ever(pool: Pool) -> None:
    for text in pool.run(differ, 2, backend="shm"):
        assert "rank 0: all_reduce((3,) float32, SUM) at " in text
        assert "rank 1: all_reduce((4,) float32, SUM) at " in text


def fails(how: str) -> str:
    group = md.new_group(timeout=timedelta(seconds=1.0))
    md.all_reduce(torch.ones(1), group=group)
    md.barrier()
    if md.get_rank() == 1:
        if how == "dies":
            os._exit(7)
        time.sleep(0.2)
        if how == "aborts":
            group.abort("enough")
        time.sleep(2.0)
        return ""
    with pytest.raises(md.MeshdistError) as caught:
        md.all_reduce(torch.ones(3), group=group)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("is late", "CollectiveTimeoutError: all_reduce on group of ranks 0-1 timed out"),
        ("dies", "BackendError: all_reduce on group of ranks 0-1 failed on backend 'shm'"),
        ("aborts", "AbortedError: all_reduce on group of ranks 0-1 was aborted"),
    ],
)
def test_failures_are_told_as_ever(pool: Pool, how: str, told: str) -> None:
    text = pool.outcomes(fails, 2, how, backend="shm")[0]
    assert text.startswith(told)
    assert "call 2 on group of ranks 0-1: all_reduce((3,) float32, SUM) at " in text


def interrupted() -> float:
    md.all_reduce(torch.ones(1))
    if md.get_rank() == 1:
        time.sleep(1.0)
        return 0.0
    return seconds_until_interrupted(lambda: md.all_reduce(torch.ones(1)))


def test_ctrl_c_ends_it(pool: Pool) -> None:
    assert is_within(pool.run(interrupted, 2, backend="shm")[0], 0.9)


def closed_and_forked() -> list[str]:
    group: ProcessGroup = md.new_group()
    x = torch.ones(1)
    md.all_reduce(x, group=group)
    fast = group.fast_path.all_reduce
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(fast(x, md.ReduceOp.SUM)).encode())
        os._exit(0)
    os.wait()
    told = [os.read(reader, 9).decode()]
    md.destroy_process_group(group)
    with pytest.raises(md.GroupClosedError) as caught:
        md.all_reduce(x, group=group)
    return [*told, str(caught.value).splitlines()[0]]


def test_a_forked_child_and_a_closed_group_take_the_slow_path(pool: Pool) -> None:
    for forked, closed in pool.run(closed_and_forked, 2, backend="shm"):
        assert forked == "False"
        assert "was closed" in closed


@pytest.mark.parametrize(("size", "shape"), [(1, (3,)), (2, (3,)), (3, (2, 1, 2)), (2, (1,) * 6)])
def test_members_on_both_paths_meet(pool: Pool, size: int, shape: tuple[int, ...]) -> None:
    found = pool.run(both_paths, size, shape, backend="shm")
    for rank, (results, num_fast, notes) in enumerate(found):
        assert all(result == results[0] for result in results)
        assert num_fast == [NUM_CALLS * (turn >> rank & 1) for turn in range(1 << size)]
        assert all(note == notes[0] for note in notes)
        assert "fast_paths.py" in notes[0][0][2]


def left_alone() -> tuple[list[str], int]:
    group, spy = opened()
    x, size = torch.ones(2, 2), group.size()
    row = torch.ones(size, 2, 2)
    cases = {
        "strided": lambda: spy.broadcast(x[:, 0], 0),
        "a leaf": lambda: spy.broadcast(torch.ones(2, requires_grad=True), 0),
        "complex": lambda: spy.broadcast(x.to(torch.complex64), 0),
        "no sum in the core": lambda: spy.reduce(x.to(torch.float8_e5m2), ReduceOp.SUM, 0),
        "an array": lambda: spy.broadcast(x.numpy(), 0),
        "a mean of truths": lambda: spy.reduce(x.bool(), ReduceOp.AVG, 0),
        "bits of floats": lambda: spy.reduce(x, ReduceOp.BAND, 0),
        "no op": lambda: spy.reduce(x, "sum", 0),
        "two dtypes": lambda: spy.all_gather_single(row, x.double()),
        "overlapping": lambda: spy.all_gather_single(row, row[1 - group.rank()]),
        "rows of another size": lambda: spy.all_gather_single(row.view(size, 4, 1), x),
        "too few": lambda: spy.reduce_scatter_single(x, row[:1, 0], ReduceOp.SUM),
        "no list": lambda: spy.gather(x, row, group.rank()),
        "a short list": lambda: spy.gather(x, [], group.rank()),
        "a list with its own tensor": lambda: spy.gather(x, [x] * size, group.rank()),
        "a list elsewhere": lambda: spy.scatter(x, [x], 1 - group.rank()),
        "rows that do not divide": lambda: spy.all_to_all_single(
            torch.ones(size + 1), torch.ones(size + 1)
        ),
        "rows of two sizes": lambda: spy.all_to_all_single(torch.empty(0, 3), torch.empty(0, 5)),
        "no dim": lambda: spy.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0)),
    }
    before = group.open_device_group("cpu").recorder.num_notes
    taken = [name for name, call in cases.items() if call() is not False]
    return taken, group.open_device_group("cpu").recorder.num_notes - before


def test_other_collectives_leave_alone_what_is_not_plain(pool: Pool) -> None:
    assert pool.run(left_alone, 2, backend="shm") == [([], 0)] * 2


def after_another_group_broke() -> list[bool]:
    group, spy = opened()
    other = md.new_group()
    with pytest.raises(md.MismatchError):
        md.all_reduce(torch.ones(1 + md.get_rank()), group=other)
    md.all_reduce(torch.ones(1), group=group)
    return spy.answers


def test_another_group_that_broke_changes_nothing(pool: Pool) -> None:
    assert pool.run(after_another_group_broke, 2, backend="shm") == [[True]] * 2


def every_reduction() -> list[list[float]]:
    """Of each op the root's result and the scattered one."""
    _, spy = opened()
    rank = md.get_rank()
    found = []
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
        x, part = torch.tensor([1.0 + rank, 2.0]), torch.zeros(1, dtype=torch.bfloat16)
        md.reduce(x, 0, op)
        md.reduce_scatter_tensor(part, torch.tensor([1.0 + rank, 2.0]).bfloat16(), op)
        found.append([*x.tolist(), part.item()])
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        x, part = torch.tensor([1 + rank, 2]), torch.zeros(1, dtype=torch.uint8)
        md.reduce(x, 0, op)
        md.reduce_scatter_tensor(part, torch.tensor([1 + rank, 2], dtype=torch.uint8), op)
        found.append([*x.tolist(), part.item()])
    assert spy.answers == [True] * 16
    return found


def test_every_reduction(pool: Pool) -> None:
    first, second = pool.run(every_reduction, 2, backend="shm")
    kept = [[2.0, 2.0]] * 8
    sums = [[3.0, 4.0], [1.5, 2.0], [2.0, 4.0], [1.0, 2.0], [2.0, 2.0], [0, 2], [3, 2], [3, 0]]
    assert [one[:2] for one in first] == sums
    assert [one[2] for one in first] == [one[0] for one in sums]
    assert [one[:2] for one in second] == kept
    assert [one[2] for one in second] == [one[1] for one in sums]


def gathered_in_place() -> list[float]:
    _, spy = opened()
    out = torch.zeros(md.get_world_size(), 3)
    out[md.get_rank()] = md.get_rank() + 1.0
    md.all_gather_into_tensor(out, out[md.get_rank()])
    assert spy.answers == [True]
    return out[:, 2].tolist()


def test_a_gather_into_its_own_rows(pool: Pool) -> None:
    assert pool.run(gathered_in_place, 3, backend="shm") == [[1.0, 2.0, 3.0]] * 3


def test_who_waits_meets_who_goes_on(pool: Pool) -> None:
    assert pool.run(waits_or_not, 3, (40, 3), backend="shm") == [[True] * 3] * 3


@pytest.mark.parametrize("what", list(TOLD))
def test_a_disagreement_is_told_on_all(pool: Pool, what: str) -> None:
    for text in pool.run(differing, 2, what, backend="shm"):
        assert "collective mismatch: ranks made different calls as call" in text
        assert TOLD[what][0] in text
        assert TOLD[what][1] in text

"""The short ways of plain calls do what the long ways do, or leave the call to them."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.mesh.groups import ProcessGroup
from meshdist.wires.shm import ShmWire
from tests.pool import Pool

pytestmark = pytest.mark.skipif(not ShmWire().is_available(), reason="no native core here")


def notes_of_both_ways() -> list[dict[str, Any]]:
    x = torch.ones(2, 3, dtype=torch.float64)
    md.all_reduce(x)  # opens the group; from here on the short way is there
    group = md.group.WORLD
    recorder = group.channel("cpu").recorder
    found = []
    for short in (group.plain_calls, None):
        group.plain_calls = short
        before = recorder.num_notes, recorder.sequence, recorder.moment
        md.all_reduce(x)
        after = recorder.num_notes, recorder.sequence, recorder.moment
        assert after[:2] == (before[0] + 1, before[1] + 1)
        assert after[2] > before[2]
        found.append(recorder.describe())
    assert found[0].pop("sequence") + 1 == found[1].pop("sequence")
    return found


def test_both_ways_note_the_same(pool: Pool) -> None:
    for short, long in pool.run(notes_of_both_ways, 2, backend="shm"):
        assert short == long
        assert short["argument"] == "(2, 3) float64, SUM"
        assert "in notes_of_both_ways" in short["where"]


def answers_of_the_short_way() -> dict[str, bool]:
    warnings.simplefilter("ignore")  # nested tensors are a prototype
    md.all_reduce(torch.ones(1))
    short = md.group.WORLD.plain_calls.all_reduce
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
    return {name: short(tensor) for name, tensor in cases.items()}


def test_it_leaves_alone_what_is_not_plain(pool: Pool) -> None:
    done = {"plain", "no element", "one number", "a view"}
    for answers in pool.run(answers_of_the_short_way, 2, backend="shm"):
        assert {name for name, is_done in answers.items() if is_done} == done


def sums(dtype: torch.dtype) -> bool:
    x = torch.arange(5).to(dtype)
    md.all_reduce(torch.ones(1))
    assert md.group.WORLD.plain_calls.all_reduce(x)
    return torch.equal(x, torch.arange(5).to(dtype) * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_it_sums(pool: Pool, dtype: torch.dtype) -> None:
    assert pool.run(sums, 2, dtype, backend="shm") == [True] * 2


def sums_of_many_shapes() -> list[float]:
    """One after the other, so that nothing of a call is kept for another one's tensor."""
    md.all_reduce(torch.ones(1))
    short, group = md.group.WORLD.plain_calls.all_reduce, md.group.WORLD
    found = []
    for dtype in (torch.float32, torch.int32, torch.float64):
        for shape in ((2, 3), (3, 2), (6,), (1, 6), (0, 6), (), (2, 3)):
            x = torch.ones(shape, dtype=dtype)
            assert short(x)
            assert (x == 2).all()
            found.append(group.channel("cpu").recorder.describe()["argument"])
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
    assert md.group.WORLD.plain_calls.all_reduce(y)
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
    log = logging.getLogger("meshdist.verbs")
    log.addHandler(handler)
    log.setLevel(caplog_level)
    md.all_reduce(torch.ones(3))
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)
    md.all_reduce(torch.ones(3))
    return lines


def test_it_gives_way_to_the_log_of_all_verbs(pool: Pool) -> None:
    for (line,) in pool.run(told, 2, 5, backend="shm"):
        assert "all_reduce((3,) float32, SUM)" in line


def differ() -> str:
    md.all_reduce(torch.ones(1))
    with pytest.raises(md.AgreementError) as caught:
        md.all_reduce(torch.ones(3 + md.get_rank()))
    with pytest.raises(md.MeshdistError, match="a group disagree about their call 2"):
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
        ("is late", "CollectiveTimeoutError: all_reduce on group of ranks 0-1 was not finished"),
        ("dies", "BackendError: all_reduce on group of ranks 0-1 failed on wire 'shm'"),
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

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        md.all_reduce(torch.ones(1))
    signal.signal(signal.SIGALRM, before)
    return time.monotonic() - begin


def test_ctrl_c_ends_it(pool: Pool) -> None:
    assert pool.run(interrupted, 2, backend="shm")[0] < 0.9


def closed_and_forked() -> list[str]:
    group: ProcessGroup = md.new_group()
    x = torch.ones(1)
    md.all_reduce(x, group=group)
    short = group.plain_calls.all_reduce
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(short(x)).encode())
        os._exit(0)
    os.wait()
    told = [os.read(reader, 9).decode()]
    md.destroy_process_group(group)
    with pytest.raises(md.GroupClosedError) as caught:
        md.all_reduce(x, group=group)
    return [*told, str(caught.value).splitlines()[0]]


def test_a_forked_child_and_a_closed_group_go_the_long_way(pool: Pool) -> None:
    for forked, closed in pool.run(closed_and_forked, 2, backend="shm"):
        assert forked == "False"
        assert "was closed" in closed

"""Messages whose Work is dropped go on, on every backend, and what follows them arrives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.backends.c10d.gloo_connections import DroppedMessages
from tests.inner import Deadline, wait_until
from tests.operations.cases import BACKENDS
from tests.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:the Work of:UserWarning")
LARGE = 3_000_000
ON = ["shm", "gloo", "gloo across hosts", "simulated", pytest.param("mpi", marks=pytest.mark.mpi)]


def total() -> float:
    """What a sum gives after them; it is no sum where they stand in the way."""
    x = torch.ones(1)
    for _ in range(3):
        md.all_reduce(x)
    return x.item()


def receives_dropped(numel: int, is_sent_first: bool, is_named: bool) -> tuple[float, list[float]]:
    """Rank 1 drops a receive, whose message comes before or after it; then it receives another."""
    first, second = torch.zeros(numel), torch.zeros(numel)
    sent = None
    if md.get_rank() == 0 and is_sent_first:
        sent = md.isend(torch.ones(numel), 1)
    md.barrier()
    if md.get_rank() == 1:
        md.irecv(first, 0 if is_named else None)
        gc.collect()
    md.barrier()
    if md.get_rank() == 0:
        sent = sent or md.isend(torch.ones(numel), 1)
    found = total()
    if md.get_rank() == 0:
        assert sent is not None
        md.send(torch.full((numel,), 2.0), 1)
        sent.wait()
    else:
        md.recv(second, 0)
    md.barrier()
    return found, [first[-1].item(), second[-1].item()]


@pytest.mark.parametrize("backend", ON)
def test_a_receive(pool: Pool, backend: str) -> None:
    """It is small or large, sent before or after, and from a member or from anyone."""
    cases = list(product((3, LARGE), (True, False), (True, False)))
    for case, *found in zip(cases, *BACKENDS[backend](pool, each_dropped, 2, cases), strict=True):
        assert [one[0] for one in found] == [8.0, 8.0], case
        assert found[1][1] == [1.0, 2.0], case


def each_dropped(cases: list[tuple[int, bool, bool]]) -> list[tuple[float, list[float]]]:
    return [receives_dropped(*case) for case in cases]


def sends_dropped(numel: int) -> tuple[float, float]:
    x = torch.zeros(numel)
    if md.get_rank() == 0:
        md.isend(torch.ones(numel), 1)
        gc.collect()
    md.barrier()
    found = total()
    if md.get_rank() == 1:
        md.recv(x, 0)
    md.barrier()
    return found, x[-1].item()


@pytest.mark.parametrize("numel", [3, LARGE])
@pytest.mark.parametrize("backend", ON)
def test_a_send(pool: Pool, backend: str, numel: int) -> None:
    assert BACKENDS[backend](pool, sends_dropped, 2, numel) == [(8.0, 0.0), (8.0, 1.0)]


def never_met() -> float:
    if md.get_rank() == 0:
        for numel in (3, LARGE):
            md.isend(torch.ones(numel), 1, tag=7)
            md.irecv(torch.ones(numel), 1, tag=8)
    return total()


@pytest.mark.parametrize("backend", ON)
def test_one_that_never_meets_its_other_side_holds_nothing_up(pool: Pool, backend: str) -> None:
    assert BACKENDS[backend](pool, never_met, 2) == [8.0, 8.0]


def async_collectives_dropped() -> float:
    for numel in (3, LARGE):
        md.all_reduce(torch.ones(numel), async_op=True)
        md.all_gather([torch.ones(numel), torch.ones(numel)], torch.ones(numel), async_op=True)
    gc.collect()
    return total()


@pytest.mark.parametrize("backend", ON)
def test_collectives(pool: Pool, backend: str) -> None:
    assert BACKENDS[backend](pool, async_collectives_dropped, 2) == [8.0, 8.0]


def tensors_kept() -> int:
    """How many tensors of dropped messages live when all have come."""
    seen = []
    for place in range(50):
        x = torch.full((10,), float(place))
        seen.append(weakref.ref(x))
        if md.get_rank() == 0:
            md.isend(x, 1)
        else:
            md.irecv(x, 0)
        del x
    md.barrier()

    def num_kept() -> int:
        # Lets what was dropped before be looked at.
        call = md.isend if md.get_rank() == 0 else md.irecv
        call(torch.ones(1), 1 - md.get_rank(), tag=1).wait()
        return sum(one() is not None for one in seen)

    for _ in range(200):
        x = torch.tensor(num_kept())
        md.all_reduce(x)
        if not x.item():
            break
    return int(x.item())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_their_memory_is_let_go(pool: Pool, backend: str) -> None:
    assert BACKENDS[backend](pool, tensors_kept, 2) == [0, 0]


class Message:
    """A message that is done when the test says so."""

    def __init__(self) -> None:
        self.is_done = threading.Event()

    def wait(self, patience: timedelta) -> None:
        if not self.is_done.wait(patience.total_seconds()):
            raise RuntimeError("timed out")


def eventually(condition: Callable[[], Any]) -> bool:
    return bool(wait_until(condition, Deadline(30)))


def test_messages_that_never_come_hold_up_no_other() -> None:
    dropped, stuck, done = DroppedMessages(timedelta(seconds=60)), Message(), Message()
    done.is_done.set()
    seen = weakref.ref(done)
    dropped.add(stuck, is_from_anyone=False)
    dropped.look()
    dropped.add(done, is_from_anyone=False)
    del done
    dropped.look()
    assert eventually(lambda: seen() is None)
    assert dropped.close()
    stuck.is_done.set()
    assert eventually(lambda: not dropped.close())


def test_no_thread_waits_for_one_from_anyone() -> None:
    dropped, message = DroppedMessages(timedelta(seconds=60)), Message()
    seen = weakref.ref(message)
    dropped.add(message, is_from_anyone=True)
    del message
    dropped.look()
    assert seen() is not None
    assert not dropped.close()
    assert seen() is None

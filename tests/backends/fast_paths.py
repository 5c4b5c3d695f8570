"""Programs that take the fast path, over any backend that has one."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.reduce_ops import ReduceOp


class Spy:
    """The fast path of a group, and of each call whether it was done there."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.answers: list[bool] = []

    @property
    def starting(self) -> Any:
        """That of calls that are started, of which nothing is kept."""
        return self.path.starting

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found = getattr(self.path, name)(*arguments)
            self.answers.append(found is not False)
            return found

        return call


def opened() -> tuple[Any, Spy]:
    """The world, whose members have met, and a spy on its fast path."""
    group = md.group.WORLD
    md.all_reduce(torch.ones(1))  # from here on everybody's words are known
    spy = Spy(group.fast_path)
    group.fast_path = spy
    return group, spy


def seconds_until_interrupted(call: Callable[[], Any]) -> float:
    """How long a call takes that the KeyboardInterrupt of a signal's handler ends, after 0.2 s."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call()
    signal.signal(signal.SIGALRM, before)
    return time.monotonic() - begin


def every_operation(
    shape: tuple[int, ...], *, goes_on: bool = False, group: Any = None
) -> dict[str, Any]:
    """What each collective with a fast path gives this rank; one that goes on does not take it.

    ``group`` has all ranks; None takes the world's.
    """
    rank, size, root = md.get_rank(), md.get_world_size(), md.get_world_size() - 1
    x = torch.full(shape, rank + 1.0)
    row = torch.arange(size * x.numel(), dtype=torch.float64) + 100 * rank
    whole = row.view(size, *shape)
    found = {
        **{name: x.clone() for name in ("all_reduce", "reduce", "product", "broadcast")},
        "all_gather_single": x.new_zeros(size * x.numel()),
        "all_gather_into_tensor": x.new_zeros(size, *shape),
        "reduce_scatter_single": row.new_zeros(shape),
        "reduce_scatter_tensor": row.new_zeros(shape),
        "gather": x.new_zeros(size, *shape),
        "scatter": x.new_zeros(shape),
        "all_to_all_single": torch.zeros_like(row),
        "all_gather": x.new_zeros(2 * size, *shape),
        "all_to_all": torch.zeros_like(row.view(size, *shape)),
        "barrier": x.new_zeros(1),
    }
    rows = list(whole.float()) if rank == root else None
    places = list(found["gather"]) if rank == root else None
    apart = list(found["all_gather"])[::2] if rank else list(found["all_gather"])[1::2]
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": md.all_reduce,
        "reduce": lambda y, **how: md.reduce(y, root, **how),
        "product": lambda y, **how: md.reduce(y, root, ReduceOp.PRODUCT, **how),
        "broadcast": lambda y, **how: md.broadcast(y, root, **how),
        "all_gather_single": lambda y, **how: md.all_gather_single(y, x, **how),
        "all_gather_into_tensor": lambda y, **how: md.all_gather_into_tensor(y, x, **how),
        "reduce_scatter_single": lambda y, **how: md.reduce_scatter_single(y, row, **how),
        "reduce_scatter_tensor": lambda y, **how: md.reduce_scatter_tensor(
            y, whole, op=ReduceOp.PRODUCT, **how
        ),
        "gather": lambda y, **how: md.gather(x, places, root, **how),
        "scatter": lambda y, **how: md.scatter(y, rows, root, **how),
        "all_to_all_single": lambda y, **how: md.all_to_all_single(y, row, **how),
        "all_gather": lambda y, **how: md.all_gather(apart, x, **how),
        "all_to_all": lambda y, **how: md.all_to_all(list(y)[::-1], list(whole), **how),
        "barrier": lambda y, **how: md.barrier(**how),
    }
    for name, call in calls.items():
        work = call(found[name], async_op=goes_on, group=group)
        if work is not None:
            work.wait()
    return {name: value.tolist() for name, value in found.items()}


NUM_CALLS = 14


def both_paths(shape: tuple[int, ...]) -> tuple[list[Any], list[int], list[Any]]:
    """The results, how many calls took the fast path, and the notes, by turns.

    In the first turn no member takes it, in the last one all do; some do in between.
    """
    group, spy = opened()
    results, num_fast, notes = [], [], []
    for turn in range(1 << group.size()):
        is_fast = bool(turn >> group.rank() & 1)
        group.fast_path = spy if is_fast else None
        spy.answers.clear()
        results.append(every_operation(shape))
        num_fast.append(sum(spy.answers))
        recorder = group.open_device_group("cpu").recorder
        called = [recorder.find_note(recorder.num_notes - k) for k in range(NUM_CALLS)]
        notes.append([(note.call, note.arguments, note.where) for note in called])
    return results, num_fast, notes


def waits_or_not(shape: tuple[int, ...]) -> list[bool]:
    """Whether one member may take the fast path while another goes on."""
    group, spy = opened()
    expected = every_operation(shape)
    found = []
    for turn in range(3):
        spy.answers.clear()
        goes_on = (turn + group.rank()) % 2 == 0
        found.append(every_operation(shape, goes_on=goes_on) == expected)
        assert sum(spy.answers) == (0 if goes_on else NUM_CALLS)
    return found


def goes_on_beside_a_message() -> float:
    """What one has started goes on while it waits, though a message lies there unreceived."""
    world, rank = md.get_world_size(), md.get_rank()
    given, taken, message = (torch.full((300_000 * world,), one) for one in (2.0, 0.0, 1.0))
    if rank == 0:
        sent = md.isend(message, 1)
        time.sleep(0.2)
        md.all_to_all_single(taken, given)
        md.barrier()
        sent.wait()
    else:
        started = md.all_to_all_single(taken, given, async_op=True)
        md.barrier()
        if rank == 1:
            md.recv(message, 0)
        started.wait()
    return taken.sum().item()


def sums_of_two_halves() -> list[list[float]]:
    """Of 16-bit floats, by the first two members; nothing on the others."""
    pair = md.new_group([0, 1])
    if md.get_rank() > 1:
        return []
    md.all_reduce(torch.ones(1), group=pair)
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(100.0).to(dtype) + md.get_rank()
        assert pair.fast_path.all_reduce(x, md.ReduceOp.SUM) is None
        found.append(x.tolist())
    return found


def differing(what: str) -> str:
    md.all_reduce(torch.ones(1))
    rank = md.get_rank()
    x = torch.ones(4)
    two = torch.ones(2, 4, dtype=(torch.int32, torch.float32)[rank])
    call = {
        "roots": lambda: md.broadcast(x, rank),
        "ops": lambda: md.reduce(x, 0, ReduceOp.SUM if rank else ReduceOp.PRODUCT),
        "dtypes": lambda: md.all_gather_single(two, torch.zeros_like(two[0])),
        "operations": lambda: md.barrier() if rank else md.all_reduce(x),
        "sizes": lambda: md.all_to_all_single(x, torch.ones(4), *[[1, 3]] * 2 * rank),
    }[what]
    with pytest.raises(md.MismatchError) as caught:
        call()
    assert x.sum() == 4
    assert two.sum() == 8
    return str(caught.value)


TOLD = {
    "roots": ("broadcast((4,) float32, root rank 0)", "broadcast((4,) float32, root rank 1)"),
    "ops": (
        "reduce((4,) float32, PRODUCT, root rank 0)",
        "reduce((4,) float32, SUM, root rank 0)",
    ),
    "dtypes": ("all_gather_single((4,) int32)", "all_gather_single((4,) float32)"),
    "operations": ("all_reduce((4,) float32, SUM)", "barrier()"),
    "sizes": ("sending [2, 2], receiving [2, 2]", "sending [1, 3], receiving [1, 3]"),
}
"""What the error shows of the two calls."""

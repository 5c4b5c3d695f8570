"""What a step takes on all ranks, in CPU time and wall time, what a call takes on one thread, and
whether it keeps to a target."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import meshdist as md


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one step."""

    cpu: float
    wall: float


def sample_of(step: Callable[[], None], num_steps: int) -> Sample:
    """Time some steps, without collections of garbage among them."""
    gc.collect()
    gc.disable()
    try:
        md.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    slowest = torch.tensor(wall, dtype=torch.float64)
    mean = torch.tensor(cpu, dtype=torch.float64)
    md.all_reduce(slowest, md.ReduceOp.MAX)
    md.all_reduce(mean, md.ReduceOp.AVG)
    return Sample(mean.item() * 1e3 / num_steps, slowest.item() * 1e3 / num_steps)


def thread_us(
    call: Callable[[], Any],
    count: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """CPU time of a call, on this thread, inside a context that was entered before."""
    with context():
        for _ in range(count // 10 + 1):
            call()
        start = time.thread_time()
        for _ in range(count):
            call()
        return (time.thread_time() - start) / count * 1e6


def quotient(one: Sequence[float], other: Sequence[float]) -> float:
    """The median over rounds of one side's time over the other's.

    Example:
        >>> quotient([2.0, 30.0, 4.0], [1.0, 10.0, 2.0])
        2.0
    """
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def verdict(most: float | None, found: Sequence[float]) -> str:
    """Whether what was found keeps to a target, if there is one."""
    if most is None:
        return ""
    return f"{'met' if max(found) <= most else 'MISSED'} (at most {most:g})"

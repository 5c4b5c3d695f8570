"""What a step takes on all ranks, in CPU time and wall time, and whether it keeps to a target."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def verdict(most: float | None, found: Sequence[float]) -> str:
    """Whether what was found keeps to a target, if there is one."""
    if most is None:
        return ""
    return f"{'met' if max(found) <= most else 'MISSED'} (at most {most:g})"

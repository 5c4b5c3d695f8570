"""Ranks that wait beside a program that computes are run when they are woken."""

from __future__ import annotations

import os
import statistics
import time

import torch

import meshdist as md
from benchmarks.busy import busy_processes
from tests.load import is_within
from tests.pool import Pool

CALLS = 300


def test_waits_on_a_core_that_another_program_wants_cost_no_slices_of_it(pool: Pool) -> None:
    """Two ranks and busy processes on one core: a turn of these takes some milliseconds."""

    def program() -> float:
        usual = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, {min(usual)})
            x, seconds = torch.ones(2), []
            for _ in range(CALLS):
                begin = time.perf_counter()
                md.all_reduce(x)
                seconds.append(time.perf_counter() - begin)
                x.fill_(1.0)
        finally:
            os.sched_setaffinity(0, usual)
        return statistics.median(seconds[CALLS // 3 :])

    with busy_processes(4) as processes:
        for busy in processes:
            os.sched_setaffinity(busy.pid, {min(os.sched_getaffinity(0))})
        assert is_within(max(pool.run(program, 2, backend="shm")), 0.0003)

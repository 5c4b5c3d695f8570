"""Run a program on ranks of each kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool

Run = Callable[..., list[Any]]


@pytest.fixture(
    params=["simulated", "shm", "gloo", "two hosts", pytest.param("mpi", marks=pytest.mark.mpi)]
)
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` on simulated ranks, and on processes over each backend."""
    kind = request.param
    if kind == "simulated":
        return lambda fn, size, *args: md.simulate(fn, size, args)
    pool: Pool = request.getfixturevalue("pool")
    if kind == "mpi":
        return lambda fn, size, *args: job_of(pool, size).run_in_world(fn, *args)
    if kind == "two hosts":
        return lambda fn, size, *args: pool.run(fn, size, *args, hosts=("AB" * size)[:size])
    return partial(pool.run, backend=kind)

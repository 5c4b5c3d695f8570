"""Random programs have one device's values and gradients: by types, and with casts by hand."""

from __future__ import annotations

import numpy as np
import pytest

import meshdist as md
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.typed_mode.typed_programs import NAMES, Program, largest_error, make_program


def worst_errors(program: Program, ways: tuple[bool, ...]) -> list[float]:
    """On one rank, how far each way to run a program is from one device."""
    ranks = np.array(program.ranks)
    mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[-ranks.ndim :])
    return [largest_error(program, mesh, by_hand=by_hand) for by_hand in ways]


def errors(seeds: range, ways: tuple[bool, ...] = (True, False)) -> list[tuple[int, bool, float]]:
    """The programs that are wrong: seed, whether by hand, and by how much."""
    programs = {seed: make_program(seed) for seed in seeds}
    wrong = []
    for seed, program in programs.items():
        found = md.simulate(worst_errors, np.size(program.ranks), args=(program, ways))
        worst = np.max(found, axis=0)
        wrong += [
            (seed, by_hand, error)
            for by_hand, error in zip(ways, worst, strict=True)
            if not error < 1e-12
        ]
    return wrong


@pytest.mark.parametrize(
    "start", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(25, 200, 25))]
)
def test_random_programs(start: int) -> None:
    assert errors(range(start, start + 25), (False,) if start else (True, False)) == []


@pytest.mark.soak
@pytest.mark.parametrize("start", range(200, 2000, 100))
def test_more_random_programs(start: int) -> None:
    assert errors(range(start, start + 100)) == []


def programs_of_four_ranks() -> list[Program]:
    programs = [make_program(seed) for seed in range(60)]
    return [one for one in programs if np.size(one.ranks) == 4][:12]


def errors_on_rank(programs: list[Program]) -> list[float]:
    return [max(worst_errors(program, (False,))) for program in programs]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_random_programs_on_processes(pool: Pool, backend: str) -> None:
    found = pool.run(errors_on_rank, 4, programs_of_four_ranks(), backend=backend)
    assert np.max(found) < 1e-12


@pytest.mark.soak
@pytest.mark.mpi
def test_random_programs_over_mpi(pool: Pool) -> None:
    found = job_of(pool, 4).run_in_world(errors_on_rank, programs_of_four_ranks())
    assert np.max(found) < 1e-12

"""Random programs have one device's values and gradients: by types, and with casts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import meshdist as md
from tests.collectives.typed_programs import NAMES, largest_error, make_program


def errors(seeds: range, ways: tuple[bool, ...] = (True, False)) -> list[tuple[int, bool, float]]:
    """The programs that are wrong: seed, whether by hand, and by how much."""
    programs = {seed: make_program(seed) for seed in seeds}

    def on_rank(seed: int) -> Any:
        program = programs[seed]
        ranks = np.array(program.ranks)
        mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=NAMES[-ranks.ndim :])
        return [largest_error(program, mesh, by_hand=by_hand) for by_hand in ways]

    wrong = []
    for seed, program in programs.items():
        found = md.simulate(on_rank, np.size(program.ranks), args=(seed,))
        worst = np.max(found, axis=0)
        wrong += [
            (seed, by_hand, error)
            for by_hand, error in zip(ways, worst, strict=True)
            if not error < 1e-12
        ]
    return wrong


@pytest.mark.parametrize("start", range(0, 200, 50))
def test_random_programs(start: int) -> None:
    assert errors(range(start, start + 50), (False,) if start else (True, False)) == []


@pytest.mark.soak
@pytest.mark.parametrize("start", range(200, 2000, 100))
def test_more_random_programs(start: int) -> None:
    assert errors(range(start, start + 100)) == []

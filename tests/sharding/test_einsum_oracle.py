"""Random einsums of sharded tensors, against one device that holds all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

import meshdist as md

from .einsum_cases import AXES, check_in_turn, draw_case

NUM_CASES = 20  # in a simulation: a mesh costs more than a case
NUM_DRAWS = {
    (2,): 7,
    (3,): 4,
    (4,): 4,
    (2, 2): 7,
    (2, 3): 3,
    (4, 2): 2,
    (2, 2, 2): 2,
    (2, 1, 3): 2,
    (2, 2, 4): 1,
}
"""How many simulations a mesh gets: a case costs as much as the mesh has ranks."""
SEEDS = st.integers(0, 10**6)


def check_cases(shape: tuple[int, ...], seed: int) -> None:
    axes = AXES[: len(shape)]
    cases = [draw_case(1000 * seed + number, axes) for number in range(NUM_CASES)]

    def program() -> None:
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=axes)
        check_in_turn(cases, mesh)

    md.simulate(program, math.prod(shape))


@pytest.mark.parametrize("shape", NUM_DRAWS, ids=str)
def test_values_and_gradients_are_those_of_one_device(shape: tuple[int, ...]) -> None:
    @settings(max_examples=NUM_DRAWS[shape])
    @given(seed=SEEDS)
    def check(seed: int) -> None:
        check_cases(shape, seed)

    check()


@pytest.mark.soak
@settings(max_examples=500)
@given(shape=st.sampled_from([*NUM_DRAWS]), seed=SEEDS)
def test_ten_thousand(shape: tuple[int, ...], seed: int) -> None:
    check_cases(shape, seed)

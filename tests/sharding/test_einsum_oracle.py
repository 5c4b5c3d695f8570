"""Random einsums of sharded tensors, against one device that holds all of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

import meshdist as md

from .einsum_cases import AXES, MESHES, check_in_turn, draw_case

SHAPES, SEEDS = st.sampled_from(MESHES), st.integers(0, 10**6)


def check_cases(shape: tuple[int, ...], seed: int) -> None:
    axes = AXES[: len(shape)]
    cases = [draw_case(1000 * seed + number, axes) for number in range(20)]

    def program() -> None:
        mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=axes)
        check_in_turn(cases, mesh)

    md.simulate(program, math.prod(shape))


@settings(max_examples=20)
@given(shape=SHAPES, seed=SEEDS)
def test_values_and_gradients_are_those_of_one_device(shape: tuple[int, ...], seed: int) -> None:
    check_cases(shape, seed)


@pytest.mark.soak
@settings(max_examples=100)
@given(shape=SHAPES, seed=SEEDS)
def test_two_thousand(shape: tuple[int, ...], seed: int) -> None:
    check_cases(shape, seed)

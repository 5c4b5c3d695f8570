"""Every collective on every backend, array library, dtype, op, world size and shape, against
NumPy."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

import meshdist as md
from tests.operations.cases import (
    BACKENDS,
    LIBRARIES_ON_GPU,
    SIZES,
    every_case,
    judge,
    perform_all,
    run_cases,
    sample,
)
from tests.pool import Pool

NUM_PER_OPERATION = 6
BATCH = 1000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sample(backend: str, size: int, pool: Pool) -> None:
    run_cases(backend, sample(size, NUM_PER_OPERATION), pool)


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_cases(backend: str, size: int, pool: Pool) -> None:
    cases = every_case(size)
    while batch := list(islice(cases, BATCH)):
        run_cases(backend, batch, pool)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("library", LIBRARIES_ON_GPU)
def test_sample_on_a_gpu(library: str, size: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if library == "cupy":
        pytest.importorskip("cupy")
    cases = sample(size, NUM_PER_OPERATION, (library,))
    judge("simulated", cases, md.simulate(perform_all, size, args=(cases, 0)))

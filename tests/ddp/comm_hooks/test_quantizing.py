"""8-bit averages against a loop in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.ddp.comm_hooks.compression import quantization_perchannel_hook
from tests.ddp.comm_hooks.test_uncompressed import averaged


def gradients(rank: int, numel: int) -> torch.Tensor:
    """Of very different sizes from one end to the other."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return drawn * torch.linspace(0.01, 10, numel)


def in_steps(values: np.ndarray) -> np.ndarray:
    """What is left of values that share one scale."""
    least, greatest = min(values.min(), 0), max(values.max(), 0)
    scale = max(np.float32((greatest - least) / np.float32(255)), np.float32(2**-23))
    zero = np.clip(np.round(-least / scale), 0, 255)
    steps = np.clip(np.round(values / scale) + zero, 0, 255)
    return ((steps - zero) * scale).astype(np.float32)


def expected(num_ranks: int, numel: int, channel_size: int) -> np.ndarray:
    total = np.zeros(numel, np.float32)
    for rank in range(num_ranks):
        x = gradients(rank, numel).numpy()
        for start in range(0, numel, channel_size):
            total[start : start + channel_size] += in_steps(x[start : start + channel_size])
    return total / np.float32(num_ranks)


@pytest.mark.parametrize("numel", [1, 511, 512, 513, 2000])
@pytest.mark.parametrize("name", ["tensor", "channel"])
def test_averages_of_what_is_left(name: str, numel: int) -> None:
    def program() -> np.ndarray:
        hook = getattr(md.comm_hooks, f"quantization_per{name}_hook")
        found: np.ndarray = averaged(hook, gradients(md.get_rank(), numel)).numpy()
        return found

    one, *others = md.simulate(program, 3)
    wanted = expected(3, numel, numel if name == "tensor" else 512)
    np.testing.assert_allclose(one, wanted, rtol=1e-6, atol=1e-7)
    for other in others:
        np.testing.assert_array_equal(one, other)


def test_more_scales_are_more_exact() -> None:
    def program() -> list[float]:
        exact = averaged(md.comm_hooks.allreduce_hook, gradients(md.get_rank(), 4096))
        found = []
        for hook in (
            md.comm_hooks.quantization_pertensor_hook,
            md.comm_hooks.quantization_perchannel_hook,
            lambda state, bucket: quantization_perchannel_hook(state, bucket, bucket_size=64),
        ):
            x = averaged(hook, gradients(md.get_rank(), 4096))
            found.append((x - exact)[:512].abs().max().item())
        return found

    coarse, fine, finest = md.simulate(program, 2)[0]
    assert coarse > 5 * fine > 5 * finest > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def program() -> torch.Tensor:
        return averaged(md.comm_hooks.quantization_pertensor_hook, torch.ones(4, dtype=dtype) * 2)

    for found in md.simulate(program, 2):
        assert found.dtype is dtype and found.tolist() == [2.0] * 4


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(bad: float) -> None:
    """As a GradScaler, which skips such a step, relies on."""

    def program() -> bool:
        x = torch.ones(600)
        if md.get_rank() == 1:
            x[3] = bad
        averaged(md.comm_hooks.quantization_perchannel_hook, x)
        return bool(x.isfinite().all())

    assert md.simulate(program, 2) == [False, False]


def test_an_empty_bucket() -> None:
    def program() -> int:
        for hook in (
            md.comm_hooks.quantization_pertensor_hook,
            md.comm_hooks.quantization_perchannel_hook,
        ):
            assert averaged(hook, torch.empty(0)).numel() == 0
        return 0

    assert md.simulate(program, 2) == [0, 0]

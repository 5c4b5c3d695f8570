"""The comparison of values: distances, tolerances, and the text of what differs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.dtypes import DTYPES
from meshdist.errors import GradientError
from meshdist.functional.value_checks import (
    check_invariant,
    find_differing,
    relative_distance,
    tolerance,
)

QUIET = [dtype for dtype in DTYPES if dtype is not torch.complex32]
"""Every dtype but the one of whose every use torch warns."""
INEXACT = [dtype for dtype in QUIET if dtype.is_floating_point or dtype.is_complex]


def group() -> Any:
    mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("tp",))
    return mesh.get_group("tp")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
def test_any_value_can_be_compared(dtype: torch.dtype) -> None:
    def program() -> str:
        words = {"where": "here", "expected": "equal ones", "fix": "make them equal"}
        along = group()
        check_invariant(torch.tensor([1, 0], dtype=dtype), along, "a mask", **words)
        mine = torch.tensor([1, md.get_rank()], dtype=dtype)
        with pytest.raises(GradientError) as caught:
            check_invariant(mine, along, "a mask", **words)
        return str(caught.value)

    assert (
        md.simulate(program, 2)
        == [
            "a mask over axis 'tp' of DeviceMesh(tp=2) is not the same on every rank\n"
            "  where:    here\n"
            "  expected: equal ones\n"
            "  found:    rank 1 differs from rank 0, by up to 1 of its largest value\n"
            "  fix:      make them equal"
        ]
        * 2
    )


def test_each_tensor_has_its_own_answer() -> None:
    def program() -> Any:
        rank = md.get_rank()
        tensors = [torch.ones(2), torch.tensor([4.0, 4.0 - rank]), torch.tensor(rank // 2)]
        assert find_differing([], group()) == []
        return find_differing(tensors, group())

    assert md.simulate(program, 3) == [[{}, {1: 0.25, 2: 0.5}, {2: math.inf}]] * 3


@pytest.mark.parametrize("dtype", QUIET)
def test_every_dtype_has_a_distance(dtype: torch.dtype) -> None:
    two = torch.tensor([1.0, 2.0]).to(dtype)
    one = torch.tensor([1.0, 1.0]).to(dtype)
    assert relative_distance(two, two) == 0.0
    assert relative_distance(one, two) == (0.0 if dtype is torch.bool else 0.5)


@pytest.mark.parametrize("dtype", INEXACT)
def test_half_of_the_digits_count(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert tolerance(torch.empty((), dtype=dtype)) == math.sqrt(eps) >= eps


def test_what_counts_as_equal() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 3.0])
    assert relative_distance(odd, odd.clone()) == 0.0
    assert relative_distance(odd, -odd) == math.inf
    assert relative_distance(torch.ones(1), torch.zeros(1)) == math.inf
    assert relative_distance(torch.empty(0), torch.empty(0)) == 0.0
    large = torch.tensor([2**62 + 1, 5])
    assert relative_distance(large, torch.tensor([2**62, -5])) > 0.0
    # What torch only moves is compared by its bytes.
    bits = torch.tensor([1, 2], dtype=torch.uint8)
    assert (
        relative_distance(bits.view(torch.float4_e2m1fn_x2), bits.view(torch.float4_e2m1fn_x2))
        == 0.0
    )
    assert (
        relative_distance(
            bits.view(torch.float4_e2m1fn_x2), bits.flip(0).view(torch.float4_e2m1fn_x2)
        )
        == 0.5
    )

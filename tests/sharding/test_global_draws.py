"""Shards of random arrays against slices of what is drawn at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from meshdist.sharding.array_creation import draw_box


@st.composite
def cases(draw: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], int]:
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    box = []
    for size in shape:
        ends = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        box.append((ends[0], ends[1]))
    return shape, tuple(box), draw(st.sampled_from([16, 32, 64]))


@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]))
def test_pieces_of_torch_make_the_whole(case: Any, dtype: torch.dtype) -> None:
    shape, box, piece = case
    alone, generator = (torch.Generator().manual_seed(7) for _ in range(2))
    whole = torch.randn(shape, dtype=dtype, generator=alone)
    part = draw_box(
        lambda count: torch.randn(count, dtype=dtype, generator=generator), shape, box, piece=piece
    )
    assert torch.equal(part, whole[tuple(slice(*ends) for ends in box)])
    assert torch.equal(generator.get_state(), alone.get_state())
    assert part.untyped_storage().size() <= max(1, part.numel()) * part.itemsize


@pytest.mark.parametrize("count", [(1 << 18) + 15, (1 << 18) + 16, (2 << 18) + 1])
def test_the_pieces_of_large_arrays(count: int) -> None:
    torch.manual_seed(3)
    whole = torch.randn(count)
    torch.manual_seed(3)
    counts: list[int] = []

    def draw(count: int) -> torch.Tensor:
        counts.append(count)
        return torch.randn(count)

    part = draw_box(draw, (count,), ((count - 20, count),))
    assert torch.equal(part, whole[-20:])
    assert sum(counts) == count and max(counts) < (1 << 18) + 16


@given(cases())
def test_pieces_of_numpy_make_the_whole(case: Any) -> None:
    shape, box, piece = case
    whole = np.random.default_rng(5).standard_normal(shape)
    generator = np.random.default_rng(5)
    part = draw_box(
        lambda count: torch.from_numpy(generator.standard_normal(count)), shape, box, piece=piece
    )
    assert np.array_equal(part.numpy(), whole[tuple(slice(*ends) for ends in box)])

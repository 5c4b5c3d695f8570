"""Cutting and joining, beyond what the collectives' own tests show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from meshdist.errors import ShapeError
from meshdist.functional.linear_function import cut, get_dim, stack_blocks
from tests.functional.operation_cases import on_a_line


@given(st.integers(1, 4), st.integers(0, 2), st.booleans(), st.integers(0, 2))
def test_joined_undoes_cut(size: int, dim: int, tiled: bool, rows: int) -> None:
    shape = [2, 3, 1]
    shape[dim] = size * rows if tiled else size
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)

    def body(group: Any) -> Any:
        blocks = cut(x, dim, group, "a collective", "dim", tiled=tiled)
        assert blocks.shape[0] == size
        for place in range(size):
            own = x.narrow(dim, place * (rows if tiled else 1), rows if tiled else 1)
            assert torch.equal(blocks[place], own if tiled else own.squeeze(dim))
        return torch.equal(stack_blocks(blocks, dim, tiled=tiled), x)

    assert on_a_line(body, size) == [True] * size


@pytest.mark.parametrize(("given_dim", "found"), [(0, 0), (2, 2), (-1, 2), (-3, 0)])
def test_dims_count_from_both_ends(given_dim: int, found: int) -> None:
    assert get_dim(given_dim, 3, "dim", "a collective") == found


@pytest.mark.parametrize("given_dim", [3, -4])
def test_a_dim_that_is_not_there(given_dim: int) -> None:
    with pytest.raises(
        ShapeError,
        match=f"a collective: dim={given_dim} is out of range for a tensor of 3 dimensions",
    ):
        get_dim(given_dim, 3, "dim", "a collective")

"""The spec that a tensor carries: written and read back, and dropped where it no longer holds."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, strategies as st

from meshdist.annotations.axis_types import type_of
from meshdist.annotations.tensor_specs import dims_text, find_spec, mark_spec
from meshdist.mesh.partition_spec import P


@given(st.data())
def test_marked_then_found(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 3))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    kinds: list[set[str]] = [set(), set(), set()]
    for axis in data.draw(st.permutations(["dp", "tp", "ep", "cp"])):
        place = data.draw(st.integers(0, ndim + 2))
        if place < ndim:
            dims[place].append(axis)
        else:
            kinds[place - ndim].add(axis)
    spec = P(*map(tuple, dims), unreduced=kinds[0], reduced=kinds[1])
    x = torch.empty([data.draw(st.integers(0, 3)) for _ in range(ndim)])
    assert find_spec(x) is None
    assert mark_spec(x, spec) is x
    assert find_spec(x) == spec
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    assert find_spec(torch.load(buffer, weights_only=True)) == spec


def test_dims_without_an_entry_are_not_cut() -> None:
    x = mark_spec(torch.empty(3, 4), P("dp"))
    assert find_spec(x) == P("dp", None)
    assert type_of(x) == "V:dp"
    assert dims_text((3, 4), P("dp")) == "3@dp, 4"
    assert dims_text((), P()) == ""


@pytest.mark.parametrize("shape", [(4, 3), (12,), (3, 4, 1)])
def test_a_tensor_of_another_shape_carries_none(shape: tuple[int, ...]) -> None:
    x = mark_spec(torch.empty(3, 4), P("dp"))
    x.data = torch.empty(shape)
    assert find_spec(x) is None


def test_results_carry_none() -> None:
    x = mark_spec(torch.empty(3, 4), P("dp"))
    assert find_spec(x + 1) is None
    assert find_spec(x.clone()) is None
    assert find_spec(x) == P("dp", None)

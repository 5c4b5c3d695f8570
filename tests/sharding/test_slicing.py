"""Slices of shards against NumPy's slices of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from meshdist.errors import ArgumentError, KindError, LengthError
from meshdist.mesh.placement import DimSplit
from meshdist.sharding.array_methods import slice_shard


@st.composite
def cases(draw: Any) -> tuple[tuple[DimSplit, ...], Any]:
    """Dims, the first two of which may be cut, and an index."""
    dims = []
    for axes in ((0,), (1, 2), ()):
        size = draw(st.integers(0, 9))
        if not axes or draw(st.booleans()):
            dims.append(DimSplit(size))
            continue
        parts = (3,) if axes == (0,) else (2, 2)
        cells = None
        if draw(st.booleans()):
            count = int(np.prod(parts))
            cuts = sorted(
                draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1))
            )
            cells = tuple(np.diff([0, *cuts, size]).tolist())
        dims.append(DimSplit(size, axes, parts, cells))
    index: list[Any] = []
    for split in dims[: draw(st.integers(0, 3))]:
        ends = st.none() | st.integers(-11, 11)
        step = st.none() | st.integers(1, 4)
        part: Any = slice(draw(ends), draw(ends), draw(step))
        if not split.axes and split.size and draw(st.booleans()):
            part = draw(st.integers(-split.size, split.size - 1))
        index.append(part)
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), None)
    if draw(st.booleans()) or len(index) < 2:
        dots = draw(st.integers(0, len(index)))
        if all(one is None for one in index[dots:]):
            index.insert(dots, ...)
    return tuple(dims), tuple(index)


@given(cases())
def test_ranks_keep_their_parts_of_the_slice(case: tuple[tuple[DimSplit, ...], Any]) -> None:
    dims, index = case
    shape = tuple(split.size for split in dims)
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    expected = whole[index]
    found = np.full(expected.shape, -1)
    for coordinate in np.ndindex(3, 2, 2):
        box = tuple(split.interval(coordinate) for split in dims)
        slicing = slice_shard(index, dims, box)
        assert tuple(split.size for split in slicing.dims) == expected.shape
        part = whole[tuple(slice(*ends) for ends in box)][slicing.local]
        target = tuple(slice(*split.interval(coordinate)) for split in slicing.dims)
        assert found[target].shape == part.shape
        found[target] = part
    assert np.array_equal(found, expected)


ROWS = (DimSplit(8, (0,), (2,)), DimSplit(3))
BOX = ((4, 8), (0, 3))


@pytest.mark.parametrize(
    ("index", "kind", "words"),
    [
        (3, ArgumentError, ["dim 0 is sharded", "x[3:4]"]),
        ((-1, slice(1, None)), ArgumentError, ["element 7 of dim 0", "x[7:8, 1:]"]),
        ((None, 3), ArgumentError, ["x[None, 3:4]"]),
        (
            slice(None, None, -1),
            ArgumentError,
            ["cannot be reversed", "a positive step", "step -1"],
        ),
        ((slice(None), 3), LengthError, ["index 3 is outside dim 1 of size 3", "from -3 to 2"]),
        ((0, 0, 0), LengthError, ["at most 2", "3 slices and numbers"]),
        ((..., ...), LengthError, ["`...` 2 times"]),
        ([0, 1], KindError, ["cannot be indexed with a list", "x.local[...]", "x.full()[...]"]),
        (np.arange(3), KindError, ["cannot be indexed with an ndarray"]),
        (True, KindError, ["cannot be indexed with a bool"]),
        (1.5, KindError, ["cannot be indexed with a float"]),
    ],
)
def test_what_is_rejected(index: Any, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        slice_shard(index, ROWS, BOX)
    for word in words:
        assert word in str(caught.value)


def test_a_number_in_numpy_or_torch_is_a_number() -> None:
    assert slice_shard((slice(None), np.int64(2)), ROWS, BOX).local == (slice(0, 4, 1), 2)


def test_numbers_outside_a_dim_end_iteration() -> None:
    with pytest.raises(IndexError):
        slice_shard((slice(None), 5), ROWS, BOX)

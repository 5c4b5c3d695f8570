"""How dims are cut: a loop over coordinates is the oracle."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
from hypothesis import given, strategies as st

from meshdist.mesh.placement import (
    DimSplit,
    Placement,
    balanced_boundaries,
    index_along,
    index_of,
    split_dim,
    volume,
)

SIZES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def parts_of(indices: list[int], axis_sizes: tuple[int, ...]) -> list[list[int]]:
    """Cut a list axis after axis, larger parts first: one list for each cell, in linear order."""
    if not axis_sizes:
        return [indices]
    count = axis_sizes[0]
    short, larger = divmod(len(indices), count)
    cut, at = [], 0
    for part in range(count):
        size = short + (part < larger)
        cut += parts_of(indices[at : at + size], axis_sizes[1:])
        at += size
    return cut


@given(st.integers(0, 40), SIZES)
def test_a_balanced_split(size: int, axis_sizes: tuple[int, ...]) -> None:
    axes = tuple(range(len(axis_sizes)))
    split = DimSplit(size, axes, axis_sizes)
    blocks = parts_of(list(range(size)), axis_sizes)
    assert split.num_blocks == len(blocks)
    assert split.boundaries == tuple(itertools.accumulate(map(len, blocks), initial=0))
    assert split.boundary_array.tolist() == list(split.boundaries)
    assert split.is_even == (len({len(cell) for cell in blocks}) == 1)
    for cell, at in enumerate(itertools.product(*map(range, axis_sizes))):
        assert split.block_at(at) == cell
        assert list(range(*split.interval(at))) == blocks[cell]


@given(st.lists(st.integers(0, 6), min_size=6, max_size=6).map(tuple))
def test_a_split_of_given_sizes(sizes: tuple[int, ...]) -> None:
    split = DimSplit(sum(sizes), (2, 0), (2, 3), sizes)
    balanced = list(map(len, parts_of(list(range(sum(sizes))), (2, 3))))
    assert (split.block_sizes is None) == (list(sizes) == balanced)
    for cell, (major, minor) in enumerate(itertools.product(range(2), range(3))):
        assert split.interval((minor, 9, major)) == (sum(sizes[:cell]), sum(sizes[: cell + 1]))
    assert split.is_even == (len(set(sizes)) == 1)


def test_thousands_of_cells() -> None:
    sizes = (16, 16, 16)
    split = DimSplit(100_003, (0, 1, 2), sizes)
    assert split.boundaries == tuple(balanced_boundaries(100_003, sizes))
    assert np.array_equal(split.boundary_array, split.boundaries)
    assert not split.boundary_array.flags.writeable
    assert all(
        split.interval(at) == (split.boundaries[cell], split.boundaries[cell + 1])
        for cell, at in enumerate(itertools.product(range(16), repeat=3))
    )
    even = DimSplit(8192, (0, 1, 2), sizes)
    assert even.boundaries == tuple(range(0, 8193, 2))
    assert DimSplit(0, (0, 1, 2), sizes).boundaries == (0,) * 4097


def test_equality_of_splits() -> None:
    assert (
        DimSplit(5, (0,), (2,))
        == DimSplit(5, (0,), (2,), (3, 2))
        != DimSplit(5, (0,), (2,), (2, 3))
    )
    assert hash(DimSplit(5, (0,), (2,))) == hash(DimSplit(5, (0,), (2,), (3, 2)))
    assert DimSplit(5, (0,), (2,)) != DimSplit(5, (1,), (2,))
    assert DimSplit(12, (0, 1), (2, 3)) != DimSplit(12, (0, 1), (3, 2))
    assert split_dim(5, (0,), (2,)) is split_dim(5, (0,), (2,))
    assert DimSplit(5) != 5


@given(st.data())
def test_boxes_tile_the_whole(data: st.DataObject) -> None:
    mesh_sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    axes = data.draw(st.permutations(range(len(mesh_sizes))))
    ndim = data.draw(st.integers(1, 3))
    by_dim: list[list[int]] = [[] for _ in range(ndim)]
    others = []
    for axis in axes:
        place = data.draw(st.integers(0, ndim + 1))
        (by_dim[place] if place < ndim else others).append(axis)
    unreduced = tuple(sorted(axis for axis in others if data.draw(st.booleans())))
    shape = tuple(data.draw(st.integers(0, 7)) for _ in range(ndim))
    dims = tuple(
        DimSplit(size, tuple(cut), tuple(mesh_sizes[axis] for axis in cut))
        for size, cut in zip(shape, by_dim, strict=True)
    )
    placement = Placement(mesh_sizes, shape, dims, unreduced)
    count = np.zeros(shape, dtype=int)
    replicas: dict[tuple[object, ...], list[int]] = {}
    for at in itertools.product(*map(range, mesh_sizes)):
        box = placement.box(at)
        assert placement.local_shape(at) == tuple(stop - start for start, stop in box)
        assert volume(box) == math.prod(placement.local_shape(at))
        count[index_of(box)] += 1
        cell = tuple(at[axis] for axis in (*placement.cut_axes, *unreduced))
        replica = index_along(placement.free_axes, mesh_sizes, at)
        replicas.setdefault(cell, []).append(replica)
    copies = math.prod(mesh_sizes[axis] for axis in others)
    assert (count == copies).all()
    free = math.prod(mesh_sizes[axis] for axis in placement.free_axes)
    assert all(sorted(found) == list(range(free)) for found in replicas.values())
    assert {*placement.free_axes, *placement.cut_axes, *unreduced} == set(range(len(mesh_sizes)))


def test_a_placement_is_a_value() -> None:
    rows = Placement((2, 4), (10,), (DimSplit(10, (1,), (4,)),), (0,))
    same = Placement((2, 4), (10,), (DimSplit(10, (1,), (4,), (3, 3, 2, 2)),), (0,))
    assert rows == same
    assert hash(rows) == hash(same)
    assert rows != rows.transposed() == Placement((2, 4), (10,), rows.dims, (), (0,))
    assert rows.transposed().transposed() == rows
    assert rows.transposed().free_axes == (0,)
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert rows != "rows"


def test_dims_in_another_order() -> None:
    cut = Placement((2, 4), (10, 6, 3), (DimSplit(10, (1,), (4,)), DimSplit(6), DimSplit(3)), (0,))
    moved = cut.permuted((1, 2, 0))
    assert moved.shape == (6, 3, 10)
    assert moved.box((1, 3)) == (*cut.box((1, 3))[1:], cut.box((1, 3))[0])
    assert moved.unreduced == (0,)
    assert moved.permuted((2, 0, 1)) == cut


def test_values_that_become_unreduced_are_kept_at_coordinate_0() -> None:
    partial_sums = Placement((2, 2, 2), (), (), (0, 2))
    kept = [at for at in itertools.product(range(2), repeat=3) if partial_sums.has_values(at)]
    assert kept == [(0, 0, 0), (0, 1, 0)]

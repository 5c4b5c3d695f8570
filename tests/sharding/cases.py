"""Placements drawn at random, values on them, and the oracle: loops over coordinates that slice."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

from meshdist.mesh.placement import DimSplit, Placement, split_dim
from tests.sharding.interpreter import Array, Coordinate, coordinates, index_of

MESHES = (
    *(
        (1,),
        (2,),
        (3,),
        (4,),
        (2, 2),
        (2, 4),
        (4, 2),
        (3, 2),
        (4, 4),
        (2, 8),
        (8, 2),
        (16,),
        (1, 3),
    ),
    *((2, 2, 2), (2, 3, 2), (2, 2, 4), (4, 1, 2), (1, 2, 1)),
)
SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def placed(
    mesh: tuple[int, ...],
    shape: tuple[int, ...],
    *axes: tuple[int, ...],
    unreduced: tuple[int, ...] = (),
    reduced: tuple[int, ...] = (),
) -> Placement:
    """A balanced placement: for each dim the axes that cut it."""
    dims = [
        split_dim(size, cut, tuple(mesh[axis] for axis in cut))
        for size, cut in zip(shape, axes, strict=True)
    ]
    return Placement(mesh, shape, tuple(dims), unreduced, reduced)


@st.composite
def placements(
    draw: Any, mesh: tuple[int, ...], shape: tuple[int, ...], *, kinds: str, uneven: bool
) -> Placement:
    """Any placement of an array: each axis cuts a dim, or is free, or of one of ``kinds``."""
    order = draw(st.permutations(range(len(mesh))))
    places = [*range(len(shape)), "", *kinds]
    roles = [draw(st.sampled_from(places)) for _ in order]
    dims = []
    for dim, size in enumerate(shape):
        axes = tuple(axis for axis, role in zip(order, roles, strict=True) if role == dim)
        sizes = tuple(mesh[axis] for axis in axes)
        cells = None
        if uneven and axes and draw(st.booleans()):
            count = math.prod(sizes) - 1
            inner = draw(st.lists(st.integers(0, size), min_size=count, max_size=count))
            cells = tuple(np.diff([0, *sorted(inner), size]).tolist())
        dims.append(DimSplit(size, axes, sizes, cells))
    found = dict(zip(order, roles, strict=True))
    unreduced, reduced = (
        tuple(sorted(axis for axis in order if found[axis] == kind)) for kind in "UR"
    )
    return Placement(mesh, shape, tuple(dims), unreduced, reduced)


@st.composite
def pairs(
    draw: Any, *, kinds: tuple[str, str] = ("UR", "UR"), uneven: bool = True, most_dims: int = 4
) -> tuple[Placement, Placement]:
    """Two placements of one array on one mesh."""
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), max_size=most_dims)))
    source, target = (draw(placements(mesh, shape, kinds=kind, uneven=uneven)) for kind in kinds)
    return source, target


def whole_array(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Integers, so that sums are exact in any order."""
    return np.random.default_rng(seed).integers(-1000, 1000, shape)


def shards(placement: Placement, whole: Array) -> dict[Coordinate, Array]:
    """What each rank holds; along unreduced axes partial sums of the whole, all but one drawn."""
    sizes, axes = placement.mesh_sizes, placement.unreduced
    partial_sums: dict[Coordinate, Array] = {}
    for number, at in enumerate(product(*(range(sizes[axis]) for axis in axes))):
        partial_sums[at] = whole_array(whole.shape, 1000 + number)
    last = tuple(sizes[axis] - 1 for axis in axes)
    partial_sums[last] = whole - sum(part for at, part in partial_sums.items() if at != last)
    return {
        rank: partial_sums[tuple(rank[axis] for axis in axes)][index_of(placement.box(rank))]
        for rank in coordinates(sizes)
    }


def assert_lies(placement: Placement, whole: Array, held: dict[Coordinate, Array]) -> None:
    """The arrays of all ranks are the shards of ``whole``, or partial sums of them."""
    sums: dict[Coordinate, Any] = {}
    for rank, local in held.items():
        assert local.shape == placement.local_shape(rank)
        group = tuple(-1 if a in placement.unreduced else i for a, i in enumerate(rank))
        sums[group] = sums.get(group, 0) + local
    for rank in held:
        group = tuple(-1 if a in placement.unreduced else i for a, i in enumerate(rank))
        assert np.array_equal(sums[group], whole[index_of(placement.box(rank))])


# -- who ends up with what, by loops -------------------------------------------------------------


def summed_axes(source: Placement, target: Placement) -> list[int]:
    return [
        axis
        for axis in source.unreduced
        if axis not in target.unreduced and source.mesh_sizes[axis] > 1
    ]


def mask(placement: Placement, rank: Coordinate) -> Array:
    """Which elements of the whole lie on a rank."""
    found = np.zeros(placement.shape, bool)
    found[index_of(placement.box(rank))] = True
    return found


def destined(source: Placement, target: Placement, rank: Coordinate) -> Array:
    """Which elements shall end on a rank with their value; elsewhere it has zeros.

    Where the value becomes unreduced, a free axis keeps it at coordinate 0, and a shard stays at
    the coordinate where it lies.
    """
    found = mask(target, rank)
    for axis in target.unreduced:
        if axis in source.free_axes:
            found &= rank[axis] == 0
        elif axis in source.cut_axes:
            there = np.zeros(source.shape, bool)
            for other in coordinates(source.mesh_sizes):
                if other[axis] == rank[axis]:
                    there |= mask(source, other)
            found &= there
    return found


def lacking(source: Placement, target: Placement, rank: Coordinate) -> Array:
    """Which elements are destined for a rank and do not lie there."""
    return destined(source, target, rank) & ~mask(source, rank)


def fewest_received(source: Placement, target: Placement) -> int:
    """The bound: per element partial sums + destinations - 1, less 1 if a destination holds one.

    Without a sum: the elements that each rank lacks.
    """
    sizes = source.mesh_sizes
    if not summed_axes(source, target):
        ranks = coordinates(sizes)
        return sum(int(lacking(source, target, rank).sum()) for rank in ranks)
    partial_sums = math.prod(sizes[axis] for axis in summed_axes(source, target))
    kept = [axis for axis in target.unreduced if axis in source.unreduced]
    groups: dict[Coordinate, list[Coordinate]] = {}
    for rank in coordinates(sizes):
        groups.setdefault(tuple(rank[axis] for axis in kept), []).append(rank)
    total = 0
    for ranks in groups.values():
        destinations = np.zeros(source.shape, int)
        is_held = np.zeros(source.shape, bool)
        for rank in ranks:
            here = destined(source, target, rank)
            destinations += here
            is_held |= here & mask(source, rank)
        least = partial_sums + destinations - 1 - is_held
        total += int(least[destinations > 0].sum())
    return total


def ends_on_one_rank(source: Placement, target: Placement) -> bool:
    axes = range(len(source.mesh_sizes))
    placed_axes = {*target.cut_axes, *target.unreduced}
    return all(axis in placed_axes for axis in axes if source.mesh_sizes[axis] > 1)


def extends_or_shortens(source: Placement, target: Placement) -> bool:
    """Whether each dim's axes extend or shorten those of the source, in balanced cells, none empty.

    Where cells are empty, 8 ranks were seen to receive 11 elements in place of 10.
    """
    for here, there in zip(source.dims, target.dims, strict=True):
        ours, theirs = (
            [axis for axis, size in zip(dim.axes, dim.axis_sizes, strict=True) if size > 1]
            for dim in (here, there)
        )
        common = min(len(ours), len(theirs))
        if ours[:common] != theirs[:common] or here.block_sizes or there.block_sizes:
            return False
        if here.size < max(math.prod(here.axis_sizes), math.prod(there.axis_sizes)):
            return False
    return True

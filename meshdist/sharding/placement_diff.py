"""Find the axes that gather, slice, sum, move a dim or divide blocks between placements.

A ``Change`` is the same for all ranks. It counts exactly the elements that all ranks receive, from
interval overlaps. In product form, a collective moves equal parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..mesh.placement import DimSplit, Placement, split_dim


@dataclass(frozen=True)
class DimChange:
    """A dim's cut before and after a change.

    Args:
        num_common: the number of major axes that cut both at the same boundaries.
        removed: the source's other axes, which cut the target differently or not at all.
        new: the target's other axes, which cut the source differently or not at all.
    """

    source: DimSplit
    target: DimSplit
    num_common: int
    removed: tuple[int, ...]
    new: tuple[int, ...]

    @cached_property
    def is_source_even(self) -> bool:
        """Return whether the source's blocks have equal size in each block of the common axes."""
        return _is_even_beyond(self.source, self.num_common)

    @cached_property
    def is_target_even(self) -> bool:
        """Return whether the target's blocks have equal size in each block of the common axes."""
        return _is_even_beyond(self.target, self.num_common)


@dataclass(frozen=True)
class Change:
    """The change between two placements over the same axes, as one exchange."""

    # Along an axis where the target is unreduced, a rank receives only from ranks with its own
    # coordinate: other partial sums of one sum, or padded shards if the axis cuts the source.
    source: Placement
    target: Placement
    dims: tuple[DimChange, ...]

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The axes that are unreduced in the source but not in the target."""
        return tuple(axis for axis in self.source.unreduced if axis not in self.target.unreduced)

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """The axes that cut the source and are unreduced in the target."""
        return tuple(axis for axis in self.target.unreduced if axis in self.source.cut_axes)

    @cached_property
    def dividing(self) -> tuple[int, ...]:
        """The axes that newly cut a dim, and whose replicas each send a part."""
        # They cut a dim of the target that other axes cut in the source. All ranks along them hold
        # each box: if one rank sent it all, the others would idle.
        free = self.source.free_axes
        return tuple(sorted(a for dim in self.dims if dim.removed for a in dim.new if a in free))

    @cached_property
    def group(self) -> tuple[int, ...]:
        """The axes along which a sender can differ from its receiver, in mesh order."""
        lost = {axis for dim in self.dims for axis in dim.removed} - set(self.padded)
        return tuple(sorted(lost | set(self.dividing) | set(self.summed)))

    # ---------------------------------------------------------------- product form

    @cached_property
    def moving(self) -> tuple[int, ...]:
        """The axes that leave one dim and cut another, in mesh order."""
        new = {axis for dim in self.dims for axis in dim.new}
        return tuple(sorted(axis for dim in self.dims for axis in dim.removed if axis in new))

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        """The axes that cut the source, do not cut the target and are not padded."""
        kept = {*self.target.cut_axes, *self.padded}
        return tuple(sorted(a for dim in self.dims for a in dim.removed if a not in kept))

    @cached_property
    def has_product_form(self) -> bool:
        """Return whether members exchange equal parts, as in collectives like all-to-all."""
        # Each dim's axes then extend or shorten the source's, in equal blocks. A padded dim loses
        # only padded axes.
        equal = {*self.moving, *self.summed}
        for dim in self.dims:
            removed, new = dim.removed, dim.new
            padded = [axis for axis in removed if axis in self.padded]
            if (removed and new) or (padded and len(padded) < len(removed)):
                return False
            if removed and not padded and not dim.is_source_even:
                return False
            if not equal.isdisjoint(new) and not dim.is_target_even:
                return False
        if not self.summed:
            return True
        cut = {axis for dim in self.dims for axis in dim.new}
        return equal <= cut and not any(dim.removed for dim in self.dims)

    # ---------------------------------------------------------------- exact price

    @cached_property
    def num_received(self) -> int:
        """The number of elements that all ranks receive together."""
        # Each rank receives its target part once per partial sum, except the elements it holds.
        sizes, target = self.source.mesh_sizes, self.target
        once = {*target.cut_axes, *self.padded}
        wanted = math.prod(target.shape)
        wanted *= math.prod(size for axis, size in enumerate(sizes) if axis not in once)
        partial_sums = math.prod(sizes[axis] for axis in self.summed)
        return wanted * partial_sums - self.num_held

    @cached_property
    def num_held(self) -> int:
        """The number of target elements that ranks hold already, in total."""
        sizes = self.source.mesh_sizes
        held, table = 1, None
        counted: set[int] = set()
        moving = frozenset(self.moving)
        for dim in self.dims:
            counted.update(dim.source.axes, dim.target.axes)
            if not (dim.removed and dim.new) and moving.isdisjoint(dim.removed + dim.new):
                held *= dim.source.size  # One block contains the other.
            else:
                overlaps = overlap_table(dim.source, dim.target, len(sizes))
                table = overlaps if table is None else table * overlaps
        if table is not None:
            held *= int(table.sum())
        return held * math.prod(size for axis, size in enumerate(sizes) if axis not in counted)


@lru_cache(maxsize=4096)
def change_between(source: Placement, target: Placement) -> Change:
    """Return the ``Change`` between two ``bare`` placements over the same axes."""
    dims = []
    for here, there in zip(source.dims, target.dims, strict=True):
        common = _num_common(here, there)
        dims.append(DimChange(here, there, common, here.axes[common:], there.axes[common:]))
    return Change(source, target, tuple(dims))


def bare(placement: Placement) -> Placement:
    """Return ``placement`` without cuts along axes of size 1 and without reduced axes."""
    sizes = placement.mesh_sizes
    if 1 not in sizes and not placement.reduced:
        return placement
    return Placement(
        sizes,
        placement.shape,
        tuple(_without_size_1(dim) for dim in placement.dims),
        tuple(axis for axis in placement.unreduced if sizes[axis] > 1),
    )


def extended(split: DimSplit, axes: tuple[int, ...], axis_sizes: tuple[int, ...]) -> DimSplit:
    """Return ``split`` with each block cut further, balanced, along more axes."""
    if not axes:
        return split
    blocks = None
    if split.block_sizes is not None:
        within = (split_dim(size, axes, axis_sizes).boundary_array for size in split.block_sizes)
        blocks = tuple(np.concatenate([np.diff(cut) for cut in within]).tolist())
    return split_dim(split.size, split.axes + axes, split.axis_sizes + axis_sizes, blocks)


def dim_of_largest_blocks(dims: Sequence[DimSplit]) -> int:
    return max(range(len(dims)), key=lambda number: dims[number].size / dims[number].num_blocks)


def _without_size_1(dim: DimSplit) -> DimSplit:
    if 1 not in dim.axis_sizes:
        return dim
    kept = [index for index, size in enumerate(dim.axis_sizes) if size > 1]
    axes, sizes = tuple(dim.axes[i] for i in kept), tuple(dim.axis_sizes[i] for i in kept)
    return split_dim(dim.size, axes, sizes, dim.block_sizes)


def _num_common(source: DimSplit, target: DimSplit) -> int:
    """Return the length of the longest common prefix of axes that cuts both dims equally."""
    if source == target:
        return len(source.axes)
    count = 0
    for before, after in zip(source.axes, target.axes, strict=False):
        if before != after:
            break
        count += 1
    if source.block_sizes is None and target.block_sizes is None:
        return count
    while count and not np.array_equal(_common_cut(source, count), _common_cut(target, count)):
        count -= 1
    return count


def _common_cut(split: DimSplit, num_axes: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the boundaries of the blocks that only the first ``num_axes`` axes make."""
    return split.boundary_array[:: math.prod(split.axis_sizes[num_axes:])]


def _is_even_beyond(split: DimSplit, num_axes: int) -> bool:
    if split.is_even:
        return True
    sizes = np.diff(split.boundary_array).reshape(math.prod(split.axis_sizes[:num_axes]), -1)
    return bool((sizes == sizes[:, :1]).all())


@lru_cache(maxsize=4096)
def overlap_table(
    source: DimSplit, target: DimSplit, ndim: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return how many elements a rank's source and target blocks share, by mesh coordinate."""
    (start, stop), (low, high) = _block_tables(source, ndim), _block_tables(target, ndim)
    overlaps: np.ndarray[Any, np.dtype[np.int64]] = np.minimum(stop, high)
    overlaps = overlaps - np.maximum(start, low)
    return overlaps.clip(min=0)


def _block_tables(
    split: DimSplit, ndim: int
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Return each coordinate's block start and stop, as tables with a dim per mesh axis."""
    bounds = split.boundary_array
    order = sorted(range(len(split.axes)), key=split.axes.__getitem__)
    shape = [1] * ndim
    for axis, size in zip(split.axes, split.axis_sizes, strict=True):
        shape[axis] = size
    starts = bounds[:-1].reshape(split.axis_sizes).transpose(order).reshape(shape)
    stops = bounds[1:].reshape(split.axis_sizes).transpose(order).reshape(shape)
    return starts, stops

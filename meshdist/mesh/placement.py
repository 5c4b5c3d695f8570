"""Describe how mesh axes shard the dims of an array, as integers.

A ``DimSplit`` cuts a dim into a block for each combination of coordinates along its axes, major to
minor. A ``Placement`` holds a ``DimSplit`` per dim of a global array, and the axes along which
ranks hold partial sums. Axes are indices into a mesh's sizes.

Worked example: a dim of size 10 is cut along axis 0, of size 2, then along axis 1, of size 3.

    element     0   1   2   3   4   5   6   7   8   9
    axis 0    |---------- 0 ------|---------- 1 ------|      10 = 5 + 5
    axis 1    |-- 0 --|-- 1 --| 2 |-- 0 --|-- 1 --| 2 |       5 = 2 + 2 + 1, twice
    block         0       1     2     3       4     5

``balanced_boundaries`` cuts all blocks, axis after axis. ``interval`` walks to one block alone. At
coordinate (1, 2):

    along axis 0    divmod(10, 2) = 5, 0    the start moves by 1 * 5 to 5, the size is 5
    along axis 1    divmod(5, 3)  = 1, 2    2 larger parts come before: the start moves by 2 * 1 + 2
                                            to 9, and part 2 is a smaller part: the size is 1

    >>> split_dim(10, (0, 1), (2, 3)).boundaries
    (0, 2, 4, 5, 7, 9, 10)
    >>> split_dim(10, (0, 1), (2, 3)).interval((1, 2))
    (9, 10)

Were axis 1 the major axis, 10 = 4 + 3 + 3 would be cut. A dim of size 3 has empty blocks.

    >>> split_dim(10, (1, 0), (3, 2)).boundaries, split_dim(3, (0, 1), (2, 3)).boundaries
    ((0, 2, 4, 6, 7, 9, 10), (0, 1, 2, 2, 3, 3, 3))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]
"""(start, stop) per dim, in the whole array."""

# For few blocks, plain Python is faster than NumPy.
_FEW_BLOCKS = 64


@dataclass(frozen=True, eq=False)
class _CacheKey:
    """Base of cache keys: computes the hash once, compares identity first."""

    def _keep_key(self, *key: Any) -> None:
        vars(self).update(_key=key, _hash=hash(key))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return bool(vars(self)["_key"] == vars(other)["_key"])

    def __hash__(self) -> int:
        return int(vars(self)["_hash"])

    def __reduce__(self) -> tuple[Any, ...]:  # Another process has other hashes.
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, eq=False)
class DimSplit(_CacheKey):
    """A dim of known size, cut into blocks along axes of the mesh.

    Args:
        axes: indices of the mesh's axes, major to minor; () for an uncut dim.
        block_sizes: the size of each block, the last axis the fastest. None cuts axis after axis
            into balanced parts: sizes differ by at most 1, larger parts first, empty parts allowed.

    Example:
        >>> DimSplit(10, (0, 1), (2, 2)).boundaries
        (0, 3, 5, 8, 10)
        >>> DimSplit(10, (0,), (2,), (7, 3)).interval((1, 0))
        (7, 10)
    """

    size: int
    axes: tuple[int, ...] = ()
    axis_sizes: tuple[int, ...] = ()
    block_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.block_sizes is not None:
            balanced = balanced_boundaries(self.size, self.axis_sizes)
            if tuple(accumulate(self.block_sizes, initial=0)) == tuple(balanced):
                vars(self)["block_sizes"] = None  # Equal splits must be equal keys.
        self._keep_key(self.size, self.axes, self.axis_sizes, self.block_sizes)

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks: 1 for an uncut dim."""
        return math.prod(self.axis_sizes)

    @cached_property
    def is_even(self) -> bool:
        """Return whether all blocks have one size."""
        return self.block_sizes is None and self.size % self.num_blocks == 0

    @cached_property
    def boundaries(self) -> tuple[int, ...]:
        """The starts of all blocks, and the size of the dim."""
        if self.block_sizes is not None:
            return tuple(accumulate(self.block_sizes, initial=0))
        return tuple(balanced_boundaries(self.size, self.axis_sizes))

    @cached_property
    def boundary_array(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The ``boundaries`` as a read-only array, fast for many blocks."""
        if self.block_sizes is None and self.num_blocks > _FEW_BLOCKS:
            array = _balanced_array(self.size, self.axis_sizes)
        else:
            array = np.array(self.boundaries, dtype=np.int64)
        array.flags.writeable = False
        return array

    def block_at(self, coordinate: Sequence[int]) -> int:
        """Return the linear index of the block at a mesh coordinate."""
        block = 0
        for axis, size in zip(self.axes, self.axis_sizes, strict=True):
            block = block * size + coordinate[axis]
        return block

    def interval(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return (start, stop) of the block at a mesh coordinate."""
        if self.block_sizes is not None:
            block = self.block_at(coordinate)
            return self.boundaries[block], self.boundaries[block + 1]
        start, size = 0, self.size
        for axis, parts in zip(self.axes, self.axis_sizes, strict=True):
            part = coordinate[axis]
            size, larger = divmod(size, parts)
            start += part * size + min(part, larger)
            size += part < larger
        return start, start + size


@lru_cache(maxsize=4096)
def split_dim(
    size: int,
    axes: tuple[int, ...],
    axis_sizes: tuple[int, ...],
    block_sizes: tuple[int, ...] | None = None,
) -> DimSplit:
    """Return a cached ``DimSplit`` of these arguments."""
    return DimSplit(size, axes, axis_sizes, block_sizes)


def balanced_boundaries(size: int, axis_sizes: tuple[int, ...]) -> Sequence[int]:
    """Return the block boundaries of a balanced split.

    Example:
        >>> list(balanced_boundaries(5, (2, 2)))
        [0, 2, 3, 4, 5]
    """
    num_blocks = math.prod(axis_sizes)
    if size and size % num_blocks == 0:
        return range(0, size + 1, size // num_blocks)
    if num_blocks > _FEW_BLOCKS:
        listed: list[int] = _balanced_array(size, axis_sizes).tolist()
        return listed
    sizes = [size]
    for parts in axis_sizes:
        cut = []
        for part in sizes:
            smaller, larger = divmod(part, parts)
            cut += [smaller + 1] * larger + [smaller] * (parts - larger)
        sizes = cut
    return list(accumulate(sizes, initial=0))


def _balanced_array(size: int, axis_sizes: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int64]]:
    sizes = np.array([size], dtype=np.int64)
    for parts in axis_sizes:
        smaller, larger = np.divmod(sizes, parts)
        sizes = (smaller[:, None] + (np.arange(parts) < larger[:, None])).ravel()
    boundaries = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=boundaries[1:])
    return boundaries


@dataclass(frozen=True, eq=False)
class Placement(_CacheKey):
    """The part or partial sum of an array of known shape at each coordinate of a mesh.

    Args:
        unreduced: axes along which each rank holds a partial sum, sorted.
        reduced: axes along which values are equal and the gradient is unreduced, sorted.

    Example:
        >>> rows = Placement((2, 4), (10, 8), (DimSplit(10, (1,), (4,)), DimSplit(8)), (0,))
        >>> rows.box((0, 1)), rows.local_shape((0, 3)), rows.free_axes
        (((3, 6), (0, 8)), (2, 8), ())
    """

    mesh_sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dims: tuple[DimSplit, ...]
    unreduced: tuple[int, ...] = ()
    reduced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._keep_key(self.mesh_sizes, self.dims, self.unreduced, self.reduced)

    @cached_property
    def cut_axes(self) -> tuple[int, ...]:
        """The axes that cut dims, in dim order, major to minor."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @cached_property
    def free_axes(self) -> tuple[int, ...]:
        """The axes along which values are equal: they neither cut a dim nor are unreduced."""
        used = {*self.cut_axes, *self.unreduced}
        return tuple(axis for axis in range(len(self.mesh_sizes)) if axis not in used)

    def box(self, coordinate: Sequence[int]) -> Box:
        """Return the part at ``coordinate``: (start, stop) per dim."""
        return tuple([dim.interval(coordinate) for dim in self.dims])

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        return shape_of(self.box(coordinate))

    def has_values(self, coordinate: Sequence[int]) -> bool:
        """Return whether an unreduced array's values go to ``coordinate``'s rank, not zeros."""
        return not any(coordinate[axis] for axis in self.unreduced)

    def transposed(self) -> Placement:
        """Return the cotangent's placement: unreduced and reduced are exchanged."""
        return Placement(self.mesh_sizes, self.shape, self.dims, self.reduced, self.unreduced)

    def permuted(self, order: Sequence[int]) -> Placement:
        """Return the placement with dim ``order[i]`` as dim i."""
        shape, dims = tuple(self.shape[i] for i in order), tuple(self.dims[i] for i in order)
        return Placement(self.mesh_sizes, shape, dims, self.unreduced, self.reduced)


def index_along(axes: Sequence[int], mesh_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
    """Return the linear index of a coordinate along axes, the last axis the fastest.

    Example:
        >>> index_along((0, 2), (2, 3, 4), (1, 0, 2))
        6
    """
    index = 0
    for axis in axes:
        index = index * mesh_sizes[axis] + coordinate[axis]
    return index


def volume(box: Box) -> int:
    """Return the number of elements in a box.

    Example:
        >>> volume(((2, 5), (0, 4)))
        12
    """
    return math.prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box.

    Example:
        >>> shape_of(((2, 5), (0, 4)))
        (3, 4)
    """
    return tuple([stop - start for start, stop in box])


def index_of(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in an array.

    Example:
        >>> np.arange(6).reshape(2, 3)[index_of(((0, 2), (1, 2)))].tolist()
        [[1], [4]]
    """
    return tuple([slice(start, stop) for start, stop in box])


def box_text(box: Box) -> str:
    """Return a box as a slice: ``[4:8, 0:4]``.

    Example:
        >>> box_text(((4, 8), (0, 4))), box_text(())
        ('[4:8, 0:4]', 'the scalar')
    """
    if not box:
        return "the scalar"
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"

"""Slice and sum one rank's shard of an array.

Slicing moves nothing. So a sharded dim can be sliced, which gives uneven shard sizes, but a single
element cannot be taken from it, because only one rank would hold it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arguments import find_integers
from ..arrays import Array
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import ArgumentError, DtypeError, KindError, LengthError
from ..mesh.placement import Box, DimSplit
from ..mesh.spec import NamedSharding, sharding_of


@dataclass(frozen=True)
class Slicing:
    """An index into this rank's shard for a global index, and the result's dims."""

    local: tuple[Any, ...]
    dims: tuple[DimSplit, ...]


def slice_shard(index: Any, dims: Sequence[DimSplit], box: Box) -> Slicing:
    """Return the index of the shard that covers ``box`` for an index of the global array.

    Args:
        index: slices, integers, ``...`` and None, or a tuple of them.

    Example:
        >>> dims = DimSplit(8, (0,), (2,)), DimSplit(3)
        >>> found = slice_shard((slice(1, 8), 2), dims, ((4, 8), (0, 3)))
        >>> found.local, found.dims[0].boundaries
        ((slice(0, 4, 1), 2), (0, 3, 7))
    """
    local: list[Any] = []
    result: list[DimSplit] = []
    parts = _parts_of_index(index, len(dims))
    at = 0
    for position, part in enumerate(parts):
        if part is None:
            local.append(None)
            result.append(DimSplit(1))
            continue
        split = dims[at]
        size = split.size
        if isinstance(part, slice):
            selected = range(size)[part]
            if not split.axes:
                local.append(part)
                result.append(DimSplit(len(selected)))
            else:
                if selected.step < 0:
                    raise _reversed_dim(part, at)
                begin, end = box[at]
                first, stop = _num_below(selected, np.asarray((begin, end))).tolist()
                own = slice(0, 0)  # relative to the shard, which starts at ``begin``
                if first < stop:
                    own = slice(
                        selected[first] - begin, selected[stop - 1] - begin + 1, selected.step
                    )
                local.append(own)
                sizes = np.diff(_num_below(selected, split.boundary_array)).tolist()
                result.append(DimSplit(len(selected), split.axes, split.axis_sizes, tuple(sizes)))
        else:
            if not -size <= part < size:
                raise LengthError(
                    f"index {part} is outside dim {at} of size {size}",
                    expected=f"a number from {-size} to {size - 1}" if size else "no number",
                )
            if split.axes:
                raise _element_of_sharded_dim(part % size, at, parts, position)
            local.append(part)
        at += 1
    return Slicing(tuple(local), tuple(result))


def _num_below(selected: range, positions: Any) -> Any:
    """Return how many elements of ``selected`` are below each of ``positions``."""
    return np.clip(-((selected.start - positions) // selected.step), 0, len(selected))


def _parts_of_index(index: Any, num_dims: int) -> list[Any]:
    """Return ``index`` as slices, ints and None, with "..." expanded; raise if it is invalid."""
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, (bool, np.bool_)) or getattr(part, "shape", ()) != ():
            raise _foreign_part(part)
        else:
            try:
                parts.append(operator.index(part))
            except TypeError:
                raise _foreign_part(part) from None
    num_taken = sum(part is not None and part is not Ellipsis for part in parts)
    num_dots = sum(part is Ellipsis for part in parts)
    if num_taken > num_dims or num_dots > 1:
        raise LengthError(
            f"an array of {num_dims} dims cannot take this index",
            expected=f"at most {num_dims} slices and numbers, and `...` once",
            found=f"{num_taken} slices and numbers, and `...` {num_dots} times",
        )
    if not num_dots:
        parts.append(Ellipsis)
    dots = next(position for position, part in enumerate(parts) if part is Ellipsis)
    parts[dots : dots + 1] = [slice(None)] * (num_dims - num_taken)
    return parts


def _foreign_part(part: Any) -> KindError:
    return KindError(
        f"a sharded array cannot be indexed with {with_article(type(part).__name__)}",
        expected="slices, integers, `...` and None",
        fix="index this rank's shard, x.local[...], or the global array, x.full()[...]",
    )


def _reversed_dim(part: slice, dim: int) -> ArgumentError:
    return ArgumentError(
        f"dim {dim} is sharded and cannot be reversed, because its elements would change ranks",
        expected="a positive step",
        found=f"step {part.step}",
        fix=f"first reshard x so that dim {dim} is not sharded",
    )


def _element_of_sharded_dim(
    number: int, dim: int, parts: Sequence[Any], index: int
) -> ArgumentError:
    shown = [_part_text(part) for part in parts]
    while len(shown) > index + 1 and shown[-1] == ":":
        shown.pop()
    shown[index] = f"{number}:{number + 1}"
    return ArgumentError(
        f"element {number} of dim {dim} is on some ranks only, because dim {dim} is sharded",
        expected="a slice of a sharded dim; a number only for a dim that is not sharded",
        fix=f"keep the dim, x[{', '.join(shown)}], or first reshard x so that dim {dim} is not "
        "sharded",
    )


def _part_text(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join(ends if part.step is None else [*ends, str(part.step)])


def checked_dims(dims: Any, ndim: int, call: str) -> tuple[int, ...]:
    """Return the dims to sum over, sorted and non-negative; None means all dims.

    Example:
        >>> checked_dims(-1, 3, "sum"), checked_dims(None, 2, "sum")
        ((2,), (0, 1))
    """
    if dims is None:
        return tuple(range(ndim))
    given = find_integers(dims if isinstance(dims, (tuple, list)) else (dims,))
    if given is None:
        raise KindError(f"{call} takes dims as integers", found=repr(dims))
    found = [dim + ndim if dim < 0 else dim for dim in given]
    if len(set(found)) < len(found) or not all(0 <= dim < ndim for dim in found):
        raise ArgumentError(
            f"{call} over dims {dims!r} of an array of {ndim} dims",
            expected=f"different numbers from {-ndim} to {ndim - 1}",
        )
    return tuple(sorted(found))


def summed_sharding(
    shape: tuple[int, ...], sharding: NamedSharding, dims: Sequence[int], *, keepdim: bool
) -> tuple[tuple[int, ...], NamedSharding]:
    """Return the shape and sharding of a sum, unreduced over the axes that cut ``dims``."""
    placement = sharding.placement(shape)
    names = sharding.layout.names or ()
    kept = [
        DimSplit(1) if dim in dims else split
        for dim, split in enumerate(placement.dims)
        if keepdim or dim not in dims
    ]
    summed = {names[axis] for dim in dims for axis in placement.dims[dim].axes}
    return tuple(split.size for split in kept), sharding_of(
        sharding.mesh,
        kept,
        unreduced={*sharding.spec.unreduced, *summed},
        reduced=sharding.spec.reduced,
    )


def sum_of_shard(local: Array, dims: tuple[int, ...], *, keepdim: bool, dtype: Any) -> Array:
    """Return the sum of a shard over ``dims``; () sums over no dim."""
    if isinstance(local, torch.Tensor):
        if not dims:  # torch reads an empty tuple as all dims.
            return local.sum(dtype=dtype) if local.ndim == 0 else local.to(dtype or local.dtype)
        return local.sum(dims, keepdim=keepdim, dtype=dtype)
    return local.sum(axis=dims, keepdims=keepdim, dtype=dtype)


def mean_of_shard(
    local: Array, dims: tuple[int, ...], count: int, *, keepdim: bool, dtype: Any
) -> Array:
    """Return the shard's partial sum of the mean: its sum over ``dims`` divided by ``count``."""
    # torch and NumPy sum halves in float32, because the sum can exceed the range of a half.
    if isinstance(local, torch.Tensor):
        result = dtype or local.dtype
        if not (result.is_floating_point or result.is_complex):
            raise DtypeError(
                f"mean of {dtype_name(result)}: torch takes means of floating dtypes only",
                fix="pass a floating dtype: x.mean(dtype=torch.float32)",
            )
        wide = torch.float32 if result in (torch.float16, torch.bfloat16) else result
        return (sum_of_shard(local, dims, keepdim=keepdim, dtype=wide) / count).to(result)
    result = np.dtype(dtype) if dtype is not None else local.dtype
    if result.kind in "biu":
        result = np.dtype(np.float64)
    wide = np.dtype(np.float32) if result == np.float16 else result
    total = sum_of_shard(local, dims, keepdim=keepdim, dtype=wide)
    return (total / wide.type(count)).astype(result)


@dataclass(frozen=True, eq=False)
class Shard:
    """A rank's part of an array.

    Args:
        index: the slices that take the part out of the global array.
        replica: the number of this copy; the rank with replica 0 saves it.
    """

    index: tuple[slice, ...]
    replica: int
    data: Array

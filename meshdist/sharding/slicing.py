"""Slices of sharded arrays: which part of its own shard a rank keeps, and how the result is cut.

Nothing moves. So a sharded dim may be sliced, after which its cells have sizes of their own, but no
single element can be taken out of it: that would lie on one rank alone.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, KindError, LengthError
from ..mesh.splits import Box, DimSplit

__all__ = ["Slicing", "slice_shard"]


@dataclass(frozen=True)
class Slicing:
    """An index of the whole array as one of this rank's shard, and the cuts of the result."""

    local: tuple[Any, ...]
    dims: tuple[DimSplit, ...]


def slice_shard(index: Any, dims: Sequence[DimSplit], box: Box) -> Slicing:
    """Find what ``index`` of the whole leaves of the shard that covers ``box``.

    Args:
        index: as between the brackets: slices, whole numbers, ``...`` and None, or a tuple of them.
        dims: how each dim of the whole is cut.
        box: the part of the whole that this rank holds.

    Raises:
        KindError: the index has other parts, such as arrays.
        LengthError: too many parts, or a number outside its dim.
        ArgumentError: a number, or a negative step, for a sharded dim.

    Example:
        >>> dims = DimSplit(8, (0,), (2,)), DimSplit(3)
        >>> found = slice_shard((slice(1, 8), 2), dims, ((4, 8), (0, 3)))
        >>> found.local, found.dims[0].boundaries
        ((slice(0, 4, 1), 2), (0, 3, 7))
    """
    local: list[Any] = []
    result: list[DimSplit] = []
    parts = _one_per_dim(index, len(dims))
    at = 0
    for place, part in enumerate(parts):
        if part is None:
            local.append(None)
            result.append(DimSplit(1))
            continue
        split = dims[at]
        size = split.size
        if isinstance(part, slice):
            wanted = range(size)[part]
            if not split.axes:
                local.append(part)
                result.append(DimSplit(len(wanted)))
            else:
                if wanted.step < 0:
                    raise _turned(part, at)
                begin, end = box[at]
                first, stop = _num_below(wanted, np.asarray((begin, end))).tolist()
                local.append(_own_part(wanted, first, stop, begin))
                sizes = np.diff(_num_below(wanted, split.boundary_array)).tolist()
                result.append(DimSplit(len(wanted), split.axes, split.axis_sizes, tuple(sizes)))
        else:
            if not -size <= part < size:
                raise LengthError(
                    f"index {part} is outside dim {at} of size {size}",
                    expected=f"a number from {-size} to {size - 1}" if size else "no number",
                )
            if split.axes:
                raise _one_of_a_sharded_dim(part % size, at, parts, place)
            local.append(part)
        at += 1
    return Slicing(tuple(local), tuple(result))


def _own_part(wanted: range, first: int, stop: int, begin: int) -> slice:
    """The elements ``first`` to ``stop`` of those wanted, in a shard that begins at ``begin``."""
    if stop == first:
        return slice(0, 0)
    return slice(wanted[first] - begin, wanted[stop - 1] - begin + 1, wanted.step)


def _num_below(wanted: range, places: Any) -> Any:
    """How many of the wanted elements lie before each place."""
    return np.clip(-((wanted.start - places) // wanted.step), 0, len(wanted))


def _one_per_dim(index: Any, num_dims: int) -> list[Any]:
    """The parts of an index, ``...`` written out: slices and numbers for all dims, and None."""
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
    dots = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[dots : dots + 1] = [slice(None)] * (num_dims - num_taken)
    return parts


def _foreign_part(part: Any) -> KindError:
    return KindError(
        f"a sharded array takes no {type(part).__name__} as an index",
        expected="slices, whole numbers, `...` and None",
        fix="index what this rank holds, x.local[...], or the whole, x.full()[...]",
    )


def _turned(part: slice, dim: int) -> ArgumentError:
    return ArgumentError(
        f"dim {dim} is sharded and cannot be turned round: its elements would change ranks",
        expected="a positive step",
        found=f"step {part.step}",
        fix=f"reshard x so that dim {dim} is whole first",
    )


def _one_of_a_sharded_dim(number: int, dim: int, parts: Sequence[Any], place: int) -> ArgumentError:
    shown = [_part_text(part) for part in parts]
    while len(shown) > place + 1 and shown[-1] == ":":
        shown.pop()
    shown[place] = f"{number}:{number + 1}"
    return ArgumentError(
        f"element {number} of dim {dim} lies on some ranks only: dim {dim} is sharded",
        expected="a slice of a sharded dim; a number only of a dim that is whole",
        fix=f"keep the dim, x[{', '.join(shown)}], or reshard x so that dim {dim} is whole first",
    )


def _part_text(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    ends = ["" if one is None else str(one) for one in (part.start, part.stop)]
    return ":".join(ends if part.step is None else [*ends, str(part.step)])

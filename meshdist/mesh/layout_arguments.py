"""Check names, sizes and arrays of ranks."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arguments import find_integers
from ..errors import AxisError, KindError, MeshError
from .strides import AxisModes, coalesced

_ABBREVIATED = 3
"""In names of at most this many letters, another letter can mean another kind of parallelism: 'ep'
must not suggest 'dp', nor 'etp' 'edp'."""


def checked_modes(axis: Any) -> AxisModes:
    """Return an axis's (size, stride) pairs in normal form; or raise."""
    try:
        pairs = [(operator.index(size), operator.index(stride)) for size, stride in axis]
    except (TypeError, ValueError) as error:
        raise KindError(
            "the modes of an axis must be pairs of integers (size, stride)", found=repr(axis)
        ) from error
    if any(size < 1 or stride < 1 for size, stride in pairs):
        raise MeshError(
            "sizes and strides of a layout must be 1 or more", found=f"modes {tuple(pairs)}"
        )
    return coalesced(pairs)


def checked_names(
    names: Sequence[str] | None, ndim: int, where: str | None = None
) -> tuple[str, ...] | None:
    """Return None or axis names as a tuple of ``ndim`` different identifiers; else raise."""
    if names is None:
        return None
    if isinstance(names, str):
        raise AxisError(
            f"axis names must be a tuple of strings, not the string {names!r}",
            where=where,
            fix=f"write ({names!r},) for one axis",
        )
    try:
        names = tuple(names)
    except TypeError as error:
        raise AxisError(
            f"axis names must be a tuple of strings, not {names!r}", where=where
        ) from error
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise AxisError(
                f"{name!r} is not a valid axis name",
                where=where or f"axis names {names}",
                expected="letters, digits and underscores, not beginning with a digit",
                fix=_identifier_hint(name),
            )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise AxisError(
            f"axis name {twice!r} is used twice",
            where=where,
            expected="a different name for each axis",
            found=f"axis names {names}",
        )
    if len(names) != ndim:
        raise AxisError(
            "the number of axis names does not match the number of axes",
            where=where,
            expected=f"one name per axis, {ndim} in all",
            found=f"names {names}",
            fix="pass as many names as axes",
        )
    return names


def _identifier_hint(name: object) -> str | None:
    if not isinstance(name, str):
        return None
    hint = "".join(char if char.isalnum() else "_" for char in name.strip())
    return f"rename it to {hint!r}" if hint.isidentifier() and hint.strip("_") else None


def checked_sizes(sizes: Any, what: str) -> tuple[int, ...]:
    """Return a tuple of positive ints and at most one -1; else raise."""
    try:
        found = find_integers([sizes] if isinstance(sizes, int) else list(sizes))
    except TypeError:
        found = None
    if found is None:
        raise KindError(f"{what} {sizes!r}: sizes must be integers", expected="such as (2, 4)")
    checked = tuple(found)
    if not checked:
        raise MeshError(f"{what} () is empty", expected="at least one size")
    for size in checked:
        if size == 0 or size < -1:
            raise MeshError(
                f"{what} {checked} has a size of {size}",
                expected="sizes of 1 or more, or one -1, which is inferred",
            )
    if checked.count(-1) > 1:
        raise MeshError(
            f"{what} {checked} has -1 more than once",
            expected="at most one -1, since only one size can be inferred",
        )
    return checked


def inferred_sizes(
    sizes: tuple[int, ...], whole: int, what: str, whole_text: str
) -> tuple[int, ...]:
    """Return ``sizes`` with -1 replaced for the product ``whole``; or raise."""
    if -1 not in sizes:
        return sizes
    known = -math.prod(sizes)
    if whole % known:
        raise MeshError(
            f"{what} {sizes} does not divide {whole_text}",
            expected=f"the known sizes' product, {known}, to divide {whole}",
            found=f"{whole} = {known} x {whole // known} + {whole % known}",
        )
    return tuple(whole // known if size == -1 else size for size in sizes)


def checked_ranks(ranks: Any, world_size: int | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return an array of distinct ranks below ``world_size`` (None: any); or raise."""
    try:
        array = np.asarray(ranks)
    except ValueError as error:  # The rows have different lengths.
        raise MeshError(
            "the ranks of a mesh do not form a grid",
            expected="rows of equal length",
            found=repr(ranks),
        ) from error
    except (TypeError, RuntimeError) as error:
        raise KindError(
            "the ranks of a mesh must be an array of integers on the CPU",
            found=f"{type(ranks).__name__}: {error}",
        ) from error
    if array.ndim == 0:
        raise (MeshError if array.dtype.kind in "iu" else KindError)(
            "the ranks of a mesh must have at least one dim",
            expected="an array such as [0, 1, 2, 3] or [[0, 1], [2, 3]]",
            found=str(array),
        )
    if array.size == 0:
        raise MeshError(
            "a mesh must have at least one rank",
            expected="sizes of 1 or more",
            found=f"an array of shape {array.shape}",
        )
    if array.dtype.kind not in "iu":
        raise KindError(
            "the ranks of a mesh must be integers",
            expected="integers",
            found=f"an array of {array.dtype}",
        )
    array = array.astype(np.int64, copy=False)
    if array.min() < 0:
        raise MeshError(
            f"rank {array.min()} cannot be in a mesh",
            expected="global ranks of 0 or more",
            found=f"{array.min()} at coordinate {_where_is(array, array.min())}",
        )
    if world_size is not None and array.max() >= world_size:
        raise MeshError(
            f"the mesh names rank {array.max()}, which does not exist in the world",
            expected=f"ranks from 0 to {world_size - 1}",
            found=f"{array.max()} at coordinate {_where_is(array, array.max())}",
            fix=f"start {array.max() + 1} ranks, or use fewer",
        )
    ordered = np.sort(array, axis=None)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if repeated.size:
        rank = repeated[0]
        indices = [tuple(map(int, index)) for index in np.argwhere(array == rank)]
        raise MeshError(
            f"rank {rank} is in the mesh more than once",
            expected="each rank at one coordinate",
            found=f"rank {rank} at coordinates {', '.join(map(str, indices))}",
        )
    return array


def _where_is(array: np.ndarray[Any, Any], rank: int) -> tuple[int, ...]:
    return tuple(map(int, np.argwhere(array == rank)[0]))


def num_ranks_text(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def no_axis(axis: str, names: Sequence[str], where: str) -> AxisError:
    """Return the error for a missing axis, which suggests a similar name.

    Example:
        >>> no_axis("modle", ("data", "model"), "mesh (data=2, model=4)").fix
        "did you mean 'model'?"
        >>> [no_axis(typo, ("dp", "tp"), "mesh (dp=2, tp=4)").fix for typo in ("DP", "dpp", "db")]
        ["did you mean 'dp'?", "did you mean 'dp'?", "did you mean 'dp'?"]
        >>> no_axis("ep", ("dp", "tp"), "mesh (dp=2, tp=4)").fix is None
        True
    """
    given, lowered = axis.lower(), {name.lower(): name for name in names}
    near = [given] if given in lowered else [name for name in lowered if set(name) == set(given)]
    if not near and len(given) > _ABBREVIATED:
        long = [name for name in lowered if len(name) > _ABBREVIATED]
        near = difflib.get_close_matches(given, long, n=1, cutoff=0.5)
    elif not near and not given.endswith("p"):
        near = difflib.get_close_matches(given, lowered, n=2, cutoff=0.5)
    error = AxisError(
        f"no axis {axis!r} in the mesh",
        where=where,
        expected=f"one of {', '.join(map(repr, names))}",
        fix=f"did you mean {lowered[near[0]]!r}?" if len(near) == 1 else None,
    )
    error.axis = axis
    return error

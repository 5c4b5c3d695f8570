"""Compute with axes as strides: tuples of modes (size, stride), major to minor.

A mode (4, 2) means the places 0, 2, 4, 6; the axis ((2, 8), (4, 1)) means 0, 1, 2, 3, 8, 9, 10, 11.
In normal form no mode has size 1 and no two neighbours can merge, so equal axes have equal modes
and an axis of size 1 is ().

Source: the hierarchical layouts of CuTe (NVIDIA CUTLASS documentation, "Layout Algebra").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Mode = tuple[int, int]
AxisModes = tuple[Mode, ...]


def size_of(axis: AxisModes) -> int:
    return axis[0][0] if len(axis) == 1 else math.prod(size for size, _ in axis)


def displacement(axis: AxisModes, index: int) -> int:
    """Return the distance of an index from index 0."""
    if len(axis) == 1:
        return index * axis[0][1]
    total = 0
    for size, stride in reversed(axis):
        index, digit = divmod(index, size)
        total += digit * stride
    return total


def coalesced(modes: Iterable[Mode]) -> AxisModes:
    """Return the fewest (size, stride) pairs with the same places in order."""
    kept: list[Mode] = []
    for size, stride in modes:
        if size == 1:
            continue
        if kept and kept[-1][1] == size * stride:
            kept[-1] = (kept[-1][0] * size, stride)
        else:
            kept.append((size, stride))
    return tuple(kept)


def is_nested(modes: Iterable[Mode]) -> bool:
    """Return whether each stride exceeds the reach of smaller strides, so places are unique."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in modes):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def split(axis: AxisModes, sizes: tuple[int, ...]) -> tuple[AxisModes, ...] | None:
    """Return the modes of axes of ``sizes`` that make up ``axis``; or None."""
    rest = list(axis)
    parts: list[AxisModes] = []
    for needed in reversed(sizes):
        part: list[Mode] = []
        while needed > 1:
            size, stride = rest.pop()
            taken = math.gcd(size, needed)
            if taken == 1:
                return None
            if taken < size:
                rest.append((size // taken, stride * taken))
            part.append((taken, stride))
            needed //= taken
        parts.append(coalesced(reversed(part)))
    return tuple(reversed(parts))


def common_origin(
    offset: int, modes: Sequence[AxisModes], other: int, other_modes: Sequence[AxisModes]
) -> int | None:
    """Return the offset of the layout that joins two with a common rank, else None."""
    # The layouts meet at ``offset + a = other + b``. If ``a`` is counted from its far end, both
    # unknowns are positive digits of one number, which nested strides decompose uniquely.
    ours = [(stride, size, True) for axis in modes for size, stride in axis]
    theirs = [(stride, size, False) for axis in other_modes for size, stride in axis]
    rest = offset - other + sum((size - 1) * stride for stride, size, _ in ours)
    if rest < 0:
        return None
    b = 0
    for stride, size, is_ours in sorted(ours + theirs, reverse=True):
        digit, rest = divmod(rest, stride)
        if digit >= size:
            return None
        if not is_ours:
            b += digit * stride
    return None if rest else offset - b


def strided_modes(array: np.ndarray[Any, Any]) -> tuple[AxisModes, ...] | None:
    """Return each dim's (size, stride) modes that give ``array``; None without nested strides."""
    origin = array.flat[0]
    modes: list[AxisModes] = []
    for dim in range(array.ndim):
        at = tuple(slice(None) if other == dim else 0 for other in range(array.ndim))
        line = array[at] - origin
        axis: list[Mode] = []
        while len(line) > 1:
            stride = int(line[1])
            if stride < 1:
                return None
            breaks = np.flatnonzero(line != np.arange(len(line)) * stride)
            size = int(breaks[0]) if len(breaks) else len(line)
            if len(line) % size:
                return None
            axis.append((size, stride))
            line = line[::size]
        modes.append(tuple(reversed(axis)))
    if not is_nested(mode for axis_modes in modes for mode in axis_modes):
        return None
    return tuple(modes) if np.array_equal(positions_of(int(origin), modes), array) else None


def positions_of(offset: int, modes: Iterable[AxisModes]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the place at each coordinate, with a dim per axis."""
    positions = np.array(offset, dtype=np.int64)
    for axis in modes:
        reach = np.zeros((), dtype=np.int64)
        for size, stride in axis:
            reach = np.add.outer(reach, np.arange(size, dtype=np.int64) * stride)
        positions = np.add.outer(positions, reach.ravel())
    return positions

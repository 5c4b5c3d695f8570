"""Assign parts of arrays to ranks for saving, and check that pieces cover an array.

Replicas share the work: they evenly split the bytes of their arrays, in sequence. Splits are
between rows of an array's longest dimension, and never inside a small array. So each byte is saved
once, replicas differ by at most one row, and most arrays need a single piece per shard.

Worked example: two replicas save w of 6 rows, 60 bytes, and b of 20 bytes, which is small.

    array       |-------------- w --------------|--- b ---|
    row          0    1    2    3    4    5
    byte         0    10   20   30   40   50    60       80
    replica 0   |<-- rows 0 to 3 -->|                          up to byte 40
    replica 1                       |<-- 4, 5 -->|<- b ->|     from byte 40

    >>> boxes = [(((0, 6), (0, 5)), 2), (((0, 5),), 4)]
    >>> own_parts(boxes, 0, 2, small=21)
    [((0, 4), (0, 5)), None]
    >>> own_parts(boxes, 1, 2, small=21)
    [((4, 6), (0, 5)), ((0, 5),)]
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..mesh.placement import Box, box_text, shape_of, volume
from ..mesh.spec import NamedSharding

SMALL = 64 << 10
"""Arrays of fewer bytes are saved and read without splitting."""


class Holding(NamedTuple):
    """The part of an array that this rank has, and its replicas.

    Args:
        replicas: a key, equal for arrays with the same replicas.
        replica: this rank's index among them.
    """

    box: Box
    itemsize: int
    replicas: Hashable = None
    replica: int = 0
    num_replicas: int = 1


def holding_of(
    sharding: NamedSharding, shape: tuple[int, ...], itemsize: int, rank: int
) -> Holding:
    """Return the part of an array that ``rank`` holds, and its replicas."""
    free = sharding.placement(shape).free_axes
    count = math.prod(sharding.layout.sizes[axis] for axis in free)
    replicas = sharding.layout, free
    return Holding(sharding.box(rank, shape), itemsize, replicas, sharding.replica(rank), count)


def parts_of(holdings: Mapping[str, Holding]) -> dict[str, Box]:
    """Return, by array, the box that this rank saves, unless other replicas save it."""
    alike: dict[Hashable, dict[str, Holding]] = {}
    for name, holding in holdings.items():
        alike.setdefault((holding.replicas, holding.num_replicas), {})[name] = holding
    parts: dict[str, Box] = {}
    for group in alike.values():
        boxes = [(holding.box, holding.itemsize) for holding in group.values()]
        first = next(iter(group.values()))
        own = own_parts(boxes, first.replica, first.num_replicas)
        parts.update(
            (name, part) for name, part in zip(group, own, strict=True) if part is not None
        )
    return {name: parts[name] for name in holdings if name in parts}


def own_parts(
    boxes: Sequence[tuple[Box, int]], replica: int, num_replicas: int, small: int = SMALL
) -> list[Box | None]:
    """Return the part of each box that a replica saves; None if other replicas save all of it.

    Args:
        boxes: the boxes of all replicas, each with an element's size in bytes.
        small: a single replica saves a box of fewer bytes.
    """
    sizes = [volume(box) * itemsize for box, itemsize in boxes]
    total = sum(sizes)
    first, last = (total * number // num_replicas for number in (replica, replica + 1))
    parts: list[Box | None] = []
    start = 0
    for (box, _), size in zip(boxes, sizes, strict=True):
        if not size:
            parts.append(box if replica == 0 else None)
            continue
        shape = shape_of(box)
        dim = shape.index(max(shape)) if size >= small else None
        rows = 1 if dim is None else shape[dim]
        # The first rows that start at or after the ends of this replica's part of the line.
        begin, end = (min(max(-((start - at) * rows // size), 0), rows) for at in (first, last))
        start += size
        if begin >= end:
            parts.append(None)
        elif dim is None:
            parts.append(box)
        else:
            edge = box[dim][0]
            parts.append((*box[:dim], (edge + begin, edge + end), *box[dim + 1 :]))
    return parts


def whole_box(shape: Sequence[int]) -> Box:
    return tuple([(0, size) for size in shape])


def intersect(first: Box, second: Box) -> Box | None:
    """Return the common elements of two boxes, None if none.

    Example:
        >>> intersect(((0, 4), (0, 2)), ((3, 6), (1, 2))), intersect(((0, 4),), ((4, 6),))
        (((3, 4), (1, 2)), None)
    """
    both = []
    for (start, stop), (begin, end) in zip(first, second, strict=True):
        low, high = max(start, begin), min(stop, end)
        if low >= high:
            return None
        both.append((low, high))
    return tuple(both)


def within(box: Box, outer: Box) -> Box:
    """Return ``box`` relative to the start of ``outer``, which contains it.

    Example:
        >>> within(((3, 4), (1, 2)), ((2, 6), (1, 2)))
        ((1, 2), (0, 1))
    """
    return tuple(
        [(start - edge, stop - edge) for (start, stop), (edge, _) in zip(box, outer, strict=True)]
    )


def find_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Return why boxes do not cover an array exactly, or "".

    Example:
        >>> find_fault((4,), [((0, 2),), ((2, 4),)]), find_fault((4,), [((0, 2),), ((1, 3),)])
        ('', 'pieces [0:2] and [1:3] overlap')
        >>> find_fault((4,), [((0, 2),)])
        'pieces have 2 of 4 elements'
    """
    found = [box for box in boxes if volume(box)]
    if found == [whole_box(shape)]:
        return ""
    for box in found:
        if any(start < 0 or stop > size for (start, stop), size in zip(box, shape, strict=True)):
            return f"piece {box_text(box)} is outside {tuple(shape)}"
    # Along the dimension that is split most often, few pieces are open at a time. A matrix split
    # into columns by 1,000 ranks would have all open along its rows: 500,000 pairs to compare.
    dims = range(len(shape))
    cut = max(dims, key=lambda dim: len({box[dim] for box in found}), default=0)
    open_boxes: list[Box] = []  # boxes that extend past the start of the next
    for box in sorted(found, key=lambda box: box[cut:]):
        open_boxes = [other for other in open_boxes if not box or other[cut][1] > box[cut][0]]
        for other in open_boxes:
            if intersect(other, box) is not None:
                return f"pieces {box_text(other)} and {box_text(box)} overlap"
        open_boxes.append(box)
    num_elements = sum(map(volume, found))
    if num_elements != math.prod(shape):
        return f"pieces have {num_elements} of {math.prod(shape)} elements"
    return ""

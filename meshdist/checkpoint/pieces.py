"""Which part of each array a rank saves, and whether pieces make a whole: boxes alone, no arrays.

Replicas share what they hold. Their arrays, laid in a row, make a line of bytes,
which they cut evenly; the cuts lie between rows of an array's longest dim, and a small array is
never cut. So each byte is saved once, writers differ by a row at most, and most arrays have one
piece for each of their shards.

Drawn case: two replicas save w of 6 rows, 60 bytes, and b of 20 bytes, which is small.

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
"""Arrays of fewer bytes are saved and read whole."""


class Holding(NamedTuple):
    """Part of an array that this rank has, and the replicas that hold the same part.

    Args:
        replicas: a key, equal for arrays whose replicas are the same ranks.
        replica: this rank's number among them.
    """

    box: Box
    itemsize: int
    replicas: Hashable = None
    replica: int = 0
    num_replicas: int = 1


def holding_of(
    sharding: NamedSharding, shape: tuple[int, ...], itemsize: int, rank: int
) -> Holding:
    """Return what ``rank`` holds of an array with this sharding, with its replicas."""
    free = sharding.placement(shape).free_axes
    count = math.prod(sharding.layout.sizes[axis] for axis in free)
    replicas = sharding.layout, free
    return Holding(sharding.box(rank, shape), itemsize, replicas, sharding.replica(rank), count)


def parts_of(holdings: Mapping[str, Holding]) -> dict[str, Box]:
    """Return, by array, the box that this rank saves; without entry where replicas save it."""
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
    """Return the part of each box that a replica saves, None where others save all of it.

    Args:
        boxes: those that all replicas hold, each with the bytes of an element.
        small: a box of fewer bytes is not cut, but saved by a single replica.
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
        # The first rows that begin at or behind the ends of this replica's part of the line.
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
    """Return the box of a whole array."""
    return tuple([(0, size) for size in shape])


def intersect(first: Box, second: Box) -> Box | None:
    """Return the elements that two boxes have in common, None where they have none.

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
    """Return a box that lies in ``outer``, counted from the begin of ``outer``.

    Example:
        >>> within(((3, 4), (1, 2)), ((2, 6), (1, 2)))
        ((1, 2), (0, 1))
    """
    return tuple(
        [(start - edge, stop - edge) for (start, stop), (edge, _) in zip(box, outer, strict=True)]
    )


def find_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str:
    """Return what keeps boxes from making a whole array of this shape, or "".

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
            return f"piece {box_text(box)} lies outside of {tuple(shape)}"
    # Along the dim that is cut most often few pieces are open at a time. A matrix that 1,000 ranks
    # cut into columns would have all of them open along its rows: 500,000 pairs to compare.
    dims = range(len(shape))
    cut = max(dims, key=lambda dim: len({box[dim] for box in found}), default=0)
    open_boxes: list[Box] = []  # those that reach behind the begin of the next
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

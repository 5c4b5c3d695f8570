"""Lower a change of placement to steps: one collective, or an exchange of blocks.

Changes in product form are collectives: members of a group exchange equal parts. First come slices,
which cost nothing. Then one equal all-to-all handles the axes that move from one dim to another,
and one all-gather the axes that leave. Together they receive as many bytes as one exchange. Each
packs and unpacks by one strided copy. Summed axes use a reduce-scatter.

In an exchange, each rank receives, sends and keeps boxes. In each dim this rank's interval of the
target overlaps some blocks of the source; it receives the products of the overlaps. The sender of a
box is the rank that holds its block and has this rank's coordinates along all other axes. The same
search from the source finds the sent boxes. The cost is proportional to the number of peers.

Worked example: rows on 2 ranks become columns. A 4 x 4 array is cut evenly, into one collective:

              before     packed: a part for each    received: from rank 0, from rank 1
    rank 0    a b c d    for 0: a b   for 1: c d    a b           i j
              e f g h           e f          g h    e f           m n
    rank 1    i j k l    for 0: i j   for 1: k l    c d           k l
              m n o p           m n          o p    g h           o p    (stacked: its columns)

    >>> from .placement_diff import Placement, change_between, split_dim
    >>> def change(n):
    ...     rows = Placement((2,), (n, n), (split_dim(n, (0,), (2,)), split_dim(n, (), ())))
    ...     return change_between(rows, rows.permuted((1, 0)))
    >>> [step] = operation_steps(change(4), (0,))  # 2 rows of 2 x 2 columns, packed as 2 x (2 x 2)
    >>> step.operation, step.pack.view, step.pack.order, step.unpack.shape
    ('all_to_all_single', (2, 2, 2), (1, 0, 2), (4, 2))

A 3 x 3 array needs boxes. Rank 0 has rows 0:2, above the dashes, and gets columns 0:2:

    a b | c    Its rows-to-be 0:3 meet two source blocks: of 0:2 it has a b d e itself, of 2:3
    d e | f    it receives g h, as row 2 of its new array. Its columns 0:3 meet two blocks of the
    ----+--    target: 0:2, which it keeps, and 2:3. So it sends c f, column 2 of its old array.
    g h | i
    >>> [step] = exchange_steps(change(3), (0,))
    >>> step.own, step.receives, step.sends
    ((((0, 2), (0, 2)), ((0, 2), (0, 2))), ((1, ((2, 3), (0, 2))),), ((1, ((0, 2), (2, 3))),))
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from ..mesh.placement import Box, DimSplit, Placement, index_along, shape_of, volume
from .placement_diff import Change
from .steps import Arrangement, CollectiveStep, Exchange, Pad, Part, Step, Take


def operation_steps(change: Change, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps of one rank for a change that ``has_product_form``."""
    steps: list[Step] = []
    mesh_sizes, shape = change.source.mesh_sizes, change.source.local_shape(coordinate)
    scatter_axes = change.summed or change.moving
    slices = _find_slice(change, coordinate, scatter_axes)
    if slices is not None:
        steps.append(slices)
        shape = slices.shape
    if scatter_axes:
        group = group_at(scatter_axes, mesh_sizes, coordinate)
        pack = _packing(change, scatter_axes, coordinate, shape)
        part = shape = pack.shape[1:]
        if change.summed:
            steps.append(CollectiveStep(shape, *group, "reduce_scatter_tensor", part, pack))
        else:
            unpack = _unpacking(change, scatter_axes, (), part)
            shape = unpack.shape
            steps.append(CollectiveStep(shape, *group, "all_to_all_single", part, pack, unpack))
    if change.gathered:
        group, part = group_at(change.gathered, mesh_sizes, coordinate), shape
        unpack = _unpacking(change, change.gathered, scatter_axes, part)
        steps.append(
            CollectiveStep(unpack.shape, *group, "all_gather_into_tensor", part, unpack=unpack)
        )
    if change.padded:
        steps.append(_pad(change, coordinate))
    return tuple(steps)


def group_at(
    axes: tuple[int, ...], mesh_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], int, int]:
    """Return a group's axes, its number of members and this rank's index in it."""
    size = math.prod(mesh_sizes[axis] for axis in axes)
    return axes, size, index_along(axes, mesh_sizes, coordinate)


def _find_slice(
    change: Change, coordinate: tuple[int, ...], scatter_axes: Sequence[int]
) -> Take | None:
    """Return the step that slices dims newly cut by axes other than ``scatter_axes``, or None."""
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    box = tuple(
        own if not dim.new or not set(dim.new).isdisjoint(scatter_axes) else kept
        for dim, own, kept in zip(change.dims, source, target, strict=True)
    )
    return None if box == source else _take(box, source)


def _packing(
    change: Change, scatter_axes: Sequence[int], coordinate: Sequence[int], shape: Sequence[int]
) -> Arrangement:
    """Return how to cut a local array into parts along ``scatter_axes``."""
    sizes = change.source.mesh_sizes
    view: list[int] = []
    slices: list[int | None] = []
    dim_of: dict[int, int] = {}  # the dim of an axis, or of ~dim, in the view after indexing
    for number, (dim, length) in enumerate(zip(change.dims, shape, strict=True)):
        cut = [] if set(dim.new).isdisjoint(scatter_axes) else list(dim.new)
        for axis in cut:
            view.append(sizes[axis])
            slices.append(None if axis in scatter_axes else coordinate[axis])
            if axis in scatter_axes:
                dim_of[axis] = slices.count(None) - 1
        view.append(length // math.prod(sizes[axis] for axis in cut))
        slices.append(None)
        dim_of[~number] = slices.count(None) - 1
    order = [dim_of[axis] for axis in scatter_axes]
    order += [dim_of[~number] for number in range(len(shape))]
    kept = [size for size, index in zip(view, slices, strict=True) if index is None]
    members = math.prod(sizes[axis] for axis in scatter_axes)
    part = [kept[dim_of[~number]] for number in range(len(shape))]
    return Arrangement(tuple(view), tuple(slices), tuple(order), (members, *part))


def _unpacking(
    change: Change, axes: Sequence[int], merged: Sequence[int], shape: Sequence[int]
) -> Arrangement:
    """Return how to join the parts of members along ``axes``.

    Args:
        merged: axes of an earlier step, whose parts ``shape`` contains already.
        shape: of one member's part.
    """
    sizes = change.source.mesh_sizes
    view = [sizes[axis] for axis in axes]
    dim_of = {axis: number for number, axis in enumerate(axes)}
    order: list[int] = []
    lengths: list[int] = []
    for dim, length in zip(change.dims, shape, strict=True):
        before = [axis for axis in dim.removed if axis in merged]
        for axis in before:
            dim_of[axis] = len(view)
            view.append(sizes[axis])
        view.append(length // math.prod(sizes[axis] for axis in before))
        joined = [axis for axis in dim.removed if axis in dim_of]
        order += [*(dim_of[axis] for axis in joined), len(view) - 1]
        lengths.append(math.prod(view[i] for i in order[len(order) - len(joined) - 1 :]))
    return Arrangement(tuple(view), (None,) * len(view), tuple(order), tuple(lengths))


def _pad(change: Change, coordinate: tuple[int, ...]) -> Pad:
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    box = tuple(
        held if not set(dim.removed).isdisjoint(change.padded) else wanted
        for dim, held, wanted in zip(change.dims, source, target, strict=True)
    )
    return Pad(shape_of(target), relative(box, target))


class _Overlap(NamedTuple):
    """An interval's part that a peer's block holds, and the peer's index."""

    peer: int  # the peer's index along axes that cut the source
    replica: int  # the peer's index along axes that divide boxes
    partial_sum: int  # the peer's index along summed axes
    start: int
    stop: int


def exchange_steps(change: Change, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    """Return ``change`` as one exchange of boxes for this rank."""
    group = _Group(change, coordinate)
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    kept, receives = group.receives(target)
    sends = group.sends(source)
    own = None if kept is None else (relative(kept, source), relative(kept, target))
    return (
        Exchange(
            shape_of(target),
            change.group,
            group.size,
            group.group_rank,
            tuple(sorted((peer, relative(box, source)) for peer, box in sends)),
            tuple(sorted((peer, relative(box, target)) for peer, box in receives)),
            own,
            is_covered=not change.padded,
            is_summed=bool(change.summed),
        ),
    )


def local_steps(change: Change, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    """Return one rank's steps for a change in which no rank receives anything."""
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    shape = shape_of(target)
    kept = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(source, target, strict=True))
    if any(stop <= start for start, stop in kept):
        return () if source == target else (Pad(shape, None),)
    steps: list[Step] = []
    if kept != source:
        steps.append(_take(kept, source))
    if kept != target:
        steps.append(Pad(shape, relative(kept, target)))
    return tuple(steps)


def _take(box: Box, origin: Box) -> Take:
    return Take(shape_of(box), relative(box, origin))


def relative(box: Box, origin: Box) -> Box:
    """Return a box with bounds relative to the start of ``origin``."""
    return tuple([(a - o, b - o) for (a, b), (o, _) in zip(box, origin, strict=True)])


def coordinates_along(
    axes: Sequence[int], sizes: Sequence[int], strides: dict[int, int]
) -> list[int]:
    """Return the index offset of each coordinate along ``axes``, row-major.

    Args:
        axes: the major axis first.
        strides: the index offset of a step along an axis.
    """
    added = [0]
    for axis in axes:
        stride = strides[axis]
        added = [at + index * stride for at in added for index in range(sizes[axis])]
    return added


class _Group:
    """The group of an exchange, seen from this rank."""

    def __init__(self, change: Change, coordinate: tuple[int, ...]) -> None:
        self.change, self.coordinate = change, coordinate
        sizes = change.source.mesh_sizes
        self.strides: dict[int, int] = {}
        size = 1
        for axis in reversed(change.group):
            self.strides[axis] = size
            size *= sizes[axis]
        self.size = size
        cut = frozenset(change.source.cut_axes)
        self.cut = cut
        self.free = frozenset(change.source.free_axes) - frozenset(change.dividing)
        self.my_block = self._my_index([axis for axis in change.group if axis in cut])
        self.my_replica = self._my_index(change.dividing)
        self.my_partial_sum = self._my_index(change.summed)
        self.group_rank = self.my_block + self.my_replica + self.my_partial_sum
        self.replicas = coordinates_along(change.dividing, sizes, self.strides)
        self.partial_sums = coordinates_along(change.summed, sizes, self.strides)

    def _my_index(self, axes: Sequence[int]) -> int:
        return sum(self.coordinate[axis] * self.strides[axis] for axis in axes)

    # ---------------------------------------------------------------- receives

    def receives(self, target: Box) -> tuple[Box | None, list[Part]]:
        """Return (own part of ``target`` or None, [(sender's index, box)] of received parts)."""
        per_dim = []
        for dim, interval in zip(self.change.dims, target, strict=True):
            per_dim.append(list(self._sources(dim.source, interval)))
        kept, found = None, []
        for blocks in product(*per_dim):
            peer = sum([block.peer for block in blocks])
            box = tuple([(block.start, block.stop) for block in blocks])
            if peer == self.my_block:
                kept = box
                others = (s for s in self.partial_sums if s != self.my_partial_sum)
                found += [(peer + self.my_replica + partial_sum, box) for partial_sum in others]
            elif len(self.replicas) == 1:
                found += [(peer + partial_sum, box) for partial_sum in self.partial_sums]
            else:
                for replica, part in zip(self.replicas, self._parts(box), strict=True):
                    if part is not None:
                        found += [(peer + replica + s, part) for s in self.partial_sums]
        return kept, found

    def _sources(self, source: DimSplit, interval: tuple[int, int]) -> Iterator[_Overlap]:
        """Yield overlaps of ``interval`` with source blocks to receive."""
        padded = self.change.padded
        for block, start, stop in _blocks_in(source, interval):
            peer, rest = 0, block
            for axis, size in zip(reversed(source.axes), reversed(source.axis_sizes), strict=True):
                rest, index = divmod(rest, size)
                if axis in padded and index != self.coordinate[axis]:
                    break
                peer += index * self.strides.get(axis, 0)
            else:
                yield _Overlap(peer, 0, 0, start, stop)

    # ---------------------------------------------------------------- sends

    def sends(self, source: Box) -> list[Part]:
        """Return (receiver's index, box) of each part of ``source`` that this rank sends."""
        change, sizes = self.change, self.change.source.mesh_sizes
        per_dim = []
        for dim, interval in zip(change.dims, source, strict=True):
            per_dim.append(list(self._targets(dim.target, interval)))
        placed = frozenset(change.target.cut_axes)
        everywhere = [a for a in change.group if a in self.cut and a not in placed]
        all_blocks = coordinates_along(everywhere, sizes, self.strides)
        unplaced = [axis for axis in change.summed if axis not in placed]
        all_partial_sums = coordinates_along(unplaced, sizes, self.strides)
        number = self.replicas.index(self.my_replica)
        found: list[Part] = []
        for blocks in product(*per_dim):
            peer = sum([block.peer for block in blocks])
            replica = sum([block.replica for block in blocks])
            partial_sum = sum([block.partial_sum for block in blocks])
            box = tuple([(block.start, block.stop) for block in blocks])
            part = box if len(self.replicas) == 1 else self._parts(box)[number]
            for more in all_blocks:
                at = peer + more
                if at != self.my_block:  # The receiver gets a part of the box from each replica.
                    if part is not None:
                        found += [(at + replica + partial_sum + s, part) for s in all_partial_sums]
                elif (
                    replica == self.my_replica
                ):  # The receiver holds a partial sum of the same box.
                    there = (partial_sum + s for s in all_partial_sums)
                    found += [(at + replica + s, box) for s in there if s != self.my_partial_sum]
        return found

    def _targets(self, target: DimSplit, interval: tuple[int, int]) -> Iterator[_Overlap]:
        """Yield overlaps of ``interval`` with receivers' target blocks."""
        change = self.change
        for block, start, stop in _blocks_in(target, interval):
            peer = replica = partial_sum = 0
            rest = block
            for axis, size in zip(reversed(target.axes), reversed(target.axis_sizes), strict=True):
                rest, index = divmod(rest, size)
                if axis in self.free:
                    if index != self.coordinate[axis]:
                        break
                elif axis in self.cut:
                    peer += index * self.strides.get(axis, 0)
                elif axis in change.summed:
                    partial_sum += index * self.strides[axis]
                else:
                    replica += index * self.strides[axis]
            else:
                yield _Overlap(peer, replica, partial_sum, start, stop)

    def _parts(self, box: Box) -> list[Box | None]:
        """Return a part of ``box`` per replica, cut along the longest dim; None if empty."""
        lengths = shape_of(box)
        dim = lengths.index(max(lengths))
        start, count = box[dim][0], len(self.replicas)
        smaller, larger = divmod(lengths[dim], count)
        parts: list[Box | None] = []
        for number in range(count):
            stop = start + smaller + (number < larger)
            part = (*box[:dim], (start, stop), *box[dim + 1 :])
            parts.append(part if stop > start else None)
            start = stop
        return parts


def _blocks_in(split: DimSplit, interval: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (block, start, stop) for each block that overlaps ``interval``."""
    start, stop = interval
    if start >= stop:
        return
    bounds = split.boundaries
    block = bisect_right(bounds, start) - 1
    while start < stop:
        end = min(bounds[block + 1], stop)
        if end > start:
            yield block, start, end
            start = end
        block += 1


def root_exchanges(
    placement: Placement, here: tuple[int, ...], there: tuple[int, ...]
) -> tuple[Exchange, Exchange]:
    """Return two steps of the rank at ``here``: gather to the root at ``there``; the transpose."""
    # The group has the ranks with the root's coordinates along the free axes. Ranks other than the
    # root gather into, and scatter, an empty array.
    axes = tuple(sorted((*placement.cut_axes, *placement.unreduced)))
    group = group_at(axes, placement.mesh_sizes, here)
    mine, root = group[2], index_along(axes, placement.mesh_sizes, there)
    boxes = [
        placement.box(at) if placement.has_values(at) else None
        for at in _members(placement, axes, there)
    ]
    parts = tuple((at, box) for at, box in enumerate(boxes) if box is not None and volume(box))
    shape, own = placement.local_shape(here), placement.box(here)
    local = relative(own, own)
    is_covered = boxes[mine] is not None
    if mine != root:
        part = ((root, local),) if any(member == mine for member, _ in parts) else ()
        return (
            Exchange((0,), *group, part, (), None),
            Exchange(shape, *group, (), part, None, is_covered=is_covered),
        )
    others = tuple(part for part in parts if part[0] != root)
    is_kept = len(others) < len(parts)
    return (
        Exchange(placement.shape, *group, (), others, (local, own) if is_kept else None),
        Exchange(
            shape, *group, others, (), (own, local) if is_kept else None, is_covered=is_covered
        ),
    )


def _members(
    placement: Placement, axes: tuple[int, ...], there: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return all coordinates that equal ``there`` except along ``axes``, row-major."""
    found = [there]
    for axis in axes:
        found = [
            (*at[:axis], number, *at[axis + 1 :])
            for at in found
            for number in range(placement.mesh_sizes[axis])
        ]
    return found

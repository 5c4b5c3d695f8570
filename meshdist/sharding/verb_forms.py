"""Changes in product form as verbs: equal parts move between all members of a group.

Slices come first and cost nothing. Then the axes that move from one dim to another are one equal
all-to-all, and those that leave are one all-gather: together they receive as many bytes as one
exchange would. Each packs by one strided copy and unpacks by one. Summed axes are a reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..mesh.splits import place_along, shape_of
from .changes import Change
from .exchanges import relative
from .steps import AllGather, AllToAll, Arrangement, Pad, ReduceScatter, Step, Take

__all__ = ["group_at", "verb_steps"]


def verb_steps(change: Change, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps of one rank for a change that ``has_product_form``."""
    steps: list[Step] = []
    mesh_sizes, shape = change.source.mesh_sizes, change.source.local_shape(coordinate)
    spread = change.summed or change.moving
    taken = _taken(change, coordinate, spread)
    if taken is not None:
        steps.append(taken)
        shape = taken.shape
    if spread:
        axes, size, place = group_at(spread, mesh_sizes, coordinate)
        pack = _packed(change, spread, coordinate, shape)
        shape = pack.shape[1:]
        if change.summed:
            steps.append(ReduceScatter(axes, size, place, pack, shape))
        else:
            unpack = _merged(change, spread, (), shape)
            steps.append(AllToAll(axes, size, place, pack, unpack))
            shape = unpack.shape
    if change.gathered:
        axes, size, place = group_at(change.gathered, mesh_sizes, coordinate)
        unpack = _merged(change, change.gathered, spread, shape)
        steps.append(AllGather(axes, size, place, shape, unpack))
        shape = unpack.shape
    if change.padded:
        steps.append(_pad(change, coordinate))
    return tuple(steps)


def group_at(
    axes: tuple[int, ...], mesh_sizes: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, ...], int, int]:
    """Return the first three fields of a step: the axes, how many members, this rank's place."""
    size = math.prod(mesh_sizes[axis] for axis in axes)
    return axes, size, place_along(axes, mesh_sizes, coordinate)


def _taken(change: Change, coordinate: tuple[int, ...], spread: Sequence[int]) -> Take | None:
    """The slice along dims that free axes alone cut anew."""
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    box = tuple(
        own if not dim.new or not set(dim.new).isdisjoint(spread) else kept
        for dim, own, kept in zip(change.dims, source, target, strict=True)
    )
    return None if box == source else Take(relative(box, source))


def _packed(
    change: Change, spread: Sequence[int], coordinate: Sequence[int], shape: Sequence[int]
) -> Arrangement:
    """From the local array to a part per member: dims that ``spread`` cuts anew are split."""
    sizes = change.source.mesh_sizes
    view: list[int] = []
    taken: list[int | None] = []
    dim_of: dict[int, int] = {}  # of an axis, or of ~dim, in the view without what is taken
    for number, (dim, length) in enumerate(zip(change.dims, shape, strict=True)):
        cut = [] if set(dim.new).isdisjoint(spread) else list(dim.new)
        for axis in cut:
            view.append(sizes[axis])
            taken.append(None if axis in spread else coordinate[axis])
            if axis in spread:
                dim_of[axis] = taken.count(None) - 1
        view.append(length // math.prod(sizes[axis] for axis in cut))
        taken.append(None)
        dim_of[~number] = taken.count(None) - 1
    order = [dim_of[axis] for axis in spread] + [dim_of[~number] for number in range(len(shape))]
    kept = [size for size, index in zip(view, taken, strict=True) if index is None]
    members = math.prod(sizes[axis] for axis in spread)
    part = [kept[dim_of[~number]] for number in range(len(shape))]
    return Arrangement(tuple(view), tuple(taken), tuple(order), (members, *part))


def _merged(
    change: Change, axes: Sequence[int], merged: Sequence[int], shape: Sequence[int]
) -> Arrangement:
    """From a part per member along ``axes`` to dims that join them, beside those merged before."""
    sizes = change.source.mesh_sizes
    view = [sizes[axis] for axis in axes]
    dim_of = {axis: number for number, axis in enumerate(axes)}
    order: list[int] = []
    lengths: list[int] = []
    for dim, length in zip(change.dims, shape, strict=True):
        before = [axis for axis in dim.left if axis in merged]
        for axis in before:
            dim_of[axis] = len(view)
            view.append(sizes[axis])
        view.append(length // math.prod(sizes[axis] for axis in before))
        joined = [axis for axis in dim.left if axis in dim_of]
        order += [*(dim_of[axis] for axis in joined), len(view) - 1]
        lengths.append(math.prod(view[i] for i in order[len(order) - len(joined) - 1 :]))
    return Arrangement(tuple(view), (None,) * len(view), tuple(order), tuple(lengths))


def _pad(change: Change, coordinate: tuple[int, ...]) -> Pad:
    source, target = change.source.box(coordinate), change.target.box(coordinate)
    box = tuple(
        held if not set(dim.left).isdisjoint(change.padded) else wanted
        for dim, held, wanted in zip(change.dims, source, target, strict=True)
    )
    return Pad(shape_of(target), relative(box, target))

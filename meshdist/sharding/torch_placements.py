"""Shardings as the placements of torch's DTensor, and back; pure.

torch cuts dims by ``torch.chunk``: all parts but the last ones are of one size, the last are short
or empty, where ours differ by at most one. Axes cut a dim in the order of the mesh. Where another
is meant, ``_StridedShard`` says how many shards an axis finds already made by axes after it; a
shard is one piece of the whole then only if the sizes divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..errors import ArgumentError, AxisError, KindError, LengthError, ShapeError
from ..mesh.layout import Layout
from ..mesh.partition_spec import Entry, PartitionSpec, axes_of
from ..mesh.spec import NamedSharding
from ..mesh.splits import split_dim

__all__ = ["as_torch_holds_it", "from_placements", "to_placements"]

_SUMS = ("sum", "avg")


def to_placements(sharding: NamedSharding) -> tuple[Placement, ...]:
    """Return torch's placements of a sharding, one for each axis of the mesh.

    Unreduced axes become ``Partial("sum")``. Where axes cut a dim in another order than the mesh's,
    the placement is a ``_StridedShard``. What placements cannot say is lost: ``reduced``, which
    becomes ``Replicate``, and the sizes of shards, for which torch has its own rule. Where the
    sizes agree, ``from_placements`` is the inverse.

    Example:
        >>> import meshdist as md
        >>> mesh = md.Layout.from_shape((2, 4), ("dp", "tp"))
        >>> to_placements(md.NamedSharding(mesh, md.P(None, "tp", unreduced={"dp"})))
        (Partial(sum), Shard(dim=1))
        >>> to_placements(md.NamedSharding(mesh, md.P(("tp", "dp"))))
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    layout = sharding.layout
    placements: list[Placement] = [Replicate() for _ in range(layout.ndim)]
    for name in sharding.spec.unreduced:
        placements[layout.axis_index(name)] = Partial("sum")
    for dim, entry in enumerate(sharding.spec.partitions):
        axes = [layout.axis_index(axis) for axis in axes_of(entry)]
        for place, axis in enumerate(axes):
            before = math.prod(layout.sizes[other] for other in axes[:place] if other > axis)
            placements[axis] = (
                Shard(dim) if before == 1 else _StridedShard(dim, split_factor=before)
            )
    return tuple(placements)


def from_placements(
    placements: Sequence[Placement], mesh: Any, shape: Sequence[int]
) -> NamedSharding:
    """Return the sharding of an array of this shape that torch's placements describe.

    The sizes that torch's rule gives are kept, as ``shard_sizes`` where they are not ours.
    ``Partial`` becomes unreduced. Of ``Partial("avg")`` the summands are the local values divided
    by the size of the axis: ``ShardedArray`` takes them so, and ``from_dtensor`` divides.

    Args:
        placements: one for each axis of the mesh; dims may be negative.
        mesh: a ``DeviceMesh`` or a ``Layout``, with named axes.
        shape: of the whole array.

    Raises:
        KindError: something that is no placement, or of a class of which nothing is known.
        ArgumentError: a ``Partial`` of another op than sum and avg.
        LengthError: not one placement for each axis.
        ShapeError: a dim that the array does not have; a ``_StridedShard`` of a dim that does not
            divide, or beside placements that it does not fit.
        AxisError: the mesh has no axis names.

    Example:
        >>> import meshdist as md
        >>> mesh = md.Layout.from_shape((4,), ("dp",))
        >>> from_placements([Shard(0)], mesh, (9,)).shard_sizes
        {0: (3, 3, 3, 0)}
    """
    layout = mesh if isinstance(mesh, Layout) else mesh.layout
    shape, names = tuple(shape), _checked_names(layout)
    where = f"placements {list(placements)!r} of shape {shape} on mesh ({layout.axis_text()})"
    if len(placements) != layout.ndim:
        raise LengthError(
            "not one placement for each axis of the mesh",
            where=where,
            expected=f"{layout.ndim} placements",
            found=str(len(placements)),
        )
    unreduced: set[str] = set()
    cuts: list[list[tuple[int, int]]] = [[] for _ in shape]  # (axis, split factor) by dim
    for axis, placement in enumerate(placements):
        if type(placement) is Partial:
            _check_sum(placement, where)
            unreduced.add(names[axis])
        elif type(placement) in (Shard, _StridedShard):
            factor = placement.split_factor if type(placement) is _StridedShard else 1
            cuts[_checked_dim(placement, len(shape), where)].append((axis, int(factor)))
        elif type(placement) is not Replicate:
            raise KindError(
                f"{placement!r} is no placement of which the meaning is known",
                where=where,
                expected="Shard, Replicate or Partial",
                found=f"a {type(placement).__name__}",
                fix="redistribute the DTensor to one of them first",
            )
    orders = [_order(layout, dim, size, where) for dim, size in zip(cuts, shape, strict=True)]
    return _chunked(mesh, orders, shape, PartitionSpec(unreduced=unreduced))


def as_torch_holds_it(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Return how a DTensor holds an array that lies so: with torch's sizes, and where a dim does
    not divide, with the axes in the order of the mesh.
    """
    orders = []
    for split in sharding.placement(shape).dims:
        divides = split.size % split.num_cells == 0
        orders.append(split.axes if divides else tuple(sorted(split.axes)))
    return _chunked(sharding.mesh, orders, tuple(shape), sharding.spec)


def _chunked(
    mesh: Any, orders: Sequence[tuple[int, ...]], shape: tuple[int, ...], kinds: PartitionSpec
) -> NamedSharding:
    """The sharding whose dims ``torch.chunk`` cuts along these axes, major to minor."""
    layout = mesh if isinstance(mesh, Layout) else mesh.layout
    names = _checked_names(layout)
    entries: list[Entry] = [tuple(names[axis] for axis in axes) for axes in orders]
    shard_sizes = {}
    for dim, (axes, size) in enumerate(zip(orders, shape, strict=True)):
        axis_sizes = tuple(layout.sizes[axis] for axis in axes)
        cells = _chunk_sizes(size, axis_sizes)
        if axes and split_dim(size, axes, axis_sizes, cells).cell_sizes is not None:
            shard_sizes[dim] = cells
    spec = PartitionSpec(*entries, unreduced=kinds.unreduced, reduced=kinds.reduced)
    return NamedSharding(mesh, spec, shard_sizes=shard_sizes)


def _chunk_sizes(size: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the cells where ``torch.chunk`` cuts axis after axis, in linear order."""
    cells = [size]
    for parts in axis_sizes:
        cut = []
        for cell in cells:
            longest = -(-cell // parts)
            cut += [max(0, min(longest, cell - part * longest)) for part in range(parts)]
        cells = cut
    return tuple(cells)


def _order(
    layout: Layout, cuts: Sequence[tuple[int, int]], size: int, where: str
) -> tuple[int, ...]:
    """The axes that cut one dim, major to minor."""
    order: list[int] = []
    for axis, factor in reversed(cuts):  # those after this axis are in their order already
        before = [
            math.prod(layout.sizes[one] for one in order[:at]) for at in range(len(order) + 1)
        ]
        if factor not in before:
            raise ShapeError(
                f"_StridedShard over axis {layout.names and layout.names[axis]!r} does not fit the "
                "placements after it",
                where=where,
                expected=f"a split factor of {' or '.join(map(str, dict.fromkeys(before)))}",
                found=str(factor),
                fix="redistribute the DTensor to Shard or Replicate first",
            )
        order.insert(before.index(factor), axis)
    parts = math.prod(layout.sizes[axis] for axis in order)
    if order != sorted(order) and size % parts:
        raise ShapeError(
            "_StridedShard of a dim that does not divide: a rank's shard is not one piece",
            where=where,
            expected=f"a size that is a multiple of {parts}",
            found=str(size),
            fix="redistribute the DTensor to Shard or Replicate first",
        )
    return tuple(order)


def _checked_dim(placement: Any, ndim: int, where: str) -> int:
    if not -ndim <= placement.dim < ndim:
        raise ShapeError(
            f"{placement!r} cuts a dim that the array does not have",
            where=where,
            expected=f"a dim from {-ndim} to {ndim - 1}" if ndim else "no Shard of a scalar",
        )
    return int(placement.dim) % ndim


def _check_sum(placement: Partial, where: str) -> None:
    if placement.reduce_op not in _SUMS:
        raise ArgumentError(
            f"Partial({placement.reduce_op!r}) has no counterpart: unreduced values are summands",
            where=where,
            expected="Partial('sum') or Partial('avg')",
            fix="redistribute the DTensor to Replicate or Shard first, which reduces it",
        )


def _checked_names(layout: Layout) -> tuple[str, ...]:
    if layout.names is None:
        raise AxisError(
            "a sharding needs a mesh with named axes",
            where=f"mesh ({layout.axis_text()})",
            fix="give the mesh names: mesh_dim_names=('dp', ...)",
        )
    return layout.names

"""Convert between sharded arrays and torch's DTensor, and between shardings and placements.

torch cuts dims by ``torch.chunk``: all parts have one size, except that the last may be short or
empty; meshdist's sizes differ by at most 1. torch cuts a dim by axes in mesh order. For another
order, ``_StridedShard`` states how many shards later axes made before. Its shard is one contiguous
part of the global array only if the sizes divide.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..arguments import get_shape
from ..arrays import as_tensor
from ..checking.call_sites import program_frame, warn_caller
from ..dtypes import dtype_name
from ..error_text import explain, with_article
from ..errors import (
    ArgumentError,
    AxisError,
    DtypeError,
    GradientError,
    KindError,
    LengthError,
    MeshError,
    ShapeError,
)
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout, get_layout
from ..mesh.partition_spec import Entry, PartitionSpec, axes_of
from ..mesh.placement import DimSplit, split_dim
from ..mesh.spec import NamedSharding
from .sharded_array import ShardedArray

__all__ = ["from_dtensor", "from_placements", "to_dtensor", "to_placements"]

_SUMS = ("sum", "avg")


def to_placements(sharding: NamedSharding) -> tuple[Placement, ...]:
    """Return torch's placement along each mesh axis.

    Unreduced axes become ``Partial("sum")``, reduced axes ``Replicate``, and axes that cut a dim
    out of mesh order ``_StridedShard``. Shard sizes are lost. If torch's rule gives the same sizes,
    ``from_placements`` is the inverse, except for reduced axes.

    Example:
        >>> import meshdist as md
        >>> mesh = md.Layout.from_shape((2, 4), ("dp", "tp"))
        >>> to_placements(md.NamedSharding(mesh, md.P(None, "tp", unreduced={"dp"})))
        (Partial(sum), Shard(dim=1))
        >>> to_placements(md.NamedSharding(mesh, md.P(("tp", "dp"))))
        (_StridedShard(dim=0, sf=4), Shard(dim=0))
    """
    if not isinstance(sharding, NamedSharding):
        raise KindError(
            "to_placements takes a NamedSharding",
            found=with_article(type(sharding).__name__),
            fix="pass a NamedSharding(mesh, spec)",
        )
    layout = sharding.layout
    placements: list[Placement] = [Replicate() for _ in range(layout.ndim)]
    for name in sharding.spec.unreduced:
        placements[layout.axis_index(name)] = Partial("sum")
    for dim, entry in enumerate(sharding.spec.partitions):
        axes = [layout.axis_index(axis) for axis in axes_of(entry)]
        for index, axis in enumerate(axes):
            before = math.prod(layout.sizes[other] for other in axes[:index] if other > axis)
            placements[axis] = (
                Shard(dim) if before == 1 else _StridedShard(dim, split_factor=before)
            )
    return tuple(placements)


def from_placements(
    placements: Sequence[Placement], mesh: Any, shape: Sequence[int]
) -> NamedSharding:
    """Return the sharding that torch's placements of an array describe.

    Sizes by torch's rule are kept, as ``shard_sizes`` if meshdist's differ. ``Partial`` becomes
    unreduced. For ``Partial("avg")`` the partial sums are the local values divided by the axis
    size: ``from_dtensor`` divides, ``ShardedArray`` expects divided values.

    Args:
        placements: a placement for each axis of the mesh; dims may be negative.
        mesh: a ``DeviceMesh`` or a ``Layout``, with named axes.
        shape: the global shape.

    Raises:
        KindError: a value is not a placement, or of an unknown class.
        ArgumentError: a ``Partial`` of another op than sum and avg.
        LengthError: not one placement for each axis.
        ShapeError: the array lacks a dim; or a ``_StridedShard`` does not divide, or contradicts
            the other placements.
        AxisError: the mesh has no axis names.

    Example:
        >>> import meshdist as md
        >>> mesh = md.Layout.from_shape((4,), ("dp",))
        >>> from_placements([Shard(0)], mesh, (9,)).shard_sizes
        {0: (3, 3, 3, 0)}
    """
    layout = get_layout(mesh, "from_placements")
    shape, names = get_shape(shape, "from_placements"), _checked_names(layout)
    if not isinstance(placements, (list, tuple)):
        raise KindError(
            "from_placements takes a placement for each axis of the mesh",
            expected="a list or tuple of torch's placements",
            found=f"{placements!r}, {with_article(type(placements).__name__)}",
            fix="pass for example [Shard(0), Replicate()]",
        )
    where = f"placements {list(placements)!r} of shape {shape} on mesh ({layout.axis_text()})"
    if len(placements) != layout.ndim:
        raise LengthError(
            "the number of placements does not match the number of mesh axes",
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
                f"{placement!r} is not a supported placement",
                where=where,
                expected="Shard, Replicate or Partial",
                found=with_article(type(placement).__name__),
                fix="redistribute the DTensor to one of them first",
            )
    orders = [_axis_order(layout, dim, size, where) for dim, size in zip(cuts, shape, strict=True)]
    return _chunked_sharding(mesh, orders, shape, PartitionSpec(unreduced=unreduced))


def as_torch_holds_it(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """Return ``sharding`` with torch's shard sizes, and its axis order in uneven dims."""
    orders = []  # torch supports only mesh order for a dim that does not divide.
    for split in sharding.placement(shape).dims:
        divides = split.size % split.num_blocks == 0
        orders.append(split.axes if divides else tuple(sorted(split.axes)))
    return _chunked_sharding(sharding.mesh, orders, tuple(shape), sharding.spec)


def _chunked_sharding(
    mesh: Any, orders: Sequence[tuple[int, ...]], shape: tuple[int, ...], kinds: PartitionSpec
) -> NamedSharding:
    """Return the sharding that cuts each dim d along ``orders[d]`` as ``torch.chunk`` would.

    Args:
        orders: by dim, the axes that cut it, major to minor.
        kinds: a sharding with the unreduced and reduced axes.
    """
    layout = get_layout(mesh, "from_placements")
    names = _checked_names(layout)
    entries: list[Entry] = [tuple(names[axis] for axis in axes) for axes in orders]
    shard_sizes = {}
    for dim, (axes, size) in enumerate(zip(orders, shape, strict=True)):
        axis_sizes = tuple(layout.sizes[axis] for axis in axes)
        blocks = _chunk_sizes(size, axis_sizes)
        if axes and split_dim(size, axes, axis_sizes, blocks).block_sizes is not None:
            shard_sizes[dim] = blocks
    spec = PartitionSpec(*entries, unreduced=kinds.unreduced, reduced=kinds.reduced)
    return NamedSharding(mesh, spec, shard_sizes=shard_sizes)


def _chunk_sizes(size: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a dim's shard sizes if ``torch.chunk`` cuts it along each axis in turn."""
    blocks = [size]
    for parts in axis_sizes:
        cut = []
        for block in blocks:
            longest = -(-block // parts)
            cut += [max(0, min(longest, block - part * longest)) for part in range(parts)]
        blocks = cut
    return tuple(blocks)


def _axis_order(
    layout: Layout, cuts: Sequence[tuple[int, int]], size: int, where: str
) -> tuple[int, ...]:
    """Return the axes that cut a dim of ``size``, major first, from pairs (axis, split factor)."""
    order: list[int] = []
    for axis, factor in reversed(cuts):  # Later axes are in their order already.
        before = [
            math.prod(layout.sizes[other] for other in order[:at]) for at in range(len(order) + 1)
        ]
        if factor not in before:
            raise ShapeError(
                f"_StridedShard over axis {layout.names and layout.names[axis]!r} does not match "
                "the placements after it",
                where=where,
                expected=f"a split factor of {' or '.join(map(str, dict.fromkeys(before)))}",
                found=str(factor),
                fix="redistribute the DTensor to Shard or Replicate first",
            )
        order.insert(before.index(factor), axis)
    parts = math.prod(layout.sizes[axis] for axis in order)
    if order != sorted(order) and size % parts:
        raise ShapeError(
            "_StridedShard of a dim that does not divide evenly: a rank's shard is not contiguous",
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
            f"Partial({placement.reduce_op!r}) is not supported: unreduced values are partial sums",
            where=where,
            expected="Partial('sum') or Partial('avg')",
            fix="redistribute the DTensor to Replicate or Shard first, which reduces it",
        )


def _checked_names(layout: Layout) -> tuple[str, ...]:
    if layout.names is None:
        raise AxisError(
            "a sharding needs a mesh with named axes",
            where=f"mesh ({layout.axis_text()})",
            fix="name the axes of the mesh: mesh_dim_names=('dp', ...)",
        )
    return layout.names


class _WarnedSites(set[tuple[str, int]]):
    """The program lines that were warned that ``to_dtensor`` reshards."""


def from_dtensor(x: DTensor, mesh: DeviceMesh | None = None) -> ShardedArray:
    """Convert a DTensor to a sharded array that shares its memory; inverse of ``to_dtensor``.

    torch's sizes are kept. For ``Partial("avg")`` the local values are divided by the axis size,
    in new memory.

    Args:
        x: a DTensor whose placements are Shard, Replicate, or Partial of sum or avg.
        mesh: a mesh with the ranks of ``x``'s mesh, in the same order, and named axes. None takes
            the current mesh if it matches, else creates a mesh from torch's, collectively over
            its ranks.

    Gradient: as ``DTensor.to_local``.

    Raises:
        KindError: ``x`` is not a DTensor, or a placement is of an unknown class.
        ArgumentError: Partial of another op.
        DtypeError: Partial("avg") of integers.
        MeshError: the mesh has other ranks.
        AxisError: torch's mesh has no axis names, and ``mesh`` is None.
        ShapeError: the local size differs from torch's rule, or as ``from_placements``.
    """
    if not isinstance(x, DTensor):
        raise KindError("from_dtensor takes a DTensor", found=with_article(type(x).__name__))
    if mesh is None:
        mesh = find_current_mesh()
        if mesh is None or not _is_same_mesh(mesh, x.device_mesh):
            mesh = DeviceMesh.from_torch(x.device_mesh)
    elif not _is_same_mesh(mesh, x.device_mesh):
        raise _mesh_mismatch("from_dtensor", mesh, x.device_mesh)
    sharding = from_placements(x.placements, mesh, tuple(x.shape))
    local: Any = x.to_local()
    if hasattr(local, "wait"):  # an asynchronous torch collective may still be running
        local = local.wait()
    averaged = [
        mesh.layout.sizes[axis]
        for axis, placement in enumerate(x.placements)
        if type(placement) is Partial and placement.reduce_op == "avg"
    ]
    if averaged and not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise DtypeError(
            "from_dtensor cannot split an average of integers into partial sums",
            expected="floating or complex numbers where a placement is Partial('avg')",
            found=f"{dtype_name(x.dtype)} with {list(x.placements)!r}",
            fix="redistribute the DTensor to Replicate or Shard first",
        )
    for size in averaged:
        local = local / size
    return ShardedArray(local, sharding, tuple(x.shape))


def to_dtensor(x: ShardedArray, device_mesh: TorchMesh | None = None) -> DTensor:
    """Convert a sharded array to a DTensor; inverse of ``from_dtensor``.

    The DTensor shares memory if torch's sharding rule gives the same shards. Otherwise ``x`` is
    resharded collectively, with one warning per program line; ``x.reshard(...)`` with the sharding
    in the warning avoids it.

    Args:
        x: a sharded array.
        device_mesh: torch's mesh with the array's ranks, in the same order. None creates a mesh at
            the first call, collectively over the world, and keeps it with the array's mesh.

    Gradient: as ``DTensor.from_local``; unreduced along reduced axes.

    Raises:
        KindError: ``x`` is not a sharded array.
        MeshError: the torch mesh has other ranks.
        GradientError: torch 2.11 would sum the gradient of reduced axes.
    """
    if not isinstance(x, ShardedArray):
        raise KindError("to_dtensor takes a ShardedArray", found=with_article(type(x).__name__))
    mesh: DeviceMesh = x.mesh
    if device_mesh is None:
        device_mesh = mesh.caches.of(TorchMesh, make=mesh.to_torch)
    elif not _is_same_mesh(mesh, device_mesh):
        raise _mesh_mismatch("to_dtensor", mesh, device_mesh)
    held = as_torch_holds_it(x.sharding, x.shape)
    if held.placement(x.shape) != x.sharding.placement(x.shape):
        _warn_of_moves(x, held)
        x = x.reshard(held)
    placements = to_placements(held)
    local = as_tensor(x.local, argument="x", operation="to_dtensor")
    gradient: dict[str, Any] = {}
    if held.spec.reduced and local.requires_grad and torch.is_grad_enabled():
        if "grad_placements" not in inspect.signature(DTensor.from_local).parameters:
            raise GradientError(
                "to_dtensor: this torch would sum the gradient over the reduced axes",
                expected="torch 2.12 or newer, whose DTensor.from_local has grad_placements",
                found=f"torch {torch.__version__}, an array that requires grad, {x.sharding!r}",
                fix="update torch, or convert under torch.no_grad()",
            )
        gradient["grad_placements"] = [
            Partial("sum") if name in held.spec.reduced else placement
            for name, placement in zip(mesh.axis_names, placements, strict=True)
        ]
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        shape=torch.Size(x.shape),
        stride=tuple(math.prod(x.shape[dim + 1 :]) for dim in range(len(x.shape))),
        **gradient,
    )


def _is_same_mesh(mesh: DeviceMesh, theirs: TorchMesh) -> bool:
    """Return whether ranks are equal and names too, if torch's mesh has any."""
    names = theirs.mesh_dim_names
    return mesh.layout.ranks().tolist() == theirs.mesh.tolist() and (
        names is None or tuple(names) == mesh.layout.names
    )


def _mesh_mismatch(call: str, mesh: DeviceMesh, theirs: TorchMesh) -> MeshError:
    return MeshError(
        f"{call}: torch's mesh and the meshdist mesh differ",
        expected=f"{mesh!r}, ranks {mesh.layout.ranks().tolist()}",
        found=f"{theirs!r}, ranks {theirs.mesh.tolist()}",
        fix="make one from the other: mesh.to_torch() or md.DeviceMesh.from_torch(theirs)",
    )


def _warn_of_moves(x: ShardedArray, held: NamedSharding) -> None:
    """Warn once per program line that ``to_dtensor`` reshards ``x`` to ``held``."""
    frame = program_frame(sys._getframe(1))
    site = (frame.f_code.co_filename, frame.f_lineno)
    warned = x.mesh.caches.of(_WarnedSites)
    if site in warned:
        return
    warned.add(site)
    here, there = (sharding.placement(x.shape).dims for sharding in (x.sharding, held))
    moved = [dim for dim, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
    warn_caller(
        explain(
            "to_dtensor reshards this array, because torch shards it differently",
            expected=_blocks_text(there, moved, x.mesh.axis_names),
            found=_blocks_text(here, moved, x.mesh.axis_names),
            fix=f"reshard explicitly before the call: x.reshard({held!r})",
        )
    )


def _blocks_text(
    dims: Sequence[DimSplit], chosen: Sequence[int], names: Sequence[str], shown: int = 8
) -> str:
    """Return at most ``shown`` block sizes per dim as lines: ``dim 0 in 3, 3, 2, 2 along dp``."""
    lines = []
    for dim in chosen:
        bounds = dims[dim].boundaries[: shown + 1]
        sizes = [str(stop - start) for start, stop in pairwise(bounds)]
        more = ", ..." if dims[dim].num_blocks > shown else ""
        axes = ", ".join(names[axis] for axis in dims[dim].axes)
        lines.append(f"dim {dim} in {', '.join(sizes)}{more} along {axes}")
    return "\n".join(lines)

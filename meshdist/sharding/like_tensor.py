"""Find how an annotated tensor is sharded: the mesh, the global shape, and the sizes of all parts.

An annotation holds the sizes of this rank's part and the names of axes. The global shape is known
if meshdist made the shard. Otherwise the ranks exchange the sizes of their parts once, and the
annotation keeps the result.

Worked example: a weight of 5 rows on 2 ranks, annotated by hand.

                           rank 0                 rank 1
    annotation             "3@tp, 4"              "2@tp, 4"
    after the exchange     global sizes (5, 4)    global sizes (5, 4)
    parts of 4 and 1       ((4, 1), 4)            ((4, 1), 4)

    >>> import meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ...     rows = torch.full((3 - md.get_rank(), 4), float(md.get_rank()))
    ...     weight = md.annotate(rows, "f@tp d", mesh=mesh)
    ...     rows = md.unshard(weight, like=weight)[:, 0].tolist()
    ...     return rows, annotation_of(weight).global_sizes
    >>> md.simulate(program, 2)[1]
    ([0.0, 0.0, 0.0, 1.0, 1.0], (5, 4))
"""

from __future__ import annotations

from typing import Any

import torch

from ..annotations.axis_types import GlobalSizes, annotation_of, change_annotation, shown
from ..annotations.tensor_specs import dims_text, find_spec, sizes_of
from ..arrays import shape_text
from ..collectives.normalize_args import run_named
from ..collectives.torch_private import hidden_from_modes
from ..error_text import with_article
from ..errors import ArgumentError, KindError, MeshError, ShapeError
from ..mesh.current_mesh import find_meshes_with, get_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout_arguments import no_axis
from ..mesh.partition_spec import PartitionSpec, sharding_axes
from ..mesh.spec import NamedSharding, sized_by_shards
from ..typed_mode.type_errors import mesh_text, tensor_text


def mesh_like(operation: str, like: torch.Tensor, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``mesh``, or the mesh of the axes that shard ``like``; raise if it is not known.

    Raises:
        AxisError: ``mesh`` lacks an axis.
        MeshError: no open mesh has the axes, or several, for different ranks.
    """
    axes = _axes_of(_spec_of(operation, like))
    if mesh is not None:
        get_mesh(operation, mesh)
        for axis in axes:
            if axis not in mesh.axis_names:
                raise no_axis(axis, mesh.axis_names, f"{operation} on {mesh_text(mesh)}")
        return mesh
    found = find_meshes_with(axes)
    if len(found) != 1:
        count = "several open meshes have" if found else "no open mesh has"
        raise MeshError(
            f"{operation}: {count} {shown(axes)}",
            expected="a single mesh with the axes that shard the tensor",
            found=tensor_text(like) + "".join(f"\n{mesh_text(each)}" for each in found),
            fix="call it inside `with mesh:`, or pass the mesh: mesh=mesh",
        )
    return found[0]


def sharding_like(
    operation: str,
    like: Any,
    mesh: DeviceMesh | None,
    local_shape: tuple[int, ...] | None,
    shape: tuple[int, ...] | None = None,
) -> tuple[NamedSharding, tuple[int, ...]]:
    """Return the sharding of ``like`` and the global shape; collective if the shape is not known.

    Args:
        local_shape: the shape of this rank's shard of the array that is sharded like it; or None.
        shape: the global shape of that array, or None.

    Raises:
        KindError: ``like`` is not a tensor. ArgumentError: it has no spec.
        ShapeError: ``like`` has another shape, or the ranks' parts do not form a global array.
        AxisError, MeshError: see ``mesh_like``.
    """
    found_mesh = mesh_like(operation, like, mesh)
    spec = _spec_of(operation, like)
    here = tuple(like.shape)
    if local_shape is not None and local_shape != here:
        raise _mismatched(operation, f"shape {shape_text(here)}, as like", local_shape)
    sizes: GlobalSizes = annotation_of(like).global_sizes
    if not sizes:
        sizes = _exchange_sizes(operation, like, spec, found_mesh)
        change_annotation(like, global_sizes=sizes)
    key = spec, sizes
    known = found_mesh.caches.find(NamedSharding, key)
    if known is None:
        parts = {dim: size for dim, size in enumerate(sizes) if isinstance(size, tuple)}
        known = NamedSharding(found_mesh, spec, shard_sizes=parts)
        found_mesh.caches.keep(NamedSharding, key, known)
    whole = tuple(sum(size) if isinstance(size, tuple) else size for size in sizes)
    if shape is not None and shape != whole:
        raise _mismatched(operation, f"shape {shape_text(whole)}, the global shape of like", shape)
    return known, whole


def _spec_of(operation: str, like: Any) -> PartitionSpec:
    """Return the dims and partial sums of the spec of ``like``; raise if it has none."""
    if not isinstance(like, torch.Tensor):
        raise KindError(
            f"{operation} takes an annotated tensor as like=",
            found=with_article(type(like).__name__),
        )
    spec = find_spec(like)
    if spec is None:
        dims = annotation_of(like).dims
        raise ArgumentError(
            f"{operation}: like= has no spec that states how it is sharded",
            expected="a tensor with a spec",
            found=tensor_text(like) + (f", annotated as [{dims}]" if dims else ""),
            fix="if it is equal on all ranks, it is already complete; if it is a shard, annotate "
            "it, for example md.annotate(p, 'f@tp d', mesh=mesh)",
        )
    # Along reduced axes values are equal.
    return PartitionSpec(*spec.partitions, unreduced=spec.unreduced)


def _axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    return (*sharding_axes(spec), *sorted(spec.unreduced))


def _mismatched(operation: str, expected: str, shape: tuple[int, ...]) -> ShapeError:
    return ShapeError(
        f"{operation}: the array does not have the shape of like",
        expected=expected,
        found=f"shape {shape_text(shape)}",
    )


@hidden_from_modes
def _exchange_sizes(
    operation: str, like: torch.Tensor, spec: PartitionSpec, mesh: DeviceMesh
) -> GlobalSizes:
    """Return the global sizes of ``like``; raise on all ranks if parts do not match; collective."""
    cut = sharding_axes(spec)
    here = tuple(like.shape)
    if not cut:
        return here
    part = mesh[tuple(axis for axis in mesh.axis_names if axis in cut)]
    group = part.open_group()
    device = group.first_device_type()
    rows = torch.empty((group.size(), len(here)), dtype=torch.int64, device=device)
    op_name = f"the global shape of {dims_text((0,) * len(here), spec)}"
    mine = torch.tensor(here, dtype=torch.int64, device=device)
    run_named("all_gather_into_tensor", group, op_name, rows, mine)
    shapes = dict(zip(group.ranks, map(tuple, rows.tolist()), strict=True))
    spec = PartitionSpec(*spec.partitions)
    sharding, shape = sized_by_shards(NamedSharding(part, spec), shapes)
    for rank, found in shapes.items():
        if (expected := sharding.shard_shape(shape, rank)) != found:
            raise ShapeError(
                f"{operation}: the parts of like do not form a global array",
                where=f"{mesh_text(part)}, {spec!r}",
                expected=f"rank {rank}: shape {shape_text(expected)}",
                found=f"rank {rank}: shape {shape_text(found)}",
                fix="annotate the tensor with its sharding: md.annotate(p, spec)",
            )
    return sizes_of(sharding, shape)

"""Shardings of this rank: checked, cut further, and as text."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import shape_text
from ..errors import AxisError, KindError, MeshError, ShapeError
from ..functional.axis_types import type_text
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.partition_spec import PartitionSpec
from ..mesh.placement import Box, Placement, shape_of
from ..mesh.spec import NamedSharding, sharding_of
from ..typed_contexts.carried_specs import dims_text
from ..typed_contexts.refusals import type_as_text
from .changes import dim_of_largest_cells, extended


def cut_further(
    sharding: NamedSharding, shape: tuple[int, ...], axes: tuple[int, ...]
) -> NamedSharding:
    """Return ``sharding`` with ``axes`` cutting, too, the dim whose cells are the largest."""
    # The new axes are the dim's minor axes, so that a single all-gather undoes it.
    placement = sharding.placement(shape)
    dims = list(placement.dims)
    dim = dim_of_largest_cells(dims)
    dims[dim] = extended(dims[dim], axes, tuple(placement.mesh_sizes[axis] for axis in axes))
    names = sharding.layout.names or ()
    unreduced = sharding.spec.unreduced - {names[axis] for axis in axes}
    return sharding_of(sharding.mesh, dims, unreduced=unreduced)


def array_type(dtype: object, shape: Sequence[int], sharding: NamedSharding) -> str:
    """Return the type of an array as text, with the axes of each dim: ``float32[8@dp, 4]{U:tp}``.

    Example:
        >>> from meshdist import Layout, P
        >>> mesh = Layout.from_shape((2, 2, 2), ("dp", "tp", "cp"))
        >>> array_type("float32", (8, 4), NamedSharding(mesh, P(("dp", "cp"), reduced={"tp"})))
        'float32[8@(dp,cp), 4]{R:tp}'
    """
    spec = sharding.spec
    kinds = {**dict.fromkeys(spec.unreduced, "U"), **dict.fromkeys(spec.reduced, "R")}
    return type_as_text(dtype, dims_text(tuple(shape), spec), type_text(kinds))


def holds_whole(placement: Placement) -> bool:
    """Return whether every rank holds all values of the array."""
    sizes = placement.mesh_sizes
    return all(sizes[axis] == 1 for axis in (*placement.cut_axes, *placement.unreduced))


def mesh_text(mesh: DeviceMesh) -> str:
    """Return this rank, its coordinate and the mesh as "rank 1 (dp=0, tp=1) of mesh (...)"."""
    rank = mesh.get_rank()
    return f"rank {rank} ({mesh.layout.coordinate_text(rank)}) of mesh ({mesh.layout.axis_text()})"


def checked_sharding(sharding: object, call: str) -> NamedSharding:
    """Return a NamedSharding that holds this rank; a spec takes the mesh in force; or raise."""
    if isinstance(sharding, PartitionSpec):
        naming = "NamedSharding(mesh, spec)"
        try:
            sharding = NamedSharding(mesh_in_force(call, naming=naming), sharding)
        except AxisError as error:
            raise with_hidden_mesh(error, None, f"name the mesh that is meant: {naming}") from None
    if not isinstance(sharding, NamedSharding):
        raise KindError(
            f"{call} takes a sharding",
            expected="a NamedSharding, or a PartitionSpec where a mesh is in force",
            found=f"{sharding!r}, a {type(sharding).__name__}",
            fix="write NamedSharding(mesh, P('dp'))",
        )
    if not isinstance(sharding.mesh, DeviceMesh):
        raise MeshError(
            f"{call} needs a mesh of this world's ranks: a bare layout only plans",
            where=repr(sharding),
            expected="a DeviceMesh",
            found=f"a {type(sharding.mesh).__name__}",
            fix="make one: md.DeviceMesh('cpu', layout)",
        )
    coordinate_in(sharding.mesh, call)
    return sharding


def check_shard(
    call: str, sharding: NamedSharding, shape: tuple[int, ...], local_shape: tuple[int, ...]
) -> Box:
    """Return the box of this rank's shard of an array of ``shape``; raise for another shape."""
    box = sharding.placement(shape).box(coordinate_in(sharding.mesh, call))
    wanted = shape_of(box)
    if wanted == local_shape:
        return box
    raise ShapeError(
        f"{call}: the local array is no shard of an array of shape {shape_text(shape)}",
        where=f"{mesh_text(sharding.mesh)}, {sharding.spec!r}",
        expected=f"shape {shape_text(wanted)}, this rank's shard",
        found=f"shape {shape_text(local_shape)}",
        fix="md.device_put(x, sharding) if every rank has the whole: it takes this rank's shard"
        if shape == local_shape
        else "pass the shape of the whole array, the same on every rank; or the sizes of the "
        "shards: md.NamedSharding(mesh, spec, shard_sizes={dim: sizes})",
    )

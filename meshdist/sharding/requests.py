"""The requests of ``reshard``, ``shard`` and ``unshard``: checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..arguments import get_whole_number
from ..errors import KindError, ShapeError
from ..mesh.current_mesh import mesh_in_force
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.partition_spec import axes_of
from ..mesh.pattern import parse
from ..mesh.pattern_sizes import regroup, size_side
from ..mesh.spec import NamedSharding, P
from .planning import mesh_links, plan_shardings
from .plans import Plan, make_plan
from .refinement import refine

__all__ = [
    "ReshardRequest",
    "check_shard",
    "get_mesh",
    "move_request",
    "on_mesh",
    "pattern_request",
    "shard_request",
    "sharding_request",
    "unshard_request",
    "whole_shape",
]

_Sizes = Mapping[str, int]


@dataclass(frozen=True)
class ReshardRequest:
    """How local arrays lie before and after a call, and the plan between.

    A pattern's groups stand for several parts. What moves are parts, in the order of the right
    side, so that the result needs no copy to be joined: ``take_apart`` and ``join`` are what einops
    does to a local array before and after.

    Args:
        verb: the public call.
        mesh: whose groups the plan's axes mean.
        meshes: the source's and the target's.
        source: how the array lies.
        target: how it shall lie.
        plan: this rank's.
        take_apart: einops' pattern, and the local sizes that it needs; None where nothing is done.
        join: einops' pattern; None where nothing is done.
    """

    verb: str
    mesh: DeviceMesh
    meshes: tuple[DeviceMesh, DeviceMesh]
    source: NamedSharding
    target: NamedSharding
    plan: Plan
    take_apart: tuple[str, Mapping[str, int]] | None = None
    join: str | None = None


def get_mesh(verb: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of a call, or the one in force; raise unless this rank is in it."""
    mesh = mesh_in_force(verb) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise KindError(
            f"{verb} needs the groups of a DeviceMesh",
            expected="a DeviceMesh",
            found=f"a {type(mesh).__name__}",
            fix="plan on a Layout with md.plan; move data on a DeviceMesh",
        )
    coordinate_in(mesh, verb)
    return mesh


def pattern_request(
    text: str,
    mesh: DeviceMesh,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
    sizes: _Sizes,
) -> ReshardRequest:
    """Make the request of ``reshard(x, "left -> right")``; raises as ``pattern_sizes.regroup``."""
    _check_hashable(text, sizes)
    found = regroup(
        text, mesh.layout, rank=mesh.get_rank(), local_shape=local_shape, shape=shape, sizes=sizes
    )
    left, right = found.source, found.target
    plan = make_plan(
        left.placement.permuted(found.order),
        right.placement,
        mesh.get_coordinate() or (),
        layout=mesh.layout,
        links=mesh_links(mesh),
        title=f"{text} of shape {left.shape}",
    )
    take_apart = join = None
    if found.is_reordered or any(count != 1 for count in (*left.counts, *right.counts)):
        letters = {name: f"d{place}" for place, name in enumerate(left.names)}
        names = [letters[name] for name in right.names]
        local = plan.source.local_shape(plan.coordinate)
        take_apart = (
            f"{_side_text(left.names, left.counts, letters)} -> {' '.join(names)}",
            dict(zip(names, local, strict=True)),
        )
        join = f"{' '.join(names)} -> {_side_text(right.names, right.counts, letters)}"
    meshes = (mesh, mesh)
    return ReshardRequest(
        "reshard", mesh, meshes, left.sharding, right.sharding, plan, take_apart, join
    )


def sharding_request(
    source: NamedSharding,
    target: NamedSharding,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
) -> ReshardRequest:
    """Make the request of ``reshard(x, source, target)``; raises where a shape does not fit."""
    shape = whole_shape(source, local_shape) if shape is None else shape
    check_shard("reshard", get_mesh("reshard", source.mesh), source, shape, local_shape)
    get_mesh("reshard", target.mesh)
    return move_request("reshard", source, target, shape)


def shard_request(
    pattern: str | NamedSharding, mesh: DeviceMesh, shape: tuple[int, ...], sizes: _Sizes
) -> ReshardRequest:
    """Make the request of ``shard``, from whole to shards; raises as ``size_side`` does."""
    target = pattern
    if not isinstance(target, NamedSharding):
        _check_hashable(target, sizes)
        target = size_side(target, mesh.layout, shape=shape, sizes=sizes).sharding
    return move_request("shard", NamedSharding(mesh, P()), on_mesh(mesh, target), shape)


def unshard_request(
    pattern: str | NamedSharding,
    mesh: DeviceMesh,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
    sizes: _Sizes,
) -> ReshardRequest:
    """Make the request of ``unshard``, from shards to the whole; raises as ``shard_request``."""
    if isinstance(pattern, NamedSharding):
        source = pattern
        shape = whole_shape(source, local_shape) if shape is None else shape
    else:
        _check_hashable(pattern, sizes)
        side = size_side(
            pattern,
            mesh.layout,
            rank=mesh.get_rank(),
            local_shape=local_shape,
            shape=shape,
            sizes=sizes,
        )
        source, shape = side.sharding, side.shape
    check_shard("unshard", mesh, source, shape, local_shape)
    return move_request("unshard", on_mesh(mesh, source), NamedSharding(mesh, P()), shape)


def move_request(
    verb: str, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]
) -> ReshardRequest:
    """A move between shardings on a DeviceMesh each, for an array of known shape.

    Raises:
        MeshError: the meshes hold other ranks, or have no common refinement.
        ShapeError: a spec does not fit the shape.
    """
    mesh, other = source.mesh, target.mesh
    plan = plan_shardings(source, target, shape, mesh.get_rank(), mesh_links(mesh))
    whole = mesh
    if plan.layout != mesh.layout:
        whole = mesh.refined(plan.layout, refine(mesh.layout, other.layout).owners)
    return ReshardRequest(verb, whole, (mesh, other), source, target, plan)


def whole_shape(sharding: NamedSharding, local_shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the whole array: each dim's shard times the number of shards.

    Dims that the spec has entries for, and the array lacks, are left out: a placement refuses them.
    """
    sizes, entries = sharding.layout.axis_sizes, sharding.spec.partitions
    whole = []
    for dim, size in enumerate(local_shape):
        if dim in sharding.shard_sizes:
            whole.append(sum(sharding.shard_sizes[dim]))
        else:
            axes = axes_of(entries[dim]) if dim < len(entries) else ()
            whole.append(size * math.prod(sizes[axis] for axis in axes))
    return tuple(whole)


def check_shard(
    verb: str,
    mesh: DeviceMesh,
    sharding: NamedSharding,
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> None:
    """Raise ShapeError unless a local shape is that of this rank's shard."""
    expected = sharding.shard_shape(shape, mesh.get_rank())
    if expected != local_shape:
        raise ShapeError(
            f"{verb}: the local array is no shard of the whole",
            where=f"rank {mesh.get_rank()}, {sharding.spec!r} on mesh ({mesh.layout.axis_text()})",
            expected=f"shape {expected}, this rank's shard of {shape}",
            found=f"shape {local_shape}",
            fix="give the shape of the whole array: shape=(...)",
        )


def _check_hashable(text: str, sizes: _Sizes) -> None:
    """Raise KindError where a text is none, or a size no whole number: both are keys of caches."""
    parse(text)
    for name, size in sizes.items():
        get_whole_number(size, f"the size of dim {name!r}", where=f"pattern {text!r}")


def on_mesh(mesh: DeviceMesh, sharding: NamedSharding) -> NamedSharding:
    """A sharding that a pattern gave, which knows a layout alone, on the mesh."""
    if sharding.mesh is mesh:
        return sharding
    return NamedSharding(mesh, sharding.spec, shard_sizes=sharding.shard_sizes)


def _side_text(names: Sequence[str], counts: Sequence[int], letters: Mapping[str, str]) -> str:
    """One side of einops' pattern.

    Example:
        >>> _side_text(("h", "k", "s"), (2, 0, 1), {"h": "d0", "k": "d1", "s": "d2"})
        '(d0 d1) 1 d2'
    """
    rest = iter(names)
    groups = [" ".join([letters[next(rest)] for _ in range(count)]) for count in counts]
    return " ".join(f"({group})" if " " in group else group or "1" for group in groups)

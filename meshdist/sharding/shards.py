"""One rank's shard of an array: what it is, which whole it is of, how it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..arrays import Array, as_tensor, like, shape_text
from ..errors import ArgumentError, ShapeError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.named_dims import regroup
from ..mesh.spec import NamedSharding
from .requests import Request, on_mesh, pattern_request, sharding_request
from .resharding import Resharding
from .shardings import mesh_text

__all__ = ["Shard", "move", "move_by_pattern", "no_shard"]


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of an array that one rank holds.

    Args:
        index: the slices that take it out of the whole array.
        replica: the number of this copy; the rank with 0 saves it.
        data: the local array.
    """

    index: tuple[slice, ...]
    replica: int
    data: Array


_NOTE = "moves of sharded arrays"
_MOST_KEPT = 1024


def move(
    local: Array, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]
) -> Array:
    """This rank's shard at ``target`` of an array that lies as ``source`` says; collective."""
    local_shape = tuple(local.shape)
    return _carried_out(
        local,
        source.mesh,
        (source, target, shape),
        lambda: sharding_request(source, target, local_shape, shape),
    )


def move_by_pattern(
    local: Array,
    source: NamedSharding,
    shape: tuple[int, ...],
    pattern: str,
    sizes: Mapping[str, int],
) -> tuple[Array, NamedSharding, tuple[int, ...]]:
    """This rank's shard after ``pattern``, and the sharding and the shape of the whole then.

    Raises:
        PatternError, AxisError, ShapeError: a pattern that does not fit the mesh or the shape.
        ArgumentError: its left side says another sharding than ``source``.
    """
    mesh, local_shape = source.mesh, tuple(local.shape)
    found = regroup(pattern, mesh.layout, shape=shape, sizes=sizes)
    left, right = found.source.sharding, found.target.sharding
    if left.placement(shape) != source.placement(shape):
        raise ArgumentError(
            f"reshard: the array does not lie as the left side of {pattern!r} says",
            where=mesh_text(mesh),
            expected=repr(source.spec),
            found=repr(left.spec),
            fix="write the right side alone: the array knows how it lies",
        )
    moved = _carried_out(
        local,
        mesh,
        (source, pattern, shape, *sizes.items()),
        lambda: pattern_request(pattern, mesh, local_shape, shape, sizes),
    )
    return moved, on_mesh(mesh, right), found.target.shape


def _carried_out(local: Array, mesh: DeviceMesh, key: Any, request: Callable[[], Request]) -> Array:
    """The result of a request, made at its first use on the mesh, on this rank's shard."""
    tensor = as_tensor(local, argument="local", verb="reshard", writable=False)
    kept: dict[Any, Resharding] = mesh.notes.setdefault(_NOTE, {})
    found = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        found = kept[key] = Resharding(request())
    return like(found(tensor), local)


def no_shard(
    local_shape: tuple[int, ...],
    wanted: tuple[int, ...],
    shape: tuple[int, ...],
    sharding: NamedSharding,
) -> ShapeError:
    """The error of a local array that is no shard of the whole."""
    if shape == local_shape:
        fix = "md.device_put(x, sharding) where every rank has the whole: it takes this rank's part"
    else:
        fix = (
            "give the shape of the whole, ShardedArray(local, sharding, shape), or the sizes of "
            "the shards, NamedSharding(mesh, spec, shard_sizes={dim: sizes})"
        )
    return ShapeError(
        f"the local array is no shard of an array of shape {shape_text(shape)}",
        where=f"{mesh_text(sharding.mesh)}, {sharding.spec!r}",
        expected=f"shape {shape_text(wanted)}",
        found=f"shape {shape_text(local_shape)}",
        fix=fix,
    )

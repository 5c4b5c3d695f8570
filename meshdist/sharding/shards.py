"""One rank's shard of an array: what it is, which whole it is of, how it moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays import Array, as_tensor, like, shape_text
from ..errors import ShapeError
from ..mesh.spec import NamedSharding
from .requests import sharding_request
from .resharding import Resharding
from .shardings import mesh_text

__all__ = ["Shard", "move", "no_shard"]


@dataclass(frozen=True, eq=False)
class Shard:
    """What one rank holds of an array.

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
    tensor = as_tensor(local, argument="local", verb="reshard", writable=False)
    kept: dict[Any, Resharding] = source.mesh.notes.setdefault(_NOTE, {})
    key = (source, target, shape)
    found = kept.get(key)
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        request = sharding_request(source, target, tuple(tensor.shape), shape)
        found = kept[key] = Resharding(request)
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

"""Sharded arrays for tests: meshes, shardings, and the whole put together from what ranks hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import meshdist as md

NAMES = ("dp", "tp", "cp")


class Held(NamedTuple):
    """What one rank holds of an array."""

    shape: tuple[int, ...]
    index: tuple[slice, ...]
    replica: int
    local: Any
    type: str


def held(x: md.ShardedArray) -> Held:
    """What this rank holds of ``x``, in NumPy's arrays."""
    (shard,) = x.addressable_shards
    data = shard.data.detach().numpy() if hasattr(shard.data, "detach") else np.asarray(shard.data)
    return Held(x.shape, shard.index, shard.replica, data.copy(), repr(x).split(", rank")[0][13:])


def assemble(shards: Sequence[Held]) -> Any:
    """The whole: what savers hold, summed where several hold partial sums; replicas are equal."""
    shape = shards[0].shape
    whole = np.zeros(shape, dtype=np.result_type(*(one.local.dtype for one in shards)))
    covered = np.zeros(shape, dtype=bool)
    for one in shards:
        assert one.shape == shape
        assert whole[one.index].shape == one.local.shape
        if one.replica == 0:
            whole[one.index] += one.local
            covered[one.index] = True
    assert covered.all()
    return whole


def on_mesh(program: Callable[[md.DeviceMesh], Any], sizes: Sequence[int] = (2, 2)) -> list[Any]:
    """Run ``program(mesh)`` on simulated ranks; return the results by rank."""

    def run() -> Any:
        names = NAMES[: len(sizes)]
        return program(md.init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names))

    return md.simulate(run, math.prod(sizes))


def error_on_mesh(
    program: Callable[[md.DeviceMesh], Any], kind: type[Exception], sizes: Sequence[int] = (2, 2)
) -> str:
    """The text of the error that ``program`` raises on every rank, as rank 1 says it."""

    def catch(mesh: md.DeviceMesh) -> str:
        with pytest.raises(kind) as caught:
            program(mesh)
        assert caught.type is kind, caught.value
        return str(caught.value)

    return on_mesh(catch, sizes)[1]

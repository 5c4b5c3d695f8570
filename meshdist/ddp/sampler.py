"""Which samples a rank reads: torch's sampler, its share given by a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from torch.utils import data

from ..checking.call_sites import warn_caller
from ..collectives.torch_private import unseen
from ..errors import ArgumentError, KindError, NotInGroupError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..worlds.initialization import get_rank, get_world_size

__all__ = ["DistributedSampler"]

T = TypeVar("T", covariant=True)


class DistributedSampler(data.DistributedSampler[T]):
    """Each rank of an axis reads its own share of a data set; other axes read the same.

    Call ``set_epoch(epoch)`` before each epoch, so that the order changes; without, the second pass
    warns. Nothing is sent.

    Args:
        dataset: what is sampled; of equal length on every rank.
        num_replicas: an axis, ``mesh["dp"]``; several, ``mesh["dp", "cp"]``, taken as one; a
            ProcessGroup; a number, as torch; or None for the world.
        rank: with a number: which share; None for this rank in the world.
        shuffle: whether samples come in random order.
        seed: of the order, equal on every rank.
        drop_last: whether to drop the tail that does not divide; else some samples come twice.

    Raises:
        NotInGroupError: this rank is not on the axis or in the group.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     return list(DistributedSampler(range(6), mesh["dp"], shuffle=False))
        >>> md.simulate(program, (2, 2))
        [[0, 2, 4], [0, 2, 4], [1, 3, 5], [1, 3, 5]]
    """

    def __init__(
        self,
        dataset: data.Dataset[Any],
        num_replicas: int | DeviceMesh | ProcessGroup | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        size, place = _size_and_place(num_replicas, rank)
        super().__init__(dataset, size, place, shuffle, seed, drop_last)
        self._num_passes = 0  # in this epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the order be that of ``epoch``, equal on every rank."""
        super().set_epoch(epoch)
        self._num_passes = 0

    @unseen
    def __iter__(self) -> Iterator[T]:
        self._num_passes += 1
        if self.shuffle and self._num_passes == 2:
            warn_caller(
                f"samples come in the order of epoch {self.epoch} again: "
                "call sampler.set_epoch(epoch) before each epoch, or pass shuffle=False"
            )
        return super().__iter__()


def _size_and_place(
    num_replicas: int | DeviceMesh | ProcessGroup | None, rank: int | None
) -> tuple[int, int]:
    """How many shares there are, and which is ours."""
    if isinstance(num_replicas, (DeviceMesh, ProcessGroup)):
        if rank is not None:
            raise ArgumentError(
                f"rank={rank} was given beside {num_replicas!r}, which tells it",
                expected="rank only with a number of replicas",
                fix="drop rank",
            )
        if isinstance(num_replicas, ProcessGroup):
            return num_replicas.size(), num_replicas.rank()
        coordinate = num_replicas.get_coordinate()
        if coordinate is None:
            raise NotInGroupError(
                "this rank has no share: it is not on the mesh",
                where=f"rank {num_replicas.world.rank}, {num_replicas!r}",
                fix="make the sampler only where mesh.get_coordinate() is not None",
            )
        shape = num_replicas.shape
        return math.prod(shape), int(np.ravel_multi_index(coordinate, shape))
    if num_replicas is not None and (
        isinstance(num_replicas, bool) or not isinstance(num_replicas, int)
    ):
        raise KindError(
            f"num_replicas is of type {type(num_replicas).__name__}",
            expected="a number, a mesh such as mesh['dp'], a ProcessGroup, or None for the world",
        )
    size = get_world_size() if num_replicas is None else num_replicas
    place = get_rank() if rank is None else rank
    if not 0 <= place < size:
        raise ArgumentError(
            f"rank {place} has no share among {size} replicas",
            expected=f"a rank from 0 to {size - 1}" if size > 0 else "at least one replica",
            fix="pass the mesh axis over which the data is split: DistributedSampler(data, "
            "mesh['dp'])",
        )
    return size, place

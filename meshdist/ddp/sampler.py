"""Split a data set over the ranks of a mesh axis, with torch's DistributedSampler."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from operator import length_hint
from typing import Any, TypeVar

from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..arguments import get_integer
from ..bootstrap.world import find_world
from ..checking.call_sites import warn_caller
from ..collectives.torch_private import hidden_from_modes
from ..errors import ArgumentError, NotInGroupError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..worlds.queries import get_rank, get_world_size

__all__ = ["DistributedSampler"]

T = TypeVar("T", covariant=True)


class DistributedSampler(data.DistributedSampler[T]):
    """Sample each rank's share of a data set, split over an axis; ranks along other axes share it.

    Call ``set_epoch(epoch)`` before each epoch to change the order; without it, the second pass
    warns. No communication.

    Args:
        dataset: the data set, of equal length on every rank.
        num_replicas: an axis, ``mesh["dp"]``; several together, ``mesh["dp", "cp"]``; a
            ProcessGroup; a number, as in torch; or None for all ranks. None warns once if an open
            mesh has several axes, unlike ``md.distributed.group.WORLD``.
        rank: with a number, the share's index; None for this rank in the world.
        shuffle: whether samples are in random order.
        seed: the seed of the order, equal on every rank.
        drop_last: whether to drop the remainder; if not, some samples are repeated.
        pad: False yields each sample exactly once (evaluation); ranks may get different numbers.

    ``len()`` is the share of an entire epoch, also if a loaded state starts in the middle.

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

    _reader: dict[str, Any] | None

    def __init__(
        self,
        dataset: data.Dataset[Any],
        num_replicas: int | DeviceMesh | ProcessGroup | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        if drop_last and not pad:
            raise ArgumentError(
                "drop_last=True and pad=False cannot be combined",
                expected="at most one of them",
                fix="pass pad=False only, to evaluate; or drop_last=True only, to train",
            )
        size, own_rank = _size_and_rank(num_replicas, rank)
        super().__init__(dataset, size, own_rank, shuffle, get_integer(seed, "seed"), drop_last)
        self.pad = pad
        if not pad:
            self.total_size = self._length
            self.num_samples = len(range(own_rank, self._length, size))
        self._may_lack_axis = not isinstance(num_replicas, (DeviceMesh, ProcessGroup))
        self._warn_of_axes()
        self._move_to(0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that determines the order; pass the same on every rank."""
        epoch = get_integer(epoch, "epoch")
        if epoch != self.epoch or self._num_passes:  # otherwise keep a loaded state of this epoch
            self._move_to(epoch, 0)

    def _move_to(self, epoch: int, consumed: int) -> None:
        """Start the next pass after the first ``consumed`` samples of an epoch."""
        super().set_epoch(epoch)
        self._begin, self._num_passes = consumed, 0
        self._num_given, self._rest, self._reader = 0, iter(()), None  # of the last pass

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Return the position in the epoch; equal on ranks that took equally many samples.

        Args:
            consumed: the number of samples of this epoch that all ranks together have processed.
                None counts the samples that the program took, including the current batch, without
                prefetched samples. Pass the number for custom batch samplers and with
                ``in_order=False``.

        Raises:
            ArgumentError: ``consumed`` is invalid, or cannot be determined.
        """
        if consumed is None:
            taken = self._count_taken()
            is_over = 0 < self._num_given == taken  # dropped samples are not read later
            consumed = self._length if is_over else self._begin + taken * self.num_replicas
        if type(consumed) is not int or consumed < 0:
            raise ArgumentError(
                f"state_dict() got consumed={consumed!r}",
                expected="a number of samples, 0 or more",
                fix="pass the number of samples that all ranks have processed, as an int",
            )
        position = {"epoch": self.epoch, "consumed": min(consumed, self._length)}
        return {**position, "length": self._length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue the next pass where ``state_dict()`` was called, on any number of ranks.

        Load the same state on every rank. ``set_epoch`` with the same epoch keeps it.

        Raises:
            ArgumentError: the state has another length, seed or order.
        """
        mine = self.state_dict(state_dict.get("consumed", 0))
        if {**mine, "epoch": state_dict.get("epoch")} != dict(state_dict):
            raise ArgumentError(
                "cannot load a state of a different order of samples",
                expected=f"length={self._length}, seed={self.seed}, shuffle={self.shuffle}",
                found=", ".join(f"{name}={value}" for name, value in state_dict.items()),
                fix="create the sampler with the data set, seed and shuffle of the saved state",
            )
        self._move_to(state_dict["epoch"], state_dict["consumed"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}  # a DataLoader's workers cannot be copied

    @hidden_from_modes
    def __iter__(self) -> Iterator[T]:
        self._warn_of_axes()
        if self.shuffle and self._num_passes == 1:
            warn_caller(
                f"the sampler repeats the order of epoch {self.epoch}: "
                "call sampler.set_epoch(epoch) before each epoch, or pass shuffle=False"
            )
        if self._num_passes:
            self._begin = 0
        self._num_passes += 1
        whole: Any = data.DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        remaining, size = order[self._begin :], self.num_replicas
        if self.drop_last:
            remaining = remaining[: len(remaining) // size * size]
        elif self.pad:
            remaining += islice(cycle(order), -len(remaining) % size)
        share = remaining[self.rank :: size]
        self._num_given, self._rest, self._reader = len(share), iter(share), _find_reader()
        return self._rest

    @property
    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def _count_taken(self) -> int:
        taken = self._num_given - length_hint(self._rest)
        if self._reader is None:
            return taken
        reads = self._reader["_index_sampler"]
        is_plain = type(reads) is data.BatchSampler and reads.sampler is self
        if not (is_plain or reads is self) or not self._reader.get("_in_order", True):
            raise ArgumentError(
                "cannot determine how many samples the program took from the DataLoader",
                expected="a DataLoader with torch's batch sampler, and in_order=True",
                fix="call sampler.state_dict(consumed=n) with the number of samples of this epoch "
                "that all ranks have processed",
            )
        num_taken: int = self._reader["_num_yielded"] * (reads.batch_size if is_plain else 1)
        return min(taken, num_taken)

    def _warn_of_axes(self) -> None:
        """Warn once if samples are split over all ranks while an open mesh has several axes."""
        world = find_world() if self._may_lack_axis else None
        if world is None or self.num_replicas != world.size:
            return
        for layout in +world.open_layouts:
            if sum(size > 1 for size in layout.sizes) > 1:
                self._may_lack_axis = False
                names = layout.names or ()
                axis = "dp" if "dp" in names else (*names, None)[0]
                warn_caller(
                    f"each of {world.size} ranks reads different samples, while DeviceMesh("
                    f"{layout.axis_text()}) has several axes: pass the axis that splits the data, "
                    f"DistributedSampler(data, {f'mesh[{axis!r}]' if axis else 'mesh.get_group(0)'}"
                    "), or all ranks, DistributedSampler(data, md.distributed.group.WORLD)"
                )
                return


def _find_reader() -> dict[str, Any] | None:
    """Return the attributes of a calling DataLoader iterator, or None."""
    frame: Any = sys._getframe(1)
    while frame and not isinstance(reader := frame.f_locals.get("self"), _BaseDataLoaderIter):
        frame = frame.f_back
    # torchdata stores the sampler's state per fetched batch, so count the samples handed out.
    is_read = frame and not type(reader).__module__.startswith("torchdata.")
    return vars(reader) if is_read else None


def _size_and_rank(
    num_replicas: int | DeviceMesh | ProcessGroup | None, rank: int | None
) -> tuple[int, int]:
    """Return the number of shares and this rank's index; raise if it is not on the mesh."""
    if isinstance(num_replicas, (DeviceMesh, ProcessGroup)):
        if rank is not None:
            raise ArgumentError(
                f"rank={rank} cannot be combined with {num_replicas!r}",
                expected="rank only if num_replicas is a number",
                fix="remove rank",
            )
        own = num_replicas.world.rank
        ranks: list[int] = (
            list(num_replicas.ranks)
            if isinstance(num_replicas, ProcessGroup)
            else num_replicas.layout.ranks().ravel().tolist()
        )
        if own not in ranks:
            raise NotInGroupError(
                "DistributedSampler: this rank is not on the mesh or in the group",
                where=f"rank {own}, {num_replicas!r}",
                fix="create the sampler only on ranks of the mesh: if mesh.get_coordinate() is not "
                "None",
            )
        return len(ranks), ranks.index(own)
    choices = "a number, a mesh such as mesh['dp'], a ProcessGroup, or None for all ranks"
    size = (
        get_world_size()
        if num_replicas is None
        else get_integer(num_replicas, "num_replicas", expected=choices)
    )
    own_rank = get_rank() if rank is None else get_integer(rank, "rank")
    if not 0 <= own_rank < size:
        raise ArgumentError(
            f"DistributedSampler: rank {own_rank} has no share among {size} replicas",
            expected=f"a rank from 0 to {size - 1}" if size > 0 else "at least one replica",
            fix="pass the mesh axis over which the data is split: DistributedSampler(data, "
            "mesh['dp'])",
        )
    return size, own_rank

"""Which samples a rank reads: torch's sampler, its share given by a mesh axis."""

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
    """Each rank of an axis reads its own share of a data set; other axes read the same.

    Call ``set_epoch(epoch)`` before each epoch, so that the order changes; without, the second pass
    warns. Nothing is sent.

    Args:
        dataset: what is sampled; of equal length on every rank.
        num_replicas: an axis, ``mesh["dp"]``; several together, ``mesh["dp", "cp"]``; a
            ProcessGroup; a number, as torch; or None for the world, which warns once where an open
            mesh has several axes: ``md.distributed.group.WORLD`` says that all ranks are meant.
        rank: with a number: which share; None for this rank in the world.
        shuffle: whether samples come in random order.
        seed: of the order, equal on every rank.
        drop_last: whether to drop the tail that does not divide; else some samples come twice.
        pad: False lets each sample come once, to evaluate: ranks may get unequal numbers.

    ``len()`` is that of a whole epoch's share, also where a state lets a pass begin inside of it.

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
                "drop_last=True leaves samples out, and pad=False reads each of them once",
                fix="drop one of the two: pad=False is to evaluate, drop_last=True to train",
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
        """Let the order be that of ``epoch``, equal on every rank."""
        epoch = get_integer(epoch, "epoch")
        if epoch != self.epoch or self._num_passes:  # else a state of this epoch may be loaded
            self._move_to(epoch, 0)

    def _move_to(self, epoch: int, consumed: int) -> None:
        """Begin the next pass after the first ``consumed`` samples of an epoch."""
        super().set_epoch(epoch)
        self._begin, self._num_passes = consumed, 0
        self._num_given, self._rest, self._reader = 0, iter(()), None  # of the last pass

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Return where the program is in its epoch; equal on ranks that have taken equally many.

        Args:
            consumed: how many samples of this epoch all ranks together are done with; None: those
                that the program has taken, the batch in hand included. What the workers of a
                DataLoader have prefetched is not taken. Other batch samplers than torch's, and
                ``in_order=False``, need the number.
        """
        if consumed is None:
            taken = self._count_taken()
            is_over = 0 < self._num_given == taken  # what is dropped now is not read later
            consumed = self._length if is_over else self._begin + taken * self.num_replicas
        if type(consumed) is not int or consumed < 0:
            raise ArgumentError(f"consumed={consumed!r} is no number of samples")
        position = {"epoch": self.epoch, "consumed": min(consumed, self._length)}
        return {**position, "length": self._length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Let the next pass go on where ``state_dict()`` was taken, at any number of ranks.

        Every rank loads it. ``set_epoch`` with its epoch keeps it.
        """
        mine = self.state_dict(state_dict.get("consumed", 0))
        if {**mine, "epoch": state_dict.get("epoch")} != dict(state_dict):
            raise ArgumentError(
                "the state is of another order of samples",
                expected=f"length={self._length}, seed={self.seed}, shuffle={self.shuffle}",
                found=", ".join(f"{name}={value}" for name, value in state_dict.items()),
                fix="load what state_dict() gave into a sampler of the same data, seed and shuffle",
            )
        self._move_to(state_dict["epoch"], state_dict["consumed"])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}  # a DataLoader's workers cannot be copied

    @hidden_from_modes
    def __iter__(self) -> Iterator[T]:
        self._warn_of_axes()
        if self.shuffle and self._num_passes == 1:
            warn_caller(
                f"samples come in the order of epoch {self.epoch} again: "
                "call sampler.set_epoch(epoch) before each epoch, or pass shuffle=False"
            )
        if self._num_passes:
            self._begin = 0
        self._num_passes += 1
        whole: Any = data.DistributedSampler(self.dataset, 1, 0, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        order = list(whole)
        left, size = order[self._begin :], self.num_replicas
        if self.drop_last:
            left = left[: len(left) // size * size]
        elif self.pad:
            left += islice(cycle(order), -len(left) % size)
        share = left[self.rank :: size]
        self._num_given, self._rest, self._reader = len(share), iter(share), _find_reader()
        return self._rest

    @property
    def _length(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def _count_taken(self) -> int:
        """Return how many samples the program has taken in the last pass."""
        taken = self._num_given - length_hint(self._rest)
        if self._reader is None:
            return taken
        reads = self._reader["_index_sampler"]
        is_plain = type(reads) is data.BatchSampler and reads.sampler is self
        if not (is_plain or reads is self) or not self._reader.get("_in_order", True):
            raise ArgumentError(
                "the DataLoader does not tell which samples the program has taken",
                expected="no batch sampler of its own, and in_order=True",
                fix="sampler.state_dict(consumed=...), how many all ranks had of this epoch",
            )
        num_taken: int = self._reader["_num_yielded"] * (reads.batch_size if is_plain else 1)
        return min(taken, num_taken)

    def _warn_of_axes(self) -> None:
        """Warn once where samples are split over the world while an open mesh has several axes."""
        world = find_world() if self._may_lack_axis else None
        if world is None or self.num_replicas != world.size:
            return
        for layout in +world.open_layouts:
            if sum(size > 1 for size in layout.sizes) > 1:
                self._may_lack_axis = False
                names = layout.names or ()
                axis = "dp" if "dp" in names else (*names, None)[0]
                warn_caller(
                    f"each of {world.size} ranks reads samples of its own, while DeviceMesh("
                    f"{layout.axis_text()}) has several axes: name the axis that splits data, "
                    f"DistributedSampler(data, {f'mesh[{axis!r}]' if axis else 'mesh.get_group(0)'}"
                    "), or say that all do, DistributedSampler(data, md.distributed.group.WORLD)"
                )
                return


def _find_reader() -> dict[str, Any] | None:
    """Return the attributes of the DataLoader iterator in a frame above, None without."""
    frame: Any = sys._getframe(1)
    while frame and not isinstance(reader := frame.f_locals.get("self"), _BaseDataLoaderIter):
        frame = frame.f_back
    # torchdata's keeps what a sampler says at each batch that is fetched: what was handed out.
    is_read = frame and not type(reader).__module__.startswith("torchdata.")
    return vars(reader) if is_read else None


def _size_and_rank(
    num_replicas: int | DeviceMesh | ProcessGroup | None, rank: int | None
) -> tuple[int, int]:
    """Return the number of shares (None: the world's) and this rank's index; raise off the mesh."""
    if isinstance(num_replicas, (DeviceMesh, ProcessGroup)):
        if rank is not None:
            raise ArgumentError(
                f"rank={rank} was given beside {num_replicas!r}, which tells it",
                expected="rank only with a number of replicas",
                fix="drop rank",
            )
        own = num_replicas.world.rank
        ranks: list[int] = (
            list(num_replicas.ranks)
            if isinstance(num_replicas, ProcessGroup)
            else num_replicas.layout.ranks().ravel().tolist()
        )
        if own not in ranks:
            raise NotInGroupError(
                "this rank has no share: it is not on the mesh",
                where=f"rank {own}, {num_replicas!r}",
                fix="make the sampler only where mesh.get_coordinate() is not None",
            )
        return len(ranks), ranks.index(own)
    choices = "a number, a mesh such as mesh['dp'], a ProcessGroup, or None for the world"
    size = (
        get_world_size()
        if num_replicas is None
        else get_integer(num_replicas, "num_replicas", expected=choices)
    )
    own_rank = get_rank() if rank is None else get_integer(rank, "rank")
    if not 0 <= own_rank < size:
        raise ArgumentError(
            f"rank {own_rank} has no share among {size} replicas",
            expected=f"a rank from 0 to {size - 1}" if size > 0 else "at least one replica",
            fix="pass the mesh axis over which the data is split: DistributedSampler(data, "
            "mesh['dp'])",
        )
    return size, own_rank

"""What each library is asked to do for one verb and one size, on buffers of its own.

A size is that of the full buffer in bytes, as in nccl-tests: what an all-gather puts out, what a
reduce-scatter takes, what an all-to-all exchanges. A side returns a function that makes one call.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

__all__ = ["SIDES", "VERBS", "Side", "open_side"]

VERBS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "all_to_all_single",
    "all_to_all",
    "send_recv",
    "barrier",
)
"""In the names of torch; ``send_recv`` is half a round trip between ranks 0 and 1."""

_SINGLE = {
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
}
"""The newer names, under which torch does not warn."""

Call = Callable[[], Any]


class Side(ABC):
    """One library with its world of ranks."""

    rank: int
    size: int

    @abstractmethod
    def call(self, verb: str, num_bytes: int) -> Call | None:
        """Return a function that does ``verb`` once over float32; None if there is no such verb."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def close(self) -> None:
        """End the world."""


class TorchSide(Side):
    """torch.distributed, or anything with its names: meshdist is called by the same code."""

    def __init__(self, library: Any, backend: str) -> None:
        import torch

        torch.set_num_threads(1)
        library.init_process_group(backend)
        self._library = library
        self._torch = torch
        self.rank = library.get_rank()
        self.size = library.get_world_size()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._library.barrier()

    def close(self) -> None:
        """End the world."""
        self._library.destroy_process_group()

    def call(self, verb: str, num_bytes: int) -> Call | None:
        """Return a function that does ``verb`` once on CPU tensors."""
        torch, library = self._torch, self._library
        part = max(1, num_bytes // 4 // self.size)
        whole = torch.ones(part * self.size if num_bytes // 4 >= self.size else num_bytes // 4)
        one = torch.ones(part)
        parts = list(torch.ones(part * self.size).chunk(self.size))
        others = [torch.ones(part) for _ in parts]
        on_root = parts if self.rank == 0 else None
        full = torch.ones(part * self.size)
        if verb == "barrier":
            return partial(library.barrier)
        if verb == "send_recv":
            return self._ping_pong(whole)
        if verb in ("broadcast", "reduce"):
            return partial(getattr(library, verb), whole, 0)
        arguments: dict[str, tuple[Any, ...]] = {
            "all_reduce": (whole,),
            "all_gather_into_tensor": (full, one),
            "all_gather": (others, one),
            "gather": (one, on_root, 0),
            "scatter": (one, on_root, 0),
            "reduce_scatter_tensor": (one, full),
            "reduce_scatter": (one, parts),
            "all_to_all_single": (full, torch.ones(part * self.size)),
            "all_to_all": (others, parts),
        }
        return partial(getattr(library, _SINGLE.get(verb, verb)), *arguments[verb])

    def _ping_pong(self, tensor: Any) -> Call:
        send, recv = self._library.send, self._library.recv

        def first() -> None:
            send(tensor, 1)
            recv(tensor, 1)

        def second() -> None:
            recv(tensor, 0)
            send(tensor, 0)

        return first if self.rank == 0 else second if self.rank == 1 else lambda: None


class MpiSide(Side):
    """mpi4py on NumPy arrays: one call of MPI for each verb."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD
        self._in_place: Any = MPI.IN_PLACE
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._world.Barrier()

    def close(self) -> None:
        """Nothing: MPI ends with the process."""

    def call(self, verb: str, num_bytes: int) -> Call | None:
        """Return a function that does ``verb`` once."""
        import numpy as np

        world = self._world
        part = max(1, num_bytes // 4 // self.size)
        whole = np.ones(max(1, num_bytes // 4), np.float32)
        one = np.ones(part, np.float32)
        full = np.ones(part * self.size, np.float32)
        second = np.ones(part * self.size, np.float32)
        at_root = full if self.rank == 0 else None
        if verb == "send_recv":
            return self._ping_pong(whole)
        if verb == "reduce" and self.rank == 0:
            return partial(world.Reduce, self._in_place, whole)
        calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "all_reduce": (world.Allreduce, (self._in_place, whole)),
            "reduce": (world.Reduce, (whole, None)),
            "broadcast": (world.Bcast, (whole,)),
            "all_gather_into_tensor": (world.Allgather, (one, full)),
            "gather": (world.Gather, (one, at_root)),
            "scatter": (world.Scatter, (at_root, one)),
            "reduce_scatter_tensor": (world.Reduce_scatter_block, (full, one)),
            "all_to_all_single": (world.Alltoall, (full, second)),
            "barrier": (world.Barrier, ()),
        }
        if verb not in calls:
            return None
        function, arguments = calls[verb]
        return partial(function, *arguments)

    def _ping_pong(self, array: Any) -> Call:
        world = self._world

        def first() -> None:
            world.Send(array, 1)
            world.Recv(array, 1)

        def second() -> None:
            world.Recv(array, 0)
            world.Send(array, 0)

        return first if self.rank == 0 else second if self.rank == 1 else lambda: None


def _side_of(library: str, backend: str) -> Side:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchSide(import_module(library), backend)


SIDES: dict[str, Callable[[], Side]] = {
    "meshdist/shm": partial(_side_of, "meshdist", "shm"),
    "meshdist/gloo": partial(_side_of, "meshdist", "gloo"),
    "torch/gloo": partial(_side_of, "torch.distributed", "gloo"),
    "mpi": MpiSide,
}
"""What can be measured; "mpi" is whichever MPI the interpreter's mpi4py finds."""


def open_side(name: str) -> Side:
    """Open the world of a side, in every one of its ranks."""
    return SIDES[name]()

"""Implement each library's calls for one collective and size, on its own buffers.

A size counts the bytes of the full buffer, as in nccl-tests: the output of an all-gather, the input
of a reduce-scatter, the data of an all-to-all.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from .. import operation_table

OPERATIONS = (
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
"""Names as in torch; ``send_recv`` is half a round trip between ranks 0 and 1."""

DTYPES = ("float32", "bfloat16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

_SINGLE = {
    operation.alias_of: operation.name
    for operation in operation_table.OPERATIONS.values()
    if operation.alias_of
}
"""The newer names, for which torch does not warn."""

Call = Callable[[], Any]


class Library(ABC):
    """A library to measure, initialized on this rank."""

    rank: int
    size: int
    barrier: Call
    """Waits for all ranks."""
    close: Call
    """Shuts the library down."""

    @abstractmethod
    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        """Return a function that runs ``operation`` once; None if it is not supported.

        Args:
            num_bytes: the size of the full buffer, also if each rank has only a part.
        """

    def counts(self, num_bytes: int, dtype: str) -> tuple[int, int, int]:
        """Return the elements in ``num_bytes``, in a rank's part, and in all parts."""
        count = max(1, num_bytes // _ITEM_BYTES[dtype])
        part = max(1, count // self.size)
        return count, part, part * self.size

    def ping_pong(self, send: Callable[..., Any], recv: Callable[..., Any], data: Any) -> Call:
        """Return a function that sends ``data`` from rank 0 to rank 1 and back."""

        def first() -> None:
            send(data, 1)
            recv(data, 1)

        def second() -> None:
            recv(data, 0)
            send(data, 0)

        return first if self.rank == 0 else second if self.rank == 1 else lambda: None


class TorchSide(Library):
    """torch.distributed or meshdist, called by the same names."""

    def __init__(self, name: str, backend: str) -> None:
        import torch

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        library = import_module(name)
        torch.set_num_threads(1)
        library.init_process_group(backend)
        self._library = library
        self._torch = torch
        self.rank = library.get_rank()
        self.size = library.get_world_size()
        self.barrier, self.close = library.barrier, library.destroy_process_group

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        kind = getattr(self._torch, dtype)
        whole, part, full = (
            partial(self._ones, number, kind) for number in self.counts(num_bytes, dtype)
        )

        def parts() -> list[Any]:
            return list(full().chunk(self.size))

        def parts_on_root() -> list[Any] | None:
            return parts() if self.rank == 0 else None

        def blocks() -> list[Any]:
            return [part() for _ in range(self.size)]

        root = int  # makes 0
        if operation == "send_recv":
            return self.ping_pong(self._library.send, self._library.recv, whole())
        makers: dict[str, tuple[Callable[[], Any], ...]] = {
            "all_reduce": (whole,),
            "reduce": (whole, root),
            "broadcast": (whole, root),
            "all_gather_into_tensor": (full, part),
            "all_gather": (blocks, part),
            "gather": (part, parts_on_root, root),
            "scatter": (part, parts_on_root, root),
            "reduce_scatter_tensor": (part, full),
            "reduce_scatter": (part, parts),
            "all_to_all_single": (full, full),
            "all_to_all": (blocks, parts),
            "barrier": (),
        }
        function = getattr(self._library, _SINGLE.get(operation, operation))
        return partial(function, *(make() for make in makers[operation]))

    def _ones(self, count: int, dtype: Any) -> Any:
        return self._torch.ones(count, dtype=dtype)


class SharedSide(TorchSide):
    """meshdist's all_reduce on tensors in shared memory."""

    def __init__(self, name: str, backend: str) -> None:
        super().__init__(name, backend)
        self._made: dict[tuple[int, Any], Any] = {}

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        return super().call(operation, num_bytes, dtype) if operation == "all_reduce" else None

    def _ones(self, count: int, dtype: Any) -> Any:
        if (count, dtype) not in self._made:
            self._made[count, dtype] = self._library.shared_empty((count,), dtype=dtype)
        return self._made[count, dtype].fill_(1)


class CopySide(TorchSide):
    """A lower bound for all_reduce: every rank only copies its array once."""

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        if operation != "all_reduce":
            return None
        count, kind = self.counts(num_bytes, dtype)[0], getattr(self._torch, dtype)
        return partial(self._ones(count, kind).copy_, self._ones(count, kind))


class MpiSide(Library):
    """mpi4py on NumPy arrays: one call of MPI for each collective."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world: Any = MPI.COMM_WORLD
        self._in_place: Any = MPI.IN_PLACE
        self.rank = self._world.Get_rank()
        self.size = self._world.Get_size()
        self.barrier, self.close = self._world.Barrier, lambda: None  # MPI ends with the process

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        import numpy as np

        world, is_root = self._world, self.rank == 0
        whole, part, full = (
            partial(np.ones, number, dtype) for number in self.counts(num_bytes, dtype)
        )

        def in_place() -> Any:
            return self._in_place

        def nothing() -> None:
            return None

        if dtype != "float32":
            return None
        if operation == "send_recv":
            return self.ping_pong(world.Send, world.Recv, whole())
        functions: dict[str, tuple[Callable[..., Any], ...]] = {
            "all_reduce": (world.Allreduce, in_place, whole),
            "reduce": (world.Reduce, *((in_place, whole) if is_root else (whole, nothing))),
            "broadcast": (world.Bcast, whole),
            "all_gather_into_tensor": (world.Allgather, part, full),
            "gather": (world.Gather, part, full if is_root else nothing),
            "scatter": (world.Scatter, full if is_root else nothing, part),
            "reduce_scatter_tensor": (world.Reduce_scatter_block, full, part),
            "all_to_all_single": (world.Alltoall, full, full),
            "barrier": (world.Barrier,),
        }
        if operation not in functions:
            return None
        function, *makers = functions[operation]
        return partial(function, *(make() for make in makers))


class JaxSide(Library):
    """JAX's CPU collectives: one device per process, one jitted function per collective."""

    def __init__(self) -> None:
        import numpy as np

        jax: Any = import_module("jax")
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, self.size, self.rank)
        self._jax = jax
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
        barrier = self.call("all_reduce", 4, "float32")
        assert barrier is not None
        self.barrier, self.close = barrier, jax.distributed.shutdown

    def call(self, operation: str, num_bytes: int, dtype: str) -> Call | None:
        """Return a function that runs ``operation`` once, out of place; None if not supported."""
        import numpy as np

        lax, spec = self._jax.lax, self._jax.sharding.PartitionSpec
        count, part, full = self.counts(num_bytes, dtype)
        bodies: dict[str, tuple[int, Callable[[Any], Any]]] = {
            "all_reduce": (count, lambda x: lax.psum(x, "ranks")),
            "all_gather_into_tensor": (part, lambda x: lax.all_gather(x, "ranks", tiled=True)),
            "reduce_scatter_tensor": (full, lambda x: lax.psum_scatter(x, "ranks", tiled=True)),
            "all_to_all_single": (full, lambda x: lax.all_to_all(x, "ranks", 0, 0, tiled=True)),
        }
        if operation not in bodies:
            return None
        number, body = bodies[operation]
        ranks = spec("ranks")
        each = self._jax.shard_map(
            body, mesh=self._mesh, in_specs=ranks, out_specs=ranks, check_vma=False
        )
        function = self._jax.jit(each)
        mine = np.ones(number, self._jax.numpy.dtype(dtype))
        x = self._jax.make_array_from_process_local_data(
            self._jax.sharding.NamedSharding(self._mesh, ranks), mine
        )
        return lambda: function(x).block_until_ready()


SIDES: dict[str, Callable[[], Library]] = {
    "meshdist/shm": partial(TorchSide, "meshdist", "shm"),
    "meshdist/shm/shared": partial(SharedSide, "meshdist", "shm"),
    "meshdist/gloo": partial(TorchSide, "meshdist", "gloo"),
    "torch/gloo": partial(TorchSide, "torch.distributed", "gloo"),
    "copy": partial(CopySide, "torch.distributed", "gloo"),
    "mpi": MpiSide,
    "jax": JaxSide,
}
"""The sides that can be measured.

``meshdist/shm/shared`` uses ``shared_empty`` tensors; ``copy`` is a lower bound, a copy on every
rank; ``mpi`` is the MPI of the interpreter's mpi4py.
"""

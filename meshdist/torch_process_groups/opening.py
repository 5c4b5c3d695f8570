"""Opens a group over our wire as torch describes it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch.distributed as torch_distributed
from torch.distributed import PrefixStore, Store

from ..bootstrap.bounded_store import BoundedStore
from ..bootstrap.environments import find_local_size
from ..bootstrap.generations import Joined
from ..bootstrap.init_methods import meet
from ..bootstrap.stores import cloned, root_of
from ..checking.nesting import never_nested
from ..runtime.timeouts import DEFAULT_TIMEOUT
from ..wires import capabilities as capabilities  # all wires register themselves
from ..wires.opening import Opening
from ..wires.registry import get_wire
from .process_group import WireGroup

__all__ = ["open_group", "open_mpi_group"]


@never_nested
def open_group(wire: str, options: Any, wire_options: Any) -> WireGroup:
    """Open a group as torch's DistributedBackendOptions describe it; collective over its members.

    Raises:
        BackendError: no such wire on this machine, or it could not be opened.
        CollectiveTimeoutError: a member did not come.
    """
    size, store = options.group_size, _store_of(options)
    handle = BoundedStore(cloned(store), options.timeout)
    return WireGroup(
        get_wire(wire),
        Opening(
            store=handle,
            make_torch_store=lambda: store,
            ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),
            rank=options.group_rank,
            device_type="cpu",
            timeout=options.timeout,
            options=wire_options,
            name=options.group_id,
            num_local=_num_local(size),
        ),
        options.group_id,
        handle,
    )


@never_nested
def open_mpi_group(ranks: list[int]) -> WireGroup:
    """Open the MPI wire for these global ranks, or for all of ``mpiexec``'s where none is named.

    Torch hands over no store, rank or size: all three come from what started the processes.

    Raises:
        RendezvousError: this process was not started by mpiexec.
        BackendError: no MPI on this machine, or it could not be opened.
    """
    wire = get_wire("mpi")
    joined = _joined_under_mpi()
    members = tuple(ranks) or tuple(range(joined.size))
    text = ",".join(map(str, members))
    # The members of a group ask for it equally often, the others not at all.
    name = f"mpi {text} {joined.store.add(f'{text} by {joined.rank}', 1)}"
    hosts = tuple(joined.hosts[rank] for rank in members)
    return WireGroup(
        wire,
        Opening(
            store=PrefixStore(name, joined.store),
            make_torch_store=lambda: PrefixStore(name, joined.make_torch_store()),
            ranks=members,
            rank=members.index(joined.rank),
            device_type="cpu",
            timeout=DEFAULT_TIMEOUT,  # torch does not pass on the program's
            is_one_host=len(set(hosts)) == 1,
            name=name,
            num_local=joined.local_size,
            hosts=hosts,
        ),
        name,
    )


@cache
def _joined_under_mpi() -> Joined:
    """The ranks that one mpiexec has started, met once in a process."""
    return meet(is_mpi_asked=True, group_name="torch's mpi")


def _store_of(options: Any) -> Store:
    """Keys of this group alone, also where an earlier world of the same store had its name.

    They are in the store that torch gives the group. In a world over MPI it gives what cannot be
    called: there the group gets the store by which mpiexec's ranks have met.
    """
    store = options.store
    if type(root_of(store)) is Store:
        joined = _joined_under_mpi()
        store = PrefixStore(f"torch's group {options.group_id}", joined.make_torch_store())
    generation = store.add(f"opened by {options.group_rank}", 1)
    return PrefixStore(f"opened {generation}", store)


def _num_local(size: int) -> int:
    """How many ranks of the world run on this host, as far as a launcher says."""
    world = torch_distributed.get_world_size() if torch_distributed.is_initialized() else size
    return find_local_size(os.environ) or world

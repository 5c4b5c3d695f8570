"""Open process groups on meshdist's backends for torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit
from weakref import WeakValueDictionary, finalize

import torch.distributed as torch_distributed
from torch.distributed import PrefixStore, Store, TCPStore

from ..arguments import DEFAULT_TIMEOUT
from ..backends import capabilities as capabilities  # all backends register themselves
from ..backends.registry import Opening, get_backend
from ..backends.simulated.scheduler import find_rank_here
from ..bootstrap.init_methods import InitArguments, meet
from ..bootstrap.launch_environment import find_local_size
from ..bootstrap.rendezvous_rounds import Rendezvous
from ..bootstrap.stores import cloned, root_of
from ..bootstrap.timeout_store import TimeoutStore, within
from ..bootstrap.world import find_world
from ..checking.call_sites import never_nested
from ..errors import BackendError, WorldError
from ..runtime.deadlines import Deadline
from ..runtime.fork_safe_locks import ForkSafeLock
from ..runtime.torch_worlds import isolate_names
from . import functional_ops as functional_ops  # registers its kernels
from .backend_group import BackendGroup


@never_nested
def open_group(backend: str, options: Any, backend_options: Any) -> BackendGroup:
    """Open the group that torch's DistributedBackendOptions describe; collective."""
    size, torchs, name = options.group_size, options.store, options.group_id
    if type(root_of(torchs)) is Store:  # torch's store in a world over MPI, which cannot be called
        torchs = PrefixStore(f"torch's group {name}", _joined_under_mpi().make_torch_store())
    world = torch_distributed.get_world_size() if torch_distributed.is_initialized() else size
    with within(Deadline(options.timeout)):
        connection = _take_connection(root_of(torchs), options.timeout)
        torchs, ours = _keys_of_group(torchs, options.group_rank, connection.store)
    return BackendGroup(
        get_backend(backend),
        Opening(
            store=ours,
            make_torch_store=lambda: torchs,
            ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),
            rank=options.group_rank,
            device_type="cpu",
            timeout=options.timeout,
            options=backend_options,
            name=name,
            num_local=find_local_size(os.environ) or world,  # if a launcher's variables define it
        ),
        connection,
    )


@never_nested
def open_mpi_group(ranks: list[int]) -> BackendGroup:
    """Open the MPI backend for these global ranks, or if empty for all of mpiexec."""
    backend = get_backend("mpi")
    joined = _joined_under_mpi()  # torch gives no store, rank or size
    members = tuple(ranks) or tuple(range(joined.size))
    text = ",".join(map(str, members))
    # The group's members create it equally often; other ranks never do.
    name = f"mpi {text} {joined.store.add(f'{text} by {joined.rank}', 1)}"
    hosts = tuple(joined.hosts[rank] for rank in members)
    return BackendGroup(
        backend,
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
    )


@never_nested
def open_simulated_group(options: Any) -> BackendGroup:
    """Open a group of simulated ranks without waiting."""
    if find_rank_here() is None:
        raise BackendError(
            "backend 'simulated' works only on simulated ranks, but this is a process",
            expected="a program that meshdist.simulate runs",
            fix="call meshdist.simulate(program, 4), or name another backend, such as 'shm'",
        )
    isolate_names()
    size, rank = options.group_size, options.group_rank
    # An earlier world of the rank may have had a group of this name.
    number = options.store.add(f"opened by {rank}", 1)
    store = PrefixStore(f"opened {number}", options.store)
    return BackendGroup(
        get_backend("simulated"),
        Opening(
            store=store,
            make_torch_store=lambda: store,
            ranks=tuple(options.global_ranks_in_group) or tuple(range(size)),
            rank=rank,
            device_type="cpu",
            timeout=options.timeout,
            name=options.group_id,
            num_local=size,
        ),
    )


def meet_simulated(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield a simulated rank's store, number and world size, for ``simulated://``."""
    world = find_world()
    if world is None or not world.is_simulated:
        raise WorldError(
            f"{url!r} works only on simulated ranks, but this is a process",
            expected="a program that meshdist.simulate runs",
            fix="call meshdist.simulate(program, 4), or name another init_method, such as 'env://'",
        )
    for name, value in (("rank", world.rank), ("world_size", world.size)):
        # torch passes its arguments in the URL's query
        given = parse_qs(urlsplit(url).query).get(name, [])
        if given not in ([], ["-1"], [str(value)]):
            raise WorldError(
                f"this simulated rank has {name} {value}, not {given[0]}",
                expected=f"{name}={value}, or none",
                fix='call init_process_group("simulated", init_method="simulated://")',
            )
    yield PrefixStore("torch", world.make_torch_store()), world.rank, world.size


@cache
def _joined_under_mpi() -> Rendezvous:
    """Meet the ranks of this mpiexec, once in a process."""
    return meet(InitArguments(group_name="torch's mpi"), is_mpi_asked=True)


def _keys_of_group(store: Store, rank: int, connection: TimeoutStore) -> tuple[Store, Store]:
    """Return two stores for the new group's keys: on ``store`` and on ``connection``."""
    # An earlier world of the same store may have had a group of this name.
    number = connection.ask(lambda _: store.add(f"opened by {rank}", 1))
    torchs = PrefixStore(f"opened {number}", store)
    # ``store`` does not reveal its prefixes. So the first member sets a random word under them, for
    # example 8f1c..., and this group's keys on ``connection`` are "8f1c.../address", and so on.
    word = secrets.token_hex(16)
    word = connection.ask(lambda _: torchs.compare_set("word", "", word)).decode()
    return torchs, PrefixStore(word, connection)


# When a client connects, torch's server looks up the client's name and answers no request
# meanwhile: a hundredth of the lookups may take 5 s. So all open groups of a process on the same
# server share a connection, and 100 groups on 4 ranks need 4 lookups instead of 800.
_connections: WeakValueDictionary[tuple[int, str, int], _Connection] = WeakValueDictionary()
_sharing = ForkSafeLock()


class _Connection:
    """A connection to a store that groups share, closed with the last reference."""

    def __init__(self, root: Store, timeout: timedelta) -> None:
        self.store = TimeoutStore(cloned(root), timeout)
        finalize(self, self.store.close)  # finalize keeps the store's socket


def _take_connection(root: Store, timeout: timedelta) -> _Connection:
    """Return this process's connection to a store's server, or a new connection."""
    if not isinstance(root, TCPStore):
        return _Connection(root, timeout)
    server = os.getpid(), root.host, root.port
    with _sharing.current:
        connection = _connections.get(server)
        if connection is None or not connection.store.is_hosted:
            connection = _connections[server] = _Connection(root, timeout)
        return connection

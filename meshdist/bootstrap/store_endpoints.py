"""Open the store at a host and port: host it on rank 0, or connect to it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed

from ..error_text import first_line
from ..errors import RendezvousError
from ..runtime.deadlines import Deadline
from .launch_environment import LaunchEnvironment
from .mpi_library import store_by_mpi
from .store_cache import is_cached
from .stores import (
    NamedPrefixStore,
    Store,
    bind_listener,
    check_can_serve,
    connect_store,
    find_number,
    inherited_listener,
    is_loopback,
    numeric_loopback,
    root_of,
    serve_store,
)

_FORMER_STORE_S = 10.0
_PROBE_S = 1.0
_PAUSE_S = 0.01


def open_by_url(
    address: str, port: int, rank: int, size: int, timeout: timedelta, *, is_named: bool
) -> Store:
    """Return the store at a URL's address, hosted by rank 0 or by the first process.

    Args:
        rank: -1 if ranks are assigned in the order of arrival.
        is_named: whether several named worlds, each with a rank 0, share the address.
    """
    if rank > 0:
        return connect_store(address, port, timeout)
    if rank == 0:
        check_can_serve(size)
    if rank == 0 and not is_named:
        return _serve_or_find(address, port, timeout)
    # The first process hosts the store: any rank, or another job at this address.
    listener = None
    with suppress(RendezvousError):
        listener = bind_listener(address, port)
    if listener is None:
        return connect_store(address, port, timeout)
    return serve_store(listener, address, port, timeout)


def endpoint_from_environment(
    launch_environment: LaunchEnvironment, timeout: timedelta
) -> tuple[Hashable, Callable[[], Store]]:
    """Return the cache key of a launcher's store, and a function that opens it."""
    port, address = launch_environment.port, launch_environment.address or ""
    if port is None:
        return ("mpiexec", launch_environment.job), partial(
            store_by_mpi, launch_environment, timeout
        )
    if launch_environment.has_agent_store:
        return ("agent", address, port), partial(_store_of_agent, address, port, timeout)

    def make() -> Store:
        if launch_environment.rank > 0:
            return connect_store(address, port, timeout)
        check_can_serve(launch_environment.size)
        return _serve_or_find(address, port, timeout)

    return endpoint_of(address, port), make


def endpoint_of(address: str, port: int) -> Hashable:
    """Return the cache key of the store at a host's port."""
    return "tcp", numeric_loopback(address), port


def _serve_or_find(address: str, port: int, timeout: timedelta) -> Store:
    """Host a new store on rank 0, or connect to a store that another process left open."""
    # If rank numbers have changed, the former rank 0 may close its store a little later.
    host, grace = numeric_loopback(address or "127.0.0.1"), Deadline(_FORMER_STORE_S)
    while True:
        try:
            listener = inherited_listener(os.environ.get("MESHDIST_LISTEN_FD"), port)
            if listener is None and address:
                listener = _listener_at(address, port)
            return serve_store(listener, address or host, port, timeout)
        except RendezvousError:
            if not is_cached(endpoint_of(address, port)) or grace.is_over:
                raise
        with suppress(RendezvousError, OSError):
            socket.create_connection((host, port), _PROBE_S).close()  # fails if it has just closed
            return connect_store(host, port, min(timeout, timedelta(seconds=grace.left_s)))
        time.sleep(_PAUSE_S)


def _store_of_agent(address: str, port: int, timeout: timedelta) -> Store:
    # torch returns the agent's store with a prefix that counts restarts, but does not expose the
    # prefix; so build it here.
    found = torch.distributed.rendezvous("env://", timeout=timeout)
    try:
        store: Store = root_of(next(found)[0])
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"torchrun's store does not respond: {first_line(error)}",
            where=f"env://, started by torchrun, store at {address}, port {port}",
            fix="check the output of torchrun on its first host for an error",
        ) from error
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return NamedPrefixStore(f"attempt {restarts}", store)


def _listener_at(address: str, port: int) -> Any:
    """Return a socket listening at a loopback or numeric address here, else None."""
    # A host's name may resolve to loopback on itself and to another interface elsewhere.
    is_safe = is_loopback(address) or find_number(address) is not None
    return bind_listener(address, port) if is_safe else None

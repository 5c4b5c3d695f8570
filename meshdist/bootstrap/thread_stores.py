"""One store handle per thread: a thread that waits on a handle blocks every other user of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistNetworkError, Store

from ..errors import StoreError
from .world import World

__all__ = [
    "check_store_served",
    "cloned",
    "lost_store_error",
    "lost_store_explained",
    "store_of_thread",
]


def cloned(store: Any) -> Store:
    """Return another handle to the same store, over a connection of its own."""
    clone: Store = store.clone()
    return clone


def store_of_thread(world: World) -> Store:
    """Return the world's store, or this thread's own clone of it.

    The thread that made the world uses the world's own handle, a simulated rank too.
    """
    if world.thread_id == threading.get_ident() or world.is_simulated:
        return world.store
    store: Store | None = getattr(world.store_clones, "store", None)
    if store is None:
        store = world.store_clones.store = cloned(world.store)
    return store


@contextmanager
def lost_store_explained(world: World) -> Iterator[None]:
    """Raise StoreError where a request to the store finds that its server is no more."""
    check_store_served(world)
    try:
        yield
    except DistNetworkError:
        raise _store_lost(world) from None


def check_store_served(world: World) -> None:
    """Raise StoreError where the process that serves the store is known to have ended.

    Called before a request, since torch reports a lost server on stderr, with a stack.
    """
    if world.find_server is not None and not world.find_server():
        raise _store_lost(world)


def lost_store_error(during: str, where: str, error: RuntimeError) -> StoreError:
    """Of what one of torch's stores raised, for example ``during monitored_barrier``."""
    return StoreError(
        f"the store was lost {during}",
        where=where,
        found=str(error).splitlines()[0],
        fix="look at the rank that ended first: its error is the cause",
    )


def _store_lost(world: World) -> StoreError:
    return StoreError(
        "the process that serves the store has ended",
        where=f"rank {world.rank} of {world.size}",
        expected="it to live as long as the others need it",
        fix="look at what that rank (rank 0, as a rule) wrote last; let it leave last, for "
        "example after a barrier",
    )

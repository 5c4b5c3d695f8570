"""One store handle per thread: a thread that waits on a handle blocks every other user of it."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed import Store

from .world import World

__all__ = ["cloned", "store_of_thread"]


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
    clones = world.rooms.setdefault("store clones", threading.local())
    store: Store | None = getattr(clones, "store", None)
    if store is None:
        store = cloned(world.store)
        clones.store = store
    return store

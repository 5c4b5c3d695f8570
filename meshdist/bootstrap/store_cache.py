"""Cache stores by address, and close each store after its last world and client are gone.

A process that hosts a store may leave its world before the other ranks, and initialize again at the
same address. The store closes once its last world here has ended and no other process is connected.
The server first sets a marker key: clients that see it connect again.

Rank 0 hosts the store, and rank 1 leaves later::

    rank 0   world ---- release_store: rank 1 is connected ......... mark, check again, close
    rank 1   world ----------------------------------- leaves
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed import Store, TCPStore

from ..runtime.hosts import call_at_end, do_not_call_at_end
from .store_liveness import has_clients
from .stores import CLOSING, HostedStore, root_of

_PERIOD_S = (0.05, 1.0)  # between checks for clients: first and longest
_END_S = 5.0

_Key: TypeAlias = tuple[int, Hashable]
"""Process id (so that a forked child does not see its parent's stores) and address."""


@dataclass
class _CachedStore:
    store: Store
    num_users: int = 0


_stores: dict[_Key, _CachedStore] = {}
_keeping = threading.RLock()
_had: set[_Key] = set()


def is_cached(address: Hashable) -> bool:
    """Return whether this process has opened a store for ``address`` before."""
    return (os.getpid(), address) in _had


def keep_store(address: Hashable, make: Callable[[], Store]) -> Store:
    """Return the store of ``address``, opening it if needed; release it with ``release_store``."""
    key = (os.getpid(), address)
    with _keeping:
        cached = _stores.get(key)
        if cached is None:
            cached = _stores[key] = _CachedStore(make())
            _had.add(key)
        cached.num_users += 1
        return cached.store


def release_store(address: Hashable) -> None:
    """Release ``address``; after its last use, close the store once no client is connected."""
    key = (os.getpid(), address)
    with _keeping:
        cached = _stores.get(key)
        if cached is None:  # in a forked child
            return
        cached.num_users -= 1
        if not cached.num_users and not _close_if_unused(key):
            _closer.start()


def hold_until_closed(store: Store) -> None:
    """Keep ``store`` open until no other process is connected to it."""
    root = root_of(store)
    if isinstance(root, TCPStore) and has_clients(root):
        with _keeping:
            _stores[os.getpid(), ("given", root.port)] = _CachedStore(store)
            _closer.start()


def _close_if_unused(key: _Key) -> bool:
    """Close the store of ``key`` unless clients are connected; return whether it is closed."""
    root = root_of(_stores[key].store)
    if isinstance(root, TCPStore):
        if has_clients(root):
            return False
        if isinstance(root, HostedStore):
            root.set(CLOSING, "")
            if has_clients(root):
                root.delete_key(CLOSING)
                return False
    del _stores[key]
    return True


class _Closer:
    """Thread that closes released stores once their clients have left."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._is_ending = threading.Event()

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="meshdist-closer", daemon=True)
            with suppress(RuntimeError):  # Python is ending, and waits for the clients elsewhere
                self._thread.start()
                # Python must not end the thread inside torch's C++.
                call_at_end(self.stop)

    def stop(self) -> None:
        self._is_ending.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s, last_s = _PERIOD_S
        while not self._is_ending.wait(pause_s):
            pause_s = min(2 * pause_s, last_s)
            with _keeping:
                ended = [key for key, cached in _stores.items() if not cached.num_users]
                if sum(_close_if_unused(key) for key in ended) == len(ended):
                    self._thread = None
                    do_not_call_at_end(self.stop)
                    return


_closer = _Closer()


def _forget_locks() -> None:
    """Give a forked child a new lock and closer; its parent's stores stay open."""
    global _keeping, _closer
    _keeping, _closer = threading.RLock(), _Closer()


os.register_at_fork(after_in_child=_forget_locks)

"""Idle connections to the process that serves a store: who holds one sees that process end.

torch reports on stderr that a server is lost to whoever asks it something then. So a client looks
at its lifeline first; and a server of ours that comes to its end in good order first hangs up all
lifelines, and waits a little until their holders, who may be asking still, have done the same.
"""

from __future__ import annotations

import atexit
import os
import select
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import parent_process
from multiprocessing.util import Finalize

from torch.distributed import PrefixStore, Store, TCPStore

__all__ = ["find_lifelines", "offer_lifelines"]

_KEY = "meshdist/lifelines"
_BACKLOG = 4096
_CONNECT_S = 5.0
# A second line, which a firewall may forbid, is not worth waiting long for.
_CONNECT_BESIDE_S = 1.0
# Who is stopped, or has no time for its own threads, need not keep the server from ending.
_HANG_UP_S = 1.0


_lock = threading.Lock()
_served: list[_Holders] = []


def find_lifelines(store: Store) -> list[socket.socket]:
    """Return connections to the process that serves ``store``; none where no process does.

    One goes to the store itself and ends with it, however that happens; a server of ours hangs up
    the other one first.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return []
    with _lock:
        for holders in _served:  # a server is a client, too, each time that ranks meet
            holders.look()
    wanted = [(store.port, _CONNECT_S)]
    if store.check([_KEY]):
        wanted.append((int(store.get(_KEY)), _CONNECT_BESIDE_S))
    lines = []
    for port, limit_s in wanted:
        with suppress(OSError):
            lines.append(socket.create_connection((store.host, port), timeout=limit_s))
    return lines


def offer_lifelines(store: Store, host: str) -> None:
    """Let the clients of ``store``, which this process serves, hold lifelines until it ends.

    Args:
        store: the store.
        host: the number of the address at which it listens. Where nobody can listen beside it
            there are none but those to the store itself.
    """
    is_v6 = ":" in host
    try:
        listener = socket.create_server(
            (host, 0),
            family=socket.AF_INET6 if is_v6 else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
        )
    except OSError:
        return
    holders = _Holders(listener)
    store.set(_KEY, str(listener.getsockname()[1]))
    with _lock:
        _served.append(holders)
    atexit.register(holders.hang_up)
    if parent_process() is not None:  # its end runs no handlers of atexit
        Finalize(None, holders.hang_up, exitpriority=0)


class _Holders:
    """Who holds lifelines to this process.

    Args:
        listener: where they connect to.
    """

    def __init__(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._lines: list[socket.socket] = []
        self._process_id = os.getpid()

    def look(self) -> None:
        """Take new lines, and forget those that were hung up: the system lets few wait."""
        if self._process_id != os.getpid():  # a forked child's copy
            return
        with suppress(OSError):
            while True:
                self._lines.append(self._listener.accept()[0])
        ended = self._find_ended(0.0)
        for line in ended:
            line.close()
        self._lines = [line for line in self._lines if line not in ended]

    def hang_up(self) -> None:
        """End all lines, and wait until their holders have closed them."""
        atexit.unregister(self.hang_up)
        if self._process_id != os.getpid():
            return
        deadline = time.monotonic() + _HANG_UP_S
        self.look()
        self._listener.close()
        for line in self._lines:
            with suppress(OSError):
                line.shutdown(socket.SHUT_WR)
        while self._lines and (left_s := deadline - time.monotonic()) > 0:
            self._find_ended(left_s)
            self.look()
        for line in self._lines:
            line.close()

    def _find_ended(self, seconds: float) -> set[socket.socket]:
        """The lines that are closed at their other end, as soon as any is."""
        poll = select.poll()
        lines = {line.fileno(): line for line in self._lines}
        for number in lines:
            poll.register(number, select.POLLIN)
        return {lines[number] for number, _ in poll.poll(1000 * seconds)}  # nobody sends anything

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


def find_lifelines(store: Store) -> list[socket.socket]:
    """Return connections to the process that serves ``store``; none where no process does.

    One goes to the store itself and ends with it, however that happens; a server of ours hangs up
    the other one first.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return []
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
    store.set(_KEY, str(listener.getsockname()[1]))
    served_by = os.getpid()

    def end() -> None:
        atexit.unregister(end)
        if os.getpid() == served_by:
            _hang_up(listener)

    atexit.register(end)
    if parent_process() is not None:  # its end runs no handlers of atexit
        Finalize(None, end, exitpriority=0)


def _hang_up(listener: socket.socket) -> None:
    """End all lifelines, and wait until their holders have closed them."""
    deadline = time.monotonic() + _HANG_UP_S
    held: list[socket.socket] = []
    listener.setblocking(False)
    with listener, suppress(OSError):
        while True:  # nobody needed to accept them before
            held.append(listener.accept()[0])
    poll = select.poll()
    lines = {line.fileno(): line for line in held}
    for line in held:
        with suppress(OSError):
            line.shutdown(socket.SHUT_WR)
        poll.register(line, select.POLLIN)
    while lines and (left_s := deadline - time.monotonic()) > 0:
        for number, _ in poll.poll(1000 * left_s):
            poll.unregister(number)  # a holder never sends anything: this is its end
            lines.pop(number).close()
    for line in lines.values():
        line.close()

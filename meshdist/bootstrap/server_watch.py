"""How clients of a store see its server end, and how a server of ours waits for its clients.

torch reports on stderr that a server is lost as soon as a client asks it something. So a client
looks first at a second connection of its own to the store, and whether the server's process lives
where it can see that; and it writes the address of that connection into the store. A server that
ends in good order finds the connections among its own sockets, and waits until the clients have
closed them. Then it closes its side of those that are left, and waits shortly until clients whose
requests may be under way have closed theirs.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import select
import socket
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from ..runtime.deadlines import Grace
from ..runtime.hosts import (
    ProcessCard,
    call_at_end,
    is_alive,
    is_ending_by_exception,
    is_stopped,
    own_sockets,
)

__all__ = ["ServerWatch", "find_readable", "wait_for_clients_at_end"]

_CLIENTS = "meshdist/clients"
_NO_VALUE = "?"  # that no client writes
_CONNECT_S = 5.0
# A client that is stopped, or whose threads get no time, must not keep the server from ending.
_CLOSING_S = 1.0
# A rank that fails ends soon, but lets the others read what it has left for them.
_FAILING_S = 2.0
_SLICE_S = 0.25
_LOOK_S = 0.01  # a look costs more than a request on this host
_HAS_LEFT = getattr(select, "POLLRDHUP", 0)  # unlike POLLIN, not for requests


class ServerWatch:
    """A connection to the process that serves ``store``, free for requests; none where none does.

    Attributes:
        connection: ends with the server, which closes it first where it ends in good order.
        server: the process that serves the store, once that is known.
        stopped_since: when the server's process was first seen stopped, where it still is.
    """

    def __init__(self, store: Store) -> None:
        self.connection: socket.socket | None = None
        self.server: ProcessCard | None = None
        self.stopped_since: float | None = None
        self._next_look = 0.0
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return
        with suppress(OSError):
            self.connection = socket.create_connection((store.host, store.port), _CONNECT_S)
            self.connection.settimeout(None)  # else MSG_DONTWAIT waits, too
        if self.connection is None:
            return
        try:
            name = _text_of(self.connection.getsockname())
            store.append(_CLIENTS, f"{name}\n")  # type: ignore[attr-defined] # torch has it
        except BaseException:
            self.close()
            raise

    def is_served(self) -> bool:
        """Return whether the process that serves the store lives; its connections may end later."""
        now = time.monotonic()
        if self.server is not None and now > self._next_look:
            self._next_look = now + _LOOK_S
            self.stopped_since = (self.stopped_since or now) if is_stopped(self.server) else None
            return is_alive(self.server) is not False
        return True

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the connection ends within so many ``seconds``; answers are no end."""
        if self.connection is None:
            return False
        try:
            is_readable = bool(find_readable([self.connection], seconds))
            return is_readable and not self.connection.recv(
                1, socket.MSG_PEEK | socket.MSG_DONTWAIT
            )
        except BlockingIOError:  # another thread has read it
            return False
        except (OSError, ValueError):  # closed
            return True

    def close(self) -> None:
        """Close the connection, also for the server where a forked child has a copy of it."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()


def find_readable(files: Iterable[Any], seconds: float) -> set[int]:
    """The numbers of the files that can be read, or have ended, within so many seconds."""
    return _polled(files, select.POLLIN, seconds)


def _polled(files: Iterable[Any], events: int, seconds: float) -> set[int]:
    poll = select.poll()  # unlike select, for descriptors of any number
    for file in files:
        poll.register(file, events)
    return {number for number, _ in poll.poll(1000 * seconds)}


def wait_for_clients_at_end(store: TCPStore, timeout: timedelta) -> None:
    """At the end of this process, which serves ``store``, wait for clients up to ``timeout``."""
    call_at_end(_Clients(store, timeout).close)


class _Clients:
    """The clients of a store that this process serves, by the connections that they watch.

    Args:
        store: served as long as there is another reference to it.
        timeout: how long to wait for them at the end.
    """

    def __init__(self, store: TCPStore, timeout: timedelta) -> None:
        self._store = weakref.ref(store)
        self._timeout = timeout
        self._told = b""
        self._connections: list[socket.socket] = []
        self._process_id = os.getpid()

    def update(self, seconds: float = 0.0) -> None:
        """Find new clients' connections, and drop those that clients close in ``seconds``."""
        store = self._store()
        told = b"" if store is None else store.compare_set(_CLIENTS, _NO_VALUE, _NO_VALUE)
        if store is not None and told != self._told:
            clients = {*told.decode(errors="replace").split("\n")}
            clients -= {*self._told.decode(errors="replace").split("\n")}
            self._told = told
            self._connections += _connections_of(clients, store.port)
        closed = _polled(self._connections, _HAS_LEFT, seconds)
        for connection in [one for one in self._connections if one.fileno() in closed]:
            self._connections.remove(connection)
            connection.close()

    def close(self) -> None:
        """Wait until no client needs the store; close this side, and see the clients close theirs.

        Where an exception ends the process, wait shortly. A program that is interrupted meanwhile
        ends at once.
        """
        atexit.unregister(self.close)
        if self._process_id != os.getpid():  # a forked child's copy
            return
        patience = Grace(_FAILING_S if is_ending_by_exception() else self._timeout)
        self.update()
        while self._connections and not patience.is_over:
            self.update(patience.slice_s(_SLICE_S))
        grace = Grace(_CLOSING_S)
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        while self._connections and not grace.is_over:
            self.update(grace.left_s)
        for connection in self._connections:
            connection.close()


def _connections_of(clients: set[str], port: int) -> Iterator[socket.socket]:
    """Copies of this process's sockets at ``port`` whose other ends are those of ``clients``.

    The server of torch's store does not hand out its own.
    """
    for _, copy in own_sockets():
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with suppress(OSError):  # it has no other end
            if copy.getsockname()[1] == port and _text_of(copy.getpeername()) in clients:
                yield socket.socket(fileno=copy.detach())


def _text_of(name: tuple[Any, ...]) -> str:
    """An end of a connection, in the same words on both sides."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return f"{getattr(address, 'ipv4_mapped', None) or address} {name[1]}"

"""Idle connections to the process that serves a store, by which its clients see that it ends.

torch reports on stderr that a server is lost as soon as a client asks it something. So a client
looks at its server watch first, and whether the process lives where it can see that. A server of
ours that ends in good order waits until its clients have ended or closed their worlds. Then it
closes its side of all watches, and waits shortly until clients whose requests may be under way have
closed theirs.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
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
    my_card,
)

__all__ = ["ServerWatch", "accept_clients", "find_offer", "find_readable", "offer_server_watch"]

_KEY = "meshdist/server watch"
_BACKLOG = 4096
_CONNECT_S = 5.0
# A second connection, which a firewall may forbid, is not worth waiting long for.
_CONNECT_BESIDE_S = 1.0
# A client that is stopped, or whose threads get no time, must not keep the server from ending.
_CLOSING_S = 1.0
# A rank that fails ends soon, but lets the others read what it has left for them.
_FAILING_S = 2.0
_SLICE_S = 0.25
_LOOK_S = 0.01  # a look costs more than a request on this host
_WORD_BYTES = 16
_MOST_STRANGERS = 64


_lock = threading.Lock()
_served: list[_Clients] = []


class ServerWatch:
    """Connections to the process that serves ``store``; none where no process does.

    A server of ours offers to be watched, and closes that connection first where it ends in order.

    Attributes:
        connections: end with the server.
        to_store: to the store itself, free for requests: their answers are not taken for an end.
        stopped_since: when the server's process was first seen stopped, where it still is.
    """

    def __init__(self, store: Store) -> None:
        self.connections: list[socket.socket] = []
        self.to_store: socket.socket | None = None
        self.stopped_since: float | None = None
        self._server: ProcessCard | None = None
        self._next_look = 0.0
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if not isinstance(store, TCPStore):
            return
        self.to_store = self._connect(store.host, store.port, _CONNECT_S)
        try:
            offer = find_offer(store.compare_set(_KEY, "?", "?"))  # "?" where there is none
        except BaseException:
            self.close()
            raise
        if offer is None:
            return
        self._server = offer.server
        if connection := self._connect(store.host, offer.port, _CONNECT_BESIDE_S):
            self.connections = [connection]
            with suppress(OSError):
                connection.sendall(offer.word)

    def _connect(self, host: str, port: int, limit_s: float) -> socket.socket | None:
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=limit_s)
            connection.settimeout(None)  # else MSG_DONTWAIT waits, too
            self.connections.append(connection)
            return connection
        return None

    def is_served(self) -> bool:
        """Whether the process that serves the store lives; its connections may end later."""
        now = time.monotonic()
        if self._server is not None and now > self._next_look:
            self._next_look = now + _LOOK_S
            self.stopped_since = (self.stopped_since or now) if is_stopped(self._server) else None
            return is_alive(self._server) is not False
        return True

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether a connection ends within so many ``seconds``; answers of the store are no end."""
        try:
            ready = find_readable(self.connections, seconds)
            found = [each for each in self.connections if each.fileno() in ready]
            return any(not each.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) for each in found)
        except BlockingIOError:  # another thread has read it
            return False
        except (OSError, ValueError):  # closed
            return True

    def close(self) -> None:
        """Close the connections, also for the server where a forked child has copies of them."""
        for connection in {*self.connections, self.to_store} - {None}:
            assert connection is not None
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@dataclass(frozen=True)
class Offer:
    """A server's entry in its store: where clients watch it, and how they are known."""

    port: int
    word: bytes
    server: ProcessCard


def find_offer(value: bytes) -> Offer | None:
    """The offer of a server, as it stands in the store; None where that is none."""
    try:
        found = json.loads(value)
        port, word = int(found["port"]), bytes.fromhex(found["word"])
        card = ProcessCard.from_json(found["server"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return Offer(port, word, card) if 0 < port < 65536 and len(word) == _WORD_BYTES else None


def find_readable(files: Iterable[Any], seconds: float) -> set[int]:
    """The numbers of the files that can be read, or have ended, within so many seconds."""
    poll = select.poll()  # unlike select, for descriptors of any number
    for file in files:
        poll.register(file, select.POLLIN)
    return {number for number, _ in poll.poll(1000 * seconds)}


def accept_clients() -> None:
    """Accept what waits to watch this process, each time that ranks meet; few may wait."""
    with _lock:
        for clients in _served:
            clients.update()


def offer_server_watch(store: Store, host: str, timeout: timedelta) -> None:
    """Let the clients of ``store``, which this process serves, watch this process until it ends.

    It listens at the address ``host``, by its number; where no second one can be had, clients have
    only the connection to the store itself. The end of this process may wait for the clients as
    long as ``timeout``.
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
    clients = _Clients(listener, timeout)
    offer = {"port": listener.getsockname()[1], "word": clients.word.hex()}
    store.set(_KEY, json.dumps({**offer, "server": my_card().to_json()}))
    with _lock:
        _served.append(clients)
    call_at_end(clients.close)


class _Clients:
    """The clients that watch this process: those that have sent the word that the store tells.

    Args:
        listener: where they connect to.
        timeout: how long to wait for them at the end.
    """

    def __init__(self, listener: socket.socket, timeout: timedelta) -> None:
        self.word = secrets.token_bytes(_WORD_BYTES)
        self._timeout = timeout
        listener.setblocking(False)
        self._listener = listener
        self._strangers: list[socket.socket] = []
        self._connections: list[socket.socket] = []
        self._process_id = os.getpid()

    def update(self, seconds: float = 0.0) -> None:
        """Accept new connections, of which few can wait, and drop those closed in ``seconds``."""
        if self._process_id != os.getpid():  # a forked child's copy
            return
        with suppress(OSError):
            while True:
                self._strangers.append(self._listener.accept()[0])
        for stranger in self._strangers[:]:
            self._greet(stranger)
        for stranger in self._strangers[:-_MOST_STRANGERS]:
            self._strangers.remove(stranger)
            stranger.close()
        closed = find_readable(self._connections, seconds)  # clients send nothing
        for connection in [one for one in self._connections if one.fileno() in closed]:
            self._connections.remove(connection)
            connection.close()

    def _greet(self, stranger: socket.socket) -> None:
        """Take a connection for a client's once it has sent the word; close it if it sent other."""
        try:
            sent = stranger.recv(_WORD_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            sent = b""
        self._strangers.remove(stranger)
        if sent == self.word:
            self._connections.append(stranger)
        else:
            stranger.close()

    def close(self) -> None:
        """Wait until no client needs the store; close this side, and see the clients close theirs.

        Where an exception ends the process, wait shortly. A program that is interrupted meanwhile
        ends at once.
        """
        atexit.unregister(self.close)
        if self._process_id != os.getpid():
            return
        patience = Grace(_FAILING_S if is_ending_by_exception() else self._timeout)
        self.update()
        while self._connections and not patience.is_over:
            self.update(patience.slice_s(_SLICE_S))
        grace = Grace(_CLOSING_S)
        self.update()
        for connection in (self._listener, *self._strangers):
            connection.close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        while self._connections and not grace.is_over:
            self.update(grace.left_s)
        for connection in self._connections:
            connection.close()

"""Detect a lost store server, wait for keys on a pollable socket, and let a server await clients.

Torch's client prints to stderr if the server is lost. So a client first checks a second connection
to the store, and on the same host the server's process. It writes that connection's address to the
store. A server that ends normally finds these connections among its sockets, waits until the
clients have closed them, closes its side of the rest, and waits briefly for requests in flight.

Torch's own wait for a key cannot be canceled, and prints to stderr when it expires. A KeyAlarm
sends torch's wait request over a pollable socket. The requests "wait for a", "cancel", "wait for b"
get the answers 1 0, or 0 1 0 if "a" was set before the cancellation: only a 0 after as many 1 as
cancellations signals "b". If the server does not support the request, no alarm fires.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from ..runtime.deadlines import Deadline
from ..runtime.hosts import (
    ProcessInfo,
    call_at_end,
    do_not_call_at_end,
    is_alive,
    is_ending_by_exception,
    is_stopped,
    own_sockets,
)

_CLIENTS = "meshdist/clients"
_NO_VALUE = "?"  # that no client writes
_CONNECT_S = 5.0
_CONNECT_ALARM_S = 1.0
# A stopped or starved client must not keep the server from ending.
_CLOSING_S = 1.0
# A failing rank ends soon, but gives the others time to read its report.
_FAILING_S = 2.0
_SLICE_S = 0.25
_LOOK_S = 0.01  # a check costs more than a request on this host
# Of torch's protocol: the first message, the head of a wait for one key and its answer, the
# cancellation of a wait and its answer.
_VALIDATE, _WAIT, _IS_SET = struct.pack("=BI", 0, 0x3C85F7CE), struct.pack("=BQ", 6, 1), 0
_CANCEL, _IS_CANCELED = struct.pack("=B", 12), 1
_MOST_ANSWERS = 64
_PEER_CLOSED = getattr(select, "POLLRDHUP", 0)  # unlike POLLIN, not for requests


class StoreLiveness:
    """Connection to a store's server without requests, which closes with the server."""

    def __init__(self, store: Store) -> None:
        self.connection: socket.socket | None = None
        self.server: ProcessInfo | None = None  # the server's process, once it is known
        self.stopped_since: float | None = None  # when it was first seen stopped, if it still is
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

    def is_hosted(self) -> bool:
        """Return whether the server's process is alive; True if unknown or just checked."""
        # The connections of a dead process may close later.
        now = time.monotonic()
        if self.server is not None and now > self._next_look:
            self._next_look = now + _LOOK_S
            self.stopped_since = (self.stopped_since or now) if is_stopped(self.server) else None
            return is_alive(self.server) is not False
        return True

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the server closes the connection within ``seconds``; read no answers."""
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
        """Close the connection for the server, even if a forked child has a copy."""
        if self.connection is not None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.connection.close()


def find_readable(files: Iterable[Any], seconds: float) -> set[int]:
    """Return the descriptors of ``files`` that are readable or closed within ``seconds``."""
    return _polled(files, select.POLLIN, seconds)


def _polled(files: Iterable[Any], events: int, seconds: float) -> set[int]:
    poll = select.poll()  # unlike select, for descriptors of any number
    for file in files:
        poll.register(file, events)
    return {number for number, _ in poll.poll(1000 * seconds)}


class AlarmLost(ConnectionError):
    """The server has closed an alarm's connection, or does not support the request."""


class KeyAlarm:
    """Connection to a TCPStore's server, readable when a key is set."""

    # Every method raises AlarmLost if the connection is lost.

    def __init__(self, to: tuple[str, int] | socket.socket) -> None:
        self.turn = threading.Lock()  # held while a wait uses the alarm
        self.is_lost = False  # True once the alarm can no longer fire
        self._lock = threading.RLock()
        self._has_rung = False
        self._greeting, self._key, self._num_canceled = _VALIDATE, "", 0
        with self._watched():
            if not isinstance(to, socket.socket):
                to = socket.create_connection(to, timeout=_CONNECT_ALARM_S)
            to.settimeout(None)  # else MSG_DONTWAIT waits, too
            self.connection = to

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except OSError:
                self.is_lost = True
                raise AlarmLost from None
            except BaseException:  # from a signal handler: the next answers are unknown
                self.is_lost = True
                raise

    def reset(self, key: str) -> None:
        """Set the alarm for ``key``, replacing the previous key; "" clears it."""
        name = f"/{key}".encode()  # torch begins each key with "/"
        with self._watched():
            text = b""
            if self._key and not self._has_rung:
                text, self._num_canceled = _CANCEL, self._num_canceled + 1
            self._key, self._has_rung = key, False
            if key:
                text += self._greeting + _WAIT + struct.pack("=Q", len(name)) + name
                self._greeting = b""
            self.connection.sendall(text)

    def has_rung(self, key: str) -> bool:
        """Return, only once, whether the alarm has fired for ``key``."""
        with self._watched():
            with suppress(BlockingIOError):
                answers = self.connection.recv(_MOST_ANSWERS, socket.MSG_DONTWAIT)
                for answer in answers or b"?":
                    if answer == _IS_SET:
                        self._has_rung |= not self._num_canceled
                    elif answer == _IS_CANCELED and self._num_canceled:
                        self._num_canceled -= 1
                    else:
                        raise ConnectionError
            if not key or self._key != key or not self._has_rung:
                return False
            self._key = ""
            return True

    def poll(self, key: str | None = None) -> bool | None:
        """Set the alarm for ``key``, if given; return whether it fired, None if in use."""
        if not self.turn.acquire(blocking=False):
            return None
        try:
            # Without a key, only read available answers.
            if key is not None and self._key != key:
                self.reset(key)
            return self.has_rung(key or "")
        finally:
            self.turn.release()


def wait_for_clients_at_end(store: TCPStore, timeout: timedelta) -> None:
    """Make this process, which hosts ``store``, wait for clients at its end."""
    close = _Clients(store, timeout).close
    call_at_end(close)
    weakref.finalize(store, do_not_call_at_end, close).atexit = False


def has_clients(store: TCPStore) -> bool:
    """Return whether other processes are connected to ``store``; False if hosted elsewhere."""
    is_seen, mine, peers = False, set(), []
    for _, copy in own_sockets():
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        name = copy.getsockname()
        mine.add(_text_of(name))
        if name[1] == store.port:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                is_seen = True
            else:
                with suppress(OSError):  # it was closed meanwhile
                    peers.append(_text_of(copy.getpeername()))
    if not is_seen:  # this process hosts no store, or cannot list its sockets
        return bool(getattr(store, "is_hosted_here", False))
    return not mine.issuperset(peers)


class _Clients:
    """Connections with which clients watch a store that this process hosts.

    Args:
        store: held by a weak reference.
    """

    def __init__(self, store: TCPStore, timeout: timedelta) -> None:
        self._store = weakref.ref(store)
        self._timeout = timeout
        self._known = b""
        self._connections: list[socket.socket] = []
        self._process_id = os.getpid()

    def update(self, seconds: float = 0.0) -> None:
        """Add new clients' connections, and drop those closing within ``seconds``."""
        store = self._store()
        latest = b"" if store is None else store.compare_set(_CLIENTS, _NO_VALUE, _NO_VALUE)
        if store is not None and latest != self._known:
            clients = {*latest.decode(errors="replace").split("\n")}
            clients -= {*self._known.decode(errors="replace").split("\n")}
            self._known = latest
            self._connections += _connections_of(clients, store.port)
        closed = _polled(self._connections, _PEER_CLOSED, seconds)
        for connection in tuple(self._connections):
            if connection.fileno() in closed:
                self._connections.remove(connection)
                connection.close()

    def close(self) -> None:
        """Wait until clients have closed their connections; close this side after the timeout."""
        do_not_call_at_end(self.close)  # a program that is interrupted here ends immediately
        if self._process_id != os.getpid():  # a forked child's copy
            return
        patience = Deadline(_FAILING_S if is_ending_by_exception() else self._timeout)
        self.update()
        while self._connections and not patience.is_over:
            self.update(min(_SLICE_S, patience.left_s))
        grace = Deadline(_CLOSING_S)
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        while self._connections and not grace.is_over:
            self.update(grace.left_s)
        for connection in self._connections:
            connection.close()


def _connections_of(clients: set[str], port: int) -> Iterator[socket.socket]:
    """Yield copies of this process's sockets at ``port`` whose other ends are ``clients``."""
    for _, copy in own_sockets():  # torch's server does not expose its sockets
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        with suppress(OSError):  # it has no other end
            if copy.getsockname()[1] == port and _text_of(copy.getpeername()) in clients:
                yield socket.socket(fileno=copy.detach())


def _text_of(name: tuple[Any, ...]) -> str:
    """Return an address and port as a text, equal on both sides."""
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return f"{getattr(address, 'ipv4_mapped', None) or address} {name[1]}"

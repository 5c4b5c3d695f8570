"""Host and connect to torch's stores; a server at a loopback address listens on loopback only.

Torch's TCPStore listens on every interface, even for ``127.0.0.1``, unless it gets a bound socket,
as from ``serve_store``.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, FileStore, HashStore, PrefixStore, Store, TCPStore

from ..error_text import first_line
from ..errors import RendezvousError, StoreError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import MORE_DESCRIPTORS, name_locker, raise_descriptor_limit, take_lock
from ..runtime.integers import find_integer
from .store_liveness import wait_for_clients_at_end

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "TCPStore",
]

LEAST_STORE_TIMEOUT = timedelta(seconds=60)
"""Minimum timeout of a store's own waits and connections: torch resolves the name of every peer,
which can take ten seconds if the name server does not respond."""

_BACKLOG = 4096
# Measured in worlds of 1 to 5 ranks. A process that can communicate needs the first number of
# descriptors. The store's host also needs, for each other rank, descriptors for its requests, its
# alarm, and a first probe of the listener or a copy of its alarm at the end. Groups count theirs.
_DESCRIPTORS = 16
_DESCRIPTORS_TO_SERVE = 24
_DESCRIPTORS_PER_CLIENT = 3
_DESCRIPTORS_TO_CONNECT = 4  # some only briefly
_MOST_DESCRIPTORS = (1 << 31) - 1  # descriptors are C ints
_LONGEST_PAUSE_S = 0.2  # between connections, which cost rank 0's host more than requests
_CONNECT_S = 5.0
_SOUND = "sound"
_MOST_DIGITS = 18  # that fit in 64 bits
CLOSING = "meshdist/closing"
"""The key that a server sets before it closes a store without clients."""
_MOST_RESETS = 3  # of connections to a server that has just closed
_PAUSE_S = 0.02  # until the next try to connect to a closing server
_ANSWER_S = 30.0
"""How long a server that has accepted a connection may take to respond as a store."""


def find_number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return ``address`` as an IP address, or None for a host name."""
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether a name or IP address is a loopback address."""
    number = find_number(numeric_loopback(address))
    return number is not None and number.is_loopback


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the route to ``host``, without sending."""
    for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {host}")


def numeric_loopback(address: str) -> str:
    """Return ``address``, or 127.0.0.1 for localhost, which may resolve to two addresses."""
    return "127.0.0.1" if address == "localhost" else address


def bind_listener(address: str, port: int) -> socket.socket | None:
    """Return a socket listening at ``address``, or None if this host has no such address.

    Args:
        port: 0 takes any free port.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(
            numeric_loopback(address), port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        raise unknown_address(address, error) from None
    is_v6 = family == socket.AF_INET6
    try:
        return socket.create_server(target, family=family, backlog=_BACKLOG, dualstack_ipv6=is_v6)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        raise RendezvousError(
            f"rank 0 cannot listen on {address}, port {port}: {error.strerror or error}",
            where=f"host {socket.gethostname()}",
            expected="a free port",
            fix="use another port (MASTER_PORT, or the port in the URL), stop the job that uses "
            "this port, or start with `meshdist run -n 4 script.py`, which picks a free port",
        ) from None


def unknown_address(address: str, error: Exception) -> RendezvousError:
    """Return the error for an unresolvable host name."""
    return RendezvousError(
        f"cannot resolve the host name {address!r}: {error}",
        where=f"host {socket.gethostname()}",
        expected="the name or IP address of rank 0's host",
        fix="set MASTER_ADDR (or the host in the URL) to an address that every host can reach",
    )


def inherited_listener(descriptor: str | None, port: int) -> socket.socket | None:
    """Return the launcher's socket ``descriptor``, listening, or None if not bound to ``port``."""
    number = find_integer(descriptor or "", most=_MOST_DESCRIPTORS)
    if number is None:
        return None
    try:
        duplicate = os.dup(number)
    except OSError:
        return None
    try:
        inherited = socket.socket(fileno=duplicate)
    except OSError:  # socket.fromfd would leak the duplicate here
        os.close(duplicate)
        return None
    with suppress(OSError, IndexError):  # some other file may have the number now
        is_free = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        if inherited.getsockname()[1] == port and is_free:
            inherited.listen(_BACKLOG)
            os.close(number)  # use the duplicate, which children do not inherit
            return inherited
    inherited.close()
    return None


class NamedPrefixStore(PrefixStore):
    """PrefixStore that shows its ``prefix`` and keeps the Python part of ``store`` alive."""

    # torch's class keeps only the C++ part alive, which raises "Not implemented" on its own.

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self.prefix = prefix
        self._store = store


class HostedStore(TCPStore):
    """TCPStore whose server runs in this process."""

    is_hosted_here = True


def serve_store(
    listener: socket.socket | None, address: str, port: int, timeout: timedelta
) -> HostedStore:
    """Return a store whose server runs in this process and listens only on ``listener``.

    Args:
        listener: a socket, owned by the store from now on; None listens on all interfaces.
        timeout: how long this process waits at its end for the store's clients.
    """
    asked, is_given = address, listener is not None
    if listener is None:
        listener = bind_listener("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)
        assert listener is not None  # every host has these addresses
        address = "127.0.0.1"  # for this process's own client
    bound, port = listener.getsockname()[:2]
    address = address if bound in ("0.0.0.0", "::") else bound
    limit = max(timeout, LEAST_STORE_TIMEOUT)
    descriptor = listener.detach()
    store = HostedStore(
        address, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    if not is_given:
        _check_reached(store, asked, port, timeout)
    wait_for_clients_at_end(store, timeout)
    return store


def _check_reached(store: TCPStore, address: str, port: int, timeout: timedelta) -> None:
    """Raise RendezvousError unless a client at ``address`` reaches this process's ``store``."""
    # A router or proxy may forward an address that no interface of this host has.
    key = f"meshdist/reached/{secrets.token_hex(8)}"
    store.set(key, "")
    try:
        found = connect_store(address, port, min(timeout, timedelta(seconds=_CONNECT_S)))
        reason = "" if found.check([key]) else "another store answers there"
    except (RendezvousError, RuntimeError) as error:
        reason = first_line(error).removeprefix("cannot reach rank 0: ")
    store.delete_key(key)
    if reason:
        raise RendezvousError(
            f"rank 0 cannot be reached at {address}, port {port}",
            where=f"host {socket.gethostname()}",
            expected="an address of rank 0's host",
            found=reason,
            fix="set MASTER_ADDR (or the host in the URL) to the name or IP address of this host, "
            "or start rank 0 on the host with that address",
        )


def connect_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a client of the store at ``address`` once it listens and is not about to close."""
    host, deadline, num_resets = numeric_loopback(address), Deadline(timeout), 0
    while True:
        _wait_for_listener(host, port, timeout, deadline)
        found = _try_to_connect(host, port, timeout)
        if isinstance(found, TCPStore):
            return found
        was_reset = isinstance(found, DistNetworkError)
        num_resets += was_reset
        can_retry = isinstance(found, _Closing) or (was_reset and num_resets < _MOST_RESETS)
        if not can_retry or deadline.is_over:
            break
        time.sleep(_PAUSE_S)
    raise RendezvousError(
        f"the service at {address}, port {port} does not respond as a store",
        where=f"host {socket.gethostname()}, process {os.getpid()}",
        expected="the store of rank 0",
        found=first_line(found),
        fix="use a port that no other service uses (MASTER_PORT, or the port in the URL), and "
        "check that rank 0 is running",
    )


class _Closing(RuntimeError):
    """The server is about to close its store, which no process uses."""


def _try_to_connect(host: str, port: int, timeout: timedelta) -> TCPStore | RuntimeError:
    """Return a client of the listening store, or the reason why none."""
    outcome: list[TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            patience = max(timeout, LEAST_STORE_TIMEOUT)
            found = TCPStore(host, port, None, False, patience, wait_for_workers=False)
            is_closing = found.check([CLOSING])
            outcome.append(_Closing("it keeps closing") if is_closing else found)
        except RuntimeError as error:
            outcome.append(error)

    # Torch waits for the first answer without a timeout, so connect in a thread that can be
    # abandoned.
    client = threading.Thread(target=connect, name="meshdist-connect", daemon=True)
    client.start()
    limit_s = min(_ANSWER_S, timeout.total_seconds())
    client.join(limit_s)
    silent = f"no response in {limit_s:g} s: it is another service, or rank 0 is stopped"
    return outcome[0] if outcome else RuntimeError(silent)


def open_file(path: str, timeout: timedelta, num_users: int = -1) -> FileStore:
    """Return the store in the file at ``path``, creating it; raise for other content.

    Args:
        num_users: the last of this many processes removes the file; -1 if none may, because another
            process may be initializing in it.
    """
    # Torch would hold the GIL forever while it reads a damaged file or waits for a locked file.
    try:
        found = wait_until(lambda: _find_damage(path), Deadline(timeout))
        reason = found or f"{name_locker(path)} keeps it locked"
        if reason == _SOUND:
            return FileStore(path, num_users)
    except (OSError, ValueError) as error:
        reason = first_line(error)
    raise RendezvousError(
        f"cannot use the store's file: {reason}",
        where=f"{path}; host {socket.gethostname()}, process {os.getpid()}",
        expected="a path in an existing directory on a file system that all ranks share; the file "
        "is absent, empty, or left by an earlier job",
        fix="pass another path, or remove the file if no other job uses it",
    )


def _find_damage(path: str) -> str | None:
    """Return the damage of a FileStore's file, or ``_SOUND``; None while it is locked."""
    # Opening a non-file, for example a pipe, must not block.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o600), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return "it is not a regular file"
        if not take_lock(file.fileno()):
            return None
        data = file.read()
    position, texts = 0, []  # keys and values in turn, each after its length in four bytes
    while position + 4 <= len(data):
        begin = position + 4
        position = begin + int.from_bytes(data[position:begin], sys.byteorder)
        texts.append(data[begin:position])
    pairs = zip(texts[::2], texts[1::2], strict=False)
    # Torch's user counts, which it also reads in the destructor, where errors are fatal. Other keys
    # begin with "/", deleted ones with "-".
    counts = [value for key, value in pairs if not key.startswith((b"/", b"-"))]
    are_counts = all(count.isdigit() and len(count) <= _MOST_DIGITS for count in counts)
    is_whole = position == len(data) and len(texts) % 2 == 0
    return _SOUND if is_whole and are_counts else "it is damaged"


def _wait_for_listener(host: str, port: int, timeout: timedelta, deadline: Deadline) -> None:
    reason = ""

    def is_listening() -> bool:
        nonlocal reason
        try:
            limit_s = max(0.001, min(_CONNECT_S, deadline.left_s))
            socket.create_connection((host, port), timeout=limit_s).close()
        except socket.gaierror as error:
            raise unknown_address(host, error) from None
        except OSError as error:
            reason = error.strerror or str(error)
            return False
        return True

    if not wait_until(is_listening, deadline, longest_pause_s=_LONGEST_PAUSE_S):
        raise RendezvousError(
            f"cannot reach rank 0: no process listens on {host}, port {port} "
            f"after {timeout.total_seconds():g} s ({reason})",
            where=f"host {socket.gethostname()}, process {os.getpid()}",
            expected="rank 0 to host the store at this address",
            fix="check the output of rank 0 for a failure, that every rank has the same "
            "MASTER_ADDR and MASTER_PORT (or URL), and that no firewall blocks the port",
        )


def check_can_join() -> None:
    """Raise RendezvousError if this process cannot open enough files to join a world."""
    _check_descriptors(_DESCRIPTORS, "join a world")


def check_can_serve(size: int) -> None:
    """Raise RendezvousError if it cannot open enough files to host a store."""
    num_needed = _DESCRIPTORS_TO_SERVE + _DESCRIPTORS_PER_CLIENT * (size - 1)
    _check_descriptors(num_needed, f"host the store of {size} ranks")


def _check_descriptors(num_needed: int, purpose: str) -> None:
    if lack := raise_descriptor_limit(num_needed):
        raise RendezvousError(
            f"this process cannot open enough files and sockets to {purpose}",
            where=f"process {os.getpid()}",
            expected=f"{num_needed} free file descriptors",
            found=lack,
            fix=MORE_DESCRIPTORS,
        )


def root_of(store: Store) -> Store:
    """Return the store below all PrefixStores."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def cloned(store: Any) -> Store:
    """Return the store on a new connection; raise StoreError without free descriptors."""
    if lack := raise_descriptor_limit(_DESCRIPTORS_TO_CONNECT):  # torch would retry for a minute
        raise StoreError(
            "cannot open another connection to the store: too few file descriptors are free",
            where=f"process {os.getpid()}",
            found=lack,
            fix=MORE_DESCRIPTORS,
        )
    clone: Store = store.clone()
    return clone

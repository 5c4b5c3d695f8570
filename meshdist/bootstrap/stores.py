"""Torch's stores, under their own names; a server on loopback alone.

Torch's TCPStore listens on every interface, also at the address ``127.0.0.1``, unless it gets a
socket that is bound already, as ``serve_store`` gives it.
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
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, FileStore, HashStore, PrefixStore, Store, TCPStore

from ..error_text import first_line
from ..errors import RendezvousError, StoreError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import MORE_DESCRIPTORS, make_descriptor_room, name_locker, take_lock
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
"""For a store's own waits and connections. Torch asks the name server for the name of every peer,
which alone may take ten seconds when it does not answer, so that less could fail for nothing."""

_BACKLOG = 4096
# Measured in worlds of 1 to 5 ranks: what a process has open once it can communicate, and what the
# process that serves the store has besides for each other rank: its requests, its alarm, and one
# that comes first to see whether the store listens, or a copy of its alarm at the end. Groups count
# their own as they open.
_DESCRIPTORS = 16
_DESCRIPTORS_TO_SERVE = 24
_DESCRIPTORS_PER_CLIENT = 3
_DESCRIPTORS_TO_CONNECT = 4  # some of them for a moment
_MOST_DESCRIPTORS = (1 << 31) - 1  # C's int holds a descriptor
_LONGEST_PAUSE_S = 0.2  # between connections, which cost the host of rank 0 more than a request
_CONNECT_S = 5.0
_SOUND = "sound"
_MOST_DIGITS = 18  # which 64 bits hold
CLOSING = "meshdist/closing"
"""The key that a server sets before it closes a store to which it sees nobody connected."""
_MOST_TRIES = 3  # to connect to a server that closes
_ANSWER_S = 30.0
"""How long a server that has accepted a connection may take to answer as a store does."""


def find_number(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``address`` writes in numbers; None for a name."""
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None


def is_loopback(address: str) -> bool:
    """Return whether ``address``, a name or a number, means this host by its loopback interface."""
    number = find_number(numeric_loopback(address))
    return number is not None and number.is_loopback


def address_towards(host: str, port: int) -> str:
    """Return the address of this host from which it reaches ``host``; nothing is sent."""
    for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {host}")


def numeric_loopback(address: str) -> str:
    """Return ``address``, or 127.0.0.1 for the name localhost, which may have two numbers."""
    return "127.0.0.1" if address == "localhost" else address


def bind_listener(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens at ``address``; None where that is no address of this host.

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
            expected="a port that nobody uses",
            fix="choose another port (MASTER_PORT, or the one in the URL), end the job that "
            "holds it, or let `meshdist run -n 4 script.py` choose one",
        ) from None


def unknown_address(address: str, error: Exception) -> RendezvousError:
    """Return the error for a host name that has no address here."""
    return RendezvousError(
        f"no host is known by the name {address!r}: {error}",
        where=f"host {socket.gethostname()}",
        expected="the name or the number of the host of rank 0",
        fix="set MASTER_ADDR (or the host in the URL) to an address that every host can reach",
    )


def inherited_listener(descriptor: str | None, port: int) -> socket.socket | None:
    """Return the launcher's socket ``descriptor``, listening, if bound to ``port``; else None."""
    number = find_integer(descriptor or "", most=_MOST_DESCRIPTORS)
    if number is None:
        return None
    try:
        duplicate = os.dup(number)
    except OSError:
        return None
    try:
        inherited = socket.socket(fileno=duplicate)
    except OSError:  # not socket.fromfd, which would leave the duplicate open then
        os.close(duplicate)
        return None
    with suppress(OSError, IndexError):  # some other file may have the number now
        is_free = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
        if inherited.getsockname()[1] == port and is_free:
            inherited.listen(_BACKLOG)
            os.close(number)  # the duplicate serves from now on, and no child inherits it
            return inherited
    inherited.close()
    return None


class NamedPrefixStore(PrefixStore):
    """A PrefixStore whose ``prefix`` can be read, as that of torch's own class cannot."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self.prefix = prefix


class ServedStore(TCPStore):
    """A store whose server runs in this process."""

    is_served_here = True


def serve_store(
    listener: socket.socket | None, address: str, port: int, timeout: timedelta
) -> ServedStore:
    """Return a store whose server runs in this process and listens on ``listener`` alone.

    Args:
        listener: taken over; None lets the server listen on every interface, at ``port``.
        timeout: how long this process waits at its end for others that need the store.
    """
    asked, is_given = address, listener is not None
    if listener is None:
        listener = bind_listener("::" if socket.has_dualstack_ipv6() else "0.0.0.0", port)
        assert listener is not None  # every host has these
        address = "127.0.0.1"  # of this process's own handle
    bound, port = listener.getsockname()[:2]
    address = address if bound in ("0.0.0.0", "::") else bound
    limit = max(timeout, LEAST_STORE_TIMEOUT)
    descriptor = listener.detach()
    store = ServedStore(
        address, port, None, True, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    if not is_given:
        _check_reached(store, asked, port, timeout)
    wait_for_clients_at_end(store, timeout)
    return store


def _check_reached(store: TCPStore, address: str, port: int, timeout: timedelta) -> None:
    """Raise RendezvousError unless a client at ``address`` reaches this process's ``store``."""
    # A router or a proxy may lead here from an address that no interface of this host has.
    key = f"meshdist/reached/{secrets.token_hex(8)}"
    store.set(key, "")
    try:
        found = connect_store(address, port, min(timeout, timedelta(seconds=_CONNECT_S)))
        reason = "" if found.check([key]) else "another store answers there"
    except (RendezvousError, RuntimeError) as error:
        reason = first_line(error).removeprefix("rank 0 has not joined: ")
    store.delete_key(key)
    if reason:
        raise RendezvousError(
            f"rank 0 cannot be reached at {address}, port {port}",
            where=f"host {socket.gethostname()}",
            expected="an address of the host of rank 0",
            found=reason,
            fix="set MASTER_ADDR (or the host in the URL) to the name or the number of this host, "
            "or start the program so that rank 0 runs on that one",
        )


def connect_store(address: str, port: int, timeout: timedelta, try_number: int = 1) -> TCPStore:
    """Return a client of the store at ``address`` once it listens; try again if it is closing."""
    host, deadline = numeric_loopback(address), Deadline(timeout)
    _wait_for_listener(host, port, timeout)
    outcome: list[TCPStore | RuntimeError] = []
    is_closing: list[bool] = []

    def connect() -> None:
        try:
            patience = max(timeout, LEAST_STORE_TIMEOUT)
            found = TCPStore(host, port, None, False, patience, wait_for_workers=False)
            is_closing.append(found.check([CLOSING]))
            outcome.append(found)
        except RuntimeError as error:
            is_closing.append(isinstance(error, DistNetworkError))
            outcome.append(error)

    # Torch waits without end for the first answer from that port: a thread does the waiting, so
    # that this one can stop.
    client = threading.Thread(target=connect, name="meshdist-connect", daemon=True)
    client.start()
    limit_s = min(_ANSWER_S, timeout.total_seconds())
    client.join(limit_s)
    found = outcome[0] if outcome else None
    if found is not None and is_closing[0] and try_number < _MOST_TRIES and not deadline.is_over:
        del found, outcome[:]
        return connect_store(address, port, timedelta(seconds=deadline.left_s), try_number + 1)
    if isinstance(found, TCPStore):
        return found
    reason = "" if found is None else f": {first_line(found)}"
    silent = f"nothing has come back in {limit_s:g} s: another service, or rank 0 is stopped"
    raise RendezvousError(
        f"what listens on {address}, port {port} does not answer as a store{reason}",
        where=f"host {socket.gethostname()}, process {os.getpid()}",
        expected="the store of rank 0",
        found="" if found is not None else silent,
        fix="choose a port that no other service uses (MASTER_PORT, or the one in the URL), and "
        "see that rank 0 runs",
    )


def open_file(path: str, timeout: timedelta, num_users: int = -1) -> FileStore:
    """Return the store in the file at ``path``, made where absent; raise for other content.

    Args:
        num_users: the last of so many processes removes the file; -1: no process does, since
            another process may just begin a world in it.
    """
    # Torch reads a damaged file, or waits for one that is locked, for ever, with the GIL.
    try:
        found = wait_until(lambda: _find_damage(path), Deadline(timeout))
        reason = found or f"{name_locker(path)} keeps it locked"
        if reason == _SOUND:
            return FileStore(path, num_users)
    except (OSError, ValueError) as error:
        reason = first_line(error)
    raise RendezvousError(
        f"the file of the store cannot be used: {reason}",
        where=f"{path}; host {socket.gethostname()}, process {os.getpid()}",
        expected="a path in an existing directory on a file system that all ranks share; the file "
        "is absent or empty, or an earlier job met in it",
        fix="pass another path, or remove the file if no other job uses it",
    )


def _find_damage(path: str) -> str | None:
    """Return the damage of a FileStore's file, or ``_SOUND``; None while it is locked."""
    # What is no file, a pipe for example, must not keep this process waiting.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
    with os.fdopen(os.open(path, flags, 0o600), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return "it is no regular file"
        if not take_lock(file.fileno()):
            return None
        data = file.read()
    position, texts = 0, []  # keys and values in turn, each after its length in four bytes
    while position + 4 <= len(data):
        begin = position + 4
        position = begin + int.from_bytes(data[position:begin], sys.byteorder)
        texts.append(data[begin:position])
    pairs = zip(texts[::2], texts[1::2], strict=False)
    # What torch counts its users by, also when it destroys the object, where errors are fatal.
    # Other keys begin with "/", or with "-" where they are deleted.
    counts = [value for key, value in pairs if not key.startswith((b"/", b"-"))]
    are_counts = all(count.isdigit() and len(count) <= _MOST_DIGITS for count in counts)
    is_whole = position == len(data) and len(texts) % 2 == 0
    return _SOUND if is_whole and are_counts else "it is damaged"


def _wait_for_listener(host: str, port: int, timeout: timedelta) -> None:
    deadline = Deadline(timeout)
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
            f"rank 0 has not joined: nobody listens on {host}, port {port} "
            f"after {timeout.total_seconds():g} s ({reason})",
            where=f"host {socket.gethostname()}, process {os.getpid()}",
            expected="rank 0, which serves the store at this address",
            fix="look at the output of rank 0; check that every rank has the same "
            "MASTER_ADDR and MASTER_PORT (or URL), and that a firewall lets the port pass",
        )


def check_can_join() -> None:
    """Raise RendezvousError where this process can open too few files to be in a world."""
    _check_descriptors(_DESCRIPTORS, "join a world")


def check_can_serve(size: int) -> None:
    """Raise RendezvousError where this process can open too few files to serve a store."""
    num_needed = _DESCRIPTORS_TO_SERVE + _DESCRIPTORS_PER_CLIENT * (size - 1)
    _check_descriptors(num_needed, f"serve the store of {size} ranks")


def _check_descriptors(num_needed: int, purpose: str) -> None:
    if lack := make_descriptor_room(num_needed):
        raise RendezvousError(
            f"this process can open too few files and sockets to {purpose}",
            where=f"process {os.getpid()}",
            expected=f"room for {num_needed} more",
            found=lack,
            fix=MORE_DESCRIPTORS,
        )


def root_of(store: Store) -> Store:
    """Return the store under all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def cloned(store: Any) -> Store:
    """Return the store by a new connection; raise StoreError if no file descriptor is free."""
    if lack := make_descriptor_room(_DESCRIPTORS_TO_CONNECT):  # torch would try for a minute
        raise StoreError(
            "there is no room for another connection to the store",
            where=f"process {os.getpid()}",
            found=lack,
            fix=MORE_DESCRIPTORS,
        )
    clone: Store = store.clone()
    return clone

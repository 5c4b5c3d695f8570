"""Admit only the members of a group to its shared memory.

Any process of the host can connect to a Unix socket. So the first member creates a secret, which
the other members read from the store and send first. Connections that send anything else are
dropped, and silent connections do not block members. Another user's process gets an answer, since
it may be a member. This does not exclude processes of the same user that can read the store.
"""

from __future__ import annotations

import array
import errno
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ...runtime.deadlines import Deadline, wait_until

MOST_FILES = 250  # in one message
_FILE_BYTES = array.array("i").itemsize
_HEAD = struct.Struct("!iI")  # the number, and how many files follow
_SHORTEST_S = 0.05


def send(connection: socket.socket, number: int, files: Sequence[int], deadline: Deadline) -> None:
    """Send a number and open files, in as many messages as needed; see ``receive``."""
    limit(connection, deadline)
    connection.sendall(_HEAD.pack(number, len(files)))
    for start in range(0, len(files), MOST_FILES):
        send_part(connection, b"f", files[start : start + MOST_FILES], deadline)


def receive(
    connection: socket.socket, deadline: Deadline, most_files: int = 0
) -> tuple[int, list[int]]:
    """Return number and files from ``send``, ``most_files`` at most; the caller closes these."""
    data = b""
    while len(data) < _HEAD.size:
        limit(connection, deadline)
        begin = connection.recv(_HEAD.size - len(data))
        if not begin:
            raise ConnectionResetError("the connection ended")
        data += begin
    number, num_files = _HEAD.unpack(data)
    if num_files > most_files:
        raise OSError(
            f"{num_files} file descriptors are announced, at most {most_files} may follow"
        )
    files: list[int] = []
    try:
        while len(files) < num_files:
            limit(connection, deadline)
            most = min(MOST_FILES, num_files - len(files))
            _, more, is_whole = receive_part(connection, 1, most)
            files += more
            if not is_whole:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not more:
                raise ConnectionResetError("the connection ended")
    except OSError:
        close_all(files)
        raise
    return number, files


def limit(connection: socket.socket, deadline: Deadline) -> None:
    """Bound the next call on ``connection`` by ``deadline``."""
    connection.settimeout(max(deadline.left_s, _SHORTEST_S))


def send_part(
    connection: socket.socket, data: bytes, files: Sequence[int], deadline: Deadline
) -> None:
    """Send a few bytes and open files in one message, for ``receive_part``."""
    if not wait_until(partial(_try_to_send, connection, data, files), deadline):
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))


def receive_part(
    connection: socket.socket, num_bytes: int, most_files: int
) -> tuple[bytes, list[int], bool]:
    """Receive a message with ``most_files`` at most; return bytes, files, and completeness."""
    # socket.recv_fds would let child programs inherit the descriptors.
    ancillary_bytes = socket.CMSG_SPACE(most_files * _FILE_BYTES)
    data, more, flags, _ = connection.recvmsg(num_bytes, ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for _, kind, part in more:
        if kind == socket.SCM_RIGHTS:
            files.frombytes(part[: len(part) // _FILE_BYTES * _FILE_BYTES])
    return data, list(files), not flags & socket.MSG_CTRUNC


def close_all(files: list[int]) -> None:
    """Close all file descriptors in ``files``."""
    for file in files:
        os.close(file)


def _try_to_send(connection: socket.socket, data: bytes, files: Sequence[int]) -> bool:
    """Send ``data`` with open files; return False while this user has too many in flight."""
    try:
        connection.sendmsg(
            [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        return False
    return True


OF_ANOTHER_USER = -1
"""The number that is sent to a process of another user, in case it is a member."""

_SECRET_BYTES = 16
_GREETING = struct.Struct(f"!{_SECRET_BYTES}sI")  # the secret, and the member's group rank
_MOST_SILENT = 64  # connections that have not sent a greeting
_SILENT_S = 1.0  # how long each may stay silent while others wait to connect


class Listener:
    """The first member's listening socket, and connections without a greeting."""

    def __init__(self, size: int) -> None:
        name = f"meshdist-{secrets.token_hex(16)}"
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self.address = f"{name} {self._secret.hex()}"  # for ``enter``
        self.awaited = set(range(1, size))  # members that have not connected
        self._silent: dict[socket.socket, Deadline] = {}  # the oldest comes first
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(f"\0{name}")
            self._listener.listen(size + _MOST_SILENT)
        except OSError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Close the socket and the connections without a greeting."""
        for connection in (self._listener, *self._silent):
            connection.close()
        self._silent.clear()

    def watched(self) -> list[socket.socket]:
        """Return the sockets to ``look`` at once readable: the listener, new connections."""
        is_full = (
            len(self._silent) >= _MOST_SILENT and not next(iter(self._silent.values())).is_over
        )
        return [*self._silent] if is_full else [self._listener, *self._silent]

    def look(self, connection: socket.socket) -> tuple[int, socket.socket, int] | None:
        """Read a watched socket; return a new member's (place, connection, file) or None."""
        if connection is self._listener:
            self._accept()
        if self._silent.pop(connection, None) is None:
            return None
        try:
            data, files, is_whole = receive_part(connection, _GREETING.size, 1)
        except OSError:
            data, files, is_whole = b"", [], True
        secret, member = _GREETING.unpack(data.ljust(_GREETING.size, b"\0"))
        is_member = hmac.compare_digest(secret, self._secret) and member in self.awaited
        if not is_member or not is_whole or len(files) != 1:
            close_all(files)
            connection.close()
            if is_member and not is_whole:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return None
        self.awaited.remove(member)
        return member, connection, files[0]

    def _accept(self) -> None:
        if len(self._silent) >= _MOST_SILENT:
            self._drop_oldest()
        try:
            connection = self._listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._silent:
                self._drop_oldest()
                return
            raise
        if _peer_user(connection) != os.getuid():
            with connection, suppress(OSError):
                send(connection, OF_ANOTHER_USER, [], Deadline(0.0))
            return
        connection.setblocking(False)
        self._silent[connection] = Deadline(_SILENT_S)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        oldest.close()


def enter(
    connection: socket.socket, address: str, member: int, pidfd: int, deadline: Deadline
) -> bool:
    """Send ``member`` and ``pidfd`` to the listener; return False if it is another user's."""
    try:
        name, secret = address.split()
        greeting = _GREETING.pack(bytes.fromhex(secret), member)
    except ValueError:
        raise OSError(f"the store holds {address[:80]!r} instead of the socket's address") from None
    if not wait_until(partial(_try_to_connect, connection, name), deadline):
        raise TimeoutError
    if _peer_user(connection) != os.getuid():
        return False
    with suppress(ConnectionError):  # a rejected member must still read the answer
        send_part(connection, greeting, [pidfd], deadline)
    return True


def _peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the connection's other end."""
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _try_to_connect(connection: socket.socket, name: str) -> bool:
    """Connect; return False while too many others wait."""
    try:
        connection.connect(f"\0{name}")
    except BlockingIOError:
        return False
    return True

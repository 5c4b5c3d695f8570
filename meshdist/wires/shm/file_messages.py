"""Numbers and open files, sent from one process to another through a Unix socket."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Sequence
from functools import partial

from ...runtime.deadlines import Deadline, wait_until

__all__ = ["close_all", "limit", "receive", "receive_part", "send", "send_part"]

_MOST_FILES = 250  # in one message
_FILE_BYTES = array.array("i").itemsize
_HEAD = struct.Struct("!iI")  # the number, and how many files follow
_SHORTEST_S = 0.05


def send(connection: socket.socket, number: int, files: Sequence[int], deadline: Deadline) -> None:
    """Send a number and open files, the files in as many messages as they need; see ``receive``."""
    limit(connection, deadline)
    connection.sendall(_HEAD.pack(number, len(files)))
    for start in range(0, len(files), _MOST_FILES):
        send_part(connection, b"f", files[start : start + _MOST_FILES], deadline)


def receive(
    connection: socket.socket, deadline: Deadline, most_files: int = 0
) -> tuple[int, list[int]]:
    """Receive what ``send`` sent; the files are the caller's to close."""
    data = b""
    while len(data) < _HEAD.size:
        limit(connection, deadline)
        begin = connection.recv(_HEAD.size - len(data))
        if not begin:
            raise ConnectionResetError("the connection ended")
        data += begin
    number, num_files = _HEAD.unpack(data)
    if num_files > most_files:
        raise OSError(f"{num_files} files are announced where {most_files} may come")
    files: list[int] = []
    try:
        while len(files) < num_files:
            limit(connection, deadline)
            most = min(_MOST_FILES, num_files - len(files))
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
    """Let the next call on a connection wait until ``deadline`` at most."""
    connection.settimeout(max(deadline.left_s, _SHORTEST_S))


def send_part(
    connection: socket.socket, data: bytes, files: Sequence[int], deadline: Deadline
) -> None:
    """Send few bytes with open files, in one message; see ``receive_part``."""
    if not wait_until(partial(_try_to_send, connection, data, files), deadline):
        raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))


def receive_part(
    connection: socket.socket, num_bytes: int, most_files: int
) -> tuple[bytes, list[int], bool]:
    """Receive one message: at most so many bytes and files, and whether all files have come."""
    # Not socket.recv_fds, which lets programs that are started inherit them.
    room = socket.CMSG_SPACE(most_files * _FILE_BYTES)
    data, more, flags, _ = connection.recvmsg(num_bytes, room, socket.MSG_CMSG_CLOEXEC)
    files = array.array("i")
    for _, kind, part in more:
        if kind == socket.SCM_RIGHTS:
            files.frombytes(part[: len(part) // _FILE_BYTES * _FILE_BYTES])
    return data, list(files), not flags & socket.MSG_CTRUNC


def close_all(files: list[int]) -> None:
    """Close open files."""
    for file in files:
        os.close(file)


def _try_to_send(connection: socket.socket, data: bytes, files: Sequence[int]) -> bool:
    """Send files; or return False while too many files of this user are under way."""
    try:
        connection.sendmsg(
            [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        return False
    return True

"""How processes of one host come to share memory, or learn together that they cannot.

The first member makes the memory and a private Unix socket, and tells the others where it is
through the store. Each comes with a handle to its own process (a pidfd); when all have come each
gets the memory and everyone's handle. Nothing has a name that outlives the handshake, and a process
of another user is turned away. In the end every member shares, or none does and all know why.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from torch.distributed import Store

from .base import WireFailure, WireRefused, WireTimeout

__all__ = ["Shared", "share"]

_ADDRESS = "shared/address"
_REFUSED = "shared/refused"
_SLICE_S = 0.05
_MOST_FILES = 250  # in one message
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Shared:
    """What a member gets: open files, which are its own to close.

    Args:
        memory: the shared memory.
        processes: a pidfd for each member, -1 for this one.
    """

    memory: int
    processes: tuple[int, ...]


def share(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    make_memory: Callable[[], int],
    attach: Callable[[Shared], None],
    timeout_s: float,
) -> None:
    """Share memory among the members of one group; return when all of them have attached to it.

    Args:
        store: keys of this group alone.
        rank: this member's place.
        ranks: the members' global ranks, for messages.
        make_memory: makes the memory and returns its open file; called on the first member.
        attach: begins to use it; called on every member. Raises OSError, MemoryError or
            RuntimeError where it cannot.
        timeout_s: how long to wait for the others.

    Raises:
        WireRefused: a member cannot; all raise it.
        WireTimeout: a member did not come.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        try:
            if rank == 0:
                _lead(store, ranks, make_memory, attach, deadline, stack)
            else:
                _follow(store, rank, ranks, attach, deadline, stack)
        except TimeoutError:
            raise WireTimeout("a member did not come to share memory") from None
        except OSError as error:
            raise WireFailure(f"a member left while sharing memory: {error}") from None


def _lead(
    store: Store,
    ranks: Sequence[int],
    make_memory: Callable[[], int],
    attach: Callable[[Shared], None],
    deadline: float,
    stack: ExitStack,
) -> None:
    try:
        memory = make_memory()
        stack.callback(os.close, memory)
        own = _own_handle()
        stack.callback(os.close, own)
    except (OSError, RuntimeError) as error:
        reason = f"rank {ranks[0]}: {error}"
        store.set(_ADDRESS, json.dumps({"refused": reason}))
        raise WireRefused(reason) from None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshdist-"))
    path = os.path.join(folder, "group")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(len(ranks))
    store.set(_ADDRESS, json.dumps({"path": path}))
    handles = {0: own}
    talks: dict[int, socket.socket] = {}
    while len(talks) < len(ranks) - 1:
        connection = _accept(listener, store, deadline)
        if connection is None:
            _tell_all(talks, _refusal(store))
            raise WireRefused(_refusal(store))
        if _peer_user(connection) != os.getuid():
            connection.close()
            continue
        stack.enter_context(connection)
        _limit(connection, deadline)
        text, files = _receive(connection, 1)
        stack.callback(os.close, files[0])
        handles[int(text)] = files[0]
        talks[int(text)] = connection
    in_order = [handles[member] for member in range(len(ranks))]
    for connection in talks.values():
        _send(connection, "", [memory, *in_order])
    reasons = [_attempt(attach, memory, in_order, 0, ranks)]
    for member, connection in sorted(talks.items()):
        try:
            reasons.append(_receive(connection, 0)[0])
        except OSError as error:
            reasons.append(f"rank {ranks[member]} left: {error}")
    verdict = "; ".join(filter(None, reasons))
    _tell_all(talks, verdict)
    if verdict:
        raise WireRefused(verdict)


def _follow(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    attach: Callable[[Shared], None],
    deadline: float,
    stack: ExitStack,
) -> None:
    _await(store, _ADDRESS, deadline)
    address = json.loads(store.get(_ADDRESS))
    if "refused" in address:
        raise WireRefused(address["refused"])
    try:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        _limit(connection, deadline)
        own = _own_handle()
        stack.callback(os.close, own)
        connection.connect(address["path"])
        if _peer_user(connection) != os.getuid():
            raise PermissionError("the socket belongs to another user")
    except OSError as error:
        store.compare_set(_REFUSED, "", f"rank {ranks[rank]} cannot reach rank {ranks[0]}: {error}")
        raise WireRefused(_refusal(store)) from None
    _send(connection, str(rank), [own])
    reason, files = _receive(connection, 1 + len(ranks))
    if files:
        for file in files:
            stack.callback(os.close, file)
        _send(connection, _attempt(attach, files[0], files[1:], rank, ranks), [])
        reason, _ = _receive(connection, 0)
    if reason:
        raise WireRefused(reason)


def _attempt(
    attach: Callable[[Shared], None],
    memory: int,
    handles: Sequence[int],
    rank: int,
    ranks: Sequence[int],
) -> str:
    """Attach with files of the member's own; why that failed, or ""."""
    files = [os.dup(file) if member != rank else -1 for member, file in enumerate(handles)]
    try:
        attach(Shared(os.dup(memory), tuple(files)))
    except (OSError, MemoryError, RuntimeError) as error:
        return f"rank {ranks[rank]}: {error}"
    return ""


def _accept(listener: socket.socket, store: Store, deadline: float) -> socket.socket | None:
    """The next connection; None where a member has said that it cannot come."""
    listener.settimeout(_SLICE_S)
    while True:
        with suppress(TimeoutError):
            return listener.accept()[0]
        if store.check([_REFUSED]):
            return None
        if time.monotonic() > deadline:
            raise WireTimeout("a member did not come to share memory")


def _await(store: Store, key: str, deadline: float) -> None:
    pause = 0.0001
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise WireTimeout("the first member did not come to share memory")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def _refusal(store: Store) -> str:
    return store.get(_REFUSED).decode()


def _own_handle() -> int:
    if not hasattr(os, "pidfd_open"):
        raise OSError("this Python has no os.pidfd_open")
    return os.pidfd_open(os.getpid())


def _peer_user(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _limit(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), _SLICE_S))


def _tell_all(talks: dict[int, socket.socket], text: str) -> None:
    for connection in talks.values():
        with suppress(OSError):  # whoever left already knows
            _send(connection, text, [])


def _send(connection: socket.socket, text: str, files: Sequence[int]) -> None:
    """Send a text and open files, the files in as many messages as they need."""
    data = text.encode()
    connection.sendall(_LENGTH.pack(len(data)) + _LENGTH.pack(len(files)) + data)
    for start in range(0, len(files), _MOST_FILES):
        part = array.array("i", files[start : start + _MOST_FILES])
        connection.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, part)])


def _receive(connection: socket.socket, num_files: int) -> tuple[str, list[int]]:
    """Receive a text and the files that come with it: ``num_files``, or none."""
    length, count = (_LENGTH.unpack(_exactly(connection, _LENGTH.size))[0] for _ in range(2))
    text = _exactly(connection, length).decode()
    files: list[int] = []
    while len(files) < min(count, num_files):
        _, more, _, _ = socket.recv_fds(connection, 1, _MOST_FILES)
        if not more:
            raise ConnectionError("the connection ended")
        files.extend(more)
    return text, files


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return data

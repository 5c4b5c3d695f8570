"""How processes of one host come to share memory, or learn together that they cannot.

The first member makes the memory and a Unix socket that has no file, and tells the others its name
through the store. Each comes with a handle to its own process (a pidfd); when all have come each
gets the memory and everyone's handle, and tells that it uses them. A process of another user is
turned away. Whoever meets trouble writes it to the store, where the first stays, and hangs up: so
in the end every member shares, or none does and all tell the same reason.
"""

from __future__ import annotations

import array
import errno
import json
import os
import secrets
import selectors
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from torch.distributed import Store

from ...error_text import ranks_text
from ...runtime.deadlines import Deadline, Grace, wait_until
from ..failures import WireFailure, WireRefused, WireTimeout

__all__ = ["Shared", "share"]

_ADDRESS = "shared/address"
_TROUBLE = "shared/trouble"
_KINDS = {"refused": WireRefused, "left": WireFailure, "late": WireTimeout}
_SLICE_S = 0.05
_GRACE_S = 1.0  # the others wait longer than the first member, which knows who is missing
_SPARE_PLACES = 64  # in the queue of the socket, for strangers who are turned away
_MOST_FILES = 250  # in one message
_FILE_BYTES = array.array("i").itemsize
_HEAD = struct.Struct("!iI")  # who speaks, and how many files come along
_STRANGER = -1


@dataclass(frozen=True)
class Shared:
    """What a member gets: open files, which are its own to close.

    Args:
        memory: the shared memory.
        processes: a pidfd for each member, -1 for this one.
    """

    memory: int
    processes: tuple[int, ...]


class _Trouble(Exception):
    """Why nothing is shared: one of ``_KINDS``, and a text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


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
        WireFailure: a member has left, or the store is lost.
    """
    try:
        with ExitStack() as stack:  # what is still open is closed when the reason is known to all
            try:
                if rank == 0:
                    _lead(store, ranks, make_memory, attach, Grace(timeout_s), stack)
                else:
                    deadline = Grace(timeout_s + _GRACE_S)
                    _follow(store, rank, ranks, attach, deadline, stack)
            except _Trouble as trouble:
                kind, text = _first_trouble(store, trouble)
                raise _KINDS[kind](text) from None
    except RuntimeError as error:  # as torch's stores raise it
        raise WireFailure(f"the store is lost: {error}") from None


def _lead(
    store: Store,
    ranks: Sequence[int],
    make_memory: Callable[[], int],
    attach: Callable[[Shared], None],
    deadline: Deadline,
    stack: ExitStack,
) -> None:
    held: list[int] = []
    stack.callback(_close_all, held)
    name = f"meshdist-{secrets.token_hex(16)}"
    try:
        with _as_trouble(ranks[0], "the system"):
            memory = make_memory()
            held.append(memory)
            own = _own_handle()
            stack.callback(os.close, own)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"\0{name}")
            listener.listen(len(ranks) + _SPARE_PLACES)
    except _Trouble as trouble:
        _first_trouble(store, trouble)
        store.set(_ADDRESS, "")
        raise
    store.set(_ADDRESS, name)
    handles = {0: own}
    talks: dict[int, socket.socket] = {}
    awaited = set(range(1, len(ranks)))
    while awaited:
        ready = _next(store, [listener, *talks.values()], ranks, awaited, deadline)
        if ready is not listener:  # no member sends anything before all have come
            gone = ranks[_member_at(ready, talks)]
            raise _Trouble("left", f"rank {gone} left while memory was shared")
        with _as_trouble(ranks[0], "a member"):
            connection = stack.enter_context(listener.accept()[0])
            if _peer_user(connection) != os.getuid():
                with suppress(OSError):
                    _send(connection, _STRANGER, [], deadline)
                connection.close()
                continue
            _limit(connection, deadline)
            member, (handle,) = _receive(connection)
        held.append(handle)
        handles[member], talks[member] = handle, connection
        awaited.remove(member)
    in_order = [handles[member] for member in range(len(ranks))]
    with _as_trouble(ranks[0], "a member"):
        for connection in talks.values():
            _send(connection, 0, [memory, *in_order], deadline)
        held.clear()  # they are handed over
        attach(Shared(memory, (-1, *in_order[1:])))
    _await_confirmations(store, ranks, talks, deadline)
    for connection in talks.values():
        with suppress(OSError):  # the first call notices a member that has left by now
            _send(connection, 0, [], deadline)


def _await_confirmations(
    store: Store, ranks: Sequence[int], talks: Mapping[int, socket.socket], deadline: Deadline
) -> None:
    """Wait until every other member has confirmed that it uses the memory."""
    awaited = set(talks)
    while awaited:
        ready = _next(store, [talks[one] for one in awaited], ranks, awaited, deadline)
        member = _member_at(ready, talks)
        with _as_trouble(ranks[0], f"rank {ranks[member]}"):
            _receive(ready)
        awaited.remove(member)


def _member_at(ready: socket.socket, talks: Mapping[int, socket.socket]) -> int:
    return next(member for member, connection in talks.items() if connection is ready)


def _follow(
    store: Store,
    rank: int,
    ranks: Sequence[int],
    attach: Callable[[Shared], None],
    deadline: Deadline,
    stack: ExitStack,
) -> None:
    name = _await_address(store, ranks[0], deadline)
    with _as_trouble(ranks[rank], f"rank {ranks[0]}"):
        connection = stack.enter_context(socket.socket(socket.AF_UNIX))
        _limit(connection, deadline)
        own = _own_handle()
        stack.callback(os.close, own)
        connection.connect(f"\0{name}")
        if _peer_user(connection) != os.getuid():
            raise PermissionError(f"rank {ranks[0]} runs as another user")
        with suppress(ConnectionError):  # a member that is turned away still has an answer to read
            _send(connection, rank, [own], deadline)
        answer, files = _receive(connection)
        if answer == _STRANGER:
            raise PermissionError(f"rank {ranks[0]} runs as another user")
        memory, *handles = files
        os.close(handles[rank])
        handles[rank] = -1
        attach(Shared(memory, tuple(handles)))
        _send(connection, rank, [], deadline)
        _receive(connection)


@contextmanager
def _as_trouble(rank: int, other: str) -> Iterator[None]:
    """What goes wrong inside, as the trouble of ``rank``, or of the ``other`` it talks to."""
    try:
        yield
    except ConnectionRefusedError as error:
        raise _Trouble("refused", f"rank {rank} cannot reach {other}: {error}") from None
    except ConnectionError:
        raise _Trouble("left", f"{other} left while memory was shared") from None
    except TimeoutError:
        raise _Trouble("late", f"{other} did not answer while memory was shared") from None
    except (OSError, MemoryError, RuntimeError) as error:
        told = str(error) or type(error).__name__
        raise _Trouble("refused", f"rank {rank}: {told}") from None


def _first_trouble(store: Store, trouble: _Trouble) -> tuple[str, str]:
    """What all members tell: the trouble that was told first."""
    mine = json.dumps([trouble.kind, str(trouble)])
    kind, text = json.loads(store.compare_set(_TROUBLE, "", mine))
    return kind, text


def _next(
    store: Store,
    sockets: Sequence[socket.socket],
    ranks: Sequence[int],
    awaited: set[int],
    deadline: Deadline,
) -> socket.socket:
    """The first of ``sockets`` that has something to say, or has come to its end.

    Raises:
        _Trouble: a member has told its own in the store, or those ``awaited`` are late.
    """
    with selectors.PollSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        while not (ready := selector.select(_SLICE_S)):
            if store.check([_TROUBLE]):
                raise _Trouble(*json.loads(store.get(_TROUBLE)))
            if deadline.is_over:
                missing = ranks_text(ranks[member] for member in sorted(awaited))
                raise _Trouble("late", f"{missing} did not come to share memory")
    found = ready[0][0].fileobj
    assert isinstance(found, socket.socket)
    return found


def _await_address(store: Store, first: int, deadline: Deadline) -> str:
    if not wait_until(lambda: store.check([_ADDRESS]), deadline):
        raise _Trouble("late", f"rank {first} did not come to share memory")
    name = store.get(_ADDRESS).decode()
    if not name:
        raise _Trouble("left", f"rank {first} has made no memory")  # it has told why
    return name


def _own_handle() -> int:
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no pidfd_open")
    return os.pidfd_open(os.getpid())


def _peer_user(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _limit(connection: socket.socket, deadline: Deadline) -> None:
    connection.settimeout(max(deadline.left_s, _SLICE_S))


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)


def _send(connection: socket.socket, number: int, files: Sequence[int], deadline: Deadline) -> None:
    """Send a number and open files, the files in as many messages as they need."""
    connection.sendall(_HEAD.pack(number, len(files)))
    for start in range(0, len(files), _MOST_FILES):
        part = array.array("i", files[start : start + _MOST_FILES])
        if not wait_until(partial(_try_to_send, connection, part), deadline):
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))


def _try_to_send(connection: socket.socket, files: array.array[int]) -> bool:
    """Send files; or return False while too many files of this user are under way."""
    try:
        connection.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
        return False
    return True


def _receive(connection: socket.socket) -> tuple[int, list[int]]:
    """Receive what ``_send`` sent."""
    data = b""
    while len(data) < _HEAD.size:
        begin = connection.recv(_HEAD.size - len(data))
        if not begin:
            raise ConnectionResetError("the connection ended")
        data += begin
    number, num_files = _HEAD.unpack(data)
    files: list[int] = []
    try:
        while len(files) < num_files:
            most = min(_MOST_FILES, num_files - len(files))
            # Not socket.recv_fds, which lets programs that are started inherit them.
            room = socket.CMSG_SPACE(most * _FILE_BYTES)
            text, more, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
            for _, _, part in more:
                files += array.array("i", part[: len(part) // _FILE_BYTES * _FILE_BYTES])
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not text:
                raise ConnectionResetError("the connection ended")
    except OSError:
        _close_all(files)
        raise
    return number, files

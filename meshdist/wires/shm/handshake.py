"""How processes of one host come to share memory, or learn together that they cannot.

The first member makes the memory and a Unix socket without a file, and writes the socket's name to
the store. Each member connects and sends a handle to its own process (a pidfd). When all have
connected, each gets the memory and all handles, and confirms that it has mapped them. A process of
another user is refused. A member that fails writes its reason to the store, where the first one
stays, and disconnects: so in the end all members share, or all raise the same reason.
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
_GRACE_S = 1.0  # the others wait longer than the first member, which knows the missing ones
_SPARE_PLACES = 64  # in the queue of the socket, for strangers that are refused
_MOST_FILES = 250  # in one message
_FILE_BYTES = array.array("i").itemsize
_HEAD = struct.Struct("!iI")  # the sender's rank, and how many files follow
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
                deadline = Grace(timeout_s + (_GRACE_S if rank else 0.0))
                member = _Member(store, rank, ranks, make_memory, attach, deadline, stack)
                if rank == 0:
                    member.lead()
                else:
                    member.follow()
            except _Trouble as trouble:
                kind, text = _first_trouble(store, trouble)
                raise _KINDS[kind](text) from None
    except RuntimeError as error:  # as torch's stores raise it
        raise WireFailure(f"the store is lost: {error}") from None


@dataclass
class _Member:
    """One member's way to the memory; the arguments are those of ``share``, and what it opens."""

    store: Store
    rank: int
    ranks: Sequence[int]
    make_memory: Callable[[], int]
    attach: Callable[[Shared], None]
    deadline: Deadline
    stack: ExitStack

    def lead(self) -> None:
        """As the first member: make the memory, and hand it to the others."""
        held: list[int] = []
        self.stack.callback(_close_all, held)
        name = f"meshdist-{secrets.token_hex(16)}"
        try:
            with _as_trouble(self.ranks[0], "the system"):
                memory = self.make_memory()
                held.append(memory)
                own = _own_handle()
                self.stack.callback(os.close, own)
                listener = self.stack.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(f"\0{name}")
                listener.listen(len(self.ranks) + _SPARE_PLACES)
        except _Trouble as trouble:
            _first_trouble(self.store, trouble)
            self.store.set(_ADDRESS, "")
            raise
        self.store.set(_ADDRESS, name)
        handles = {0: own}
        talks: dict[int, socket.socket] = {}
        awaited = set(range(1, len(self.ranks)))
        while awaited:
            gone = self._next({0: listener, **talks}, awaited)
            if gone:  # no member sends anything before all have come
                raise _Trouble("left", f"rank {self.ranks[gone]} left while memory was shared")
            with _as_trouble(self.ranks[0], "a member"):
                connection = self.stack.enter_context(listener.accept()[0])
                if _peer_user(connection) != os.getuid():
                    with suppress(OSError):
                        _send(connection, _STRANGER, [], self.deadline)
                    connection.close()
                    continue
                _limit(connection, self.deadline)
                member, (handle,) = _receive(connection)
            held.append(handle)
            handles[member], talks[member] = handle, connection
            awaited.remove(member)
        in_order = [handles[member] for member in range(len(self.ranks))]
        with _as_trouble(self.ranks[0], "a member"):
            for connection in talks.values():
                _send(connection, 0, [memory, *in_order], self.deadline)
            held.clear()  # they are handed over
            self.attach(Shared(memory, (-1, *in_order[1:])))
        self._await_confirmations(talks)
        for connection in talks.values():
            with suppress(OSError):  # the first call notices a member that has left by now
                _send(connection, 0, [], self.deadline)

    def _await_confirmations(self, talks: Mapping[int, socket.socket]) -> None:
        """Wait until every other member has confirmed that it uses the memory."""
        awaited = set(talks)
        while awaited:
            member = self._next({one: talks[one] for one in awaited}, awaited)
            with _as_trouble(self.ranks[0], f"rank {self.ranks[member]}"):
                _receive(talks[member])
            awaited.remove(member)

    def follow(self) -> None:
        """As any other member: get the memory from the first."""
        name = self._await_address()
        with _as_trouble(self.ranks[self.rank], f"rank {self.ranks[0]}"):
            connection = self.stack.enter_context(socket.socket(socket.AF_UNIX))
            _limit(connection, self.deadline)
            own = _own_handle()
            self.stack.callback(os.close, own)
            connection.connect(f"\0{name}")
            if _peer_user(connection) != os.getuid():
                raise PermissionError(f"rank {self.ranks[0]} runs as another user")
            with suppress(
                ConnectionError
            ):  # a member that is turned away still has an answer to read
                _send(connection, self.rank, [own], self.deadline)
            answer, files = _receive(connection)
            if answer == _STRANGER:
                raise PermissionError(f"rank {self.ranks[0]} runs as another user")
            memory, *handles = files
            os.close(handles[self.rank])
            handles[self.rank] = -1
            self.attach(Shared(memory, tuple(handles)))
            _send(connection, self.rank, [], self.deadline)
            _receive(connection)

    def _next(self, sockets: Mapping[int, socket.socket], awaited: set[int]) -> int:
        """The key of the first of ``sockets`` that has something to read, or is closed.

        Raises:
            _Trouble: another member has written its own to the store, or ``awaited`` are late.
        """
        with selectors.PollSelector() as selector:
            for member, one in sockets.items():
                selector.register(one, selectors.EVENT_READ, member)
            while not (ready := selector.select(_SLICE_S)):
                if self.store.check([_TROUBLE]):
                    raise _Trouble(*json.loads(self.store.get(_TROUBLE)))
                if self.deadline.is_over:
                    missing = ranks_text(self.ranks[member] for member in sorted(awaited))
                    raise _Trouble("late", f"{missing} did not come to share memory")
        return int(ready[0][0].data)

    def _await_address(self) -> str:
        if not wait_until(lambda: self.store.check([_ADDRESS]), self.deadline):
            raise _Trouble("late", f"rank {self.ranks[0]} did not come to share memory")
        name = self.store.get(_ADDRESS).decode()
        if not name:
            raise _Trouble(
                "left", f"rank {self.ranks[0]} has made no memory"
            )  # its reason is in the store
        return name


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
        text = str(error) or type(error).__name__
        raise _Trouble("refused", f"rank {rank}: {text}") from None


def _first_trouble(store: Store, trouble: _Trouble) -> tuple[str, str]:
    """The trouble that all members report: the first in the store."""
    mine = json.dumps([trouble.kind, str(trouble)])
    kind, text = json.loads(store.compare_set(_TROUBLE, "", mine))
    return kind, text


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

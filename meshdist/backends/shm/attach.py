"""Set up memory that a host's processes share, on all members or none.

The first member creates the memory and an abstract Unix socket (``listener``), whose address it
writes to the store. Each member connects and sends its pidfd, a process handle. When all have
connected, each gets the memory and all pidfds, and confirms the mapping. A member that fails writes
its reason to the store, which keeps the first reason, and disconnects: all members share the
memory, or all raise the same reason.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

from torch.distributed import Store

from ...error_text import ranks_text
from ...runtime.deadlines import Deadline, wait_until
from ..requests import BackendFailure, BackendTimeout, BackendUnsupported
from .listener import OF_ANOTHER_USER, Listener, close_all, enter, limit, receive, send

_ADDRESS = "shared/address"
_TROUBLE = "shared/trouble"
_KINDS = {"rejected": BackendUnsupported, "left": BackendFailure, "late": BackendTimeout}
_SLICE_S = 0.05
_GRACE_S = 1.0  # others wait longer than the first member, which knows which members are missing


@dataclass(frozen=True)
class Shared:
    """Open descriptors that the member closes: memory, and processes (-1: its own)."""

    memory: int
    processes: tuple[int, ...]


class _Trouble(Exception):
    """Reason of a failure: one of ``_KINDS``, and a text."""

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
    find_lost: Callable[[], str] = str,
) -> None:
    """Share memory among a group's members; return when all have attached.

    Args:
        store: for keys of this group only.
        ranks: global ranks, for messages.
        make_memory: called on the first member; returns the memory's open file.
        attach: maps the memory; raises OSError, MemoryError or RuntimeError.
        find_lost: returns text about exited members, or "".
    """
    try:
        with ExitStack() as stack:  # closes open descriptors once all members know the reason
            try:
                deadline = Deadline(timeout_s + (_GRACE_S if rank else 0.0))
                of_group = store, rank, ranks, make_memory, attach, find_lost
                member = _Member(*of_group, deadline, stack)
                if rank == 0:
                    member.lead()
                else:
                    member.follow()
            except _Trouble as trouble:
                kind, text = _first_trouble(store, trouble)
                raise _KINDS[kind](text) from None
    except RuntimeError as error:  # as torch's stores raise it
        raise BackendFailure(f"the store is lost: {error}") from None


@dataclass
class _Member:
    """A member's part, with the arguments of ``share`` as fields."""

    store: Store
    rank: int
    ranks: Sequence[int]
    make_memory: Callable[[], int]
    attach: Callable[[Shared], None]
    find_lost: Callable[[], str]
    deadline: Deadline
    stack: ExitStack
    next_look: Deadline = field(default_factory=lambda: Deadline(_SLICE_S))  # into the store

    def lead(self) -> None:
        """Create the memory on the first member, and send it to the others."""
        held: list[int] = []
        self.stack.callback(close_all, held)
        try:
            with _as_trouble(self.ranks[0], "the system"):
                memory = self.make_memory()
                held.append(memory)
                own = _own_handle()
                self.stack.callback(os.close, own)
                listener = Listener(len(self.ranks))
                self.stack.callback(listener.close)
        except _Trouble as trouble:
            _first_trouble(self.store, trouble)
            self.store.set(_ADDRESS, "")
            raise
        self.store.set(_ADDRESS, listener.address)
        pidfds = {0: own}
        connections: dict[socket.socket, int] = {}
        while listener.awaited:
            for socket_ in self._ready([*listener.watched(), *connections], listener.awaited):
                if socket_ in connections:  # no member sends anything before all have come
                    rank = self.ranks[connections[socket_]]
                    raise _Trouble(
                        "left", f"rank {rank} disconnected while setting up shared memory"
                    )
                with _as_trouble(self.ranks[0], "a member"):
                    accepted = listener.look(socket_)
                if accepted is not None:
                    member, connection, pidfd = accepted
                    self.stack.enter_context(connection)
                    held.append(pidfd)
                    pidfds[member], connections[connection] = pidfd, member
        listener.close()
        in_order = [pidfds[member] for member in range(len(self.ranks))]
        with _as_trouble(self.ranks[0], "a member"):
            for connection in connections:
                send(connection, 0, [memory, *in_order], self.deadline)
            held.clear()  # they are handed over
            self.attach(Shared(memory, (-1, *in_order[1:])))
        self._await_confirmations(connections)
        for connection in connections:
            with suppress(OSError):  # the first call detects a member that has left by now
                send(connection, 0, [], self.deadline)

    def _await_confirmations(self, connections: Mapping[socket.socket, int]) -> None:
        """Wait until every other member has confirmed the mapping."""
        waiting = dict(connections)
        while waiting:
            for socket_ in self._ready(waiting, set(waiting.values())):
                with _as_trouble(self.ranks[0], f"rank {self.ranks[waiting.pop(socket_)]}"):
                    receive(socket_, self.deadline)

    def follow(self) -> None:
        """Receive the memory from the first member, attach, and confirm that."""
        address = self._await_address()
        with _as_trouble(self.ranks[self.rank], f"rank {self.ranks[0]}"):
            connection = self.stack.enter_context(socket.socket(socket.AF_UNIX))
            limit(connection, self.deadline)
            own = _own_handle()
            self.stack.callback(os.close, own)
            is_of_this_user = enter(connection, address, self.rank, own, self.deadline)
            answer, files = OF_ANOTHER_USER, list[int]()
            if is_of_this_user:
                answer, files = receive(connection, self.deadline, 1 + len(self.ranks))
            if len(files) != 1 + len(self.ranks):
                close_all(files)
                if answer == OF_ANOTHER_USER:
                    raise PermissionError(f"rank {self.ranks[0]} runs as another user")
                raise OSError(f"rank {self.ranks[0]} sent {len(files)} file descriptors")
            memory, *pidfds = files
            os.close(pidfds[self.rank])
            pidfds[self.rank] = -1
            self.attach(Shared(memory, tuple(pidfds)))
            send(connection, self.rank, [], self.deadline)
            receive(connection, self.deadline)

    def _ready(
        self, sockets: Iterable[socket.socket], awaited: Iterable[int]
    ) -> list[socket.socket]:
        """Wait for readable sockets; raise _Trouble if a member failed or is late.

        Args:
            awaited: group ranks that are late at the deadline.
        """
        with selectors.PollSelector() as selector:
            for socket_ in sockets:
                selector.register(socket_, selectors.EVENT_READ)
            ready = [cast(socket.socket, key.fileobj) for key, _ in selector.select(_SLICE_S)]
        self._look()
        if self.next_look.is_over:  # another member may have written its trouble to the store
            self.next_look = Deadline(_SLICE_S)
            if self.store.check([_TROUBLE]):
                raise _Trouble(*_read_trouble(self.store.get(_TROUBLE)))
        if self.deadline.is_over:
            missing = ranks_text(self.ranks[member] for member in sorted(awaited))
            raise _Trouble("late", f"{missing} did not connect to set up shared memory")
        return ready

    def _await_address(self) -> str:
        if not wait_until(lambda: self.store.check([_ADDRESS]), self.deadline, self._look):
            raise _Trouble("late", f"rank {self.ranks[0]} did not connect to set up shared memory")
        address = self.store.get(_ADDRESS).decode(errors="replace")
        if not address:  # its reason is in the store
            raise _Trouble("left", f"rank {self.ranks[0]} failed to create the shared memory")
        return address

    def _look(self) -> None:
        """Raise _Trouble if an awaited member has exited."""
        if lost := self.find_lost():
            raise _Trouble("left", lost)


@contextmanager
def _as_trouble(rank: int, other: str) -> Iterator[None]:
    """Convert the block's errors to a _Trouble of ``rank`` and its peer ``other``."""
    try:
        yield
    except ConnectionRefusedError as error:
        raise _Trouble("rejected", f"rank {rank} cannot reach {other}: {error}") from None
    except ConnectionError:
        raise _Trouble("left", f"{other} disconnected while setting up shared memory") from None
    except TimeoutError:
        raise _Trouble("late", f"{other} did not respond while setting up shared memory") from None
    except (OSError, MemoryError, RuntimeError) as error:
        text = str(error) or type(error).__name__
        raise _Trouble("rejected", f"rank {rank}: {text}") from None


def _first_trouble(store: Store, trouble: _Trouble) -> tuple[str, str]:
    """Store ``trouble`` if it is the first; return kind and text of the first."""
    mine = json.dumps([trouble.kind, str(trouble)])
    return _read_trouble(store.compare_set(_TROUBLE, "", mine))


def _read_trouble(found: bytes) -> tuple[str, str]:
    """Parse kind and text of a trouble in the store; kind "left" if malformed."""
    with suppress(ValueError, TypeError, RecursionError):
        kind, text = json.loads(found)
        if kind in _KINDS:
            return kind, str(text)
    return "left", "a store key of this group holds a value that no rank has written"


def _own_handle() -> int:
    if not hasattr(os, "pidfd_open"):
        raise OSError("this system has no pidfd_open")
    return os.pidfd_open(os.getpid())

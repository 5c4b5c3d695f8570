"""Track and wait for a group's operations in flight over MPI.

Neither an abort nor a timeout can end MPI's own waits, so operations are tested until done. If
mpiexec ends this rank because another died, MPI raises nothing: a signal handler prints a report.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from ...error_text import first_line
from ...runtime.deadlines import Deadline, wait_until
from ...runtime.hosts import ProcessInfo, is_alive, num_cores
from ..registry import Opening
from ..requests import (
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    MemberLost,
    MessageMismatch,
    Request,
    as_backend_failure,
)

# If each rank of the host has a core to itself, spinning delays no other rank; to yield would leave
# the core to other programs for whole time slices.
_SPIN_S = 0.00015
# MPI moves data while it is polled: a rank that sleeps early slows down operations in flight.
_AWAKE_S = 0.02
_LONGEST_PAUSE_S = 0.0002
_LATE_S = 1.0
_LATE_PAUSE_S = 0.001
_LOOK_S = 0.1
_LOOKS_PER_QUERY = 10  # a query to the store costs more than a look at a process


@dataclass(eq=False, slots=True)
class MpiRequest(Request):
    """A collective or message in flight, with the tensors that it uses."""

    link: MpiConnection
    request: Any
    keep_alive: Any
    awaited: Sequence[list[int]]
    """Sets of members: if all members of one set have left, the wait ends."""
    then: Callable[[], None] | None = None
    status: Any = None
    num_bytes: int = 0
    is_done: bool = False
    polling: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, timeout: timedelta) -> None:
        link, is_receive = self.link, self.status is not None
        try:
            link.wait(self, timeout)
        except link.MPI.Exception as error:
            link.forget(self)
            raise link.failure(error, self.num_bytes if is_receive else None) from None
        link.forget(self)
        if is_receive:
            link.check_size(self.status.Get_elements(link.MPI.BYTE), self.num_bytes)
        then, self.then, self.keep_alive = self.then, None, None
        if then is not None:
            then()

    def poll(self) -> bool:
        return self.link.is_aborted or self.test_quietly()

    def source(self) -> int:
        return Request.source(self) if self.status is None else int(self.status.Get_source())

    def test(self) -> bool:
        """Test MPI's request, unless another thread does; return whether it is done."""
        if not self.is_done and self.polling.acquire(blocking=False):
            try:
                if not self.is_done:  # a second test after the end gets an empty status
                    self.is_done = self.request.Test(self.status)
            finally:
                self.polling.release()
        return self.is_done

    def test_quietly(self) -> bool:
        """Return ``test()``, or True on MPI's error, which ``finish`` raises again."""
        try:
            return self.test()
        except self.link.MPI.Exception:
            return True


@dataclass(eq=False)
class MpiConnection:
    """A member's connection to a group over MPI, with its operations in flight."""

    MPI: Any
    comm: Any
    opening: Opening
    process_infos: Sequence[ProcessInfo]
    is_aborted: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)
    in_flight: dict[MpiRequest, None] = field(default_factory=dict, init=False)
    keeping: threading.Lock = field(default_factory=threading.Lock, init=False)
    _process_id: int = field(default_factory=os.getpid, init=False)

    def __post_init__(self) -> None:
        # How long to spin for another member, before the thread yields or sleeps.
        self.spin_s = 0.0 if self.opening.num_local > num_cores() else _SPIN_S
        _links.add(self)

    @property
    def is_forked(self) -> bool:
        """Return whether this is a forked child of the connection's process."""
        return self._process_id != os.getpid()

    def find_dead(self) -> list[int]:
        """Return the group ranks whose processes have exited."""
        return [
            member
            for member, process_info in enumerate(self.process_infos)
            if is_alive(process_info) is False
        ]

    def start(self, request: MpiRequest) -> MpiRequest:
        """Keep a request in flight, even if its Work is dropped."""
        in_flight = self.in_flight
        with self.keeping:
            for _ in range(2):  # so that operations whose Work was dropped are freed in time
                oldest = next(iter(in_flight), None)
                if oldest is None:
                    break
                del in_flight[oldest]
                if not oldest.test_quietly():
                    in_flight[oldest] = None
            in_flight[request] = None
        return request

    def finish_at_once(self, request: MpiRequest, timeout: timedelta) -> None:
        """Wait for a new collective; raise a handler's exception as an Interrupted."""
        try:
            test, end = request.request.Test, time.perf_counter() + self.spin_s
            while not test():
                if self.in_flight or time.perf_counter() >= end:
                    self.start(request).finish(timeout)
                    return
            if request.then is not None:
                request.then()
        except self.MPI.Exception as error:
            raise self.failure(error) from None
        except (
            BaseException
        ) as error:  # MPI cannot cancel a collective, and may still write to its tensors
            raise as_backend_failure(error, self.start(request).test_quietly) from None

    def forget(self, request: MpiRequest) -> None:
        """Drop the reference to a request that is over."""
        with self.keeping:
            self.in_flight.pop(request, None)

    def wait(self, request: MpiRequest, timeout: timedelta) -> None:
        """Test ``request`` until done, yielding, then sleeping.

        Raises:
            BackendFailure: it is late, aborted or closed, or an awaited member has exited.
        """
        deadline, is_over = Deadline(timeout), partial(self._check_done, request.test)
        look, early = self._looks(request), Deadline(min(_LATE_S, deadline.left_s))
        if not wait_until(
            is_over, early, look, awake_s=_AWAKE_S, longest_pause_s=_LONGEST_PAUSE_S
        ) and not wait_until(is_over, deadline, look, longest_pause_s=_LATE_PAUSE_S):
            raise BackendTimeout.after(timeout)

    def leave(self) -> None:
        """Announce in the store that this member leaves; do nothing in a forked child."""
        if self.is_forked:  # it has no part in the group
            return
        with suppress(RuntimeError):  # the store is lost, as the others will see
            self.opening.store.set(exit_key(self.opening.rank), "")

    def close(self) -> None:
        """Free MPI's communicator, or keep it to the end if calls are in flight."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.is_forked:
            return
        self.leave()
        with self.keeping:
            unfinished = [it for it in self.in_flight if not it.test_quietly()]
            self.in_flight.clear()
        if unfinished or self.is_aborted or self.MPI.Is_finalized():
            _abandoned.append((self.comm, unfinished))  # MPI may write into their tensors still
            return
        self.comm.Free()

    def check_size(self, count: int, num_bytes: int) -> None:
        """Raise MessageMismatch unless ``count`` received bytes equal ``num_bytes``."""
        if count != num_bytes:
            raise MessageMismatch(
                f"a message of {count} bytes arrived for a receive of {num_bytes} bytes"
            )

    def failure(self, error: Any, num_bytes: int | None = None) -> BackendFailure:
        """Return the failure for MPI's error, in a receive of ``num_bytes`` or elsewhere (None)."""
        if num_bytes is not None and error.Get_error_class() == self.MPI.ERR_TRUNCATE:
            return MessageMismatch(f"a longer message arrived for a receive of {num_bytes} bytes")
        text = first_line(error)
        return BackendAborted(text) if self.is_aborted else BackendFailure(text)

    def _check_done(self, is_done: Callable[[], bool]) -> bool:
        """Return ``is_done()``; raise if closed, or aborted before."""
        if self.is_closed:  # maybe by another thread; MPI must not be polled any more
            raise BackendFailure("the communicator was closed")
        if is_done():
            return True
        if self.is_aborted:
            raise BackendAborted("aborted while waiting")
        return False

    def _looks(self, request: MpiRequest) -> Callable[[], None]:
        """Return a function that, called often, checks periodically for lost members."""
        next_look, num_looks = time.perf_counter() + _LOOK_S, 0

        def look() -> None:
            nonlocal next_look, num_looks
            if time.perf_counter() > next_look:
                next_look, num_looks = time.perf_counter() + _LOOK_S, num_looks + 1
                self._look_for_lost(request, queries=num_looks % _LOOKS_PER_QUERY == 0)

        return look

    def _look_for_lost(self, request: MpiRequest, *, queries: bool) -> None:
        if self.opening.look is not None:
            self.opening.look()
        lost, text = self.find_dead(), "has ended"
        if not lost and queries:
            lost, text = self._find_exited(request.awaited), "has closed this group or exits"
        # Its last message may still be in transit.
        limit = Deadline(_LOOK_S)
        if lost and not wait_until(request.test, limit, longest_pause_s=_LATE_PAUSE_S):
            raise MemberLost(text, lost[0])

    def _find_exited(self, awaited: Sequence[list[int]]) -> list[int]:
        """Return the first set of members that have all left, else []."""
        with suppress(RuntimeError):  # the store is lost
            check = self.opening.store.check
            return next((some for some in awaited if check([exit_key(k) for k in some])), [])
        return []


_links: weakref.WeakSet[MpiConnection] = weakref.WeakSet()
_abandoned: list[Any] = []
"""The operations in flight in groups that were closed, until the process ends."""


def _all_links() -> tuple[MpiConnection, ...]:
    """Return this process's connections; () while another thread opens a group."""
    try:
        return tuple(_links)
    except RuntimeError:
        return ()


def exit_key(member: int) -> str:
    """Return the store key that a leaving member sets."""
    return f"left/{member}"


def report_dead_ranks_at_the_end() -> None:
    """Install a SIGTERM handler that prints the dead ranks when mpiexec ends this rank."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _report)


def _report(number: int, frame: object) -> None:
    for link in _all_links():
        dead = [] if link.is_forked or link.is_closed else link.find_dead()
        if dead:
            ranks = link.opening.ranks
            them = ", ".join(
                f"rank {ranks[member]} ({link.process_infos[member]})" for member in dead
            )
            have = "has" if len(dead) == 1 else "have"
            print(
                f"meshdist: rank {ranks[link.opening.rank]} is ended by mpiexec: {them} {have} "
                "ended before, and under MPI all ranks end together",
                file=sys.stderr,
                flush=True,
            )
            break
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

"""What one member of a group over MPI knows of the others, how it waits, and what is in flight.

MPI's own waits cannot be ended: not by an abort, nor at a timeout. So operations are started and
asked after until they are done. On one host a collective may be MPI's blocking one all the same,
which is faster, once every member is known to have come to it, to have found its header equal to
the others', and to wait for it: then nothing is left that could keep it. ``Arrivals`` tells.
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
from datetime import timedelta
from enum import IntEnum
from functools import cache, partial
from typing import Any

from torch.distributed import Store

from ..runtime.boards import Board, find_board
from ..runtime.clock import clock
from ..runtime.hosts import ProcessCard, is_alive
from .base import MemberLost, MessageMisfit, WireAborted, WireFailure, WireTimeout

__all__ = [
    "Arrivals",
    "Link",
    "Meeting",
    "Started",
    "left_key",
    "report_at_the_end",
    "shared_board",
]

# As long as every rank of the host has a core of its own nobody is kept from work by who spins; to
# yield would leave the core to other programs for whole time slices.
_SPIN_S = 0.0002
# MPI moves data while it is asked: who sleeps early slows down what is under way.
_AWAKE_S = 0.02
_LONGEST_PAUSE_S = 0.0002
_LATE_S = 1.0
_LATE_PAUSE_S = 0.001
_LOOK_S = 0.1
_LOOKS_PER_QUESTION = 10  # a question to the store costs more than a look at a process

_WINDOW = 1024
_CHECK_EVERY = 256
_LEAVING_S = 0.001
_SETTLING = timedelta(seconds=5)
_GOES_ON, _WAITS, _LEAVES, _LEFT = range(4)
_STATE = 3  # the bits of a word that hold one of them
_EVEN = 4
_NUMBER_SHIFT = 3


class Started:
    """A collective or message in flight, with the tensors whose memory it uses.

    Args:
        request: MPI's.
        kept: the tensors.
        settle: brings the result home, once it is done; or None.
        status: of a receive, else None.
        num_bytes: of a receive: how many have to come.
    """

    __slots__ = ("_asking", "_settle", "is_done", "kept", "num_bytes", "request", "status")

    def __init__(
        self,
        request: Any,
        kept: Any,
        settle: Callable[[], None] | None = None,
        status: Any = None,
        num_bytes: int = 0,
    ) -> None:
        self.request = request
        self.kept = kept
        self.status = status
        self.num_bytes = num_bytes
        self.is_done = False
        self._asking = threading.Lock()
        self._settle = settle

    def test(self) -> bool:
        """Whether MPI is done with it; lets MPI go on, unless another thread does so just now."""
        if not self.is_done and self._asking.acquire(blocking=False):
            try:
                if not self.is_done:  # who asks MPI again gets an empty status
                    self.is_done = self.request.Test(self.status)
            finally:
                self._asking.release()
        return self.is_done

    def settle(self) -> None:
        """Bring the result home, once, and let go of the tensors."""
        settle, self._settle = self._settle, None
        self.kept = None
        if settle is not None:
            settle()


class Link:
    """One member's part in a group.

    Args:
        MPI: mpi4py's module.
        comm: MPI's communicator.
        store: of the group alone.
        ranks: the members' global ranks.
        cards: the members' processes.
        rank: this member's place.
        is_crowded: whether this host has more ranks than cores.
        end: gives back what the group has taken besides.
        look: raises where waiting is in vain; asked now and then. Or None.

    Attributes:
        spin_s: how long to look for another member without a pause.
    """

    def __init__(
        self,
        MPI: Any,
        comm: Any,
        store: Store,
        ranks: Sequence[int],
        cards: Sequence[ProcessCard],
        rank: int,
        *,
        is_crowded: bool,
        end: Callable[[], None],
        look: Callable[[], None] | None = None,
    ) -> None:
        self.MPI = MPI
        self.comm = comm
        self.is_aborted = False
        self.is_closed = False
        self._store = store
        self._ranks = ranks
        self._cards = cards
        self._rank = rank
        self.spin_s = 0.0 if is_crowded else _SPIN_S
        self._process_id = os.getpid()
        self._in_flight: dict[Started, None] = {}
        self._keeping = threading.Lock()
        self._has_stranded = False
        self._end = end
        self._look = look
        _links.add(self)

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._process_id != os.getpid()

    @property
    def rank_of_world(self) -> int:
        """This member's global rank."""
        return self._ranks[self._rank]

    def find_dead(self) -> dict[int, ProcessCard]:
        """The global ranks of the members whose processes have ended, as far as can be seen."""
        pairs = zip(self._ranks, self._cards, strict=True)
        return {rank: card for rank, card in pairs if is_alive(card) is False}

    def keep(self, started: Started) -> Started:
        """Let the tensors of what is in flight live, also where nobody keeps its Work."""
        in_flight = self._in_flight
        with self._keeping:
            for _ in range(2):  # so that those whose Work was dropped are let go in time
                oldest = next(iter(in_flight), None)
                if oldest is None:
                    break
                del in_flight[oldest]
                if not self._has_ended(oldest):
                    in_flight[oldest] = None
            in_flight[started] = None
        return started

    def finish(self, started: Started, timeout: timedelta) -> None:
        """Wait until it is done, and bring its result home."""
        try:
            self.wait(started.test, timeout)
        except self.MPI.Exception as error:
            self._forget(started)
            is_receive = started.status is not None
            raise self.failure(error, started.num_bytes if is_receive else None) from None
        self._forget(started)
        if started.status is not None:
            self.check_size(started.status.Get_count(self.MPI.BYTE), started.num_bytes)
        started.settle()

    def is_finished(self, started: Started) -> bool:
        """Whether it is done, or has failed, as ``finish`` will tell."""
        return self.is_aborted or self._has_ended(started)

    def progress(self) -> None:
        """Let MPI go on with what is in flight."""
        if not self.comm.Iprobe():
            return
        # It has found a message, and gone on with nothing. To ask after something that is not done
        # lets it go on with all.
        try:
            links = tuple(_links)
        except RuntimeError:  # another thread opens a group just now; this is asked again
            return
        for link in links:
            with link._keeping:
                started = next((one for one in link._in_flight if not one.is_done), None)
            if started is not None:
                link._has_ended(started)
                return

    def wait(self, is_done: Callable[[], bool], timeout: timedelta) -> None:
        """Return when ``is_done()``, which lets MPI go on.

        Raises:
            WireAborted, WireTimeout: as their names say.
            MemberLost: a member has ended.
        """
        if is_done():
            return
        begin = time.perf_counter()
        spins_until = begin + self.spin_s
        while time.perf_counter() < spins_until:
            if is_done():
                return
        deadline = clock.now() + timeout.total_seconds()
        next_look, num_looks = begin + _LOOK_S, 0
        while True:
            if self.is_closed:  # perhaps by another thread; then MPI must not be asked any more
                raise WireFailure("the communicator was closed")
            if is_done():
                return
            if self.is_aborted:
                raise WireAborted("aborted while waiting")
            if clock.now() > deadline:
                raise WireTimeout(f"not finished after {timeout.total_seconds():g} s")
            now = time.perf_counter()
            if now - begin < _AWAKE_S:
                os.sched_yield()
                continue
            time.sleep(_LONGEST_PAUSE_S if now - begin < _LATE_S else _LATE_PAUSE_S)
            if now > next_look:
                next_look, num_looks = now + _LOOK_S, num_looks + 1
                self._look_for_lost(is_done, asks=num_looks % _LOOKS_PER_QUESTION == 0)

    def leave(self) -> None:
        """Let the others know that this member takes no further part."""
        if self.is_forked:  # it speaks for nobody
            return
        with suppress(RuntimeError):  # the store is lost: whoever waits for it knows
            self._store.set(left_key(self._rank), "")

    def close(self) -> None:
        """Give MPI its communicator back, where nothing is in flight on it."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.is_forked:  # it has no part in it
            return
        self.leave()
        self._end()
        with self._keeping:
            unfinished = [started for started in self._in_flight if not self._has_ended(started)]
            self._in_flight.clear()
        if unfinished or self._has_stranded or self.is_aborted or self.MPI.Is_finalized():
            _abandoned.append((self.comm, unfinished))  # MPI may write into their tensors still
            return
        self.comm.Free()

    def strand(self, kept: Any) -> None:
        """Let tensors live on whose operation nobody asks after any more: MPI may use them."""
        self._has_stranded = True
        _abandoned.append((self.comm, kept))

    def check_size(self, count: int, num_bytes: int) -> None:
        """Raise unless a receive of ``num_bytes``, which is done, has got as many."""
        if count != num_bytes:
            raise MessageMisfit(
                f"a message of {count} bytes came where {num_bytes} were to be received"
            )

    def failure(self, error: Any, num_bytes: int | None = None) -> WireFailure:
        """What an error of MPI's means, in a receive of ``num_bytes`` or anything else (None)."""
        if num_bytes is not None and error.Get_error_class() == self.MPI.ERR_TRUNCATE:
            return MessageMisfit(
                f"a longer message came where {num_bytes} bytes were to be received"
            )
        text = str(error).splitlines()[0]
        return WireAborted(text) if self.is_aborted else WireFailure(text)

    def _forget(self, started: Started) -> None:
        with self._keeping:
            self._in_flight.pop(started, None)

    def _has_ended(self, started: Started) -> bool:
        try:
            return started.test()
        except self.MPI.Exception:
            return True

    def _look_for_lost(self, is_done: Callable[[], bool], *, asks: bool) -> None:
        if self._look is not None:
            self._look()
        lost = [k for k, card in enumerate(self._cards) if is_alive(card) is False]
        text = "has ended"
        if not lost and asks:
            lost, text = self._find_left(), "has closed this group, or ends"
        if lost:
            # What it sent before may be on its way still.
            end = time.perf_counter() + _LOOK_S
            while time.perf_counter() < end:
                if is_done():
                    return
                time.sleep(_LATE_PAUSE_S)
            raise MemberLost(text, lost[0])

    def _find_left(self) -> list[int]:
        with suppress(RuntimeError):  # the store is lost
            others = (k for k in range(len(self._cards)) if k != self._rank)
            return [k for k in others if self._store.check([left_key(k)])]
        return []


class Meeting(IntEnum):
    """How the members come to a collective."""

    APART = 0
    """Some do not wait for it: nobody may go into MPI's blocking call."""
    TOGETHER = 1
    """All wait."""
    EVEN = 2
    """All wait, and the parts of each are of one size."""


class Arrivals:
    """Who has come to which collective of a group on one host, in memory that all can read.

    Each member counts its collectives, and writes for each whether it waits for it or goes on, and
    whether all parts that it gives and takes are of one size, so that MPI's alltoall will do. One
    that gives up waiting says so first, and looks once more: if all have come meanwhile it stays,
    since the others may have entered MPI's blocking call by then.

    Args:
        link: how to wait.
        mine: this member's words; the others can only read them.
        others: the other members' words.
    """

    num_words = _WINDOW + 1  # one for each collective in sight, and how many there were

    def __init__(self, link: Link, mine: memoryview, others: Sequence[memoryview]) -> None:
        self._link = link
        self._mine = mine
        self._others = others
        self._interruption: BaseException | None = None

    def insides(self) -> dict[str, Any]:
        """What a native caller needs to do what ``enter`` does while the others come soon."""
        return {
            "arrivals": self._mine,
            "others_arrivals": list(self._others),
            "arrivals_window": _WINDOW,
            "arrivals_check_every": _CHECK_EVERY,
            "arrivals_waits": _WAITS,
            "arrivals_left": _LEFT,
            "arrivals_even": _EVEN,
            "arrivals_number_shift": _NUMBER_SHIFT,
        }

    def enter(self, waits: bool, timeout: timedelta, *, is_even: bool = False) -> Meeting:
        """Come to the next collective, and wait for the others.

        A caller to whom it tells that all wait must go into MPI's call at once: what a signal's
        handler raises in between leaves the others there.

        Args:
            waits: whether this member waits for it. One that does not learns nothing.
            timeout: how long it may take until the others have come.
            is_even: whether all parts that this member gives and takes are of one size.
        """
        number = self._mine[_WINDOW] = self._mine[_WINDOW] + 1
        if not number % _CHECK_EVERY:
            self._wait_for_the_slowest(number, timeout)
        if not waits:
            self._write(number, _GOES_ON)
            return Meeting.APART
        try:
            self._write(number, _WAITS, is_even)
            return self._wait_for_all(number, timeout)
        except BaseException as error:  # Ctrl-C, too
            return self.leave(error)

    def wait_for_all(self, timeout: timedelta) -> Meeting:
        """Go on with ``enter``, for a native caller that waits and has told so.

        What a signal's handler raises before the first line passes by: then ``leave``, too.
        """
        try:
            return self._wait_for_all(self._mine[_WINDOW], timeout)
        except BaseException as error:
            return self.leave(error)

    def leave(self, error: BaseException) -> Meeting:
        """Give up waiting, and raise ``error``; or stay, and keep it for ``end``.

        Where all have come by now the others may be inside MPI's call, which takes this one, too.
        """
        number = self._mine[_WINDOW]
        is_even = bool(self._mine[number % _WINDOW] & _EVEN)
        self._write(number, _LEAVES, is_even)
        time.sleep(_LEAVING_S)
        # Others may leave at the same time, and one who came last have seen all of them wait: it is
        # inside MPI's call then, so those who leave count as there.
        if not self._are_there(number):
            self._write(number, _LEFT, is_even)
            raise error
        self._write(number, _WAITS, is_even)
        self._interruption = None if isinstance(error, WireFailure) else error
        self._link.wait(partial(self._have_come, number), _SETTLING)
        return self._meeting(number)

    def end(self) -> None:
        """After MPI's call: raise what interrupted the wait before it."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def _wait_for_all(self, number: int, timeout: timedelta) -> Meeting:
        word = number << _NUMBER_SHIFT | _WAITS
        if any(theirs[number % _WINDOW] & ~_EVEN != word for theirs in self._others):
            self._link.wait(partial(self._have_come, number, progress=True), timeout)
        return self._meeting(number)

    def _meeting(self, number: int) -> Meeting:
        words = [words[number % _WINDOW] for words in (self._mine, *self._others)]
        # Who stands at _LEAVES for its moment waits with all others in the end.
        if any(word & _STATE == _GOES_ON for word in words):
            return Meeting.APART
        return Meeting.EVEN if all(word & _EVEN for word in words) else Meeting.TOGETHER

    def _write(self, number: int, state: int, is_even: bool = False) -> None:
        self._mine[number % _WINDOW] = number << _NUMBER_SHIFT | is_even * _EVEN | state

    def _are_there(self, number: int) -> bool:
        words = [theirs[number % _WINDOW] for theirs in self._others]
        return all(word >> _NUMBER_SHIFT >= number and word & _STATE != _LEFT for word in words)

    def _have_come(self, number: int, *, progress: bool = False) -> bool:
        """Whether all others are there; one that has given up ends the group."""
        for theirs in self._others:
            word = theirs[number % _WINDOW]
            if word >> _NUMBER_SHIFT < number or word & _STATE == _LEAVES:
                if progress:
                    self._link.progress()
                return False
            if word & _STATE == _LEFT:
                raise WireAborted("a member has given up waiting for this call")
        return True

    def _wait_for_the_slowest(self, number: int, timeout: timedelta) -> None:
        """Return when nobody can still look for a word that is about to be overwritten."""
        past = number - _WINDOW // 2
        if past > 0:

            def has_nobody_behind() -> bool:
                self._link.progress()
                return all(
                    theirs[past % _WINDOW] >> _NUMBER_SHIFT >= past for theirs in self._others
                )

            self._link.wait(has_nobody_behind, timeout)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def left_key(member: int) -> str:
    """What a member writes into the store when it takes no further part."""
    return f"left/{member}"


def report_at_the_end() -> None:
    """Let this rank tell who has died, where mpiexec ends it for that; MPI raises nothing then."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _report)


def _report(number: int, frame: object) -> None:
    for link in tuple(_links):
        if link.is_forked:
            continue
        dead = {} if link.is_closed else link.find_dead()
        if dead:
            who = ", ".join(f"rank {rank} ({card})" for rank, card in dead.items())
            verb = "has" if len(dead) == 1 else "have"
            print(
                f"meshdist: rank {link.rank_of_world} is ended by mpiexec: {who} {verb} ended "
                "before, and under MPI all ranks end with one",
                file=sys.stderr,
                flush=True,
            )
            break
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_abandoned: list[Any] = []
"""What was in flight in groups that were closed, until the process ends."""


def shared_board() -> Board | None:
    """This process's board for all its groups over MPI; None where the system has none."""
    return _board_of(os.getpid())


@cache
def _board_of(process_id: int) -> Board | None:
    return find_board()

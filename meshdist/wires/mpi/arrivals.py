"""Which members have come to a collective, so that all may go into MPI's blocking call together.

MPI's blocking calls are faster than what is started and tested, but cannot be ended. On one host a
member enters such a call when all others have arrived at it, with equal headers, and wait for it:
then nothing can hold it up.

Each member counts its collectives, and writes for each whether it waits for it or goes on, and
whether all parts that it gives and takes are of one size, so that MPI's alltoall will do. A member
that gives up waiting writes so first, and looks once more: if all have come meanwhile it stays,
since the others may have entered MPI's blocking call by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from functools import cache, partial
from typing import Any, ClassVar

from ...checking.shared_words import SharedWords, make_shared_words
from ..core import core
from ..operations import WireAborted, WireFailure, given_up_for
from .connection import MpiConnection

_WINDOW = 1024
_INSIDE = _WINDOW + 1
_CHECK_EVERY = 256
_LEAVING_S = 0.001
_SETTLING = timedelta(seconds=5)
_GOES_ON, _WAITS, _LEAVES, _LEFT = range(4)
_STATE = 3  # the bits of a word that hold one of them
_EVEN = 4
_NUMBER_SHIFT = 3


class EntryKind(IntEnum):
    """Way into a collective: APART (not all wait), TOGETHER (all do), EVEN (with equal parts)."""

    APART = 0
    """Some do not wait for it: no member may go into MPI's blocking call."""
    TOGETHER = 1
    """All wait."""
    EVEN = 2
    """All wait, and the parts of each are of one size."""


@dataclass(eq=False)
class Arrivals:
    """The collectives that members of a group on one host have come to, in memory that all read.

    Args:
        link: how to wait.
        mine: this member's words; the others can only read them.
    """

    num_words: ClassVar = _WINDOW + 2
    """A word for each collective in the window, how many there were, and for how many milliseconds
    this member may stay in MPI's blocking call: 0 where it is in none."""

    link: MpiConnection
    mine: memoryview
    others: Sequence[memoryview]
    _interruption: BaseException | None = field(default=None, init=False)

    def for_core(self) -> Any:
        """Return the native object that does ``enter`` if the others come soon."""
        return core.ArrivalWords(
            core.Words(self.mine),
            [core.Words(theirs) for theirs in self.others],
            window=_WINDOW,
            inside=_INSIDE,
            check_every=_CHECK_EVERY,
            goes_on=_GOES_ON,
            waits=_WAITS,
            left=_LEFT,
            even=_EVEN,
            number_shift=_NUMBER_SHIFT,
        )

    def enter(self, waits: bool, timeout: timedelta, *, is_even: bool = False) -> EntryKind:
        """Show arrival at the next collective; if ``waits``, wait, and return whether all do so.

        Args:
            is_even: whether all parts that this member gives and takes are of one size.
        """
        # Where this returns that all wait, the caller must go into MPI's call at once: what a
        # signal's handler raises in between leaves the others there.
        number = self.mine[_WINDOW] = self.mine[_WINDOW] + 1
        if not number % _CHECK_EVERY:
            self._wait_for_the_slowest(number, timeout)
        if not waits:
            self._write(number, _GOES_ON)
            return EntryKind.APART
        try:
            self._write(number, _WAITS, is_even)
            return self._wait_for_all(number, timeout)
        except BaseException as error:  # Ctrl-C, too
            return self.leave(error)

    def wait_for_all(self, timeout: timedelta) -> EntryKind:
        """Wait for the others' arrival, after this member's; return whether all wait there."""
        # Where a signal's handler raises before the first line runs, the caller must ``leave``.
        try:
            return self._wait_for_all(self.mine[_WINDOW], timeout)
        except BaseException as error:
            return self.leave(error)

    def leave(self, error: BaseException) -> EntryKind:
        """Raise ``error`` if a member is missing; else return how all came; ``end`` raises it."""
        # Where all have come by now the others may be inside MPI's call, which takes this one, too.
        number = self.mine[_WINDOW]
        is_even = bool(self.mine[number % _WINDOW] & _EVEN)
        self._write(number, _LEAVES, is_even)
        time.sleep(_LEAVING_S)
        # Others may leave at the same time, and the last one to come have seen all of them wait: it
        # is inside MPI's call then, so those that leave count as there.
        if not self._are_there(number):
            self.link.say_why(number, error)
            self._write(number, _LEFT, is_even)
            raise given_up_for(error) from None
        self._write(number, _WAITS, is_even)
        self._interruption = None if isinstance(error, WireFailure) else error
        self.link.wait(partial(self._look_for_all, number), _SETTLING)
        return self._entry_kind(number)

    def stay_inside(self, call: Callable[..., Any], arguments: Any, timeout: timedelta) -> None:
        """Run MPI's blocking ``call``; meanwhile show the other members its ``timeout``."""
        self.mine[_INSIDE] = milliseconds(timeout)
        try:
            call(*arguments)
        finally:
            self.mine[_INSIDE] = 0

    def find_blocked_collective(self) -> tuple[int, float] | None:
        """Return (number, timeout in s) of the collective that blocks this member, or None."""
        number, limit_ms = self.mine[_WINDOW], self.mine[_INSIDE]
        return (number, limit_ms / 1000) if limit_ms else None

    def end(self) -> None:
        """Raise, once, the error that interrupted the last wait for arrivals, if any did."""
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption

    def _wait_for_all(self, number: int, timeout: timedelta) -> EntryKind:
        word = number << _NUMBER_SHIFT | _WAITS
        for theirs in self.others:
            if theirs[number % _WINDOW] & ~_EVEN != word:
                self.link.wait(partial(self._look_for_all, number, progress=True), timeout)
                break
        return self._entry_kind(number)

    def _entry_kind(self, number: int) -> EntryKind:
        words = [words[number % _WINDOW] for words in (self.mine, *self.others)]
        # A member that is at _LEAVES for its moment waits with all others in the end.
        if _GOES_ON in [word & _STATE for word in words]:
            return EntryKind.APART
        return EntryKind.TOGETHER if 0 in [word & _EVEN for word in words] else EntryKind.EVEN

    def _write(self, number: int, state: int, is_even: bool = False) -> None:
        self.mine[number % _WINDOW] = number << _NUMBER_SHIFT | is_even * _EVEN | state

    def _are_there(self, number: int) -> bool:
        words = [theirs[number % _WINDOW] for theirs in self.others]
        return all(word >> _NUMBER_SHIFT >= number and word & _STATE != _LEFT for word in words)

    def _look_for_all(self, number: int, *, progress: bool = False) -> bool:
        """Return whether all came to call ``number``, else ``progress`` MPI; raise if any left."""
        for place, theirs in enumerate(self.others):
            word = theirs[number % _WINDOW]
            if word >> _NUMBER_SHIFT < number or word & _STATE == _LEAVES:
                if progress:
                    self.link.progress()
                return False
            if word & _STATE == _LEFT:
                # The others' words are those of all places but this member's own.
                member = place + (place >= self.link.opening.rank)
                raise WireAborted(self.link.find_why(member, number))
        return True

    def _wait_for_the_slowest(self, number: int, timeout: timedelta) -> None:
        """Wait until no member is more than half a window (512 calls) behind ``number``."""
        past = number - _WINDOW // 2
        if past > 0:

            def look_for_all() -> bool:
                self.link.progress()
                return all(
                    theirs[past % _WINDOW] >> _NUMBER_SHIFT >= past for theirs in self.others
                )

            self.link.wait(look_for_all, timeout)


def milliseconds(timeout: timedelta) -> int:
    """Return the timeout in whole milliseconds, at least 1."""
    return max(1, int(timeout.total_seconds() * 1000))


@cache
def words_of_process() -> SharedWords | None:
    """Return this process's shared words for its groups over MPI; None where it can have none."""
    return make_shared_words()


os.register_at_fork(after_in_child=words_of_process.cache_clear)

"""Call words: in shared words the members of a group on one host show what they call in contexts.

Before each call inside a join context a member writes one word of its own. It says where, in this
member's words, stands what it calls, which is written there once, before its first use. So a rank
without data can take part in what it sees, and a member with data waits for none that reads:

    rank 0, with data:   7 @40 | 8 @52 | 9 @40     @40: all_reduce((2,) float32, SUM)
    rank 1, without:     7 -   | 8 -               @52: notice() of the first joinable

What is written has a place, so that no two calls are taken for each other. It fills one half of the
room after the other; a half is written over once all others have come behind its last use. What is
too long for a half is told to all as an error. Words may arrive in another order than they were
written in: each bears its number, and what is called a checksum.
"""

from __future__ import annotations

import json
from functools import lru_cache, partial
from zlib import crc32

from .calls import Call, from_fields, to_fields
from .shared_words import Regions, SharedWords

__all__ = ["GATHERED", "NOTHING", "ROUND", "WINDOW", "CallTooLong", "CallWords", "num_bytes"]

WINDOW = 1024
"""How many calls a member may be ahead of another."""
NOTHING, GATHERED, ROUND = 0, 4, 8
"""What is shown in place of a call: nothing; a call that a round tells; a round before any call."""
_LEFT, _IS_FULL, _REACHED, _CALLS = 0, 1, 2, 3
_FIRST = 1028  # behind the calls; a place is a multiple of 4, so that two bits are free
_HALF = 1 << 13
_NUM_WORDS = _FIRST + 2 * _HALF
_PLACE = 0xFFFFC  # the bits of a shown word that are its place; above it is counted in which turn
_NUM_TURNS = 1 << 12
_NUM_KEPT = 1024  # programs repeat their calls
_LOW = 0xFFFFFFFF


class CallTooLong(Exception):
    """A call that takes more words than there are."""


class CallWords:
    """One member's part in what one group's members show.

    Args:
        words: this process's shared words, in which this member's own lie.
        key: of their region there.
        member: its place in the group.
        size: of the group.
        regions: the words of the other members.

    Raises:
        MemoryError: there is no room for them.
    """

    def __init__(
        self, words: SharedWords, key: int, member: int, size: int, regions: Regions
    ) -> None:
        self._mine = words.reserve(key, _NUM_WORDS)
        self._release = partial(words.release, key)
        self._seed = key & _LOW  # no word of another group is taken for one of this
        self._member = member
        self._missing = {*range(size)} - {member}
        self._regions = regions
        self._views: dict[int, memoryview] = {}
        self._told: dict[Call, int] = {}  # the words of calls in the half that is written
        self._turn = 0  # how often the halves have changed
        self._end = _FIRST
        self._all_reached = 0  # when it was looked at
        self.number = 0
        """Of what this member has shown last."""

    def sees_all(self) -> bool:
        """Whether the words of all members are seen; one that was in no context has none."""
        for member in tuple(self._missing):
            view = self._regions.find(member, _NUM_WORDS)
            if view is not None:
                self._views[member] = view
                self._missing.remove(member)
        return not self._missing

    def reaches_all(self) -> bool:
        """Whether the words of each member would be seen if it had some."""
        return self.sees_all() or all(map(self._regions.reaches, self._missing))

    def close(self) -> None:
        """Give its words back."""
        self._views.clear()
        self._release()

    # -- of this member ---------------------------------------------------------------------------

    def has_room(self, call: Call | None) -> bool:
        """Whether the call, or None for a word in place of it, can be shown now.

        What a member has yet to read is not written over.
        """
        fits = call is None or call in self._told or _num_words(call) <= self._left_over()
        least = self.number + 2 - WINDOW if fits else self.number
        if self._all_reached < least:
            reached = (view[_REACHED] for view in self._views.values())
            self._all_reached = min(reached, default=self.number)
        return self._all_reached >= least

    def show(self, call: Call, bits: int = 0) -> None:
        """Show the call that this member comes to next, where there is room, and two bits more.

        Raises:
            CallTooLong: there never is.
        """
        word = self._told.get(call)
        self.enter((self._write(call) if word is None else word) | bits)

    def enter(self, word: int) -> None:
        """Show a word in place of a call."""
        self.number += 1
        self._mine[_CALLS + self.number % WINDOW] = self._tag(self.number) << 32 | word
        self._mine[_REACHED] = self.number

    def _write(self, call: Call) -> int:
        """Write what a word stands for; return the word."""
        data, num_words = _to_bytes(call), _num_words(call)
        if num_words > _HALF:
            self._mine[_IS_FULL] = 1
            self.leave(self.number)
            raise CallTooLong
        if num_words > self._left_over():  # all have come behind the last use of the other half
            self._turn = (self._turn + 1) % _NUM_TURNS
            self._end = _FIRST + self._turn % 2 * _HALF
            self._told.clear()
        place, word = self._end, self._turn << 20 | self._end
        self._end += num_words
        padded = data.ljust(8 * (num_words - 1), b"\0")
        self._mine[place + 1 : self._end] = memoryview(padded).cast("Q")
        self._mine[place] = len(data) << 32 | self._checksum(data, word)
        self._told[call] = word
        return word

    def _left_over(self) -> int:
        """How many words are left in the half that is written."""
        return _FIRST + (self._turn % 2 + 1) * _HALF - self._end

    def _checksum(self, data: bytes, word: int) -> int:
        """Of what is written for a word: what was there in another turn has another."""
        return crc32(data, self._seed ^ word & ~3)

    # -- of the others ----------------------------------------------------------------------------

    def is_awaited(self, *, by_wire: bool = False) -> bool:
        """Whether a member has come to what follows this one's last word: a round, or no round."""
        for member, view in self._views.items():
            word = self._find(view, self.number + 1)
            if word is None:
                is_there = bool(view[_IS_FULL])
            else:
                is_there = (word == ROUND) == by_wire
            if is_there and self._regions.is_current(member):
                return True
        return False

    def find_shown(self) -> dict[int, int]:
        """What is shown where this member has come to, of each that has come there."""
        views = {self._member: self._mine, **self._views}
        shown = {member: self._find(view, self.number) for member, view in views.items()}
        return {member: word for member, word in shown.items() if word is not None}

    def find_call(self, member: int, word: int) -> Call | None:
        """The call that a member shows; None where what it has written is not seen yet."""
        view, place = self._views.get(member, self._mine), word & _PLACE
        size, checksum = divmod(view[place], 1 << 32)
        data = view[place + 1 : place + 1 + -(-size // 8)].tobytes()[:size]
        return _from_bytes(data) if self._checksum(data, word) == checksum else None

    def _tag(self, number: int) -> int:
        return self._seed + number & _LOW

    def _find(self, view: memoryview, number: int) -> int | None:
        """What a member shows under a number; also where it has closed the group since."""
        word = view[_CALLS + number % WINDOW]
        return word & _LOW if word >> 32 == self._tag(number) else None

    # -- contexts ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A context begins; call it before any other member can call anything in it."""
        self._mine[_LEFT] = 0

    def leave(self, number: int) -> None:
        """This member has made its calls up to ``number``, and makes no more in the context."""
        self._mine[_LEFT] = 1 + number

    def find_left(self) -> int | None:
        """A member that has left, and does not make the call that this one has shown."""
        for member, view in self._views.items():
            if 0 < view[_LEFT] <= self.number and self._regions.is_current(member):
                return member
        return None

    def find_full(self) -> int | None:
        """A member that has left since it could not show its call."""
        for member, view in ((self._member, self._mine), *self._views.items()):
            if view[_IS_FULL] and (view is self._mine or self._regions.is_current(member)):
                return member
        return None


def num_bytes() -> int:
    """The bytes that there are for what one call is."""
    return 8 * (_HALF - 1)


@lru_cache(maxsize=_NUM_KEPT)
def _to_bytes(call: Call) -> bytes:
    """How a call is written; the inverse of ``_from_bytes``."""
    return json.dumps(to_fields(call), separators=(",", ":")).encode()


@lru_cache(maxsize=_NUM_KEPT)
def _from_bytes(data: bytes) -> Call:
    """The call that was written; the inverse of ``_to_bytes``."""
    return from_fields(*json.loads(data))


def _num_words(call: Call) -> int:
    """How many words a call is written on: a multiple of 4."""
    return -(-(8 + len(_to_bytes(call))) // 32) * 4

"""Call words: in shared words the members of a group on one host show what they call in contexts.

Before each call inside a join context a member writes one word of its own. It says where, in this
member's words, stands what it is about to do, which is written there once, before its first use. So
a rank without data can take part in what it sees, and a member with data waits for none that reads:

    rank 0, with data:   7 @40 | 8 @52 | 9 @40     @40: all_reduce((2,) float32, SUM)
    rank 1, without:     7 @40 | 8 @40             @52: notice() of the first joinable
                                                   rank 1's own @40: that it has joined

A place belongs to its writer, so that no two statements are taken for each other. They fill one
half of the room after the other; a half is written over once all others have come behind its last
use. Words may arrive in another order than they were written in: each bears its number, and each
statement a checksum.
"""

from __future__ import annotations

from functools import partial
from zlib import crc32

from .shared_words import Regions, SharedWords

WINDOW = 1024
"""How many calls a member may be ahead of another."""
_LEFT, _REACHED, _CALLS = 0, 1, 2
_FIRST = _CALLS + WINDOW
_HALF = 1 << 15
_NUM_WORDS = _FIRST + 2 * _HALF
_ROUND = 0  # shown in place of a statement, which a round by the wire tells
_PLACE_BITS = 20  # of a word that is shown; above them stands in which turn it was written
_NUM_TURNS = 1 << 12
_LOW = 0xFFFFFFFF


class StatementTooLong(Exception):
    """Error of a statement that takes more words than call words have for statements."""


class CallWords:
    """A member's part in the words that a group's members show each other.

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
        self._told: dict[bytes, int] = {}  # the words of what stands in the half that is written
        self._turn = 0  # how often the halves have changed
        self._end = _FIRST
        self._all_reached = 0  # when it was looked at
        self.number = 0
        """Of what this member has shown last."""

    def sees_all(self) -> bool:
        """Look for the other members' words; return whether those of all are found."""
        for member in tuple(self._missing):
            view = self._regions.find(member, _NUM_WORDS)
            if view is not None:
                self._views[member] = view
                self._missing.remove(member)
        return not self._missing

    def reaches_all(self) -> bool:
        """Return whether all members' shared words are found, or can be once they are reserved."""
        return self.sees_all() or all(map(self._regions.reaches, self._missing))

    def close(self) -> None:
        """Free this member's words, and drop the views of the other members' words."""
        self._views.clear()
        self._release()

    # -- of this member ---------------------------------------------------------------------------

    def has_room(self, data: bytes) -> bool:
        """Return whether ``data`` fits now without overwriting what a member has yet to read."""
        fits = data in self._told or _num_words(data) <= self._num_free_words()
        least = self.number + 2 - WINDOW if fits else self.number
        if self._all_reached < least:
            reached = (view[_REACHED] for view in self._views.values())
            self._all_reached = min(reached, default=self.number)
        return self._all_reached >= least

    def show(self, data: bytes) -> None:
        """Show the statement ``data`` as this member's next; call it only if ``has_room``.

        Raises:
            StatementTooLong: ``data`` never has room.
        """
        word = self._told.get(data)
        self._enter(self._write(data) if word is None else word)

    def show_round(self) -> None:
        """Show that this member's next statement travels by the wire, not by shared words."""
        self._enter(_ROUND)

    def _enter(self, word: int) -> None:
        self.number += 1
        self._mine[_CALLS + self.number % WINDOW] = self._tag(self.number) << 32 | word
        self._mine[_REACHED] = self.number

    def _write(self, data: bytes) -> int:
        """Write the statement ``data``; return the word that refers to the statement."""
        num_words = _num_words(data)
        if num_words > _HALF:
            raise StatementTooLong
        if (
            num_words > self._num_free_words()
        ):  # all have come behind the last use of the other half
            self._turn = (self._turn + 1) % _NUM_TURNS
            self._end = _FIRST + self._turn % 2 * _HALF
            self._told.clear()
        place, word = self._end, self._turn << _PLACE_BITS | self._end
        self._end += num_words
        padded = data.ljust(8 * (num_words - 1), b"\0")
        self._mine[place + 1 : self._end] = memoryview(padded).cast("Q")
        self._mine[place] = len(data) << 32 | self._checksum(data, word)
        self._told[data] = word
        return word

    def _num_free_words(self) -> int:
        """Return how many words are free in the half that is being filled."""
        return _FIRST + (self._turn % 2 + 1) * _HALF - self._end

    # -- of the others ----------------------------------------------------------------------------

    def is_awaited(self, *, by_wire: bool = False) -> bool:
        """Return whether a member is a statement ahead, by words, or by the wire (``by_wire``)."""
        shown = {member: self._find(view, self.number + 1) for member, view in self._views.items()}
        return any(
            word is not None and (word == _ROUND) == by_wire and self._regions.is_current(member)
            for member, word in shown.items()
        )

    def find_all(self) -> list[bytes] | None:
        """Return all members' statements of this member's last number; None until all have come."""
        found = []
        for member in range(1 + len(self._views)):
            view = self._views.get(member, self._mine)
            word = self._find(view, self.number)
            data = self._read(view, word) if word else None
            if data is None:
                return None
            found.append(data)
        return found

    def find_silent(self) -> list[int]:
        """Return the members that have not shown as many statements as this member."""
        views = sorted(self._views.items())
        return [member for member, view in views if self._find(view, self.number) is None]

    def _find(self, view: memoryview, number: int) -> int | None:
        """Return the word by which a member shows statement ``number``; None if not shown."""
        word = view[_CALLS + number % WINDOW]
        return word & _LOW if word >> 32 == self._tag(number) else None

    def _read(self, view: memoryview, word: int) -> bytes | None:
        """Return the statement that a word points to; None while its checksum does not match."""
        place = word & (1 << _PLACE_BITS) - 1
        size, checksum = divmod(view[place], 1 << 32)
        data = view[place + 1 : place + 1 + -(-size // 8)].tobytes()[:size]
        return data if self._checksum(data, word) == checksum else None

    def _tag(self, number: int) -> int:
        return self._seed + number & _LOW

    def _checksum(self, data: bytes, word: int) -> int:
        """Return a checksum of a statement and of the word that refers to the statement."""
        return crc32(data, self._seed ^ word)

    # -- contexts ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a join context begins, before another member can make a call there."""
        self._mine[_LEFT] = 0

    def leave(self, number: int) -> None:
        """Show that call ``number`` was the last of this member in the join context."""
        self._mine[_LEFT] = 1 + number

    def find_left(self) -> int | None:
        """Return a member that has left before the call that this member has shown, or None."""
        for member, view in self._views.items():
            if 0 < view[_LEFT] <= self.number and self._regions.is_current(member):
                return member
        return None


def most_statement_bytes() -> int:
    """Return the most bytes that a statement may have."""
    return 8 * (_HALF - 1)


def _num_words(data: bytes) -> int:
    return 1 + -(-len(data) // 8)

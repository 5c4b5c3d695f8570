"""Announcement tables: in shared words the members of a group on one host say what they call.

In a join context each member numbers its announcements, and writes them into rows of its own table.
The others read them, so that no message is needed, and none of them waits for a reader as long as
it is less than ``NUM_ROWS`` announcements ahead. A row begins with a word of its number and a
checksum: words may arrive in another order than they were written in. A member that leaves the
context writes after how many announcements, whose calls it has made, it has left. One that begins a
round by the wire counts it, so that the others tell it from calls outside of contexts.

All members make their n-th announcement for the same call. So what is known of a call is a function
of its number, the same on every member: the announcements, and which members have left before.
"""

from __future__ import annotations

from functools import partial
from zlib import crc32

from .shared_words import Regions, SharedWords

__all__ = ["NUM_ROWS", "AnnouncementTable"]

NUM_ROWS = 63
"""How many announcements a member may be ahead of another; one less."""
_ROW_WORDS = 32
_ROW_BYTES = 8 * (_ROW_WORDS - 1)
_SIZE_BYTES = 4
_SAID, _LEFT, _BY_WIRE, _FIRST_ROW = 0, 1, 2, _ROW_WORDS
_NUM_WORDS = _FIRST_ROW + NUM_ROWS * _ROW_WORDS
_LOW = 0xFFFFFFFF


class AnnouncementTable:
    """One member's part in what one group's members announce.

    Args:
        words: this process's shared words, in which this member's own lie.
        key: of their region there.
        member: its place in the group.
        size: of the group.
        regions: the words of the other members.

    Raises:
        MemoryError: there is no room for them.
    """

    num_bytes = _ROW_BYTES - _SIZE_BYTES
    """The bytes for which a row has room."""

    def __init__(
        self, words: SharedWords, key: int, member: int, size: int, regions: Regions
    ) -> None:
        self._mine = words.reserve(key, _NUM_WORDS)
        self._release = partial(words.release, key)
        self._seed = key & _LOW  # no row of another table is taken for one of this
        self._member = member
        self._size = size
        self._others = {*range(size)} - {member}
        self._regions = regions
        self._views: dict[int, memoryview] = {}
        self._rows: dict[int, tuple[int, bytes]] = {}  # of the last number
        self._num_settled = 0
        self._num_by_wire = 0
        self._num_reached = 0  # by all others, when it was looked at
        self.number = 0
        """Of this member's last announcement."""

    def sees_all(self) -> bool:
        """Whether the tables of all members are seen; one that was in no context has none."""
        if len(self._views) == len(self._others):
            return True
        for member in self._others - self._views.keys():
            view = self._regions.find(member, _NUM_WORDS)
            if view is not None:
                self._views[member] = view
        return len(self._views) == len(self._others)

    def reaches_all(self) -> bool:
        """Whether the table of each member would be seen if it had one."""
        return self.sees_all() or all(map(self._regions.reaches, self._others))

    def close(self) -> None:
        """Give its words back."""
        self._views.clear()
        self._release()

    # -- announcements ----------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether all members have read what the next announcement is written over."""
        least = self.number + 2 - NUM_ROWS
        if self._num_reached < least:
            self._num_reached = min(view[_SAID] for view in self._views.values())
        return self._num_reached >= least

    def say(self, data: bytes) -> None:
        """Make the next announcement; the end of one that is too long is left out.

        Call it where there is room.
        """
        self.number += 1
        payload = len(data).to_bytes(_SIZE_BYTES, "little") + data[: self.num_bytes]
        row = self._row_start()
        padded = payload.ljust(-(-len(payload) // 8) * 8, b"\0")
        words = memoryview(padded).cast("Q")
        self._mine[row + 1 : row + 1 + len(words)] = words
        self._mine[row] = (self.number & _LOW) << 32 | crc32(payload, self._seed)
        self._mine[_SAID] = self.number
        self._rows = {self._member: (len(data), payload[_SIZE_BYTES:])}

    def find_said(self) -> list[tuple[int, bytes]] | None:
        """The size of each member's announcement of this number, and its bytes; None if some lack.

        In group order; of one that is longer than ``num_bytes`` the first ones.
        """
        for member, view in self._views.items():
            if member not in self._rows:
                row = self._find_row(view)
                if row is None:
                    return None
                self._rows[member] = row
        return [self._rows[member] for member in range(self._size)]

    def find_silent(self) -> list[int]:
        """The members that have not come to this number."""
        self.find_said()
        return [
            member
            for member, view in self._views.items()
            if member not in self._rows and self._find_row(view) is None
        ]

    def find_gone(self) -> int | None:
        """A member that will never come to this number, since its process has ended.

        Where all have come to it, one that will never come to the next.
        """
        ended = [member for member in self._views if not self._regions.is_alive(member)]
        if not ended:
            return None
        # Behind that: a member may come and go meanwhile.
        silent = self.find_silent()
        if not silent:
            silent = [one for one, view in self._views.items() if view[_SAID] <= self.number]
        return next((member for member in ended if member in silent), None)

    def is_awaited(self) -> bool:
        """Whether a member has made an announcement after this member's last one."""
        return self._is_behind(_SAID, self.number)

    def count_by_wire(self) -> None:
        """This member begins a round by the wire."""
        self._num_by_wire += 1
        self._mine[_BY_WIRE] = self._num_by_wire

    def is_awaited_by_wire(self) -> bool:
        """Whether a member has begun a round by the wire after this member's last one."""
        return self._is_behind(_BY_WIRE, self._num_by_wire)

    def _is_behind(self, word: int, count: int) -> bool:
        return any(
            view[word] > count and self._regions.is_current(member)
            for member, view in self._views.items()
        )

    # -- contexts ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """A context begins; call it before any other member can announce anything in it."""
        self._num_settled = self.number
        self._mine[_LEFT] = 0

    def settle(self) -> None:
        """This member has made the calls of all its announcements."""
        self._num_settled = self.number

    def leave(self) -> None:
        """This member leaves the context, and makes no call more."""
        self._mine[_LEFT] = 1 + self._num_settled

    def is_anyone_beyond(self) -> bool:
        """Whether a member is at a call that this one, which has left, does not make."""
        return any(view[_SAID] > self._num_settled for view in self._views.values())

    def find_left(self) -> int | None:
        """A member that has left, and does not make this number's call."""
        for member, view in self._views.items():
            if 0 < view[_LEFT] <= self.number and self._regions.is_current(member):
                return member
        return None

    def _row_start(self) -> int:
        return _FIRST_ROW + self.number % NUM_ROWS * _ROW_WORDS

    def _find_row(self, view: memoryview) -> tuple[int, bytes] | None:
        """A member's announcement of this number: its size, and its first bytes."""
        row = self._row_start()
        word = view[row]
        if word >> 32 != self.number & _LOW:
            return None
        payload = view[row + 1 : row + _ROW_WORDS].tobytes()
        size = int.from_bytes(payload[:_SIZE_BYTES], "little")
        payload = payload[: _SIZE_BYTES + size]
        return (size, payload[_SIZE_BYTES:]) if crc32(payload, self._seed) == word & _LOW else None

"""The messages between this member and one other, as both note them in words that both can read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

__all__ = ["NUM_ENTRIES", "NUM_WORDS", "MessageLog", "NewLog"]

NUM_ENTRIES = 128
"""How many notes of one member can be ahead of who reads of them."""
NUM_WORDS = 2 + 2 * NUM_ENTRIES
"""How many words a member writes on for one other."""

_WRITTEN, _READ, _FIRST = range(3)
_LOW = 0xFFFFFFFF
_ALL = 0xFFFFFFFFFFFFFFFF


class MessageLog:
    """The messages between this member and one other.

    First come two words: how many entries were written, and how many of the other's were read. An
    entry is two words: direction, tag and number; and the fingerprint under a seal that tells
    whether both are of this entry. The number counts the messages of one direction and tag, so that
    the n-th send meets the n-th receive; it is 0 for a receive whose sender is never known, after
    which messages of that tag cannot be told apart. What the other has not read is not overwritten:
    further entries wait in this process. Those are not compared with what the other has started by
    the time that they are written.

    The native core has the same in C++.

    Args:
        mine: this member's words for the other.
        find_theirs: finds the other's words for this member, or None as long as they are not there.
        is_current: whether the other's words are still this group's.
        is_alive: whether the other may read or write more.
        publish_later: lets somebody ``publish`` now and then until nothing waits.
        num_entries: how many of one member can be ahead of the other.
    """

    def __init__(
        self,
        mine: memoryview,
        find_theirs: Callable[[], memoryview | None],
        is_current: Callable[[], bool],
        is_alive: Callable[[], bool],
        publish_later: Callable[[], None],
        num_entries: int,
    ) -> None:
        self._mine = mine
        self._find_theirs = find_theirs
        self._is_current = is_current
        self._is_alive = is_alive
        self._publish_later = publish_later
        self._num_entries = num_entries
        self._theirs: memoryview | None = None
        self._num_mine = 0
        self._num_read = 0
        self._room_until = num_entries
        self._counts: dict[int, int] = {}
        self._ahead: dict[int, dict[int, int]] = {}
        self._latest: dict[int, int] = {}
        self._backlog: deque[tuple[int, int, int]] = deque()
        self._loose: set[int] = set()
        self._has_gaps = False

    def note(self, kind: int, header: int) -> int:
        """Note one transfer; returns its number where its counterpart is there and differs, else 0.

        Args:
            kind: its tag, times two, and one more for a receive.
            header: its fingerprint.
        """
        number = self._counts.get(kind, 0) + 1
        self._write(kind, number, header)
        # Read before the count: what comes for an earlier number was compared over there.
        if self._theirs is None or self._theirs[_WRITTEN] != self._num_read:
            self._read()
        self._counts[kind] = number
        ahead = self._ahead.get(kind ^ 1)
        if not ahead or ahead.pop(number, header) == header:
            return 0
        if self._has_gaps or kind >> 1 in self._loose:
            return 0
        return number if self._is_current() else 0

    def has_sent(self, tag: int) -> bool:
        """Whether the other has noted more sends under ``tag`` than this member has receives."""
        if self._theirs is None or self._theirs[_WRITTEN] != self._num_read:
            self._read()
        return self._latest.get(tag << 1, 0) > self._counts.get(tag << 1 | 1, 0)

    def sees_sends(self, tag: int) -> bool:
        """Whether all that the other has sent under ``tag`` is known here."""
        self._read()
        return not self._has_gaps and tag not in self._loose

    def note_any(self, tag: int) -> None:
        """Note a receive whose sender is never known."""
        if tag not in self._loose:
            self._loose.add(tag)
            self._write(tag << 1 | 1, 0, 0)

    @property
    def num_waiting(self) -> int:
        """How many entries wait for room."""
        return len(self._backlog)

    def publish(self) -> bool:
        """Write what has waited, as far as there is room; returns whether all of it is written."""
        if self._backlog and not self._is_alive():
            self._backlog.clear()  # nobody will read it
        self._drain()
        return not self._backlog

    def _drain(self) -> None:
        while self._backlog and self._has_room():
            self._put(*self._backlog.popleft())

    def _write(self, kind: int, number: int, header: int) -> None:
        self._drain()
        if not self._backlog and self._has_room():
            self._put(kind, number, header)
        else:
            self._backlog.append((kind, number, header))
            self._publish_later()

    def _has_room(self) -> bool:
        if self._num_mine < self._room_until:
            return True  # the common case
        theirs = self._look()
        if theirs is None:
            return True  # who cannot be read may not read either
        self._room_until = theirs[_READ] + self._num_entries
        return self._num_mine < self._room_until

    def _put(self, kind: int, number: int, header: int) -> None:
        entry = self._num_mine
        place = _FIRST + 2 * (entry % self._num_entries)
        name = kind << 32 | number & _LOW
        self._mine[place] = name
        self._mine[place + 1] = _seal(entry, name) << 32 | header
        self._num_mine = self._mine[_WRITTEN] = entry + 1

    def _look(self) -> memoryview | None:
        if self._theirs is None:
            self._theirs = self._find_theirs()
        return self._theirs

    def _read(self) -> None:
        theirs = self._look()
        if theirs is None:
            return
        written = theirs[_WRITTEN]
        if written - self._num_read > self._num_entries:
            self._has_gaps = True
            self._num_read = written - self._num_entries
        for entry in range(self._num_read, written):
            place = _FIRST + 2 * (entry % self._num_entries)
            name, word = theirs[place], theirs[place + 1]
            if word >> 32 == _seal(entry, name):
                self._take(name >> 32, name & _LOW, word & _LOW)
            elif theirs[_WRITTEN] - entry >= self._num_entries:  # overwritten meanwhile
                self._has_gaps = True
            else:  # not all of it has arrived yet
                written = entry
                break
        self._num_read = self._mine[_READ] = written

    def _take(self, kind: int, number: int, header: int) -> None:
        if number == 0:
            self._loose.add(kind >> 1)
            return
        if not kind & 1:
            self._latest[kind] = number  # which tells of all before it under its tag
        if number > self._counts.get(kind ^ 1, 0):
            self._ahead.setdefault(kind, {})[number] = header


def _seal(entry: int, name: int) -> int:
    """A number of 32 bits; not 0 for an entry that has not arrived."""
    mixed = ((entry + 1) * 0x9E3779B97F4A7C15 ^ name) * 0xD6E8FEB86659FD93
    return (mixed & _ALL) >> 32


NewLog: TypeAlias = Callable[..., MessageLog]
"""``MessageLog``, or what has its arguments and methods."""

"""Header tables: in shared words the members of a group on one host compare their calls.

For each collective a member writes one word into its own table, the call's number and a fingerprint
of collective, dtype, count, op and root, and then reads the others' words for the same call. Of two
members whose calls differ the later one sees it, before it has sent anything. No member waits for
another, so that asynchronous calls still overlap. Where members may differ in how much they send
(uneven collectives), they also write how much they send to and take from each other member, and
compare pair by pair. Where there is a native core, messages are compared in the order of their
tags, sender with receiver.

A write is one aligned 64-bit store of the interpreter's, long before the loads that follow it.

Drawn case: member 0 has come to call 1026, member 1 to call 300. A word is a call's number, here
before the colon, and its fingerprint; call n stands at place n % 1024 of a member's table.

    place       0         1         2         3    ...  300      ...  1023
    member 0    1024:7    1025:7    1026:7    3:7       300:7         1023:7
    member 1    -         1:7       2:7       3:7       300:9         -

Member 1 reads 300:7 as it writes 300:9, and sees that they differ. Member 0 read "-" at its call
300, and at call 1026 reads 2:7, of another number: it compares neither. At every 256th call it
looks 768 back: at 1024 it found 256:7, at 1280 it finds no 512:7, and waits. So it is at most 1023
ahead, and no unread word is lost. Call 2**32 + 5 is noted as 5, and not behind call 2**32 + 3.

    >>> from types import SimpleNamespace as Stand
    >>> num_bytes = 8 * FingerprintTable.num_words(2)
    >>> words = [memoryview(bytearray(num_bytes)).cast("Q") for _ in range(2)]
    >>> others = Stand(find=lambda n, _: words[n], is_current=lambda _: 1, is_alive=lambda _: 1)
    >>> def table(n):
    ...     mine = Stand(reserve=lambda *_: words[n], release=id)
    ...     return FingerprintTable(mine, 1, (0, 0), n, others)
    >>> table_0, table_1 = table(0), table(1)
    >>> member_0 = [table_0.enter(call, 7) for call in range(1, 1027)]
    >>> member_1 = [table_1.enter(call, 7) for call in range(1, 300)]
    >>> any(member_0 + member_1), table_1.enter(300, 9)
    (False, [0])
    >>> table_0.find_behind(1024, False), table_0.find_behind(1280, False), _is_behind(5, 2**32 + 3)
    (None, 1, False)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from ..runtime.deadlines import Deadline, Timer, wait_until
from .shared_flags import Regions, SharedFlags

WINDOW = 1024
"""How many collectives a member may be ahead of another."""
CHECK_EVERY = 256
"""At every how many collectives to look whether a member is that far behind."""
_UNEVEN_WINDOW = 64
_NUM_ENTRIES = 128  # of messages, that one member can note ahead of another
_MESSAGE_WORDS = 2 + 2 * _NUM_ENTRIES  # for one other member, laid out as in MessageLog
_PATIENT_LOOKS = 64  # for a member's words that are not there; then only every so many calls
_REORDERING_S = 0.001
_SHORT_PAUSE_S = 0.001
_PUBLISH_S = 0.001
_LOW = 0xFFFFFFFF


class FingerprintTable:
    """A member's part in the headers that a group's members show each other.

    Args:
        words: this process's shared words, in which this member's own lie.
        key: of their region there.
        hosts: the host of each member, as a number; those on other hosts are not compared.
        member: its place in the group.
        regions: the words of the other members.
        new_log: makes the native core's log of messages between this member and another; without
            it messages are not compared.

    Raises:
        MemoryError: there is no room for them.
    """

    def __init__(
        self,
        words: SharedFlags,
        key: int,
        hosts: Sequence[int],
        member: int,
        regions: Regions,
        new_log: Callable[..., Any] | None = None,
    ) -> None:
        size = len(hosts)
        others = [it for it in range(size) if it != member and hosts[it] == hosts[member]]
        self._mine = words.reserve(key, self.num_words(size))
        self._release = partial(words.release, key)
        self._member = member
        self._size = size
        self._regions = regions
        self._num_looks = 0
        self._uneven_words = 1 + 2 * size
        self._missing = others
        self._views: list[tuple[int, memoryview]] = []
        self._sees_all = len(others) == size - 1
        self._messages: dict[int, Any] = {}
        if new_log is not None:
            for peer in others:
                self._messages[peer] = new_log(
                    self.message_words(self._mine, peer),
                    partial(self._find_messages_of, peer),
                    partial(regions.is_current, peer),
                    partial(regions.is_alive, peer),
                    self._publish_later,
                    _NUM_ENTRIES,
                )
        self._publisher: Timer | None = None
        self._finding = threading.Lock()  # several threads may call collectives at the same time
        self._messages_lock = threading.Lock()  # the thread of timers uses them, too

    @classmethod
    def reserve(
        cls, words: SharedFlags | None, key: int, hosts: Sequence[int], member: int, *more: Any
    ) -> FingerprintTable | None:
        """Return a table, its arguments the class's; None without room or others on this host."""
        if words is not None and hosts.count(hosts[member]) > 1:
            with suppress(MemoryError):
                return cls(words, key, hosts, member, *more)
        return None

    @staticmethod
    def num_words(size: int) -> int:
        """Return the number of words on which a member of a group of ``size`` writes."""
        return WINDOW + _UNEVEN_WINDOW * (1 + 2 * size) + size * _MESSAGE_WORDS + 1

    def for_core(self, words: Callable[..., Any], make: Callable[..., Any]) -> Any:
        """Return a native object that does ``enter`` itself once all members' words are found.

        Args:
            words, make: the native classes of a member's words, and of that object.
        """
        return make(
            self,
            words(self._mine),
            self._missing,
            self._views,
            self._messages,
            window=WINDOW,
            check_every=CHECK_EVERY,
            uneven_window=_UNEVEN_WINDOW,
        )

    def close(self) -> None:
        """Free this member's words and drop the others'; later calls are not compared."""
        with self._messages_lock:
            self._missing.clear()
            self._views.clear()
            self._messages.clear()
        self._release()

    def sees_all(self) -> bool:
        """Return whether this process has found all members' shared words, to compare all calls."""
        if self._missing:
            self._find_missing()
        return self._sees_all and not self._missing

    def leave(self) -> None:
        """Announce to the others that this process exits normally."""
        self._mine[self._left_word] = 1

    def enter(
        self,
        sequence: int,
        header: int,
        sent: Sequence[int] = (),
        taken: Sequence[int] = (),
    ) -> list[int]:
        """Write the header of call ``sequence``; return the members whose header there differs.

        Args:
            sequence: the call's number, from 1.
            header: its fingerprint.
            sent, taken: how much goes to and comes from each member, for a collective whose members
                may differ in that.
        """
        if self._missing:
            self._find_missing()
        if sent:
            self._write_uneven(sequence, sent, taken)
        word = (sequence & _LOW) << 32 | header
        place = sequence % WINDOW
        self._mine[place] = word
        return self._differing(sequence, word, sent, taken)

    def look_again(self, sequence: int) -> list[int] | None:
        """Return the members whose call differs from this member's, None while some are behind."""
        # It must be called before the words of that call are overwritten.
        place = sequence % WINDOW
        word = self._mine[place]
        if word >> 32 != sequence & _LOW:
            return None
        if self._missing:
            self._find_missing()
        sent: Sequence[int] = ()
        taken: Sequence[int] = ()
        start = self._uneven_start(sequence)
        if self._mine[start] == sequence:
            sizes = self._mine[start + 1 : start + self._uneven_words].tolist()
            sent, taken = sizes[: self._size], sizes[self._size :]
        # In this order: one that comes in between is compared at the next look.
        is_one_behind = any(_is_behind(view[place] >> 32, sequence) for _, view in self._views)
        differing = self._differing(sequence, word, sent, taken)
        return None if not differing and (is_one_behind or self._missing) else differing

    def _differing(
        self, sequence: int, word: int, sent: Sequence[int], taken: Sequence[int]
    ) -> list[int]:
        place = sequence % WINDOW
        differing = []
        for member, view in self._views:
            theirs = view[place]
            if theirs == word:
                if sent and not self._fits(sequence, member, view, sent, taken):
                    differing.append(member)
            elif theirs >> 32 == word >> 32 and self._regions.is_current(member):
                differing.append(member)
        return differing

    def find_behind(self, sequence: int, is_uneven: bool) -> int | None:
        """Return a member that still needs words that call ``sequence`` overwrites, or None.

        Args:
            is_uneven: whether members may differ in sizes, of which few calls are kept.
        """
        # It is called before every uneven call, and before every ``CHECK_EVERY``-th of the others;
        # as long as there is such a member the call has to wait.
        window = _UNEVEN_WINDOW - 1 if is_uneven else WINDOW - CHECK_EVERY
        reached = sequence - window
        if reached <= 0:
            return None
        if self._missing:
            self._find_missing()
        for member, view in self._views:
            if _is_behind(view[reached % WINDOW] >> 32, reached) and self._regions.is_alive(member):
                return member
        return None

    def wait_for_the_slowest(
        self, sequence: int, is_uneven: bool, timeout: timedelta, check: Callable[[], object]
    ) -> int | None:
        """Wait until call ``sequence`` overwrites no needed words; return a late member or None.

        Args:
            check: called now and then; it may raise to end the wait.
            is_uneven: whether members may differ in sizes, of which few calls are kept.
        """
        if self.find_behind(sequence, is_uneven) is None:  # by far the most frequent
            return None
        find_behind = partial(self.find_behind, sequence, is_uneven)
        limit = Deadline(timeout)
        wait_until(lambda: find_behind() is None, limit, check, longest_pause_s=_SHORT_PAUSE_S)
        return find_behind()

    def wait_for_all(
        self, sequence: int, timeout: timedelta, check: Callable[[], object]
    ) -> list[int] | None:
        """Wait for all members in call ``sequence``; return those that differ, None if late."""
        found: list[list[int]] = []

        def have_come() -> bool:
            differing = self.look_again(sequence)
            if differing is not None:
                found.append(differing)
            return bool(found)

        wait_until(have_come, Deadline(timeout), check, longest_pause_s=_SHORT_PAUSE_S)
        return found[0] if found else None

    def note(self, peer: int, tag: int, header: int, *, is_send: bool) -> int | None:
        """Note a message's fingerprint ``header``; return its number if the peer's differs."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            log = self._messages.get(peer)
            kind = tag << 1 | (not is_send)
            return None if log is None else log.note(kind, header) or None

    def recv_any(self, tag: int) -> None:
        """Note a receive from any member; messages under ``tag`` are compared no more."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            for log in self._messages.values():
                log.note_any(tag)

    def message_words(self, words: memoryview, reader: int) -> memoryview:
        """Return the part of a member's ``words`` for its messages with member ``reader``."""
        start = WINDOW + _UNEVEN_WINDOW * self._uneven_words + reader * _MESSAGE_WORDS
        return words[start : start + _MESSAGE_WORDS]

    def _find_messages_of(self, peer: int) -> memoryview | None:
        """Return a peer's words of its messages with this member, if they have been found."""
        view = dict(self._views).get(peer)
        return None if view is None else self.message_words(view, self._member)

    def _publish_later(self) -> None:
        """Write soon the message headers that found no room, once peers have read older headers."""
        if self._publisher is None:
            with suppress(RuntimeError):  # no thread can start now: the next message tries again
                self._publisher = Timer(_PUBLISH_S, self._publish)

    def _publish(self) -> None:
        with self._messages_lock:
            self._publisher = None  # first: native callers note without this lock
            if [log for log in self._messages.values() if not log.publish()]:
                self._publish_later()

    @property
    def _left_word(self) -> int:
        return self.num_words(self._size) - 1

    def _find_missing(self) -> None:
        with self._finding:
            self._num_looks += 1
            if self._num_looks > _PATIENT_LOOKS and self._num_looks % _PATIENT_LOOKS:
                return
            for member in list(self._missing):
                view = self._regions.find(member, self.num_words(self._size))
                if view is not None:
                    self._missing.remove(member)
                    self._views.append((member, view))

    def _write_uneven(self, sequence: int, sent: Sequence[int], taken: Sequence[int]) -> None:
        start = self._uneven_start(sequence)
        for place, value in enumerate((*sent, *taken), start + 1):
            self._mine[place] = value
        self._mine[start] = sequence

    def _fits(
        self,
        sequence: int,
        member: int,
        view: memoryview,
        sent: Sequence[int],
        taken: Sequence[int],
    ) -> bool:
        start = self._uneven_start(sequence)
        for is_last_look in (False, True):
            sent_to_me = view[start + 1 + self._member]
            taken_from_me = view[start + 1 + self._size + self._member]
            if view[start] != sequence:  # overwritten
                return True
            if sent_to_me == taken[member] and taken_from_me == sent[member]:
                return True
            if not is_last_look:  # words may arrive in another order than they were written in
                time.sleep(_REORDERING_S)
        return False

    def _uneven_start(self, sequence: int) -> int:
        return WINDOW + sequence % _UNEVEN_WINDOW * self._uneven_words


def _is_behind(noted: int, sequence: int) -> bool:
    """Return whether the call number ``noted``, kept in 32 bits, is below ``sequence``."""
    return noted - sequence & _LOW >= 1 << 31

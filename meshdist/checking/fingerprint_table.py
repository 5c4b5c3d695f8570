"""Compare the calls of ranks on one host through fingerprint tables in shared memory.

For each collective a rank writes a word to its table: the call's number and a fingerprint of
collective, dtype, count, op and root. Then it reads the other ranks' words for this call. If two
calls differ, the later rank detects it before it sends anything. No rank waits for another, so
asynchronous calls overlap. In uneven collectives, ranks also compare the sizes sent and received,
pair by pair. With a native core, sender and receiver compare messages in tag order.

A write is one aligned 64-bit store by the interpreter, long before the loads that follow it.

Worked example: member 0 is in call 1026, member 1 in call 300. A word is a call's number, a colon
and its fingerprint. The word of call n has index n % 1024.

    index       0         1         2         3    ...  300      ...  1023
    member 0    1024:7    1025:7    1026:7    3:7       300:7         1023:7
    member 1    -         1:7       2:7       3:7       300:9         -

Member 1 writes 300:9, reads 300:7 and detects the mismatch. Member 0 read "-" in call 300 and reads
2:7, another number, in call 1026, so it compares neither. In every 256th call it looks 768 calls
back: in 1024 it found 256:7, in 1280 it finds no 512:7 and waits, so it is at most 1023 ahead.

    >>> from types import SimpleNamespace as Stand
    >>> size = 8 * FingerprintTable.num_words(2)
    >>> words = [memoryview(bytearray(size)).cast("Q") for _ in range(2)]
    >>> others = Stand(find=lambda n, _: words[n], is_current=lambda _: 1, is_alive=lambda _: 1)
    >>> own = [Stand(reserve=lambda *_, n=n: words[n], release=id) for n in range(2)]
    >>> table_0, table_1 = (FingerprintTable(own[n], 1, (0, 0), n, others) for n in range(2))
    >>> member_0 = [table_0.enter(call, 7) for call in range(1, 1027)]
    >>> member_1 = [table_1.enter(call, 7) for call in range(1, 300)]
    >>> any(member_0 + member_1), table_1.enter(300, 9)
    (False, [0])
    >>> table_0.find_lagging(1024, False), table_0.find_lagging(1280, False)
    (None, 1)
    >>> _is_lagging(5, 2**32 + 3)
    False
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
"""The number of collectives by which a rank can be ahead of another."""
CHECK_EVERY = 256
"""The interval, in collectives, of checks for a rank that is that far behind."""
_UNEVEN_WINDOW = 64
_NUM_ENTRIES = 128  # of messages, that one member can note ahead of another
_MESSAGE_WORDS = 2 + 2 * _NUM_ENTRIES  # for one other member, laid out as in MessageLog
_PATIENT_LOOKS = 64  # for a member's words that are not there; then only every so many calls
_REORDERING_S = 0.001
_SHORT_PAUSE_S = 0.001
_PUBLISH_S = 0.001
_LOW = 0xFFFFFFFF


class FingerprintTable:
    """The fingerprints that a rank publishes and compares with other ranks on its host.

    Args:
        key: the key of this rank's region in ``words``.
        hosts: each rank's host number; ranks on other hosts are not compared.
        member: this rank's group rank.
        new_log: creates the native log of messages with another rank; without it, messages are not
            compared.

    Raises:
        MemoryError: the shared words are full.
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
        """Return a table, or None if the words are full or no other rank is on this host."""
        if words is not None and hosts.count(hosts[member]) > 1:
            with suppress(MemoryError):
                return cls(words, key, hosts, member, *more)
        return None

    @staticmethod
    def num_words(size: int) -> int:
        """Return the number of words that each rank of a group of ``size`` writes."""
        return WINDOW + _UNEVEN_WINDOW * (1 + 2 * size) + size * _MESSAGE_WORDS + 1

    def for_core(self, words: Callable[..., Any], make: Callable[..., Any]) -> Any:
        """Return a native object that runs ``enter`` once all ranks' words are found.

        Args:
            words, make: the native classes of the words, and of that object.
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
        """Free this rank's words and stop comparing calls."""
        with self._messages_lock:
            self._missing.clear()
            self._views.clear()
            self._messages.clear()
        self._release()

    def sees_all(self) -> bool:
        """Return whether this process has found all ranks' words."""
        if self._missing:
            self._find_missing()
        return self._sees_all and not self._missing

    def leave(self) -> None:
        """Announce that this process exits normally."""
        self._mine[self._exit_word] = 1

    def enter(
        self,
        sequence: int,
        fingerprint: int,
        sent: Sequence[int] = (),
        received: Sequence[int] = (),
    ) -> list[int]:
        """Write the fingerprint of call ``sequence``; return the ranks with another fingerprint.

        Args:
            sequence: the call's number, from 1.
            fingerprint: its fingerprint.
            sent, received: the sizes sent to, and received from, each rank in an uneven collective.
        """
        if self._missing:
            self._find_missing()
        if sent:
            self._write_uneven(sequence, sent, received)
        word = (sequence & _LOW) << 32 | fingerprint
        slot = sequence % WINDOW
        self._mine[slot] = word
        return self._differing(sequence, word, sent, received)

    def look_again(self, sequence: int) -> list[int] | None:
        """Return the ranks whose call differs, None while some have not called."""
        # Call it before the words of that call are overwritten.
        slot = sequence % WINDOW
        word = self._mine[slot]
        if word >> 32 != sequence & _LOW:
            return None
        if self._missing:
            self._find_missing()
        sent: Sequence[int] = ()
        received: Sequence[int] = ()
        start = self._uneven_start(sequence)
        if self._mine[start] == sequence:
            sizes = self._mine[start + 1 : start + self._uneven_words].tolist()
            sent, received = sizes[: self._size], sizes[self._size :]
        # In this order, a word that arrives in between is compared at the next look.
        is_one_lagging = any(_is_lagging(view[slot] >> 32, sequence) for _, view in self._views)
        differing = self._differing(sequence, word, sent, received)
        return None if not differing and (is_one_lagging or self._missing) else differing

    def _differing(
        self, sequence: int, word: int, sent: Sequence[int], received: Sequence[int]
    ) -> list[int]:
        slot = sequence % WINDOW
        differing = []
        for member, view in self._views:
            theirs = view[slot]
            if theirs == word:
                if sent and not self._fits(sequence, member, view, sent, received):
                    differing.append(member)
            elif theirs >> 32 == word >> 32 and self._regions.is_current(member):
                differing.append(member)
        return differing

    def find_lagging(self, sequence: int, is_uneven: bool) -> int | None:
        """Return a rank that still needs words that call ``sequence`` overwrites, or None.

        Args:
            is_uneven: few of these calls are kept.
        """
        # Called before every uneven call, and before every ``CHECK_EVERY``-th other call. The call
        # has to wait while such a rank exists.
        window = _UNEVEN_WINDOW - 1 if is_uneven else WINDOW - CHECK_EVERY
        reached = sequence - window
        if reached <= 0:
            return None
        if self._missing:
            self._find_missing()
        for member, view in self._views:
            if _is_lagging(view[reached % WINDOW] >> 32, reached) and self._regions.is_alive(
                member
            ):
                return member
        return None

    def wait_for_the_slowest(
        self, sequence: int, is_uneven: bool, timeout: timedelta, check: Callable[[], object]
    ) -> int | None:
        """Wait until call ``sequence`` overwrites no needed words; return a late rank or None.

        Args:
            check: called regularly; it may raise to end the wait.
        """
        if self.find_lagging(sequence, is_uneven) is None:  # the common case
            return None
        find_lagging = partial(self.find_lagging, sequence, is_uneven)
        limit = Deadline(timeout)
        wait_until(lambda: find_lagging() is None, limit, check, longest_pause_s=_SHORT_PAUSE_S)
        return find_lagging()

    def wait_for_all(
        self, sequence: int, timeout: timedelta, check: Callable[[], object]
    ) -> list[int] | None:
        """Wait for all ranks in call ``sequence``; return mismatched ranks, None on timeout."""
        found: list[list[int]] = []

        def have_arrived() -> bool:
            differing = self.look_again(sequence)
            if differing is not None:
                found.append(differing)
            return bool(found)

        wait_until(have_arrived, Deadline(timeout), check, longest_pause_s=_SHORT_PAUSE_S)
        return found[0] if found else None

    def note(self, peer: int, tag: int, fingerprint: int, *, is_send: bool) -> int | None:
        """Record a message's fingerprint; return its number if the peer's differs."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            log = self._messages.get(peer)
            kind = tag << 1 | (not is_send)
            return None if log is None else log.note(kind, fingerprint) or None

    def recv_any(self, tag: int) -> None:
        """Record a receive from any rank; stop comparing messages with ``tag``."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            for log in self._messages.values():
                log.note_any(tag)

    def message_words(self, words: memoryview, reader: int) -> memoryview:
        """Return the slice of a table for the messages of its owner to and from ``reader``.

        Args:
            words: the table of this rank or of another rank.
            reader: the group rank that compares them.
        """
        start = WINDOW + _UNEVEN_WINDOW * self._uneven_words + reader * _MESSAGE_WORDS
        return words[start : start + _MESSAGE_WORDS]

    def _find_messages_of(self, peer: int) -> memoryview | None:
        """Return the slice of the peer's table for messages with this rank; None if not found."""
        view = dict(self._views).get(peer)
        return None if view is None else self.message_words(view, self._member)

    def _publish_later(self) -> None:
        """Retry soon to write message fingerprints that did not fit."""
        if self._publisher is None:
            with suppress(RuntimeError):  # no thread can start now: the next message tries again
                self._publisher = Timer(_PUBLISH_S, self._publish)

    def _publish(self) -> None:
        with self._messages_lock:
            self._publisher = None  # first: native callers note without this lock
            if [log for log in self._messages.values() if not log.publish()]:
                self._publish_later()

    @property
    def _exit_word(self) -> int:
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

    def _write_uneven(self, sequence: int, sent: Sequence[int], received: Sequence[int]) -> None:
        start = self._uneven_start(sequence)
        for index, value in enumerate((*sent, *received), start + 1):
            self._mine[index] = value
        self._mine[start] = sequence

    def _fits(
        self,
        sequence: int,
        member: int,
        view: memoryview,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> bool:
        start = self._uneven_start(sequence)
        for is_last_look in (False, True):
            sent_to_me = view[start + 1 + self._member]
            received_from_me = view[start + 1 + self._size + self._member]
            if view[start] != sequence:  # overwritten
                return True
            if sent_to_me == received[member] and received_from_me == sent[member]:
                return True
            if not is_last_look:  # words may arrive in another order than they were written
                time.sleep(_REORDERING_S)
        return False

    def _uneven_start(self, sequence: int) -> int:
        return WINDOW + sequence % _UNEVEN_WINDOW * self._uneven_words


def _is_lagging(noted: int, sequence: int) -> bool:
    """Return whether the call number ``noted``, stored in 32 bits, is below ``sequence``."""
    return noted - sequence & _LOW >= 1 << 31

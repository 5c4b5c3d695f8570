"""What the members of one group on one host tell each other before each call: headers.

Every member writes one word per collective on its own board: the call's number and a fingerprint
of verb, dtype, count, op and root. Then it looks at the others' words for the same call. Of two
members whose calls differ the later one sees it, before it has sent anything; nobody waits for
anybody, so that asynchronous calls overlap as ever. Where members may differ in how much they send
(uneven verbs), they write beside it what they send to and take from each other member, and compare
pair by pair. Messages are compared in the order of their tags, sender with receiver; a receive from
any member looks for who has noted a message for it, and is from then on one from that member.

A write is one aligned 64-bit store of the interpreter's, far apart from the loads that follow it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .message_log import NUM_ENTRIES, NUM_WORDS, MessageLog, NewLog

__all__ = ["CHECK_EVERY", "WINDOW", "Ledger", "fingerprint"]

WINDOW = 1024
"""How many collectives a member may be ahead of another."""
CHECK_EVERY = 256
"""At every how many collectives to look whether a member is that far behind."""
_UNEVEN_WINDOW = 64
_PATIENT_LOOKS = 64  # for a member's words that are not there; then now and then only
_SETTLE_S = 0.001
_PUBLISH_S = 0.001
_LONGEST_PUBLISH_S = 0.02
_LOW = 0xFFFFFFFF

FindRegion = Callable[[int, int], "memoryview | None"]


def fingerprint(*values: int) -> int:
    """A number of 32 bits, equal for equal values on every process that runs this Python."""
    return hash(values) & _LOW


class Ledger:
    """One member's part in one group's headers.

    Its words are: one per collective, tables of sizes for uneven ones, a log of messages per other
    member, and one that tells that the member has left in good order.

    Args:
        region: this member's own words, ``num_words(size)`` of them.
        member: its place in the group.
        others: the places of the members on this host, without itself.
        size: of the group.
        find_region: finds another member's words (its place, how many words), or None as long as
            they are not there.
        is_current: whether a member's words are still this group's.
        is_alive: whether a member may write more; by default as long as they are.
        new_log: makes what notes the messages between this member and another one.
    """

    def __init__(
        self,
        region: memoryview,
        member: int,
        others: Sequence[int],
        size: int,
        find_region: FindRegion,
        is_current: Callable[[int], bool],
        is_alive: Callable[[int], bool] | None = None,
        new_log: NewLog = MessageLog,
    ) -> None:
        self._mine = region
        self._member = member
        self._size = size
        self._find_region = find_region
        self._is_current = is_current
        self._is_alive = is_alive or is_current
        self._num_looks = 0
        self._uneven_words = 1 + 2 * size
        self._missing = list(others)
        self._views: list[tuple[int, memoryview]] = []
        self._reaches_all = len(self._missing) == size - 1
        self._messages = {
            peer: new_log(
                self.message_words(self._mine, peer),
                partial(self._find_messages_of, peer),
                partial(self._is_current, peer),
                partial(self._is_alive, peer),
                self._publish_later,
                NUM_ENTRIES,
            )
            for peer in others
        }
        self._turns = list(others)
        self._publisher: threading.Thread | None = None
        self._finding = threading.Lock()  # several threads may call verbs at the same time
        self._messages_lock = threading.Lock()  # another thread may look for who has sent

    @staticmethod
    def num_words(size: int) -> int:
        """How many words a member of a group of ``size`` writes on."""
        return WINDOW + _UNEVEN_WINDOW * (1 + 2 * size) + size * NUM_WORDS + 1

    def insides(self) -> dict[str, Any]:
        """What a native caller needs to do what ``enter`` does, as long as nobody is missing."""
        return {
            "ledger": self,
            "words": self._mine,
            "missing": self._missing,
            "views": self._views,
            "window": WINDOW,
            "check_every": CHECK_EVERY,
            "uneven_window": _UNEVEN_WINDOW,
            "logs": self._messages,
        }

    def close(self) -> None:
        """Let go of the others' words; compare nothing any more."""
        with self._messages_lock:
            self._missing.clear()
            self._views.clear()
            self._messages.clear()

    def leave(self) -> None:
        """Tell the others that this process comes to its end in good order."""
        self._mine[self._left_word] = 1

    def enter(
        self, sequence: int, header: int, sent: Sequence[int] = (), taken: Sequence[int] = ()
    ) -> list[int]:
        """Write the header of call ``sequence``; return the members there that differ from it.

        Args:
            sequence: the call's number, from 1.
            header: its fingerprint.
            sent, taken: how much goes to and comes from each member, for a verb whose members may
                differ in that.
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
        """The members whose call ``sequence`` differs from this member's, now that more have come.

        None where none does and one is still to come to it, this member included. To be asked
        before the words of that call are overwritten.
        """
        place = sequence % WINDOW
        word = self._mine[place]
        if word >> 32 != sequence & _LOW:
            return None
        sent: Sequence[int] = ()
        taken: Sequence[int] = ()
        start = self._uneven_start(sequence)
        if self._mine[start] == sequence:
            sizes = self._mine[start + 1 : start + self._uneven_words].tolist()
            sent, taken = sizes[: self._size], sizes[self._size :]
        differing = self._differing(sequence, word, sent, taken)
        if not differing and any(
            _is_behind(view[place] >> 32, sequence) for _, view in self._views
        ):
            return None
        return differing

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
            elif theirs >> 32 == word >> 32 and self._is_current(member):
                differing.append(member)
        return differing

    def find_behind(self, sequence: int, is_uneven: bool) -> int | None:
        """A member so far behind that call ``sequence`` would overwrite what it has not seen.

        To be asked before every uneven call and every ``CHECK_EVERY``-th other one; as long as
        there is such a member the call has to wait.
        """
        window = _UNEVEN_WINDOW - 1 if is_uneven else WINDOW - CHECK_EVERY
        reached = sequence - window
        if reached <= 0:
            return None
        if self._missing:
            self._find_missing()
        for member, view in self._views:
            if _is_behind(view[reached % WINDOW] >> 32, reached) and self._is_alive(member):
                return member
        return None

    def send(self, peer: int, tag: int, header: int) -> int | None:
        """Note a message to ``peer``; returns its number where the receive for it differs."""
        return self._note(peer, tag << 1, header)

    def recv(self, peer: int, tag: int, header: int) -> int | None:
        """Note a receive from ``peer``; returns its number where the message differs."""
        return self._note(peer, tag << 1 | 1, header)

    def can_find_sender(self, tag: int) -> bool:
        """Whether ``find_sender`` sees every message under ``tag`` that a member sends."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            return (
                self._reaches_all
                and not self._missing
                and all(log.sees_sends(tag) for log in self._messages.values())
            )

    def find_sender(self, tag: int) -> int | None:
        """A member that has noted a message under ``tag`` for which there is no receive yet.

        Members take turns, where several have. For tags for which ``can_find_sender`` was so.
        """
        with self._messages_lock:
            for place, peer in enumerate(self._turns):
                log = self._messages.get(peer)
                if log is not None and log.has_sent(tag):
                    self._turns.append(self._turns.pop(place))
                    return peer
        return None

    def find_lost(self) -> int | None:
        """A member whose process has ended without saying so; or any, where nobody else is left."""
        gone = [member for member, _ in tuple(self._views) if not self._is_alive(member)]
        for member, view in tuple(self._views):
            # Asked in this order, since who closes the group says so before its words go.
            if member in gone and self._is_current(member) and not view[self._left_word]:
                return member
        return gone[0] if gone and len(gone) == self._size - 1 else None

    def recv_any(self, tag: int) -> None:
        """Note a receive whose sender will not be known: its tag is compared no more."""
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            for log in self._messages.values():
                log.note_any(tag)

    def message_words(self, words: memoryview, reader: int) -> memoryview:
        """Where in ``words``, a member's, it notes its messages with member ``reader``."""
        start = WINDOW + _UNEVEN_WINDOW * self._uneven_words + reader * NUM_WORDS
        return words[start : start + NUM_WORDS]

    def publish(self) -> bool:
        """Write notes of messages that had no room before; returns whether none is left."""
        with self._messages_lock:
            waiting = [log for log in self._messages.values() if not log.publish()]
        return not waiting

    def _find_messages_of(self, peer: int) -> memoryview | None:
        """Where another member notes its messages with this one, if its words have been found."""
        for member, view in self._views:
            if member == peer:
                return self.message_words(view, self._member)
        return None

    def _publish_later(self) -> None:
        """Let a thread publish, as soon as others have read what is there."""
        if self._publisher is None:
            publisher = threading.Thread(
                target=self._publish_all, name="meshdist-ledger", daemon=True
            )
            self._publisher = publisher
            try:
                publisher.start()
            except RuntimeError:  # no thread to be had now: the next message tries again
                self._publisher = None

    def _publish_all(self) -> None:
        pause, num_waiting = _PUBLISH_S, 0
        while True:
            time.sleep(pause)
            with self._messages_lock:
                self._publisher = None  # first: native callers note without this lock
                waiting = [log for log in self._messages.values() if not log.publish()]
                if not waiting:
                    return
                self._publisher = threading.current_thread()
            num_before, num_waiting = num_waiting, sum(log.num_waiting for log in waiting)
            has_moved = num_waiting < num_before
            pause = _PUBLISH_S if has_moved else min(2 * pause, _LONGEST_PUBLISH_S)

    @property
    def _left_word(self) -> int:
        return self.num_words(self._size) - 1

    def _note(self, peer: int, kind: int, header: int) -> int | None:
        with self._messages_lock:
            if self._missing:
                self._find_missing()
            log = self._messages.get(peer)
            return None if log is None else log.note(kind, header) or None

    def _find_missing(self) -> None:
        with self._finding:
            self._num_looks += 1
            if self._num_looks > _PATIENT_LOOKS and self._num_looks % _PATIENT_LOOKS:
                return
            for member in list(self._missing):
                view = self._find_region(member, self.num_words(self._size))
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
        for is_settled in (False, True):
            sent_to_me = view[start + 1 + self._member]
            taken_from_me = view[start + 1 + self._size + self._member]
            if view[start] != sequence:  # overwritten
                return True
            if sent_to_me == taken[member] and taken_from_me == sent[member]:
                return True
            if not is_settled:  # words may arrive in another order than they were written in
                time.sleep(_SETTLE_S)
        return False

    def _uneven_start(self, sequence: int) -> int:
        return WINDOW + sequence % _UNEVEN_WINDOW * self._uneven_words


def _is_behind(noted: int, sequence: int) -> bool:
    """Whether the number of a noted call, of which 32 bits are kept, is below ``sequence``."""
    return noted - sequence & _LOW >= 1 << 31

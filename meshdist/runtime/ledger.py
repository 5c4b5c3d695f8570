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
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CHECK_EVERY", "WINDOW", "Ledger", "fingerprint"]

WINDOW = 1024
"""How many collectives a member may be ahead of another."""
CHECK_EVERY = 256
"""At every how many collectives to look whether a member is that far behind."""
_UNEVEN_WINDOW = 64
_MESSAGES = 128  # of one pair that can be ahead of who reads of them
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
        self._messages = {peer: _MessageLog(self, peer) for peer in others}
        self._turns = list(others)
        self._publisher: threading.Thread | None = None
        self._finding = threading.Lock()  # several threads may call verbs at the same time
        self._messages_lock = threading.Lock()  # another thread may look for who has sent

    @staticmethod
    def num_words(size: int) -> int:
        """How many words a member of a group of ``size`` writes on."""
        return WINDOW + _UNEVEN_WINDOW * (1 + 2 * size) + size * _MessageLog.num_words + 1

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

    def view_of(self, peer: int) -> memoryview | None:
        """The words of ``peer``, if they have been found."""
        return next((view for member, view in self._views if member == peer), None)

    def message_words(self, writer: memoryview | None, reader: int) -> memoryview:
        """Where the owner of ``writer`` (None: this member) notes what it does with ``reader``."""
        words = self._mine if writer is None else writer
        start = WINDOW + _UNEVEN_WINDOW * self._uneven_words + reader * _MessageLog.num_words
        return words[start : start + _MessageLog.num_words]

    def publish(self) -> bool:
        """Write notes of messages that had no room before; returns whether none is left."""
        with self._messages_lock:
            waiting = [log for log in self._messages.values() if not log.publish()]
        return not waiting

    def publish_later(self) -> None:
        """Let a thread publish, as soon as others have read what is there; called by a log."""
        if self._publisher is None:
            self._publisher = threading.Thread(
                target=self._publish_all, name="meshdist-ledger", daemon=True
            )
            self._publisher.start()

    @property
    def member(self) -> int:
        """This member's place in the group."""
        return self._member

    def is_current(self, member: int) -> bool:
        """Whether a member's words are still this group's."""
        return self._is_current(member)

    def is_alive(self, member: int) -> bool:
        """Whether a member may read or write more."""
        return self._is_alive(member)

    def _publish_all(self) -> None:
        pause, num_waiting = _PUBLISH_S, 0
        while True:
            time.sleep(pause)
            with self._messages_lock:
                waiting = [log for log in self._messages.values() if not log.publish()]
                if not waiting:
                    self._publisher = None
                    return
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
            return None if log is None else log.note(kind, header)

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


class _MessageLog:
    """The messages between this member and one other, as both note them.

    First come two words: how many entries were written, and how many of the other's were read. An
    entry is two words: direction, tag and number; and the fingerprint under a seal that tells
    whether both are of this entry. The number counts the messages of one direction and tag, so that
    the n-th send meets the n-th receive; it is 0 for a receive whose sender is never known, after
    which messages of that tag cannot be told apart. What the other has not read is not overwritten:
    further entries wait in this process. Those are not compared with what the other has started by
    the time that they are written.
    """

    num_words = 2 + 2 * _MESSAGES

    def __init__(self, ledger: Ledger, peer: int) -> None:
        self._ledger = ledger
        self._peer = peer
        self._mine = ledger.message_words(None, peer)
        self._theirs: memoryview | None = None
        self._num_mine = 0
        self._num_read = 0
        self._room_until = _MESSAGES
        self._counts: dict[int, int] = {}
        self._ahead: dict[int, dict[int, int]] = {}
        self._latest: dict[int, int] = {}
        self._backlog: deque[tuple[int, int, int]] = deque()
        self._loose: set[int] = set()
        self._has_gaps = False

    def note(self, kind: int, header: int) -> int | None:
        """Note one transfer; returns its number where its counterpart is there and differs.

        Args:
            kind: its tag, times two, and one more for a receive.
            header: its fingerprint.
        """
        number = self._counts.get(kind, 0) + 1
        self._write(kind, number, header)
        # Read before the count: what comes for an earlier number was compared over there.
        if self._theirs is None or self._theirs[0] != self._num_read:
            self._read()
        self._counts[kind] = number
        ahead = self._ahead.get(kind ^ 1)
        if not ahead or ahead.pop(number, header) == header:
            return None
        if self._has_gaps or kind >> 1 in self._loose:
            return None
        return number if self._ledger.is_current(self._peer) else None

    def has_sent(self, tag: int) -> bool:
        """Whether the other has noted more sends under ``tag`` than this member has receives."""
        if self._theirs is None or self._theirs[0] != self._num_read:
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
        if self._backlog and not self._ledger.is_alive(self._peer):
            self._backlog.clear()  # nobody will read it
        while self._backlog and self._has_room():
            self._put(*self._backlog.popleft())
        return not self._backlog

    def _write(self, kind: int, number: int, header: int) -> None:
        if not self._backlog and self._has_room():
            self._put(kind, number, header)
        else:
            self._backlog.append((kind, number, header))
            self._ledger.publish_later()

    def _has_room(self) -> bool:
        if self._num_mine < self._room_until:
            return True  # the common case
        if self._theirs is None:
            return not self._find_theirs()  # who cannot be read may not read either
        self._room_until = self._theirs[1] + _MESSAGES
        return self._num_mine < self._room_until

    def _put(self, kind: int, number: int, header: int) -> None:
        entry = self._num_mine
        place = 2 + 2 * (entry % _MESSAGES)
        name = kind << 32 | number & _LOW
        self._mine[place] = name
        self._mine[place + 1] = fingerprint(entry, name) << 32 | header
        self._num_mine = self._mine[0] = entry + 1

    def _find_theirs(self) -> bool:
        view = self._ledger.view_of(self._peer)
        if view is not None:
            self._theirs = self._ledger.message_words(view, self._ledger.member)
        return view is not None

    def _read(self) -> None:
        if self._theirs is None and not self._find_theirs():
            return
        theirs = self._theirs
        assert theirs is not None  # it was found
        written = theirs[0]
        if written - self._num_read > _MESSAGES:
            self._has_gaps = True
            self._num_read = written - _MESSAGES
        for entry in range(self._num_read, written):
            place = 2 + 2 * (entry % _MESSAGES)
            name, word = theirs[place], theirs[place + 1]
            if word >> 32 == fingerprint(entry, name):
                self._take(name >> 32, name & _LOW, word & _LOW)
            elif theirs[0] - entry >= _MESSAGES:  # overwritten meanwhile
                self._has_gaps = True
            else:  # not all of it has arrived yet
                written = entry
                break
        self._num_read = self._mine[1] = written

    def _take(self, kind: int, number: int, header: int) -> None:
        if number == 0:
            self._loose.add(kind >> 1)
            return
        if not kind & 1:
            self._latest[kind] = number  # which tells of all before it under its tag
        if number > self._counts.get(kind ^ 1, 0):
            self._ahead.setdefault(kind, {})[number] = header

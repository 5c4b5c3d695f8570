"""Record this rank's last calls on a communicator, at little cost for each collective."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.fork_safe_locks import ForkSafeLock
from .call_sites import is_between, program_frame, stack_above
from .calls import Call, CallRecord, GroupFacts
from .debug_levels import shows_stacks

NUM_NOTES = 128
"""The default number of calls that a recorder keeps."""
FORGOTTEN = "its call is no longer known"
"""The text for an overwritten call."""

_moments = memoryview(bytearray(8)).cast("Q")  # one number, which the core also increments
_making = ForkSafeLock()
_NO_STACK: Sequence[str] = ()
_SEQUENCE, _MOMENT, _NUM_NOTES = range(3)


class Recorder:
    """The last calls of this rank on a communicator.

    Args:
        num_notes: how many to keep: the native core keeps plain calls, this object all others.
    """

    # A note has the fields of ``CallRecord``: the call, and a frame's code and position, which are
    # cheap to read. ``CallRecord`` formats them only when a message needs them.

    def __init__(self, num_notes: int = NUM_NOTES) -> None:
        self._keeps_stacks = shows_stacks()
        self.counts = memoryview(bytearray(24)).cast("Q")  # native callers also increment them
        """``sequence``, ``moment`` and ``num_notes`` in one array."""
        self._notes: list[tuple[int, tuple[Any, ...]]] = [(0, ())] * num_notes
        self._of_core: Any = None  # the native recorder, which keeps its own notes
        self._num_messages: dict[tuple[Any, ...], int] = {}

    @property
    def sequence(self) -> int:
        """Return the number of recorded collectives."""
        return self.counts[_SEQUENCE]

    @property
    def moment(self) -> int:
        """Return the last note's number among the notes of all recorders; 0 before the first."""
        return self.counts[_MOMENT]

    @property
    def num_notes(self) -> int:
        """Return the number of recorded calls, which is the last call's number."""
        return self.counts[_NUM_NOTES]

    def note(
        self,
        group: GroupFacts,
        call: Call,
        sizes: Sequence[Sequence[int]] = (),
    ) -> tuple[Any, ...]:
        """Record a call; return the record as a tuple."""
        # Collectives are numbered in the members' common sequence. Messages are numbered separately
        # for each direction, peer and tag, because only two members see them.
        counts, number = self.counts, 0
        if call.tag is None:
            counts[_SEQUENCE] += 1
        else:
            self._num_messages[call.kind] = number = self._num_messages.get(call.kind, 0) + 1
        _moments[0] += 1  # no other thread can run during this line
        counts[_MOMENT] = _moments[0]
        caller = sys._getframe(2)
        frame = program_frame(caller.f_back or caller)
        stack = stack_above(frame) if self._keeps_stacks else _NO_STACK
        fields = counts[_SEQUENCE], group, call, sizes, number
        note = (*fields, frame.f_code, frame.f_lasti, stack)
        noted = counts[_NUM_NOTES] + 1
        self._notes[noted % len(self._notes)] = noted, note
        counts[_NUM_NOTES] = noted
        return note

    def for_core(self, make: Callable[..., Any]) -> Any:
        """Return the native recorder, created by ``make``; None if stacks are kept."""
        if self._keeps_stacks:
            return None
        with _making.current:  # groups may share a communicator
            if self._of_core is None:
                self._of_core = make(
                    self.counts,
                    len(self._notes),
                    self._num_messages,
                    moments=_moments,
                    is_between=is_between,
                    no_stack=_NO_STACK,
                )
        return self._of_core

    def find_note(self, number: int | None = None) -> CallRecord | None:
        """Return the record ``number``, by default the last; None if overwritten."""
        last, size = self.counts[_NUM_NOTES], len(self._notes)
        number = last if number is None else number
        if not max(0, last - size) < number <= last:
            return None
        fields = None if self._of_core is None else self._of_core.find(number)
        if fields is None:
            noted, fields = self._notes[number % size]
            if noted != number:  # another thread is writing this note
                return None
        return CallRecord(*fields)

    def find_call(self, sequence: int) -> CallRecord | None:
        """Return the record of the collective ``sequence``; None if overwritten."""
        return self._find(lambda note: note.sequence == sequence and not note.is_message)

    def find_message(self, *message: Any) -> CallRecord | None:
        """Return a message's record by (is send, peer, tag, number); None if overwritten."""
        return self._find(lambda note: (*note.call.kind, note.number) == message)

    def text_about(self, about: dict[str, Any]) -> str | None:
        """Describe the call ``about``; ``FORGOTTEN`` if overwritten, None if not recorded.

        Args:
            about: a collective's ``sequence``, a record's number as ``note``, or a ``message``'s
                fields.
        """
        if "sequence" in about:
            note, is_noted = self.find_call(about["sequence"]), about["sequence"] <= self.sequence
        elif "note" in about:
            note, is_noted = self.find_note(about["note"]), 0 < about["note"] <= self.num_notes
        else:
            *kind, number = about["message"]
            note = self.find_message(*kind, number)
            is_noted = number <= self._num_messages.get(tuple(kind), 0)
        if note is not None:
            return note.text
        return FORGOTTEN if is_noted else None

    def _find(self, is_meant: Callable[[CallRecord], bool]) -> CallRecord | None:
        last = self.num_notes
        notes = map(self.find_note, range(max(0, last - len(self._notes)) + 1, last + 1))
        return next((note for note in notes if note is not None and is_meant(note)), None)

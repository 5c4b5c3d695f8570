"""What this rank called on one communicator, cheap enough to note at every verb."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import count
from types import FrameType
from typing import Any, TypeAlias

import torch

from ..arrays import dtype_name
from ..reduce_ops import ReduceKind, op_name
from .debug_levels import shows_stacks

__all__ = ["NUM_NOTES", "Data", "Recorder", "call_text", "is_list"]

NUM_NOTES = 128
"""How many calls a recorder remembers."""

_moments = count(1)
_NO_STACK: Sequence[str] = ()
_SEQUENCE, _MOMENT, _NUM_NOTES = range(3)
_FORGOTTEN = f"a call before the last {NUM_NOTES}"

Data: TypeAlias = "tuple[Any, ...] | None"
"""The shape and dtype of a tensor, a tuple of such for a list of tensors, or None."""

_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


class _BetweenFiles(dict[str, bool]):
    """Whether a file lies between the program and the wire: this package's and torch's do."""

    def __missing__(self, name: str) -> bool:
        self[name] = found = name.startswith(_NOT_THE_PROGRAM)
        return found


_between_files = _BetweenFiles()


class Recorder:
    """The last verbs that one rank called on one communicator.

    Noting keeps shapes, dtypes and a frame's code and position, which cost little to take; text is
    made only when somebody asks.

    Args:
        ranks: the members' global ranks, in group order.
    """

    __slots__ = ("_counts", "_keeps_stacks", "_notes", "_num_messages", "ranks")

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self._keeps_stacks = shows_stacks()
        self.ranks = ranks
        self._counts = memoryview(bytearray(24)).cast("Q")  # as a native caller counts them too
        self._notes: list[tuple[Any, ...]] = [()] * NUM_NOTES
        self._num_messages: dict[tuple[bool, int | None, int], int] = {}

    @property
    def sequence(self) -> int:
        """How many collectives were noted."""
        return self._counts[_SEQUENCE]

    @property
    def moment(self) -> int:
        """When it was called last, in terms of all recorders of the process; 0 for never."""
        return self._counts[_MOMENT]

    @property
    def num_notes(self) -> int:
        """How many calls were noted; the last one bears this number."""
        return self._counts[_NUM_NOTES]

    def note(
        self,
        group: str,
        verb: str,
        tensor: torch.Tensor | list[torch.Tensor] | None,
        op: ReduceKind | None = None,
        root: int | None = None,
        sizes: Sequence[Sequence[int]] = (),
    ) -> Data:
        """Note a collective, the next in the members' common sequence.

        Args:
            group: what messages call the group.
            verb: its name.
            tensor: whose shape and dtype tell what is communicated; a list of such, or None.
            op: the reduction, if it is one.
            root: the place of the source or destination in the group, if it has one.
            sizes: how many elements go to and come from each member, where members may differ.

        Returns:
            What is kept of ``tensor``.
        """
        self._counts[_SEQUENCE] += 1
        return self._keep(group, verb, tensor, (op, root, sizes), sys._getframe(2))

    def note_message(
        self,
        group: str,
        verb: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        is_numbered: bool = True,
    ) -> None:
        """Note a send to or a receive from ``peer`` (None: any member).

        Those of one direction, peer and tag are numbered, but for a receive that ``name_sender``
        shall number; the sequence is of collectives.
        """
        kind = ("send" in verb, peer, tag)
        number = 0
        if is_numbered:
            number = self._num_messages[kind] = self._num_messages.get(kind, 0) + 1
        self._keep(group, verb, tensor, (*kind, number), sys._getframe(2))

    def insides(self) -> dict[str, Any]:
        """What a native caller needs to note calls just as ``note`` does; {} where it may not."""
        if self._keeps_stacks:
            return {}
        return {
            "counts": self._counts,
            "notes": self._notes,
            "num_messages": self._num_messages,
            "moments": _moments,
            "between_files": _between_files,
            "no_stack": _NO_STACK,
        }

    def name_sender(self, note: int, peer: int, tag: int) -> None:
        """Let a receive under ``tag`` that has no number yet be the next one from ``peer``.

        Args:
            note: which of all notes it is.
            peer: whose message it takes.
            tag: of the message.
        """
        kind = (False, peer, tag)
        number = self._num_messages[kind] = self._num_messages.get(kind, 0) + 1
        if note > self.num_notes - NUM_NOTES + 1:  # the oldest may be overwritten right now
            place = (note - 1) % NUM_NOTES
            noted = self._notes[place]
            self._notes[place] = (*noted[:4], (*kind, number), *noted[5:])

    def _keep(
        self,
        group: str,
        verb: str,
        tensor: torch.Tensor | list[torch.Tensor] | None,
        more: tuple[Any, ...],
        verb_frame: FrameType,
    ) -> Data:
        counts = self._counts
        counts[_MOMENT] = next(_moments)
        frame = verb_frame.f_back or verb_frame
        code = frame.f_code
        while _between_files[code.co_filename] and frame.f_back is not None:
            frame = frame.f_back
            code = frame.f_code
        data: Data = None
        if isinstance(tensor, list):
            data = tuple([(part.shape, part.dtype) for part in tensor])
        elif tensor is not None:
            data = (tensor.shape, tensor.dtype)
        stack = _stack_above(frame) if self._keeps_stacks else _NO_STACK
        note = (counts[_SEQUENCE], group, verb, data, more, code, frame.f_lasti, stack)
        number = counts[_NUM_NOTES]
        self._notes[number % NUM_NOTES] = note
        counts[_NUM_NOTES] = number + 1
        return data

    def describe(self, number: int | None = None) -> dict[str, Any]:
        """The call noted under ``number`` (None: the last one).

        As plain values: sequence, group, verb, argument, where; and for a send or receive what it
        waits for. All are empty where there is no such call; where it is no longer remembered,
        ``verb`` says so.
        """
        found = self.find_note(self.num_notes if number is None else number)
        if found is not None:
            return found
        empty = dict.fromkeys(("group", "verb", "argument", "where", "waits_for"), "")
        if self.num_notes:
            empty["verb"] = _FORGOTTEN
        return {"sequence": 0, **empty}

    def find_note(self, number: int) -> dict[str, Any] | None:
        """The call noted under ``number``, if it is remembered."""
        if not max(0, self.num_notes - NUM_NOTES) < number <= self.num_notes:
            return None
        return self._described(self._notes[(number - 1) % NUM_NOTES])

    def find_about(self, about: dict[str, Any]) -> dict[str, Any] | None:
        """The call that is asked about, if it is remembered; ``about`` tells as signals do."""
        if "sequence" in about:
            return self.find_call(about["sequence"])
        if "note" in about:
            return self.find_note(about["note"])
        return self.find_message(*about["message"])

    def has_noted(self, about: dict[str, Any]) -> bool:
        """As ``find_about``, for whether it was noted at all."""
        if "sequence" in about:
            return bool(about["sequence"] <= self.sequence)
        if "note" in about:
            return bool(0 < about["note"] <= self.num_notes)
        *kind, number = about["message"]
        return bool(number <= self._num_messages.get((kind[0], kind[1], kind[2]), 0))

    def find_call(self, sequence: int) -> dict[str, Any] | None:
        """The collective numbered ``sequence``, if it was called and is remembered."""
        for note in self._notes:
            if note and note[0] == sequence and len(note[4]) == 3:
                return self._described(note)
        return None

    def find_message(
        self, is_send: bool, peer: int, tag: int, number: int
    ) -> dict[str, Any] | None:
        """The ``number``-th send to or receive from ``peer`` under ``tag``, if remembered."""
        for note in self._notes:
            if note and note[4] == (is_send, peer, tag, number):
                return self._described(note)
        return None

    def _described(self, note: tuple[Any, ...]) -> dict[str, Any]:
        sequence, group, verb, data, more, code, instruction, stack = note
        told = [] if data is None else [_data_text(data)]
        waits_for = ""
        if len(more) == 3:
            op, root, sizes = more
            if op is not None:
                told.append(op_name(op))
            if root is not None:
                told.append(f"root {self._rank_text(root)}")
            if sizes:
                told.append(f"sending {list(sizes[0])}, taking {list(sizes[1])} elements")
        else:
            is_send, peer, tag, _ = more
            whom = "any rank" if peer is None else self._rank_text(peer)
            if "object" in verb:
                answer = "recv_object_list" if is_send else "send_object_list"
                waits_for = f"{whom} in {answer}, with this rank as its peer"
            elif is_send:
                waits_for = f"{whom} to receive {told[0]} from this rank under tag {tag}"
            else:
                waits_for = f"{whom} to send {told[0]} to this rank under tag {tag}"
            told.append(f"{'to' if is_send else 'from'} {whom}")
            if tag:
                told.append(f"tag {tag}")
        return {
            "sequence": sequence,
            "group": group,
            "verb": verb,
            "argument": ", ".join(told),
            "where": "\n  called at ".join([_where(code, instruction), *stack]),
            "waits_for": waits_for,
        }

    def _rank_text(self, member: int) -> str:
        return f"rank {self.ranks[member]}" if self.ranks else f"member {member}"


def is_list(data: Data) -> bool:
    """Whether ``data`` is of a list of tensors."""
    return data is not None and not (data and isinstance(data[0], torch.Size))


def _data_text(data: Any) -> str:
    if is_list(data):
        return f"[{', '.join(map(_data_text, data))}]"
    shape, dtype = data
    return f"{tuple(shape)} {dtype_name(dtype)}"


def _stack_above(frame: FrameType) -> list[str]:
    """Who called the program's frame that called a verb, and so on."""
    stack = []
    above = frame.f_back
    while above is not None:
        if not _between_files[above.f_code.co_filename]:
            stack.append(_where(above.f_code, above.f_lasti))
        above = above.f_back
    return stack


def _where(code: Any, instruction: int) -> str:
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
            break
    return f"{code.co_filename}:{line} in {code.co_name}"


def call_text(call: dict[str, Any]) -> str:
    """One call as a recorder describes it, as text for messages."""
    if call["verb"] == _FORGOTTEN:
        return f"{_FORGOTTEN}, which is no longer known"
    told = f"{call['verb']}({call['argument']})"
    if call["waits_for"]:  # messages are not counted: their two ends need not agree on a number
        return f"{told} on {call['group']} at {call['where']}"
    return f"call {call['sequence']} on {call['group']}: {told} at {call['where']}"

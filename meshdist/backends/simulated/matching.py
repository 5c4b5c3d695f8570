"""Match and execute the collectives and messages of simulated ranks.

Each call is compared when it starts. A collective's last member moves its data. A message waits for
its receive, or a receive for its message.

``_writes`` reads a collective's inputs and returns the writes; ``move`` executes them. Each result
is computed once, so members' results are bitwise equal.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain, islice, repeat
from math import prod
from operator import attrgetter, itemgetter
from typing import TypeAlias

import torch

from ...checking.calls import CallRecord, likeness
from ...error_text import UNUSABLE_GROUP, grouped_text, ranks_text
from ...errors import MismatchError
from ...operation_table import BACKEND_OPERATIONS, FOR_EACH, BackendOperation, TensorLayout
from ...reduce_ops import ReduceKind, ReduceOp
from ..composed_collectives import reduced
from ..operation_args import Tensors, blocks, writing
from ..requests import BackendAborted, BackendFailure, Request
from .scheduler import Rank, find_rank_here

Writes: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of members, each with the data to write into it."""


@dataclass
class MemberData:
    """The members' data in a collective, in group order.

    Args:
        inputs: each member's tensor, tensors for each member, or list.
        outputs: the tensors for each member's results.
        root: a rooted collective's.
    """

    inputs: Sequence[Tensors]
    outputs: Sequence[Tensors]
    op: ReduceKind = ReduceOp.SUM
    root: int = 0


def move(operation: BackendOperation, round_: MemberData) -> None:
    """Read all inputs of a collective, then write each member's outputs."""
    # ``writing`` allows writes to parameters and to tensors of inference mode.
    with writing():
        writes = _writes(operation, round_)
        # A total is a new tensor.
        written = () if operation.reduces else {x.untyped_storage().data_ptr() for x, _ in writes}
        ready = []
        for output, data in writes:
            is_kept = not written or data.data_ptr() == output.data_ptr()
            if not is_kept and data.untyped_storage().data_ptr() in written:
                data = data.clone()  # else something might be written over it before it is read
            ready.append((output, data.reshape(output.shape)))
        for output, data in ready:
            output.copy_(data)
    for output, _ in ready:
        if not output.is_cpu:
            synchronize(output)


def write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into ``tensor``, whose shape may differ."""
    with writing():
        tensor.copy_(data.reshape(tensor.shape))
    synchronize(tensor)


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the current stream of a CUDA or XPU tensor's device."""
    if tensor.device.type in ("cuda", "xpu"):
        torch.accelerator.current_stream(tensor.device).synchronize()


_ONE, _IN_PLACE = TensorLayout.ONE, TensorLayout.IN_PLACE
_first, _sizes, _paired = itemgetter(0), attrgetter("sizes"), partial(zip, strict=True)


def _writes(operation: BackendOperation, round_: MemberData) -> Writes:
    """Return pairs of an output and its data, as ``operation`` moves the inputs."""
    # All members' tensors form columns; a member gets a column, all columns, or a part of a column:
    #
    #     scatter from member 1, of x0 x1 x2     columns (x0) (x1) (x2)      member 2: x2
    #     all_gather of a, b, c                  column (a b c) as one       all: abc
    #     all_reduce_list of [a d] [b e] [c f]   columns (a+b+c) (d+e+f)     all: both
    #     reduce_scatter of a, b, c              column (a+b+c)              member 2: its third
    outputs, root, takes = round_.outputs, round_.root, operation.takes
    if takes is operation.gives is TensorLayout.NONE:
        return []
    columns: list[Tensors] = []
    sources = [round_.inputs[root]] if operation.root == "from" else round_.inputs
    for parts in zip(*sources, strict=True):
        column: Tensors = parts
        if operation.reduces:
            column = [reduced([part.reshape(-1) for part in parts], round_.op)]
        elif operation.gives is _ONE and len(parts) > 1:
            column = [torch.cat([part.reshape(-1).to(parts[0].device) for part in parts])]
        columns.append(column)
    results: Iterable[Tensors] = columns
    if takes is _ONE and operation.reduces:
        results = zip(blocks(columns[0][0], len(outputs)))
    elif takes not in FOR_EACH:
        results = repeat(columns[0] if len(columns) == 1 else [*chain(*columns)])
    if operation.root == "to":
        outputs, results = outputs[root : root + 1], islice(results, root, None)
    elif operation.root and takes is _IN_PLACE:  # it lies there
        outputs = [*outputs[:root], *outputs[root + 1 :]]
    if operation.gives is _ONE:
        return [*zip(map(_first, outputs), map(_first, results), strict=False)]
    return [*chain(*map(_paired, outputs, results))]


_THEN = f"; {UNUSABLE_GROUP}"


@dataclass(eq=False)
class PendingCall(Request):
    """A member's operation that other simulated ranks can end."""

    matching: Matching
    member: int
    rank: Rank
    note: CallRecord
    is_done: bool = field(default=False, init=False)
    failure: Exception | None = field(default=None, init=False)

    def finish(self, timeout: timedelta) -> None:
        """Wait while other ranks run, without a timeout; raise the operation's failure."""
        if self.is_done:
            self.rank.check_here()
        else:
            self.rank.wait(self)
        if self.failure is not None:
            raise copy.copy(self.failure)

    def poll(self) -> bool:
        """Return whether the operation is over; if not, let other ranks run first."""
        if not self.is_done and find_rank_here() is self.rank:
            self.rank.poll(self)
        return self.is_done

    def is_ready(self) -> bool:
        return self.is_done

    @abstractmethod
    def describe(self) -> str:
        """Describe the operation and its wait."""

    def end(self, failure: Exception | None = None) -> None:
        """End the operation, with the ``failure`` for ``finish``, if any."""
        self.failure = failure
        self.is_done = True


@dataclass(eq=False)
class PendingCollective(PendingCall):
    """A member's part in the simulated operation ``backend_operation``."""

    backend_operation: str
    inputs: Tensors
    outputs: Tensors
    op: ReduceKind | None  # of ``backend_operation``: the call's own may be done in several steps

    def describe(self) -> str:
        """Describe the call and the awaited members."""
        note, matching = self.note, self.matching
        there = matching.rounds[note.sequence]
        missing: dict[int, list[int]] = {}
        for member, rank in enumerate(matching.ranks):
            if member not in there:
                missing.setdefault(matching.num_calls[member], []).append(rank)
        made = {number: f", which made {number}" if number else "" for number in missing}
        ranks = " and ".join(ranks_text(of) + made[number] for number, of in missing.items())
        return (
            f"{note.called} for {ranks}; call {note.sequence} on "
            f"{matching.op_name}, called at {note.where}"
        )

    def end(self, failure: Exception | None = None) -> None:
        """End the collective, with its ``failure``, if any; drop its tensors."""
        self.failure, self.inputs, self.outputs = failure, (), ()
        self.is_done = True


@dataclass(eq=False)
class PendingReceive(PendingCall):
    """A receive from member ``peer`` (None: any)."""

    peer: int | None
    tag: int
    tensor: torch.Tensor | None
    _source: int | None = field(default=None, init=False)

    def source(self) -> int:
        return super().source() if self._source is None else self._source

    def takes(self, message: SentMessage) -> bool:
        """Return whether ``message`` matches this receive."""
        return self.tag == message.tag and self.peer in (None, message.source)

    def accept(self, message: SentMessage) -> None:
        """Write a message into the tensor; fail the whole group if it does not match."""
        tensor, data = self.tensor, message.data
        assert tensor is not None  # a receive accepts once
        self._source = message.source
        if message.note.call.fingerprint_inputs == self.note.call.fingerprint_inputs:
            self.end(_attempt(lambda: write(tensor, data)))
            return
        ranks = self.matching.ranks
        is_own = message.source == self.member
        failure = MismatchError(
            "message mismatch: a send does not match its receive",
            where=f"tag {self.tag} on {self.matching.op_name}",
            expected="the same dtype and number of elements on both sides, "
            "and objects received as objects",
            found=f"rank {ranks[message.source]}: {message.note.text}\n"
            f"rank {ranks[self.member]}: {self.note.text}",
            fix="receive into a tensor like the one that is sent, or pass a different tag for each "
            f"kind of message{'' if is_own else _THEN}",
        )
        self.end(failure)
        if not is_own:  # a message of a rank to itself concerns no other member
            self.matching.fail(failure)

    def describe(self) -> str:
        """Describe the receive and the messages that arrived instead."""
        note, matching = self.note, self.matching
        lines = [f"{note.called} on {matching.op_name}, called at {note.where}"]
        lines += [
            f"  rank {matching.ranks[message.source]} called {message.note.text}, which no rank "
            "has received"
            for message in matching.messages[self.member]
            if self.peer in (None, message.source)
        ]
        return "\n".join(lines)

    def end(self, failure: Exception | None = None) -> None:
        """End the receive, with its ``failure``, if any; drop its tensor."""
        super().end(failure)
        self.tensor = None


@dataclass
class SentMessage:
    """A sent message with its record."""

    source: int
    tag: int
    data: torch.Tensor
    note: CallRecord


class Matching:
    """State that a communicator's members share; messages use a nonempty ``name``."""

    def __init__(self, ranks: tuple[int, ...], name: str) -> None:
        self.ranks = ranks
        self.op_name = f"{name} ({ranks_text(ranks)})" if name else ranks_text(ranks)
        self.size = len(ranks)
        self.num_calls = [0] * self.size
        self.rounds: dict[int, dict[int, PendingCollective]] = {}
        self.messages: list[list[SentMessage]] = [[] for _ in ranks]
        self.receives: list[list[PendingReceive]] = [[] for _ in ranks]
        self.is_aborted = False
        self.failure: Exception | None = None
        """The mismatch of members, if any; all later operations fail with it."""

    def enter(self, started: PendingCollective) -> None:
        """Add a member's call to its round; the last member moves the data."""
        number = started.note.sequence
        there = self.rounds.setdefault(number, {})
        there[started.member] = started
        self.num_calls[started.member] = number
        failure = self._find_disagreement(started, there)
        if failure is not None:
            self.fail(failure)
        elif len(there) == self.size:
            self._perform([there[member] for member in range(self.size)])
            del self.rounds[number]

    def _perform(self, parts: Sequence[PendingCollective]) -> None:
        data = MemberData(
            [part.inputs for part in parts],
            [part.outputs for part in parts],
            parts[0].op or ReduceOp.SUM,
            parts[0].note.call.root or 0,
        )
        failure = _attempt(lambda: move(BACKEND_OPERATIONS[parts[0].backend_operation], data))
        for part in parts:
            part.end(failure)

    def _find_disagreement(
        self, started: PendingCollective, there: Mapping[int, PendingCollective]
    ) -> MismatchError | None:
        """Return an error if ``started`` does not match its round's calls ``there``."""
        first = next(iter(there.values()))
        fits = (started.backend_operation, started.note.call.fingerprint_inputs) == (
            first.backend_operation,
            first.note.call.fingerprint_inputs,
        )
        notes = {member: call.note for member, call in there.items()}
        if fits and not any(map(_sizes, notes.values())):
            return None
        mismatch: str | None = None
        if not fits:
            expected = likeness(started.note)
            fix = (
                "call the same collectives in the same order, with matching tensors, on every rank"
            )
        elif mismatch := find_mismatch(started.member, notes, self.ranks):
            expected = "input sizes that match the output sizes of the receiving rank"
            fix = (
                "give each output as many elements as its source sends; if a rank cannot know the "
                "sizes, exchange them first"
            )
        else:
            return None
        texts = dict.fromkeys(self.ranks, "has not reached this call")
        texts |= {self.ranks[member]: note.text for member, note in notes.items()}
        return MismatchError(
            f"collective mismatch: ranks made different calls as call {started.note.sequence}",
            where=f"{self.op_name}; no data was moved",
            expected=expected,
            found="\n".join(filter(None, (mismatch, grouped_text(texts.items())))),
            fix=f"{fix}{_THEN}",
        )

    def send(self, message: SentMessage, to: int) -> None:
        """Pass the message to the first matching receive of member ``to``, or keep a copy."""
        waiting = self.receives[to]
        for index, receive in enumerate(waiting):
            if receive.takes(message):
                waiting.pop(index).accept(message)
                return
        message.data = message.data.clone()
        synchronize(message.data)
        self.messages[to].append(message)

    def receive(self, receive: PendingReceive) -> None:
        """Pass the first matching message to a receive, or let it wait."""
        waiting = self.messages[receive.member]
        for index, message in enumerate(waiting):
            if receive.takes(message):
                receive.accept(waiting.pop(index))
                return
        self.receives[receive.member].append(receive)

    def fail(self, failure: MismatchError) -> None:
        """Fail all unfinished and later operations with ``failure``."""
        self.failure = failure
        self._end(failure)

    def abort(self) -> None:
        """Fail all unfinished and later operations with BackendAborted."""
        self.is_aborted = True
        self._end(BackendAborted("the communicator was aborted"))

    def _end(self, failure: Exception) -> None:
        pending: list[PendingCall] = [
            call for there in self.rounds.values() for call in there.values()
        ]
        pending.extend(receive for waiting in self.receives for receive in waiting)
        for step in pending:
            if not step.is_done:
                step.end(failure)
        self.rounds.clear()
        self.messages = [[] for _ in self.ranks]
        self.receives = [[] for _ in self.ranks]


def find_mismatch(member: int, notes: Mapping[int, CallRecord], ranks: Sequence[int]) -> str | None:
    """Describe a size that differs between ``member``'s call and another's, or return None."""
    sizes = {other: note.sizes or _even_sizes(note) for other, note in notes.items()}
    for other in sorted(notes):
        for source, target in ((member, other), (other, member)):
            gives, wants = sizes[source][0][target], sizes[target][1][source]
            if gives != wants:
                receiver = "itself" if source == target else f"rank {ranks[target]}"
                does = "and receives" if source == target else "which receives"
                return f"rank {ranks[source]} sends {gives} to {receiver}, {does} {wants}"
    return None


def _even_sizes(note: CallRecord) -> Sequence[Sequence[int]]:
    """Return (sent, received) for every member: the call's number of elements."""
    shape, _ = note.call.data or ((0,), None)
    return ((prod(shape),) * len(note.group.ranks),) * 2


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Run ``action``; return None, or its exception as a BackendFailure."""
    try:
        action()
    except Exception as failure:
        backend_failure = BackendFailure(
            f"copying the data failed: {type(failure).__name__}: {failure}"
        )
        backend_failure.__cause__ = failure
        return backend_failure
    return None

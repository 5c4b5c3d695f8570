"""The wire of simulated ranks: one process, of whose ranks exactly one runs.

Since all members lie in one process, every call is compared with the others' before any data
moves, and a rank that waits for what cannot come fails at once. Timeouts are accepted and never end
a wait: there is no clock.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from ...checking.calls import GroupFacts, Note
from ...error_text import ranks_text
from ...errors import AgreementError
from ...operation_table import FOR_EACH, REDUCING_VERBS, WIRE_VERBS, Form
from ...reduce_ops import REDUCIBLE, ReduceKind
from ..communicator import Communicator
from ..composed_collectives import check_reducible, find_lack
from ..operation_args import PreparedCall, Tensors, parts
from ..registry import Opening, Wire, register_wire
from ..requests import DONE, Operation, WireAborted, WireFailure
from .matching import Meeting, PendingCollective, PendingReceive, SentMessage, synchronize
from .scheduler import Rank, find_rank_here

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
"""The device types that simulated ranks serve; data moves by torch's own copies."""


class SimulatedCommunicator(Communicator):
    """A group of simulated ranks, as one rank of them sees it."""

    # Every verb moves its data natively, and is done when its last member has started it. A send
    # is done at once: the message is copied, so that programs which are right where sends are eager
    # do not deadlock here, and messages of one sender under one tag arrive in the order sent.

    ways = dict.fromkeys(WIRE_VERBS, "_collective") | {"send": "_send", "recv": "_recv"}
    averages_at_once = True

    def __init__(self, meeting: Meeting, opening: Opening, rank: Rank) -> None:
        super().__init__("simulated", opening.rank, len(opening.ranks))
        self._meeting = meeting
        self._rank = rank
        self._group = GroupFacts(meeting.title, opening.ranks, opening.rank)
        self._started = 0
        self._is_closed = False

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in REDUCING_VERBS and find_lack(op, dtype) is not None:
            return ""
        return super().support(verb, device_type, dtype, op)

    def _collective(self, prepared: PreparedCall) -> Operation:
        """Start a collective; its data are moved when its last member has started it."""
        self._check_usable()
        way, op, root, sizes = prepared.way, prepared.op, prepared.root, prepared.sizes
        inputs, outputs = prepared.inputs, prepared.outputs
        for part in (*inputs, *outputs):
            if not part.is_cpu:
                synchronize(part)
            if op is not None and (op.value, part.dtype) not in REDUCIBLE:
                check_reducible(self.wire, op, part.dtype)
        verb = WIRE_VERBS[way]
        if verb.takes is Form.PARTS:
            assert sizes is not None
            inputs, outputs = parts(inputs[0], sizes[0]), parts(outputs[0], sizes[1])
        elif verb.takes in FOR_EACH or verb.gives in FOR_EACH:
            sizes = self._sizes(inputs or outputs), self._sizes(outputs or inputs)
            if root is not None and (root != self.rank or sizes[0] == sizes[1]):
                sizes = None  # as even as a rooted verb is
        self._started += 1
        note = self._noted(prepared)
        if prepared.shows_all:
            if note.sizes != (sizes or ()):
                note = note._replace(sizes=sizes or ())
            if note.call.is_uneven != (is_uneven := sizes is not None and root is None):
                note = note._replace(call=replace(note.call, is_uneven=is_uneven))
        started = PendingCollective(
            self._meeting, self.rank, self._rank, note, way, inputs, outputs, op
        )
        self._meeting.enter(started)
        return started

    def _send(self, prepared: PreparedCall) -> Operation:
        """Write a message to the receive that waits for it, or keep a copy; never wait."""
        self._check_usable()
        (tensor,), peer = prepared.inputs, prepared.root
        assert peer is not None
        synchronize(tensor)
        message = SentMessage(self.rank, prepared.tag, tensor.detach(), self._noted(prepared))
        self._meeting.send(message, peer)
        return DONE

    def _recv(self, prepared: PreparedCall) -> Operation:
        """Start a receive from a member, or any; it takes the message that was sent first."""
        self._check_usable()
        (tensor,), peer, tag = prepared.outputs, prepared.root, prepared.tag
        synchronize(tensor)
        note = self._noted(prepared)
        receive = PendingReceive(self._meeting, self.rank, self._rank, note, peer, tag, tensor)
        self._meeting.receive(receive)
        return receive

    def abort(self) -> None:
        self._meeting.abort()

    def close(self) -> None:
        self._is_closed = True

    def _check_usable(self) -> None:
        self._rank.check_here()
        self._rank.num_vain_polls = 0
        if self._meeting.failure is not None:
            raise copy.copy(self._meeting.failure)
        if self._meeting.is_aborted:
            raise WireAborted("the communicator was aborted")
        if self._is_closed:
            raise WireFailure("the communicator was closed")

    def _noted(self, prepared: PreparedCall) -> Note:
        """Return the recorder's note of a call, with this group's number and name."""
        recorder = prepared.recorder
        assert recorder is not None  # a wire's own calls are those of other wires
        note = recorder.find_note(prepared.number)
        assert note is not None
        return Note(self._started, self._group, *note[2:])

    def _sizes(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the number of elements to or from each member, equal if there is a lone tensor."""
        counts = tuple(tensor.numel() for tensor in tensors)
        return counts * self.size if len(counts) == 1 else counts


class SimulatedWire(Wire):
    """The wire "simulated": serves the ranks of ``meshdist.simulate``, and no other."""

    name = "simulated"
    device_types = frozenset(DEVICE_TYPES)
    compares_calls = True
    communicator_kind = SimulatedCommunicator

    def is_available(self) -> bool:
        return True

    def open(self, opening: Opening) -> Communicator:
        """Return this member's communicator; never wait, since the members share a process."""
        rank = find_rank_here()
        if rank is None:
            raise WireFailure(
                "the wire 'simulated' serves simulated ranks alone: run the program with "
                "meshdist.simulate(fn, ranks)"
            )
        # The store's keys are this communicator's alone, so the first member to come names it.
        if opening.store.add("simulated/members", 1) == 1:
            name = f"meeting {len(rank.scheduler.tables)}"
            rank.scheduler.tables[name] = Meeting(opening.ranks, opening.name)
            opening.store.set("simulated/name", name)
        meeting = rank.scheduler.tables[opening.store.get("simulated/name").decode()]
        if meeting.ranks != opening.ranks:
            raise AgreementError(
                "the members of a group disagree about who they are",
                where=f"rank {rank.index}, opening a group on the wire 'simulated'",
                expected="the same ranks in the same order on every member",
                found=f"{ranks_text(meeting.ranks)} elsewhere; {ranks_text(opening.ranks)} here",
                fix="give every member the same list of ranks",
            )
        return SimulatedCommunicator(meeting, opening, rank)


register_wire(SimulatedWire())

"""The wire of simulated ranks: one process, its ranks one at a time.

Since all members lie in one process, every call is compared with the others' before any data
moves, and a rank that waits for what cannot come fails at once. Timeouts are accepted and never end
a wait: there is no clock.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch

from ...checking.calls import Call, GroupFacts, Note, get_call, get_message
from ...checking.program import program_frame
from ...error_text import ranks_text
from ...errors import AgreementError
from ...reduce_ops import ReduceKind
from ...verb_table import REDUCING_VERBS
from ..communicator import Communicator
from ..failures import WireAborted, WireFailure
from ..fallbacks import check_reducible, find_lack
from ..operations import DONE, Operation, Terms
from ..packing import Sizes, Tensors, parts
from ..registry import Opening, Wire, register_wire
from .meeting import Collective, Meeting, Message, Receive, synchronize
from .scheduler import Rank, find_rank_here

__all__ = ["DEVICE_TYPES", "SimulatedCommunicator", "SimulatedWire"]

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
"""The device types that simulated ranks serve; data moves by torch's own copies."""


class SimulatedCommunicator(Communicator):
    """A group of simulated ranks, as one of them sees it.

    Every verb moves its data natively, and is done when its last member has started it. A send is
    done at once: the message is copied, so that programs which are right where sends are eager do
    not deadlock here, and messages of one sender under one tag arrive in the order sent. An abort
    by one member aborts all of them.
    """

    averages_at_once = True
    shows_calls = True

    def __init__(self, meeting: Meeting, opening: Opening, rank: Rank) -> None:
        super().__init__("simulated", opening.rank, len(opening.ranks))
        self._meeting = meeting
        self._rank = rank
        self._group = GroupFacts(meeting.title, opening.ranks, opening.rank)
        self._started = 0
        self._is_closed = False

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Native, but for reductions of what torch cannot add."""
        if verb in REDUCING_VERBS and find_lack(op, dtype) is not None:
            return ""
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        """Start reducing ``tensor`` in place, in group order."""
        return self._start("all_reduce", tensor, [tensor], [tensor], terms, op)

    def all_reduce_list(self, tensors: Tensors, op: ReduceKind, terms: Terms) -> Operation:
        """Start reducing each of ``tensors`` in place, as one collective."""
        return self._start("all_reduce_list", tensors, tensors, tensors, terms, op)

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        """Start reducing in place on member ``root`` alone."""
        return self._start("reduce", tensor, [tensor], [tensor], terms, op, root)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        """Start giving every member the tensor of member ``root``."""
        return self._start("broadcast", tensor, [tensor], [tensor], terms, root=root)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        """Start giving member ``root`` everyone's tensor."""
        sizes = self._sizes(tensor), self._sizes(outputs if self.rank == root else tensor)
        return self._start("gather", tensor, [tensor], outputs, terms, root=root, sizes=sizes)

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int, terms: Terms) -> Operation:
        """Start giving every member its tensor of those on ``root``."""
        sizes = self._sizes(inputs if self.rank == root else tensor), self._sizes(tensor)
        return self._start("scatter", tensor, inputs, [tensor], terms, root=root, sizes=sizes)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, terms: Terms) -> Operation:
        """Start copying the members' tensors one after the other into ``output``."""
        return self._start("all_gather", tensor, [tensor], [output], terms)

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor, terms: Terms) -> Operation:
        """Start writing each member's tensor, of any size, into its place of ``outputs``."""
        sizes = self._sizes(tensor), self._sizes(outputs)
        return self._start("all_gather_list", tensor, [tensor], outputs, terms, sizes=sizes)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, terms: Terms
    ) -> Operation:
        """Start reducing the members' tensors block by block; ``output`` is my block."""
        return self._start("reduce_scatter", tensor, [tensor], [output], terms, op)

    def reduce_scatter_list(
        self, output: torch.Tensor, inputs: Tensors, op: ReduceKind, terms: Terms
    ) -> Operation:
        """Start reducing all members' ``inputs[my rank]`` into ``output``; any sizes."""
        sizes = self._sizes(inputs), self._sizes(output)
        return self._start("reduce_scatter_list", output, inputs, [output], terms, op, sizes=sizes)

    def all_to_all(self, outputs: Tensors, inputs: Tensors, terms: Terms) -> Operation:
        """Start sending ``inputs[j]`` to member j, and receiving its part into ``outputs[j]``."""
        sizes = self._sizes(inputs), self._sizes(outputs)
        return self._start("all_to_all", inputs, inputs, outputs, terms, sizes=sizes)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: Sizes, gives: Sizes, terms: Terms
    ) -> Operation:
        """Start an all-to-all over consecutive parts of both tensors."""
        outputs, inputs = parts(output, takes), parts(tensor, gives)
        sizes = gives, takes
        return self._start("all_to_all_single", tensor, inputs, outputs, terms, sizes=sizes)

    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        """Start a barrier."""
        return self._start("barrier", None, [], [], terms)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        """Send to member ``peer``: delivered or copied at once, so never waits."""
        self._check_usable()
        synchronize(tensor)
        note = self._note(get_message(terms.verb or "send", tensor, peer, tag))
        self._meeting.send(Message(self.rank, tag, tensor.detach(), note), peer)
        return DONE

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        """Start receiving from member ``peer``, or from any: the message that was sent first."""
        self._check_usable()
        synchronize(tensor)
        note = self._note(get_message(terms.verb or "recv", tensor, peer, tag))
        receive = Receive(self._meeting, self.rank, self._rank, note, peer, tag, tensor)
        self._meeting.receive(receive)
        return receive

    def is_awaited(self, verb: str | None = None) -> bool:
        there = self._meeting.rounds.get(self._started + 1, {})
        return any(verb in (None, started.note.call.verb) for started in there.values())

    def abort(self) -> None:
        """Fail everything that is not done, on all members, and free the ranks that wait for it."""
        self._meeting.abort()

    def close(self) -> None:
        """End this member's part; a later call by it is refused."""
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

    def _start(
        self,
        way: str,
        tensor: torch.Tensor | Tensors | None,
        inputs: Tensors,
        outputs: Tensors,
        terms: Terms,
        op: ReduceKind | None = None,
        root: int | None = None,
        sizes: Sequence[Sequence[int]] = (),
    ) -> Collective:
        """Start the verb ``way`` of a communicator; ``tensor`` is what it is noted with."""
        self._check_usable()
        for part in (*inputs, *outputs):
            synchronize(part)
            if op is not None:
                check_reducible(self.wire, op, part.dtype)
        if root is not None and sizes[:1] == sizes[1:]:
            sizes = ()  # as even as a rooted verb is
        self._started += 1
        if terms.call is not None:
            note = terms.call._replace(sequence=self._started, group=self._group)
        else:
            # The sizes of a verb with a root are the root's alone: it compares how many there are.
            is_uneven = bool(sizes) and root is None
            call = get_call(terms.verb or way, tensor, op, root, is_uneven=is_uneven)
            note = self._note(call, sizes)
        started = Collective(self._meeting, self.rank, self._rank, note, way, inputs, outputs, op)
        self._meeting.enter(started)
        return started

    def _note(self, call: Call, sizes: Sequence[Sequence[int]] = ()) -> Note:
        """The note of a call, made at the program's innermost line."""
        frame = program_frame(sys._getframe(1))
        place = frame.f_code, frame.f_lasti
        return Note(self._started, self._group, call, sizes, 0, *place)

    def _sizes(self, tensors: torch.Tensor | Tensors) -> tuple[int, ...]:
        """Elements to or from each member: of a list, or of one tensor for all."""
        if isinstance(tensors, torch.Tensor):
            return (tensors.numel(),) * self.size
        return tuple(tensor.numel() for tensor in tensors)


class SimulatedWire(Wire):
    """The wire "simulated": serves the ranks of ``meshdist.simulate``, and no other."""

    name = "simulated"
    device_types = frozenset(DEVICE_TYPES)
    communicator_kind = SimulatedCommunicator

    def is_available(self) -> bool:
        """True: it needs nothing but torch."""
        return True

    def open(self, opening: Opening) -> Communicator:
        """Open one member's side; never waits, since the members share a process."""
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

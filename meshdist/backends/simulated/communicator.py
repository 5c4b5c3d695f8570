"""Run operations among simulated ranks.

Members share a process, so every call is compared before data moves, and deadlocks raise
immediately. Timeouts never expire: simulated ranks have no clock.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from ...checking.calls import CallRecord, GroupFacts
from ...error_text import ranks_text
from ...errors import MismatchError
from ...operation_table import BACKEND_OPERATIONS, FOR_EACH, REDUCING_OPERATIONS, TensorLayout
from ...reduce_ops import REDUCIBLE, ReduceKind
from ..communicator import Communicator
from ..composed_collectives import check_reducible, find_lack
from ..operation_args import OperationArgs, Tensors, parts
from ..registry import BackendType, Opening, register_backend
from ..requests import DONE, BackendAborted, BackendFailure, Request
from .matching import Matching, PendingCollective, PendingReceive, SentMessage, synchronize
from .scheduler import Rank, find_rank_here

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
"""The device types that simulated ranks support; torch copies the data."""


class SimulatedCommunicator(Communicator):
    """Communicator of a simulated rank."""

    # Every collective is native, and is done when its last member has started it. A send is done
    # immediately, because it copies the message: programs that are correct with eager sends do not
    # deadlock here, and messages of one sender under one tag arrive in order.

    implementations = dict.fromkeys(BACKEND_OPERATIONS, "_collective") | {
        "send": "_send",
        "recv": "_recv",
    }
    averages_at_once = True

    def __init__(self, matching: Matching, opening: Opening, rank: Rank) -> None:
        super().__init__("simulated", opening.rank, len(opening.ranks))
        self._matching = matching
        self._rank = rank
        self._group = GroupFacts(matching.op_name, opening.ranks, opening.rank)
        self._started = 0
        self._is_closed = False

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if operation in REDUCING_OPERATIONS and find_lack(op, dtype) is not None:
            return ""
        return super().support(operation, device_type, dtype, op)

    def _collective(self, prepared: OperationArgs) -> Request:
        """Start a collective; the last member to start moves the data."""
        self._check_usable()
        backend_operation, op, root, sizes = (
            prepared.backend_operation,
            prepared.op,
            prepared.root,
            prepared.sizes,
        )
        inputs, outputs = prepared.inputs, prepared.outputs
        for part in (*inputs, *outputs):
            if not part.is_cpu:
                synchronize(part)
            if op is not None and (op.value, part.dtype) not in REDUCIBLE:
                check_reducible(self.backend, op, part.dtype)
        operation = BACKEND_OPERATIONS[backend_operation]
        if operation.takes is TensorLayout.PARTS:
            assert sizes is not None
            inputs, outputs = parts(inputs[0], sizes[0]), parts(outputs[0], sizes[1])
        elif operation.takes in FOR_EACH or operation.gives in FOR_EACH:
            sizes = self._sizes(inputs or outputs), self._sizes(outputs or inputs)
            if root is not None and (root != self.rank or sizes[0] == sizes[1]):
                sizes = None  # rooted collectives have equal sizes
        self._started += 1
        note = self._noted(prepared)
        if prepared.shows_all:
            if note.sizes != (sizes or ()):
                note = note._replace(sizes=sizes or ())
            if note.call.is_uneven != (is_uneven := sizes is not None and root is None):
                note = note._replace(call=replace(note.call, is_uneven=is_uneven))
        started = PendingCollective(
            self._matching, self.rank, self._rank, note, backend_operation, inputs, outputs, op
        )
        self._matching.enter(started)
        return started

    def _send(self, prepared: OperationArgs) -> Request:
        """Write a message into its pending receive, or keep a copy; never wait."""
        self._check_usable()
        (tensor,), peer = prepared.inputs, prepared.root
        assert peer is not None
        synchronize(tensor)
        message = SentMessage(self.rank, prepared.tag, tensor.detach(), self._noted(prepared))
        self._matching.send(message, peer)
        return DONE

    def _recv(self, prepared: OperationArgs) -> Request:
        """Start a receive from a member, or any, of the message sent first."""
        self._check_usable()
        (tensor,), peer, tag = prepared.outputs, prepared.root, prepared.tag
        synchronize(tensor)
        note = self._noted(prepared)
        receive = PendingReceive(self._matching, self.rank, self._rank, note, peer, tag, tensor)
        self._matching.receive(receive)
        return receive

    def abort(self) -> None:
        self._matching.abort()

    def close(self) -> None:
        self._is_closed = True

    def _check_usable(self) -> None:
        self._rank.check_here()
        self._rank.num_vain_polls = 0
        if self._matching.failure is not None:
            raise copy.copy(self._matching.failure)
        if self._matching.is_aborted:
            raise BackendAborted("the communicator was aborted")
        if self._is_closed:
            raise BackendFailure("the communicator was closed")

    def _noted(self, prepared: OperationArgs) -> CallRecord:
        """Return a call's record, with this group's number and name."""
        recorder = prepared.recorder
        assert recorder is not None  # other backends make internal calls
        note = recorder.find_note(prepared.number)
        assert note is not None
        return CallRecord(self._started, self._group, *note[2:])

    def _sizes(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the number of elements per member, equal for a single tensor."""
        counts = tuple(tensor.numel() for tensor in tensors)
        return counts * self.size if len(counts) == 1 else counts


class SimulatedBackend(BackendType):
    """The backend "simulated", for the ranks of ``meshdist.simulate`` only."""

    name = "simulated"
    device_types = frozenset(DEVICE_TYPES)
    compares_calls = True
    communicator_kind = SimulatedCommunicator

    def is_available(self) -> bool:
        return True

    def open(self, opening: Opening) -> Communicator:
        """Return this member's communicator without waiting."""
        rank = find_rank_here()
        if rank is None:
            raise BackendFailure(
                "backend 'simulated' works on simulated ranks only: run the program with "
                "meshdist.simulate(fn, ranks)"
            )
        # The store's keys belong to this communicator only, so its first member names it.
        if opening.store.add("simulated/members", 1) == 1:
            name = f"meeting {len(rank.scheduler.tables)}"
            rank.scheduler.tables[name] = Matching(opening.ranks, opening.name)
            opening.store.set("simulated/name", name)
        matching = rank.scheduler.tables[opening.store.get("simulated/name").decode()]
        if matching.ranks != opening.ranks:
            raise MismatchError(
                "the ranks of a group passed different lists of ranks",
                where=f"rank {rank.index}, opening a group on the backend 'simulated'",
                expected="the same ranks in the same order on every rank of the group",
                found=f"{ranks_text(matching.ranks)} on another rank\n"
                f"{ranks_text(opening.ranks)} on this rank",
                fix="pass the same list of ranks on every rank of the group",
            )
        return SimulatedCommunicator(matching, opening, rank)


register_backend(SimulatedBackend())

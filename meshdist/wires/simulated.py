"""The wire of simulated ranks: one process, its ranks one at a time.

Since all members lie in one process, every call is compared with the others' before any data
moves, and a rank that waits for what cannot come is told so at once. Time-outs are accepted and
never fire: there is no clock.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch

from ..error_text import ranks_text
from ..errors import AgreementError
from ..reduce_ops import ReduceKind
from .base import (
    REDUCING_VERBS,
    Communicator,
    Opening,
    Pending,
    Wire,
    WireAborted,
    WireFailure,
    register_wire,
)
from .exchange import Call, Exchange, Message, Receive, Sent
from .fallbacks import parts
from .headers import Header, sizes_of
from .moving import synchronize
from .pending import Chain
from .reductions import check_reducible, find_lack
from .turns import Rank, find_rank_here

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

    def __init__(self, exchange: Exchange, opening: Opening, rank: Rank) -> None:
        super().__init__("simulated", opening.rank, len(opening.ranks))
        self._exchange = exchange
        self._rank = rank
        self._started = 0
        self._is_closed = False

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Native, but for reductions of what torch cannot add."""
        if verb in REDUCING_VERBS and find_lack(op, dtype) is not None:
            return ""
        return super().support(verb, device_type, dtype, op)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        """Start reducing ``tensor`` in place, in group order."""
        header = Header("all_reduce", (tensor.dtype,), tensor.numel(), op)
        return self._start(header, [tensor], [tensor])

    def all_reduce_list(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """Start reducing each of ``tensors`` in place, as one collective."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        header = Header("all_reduce_list", dtypes, sizes_of(tensors), op)
        return self._start(header, tensors, tensors)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        """Start reducing in place on member ``root`` alone."""
        header = Header("reduce", (tensor.dtype,), tensor.numel(), op, root)
        return self._start(header, [tensor], [tensor])

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        """Start giving every member the tensor of member ``root``."""
        header = Header("broadcast", (tensor.dtype,), tensor.numel(), root=root)
        return self._start(header, [tensor], [tensor])

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        """Start giving member ``root`` everyone's tensor."""
        count = tensor.numel()
        takes = sizes_of(outputs) if self.rank == root else None
        header = Header("gather", (tensor.dtype,), count, root=root, sends=count, takes=takes)
        return self._start(header, [tensor], outputs)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        """Start giving every member its tensor of those on ``root``."""
        count = tensor.numel()
        sends = sizes_of(inputs) if self.rank == root else None
        header = Header("scatter", (tensor.dtype,), count, root=root, sends=sends, takes=count)
        return self._start(header, inputs, [tensor])

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        """Start laying the members' tensors one after the other into ``output``."""
        return self._start(
            Header("all_gather", (tensor.dtype,), tensor.numel()), [tensor], [output]
        )

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        """Start writing each member's tensor, of any size, into its place of ``outputs``."""
        sends, takes = tensor.numel(), sizes_of(outputs)
        header = Header("all_gather_list", (tensor.dtype,), sends=sends, takes=takes)
        return self._start(header, [tensor], outputs)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """Start reducing the members' tensors block by block; ``output`` is my block."""
        header = Header("reduce_scatter", (tensor.dtype,), tensor.numel(), op)
        return self._start(header, [tensor], [output])

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        """Start reducing all members' ``inputs[my rank]`` into ``output``; any sizes."""
        sends, takes = sizes_of(inputs), output.numel()
        header = Header("reduce_scatter_list", (output.dtype,), op=op, sends=sends, takes=takes)
        return self._start(header, inputs, [output])

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        """Start sending ``inputs[j]`` to member j, and receiving its part into ``outputs[j]``."""
        return self._all_to_all("all_to_all", outputs, inputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        """Start an all-to-all over consecutive parts of both tensors."""
        outputs, inputs = parts(output, output_sizes), parts(tensor, input_sizes)
        return self._all_to_all("all_to_all_single", outputs, inputs)

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        """Start a barrier."""
        return self._start(Header("barrier"), [], [])

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        """Send to member ``peer``: delivered or copied at once, so never waits."""
        self._check_usable()
        synchronize(tensor)
        sent = Sent(self._exchange, self.rank)
        verb = self.caller or "send"
        self._exchange.send(Message(self.rank, tag, tensor.detach(), sent.site, verb), peer)
        sent.settle()
        return sent

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        """Start receiving from member ``peer``, or from any: the message that was sent first."""
        self._check_usable()
        synchronize(tensor)
        receive = Receive(self._exchange, self.rank, tensor, peer, tag, self.caller)
        self._exchange.receive(receive)
        return receive

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        """Wait for ``pending``, handing the turn on; ``timeout`` never expires."""
        if isinstance(pending, Chain):
            return self.finish_chain(pending, timeout)
        self._rank.check_here()
        if not pending.is_settled:
            self._rank.wait(pending)
        if pending.failure is not None:
            raise copy.copy(pending.failure)

    def is_finished(self, pending: Pending) -> bool:
        """Whether ``pending`` is done; if not, the other ranks have had their turn before."""
        if isinstance(pending, Chain):
            return self.is_chain_finished(pending)
        if not pending.is_settled and find_rank_here() is self._rank:
            self._rank.poll(pending)
        return bool(pending.is_settled)

    def source(self, pending: Pending) -> int:
        """The member that a finished receive came from."""
        if not isinstance(pending, Receive) or pending.source is None:
            return super().source(pending)
        return pending.source

    def abort(self) -> None:
        """Fail everything that is not done, on all members, and free whoever waits for it."""
        self._exchange.abort()

    def close(self) -> None:
        """End this member's part; a later call by it is refused."""
        self._is_closed = True

    def _check_usable(self) -> None:
        self._rank.check_here()
        self._rank.num_vain_polls = 0
        if self._exchange.failure is not None:
            raise copy.copy(self._exchange.failure)
        if self._exchange.is_aborted:
            raise WireAborted("the communicator was aborted")
        if self._is_closed:
            raise WireFailure("the communicator was closed")

    def _all_to_all(
        self, verb: str, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Call:
        sends, takes = sizes_of(inputs), sizes_of(outputs)
        return self._start(
            Header(verb, (inputs[0].dtype,), sends=sends, takes=takes), inputs, outputs
        )

    def _start(
        self, header: Header, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> Call:
        self._check_usable()
        if header.op is not None:
            for dtype in header.dtypes:
                check_reducible(self.wire, header.op, dtype)
        for tensor in (*inputs, *outputs):
            synchronize(tensor)
        self._started += 1
        header = replace(header, caller=self.caller)
        call = Call(self._exchange, self.rank, self._started, header, inputs, outputs)
        self._exchange.enter(call)
        return call


class SimulatedWire(Wire):
    """The wire "simulated": serves the ranks of ``meshdist.simulate``, and nobody else."""

    name = "simulated"
    device_types = frozenset(DEVICE_TYPES)
    communicator_kind = SimulatedCommunicator

    def is_available(self) -> bool:
        """True: it needs nothing but torch."""
        return True

    def open(self, opening: Opening) -> Communicator:
        """Open one member's side; waits for nobody, since the members share a process."""
        rank = find_rank_here()
        if rank is None:
            raise WireFailure(
                "the wire 'simulated' serves simulated ranks alone: run the program with "
                "meshdist.simulate(fn, ranks)"
            )
        # The store's keys are this communicator's alone, so the first member to come names it.
        if opening.store.add("simulated/members", 1) == 1:
            name = f"exchange {len(rank.scheduler.tables)}"
            rank.scheduler.tables[name] = Exchange(opening.ranks, opening.name)
            opening.store.set("simulated/name", name)
        exchange = rank.scheduler.tables[opening.store.get("simulated/name").decode()]
        if exchange.ranks != opening.ranks:
            raise AgreementError(
                "the members of a group disagree about who they are",
                where=f"rank {rank.index}, opening a group on the wire 'simulated'",
                expected="the same ranks in the same order on every member",
                found=f"{ranks_text(exchange.ranks)} elsewhere; {ranks_text(opening.ranks)} here",
                fix="give every member the same list of ranks",
            )
        return SimulatedCommunicator(exchange, opening, rank)


register_wire(SimulatedWire())

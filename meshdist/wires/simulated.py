"""The wire of simulated ranks: one process, its ranks one at a time.

Since all members lie in one process, every call is compared with the others' before any data
moves, and a rank that waits for what cannot come is told so at once. Time-outs are accepted and
never fire: there is no clock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..arrays import dtype_name
from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError, BackendError
from ..reduce_ops import ReduceKind, find_refusal, op_name
from .base import Communicator, Opening, Pending, Wire, WireAborted, WireFailure, register_wire
from .reductions import reduced
from .turns import Rank, Site, call_site, find_rank_here, show_site

__all__ = ["DEVICE_TYPES", "SimulatedCommunicator", "SimulatedWire"]

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia")
"""The device types that simulated ranks serve; data moves by torch's own copies."""


class _Step:
    """A started operation of one member."""

    def __init__(self, exchange: _Exchange, member: int, site: Site) -> None:
        self.exchange = exchange
        self.member = member
        self.site = site
        self.is_settled = False
        self.failure: Exception | None = None

    def is_ready(self) -> bool:
        return self.is_settled

    def settle(self, failure: Exception | None = None) -> None:
        """The operation is done, or has failed; forget its tensors."""
        self.failure = failure
        self.is_settled = True


class _Call(_Step):
    """One member's part in a collective."""

    def __init__(
        self,
        exchange: _Exchange,
        member: int,
        number: int,
        verb: str,
        tensor: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        op: ReduceKind | None = None,
        root: int | None = None,
    ) -> None:
        super().__init__(exchange, member, call_site())
        self.number = number
        self.verb = verb
        self.tensor = tensor
        self.output = output
        self.op = op
        self.root = root
        self.dtype = None if tensor is None else tensor.dtype
        self.count = 0 if tensor is None else tensor.numel()

    def agrees_with(self, other: _Call) -> bool:
        """Whether both can be parts of one collective."""
        return (
            self.verb == other.verb
            and self.dtype is other.dtype
            and self.count == other.count
            and self.op == other.op
            and self.root == other.root
        )

    def show(self) -> str:
        """The call in words, without the place."""
        how = []
        if self.op is not None:
            how.append(op_name(self.op))
        if self.root is not None:
            how.append(f"from {ranks_text([self.exchange.ranks[self.root]])}")
        text = self.verb + (f"({', '.join(how)})" if how else "")
        return text if self.dtype is None else f"{text} of {_show_data(self.count, self.dtype)}"

    def describe(self) -> str:
        calls = self.exchange.rounds[self.number]
        missing = [rank for m, rank in enumerate(self.exchange.ranks) if m not in calls]
        return (
            f"{self.show()} for {ranks_text(missing)}; collective {self.number} over "
            f"{self.exchange.title}, called at {show_site(self.site)}"
        )

    def settle(self, failure: Exception | None = None) -> None:
        super().settle(failure)
        self.tensor = self.output = None


class _Receive(_Step):
    """A receive that waits for its message, or has it."""

    def __init__(
        self,
        exchange: _Exchange,
        member: int,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
    ) -> None:
        super().__init__(exchange, member, call_site())
        self.tensor: torch.Tensor | None = tensor
        self.peer = peer
        self.tag = tag
        self.source: int | None = None

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message of ``source`` under ``tag`` is meant."""
        return self.tag == tag and (self.peer is None or self.peer == source)

    def accept(self, source: int, data: torch.Tensor, site: Site) -> None:
        """Take a message; one that does not fit is an error of this receive."""
        tensor = self.tensor
        assert tensor is not None  # a receive accepts once
        self.source = source
        failure: Exception | None = None
        if data.dtype is not tensor.dtype or data.numel() != tensor.numel():
            ranks = self.exchange.ranks
            sent = _show_data(data.numel(), data.dtype)
            wanted = _show_data(tensor.numel(), tensor.dtype)
            failure = AgreementError(
                "a message does not fit the tensor that receives it",
                where=f"tag {self.tag} over {self.exchange.title}",
                expected="equal dtype and number of elements on both sides",
                found=f"rank {ranks[source]}: send of {sent} at {show_site(site)}\n"
                f"rank {ranks[self.member]}: recv of {wanted} at {show_site(self.site)}",
                fix="receive into a tensor like the one that is sent, or give messages of "
                "different kinds different tags",
            )
        else:
            failure = _attempt(lambda: _write(tensor, data))
        self.settle(failure)

    def describe(self) -> str:
        ranks = self.exchange.ranks
        source = "any rank" if self.peer is None else f"rank {ranks[self.peer]}"
        return (
            f"recv from {source}, tag {self.tag}, over {self.exchange.title}, "
            f"called at {show_site(self.site)}"
        )

    def settle(self, failure: Exception | None = None) -> None:
        super().settle(failure)
        self.tensor = None


class _Sent(_Step):
    """A send: done as soon as it has started, since messages are buffered."""


@dataclass
class _Message:
    source: int
    tag: int
    data: torch.Tensor
    site: Site


class _Exchange:
    """What the members of one communicator share."""

    def __init__(self, ranks: tuple[int, ...], name: str) -> None:
        self.ranks = ranks
        self.title = f"{name} ({ranks_text(ranks)})" if name else ranks_text(ranks)
        self.size = len(ranks)
        self.rounds: dict[int, dict[int, _Call]] = {}
        self.messages: list[list[_Message]] = [[] for _ in ranks]
        self.receives: list[list[_Receive]] = [[] for _ in ranks]
        self.is_aborted = False

    def enter(self, call: _Call) -> None:
        """Add a member's call to its round; the last one moves the data."""
        calls = self.rounds.setdefault(call.number, {})
        calls[call.member] = call
        first = next(iter(calls.values()))
        if first.failure is not None:
            call.settle(first.failure)
        elif not call.agrees_with(first):
            failure = self._disagreement(calls)
            for each in calls.values():
                each.settle(failure)
        elif len(calls) == self.size:
            in_order = [calls[member] for member in range(self.size)]
            failure_or_none = _attempt(lambda: _perform(in_order))
            for each in in_order:
                each.settle(failure_or_none)
        if len(calls) == self.size:
            del self.rounds[call.number]

    def _disagreement(self, calls: dict[int, _Call]) -> AgreementError:
        told = []
        for member, rank in enumerate(self.ranks):
            call = calls.get(member)
            text = "not there yet" if call is None else f"{call.show()} at {show_site(call.site)}"
            told.append((rank, text))
        number = next(iter(calls.values())).number
        return AgreementError(
            f"the members of a group disagree about their collective {number}",
            where=f"{self.title}; no data was moved",
            expected="the same verb, dtype, number of elements, op and root on every member",
            found=grouped_text(told),
            fix="make every member call the same verbs in the same order, on equal tensors",
        )

    def send(self, message: _Message, to: int) -> None:
        """Deliver to the first receive that takes the message, or keep a copy."""
        waiting = self.receives[to]
        for place, receive in enumerate(waiting):
            if receive.takes(message.source, message.tag):
                del waiting[place]
                receive.accept(message.source, message.data, message.site)
                return
        message.data = message.data.clone()
        _synchronize(message.data)
        self.messages[to].append(message)

    def receive(self, receive: _Receive) -> None:
        """Take the first message that is meant, or wait for it."""
        kept = self.messages[receive.member]
        for place, message in enumerate(kept):
            if receive.takes(message.source, message.tag):
                del kept[place]
                receive.accept(message.source, message.data, message.site)
                return
        self.receives[receive.member].append(receive)

    def abort(self) -> None:
        """Fail everything that is not done, and all that follows."""
        self.is_aborted = True
        pending: list[_Step] = [call for calls in self.rounds.values() for call in calls.values()]
        pending.extend(receive for waiting in self.receives for receive in waiting)
        for step in pending:
            if not step.is_settled:
                step.settle(WireAborted("the communicator was aborted"))
        self.rounds.clear()
        self.messages = [[] for _ in self.ranks]
        self.receives = [[] for _ in self.ranks]


class SimulatedCommunicator(Communicator):
    """A group of simulated ranks, as one of them sees it.

    A collective is done when its last member has started it. A send is done at once: the message
    is copied, so that programs which are right where sends are eager do not deadlock here, and
    messages of one sender under one tag arrive in the order sent. An abort by one member aborts
    all of them.
    """

    def __init__(self, exchange: _Exchange, opening: Opening, rank: Rank) -> None:
        super().__init__("simulated", opening.rank, len(opening.ranks))
        self._exchange = exchange
        self._rank = rank
        self._started = 0
        self._is_closed = False

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        """Start reducing ``tensor`` in place, in group order."""
        return self._start("all_reduce", tensor, op=_checked_op(op, tensor.dtype))

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        """Start giving every member the tensor of member ``root``."""
        return self._start("broadcast", tensor, root=root)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        """Start laying the members' tensors one after the other into ``output``."""
        return self._start("all_gather", tensor, output)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """Start reducing the members' tensors block by block; ``output`` is my block."""
        return self._start("reduce_scatter", tensor, output, op=_checked_op(op, tensor.dtype))

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        """Start a barrier."""
        return self._start("barrier")

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        """Send to member ``peer``: delivered or copied at once, so never waits."""
        self._check_usable()
        _synchronize(tensor)
        sent = _Sent(self._exchange, self.rank, call_site())
        self._exchange.send(_Message(self.rank, tag, tensor.detach(), sent.site), peer)
        sent.settle()
        return sent

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        """Start receiving from member ``peer``, or from any: the message that was sent first."""
        self._check_usable()
        _synchronize(tensor)
        receive = _Receive(self._exchange, self.rank, tensor, peer, tag)
        self._exchange.receive(receive)
        return receive

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        """Wait for ``pending``, handing the turn on; ``timeout`` never expires."""
        self._rank.check_here()
        if not pending.is_settled:
            self._rank.wait(pending)
        if pending.failure is not None:
            raise copy.copy(pending.failure)

    def is_finished(self, pending: Pending) -> bool:
        """Whether ``pending`` is done; if not, the other ranks have had their turn before."""
        if not pending.is_settled and find_rank_here() is self._rank:
            self._rank.poll(pending)
        return bool(pending.is_settled)

    def source(self, pending: Pending) -> int:
        """The member that a finished receive came from."""
        if not isinstance(pending, _Receive) or pending.source is None:
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
        if self._exchange.is_aborted:
            raise WireAborted("the communicator was aborted")
        if self._is_closed:
            raise WireFailure("the communicator was closed")

    def _start(
        self,
        verb: str,
        tensor: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        op: ReduceKind | None = None,
        root: int | None = None,
    ) -> _Call:
        self._check_usable()
        _synchronize(tensor)
        _synchronize(output)
        self._started += 1
        call = _Call(
            self._exchange, self.rank, self._started, verb, tensor, output, op=op, root=root
        )
        self._exchange.enter(call)
        return call


class SimulatedWire(Wire):
    """The wire "simulated": serves the ranks of ``meshdist.simulate``, and nobody else."""

    name = "simulated"
    device_types = frozenset(DEVICE_TYPES)

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
            rank.scheduler.tables[name] = _Exchange(opening.ranks, opening.name)
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


# -- how it is done -------------------------------------------------------------------------------


def _checked_op(op: ReduceKind, dtype: torch.dtype) -> ReduceKind:
    """Return ``op``; raises BackendError where ``dtype`` has no such reduction."""
    refusal = find_refusal(op, dtype)
    if refusal is not None:
        raise BackendError(
            f"the wire 'simulated' cannot reduce {dtype_name(dtype)} with {op_name(op)}",
            expected=refusal,
            fix="use another reduction, or convert the tensor",
        )
    return op


def _perform(calls: Sequence[_Call]) -> None:
    """Move the data of one collective: read everything, then write each member's result."""
    verb = calls[0].verb
    if verb == "barrier":
        return
    # Members may be in inference mode or not, and hold parameters: this mode writes to all.
    with torch.inference_mode():
        tensors = [_tensor_of(call) for call in calls]
        if verb == "broadcast":
            root = calls[0].root
            for member, tensor in enumerate(tensors):
                if member != root:
                    _write(tensor, tensors[root or 0])
            return
        flat = [tensor.reshape(-1) for tensor in tensors]
        op = calls[0].op
        if op is None:
            device = flat[0].device
            whole = torch.cat([part.to(device) for part in flat])
        else:
            whole = reduced(flat, op)
        if verb == "reduce_scatter":
            results = list(whole.chunk(len(calls)))
        else:
            results = [whole] * len(calls)
        for call, tensor, result in zip(calls, tensors, results, strict=True):
            _write(tensor if call.output is None else call.output, result)


def _tensor_of(call: _Call) -> torch.Tensor:
    assert call.tensor is not None  # only a barrier has none
    return call.tensor


def _write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into ``tensor``, of any shape with as many elements."""
    with torch.inference_mode():
        tensor.copy_(data.reshape(tensor.shape))
    _synchronize(tensor)


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Do it; the failure belongs to every member, not to the one whose thread this is."""
    try:
        action()
    except Exception as failure:
        wire_failure = WireFailure(f"moving the data failed: {type(failure).__name__}: {failure}")
        wire_failure.__cause__ = failure
        return wire_failure
    return None


def _synchronize(tensor: torch.Tensor | None) -> None:
    """Wait for the caller's stream, since the member that moves the data may use another."""
    if tensor is not None and tensor.device.type in ("cuda", "xpu"):
        torch.accelerator.current_stream(tensor.device).synchronize()


def _show_data(count: int, dtype: torch.dtype) -> str:
    return f"{count} {dtype_name(dtype)}"

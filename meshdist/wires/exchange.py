"""Where the members of a group that share a process meet: their collectives and messages.

Calls are compared as they come; the last member of a collective moves its data. A message waits
for its receive, or a receive for its message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError
from ..reduce_ops import ReduceOp
from .base import WireAborted, WireFailure
from .headers import Header, data_text, find_mismatch
from .moving import Round, move, synchronize, write
from .turns import Site, call_site, show_site

__all__ = ["Call", "Exchange", "Message", "Receive", "Sent", "Step"]

_BROKEN = "; the group is broken now"


class Step:
    """A started operation of one member."""

    def __init__(self, exchange: Exchange, member: int) -> None:
        self.exchange = exchange
        self.member = member
        self.site = call_site()
        self.is_settled = False
        self.failure: Exception | None = None

    def is_ready(self) -> bool:
        """Whether it is done, or has failed."""
        return self.is_settled

    def settle(self, failure: Exception | None = None) -> None:
        """The operation is done, or has failed; forget its tensors."""
        self.failure = failure
        self.is_settled = True


class Call(Step):
    """One member's part in a collective."""

    def __init__(
        self,
        exchange: Exchange,
        member: int,
        number: int,
        header: Header,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__(exchange, member)
        self.number = number
        self.header = header
        self.inputs = inputs
        self.outputs = outputs

    def describe(self) -> str:
        """The call in words, with whom it waits for."""
        exchange = self.exchange
        calls = exchange.rounds[self.number]
        missing = [rank for m, rank in enumerate(exchange.ranks) if m not in calls]
        return (
            f"{self.header.show(exchange.ranks)} for {ranks_text(missing)}; call "
            f"{self.number} over {exchange.title}, called at {show_site(self.site)}"
        )

    def settle(self, failure: Exception | None = None) -> None:
        """The collective is done, or has failed; forget its tensors."""
        super().settle(failure)
        self.inputs = self.outputs = ()


class Receive(Step):
    """A receive that waits for its message, or has it."""

    def __init__(
        self,
        exchange: Exchange,
        member: int,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        verb: str = "",
    ) -> None:
        super().__init__(exchange, member)
        self.verb = verb or "recv"
        self.tensor: torch.Tensor | None = tensor
        self.peer = peer
        self.tag = tag
        self.source: int | None = None

    def takes(self, source: int, tag: int) -> bool:
        """Whether a message of ``source`` under ``tag`` is meant."""
        return self.tag == tag and (self.peer is None or self.peer == source)

    def accept(self, message: Message) -> None:
        """Take a message; one that does not fit is an error of the whole group."""
        tensor, data = self.tensor, message.data
        assert tensor is not None  # a receive accepts once
        self.source = message.source
        is_alike = data.dtype is tensor.dtype and data.numel() == tensor.numel()
        if is_alike and _is_of_objects(message.verb) == _is_of_objects(self.verb):
            self.settle(_attempt(lambda: write(tensor, data)))
            return
        ranks = self.exchange.ranks
        wanted = data_text(tensor.numel(), [tensor.dtype])
        is_mine = message.source == self.member
        failure = AgreementError(
            "a message does not fit the tensor that receives it",
            where=f"tag {self.tag} over {self.exchange.title}",
            expected="equal dtype and number of elements on both sides, and objects met by objects",
            found=f"rank {ranks[message.source]}: {message.describe()}\n"
            f"rank {ranks[self.member]}: {self.verb} of {wanted} at {show_site(self.site)}",
            fix="receive into a tensor like the one that is sent, or give messages of "
            f"different kinds different tags{'' if is_mine else _BROKEN}",
        )
        self.settle(failure)
        if not is_mine:  # no other member has a part in what a rank sends to itself
            self.exchange.fail(failure)

    def describe(self) -> str:
        """The receive in words."""
        ranks = self.exchange.ranks
        source = "any rank" if self.peer is None else f"rank {ranks[self.peer]}"
        told = [
            f"{self.verb} from {source}, tag {self.tag}, over {self.exchange.title}, "
            f"called at {show_site(self.site)}"
        ]
        told += [
            f"  rank {ranks[message.source]} sent {message.describe_data()} under tag "
            f"{message.tag} at {show_site(message.site)}, which nobody has received"
            for message in self.exchange.messages[self.member]
            if self.peer is None or self.peer == message.source
        ]
        return "\n".join(told)

    def settle(self, failure: Exception | None = None) -> None:
        """The message is there, or the receive has failed; forget its tensor."""
        super().settle(failure)
        self.tensor = None


class Sent(Step):
    """A send: done as soon as it has started, since messages are buffered."""


@dataclass
class Message:
    """What a member has sent, and where in its program."""

    source: int
    tag: int
    data: torch.Tensor
    site: Site
    verb: str = "send"

    def describe(self) -> str:
        """The send in words."""
        return f"{self.verb} of {self.describe_data()} at {show_site(self.site)}"

    def describe_data(self) -> str:
        """What was sent: ``4 float32``."""
        return data_text(self.data.numel(), [self.data.dtype])


class Exchange:
    """What the members of one communicator share.

    Args:
        ranks: the members' global ranks, in group order.
        name: what messages call the group, or "".
    """

    def __init__(self, ranks: tuple[int, ...], name: str) -> None:
        self.ranks = ranks
        self.title = f"{name} ({ranks_text(ranks)})" if name else ranks_text(ranks)
        self.size = len(ranks)
        self.rounds: dict[int, dict[int, Call]] = {}
        self.messages: list[list[Message]] = [[] for _ in ranks]
        self.receives: list[list[Receive]] = [[] for _ in ranks]
        self.is_aborted = False
        self.failure: Exception | None = None
        """Of members that disagreed; whatever is started after that fails with it."""

    def enter(self, call: Call) -> None:
        """Add a member's call to its round; the last one moves the data."""
        calls = self.rounds.setdefault(call.number, {})
        calls[call.member] = call
        failure = self._find_disagreement(call, next(iter(calls.values())), calls)
        if failure is not None:
            self.fail(failure)
        elif len(calls) == self.size:
            self._perform([calls[member] for member in range(self.size)])
            del self.rounds[call.number]

    def _perform(self, calls: Sequence[Call]) -> None:
        header = calls[0].header
        parts = Round(
            [call.inputs for call in calls],
            [call.outputs for call in calls],
            ReduceOp.SUM if header.op is None else header.op,
            header.root or 0,
        )
        failure = _attempt(lambda: move(header.verb, parts))
        for call in calls:
            call.settle(failure)

    def _find_disagreement(
        self, call: Call, first: Call, calls: dict[int, Call]
    ) -> AgreementError | None:
        """Compare the newest call with all that are there."""
        if not call.header.agrees_with(first.header):
            return self._disagreement(
                calls,
                expected="the same verb, dtype, number of elements, op and root on every member",
                fix="make every member call the same verbs in the same order, on fitting "
                f"tensors{_BROKEN}",
            )
        headers = {member: each.header for member, each in calls.items()}
        mismatch = find_mismatch(call.member, call.header, headers, self.ranks)
        if mismatch is None:
            return None
        return self._disagreement(
            calls,
            mismatch,
            expected="what a member sends to another is what that one takes from it",
            fix="give each output as many elements as its source sends; where a member cannot "
            f"know them, exchange the sizes first{_BROKEN}",
        )

    def _disagreement(
        self, calls: dict[int, Call], mismatch: str | None = None, *, expected: str, fix: str
    ) -> AgreementError:
        told = []
        for member, rank in enumerate(self.ranks):
            call = calls.get(member)
            text = "not there yet"
            if call is not None:
                text = f"{call.header.show(self.ranks)} at {show_site(call.site)}"
            told.append((rank, text))
        number = next(iter(calls.values())).number
        return AgreementError(
            f"the members of a group disagree about their call {number}",
            where=f"{self.title}; no data was moved",
            expected=expected,
            found="\n".join(filter(None, (mismatch, grouped_text(told)))),
            fix=fix,
        )

    def send(self, message: Message, to: int) -> None:
        """Deliver to the first receive that takes the message, or keep a copy."""
        waiting = self.receives[to]
        for place, receive in enumerate(waiting):
            if receive.takes(message.source, message.tag):
                del waiting[place]
                receive.accept(message)
                return
        message.data = message.data.clone()
        synchronize(message.data)
        self.messages[to].append(message)

    def receive(self, receive: Receive) -> None:
        """Take the first message that is meant, or wait for it."""
        kept = self.messages[receive.member]
        for place, message in enumerate(kept):
            if receive.takes(message.source, message.tag):
                del kept[place]
                receive.accept(message)
                return
        self.receives[receive.member].append(receive)

    def fail(self, failure: AgreementError) -> None:
        """Members disagree: fail everything that is not done, and all that follows."""
        self.failure = failure
        self._end(failure)

    def abort(self) -> None:
        """Fail everything that is not done, and all that follows."""
        self.is_aborted = True
        self._end(WireAborted("the communicator was aborted"))

    def _end(self, failure: Exception) -> None:
        pending: list[Step] = [call for calls in self.rounds.values() for call in calls.values()]
        pending.extend(receive for waiting in self.receives for receive in waiting)
        for step in pending:
            if not step.is_settled:
                step.settle(failure)
        self.rounds.clear()
        self.messages = [[] for _ in self.ranks]
        self.receives = [[] for _ in self.ranks]


def _is_of_objects(verb: str) -> bool:
    return "object" in verb


def _attempt(action: Callable[[], None]) -> Exception | None:
    """Do it; the failure belongs to every member, not to the one whose thread this is."""
    try:
        action()
    except Exception as failure:
        wire_failure = WireFailure(f"moving the data failed: {type(failure).__name__}: {failure}")
        wire_failure.__cause__ = failure
        return wire_failure
    return None

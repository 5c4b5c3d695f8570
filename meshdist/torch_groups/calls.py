"""What a torch program asks of a group, and what a call that failed is told as."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import Store

from ..arrays import dtype_name
from ..error_text import grouped_text, ranks_text
from ..errors import (
    AbortedError,
    AgreementError,
    BackendError,
    CollectiveTimeoutError,
    MeshdistError,
)
from ..reduce_ops import ReduceKind, ReduceOp, op_name
from ..wires.base import (
    MemberLost,
    MembersDisagree,
    MessageMisfit,
    WireAborted,
    WireFailure,
    WireTimeout,
)

__all__ = ["Asked", "Call", "Members", "explain", "read_options"]

_ANSWERS_S = 1.0
_PAUSE_S = 0.005


class Asked(NamedTuple):
    """How a call is to be done.

    Args:
        is_async: whether the caller goes on before it is done.
        timeout: how long it may take, in place of the group's; None is the group's.
        op: of a verb that reduces.
        root: of a verb that has one, counted in the group.
    """

    is_async: bool = True
    timeout: timedelta | None = None
    op: Any = ReduceOp.SUM
    root: int = 0


def read_options(options: Any, first: str, **given: Any) -> Asked:
    """Return what a verb of torch's ProcessGroup was asked, in either form that it can be called.

    Args:
        options: torch's options, or in the short form the value of the field ``first``, or None.
        first: the field that the short form gives in the place of the options.
        given: more fields; None stands for what nobody gave.
    """
    if hasattr(options, "asyncOp"):
        return Asked(
            options.asyncOp,
            _given_timeout(options.timeout),
            getattr(options, "reduceOp", ReduceOp.SUM),
            getattr(options, "rootRank", 0),
        )
    fields = {first: options, **{name: x for name, x in given.items() if x is not None}}
    return Asked(**{name: x for name, x in fields.items() if x is not None})


def _given_timeout(timeout: timedelta) -> timedelta | None:
    return timeout if timeout > timedelta(0) else None  # torch's sign for "none" is negative


@dataclass(frozen=True)
class Members:
    """The group that a call belongs to, as messages tell it.

    Args:
        name: what torch calls the group.
        wire: the name of its wire.
        ranks: the members' global ranks, in group order.
        rank: this member's place.
        store: where members tell each other what they called when their calls differ.
    """

    name: str
    wire: str
    ranks: tuple[int, ...]
    rank: int
    store: Store

    def __str__(self) -> str:
        return f"group {self.name!r} ({ranks_text(self.ranks)})"

    @property
    def here(self) -> str:
        """This member, for messages."""
        return f"rank {self.ranks[self.rank]}"


@dataclass
class Call:
    """One call of a verb, as messages tell it.

    Args:
        verb: torch's name of it.
        tensors: what it was called on.
        op: its reduction.
        peer: the other side of a message, or the root, counted in the group; None for neither.
        tag: of a message.
        number: how many calls the group had before, and this one.
        sizes: how many elements go to and come from each member, where members may differ.
        amounts: elements and dtype of each tensor, in the place of ``tensors``.
    """

    verb: str
    tensors: Sequence[torch.Tensor] = ()
    op: ReduceKind | None = None
    peer: int | None = None
    tag: int | None = None
    number: int = 0
    sizes: tuple[Sequence[int], Sequence[int]] = ((), ())
    amounts: Sequence[tuple[int, torch.dtype]] = ()

    @property
    def title(self) -> str:
        """The verb as torch's own backends name it in a profile."""
        return "recvAnySource" if self.verb == "recv" and self.peer is None else self.verb

    def without_tensors(self) -> Call:
        """The same call, to be told later without keeping its tensors."""
        amounts = [(tensor.numel(), tensor.dtype) for tensor in self.tensors]
        return Call(
            self.verb, (), self.op, self.peer, self.tag, self.number, self.sizes, tuple(amounts)
        )

    def text(self, members: Members) -> str:
        """The call in words, for example ``broadcast(3 float32, rank 0)``."""
        amounts = self.without_tensors().amounts if self.tensors else self.amounts
        parts = [f"{count} {dtype_name(dtype)}" for count, dtype in amounts]
        if self.op is not None:
            parts.append(op_name(self.op))
        if self.peer is not None:
            parts.append(f"rank {members.ranks[self.peer]}")
        if self.tag is not None:
            parts.append(f"tag {self.tag}")
        if self.sizes[0]:
            sent, taken = map(list, self.sizes)
            parts.append(f"sending {sent}, taking {taken} elements")
        return f"{self.verb}({', '.join(parts)})"


def explain(
    failure: WireFailure,
    call: Call,
    members: Members,
    limit: timedelta,
    *,
    is_end: bool = False,
) -> MeshdistError:
    """Turn a wire's failure into the error that tells who, where and why.

    Args:
        failure: how the call failed.
        call: which call.
        members: of which group.
        limit: how long it might take.
        is_end: whether calls that differ end the group.
    """
    told = call.text(members)
    where = f"{members.here}, call {call.number}: {told}"
    if isinstance(failure, (MembersDisagree, MessageMisfit)):
        return _disagreement(failure, call, members, where, is_end=is_end)
    text = str(failure)
    if isinstance(failure, MemberLost):
        text = f"rank {members.ranks[failure.member]} {failure}"
    if isinstance(failure, WireTimeout):
        seconds = (failure.limit or limit).total_seconds()
        return CollectiveTimeoutError(
            f"{call.verb} on {members} was not finished within the timeout of {seconds:g} s",
            where=where,
            expected=f"the same call on {ranks_text(members.ranks)}"
            if call.tag is None
            else "the other side of the message",
            found=text,
            fix="look at the ranks that did not come to this call; make a new group on the others",
        )
    if isinstance(failure, WireAborted):
        return AbortedError(
            f"{call.verb} on {members} was aborted",
            where=where,
            found=text,
            fix="make a new group on the ranks that are left",
        )
    return BackendError(
        f"{call.verb} on {members} failed on wire {members.wire!r}",
        where=where,
        found=text,
        fix="look at the rank that ended or failed first",
    )


def _disagreement(
    failure: WireFailure, call: Call, members: Members, where: str, *, is_end: bool
) -> AgreementError:
    if call.tag is not None:
        return AgreementError(
            "a message does not fit the tensor that receives it",
            where=f"{members}; {where}",
            expected="equal dtype and number of elements on both sides",
            found=str(failure),
            fix="receive into a tensor like the one that is sent, or give messages of different "
            "kinds different tags",
        )
    # Where the wire itself compares, it does so before any data moves, and the group goes on.
    moved = "this member's tensors may have been written" if is_end else "no data was moved"
    end = "; the group is broken now" if is_end else ""
    return AgreementError(
        f"the members of a group disagree about their call {call.number}",
        where=f"{members}; {where}; {moved}",
        expected="the same verb, dtype, number of elements, op and root on every member",
        found="\n".join([str(failure), _what_each_called(call, members)]),
        fix=f"make every member call the same verbs in the same order, on fitting tensors{end}",
    )


def _what_each_called(call: Call, members: Members) -> str:
    """What every member called where the calls differ: all of them learn so, and tell it here."""
    prefix = f"disagreement/{call.number}"
    told = {members.rank: call.text(members)}
    with suppress(RuntimeError):  # the store is lost: then each tells what it knows of itself
        members.store.set(f"{prefix}/{members.rank}", json.dumps(told[members.rank]))
        deadline = time.monotonic() + _ANSWERS_S
        missing = set(range(len(members.ranks))) - {members.rank}
        while missing and time.monotonic() < deadline:
            for member in list(missing):
                key = f"{prefix}/{member}"
                if members.store.check([key]):
                    told[member] = json.loads(members.store.get(key))
                    missing.remove(member)
            time.sleep(_PAUSE_S)
    return grouped_text(
        (rank, told.get(member, "has not told")) for member, rank in enumerate(members.ranks)
    )

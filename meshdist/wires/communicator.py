"""One group's connection over one wire: the verbs that a wire writes, and those built from them.

Tensors that reach a wire are contiguous torch tensors of a device type it serves, without
gradients, checked by the verbs above; roots and peers count inside the group; only numbers of
elements matter, never shapes. A wire that ``takes_layouts`` may get others without gaps.

A wire writes the verbs that are abstract here; the others have a way of their own where the wire
has one, and else are built from those. Results are the same bits on every member, since every
member reduces in group order.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from ..errors import MeshdistError
from ..reduce_ops import ReduceKind
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.memory import Scratch
from .failures import WireFailure, WireTimeout
from .operations import Chain, Operation, Terms
from .packing import Sizes, Tensors, blocks, packed, parts, write, write_blocks

if TYPE_CHECKING:
    from .native import FastPath

__all__ = ["EXCHANGE_TAG", "LARGEST_TAG", "Communicator", "Explain", "handed_to"]

_log = logging.getLogger("meshdist.wires")

LARGEST_TAG = (1 << 30) - 3
"""The largest tag that every wire takes; larger tags belong to the verbs and wires themselves."""

EXCHANGE_TAG = (1 << 30) - 1
"""The tag of messages that belong to an all-to-all; no program's message bears it."""


Explain: TypeAlias = Callable[[WireFailure, int | None], BaseException]
"""Makes the error to raise of a failure, given the number of the call's note."""


class Communicator(ABC):
    """One group's connection over one wire.

    Each verb starts an operation at once and returns it; nothing is kept of the tensors once it is
    finished. Operations of one communicator are started in program order by one thread at a time;
    where it ``wants_senders``, another thread may call ``recv`` meanwhile.
    """

    wants_senders: ClassVar[bool] = False
    """Whether a receive should name its sender, where members note what they send."""

    on_stream: ClassVar[bool] = False
    """Whether its verbs are enqueued on a device, so that only streams wait for them."""

    posts_at_once = False
    """Whether starting a receive neither waits nor needs the terms' number."""

    shows_calls: ClassVar[bool] = False
    """Whether ``is_awaited`` can tell; else a header table does, where there is one."""

    holds_callers: ClassVar[bool] = False
    """Whether a caller that waits for a collective is on the host until all have come to it."""

    averages_at_once: ClassVar[bool] = False
    """Whether an average costs no more than a sum; else a division over all of the result."""

    def __init__(self, wire: str, rank: int, size: int) -> None:
        self.wire = wire
        self.rank = rank
        self.size = size
        self.scratch = Scratch()

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Whether a verb that works is ``"native"``, or ``"built"`` from others; for ``Wire``."""
        ours = getattr(Communicator, verb)
        is_built = getattr(cls, verb) is ours and not getattr(ours, "__isabstractmethod__", False)
        return "built" if is_built else "native"

    def takes_layouts(self, verb: str, tensors: Tensors, op: ReduceKind | None) -> bool:
        """Whether it does this with tensors without gaps in any order, as they lie in memory.

        Elements correspond by their places in the shape; a wire that answers yes must be right
        where members' layouts differ, too.

        Args:
            verb: a method of this class whose tensors correspond element by element on all members.
            tensors: whose dtypes, like ``op``, are equal on all members.
            op: of a reduction.
        """
        return False

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        """Reduce ``tensor`` in place; every member then holds the same bits."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        """Give every member the tensor of member ``root``."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, terms: Terms) -> Operation:
        """Copy the members' tensors one after the other, in group order, into ``output``."""

    @abstractmethod
    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        """Finished on a member when every member has started it.

        ``device`` is the device to run on, for a wire of such devices; None takes the connected
        one, else the current one.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        """Send to member ``peer``; finished when ``tensor`` may be written again."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        """Receive from member ``peer``, or from any member."""

    @abstractmethod
    def abort(self) -> None:
        """Free every thread of this process that waits for an operation; any thread may call it."""

    @classmethod
    def abort_together(cls, communicators: Sequence[Communicator]) -> None:
        """Abort communicators of this class, all of them also where one raises."""
        for one in communicators:
            try:
                one.abort()
            except Exception:
                _log.exception("a communicator on wire %s could not be aborted", one.wire)

    @abstractmethod
    def close(self) -> None:
        """End the communicator when nothing waits in it."""

    def leave(self) -> None:  # noqa: B027 (most wires announce nothing)
        """Announce to the others that this process exits normally."""

    def has_sent_itself(self, tag: int) -> bool:
        """Whether a message of this member to itself waits under ``tag``."""
        return False

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        """New bytes of this member's own, in memory that all members map; equal on all of them.

        Collective. Ordinary memory where the wire shares none.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    def batch(self) -> AbstractContextManager[None]:
        """Sends and receives started inside wait for each other in no order, whatever theirs is.

        Nothing is to be done where starting one never waits.
        """
        return nullcontext()

    def wait_for(self, condition: Callable[[], bool], timeout: timedelta) -> None:
        """Return when ``condition()``, as an operation's ``finish`` does; raises WireFailure."""
        if not wait_until(condition, Deadline(timeout)):
            raise WireTimeout.after(timeout)

    def connect(self, device: torch.device) -> None:  # noqa: B027 (most connect as they open)
        """Connect now, not at the first verb; collective, and WireFailure if it fails."""

    def is_awaited(self, verb: str | None = None) -> bool:
        """Whether a member has come to the next collective, ``verb`` if the wire can tell."""
        return False

    def take_error(self) -> MeshdistError | None:
        """The error of a call that has failed while nobody waited for it; None from then on."""
        return None

    def watch(self, explain: Explain) -> None:  # noqa: B027 (most calls can be ended)
        """Take what makes the error of a call that can neither end nor raise."""

    def fast_path(self, entry: Any, explain: Explain, timeout: timedelta) -> FastPath | None:
        """The group's fast path over the native core's ``entry``; None where there is none."""
        return None

    # -- verbs built from those above, for a wire without a way of its own ------------------------

    def all_reduce_list(self, tensors: Tensors, op: ReduceKind, terms: Terms) -> Operation:
        """Reduce each of ``tensors`` (one dtype or several) in place, as if one after the other."""
        return Chain([self.all_reduce(tensor, op, terms) for tensor in tensors])

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        """Reduce in place on member ``root``; the other members' tensors stay as they are.

        Built: an all-reduce, in a copy on all members but the root.
        """
        return self.all_reduce(tensor if self.rank == root else tensor.clone(), op, terms)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        """Give member ``root`` everyone's tensor: ``outputs[j]``, of equal size, is member j's.

        ``outputs`` is empty on the other members. Built: an all-gather, of which the root alone
        keeps the result.
        """
        whole = tensor.new_empty(self.size * tensor.numel())
        gathered = self.all_gather(whole, tensor, terms)
        return Chain([gathered], lambda: write_blocks(outputs, whole))

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int, terms: Terms) -> Operation:
        """Give every member its tensor of those on ``root``: ``inputs[j]``, of equal size, to j.

        ``inputs`` is empty on the other members. Built: a broadcast of everything, of which each
        member keeps its part.
        """
        count = tensor.numel()
        whole = packed(inputs) if self.rank == root else tensor.new_empty(self.size * count)
        sent = self.broadcast(whole, root, terms)
        return Chain([sent], lambda: write(tensor, whole[self.rank * count :][:count]))

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor, terms: Terms) -> Operation:
        """Write member j's tensor into ``outputs[j]``; sizes may differ between members.

        Built: one all-gather where sizes are equal, else one broadcast from each member.
        """
        if all(output.numel() == tensor.numel() for output in outputs):
            whole = tensor.new_empty(self.size * tensor.numel())
            gathered = self.all_gather(whole, tensor, terms)
            return Chain([gathered], lambda: write_blocks(outputs, whole))
        write(outputs[self.rank], tensor)
        return Chain([self.broadcast(output, root, terms) for root, output in enumerate(outputs)])

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, terms: Terms
    ) -> Operation:
        """Cut ``tensor`` into one equal block per member; ``output`` is my block, reduced."""
        return self.reduce_scatter_list(output, blocks(tensor, self.size), op, terms)

    def reduce_scatter_list(
        self, output: torch.Tensor, inputs: Tensors, op: ReduceKind, terms: Terms
    ) -> Operation:
        """``output`` is the reduction of all members' ``inputs[my rank]``; sizes may differ.

        Built: an all-reduce of all inputs one after the other, of which each member keeps its own.
        """
        whole = packed(inputs)
        start = sum(part.numel() for part in inputs[: self.rank])
        reduction = self.all_reduce(whole, op, terms)
        return Chain([reduction], lambda: write(output, whole[start:][: output.numel()]))

    def all_to_all(self, outputs: Tensors, inputs: Tensors, terms: Terms) -> Operation:
        """Send ``inputs[j]`` to member j, and receive member j's into ``outputs[j]``; any sizes.

        Built: one message to and from each other member.
        """
        write(outputs[self.rank], inputs[self.rank])
        others = [peer for peer in range(self.size) if peer != self.rank]
        later = terms._replace(waits=False)  # a receive that waits would keep others from sending
        receives = [self.recv(outputs[j], j, EXCHANGE_TAG, later) for j in others]
        return Chain([*receives, *(self.send(inputs[j], j, EXCHANGE_TAG, later) for j in others)])

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: Sizes, gives: Sizes, terms: Terms
    ) -> Operation:
        """As ``all_to_all`` over consecutive parts of flat tensors; sizes in elements."""
        return self.all_to_all(parts(output, takes), parts(tensor, gives), terms)


def handed_to(other: str, method: str) -> Any:
    """A method that another communicator, the attribute ``other``, does in this one's place."""

    def call(self: Any, *arguments: Any) -> Any:
        return getattr(getattr(self, other), method)(*arguments)

    return call

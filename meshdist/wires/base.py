"""The protocol of all wires, and their registry.

A ``Wire`` opens a ``Communicator`` among the members of one group. A communicator starts
operations and returns each as a ``Pending``; ``finish`` waits for one. Tensors that reach a wire
are contiguous torch tensors of a device type it serves, without gradients, checked by the verbs
above; roots and peers count inside the group; only numbers of elements matter, never shapes.

A wire writes the verbs that are abstract here; the others have a way of their own where the wire
has one, and else are built from those (``fallbacks``).
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed import Store

from ..errors import BackendError
from ..reduce_ops import ReduceKind, ReduceOp, find_refusal
from ..runtime.clock import clock
from ..runtime.timeouts import DEFAULT_TIMEOUT
from . import fallbacks
from .pending import Chain, Deferred, Pending
from .scratch import Scratch

__all__ = [
    "Communicator",
    "LARGEST_TAG",
    "MemberLost",
    "MembersDisagree",
    "Opening",
    "Pending",
    "PlainCalls",
    "REDUCING_VERBS",
    "Wire",
    "WireAborted",
    "WireFailure",
    "WireRefused",
    "WireTimeout",
    "find_wire",
    "get_wire",
    "register_wire",
    "wire_names",
]


LARGEST_TAG = (1 << 30) - 3
"""What every wire takes; larger ones belong to the verbs and wires themselves."""

REDUCING_VERBS = frozenset(
    {"all_reduce", "all_reduce_list", "reduce", "reduce_scatter", "reduce_scatter_list"}
)
"""The verbs of a communicator that take an op."""


class PlainCalls(Protocol):
    """Short ways for calls on plain CPU tensors that wait.

    Each does all that the verb does, and returns True; or does nothing, and returns False, where
    the call is not that plain. What it raises is what the verb raises.
    """

    def all_reduce(self, tensor: Any, /) -> bool:
        """The sum, in place."""
        ...

    def reduce(self, tensor: Any, op: Any, root: int, /) -> bool:
        """To the member at place ``root``."""
        ...

    def broadcast(self, tensor: Any, root: int, /) -> bool:
        """From the member at place ``root``."""
        ...

    def all_gather(self, verb: str, output: Any, tensor: Any, /) -> bool:
        """Under the public name ``verb``."""
        ...

    def reduce_scatter(self, verb: str, output: Any, tensor: Any, op: Any, /) -> bool:
        """Under the public name ``verb``."""
        ...

    def gather(self, tensor: Any, outputs: Any, root: int, /) -> bool:
        """To the member at place ``root``; ``outputs`` is None on the others."""
        ...

    def scatter(self, tensor: Any, inputs: Any, root: int, /) -> bool:
        """From the member at place ``root``; ``inputs`` is None on the others."""
        ...

    def all_to_all(self, output: Any, tensor: Any, /) -> bool:
        """In equal parts."""
        ...

    def all_gather_list(self, outputs: Any, tensor: Any, /) -> bool:
        """Into a list of tensors as large as this member's."""
        ...

    def all_to_all_list(self, outputs: Any, inputs: Any, /) -> bool:
        """Of lists of tensors of one size."""
        ...

    def barrier(self) -> bool:
        """Over all members."""
        ...

    def send(self, tensor: Any, peer: int, tag: Any, /) -> bool:
        """To the member at place ``peer``."""
        ...

    def recv(self, tensor: Any, peer: int | None, tag: Any, /) -> int | None:
        """From the member at place ``peer``, or from any; its place for True, None for False."""
        ...


class WireFailure(Exception):
    """A wire could not finish an operation; the verbs turn it into an error that explains."""

    limit: timedelta | None = None
    """How long the caller was ready to wait, where that is not the group's timeout."""


class WireTimeout(WireFailure):
    """An operation was not finished in time."""


class WireAborted(WireFailure):
    """The communicator was aborted while an operation waited."""


class WireRefused(WireFailure):
    """The wire cannot serve this group; every member has learned so, and raises."""


class MemberLost(WireFailure):
    """A member has ended, or left the group, while others waited for it.

    Args:
        text: what it did, for example ``has ended``.
        member: its place in the group.
    """

    def __init__(self, text: str, member: int) -> None:
        super().__init__(text)
        self.member = member


class MessageMisfit(WireFailure):
    """A message came that is longer or shorter than what was to receive it."""


class MembersDisagree(WireFailure):
    """A wire that compares calls found that members have started different ones.

    Args:
        text: what differs.
        number: of the call; None for the last. Of a message what the verbs gave as ``number``
            where the peer's is known as well; else how many of its kind there were.
        message: for a message whether it is a send, the peer and the tag.
        other_number: what the peer's verb gave as ``number``.
    """

    def __init__(
        self,
        text: str,
        number: int | None,
        message: tuple[bool, int, int] | None = None,
        other_number: int | None = None,
    ) -> None:
        super().__init__(text)
        self.number = number
        self.message = message
        self.other_number = other_number


@dataclass(frozen=True)
class Opening:
    """What a wire needs to open one communicator, equal on all members but for ``rank``.

    Args:
        store: a store whose keys belong to this communicator alone.
        ranks: the members' global ranks, in group order.
        rank: this member's place in ``ranks``.
        device_type: the device type of the tensors that it will carry.
        timeout: bounds the opening, and each operation that names none.
        is_one_host: whether all members run on one host.
        options: the wire's own options, or None.
        device: the device bound to this rank, or None.
        name: what messages call the group that opens it.
        num_local: how many ranks of the world run on this host.
        hosts: the number of each member's host; () where nobody knows.
        look: what a wire that does not compare calls asks now and then while a caller waits; raises
            WireFailure where that is in vain. None where nobody compares them for it.
    """

    store: Store
    ranks: tuple[int, ...]
    rank: int
    device_type: str
    timeout: timedelta
    is_one_host: bool = True
    options: Any = None
    device: torch.device | None = None
    name: str = ""
    num_local: int = 1
    hosts: tuple[int, ...] = ()
    look: Callable[[], None] | None = None


class Communicator(ABC):
    """One group's connection over one wire.

    Each verb starts an operation at once and returns it; nothing is kept of the tensors once it
    is finished. Operations of one communicator are started in program order by one thread at a
    time; where it ``wants_senders``, another thread may call ``recv`` meanwhile.
    """

    wants_senders: ClassVar[bool] = False
    """Whether a receive should name its sender, where members note what they send."""

    def __init__(self, wire: str, rank: int, size: int) -> None:
        self.wire = wire
        self.rank = rank
        self.size = size
        # The public verb that what is started next belongs to, and its number, for messages.
        self.scratch = Scratch()
        self.caller = ""
        self.number = 0
        self.posts_at_once = False
        """Whether starting a receive neither waits nor asks who called."""

    @property
    def waiting(self) -> Communicator:
        """The same verbs for a caller who waits at once; ``finish`` follows but for None."""
        return self

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        """Whether a verb that works is ``"native"``, or ``"built"`` from others; for ``Wire``."""
        ours = getattr(Communicator, verb)
        is_built = getattr(cls, verb) is ours and not getattr(ours, "__isabstractmethod__", False)
        return "built" if is_built else "native"

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        """Reduce ``tensor`` in place; every member then holds the same bits."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        """Give every member the tensor of member ``root``."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        """Lay the members' tensors one after the other, in group order, into ``output``."""

    def shared_bytes(self, num_bytes: int, timeout: timedelta) -> torch.Tensor:
        """New bytes of this member's own, in memory that all members map; equal on all of them.

        Collective. Ordinary memory where the wire shares none.
        """
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        """Finished on a member when every member has started it.

        ``device`` is the CUDA device to run on, for a wire that needs one; None lets it choose.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        """Send to member ``peer``; finished when ``tensor`` may be written again."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        """Receive from member ``peer``, or from any member."""

    def has_sent_itself(self, tag: int) -> bool:
        """Whether a message of this member to itself waits under ``tag``."""
        return False

    def plain_calls(self, noting: dict[str, Any], timeout: timedelta) -> PlainCalls | None:
        """Shorter ways for plain calls; None where there are none.

        Args:
            noting: what they need to look at tensors, to note and compare calls, as
                ``Channel.enter`` does, and ``explain``, which makes the error to raise of any; {}
                where they may not.
            timeout: how long one may take.
        """
        return None

    def batch(self) -> AbstractContextManager[None]:
        """Sends and receives started inside wait for each other in no order, whatever theirs is.

        Nothing is to be done where starting one never waits.
        """
        return nullcontext()

    def all_reduce_list(
        self, tensors: Sequence[torch.Tensor], op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """Reduce each of ``tensors`` (one dtype or several) in place, as if one after the other."""
        return Chain([self.all_reduce(tensor, op, timeout) for tensor in tensors])

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        """Reduce in place on member ``root``; the other members' tensors stay as they are."""
        return fallbacks.reduce(self, tensor, op, root, timeout)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        """Give member ``root`` everyone's tensor: ``outputs[j]``, of equal size, is member j's.

        ``outputs`` is empty on the other members.
        """
        return fallbacks.gather(self, outputs, tensor, root, timeout)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        """Give every member its tensor of those on ``root``: ``inputs[j]``, of equal size, to j.

        ``inputs`` is empty on the other members.
        """
        return fallbacks.scatter(self, tensor, inputs, root, timeout)

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        """Write member j's tensor into ``outputs[j]``; sizes may differ between members."""
        return fallbacks.all_gather_list(self, outputs, tensor, timeout)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        """Cut ``tensor`` into one equal block per member; ``output`` is my block, reduced."""
        return fallbacks.reduce_scatter(self, output, tensor, op, timeout)

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        """``output`` is the reduction of all members' ``inputs[my rank]``; sizes may differ."""
        return fallbacks.reduce_scatter_list(self, output, inputs, op, timeout)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        """Send ``inputs[j]`` to member j, and receive member j's into ``outputs[j]``; any sizes."""
        return fallbacks.all_to_all(self, outputs, inputs, timeout)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        """As ``all_to_all`` over consecutive parts of flat tensors; sizes in elements."""
        return fallbacks.all_to_all_single(self, output, tensor, output_sizes, input_sizes, timeout)

    def finish_chain(self, chain: Chain, timeout: timedelta) -> None:
        """Wait for every part of ``chain`` and bring its results home; for ``finish``."""
        deadline = clock.now() + timeout.total_seconds()
        for pending in chain.pendings:
            left = max(0.0, deadline - clock.now())
            self.finish(pending, timedelta(seconds=left))
        chain.settle()

    def is_chain_finished(self, chain: Chain) -> bool:
        """Whether every part of ``chain`` is done; for ``is_finished``."""
        return all(self.is_finished(pending) for pending in chain.pendings)

    def finish_deferred(
        self,
        deferred: Deferred,
        timeout: timedelta,
        wait: Callable[[Callable[[], bool], timedelta], None],
    ) -> None:
        """Wait until it has started, and then for its end; for ``finish``.

        ``wait`` returns when what it is given says True, and raises at the timeout.
        """
        deadline = clock.now() + timeout.total_seconds()
        try:
            wait(deferred.is_settled, timeout)
        except BaseException:  # Ctrl-C, too: who receives next must not wait behind it
            deferred.is_cancelled = True
            raise
        if deferred.failure is not None:
            raise deferred.failure
        left = max(0.0, deadline - clock.now())
        self.finish(deferred.started, timedelta(seconds=left))

    def is_deferred_finished(self, deferred: Deferred) -> bool:
        """Whether it has started and ended, or never will start; for ``is_finished``."""
        return deferred.is_settled() and (
            deferred.failure is not None or self.is_finished(deferred.started)
        )

    @abstractmethod
    def finish(self, pending: Pending, timeout: timedelta) -> None:
        """Wait for ``pending``; raises WireTimeout, WireAborted or WireFailure.

        A helper thread may finish one operation while the program's starts or finishes others;
        never two threads the same one.
        """

    @abstractmethod
    def is_finished(self, pending: Pending) -> bool:
        """Whether ``pending`` is done, failed ones too, without waiting."""

    def source(self, pending: Pending) -> int:
        """The member that a finished receive came from."""
        raise WireFailure("only a receive has a source")

    @abstractmethod
    def abort(self) -> None:
        """Free every thread of this process that waits in ``finish``; may be called by any."""

    def leave(self) -> None:  # noqa: B027 (most wires have nothing to say)
        """Let the others know that this process comes to its end in good order."""

    @abstractmethod
    def close(self) -> None:
        """End the communicator when nothing waits in it."""


class Wire(ABC):
    """One way to move bytes."""

    name: str
    device_types: frozenset[str]
    default_timeout: timedelta = DEFAULT_TIMEOUT
    communicator_kind: type[Communicator] = Communicator  # type: ignore[type-abstract]
    """The class of what ``open`` returns, which knows what it does itself."""
    stand_in = ""
    """The wire to take in its place for a group that it refuses, where the program named none."""
    across_hosts = ""
    """The wire to take in its place for a group that spans hosts, where the program named none."""
    compares_calls = False
    """Whether it compares every call with the other members' by itself."""

    def support(
        self, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
    ) -> str:
        """How the wire serves one of a communicator's verbs.

        Args:
            verb: the name of a method of ``Communicator``.
            device_type: of the tensors.
            dtype: of the tensors.
            op: for a verb that reduces; None is SUM.

        Returns:
            ``"native"``: by the wire's own means; ``"built"``: from others of its verbs, or in
            another dtype; ``""``: not at all.
        """
        op = ReduceOp.SUM if op is None else op
        if device_type not in self.device_types:
            return ""
        if verb in REDUCING_VERBS and find_refusal(op, dtype) is not None:
            return ""
        return self.communicator_kind.support(verb, device_type, dtype, op)

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this machine can use the wire now."""

    def why_unavailable(self) -> tuple[str, str]:
        """Why this machine cannot use the wire, and what mends it."""
        return f"the wire {self.name!r} says so", "ask whoever registered it"

    @abstractmethod
    def open(self, opening: Opening) -> Communicator:
        """Open a communicator, together with all other members; raises WireFailure."""


_wires: dict[str, Wire] = {}


def register_wire(wire: Wire) -> None:
    """Add ``wire`` under its name, replacing an older one of that name."""
    _wires[wire.name] = wire


def wire_names() -> tuple[str, ...]:
    """The names of all registered wires, sorted."""
    return tuple(sorted(_wires))


def find_wire(name: str) -> Wire | None:
    """Return the wire called ``name``, or None."""
    return _wires.get(name.lower())


def get_wire(name: str) -> Wire:
    """Return the wire called ``name``; raises BackendError, listing what there is."""
    name = name.lower()
    wire = find_wire(name)
    if wire is not None and wire.is_available():
        return wire
    known = [known for known in wire_names() if _wires[known].is_available()]
    expected = f"one of: {', '.join(known)}"
    if wire is not None:
        found, fix = wire.why_unavailable()
        raise BackendError(
            f"backend {name!r} is not available on this machine",
            expected=expected,
            found=found,
            fix=f"{fix}; or name another, or None for the default of each device type",
        )
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]!r}? " if close else ""
    raise BackendError(
        f"backend {name!r} is not registered",
        expected=expected,
        fix=f"{meant}name one of these, or None for the default of each device type",
    )

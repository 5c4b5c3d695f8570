"""One group's way to move tensors of one device type, and what stands before each call on it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from ..arrays import QUANTIZED
from ..errors import MeshdistError
from ..reduce_ops import ReduceKind, ReduceOp
from ..runtime.clock import clock
from ..runtime.debug_levels import (
    TRACE,
    DebugLevel,
    get_debug_level,
    known_levels,
    verbs_log,
)
from ..runtime.ledger import CHECK_EVERY, Ledger, fingerprint
from ..runtime.recorder import Data, call_text, is_list
from ..wires.base import (
    Communicator,
    MembersDisagree,
    Pending,
    Wire,
    WireAborted,
    WireFailure,
    WireTimeout,
)
from ..wires.core import core
from .failures import (
    call_disagreement,
    closed_meanwhile,
    explain,
    message_disagreement,
)
from .registry import OpenCommunicator

if TYPE_CHECKING:
    from .groups import ProcessGroup

__all__ = ["Channel", "header_of"]

_PAUSE_S = 0.001
_MOST_FINGERPRINTS = 4096
_SUM = ReduceOp.SUM
_SUM_NUMBER = ReduceOp.SUM.value  # known beforehand, since asking costs 0.1 microseconds
_DTYPES = {one for one in vars(torch).values() if isinstance(one, torch.dtype)} - QUANTIZED
_PLAIN_DTYPES = {dtype: 0 for dtype in _DTYPES if not dtype.is_complex}
"""Of plain tensors; a wire may have numbers of its own. (Complex ones may hold conjugates.)"""


class _Codes(dict[Any, int]):
    """A number for each name, equal on every process."""

    def __missing__(self, name: Any) -> int:
        self[name] = code = crc32(str(name).encode())
        return code


class _Fingerprints(dict[Any, int]):
    """The fingerprint of each header; kept, since programs repeat their calls."""

    def __missing__(self, header: Any) -> int:
        if len(self) >= _MOST_FINGERPRINTS:
            self.clear()
        self[header] = found = fingerprint(*_numbers(*header))
        return found


class _MessageFingerprints(dict[Any, int]):
    """The fingerprint of each kind of message: dtype, number of elements, whether of objects."""

    def __missing__(self, message: Any) -> int:
        if len(self) >= _MOST_FINGERPRINTS:
            self.clear()
        dtype, count, is_of_objects = message
        self[message] = found = fingerprint(_codes[dtype], count, is_of_objects)
        return found


_codes = _Codes()
_fingerprints = _Fingerprints()
_message_fingerprints = _MessageFingerprints()


class Channel:
    """One group's way to move tensors of one device type.

    Args:
        group: whose way it is.
        wire: what moves them.
        opened: the communicator, which other groups may use as well.
        device_type: of the tensors.
        timeout: how long a verb may wait.
    """

    __slots__ = (
        "__weakref__",
        "_enter",
        "aborts",
        "communicator",
        "device_type",
        "group",
        "ledger",
        "matching",
        "opened",
        "plain_calls",
        "recorder",
        "spans_hosts",
        "timeout",
        "waiting",
        "wire",
    )

    def __init__(
        self,
        group: ProcessGroup,
        wire: Wire,
        opened: OpenCommunicator,
        device_type: str,
        timeout: timedelta,
    ) -> None:
        self.group = group
        self.wire = wire
        self.opened = opened
        self.aborts = opened.aborts
        self.device_type = device_type
        self.timeout = timeout
        self.communicator: Communicator = opened.communicator
        self.waiting = self.communicator.waiting
        self.ledger = opened.ledger
        self.matching = opened.matching
        self.recorder = opened.recorder
        self.spans_hosts = opened.spans_hosts
        noting = {} if self.spans_hosts else self._noting()
        self._enter = core.Entry(noting).enter if core is not None and noting else _is_not_entered
        self.plain_calls = self.waiting.plain_calls(noting, timeout)

    def enter(
        self,
        verb: str,
        tensor: torch.Tensor | list[torch.Tensor] | None,
        op: ReduceKind | None = None,
        root: int | None = None,
        sent: Sequence[int] = (),
        taken: Sequence[int] = (),
    ) -> None:
        """Note a collective that this rank is about to start, and compare it with the others'.

        Args:
            verb: its public name.
            tensor: the tensor, or list of tensors, whose dtype and number of elements must be equal
                on all members.
            op: its reduction.
            root: the place of its source or destination.
            sent, taken: how many elements go to and come from each member, for a verb whose
                members may differ in that; only the dtype of ``tensor`` must be equal then.

        Raises:
            AgreementError: another member has started another call in its place. Every member
                that waits raises it.
            CollectiveTimeoutError: a member is more than a thousand calls behind for too long.
        """
        communicator = self.communicator
        recorder = self.recorder
        number = _SUM_NUMBER if op is _SUM else None if op is None else op.value
        if not sent and self._enter(verb, tensor, op, number, root):
            communicator.caller = verb
            communicator.number = recorder.sequence
            return
        sizes = (sent, taken) if sent else ()
        data = recorder.note(self.group.name, verb, tensor, op, root, sizes)
        if verbs_log.isEnabledFor(TRACE):
            self._tell()
        if self.aborts and self.is_broken():
            raise explain(self.group, WireAborted("the group is broken"), self)
        communicator.caller = verb
        communicator.number = recorder.sequence
        ledger = self.ledger
        if ledger is not None:
            sequence = recorder.sequence
            if sent or not sequence % CHECK_EVERY:
                self._wait_for_the_slowest(ledger, sequence, bool(sent))
            header = _fingerprints[verb, data, number, root, bool(sent)]
            if ledger.enter(sequence, header, sent, taken):
                raise call_disagreement(self.group, self, sequence)
        if self.spans_hosts and get_debug_level() == DebugLevel.DETAIL:
            numbers = _numbers(verb, data, number, root, bool(sent))
            self._compare_by_a_round(numbers, sent, taken)

    def is_broken(self) -> bool:
        """Whether the group failed or was aborted, so that every call on it is refused."""
        return self.opened.label in self.aborts

    def note_message(
        self,
        verb: str,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        *,
        is_numbered: bool = True,
    ) -> None:
        """Note a send or receive; refuse it where the group is broken.

        A receive for ``recv_later`` gets its number there.
        """
        communicator, recorder = self.communicator, self.recorder
        recorder.note_message(self.group.name, verb, tensor, peer, tag, is_numbered=is_numbered)
        communicator.number = self.waiting.number = recorder.num_notes
        communicator.caller = verb
        if verbs_log.isEnabledFor(TRACE):
            self._tell()
        if self.aborts and self.is_broken():
            raise explain(self.group, WireAborted("the group is broken"), self)

    def compare_message(
        self, verb: str, tensor: torch.Tensor, peer: int | None, tag: int, *, is_send: bool
    ) -> int | None:
        """Compare a send or receive with its counterpart, if that is there.

        Returns:
            Its number, for ``refuse_message``, where the counterpart has another dtype or number of
            elements, or one is of objects and the other of a tensor.
        """
        ledger = self.ledger
        if ledger is None:
            return None
        if peer is None:
            ledger.recv_any(tag)
            return None
        return (ledger.send if is_send else ledger.recv)(peer, tag, _message_header(verb, tensor))

    def waits_for_sender(self, peer: int | None, tag: int) -> bool:
        """Whether a receive is to be started by ``recv_later``."""
        return self.matching is not None and self.matching.takes(peer, tag)

    def recv_later(
        self, verb: str, tensor: torch.Tensor, peer: int | None, tag: int, note: int, *, waits: bool
    ) -> Pending:
        """Start a noted receive as soon as a member has noted a message for it, and compare them.

        Args:
            verb: its public name.
            tensor: what is written.
            peer: the sender; None for any member.
            tag: of the message.
            note: under which the recorder noted the call, without a number.
            waits: whether the caller waits for it at once.
        """
        assert self.matching is not None  # waits_for_sender was so
        return self.matching.add(
            tensor,
            peer=peer,
            tag=tag,
            header=_message_header(verb, tensor),
            note=note,
            timeout=self.timeout,
            explain=lambda failure: explain(self.group, failure, self, note),
            waits=waits,
        )

    def refuse_message(
        self, is_send: bool, peer: int | None, tag: int, number: int
    ) -> MeshdistError:
        """The error of a noted message that differs from its counterpart."""
        assert peer is not None  # whose sender is known later is compared by recv_later
        return message_disagreement(self.group, self, is_send, peer, tag, number)

    def _noting(self) -> dict[str, Any]:
        """What a native caller needs to do what ``enter`` does; {} where it may not."""
        insides = self.recorder.insides()
        if not insides:
            return {}
        found = weakref.ref(self)  # which keeps those callers
        world, name = self.group.world, self.group.name
        wire_name, recorder = self.wire.name, self.recorder

        def explained(error: BaseException, note: int | None = None) -> BaseException:
            if not isinstance(error, WireFailure):
                return error
            channel = found()
            if channel is None:
                return closed_meanwhile(world, name, wire_name, recorder, error, note)
            return explain(channel.group, error, channel, note)

        def disagreement(sequence: int) -> BaseException:
            return explained(MembersDisagree("the members' calls differ", sequence))

        def misfit(is_send: bool, peer: int, tag: int, number: int) -> BaseException:
            return explained(MembersDisagree("", number, (is_send, peer, tag)))

        return {
            **insides,
            **({} if self.ledger is None else self.ledger.insides()),
            **({} if self.matching is None else self.matching.insides()),
            "tensor_type": torch.Tensor,
            "codes": _PLAIN_DTYPES,
            "increment_version": torch._C._increment_version,
            "aborts": self.aborts,
            "label": self.opened.label,
            "is_told": verbs_log.isEnabledFor,
            "level": TRACE,
            "known_levels": known_levels(),
            "group": self.group.name,
            "size": self.group.size(),
            "member": self.group.rank(),
            "headers": _fingerprints,
            "message_headers": _message_fingerprints,
            "explain": explained,
            "disagreement": disagreement,
            "misfit": misfit,
        }

    def _tell(self) -> None:
        """Tell, in the log of all verbs, the call that was just noted."""
        text = call_text(self.recorder.describe())
        verbs_log.log(TRACE, "rank %d: %s", self.group.world.rank, text)

    def _wait_for_the_slowest(self, ledger: Ledger, sequence: int, is_uneven: bool) -> None:
        """Return when no member is too far behind to see what call ``sequence`` overwrites."""
        deadline = clock.now() + self.timeout.total_seconds()
        while (member := ledger.find_behind(sequence, is_uneven)) is not None:
            if self.is_broken():
                raise explain(self.group, WireFailure("aborted while waiting"), self)
            if clock.now() > deadline:
                slow = f"rank {self.group.ranks[member]} is too many calls behind"
                raise explain(self.group, WireTimeout(slow), self)
            time.sleep(_PAUSE_S)

    def _compare_by_a_round(
        self, header: tuple[int, ...], sent: Sequence[int], taken: Sequence[int]
    ) -> None:
        """Compare headers by a gather of their own, where no memory is shared."""
        size = self.group.size()
        nothing = [0] * size
        values = [*header, *(sent or nothing), *(taken or nothing)]
        mine = torch.tensor(values, dtype=torch.int64, device=self.device_type)
        all_of_them = mine.new_empty(size * len(values))
        try:
            pending = self.communicator.all_gather(all_of_them, mine, self.timeout)
            self.communicator.finish(pending, self.timeout)
        except WireFailure as failure:
            raise explain(self.group, failure, self) from None
        headers = all_of_them.view(size, -1).tolist()
        commons = {tuple(row[: len(header)]) for row in headers}
        sends = [row[len(header) :][:size] for row in headers]
        takes = [row[len(header) + size :] for row in headers]
        fits = all(sends[i][j] == takes[j][i] for i in range(size) for j in range(size))
        if len(commons) > 1 or not fits:
            raise call_disagreement(self.group, self, self.recorder.sequence)


def _is_not_entered(*_: Any) -> bool:
    return False


def header_of(
    verb: str, data: Data, op: ReduceKind | None, root: int | None, *, is_uneven: bool
) -> int:
    """What must be equal on all members of a collective, as a number equal on every process.

    Args:
        verb: its name.
        data: the shape and dtype of its tensor, a tuple of such, or None.
        op: its reduction.
        root: the place of its root.
        is_uneven: whether members may differ in the number of elements.
    """
    return _fingerprints[verb, data, None if op is None else op.value, root, is_uneven]


def _message_header(verb: str, tensor: torch.Tensor) -> int:
    """What must be equal on both sides of a message, as a number equal on every process."""
    return _message_fingerprints[tensor.dtype, tensor.numel(), "object" in verb]


def _numbers(
    verb: str, data: Data, op: int | None, root: int | None, is_uneven: bool
) -> tuple[int, ...]:
    """What must be equal on all members of a collective, as numbers equal on every process.

    Args:
        verb: its name.
        data: the shape and dtype of its tensor, a tuple of such, or None.
        op: the number of its reduction.
        root: the place of its root.
        is_uneven: whether members may differ in the number of elements.
    """
    dtype = count = 0
    if is_list(data):
        dtype = fingerprint(*(_codes[kind] for _, kind in data or ()))
        count = fingerprint(*(prod(shape) for shape, _ in data or ()))
    elif data is not None:
        shape, kind = data
        dtype, count = _codes[kind], 0 if is_uneven else prod(shape)
    return _codes[verb], dtype, count, -2 if op is None else op, -2 if root is None else root

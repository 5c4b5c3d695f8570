"""One group's way to move tensors of one device type, and what stands before each call on it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from ..reduce_ops import ReduceKind
from ..runtime.ledger import fingerprint
from ..runtime.recorder import DebugLevel, debug_level
from ..wires.base import Communicator, Wire, WireFailure, WireTimeout
from .failures import call_disagreement, explain, message_disagreement
from .registry import OpenCommunicator

if TYPE_CHECKING:
    from .groups import ProcessGroup

__all__ = ["Channel"]

_PAUSE_S = 0.001


class _Codes(dict[Any, int]):
    """A number for each name, equal on every process."""

    def __missing__(self, name: Any) -> int:
        self[name] = code = crc32(str(name).encode())
        return code


_codes = _Codes()


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
        "communicator",
        "device_type",
        "group",
        "ledger",
        "opened",
        "recorder",
        "spans_hosts",
        "timeout",
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
        self.device_type = device_type
        self.timeout = timeout
        self.communicator: Communicator = opened.communicator
        self.ledger = opened.ledger
        self.recorder = opened.recorder
        self.spans_hosts = opened.spans_hosts

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
        self.communicator.caller = verb
        recorder = self.recorder
        recorder.note(self.group.name, verb, tensor, op, root, (sent, taken) if sent else ())
        ledger = self.ledger
        if ledger is not None:
            sequence = recorder.sequence
            header = fingerprint(*_header(verb, tensor, op, root, bool(sent)))
            if ledger.find_behind(sequence, bool(sent)) is not None:
                self._wait_for_the_slowest(sequence, bool(sent))
            if ledger.enter(sequence, header, sent, taken):
                raise call_disagreement(self.group, self, sequence)
        if self.spans_hosts and debug_level() == DebugLevel.DETAIL:
            self._compare_by_a_round(_header(verb, tensor, op, root, bool(sent)), sent, taken)

    def enter_message(
        self, verb: str, tensor: torch.Tensor, peer: int | None, tag: int, *, is_send: bool
    ) -> None:
        """Note a send or receive, and compare it with its counterpart, if that is there.

        Raises:
            AgreementError: the counterpart has another dtype or number of elements.
        """
        self.recorder.note_message(self.group.name, verb, tensor, peer, tag)
        ledger = self.ledger
        if ledger is None:
            return
        if peer is None:
            ledger.recv_any(tag)
            return
        header = fingerprint(_codes[tensor.dtype], tensor.numel())
        number = (ledger.send if is_send else ledger.recv)(peer, tag, header)
        if number is not None:
            raise message_disagreement(self.group, self, is_send, peer, tag, number)

    def _wait_for_the_slowest(self, sequence: int, is_uneven: bool) -> None:
        """Return when no member is too far behind to see what call ``sequence`` overwrites."""
        ledger = self.ledger
        assert ledger is not None
        deadline = time.monotonic() + self.timeout.total_seconds()
        while (member := ledger.find_behind(sequence, is_uneven)) is not None:
            if self.opened.label in self.opened.aborts:
                raise explain(self.group, WireFailure("aborted while waiting"), self)
            if time.monotonic() > deadline:
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


def _header(
    verb: str,
    tensor: torch.Tensor | list[torch.Tensor] | None,
    op: ReduceKind | None,
    root: int | None,
    is_uneven: bool,
) -> tuple[int, ...]:
    """What must be equal on all members of a collective, as numbers."""
    if tensor is None:
        dtype = count = 0
    elif isinstance(tensor, list):
        dtype = fingerprint(*(_codes[part.dtype] for part in tensor))
        count = fingerprint(*(part.numel() for part in tensor))
    else:
        dtype = _codes[tensor.dtype]
        count = 0 if is_uneven else tensor.numel()
    return (
        _codes[verb],
        dtype,
        count,
        -2 if op is None else op.value,
        -2 if root is None else root,
    )

"""The statements that members of a join context make before a call, in rounds.

A round is a small all-gather on the communicator of the call. It is noted and compared as other
collectives are, so that a member outside of every join context is found to disagree.

A ``JoinedCommunicator`` exchanges statements on one communicator of a join context, and tells
whether this rank is needed there.
"""

from __future__ import annotations

import json
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch

from ..checking.calls import Call, from_fields, get_call, to_fields
from ..errors import MeshdistError
from ..groups.channel import Channel
from ..groups.communicators import get_registry
from ..groups.process_group import ProcessGroup
from ..wires.prepared import PreparedCall

NAME = "Join"
"""The name of a round in the recorder and in messages."""
NOTICE = "notice"
"""The verb of a call by which a joinable says that it begins something, named by its owner."""

_NUM_BYTES = 256
_MOST_BYTES = 1 << 26  # of a statement: more is another call's
_HEAD_BYTES = 4
_ROUND = get_call(NAME, torch.empty(_NUM_BYTES, dtype=torch.uint8, device="meta"))
_AT_ONCE = timedelta(milliseconds=1)
NEVER = timedelta(days=3650)
"""The timeout of waits that end when the others have no data left."""
_NUM_KEPT = 1024  # statements kept as bytes, since programs repeat their calls
_NOTHING = Call("", None)


class Statement(NamedTuple):
    """The message of a member before a call.

    Args:
        call: the call that the member is about to start, or a notice of a joinable; without a verb
            where the member has no call of its own.
        sizes: the numbers of elements sent to and taken from each member, where members may differ.
        has_joined: whether the member has no data left.
        is_late: of a member without data: whether no other has made a call since it joined.
    """

    call: Call = _NOTHING
    sizes: tuple[tuple[int, ...], ...] = ()
    has_joined: bool = False
    is_late: bool = False

    @classmethod
    def of(cls, prepared: PreparedCall, owner: str = "") -> Statement:
        """Return the statement of a prepared call, which the joinable ``owner`` makes."""
        asked = prepared.verb, prepared.noted, prepared.noted_op, prepared.root, prepared.title
        sent, taken = prepared.sizes or ((), ())
        call = get_call(*asked, bool(sent), owner=owner)
        return cls(call, (tuple(sent), tuple(taken)) if sent else ())


@lru_cache(maxsize=_NUM_KEPT)
def to_bytes(statement: Statement) -> bytes:
    """Return a statement as the bytes that travel; the inverse of ``from_bytes``."""
    call, sizes, *flags = statement
    bits = map(int, flags)  # shorter than true and false
    return json.dumps([to_fields(call), sizes, *bits], separators=(",", ":")).encode()


@lru_cache(maxsize=_NUM_KEPT)
def from_bytes(data: bytes) -> Statement:
    """Return a statement from its bytes, the inverse of ``to_bytes``."""
    fields, sizes, *flags = json.loads(data)
    return Statement(from_fields(*fields), tuple(map(tuple, sizes)), *map(bool, flags))


class JoinedCommunicator:
    """A communicator with a group on which this rank may have to answer calls."""

    def __init__(self, group: ProcessGroup, channel: Channel) -> None:
        self.group = group
        self.channel = channel
        self.begun: Statement | None = None  # this member's, while it waits for those of the others
        self.is_over = False  # all members have joined
        self.is_wider = False  # some member is outside of the context
        self.is_ahead = False  # a member waits in a later context, which this rank has yet to enter
        self.is_settled = True  # this rank has made all calls that it has stated
        self._gather: PreparedCall | None = None  # the round that is under way

    @property
    def label(self) -> str:
        """The name of the communicator in stores, equal on all members."""
        return self.channel.opened.label

    def is_held(self) -> bool:
        """Return whether a call of this rank waits for other members' statements."""
        return self.begun is not None and bool(self.begun.call.verb)

    # -- statements -------------------------------------------------------------------------------

    def timeout_of(self, mine: Statement) -> timedelta:
        """Return the time limit to wait for statements: unlimited if ``mine`` calls no verb."""
        return self.channel.timeout if mine.call.verb else NEVER

    def say(self, mine: Statement) -> None:
        """Start an all-gather of statements."""
        self.is_settled, data = False, to_bytes(mine)
        head = len(data).to_bytes(_HEAD_BYTES, "little")
        self._gather = self._start(head + data, _NUM_BYTES, self.timeout_of(mine))
        self.begun = mine

    def is_ready(self) -> bool:
        """Return whether all members' statements have come, or gathering them failed."""
        return self._gather is not None and self._gather.operation.is_ready()

    def read(self) -> list[Statement]:
        """Return all members' statements in group order; raise if any is missing."""
        try:
            return list(map(from_bytes, self._gathered()))
        except (ValueError, TypeError, LookupError):
            raise self._of_another_call() from None

    def end(self) -> None:
        """Drop the wait for other members' statements."""
        self.begun = self._gather = None

    def _gathered(self) -> list[bytes]:
        assert self._gather is not None and self.begun is not None
        rows = self._rows(self._gather, _AT_ONCE)
        sizes = [int.from_bytes(row[:_HEAD_BYTES], "little") for row in rows]
        rows = [row[_HEAD_BYTES:] for row in rows]
        longest = max(sizes)
        if longest > _MOST_BYTES:
            raise self._of_another_call()
        # A statement that does not fit is sent by a second round, which all members then start.
        if longest > _NUM_BYTES - _HEAD_BYTES:
            timeout = self.timeout_of(self.begun)
            rows = self._rows(self._start(to_bytes(self.begun), longest, timeout), timeout)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def _of_another_call(self) -> MeshdistError:
        """Return the error where a member's data are no statement, but those of another call."""
        return self.channel.disagree(self.channel.recorder.sequence)

    def _start(self, data: bytes, num_bytes: int, timeout: timedelta) -> PreparedCall:
        """Start an all-gather of ``num_bytes`` per member, here of ``data``; return it."""
        channel = self.channel
        padded = bytearray(data[:num_bytes].ljust(num_bytes, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(channel.device_type)
        gathered = mine.new_empty(channel.communicator.size * num_bytes)
        prepared = PreparedCall(NAME, "all_gather", [mine], [gathered], mine)
        prepared.timeout = timeout
        channel.enter(prepared, is_guarded=False)
        channel.start_entered(prepared)
        return prepared

    def _rows(self, gather: PreparedCall, left: timedelta) -> list[bytes]:
        self.channel.finish(gather, left)
        rows = gather.outputs[0].view(self.channel.communicator.size, -1)
        return [bytes(row) for row in rows.cpu().numpy()]

    # -- where it is needed -----------------------------------------------------------------------

    def is_open(self) -> bool:
        """Return whether calls are still possible on the communicator."""
        is_closed = self.group.is_closed or self.channel.opened.is_closed
        return not (self.is_over or is_closed or self.channel.is_broken())

    def is_awaited(self) -> bool:
        """Return whether a member waits at a call of the context after this member's last call."""
        return self.channel.is_awaited(NAME, _ROUND.fingerprint if self.is_wider else None)

    def is_missed(self) -> bool:
        """Return whether a member may wait for a call that this rank, leaving, never makes."""
        return not self.is_settled

    def find_gone(self) -> int | None:
        """Return the place of the first member that has left the world, as seen here, or None."""
        ranks, mine = self.channel.group.ranks, self.group.world.rank
        others = [rank for rank in ranks if rank != mine]
        gone = get_registry(self.group.world).endings.find_all(others)
        return min(map(ranks.index, gone), default=None)

"""What each member of a join context says before a call: in shared words, or in a round.

A round is one small all-gather on the communicator of the call. It is noted and compared as other
collectives are, so that a member outside of every join context is found to disagree. Where all
members are on one host, and see each other's call words, later calls of the context are shown
there: then a member that has data need not wait for the others, except where it must know which
ranks have joined. Calls whose sizes may differ, and those on many tensors, have a round still. So
what a member does is told by its own call alone:

    no words yet:     rank 0   shows ROUND, gathers, calls     rank 1 (joined)  as rank 0
    a call on words:  rank 0   shows it, calls                 rank 1 (joined)  shows NOTHING, reads
    an uneven call:   rank 0   shows GATHERED, gathers, calls  rank 1 (joined)  NOTHING, gathers

A ``JoinedCommunicator`` says how that goes on one communicator of a join context, and whether a
rank is needed there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch

from ..checking.call_words import GATHERED, NOTHING, ROUND, CallWords
from ..checking.calls import Call, from_fields, get_call, to_fields
from ..error_text import ranks_text
from ..errors import CollectiveTimeoutError
from ..groups.channel import Channel
from ..groups.communicators import get_registry
from ..groups.process_group import ProcessGroup
from ..wires.prepared import PreparedCall

__all__ = [
    "NAME",
    "NOTICE",
    "Announcement",
    "JoinedCommunicator",
    "Statement",
    "from_bytes",
    "to_bytes",
]

NAME = "Join"
"""The name of a round in the recorder and in messages."""
NOTICE = "notice"
"""The verb of what a joinable begins, which its owner tells."""

_NUM_BYTES = 256
_HEAD_BYTES = 4
_MOST_SHOWN = 256  # tensors
_AT_ONCE = timedelta(milliseconds=1)
_NUM_KEPT = 1024  # programs repeat their calls
_NOTHING = Call("", None)


class Statement(NamedTuple):
    """The message of one member before a call.

    Args:
        call: the call that it is about to start, or what a joinable begins, of the verb ``NOTICE``;
            of no verb where the member brings nothing of its own.
        sizes: how many elements go to and come from each member, where members may differ; else ().
        has_joined: whether the member has no data left.
        is_late: of such a member: whether no other has gone on since.
        sees_all: in a round, whether the member sees the call words of all.
    """

    call: Call = _NOTHING
    sizes: tuple[tuple[int, ...], ...] = ()
    has_joined: bool = False
    is_late: bool = False
    sees_all: bool = False

    @classmethod
    def of(cls, prepared: PreparedCall, owner: str = "") -> Statement:
        """That of a call, as ``Channel.enter`` is given it, and its owner."""
        asked = prepared.verb, prepared.noted, prepared.noted_op, prepared.root, prepared.title
        sent, taken = prepared.sizes or ((), ())
        call = get_call(*asked, bool(sent), owner=owner)
        return cls(call, (tuple(sent), tuple(taken)) if sent else ())

    @property
    def is_gathered(self) -> bool:
        """Whether it is said in a round always: it has sizes, or tells of many tensors.

        That is equal on all members whose calls are, so that they do the same.
        """
        return self.call.is_uneven or len(self.call.data or ()) > _MOST_SHOWN


@lru_cache(maxsize=_NUM_KEPT)
def to_bytes(statement: Statement) -> bytes:
    """The bytes that travel; the inverse of ``from_bytes``."""
    call, sizes, *flags = statement
    bits = map(int, flags)  # shorter than words
    return json.dumps([to_fields(call), sizes, *bits], separators=(",", ":")).encode()


@lru_cache(maxsize=_NUM_KEPT)
def from_bytes(data: bytes) -> Statement:
    """The statement that was made; the inverse of ``to_bytes``."""
    fields, sizes, *flags = json.loads(data)
    return Statement(from_fields(*fields), tuple(map(tuple, sizes)), *map(bool, flags))


class Announcement:
    """What this member says before a call; what all say, once all have come to it.

    Args:
        channel: on whose communicator it is.
        mine: this member's.
        timeout: of a round.
        words: of this member, where all see those of all; else it is a round.
    """

    def __init__(
        self, channel: Channel, mine: Statement, timeout: timedelta, words: CallWords | None
    ) -> None:
        self.mine = mine
        self._channel, self._timeout, self._words = channel, timeout, words
        self._gather: PreparedCall | None = None
        self._said: list[Statement] | None = None
        bits = mine.has_joined | mine.is_late << 1
        if words is None or mine.is_gathered:
            if words is not None:
                words.enter(GATHERED)
            self._begin_round()
        elif mine.call.verb:
            words.show(mine.call, bits)
        else:
            words.enter(NOTHING | bits)

    @property
    def is_round(self) -> bool:
        """Whether it goes by the wire, so that it fails as members end."""
        return self._gather is not None

    def is_ready(self) -> bool:
        """Whether all have come to it, or it has failed."""
        if self._gather is None and self._said is None:
            self._look()
        return self._said is not None or (
            self._gather is not None and self._gather.operation.is_ready()
        )

    def finish(self, timeout: timedelta = _AT_ONCE) -> list[Statement] | None:
        """Return what each member says, in group order; None if not all have come to it.

        Raises:
            MeshdistError: a round failed; as the group explains.
        """
        return self._said if self._gather is None else self._finish_round(self._gather, timeout)

    def _look(self) -> None:
        """Read what all show, or begin the round that one of them has begun."""
        assert self._words is not None
        shown = self._words.find_shown()
        if GATHERED in shown.values():
            self._begin_round()
        elif len(shown) == self._channel.communicator.size:
            said = []
            for member, word in sorted(shown.items()):
                call = self._words.find_call(member, word) if word > ROUND else _NOTHING
                if call is None:  # it has not arrived yet
                    return
                said.append(Statement(call, (), bool(word & 1), bool(word & 2)))
            self._said = said

    def _begin_round(self) -> None:
        data = to_bytes(self.mine)
        self._gather = self._start(len(data).to_bytes(_HEAD_BYTES, "little") + data, _NUM_BYTES)

    def _finish_round(self, gather: PreparedCall, timeout: timedelta) -> list[Statement]:
        rows = self._rows(gather, timeout)
        sizes = [int.from_bytes(row[:_HEAD_BYTES], "little") for row in rows]
        rows = [row[_HEAD_BYTES:] for row in rows]
        longest = max(sizes)
        if longest > _NUM_BYTES - _HEAD_BYTES:  # all have come, and know that they do not fit
            rows = self._rows(self._start(to_bytes(self.mine), longest), self._timeout)
        return [from_bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]

    def _start(self, data: bytes, num_bytes: int) -> PreparedCall:
        """Start to gather ``data`` of all members, ``num_bytes`` of each."""
        channel = self._channel
        padded = bytearray(data[:num_bytes].ljust(num_bytes, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8).to(channel.device_type)
        gathered = mine.new_empty(channel.communicator.size * num_bytes)
        prepared = PreparedCall(NAME, "all_gather", [mine], [gathered], mine)
        prepared.timeout = self._timeout
        channel.enter(prepared, is_guarded=False)
        channel.start_entered(prepared)
        return prepared

    def _rows(self, gather: PreparedCall, left: timedelta) -> list[bytes]:
        self._channel.finish(gather, left)
        rows = gather.outputs[0].view(self._channel.communicator.size, -1)
        return [bytes(row) for row in rows.cpu().numpy()]


@dataclass(eq=False)
class JoinedCommunicator:
    """One communicator on which this rank may be needed, with one group that uses it."""

    group: ProcessGroup
    channel: Channel
    words: CallWords | None = field(default=None, init=False)
    """This member's, where it has some."""
    begun: Announcement | None = field(default=None, init=False)
    """The announcement that this rank has made, and whose answers it has not read."""
    is_held: bool = field(default=False, init=False)
    """Whether a call of this rank waits for that."""
    is_over: bool = field(default=False, init=False)
    """Whether all members have joined."""
    uses_words: bool = field(default=False, init=False)
    """Whether all members see what the others show in shared words; the same on all of them."""
    is_settled: bool = field(default=True, init=False)
    """Whether this rank has made the calls of all announcements that it has made."""

    def __post_init__(self) -> None:
        opened = self.channel.opened
        if opened.call_words is None and not opened.communicator.on_stream:
            tables = get_registry(self.group.world).header_tables
            opened.call_words = tables.make_call_words(opened.label, self.group.ranks)
        self.words = opened.call_words
        if self.words is not None:
            self.words.begin()

    def announce(self, mine: Statement, timeout: timedelta) -> None:
        """Say ``mine`` to all members, where there is room for it."""
        self.is_settled = False
        words = self.words
        if not self.uses_words and words is not None:
            words.enter(ROUND)
            mine = mine._replace(sees_all=words.sees_all())
        self.begun = Announcement(self.channel, mine, timeout, words if self.uses_words else None)

    def note(self, said: Sequence[Statement]) -> None:
        """Take notice of what all have said."""
        self.uses_words = self.uses_words or all(one.sees_all for one in said)

    def has_room(self, mine: Statement) -> bool:
        """Whether ``mine`` can be said now, over nothing that a member has yet to read."""
        if not self.uses_words or self.words is None:
            return True
        return self.words.has_room(mine.call if mine.call.verb and not mine.is_gathered else None)

    @property
    def label(self) -> str:
        """Of the communicator, equal on all members."""
        return self.channel.opened.label

    def is_in_round(self) -> bool:
        """Whether a round is under way, which fails as members end."""
        return self.begun is not None and self.begun.is_round

    def is_ready(self) -> bool:
        """Whether what is begun here is ready, or a member that has left is missed in it."""
        assert self.begun is not None
        return self.begun.is_ready() or self.find_left() is not None

    def is_open(self) -> bool:
        """Whether there is more to come, be it the error of a member that could not show it."""
        if self.find_full() is not None:
            return True
        is_closed = self.group.is_closed or self.channel.opened.is_closed
        return not (self.is_over or is_closed or self.channel.is_broken())

    def is_awaited(self) -> bool:
        """Whether a member has come to a call in a context after this member's last one.

        A call outside of contexts is told from these by words, or by the wire if it can.
        """
        if self.words is None or not self.words.reaches_all():
            return self.channel.is_awaited(NAME)
        return self.words.is_awaited(by_wire=not self.uses_words)

    def is_missed(self) -> bool:
        """Whether a member may be at a call that this one, which has left, does not make."""
        return not self.is_settled or (self.uses_words and self.is_awaited())

    def find_left(self) -> int | None:
        """A member that has left the context, where it is seen."""
        return self.words.find_left() if self.uses_words and self.words else None

    def find_full(self) -> int | None:
        """A member whose words had no room for its call."""
        return self.words.find_full() if self.uses_words and self.words else None

    def find_gone(self) -> int | None:
        """A member that will make no announcement more, since its process has ended.

        Raises:
            StoreError: the store, which is asked, is lost.
        """
        ranks, mine = self.channel.group.ranks, self.group.world.rank
        others = [rank for rank in ranks if rank != mine]
        gone = get_registry(self.group.world).endings.find_all(others)
        return min(map(ranks.index, gone), default=None)

    def leave(self) -> None:
        """This member makes no call more in the context."""
        if self.words is not None:
            self.words.leave(self.words.number - (not self.is_settled))

    def not_begun(self, call: Call, timeout: timedelta) -> CollectiveTimeoutError:
        """The error of members that have not come to a call, or that are far behind it."""
        group, shown = self.channel.group, self.words.find_shown() if self.words else {}
        silent = [rank for member, rank in enumerate(group.ranks) if member not in shown]
        return CollectiveTimeoutError(
            f"{call.text} on {group.name} was not begun by all ranks within "
            f"{timeout.total_seconds():g} s",
            where=group.here,
            expected=f"the same call, or the end of the data, on {ranks_text(group.ranks)}",
            found=f"{ranks_text(silent)} did not come to it",
            fix="look at the ranks that did not come to this call; the group is broken now",
        )

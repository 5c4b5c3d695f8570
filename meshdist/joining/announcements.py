"""The statement of each member in the round that comes before a call, inside a join context.

A round is one small all-gather on the communicator of the call. It is noted and compared as other
collectives are, so that a member outside of every join context is found to disagree. Where all
members are on one host, and see each other's announcement tables, later rounds of the context go
through these: then a member that has data need not wait for the others' announcements, except where
it must know which ranks have joined. A ``JoinedCommunicator`` says how announcements go on one
communicator of a join context, and whether a rank is needed there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch

from ..checking.announcement_table import AnnouncementTable
from ..checking.calls import Call, Data, calls, get_call, is_list
from ..dtypes import dtype_name
from ..error_text import ranks_text
from ..errors import CollectiveTimeoutError
from ..groups.channel import Channel
from ..groups.communicators import OpenCommunicator, get_registry
from ..groups.process_group import ProcessGroup
from ..wires.prepared import PreparedCall

__all__ = [
    "NAME",
    "NOTICE",
    "JoinedCommunicator",
    "Places",
    "AnnouncementRound",
    "Statement",
    "TableRound",
    "from_bytes",
    "to_bytes",
]

NAME = "Join"
"""The name of a round in the recorder and in messages."""
NOTICE = "notice"
"""The verb of what a joinable begins, which its owner tells."""

_NUM_BYTES = 256
_HEAD_BYTES = 4
_AT_ONCE = timedelta(milliseconds=1)
_NUM_KEPT = 1024  # programs repeat their calls
_NOTHING = Call("", None)


class Statement(NamedTuple):
    """The message of one member in a round.

    Args:
        call: the call that it is about to start, or what a joinable begins, of the verb ``NOTICE``;
            of no verb where the member brings nothing of its own.
        sizes: how many elements go to and come from each member, where members may differ; else ().
        has_joined: whether the member has no data left.
        is_late: of such a member: whether no other has gone on since.
        sees_all: whether the member sees the announcement tables of all.
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


@lru_cache(maxsize=_NUM_KEPT)
def to_bytes(statement: Statement) -> bytes:
    """The bytes that travel; the inverse of ``from_bytes``."""
    call, sizes, *flags = statement
    parts = [(shape, dtype_name(dtype)) for shape, dtype in call.parts]
    said = [call.verb, parts, call.op_number, call.root, call.title, call.owner, sizes]
    bits = map(int, [is_list(call.data), call.is_uneven, *flags])  # shorter than words
    return json.dumps([*said, *bits], separators=(",", ":")).encode()


@lru_cache(maxsize=_NUM_KEPT)
def from_bytes(data: bytes) -> Statement:
    """The statement that was made; the inverse of ``to_bytes``."""
    verb, shapes, op, root, title, owner, sizes, *bits = json.loads(data)
    is_of_list, is_uneven, *flags = map(bool, bits)
    parts = tuple((torch.Size(shape), getattr(torch, name)) for shape, name in shapes)
    given: Data = parts if is_of_list else (*parts, None)[0]
    call = calls[verb, given, op, root, title, is_uneven, (), owner]
    return Statement(call, tuple(map(tuple, sizes)), *flags)


class AnnouncementRound:
    """One round that has been started; the statements of all members, once it is done."""

    is_watched = True
    """Whether it fails as members end."""

    def __init__(self, channel: Channel, mine: Statement, timeout: timedelta) -> None:
        self._channel = channel
        self._data = to_bytes(mine)
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        head = len(self._data).to_bytes(_HEAD_BYTES, "little")
        self._gather = self._start(head + self._data, _NUM_BYTES)

    def is_ready(self) -> bool:
        """Whether it is done, or has failed."""
        return self._gather.operation.is_ready()

    def find_left(self) -> int | None:
        """A member that has left the context, so that this is never done."""
        return None

    def finish(self, timeout: timedelta = _AT_ONCE) -> list[Statement]:
        """Return what each member says, in group order; errors are as the group explains."""
        rows = self._rows(self._gather, timeout)
        sizes = [int.from_bytes(row[:_HEAD_BYTES], "little") for row in rows]
        said = [row[_HEAD_BYTES:][:size] for row, size in zip(rows, sizes, strict=True)]
        return self._read(sizes, said, _NUM_BYTES - _HEAD_BYTES)

    def _read(self, sizes: list[int], said: list[bytes], most: int) -> list[Statement]:
        """The statements of all, of which at most the first ``most`` bytes are there."""
        longest = max(sizes)
        if longest > most:  # all have come, and know that they do not fit
            rows = self._rows(self._start(self._data, longest), self._timeout)
            said = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        return [from_bytes(one) for one in said]

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


class TableRound(AnnouncementRound):
    """One round through announcement tables: it sends nothing, and the wire does not watch it.

    Args:
        table: this member's, with room for an announcement.
        channel, mine, timeout: as for ``AnnouncementRound``.
    """

    is_watched = False

    def __init__(
        self, table: AnnouncementTable, channel: Channel, mine: Statement, timeout: timedelta
    ) -> None:
        self._table = table
        self._text = mine.call.text
        super().__init__(channel, mine, timeout)

    def _begin(self) -> None:
        self._table.say(self._data)

    def is_ready(self) -> bool:
        """Whether all have said it, or one that has not has left."""
        return self._table.find_said() is not None or self._table.find_left() is not None

    def find_left(self) -> int | None:
        """A member that has left before it has said it."""
        return None if self._table.find_said() is not None else self._table.find_left()

    def finish(self, timeout: timedelta = _AT_ONCE) -> list[Statement]:
        """Return what each member says, in group order; CollectiveTimeoutError if some lack."""
        rows = self._table.find_said()
        if rows is None:
            raise self._late()
        sizes, said = (list(column) for column in zip(*rows, strict=True))
        return self._read(sizes, said, self._table.num_bytes)

    def _late(self) -> CollectiveTimeoutError:
        group = self._channel.group
        silent = [group.ranks[member] for member in self._table.find_silent()]
        return CollectiveTimeoutError(
            f"{self._text} on {group.name} was not begun by all ranks within "
            f"{self._timeout.total_seconds():g} s",
            where=group.here,
            expected=f"the same call, or the end of the data, on {ranks_text(group.ranks)}",
            found=f"{ranks_text(silent)} did not come to it",
            fix="look at the ranks that did not come to this call; the group is broken now",
        )


@dataclass(eq=False)
class JoinedCommunicator:
    """One communicator on which this rank may be needed, with one group that uses it."""

    group: ProcessGroup
    channel: Channel
    round: AnnouncementRound | None = field(default=None, init=False)
    """Of a rank that has joined: the one that it has begun."""
    is_over: bool = field(default=False, init=False)
    """Whether all members have joined."""
    is_held: bool = field(default=False, init=False)
    """Whether a call that this rank has begun waits for that round."""
    uses_table: bool = field(default=False, init=False)
    """Whether rounds go through announcement tables; the same on all members."""

    is_settled: bool = field(default=True, init=False)
    """Whether this rank has made the calls of all rounds by the wire that it has begun."""

    def __post_init__(self) -> None:
        opened = self.channel.opened
        if opened.announcements is None and not opened.communicator.on_stream:
            tables = get_registry(self.group.world).header_tables
            opened.announcements = tables.make_for_announcements(opened.label, self.group.ranks)
        self.table = opened.announcements
        if self.table is not None:
            self.table.begin()

    def begin_round(self, mine: Statement, timeout: timedelta) -> AnnouncementRound:
        """Say ``mine`` to all members; where tables are used there is room for it."""
        if self.uses_table:
            assert self.table is not None  # else the others do not use theirs
            return TableRound(self.table, self.channel, mine, timeout)
        self.is_settled = False
        if self.table is not None:
            self.table.count_by_wire()
        sees_all = self.table is not None and self.table.sees_all()
        return AnnouncementRound(self.channel, mine._replace(sees_all=sees_all), timeout)

    def note(self, said: Sequence[Statement]) -> None:
        """Take notice of what all have said in a round."""
        self.uses_table = self.uses_table or all(one.sees_all for one in said)

    def say(self, mine: Statement) -> bool:
        """Say ``mine`` without a round, where those that read it do without this rank's waiting.

        Sizes that differ between members make announcements of different lengths, of which all have
        to know which is too long for the table.

        Returns:
            Whether that could be done.
        """
        if not self.uses_table or mine.sizes:
            return False
        assert self.table is not None
        data = to_bytes(mine)
        if len(data) > self.table.num_bytes:
            return False
        self.table.say(data)
        return True

    def has_room(self) -> bool:
        """Whether the next announcement can be made now."""
        return not self.uses_table or self.table is None or self.table.has_room()

    def is_open(self) -> bool:
        """Whether members may call there still."""
        is_closed = self.group.is_closed or self.channel.opened.is_closed
        return not (self.is_over or is_closed or self.channel.is_broken())

    def is_awaited(self) -> bool:
        """Whether a member has come to a call in a context after this member's last one.

        A call outside of contexts is told from these by tables, or by the wire if it can.
        """
        if self.table is None or not self.table.reaches_all():
            return self.channel.is_awaited(NAME)
        return self.table.is_awaited() if self.uses_table else self.table.is_awaited_by_wire()

    def find_gone(self) -> int | None:
        """A member that will make no announcement more, since its process has ended.

        Raises:
            StoreError: the store, which is asked where no tables are used, is lost.
        """
        if self.uses_table and self.table is not None:
            return self.table.find_gone()
        ranks, mine = self.channel.group.ranks, self.group.world.rank
        gone = get_registry(self.group.world).endings.find_all(
            [one for one in ranks if one != mine]
        )
        return min(map(ranks.index, gone), default=None)

    def find_left(self) -> int | None:
        """A member that has left the context, where it is seen."""
        return self.table.find_left() if self.uses_table and self.table is not None else None

    def settle(self) -> None:
        """This member has made all calls that it has announced."""
        self.is_settled = True
        if self.table is not None:
            self.table.settle()

    def leave(self) -> None:
        """This member makes no call more in the context."""
        if self.table is not None:
            self.table.leave()

    def is_missed(self) -> bool:
        """Whether a member may be at a call that this one, which has left, does not make."""
        if self.uses_table and self.table is not None:
            return self.table.is_anyone_beyond()
        return not self.is_settled


class Places:
    """All communicators of one join context; ``main`` is its main group's, of ``ranks``."""

    def __init__(self, main: OpenCommunicator, ranks: Sequence[int]) -> None:
        self._main = main
        self._ranks = {*ranks}
        self._by_opened: dict[OpenCommunicator, JoinedCommunicator] = {}

    def __iter__(self) -> Iterator[JoinedCommunicator]:
        return iter(self._by_opened.values())

    @property
    def main(self) -> JoinedCommunicator | None:
        """That of the main group; None where this rank is alone there."""
        return self.find(self._main)

    def find(self, opened: OpenCommunicator) -> JoinedCommunicator | None:
        """The place of a communicator that has several members."""
        return self._by_opened.get(opened)

    def cover(self, group: ProcessGroup, channel: Channel) -> JoinedCommunicator:
        """The place of a channel's communicator, which may be new."""
        place = self.find(channel.opened)
        if place is None:
            place = self._by_opened[channel.opened] = JoinedCommunicator(group, channel)
        return place

    # -- of a rank that has joined ----------------------------------------------------------------

    def begins_at_once(self, place: JoinedCommunicator) -> bool:
        """Whether a round is always under way there, since calls of others cannot be seen."""
        reaches = self._ranks.issuperset(place.group.ranks)
        return not place.channel.shows_calls and reaches and place.is_open()

    def find_due(self) -> JoinedCommunicator | None:
        """Where there is something to do: a round is done, or a member waits for this one."""
        for place in tuple(self):
            if place.round is not None:
                if not place.is_held and place.round.is_ready():
                    return place
            elif place.is_open() and place.is_awaited():
                return place
        return None

    def is_at_work(self) -> bool:
        """Whether a round is under way, or a call that a member started before it had joined."""
        return any(
            place.round is not None
            or (
                place.uses_table
                and self._ranks.issuperset(place.group.ranks)
                and place.is_open()
                and place.is_awaited()
            )
            for place in self
        )

    def under_way(self) -> list[JoinedCommunicator]:
        """Those where this rank waits for others: in rounds, and on the main group to its end."""
        main = self.main
        return [one for one in self if one.round or (one is main and not one.is_over)]

    def leave_broken(self, due: JoinedCommunicator | None) -> bool:
        """Wait no more for calls where a group is broken: no member that goes on makes any there.

        Returns:
            Whether that was so at ``due``, or where a round was under way; never on the main group,
            or where a call of this rank waits.
        """
        broken = [
            one for one in self if one.channel.is_broken() and (one is due or one.round is not None)
        ]
        if not broken or any(one.is_held or one is self.main for one in broken):
            return False
        for one in broken:
            one.round = None
        return True

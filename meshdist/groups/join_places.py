"""The communicators of a join context: how announcements go on each, and where a rank is needed.

The first rounds of a context go by the wire. Once all members have said in one that they see the
announcement tables of all, later ones go through these: then a member that has data need not wait
for the others' announcements, except where it must know which ranks have joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from .announcements import NAME, Announcement, Round, TableRound, to_bytes
from .channel import Channel
from .process_group import ProcessGroup
from .registry import OpenCommunicator, get_registry

__all__ = ["Place", "Places"]


@dataclass(eq=False)
class Place:
    """One communicator on which this rank may be needed, with one group that uses it."""

    group: ProcessGroup
    channel: Channel
    round: Round | None = field(default=None, init=False)
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

    def begin_round(self, mine: Announcement, timeout: timedelta) -> Round:
        """Say ``mine`` to all members; where tables are used there is room for it."""
        if self.uses_table:
            assert self.table is not None  # else the others do not use theirs
            return TableRound(self.table, self.channel, mine, timeout)
        self.is_settled = False
        if self.table is not None:
            self.table.count_by_wire()
        sees_all = self.table is not None and self.table.sees_all()
        return Round(self.channel, replace(mine, sees_all=sees_all), timeout)

    def note(self, said: Sequence[Announcement]) -> None:
        """Take notice of what all have said in a round."""
        self.uses_table = self.uses_table or all(one.sees_all for one in said)

    def say(self, mine: Announcement) -> bool:
        """Say ``mine`` without a round, where those that read it do without this rank's waiting.

        Sizes that differ between members make announcements of different lengths, of which all have
        to know which is too long for the table.

        Returns:
            Whether that could be done.
        """
        if not self.uses_table or mine.sent:
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
        self._by_opened: dict[OpenCommunicator, Place] = {}

    def __iter__(self) -> Iterator[Place]:
        return iter(self._by_opened.values())

    @property
    def main(self) -> Place | None:
        """That of the main group; None where this rank is alone there."""
        return self.find(self._main)

    def find(self, opened: OpenCommunicator) -> Place | None:
        """The place of a communicator that has several members."""
        return self._by_opened.get(opened)

    def cover(self, group: ProcessGroup, channel: Channel) -> Place:
        """The place of a channel's communicator, which may be new."""
        place = self.find(channel.opened)
        if place is None:
            place = self._by_opened[channel.opened] = Place(group, channel)
        return place

    # -- of a rank that has joined ----------------------------------------------------------------

    def begins_at_once(self, place: Place) -> bool:
        """Whether a round is always under way there, since calls of others cannot be seen."""
        reaches = self._ranks.issuperset(place.group.ranks)
        return not place.channel.shows_calls and reaches and place.is_open()

    def find_due(self) -> Place | None:
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

    def under_way(self) -> list[Place]:
        """Those where this rank waits for others: in rounds, and on the main group to its end."""
        main = self.main
        return [one for one in self if one.round or (one is main and not one.is_over)]

    def leave_broken(self, due: Place | None) -> bool:
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

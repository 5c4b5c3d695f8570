"""The members of one of torch's groups as a group of ours: the verbs of torch's run on it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import torch

from ..bootstrap.bounded_store import within
from ..bootstrap.world import World
from ..checking.calls import GroupFacts
from ..checking.recorder import Recorder
from ..error_text import ranks_text
from ..groups.channel import Channel
from ..groups.failures import explained_opening
from ..groups.process_group import ProcessGroup
from ..groups.registry import OpenCommunicator
from ..runtime.deadlines import Deadline
from ..runtime.hosts import num_forks
from ..wires.failures import MembersDisagree
from ..wires.packing import Layout
from ..wires.prepared import PreparedCall
from ..wires.registry import Opening, Wire
from ..wires.work import Work
from .members import Comparison, MembersOfTorchGroup

__all__ = ["InnerGroup"]

_LABEL = ""  # of a communicator that no other group shares


class InnerGroup(ProcessGroup):
    """One group of torch's as ours. Making one opens the wire, and is collective over its members.

    Args:
        wire: what moves tensors of its device types.
        opening: the group, as the wire is to open it.
        name: what torch calls the group.

    Raises:
        BackendError: the wire could not be opened; CollectiveTimeoutError: a member did not come.
    """

    def __init__(self, wire: Wire, opening: Opening, name: str) -> None:
        ranks, timeout = opening.ranks, opening.timeout
        # Opening is collective and calls need not be: so all that may be called for is opened here.
        kinds = {opening.device_type, *(["cuda"] if torch.cuda.is_available() else [])}
        backends = dict.fromkeys(sorted(wire.device_types & kinds), wire.name)
        world = World(ranks[opening.rank], max(ranks) + 1, opening.store, backends, timeout)
        super().__init__(world, ranks, name=f"group {name!r} ({ranks_text(ranks)})")
        facts = GroupFacts(self.name, ranks, opening.rank, wire=wire.name, timeout=timeout)
        self.here = facts.here
        self.recorder = Recorder()
        self._aborts: dict[str, Any] = {}
        self._comparison: Comparison | None = None
        if not wire.compares_calls:
            self._comparison = Comparison(opening, self.recorder)
            opening = replace(opening, look=self._comparison.compare_again)
        # Without the group, whose channels keep the native core's part that is given this.
        break_here = partial(_break_here, ref(self))
        others = MembersOfTorchGroup(facts, opening.store, self._comparison, break_here)
        try:
            for kind in backends:
                self._channels[kind] = self._opened(wire, opening, kind, facts, others)
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        """Do nothing: torch's group ends it."""

    def _opened(
        self,
        wire: Wire,
        opening: Opening,
        kind: str,
        facts: GroupFacts,
        others: MembersOfTorchGroup,
    ) -> Channel:
        """The channel for tensors of a device type."""
        if kind != opening.device_type:
            opening = opening.below(kind, device_type=kind)
        explained = explained_opening(self.name, self.ranks, wire, self.here)
        with explained, within(Deadline(opening.timeout)):
            communicator = wire.open(opening)
        comparison = self._comparison
        table = None if comparison is None else comparison.table
        opened = OpenCommunicator(_LABEL, communicator, self.recorder, self._aborts, table)
        channel = _SharedChannel(facts, wire, opened, kind, others)
        channel.comparison = comparison
        return channel

    @property
    def is_over(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._closed or self._num_forks != num_forks()

    @property
    def broken(self) -> str:
        """Why it cannot be used any more; "" where it can."""
        abort = self._aborts.get(_LABEL)
        return "" if abort is None else str(abort["reason"])

    def break_here(self, reason: str) -> None:
        """Refuse all that follows, and free every wait.

        After a timeout the members may be out of step: one that comes late would else meet another
        call than its own. Calls that differ end the group where the wire does not compare them: it
        has started those of some members.
        """
        self._aborts.setdefault(_LABEL, {"reason": reason})
        self.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Let every later call take so long."""
        self.own_timeout = timeout
        for channel in self._channels.values():
            channel.timeout = timeout

    def abort(self, reason: str = "") -> None:
        """Free every wait, here and on the other members."""
        for channel in self._channels.values():
            channel.communicator.abort()

    def leave(self) -> None:
        """Announce to the other members that this process ends in good order."""
        for channel in self._channels.values():
            channel.communicator.leave()

    def close(self) -> None:
        """End this member's part."""
        self._closed = True
        self.leave()
        for channel in self._channels.values():
            channel.communicator.close()
        if self._comparison is not None:
            self._comparison.close()


def _break_here(alive: ref[InnerGroup], reason: str) -> None:
    if (group := alive()) is not None:
        group.break_here(reason)


class _SharedChannel(Channel):
    """A channel on which several threads may call verbs at the same time."""

    comparison: Comparison | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._starting = threading.RLock()

    def run(self, prepared: PreparedCall, *, is_async: bool = False) -> Work | None:
        # Calls that go on in the background start in the order in which they are noted.
        with self._starting if is_async else nullcontext():
            return super().run(prepared, is_async=is_async)

    def enter(
        self, prepared: PreparedCall, layouts: Sequence[Layout] = (), *, is_guarded: bool = True
    ) -> None:
        with self._starting:
            super().enter(prepared, layouts, is_guarded=is_guarded)
        if self.comparison is not None:
            try:
                self.comparison.compare_again(is_thorough=False)
            except MembersDisagree as failure:
                raise self.explain(failure, prepared.number) from None

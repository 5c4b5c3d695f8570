"""Waits of ranks in a join context, which end where the others leave it by exceptions, or end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..bootstrap.world import World
from ..checking.call_sites import call_site
from ..errors import JoinError
from ..runtime.deadlines import Deadline, Grace, wait_until
from ..wires.failures import MemberLost
from ..wires.simulated.scheduler import find_rank_here
from ..wires.simulated.store import CallWait
from .channel import Channel
from .registry import get_registry
from .whereabouts import Whereabouts

__all__ = ["Waits"]

_LOOK_S = 0.1
_LOOK_AT_LIVES_S = 0.5
_LEAVING_S = 0.5
_NUM_YIELDS = 20
_PAUSE_S = 0.001  # the others wait meanwhile


class Waits:
    """The waits of this rank in one join context.

    Args:
        world: whose rank it is.
        whereabouts: what the ranks have said of themselves.
    """

    def __init__(self, world: World, whereabouts: Whereabouts) -> None:
        self._world = world
        self._whereabouts = whereabouts

    def until(
        self,
        is_ready: Callable[[], bool],
        channels: Sequence[Channel],
        timeout: timedelta,
        idle: Channel | None = None,
    ) -> None:
        """Wait until ``is_ready()``, or the timeout.

        Args:
            is_ready: called often.
            channels: on which the others are waited for.
            timeout: how long to wait.
            idle: where nothing of this rank's is under way, which would fail as others end.

        Raises:
            JoinError: a member of ``channels`` has left the context by an exception.
            AbortedError, BackendError: one of ``channels`` is broken; a member of ``idle`` ended.
        """
        here = find_rank_here()
        if here is not None:
            what = "a join context, for the others' next call"
            here.wait(
                CallWait(
                    what, call_site(), lambda: is_ready() or self._find_left(channels) is not None
                )
            )
            if not is_ready():
                self.raise_left(channels)
            return
        for _ in range(_NUM_YIELDS):  # a round is short where all members are there
            if is_ready():
                return
            time.sleep(0)
        next_look = next_look_at_lives = time.monotonic() + _LOOK_S

        def check() -> None:
            nonlocal next_look, next_look_at_lives
            for channel in channels:
                channel.refuse_broken()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_S
                # One that has left after the round leaves it to be done here in a moment.
                if self._find_left(channels) and not wait_until(is_ready, Grace(_LEAVING_S)):
                    self.raise_left(channels)
            if idle is not None and now >= next_look_at_lives:
                next_look_at_lives = now + _LOOK_AT_LIVES_S
                self._raise_ended(idle)

        wait_until(is_ready, Deadline(timeout), check, longest_pause_s=_PAUSE_S)

    def raise_left(self, channels: Sequence[Channel]) -> None:
        """Raise where a member has left the context, which no rank may wait for then."""
        channel = self._find_left(channels)
        if channel is None:
            return
        left = self._whereabouts.find_left(channel.opened.label)
        assert left is not None  # it is said once
        summary = f"rank {left['rank']} has left the join context by an exception"
        if not channel.is_broken():  # what this rank has started there would wait for ever
            reason = f"{summary}: {left['reason']}"
            message = {"reason": reason, "group": channel.group.name}
            get_registry(self._world).abort([channel.opened.label], message)
        raise JoinError(
            summary,
            where=f"rank {self._world.rank}, {channel.group.name}",
            found=left["reason"],
            fix=f"look at rank {left['rank']}; the group is broken now",
        )

    def _find_left(self, channels: Sequence[Channel]) -> Channel | None:
        """A channel of which a member has left the context by an exception."""
        find = self._whereabouts.find_left
        return next((one for one in channels if find(one.opened.label) is not None), None)

    def _raise_ended(self, channel: Channel) -> None:
        """Raise where a member's process has ended."""
        endings = get_registry(self._world).endings
        for member, rank in enumerate(channel.group.ranks):
            if rank != self._world.rank and endings.find(rank):
                raise channel.explain(MemberLost("has ended", member))

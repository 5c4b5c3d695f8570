"""Waits of ranks in a join context, which end where the others leave it by exceptions, or end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

from ..bootstrap.world import World
from ..checking.call_words import num_bytes
from ..checking.program import call_site, set_aside
from ..errors import JoinError
from ..groups.communicators import get_registry
from ..runtime.deadlines import Deadline, Grace, wait_until
from ..wires.operations import MemberLost
from ..wires.simulated.scheduler import find_rank_here
from ..wires.simulated.store import CallWait
from ..wires.work import Work, is_ready as is_done, may_be_dropped
from .announcements import JoinedCommunicator
from .whereabouts import Whereabouts

__all__ = ["Waits"]

_LOOK_S = 0.1
_LOOK_AT_LIVES_S = 0.5
_LEAVING_S = 0.5
_SEEN_S = 0.002
_YIELDS_S = 0.0002
_PAUSE_S = 0.001  # the others wait meanwhile
_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # not on every system


class Waits:
    """The waits of this rank in one join context, with what the ranks have said of themselves."""

    def __init__(self, world: World, whereabouts: Whereabouts) -> None:
        self._world = world
        self._whereabouts = whereabouts
        self._answers: list[Work] = []

    def keep(self, answer: Work | None) -> None:
        """Take an answer that this rank does not wait for now."""
        if answer is not None:
            self._answers.append(may_be_dropped(answer))

    def has_ready_answer(self) -> bool:
        """Let the answers that were taken go on; whether one is done, or has failed."""
        return any(is_done(answer) for answer in self._answers)

    def end_answers(self, *, ready_alone: bool = False) -> None:
        """Wait for the answers taken, or the done ones alone; raise the error of a failed one."""
        for answer in tuple(self._answers):
            if not ready_alone or is_done(answer):
                self._answers.remove(answer)
                with set_aside():  # this rank may be inside a call of its own
                    answer.wait()

    def until(
        self,
        is_ready: Callable[[], bool],
        places: Sequence[JoinedCommunicator],
        timeout: timedelta,
    ) -> None:
        """Wait until ``is_ready()``, which is called often, or the timeout.

        Args:
            places: where the others are waited for; in a round the wire sees that they end.

        Raises:
            JoinError: a member there has left the context by an exception.
            AbortedError, BackendError: a group there is broken; a member ended.
        """
        here = find_rank_here()
        if here is not None:
            what = "a join context, for the others' next call"
            here.wait(
                CallWait(
                    what, call_site(), lambda: is_ready() or self._find_left(places) is not None
                )
            )
            if not is_ready():
                self.raise_left(places)
            return
        end = time.monotonic() + _YIELDS_S
        while time.monotonic() < end:  # it is short where all members are there
            if is_ready():
                return
            _yield_core()
        next_look = next_look_at_lives = time.monotonic() + _LOOK_S

        def check() -> None:
            nonlocal next_look, next_look_at_lives
            for place in places:
                place.channel.refuse_broken()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_S
                # One that has left after the call leaves it to be done here in a moment.
                if self._find_left(places) and not wait_until(is_ready, Grace(_LEAVING_S)):
                    self.raise_left(places)
            if now >= next_look_at_lives:
                next_look_at_lives = now + _LOOK_AT_LIVES_S
                for place in places:
                    gone = None if place.is_in_round() else place.find_gone()
                    if gone is not None and not is_ready():  # it may have come before it ended
                        raise place.channel.explain(MemberLost("has ended", gone))

        wait_until(is_ready, Deadline(timeout), check, longest_pause_s=_PAUSE_S)

    def raise_left(self, places: Sequence[JoinedCommunicator]) -> None:
        """Raise where a member has left the context by an exception."""
        place = self._find_left(places)
        if place is None:
            return
        left = self._whereabouts.find_left(place.label)
        assert left is not None  # it is said once
        self._end(place, _text_of(left))
        raise JoinError(
            _summary_of(left),
            where=self._where(place),
            found=left["reason"],
            fix=f"look at rank {left['rank']}; the group is broken now",
        )

    def raise_full(self, place: JoinedCommunicator) -> None:
        """Raise where a member, be it this one, had no room for its call."""
        member = place.find_full()
        if member is None:
            return
        group = place.channel.group
        summary = f"a call on {group.name} is too long to be told to ranks without data"
        self._end(place, summary)
        raise JoinError(
            summary,
            where=self._where(place),
            expected=f"a verb, shapes, dtypes and a title that take {num_bytes()} bytes",
            found=f"a longer call on rank {group.ranks[member]}",
            fix="give it a shorter title or tensors of fewer dims, or call it outside of the join "
            "context; the group is broken now",
        )

    def raise_gone(self, place: JoinedCommunicator, member: int) -> NoReturn:
        """Raise as a member has left: by an exception, as another has ended, or at its end."""
        self.raise_full(place)
        self.raise_left([place])
        ended = place.find_gone()
        if ended is not None:
            raise place.channel.explain(MemberLost("has ended", ended))
        rank = place.channel.group.ranks[member]
        summary = f"rank {rank} has left its join context, which this rank is in still"
        self._end(place, summary)
        raise JoinError(
            summary,
            where=self._where(place),
            expected="equally many calls of a group on all of its members, or a join context that "
            "all of them leave together",
            fix="let the context be on a group that has all of these ranks; the group is broken "
            "now",
        )

    def leave(self, places: Sequence[JoinedCommunicator]) -> None:
        """Leave the context; end the groups of which a member may wait for this one in a call.

        What has been told in the store is told before.
        """
        for place in places:
            place.leave()
        if any(place.uses_words for place in places):
            time.sleep(_SEEN_S)  # one that has not seen this rank leave is seen to go on by then
        for place in places:
            if place.is_missed():
                left = self._whereabouts.find_left(place.label)
                summary = f"rank {self._world.rank} has left its join context"
                self._end(place, summary if left is None else _text_of(left))

    def _end(self, place: JoinedCommunicator, reason: str) -> None:
        """End the group for all members: what has been started there would wait for ever."""
        if not place.channel.is_broken():
            message = {"reason": reason, "group": place.channel.group.name}
            get_registry(self._world).abort([place.label], message)

    def _find_left(self, places: Sequence[JoinedCommunicator]) -> JoinedCommunicator | None:
        """Where a member has left the context by an exception."""
        find = self._whereabouts.find_left
        return next((place for place in places if find(place.label) is not None), None)

    def _where(self, place: JoinedCommunicator) -> str:
        return f"rank {self._world.rank}, {place.channel.group.name}"


def _summary_of(left: Mapping[str, Any]) -> str:
    return f"rank {left['rank']} has left the join context by an exception"


def _text_of(left: Mapping[str, Any]) -> str:
    return f"{_summary_of(left)}: {left['reason']}"

"""Waits of ranks in a join context, which raise where members leave by exceptions, or end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from ..bootstrap.world import World
from ..checking.program import call_site, set_aside
from ..errors import JoinError
from ..groups.communicators import get_registry
from ..runtime.deadlines import Deadline, wait_until
from ..wires.operations import MemberLost
from ..wires.simulated.scheduler import find_rank_here
from ..wires.simulated.store import CallWait
from ..wires.work import Work, is_ready as is_done, may_be_dropped
from .statements import JoinedCommunicator
from .whereabouts import Whereabouts

_LOOK_S = 0.1
_LOOK_AT_LIVES_S = 0.5
_LEAVING_S = 0.5
_YIELDS_S = 0.0002
_PAUSE_S = 0.001  # short, since the others wait meanwhile
_yield_core = getattr(os, "sched_yield", partial(time.sleep, 0))  # not on every system


class Waits:
    """The waits of this rank in a join context, and its answers in flight."""

    def __init__(self, world: World, whereabouts: Whereabouts) -> None:
        self._world = world
        self._whereabouts = whereabouts
        self._answers: list[Work] = []

    def keep(self, answer: Work | None) -> None:
        """Keep the Work of an answer to others' call, to wait for later; do nothing for None."""
        if answer is not None:
            self._answers.append(may_be_dropped(answer))

    def has_ready_answer(self) -> bool:
        """Poll the answers in flight; return whether any has ended."""
        return any(is_done(answer) for answer in self._answers)

    def end_answers(self, *, ready_alone: bool = False) -> None:
        """Wait for the answers in flight, or (``ready_alone``) for ended answers; raise errors."""
        for answer in tuple(self._answers):
            if not ready_alone or is_done(answer):
                self._answers.remove(answer)
                with set_aside():  # this rank may be inside a call of its own
                    answer.wait()

    def until(
        self,
        is_ready: Callable[[], bool],
        communicators: Sequence[JoinedCommunicator],
        timeout: timedelta,
    ) -> None:
        """Wait until ``is_ready()``, which is called often, or the timeout.

        Args:
            communicators: those whose members are waited for.

        Raises:
            JoinError: a member there has left the context by an exception.
            AbortedError, BackendError: a group there is broken; a member ended.
        """

        def has_left() -> bool:
            return any(self._whereabouts.find_left(each.label) for each in communicators)

        here = find_rank_here()
        if here is not None:
            what = "a join context, for the others' next call"
            here.wait(CallWait(what, call_site(), lambda: is_ready() or has_left()))
            if not is_ready():
                self.refuse_left(communicators)
            return
        end = time.monotonic() + _YIELDS_S
        while time.monotonic() < end:  # where all members are there, the wait is short
            if is_ready():
                return
            _yield_core()
        next_look = next_look_at_lives = time.monotonic() + _LOOK_S

        def check() -> None:
            nonlocal next_look, next_look_at_lives
            for communicator in communicators:
                communicator.channel.refuse_broken()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_S
                # A member that left after its part in the call: the call is done here soon.
                if has_left() and not wait_until(is_ready, Deadline(_LEAVING_S)):
                    self.refuse_left(communicators)
            if now >= next_look_at_lives:
                next_look_at_lives = now + _LOOK_AT_LIVES_S
                for communicator in communicators:  # in a round the wire sees members end
                    gone = None if communicator.begun is not None else communicator.find_gone()
                    if gone is not None and not is_ready():  # it may have come before it ended
                        raise communicator.channel.explain(MemberLost("has ended", gone))

        wait_until(is_ready, Deadline(timeout), check, longest_pause_s=_PAUSE_S)

    def break_if_left(self, communicator: JoinedCommunicator) -> JoinError | None:
        """Break the group if a member has left it by an exception; return the error, or None."""
        left = self._whereabouts.find_left(communicator.label)
        if left is None:
            return None
        return self._broken(
            communicator,
            f"rank {left['rank']} has left the join context by an exception",
            found=left["reason"],
            fix=f"look at rank {left['rank']}; the group is broken now",
        )

    def refuse_left(self, communicators: Sequence[JoinedCommunicator]) -> None:
        """Raise if a member of any of ``communicators`` has left by an exception."""
        for communicator in communicators:
            cause = self.break_if_left(communicator)
            if cause is not None:
                raise cause

    def leave(self, communicators: Sequence[JoinedCommunicator]) -> None:
        """Leave the context, and end each group whose members may wait for this rank."""
        for communicator in communicators:
            if communicator.is_missed() and self.break_if_left(communicator) is None:
                self._end(communicator, f"rank {self._world.rank} has left its join context")

    def _end(self, communicator: JoinedCommunicator, reason: str) -> None:
        """Abort the communicator's group on all members with ``reason``, unless it is broken."""
        if not communicator.channel.is_broken():
            message = {"reason": reason, "group": communicator.channel.group.name}
            get_registry(self._world).abort([communicator.label], message)

    def _broken(
        self,
        communicator: JoinedCommunicator,
        summary: str,
        *,
        found: str | None = None,
        **more: str,
    ) -> JoinError:
        """Abort the communicator's group on all members; return a JoinError of the given texts."""
        self._end(communicator, f"{summary}: {found}" if found else summary)
        where = f"rank {self._world.rank}, {communicator.channel.group.name}"
        return JoinError(summary, where=where, found=found, **more)

"""A barrier that names who does not come.

It goes through the store of the world instead of a wire, so that a rank that does not come breaks
nothing: the group can be used afterwards. It is not one of the collectives that the members count
and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import AbortedError, CollectiveTimeoutError, MeshdistError, StoreError, WorldError
from ..mesh.agreement import digest_of_ranks
from ..mesh.failures import last_call_text
from ..mesh.groups import ProcessGroup, resolve_group
from ..mesh.registry import get_registry
from ..mesh.signals import ask
from ..runtime.handles import check_store_served, store_of_thread
from ..runtime.recorder import call_text
from ..runtime.roll_calls import RollCall, Verdict, failed_text
from ..runtime.timeouts import check_timeout
from ..wires.turns import Site, call_site, find_rank_here, show_site
from .instruments import verb

__all__ = ["monitored_barrier"]

_NAME = "monitored_barrier"


@verb
def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every member has called it; raise on every member where one does not come.

    Rank 0 of the group collects, the others wait for it: each of them at most ``timeout`` until it
    comes, and as long again for its verdict.

    Args:
        group: who takes part.
        timeout: how long to wait; None takes the group's.
        wait_all_ranks: let rank 0 name every absent member, not the first alone.

    Raises:
        CollectiveTimeoutError: a member did not come. Rank 0 names it, with what it called last;
            the others point to rank 0. A member that comes too late is told so.
        DeadlockError: on simulated ranks, which have no clock, where a member cannot come any
            more.
        KindError, ArgumentError: a wrong timeout.
        AbortedError: the group was aborted meanwhile.

    Cost: some requests to the store per rank, and rank 0 one for each member.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     if md.get_rank() != 1:
        ...         md.monitored_barrier()
        >>> try:
        ...     md.simulate(program, 2)
        ... except md.DeadlockError as error:
        ...     print(error.found)
        rank 0: waits in monitored_barrier on the world, called at ...: Rank 1 failed to pass \
monitoredBarrier
        rank 1: returned
    """
    target = resolve_group(group)
    check_timeout(timeout)
    target.check_usable()
    if target.size() == 1:
        return
    if target.world.is_simulated:
        _meet_simulated(target)
        return
    meeting = _Meeting(target, timeout or target.timeout, wait_all_ranks)
    try:
        meeting.hold()
    except RuntimeError as error:
        if isinstance(error, MeshdistError):
            raise
        raise StoreError(
            f"the store was lost during {_NAME}",
            where=meeting.where,
            found=str(error).splitlines()[0],
            fix="look at the rank that ended first: its error is the cause",
        ) from error


def _keys_of(group: ProcessGroup) -> str:
    """What the keys of a group's barriers begin with; equal on its members, and theirs alone."""
    if group.is_private:
        return f"monitored/{group.channel(group.first_device_type()).opened.label}"
    return f"monitored/{digest_of_ranks(group.ranks)}"


class _Meeting:
    """One call of one member.

    Args:
        group: who meets.
        timeout: how long to wait.
        names_all: whether rank 0 names all who are absent.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta, names_all: bool) -> None:
        world = self._world = group.world
        self._group = group
        self._names_all = names_all
        prefix = _keys_of(group)
        counts: dict[str, int] = world.rooms.setdefault("monitored barriers", {})
        number = counts[prefix] = counts.get(prefix, 0) + 1
        self._roll_call = RollCall(
            store_of_thread(world),
            prefix,
            group.ranks,
            world.rank,
            number,
            timeout,
            names_all=names_all,
            check=self._check,
        )
        self._aborts = get_registry(world).aborts
        self._known_aborts = set(self._aborts)
        recorder = get_registry(world).beside_wires
        recorder.note(group.name, _NAME, None)
        call = {**recorder.describe(), "sequence": number}
        self.where = f"rank {world.rank}, {call_text(call)}"

    def hold(self) -> None:
        """Wait for the verdict; raise where it is bad."""
        verdict = self._roll_call.hold()
        if verdict.failure:
            raise self._error(verdict)

    def _check(self) -> None:
        """Raise where waiting is in vain: the store is lost, or the group was aborted."""
        check_store_served(self._world)
        for label in set(self._aborts) - self._known_aborts:
            message = self._aborts[label]
            if message.get("group") == self._group.name:
                raise AbortedError(
                    f"{_NAME} on {self._group.name} was aborted",
                    where=self.where,
                    found=f"rank {message['rank']}: {message['reason']}",
                    fix="make a new mesh on the ranks that are left",
                )

    def _error(self, verdict: Verdict) -> CollectiveTimeoutError:
        me, leader = self._world.rank, self._group.ranks[0]
        told = f"rank {verdict.by}: {verdict.failure}"
        if me in verdict.absent:
            return self._late(
                f"rank {me} came to monitoredBarrier when rank {verdict.by} had given up",
                told,
                f"look at what kept rank {me}, or raise the timeout",
            )
        if me == leader:
            named = verdict.absent if self._names_all else verdict.absent[:1]
            return self._late(
                verdict.failure,
                self._last_calls(named),
                "look at what these ranks do instead, or raise the timeout",
            )
        found, fix = told, f"look at the error of rank {leader}, which tells more"
        if leader in verdict.absent:
            found = f"{told}\n{self._last_calls([leader])}"
            fix = f"look at what rank {leader} does instead, or raise the timeout"
        return self._late(
            f"rank {me} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank {leader}",
            found,
            fix,
        )

    def _late(self, summary: str, found: str, fix: str) -> CollectiveTimeoutError:
        expected = f"the same call on ranks {', '.join(map(str, self._group.ranks))}"
        return CollectiveTimeoutError(
            summary, where=self.where, expected=expected, found=found, fix=fix
        )

    def _last_calls(self, ranks: list[int]) -> str:
        """What ranks that are absent called last, as far as they answer."""
        answers = ask(self._world, tuple(ranks))
        return "\n".join(f"rank {rank}: {last_call_text(answers.get(rank))}" for rank in ranks)


@dataclass
class _Wait:
    """A simulated rank's wait for the other members."""

    group: ProcessGroup
    counts: dict[int, int]
    number: int
    site: Site

    def is_ready(self) -> bool:
        return not self._absent()

    def describe(self) -> str:
        return (
            f"{_NAME} on {self.group.name}, called at {show_site(self.site)}: "
            f"{failed_text(self._absent())}"
        )

    def _absent(self) -> list[int]:
        return [rank for rank in self.group.ranks if self.counts.get(rank, 0) < self.number]


def _meet_simulated(group: ProcessGroup) -> None:
    """Wait for the other simulated ranks; where they cannot come, the simulator tells so."""
    rank = find_rank_here()
    if rank is None:
        raise WorldError(
            f"{_NAME} of simulated rank {group.world.rank} was called from another thread",
            where=f"called at {show_site(call_site())}",
            expected="verbs on the rank's own thread",
            fix="call it there, or run the program as processes (meshdist run, meshdist.spawn)",
        )
    counts: dict[int, int] = rank.scheduler.tables.setdefault(_keys_of(group), {})
    me = group.world.rank
    counts[me] = counts.get(me, 0) + 1
    try:
        rank.wait(_Wait(group, counts, counts[me], call_site()))
    except BaseException:
        counts[me] -= 1  # this rank waits no more, and passed nothing
        raise

"""A barrier that names the members that do not come.

It goes through the store of the world instead of a wire, so that a rank that does not come breaks
nothing: the group can be used afterwards. It is not one of the collectives that the members count
and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..bootstrap.thread_stores import check_store_served, store_of_thread
from ..checking.barrier_arrivals import MonitoredBarrier, Outcome, failed_text
from ..checking.call_sites import Site, call_site, show_site
from ..checking.calls import GroupFacts
from ..errors import AbortedError, CollectiveTimeoutError, WorldError
from ..groups.agreement import digest_of_ranks
from ..groups.other_members import last_call_text
from ..groups.process_group import ProcessGroup, resolve_group
from ..groups.registry import get_registry
from ..groups.signal_thread import ask
from ..runtime.timeouts import check_timeout
from ..wires.simulated.scheduler import find_rank_here
from .instruments import verb

__all__ = ["monitored_barrier"]

_NAME = "monitored_barrier"


@verb
def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every member has called it; raise on every member where one does not come.

    Rank 0 of the group collects, the others wait for it: each of them at most ``timeout`` until it
    comes, and as long again for its outcome.

    Args:
        group: whose members take part.
        timeout: how long to wait; None takes the group's.
        wait_all_ranks: let rank 0 name every absent member, not the first alone.

    Raises:
        CollectiveTimeoutError: a member did not come. Rank 0 names it, with what it called last;
            the others point to rank 0. A member that comes too late raises, too.
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
    _Call(target, timeout or target.timeout, wait_all_ranks).wait()


def _keys_of(group: ProcessGroup) -> str:
    """What the keys of a group's barriers begin with; equal on its members, and theirs alone."""
    if group.is_private:
        return f"monitored/{group.open_channel(group.first_device_type()).opened.label}"
    return f"monitored/{digest_of_ranks(group.ranks)}"


class _Call:
    """One call of one member.

    Args:
        group: whose members wait for each other.
        timeout: how long to wait.
        names_all: whether rank 0 names every absent member.
    """

    def __init__(self, group: ProcessGroup, timeout: timedelta, names_all: bool) -> None:
        world = self._world = group.world
        self._group = group
        self._names_all = names_all
        prefix = _keys_of(group)
        number = world.next_number(prefix)
        self._aborts = get_registry(world).aborts
        self._known_aborts = set(self._aborts)
        recorder = get_registry(world).beside_wires
        recorder.note(GroupFacts(group.name, group.ranks, group.rank()), _NAME, None)
        call = recorder.find_note()
        assert call is not None  # it was just noted
        self._where = f"rank {world.rank}, {call._replace(sequence=number).title}"
        self._barrier = MonitoredBarrier(
            store_of_thread(world),
            prefix,
            group.ranks,
            world.rank,
            number,
            timeout,
            names_all,
            self._where,
            self._check,
        )

    def wait(self) -> None:
        """Wait for the outcome; raise where a member did not arrive, or the store is lost."""
        outcome = self._barrier.wait()
        if outcome.failure:
            raise self._error(outcome)

    def _check(self) -> None:
        """Raise where waiting is in vain: the store is lost, or the group was aborted."""
        check_store_served(self._world)
        for label in set(self._aborts) - self._known_aborts:
            message = self._aborts[label]
            if message.get("group") == self._group.name:
                raise AbortedError(
                    f"{_NAME} on {self._group.name} was aborted",
                    where=self._where,
                    found=f"rank {message['rank']}: {message['reason']}",
                    fix="make a new mesh on the ranks that are left",
                )

    def _error(self, outcome: Outcome) -> CollectiveTimeoutError:
        """What a member raises: rank 0 its findings, the others a pointer to rank 0's error."""
        ranks = self._group.ranks
        me, leader = self._world.rank, ranks[0]
        found = f"rank {outcome.by}: {outcome.failure}"
        if me in outcome.absent:
            summary = f"rank {me} came to monitoredBarrier when rank {outcome.by} had given up"
            fix = f"look at what kept rank {me}, or raise the timeout"
        elif me == leader:
            summary = outcome.failure
            found = self._last_calls(outcome.absent if self._names_all else outcome.absent[:1])
            fix = "look at what these ranks do instead, or raise the timeout"
        else:
            summary = (
                f"rank {me} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank {leader}"
            )
            fix = f"look at the error of rank {leader}, which tells more"
            if leader in outcome.absent:
                found = f"{found}\n{self._last_calls([leader])}"
                fix = f"look at what rank {leader} does instead, or raise the timeout"
        expected = f"the same call on ranks {', '.join(map(str, ranks))}"
        return CollectiveTimeoutError(
            summary, where=self._where, expected=expected, found=found, fix=fix
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
    """Wait for the other simulated ranks; where they cannot come, the scheduler raises."""
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
        counts[me] -= 1  # this rank waits no more, and did not pass
        raise

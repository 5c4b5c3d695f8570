"""A barrier that names the members that do not come.

It goes through the store of the world instead of a backend, so that a rank that does not come
breaks
nothing: the group can be used afterwards. It is not one of the collectives that the members count
and compare.

Under keys of its own a group keeps in the store the number of the latest barrier at which each
member has arrived, and one outcome. The outcome is replaced by compare-and-set, so that each
barrier ends in the same way for all members.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ..arguments import check_timeout
from ..backends.simulated.scheduler import find_rank_here
from ..backends.simulated.store import CallWait
from ..bootstrap.arrival_counters import digest_of_ranks
from ..bootstrap.timeout_store import read_json, read_number, within
from ..bootstrap.world import World
from ..checking.call_sites import call_site, show_site
from ..checking.calls import CallRecord, GroupFacts, get_call
from ..errors import AbortedError, CollectiveTimeoutError, WorldError
from ..groups.communicators import get_registry
from ..groups.control_messages import ask, last_call_text
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..runtime.deadlines import Deadline, wait_until
from .registration import collective

__all__ = ["monitored_barrier"]

_NAME = "monitored_barrier"


@collective()
def monitored_barrier(
    group: GroupLike = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when every member has called it; raise on every member if any does not come.

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

    Cost: some requests to the store per rank, and on rank 0 a request for each member.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     if md.get_rank() != 1:
        ...         dist.monitored_barrier()
        >>> try:
        ...     md.simulate(program, 2)
        ... except md.errors.DeadlockError as error:
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
    else:
        _meet(target, timeout or target.timeout, wait_all_ranks)


def _keys_of(group: ProcessGroup) -> str:
    """Return the prefix of the store keys for a group's barriers, equal on its members."""
    if group.is_private:
        return f"monitored/{group.open_device_group(group.first_device_type()).opened.label}"
    return f"monitored/{digest_of_ranks(group.ranks)}"


def _meet(group: ProcessGroup, timeout: timedelta, names_all: bool) -> None:
    """Wait until all members come; raise on all if late, naming all absent if ``names_all``."""
    world, ranks = group.world, group.ranks
    registry = get_registry(world)
    known_aborts = set(registry.aborts)
    prefix = _keys_of(group)
    number = world.next_number(prefix)
    facts = GroupFacts(group.name, group.ranks, group.rank())
    note = CallRecord(*registry.beside_backends.note(facts, get_call(_NAME, None)))
    where = f"rank {world.rank}, {note._replace(sequence=number).heading}"
    barrier = MonitoredBarrier(
        world.store,
        prefix,
        ranks,
        world.rank,
        number,
        timeout,
        names_all,
        lambda: _check_not_aborted(group, known_aborts, where),
    )
    outcome = barrier.wait()
    came = [rank for rank in ranks if rank not in outcome.absent]
    registry.liveness.finish(f"{prefix}/{number}", came)
    if outcome.failure:
        raise _timed_out(group.world, ranks, outcome, where, names_all)


def _check_not_aborted(group: ProcessGroup, known_aborts: set[str], where: str) -> None:
    """Raise AbortedError if the group was aborted by an abort that is not in ``known_aborts``."""
    aborts = get_registry(group.world).aborts
    for label in set(aborts) - known_aborts:
        message = aborts[label]
        if message.get("group") == group.name:
            raise AbortedError(
                f"{_NAME} on {group.name} was aborted",
                where=where,
                found=f"rank {message['rank']}: {message['reason']}",
                fix="make a new mesh on the ranks that are left",
            )


def _timed_out(
    world: World, ranks: Sequence[int], outcome: BarrierResult, where: str, names_all: bool
) -> CollectiveTimeoutError:
    """Return this rank's error: the first member names absent ranks, the others point to its error.

    Args:
        names_all: whether the first member names all absent ranks, or the first alone.
    """
    me, leader = world.rank, ranks[0]
    found = f"rank {outcome.by}: {outcome.failure}"
    if me in outcome.absent:
        summary = f"rank {me} came to monitoredBarrier when rank {outcome.by} had given up"
        fix = f"check what delayed rank {me}, or pass a longer timeout"
    elif me == leader:
        summary = outcome.failure
        found = _last_calls(world, outcome.absent if names_all else outcome.absent[:1])
        fix = "look at what these ranks do instead, or raise the timeout"
    else:
        summary = (
            f"rank {me} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank {leader}"
        )
        fix = f"look at the error of rank {leader}, which tells more"
        if leader in outcome.absent:
            found = f"{found}\n{_last_calls(world, [leader])}"
            fix = f"check what rank {leader} does instead, or pass a longer timeout"
    expected = f"the same call on ranks {', '.join(map(str, ranks))}"
    return CollectiveTimeoutError(summary, where=where, expected=expected, found=found, fix=fix)


def _last_calls(world: World, ranks: list[int]) -> str:
    """Return a line on the last call of each absent rank that answers."""
    answers = ask(world, tuple(ranks))
    return "\n".join(f"rank {rank}: {last_call_text(answers.get(rank))}" for rank in ranks)


def _counts_of_simulated(group: ProcessGroup) -> dict[int, int]:
    """Return the group's shared table of how many barriers each simulated member has come to."""
    rank = find_rank_here()
    assert rank is not None  # else the caller has raised
    counts: dict[int, int] = rank.scheduler.tables.setdefault(_keys_of(group), {})
    return counts


def _meet_simulated(group: ProcessGroup) -> None:
    """Wait for the other simulated ranks; raise if they cannot come."""
    rank = find_rank_here()
    if rank is None:
        raise WorldError(
            f"{_NAME} of simulated rank {group.world.rank} was called from another thread",
            where=f"called at {show_site(call_site())}",
            expected="collectives on the rank's own thread",
            fix="call it there, or run the program as processes (meshdist run, meshdist.spawn)",
        )
    counts = _counts_of_simulated(group)
    me = group.world.rank
    number = counts[me] = counts.get(me, 0) + 1

    def find_absent() -> list[int]:
        return [rank for rank in group.ranks if counts.get(rank, 0) < number]

    try:
        wait = CallWait(f"{_NAME} on {group.name}", call_site(), lambda: not find_absent())
        wait.show_more = lambda: f": {failed_text(find_absent())}"
        rank.wait(wait)
    except BaseException:
        counts[me] -= 1  # this rank waits no more, and did not pass
        raise


_GRACE = timedelta(seconds=1)


def failed_text(ranks: Sequence[int], timeout: timedelta | None = None) -> str:
    """Return torch's sentence on ``ranks`` that failed to pass a monitored barrier in time."""
    ranks_named = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    limit = "" if timeout is None else f" in {timeout / timedelta(milliseconds=1):.0f} ms"
    return f"{ranks_named} failed to pass monitoredBarrier{limit}"


@dataclass
class BarrierResult:
    """The result of a group's latest barrier, stored as JSON."""

    number: int  # the barrier's
    passed: int  # the number of the latest barrier that all members passed
    by: int  # the rank that decided
    failure: str  # the reason, or ""
    absent: list[int]  # the ranks that had not arrived

    @classmethod
    def parse(cls, value: dict[str, Any]) -> BarrierResult:
        """Return the result from JSON; raise if a field is missing or of another type."""
        return cls(
            number=int(value["number"]),
            passed=int(value["passed"]),
            by=int(value["by"]),
            failure=str(value["failure"]),
            absent=[int(rank) for rank in value["absent"]],
        )


@dataclass
class MonitoredBarrier:
    """A member's part in a monitored barrier.

    Args:
        prefix: the beginning of the group's keys in the store.
        ranks: the members' global ranks; the first rank decides as a rule.
        number: the barrier's, from 1; all members count alike.
        names_all: whether the failure names all absent ranks, or the first alone.
        check: raises where waiting is in vain.
    """

    store: Store
    prefix: str
    ranks: Sequence[int]
    rank: int
    number: int
    timeout: timedelta
    names_all: bool
    check: Callable[[], None] = lambda: None

    def wait(self) -> BarrierResult:
        """Wait for all members; return the result, decided by the first or a late member."""
        # The others wait at most the timeout until the first arrives, and as long again for its
        # decision.
        with within(Deadline(self.timeout)):
            outcome = self._find_outcome()
            if outcome is None:
                self.check()
                self.store.set(f"{self.prefix}/arrived/{self.rank}", str(self.number))
                outcome = self._lead() if self.rank == self.ranks[0] else self._follow()
            return outcome

    def _lead(self) -> BarrierResult:
        absent = list(self.ranks[1:])

        def collect() -> BarrierResult | None:
            """Return the result once all members have arrived or another member has decided it."""
            absent[:] = [rank for rank in absent if not self._has_arrived(rank)]
            return self._find_outcome() if absent else self._decide("", [])

        outcome = wait_until(collect, Deadline(self.timeout), self.check)
        return outcome or self._decide(self._why(absent), absent)

    def _follow(self) -> BarrierResult:
        leader = self.ranks[0]

        def is_led() -> bool:
            return self._find_outcome() is not None or self._has_arrived(leader)

        if wait_until(is_led, Deadline(self.timeout), self.check):
            limit = Deadline(self.timeout + _GRACE)
            if outcome := wait_until(self._find_outcome, limit, self.check):
                return outcome
        absent = [rank for rank in self.ranks if not self._has_arrived(rank)]
        why = self._why(absent) if absent else f"rank {leader} came, and did not decide in time"
        return self._decide(why, absent)

    def _has_arrived(self, rank: int) -> bool:
        return read_number(self.store, f"{self.prefix}/arrived/{rank}") >= self.number

    def _why(self, absent: list[int]) -> str:
        return failed_text(absent if self.names_all else absent[:1], self.timeout)

    def _find_outcome(self) -> BarrierResult | None:
        """Return the outcome of this barrier if it has ended, else None."""
        outcome, _ = self._read()
        if outcome is None or outcome.number < self.number:
            return None
        if outcome.passed >= self.number:
            outcome.failure = ""
        return outcome

    def _read(self) -> tuple[BarrierResult | None, str]:
        key = f"{self.prefix}/outcome"
        if not self.store.check([key]):
            return None, ""
        text = self.store.get(key).decode(errors="replace")
        return read_json(self.store, key, BarrierResult.parse), text

    def _decide(self, failure: str, absent: list[int]) -> BarrierResult:
        """Store this member's result unless another has decided; return the stored result."""
        while True:
            latest, before = self._read()
            if latest is not None and latest.number >= self.number:
                found = self._find_outcome()
                assert found is not None  # numbers only rise
                return found
            passed = self.number if not failure else latest.passed if latest else 0
            mine = BarrierResult(self.number, passed, self.rank, failure, absent)
            text = json.dumps(vars(mine))
            after = self.store.compare_set(f"{self.prefix}/outcome", before, text)
            if after == text.encode():
                return mine

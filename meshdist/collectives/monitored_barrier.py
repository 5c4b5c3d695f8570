"""Run a barrier that lists the ranks that do not reach it.

It uses the store, not a backend, so the group stays usable if a rank is missing. Ranks do not count
or compare it like other collectives.

The store holds, per group, the latest barrier that each rank reached, and a single outcome, which
ranks replace by compare-and-set so that all get the same.
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
    """Wait until every rank of the group has called it; raise on every rank if any rank is missing.

    Rank 0 of the group collects arrivals. Other ranks wait up to ``timeout`` for rank 0 to call,
    and as long again for the outcome.

    Args:
        group: as in ``all_reduce``.
        timeout: how long to wait; None uses the group's timeout.
        wait_all_ranks: list every missing rank in the error of rank 0, not only the first.

    Raises:
        CollectiveTimeoutError: a rank did not reach the call in time; a late rank raises, too. Rank
            0 lists it with its last call; other ranks refer to rank 0.
        DeadlockError: simulated ranks only: a rank can no longer reach the call.
        KindError, ArgumentError: a wrong timeout.
        AbortedError: the group was aborted.

    Cost: a few store requests per rank; on rank 0 also a request per rank.

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
    """Return the prefix of the store keys for a group's barriers, equal on every rank."""
    if group.is_private:
        return f"monitored/{group.open_device_group(group.first_device_type()).opened.label}"
    return f"monitored/{digest_of_ranks(group.ranks)}"


def _meet(group: ProcessGroup, timeout: timedelta, names_all: bool) -> None:
    """Wait for all ranks; raise on every rank if any is missing."""
    world, ranks = group.world, group.ranks
    registry = get_registry(world)
    known_aborts = set(registry.aborts)
    prefix = _keys_of(group)
    number = world.next_number(prefix)
    facts = GroupFacts(group.name, group.ranks, group.rank())
    note = CallRecord(*registry.store_calls.note(facts, get_call(_NAME, None)))
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
    reached = [rank for rank in ranks if rank not in outcome.absent]
    registry.liveness.finish(f"{prefix}/{number}", reached)
    if outcome.failure:
        raise _timed_out(group.world, ranks, outcome, where, names_all)


def _check_not_aborted(group: ProcessGroup, known_aborts: set[str], where: str) -> None:
    """Raise AbortedError for an abort of the group that is not in ``known_aborts``."""
    aborts = get_registry(group.world).aborts
    for label in set(aborts) - known_aborts:
        message = aborts[label]
        if message.get("group") == group.name:
            raise AbortedError(
                f"{_NAME} on {group.name} was aborted",
                where=where,
                found=f"rank {message['rank']}: {message['reason']}",
                fix="create a new mesh of the remaining ranks",
            )


def _timed_out(
    world: World, ranks: Sequence[int], outcome: BarrierResult, where: str, names_all: bool
) -> CollectiveTimeoutError:
    """Return this rank's error: the first rank lists the missing ranks, the others refer to it."""
    me, leader = world.rank, ranks[0]
    found = f"rank {outcome.by}: {outcome.failure}"
    if me in outcome.absent:
        summary = f"rank {me} reached monitoredBarrier after rank {outcome.by} had timed out"
        fix = f"check what delayed rank {me}, or pass a longer timeout"
    elif me == leader:
        summary = outcome.failure
        found = _last_calls(world, outcome.absent if names_all else outcome.absent[:1])
        fix = "check why these ranks did not make this call, or pass a longer timeout"
    else:
        summary = (
            f"rank {me} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank {leader}"
        )
        fix = f"read the error of rank {leader}, which lists the missing ranks"
        if leader in outcome.absent:
            found = f"{found}\n{_last_calls(world, [leader])}"
            fix = f"check why rank {leader} did not make this call, or pass a longer timeout"
    expected = f"the same call on ranks {', '.join(map(str, ranks))}"
    return CollectiveTimeoutError(summary, where=where, expected=expected, found=found, fix=fix)


def _last_calls(world: World, ranks: list[int]) -> str:
    """Return one line per missing rank with its last call."""
    answers = ask(world, tuple(ranks))
    return "\n".join(f"rank {rank}: {last_call_text(answers.get(rank))}" for rank in ranks)


def _counts_of_simulated(group: ProcessGroup) -> dict[int, int]:
    """Return how many of the group's barriers each simulated rank has reached."""
    rank = find_rank_here()
    assert rank is not None  # else the caller has raised
    counts: dict[int, int] = rank.scheduler.tables.setdefault(_keys_of(group), {})
    return counts


def _meet_simulated(group: ProcessGroup) -> None:
    """Wait for the other simulated ranks; raise if they can no longer reach the call."""
    rank = find_rank_here()
    if rank is None:
        raise WorldError(
            f"{_NAME} of simulated rank {group.world.rank} was called from another thread",
            where=f"called at {show_site(call_site())}",
            expected="collectives on the rank's own thread",
            fix="call it on that thread, or run the ranks as processes (meshdist run, "
            "meshdist.spawn)",
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
        counts[me] -= 1  # this rank stops waiting without having passed
        raise


_GRACE = timedelta(seconds=1)


def failed_text(ranks: Sequence[int], timeout: timedelta | None = None) -> str:
    """Return torch's message for ``ranks`` that missed a monitored barrier."""
    ranks_named = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    limit = "" if timeout is None else f" in {timeout / timedelta(milliseconds=1):.0f} ms"
    return f"{ranks_named} failed to pass monitoredBarrier{limit}"


@dataclass
class BarrierResult:
    """The result of a group's latest barrier, stored as JSON."""

    number: int  # of the barrier
    passed: int  # the latest barrier that all ranks passed
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
    """A rank's part in a monitored barrier.

    Args:
        ranks: global ranks; the first decides the outcome, or a rank that waits for it too long.
        number: the number of the barrier in its group, from 1.
        timeout: how long each rank waits for the first, and the first for all others.
        names_all: list all missing ranks in the failure, not only the first.
        check: raises to end the wait.
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
        """Wait for all ranks; return the result."""
        # The others wait up to the timeout for the first, and as long again for its decision.
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
            """Return the result after all ranks arrive or another rank decides it."""
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
        why = (
            self._why(absent)
            if absent
            else f"rank {leader} reached the call, but did not finish it in time"
        )
        return self._decide(why, absent)

    def _has_arrived(self, rank: int) -> bool:
        return read_number(self.store, f"{self.prefix}/arrived/{rank}") >= self.number

    def _why(self, absent: list[int]) -> str:
        return failed_text(absent if self.names_all else absent[:1], self.timeout)

    def _find_outcome(self) -> BarrierResult | None:
        """Return the outcome of this barrier; None before it ends."""
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
        """Store this rank's result unless another rank has decided; return the stored result."""
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

"""A monitored barrier: it goes through a store, and names the members that do not arrive.

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

from ..bootstrap.bounded_store import read_json, read_number, within
from ..runtime.deadlines import Deadline, wait_until

__all__ = ["MonitoredBarrier", "Outcome", "failed_text"]

_GRACE = timedelta(seconds=1)


def failed_text(ranks: Sequence[int], timeout: timedelta | None = None) -> str:
    """Which ranks did not pass, in the words that torch uses."""
    ranks_named = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    limit = "" if timeout is None else f" in {timeout / timedelta(milliseconds=1):.0f} ms"
    return f"{ranks_named} failed to pass monitoredBarrier{limit}"


@dataclass
class Outcome:
    """How a group's latest barrier ended; kept in the store.

    Args:
        number: the barrier's.
        passed: the number of the latest barrier that all members passed.
        by: the rank that decided.
        failure: why it failed, or "".
        absent: the ranks that had not arrived.
    """

    number: int
    passed: int
    by: int
    failure: str
    absent: list[int]

    @classmethod
    def parse(cls, value: dict[str, Any]) -> Outcome:
        """Return what was kept; raises where it is something else."""
        return cls(
            number=int(value["number"]),
            passed=int(value["passed"]),
            by=int(value["by"]),
            failure=str(value["failure"]),
            absent=[int(rank) for rank in value["absent"]],
        )


@dataclass
class MonitoredBarrier:
    """One member's part in one monitored barrier.

    Args:
        store: where the members meet.
        prefix: what the group's keys there begin with.
        ranks: the members' global ranks; the first one decides as a rule.
        rank: this member's.
        number: the barrier's, from 1; all members count alike.
        timeout: how long to wait.
        names_all: whether the failure names all absent ranks, or the first one alone.
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

    def wait(self) -> Outcome:
        """Wait for the outcome; the first member decides it.

        The others wait at most the timeout until the first arrives, and as long again for its
        decision; a member that waits in vain decides.

        Raises:
            StoreError: the store is lost.
        """
        with within(Deadline(self.timeout)):
            outcome = self._find_outcome()
            if outcome is None:
                self.check()
                self.store.set(f"{self.prefix}/arrived/{self.rank}", str(self.number))
                outcome = self._lead() if self.rank == self.ranks[0] else self._follow()
            return outcome

    def _lead(self) -> Outcome:
        absent = list(self.ranks[1:])

        def collect() -> Outcome | None:
            """The outcome, where all members have arrived or another one has given up."""
            absent[:] = [rank for rank in absent if not self._has_arrived(rank)]
            return self._find_outcome() if absent else self._decide("", [])

        outcome = wait_until(collect, Deadline(self.timeout), self.check)
        return outcome or self._decide(self._why(absent), absent)

    def _follow(self) -> Outcome:
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

    def _find_outcome(self) -> Outcome | None:
        """How this barrier ended, if it has."""
        outcome, _ = self._read()
        if outcome is None or outcome.number < self.number:
            return None
        if outcome.passed >= self.number:
            outcome.failure = ""
        return outcome

    def _read(self) -> tuple[Outcome | None, str]:
        key = f"{self.prefix}/outcome"
        if not self.store.check([key]):
            return None, ""
        text = self.store.get(key).decode(errors="replace")
        return read_json(self.store, key, Outcome.parse), text

    def _decide(self, failure: str, absent: list[int]) -> Outcome:
        """Decide how it ends, unless another member has; return how it does."""
        while True:
            latest, before = self._read()
            if latest is not None and latest.number >= self.number:
                found = self._find_outcome()
                assert found is not None  # numbers only rise
                return found
            passed = self.number if not failure else latest.passed if latest else 0
            mine = Outcome(self.number, passed, self.rank, failure, absent)
            text = json.dumps(vars(mine))
            after = self.store.compare_set(f"{self.prefix}/outcome", before, text)
            if after == text.encode():
                return mine

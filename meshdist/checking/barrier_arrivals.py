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

from torch.distributed import Store

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

    def __init__(
        self,
        store: Store,
        prefix: str,
        ranks: Sequence[int],
        rank: int,
        number: int,
        timeout: timedelta,
        *,
        names_all: bool,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._ranks = ranks
        self._rank = rank
        self._number = number
        self._timeout = timeout
        self._names_all = names_all
        self._check = check
        self._absent = list(ranks[1:])

    def wait(self) -> Outcome:
        """Wait for the outcome; the first member decides it.

        The others wait at most the timeout until the first arrives, and as long again for its
        decision; a member that waits in vain decides.
        """
        outcome = self._find_outcome()
        if outcome is None:
            self._check()
            self._store.set(f"{self._prefix}/arrived/{self._rank}", str(self._number))
            outcome = self._lead() if self._rank == self._ranks[0] else self._follow()
        return outcome

    def _lead(self) -> Outcome:
        outcome = wait_until(self._collect, Deadline(self._timeout), self._check)
        return outcome or self._decide(self._why(self._absent), self._absent)

    def _collect(self) -> Outcome | None:
        """The outcome, where all members have arrived or another one has given up."""
        self._absent = [rank for rank in self._absent if not self._has_arrived(rank)]
        return self._find_outcome() if self._absent else self._decide("", [])

    def _follow(self) -> Outcome:
        leader = self._ranks[0]

        def is_led() -> bool:
            return self._find_outcome() is not None or self._has_arrived(leader)

        if wait_until(is_led, Deadline(self._timeout), self._check):
            limit = Deadline(self._timeout + _GRACE)
            if outcome := wait_until(self._find_outcome, limit, self._check):
                return outcome
        absent = [rank for rank in self._ranks if not self._has_arrived(rank)]
        why = self._why(absent) if absent else f"rank {leader} gave no verdict"
        return self._decide(why, absent)

    def _has_arrived(self, rank: int) -> bool:
        key = f"{self._prefix}/arrived/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._number

    def _why(self, absent: list[int]) -> str:
        return failed_text(absent if self._names_all else absent[:1], self._timeout)

    def _find_outcome(self) -> Outcome | None:
        """How this barrier ended, if it has."""
        outcome, _ = self._read()
        if outcome is None or outcome.number < self._number:
            return None
        if outcome.passed >= self._number:
            outcome.failure = ""
        return outcome

    def _read(self) -> tuple[Outcome | None, str]:
        key = f"{self._prefix}/outcome"
        if not self._store.check([key]):
            return None, ""
        text = self._store.get(key).decode()
        return Outcome(**json.loads(text)), text

    def _decide(self, failure: str, absent: list[int]) -> Outcome:
        """Decide how it ends, unless another member has; return how it does."""
        while True:
            latest, before = self._read()
            if latest is not None and latest.number >= self._number:
                found = self._find_outcome()
                assert found is not None  # numbers only rise
                return found
            passed = self._number if not failure else latest.passed if latest else 0
            mine = Outcome(self._number, passed, self._rank, failure, absent)
            text = json.dumps(vars(mine))
            after = self._store.compare_set(f"{self._prefix}/outcome", before, text)
            if after.decode() == text:
                return mine

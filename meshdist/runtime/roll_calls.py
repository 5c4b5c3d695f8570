"""Who of a group has come: the roll call that a monitored barrier is.

It goes by way of a store, where a group keeps, under keys of its own, the number of the latest
roll call that each member has come to, and one verdict. That is replaced by compare-and-set, so
that each roll call ends in one way for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from .clock import clock

__all__ = ["RollCall", "Verdict", "failed_text"]

_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.02
_GRACE_S = 1.0


def failed_text(ranks: Sequence[int], timeout: timedelta | None = None) -> str:
    """Who did not pass, in the words that torch uses."""
    who = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    limit = "" if timeout is None else f" in {timeout / timedelta(milliseconds=1):.0f} ms"
    return f"{who} failed to pass monitoredBarrier{limit}"


@dataclass
class Verdict:
    """How a group's latest roll call ended; kept in the store.

    Args:
        number: the roll call's.
        passed: the number of the latest that all members passed.
        by: who decided.
        failure: why it failed, or "".
        absent: who had not come.
    """

    number: int
    passed: int
    by: int
    failure: str
    absent: list[int]


class RollCall:
    """One member's part in one roll call.

    Args:
        store: where the members meet.
        prefix: what the group's keys there begin with.
        ranks: the members' global ranks; the first one collects.
        rank: this member's.
        number: the roll call's, from 1; all members count alike.
        timeout: how long to wait.
        names_all: whether the failure names all who are absent, or the first alone.
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

    def hold(self) -> Verdict:
        """Wait for the verdict, as the first member make it.

        The others wait at most the timeout until the first comes, and as long again for its
        verdict; whoever finds it missing decides.
        """
        verdict = self._find_verdict()
        if verdict is None:
            self._check()
            self._store.set(f"{self._prefix}/arrived/{self._rank}", str(self._number))
            verdict = self._lead() if self._rank == self._ranks[0] else self._follow()
        return verdict

    def _lead(self) -> Verdict:
        absent = list(self._ranks[1:])
        deadline = clock.now() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE_S
        while True:
            absent = [rank for rank in absent if not self._has_come(rank)]
            if not absent:
                return self._decide("", absent)
            verdict = self._find_verdict()  # another member may have given up
            if verdict is not None:
                return verdict
            if clock.now() >= deadline:
                return self._decide(self._why(absent), absent)
            pause = self._pause(pause)

    def _follow(self) -> Verdict:
        leader = self._ranks[0]
        is_leader_here = False
        deadline = clock.now() + self._timeout.total_seconds()
        pause = _FIRST_PAUSE_S
        while True:
            verdict = self._find_verdict()
            if verdict is not None:
                return verdict
            if not is_leader_here and self._has_come(leader):
                is_leader_here = True
                deadline = clock.now() + self._timeout.total_seconds() + _GRACE_S
            if clock.now() >= deadline:
                absent = [rank for rank in self._ranks if not self._has_come(rank)]
                why = self._why(absent) if absent else f"rank {leader} gave no verdict"
                return self._decide(why, absent)
            pause = self._pause(pause)

    def _has_come(self, rank: int) -> bool:
        key = f"{self._prefix}/arrived/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) >= self._number

    def _why(self, absent: list[int]) -> str:
        return failed_text(absent if self._names_all else absent[:1], self._timeout)

    def _find_verdict(self) -> Verdict | None:
        """How this roll call ended, if it has."""
        verdict, _ = self._read()
        if verdict is None or verdict.number < self._number:
            return None
        if verdict.passed >= self._number:
            verdict.failure = ""
        return verdict

    def _read(self) -> tuple[Verdict | None, str]:
        key = f"{self._prefix}/verdict"
        if not self._store.check([key]):
            return None, ""
        text = self._store.get(key).decode()
        return Verdict(**json.loads(text)), text

    def _decide(self, failure: str, absent: list[int]) -> Verdict:
        """Decide how it ends, unless another member has; return how it does."""
        while True:
            latest, before = self._read()
            if latest is not None and latest.number >= self._number:
                found = self._find_verdict()
                assert found is not None  # numbers only rise
                return found
            passed = self._number if not failure else latest.passed if latest else 0
            mine = Verdict(self._number, passed, self._rank, failure, absent)
            text = json.dumps(vars(mine))
            after = self._store.compare_set(f"{self._prefix}/verdict", before, text)
            if after.decode() == text:
                return mine

    def _pause(self, seconds: float) -> float:
        """Sleep a little; return how long to sleep next."""
        time.sleep(seconds)
        self._check()
        return min(seconds * 1.5, _LONGEST_PAUSE_S)

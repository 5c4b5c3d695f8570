"""How tests of simulated ranks wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshdist.backends.simulated.scheduler import Rank, find_rank_here


@dataclass
class Until:
    """A wait for a condition."""

    is_ready: Callable[[], bool]
    text: str = "a test"

    def describe(self) -> str:
        return self.text


def here() -> Rank:
    rank = find_rank_here()
    assert rank is not None
    return rank


def pass_round(arrived: dict[int, int], rank: int, size: int) -> None:
    """Wait until every rank has come to this point as often as this one."""
    arrived[rank] = arrived.get(rank, 0) + 1
    mine = arrived[rank]
    here().wait(Until(lambda: all(arrived.get(r, 0) >= mine for r in range(size))))

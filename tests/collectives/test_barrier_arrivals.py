"""Monitored barriers: all members get one outcome, whichever of them decides."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from meshdist.collectives.monitored_barrier import BarrierResult, MonitoredBarrier, failed_text

RANKS = (4, 1, 7)
SHORT, LONG = timedelta(seconds=1), timedelta(seconds=20)


def meet(
    store: dist.Store, ranks: tuple[int, ...], number: int, timeout: timedelta, names_all: bool
) -> dict[int, BarrierResult]:
    """The outcomes for these members, which arrive at the same time."""
    found: dict[int, BarrierResult] = {}
    start = threading.Barrier(len(ranks))

    def come(rank: int) -> None:
        start.wait()
        barrier = MonitoredBarrier(store, "keys", RANKS, rank, number, timeout, names_all)
        found[rank] = barrier.wait()

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_who_come_pass_as_often_as_they_do() -> None:
    store = dist.HashStore()
    for number in (1, 2, 3):
        found = meet(store, RANKS, number, LONG, names_all=False)
        assert {outcome.failure for outcome in found.values()} == {""}
    assert store.num_keys() == len(RANKS) + 1  # and an outcome, however often they come


@pytest.mark.parametrize(
    ("come", "names_all", "text"),
    [
        ((4, 7), False, "Rank 1 failed to pass monitoredBarrier in 1000 ms"),
        ((4,), False, "Rank 1 failed to pass monitoredBarrier in 1000 ms"),
        ((4,), True, "Ranks 1, 7 failed to pass monitoredBarrier in 1000 ms"),
        ((1, 7), False, "Rank 4 failed to pass monitoredBarrier in 1000 ms"),
    ],
)
def test_who_does_not_come_is_told_alike_to_all_also_later(
    come: tuple[int, ...], names_all: bool, text: str
) -> None:
    store = dist.HashStore()
    found = meet(store, come, 1, SHORT, names_all)
    late = tuple(rank for rank in RANKS if rank not in come)
    found |= meet(store, late, 1, LONG, names_all)
    assert {outcome.failure for outcome in found.values()} == {text}
    assert {tuple(outcome.absent) for outcome in found.values()} == {late}
    assert meet(store, RANKS, 2, LONG, names_all)[1].failure == ""


def test_whoever_waits_in_vain_learns_so() -> None:
    def check() -> None:
        raise ValueError("in vain")

    barrier = MonitoredBarrier(
        dist.HashStore(), "keys", RANKS, 4, 1, LONG, names_all=False, check=check
    )
    with pytest.raises(ValueError, match="in vain"):
        barrier.wait()


def test_the_words_are_torchs() -> None:
    assert failed_text([3]) == "Rank 3 failed to pass monitoredBarrier"

"""A barrier through the store that names absent members; it breaks nothing."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store

from ..checking.barrier_arrivals import MonitoredBarrier
from ..checking.calls import GroupFacts
from ..errors import CollectiveTimeoutError

__all__ = ["meet_monitored"]


def meet_monitored(
    group: GroupFacts, store: Store, number: int, timeout: timedelta, *, names_all: bool
) -> None:
    """Return when every member has come to its meeting of this number.

    Raises:
        CollectiveTimeoutError: one did not come. It names the first that did not, or all of them
            with ``names_all``.
        StoreError: the store is lost.
    """
    rank, where = group.ranks[group.rank], f"{group.here}, {group.name}"
    if timeout <= timedelta(0):
        raise CollectiveTimeoutError(
            f"Rank {rank} timed out in monitoredBarrier: it may not wait",
            where=where,
            expected="a timeout above zero",
            found=f"{timeout}",
        )
    outcome = MonitoredBarrier(
        store, "meeting", group.ranks, rank, number, timeout, names_all, where
    ).wait()
    if outcome.failure:
        raise CollectiveTimeoutError(
            outcome.failure,
            where=where,
            expected="every member to call it",
            fix="look at what that rank did instead; the group can be used afterwards",
        )

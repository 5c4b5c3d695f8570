"""A barrier by way of the store that names who does not come; it breaks nothing."""

from __future__ import annotations

from datetime import timedelta

from ..errors import CollectiveTimeoutError, StoreError
from ..runtime.roll_calls import RollCall
from .calls import Members

__all__ = ["meet_monitored"]


def meet_monitored(members: Members, number: int, timeout: timedelta, *, names_all: bool) -> None:
    """Return when every member has come to its meeting of this number.

    Raises:
        CollectiveTimeoutError: one did not come. Whoever decided so names it, or with ``names_all``
            all who did not; that is the first member, or another where the first does not come.
        StoreError: the store is lost.
    """
    rank = members.ranks[members.rank]
    if timeout <= timedelta(0):
        raise CollectiveTimeoutError(
            f"Rank {rank} timed out in monitoredBarrier: it may not wait",
            where=f"{members.here}, {members}",
            expected="a timeout above zero",
            found=f"{timeout}",
        )
    roll_call = RollCall(
        members.store, "meeting", members.ranks, rank, number, timeout, names_all=names_all
    )
    try:
        verdict = roll_call.hold()
    except RuntimeError as error:  # as torch's stores raise it
        raise StoreError(
            "the store was lost during monitored_barrier",
            where=members.here,
            found=str(error).splitlines()[0],
            fix="look at the rank that ended first",
        ) from error
    if verdict.failure:
        raise CollectiveTimeoutError(
            verdict.failure,
            where=f"{members.here}, {members}",
            expected="every member to call it",
            fix="look at what that rank did instead; the group can be used afterwards",
        )

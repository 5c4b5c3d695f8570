"""A barrier by way of the store that names who does not come; it breaks nothing.

The first verdict that a member puts in the store is that of all.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

from ..errors import CollectiveTimeoutError, StoreError
from .calls import Members

__all__ = ["meet_monitored"]

_PAUSE_S = 0.002
_GRACE_S = 1.0  # the others wait longer than the first member, which knows who is missing


def meet_monitored(members: Members, number: int, timeout: timedelta, *, names_all: bool) -> None:
    """Return when every member has come to its meeting of this number.

    Raises:
        CollectiveTimeoutError: one did not come; the first member names it, or with ``names_all``
            all who did not, and the others learn so from it. Where the first member does not come
            in time, they name it, and it learns so when it comes.
        StoreError: the store is lost.
    """
    prefix = f"meeting/{number}"
    if timeout <= timedelta(0):
        raise CollectiveTimeoutError(
            f"Rank {members.ranks[members.rank]} timed out in monitoredBarrier: it may not wait",
            where=f"{members.here}, {members}",
            expected="a timeout above zero",
            found=f"{timeout}",
        )
    try:
        members.store.set(f"{prefix}/{members.rank}", "here")
        find_absent = _find_absent if members.rank == 0 else _follow
        mine = json.dumps(find_absent(members, prefix, timeout))
        absent = json.loads(members.store.compare_set(f"{prefix}/verdict", "", mine))
    except RuntimeError as error:  # as torch's stores raise it
        if isinstance(error, CollectiveTimeoutError):
            raise
        raise StoreError(
            "the store was lost during monitored_barrier",
            where=members.here,
            found=str(error).splitlines()[0],
            fix="look at the rank that ended first",
        ) from error
    if absent:
        shown = absent if names_all else absent[:1]
        who = f"Rank{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"
        milliseconds = timeout / timedelta(milliseconds=1)
        raise CollectiveTimeoutError(
            f"{who} failed to pass monitoredBarrier in {milliseconds:.0f} ms",
            where=f"{members.here}, {members}",
            expected="every member to call it",
            fix="look at what that rank did instead; the group can be used afterwards",
        )


def _find_absent(members: Members, prefix: str, timeout: timedelta) -> list[int]:
    """The global ranks of those who did not come in time, unless there is a verdict before."""
    missing = dict(enumerate(members.ranks))
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        for member in list(missing):
            if members.store.check([f"{prefix}/{member}"]):
                del missing[member]
        is_over = members.store.check([f"{prefix}/verdict"]) or time.monotonic() >= deadline
        if is_over or not missing:
            return list(missing.values())
        time.sleep(_PAUSE_S)


def _follow(members: Members, prefix: str, timeout: timedelta) -> list[int]:
    """Wait for a verdict; the first member's global rank where there is none in time."""
    key = f"{prefix}/verdict"
    deadline = time.monotonic() + timeout.total_seconds() + _GRACE_S
    while not members.store.check([key]):
        if time.monotonic() >= deadline:
            return [members.ranks[0]]
        time.sleep(_PAUSE_S)
    return []

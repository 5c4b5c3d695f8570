"""Ends this process where it stays in a blocking call of MPI's for longer than the call may take.

A member makes such a call once all have come, so that it takes as long as the data do; but where
one of them is stopped inside, the others stay there, and nothing can end MPI's call. So a thread
looks after those that stay, prints the error that the call cannot raise, and ends the process: then
mpiexec ends the job, as where any rank fails.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial

from ...error_text import first_line, ranks_text
from ...errors import CollectiveTimeoutError
from ...runtime.deadlines import Deadline, Timer
from ...runtime.hosts import ProcessCard, is_stopped, num_forks
from ..communicator import Explain
from ..failures import WireTimeout
from ..opening import Opening
from .arrivals import Arrivals

__all__ = ["forget", "limited", "watch"]

FindCards = Callable[[], Sequence[ProcessCard | None]]

_PERIOD_S = 0.25

_watched: dict[Arrivals, Explain] = {}
"""The function that makes the error of a call, for each group of this process."""


def watch(arrivals: Arrivals, explain: Explain) -> None:
    """Look after this member's blocking calls in a group."""
    _watched[arrivals] = explain
    _start(num_forks())  # threads do not follow into a forked child


def forget(arrivals: Arrivals) -> None:
    """Look no more after a group, which ends."""
    _watched.pop(arrivals, None)


@cache
def _start(_: int) -> None:
    threading.Thread(target=_look_after_all, name="meshdist-mpi-watchdog", daemon=True).start()


def _look_after_all() -> None:
    since: dict[Arrivals, tuple[int, Deadline]] = {}
    while True:
        time.sleep(_PERIOD_S)
        inside = {one: stay for one in tuple(_watched) if (stay := one.find_stay()) is not None}
        since = {
            one: since[one] if one in since and since[one][0] == number else (number, Deadline(s))
            for one, (number, s) in inside.items()
        }
        for arrivals, (_, deadline) in since.items():
            if deadline.is_over:
                _end_process(arrivals, inside[arrivals])


def _end_process(arrivals: Arrivals, stay: tuple[int, float]) -> None:
    """Explain why the call is not finished, and end the process, unless it is by now."""
    explain = _watched.get(arrivals)
    if explain is None:
        return
    error = explain(WireTimeout(f"not finished after {stay[1]:g} s"), None)
    if arrivals.find_stay() != stay:  # the group is broken, and the next verb on it says so
        return
    _end_with(error, arrivals.link.opening)


@contextmanager
def limited(opening: Opening, find_cards: FindCards) -> Iterator[None]:
    """End the process if MPI's calls in the context, which open a group, take too long."""
    timer = Timer(opening.timeout, partial(_end_opening, opening, find_cards))
    try:
        yield
    finally:
        timer.cancel()


def _end_opening(opening: Opening, find_cards: FindCards) -> None:
    silent = []
    try:
        for rank, card in zip(opening.ranks, find_cards(), strict=True):
            if card is None:
                silent.append(f"rank {rank} has not come")
            elif is_stopped(card):
                silent.append(f"rank {rank}, {card}, is stopped")
    except RuntimeError as lost:  # of the store: its text names the process that serves it
        silent.append(first_line(lost))
    error = CollectiveTimeoutError(
        f"{opening.name} was not opened on wire 'mpi' within {opening.timeout.total_seconds():g} s",
        where=f"rank {opening.ranks[opening.rank]}, among {ranks_text(opening.ranks)}",
        expected="every member to make the calls of MPI's that open it",
        found="\n".join(silent) or "MPI does not say which rank is missing",
        fix="look at what keeps these ranks",
    )
    _end_with(error, opening)


def _end_with(error: BaseException, opening: Opening) -> None:
    print(
        f"meshdist: rank {opening.ranks[opening.rank]} ends: nothing else can end the call of "
        f"MPI's that it is in, and under MPI the other ranks end with it\n"
        f"{type(error).__name__}: {error}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)

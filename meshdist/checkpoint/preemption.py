"""Detect preemption and restarts of a job."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from ..backends.simulated.scheduler import find_rank_here
from ..bootstrap.launch_environment import find_restart_count
from ..bootstrap.world import find_launched_rank, find_world
from ..collectives.torch_private import hidden_from_modes
from ..collectives.value_comparison import is_any
from ..errors import WorldError
from ..groups.process_group import resolve_group

__all__ = ["preempted", "restart_count"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_former: dict[int, Any] = {}
"""The previous handlers, by signal; empty until the first call."""
_received: list[int] = []
"""The received signals of this process, regardless of its world."""


@hidden_from_modes
def preempted() -> bool:
    """Return whether a signal asked this job to stop; equal on all ranks at each call.

    After its first call, SIGTERM and SIGUSR1 no longer terminate the process: they are recorded, on
    any rank, and previous handlers are called. Call it on every rank once per step; if it returns
    True, save and leave the loop.

    Cost: an all-reduce of 4 bytes over all ranks; on NCCL the host waits for the device.

    Raises:
        WorldError: the first call is not in the main thread.

    Example:
        >>> import meshdist as md
        >>> md.simulate(lambda: [md.preempted() for _ in range(2)], 2)
        [[False, False], [False, False]]
    """
    if not _former:
        rank = find_rank_here()
        if rank is None:
            _install()
        else:
            rank.scheduler.call_outside(_install)
    if not _former:
        raise WorldError(
            "preempted() cannot install signal handlers outside the main thread",
            expected="the first call in the main thread",
            fix="call md.preempted() once in the main thread, at the start of the program",
        )
    mine = bool(_received)
    if find_world() is None and find_launched_rank() is None:
        return mine
    return is_any(mine, resolve_group(None), "preempted")


def restart_count() -> int:
    """Return how often torchrun or Slurm restarted this job; 0 without such a launcher.

    Example:
        >>> import meshdist as md
        >>> md.restart_count()
        0
    """
    return find_restart_count(os.environ)


def _install() -> None:
    if threading.current_thread() is threading.main_thread() and not _former:
        for number in _SIGNALS:
            _former[number] = signal.signal(number, _note)


def _note(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    former = _former.get(number)
    if callable(former) and former is not signal.default_int_handler:
        former(number, frame)

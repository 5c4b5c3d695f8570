"""How much longer things take here just now than on an idle machine: for upper bounds on time.

A test that says "at most five seconds" means an idle machine: ``is_within(took, 5.0)`` allows a
busy one as many times longer as a small fixed piece of work takes longer there, with its wake-ups.
Time-outs that must fire stay as short as they are.
"""

from __future__ import annotations

import time

_ROUNDS = 8
_ROUND_S = 0.002


def load_factor() -> float:
    """How many times longer work and wake-ups take than alone on this machine; 1 at least.

    Half of the piece of work is asleep. The other half is counted on the clock of this thread,
    which stands while another process has the core.
    """
    begin, begin_active = time.perf_counter(), time.thread_time()
    for _ in range(_ROUNDS):
        time.sleep(_ROUND_S)
        round_end = time.thread_time() + _ROUND_S
        while time.thread_time() < round_end:
            pass
    alone = _ROUNDS * _ROUND_S + time.thread_time() - begin_active
    return max(1.0, (time.perf_counter() - begin) / alone)


def is_within(seconds: float, limit: float) -> bool:
    """Whether ``seconds`` have been less than ``limit``, or what a busy machine makes of it."""
    return seconds < limit or seconds < limit * load_factor()

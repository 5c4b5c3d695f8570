"""Where the CPU time of a training step goes: threads, then functions."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable

_WARM_UP = 5
_SHOWN = 30


def show_profile(step: Callable[[], None], num_steps: int, *, is_shown: bool) -> None:
    """Run steps as they are, then under a profiler; print both where ``is_shown``.

    All ranks run the same steps. The profiler makes each call of a function longer by some tenths
    of a microsecond, so its times are to be compared with each other alone.
    """
    for _ in range(_WARM_UP):
        step()
    wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(num_steps):
        step()
    wall = (time.perf_counter() - wall) * 1e3 / num_steps
    process = (time.process_time() - process) * 1e3 / num_steps
    thread = (time.thread_time() - thread) * 1e3 / num_steps
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        step()
    profiler.disable()
    if is_shown:
        print(
            f"a step, ms: wall {wall:.2f}, CPU of the program's thread {thread:.2f}, "
            f"of the others {process - thread:.2f}; below, the sum of {num_steps} steps"
        )
        pstats.Stats(profiler).sort_stats("tottime").print_stats(_SHOWN)

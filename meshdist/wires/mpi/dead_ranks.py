"""A last report where mpiexec ends this rank since another has died; MPI raises nothing then."""

from __future__ import annotations

import os
import signal
import sys
import threading

from .link import open_links

__all__ = ["report_dead_ranks_at_the_end"]


def report_dead_ranks_at_the_end() -> None:
    """Make this rank print which ranks have died when mpiexec ends it for that."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _report)


def _report(number: int, frame: object) -> None:
    for link in open_links():
        if link.is_forked:
            continue
        dead = {} if link.is_closed else link.find_dead()
        if dead:
            them = ", ".join(f"rank {rank} ({card})" for rank, card in dead.items())
            verb = "has" if len(dead) == 1 else "have"
            print(
                f"meshdist: rank {link.rank_of_world} is ended by mpiexec: {them} {verb} ended "
                "before, and under MPI all ranks end with one",
                file=sys.stderr,
                flush=True,
            )
            break
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

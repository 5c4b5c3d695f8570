"""A process that is stopped, or goes on, for certain."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

__all__ = ["resume_other", "stop", "stop_other"]


def stop(child: int) -> None:
    """Stop the child and return when all its threads stand still.

    The signal reaches one thread first. On a busy machine the others, such as that of a store's
    server, go on until that one has had a core.
    """
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)


def stop_other(process: int) -> None:
    """Stop a process that is no child of this one, and return when all its threads stand still."""
    os.kill(process, signal.SIGSTOP)
    while any(state_of(path) != "T" for path in Path(f"/proc/{process}/task").iterdir()):
        time.sleep(0.001)


def resume_other(process: int) -> None:
    """Let a process that is no child of this one go on, and return when it does."""
    os.kill(process, signal.SIGCONT)
    while any(state_of(path) == "T" for path in Path(f"/proc/{process}/task").iterdir()):
        time.sleep(0.001)


def state_of(thread: Path) -> str:
    """Return the letter that the system has for what a thread does; "T" if it is stopped."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]

"""A child that is stopped, or goes on, for certain."""

from __future__ import annotations

import os
import signal

__all__ = ["resume", "stop"]


def stop(child: int) -> None:
    """Stop the child and return when all its threads stand still.

    The signal reaches one thread first. On a busy machine the others, such as that of a store's
    server, go on until that one has had a core.
    """
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)


def resume(child: int) -> None:
    """Let the child go on, and return when it does."""
    os.kill(child, signal.SIGCONT)
    os.waitid(os.P_PID, child, os.WCONTINUED)

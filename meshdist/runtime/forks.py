"""Whether this process is a forked child of the one that made something, asked cheaply."""

from __future__ import annotations

import os

__all__ = ["num_forks"]

_num_forks = 0


def num_forks() -> int:
    """How many forks lie between this process and the one that imported the package.

    It differs between a process and its forked child, as its number does, which costs a call of
    the system to ask.
    """
    return _num_forks


def _count() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_count)

"""A process that may open few more files, as if its hard limit said so."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

__all__ = ["room_for"]


@contextmanager
def room_for(num_files: int, *, num_hard: int | None = None) -> Iterator[None]:
    """Let this process open so many more files; ``num_hard`` more where the limit is raised.

    The hard limit is only shown: a process that lowers its own needs root to raise it again.
    """
    get, set_limits = resource.getrlimit, resource.setrlimit
    before = get(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/dev/fd")) - 1
    hard = num_open + (num_files if num_hard is None else num_hard)

    def shown(kind: int) -> tuple[int, int]:
        soft, most = get(kind)
        return (soft, hard if kind == resource.RLIMIT_NOFILE else most)

    def change(kind: int, limits: tuple[int, int]) -> None:
        assert limits[0] <= hard and limits[1] == hard
        set_limits(kind, (limits[0], before[1]))

    set_limits(resource.RLIMIT_NOFILE, (num_open + num_files, before[1]))
    try:
        with mock.patch.multiple(resource, getrlimit=shown, setrlimit=change):
            yield
    finally:
        set_limits(resource.RLIMIT_NOFILE, before)

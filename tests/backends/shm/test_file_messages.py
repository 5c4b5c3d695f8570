"""Numbers and open files through a Unix socket: many at a time, and where the system rejects."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from meshdist.backends.shm import listener
from meshdist.backends.shm.attach import Shared

from .circle import Circle, close_shared, num_files


def test_more_handles_than_fit_into_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MOST_FILES", 3)
    before = num_files()
    seen: list[int] = []

    def attach(member: int, shared: Shared) -> None:
        seen.append(len(shared.processes))
        close_shared(shared)

    assert Circle(9).run(attach) == [None] * 9
    assert seen == [9] * 9
    assert num_files() <= before  # threads of other tests may close some meanwhile


def test_too_many_files_under_way_are_sent_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = [OSError(errno.ETOOMANYREFS, "too many") for _ in range(5)]

    class Full(socket.socket):
        def sendmsg(self, *args: Any) -> int:
            if refusals:
                raise refusals.pop()
            return super().sendmsg(*args)

    monkeypatch.setattr(socket, "socket", Full)
    assert Circle(3).run() == [None] * 3
    assert not refusals

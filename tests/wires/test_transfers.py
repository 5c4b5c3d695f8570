"""Sends and receives over c10d that another thread waits for."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from meshdist.wires.transfers import Transfer

SECONDS = timedelta(seconds=20)


class Message:
    """A message that comes when it is told to, or fails."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.came = threading.Event()
        self.error = error
        self.waits: list[timedelta] = []

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout)
        self.came.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error


def test_another_thread_waits_once() -> None:
    message = Message()
    transfer = Transfer(message, 1, SECONDS)
    assert not transfer.has_waiter
    assert not transfer.is_over(SECONDS * 2)
    assert transfer.has_waiter and not transfer.is_over(SECONDS * 2, 0.01)
    message.came.set()
    assert transfer.is_over(SECONDS * 2, 5.0) and transfer.is_over(SECONDS * 2)
    transfer.check()
    assert message.waits == [SECONDS * 2]


def test_what_the_other_thread_met_is_raised_here() -> None:
    message = Message(RuntimeError("connection closed"))
    message.came.set()
    transfer = Transfer(message, 1, SECONDS)
    assert transfer.is_over(SECONDS * 2, 5.0)
    with pytest.raises(RuntimeError, match="connection closed"):
        transfer.check()

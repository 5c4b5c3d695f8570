"""Calls that can be left behind, also while no thread can be started any more."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta

import pytest

from meshdist.runtime.bounded_calls import BoundedCall, keep_thread

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=20)


def test_it_returns_or_raises_what_the_call_does() -> None:
    assert BoundedCall(lambda: 7, "test").wait(LONG) == 7
    with pytest.raises(ZeroDivisionError):
        BoundedCall(lambda: 1 // 0, "test").wait(LONG)


def test_a_call_that_stays_is_left_behind() -> None:
    go_on = threading.Event()
    call = BoundedCall(go_on.wait, "test")
    with pytest.raises(TimeoutError, match=r"not finished after 0.2 s"):
        call.wait(SHORT)
    go_on.set()
    assert call.wait(LONG)


def test_it_lets_go_of_what_it_called() -> None:
    class Held:
        def call(self) -> None:
            pass

    held = Held()
    alive = weakref.ref(held)
    call = BoundedCall(held.call, "test")
    call.wait(LONG)
    del held
    end = time.monotonic() + 10
    while alive() is not None and time.monotonic() < end:
        time.sleep(0.01)
    assert alive() is None
    call.wait(LONG)


def test_at_the_interpreters_end_a_thread_that_was_kept_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    keep_thread()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    go_on = threading.Event()
    call = BoundedCall(lambda: go_on.wait() and threading.current_thread().name, "test")
    with pytest.raises(TimeoutError):
        call.wait(SHORT)
    go_on.set()
    assert call.wait(LONG) == "meshdist-last-calls"

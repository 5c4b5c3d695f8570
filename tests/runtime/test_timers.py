"""Timers: calls when a time is up on the clock."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref

import pytest

from meshdist.runtime.deadlines import Timer
from tests.load import is_within


def test_it_calls_once_when_the_time_is_up() -> None:
    called = threading.Semaphore(0)
    begin = time.monotonic()
    timer = Timer(0.2, called.release)
    assert called.acquire(timeout=5.0)
    took = time.monotonic() - begin
    assert took >= 0.2
    assert is_within(took, 2.0)
    assert not timer.cancel()
    assert not called.acquire(timeout=0.2)


def test_what_is_cancelled_makes_no_call() -> None:
    called = threading.Event()
    timer = Timer(0.1, called.set)
    assert timer.cancel()
    assert not timer.cancel()
    assert not called.wait(0.3)


def test_cancelling_waits_for_the_end_of_a_call() -> None:
    begun, ended = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    timer = Timer(0.0, call)
    assert begun.wait(5.0)
    assert not timer.cancel()
    assert ended.is_set()


def test_one_that_fails_hinders_no_other(caplog: pytest.LogCaptureFixture) -> None:
    called = threading.Event()

    def fail() -> None:
        raise ValueError("no call")

    with caplog.at_level(logging.ERROR, "meshdist.timers"):
        Timer(0.0, fail)
        Timer(0.1, called.set)
        assert called.wait(5.0)
    assert "a timer's call failed" in caplog.text
    assert "no call" in caplog.text


def test_it_calls_again_after_a_while_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.runtime.deadlines.LINGER_S", 0.1)
    time.sleep(1.3)  # the thread sleeps by now
    for _ in range(3):
        called = threading.Event()
        Timer(0.01, called.set)
        assert called.wait(5.0)
        time.sleep(0.25)


def test_it_calls_in_a_forked_child() -> None:
    Timer(30.0, print).cancel()
    child = os.fork()
    if child == 0:
        called = threading.Event()
        Timer(0.0, called.set)
        os._exit(0 if called.wait(5.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_a_timer_that_is_over_holds_what_it_calls_no_more(seconds: float) -> None:
    called = threading.Event()
    timer = Timer(seconds, called.set)
    held = weakref.ref(called)
    if not seconds:
        assert called.wait(60)
    assert timer.cancel() == bool(seconds)
    del called
    gc.collect()
    assert held() is None

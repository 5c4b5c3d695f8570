"""Alarms: calls when a time is up on the clock."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest

from meshdist.runtime.alarms import Alarm
from meshdist.runtime.clock import clock


def test_it_rings_once_when_the_time_is_up() -> None:
    rung = threading.Semaphore(0)
    begin = time.monotonic()
    alarm = Alarm(0.2, rung.release)
    assert rung.acquire(timeout=5.0)
    assert 0.2 <= time.monotonic() - begin < 2.0
    assert not alarm.off()
    assert not rung.acquire(timeout=0.2)


def test_what_is_turned_off_does_not_ring() -> None:
    rung = threading.Event()
    alarm = Alarm(0.1, rung.set)
    assert alarm.off()
    assert not alarm.off()
    assert not rung.wait(0.3)


def test_nobody_goes_on_while_it_rings() -> None:
    begun, ended = threading.Event(), threading.Event()

    def ring() -> None:
        begun.set()
        time.sleep(0.2)
        ended.set()

    alarm = Alarm(0.0, ring)
    assert begun.wait(5.0)
    assert not alarm.off()
    assert ended.is_set()


def test_it_rings_no_earlier_for_a_clock_that_stands() -> None:
    rung = threading.Event()
    clock.stop("test")
    try:
        Alarm(0.1, rung.set)
        assert not rung.wait(0.4)
    finally:
        clock.go("test")
    assert rung.wait(5.0)


def test_one_that_fails_keeps_no_other_from_ringing(caplog: pytest.LogCaptureFixture) -> None:
    rung = threading.Event()

    def fail() -> None:
        raise ValueError("no bell")

    with caplog.at_level(logging.ERROR, "meshdist.alarms"):
        Alarm(0.0, fail)
        Alarm(0.1, rung.set)
        assert rung.wait(5.0)
    assert "an alarm failed" in caplog.text
    assert "no bell" in caplog.text


def test_it_rings_again_after_a_while_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.runtime.alarms._LINGER_S", 0.1)
    time.sleep(1.3)  # what lingered longer has gone to sleep
    for _ in range(3):
        rung = threading.Event()
        Alarm(0.01, rung.set)
        assert rung.wait(5.0)
        time.sleep(0.25)


def test_it_rings_in_a_forked_child() -> None:
    Alarm(30.0, print).off()
    child = os.fork()
    if child == 0:
        rung = threading.Event()
        Alarm(0.0, rung.set)
        os._exit(0 if rung.wait(5.0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

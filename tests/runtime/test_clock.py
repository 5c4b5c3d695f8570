"""The clock of timeouts: an oracle counts the real seconds during which nobody had stopped it."""

from __future__ import annotations

import os
import time

import pytest

from meshdist.runtime import clock as room
from meshdist.runtime.clock import Clock


class Time:
    """Real time, which goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Time:
    real = Time()
    monkeypatch.setattr(room, "time", real)
    return real


def test_it_goes_as_time_does(real: Time) -> None:
    clock = Clock()
    begin = clock.now()
    real.seconds += 2.5
    assert clock.now() - begin == 2.5
    assert not clock.stands()


def test_it_stands_while_anybody_stops_it(real: Time) -> None:
    clock = Clock()
    begin, counted, stoppers = clock.now(), 0.0, set()
    calls = ["+a", "+b", "+a", "-a", "-b", "-b", "+c", "-a", "-c", "+a", "+b", "-b", "-a"]
    for step, (act, who) in enumerate(calls):
        (clock.stop if act == "+" else clock.go)(who)
        (stoppers.add if act == "+" else stoppers.discard)(who)
        assert clock.stands() == bool(stoppers)
        real.seconds += 2.0**step
        counted += 0.0 if stoppers else 2.0**step
        assert clock.now() - begin == counted


def test_the_clock_of_the_process_is_real() -> None:
    begin, real_begin = room.clock.now(), time.monotonic()
    time.sleep(0.05)
    room.clock.stop("test")
    try:
        stopped = room.clock.now()
        assert stopped - begin == pytest.approx(time.monotonic() - real_begin, abs=0.02)
        time.sleep(0.05)
        assert room.clock.now() == stopped
    finally:
        room.clock.go("test")
    assert room.clock.now() - stopped < 0.02


def test_it_goes_in_a_forked_child() -> None:
    room.clock.stop("parent")
    try:
        before = room.clock.now()
        child = os.fork()
        if child == 0:
            time.sleep(0.01)
            os._exit(0 if not room.clock.stands() and room.clock.now() > before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert room.clock.stands()
    finally:
        room.clock.go("parent")

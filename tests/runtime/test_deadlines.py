"""The clock, against an oracle that counts real seconds; deadlines and waits, on made-up time."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest

from meshdist.runtime import deadlines as room
from meshdist.runtime.deadlines import Clock, Deadline, Grace, wait_until


class Time:
    """Real time, which goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.pauses.append(seconds)
        self.seconds += seconds


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
    assert not clock.is_paused()


def test_it_is_paused_while_it_has_a_holder(real: Time) -> None:
    clock = Clock()
    begin, counted, holders = clock.now(), 0.0, set()
    calls = ["+a", "+b", "+a", "-a", "-b", "-b", "+c", "-a", "-c", "+a", "+b", "-b", "-a"]
    for step, (act, holder) in enumerate(calls):
        (clock.pause if act == "+" else clock.resume)(holder)
        (holders.add if act == "+" else holders.discard)(holder)
        assert clock.is_paused() == bool(holders)
        real.seconds += 2.0**step
        counted += 0.0 if holders else 2.0**step
        assert clock.now() - begin == counted


def test_the_clock_of_the_process_is_real() -> None:
    begin, real_begin = room.clock.now(), time.monotonic()
    time.sleep(0.05)
    room.clock.pause("test")
    try:
        stopped = room.clock.now()
        assert stopped - begin == pytest.approx(time.monotonic() - real_begin, abs=0.02)
        time.sleep(0.05)
        assert room.clock.now() == stopped
    finally:
        room.clock.resume("test")
    assert room.clock.now() - stopped < 0.02


def test_it_goes_in_a_forked_child() -> None:
    room.clock.pause("parent")
    try:
        before = room.clock.now()
        child = os.fork()
        if child == 0:
            time.sleep(0.01)
            os._exit(0 if not room.clock.is_paused() and room.clock.now() > before else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert room.clock.is_paused()
    finally:
        room.clock.resume("parent")


def test_a_deadline_counts_down_to_nothing(real: Time) -> None:
    deadline, same = Deadline(timedelta(seconds=2)), Deadline(2.0)
    assert (deadline.left_s, same.left_s, deadline.is_over) == (2.0, 2.0, False)
    real.seconds += 0.5
    assert deadline.left == timedelta(seconds=1.5)
    real.seconds += 4
    assert (deadline.left_s, deadline.left, deadline.is_over) == (0.0, timedelta(0), True)


def test_followers_are_called_at_once_and_at_every_change() -> None:
    clock, seen = Clock(), []
    clock.pause("a")
    clock.follow(seen.append)
    clock.pause("b")
    clock.resume("a")
    clock.resume("b")
    clock.resume("b")
    clock.pause("a")
    assert seen == [True, False, True]


def test_a_deadline_waits_for_a_paused_clock_and_a_grace_does_not(
    real: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "clock", clock)
    deadline, grace = Deadline(2.0), Grace(2.0)
    clock.pause("a")
    real.seconds += 1
    assert (deadline.left_s, grace.left_s) == (2.0, 1.0)
    real.seconds += 9
    assert (deadline.is_over, grace.is_over) == (False, True)
    clock.resume("a")
    real.seconds += 2
    assert deadline.is_over


def test_for_ever_is_never_over(real: Time) -> None:
    deadline = Deadline(None)
    real.seconds += 1e9
    assert (deadline.is_over, deadline.left_s) == (False, float("inf"))


def test_a_slice_ends_at_the_deadline_unless_the_clock_is_paused(
    real: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(room, "clock", clock)
    deadline = Deadline(1.5)
    assert deadline.slice_s(1.0) == 1.0
    real.seconds += 1
    assert deadline.slice_s(1.0) == 0.5
    clock.pause("a")  # else a wait would not sleep between two looks at a clock that stands
    assert deadline.slice_s(1.0) == 1.0


def test_a_wait_returns_what_it_has_waited_for(real: Time) -> None:
    found = iter(["", "", "port"])
    assert wait_until(lambda: next(found), Deadline(1.0)) == "port"
    assert wait_until(lambda: "", Deadline(1.0)) is None


def test_a_wait_asks_once_even_where_no_time_is_left(real: Time) -> None:
    asked: list[int] = []
    assert not wait_until(lambda: asked.append(1), Deadline(0))
    assert wait_until(lambda: True, Deadline(0))
    assert (asked, real.pauses) == ([1], [])


@pytest.mark.parametrize("longest_s", [0.001, 0.02])
def test_pauses_grow_with_the_wait_and_end_at_the_deadline(real: Time, longest_s: float) -> None:
    begin = real.seconds
    assert not wait_until(lambda: False, Deadline(1.0), longest_pause_s=longest_s)
    assert real.seconds - begin == pytest.approx(1.0, abs=1e-9)
    assert real.pauses[0] == 0.00005
    assert max(real.pauses) == pytest.approx(longest_s)
    waited = 0.0
    for pause in real.pauses:
        assert pause <= max(0.00005, waited / 16 + 1e-9)
        waited += pause


def test_a_wait_in_vain_ends_by_its_check(real: Time) -> None:
    def check() -> None:
        if real.seconds > 1000.5:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        wait_until(lambda: False, Deadline(5.0), check)
    assert 0.5 <= real.seconds - 1000.0 <= 0.55

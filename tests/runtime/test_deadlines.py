"""Deadlines and waits, on made-up time."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from meshdist.runtime import deadlines as room
from meshdist.runtime.deadlines import Deadline, wait_until


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

    def give_way(self) -> None:
        self.seconds += 0.000001


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Time:
    real = Time()
    monkeypatch.setattr(room, "time", real)
    monkeypatch.setattr(os, "sched_yield", real.give_way)
    return real


def test_a_deadline_counts_down_to_nothing(real: Time) -> None:
    deadline, same = Deadline(timedelta(seconds=2)), Deadline(2.0)
    assert (deadline.left_s, same.left_s, deadline.is_over) == (2.0, 2.0, False)
    real.seconds += 0.5
    assert deadline.left == timedelta(seconds=1.5)
    real.seconds += 4
    assert (deadline.left_s, deadline.left, deadline.is_over) == (0.0, timedelta(0), True)


def test_for_ever_is_never_over(real: Time) -> None:
    deadline = Deadline(None)
    real.seconds += 1e9
    assert (deadline.is_over, deadline.left_s) == (False, float("inf"))


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
    waited = 1.0 - sum(real.pauses)
    for pause in real.pauses:
        assert pause <= max(0.00005, waited / 16 + 1e-9)
        waited += pause


def test_a_wait_gives_way_before_it_sleeps(real: Time) -> None:
    begin = real.seconds
    assert wait_until(lambda: real.seconds - begin > 0.0001, Deadline(1.0))
    assert not real.pauses
    assert wait_until(lambda: real.seconds - begin > 0.0101, Deadline(1.0), awake_s=0.01)
    assert not real.pauses


def test_a_wait_in_vain_ends_by_its_check(real: Time) -> None:
    def check() -> None:
        if real.seconds > 1000.5:
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        wait_until(lambda: False, Deadline(5.0), check)
    assert 0.5 <= real.seconds - 1000.0 <= 0.55

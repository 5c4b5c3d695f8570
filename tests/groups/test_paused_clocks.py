"""Paused clocks: by which ranks they are paused, and that none is for good."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from meshdist.groups import signals as room
from meshdist.groups.signals import PausedClocks
from tests.inner import Clock, deadlines


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Real time, which goes on when it is told to, and a clock for it alone."""
    real = SimpleNamespace(seconds=1000.0, sleep=time.sleep, clock=Clock())
    real.monotonic = lambda: real.seconds
    monkeypatch.setattr(deadlines, "time", real)
    monkeypatch.setattr(room, "clock", real.clock)
    return real


def test_the_clock_is_paused_as_long_as_a_rank_pauses_it(real: SimpleNamespace) -> None:
    pauses = PausedClocks(HashStore(), 2)
    pauses.change("a", None)
    assert not real.clock.is_paused()
    for rank, name in enumerate("ab"):
        pauses.change(name, (rank, 60.0))
        pauses.change(name, (rank, 60.0))
    for name, is_paused in [("a", True), ("a", True), ("b", False), ("b", False)]:
        pauses.change(name, None)
        assert real.clock.is_paused() == is_paused


def test_a_pause_has_a_limit(real: SimpleNamespace) -> None:
    pauses = PausedClocks(HashStore(), 2)
    pauses.change("a", (2, 60.0))
    for _ in range(11):
        real.seconds += 5.0
        assert pauses.check() == []
        assert real.clock.is_paused()
    real.seconds += 6.0
    assert pauses.check() == []
    assert not real.clock.is_paused()


def test_a_rank_that_shows_no_sign_of_life_pauses_no_clock(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    debugged, other, third = (PausedClocks(store, rank) for rank in range(3))
    other.change("a", (0, 3600.0))
    monkeypatch.setattr(room, "clock", Clock())  # as in another process
    debugged.change("a", (0, 3600.0))
    third.change("a", (0, 3600.0))
    monkeypatch.setattr(room, "clock", real.clock)
    for _ in range(5):
        real.seconds += 8.0
        assert debugged.check() == other.check() == third.check(looks=False) == []
        assert real.clock.is_paused()
    real.seconds += 8.0  # it is killed
    assert other.check() == []
    assert real.clock.is_paused()
    real.seconds += 3.0
    assert third.check(looks=False) == []  # another process of its host looks, and tells it
    assert third.check() == []  # it has not looked before
    assert other.check() == ["a"]
    assert not real.clock.is_paused()
    assert other.check() == []


def test_released_pauses_stop_no_clock(real: SimpleNamespace) -> None:
    pauses = PausedClocks(HashStore(), 1)
    pauses.change("a", (0, 60.0))
    assert real.clock.is_paused()
    pauses.release()
    assert not real.clock.is_paused()

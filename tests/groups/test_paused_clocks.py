"""Paused clocks: by which ranks they are paused, and that none is for good."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from meshdist.groups import paused_clocks as room
from meshdist.groups.paused_clocks import PausedClocks, change_pause
from meshdist.runtime import deadlines
from meshdist.runtime.deadlines import Clock


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Real time, which goes on when it is told to, and a clock for it alone."""
    real = SimpleNamespace(seconds=1000.0, sleep=time.sleep, clock=Clock())
    real.monotonic = lambda: real.seconds
    monkeypatch.setattr(deadlines, "time", real)
    monkeypatch.setattr(room, "clock", real.clock)
    return real


def test_the_clock_is_paused_as_long_as_the_table_lists_a_rank(real: SimpleNamespace) -> None:
    store = HashStore()
    pauses = PausedClocks(store, 2)
    pauses.read()
    assert not real.clock.is_paused()
    names = ["a", "b"]
    for rank, name in enumerate(names):
        change_pause(store, name, (rank, 60.0))
    for is_paused in (True, True, False):
        pauses.read()
        pauses.read()
        assert real.clock.is_paused() == is_paused
        if names:
            change_pause(store, names.pop(0), None)


def test_a_pause_has_a_limit(real: SimpleNamespace) -> None:
    store = HashStore()
    change_pause(store, "a", (2, 60.0))
    pauses = PausedClocks(store, 2)
    pauses.read()
    for _ in range(11):
        real.seconds += 5.0
        pauses.check()
        assert real.clock.is_paused()
    real.seconds += 6.0
    pauses.check()
    pauses.read()  # the pause is in the table still
    pauses.check()
    assert not real.clock.is_paused()


def test_a_rank_that_shows_no_sign_of_life_pauses_no_clock(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    change_pause(store, "a", (0, 3600.0))
    debugged, other = PausedClocks(store, 0), PausedClocks(store, 1)
    other.read()
    monkeypatch.setattr(room, "clock", Clock())  # as in another process
    debugged.read()
    monkeypatch.setattr(room, "clock", real.clock)
    for _ in range(5):
        real.seconds += 8.0
        debugged.check()
        other.check()
        assert real.clock.is_paused()
    real.seconds += 8.0  # it is killed
    other.check()
    assert real.clock.is_paused()
    real.seconds += 3.0
    other.check()
    assert not real.clock.is_paused()


def test_released_pauses_stop_no_clock(real: SimpleNamespace) -> None:
    store = HashStore()
    change_pause(store, "a", (0, 60.0))
    pauses = PausedClocks(store, 1)
    pauses.read()
    assert real.clock.is_paused()
    pauses.release()
    assert not real.clock.is_paused()

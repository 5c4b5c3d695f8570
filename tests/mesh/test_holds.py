"""Holds of the clock: who holds it, and that nobody does for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from meshdist.mesh import holds as room
from meshdist.mesh.holds import Holds, add_hold, remove_hold
from meshdist.runtime.clock import clock


class Time:
    """Real time, which goes on when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Time]:
    real = Time()
    monkeypatch.setattr(room, "time", real)
    yield real
    assert not clock.stands()


def test_the_clock_stands_as_long_as_one_rank_holds_it(real: Time) -> None:
    store = HashStore()
    holds = Holds(store, 2)
    holds.read()
    assert not clock.stands()
    first, second = add_hold(store, 0, 60.0), add_hold(store, 1, 60.0)
    for is_held in (True, True, False):
        holds.read()
        holds.read()
        assert clock.stands() == is_held
        if first:
            remove_hold(store, first)
            first = ""
        else:
            remove_hold(store, second)


def test_a_hold_has_a_limit(real: Time) -> None:
    store = HashStore()
    add_hold(store, 2, 60.0)
    holds = Holds(store, 2)
    holds.read()
    for _ in range(12):
        real.seconds += 5.0
        holds.check()
        assert clock.stands()
    real.seconds += 1.0
    holds.check()
    holds.read()  # the hold is in the table still
    holds.check()
    assert not clock.stands()


def test_a_rank_that_gives_no_sign_of_life_holds_nobody(real: Time) -> None:
    store = HashStore()
    name = add_hold(store, 0, 3600.0)
    holder, other = Holds(store, 0), Holds(store, 1)
    other.read()
    holder._holds.update({name: room._Hold(0, real.seconds + 3600.0, real.seconds)})
    for _ in range(5):
        real.seconds += 8.0
        holder.check()
        other.check()
        assert clock.stands()
    real.seconds += 8.0  # it is killed
    other.check()
    assert clock.stands()
    real.seconds += 3.0
    other.check()
    assert not clock.stands()


def test_released_holds_stop_no_clock(real: Time) -> None:
    store = HashStore()
    add_hold(store, 0, 60.0)
    holds = Holds(store, 1)
    holds.read()
    assert clock.stands()
    holds.release()
    assert not clock.stands()

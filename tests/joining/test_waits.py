"""Waits of a join context end where others leave or end, and tell which."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest

import meshdist as md
from meshdist.joining.statements import JoinedCommunicator
from meshdist.joining.waits import Waits
from meshdist.joining.whereabouts import Whereabouts
from tests.inner import get_world
from tests.load import is_within
from tests.pool import Pool

SHORT = timedelta(seconds=0.2)
LONG = timedelta(seconds=60)


def waits_here() -> tuple[Waits, Whereabouts, Any]:
    whereabouts = Whereabouts(get_world(), "main", range(2))
    channel = md.group.WORLD.open_channel("cpu")
    return Waits(get_world(), whereabouts), whereabouts, JoinedCommunicator(md.group.WORLD, channel)


def test_a_wait_ends_when_it_is_due_and_at_its_timeout(pool: Pool) -> None:
    def program() -> tuple[int, float]:
        waits, _, place = waits_here()
        looks: list[int] = []

        def is_ready() -> bool:
            looks.append(1)
            return len(looks) > 40

        waits.until(is_ready, [place], LONG)
        begin = time.monotonic()
        waits.until(lambda: False, [place], SHORT)
        return len(looks), time.monotonic() - begin

    for num_looks, seconds in pool.run(program, 2):
        assert num_looks == 41
        assert seconds >= 0.2
        assert is_within(seconds, 2.0)


def test_a_wait_tells_that_another_has_left(pool: Pool) -> None:
    def program() -> str:
        waits, whereabouts, place = waits_here()
        if md.get_rank() == 1:
            whereabouts.leave([place.label], whereabouts.reason_of(ValueError("no batch")))
            time.sleep(0.5)
            return "left"
        try:
            waits.until(lambda: False, [place], LONG)
        except md.JoinError as error:
            return str(error)
        return "no error"

    first, _ = pool.run(program, 2)
    assert "rank 1 has left the join context by an exception" in first
    assert "found:    ValueError: no batch" in first
    assert "look at rank 1; the group is broken now" in first


def test_what_is_there_counts_though_another_has_left_since(pool: Pool) -> None:
    def program() -> str:
        waits, whereabouts, place = waits_here()
        whereabouts.leave([place.label], whereabouts.reason_of(ValueError("no batch")))
        begin = time.monotonic()
        waits.until(lambda: time.monotonic() > begin + 0.3, [place], LONG)
        return "went on"

    assert pool.run(program, 2) == ["went on"] * 2


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_an_idle_wait_sees_that_a_rank_has_ended(pool: Pool, backend: str) -> None:
    def program() -> str:
        waits, _, place = waits_here()
        md.barrier()
        if md.get_rank() == 1:
            os._exit(3)
        try:
            waits.until(lambda: False, [place], LONG)
        except md.MeshdistError as error:
            return str(error)
        return "no error"

    first, _ = pool.outcomes(program, 2, backend=backend)
    assert "rank 1" in first
    assert "ended" in first

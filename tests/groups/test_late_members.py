"""Ranks that wait for long say for whom."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.bootstrap.world import World
from meshdist.groups.late_members import VARIABLE, LateMembers
from tests.pool import Pool


def waits() -> list[str]:
    """A rank that is late for a collective, and one that is late with a message."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("meshdist.waits")
    log.addHandler(handler)
    try:
        x, rank = torch.ones(4), md.get_rank()
        md.all_reduce(x)
        time.sleep(0.6)  # no rank is in a verb
        if rank == 2:
            time.sleep(1.2)
        md.all_reduce(x, async_op=True).wait()
        if rank == 1:
            time.sleep(1.2)
            md.send(x, 0)
        if rank == 0:
            md.recv(x, 1)
        return lines
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_is_late_is_named_once(backend: str, pool: Pool) -> None:
    found = pool.run(waits, 3, backend=backend, env={VARIABLE: "0.3"})
    told = [line for lines in found for line in lines]
    assert found[2] == []
    assert len(told) == 2
    first = next(line for line in told if "s in call 2 on the world" in line).splitlines()
    assert first[0].startswith("meshdist: rank ")
    assert " has waited for 0.3 s in call 2 on the world: all_reduce((4,) float32, SUM)" in first[0]
    assert len(first) == 2
    assert first[1].startswith("  rank 2: did not arrive; last call 1 on the world: all_reduce(")
    second = next(line for line in told if "s in recv" in line).splitlines()
    assert second[0].startswith("meshdist: rank 0 has waited for 0.3 s in recv((4,) float32, from")
    assert second[1].startswith("  rank 1: last call 2 on the world: all_reduce(")


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_wrong_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(md.errors.ArgumentError, match=f"{VARIABLE} is {text!r}") as caught:
        LateMembers(World(0, 1, HashStore(), {}))
    assert caught.value.expected == "after how many seconds a wait is told of, as in 30; 0: never"

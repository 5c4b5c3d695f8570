"""Ranks that wait for long say for whom."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.errors import ArgumentError
from meshdist.groups.peer_status import STALL_WARNING_VARIABLE, LatePeers
from tests.inner import World
from tests.pool import Pool, places


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what this rank logs of waits."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("meshdist.waits")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def waits() -> list[str]:
    """A rank that is late for a collective, and one that is late with a message."""
    with logged() as lines:
        x, rank = torch.ones(4), md.get_rank()
        md.all_reduce(x)
        time.sleep(0.6)  # no rank is in a collective
        if rank == 2:
            time.sleep(1.2)
        md.all_reduce(x, async_op=True).wait()
        if rank == 1:
            time.sleep(1.2)
            md.send(x, 0)
        if rank == 0:
            md.recv(x, 1)
        return lines


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_who_is_late_is_named_once(backend: str, pool: Pool) -> None:
    found = pool.run(waits, 3, backend=backend, env={STALL_WARNING_VARIABLE: "0.3"})
    told = [line for lines in found for line in lines]
    assert found[2] == []
    assert len(told) == 2
    first = next(line for line in told if "s in call 2 on the world" in line).splitlines()
    assert first[0].startswith("meshdist: rank ")
    assert " has waited for 0.3 s in call 2 on the world: all_reduce((4,) float32, SUM)" in first[0]
    assert len(first) == 2
    last = "last call 1 on the world: all_reduce("
    assert first[1].startswith(f"  rank 2: did not reach this call; {last}")
    second = next(line for line in told if "s in recv" in line).splitlines()
    assert second[0].startswith("meshdist: rank 0 has waited for 0.3 s in recv((4,) float32, from")
    assert second[1].startswith("  rank 1: last call 2 on the world: all_reduce(")


def gathers() -> list[str]:
    """Rank 0 waits for rank 2 in a call that rank 1 has left."""
    with logged() as lines:
        x, rank = torch.ones(4), md.get_rank()
        md.barrier()
        if rank == 2:
            time.sleep(2.5)
        md.gather(x, [torch.empty(4) for _ in range(3)] if rank == 0 else None)
        md.barrier()
        return lines


def test_a_rank_that_is_past_the_call_is_not_late(pool: Pool) -> None:
    told, _, _ = pool.run(gathers, 3, backend="gloo", env={STALL_WARNING_VARIABLE: "0.8"})
    (line,) = [line for line in told if "s in call 2 on the world: gather(" in line]
    _, late = line.splitlines()
    assert late.startswith("  rank 2: did not reach this call; last call 1 on the world: barrier()")


def meant() -> list[tuple[str, int]]:
    """Rank 1 is late for each call, which the program means, or not."""
    lines: list[tuple[str, int]] = []
    handler = logging.Handler()
    moments: list[float] = []

    def note(record: logging.LogRecord) -> None:
        text = record.getMessage().splitlines()[0]
        lines.append((text.split(" in call ")[1][:1], int(10 * (time.monotonic() - moments[-1]))))

    handler.emit = note  # type: ignore[method-assign]
    log = logging.getLogger("meshdist.waits")
    log.addHandler(handler)
    try:
        x = torch.ones(4)
        md.barrier()
        for seconds in (None, 0.7, "as ever"):
            context = (
                contextlib.nullcontext() if seconds == "as ever" else md.stall_warning(seconds)
            )
            moments.append(time.monotonic())
            if md.get_rank() == 1:
                time.sleep(1.2)
            with context:
                md.all_reduce(x)
        return lines
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_wait_that_is_meant_is_not_told_of(backend: str, pool: Pool) -> None:
    first, second = pool.run(meant, 2, backend=backend, env={STALL_WARNING_VARIABLE: "0.3"})
    assert second == []
    assert [call for call, _ in first] == ["3", "4"]
    assert first[0][1] >= 7


ENDS_FIRST = """
import logging, os, sys, threading, time
import torch
import meshdist as md

def log(record):
    end, store = time.monotonic() + 2.0, md.HashStore()
    while time.monotonic() < end:
        store.check(["key"])  # in C++, without the GIL
    print("logged", flush=True)

logging.getLogger("meshdist.waits").addFilter(log)  # a handler would hold a lock at exit
rank = int(os.environ["RANK"])
md.init_process_group("gloo", sys.argv[2], rank=rank, world_size=2)  # no rank hosts the store
md.barrier()
if rank == 1:
    time.sleep(1.0)
md.all_reduce(torch.ones(4))
if sys.argv[1] == "destroys":
    md.destroy_process_group()
    print([thread.name for thread in threading.enumerate()].count("meshdist-waits"))
"""


@pytest.mark.parametrize(("ending", "last"), [("ends", []), ("destroys", ["0"])])
def test_a_program_ends_after_its_stall_warning(
    ending: str, last: list[str], pool: Pool, tmp_path: Path
) -> None:
    here = [{**place, STALL_WARNING_VARIABLE: "0.3"} for place in places(2)]
    first, second = pool.start(ENDS_FIRST, here, ending, f"file://{tmp_path}/store")
    assert (first.returncode, first.stdout.split()) == (0, ["logged", *last]), first
    assert (second.returncode, second.stdout.split()) == (0, last), second


def test_a_wait_of_no_number_of_seconds() -> None:
    def program() -> list[str]:
        found = []
        for given in ("soon", 0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ArgumentError) as error, md.stall_warning(given):  # type: ignore[arg-type]
                raise AssertionError
            found.append(str(error.value))
        return found

    for found in md.simulate(program, 2):
        assert [text.splitlines()[0] for text in found] == [
            "after_s is 'soon'",
            "after_s is 0",
            "after_s is -1.0",
            "after_s is inf",
            "after_s is nan",
        ]
        expected = "expected: a number of seconds above 0, or None to turn the warning off"
        fix = "fix:      pass a number of seconds, for example md.stall_warning(60)"
        assert all(text.endswith(f"{expected}\n  {fix}") for text in found)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_wrong_number_of_seconds(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STALL_WARNING_VARIABLE, text)
    with pytest.raises(
        md.errors.ArgumentError, match=f"{STALL_WARNING_VARIABLE} is {text!r}"
    ) as caught:
        LatePeers(World(0, 1, HashStore(), {}))
    expected = "a number of seconds, for example 30, or 0 to turn the warning off"
    assert caught.value.expected == expected

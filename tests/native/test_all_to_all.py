"""Who stays how long in an all-to-all whose parts differ: members are held up, or end."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from meshdist.backends import native
from tests.native.ranks import OK, Killed, run_ranks

I8 = native.DTYPES["uint8"]
DIED = native.STATUSES["DIED"]
TIMEOUT = 30.0
MANY = 1 << 27
HELD_UP_S = 0.4


def exchange(c: Any, amounts: list[list[int]], out: torch.Tensor | None = None) -> Any:
    """Give each member as much as ``amounts`` says, all of it ones; the status."""
    gives, takes = amounts[c.rank], [row[c.rank] for row in amounts]
    x = torch.ones(sum(gives), dtype=torch.uint8)
    y = torch.zeros(sum(takes), dtype=torch.uint8) if out is None else out
    starts = [sum(gives[:j]) for j in range(c.size)], [sum(takes[:j]) for j in range(c.size)]
    ins, outs = (
        [t.data_ptr() + at for at in places] for t, places in zip((x, y), starts, strict=True)
    )
    status = c.all_to_all(outs, takes, ins, gives, I8, TIMEOUT)
    assert status != OK or bool((y == 1).all())
    return status


def from_first_to_second(c: Any, how: signal.Signals) -> tuple[Any, float]:
    """Member 0 gives member 1 much, which ends or stops in the midst; 2 has no part in it."""
    amounts = [[0, MANY, 0], [0, 0, 0], [0, 0, 0]]
    y = torch.zeros(sum(row[c.rank] for row in amounts), dtype=torch.uint8)
    if c.rank == 1:

        def watch() -> None:
            while y[0] == 0:
                time.sleep(0.0001)
            os.kill(os.getpid(), how)

        threading.Thread(target=watch, daemon=True).start()
    assert c.barrier(TIMEOUT) == OK
    status = exchange(c, amounts, y)
    return status, time.monotonic()


def do_the_others_alone_wait() -> bool:
    """Whether, of three members, those wait that exchange something with one that is stopped."""
    gone_on = []

    def meanwhile(pids: list[int]) -> None:
        stat = Path(f"/proc/{pids[1]}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        time.sleep(HELD_UP_S)
        gone_on.append(time.monotonic())
        os.kill(pids[1], signal.SIGCONT)

    first, second, third = run_ranks(
        3, lambda c: from_first_to_second(c, signal.SIGSTOP), meanwhile=meanwhile
    )
    assert [status for status, _ in (first, second, third)] == [OK] * 3
    return third[1] < gone_on[0] < min(first[1], second[1])


def test_a_member_that_is_done_waits_for_no_other() -> None:
    # On a busy machine the signal may come once all is copied.
    assert any(do_the_others_alone_wait() for _ in range(4))


def test_only_members_that_still_exchange_something_miss_one_that_dies() -> None:
    first, second, third = run_ranks(3, lambda c: from_first_to_second(c, signal.SIGKILL))
    assert first[0] == DIED
    assert isinstance(second, Killed)
    assert third[0] == OK


def test_members_that_are_done_may_end_at_once() -> None:
    def body(c: Any) -> Any:
        amounts = [[0, 1 << 24, 0], [1 << 22, 0, 0], [0, 0, 0]]
        status = exchange(c, amounts)
        if c.rank == 2:
            c.announce_end()
            os._exit(0)
        return status

    first, second, _ = run_ranks(3, body)
    assert (first, second) == (OK, OK)


def test_calls_behind_it_wait_for_all() -> None:
    """Lines, tables and slots of a member that is far ahead stay readable for those behind."""

    def body(c: Any) -> list[Any]:
        found = []
        for count in (1, 5000, 300_000, 2_000_000):
            for giver in range(3):
                amounts = [[0] * 3 for _ in range(3)]
                amounts[giver][(giver + 1) % 3] = count
                amounts[(giver + 1) % 3][giver] = count // 7
                found.append(exchange(c, amounts))
                x = torch.full((300,), c.rank + 1.0)
                place = x.data_ptr(), 300, native.DTYPES["float32"], native.OPS["SUM"]
                found += [c.all_reduce(*place, TIMEOUT), int(x[299])]
        return found

    for found in run_ranks(3, body):
        assert found == [OK, OK, 6] * 12

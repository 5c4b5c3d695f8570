"""A group takes little memory until large calls use it, and gives the same results without more."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshdist.backends import native
from tests.native.ranks import OK, run_ranks

F32, SUM = native.DTYPES["float32"], native.OPS["SUM"]
TIMEOUT = 20.0
MIB = 1 << 20
SLOT, RING = 512 * 1024, 2 * MIB  # as groups of two have them
LARGE = 100_000


def mapping() -> tuple[int, int]:
    """Where this process has mapped the segment: the first and the last address."""
    with open("/proc/self/maps") as lines:
        (line,) = [line for line in lines if "/memfd:meshdist " in line]
    start, end = line.split()[0].split("-")
    return int(start, 16), int(end, 16)


def reserved() -> int:
    """How many bytes of the segment's file are reserved."""
    start, _ = mapping()
    with open("/proc/self/maps") as lines:
        (inode,) = [line.split()[4] for line in lines if line.startswith(f"{start:x}-")]
    name = next(
        entry
        for entry in os.scandir("/proc/self/map_files")
        if entry.name.startswith(f"{start:x}-")
    )
    facts = os.stat(name.path)
    assert str(facts.st_ino) == inode
    return facts.st_blocks * 512


def forbid_more() -> None:
    """Let the kernel reject to reserve more than the first parts, in this process."""
    start, end = mapping()
    begin = end - (native.segment_bytes(2, SLOT, RING) - first_bytes())
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 1) == 0
    assert begin > start


def first_bytes() -> int:
    """How many bytes are reserved when a segment is made."""
    fd = native.create_segment(2, SLOT, RING, False)
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def total(c: Any, count: int) -> None:
    x = torch.full((count,), float(c.rank + 1))
    y = torch.arange(count, dtype=torch.float32)
    for data, expected in ((x, torch.full_like(x, c.size * (c.size + 1) / 2)), (y, c.size * y)):
        assert c.all_reduce(data.data_ptr(), count, F32, SUM, TIMEOUT) == OK
        assert torch.equal(data, expected)


def exchange(c: Any, counts: list[int]) -> None:
    """All to all, of ``counts`` from every member to each."""
    ins = [torch.full((n,), float(c.rank)) for n in counts]
    outs = [torch.empty(counts[c.rank]) for _ in counts]
    places = [[x.data_ptr() for x in outs], [x.numel() for x in outs]]
    places += [[x.data_ptr() for x in ins], counts]
    assert c.all_to_all(*places, F32, TIMEOUT) == OK
    assert all(torch.equal(x, torch.full_like(x, float(j))) for j, x in enumerate(outs))


def talk(c: Any, count: int) -> None:
    """Messages from the first member to the second, and back."""
    for source in (0, 1):
        x = torch.arange(count, dtype=torch.float32) + source
        y = torch.empty(count)
        if c.rank == source:
            assert c.send(x.data_ptr(), count, F32, 1 - source, 3, TIMEOUT) == OK
        else:
            assert c.recv(y.data_ptr(), count, F32, source, 3, TIMEOUT) == OK
            assert torch.equal(x, y)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_small_calls_leave_a_group_below_a_mib(size: int) -> None:
    slot, ring = {2: (SLOT, RING), 4: (SLOT // 2, RING // 8), 8: (SLOT // 4, RING // 32)}[size]

    def body(c: Any) -> int:
        for _ in range(20):
            total(c, 100)
            exchange(c, [10] * c.size)
        if c.size == 2:
            for _ in range(10):
                talk(c, 4)
        return reserved()

    assert max(run_ranks(size, body, slot_bytes=slot, ring_bytes=ring)) < MIB


LARGER: dict[str, Callable[[Any], None]] = {
    "all_reduce": lambda c: total(c, LARGE),
    "all_to_all": lambda c: exchange(c, [0, LARGE]),
    "messages": lambda c: talk(c, 3 * MIB),
}


@pytest.mark.parametrize("larger", LARGER)
def test_a_larger_call_reserves_what_it_uses(larger: str) -> None:
    def body(c: Any) -> int:
        for _ in range(3):
            LARGER[larger](c)
            total(c, 10)
            talk(c, 10)
        return reserved()

    before = first_bytes()
    for found in run_ranks(2, body, slot_bytes=SLOT, ring_bytes=RING, is_crowded=True):
        assert found == before + (2 * RING if larger == "messages" else 8 * SLOT)


@pytest.mark.parametrize("larger", LARGER)
def test_first_parts_serve_where_a_member_can_reserve_no_more(larger: str) -> None:
    def body(c: Any) -> None:
        if c.rank == 1:
            forbid_more()
        for _ in range(3):
            LARGER[larger](c)
            total(c, 10)
            talk(c, 10)

    run_ranks(2, body, slot_bytes=SLOT, ring_bytes=RING, is_crowded=True)


def test_calls_that_differ_are_told_apart_while_a_group_grows() -> None:
    def body(c: Any) -> tuple[list[int], int]:
        found = []
        for count in (LARGE, 10):
            x = torch.zeros(count if c.rank == 0 else LARGE + 10 - count)
            found.append(c.all_reduce(x.data_ptr(), x.numel(), F32, SUM, TIMEOUT))
        total(c, LARGE)
        return found, reserved()

    mismatch = native.STATUSES["MISMATCH"]
    for found, _ in run_ranks(2, body, slot_bytes=SLOT, ring_bytes=RING):
        assert found == [mismatch, mismatch]

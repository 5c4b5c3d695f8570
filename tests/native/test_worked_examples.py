"""The worked examples in the comments of the core, with equal numbers, in the shared memory."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from meshdist.backends import native
from tests.native.ranks import OK, run_ranks
from tests.native.reading import PAGE, reads_others, secret_memory
from tests.native.test_slots import mapping

DTYPES, SUM = native.DTYPES, native.OPS["SUM"]
TIMEOUT = 20.0
DEPTH = 4
LINE_BYTES, MEMBER_BYTES, INLINE_AT = 64, 576, 32
HINT_MISSED, HINT_OWN = 64, 32


class Segment:
    """The shared memory of a group as one of its members reads it, by native/layout.h."""

    def __init__(self) -> None:
        self._start, _ = mapping()
        numbers = struct.unpack("<Q4I8Q", self._read(0, 8 + 4 * 4 + 8 * 8))
        self._slot_bytes, self._members_at, self._slots_at = numbers[7], numbers[9], numbers[12]

    def line(self, member: int, round_: int) -> tuple[int, int, bytes]:
        """The flag, the hints and the inline bytes of a member's line."""
        at = self._members_at + member * MEMBER_BYTES + round_ % DEPTH * LINE_BYTES
        line = self._read(at, LINE_BYTES)
        return *struct.unpack("<II", line[:8]), line[INLINE_AT:]

    def slot(self, member: int, round_: int) -> bytes:
        """The first bytes of a member's slot, of those that serve small calls."""
        at = self._slots_at + (member * DEPTH + round_ % DEPTH) * self._slot_bytes
        return self._read(at, LINE_BYTES)

    def last_round(self, member: int) -> int:
        """The last round that a member has published."""
        return max(self.line(member, number)[0] for number in range(DEPTH)) - 1

    def _read(self, at: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self._start + at, num_bytes)


def small_sums(c: Any) -> None:
    segment = Segment()
    for count in (2, 12):
        x = torch.arange(1, count + 1, dtype=torch.int32) * 10**c.rank
        assert c.all_reduce(x.data_ptr(), count, DTYPES["int32"], SUM, TIMEOUT) == OK
        assert x.tolist() == [111 * (i + 1) for i in range(count)]
    g = segment.last_round(c.rank) - 1  # another member may have ended, but not begun anything
    for member in range(3):
        flag, _, data = segment.line(member, g)
        assert flag == g + 1
        assert struct.unpack("<2i", data[:8]) == (10**member, 2 * 10**member)
        assert segment.line(member, g + 1)[0] == g + 2
        twelve = struct.unpack("<12i", segment.slot(member, g + 1)[:48])
        assert twelve == tuple((i + 1) * 10**member for i in range(12))


def test_a_small_all_reduce_is_one_line_or_one_slot_of_each_member() -> None:
    run_ranks(3, small_sums)


def sum_of_48(c: Any, x: torch.Tensor) -> tuple[Segment, int]:
    """Sum 0, 1, 2, ... and 1000, 1001, 1002, ... by halves; return the call's first round."""
    c.set_tuning("fetch_block_bytes", 64)
    for name in ("halves_least_bytes", "far_halves_least_bytes"):
        c.set_tuning(name, 1)
    assert c.barrier(TIMEOUT) == OK
    segment = Segment()
    g = segment.last_round(c.rank) + 1
    x.copy_(torch.arange(48) + 1000 * c.rank)
    assert c.all_reduce(x.data_ptr(), 48, DTYPES["float32"], SUM, TIMEOUT) == OK
    assert torch.equal(x, 2 * torch.arange(48) + 1000.0)
    return segment, g


def large_sum(c: Any) -> None:
    x = torch.empty(48)
    segment, g = sum_of_48(c, x)
    assert segment.last_round(c.rank) == g + 2
    _, hints, data = segment.line(c.rank, g)
    assert hints & HINT_OWN and struct.unpack("<QQ", data[:16]) == (0, x.data_ptr())
    for member, end in ((0, 32), (1, 48)):
        flag, hints, data = segment.line(member, g + 1)
        assert flag == g + 2 and not hints & HINT_MISSED
        assert struct.unpack("<Q", data[:8]) == (end,)
        flag, hints, _ = segment.line(member, g + 2)
        assert flag == g + 3 and not hints & HINT_MISSED


@reads_others
def test_two_members_reduce_a_half_each_in_three_rounds() -> None:
    run_ranks(2, large_sum, is_crowded=False)


def sum_with_a_secret(c: Any) -> bool:
    """Let no other member read 16:48 of what member 1 has."""
    pages = secret_memory(2, range(1, 2) if c.rank else range(0))
    if pages is None:
        return False
    in_a_page = PAGE // 4
    segment, g = sum_of_48(c, pages[in_a_page - 16 :][:48])
    # A round each: 0:16 is copied to member 1, 16:32 reduced by both, 32:48 copied to member 0.
    assert segment.last_round(c.rank) == g + 2 + 3
    assert not c.reads_others
    return True


@reads_others
def test_halves_are_finished_by_slots_behind_what_could_not_be_read() -> None:
    if not all(run_ranks(2, sum_with_a_secret, is_crowded=False)):
        pytest.skip("this kernel has no secret memory")

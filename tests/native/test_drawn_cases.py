"""The drawn cases in the comments of the core, with the same numbers, seen in the shared memory."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from meshdist.wires import native
from tests.native.ranks import OK, run_ranks
from tests.native.reading import reads_others
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


def large_sum(c: Any) -> None:
    c.set_tuning("fetch_block_bytes", 64)
    for name in ("halves_least_bytes", "far_halves_least_bytes"):
        c.set_tuning(name, 1)
    assert c.barrier(TIMEOUT) == OK
    segment = Segment()
    g = segment.last_round(c.rank) + 1
    x = torch.arange(48, dtype=torch.float32) + 1000 * c.rank
    assert c.all_reduce(x.data_ptr(), 48, DTYPES["float32"], SUM, TIMEOUT) == OK
    assert torch.equal(x, 2 * torch.arange(48) + 1000.0)
    assert segment.last_round(c.rank) == g + 2
    _, hints, data = segment.line(c.rank, g)
    assert hints & HINT_OWN and struct.unpack("<QQ", data[:16]) == (0, x.data_ptr())
    for member, end in ((0, 32), (1, 48)):
        for round_ in (g + 1, g + 2):
            flag, hints, data = segment.line(member, round_)
            assert flag == round_ + 1 and not hints & HINT_MISSED
            if round_ == g + 1:
                assert struct.unpack("<Q", data[:8]) == (end,)


@reads_others
def test_two_members_reduce_a_half_each_in_three_rounds() -> None:
    run_ranks(2, large_sum, is_crowded=False)

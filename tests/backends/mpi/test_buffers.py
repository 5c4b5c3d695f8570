"""Memory for MPI: what overlaps, what lies in a row, and counts that are too large."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshdist.backends.mpi.datatypes import MpiBuffers, view_or_pack, view_or_unpack
from tests.inner import Scratch, load_mpi


def test_parts_in_a_row_are_one_view_and_others_are_copied() -> None:
    x = torch.arange(6.0)
    whole, give_back = view_or_pack(list(x.split([1, 0, 2, 3])), Scratch())
    assert whole.data_ptr() == x.data_ptr() and torch.equal(whole, x) and give_back is None
    whole, give_back = view_or_pack([x[3:], x[:3]], Scratch())
    assert whole.tolist() == [3.0, 4.0, 5.0, 0.0, 1.0, 2.0] and give_back is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2, torch.uint16])
def test_taken_apart_again(dtype: torch.dtype) -> None:
    data = torch.arange(5).to(dtype)
    outputs = [torch.empty(2, dtype=dtype), torch.empty((3, 1), dtype=dtype)]
    whole, take_apart = view_or_unpack(outputs, Scratch())
    assert take_apart is not None
    whole.copy_(data)
    take_apart()
    assert [x.view(-1).view(torch.uint8).tolist() for x in outputs] == [
        x.view(torch.uint8).tolist() for x in data.split([2, 3])
    ]


class FakeType:
    """A datatype that knows how many bytes it covers."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def Create_contiguous(self, count: int) -> FakeType:
        return FakeType(self.num_bytes * count)

    def Commit(self) -> FakeType:
        return self


class FakeMpi:
    BYTE = FakeType(1)

    class buffer:
        fromaddress = staticmethod(lambda address, count: (address, count))

    class Datatype:
        @staticmethod
        def Create_struct(counts: Any, places: Any, types: list[FakeType]) -> FakeType:
            assert places[1] == types[0].num_bytes
            return FakeType(sum(one.num_bytes for one in types))

    @staticmethod
    def Get_version() -> tuple[int, int]:
        return 3, 1


def test_what_a_count_does_not_hold_is_one_element_of_a_datatype() -> None:
    buffers = MpiBuffers(FakeMpi)
    assert buffers.most == (1 << 31) - 1
    few = torch.empty(10, dtype=torch.int16)
    assert buffers.moved(few)[1:] == (20, FakeMpi.BYTE)
    assert buffers.moved(few, 5)[1:] == (4, FakeMpi.BYTE)
    many = torch.empty((1 << 31) + 6, dtype=torch.uint8)  # nobody touches it
    for num_blocks in (1, 2):
        _, count, kind = buffers.moved(many, num_blocks)
        assert (count, kind.num_bytes) == (1, many.numel() // num_blocks)


def test_a_library_of_mpi_4_counts_all() -> None:
    MPI = load_mpi()
    assert MpiBuffers(MPI).most == ((1 << 62) - 1 if MPI.Get_version() >= (4, 0) else (1 << 31) - 1)

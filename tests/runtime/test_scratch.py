from __future__ import annotations

import pytest
import torch

from meshdist.runtime import memory as scratch
from meshdist.runtime.memory import Scratch


def test_a_block_is_used_again() -> None:
    memory = Scratch()
    first = memory.take(100, torch.ones(1))
    assert first.dtype is torch.float32 and first.shape == (100,)
    address = first.data_ptr()
    memory.give(first)
    again = memory.take(20, torch.ones(1, dtype=torch.float64))
    assert again.data_ptr() == address
    assert again.dtype is torch.float64 and again.shape == (20,)


def test_what_is_taken_is_nobody_elses() -> None:
    memory = Scratch()
    memory.give(memory.take(8, torch.ones(1)))
    one, other = memory.take(8, torch.ones(1)), memory.take(8, torch.ones(1))
    assert one.data_ptr() != other.data_ptr()


def test_two_blocks_are_kept_and_the_one_that_is_large_enough_is_taken() -> None:
    memory = Scratch()
    blocks = [memory.take(count, torch.ones(1)) for count in (4, 64, 1024)]
    places = [block.data_ptr() for block in blocks]
    for block in blocks:
        memory.give(block)
    assert memory.take(500, torch.ones(1)).data_ptr() == places[2]
    assert memory.take(50, torch.ones(1)).data_ptr() == places[1]


def test_large_blocks_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "MOST_BYTES", 1000)
    memory = Scratch()
    large = memory.take(1000, torch.ones(1))
    memory.give(large)
    assert memory.take(1000, torch.ones(1)).data_ptr() != large.data_ptr()

"""Many tensors of the first rank, given to all as few messages."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshdist as md
from meshdist.collectives import flat_sums
from meshdist.collectives.flat_sums import broadcast_from

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
SHAPES = ((), (0,), (1,), (3,), (2, 5), (1, 2, 3))


def filled(start: int) -> list[torch.Tensor]:
    counter = itertools.count(start)
    tensors = [
        torch.full(shape, next(counter) % 2 if dtype is torch.bool else next(counter), dtype=dtype)
        for dtype, shape in itertools.product(DTYPES, SHAPES)
    ]
    return [*tensors, torch.full((4, 3), start).t(), torch.full((6,), start)[::2]]


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 40])
def test_every_tensor_becomes_the_first_ranks(
    chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_sums, "CHUNK_BYTES", chunk_bytes)

    def program() -> list[torch.Tensor]:
        tensors = filled(1 + 7 * md.get_rank())
        broadcast_from(0, tensors, md.group.WORLD)
        return tensors

    expected = filled(1)
    for tensors in md.simulate(program, 3):
        for mine, first in zip(tensors, expected, strict=True):
            assert mine.dtype == first.dtype
            assert mine.stride() == first.stride()
            assert torch.equal(mine, first)


def test_few_broadcasts_carry_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    broadcast = flat_sums.broadcast

    def counting(tensor: torch.Tensor, **kwargs: object) -> None:
        sizes.append(tensor.numel())
        broadcast(tensor, **kwargs)

    monkeypatch.setattr(flat_sums, "broadcast", counting)
    monkeypatch.setattr(flat_sums, "CHUNK_BYTES", 64)

    def program() -> None:
        tensors = [torch.zeros(n, dtype=torch.float64) for n in (1, 2, 3, 20, 1, 0)]
        broadcast_from(0, tensors, md.group.WORLD)

    md.simulate(program, 1)
    assert sizes == [16 + 16 + 32, 160, 16]


def test_nothing_is_sent_for_no_tensors() -> None:
    assert md.simulate(lambda: broadcast_from(0, [], md.group.WORLD), 2) == [None, None]

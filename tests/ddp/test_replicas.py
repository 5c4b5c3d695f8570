"""Replicas compared, and made equal to the first one."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshdist as md
from meshdist.ddp import replicas
from meshdist.ddp.replicas import (
    broadcast_from,
    check_equal_lines,
    tensor_line,
)
from meshdist.errors import AgreementError

CPU = torch.device("cpu")
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
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", chunk_bytes)

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
    broadcast = replicas.broadcast

    def counting(tensor: torch.Tensor, **kwargs: object) -> None:
        sizes.append(tensor.numel())
        broadcast(tensor, **kwargs)

    monkeypatch.setattr(replicas, "broadcast", counting)
    monkeypatch.setattr(replicas, "_CHUNK_BYTES", 64)

    def program() -> None:
        tensors = [torch.zeros(n, dtype=torch.float64) for n in (1, 2, 3, 20, 1, 0)]
        broadcast_from(0, tensors, md.group.WORLD)

    md.simulate(program, 1)
    assert sizes == [16 + 16 + 32, 160, 16]


def test_nothing_is_sent_for_no_tensors() -> None:
    assert md.simulate(lambda: broadcast_from(0, [], md.group.WORLD), 2) == [None, None]


def test_equal_lines_pass_and_different_ones_are_shown_by_rank() -> None:
    def program(size: int, odd: int) -> str:
        lines = [f"line {n}" for n in range(size)]
        if md.get_rank() == odd:
            lines = ["other"] * size
        check_equal_lines(lines, md.group.WORLD, device=CPU, summary="they differ", fix="mend")
        return "equal"

    assert md.simulate(program, 3, (20, -1)) == ["equal"] * 3
    with pytest.raises(AgreementError) as error:
        md.simulate(program, 3, (2, 1))
    assert str(error.value).startswith(
        "they differ\n"
        "  where:    group of ranks 0-2\n"
        "  expected: equal lines, in the same order, on every rank\n"
        "  found:    0: ranks 0, 2: line 0; rank 1: other\n"
        "            1: ranks 0, 2: line 1; rank 1: other\n"
        "  fix:      mend"
    )
    with pytest.raises(AgreementError) as error:
        md.simulate(program, 3, (20, 1))
    assert "            7: ranks 0, 2: line 7; rank 1: other\n            and 12 more\n" in str(
        error.value
    )


def test_options_are_compared_by_name_whatever_the_lines() -> None:
    def program() -> str:
        odd = md.get_rank() == 1
        with pytest.raises(AgreementError) as error:
            check_equal_lines(
                ["line"] * (2 if odd else 1),
                md.group.WORLD,
                device=CPU,
                summary="they differ",
                fix="mend",
                options={"depth": 3 if odd else 2, "width": 1},
            )
        return error.value.found or ""

    expected = "depth: rank 0: 2; rank 1: 3\n1: rank 0: nothing; rank 1: line"
    assert md.simulate(program, 2) == [expected] * 2


def test_a_line_tells_what_replicas_must_share() -> None:
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    assert tensor_line("a", frozen) == "a (2,) float32 frozen"
    assert tensor_line("b", torch.zeros(2, 3).t()) == "b (3, 2) float32 strides (1, 3)"
    assert tensor_line("c", torch.tensor(True)) == "c () bool"

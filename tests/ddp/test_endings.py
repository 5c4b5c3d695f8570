"""How a backward ended on each rank: what every rank learns and raises, on CPUs and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp.endings import Ending, Endings
from meshdist.ddp.reports import Reports
from meshdist.errors import GradientError

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")


def endings_of(parameters: Sequence[Parameter], device: torch.device = CPU) -> Endings:
    names = [f"p{place}" for place in range(len(parameters))]
    return Endings(parameters, Reports(names, md.group.WORLD), md.group.WORLD, device)


def summed(endings: Endings, ending: Ending, dtype: torch.dtype) -> torch.Tensor:
    """What the last bucket's flags hold after the all-reduce."""
    flags = torch.full((len(Ending),), 7, dtype=dtype)
    endings.set_flag(flags, ending)
    md.all_reduce(flags)
    return flags


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "all_ends",
    [
        (Ending.WHOLE, Ending.WHOLE),
        (Ending.INTERRUPTED, Ending.INTERRUPTED),
        (Ending.WHOLE, Ending.INTERRUPTED),
        (Ending.INTERRUPTED, Ending.LACKING, Ending.INTERRUPTED),
        (Ending.LACKING, Ending.WHOLE),
    ],
)
def test_ranks_raise_together_where_some_were_interrupted(
    all_ends: tuple[Ending, ...], dtype: torch.dtype
) -> None:
    def program() -> tuple[str, bool]:
        parameter = Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        endings = endings_of([parameter])
        ending = all_ends[md.get_rank()]
        text = ""
        try:
            endings.read_flags(summed(endings, ending, dtype), ending)
        except GradientError as error:
            text = str(error)
        return text, parameter.grad is not None

    cut = [rank for rank, ending in enumerate(all_ends) if ending is Ending.INTERRUPTED]
    for text, has_gradient in md.simulate(program, len(all_ends)):
        assert has_gradient == (not cut)
        assert bool(text) == (0 < len(cut) < len(all_ends))
        if text:
            names = f"rank{'s' if len(cut) > 1 else ''} {', '.join(map(str, cut))}"
            assert f"found:    {names}: an exception was raised inside backward()" in text


def test_backwards_add_up_until_the_next_forward() -> None:
    def program() -> list[Ending]:
        endings = endings_of([Parameter(torch.ones(1)) for _ in range(3)])
        found = []
        for _ in range(2):
            endings.forward_begins()
            found += [endings.backward_ends(bytearray(came)) for came in ([1, 0, 0], [0, 1, 1])]
        return [*found, endings.backward_ends(bytearray([1, 0, 0]))]

    lacking, whole = Ending.LACKING, Ending.WHOLE
    assert md.simulate(program, 1) == [[lacking, whole, lacking, whole, whole]]


def test_every_rank_raises_at_the_next_forward_what_any_lacks() -> None:
    def program() -> str:
        endings = endings_of([Parameter(torch.ones(1)) for _ in range(3)])
        came = bytearray([[1, 1, 1], [0, 1, 0]][md.get_rank()])
        ending = endings.backward_ends(came)
        endings.read_flags(summed(endings, ending, torch.float32), ending)
        with pytest.raises(GradientError) as error:
            endings.forward_begins()
        endings.forward_begins()  # raised once
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "  found:    rank 1: p0 (index 0), p2 (index 2)\n" in text


def test_where_flags_are_not_read_only_the_interrupted_rank_raises() -> None:
    def program() -> str:
        endings = endings_of([Parameter(torch.ones(1))], ELSEWHERE)
        ending = (Ending.WHOLE, Ending.INTERRUPTED)[md.get_rank()]
        try:
            endings.read_flags(torch.empty(3, device=ELSEWHERE), ending)
        except GradientError as error:
            return str(error)
        return ""

    texts = md.simulate(program, 2)
    assert texts[0] == "" and "found:    rank 1: an exception was raised" in texts[1]


def test_where_flags_are_not_read_only_the_lacking_rank_raises() -> None:
    def program() -> str:
        endings = endings_of([Parameter(torch.ones(1))], ELSEWHERE)
        ending = endings.backward_ends(bytearray([md.get_rank()]))
        endings.read_flags(torch.empty(3, device=ELSEWHERE), ending)
        try:
            endings.forward_begins()
        except GradientError as error:
            return str(error)
        return ""

    texts = md.simulate(program, 2)
    assert "found:    rank 0: p0 (index 0)" in texts[0] and texts[1] == ""

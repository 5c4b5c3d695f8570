"""How a backward ended on each rank: what every rank learns and raises, on CPUs and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp.endings import Ending, Endings
from meshdist.ddp.reports import Reports
from meshdist.errors import GradientError
from tests.ddp.stand_in_accelerator import CPU, Accelerator, in_place_of_the_cpu


@pytest.fixture(params=["at once", "deferred"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Callable[[], Accelerator] | None]:
    """None where flags are read at once; else what stands in for each rank's accelerator."""
    if request.param == "at once":
        yield None
    else:
        with in_place_of_the_cpu() as here:
            yield here


def endings_of(parameters: Sequence[Parameter]) -> Endings:
    names = [f"p{place}" for place in range(len(parameters))]
    return Endings(parameters, Reports(names, md.group.WORLD), md.group.WORLD, CPU)


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
        (Ending.ABSENT, Ending.ABSENT),
        (Ending.INTERRUPTED, Ending.ABSENT),
        (Ending.WHOLE, Ending.ABSENT),
    ],
)
def test_ranks_raise_together_where_some_were_interrupted(
    all_ends: tuple[Ending, ...],
    dtype: torch.dtype,
    accelerator: Callable[[], Accelerator] | None,
) -> None:
    def program() -> tuple[str, bool]:
        parameter = Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        endings = endings_of([parameter])
        ending = all_ends[md.get_rank()]
        text = ""
        try:
            endings.flags_summed(summed(endings, ending, dtype), ending)
            if accelerator is not None:
                assert accelerator().told[-1].startswith("record")
                assert parameter.grad is not None
            endings.read_flags()
            endings.read_flags()  # read once
        except GradientError as error:
            text = str(error)
        return text, parameter.grad is not None

    def ranks(wanted: Ending) -> str:
        found = [str(rank) for rank, ending in enumerate(all_ends) if ending is wanted]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else ""

    cut, absent = ranks(Ending.INTERRUPTED), ranks(Ending.ABSENT)
    is_anyone_whole = bool({Ending.WHOLE, Ending.LACKING} & set(all_ends))
    for text, has_gradient in md.simulate(program, len(all_ends)):
        assert has_gradient == (not cut and not (absent and is_anyone_whole))
        assert bool(text) == (bool(cut or absent) and is_anyone_whole)
        if text and cut:
            assert f"{cut}: an exception was raised inside backward()" in text
        if text and absent:
            assert f"{absent}: no backward reached the model after its forward" in text


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


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("is_checked", [False, True])
def test_every_rank_raises_once_what_any_lacks(is_checked: bool) -> None:
    def program() -> str:
        endings = endings_of([Parameter(torch.ones(1)) for _ in range(3)])
        came = bytearray([[1, 1, 1], [0, 1, 0]][md.get_rank()])
        ending = endings.backward_ends(came)
        endings.flags_summed(summed(endings, ending, torch.float32), ending)
        endings.read_flags()
        with pytest.raises(GradientError) as error:
            endings.check_complete() if is_checked else endings.forward_begins()
        endings.check_complete()
        endings.forward_begins()
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "  found:    rank 1: p0 (index 0), p2 (index 2)\n" in text


def test_flags_that_an_abort_has_cut_off_are_not_believed() -> None:
    def program() -> str:
        endings = endings_of([Parameter(torch.ones(1))])
        flags = summed(endings, Ending.INTERRUPTED, torch.float32)
        endings.flags_summed(flags, Ending.WHOLE)
        md.group.WORLD.abort("a peer is lost")
        with pytest.raises(md.AbortedError, match="a peer is lost"):
            endings.read_flags()
        return "raised"

    with in_place_of_the_cpu():
        assert md.simulate(program, 1) == ["raised"]

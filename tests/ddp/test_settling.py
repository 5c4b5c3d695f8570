"""How a backward ended on each rank: what every rank learns and raises, on CPUs and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp.buckets import ReductionOptions
from meshdist.ddp.history import History
from meshdist.ddp.reports import Reports
from meshdist.ddp.settling import Ending, Verdict
from meshdist.errors import GradientError
from tests.ddp.stand_in_accelerator import Accelerator, in_place_of_the_cpu

WHOLE, PARTIAL, LACKING = Ending.WHOLE, Ending.PARTIAL, Ending.LACKING


@pytest.fixture(params=["at once", "deferred"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Callable[[], Accelerator] | None]:
    """None where numbers are read at once; else what stands in for each rank's accelerator."""
    if request.param == "at once":
        yield None
    else:
        with in_place_of_the_cpu() as here:
            yield here


def settling_of(
    num: int, dtype: torch.dtype = torch.float32, **options: bool
) -> tuple[Verdict, list[Parameter], History]:
    parameters = [Parameter(torch.ones(1)) for _ in range(num)]
    arrivals = History(num)
    settling = Verdict(
        parameters,
        arrivals,
        ReductionOptions(caps=(1,), **options),
        Reports([f"p{place}" for place in range(num)], md.group.WORLD),
        md.group.WORLD,
    )
    settling.place(torch.empty(settling.size, dtype=dtype), 1.0)
    return settling, parameters, arrivals


def reduced(
    settling: Verdict, ending: Ending, has: Sequence[bool] | None, dtype: torch.dtype
) -> torch.Tensor:
    """What lies behind the last bucket after the all-reduce."""
    behind = torch.full((settling.size,), 7, dtype=dtype)
    settling.write(behind, ending, has)
    md.all_reduce(behind, md.ReduceOp.AVG)
    return behind


def settle(settling: Verdict, came: Sequence[bool], unexpected: Sequence[str] = ()) -> None:
    """All that follows one backward."""
    ending = settling.backward_ends(came, unexpected)
    settling.note(reduced(settling, ending, came, torch.float32), ending)
    settling.read()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "all_ends",
    [
        (Ending.WHOLE, Ending.WHOLE),
        (Ending.PARTIAL, Ending.WHOLE),
        (Ending.INTERRUPTED, Ending.INTERRUPTED),
        (Ending.WHOLE, Ending.INTERRUPTED),
        (Ending.UNEXPECTED, Ending.INTERRUPTED),
        (Ending.INTERRUPTED, Ending.LACKING, Ending.INTERRUPTED),
        (Ending.LACKING, Ending.WHOLE),
        (Ending.ABSENT, Ending.ABSENT),
        (Ending.INTERRUPTED, Ending.ABSENT),
        (Ending.WHOLE, Ending.ABSENT),
        (Ending.PARTIAL, Ending.ABSENT),
    ],
)
def test_ranks_raise_together_where_some_were_interrupted(
    all_ends: tuple[Ending, ...],
    dtype: torch.dtype,
    accelerator: Callable[[], Accelerator] | None,
) -> None:
    def program() -> tuple[str, bool]:
        settling, (parameter,), _ = settling_of(1, dtype)
        parameter.grad = torch.ones(1)
        ending = all_ends[md.get_rank()]
        text = ""
        try:
            settling.note(reduced(settling, ending, None, dtype), ending)
            if accelerator is not None:
                assert accelerator().told[-1].startswith("record")
                assert parameter.grad is not None
            settling.read()
            settling.read()  # read once
        except GradientError as error:
            text = str(error)
        return text, parameter.grad is not None

    def ranks(wanted: Ending) -> str:
        found = [str(rank) for rank, ending in enumerate(all_ends) if ending is wanted]
        return f"rank{'s' if len(found) > 1 else ''} {', '.join(found)}" if found else ""

    cut, absent = ranks(Ending.INTERRUPTED), ranks(Ending.ABSENT)
    had_one = bool({*all_ends} - {Ending.INTERRUPTED, Ending.ABSENT})
    for text, has_gradient in md.simulate(program, len(all_ends)):
        assert has_gradient == (not cut and not (absent and had_one))
        assert bool(text) == (bool(cut or absent) and had_one)
        if text and cut:
            assert f"{cut}: an exception was raised inside backward()" in text
        if text and absent:
            assert f"{absent}: no backward reached the model after its forward" in text


@pytest.mark.usefixtures("accelerator")
def test_the_map_is_read_by_the_number_of_ranks_that_had_data_then() -> None:
    """Also where it is read at the next forward, by when a rank may have joined."""

    def program() -> frozenset[int]:
        settling, _, arrivals = settling_of(2, finds_unused=True)
        settle(settling, [True, True])
        has = [True, md.get_rank() > 0]
        ending = settling.backward_ends(has, ())
        settling.note(reduced(settling, ending, has, torch.float32), ending)
        settling.num_at_work = 2
        settling.read()
        return arrivals.trailing

    assert md.simulate(program, 3) == [{1}] * 3


@pytest.mark.usefixtures("accelerator")
def test_what_came_unexpected_is_raised_on_every_rank_and_all_is_learned_anew() -> None:
    def program() -> tuple[str, list[bool]]:
        settling, parameters, arrivals = settling_of(2)
        settle(settling, [True, True])
        settling.must_rebuild = False
        assert arrivals.is_learned
        for parameter in parameters:
            parameter.grad = torch.ones(1)
        lines = ["p0 grew", "p1 grew"] if md.get_rank() == 1 else []
        with pytest.raises(GradientError) as error:
            settle(settling, [True, True], lines)
        assert all(parameter.grad is None for parameter in parameters)
        return str(error.value), [arrivals.is_learned, settling.must_rebuild]

    for rank, (text, state) in enumerate(md.simulate(program, 3)):
        assert state == [False, True]
        assert text == (
            "gradients came that were not expected: those of this step are dropped\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: the gradients that the backwards before had, each as often\n"
            "  found:    rank 1: p0 grew; p1 grew\n"
            "  fix:      pass find_unused_parameters=True where steps differ in the parameters "
            "they use, and neither static_graph=True nor skip_all_reduce_unused_params=True; let "
            "checkpoints be use_reentrant=False"
        )


def test_a_long_list_of_unexpected_gradients_is_cut() -> None:
    def program() -> str:
        settling, _, _ = settling_of(1)
        with pytest.raises(GradientError) as error:
            settle(settling, [True], [f"line {place}" for place in range(25)])
        return str(error.value)

    assert "line 18; line 19 and 5 more\n" in md.simulate(program, 1)[0]


# -- what is lacking ------------------------------------------------------------------------------


def test_backwards_add_up_until_the_next_forward() -> None:
    def program() -> list[Ending]:
        settling, _, _ = settling_of(3)
        found = []
        for _ in range(2):
            settling.forward_begins(is_synchronised=True)
            for came in ([True, False, False], [False, True, True]):
                found.append(settling.backward_ends(came, ()))
        return [*found, settling.backward_ends([True, False, False], ())]

    assert md.simulate(program, 1) == [[LACKING, PARTIAL, LACKING, PARTIAL, PARTIAL]]


def test_nothing_is_lacking_behind_a_forward_without_synchronisation_or_where_it_may_be() -> None:
    def program() -> list[Ending]:
        settling, _, _ = settling_of(2)
        settling.backward_ends([True, True], ())
        settling.forward_begins(is_synchronised=False)
        found = [settling.backward_ends([True, False], ())]
        for option in ("finds_unused", "is_static"):
            settling, _, _ = settling_of(2, **{option: True})
            settling.forward_begins(is_synchronised=True)
            found.append(settling.backward_ends([True, False], ()))
        frozen, parameters, _ = settling_of(2)
        parameters[1].requires_grad_(False)
        return [*found, frozen.backward_ends([True, False], ())]

    assert md.simulate(program, 1) == [[PARTIAL] * 4]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("is_checked", [False, True])
def test_every_rank_raises_once_what_any_lacks(is_checked: bool) -> None:
    def program() -> str:
        settling, _, _ = settling_of(3)
        came = [[True, True, True], [False, True, False]][md.get_rank()]
        settle(settling, came)
        forward = partial(settling.forward_begins, is_synchronised=True)
        with pytest.raises(GradientError) as error:
            settling.check_complete() if is_checked else forward()
        settling.check_complete()
        settling.forward_begins(is_synchronised=True)
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "  found:    rank 1: p0 (index 0), p2 (index 2)\n" in text


# -- the map --------------------------------------------------------------------------------------


def test_all_ranks_learn_which_gradients_any_of_them_had() -> None:
    def program(finds_unused: bool) -> list[bool] | None:
        settling, _, _ = settling_of(4, finds_unused=finds_unused)
        came = [[True, True, False, False], [False, True, True, False]][md.get_rank()]
        ending = settling.backward_ends(came, ())
        settling.note(reduced(settling, ending, came, torch.float16), ending)
        return settling.find_used(is_complete=False)

    assert md.simulate(program, 2, (True,)) == [[True, True, True, False]] * 2
    assert md.simulate(program, 2, (False,)) == [[True, True, True, False]] * 2
    with in_place_of_the_cpu():  # to look would make the CPU wait: only where it must
        assert md.simulate(program, 2, (True,)) == [[True, True, True, False]] * 2
        assert md.simulate(program, 2, (False,)) == [None, None]


def test_where_all_ranks_had_all_there_is_no_map_to_read() -> None:
    def program() -> list[bool] | None:
        settling, _, _ = settling_of(2)
        ending = settling.backward_ends([True, True], ())
        settling.note(reduced(settling, ending, None, torch.float32), ending)
        return settling.find_used(is_complete=True)

    assert md.simulate(program, 2) == [None, None]


@pytest.mark.parametrize("has", [None, [True, False]])
def test_where_sums_are_sent_every_number_is_a_part_of_an_average(has: list[bool] | None) -> None:
    def program() -> list[list[float]]:
        settling, _, _ = settling_of(2)
        behind = torch.empty(settling.size)
        settling.place(behind, 0.25)
        found = []
        for ending in (Ending.WHOLE, Ending.PARTIAL):
            settling.write(behind, ending, has)
            found.append(behind.tolist())
        return found

    flags = [0.0] * (len(Ending) - 1)
    used = [0.25, 0.0] if has else [0.0, 0.0]
    assert md.simulate(program, 1)[0] == [
        [0.25, *flags, 0.25, 0.25],
        [0.0, 0.25, *flags[1:], *used],
    ]


@pytest.mark.parametrize(
    ("options", "trailing"),
    [
        ({}, set()),
        ({"is_static": True}, {1, 2}),
        ({"finds_unused": True}, {1, 2}),
        ({"finds_unused": True, "skips_unused": True}, {2}),
    ],
)
def test_what_the_first_backward_lacked_trails_or_is_never_sent(
    options: dict[str, bool], trailing: set[int]
) -> None:
    def program() -> list[object]:
        settling, _, arrivals = settling_of(3, **options)
        settle(settling, [[True, True, False], [True, False, False]][md.get_rank()])
        return [{*arrivals.trailing}, arrivals.is_learned, settling.must_rebuild]

    assert md.simulate(program, 2) == [[trailing, True, True]] * 2


@pytest.mark.parametrize(
    ("options", "stays", "moves"),
    [
        ({"finds_unused": True}, False, True),
        ({"finds_unused": True}, True, False),
        ({"finds_unused": True, "is_static": True}, False, False),
        ({"finds_unused": True, "skips_unused": True}, False, False),
        ({}, False, False),
    ],
)
def test_later_parameters_move_only_where_buckets_may_change(
    options: dict[str, bool], stays: bool, moves: bool
) -> None:
    def program() -> list[object]:
        settling, _, arrivals = settling_of(2, **options)
        settling.stays = stays
        settle(settling, [True, True])
        settling.must_rebuild = False
        settle(settling, [True, md.get_rank() == 0])
        return [{*arrivals.trailing}, settling.must_rebuild]

    assert md.simulate(program, 2) == [[{1} if moves else set(), moves]] * 2


def test_a_backward_that_no_rank_had_teaches_nothing() -> None:
    def program() -> bool:
        settling, _, arrivals = settling_of(1)
        settling.note(reduced(settling, Ending.ABSENT, None, torch.float32), Ending.ABSENT)
        settling.read()
        return arrivals.is_learned

    assert md.simulate(program, 2) == [False, False]


def test_numbers_that_an_abort_has_cut_off_are_not_believed() -> None:
    def program() -> str:
        settling, _, _ = settling_of(1)
        behind = reduced(settling, Ending.INTERRUPTED, None, torch.float32)
        settling.note(behind, Ending.WHOLE)
        md.group.WORLD.abort("a peer is lost")
        with pytest.raises(md.AbortedError, match="a peer is lost"):
            settling.read()
        return "raised"

    with in_place_of_the_cpu():
        assert md.simulate(program, 1) == ["raised"]

"""How a backward ended on each rank: what every rank learns and raises, on CPUs and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn import Parameter

import meshdist as md
from meshdist.ddp.backward_outcome import BackwardOutcome
from meshdist.ddp.bucket_layout import ReductionOptions, ReductionTerms, lay
from meshdist.ddp.expected_gradients import ExpectedGradients
from meshdist.ddp.extra_axis_groups import ExtraAxisGroups
from meshdist.ddp.gradient_errors import GradientErrors
from meshdist.ddp.status_flags import Ending, StatusFlags
from meshdist.errors import GradientError
from tests.ddp.stand_in_accelerator import Accelerator, in_place_of_the_cpu

WHOLE, PARTIAL, LACKING = Ending.COMPLETE, Ending.PARTIAL, Ending.LACKING


@pytest.fixture(params=["at once", "deferred"])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Callable[[], Accelerator] | None]:
    """None where numbers are read at once; else what stands in for each rank's accelerator."""
    if request.param == "at once":
        yield None
    else:
        with in_place_of_the_cpu() as here:
            yield here


class Backwards:
    """One backward after the other of parameters whose gradients lie in one bucket."""

    def __init__(self, num: int, dtype: torch.dtype = torch.float32, **options: bool) -> None:
        self.parameters = [Parameter(torch.ones(1, dtype=dtype)) for _ in range(num)]
        self.expected_gradients, self.stays, self.num_active = (
            ExpectedGradients(num),
            False,
            md.get_world_size(),
        )
        names, group = [f"p{place}" for place in range(num)], md.group.WORLD
        given = ReductionOptions(caps=(1 << 20,), **options)
        terms = ReductionTerms(
            self.parameters,
            group,
            given,
            GradientErrors(names, group),
            range(num),
            ExtraAxisGroups(group),
        )
        self.layout = lay(terms, self.expected_gradients, has_hook=False)
        self.outcome = BackwardOutcome(self.layout, lacking=range(num))

    def forward(self, *, is_synchronised: bool = True) -> None:
        self.outcome.reject_lacking()
        if is_synchronised:
            self.outcome.expect_all()

    def end(self, came: Sequence[bool], unexpected: Sequence[str] = ()) -> Ending | None:
        """A backward ends here; nothing is sent."""
        self.outcome = self.outcome.followed_by(came, unexpected, self.num_active)
        return self.outcome.ending

    def send(self, ending: Ending | None, has: Sequence[bool] | None) -> None:
        """Its numbers are reduced, and noted."""
        status_flags = self.layout.status_flags
        status_flags.write(ending, has)
        md.all_reduce(status_flags.numbers, md.ReduceOp.AVG)
        assert self.outcome.note_flags()

    def cut_off(self, ending: Ending) -> None:
        """One ends otherwise, and is sent."""
        self.outcome = self.outcome.followed_by_none(ending, self.num_active)
        self.send(ending, None)

    def learn(self) -> None:
        self.outcome.raise_or_learn(self.expected_gradients, stays=self.stays)

    def settle(self, came: Sequence[bool], unexpected: Sequence[str] = ()) -> None:
        """All that follows one backward."""
        self.send(self.end(came, unexpected), came)
        self.learn()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "all_ends",
    [
        (Ending.COMPLETE, Ending.COMPLETE),
        (Ending.PARTIAL, Ending.COMPLETE),
        (Ending.INTERRUPTED, Ending.INTERRUPTED),
        (Ending.COMPLETE, Ending.INTERRUPTED),
        (Ending.UNEXPECTED, Ending.INTERRUPTED),
        (Ending.INTERRUPTED, Ending.LACKING, Ending.INTERRUPTED),
        (Ending.LACKING, Ending.COMPLETE),
        (Ending.ABSENT, Ending.ABSENT),
        (Ending.INTERRUPTED, Ending.ABSENT),
        (Ending.COMPLETE, Ending.ABSENT),
        (Ending.PARTIAL, Ending.ABSENT),
    ],
)
def test_ranks_raise_together_where_some_were_interrupted(
    all_ends: tuple[Ending, ...],
    dtype: torch.dtype,
    accelerator: Callable[[], Accelerator] | None,
) -> None:
    def program() -> tuple[str, bool]:
        mine = Backwards(1, dtype)
        (parameter,) = mine.parameters
        parameter.grad = torch.ones(1, dtype=dtype)
        ending = all_ends[md.get_rank()]
        text = ""
        try:
            mine.cut_off(ending)
            if accelerator is not None:
                assert accelerator().told[-1].startswith("record")
                assert parameter.grad is not None
            mine.learn()
            mine.learn()  # read once
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
        mine = Backwards(2, finds_unused=True)
        mine.settle([True, True])
        has = [True, md.get_rank() > 0]
        mine.send(mine.end(has), has)
        mine.num_active = 2
        mine.learn()
        return mine.expected_gradients.deferred

    assert md.simulate(program, 3) == [{1}] * 3


@pytest.mark.usefixtures("accelerator")
def test_what_came_unexpected_is_raised_on_every_rank_and_all_is_learned_anew() -> None:
    def program() -> tuple[str, list[bool]]:
        mine = Backwards(2)
        mine.settle([True, True])
        assert mine.expected_gradients.is_learned
        for parameter in mine.parameters:
            parameter.grad = torch.ones(1)
        lines = ["p0 grew", "p1 grew"] if md.get_rank() == 1 else []
        learned = lay(mine.layout.terms, mine.expected_gradients, has_hook=False)
        with pytest.raises(GradientError) as error:
            mine.settle([True, True], lines)
        assert all(parameter.grad is None for parameter in mine.parameters)
        return str(error.value), [
            mine.expected_gradients.is_learned,
            not learned.fits(mine.expected_gradients),
        ]

    for rank, (text, state) in enumerate(md.simulate(program, 3)):
        assert state == [False, True]
        assert text == (
            "unexpected gradients: the gradients of this step are dropped\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: the same gradients, each as often, as in earlier backwards\n"
            "  found:    rank 1: p0 grew; p1 grew\n"
            "  fix:      pass find_unused_parameters=True if steps use different parameters, "
            "and neither static_graph=True nor skip_all_reduce_unused_params=True; pass "
            "use_reentrant=False to checkpoint()"
        )


def test_a_long_list_of_unexpected_gradients_is_cut() -> None:
    def program() -> str:
        mine = Backwards(1)
        with pytest.raises(GradientError) as error:
            mine.settle([True], [f"line {place}" for place in range(25)])
        return str(error.value)

    assert "line 18; line 19 and 5 more\n" in md.simulate(program, 1)[0]


# -- what is lacking ------------------------------------------------------------------------------


def test_backwards_add_up_until_the_next_forward() -> None:
    def program() -> list[Ending | None]:
        mine = Backwards(3)
        found = []
        for _ in range(2):
            mine.forward()
            for came in ([True, False, False], [False, True, True]):
                found.append(mine.end(came))
        return [*found, mine.end([True, False, False])]

    assert md.simulate(program, 1) == [[LACKING, PARTIAL, LACKING, PARTIAL, PARTIAL]]


def test_nothing_is_lacking_behind_a_forward_without_synchronisation_or_where_it_may_be() -> None:
    def program() -> list[Ending | None]:
        mine = Backwards(2)
        mine.end([True, True])
        mine.forward(is_synchronised=False)
        found = [mine.end([True, False])]
        for option in ("finds_unused", "is_static"):
            mine = Backwards(2, **{option: True})
            mine.forward()
            found.append(mine.end([True, False]))
        frozen = Backwards(2)
        frozen.parameters[1].requires_grad_(False)
        return [*found, frozen.end([True, False])]

    assert md.simulate(program, 1) == [[PARTIAL] * 4]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("is_checked", [False, True])
def test_every_rank_raises_once_what_any_lacks(is_checked: bool) -> None:
    def program() -> str:
        mine = Backwards(3)
        mine.settle([[True, True, True], [False, True, False]][md.get_rank()])
        with pytest.raises(GradientError) as error:
            mine.outcome.reject_lacking() if is_checked else mine.forward()
        mine.outcome.reject_lacking()
        mine.forward()
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "  found:    rank 1: p0 (index 0), p2 (index 2)\n" in text


# -- the map --------------------------------------------------------------------------------------


def test_all_ranks_learn_which_gradients_any_of_them_had() -> None:
    def program(finds_unused: bool) -> list[bool] | None:
        mine = Backwards(4, torch.float16, finds_unused=finds_unused)
        came = [[True, True, False, False], [False, True, True, False]][md.get_rank()]
        mine.send(mine.end(came), came)
        return mine.outcome.find_used(is_complete=False)

    assert md.simulate(program, 2, (True,)) == [[True, True, True, False]] * 2
    assert md.simulate(program, 2, (False,)) == [[True, True, True, False]] * 2
    with in_place_of_the_cpu():  # to look would make the CPU wait: only where it must
        assert md.simulate(program, 2, (True,)) == [[True, True, True, False]] * 2
        assert md.simulate(program, 2, (False,)) == [None, None]


def test_where_all_ranks_had_all_there_is_no_map_to_read() -> None:
    def program() -> list[bool] | None:
        mine = Backwards(2)
        mine.send(mine.end([True, True]), None)
        return mine.outcome.find_used(is_complete=True)

    assert md.simulate(program, 2) == [None, None]


@pytest.mark.parametrize("has", [None, [True, False]])
def test_where_sums_are_sent_every_number_is_a_part_of_an_average(has: list[bool] | None) -> None:
    status_flags, found = StatusFlags(torch.empty(len(Ending) + 2), 0.25), []
    for ending in (Ending.COMPLETE, Ending.PARTIAL, None):
        status_flags.write(ending, has if ending is Ending.PARTIAL else None)
        found.append(status_flags.numbers.tolist())
    flags = [0.0] * (len(Ending) - 1)
    used = [0.25, 0.0] if has else [0.0, 0.0]
    assert found == [
        [0.25, *flags, 0.25, 0.25],
        [0.0, 0.25, *flags[1:], *used],
        [0.0] * len(status_flags.numbers),
    ]


@pytest.mark.parametrize(
    ("options", "deferred"),
    [
        ({}, set()),
        ({"is_static": True}, {1, 2}),
        ({"finds_unused": True}, {1, 2}),
        ({"finds_unused": True, "skips_unused": True}, {2}),
    ],
)
def test_what_the_first_backward_lacked_trails_or_is_never_sent(
    options: dict[str, bool], deferred: set[int]
) -> None:
    def program() -> list[object]:
        mine = Backwards(3, **options)
        mine.settle([[True, True, False], [True, False, False]][md.get_rank()])
        expected_gradients = mine.expected_gradients
        return [
            {*expected_gradients.deferred},
            expected_gradients.is_learned,
            not mine.layout.fits(expected_gradients),
        ]

    assert md.simulate(program, 2) == [[deferred, True, True]] * 2


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
        mine = Backwards(2, **options)
        mine.stays = stays
        mine.settle([True, True])
        learned = lay(mine.layout.terms, mine.expected_gradients, has_hook=stays)
        mine.settle([True, md.get_rank() == 0])
        return [{*mine.expected_gradients.deferred}, not learned.fits(mine.expected_gradients)]

    assert md.simulate(program, 2) == [[{1} if moves else set(), moves]] * 2


def test_a_backward_that_no_rank_had_teaches_nothing() -> None:
    def program() -> bool:
        mine = Backwards(1)
        mine.cut_off(Ending.ABSENT)
        mine.learn()
        return mine.expected_gradients.is_learned

    assert md.simulate(program, 2) == [False, False]


def test_numbers_that_an_abort_has_cut_off_are_not_believed() -> None:
    def program() -> str:
        mine = Backwards(1)
        mine.send(Ending.INTERRUPTED, None)
        md.group.WORLD.abort("a peer is lost")
        with pytest.raises(md.AbortedError, match="a peer is lost"):
            mine.learn()
        return "raised"

    with in_place_of_the_cpu():
        assert md.simulate(program, 1) == ["raised"]

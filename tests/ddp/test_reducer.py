"""Buckets at work: order, overlap, rebuilding, and what happens when a reduction fails."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.ddp import buckets, reducer, status_flags
from meshdist.ddp.bucket_layout import ReductionOptions
from meshdist.ddp.device_streams import StatusReader
from meshdist.ddp.divergence_checks import DivergenceChecks
from meshdist.ddp.extra_axis_groups import ExtraAxisGroups
from meshdist.ddp.gradient_hooks import tensors_in
from meshdist.ddp.reducer import Reducer
from meshdist.ddp.status_flags import Ending
from meshdist.errors import BackendError, GradientError
from tests.inner import flat_sums

ONE_EACH = (1,)
ALL_IN_ONE = (1 << 30,)
NUM_FLAGS = len(Ending)


class Scaled(torch.autograd.Function):
    """Tells when the backward passes by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str], name: str) -> torch.Tensor:
        ctx.events, ctx.name = events, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.events.append(ctx.name)
        return grad, None, None


class Chain(nn.Module):
    """Multiplies by its weights in a given order, telling the backward's steps."""

    def __init__(self, order: list[int], events: list[str]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((1,), 2.0) for _ in order)
        self.order = order
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = Scaled.apply(x * self.weights[index], self.events, f"backward of {index}")
        return x


def reducer_of(module: nn.Module, caps: tuple[int, ...], **options: Any) -> Reducer:
    named = dict(module.named_parameters())
    world, how = md.group.WORLD, ReductionOptions(caps, **options)
    divergence_checks = DivergenceChecks(module, 0, torch.device("cpu"))
    return Reducer(
        list(named.values()), list(named), world, how, ExtraAxisGroups(world), divergence_checks
    )


def forward(module: nn.Module, mine: Reducer, x: torch.Tensor) -> torch.Tensor:
    mine.before_forward()
    out = module(x)
    mine.after_forward(out, module)
    return out


def step(module: nn.Module, mine: Reducer, x: torch.Tensor) -> None:
    forward(module, mine, x).sum().backward()


def gradients_of(module: nn.Module) -> list[float | None]:
    return [None if p.grad is None else p.grad.item() for p in module.parameters()]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on rank 0: reductions started, reductions waited for, the backward's steps."""
    told: list[str] = []
    all_reduce = flat_sums.all_reduce

    def telling(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        if md.get_rank() != 0:
            return work
        told.append(f"start of {tensor.numel()}")

        class Telling:
            def wait(self) -> bool:
                told.append("wait")
                return work.wait()

            def _may_be_dropped(self) -> None:
                work._may_be_dropped()

        return Telling()

    monkeypatch.setattr(flat_sums, "all_reduce", telling)
    return told


def test_a_buckets_reduction_starts_while_the_backward_goes_on(events: list[str]) -> None:
    def program() -> list[Any]:
        module = Chain([0, 1, 2], events if md.get_rank() == 0 else [])
        mine = reducer_of(module, ONE_EACH)
        seen = []
        for _ in range(2):
            module.zero_grad()
            step(module, mine, torch.ones(1) + md.get_rank())
            seen.append(gradients_of(module))
        return seen

    assert md.simulate(program, 2) == [[[6.0, 6.0, 6.0]] * 2] * 2
    last = f"start of {1 + NUM_FLAGS + 3}"
    assert events == [
        *("backward of 2", "backward of 1", "backward of 0"),  # the first backward is watched
        *("start of 1", "start of 1", last, "wait", "wait", "wait"),
        *("backward of 2", "start of 1", "backward of 1", "start of 1"),
        *("backward of 0", last, "wait", "wait", "wait"),
    ]


def test_buckets_start_strictly_in_order_whatever_comes_first(events: list[str]) -> None:
    def program() -> list[tuple[int, ...]]:
        module = Chain([0, 1, 2], events if md.get_rank() == 0 else [])
        mine = reducer_of(module, ONE_EACH)
        step(module, mine, torch.ones(1))
        events.clear()
        module.order = [2, 1, 0]  # against expectation
        step(module, mine, torch.ones(1))
        return [bucket.indices for bucket in mine.buckets]

    assert md.simulate(program, 2) == [[(2,), (1,), (0,)]] * 2
    assert events == [
        *("backward of 0", "backward of 1", "backward of 2"),
        *("start of 1", "start of 1", f"start of {1 + NUM_FLAGS + 3}", "wait", "wait", "wait"),
    ]


def test_buckets_are_rebuilt_once_in_the_order_of_rank_0() -> None:
    def program() -> list[Any]:
        order = [2, 0, 1] if md.get_rank() == 0 else [0, 1, 2]
        module = Chain(order, [])
        mine = reducer_of(module, ONE_EACH)
        seen: list[Any] = []
        for _ in range(3):
            module.zero_grad()
            step(module, mine, torch.ones(1) + md.get_rank())
            seen.append([bucket.indices for bucket in mine.buckets])
        return [*seen, gradients_of(module)]

    made, rebuilt = [(2,), (1,), (0,)], [(1,), (0,), (2,)]
    assert md.simulate(program, 3) == [[made, rebuilt, rebuilt, [8.0, 8.0, 8.0]]] * 3


def test_gradients_keep_their_values_and_become_views_when_buckets_are_rebuilt() -> None:
    def program() -> bool:
        module = Chain([1, 0], [])
        mine = reducer_of(module, ALL_IN_ONE)
        step(module, mine, torch.ones(1) + md.get_rank())
        before = [p.grad.item() for p in module.parameters()]
        mine.before_forward()
        (bucket,) = mine.buckets
        assert bucket.indices == (0, 1)
        assert [p.grad.item() for p in module.parameters()] == before == [3.0, 3.0]
        return all(
            p.grad is bucket.views[bucket.indices.index(i)]
            for i, p in enumerate(module.parameters())
        )

    assert md.simulate(program, 2) == [True, True]


def test_a_gradient_may_lie_in_its_bucket_as_another_tensor() -> None:
    def program() -> list[list[float]]:
        model = md.DDP(Again(3))
        seen = []
        for _ in range(4):
            (model(*ALL) * (1 + md.get_rank())).backward()
            seen.append(gradients_of(model))
            for parameter in model.parameters():
                parameter.grad = parameter.grad.detach()
        return seen

    assert md.simulate(program, 2) == [[[1.5 * n] * 3 for n in range(1, 5)]] * 2


def test_kept_views_are_added_to_in_place() -> None:
    def program() -> list[bool]:
        module = nn.Linear(300, 300)  # its weight goes at once, its bias with the bucket
        mine = reducer_of(module, ALL_IN_ONE)
        same = []
        for _ in range(3):
            module.zero_grad(set_to_none=False)
            step(module, mine, torch.ones(2, 300))
            (bucket,) = mine.buckets
            views = dict(zip(bucket.indices, bucket.views, strict=True))
            same.append(all(p.grad is views[i] for i, p in enumerate(module.parameters())))
            same.append(bool((module.bias.grad == 2).all() and (module.weight.grad == 2).all()))
        return same

    assert md.simulate(program, 3) == [[True] * 6] * 3


def test_a_missing_large_gradient_counts_as_zero_and_a_kept_one_stays() -> None:
    def program() -> list[float]:
        module = nn.ParameterList([torch.ones(40_000), torch.ones(1)])
        mine = reducer_of(module, ALL_IN_ONE)
        seen = []
        for _ in range(2):
            used = list(module) if md.get_rank() == 0 else [module[1]]
            if not seen:
                mine.before_forward()
                out = sum(p.sum() for p in used)
                mine.after_forward(out, module)
            out.backward(retain_graph=True)
            seen += [p.grad[0].item() for p in module]
        return seen

    # half of 1, then that half kept and half of another 1 added
    assert md.simulate(program, 2) == [[0.5, 1.0, 1.0, 2.0]] * 2


def test_a_closed_reducer_leaves_gradients_alone() -> None:
    def program() -> float:
        module = Chain([0], [])
        mine = reducer_of(module, ALL_IN_ONE)
        mine.close()
        module(torch.ones(1) + md.get_rank()).backward()
        return module.weights[0].grad.item()

    assert md.simulate(program, 2) == [1.0, 2.0]


def test_after_a_failed_reduction_every_forward_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def wait(self) -> bool:
            raise BackendError("all_reduce on the world failed on backend 'none'")

        def _may_be_dropped(self) -> None:
            pass

    def program() -> str:
        module = Chain([0], [])
        mine = reducer_of(module, ALL_IN_ONE)
        monkeypatch.setattr(flat_sums, "all_reduce", lambda *_, **__: Failing())
        with pytest.raises(BackendError, match="failed on backend"):
            step(module, mine, torch.ones(1))
        for _ in range(2):
            with pytest.raises(GradientError) as error:
                mine.before_forward()
        assert isinstance(error.value.__cause__, BackendError)
        return str(error.value)

    (text,) = md.simulate(program, 1)
    assert text == (
        "cannot reduce gradients: an earlier all-reduce failed\n"
        "  where:    rank 0, in the world\n"
        "  found:    all_reduce on the world failed on backend 'none'\n"
        "  fix:      restart the job, or create a new mesh and wrap the model again"
    )


def test_a_bucket_goes_out_after_the_streams_of_its_gradients(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Streams:
        def note(self) -> None:
            events.append("note")

        def await_others(self, gradients: Iterable[torch.Tensor]) -> None:
            events.append(f"await, to read {len(list(gradients))}")

    monkeypatch.setattr(buckets, "streams_for", lambda _: Streams)

    def program() -> None:
        module = Chain([1, 0], [])
        mine = reducer_of(module, ONE_EACH)
        step(module, mine, torch.ones(1))
        module.zero_grad()
        step(module, mine, torch.ones(1))
        module.order = [0]
        step(module, mine, torch.ones(1))  # the other one is lacking

    md.simulate(program, 1)
    last = f"start of {1 + NUM_FLAGS + 2}"
    assert events == [
        *("note", "note", "await, to read 1", "await, to read 1"),
        *("start of 1", last, "wait", "wait"),
        *("note", "await, to read 1", "start of 1"),
        *("note", "await, to read 1", last, "wait", "wait"),
        *("note", "await, to read 0", "start of 1"),  # it lies in the bucket already
        *("await, to read 0", last, "wait", "wait"),
    ]


def test_what_an_interrupted_backward_left_is_awaited_before_it_is_zeroed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Chain([0], [])
    seen = []

    class Streams:
        def await_others(self, _: Iterable[torch.Tensor]) -> None:
            seen.append(mine.buckets[0].flat.item())

    def program() -> None:
        nonlocal mine
        mine = reducer_of(module, ALL_IN_ONE)
        mine.before_forward()
        out = module(torch.ones(1))
        mine.after_forward(out, module)
        out.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.backward()
        mine.buckets[0].flat.fill_(5.0)
        mine.before_forward()
        assert seen == [5.0] and mine.buckets[0].flat.item() == 0.0

    mine: Reducer
    monkeypatch.setattr(buckets, "streams_for", lambda _: Streams)
    md.simulate(program, 1)


def test_numbers_are_expected_behind_the_last_bucket_when_buckets_are_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[torch.device, int]] = []
    noted: list[torch.Tensor] = []
    reader_for = status_flags.reader_for

    def telling(device: torch.device, count: int) -> StatusReader:
        asked.append((device, count))
        reader = reader_for(device, count)
        note = reader.note
        monkeypatch.setattr(reader, "note", lambda reduced: noted.append(reduced) or note(reduced))
        return reader

    def program() -> None:
        module = Chain([1, 0], [])
        mine = reducer_of(module, ALL_IN_ONE)
        for _ in range(3):
            step(module, mine, torch.ones(1))
            assert (
                mine.layout.flags_average is None and noted[-1] is mine.layout.status_flags.numbers
            )

    monkeypatch.setattr(status_flags, "reader_for", telling)
    md.simulate(program, 1)
    assert asked == [(torch.device("cpu"), NUM_FLAGS + 2)] * 2 and len(noted) == 3
    assert noted[0] is not noted[1]


def test_no_graph_is_captured_before_the_buckets_are_rebuilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program() -> str:
        module = Chain([0], [])
        mine = reducer_of(module, ALL_IN_ONE)
        texts = []
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(reducer, "is_capturing", lambda _: True)
                with pytest.raises(GradientError) as error:
                    mine.before_forward()
            texts.append(str(error.value))
            step(module, mine, torch.ones(1))
        monkeypatch.setattr(reducer, "is_capturing", lambda _: True)
        step(module, mine, torch.ones(1))  # rebuilt in the second step
        assert texts[0] == texts[1]
        return texts[0]

    assert md.simulate(program, 1) == [
        "cannot capture a CUDA graph before the buckets are rebuilt\n"
        "  where:    rank 0, in the world\n"
        "  expected: two steps, forward and backward, before the capture\n"
        "  fix:      run a few steps on a side stream first, as torch.cuda.graph requires"
    ]


def test_many_lacking_parameters_are_counted_not_listed() -> None:
    def program() -> str:
        module = nn.ParameterList([torch.ones(1) for _ in range(30)])
        mine = reducer_of(module, ALL_IN_ONE)
        mine.before_forward()
        out = module[0].sum()
        mine.after_forward(out, module)
        out.backward()
        with pytest.raises(GradientError) as error:
            mine.before_forward()
        return str(error.value)

    text = md.simulate(program, 1)[0]
    assert "rank 0: 1 (index 1), 2 (index 2)" in text
    assert "20 (index 20) and 9 more\n" in text


# -- what comes otherwise than expected -----------------------------------------------------------


class Again(nn.Module):
    """Uses its weights in an order; those in ``inner`` first, inside a re-entrant checkpoint."""

    def __init__(self, num: int, size: int = 1) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((size,), 2.0) for _ in range(num))

    def part(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return x * self.weights[index].sum()

    def forward(self, order: list[int], inner: list[int]) -> torch.Tensor:
        x = torch.ones(1, requires_grad=True)
        total = x * 0
        for index in inner:
            total = total + checkpoint(
                self.part, x, index, use_reentrant=True, preserve_rng_state=False
            )
        for index in order:
            total = total * 1 + self.part(x, index)
        return total.sum()


Plan = tuple[list[int], list[int]]
ALL: Plan = ([0, 1, 2], [])


def steps(
    plans: list[list[Plan]], options: dict[str, Any], size: int = 1, caps: float = 1e-6
) -> list[Any]:
    """By step: the error, or the gradients; ``plans`` are by step and rank."""
    model = md.DDP(Again(3, size), bucket_cap_mb=caps, **options)
    seen: list[Any] = []
    for ranks in plans:
        model.zero_grad()
        try:
            model(*ranks[md.get_rank()]).backward()
        except GradientError as error:
            assert all(p.grad is None for p in model.parameters())
            seen.append(str(error))
        else:
            seen.append([None if p.grad is None else p.grad[0].item() for p in model.parameters()])
    return seen


UNEXPECTED = (
    "unexpected gradients: the gradients of this step are dropped\n"
    "  where:    rank {rank}, in the world\n"
    "  expected: the same gradients, each as often, as in earlier backwards\n"
    "  found:    rank 1: {found}\n"
    "  fix:      pass find_unused_parameters=True if steps use different parameters, and "
    "neither static_graph=True nor skip_all_reduce_unused_params=True; pass "
    "use_reentrant=False to checkpoint()"
)
EACH = [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("size", [1, 40_000])
def test_a_gradient_that_grows_after_its_bucket_has_gone_is_an_error_on_every_rank(
    options: dict[str, Any], size: int
) -> None:
    again: Plan = ([0, 1, 2], [2])
    plans = [[ALL] * 2, [ALL] * 2, [ALL, again], [ALL] * 2, [ALL] * 2, [ALL] * 2]
    for rank, seen in enumerate(md.simulate(steps, 2, (plans, options, size))):
        text = UNEXPECTED.format(
            rank=rank, found="weights.2 (index 2) was added to after its bucket had been sent"
        )
        assert seen == [EACH, EACH, text, EACH, EACH, EACH]


def test_as_many_arrivals_as_last_time_are_waited_for() -> None:
    again: Plan = ([0, 1, 2], [2])
    plans = [[again] * 2, [again, ALL], [ALL] * 2, [ALL] * 2]
    twice = [1.0, 1.0, 2.0]
    for seen in md.simulate(steps, 2, (plans, {})):
        assert seen == [twice, [1.0, 1.0, 1.5], EACH, EACH]


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        (ALL, ([0, 1], []), "weights.2 (index 2): computed 0 times, in the first step once"),
        (([0, 1], []), ALL, "weights.2 (index 2): computed once, in the first step 0 times"),
        (
            ALL,
            ([1, 2], [0, 0]),
            "weights.0 (index 0): computed 2 times, in the first step once",
        ),
    ],
)
def test_a_static_graph_that_moved_on_one_rank_is_an_error_on_every_rank(
    first: Plan, then: Plan, found: str
) -> None:
    plans = [[ALL, first], [ALL, first], [ALL, then], [ALL, first], [ALL, first]]
    for rank, seen in enumerate(md.simulate(steps, 2, (plans, {"static_graph": True}))):
        right = EACH if first is ALL else [1.0, 1.0, 0.5]
        assert seen == [right, right, UNEXPECTED.format(rank=rank, found=found), right, right]


def test_a_static_graph_may_use_a_parameter_several_times_and_others_never() -> None:
    plan: Plan = ([2], [0, 0])
    seen = md.simulate(steps, 2, ([[plan] * 2] * 4, {"static_graph": True}))
    assert seen == [[[2.0, None, 1.0]] * 4] * 2


SKIPS = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}


def test_what_no_rank_used_at_first_is_never_sent(events: list[str]) -> None:
    plan: Plan = ([0, 2], [])
    plans = [[plan] * 2] * 3
    assert md.simulate(steps, 2, (plans, SKIPS)) == [[[1.0, None, 1.0]] * 3] * 2
    last = f"start of {1 + NUM_FLAGS + 3}"
    sent = [event for event in events if event != "wait"]
    assert sent == ["start of 1", "start of 1", last, *["start of 1", last] * 2]


def test_a_rank_that_uses_what_is_never_sent_is_an_error_on_all() -> None:
    few: Plan = ([0, 2], [])
    plans = [[few] * 2, [few] * 2, [few, ALL], [few] * 2, [few] * 2]
    right = [1.0, None, 1.0]
    found = "weights.1 (index 1) has a gradient, but was unused at first and is not sent"
    for rank, seen in enumerate(md.simulate(steps, 2, (plans, SKIPS))):
        assert seen == [right, right, UNEXPECTED.format(rank=rank, found=found), right, right]


def test_what_one_rank_used_at_first_is_sent_and_may_lack_later() -> None:
    few: Plan = ([0, 2], [])
    plans = [[few, ALL], [few] * 2, [ALL, few]]
    for seen in md.simulate(steps, 2, (plans, SKIPS)):
        assert seen == [[1.0, 0.5, 1.0], [1.0, None, 1.0], [1.0, 0.5, 1.0]]


def test_parameters_that_a_rank_lacked_trail_and_come_back_after_16_whole_backwards() -> None:
    few: Plan = ([0, 1], [])

    def program() -> list[Any]:
        model = md.DDP(Again(3), bucket_cap_mb=1e-6, find_unused_parameters=True)
        laid = []
        for number in range(22):
            model.zero_grad()
            is_lacking = number == 2 and md.get_rank() == 1
            model(*(few if is_lacking else ALL)).backward()
            assert model.module.weights[2].grad.item() == (0.5 if number == 2 else 1.0)
            buckets = [(bucket.indices[0], bucket.is_deferred) for bucket in model.reducer.buckets]
            if not laid or laid[-1][1] != buckets:
                laid.append((number, buckets))
        return laid

    early = [(2, False), (1, False), (0, True)]
    assert (
        md.simulate(program, 2)
        == [
            [
                (0, [(2, True), (1, True), (0, True)]),
                (1, early),
                (3, [(1, False), (0, False), (2, True)]),
                (19, early),
            ]
        ]
        * 2
    )


def test_where_nothing_may_be_lacking_nothing_moves() -> None:
    few: Plan = ([0, 1], [])

    def program() -> list[Any]:
        model = md.DDP(Again(3), bucket_cap_mb=1e-6)
        for plan in (ALL, ALL, few if md.get_rank() else ALL):
            model.zero_grad()
            model(*plan).backward()
        with pytest.raises(GradientError, match=r"rank 1: weights\.2"):
            model.check_gradients()
        model(*ALL).backward()
        return [bucket.indices for bucket in model.reducer.buckets]

    assert md.simulate(program, 2) == [[(2,), (1,), (0,)]] * 2


@pytest.mark.parametrize("size", [1, 20_000])  # the second is moved at once
@pytest.mark.parametrize("begin", [0, 1, 3])
def test_hooks_that_change_gradients_come_first_whenever_they_are_registered(
    size: int, begin: int
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(size) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(weight.sum() for weight in self.weights) * x

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2)

    def program() -> list[Any]:
        model = md.DDP(Scaled(), bucket_cap_mb=1e-6)
        seen = []
        for step in range(5):
            if step == begin:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(double)
            model.zero_grad()
            model(torch.tensor(1.0 + md.get_rank())).backward()
            seen.append([p.grad[0].item() for p in model.parameters()])
        return seen

    expected = [[1.5] * 3] * begin + [[3.0] * 3] * (5 - begin)
    assert md.simulate(program, 2) == [expected] * 2


# -- models whose backward cannot be seen to begin ------------------------------------------------


class Hidden(nn.Module):
    """Gives no tensor: its loss waits inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((1,), 2.0) for _ in range(4))
        self.loss = torch.zeros(())

    def forward(self, scale: float, use: range) -> str:
        self.loss = sum(self.weights[index] * scale for index in use).sum()
        return "done"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_whose_outputs_hold_no_tensor(set_to_none: bool) -> None:
    def program() -> list[Any]:
        model = md.DDP(Hidden(), bucket_cap_mb=1e-5, find_unused_parameters=True)
        seen = []
        for number in range(4):
            model.zero_grad(set_to_none)
            use = range(4) if number != 2 or md.get_rank() else range(2)
            model(1.0 + md.get_rank(), use)
            model.module.loss.backward()
            seen.append(gradients_of(model))
        return seen

    whole = [1.5] * 4
    assert md.simulate(program, 2) == [[whole, whole, [1.5, 1.5, 1.0, 1.0], whole]] * 2


def test_its_buckets_go_while_the_backward_goes_on(events: list[str]) -> None:
    class HiddenChain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = Chain([0, 1, 2, 3], events if md.get_rank() == 0 else [])

        def forward(self, x: torch.Tensor) -> None:
            self.loss = self.chain(x).sum()

    def program() -> None:
        model = md.DDP(HiddenChain(), bucket_cap_mb_list=[12e-6, 4e-6])
        for _ in range(3):
            model.zero_grad()
            if md.get_rank() == 0:
                events.clear()
            model(torch.ones(1))
            model.module.loss.backward()

    md.simulate(program, 2)
    assert events == [
        *("backward of 3", "backward of 2", "backward of 1", "start of 3", "backward of 0"),
        *(f"start of {1 + NUM_FLAGS + 4}", "wait", "wait"),
    ]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("cap", [1e-6, 25.0])
def test_a_loss_may_use_parameters_beside_the_outputs(set_to_none: bool, cap: float) -> None:
    def program() -> list[Any]:
        module = Chain([0, 1, 2], [])
        model = md.DDP(module, bucket_cap_mb=cap)
        seen = []
        for _ in range(4):
            model.zero_grad(set_to_none)
            out = model(torch.full((1,), 1.0 + md.get_rank())).sum()
            (out + sum(w.square().sum() for w in module.weights)).backward()
            seen.append(gradients_of(model))
            model.zero_grad(set_to_none)
            # beside the outputs alone, in one backward with them
            out = model(torch.ones(1)).sum() * 0
            (out + sum(w.sum() * (1 + md.get_rank()) for w in module.weights)).backward()
            seen.append(gradients_of(model))
        return seen

    assert md.simulate(program, 2) == [[[10.0] * 3, [1.5] * 3] * 4] * 2


@pytest.mark.parametrize("as_views", [True, False])
@pytest.mark.parametrize("keeps", ["zeros", "sums"])
def test_kept_gradients_are_seen_to_come_by_their_versions(keeps: str, as_views: bool) -> None:
    def program() -> list[Any]:
        model = md.DDP(
            Again(3),
            bucket_cap_mb_list=[8e-6, 4e-6],
            gradient_as_bucket_view=as_views,
            find_unused_parameters=True,
        )
        seen: list[Any] = []
        for number in range(5):
            if keeps == "zeros":
                model.zero_grad(set_to_none=False)
            use = [0, 1] if number == 3 and md.get_rank() == 1 else [0, 1, 2]
            model(use, []).backward()
            seen.append(gradients_of(model))
        return seen

    last = [1.0, 1.0, 1.0, 0.5, 1.0]
    sums = [[n + 1.0] * 2 + [sum(last[: n + 1])] for n in range(5)]
    expected = sums if keeps == "sums" else [[1.0, 1.0, one] for one in last]
    assert md.simulate(program, 2) == [expected] * 2


# -- delayed parameters ---------------------------------------------------------------------------


def test_delayed_parameters_go_together_behind_the_one_that_they_wait_for(
    events: list[str],
) -> None:
    def program() -> list[Any]:
        module = Chain([0, 1, 2, 3, 4], events if md.get_rank() == 0 else [])
        named = dict(module.named_parameters())
        delayed = [(name, named[name]) for name in ("weights.3", "weights.4")]
        model = md.DDP(
            module,
            bucket_cap_mb=1e-6,
            delay_all_reduce_named_params=delayed,
            param_to_hook_all_reduce=named["weights.1"],
        )
        seen: list[Any] = []
        for _ in range(3):
            model.zero_grad()
            if md.get_rank() == 0:
                events.clear()
            model(torch.ones(1) + md.get_rank()).sum().backward()
            seen.append(gradients_of(model))
            seen.append([bucket.indices for bucket in model.reducer.buckets])
        return seen

    grads, laid = [24.0] * 5, [(2,), (1,), (4, 3), (0,)]
    assert md.simulate(program, 2) == [[grads, laid] * 3] * 2
    assert events == [
        *("backward of 4", "backward of 3", "backward of 2", "start of 1"),
        *("backward of 1", "start of 1", "start of 2", "backward of 0"),
        *(f"start of {1 + NUM_FLAGS + 5}", *["wait"] * 4),
    ]


# -- no_sync --------------------------------------------------------------------------------------


def test_an_exception_inside_no_sync_ends_it() -> None:
    def program() -> list[Any]:
        model = md.DDP(Again(3))
        model.zero_grad()
        with pytest.raises(ZeroDivisionError), model.no_sync():
            model(*ALL).backward(1 / 0)
        seen = [model.require_backward_grad_sync]
        with model.no_sync():
            with pytest.raises(ZeroDivisionError), model.no_sync():
                assert 1 / 0
            seen.append(model.require_backward_grad_sync)  # the outer one goes on
        model.zero_grad()
        (model(*ALL) * (1 + md.get_rank())).backward()
        return [*seen, gradients_of(model)]

    assert md.simulate(program, 2) == [[True, False, [1.5] * 3]] * 2


def test_local_sums_reach_a_rank_that_has_dropped_its_gradient() -> None:
    def program() -> list[Any]:
        model = md.DDP(Again(3), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            model(*ALL).backward()
        model.zero_grad(set_to_none=md.get_rank() == 1)
        with model.no_sync():
            model(*(([0, 1], []) if md.get_rank() else ALL)).backward()
        model([0, 1], []).backward()
        return gradients_of(model)

    assert md.simulate(program, 2) == [[2.0, 2.0, 0.5]] * 2


def test_a_backward_that_raises_under_no_sync_concerns_its_rank_alone() -> None:
    def program() -> list[Any]:
        model = md.DDP(Again(3))
        for _ in range(3):
            model.zero_grad()
            with model.no_sync():
                loss = model(*ALL)
                if md.get_rank() == 1:
                    loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError) if md.get_rank() else nullcontext():
                    loss.backward()
            model.zero_grad()
            (model(*ALL) * (1 + md.get_rank())).backward()
        return gradients_of(model)

    assert md.simulate(program, 2) == [[1.5] * 3] * 2


def test_tensors_are_found_in_nested_outputs() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    assert list(tensors_in({"a": [x, (None, "text")], "b": {"c": y}})) == [x, y]
    assert list(tensors_in(object())) == []

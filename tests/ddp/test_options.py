"""What options promise, what comes of a broken promise, and options that are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp.bucket_layout import ReductionOptions
from meshdist.errors import ArgumentError, GradientError, KindError
from tests.ddp.models import Two
from tests.pool import Pool

Run = Callable[..., list[Any]]
FIX = (
    "fix:      pass find_unused_parameters=True if steps use different parameters, and "
    "neither static_graph=True nor skip_all_reduce_unused_params=True; pass "
    "use_reentrant=False to checkpoint()"
)
HEAD = "unexpected gradients: the gradients of this step are dropped\n"


@pytest.fixture(params=["simulated", "shm", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks)`` on simulated ranks, and on processes."""
    if request.param == "simulated":
        return md.simulate
    pool: Pool = request.getfixturevalue("pool")
    return lambda fn, num_ranks: pool.run(fn, num_ranks, backend=request.param)


def step(model: nn.Module, use: str, weight: float = 1.0) -> None:
    model.zero_grad()
    model(torch.full((1, 1), weight), use).backward()


def error_of(backward: Callable[[], object]) -> str:
    """The error of a backward on the CPU, which all ranks raise when it ends."""
    with pytest.raises(GradientError) as error:
        backward()
    return str(error.value)


def error_and_a_step_after(model: nn.Module, use: str) -> tuple[str, list[float]]:
    """A step that breaks a promise, and whether the next one is as it should be."""
    text = error_of(lambda: step(model, use))
    assert [p.grad for p in model.parameters()] == [None, None]
    step(model, "both", 1.0 + md.get_rank())
    return text, [p.grad.item() for p in model.parameters()]


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_static_graph_that_moves_on_one_rank_raises_on_all(run: Run, find_unused: bool) -> None:
    def program() -> tuple[str, list[float]]:
        model = md.DDP(Two(), static_graph=True, find_unused_parameters=find_unused)
        for _ in range(3):
            step(model, "left")
        return error_and_a_step_after(model, "both" if md.get_rank() == 1 else "left")

    for text, after in run(program, 2):
        assert text.startswith(HEAD)
        assert (
            "found:    rank 1: right.weight (index 1): computed once, in the first step 0 times"
            in text
        )
        assert FIX in text
        assert after == [1.5, 1.5]


def test_a_parameter_that_is_not_sent_must_stay_unused(run: Run) -> None:
    def program() -> tuple[str, list[float]]:
        model = md.DDP(Two(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        for _ in range(3):
            step(model, "left")
            assert model.module.right.weight.grad is None
        return error_and_a_step_after(model, "both" if md.get_rank() == 1 else "left")

    for text, after in run(program, 2):
        assert text.startswith(HEAD)
        assert (
            "found:    rank 1: right.weight (index 1) has a gradient, but was unused at "
            "first and is not sent" in text
        )
        assert after == [1.5, 1.5]


def test_delayed_parameters_are_averages_when_the_backward_returns(run: Run) -> None:
    def program() -> list[list[float]]:
        module = Two()
        model = md.DDP(
            module,
            delay_all_reduce_named_params=[("right.weight", module.right.weight)],
            param_to_hook_all_reduce=module.left.weight,
        )
        seen = []
        for _ in range(3):
            step(model, "both", 1.0 + md.get_rank())
            seen.append([p.grad.item() for p in model.parameters()])
        return seen

    assert run(program, 2) == [[[1.5, 1.5]] * 3] * 2


def test_accepted_options_change_nothing() -> None:
    def program() -> list[float]:
        model = md.DDP(Two(), dim=1, batched_grad_copy=True)
        step(model, "both", 1.0 + md.get_rank())
        return [model.dim, *(p.grad.item() for p in model.parameters())]

    assert md.simulate(program, 2) == [[1, 1.5, 1.5]] * 2


def test_check_reduction_warns() -> None:
    def program() -> None:
        with pytest.warns(FutureWarning, match="check_reduction has no effect: missing gradients"):
            md.DDP(Two(), check_reduction=True)

    md.simulate(program, 1)


def stranger() -> nn.Parameter:
    return nn.Parameter(torch.ones(1))


REFUSED: list[tuple[Callable[[Two], dict[str, Any]], type[Exception], str]] = [
    (lambda _: {"bucket_cap_mb": 0}, ArgumentError, "bucket_cap_mb is 0\n"),
    (lambda _: {"bucket_cap_mb": -3}, ArgumentError, "bucket_cap_mb is -3\n"),
    (lambda _: {"bucket_cap_mb_list": [1, 0]}, ArgumentError, "bucket_cap_mb_list[1] is 0\n"),
    (lambda _: {"bucket_cap_mb_list": [-1]}, ArgumentError, "bucket_cap_mb_list[0] is -1\n"),
    (lambda _: {"bucket_cap_mb_list": 25}, KindError, "bucket_cap_mb_list is of type int\n"),
    (
        lambda module: {"delay_all_reduce_named_params": list(module.named_parameters())},
        ArgumentError,
        "delay_all_reduce_named_params requires param_to_hook_all_reduce\n"
        "  expected: both arguments, or neither\n"
        "  fix:      pass param_to_hook_all_reduce too",
    ),
    (
        lambda module: {"param_to_hook_all_reduce": module.left.weight},
        ArgumentError,
        "param_to_hook_all_reduce requires delay_all_reduce_named_params\n",
    ),
    (
        lambda module: {
            "delay_all_reduce_named_params": [("other", stranger())],
            "param_to_hook_all_reduce": module.left.weight,
        },
        ArgumentError,
        "other is not a trainable parameter of the module\n"
        "  expected: delayed parameters, and the parameter they wait for, from the module\n"
        "  fix:      take them from module.named_parameters()",
    ),
    (
        lambda module: {
            "delay_all_reduce_named_params": [("left.weight", module.left.weight)],
            "param_to_hook_all_reduce": stranger(),
        },
        ArgumentError,
        "param_to_hook_all_reduce is not a trainable parameter of the module\n",
    ),
    (
        lambda _: {"mixed_precision": torch.bfloat16},
        KindError,
        "mixed_precision is torch.bfloat16\n"
        "  expected: a MixedPrecision with a floating-point dtype, or None, as param_dtype\n",
    ),
    (
        lambda _: {"mixed_precision": md.MixedPrecision(reduce_dtype=torch.int32)},
        KindError,
        "a MixedPrecision with a floating-point dtype, or None, as reduce_dtype\n"
        "  fix:      pass for example "
        "md.distributed.MixedPrecision(param_dtype=torch.bfloat16)",
    ),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED)
def test_bad_options_are_rejected_before_anything_is_sent(
    options: Callable[[Two], dict[str, Any]], kind: type[Exception], text: str
) -> None:
    def program() -> str:
        if md.get_rank():  # it does not even come: nothing waits for it
            return text
        module = Two()
        with pytest.raises(kind) as error:
            md.DDP(module, **options(module))
        return str(error.value)

    found, _ = md.simulate(program, 2)
    assert text in found


@pytest.mark.parametrize(
    ("given", "may_lack", "may_move"),
    [
        ({}, False, False),
        ({"finds_unused": True}, True, True),
        ({"is_static": True}, True, False),
        ({"finds_unused": True, "is_static": True}, True, False),
        ({"finds_unused": True, "skips_unused": True}, True, False),
    ],
)
def test_what_may_lack_and_move(given: dict[str, bool], may_lack: bool, may_move: bool) -> None:
    options = ReductionOptions((1,), **given)
    assert (options.may_lack, options.may_move) == (may_lack, may_move)

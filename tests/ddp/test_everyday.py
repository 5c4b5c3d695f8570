"""What users do every day comes to what one device with the whole batch comes to.

The programs run on simulated ranks; ``test_torch_second_opinion`` runs them on processes. What has
no counterpart on one device, since ranks differ on purpose, is told there or below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import GradientError
from tests.ddp.everyday_programs import (
    PROGRAMS,
    MayBeUndefined,
    batch_of,
    grads_of,
    mlp,
    run_quietly,
)
from tests.ddp.models import Two
from tests.pool import Pool

Run = Callable[..., list[Any]]

# Ranks differ on purpose, or gradients that are not averaged are looked at.
BY_RANK = {
    "a_backward_outside_of_no_sync",
    "a_functional_call",
    "accumulation_by_an_attribute",
    "accumulation_under_no_sync",
    "buffers",
    "buffers_alone",
    "buffers_by_the_older_name",
    "buffers_once",
    "evaluation_between_steps",
    "ignored_parameters_and_buffers",
    "inputs_without_rows",
    *(f"{size}_undefined_by_rank_and_step" for size in ("small", "large")),
    *(f"{size}_undefined_in_a_static_graph" for size in ("small", "large")),
    "two_forwards_with_batch_norm_before_a_backward",
    "unused_by_rank_and_step",
    "unused_with_copies",
}
ROUGH = {"autocast_and_a_scaler": 2e-2, "mixed_dtypes": 2e-2}  # low precision, other sums


class Wrap:
    """Ours."""

    type = md.DDP

    def __call__(self, module: nn.Module, **options: Any) -> nn.Module:
        return md.DDP(module, **options)

    def settle(self) -> None:
        """Gradients are averages when the backward has returned."""


class Alone(nn.Module):
    """The wrapper of one device: it does nothing."""

    require_backward_grad_sync = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    def _set_static_graph(self) -> None:
        """Nothing is reduced."""


class WrapAlone(Wrap):
    def __call__(self, module: nn.Module, **_: Any) -> nn.Module:
        return Alone(module)


NAMES = [name for name in PROGRAMS if name not in BY_RANK]


def run_ours() -> dict[str, Any]:
    rank, size = md.get_rank(), md.get_world_size()
    return {name: run_quietly(PROGRAMS[name], Wrap(), rank, size) for name in NAMES}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return {name: run_quietly(PROGRAMS[name], WrapAlone(), 0, 1) for name in NAMES}


@pytest.fixture(scope="module", params=[1, 4])
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return md.simulate(run_ours, request.param)


@pytest.fixture(params=["simulated", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks)`` on simulated ranks, and on processes with shared memory."""
    if request.param == "simulated":
        return md.simulate
    pool: Pool = request.getfixturevalue("pool")
    return lambda fn, num_ranks: pool.run(fn, num_ranks, backend="shm")


@pytest.mark.parametrize("name", NAMES)
def test_ranks_come_to_what_one_device_does(
    by_rank: list[dict[str, Any]], whole: dict[str, Any], name: str
) -> None:
    expected, form = optree.tree_flatten(whole[name], none_is_leaf=True)
    for outcomes in by_rank:
        found, found_form = optree.tree_flatten(outcomes[name], none_is_leaf=True)
        assert found_form == form
        for mine, other in zip(found, expected, strict=True):
            if isinstance(mine, torch.Tensor):
                tolerance = ROUGH.get(name, 1e-10 if mine.dtype.itemsize >= 8 else 1e-6)
                torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
            else:
                assert mine == other


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(run: Run) -> None:
    def program() -> list[Any]:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        seen = []
        for step in range(3):
            before = model.module.weight.item()
            optimizer.zero_grad()
            bad = step == 1 and md.get_rank() == 1
            loss = model(torch.ones(1, 1)).sum() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append((round(model.module.weight.item() - before, 5), scaler.get_scale()))
        return seen

    assert run(program, 2) == [[(-1.0, 4.0), (0.0, 2.0), (-1.0, 2.0)]] * 2


def test_the_example_of_accumulation(run: Run) -> None:
    """SEMANTICS' numbers: 1 and 2 alone, then again: 3 on both."""

    def program() -> list[float]:
        layer = nn.Linear(1, 1, bias=False)
        model = md.DDP(layer)
        x = torch.full((1, 1), 1.0 + md.get_rank())
        seen = []
        for _ in range(2):
            model.zero_grad()
            with model.no_sync():
                model(x).sum().backward()
            seen.append(layer.weight.grad.item())
            model(x).sum().backward()
            seen.append(layer.weight.grad.item())
        return seen

    assert run(program, 2) == [[1.0, 3.0, 1.0, 3.0], [2.0, 3.0, 2.0, 3.0]]


def test_the_forward_behind_one_that_is_not_synchronised_leaves_buffers_alone() -> None:
    def program() -> list[float]:
        model = md.DDP(nn.BatchNorm1d(1))
        mean = model.module.running_mean
        seen = []
        for is_alone in (True, False, False):
            mean.fill_(float(md.get_rank()))
            with model.no_sync() if is_alone else contextlib.nullcontext():
                model.eval()(torch.ones(2, 1)).sum().backward()
            seen.append(mean.item())
        return seen

    assert md.simulate(program, 2) == [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_gradients_of_a_loss_by_themselves_are_not_averaged() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        loss = model(torch.full((1, 1), 1.0 + md.get_rank())).sum()
        (grad,) = torch.autograd.grad(loss, list(model.parameters()))
        model(torch.ones(1, 1)).sum().backward()
        return grad.item()

    assert md.simulate(program, 2) == [1.0, 2.0]


def test_what_is_added_to_the_module_later_is_rejected() -> None:
    def program() -> str:
        module = nn.Linear(1, 1, bias=False)
        model = md.DDP(module)
        module.register_parameter("added", nn.Parameter(torch.ones(1)))
        with pytest.raises(GradientError) as error:
            model(torch.ones(1, 1))
        return error.value.summary

    summary = "added was added to the module after it was wrapped: its gradient is local"
    assert md.simulate(program, 2) == [summary] * 2


def test_a_quarter_where_one_of_four_ranks_uses_it(run: Run) -> None:
    def program() -> list[float | None]:
        model = md.DDP(Two(), find_unused_parameters=True)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(1, 1), "both" if md.get_rank() == 3 else "left").backward()
        used, some = (p.grad.item() for p in model.parameters())
        model.zero_grad()
        model(torch.ones(1, 1), "left").backward()
        return [used, some, model.module.right.weight.grad]

    assert run(program, 4) == [[1.0, 0.25, None]] * 4


def test_outputs_without_a_gradient_need_no_backward() -> None:
    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = super().forward(x)
            return y, y.detach() + 1

    def program() -> float:
        model = md.DDP(Detached(1, 1, bias=False))
        for step in range(4):
            model.zero_grad()
            y, detached = model(torch.full((1, 1), 1.0 + md.get_rank()))
            assert y.requires_grad and not detached.requires_grad
            if step % 2:
                y.sum().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2) == [1.5, 1.5]


def test_an_undefined_gradient_is_missing_where_none_may_be() -> None:
    def program() -> str:
        model = md.DDP(MayBeUndefined(1))
        model(torch.ones(1, 4).double(), md.get_rank() == 1).sum().backward()
        assert model.module.weight.grad is not None
        with pytest.raises(GradientError) as error:
            model(torch.ones(1, 4).double())
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "found:    rank 0: weight (index 0)" in text


def test_layers_are_frozen_and_thawed_between_steps(run: Run) -> None:
    """Without being told that parameters may lack: what is frozen is not missed."""

    def program() -> list[list[float | None]]:
        model = md.DDP(Two(), bucket_cap_mb=1e-6)
        seen = []
        for is_frozen in (False, True, True, False, True, False):
            model.module.right.requires_grad_(not is_frozen)
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + md.get_rank())).backward()
            grads = [p.grad for p in model.parameters()]
            seen.append([None if grad is None else grad.item() for grad in grads])
        return seen

    trained, frozen = [1.5, 1.5], [1.5, None]
    expected = [trained, frozen, frozen, trained, frozen, trained]
    assert run(program, 2) == [expected] * 2


def test_what_one_rank_freezes_alone_gets_the_mean_there_too() -> None:
    def program() -> list[float]:
        model = md.DDP(Two(), find_unused_parameters=True)
        for _ in range(3):
            model.module.right.requires_grad_(md.get_rank() == 1)
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + md.get_rank())).backward()
        return [p.grad.item() for p in model.parameters()]

    assert md.simulate(program, 2) == [[1.5, 1.0]] * 2


class Smoothing(nn.Linear):
    """Its buffer takes half of each input's mean."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean += (x.detach().mean() - self.mean) / 2
        return super().forward(x)


def test_buffers_of_several_forwards_before_a_backward(run: Run) -> None:
    def program() -> tuple[list[float], float]:
        model = md.DDP(Smoothing())
        loss = torch.zeros(())
        means = []
        for _ in range(3):
            loss = loss + model(torch.full((1, 1), 2.0 + 2 * md.get_rank())).sum()
            means.append(model.module.mean.item())
        loss.backward()
        return means, model.module.weight.grad.item()

    # The first rank's inputs are 2, the second's 4: each forward begins with the first one's mean.
    assert run(program, 2) == [([1.0, 1.5, 1.75], 9.0), ([2.0, 2.5, 2.75], 9.0)]


@pytest.mark.parametrize("of", ["wrapper", "module"])
def test_a_compiled_model_with_a_static_graph(of: str) -> None:
    def program() -> list[list[torch.Tensor]]:
        module = mlp()
        if of == "module":
            model = md.DDP(torch.compile(module, backend="aot_eager"), static_graph=True)
        else:
            model = torch.compile(md.DDP(module, static_graph=True), backend="aot_eager")
        seen = []
        for step in range(3):
            model.zero_grad()
            model(batch_of(step)[md.get_rank() :: 2]).square().mean().backward()
            seen.append(grads_of(model))
        return seen

    whole = mlp()
    for mine, other in zip(*md.simulate(program, 2), strict=True):
        assert all(map(torch.equal, mine, other))
    for step, grads in enumerate(md.simulate(program, 2)[0]):
        whole.zero_grad()
        whole(batch_of(step)).square().mean().backward()
        for mine, expected in zip(grads, grads_of(whole), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


class Nested(nn.Module):
    """The documented example: ``a.weight`` is unused, inside of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(1, 1, bias=False)
        self.body = nn.Sequential(nn.Linear(1, 1, bias=False), Two())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body[1](self.body[0](x), "left")


def test_nested_parameters_that_lack_gradients_are_named(run: Run) -> None:
    def program() -> str:
        model = md.DDP(Nested())
        model(torch.ones(1, 1)).backward()
        with pytest.raises(GradientError) as error:
            model(torch.ones(1, 1))
        return str(error.value)

    for text in run(program, 2):
        assert text.startswith("parameters got no gradient in the backward since the last forward")
        assert "found:    ranks 0-1: a.weight (index 0), body.1.right.weight (index 3)" in text
        assert "find_unused_parameters=True" in text

"""An optimizer whose replicas part for a few steps and meet again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import meshdist as md


def batches(num_steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_steps, 3, 4, 2, generator=generator, dtype=torch.float64)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: torch.Tensor) -> None:
    for x in steps:
        optimizer.zero_grad()
        (model(x[md.get_rank()]) - 1).square().mean().backward()
        optimizer.step()


def oracle(num_steps: int, period: int) -> list[torch.Tensor]:
    """Three models side by side in one loop, whose weights are averaged by hand."""
    models = [made() for _ in range(3)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in models]
    for step, x in enumerate(batches(num_steps)):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            (model(x[rank]) - 1).square().mean().backward()
            optimizer.step()
        if step % period == 0:
            with torch.no_grad():
                for same in zip(*(one.parameters() for one in models), strict=True):
                    mean = torch.stack(same).mean(0)
                    for one in same:
                        one.copy_(mean)
    return [torch.cat([p.detach().flatten() for p in one.parameters()]) for one in models]


def wrapped(model: nn.Module, period: int) -> md.PostLocalSGDOptimizer:
    local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return md.PostLocalSGDOptimizer(local, md.PeriodicModelAverager(period))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_replicas_equal_the_oracles_between_averages_and_at_them() -> None:
    def program(num_steps: int) -> torch.Tensor:
        model = made()
        train(model, wrapped(model, 3), batches(num_steps))
        return flat(model)

    for num_steps in (7, 9):
        found = md.simulate(program, 3, (num_steps,))
        for mine, expected in zip(found, oracle(num_steps, 3), strict=True):
            torch.testing.assert_close(mine, expected)
        assert torch.equal(found[0], found[1]) == (num_steps == 7)


def test_a_run_that_is_loaded_goes_on_as_if_it_had_not_stopped() -> None:
    def program() -> torch.Tensor:
        steps = batches(8)
        model = made()
        optimizer = wrapped(model, 3)
        train(model, optimizer, steps[:4])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        assert saved[1]["step"] == 4
        assert saved[1].keys() == {"state", "param_groups", "step"}
        train(model, optimizer, steps[4:])

        again = made()
        resumed = wrapped(again, 3)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert resumed.averager.step == 4
        train(again, resumed, steps[4:])
        assert torch.equal(flat(again), flat(model))
        return flat(again)

    for mine, expected in zip(md.simulate(program, 3), oracle(8, 3), strict=True):
        torch.testing.assert_close(mine, expected)


def test_a_state_without_a_step_begins_at_0_and_is_warned_of() -> None:
    def program() -> int:
        model = made()
        optimizer = wrapped(model, 2)
        optimizer.averager.step = 5
        with pytest.warns(UserWarning, match="no averager step: steps restart from 0"):
            optimizer.load_state_dict(optimizer.optim.state_dict())
        return optimizer.averager.step

    assert md.simulate(program, 1) == [0]


def test_it_is_an_optimizer_with_the_groups_and_the_state_of_the_one_inside() -> None:
    def program() -> Any:
        model = made()
        optimizer = wrapped(model, 2)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert repr(optimizer) == repr(optimizer.optim)
        schedule = OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
        train(model, optimizer, batches(1))
        schedule.step()
        assert optimizer.optim.param_groups[0]["lr"] == schedule.get_last_lr()[0]
        assert optimizer.state is optimizer.optim.state
        assert len(optimizer.state) == 4
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is optimizer.optim.param_groups
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        assert len(optimizer.param_groups) == 2
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in model.parameters())
        optimizer.zero_grad()
        return [p.grad for p in model.parameters()]

    assert md.simulate(program, 2) == [[None] * 4] * 2

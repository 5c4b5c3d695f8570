"""torch's sharded optimizer in a join context: ranks that joined go on updating their shards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, KindError
from tests.pool import Pool

WIDTH = 6


def zero_optimizer(parameters: Any, mesh: md.DeviceMesh, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # torch's module uses what torch has given up
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    group = mesh.to_torch().get_group("dp")
    return ZeroRedundancyOptimizer(parameters, *args, process_group=group, **options)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return model(x).square().mean()


def of_one_process(num_steps: list[int], divides_by_all: bool) -> list[torch.Tensor]:
    """The oracle: gradients are averaged by hand, and one optimizer has all of the state."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(max(num_steps)):
        active = [rank for rank, num in enumerate(num_steps) if num > step]
        share = len(num_steps) if divides_by_all else len(active)
        optimizer.zero_grad()
        sum(loss_of(net, rank, step) for rank in active).div(share).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def trained(
    num_steps: list[int], divides_by_all: bool, optimizer_first: bool = False, **options: Any
) -> list[torch.Tensor]:
    mesh = md.init_device_mesh("cpu", (len(num_steps),), mesh_dim_names=("dp",))
    net = make_net()
    model = md.DDP(net, device_mesh=mesh["dp"])
    optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.Adam, lr=0.05, **options)
    both = [optimizer, model] if optimizer_first else [model, optimizer]
    with md.Join(both, divide_by_initial_world_size=divides_by_all):
        for step in range(num_steps[md.get_rank()]):
            optimizer.zero_grad()
            loss_of(model, md.get_rank(), step).backward()
            optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("num_steps", "by_all", "options"),
    [
        ([1, 4, 2], True, {}),
        ([3, 1, 0], False, {"parameters_as_bucket_view": True}),
        ([2, 3, 3], True, {"optimizer_first": True}),
        ([3], True, {}),
        ([0, 2], False, {}),
        ([2, 0, 5, 1, 5], True, {}),
    ],
)
def test_steps_equal_those_of_one_process(
    backend: str, num_steps: list[int], by_all: bool, options: dict[str, Any], pool: Pool
) -> None:
    def program() -> list[torch.Tensor]:
        return trained(num_steps, by_all, **options)

    expected = of_one_process(num_steps, by_all)
    for weights in pool.run(program, len(num_steps), backend=backend):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_joinables_that_do_not_fit_raise(pool: Pool) -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = make_net()
        alone = md.new_group([md.get_rank()])
        optimizer = zero_optimizer(net.parameters(), mesh, torch.optim.SGD, lr=0.1)
        torchs = nn.parallel.DistributedDataParallel(make_net())
        found = []
        for given in ([md.DDP(net, process_group=alone), optimizer], [torchs], [optimizer]):
            with pytest.raises((ArgumentError, KindError)) as error:
                md.Join(given)
            found.append(str(error.value))
        return found

    for rank, (ranks, foreign, lonely) in enumerate(pool.run(program, 2, backend="shm")):
        assert ranks.startswith("Join cannot use joinables of different groups\n")
        assert f"found:    group of rank {rank} and torch's group of ranks [0, 1]\n" in ranks
        assert foreign.splitlines()[0].endswith("is not a group of meshdist")
        assert "found:    ZeroRedundancyOptimizer\n" in lonely


def test_steps_end_on_all_ranks_if_one_runs_out_of_data(pool: Pool) -> None:
    def program() -> tuple[int, str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_net(), device_mesh=mesh["dp"])
        optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.SGD, lr=0.1)
        turns = 0
        try:
            with md.Join([model, optimizer], throw_on_early_termination=True):
                for turns in range(1, 3 - md.get_rank()):
                    loss_of(model, md.get_rank(), turns).backward()
                    optimizer.step()
        except md.JoinError as error:
            return turns, str(error).splitlines()[0]
        return turns, "no error"

    text = "rank 1 ran out of data before the other ranks"
    assert pool.run(program, 2, backend="shm") == [(2, text), (1, text)]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_step_of_an_optimizer_that_the_context_does_not_know_raises(
    backend: str, pool: Pool
) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_net(), device_mesh=mesh["dp"])
        optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.SGD, lr=0.1)
        try:
            with model.join():
                for step in range(2 * md.get_rank()):
                    loss_of(model, md.get_rank(), step).backward()
                    optimizer.step()
        except md.JoinError as error:
            return str(error)
        return "no error"

    first, second = pool.run(program, 2, backend=backend)
    assert first.startswith("a rank that joined does not make this call")
    assert "ZeroRedundancyOptimizer.step() on rank 1" in first
    assert second == (
        "ZeroRedundancyOptimizer is not in the join context in which it steps\n"
        "  where:    rank 1, axis 'dp' of DeviceMesh(dp=2)\n"
        "  expected: an optimizer that takes part in the context\n"
        "  fix:      pass the optimizer, too: Join([model, optimizer])"
    )

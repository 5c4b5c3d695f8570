"""torch's sharded optimizer in a join context: ranks without data go on stepping their share."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import ArgumentError, JoinError, KindError
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


def prepare(optimizer: Any, net: nn.Module) -> Any:
    """Between backward and step: the norm is clipped, and the rate falls behind each step."""
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)


def of_one_device(num_steps: list[int], divides_by_all: bool) -> list[torch.Tensor]:
    """The oracle: gradients are averaged by hand, and one optimizer has all of the state."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for step in range(max(num_steps)):
        at_work = [rank for rank, num in enumerate(num_steps) if num > step]
        share = len(num_steps) if divides_by_all else len(at_work)
        optimizer.zero_grad()
        sum(loss_of(net, rank, step) for rank in at_work).div(share).backward()  # type: ignore[union-attr]
        prepare(optimizer, net)
        optimizer.step()
        decay.step()
    return [parameter.detach() for parameter in net.parameters()]


def trained(
    num_steps: list[int], divides_by_all: bool, optimizer_first: bool = False, **options: Any
) -> list[torch.Tensor]:
    mesh = md.init_device_mesh("cpu", (len(num_steps),), mesh_dim_names=("dp",))
    net = make_net()
    model = md.DDP(net, device_mesh=mesh["dp"])
    optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.Adam, lr=0.05, **options)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    both = [optimizer, model] if optimizer_first else [model, optimizer]
    with md.Join(both, divide_by_initial_world_size=divides_by_all):
        for step in range(num_steps[md.get_rank()]):
            optimizer.zero_grad()
            loss_of(model, md.get_rank(), step).backward()
            prepare(optimizer, net)
            optimizer.step()
            decay.step()
            total = torch.ones(1)
            md.all_reduce(total, group=mesh["dp"])  # no joinable's, between two steps
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_steps_are_those_of_one_device(backend: str, pool: Pool) -> None:
    cases: list[tuple[list[int], bool, dict[str, Any]]] = [
        ([1, 4, 2], True, {}),
        ([3, 1, 0], False, {"parameters_as_bucket_view": True}),
        ([2, 3, 3], True, {"optimizer_first": True}),
    ]

    def program() -> list[list[torch.Tensor]]:
        return [trained(num_steps, by_all, **options) for num_steps, by_all, options in cases]

    for found in pool.run(program, 3, backend=backend):
        for (num_steps, by_all, _), weights in zip(cases, found, strict=True):
            expected = of_one_device(num_steps, by_all)
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("num_steps", [[3], [0, 2], [2, 0, 5, 1, 5], [1, 4, 3, 2, 0]], ids=str)
def test_any_number_of_ranks(num_steps: list[int], backend: str, pool: Pool) -> None:
    for by_all in (True, False):
        expected = of_one_device(num_steps, by_all)
        for weights in pool.run(trained, len(num_steps), num_steps, by_all, backend=backend):
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-14)


def test_a_context_that_does_not_know_the_optimizer_refuses_its_step(pool: Pool) -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_net(), device_mesh=mesh["dp"])
        optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.SGD, lr=0.1)
        found = []

        def step(**given: Any) -> None:
            loss_of(model, md.get_rank(), 0).backward()
            optimizer.step(**given)

        with pytest.raises(JoinError) as error, model.join():
            step()
        found.append(str(error.value))
        with pytest.raises(JoinError) as error, md.uneven([]):
            optimizer.step()
        found.append(str(error.value))
        with pytest.raises(JoinError) as error, md.Join([model, optimizer]):
            step(closure=lambda: 0.0)
        found.append(str(error.value))
        step()  # the contexts have left nothing behind
        return found

    for rank, (unknown, other, closure) in enumerate(pool.run(program, 2, backend="shm")):
        assert unknown == (
            "ZeroRedundancyOptimizer steps in an uneven loop that does not know it\n"
            f"  where:    rank {rank}, axis 'dp' of DeviceMesh(dp=2)\n"
            "  expected: a loop inside Join([model, optimizer])\n"
            "  found:    a step that sends by torch's group, where no rank without data answers\n"
            "  fix:      write `with md.distributed.Join([model, optimizer]):` around the loop"
        )
        assert other.startswith(unknown.splitlines()[0])
        assert closure == (
            "ZeroRedundancyOptimizer.step() was given arguments in a join context\n"
            f"  where:    rank {rank}\n"
            "  expected: a step that ranks without data can take, too\n"
            "  fix:      run forward and backward before it, and call step() without a closure"
        )


def test_joinables_that_do_not_fit_are_refused(pool: Pool) -> None:
    def program() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        net = make_net()
        alone = md.new_group([md.get_rank()])
        optimizer = zero_optimizer(net.parameters(), mesh, torch.optim.SGD, lr=0.1)
        torchs = nn.parallel.DistributedDataParallel(make_net())
        found = []
        for given in ([md.DDP(net, process_group=alone), optimizer], [torchs]):
            with pytest.raises((ArgumentError, KindError)) as error:
                md.Join(given)
            found.append(str(error.value))
        return found

    for rank, (ranks, foreign) in enumerate(pool.run(program, 2, backend="shm")):
        assert ranks.startswith("Join was given joinables of different groups\n")
        assert f"found:    group of rank {rank} and torch's group of ranks [0, 1]\n" in ranks
        assert foreign.splitlines()[0].endswith("is not a group of meshdist")


def test_steps_end_on_all_ranks_where_one_has_no_data(pool: Pool) -> None:
    def program() -> tuple[int, str]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = md.DDP(make_net(), device_mesh=mesh["dp"])
        optimizer = zero_optimizer(model.parameters(), mesh, torch.optim.SGD, lr=0.1)
        turns = 0
        try:
            with md.Join([optimizer, model], throw_on_early_termination=True):
                for turns in range(1, 3 - md.get_rank()):
                    loss_of(model, md.get_rank(), turns).backward()
                    optimizer.step()
        except JoinError as error:
            return turns, str(error).splitlines()[0]
        return turns, "no error"

    first, second = pool.run(program, 2, backend="shm")
    assert first == (2, "a rank has no data left, and this one has")
    assert second == (1, "rank 1 has no data left, and others have")

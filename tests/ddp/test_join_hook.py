"""Models whose ranks have unequally many batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import GradientError
from tests.ddp.models import Two
from tests.ddp.stand_in_accelerator import in_place_of_the_cpu
from tests.pool import Pool

Run = Callable[..., list[Any]]


@pytest.fixture(params=["simulated", "gloo", "shm"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` on simulated ranks, and on processes over two backends."""
    if request.param == "simulated":
        return lambda fn, size, *args: md.simulate(fn, size, args)
    pool: Pool = request.getfixturevalue("pool")
    return lambda fn, size, *args: pool.run(fn, size, *args, backend=request.param)


def descend(model: nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def test_the_case_of_the_documentation(run: Run) -> None:
    """Four ranks, one step more on rank 3: there the gradient is a quarter; weights are equal."""

    def program() -> tuple[list[float], float]:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        nn.init.ones_(model.module.weight)
        gradients = []
        with model.join():
            for _ in range(3 if md.get_rank() == 3 else 2):
                model.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                descend(model)
                gradients.append(model.module.weight.grad.item())
        return gradients, model.module.weight.item()

    found = run(program, 4)
    assert [gradients for gradients, _ in found] == [[1.0, 1.0]] * 3 + [[1.0, 1.0, 0.25]]
    weights = [weight for _, weight in found]
    assert weights == [weights[0]] * 4
    assert weights[0] == pytest.approx(0.775)


class Net(nn.Module):
    """Parameters in several buckets, and buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2))
        self.register_buffer("num_forwards", torch.zeros(1))
        self.num_forwards: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        return self.layers(x)


def train(
    num_steps: list[int],
    divides_by_all: bool,
    num_epochs: int,
    synchronize: Callable[[], None] = lambda: None,
    hook: str = "",
) -> dict[str, list[float]]:
    """Some epochs of uneven batches, over two buckets; the state after the last."""
    rank = md.get_rank()
    torch.manual_seed(0)
    model = md.DDP(Net().double(), bucket_cap_mb=0.0001)
    if hook:
        state = None
        if hook == "powerSGD_hook":
            state = md.comm_hooks.PowerSGDState(None, start_powerSGD_iter=100)
        model.register_comm_hook(state, getattr(md.comm_hooks, hook))
    for epoch in range(num_epochs):
        with model.join(divide_by_initial_world_size=divides_by_all):
            for step in range(num_steps[rank]):
                model.zero_grad()
                model(batch(epoch, step, rank)).square().mean().backward()
                synchronize()
                descend(model)
    model.eval()
    return {name: one.flatten().tolist() for name, one in model.module.state_dict().items()}


def batch(epoch: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * epoch + 10 * step + rank)
    return torch.randn(2, 3, dtype=torch.float64, generator=generator)


def oracle(num_steps: list[int], divides_by_all: bool, num_epochs: int) -> dict[str, list[float]]:
    """One model; each step's gradient is the sum over ranks with data, divided."""
    torch.manual_seed(0)
    net = Net().double()
    for epoch in range(num_epochs):
        for step in range(max(num_steps)):
            active_ranks = [rank for rank, count in enumerate(num_steps) if step < count]
            net.zero_grad()
            before = net.num_forwards.clone()
            losses = [net(batch(epoch, step, rank)).square().mean() for rank in active_ranks]
            net.num_forwards.copy_(before + 1)
            divisor = len(num_steps) if divides_by_all else len(active_ranks)
            (sum(losses) / divisor).backward()
            descend(net)
    return {name: one.flatten().tolist() for name, one in net.state_dict().items()}


@pytest.mark.parametrize("divides_by_all", [True, False])
@pytest.mark.parametrize("num_steps", [[3, 1, 2], [0, 3, 3], [0, 0, 4], [1, 1, 1], [0, 0, 0]])
def test_steps_equal_those_of_one_model(num_steps: list[int], divides_by_all: bool) -> None:
    """Two epochs, so that what joined ranks have learned of buckets serves on the next."""
    expected = oracle(num_steps, divides_by_all, 2)
    for found in md.simulate(train, 3, (num_steps, divides_by_all, 2)):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name


def test_steps_equal_those_of_one_model_on_processes(run: Run) -> None:
    num_steps = [0, 3, 1]
    expected = oracle(num_steps, False, 2)
    for found in run(train, 3, num_steps, False, 2):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name


@pytest.mark.parametrize("hook", ["allreduce_hook", "powerSGD_hook"])
def test_communication_hooks_run_on_ranks_without_data(hook: str) -> None:
    num_steps = [0, 3, 2]
    expected = oracle(num_steps, True, 2)
    for found in md.simulate(train, 3, (num_steps, True, 2, lambda: None, hook)):
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name


def test_a_compressing_hook_keeps_replicas_equal() -> None:
    arguments = ([0, 3, 2], True, 2, lambda: None, "quantization_pertensor_hook")
    first, second, third = md.simulate(train, 3, arguments)
    assert first == second == third


def test_two_models_of_one_context() -> None:
    def program() -> list[float]:
        first, second = (md.DDP(nn.Linear(1, 1, bias=False)) for _ in range(2))
        for model in (first, second):
            nn.init.ones_(model.module.weight)
        found = []
        with md.Join([first, second]):
            for _ in range(1 + md.get_rank()):
                for model in (first, second):  # one after the other, as the hooks run
                    model.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                found += [model.module.weight.grad.item() for model in (first, second)]
        return found

    assert md.simulate(program, 2) == [[1.0, 1.0], [1.0, 1.0, 0.5, 0.5]]


def test_evaluation_inside_the_context() -> None:
    """Forwards without gradients take buffers; so do forwards that no backward follows."""

    def program() -> list[float]:
        model = md.DDP(Net())
        with model.join():
            for _ in range(md.get_rank()):
                with torch.no_grad():
                    model(torch.ones(1, 3))
                model(torch.ones(1, 3)).sum().backward()
        return model.module.num_forwards.tolist()

    assert md.simulate(program, 3) == [[4.0]] * 3


def test_a_rank_that_joined_has_the_averages() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        with model.join():
            for turn in range(1 + md.get_rank()):
                model.zero_grad()
                model(torch.full((1, 1), 1.0 + turn)).sum().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2) == [1.0, 1.0]  # of the second step: (0 + 2) / 2


def test_parameters_without_gradients_are_named_on_all_ranks() -> None:
    def program() -> str:
        model = md.DDP(Two())
        try:
            with model.join():
                for _ in range(2 * md.get_rank()):
                    model(torch.ones(1, 1), use="left").backward()
        except GradientError as error:
            return error.found or ""
        return "no error"

    texts = md.simulate(program, 3)
    for text in texts:
        assert "right.weight" in text
        assert "rank 0" not in text


def test_throwing_is_torchs() -> None:
    def program() -> str:
        model = md.DDP(nn.Linear(1, 1))
        try:
            with model.join(throw_on_early_termination=True):
                for _ in range(1 + md.get_rank()):
                    model(torch.ones(1, 1)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    first, second = md.simulate(program, 2)
    assert "rank 0 ran out of data" in first
    assert "throw_on_early_termination" in second


def test_a_model_is_copied_inside_a_context() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        with model.join():
            clone = copy.deepcopy(model)
        clone(torch.ones(1, 1)).sum().backward()
        return clone.module.weight.grad.item()

    assert md.simulate(program, 2) == [1.0, 1.0]


@pytest.mark.parametrize("num_steps", [[3, 1, 2], [0, 3, 3]])
def test_where_flags_are_read_late(num_steps: list[int]) -> None:
    """On an accelerator, for which another stands in, they are read at the next forward."""
    expected = oracle(num_steps, True, 2)

    with in_place_of_the_cpu() as here:
        results = md.simulate(train, 3, (num_steps, True, 2, lambda: here().synchronize()))
    for found in results:
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9), name


class Moody(nn.Module):
    """A layer used twice, one that is used in some steps alone, one never, and a sparse one."""

    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, sparse=is_sparse)
        self.twice = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        x = self.twice(self.twice(self.rows(x)).tanh())
        return self.sometimes(x) if uses else x


def moody(
    num_steps: list[int], epochs: int, is_sparse: bool, settings: dict[str, Any]
) -> list[list[float]]:
    """Train with unequally many steps; a third of them synchronised only at the next one."""
    torch.manual_seed(0)
    rank = md.get_rank()
    model = md.DDP(Moody(is_sparse=is_sparse).double(), bucket_cap_mb=0.0001, **settings)
    for epoch in range(epochs):
        with model.join(divide_by_initial_world_size=False):
            for step in range(num_steps[(rank + epoch) % len(num_steps)]):
                model.zero_grad()
                x = torch.tensor([(rank + step) % 5, (2 * rank + epoch) % 5])
                uses = (step + rank) % 2 == 0 or not settings.get("find_unused_parameters", False)
                if step == 1:
                    with model.no_sync():
                        model(x, uses).square().mean().backward()
                model(x, uses).square().mean().backward()
                with torch.no_grad():
                    for one in model.parameters():
                        if one.grad is not None:
                            one -= 0.1 * one.grad
    return [one.flatten().tolist() for one in model.module.state_dict().values()]


def moody_alone(
    num_steps: list[int], epochs: int, is_sparse: bool, settings: dict[str, Any]
) -> list[list[float]]:
    torch.manual_seed(0)
    net = Moody(is_sparse=is_sparse).double()
    size = len(num_steps)
    for epoch in range(epochs):
        counts = [num_steps[(rank + epoch) % size] for rank in range(size)]
        for step in range(max(counts)):
            active_ranks = [rank for rank in range(size) if step < counts[rank]]
            net.zero_grad()
            for rank in active_ranks:
                x = torch.tensor([(rank + step) % 5, (2 * rank + epoch) % 5])
                uses = (step + rank) % 2 == 0 or not settings.get("find_unused_parameters", False)
                for _ in range(2 if step == 1 else 1):
                    (net(x, uses).square().mean() / len(active_ranks)).backward()
            with torch.no_grad():
                for one in net.parameters():
                    if one.grad is not None:
                        one -= 0.1 * one.grad
    return [one.flatten().tolist() for one in net.state_dict().values()]


@pytest.mark.parametrize("num_steps", [[0, 3], [0, 4, 2], [1, 0, 3]])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": False},
    ],
)
def test_what_is_learned_of_backwards_stays_equal(
    num_steps: list[int], is_sparse: bool, settings: dict[str, Any]
) -> None:
    """The rank without data is another one in each epoch: what all know must fit on all."""
    arguments = (num_steps, 4, is_sparse, settings)
    expected = moody_alone(*arguments)
    for found in md.simulate(moody, len(num_steps), arguments):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


def test_ranks_without_data_move_no_parameter_behind_the_others() -> None:
    """What every rank with data used does not trail: only what none of them had a gradient of."""

    def program() -> list[str]:
        model = md.DDP(Moody(is_sparse=False), find_unused_parameters=True)
        with model.join():
            for _ in range(3 * md.get_rank()):
                model(torch.tensor([1]), True).sum().backward()
        names = [name for name, _ in model.module.named_parameters()]
        return [
            names[index]
            for index in sorted(model.reducer.reducer_state.expected_gradients.deferred)
        ]

    assert md.simulate(program, 3) == [["never.weight", "never.bias"]] * 3


def test_buckets_lie_as_gradients_come_on_a_rank_with_data() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second, self.first = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    def program() -> list[int]:
        model = md.DDP(Crossed())
        with model.join():
            for _ in range(2 * md.get_rank()):
                model(torch.ones(1, 1)).sum().backward()
        return [index for bucket in model.reducer.buckets for index in bucket.indices]

    assert md.simulate(program, 2) == [[0, 1], [0, 1]]  # backwards, first comes last


@pytest.mark.parametrize("kind", ["batch norm", "no backward", "two forwards"])
def test_calls_that_the_hook_does_not_make_raise_on_all_ranks(run: Run, kind: str) -> None:
    def program() -> str:
        layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
        net = nn.Sequential(*layers if kind == "batch norm" else layers[::2])
        if kind == "batch norm":
            net = md.SyncBatchNorm.convert_sync_batchnorm(net)
        model = md.DDP(net)
        try:
            with model.join():
                for _ in range(2 * md.get_rank()):
                    loss = model(torch.ones(4, 3)).sum()
                    if kind == "two forwards":
                        loss = loss + model(torch.ones(4, 3)).sum()
                    if kind != "no backward":
                        loss.backward()
        except md.JoinError as error:
            return str(error)
        return "no error"

    for text in run(program, 2):
        assert text.startswith("a rank that joined does not make this call"), text
        assert "rank 0: " in text
        assert "rank 1: " in text


def test_a_model_that_a_context_does_not_know_raises_on_all_ranks(run: Run) -> None:
    def program() -> str:
        model, other = md.DDP(nn.Linear(1, 1)), md.DDP(nn.Linear(1, 1))
        try:
            with model.join():
                for _ in range(2 * md.get_rank()):
                    other(torch.ones(1, 1)).sum().backward()
        except md.JoinError as error:
            return str(error)
        return "no error"

    for text in run(program, 2):
        assert "md.Join (which ranks have data)" in text
        assert "float32" in text


def test_training_goes_on_after_an_exception_in_a_context(run: Run) -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        with suppress(KeyError), model.join(divide_by_initial_world_size=False):
            model(torch.ones(1, 1)).sum().backward()
            raise KeyError
        model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        return model.module.weight.grad.item()

    assert run(program, 2) == [1.0, 1.0]

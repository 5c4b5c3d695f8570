"""Training where flags are read late: ranks that lack gradients, or whose backward was interrupted.

A stand-in shows it on the CPU, see ``stand_in_accelerator``; behind it stand the tests on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.ddp.device_streams import DeferredReader
from meshdist.errors import GradientError
from tests.ddp.models import Fragile, Two
from tests.ddp.no_synchronization import no_synchronization
from tests.ddp.stand_in_accelerator import in_place_of_the_cpu
from tests.pool import Pool

Run = Callable[..., list[Any]]

INTERRUPTED = (
    "the gradients of this step are wrong: a backward was interrupted\n"
    "  where:    rank {rank}, in the world\n"
    "  expected: backward() to succeed on every rank or fail on every rank\n"
    "  found:    rank {culprit}: an exception was raised inside backward()\n"
    "  fix:      remove the cause of the exception on those ranks, or skip this step on "
    "every rank: call zero_grad() and start a new step"
)
LACKING = (
    "parameters got no gradient in the backward since the last forward\n"
    "  where:    rank {rank}, in the world\n"
    "  expected: every rank's loss depends on every parameter that requires a gradient\n"
    "  found:    rank {culprit}: right.weight (index 1)\n"
    "  fix:      use all outputs of the module in the loss, or pass "
    "find_unused_parameters=True, or call requires_grad_(False) on unused parameters before "
    "you wrap the model; freeze and unfreeze the same parameters on every rank"
)


@pytest.fixture(
    params=[
        pytest.param(("simulated", "cpu"), id="simulated"),
        pytest.param(("gloo", "cpu"), id="gloo"),
        pytest.param(("gloo", "cuda"), id="gloo-cuda", marks=pytest.mark.gpu),
    ]
)
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` calls ``fn(device_type, *args)`` on every rank."""
    backend, device_type = request.param

    def late(fn: Callable[..., Any], *args: Any) -> Any:
        with contextlib.nullcontext() if device_type == "cuda" else in_place_of_the_cpu():
            return fn(device_type, *args)

    def simulate(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        with in_place_of_the_cpu():
            return md.simulate(fn, num_ranks, (device_type, *args))

    def start(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        pool: Pool = request.getfixturevalue("pool")
        return pool.run(late, num_ranks, fn, *args)

    return simulate if backend == "simulated" else start


def fragile(device: str) -> tuple[md.DDP, torch.Tensor]:
    """A model in several buckets, and this rank's input."""
    model = md.DDP(Fragile().to(device), bucket_cap_mb=1e-6)
    return model, torch.full((1, 1), 1.0 + md.get_rank(), device=device)


def backward(model: md.DDP, x: torch.Tensor, *, fails: bool) -> None:
    """One backward, in which this rank's exception is caught."""
    loss = model(x, fails).sum()
    with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
        loss.backward()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("what_follows", ["forward", "evaluation", "check"])
def test_all_ranks_raise_where_they_look_next_after_one_was_interrupted(
    run: Run, num_ranks: int, what_follows: str
) -> None:
    def program(device: str) -> tuple[str, list[float]]:
        model, x = fragile(device)
        backward(model, x, fails=md.get_rank() == 1)
        look = model.check_gradients if what_follows == "check" else partial(model, x)
        with (
            torch.set_grad_enabled(what_follows != "evaluation"),
            pytest.raises(GradientError) as error,
        ):
            look()
        assert all(p.grad is None for p in model.parameters())
        backward(model, x, fails=False)
        model(x)
        return str(error.value), [p.grad.item() for p in model.parameters()]

    mean = (1 + num_ranks) / 2
    for rank, (text, grads) in enumerate(run(program, num_ranks)):
        assert text == INTERRUPTED.format(rank=rank, culprit=1)
        assert grads == [mean, mean]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("is_checked", [True, False])
def test_all_ranks_raise_where_they_look_next_after_one_lacked_a_gradient(
    run: Run, num_ranks: int, is_checked: bool
) -> None:
    def program(device: str) -> tuple[str, list[float], list[float]]:
        model = md.DDP(Two().to(device))
        x = torch.full((1, 1), 6.0, device=device)
        model(x, use="left" if md.get_rank() == 1 else "both").backward()
        with pytest.raises(GradientError) as error:
            model.check_gradients() if is_checked else model(x)
        grads = [p.grad.item() for p in model.parameters()]
        model.zero_grad()
        model(x).backward()
        model(x)
        return str(error.value), grads, [p.grad.item() for p in model.parameters()]

    for rank, (text, grads, later) in enumerate(run(program, num_ranks)):
        assert text == LACKING.format(rank=rank, culprit=1)
        assert grads == [6.0, 6.0 * (num_ranks - 1) / num_ranks]
        assert later == [6.0, 6.0]


def test_a_parameter_that_no_rank_used_is_found_too(run: Run) -> None:
    def program(device: str) -> tuple[str, float]:
        model = md.DDP(Two().to(device))
        x = torch.ones(1, 1, device=device)
        model(x, use="left").backward()
        with pytest.raises(GradientError) as error:
            model(x)
        unused = model.module.right.weight.grad
        return str(error.value), unused.item()

    for text, grad in run(program, 2):
        assert "found:    ranks 0-1: right.weight (index 1)\n" in text
        assert grad == 0.0


def test_ranks_that_went_on_raise_at_a_second_backward_without_a_forward(run: Run) -> None:
    def program(device: str) -> tuple[str, list[float]]:
        model, x = fragile(device)
        is_culprit = md.get_rank() == 0
        losses = [model(x, is_culprit).sum(), model(x).sum()]
        with pytest.raises(ArithmeticError) if is_culprit else contextlib.nullcontext():
            losses[0].backward()
        with pytest.raises(GradientError) as error:
            model(x) if is_culprit else losses[1].backward()
        backward(model, x, fails=False)
        model(x)
        return str(error.value), [p.grad.item() for p in model.parameters()]

    for rank, (text, grads) in enumerate(run(program, 3)):
        assert text == INTERRUPTED.format(rank=rank, culprit=0)
        assert grads == [2.0, 2.0]


def checked_steps(
    model: md.DDP, num_steps: int, backward: Callable[[int], object]
) -> tuple[list[int], list[float]]:
    """Train with a check in each step: the steps that were skipped, and the last parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skipped = []
    for step in range(num_steps):
        optimizer.zero_grad()
        try:
            with contextlib.suppress(ArithmeticError, TypeError):
                backward(step)
            model.check_gradients()
        except GradientError:
            skipped.append(step)
        else:
            optimizer.step()
    return skipped, [p.item() for p in model.parameters()]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_with_a_check_all_ranks_skip_the_step_of_a_rank_that_failed(
    run: Run, num_ranks: int, where: str
) -> None:
    def program(device: str) -> tuple[list[int], list[float]]:
        model, x = fragile(device)

        def step_backward(step: int) -> None:
            fails = step in (0, 2) and md.get_rank() == 0
            out = model(*([x, x, x] if fails and where == "forward" else [x, fails]))
            if fails and where == "loss":
                raise ArithmeticError
            out.sum().backward()

        return checked_steps(model, 5, step_backward)

    found = run(program, num_ranks)
    assert found == found[:1] * num_ranks
    assert found[0][0] == [0, 2]


def test_a_step_that_was_interrupted_here_and_lacks_there_is_one_error(run: Run) -> None:
    def program(device: str) -> tuple[list[int], list[float]]:
        model = md.DDP(Two().to(device))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        x, is_culprit, now = torch.ones(1, 1, device=device), md.get_rank() == 0, [0]

        def fail(grad: torch.Tensor) -> torch.Tensor:
            if now == [1] and is_culprit:
                raise ArithmeticError
            return grad

        def step_backward(step: int) -> None:
            now[:] = [step]
            use = "left" if step == 1 and not is_culprit else "both"
            model(x * 10**step, use=use).backward()

        model.module.right.weight.register_hook(fail)
        return checked_steps(model, 4, step_backward)

    found = run(program, 2)
    assert found[0] == found[1]
    assert found[0][0] == [1]


def test_a_check_without_any_backward_keeps_gradients(run: Run) -> None:
    def program(device: str) -> list[float | None]:
        model, x = fragile(device)
        backward(model, x, fails=False)
        model.check_gradients()
        model(x)  # one that no backward follows, on any rank
        model.check_gradients()
        model.check_gradients()
        return [None if p.grad is None else p.grad.item() for p in model.parameters()]

    assert run(program, 2) == [[1.5, 1.5]] * 2


def test_every_backward_that_was_interrupted_on_all_ranks_is_dropped(run: Run) -> None:
    def program(device: str) -> list[float]:
        model, x = fragile(device)
        backward(model, x, fails=False)
        backward(model, x, fails=True)
        backward(model, x, fails=False)
        model.check_gradients()
        return [p.grad.item() for p in model.parameters()]

    assert run(program, 2) == [[1.5, 1.5]] * 2


# -- one rank over NCCL ----------------------------------------------------------------------------


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    md.init_process_group("nccl", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        yield
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("as_views", [True, False])
def test_a_backward_on_a_gpu_never_waits_for_it(as_views: bool) -> None:
    model = md.DDP(Two().cuda(), gradient_as_bucket_view=as_views)
    x = torch.ones(1, 1, device="cuda")
    for _ in range(2):
        model(x).backward()
    with no_synchronization():
        model.zero_grad()
        model(x).backward()
        model.zero_grad()
        model(x, use="left").backward()
    with pytest.raises(GradientError) as error:
        model(x)
    assert "found:    rank 0: right.weight (index 1)\n" in str(error.value)
    assert [p.grad.item() for p in model.parameters()] == [1.0, 0.0]


class Late(torch.autograd.Function):
    """The gradient comes some milliseconds later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(20_000_000)
        return grad.clone()


class TwoStreams(nn.Module):
    """One half runs on a stream of its own, where its gradients come late."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.left = nn.Linear(size, size)
        self.right = nn.Linear(size, size)
        self.side = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.left(x)
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            right = Late.apply(self.right(x))
        torch.cuda.current_stream().wait_stream(self.side)
        return left + right


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("size", [4, 300])  # weights that move in with their bucket, and at once
def test_gradients_of_several_streams_are_all_in_before_a_bucket_goes(size: int) -> None:
    module = TwoStreams(size).cuda()
    x = torch.ones(2, size, device="cuda")
    model = md.DDP(module)
    for step in range(1, 6):
        model.zero_grad()
        model(x * step).sum().backward()
        for half in (module.left, module.right):
            assert torch.equal(half.weight.grad, torch.full_like(half.weight, 2.0 * step))
            assert torch.equal(half.bias.grad, torch.full_like(half.bias, 2.0))


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
def test_a_captured_step_reads_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[bool] = []
    note = DeferredReader.note

    def telling(reader: DeferredReader, sums: torch.Tensor) -> bool:
        noted.append(note(reader, sums))
        return noted[-1]

    monkeypatch.setattr(DeferredReader, "note", telling)
    model = md.DDP(Fragile().cuda(), bucket_cap_mb=1e-6)
    x = torch.ones(1, 1, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
        model.check_gradients()
    assert noted == [True, True, True, False]
    x.fill_(3.0)
    graph.replay()
    assert [p.grad.item() for p in model.parameters()] == [3.0, 3.0]
    model.zero_grad()
    model(x).sum().backward()
    model.check_gradients()
    assert noted[-1] is True


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
def test_a_step_that_lacks_gradients_can_be_captured() -> None:
    model = md.DDP(Two().cuda(), find_unused_parameters=True)
    x = torch.ones(1, 1, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(x, use="left").backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.zero_grad(set_to_none=False)
        model(x, use="left").backward()
    x.fill_(3.0)
    graph.replay()
    assert model.module.left.weight.grad.item() == 3.0
    model.zero_grad()
    model(x, use="left").backward()
    assert model.module.left.weight.grad.item() == 3.0


@pytest.mark.gpu
@pytest.mark.usefixtures("nccl")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_no_graph_is_captured_in_the_first_steps() -> None:
    model = md.DDP(Fragile().cuda())
    x = torch.ones(1, 1, device="cuda")
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(GradientError, match="before the buckets are rebuilt"), capture:
        model(x)
    model(x).sum().backward()
    assert [p.grad.item() for p in model.parameters()] == [1.0, 1.0]

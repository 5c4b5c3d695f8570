"""Training replicas equals training one model on the whole batch; float64, so to rounding."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.ddp.gradient_hooks import tensors_in
from meshdist.distributed import ProcessGroup
from meshdist.errors import (
    ArgumentError,
    GradientError,
    KindError,
    MeshError,
    MismatchError,
)
from tests.ddp.models import Fragile, Two
from tests.inner import flat_sums
from tests.pool import Pool

Batch = tuple[torch.Tensor, torch.Tensor]
Run = Callable[..., list[Any]]


@pytest.fixture(params=["simulated", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` on simulated ranks, and on processes over Gloo."""
    if request.param == "gloo":
        pool: Pool = request.getfixturevalue("pool")
        return pool.run

    def simulate(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        return md.simulate(fn, num_ranks, args)

    return simulate


class Net(nn.Module):
    """Layers used in another order than they are made, a weight used twice, a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)
        self.first = nn.Linear(5, 6)
        self.shared = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.shared.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(x) * self.frozen)
        return self.last(torch.tanh(self.again(x)))


def made(kind: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def batches(num_steps: int, size: int = 12) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    kwargs: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return [
        (torch.randn(size, 5, **kwargs), torch.randn(size, 2, **kwargs)) for _ in range(num_steps)
    ]


def train(
    model: nn.Module, steps: list[Batch], *, part: slice, set_to_none: bool, num_backwards: int
) -> None:
    """SGD with momentum; several backwards a step add up."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9
    )
    for x, y in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(num_backwards):
            F.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def assert_equal_states(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-12, atol=1e-13)


def train_replicas(
    kind: Callable[[], nn.Module], set_to_none: bool, as_views: bool, num_backwards: int, cap: Any
) -> dict[str, torch.Tensor]:
    rank, size = md.get_rank(), md.get_world_size()
    model = md.DDP(made(kind, seed=rank), gradient_as_bucket_view=as_views, bucket_cap_mb=cap)
    part = slice(rank, None, size)
    train(model, batches(4), part=part, set_to_none=set_to_none, num_backwards=num_backwards)
    return state_of(model.module)


@pytest.mark.parametrize("num_backwards", [1, 3])
@pytest.mark.parametrize("cap", [None, 1e-4, 3e-4])
@pytest.mark.parametrize(
    ("num_ranks", "set_to_none", "as_views"),
    [(1, True, True), (2, True, True), (2, False, False), (3, False, True), (4, True, False)],
)
def test_training_equals_one_device_with_the_whole_batch(
    num_ranks: int, num_backwards: int, cap: float | None, set_to_none: bool, as_views: bool
) -> None:
    whole = made(Net)
    train(whole, batches(4), part=slice(None), set_to_none=set_to_none, num_backwards=num_backwards)
    states = md.simulate(
        train_replicas, num_ranks, (Net, set_to_none, as_views, num_backwards, cap)
    )
    for state in states:
        assert_equal_states(state, state_of(whole))
        assert all(torch.equal(state[name], states[0][name]) for name in state)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_training_over_gloo_equals_one_device(pool: Pool, num_ranks: int) -> None:
    whole = made(Net)
    train(whole, batches(4), part=slice(None), set_to_none=True, num_backwards=2)
    for state in pool.run(train_replicas, num_ranks, Net, True, True, 2, 3e-4):
        assert_equal_states(state, state_of(whole))


def test_torchs_own_wrapper_gives_the_same_gradients(pool: Pool, tmp_path: Path) -> None:
    def program() -> None:
        rank, size = md.get_rank(), md.get_world_size()
        torch.distributed.init_process_group(
            "gloo", f"file://{tmp_path}/meeting", rank=rank, world_size=size
        )
        try:
            ours = md.DDP(made(Net), bucket_cap_mb=3e-4)
            theirs = torch.nn.parallel.DistributedDataParallel(made(Net), bucket_cap_mb=3e-4)
            assert ours.state_dict().keys() == theirs.state_dict().keys()
            for x, y in batches(3):
                for model in (ours, theirs):
                    F.mse_loss(model(x[rank::size]), y[rank::size]).backward()
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-14)
            # torch's reducer must not be what keeps torch's group alive: the group's thread may
            # need the interpreter while the reducer's end, which holds it, waits for the thread.
            del theirs, model
            gc.collect()
        finally:
            torch.distributed.destroy_process_group()

    pool.run(program, 3)


def test_large_gradients_go_another_way_and_agree_too() -> None:
    def wide() -> nn.Module:  # its first weight is 120 KiB, its biases are small
        return nn.Sequential(nn.Linear(5, 3000), nn.Tanh(), nn.Linear(3000, 2))

    whole = made(wide)
    train(whole, batches(4), part=slice(None), set_to_none=False, num_backwards=2)
    for as_views in (True, False):
        for state in md.simulate(train_replicas, 3, (wide, False, as_views, 2, 0.05)):
            assert_equal_states(state, state_of(whole))


def test_replicas_stay_bitwise_equal_in_float32(run: Run) -> None:
    def program() -> list[torch.Tensor]:
        model = md.DDP(Net(), bucket_cap_mb=1e-4)
        optimizer = torch.optim.Adam(p for p in model.parameters() if p.requires_grad)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(3, 5) + md.get_rank()).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    first, *others = run(program, 3)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# -- what .grad is --------------------------------------------------------------------------------


def one_weight() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_a_summed_loss_gives_gradients_smaller_by_the_number_of_ranks() -> None:
    data = torch.tensor([[1.0], [2.0], [3.0], [6.0]])

    def program(reduce: str) -> float:
        model = md.DDP(one_weight())
        getattr(model(data[md.get_rank() :: 2]), reduce)().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2, ("mean",)) == [3.0, 3.0]  # one device: mean 3
    assert md.simulate(program, 2, ("sum",)) == [6.0, 6.0]  # one device: sum 12


def test_every_backward_averages_also_on_a_retained_graph(run: Run) -> None:
    def program() -> list[float]:
        model = md.DDP(one_weight())
        weight = model.module.weight
        loss = model(torch.tensor([[1.0 + md.get_rank()]])).sum()
        loss.backward(retain_graph=True)
        seen = [weight.grad.item()]
        loss.backward()
        seen.append(weight.grad.item())
        # two forwards, then their two backwards
        weight.grad = None
        losses = [model(torch.tensor([[f + md.get_rank()]])).sum() for f in (1.0, 10.0)]
        for loss in losses:
            loss.backward()
            seen.append(weight.grad.item())
        # two forwards in one loss
        weight.grad = None
        (model(torch.ones(1, 1)) * model(torch.full((1, 1), 2.0 + md.get_rank()))).backward()
        return [*seen, weight.grad.item()]

    # 1 and 2 average to 1.5; 10 and 11 to 10.5; d(w * 2 w) = 4 and d(w * 3 w) = 6
    assert run(program, 2) == [[1.5, 3.0, 1.5, 12.0, 5.0]] * 2


def test_gradients_are_views_into_the_buckets_unless_asked_otherwise() -> None:
    def program(as_views: bool) -> list[bool]:
        model = md.DDP(Net(), gradient_as_bucket_view=as_views)
        results = []
        for set_to_none in (True, False):
            for _ in range(3):
                model(torch.randn(2, 5)).sum().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(grads) == 7
            storages = {grad.untyped_storage().data_ptr() for grad in grads}
            results.append(len(storages) == 1)
            model.zero_grad(set_to_none=set_to_none)
        return results

    assert md.simulate(program, 2, (True,)) == [[True, True]] * 2
    assert md.simulate(program, 2, (False,)) == [[False, False]] * 2


def test_gradients_given_by_hand_are_averaged_with_the_next_backward() -> None:
    def program() -> float:
        model = md.DDP(one_weight())
        model.module.weight.grad = torch.full((1, 1), 10.0 * md.get_rank())
        model(torch.full((1, 1), 2.0)).sum().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2) == [7.0, 7.0]


def test_dtypes_may_be_mixed_and_complex(run: Run) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.complex64):
                name = str(dtype).replace("torch.", "of_")
                self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype)))

        def forward(self, factor: complex) -> torch.Tensor:
            return sum((p * factor).sum().abs().float() for p in self.parameters())

    def program() -> dict[str, list[complex]]:
        model = md.DDP(Mixed())
        factors = (1 + 1j, 2.0)
        model(factors[md.get_rank()] if md.get_rank() else 1.0).backward()
        return {name: p.grad.tolist() for name, p in model.module.named_parameters()}

    expected = [1.5] * 3
    names = ["of_float16", "of_float32", "of_bfloat16", "of_complex64"]
    assert run(program, 2) == [dict.fromkeys(names, expected)] * 2


def test_views_keep_a_channels_last_layout() -> None:
    def program() -> tuple[bool, list[Any]]:
        torch.manual_seed(0)
        model = nn.Conv2d(2, 3, 2).double().to(memory_format=torch.channels_last)
        whole = copy.deepcopy(model)
        wrapped = md.DDP(model)
        x = torch.randn(4, 2, 3, 3, dtype=torch.float64)
        wrapped(x[md.get_rank() :: 2]).mean().backward()
        whole(x).mean().backward()
        torch.testing.assert_close(model.weight.grad, whole.weight.grad)
        return model.weight.grad.stride() == model.weight.stride(), model.weight.grad.tolist()

    first, second = md.simulate(program, 2)
    assert first[0]
    assert first == second


def test_autograd_grad_of_inputs_starts_nothing() -> None:
    def program() -> tuple[float, float]:
        model = md.DDP(one_weight())
        x = torch.full((1, 1), 3.0 + md.get_rank(), requires_grad=True)
        out = model(x).square().sum()
        if md.get_rank() == 0:
            torch.autograd.grad(out, x, retain_graph=True)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.sum().backward()  # of 2 w^2 x: 4 w x
        return slope.item(), model.module.weight.grad.item()

    assert md.simulate(program, 2) == [(6.0, 14.0), (8.0, 14.0)]


@pytest.mark.parametrize("hidden", [1, 3, 300])
def test_a_loss_of_a_derivative_of_the_outputs_is_averaged(hidden: int) -> None:
    """As of forces, which are slopes of an energy: it reaches parameters and no output."""

    def program() -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1, bias=False))
        model = md.DDP(net, find_unused_parameters=True)
        seen = []
        for number in range(3):
            model.zero_grad()
            x = torch.full((1, 1), 0.5 + number + md.get_rank(), requires_grad=True)
            (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            force.square().sum().backward()
            seen += [p.grad.clone() for p in net.parameters()]
            apart = []
            for rank in range(2):
                x = torch.full((1, 1), 0.5 + number + rank, requires_grad=True)
                (force,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
                apart.append(torch.autograd.grad(force.square().sum(), list(net.parameters())))
            torch.testing.assert_close(
                seen[-3:], [(a + b) / 2 for a, b in zip(*apart, strict=True)]
            )
        return seen

    first, second = md.simulate(program, 2)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_create_graph_is_rejected() -> None:
    def program() -> None:
        model = md.DDP(one_weight())
        model(torch.ones(1, 1)).square().sum().backward(create_graph=True)

    with pytest.raises(GradientError) as error:
        md.simulate(program, 2)
    assert "cannot reduce the gradients of backward(create_graph=True) over a group" in str(
        error.value
    )
    assert "use torch.autograd.grad(..., create_graph=True)" in str(error.value)


class Deep(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        for layer in self.layers:
            if self.use_reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return {"out": [x]}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_reduce_once(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    all_reduce = flat_sums.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        started.append(md.get_rank())
        return all_reduce(*args, **kwargs)

    monkeypatch.setattr(flat_sums, "all_reduce", counting)

    def program() -> int:
        torch.manual_seed(0)
        plain = Deep(None)
        model = md.DDP(Deep(use_reentrant), bucket_cap_mb=1e-5)
        model.load_state_dict(plain.state_dict())
        x = torch.randn(2, 2, generator=torch.Generator().manual_seed(1))
        for wrapped, part in ((plain, slice(None)), (model, slice(md.get_rank(), None, 2))):
            inputs = x[part].clone().requires_grad_()
            wrapped(inputs)["out"][0].mean().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        return len(list(model.parameters()))

    assert md.simulate(program, 2) == [6, 6]
    assert len(started) == 2 * 6  # one a parameter, on two ranks


# -- when a rank lacks a gradient, or fails --------------------------------------------------------


def test_a_parameter_used_on_some_ranks_gets_the_mean_and_the_next_forward_raises(run: Run) -> None:
    def program() -> tuple[list[Any], str, list[float]]:
        model = md.DDP(Two())
        x = torch.full((1, 1), 4.0)
        model(x, use="left" if md.get_rank() == 1 else "both").backward()
        grads = [p.grad.item() for p in model.parameters()]
        with pytest.raises(GradientError) as error:
            model(x)
        model.zero_grad()
        model(x).backward()  # once told, one may go on
        model(x)
        return grads, str(error.value), [p.grad.item() for p in model.parameters()]

    for rank, (grads, text, later) in enumerate(run(program, 4)):
        assert grads == [4.0, 3.0]
        assert later == [4.0, 4.0]
        assert text == (
            "parameters got no gradient in the backward since the last forward\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: every rank's loss depends on every parameter that requires a "
            "gradient\n"
            "  found:    rank 1: right.weight (index 1)\n"
            "  fix:      use all outputs of the module in the loss, or pass "
            "find_unused_parameters=True, or call requires_grad_(False) on unused parameters "
            "before you wrap the model; freeze and unfreeze the same parameters on every rank"
        )


@pytest.mark.parametrize("as_views", [True, False])
def test_a_parameter_unused_everywhere_keeps_no_gradient(run: Run, as_views: bool) -> None:
    def program() -> tuple[list[Any], str]:
        model = md.DDP(Two(), gradient_as_bucket_view=as_views)
        model(torch.ones(1, 1), use="right").backward()
        grads = [p.grad if p.grad is None else p.grad.item() for p in model.parameters()]
        with torch.no_grad():
            model(torch.ones(1, 1))  # only a forward that trains raises
        with pytest.raises(GradientError) as error:
            model(torch.ones(1, 1))
        return grads, str(error.value)

    for grads, text in run(program, 3):
        assert grads == [None, 1.0]
        assert "found:    ranks 0-2: left.weight (index 0)\n" in text


class TwoOutputs(Two):
    # Type: ignore[override].
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def test_parts_of_a_loss_may_be_differentiated_one_by_one() -> None:
    def program() -> list[float]:
        model = md.DDP(TwoOutputs())
        x = torch.full((1, 1), 1.0 + md.get_rank())
        left, right = model(x)
        for loss in (left, right * 3):
            loss.backward()
        model(x)
        return [p.grad.item() for p in model.parameters()]

    assert md.simulate(program, 2) == [[1.5, 4.5]] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_that_raises_on_every_rank_leaves_all_usable(
    run: Run, set_to_none: bool
) -> None:
    def program() -> list[float]:
        model = md.DDP(Fragile(), bucket_cap_mb=1e-6)
        x = torch.full((1, 1), 1.0 + md.get_rank())
        seen = []
        for fails in (True, False, False, True, False):
            model.zero_grad(set_to_none)
            try:
                model(x, fails).sum().backward()
            except ArithmeticError:
                continue
            seen += [p.grad.item() for p in model.parameters()]
        return seen

    assert run(program, 2) == [[1.5] * 6] * 2


def test_a_backward_that_raises_on_one_rank_raises_on_all_and_leaves_them_usable(run: Run) -> None:
    def program() -> tuple[str, list[float]]:
        model = md.DDP(Fragile(), bucket_cap_mb=1e-6)
        x = torch.full((1, 1), 1.0 + md.get_rank())
        is_culprit = md.get_rank() == 2
        with pytest.raises(ArithmeticError if is_culprit else GradientError) as error:
            model(x, is_culprit).sum().backward()
        assert is_culprit or all(p.grad is None for p in model.parameters())
        if is_culprit:
            with pytest.raises(GradientError) as error:
                model(x)
        model.zero_grad()
        model(x).sum().backward()
        model(x)
        return str(error.value), [p.grad.item() for p in model.parameters()]

    for rank, (text, grads) in enumerate(run(program, 3)):
        assert grads == [2.0, 2.0]
        assert text == (
            "the gradients of this step are wrong: a backward was interrupted\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: backward() to succeed on every rank or fail on every rank\n"
            "  found:    rank 2: an exception was raised inside backward()\n"
            "  fix:      remove the cause of the exception on those ranks, or skip this step "
            "on every rank: call zero_grad() and start a new step"
        )


def test_a_backward_that_raises_before_any_gradient_came_keeps_step_too(run: Run) -> None:
    def program() -> tuple[str, list[float]]:
        model = md.DDP(nn.Linear(1, 1))
        x = torch.full((1, 1), 1.0 + md.get_rank())
        is_culprit = md.get_rank() == 1
        out = model(x)
        if is_culprit:

            def fail(_: torch.Tensor) -> None:
                raise ArithmeticError

            out.register_hook(fail)
        with pytest.raises(ArithmeticError if is_culprit else GradientError) as error:
            out.sum().backward()
        if is_culprit:
            with pytest.raises(GradientError) as error:
                model(x)
        model.zero_grad()
        model(x).sum().backward()
        return str(error.value), [p.grad.item() for p in model.parameters()]

    for text, grads in run(program, 3):
        assert grads == [2.0, 1.0]
        assert "found:    rank 1: an exception was raised inside backward()" in text


@pytest.mark.parametrize("later", ["loss raises", "forward raises"])
def test_a_rank_may_raise_again_in_the_step_behind_a_backward_that_raised(
    run: Run, later: str
) -> None:
    def program() -> list[str]:
        is_culprit = md.get_rank() == 1
        model, found = md.DDP(Fragile(), bucket_cap_mb=1e-6), []
        for step in range(4):
            model.zero_grad()
            raised = "nothing"
            try:
                loss = model(torch.ones(1, 1), is_culprit and step == 1).sum()
                if is_culprit and step == 2:
                    if later == "forward raises":
                        model(torch.ones(1, 2))
                    raise ArithmeticError
                loss.backward()
            except GradientError as error:
                raised = error.found
            except (ArithmeticError, RuntimeError):
                pass
            try:
                model.check_gradients()
            except GradientError as error:
                raised = error.found
            found.append(raised)
        return found

    cut = "rank 1: an exception was raised inside backward()"
    absent = "rank 1: no backward reached the model after its forward"
    for found in run(program, 3):
        assert found == ["nothing", cut, absent, "nothing"]


def test_a_check_raises_what_the_next_forward_would_once(run: Run) -> None:
    def program() -> tuple[str, str, list[float]]:
        is_culprit = md.get_rank() == 1
        two, x = md.DDP(Two()), torch.full((1, 1), 1.0 + md.get_rank())
        two.check_gradients()
        two(x, use="left" if is_culprit else "both").backward()
        with pytest.raises(GradientError) as lacking:
            two.check_gradients()
        two(x).backward()
        two.check_gradients()
        fragile = md.DDP(Fragile(), bucket_cap_mb=1e-6)
        with pytest.raises(ArithmeticError if is_culprit else GradientError) as interrupted:
            fragile(x, is_culprit).sum().backward()
        if is_culprit:
            with pytest.raises(GradientError) as interrupted:
                fragile.check_gradients()
        fragile.check_gradients()
        fragile(x).sum().backward()
        grads = [p.grad.item() for p in fragile.parameters()]
        return str(lacking.value), str(interrupted.value), grads

    for lacking, interrupted, grads in run(program, 3):
        assert "found:    rank 1: right.weight (index 1)\n" in lacking
        assert "found:    rank 1: an exception was raised inside backward()\n" in interrupted
        assert grads == [2.0, 2.0]


def test_a_check_inside_a_backward_is_rejected() -> None:
    def program() -> str:
        model = md.DDP(one_weight())
        out = model(torch.ones(1, 1)).sum()
        out.register_hook(lambda _: model.check_gradients())
        with pytest.raises(GradientError) as error:
            out.backward()
        return str(error.value)

    assert md.simulate(program, 1) == [
        "cannot check gradients while a backward runs\n"
        "  where:    rank 0, in the world\n"
        "  fix:      call check_gradients() after backward() returns"
    ]


def test_a_second_backward_after_an_interrupted_one_needs_a_forward() -> None:
    def program() -> list[str]:
        model = md.DDP(Fragile(), bucket_cap_mb=1e-6)
        x = torch.ones(1, 1)
        texts = []
        for _ in range(2):
            out = model(x, fails=True).sum()
            with pytest.raises(ArithmeticError):
                out.backward(retain_graph=True)
            with pytest.raises(GradientError) as error:
                out.backward(retain_graph=True)
            texts.append(str(error.value))
        return texts

    for text in md.simulate(program, 2)[0]:
        assert text.startswith("a backward began before the previous one ended\n  where:    rank 0")
        assert "found:    an earlier backward that was interrupted, with no forward since" in text
        assert "fix:      run the forward again" in text


def test_a_module_is_wrapped_once_at_a_time() -> None:
    def program() -> tuple[str, list[float]]:
        module = nn.Linear(1, 1)
        first = md.DDP(module)
        with pytest.raises(GradientError) as error:
            md.DDP(nn.Sequential(nn.ReLU(), module))
        with pytest.raises(GradientError) as again_there:  # the first lives until that is made
            first = md.DDP(first.module)
        assert str(again_there.value) == str(error.value).removeprefix("1.")
        inner = first.module
        del first
        again = md.DDP(inner)
        again(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return str(error.value), [p.grad.item() for p in module.parameters()]

    for text, grads in md.simulate(program, 2):
        assert grads == [1.5, 1.0]
        assert text == (
            "1.weight belongs to another DistributedDataParallel\n"
            "  expected: a parameter in at most one DistributedDataParallel\n"
            "  fix:      wrap the module once; or delete the first wrapper and its outputs "
            "before you wrap again: module = ddp.module; del ddp"
        )


class Heads(nn.Module):
    """Two models that share a trunk, as one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(2, 2)
        self.heads = nn.ModuleDict({"first": nn.Linear(2, 1), "second": nn.Linear(2, 1)})

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.heads[name](self.trunk(x).tanh()).sum()


def test_models_that_share_a_trunk_are_wrapped_as_one_module(run: Run) -> None:
    def program(is_together: bool) -> tuple[str, list[torch.Tensor]]:
        both = Heads().double()
        first = md.DDP(nn.Sequential(both.trunk, both.heads["first"]))
        with pytest.raises(GradientError) as error:
            md.DDP(nn.Sequential(both.trunk, both.heads["second"]))
        del first
        model = md.DDP(both, find_unused_parameters=not is_together)
        x = torch.full((1, 2), 1.0 + md.get_rank(), dtype=torch.float64)
        for _ in range(3):
            model.zero_grad()
            if is_together:
                (model("first", x) + model("second", 2 * x)).backward()
            else:
                model("first", x).backward()
                model("second", 2 * x).backward()
        return str(error.value), [parameter.grad for parameter in both.parameters()]

    whole = Heads().double()
    for value in (1.0, 2.0):
        x = torch.full((1, 2), value, dtype=torch.float64)
        (whole("first", x) + whole("second", 2 * x)).div(2).backward()
    expected = [parameter.grad for parameter in whole.parameters()]
    for is_together in (True, False):
        for text, gradients in run(program, 2, is_together):
            torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
            assert text == (
                "0.weight belongs to another DistributedDataParallel\n"
                "  expected: a parameter in at most one DistributedDataParallel\n"
                "  fix:      put all models that share it into one module whose forward "
                "selects the model, and wrap that module; pass find_unused_parameters=True "
                "if a loss uses only one of them"
            )


# torch 2.11 and 2.12 warn once of this, also where check_invariants=False was passed.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_a_sparse_gradient_that_the_module_does_not_tell_of_is_rejected() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.embedding(x, self.table, sparse=True)

    def program(module: nn.Module) -> None:
        md.DDP(module)(torch.tensor([1])).sum().backward()

    md.simulate(program, 2, (nn.Embedding(4, 2, sparse=True),))
    with pytest.raises(GradientError) as error:
        md.simulate(program, 2, (Sparse(),))
    assert str(error.value) == (
        "table (index 0) has a sparse gradient\n"
        "  where:    rank 0, in the world\n"
        "  expected: dense gradients\n"
        "  found:    layout sparse_coo\n"
        "  fix:      create the embedding with sparse=False"
    )


# -- groups ---------------------------------------------------------------------------------------


class Sharded(nn.Module):
    """Columns of one weight over tp; the sum over tp is left out, so tp ranks differ."""

    def __init__(self, tp: md.DeviceMesh) -> None:
        super().__init__()
        whole = torch.arange(8, dtype=torch.float64).view(2, 4)
        self.weight = nn.Parameter(whole.chunk(tp.size(), dim=1)[tp.get_local_rank()].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).square().mean()


def test_only_the_named_axis_is_reduced(run: Run) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)

    def program() -> torch.Tensor:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = md.DDP(Sharded(mesh["tp"]), device_mesh=mesh["dp"])
        model(x[mesh.get_local_rank("dp")]).backward()
        return model.module.weight.grad

    grads = run(program, 4)
    whole = torch.arange(8, dtype=torch.float64).view(2, 4)
    for rank, grad in enumerate(grads):
        shard = whole.chunk(2, dim=1)[rank % 2].clone().requires_grad_()
        (x @ shard).square().mean().backward()
        torch.testing.assert_close(grad, shard.grad, rtol=1e-13, atol=0)


def test_several_axes_and_a_group_are_taken_as_one() -> None:
    def program(how: str) -> float:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        over = {
            "axes": {"device_mesh": mesh["dp", "cp"]},
            "group": {"process_group": mesh.get_group("cp")},
            "world": {"process_group": md.group.WORLD},
        }[how]
        model = md.DDP(one_weight(), **over)
        model(torch.full((1, 1), float(md.get_rank()))).sum().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 8, ("axes",)) == [3.0, 4.0] * 4  # 0 2 4 6, and 1 3 5 7
    assert md.simulate(program, 8, ("group",)) == [1.0, 2.0] * 2 + [5.0, 6.0] * 2
    assert md.simulate(program, 8, ("world",)) == [3.5] * 8


# -- construction, buffers, state -----------------------------------------------------------------


def differing(what: str, is_other: bool) -> nn.Module:
    if not is_other:
        return nn.Linear(2, 3)
    changed = nn.Linear(2, 3, bias=what != "number")
    if what == "shape":
        changed = nn.Linear(2, 4)
    elif what == "dtype":
        changed = changed.double()
    elif what == "strides":
        changed.weight = nn.Parameter(torch.zeros(2, 3).t())
    elif what == "frozen":
        changed.bias.requires_grad_(False)
    elif what == "buffer":
        changed.register_buffer("scale", torch.ones(1))
    return changed


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("shape", "weight: ranks 0, 2: (3, 2) float32; rank 1: (4, 2) float32\n"),
        ("shape", "bias: ranks 0, 2: (3,) float32; rank 1: (4,) float32\n"),
        ("dtype", "weight: ranks 0, 2: (3, 2) float32; rank 1: (3, 2) float64\n"),
        ("strides", "rank 1: (3, 2) float32 strides (1, 3)\n"),
        ("frozen", "bias: ranks 0, 2: (3,) float32; rank 1: (3,) float32 frozen\n"),
        ("number", "bias: ranks 0, 2: (3,) float32; rank 1: missing\n"),
        ("buffer", "scale: ranks 0, 2: missing; rank 1: (1,) float32\n"),
    ],
)
def test_models_that_differ_are_shown_on_every_rank(run: Run, what: str, found: str) -> None:
    def program() -> str:
        with pytest.raises(MismatchError) as error:
            md.DDP(differing(what, md.get_rank() == 1))
        return str(error.value)

    for text in run(program, 3):
        assert text.startswith(
            "DistributedDataParallel: the ranks wrap different Linear modules, or use "
            "different options\n"
            "  where:    group of ranks 0-2\n"
        )
        assert found in text
        assert (
            "  fix:      build and wrap the same model with equal arguments on every rank" in text
        )


@pytest.mark.parametrize(
    ("option", "others", "found"),
    [
        ({"bucket_cap_mb": 0.5}, {}, "bucket_cap_mb: ranks 0, 2: [1.0, 25.0]; rank 1: [0.5]\n"),
        ({"bucket_cap_mb_list": [1, 2]}, {"bucket_cap_mb": 1}, "rank 1: [1.0, 2.0]\n"),
        ({"find_unused_parameters": True}, {}, "find_unused_parameters: ranks 0, 2: False; rank 1"),
        ({"static_graph": True}, {}, "static_graph: ranks 0, 2: False; rank 1: True\n"),
        ({"skip_all_reduce_unused_params": True}, {}, "skip_all_reduce_unused_params: ranks 0, 2"),
        *(
            ({name: False}, {}, "broadcast_buffers, forward_sync_buffers: ranks 0, 2: True; rank 1")
            for name in ("broadcast_buffers", "forward_sync_buffers")
        ),
        (
            {"mixed_precision": md.MixedPrecision(reduce_dtype=torch.bfloat16)},
            {},
            "mixed_precision.reduce_dtype: ranks 0, 2: None; rank 1: bfloat16\n",
        ),
    ],
)
def test_options_that_differ_are_shown_on_every_rank(
    run: Run, option: dict[str, Any], others: dict[str, Any], found: str
) -> None:
    def program() -> str:
        with pytest.raises(MismatchError) as error:
            md.DDP(nn.Linear(2, 3), **(option if md.get_rank() == 1 else others))
        return str(error.value)

    for text in run(program, 3):
        assert found in text
        assert "with equal arguments" in text
        assert "weight" not in text  # what is equal is not shown


def test_delayed_parameters_that_differ_are_shown_by_name() -> None:
    def program() -> str:
        net = nn.Linear(2, 3)
        late, behind = (net.weight, net.bias) if md.get_rank() else (net.bias, net.weight)
        with pytest.raises(MismatchError) as error:
            md.DDP(
                net,
                delay_all_reduce_named_params=[("late", late)],
                param_to_hook_all_reduce=behind,
            )
        return str(error.value)

    for text in md.simulate(program, 2):
        assert "delay_all_reduce_named_params: rank 0: ['bias']; rank 1: ['weight']\n" in text
        assert "param_to_hook_all_reduce: rank 0: weight; rank 1: bias\n" in text


def test_how_gradients_lie_may_differ() -> None:
    def program() -> float:
        net = nn.Linear(1, 1, bias=False)
        model = md.DDP(net, gradient_as_bucket_view=md.get_rank() == 0)
        model(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return net.weight.grad.item()

    assert md.simulate(program, 2) == [1.5, 1.5]


class Counting(nn.Module):
    """A weight, and buffers of several dtypes that each forward changes."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), start))
        self.register_buffer("count", torch.tensor(int(start)))
        self.register_buffer("ratio", torch.full((3,), start, dtype=torch.float64))
        self.register_buffer("is_odd", torch.tensor([bool(start % 2)]), persistent=False)
        self.register_buffer("phase", torch.tensor([complex(0, start)]))

    def forward(self) -> torch.Tensor:
        self.count += 1
        self.ratio = self.ratio * 2  # another tensor from now on
        return self.weight

    def values(self) -> list[Any]:
        return [self.weight.item(), *(b.flatten()[0].item() for b in self.buffers())]


def test_parameters_and_buffers_come_from_the_groups_first_rank(run: Run) -> None:
    def program() -> list[list[Any]]:
        model = md.DDP(Counting(5.0 + md.get_rank()))
        seen = [model.module.values()]
        model.eval()
        model.module.count += 100 * md.get_rank()
        model()
        seen.append(model.module.values())
        model()
        seen.append(model.module.values())
        return seen

    assert (
        run(program, 3)
        == [[[5.0, 5, 5.0, True, 5j], [5.0, 6, 10.0, True, 5j], [5.0, 7, 20.0, True, 5j]]] * 3
    )


def test_buffers_can_be_left_alone() -> None:
    def program(options: dict[str, bool]) -> list[Any]:
        model = md.DDP(Counting(5.0 + md.get_rank()), **options)
        model.module.count += 100 * md.get_rank()
        model()
        return [model.module.weight.item(), model.module.count.item(), model.broadcast_buffers]

    def run(**options: bool) -> list[list[Any]]:
        return md.simulate(program, 2, (options,))

    assert run() == [[5.0, 6, True], [5.0, 6, True]]
    assert run(forward_sync_buffers=False) == [[5.0, 6, False], [5.0, 106, False]]
    assert run(broadcast_buffers=False) == [[5.0, 6, False], [5.0, 107, False]]
    assert run(broadcast_buffers=True) == [[5.0, 6, True], [5.0, 6, True]]
    assert run(init_sync=False) == [[5.0, 6, True], [6.0, 6, True]]


def test_batch_norm_has_the_first_ranks_statistics() -> None:
    def program() -> list[Any]:
        model = md.DDP(nn.BatchNorm1d(2))
        model(torch.randn(4, 2)).sum().backward()
        model(torch.randn(4, 2) + md.get_rank())
        mean = model.module.running_mean.clone()
        with torch.no_grad():
            model.eval()(torch.randn(4, 2))
        return [mean.tolist(), model.module.running_mean.tolist()]

    (first_mean, first), (other_mean, other) = md.simulate(program, 2)
    assert first_mean != other_mean
    assert first == other == first_mean


def test_state_dict_has_torchs_names_and_loads_in_both_forms() -> None:
    def program() -> None:
        model = md.DDP(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        torch_names = ["module." + name for name in model.module.state_dict()]
        assert list(model.state_dict()) == torch_names
        other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for state in (other.state_dict(), md.DDP(other).state_dict()):
            with torch.no_grad():
                model.module[0].weight.zero_()
            assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
            assert torch.equal(model.module[0].weight, other[0].weight)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({"module.0.weight": torch.zeros(2, 2)})
        result = model.load_state_dict({"0.weight": torch.zeros(2, 2)}, strict=False)
        assert "0.bias" in result.missing_keys
        with pytest.raises(ArgumentError) as error:
            model.load_state_dict(other.state_dict(), assign=True)
        assert "load_state_dict(assign=True) cannot replace the parameters" in str(error.value)

    md.simulate(program, 2)


def test_a_module_with_a_child_called_module_loads_in_both_forms() -> None:
    def program() -> None:
        inner = nn.Module()
        inner.module = nn.Linear(1, 1)
        model = md.DDP(inner)
        for state in (inner.state_dict(), model.state_dict()):
            ones = {name: torch.ones_like(tensor) for name, tensor in state.items()}
            model.load_state_dict(ones)
            assert inner.module.weight.item() == 1.0
            with torch.no_grad():
                inner.module.weight.zero_()

    md.simulate(program, 1)


def test_a_deep_copy_is_another_replica_set_over_the_same_group() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        model = md.DDP(one_weight(), device_mesh=mesh["dp"])
        model(torch.full((1, 1), 9.0)).sum().backward()
        twin = copy.deepcopy(model)
        assert twin.process_group is model.process_group
        twin(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return [model.module.weight.grad.item(), twin.module.weight.grad.item()]

    assert md.simulate(program, 2) == [[9.0, 1.5]] * 2


def test_pickling_works_over_the_world_alone() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        model(torch.ones(1, 1)).sum().backward()
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded.module.weight, model.module.weight)
        loaded(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        mesh = md.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        part = md.DDP(nn.Linear(1, 1), device_mesh=mesh["tp"])
        with pytest.raises(KindError) as error:
            pickle.dumps(part)
        assert "cannot pickle a DistributedDataParallel whose group is not the world" in str(
            error.value
        )
        assert "save ddp.state_dict() or ddp.module" in str(error.value)
        return loaded.module.weight.grad.item()

    assert md.simulate(program, 2) == [1.5, 1.5]


def test_a_module_that_outlives_its_wrapper_is_alone_again() -> None:
    def program() -> float:
        module = one_weight()
        model = md.DDP(module)
        model(torch.ones(1, 1)).sum().backward()
        del model
        gc.collect()
        module.weight.grad = None
        module(torch.full((1, 1), 1.0 + md.get_rank())).sum().backward()
        return module.weight.grad.item()

    assert md.simulate(program, 2) == [1.0, 2.0]


def test_an_output_keeps_the_reduction_alive() -> None:
    def program() -> float:
        module = one_weight()
        out = md.DDP(module)(torch.full((1, 1), 1.0 + md.get_rank()))
        gc.collect()
        out.sum().backward()
        return module.weight.grad.item()

    assert md.simulate(program, 2) == [1.5, 1.5]


def test_outputs_of_every_documented_kind_pass_through() -> None:
    @dataclasses.dataclass
    class Output:
        value: torch.Tensor
        note: str

    class Wrapping(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            out = super().forward(x)
            return {"a": [(Output(out, "kept"),)], "none": None}

    def program() -> tuple[str, int]:
        model = md.DDP(Wrapping(1, 1))
        outputs = model(torch.ones(1, 1))
        (output,) = outputs["a"][0]
        return output.note, len(list(tensors_in(outputs)))

    assert md.simulate(program, 2) == [("kept", 1)] * 2


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: md.DDP(nn.ReLU()),
            GradientError,
            (
                "ReLU has no parameter that requires a gradient\n"
                "  expected: a module with at least one trainable parameter"
            ),
        ),
        (
            lambda: md.DDP(nn.LazyLinear(2)),
            GradientError,
            (
                "cannot wrap a module whose parameter weight is uninitialized\n"
                "  expected: parameters that are initialized"
            ),
        ),
        (
            lambda: md.DDP(torch.ones(2)),
            KindError,
            "module is of type Tensor\n  expected: a torch.nn.Module",
        ),
        (
            lambda: md.DDP(
                nn.Linear(1, 1),
                process_group=md.group.WORLD,
                device_mesh=md.init_device_mesh("cpu", (2,)),
            ),
            MeshError,
            "process_group and device_mesh cannot both be passed\n  expected: at most one of them",
        ),
        (
            lambda: md.DDP(nn.Linear(1, 1), bucket_cap_mb=0),
            ArgumentError,
            "bucket_cap_mb is 0",
        ),
        (
            lambda: md.DDP(nn.Linear(1, 1), device_ids=[0]),
            ArgumentError,
            "device_ids=[0] does not match the module's devices\n"
            "  expected: one entry, the device of a CUDA module; None for modules on the CPU "
            "or on several devices\n"
            "  found:    parameters on cpu",
        ),
        (
            lambda: md.DDP(nn.Linear(1, 1), output_device=1),
            ArgumentError,
            "output_device requires device_ids",
        ),
        (
            lambda: md.DDP(nn.Linear(1, 1), broadcast_buffers=True, forward_sync_buffers=True),
            ArgumentError,
            "broadcast_buffers and forward_sync_buffers cannot both be passed",
        ),
        (
            lambda: md.DDP(nn.Linear(1, 1)).double(),
            GradientError,
            "cannot convert parameters after the model is wrapped",
        ),
    ],
)
def test_bad_arguments_are_rejected(
    make: Callable[[], object], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as error:
        md.simulate(make, 2)
    assert text in str(error.value)


def test_groups_are_open_and_connected_when_the_wrapper_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[tuple[int, torch.device]] = []

    def connect(mine: ProcessGroup, device: torch.device) -> None:
        connected.append((mine.rank(), device))

    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), open_groups=False)
        md.DDP(nn.Linear(1, 1), device_mesh=mesh["dp"], init_sync=False)

    monkeypatch.setattr(ProcessGroup, "connect", connect)
    md.simulate(program, 2)
    assert sorted(connected) == [(rank, torch.device("cpu")) for rank in range(2)]


def test_wrapper_subclasses_are_rejected() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def program() -> None:
        module = nn.Module()
        module.weight = nn.Parameter(TwoTensor(torch.ones(1), torch.ones(1)))
        md.DDP(module)

    with pytest.raises(KindError) as error:
        md.simulate(program, 1)
    assert "parameter weight is a TwoTensor\n  expected: plain tensors as parameters" in str(
        error.value
    )


@pytest.mark.gpu
def test_a_cuda_module_trains_and_moves_inputs_and_outputs(tmp_path: Path) -> None:
    md.init_process_group("nccl", f"file://{tmp_path}/meeting", world_size=1, rank=0)
    try:
        whole = made(Net)
        train(whole, batches(4), part=slice(None), set_to_none=True, num_backwards=2)
        model = md.DDP(made(Net).cuda(), device_ids=[0], output_device=torch.device("cpu"))
        train(model, batches(4), part=slice(None), set_to_none=True, num_backwards=2)
        assert model.device == torch.device("cuda", 0)
        assert_equal_states(
            {name: tensor.cpu() for name, tensor in model.module.state_dict().items()},
            state_of(whole),
        )
        with pytest.raises(ArgumentError) as error:
            md.DDP(nn.Linear(1, 1).cuda(), device_ids=[0, 1])
        assert "device_ids=[0, 1] does not match the module's devices" in str(error.value)
    finally:
        md.destroy_process_group()


def test_output_device_0_without_device_ids_is_none_as_in_torch() -> None:
    def program() -> Any:
        return md.DDP(nn.Linear(1, 1), output_device=0).output_device

    assert md.simulate(program, 2) == [None, None]


def test_an_axis_in_the_place_of_device_ids_is_told_its_name() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        for wrong in (mesh["dp"], mesh.get_group("dp"), "dp"):
            with pytest.raises(md.KindError, match=r"device_mesh=mesh\['dp'\]"):
                md.DDP(nn.Linear(1, 1), wrong)

    md.simulate(program, 2)

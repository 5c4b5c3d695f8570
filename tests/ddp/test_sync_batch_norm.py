"""Batch norm over replicas equals torch's on one device with all batches; float64 where exact."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import meshdist as md
from meshdist.ddp import device_streams, sync_batch_norm
from meshdist.ddp.device_streams import DeferredReader
from meshdist.errors import ArgumentError, GradientError, KindError, ShapeError
from tests.ddp.stand_in_accelerator import CPU, Accelerator
from tests.pool import Pool

Run = Callable[..., list[Any]]

TAKES_BIAS = "bias" in inspect.signature(nn.BatchNorm2d).parameters  # since torch 2.12
WITHOUT_BIAS: dict[str, Any] = {"bias": False} if TAKES_BIAS else {}


def simulate(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    return md.simulate(fn, num_ranks, args)


@pytest.fixture(params=["simulated", "shm", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn, num_ranks, *args)`` on simulated ranks, and on processes."""
    if request.param != "simulated":
        pool: Pool = request.getfixturevalue("pool")

        def with_processes(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
            return pool.run(fn, num_ranks, *args, backend=request.param)

        return with_processes

    return simulate


def parts_of(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(x.split(sizes))


def weights_for(y: torch.Tensor) -> torch.Tensor:
    """A loss of many different slopes: the sum of these times the output."""
    weights = torch.linspace(-1, 2, max(y.numel(), 1), dtype=y.dtype, device=y.device)
    return weights[: y.numel()].view(y.shape)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def made(norm: Callable[..., nn.Module], **options: Any) -> nn.Module:
    module = norm(3, dtype=torch.float64, **options)
    if module.affine:
        with torch.no_grad():
            module.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
            if module.bias is not None:
                module.bias.copy_(torch.tensor([0.0, 1.0, -3.0]))
    return module


def steps(module: nn.Module, batches: list[torch.Tensor], slopes: list[torch.Tensor]) -> Any:
    """Outputs, gradients of inputs and of weights, and the state after each of a few batches."""
    seen: list[Any] = []
    for x, slope in zip(batches, slopes, strict=True):
        x = x.clone().requires_grad_()
        y = module(x)
        module.zero_grad()
        (y * slope).sum().backward()
        grads = [p.grad for p in module.parameters()]
        seen.append((y.detach(), x.grad, grads, state(module)))
    return seen


def assert_equals_one_device(
    run: Run, kind: Any, shape: tuple[int, ...], sizes: list[int], **options: Any
) -> None:
    generator = torch.Generator().manual_seed(1)
    whole = [
        torch.randn(sum(sizes), *shape, generator=generator, dtype=torch.float64) * 3 + 5
        for _ in range(2)
    ]
    slopes = [weights_for(x) for x in whole]
    expected = steps(made(kind, **options), whole, slopes)

    def program(whole: list[torch.Tensor], slopes: list[torch.Tensor]) -> Any:
        mine = [[parts_of(one, sizes)[md.get_rank()] for one in ones] for ones in (whole, slopes)]
        return steps(made(md.SyncBatchNorm, **options), *mine)

    results = run(program, len(sizes), whole, slopes)
    for number, (y, grad, grads, after) in enumerate(expected):
        of_ranks = [result[number] for result in results]
        torch.testing.assert_close(torch.cat([one[0] for one in of_ranks]), y)
        torch.testing.assert_close(torch.cat([one[1] for one in of_ranks]), grad)
        for place, of_one in enumerate(grads):  # local ones, which DDP would average
            torch.testing.assert_close(sum(one[2][place] for one in of_ranks), of_one)
        for one in of_ranks:
            torch.testing.assert_close(one[3], after)
            assert all(torch.equal(one[3][key], of_ranks[0][3][key]) for key in after)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.5},
        {"affine": False},
        {"track_running_stats": False},
        pytest.param(
            {"bias": False},
            marks=pytest.mark.skipif(
                not TAKES_BIAS, reason="torch 2.11's own BatchNorm has no argument bias"
            ),
        ),
    ],
    ids=str,
)
def test_replicas_equal_one_device(options: dict[str, Any]) -> None:
    assert_equals_one_device(simulate, nn.BatchNorm2d, (3, 2, 2), [2, 3, 1, 2], **options)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.BatchNorm1d, (3,)), (nn.BatchNorm1d, (3, 4)), (nn.BatchNorm3d, (3, 2, 1, 2))],
    ids=["2-D", "3-D", "5-D"],
)
def test_inputs_of_any_number_of_dims(kind: Any, shape: tuple[int, ...]) -> None:
    assert_equals_one_device(simulate, kind, shape, [3, 0, 2])


def test_processes_equal_one_device_where_one_has_no_data(run: Run) -> None:
    assert_equals_one_device(run, nn.BatchNorm1d, (3, 4), [3, 0, 2])


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(lambda sizes: sum(sizes) > 1))
def test_batches_of_any_sizes(sizes: list[int]) -> None:
    assert_equals_one_device(simulate, nn.BatchNorm1d, (3,), sizes)


def test_each_way_is_one_all_reduce(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = sync_batch_norm.all_reduce

    def noted(tensor: torch.Tensor, **how: Any) -> None:
        calls.append(tensor.numel())
        original(tensor, **how)

    monkeypatch.setattr(sync_batch_norm, "all_reduce", noted)

    def program() -> None:
        module = md.SyncBatchNorm(4)
        module(torch.randn(2, 4, requires_grad=True)).sum().backward()
        loss = module(torch.randn(2, 4)).sum()  # no input needs a gradient: no second one
        loss.backward(retain_graph=True)
        loss.backward()

    md.simulate(program, 2)
    assert sorted(calls) == [8, 8, 15, 15, 15, 15]


# -- numbers --------------------------------------------------------------------------------------


def test_a_mean_far_larger_than_the_deviation_loses_no_digits() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.tensor([1e4, -3e3])
    x = (torch.randn(600, 2, generator=generator) * 0.05 + means).float()
    whole = nn.BatchNorm1d(2, eps=1e-12, affine=False, dtype=torch.float64)
    slopes = torch.randn(600, 2, generator=generator)
    exact = x.double().requires_grad_()
    (whole(exact) * slopes).sum().backward()
    # What sums of squares in float32 would make of it: this variance is noise.
    naive = x.square().mean(0) - x.mean(0).square()
    assert (naive - x.double().var(0, correction=0)).abs().max() > 1

    def program() -> Any:
        part = slice(md.get_rank(), None, 3)
        module = md.SyncBatchNorm(2, eps=1e-12, affine=False)
        mine = x[part].clone().requires_grad_()
        y = module(mine)
        (y * slopes[part]).sum().backward()
        return y.detach().double(), mine.grad.double(), module.running_var.double()

    for rank, (y, grad, running_var) in enumerate(md.simulate(program, 3)):
        part = slice(rank, None, 3)
        torch.testing.assert_close(y, whole(exact)[part].detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, exact.grad[part], rtol=1e-4, atol=1e-4)
        expected = 0.9 + 0.1 * x.double().var(0)
        torch.testing.assert_close(running_var, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, 3, 5, generator=generator) + 30).to(dtype)
    wide = x.float().requires_grad_()
    whole = nn.BatchNorm1d(3)
    slopes = weights_for(wide)
    expected = whole(wide)
    (expected * slopes).sum().backward()

    def program() -> Any:
        part = slice(md.get_rank(), None, 2)
        module = md.SyncBatchNorm(3)
        mine = x[part].clone().requires_grad_()
        y = module(mine)
        assert (y.dtype, module.weight.dtype) == (dtype, torch.float32)
        (y * slopes[part]).sum().backward()
        return y.detach(), mine.grad, module.running_mean

    for rank, (y, grad, running_mean) in enumerate(md.simulate(program, 2)):
        part = slice(rank, None, 2)
        # but for the last rounding, to dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(y.float(), expected[part].detach(), rtol=eps, atol=eps)
        torch.testing.assert_close(grad.float(), wide.grad[part], rtol=2 * eps, atol=2 * eps)
        torch.testing.assert_close(running_mean, whole.running_mean)


def test_the_layout_of_the_input_is_kept() -> None:
    def program() -> bool:
        x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
        y = md.SyncBatchNorm(3)(x)
        y.square().sum().backward()
        kept = [one.is_contiguous(memory_format=torch.channels_last) for one in (y, x.grad)]
        return all(kept)

    assert md.simulate(program, 2) == [True, True]


def test_the_backward_is_the_gradient() -> None:
    """Finite differences, on ranks that do the same: each sees the others' part as its own."""

    def program() -> bool:
        torch.manual_seed(0)
        module = md.SyncBatchNorm(3, eps=1e-3, track_running_stats=False)

        def normalized(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            changed = {"weight": weight, "bias": bias}
            y: torch.Tensor = torch.func.functional_call(module, changed, (x,))
            return y

        x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
        ends = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        return torch.autograd.gradcheck(normalized, (x, *ends))

    assert md.simulate(program, 2) == [True] * 2


def test_a_second_derivative_is_rejected() -> None:
    def program() -> None:
        x = torch.randn(4, 3, requires_grad=True)
        y = md.SyncBatchNorm(3)(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    md.simulate(program, 2)


# -- who takes part -------------------------------------------------------------------------------


def test_a_rank_whose_input_needs_no_gradient_takes_part_all_the_same() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    exact = x.clone().requires_grad_()
    made(nn.BatchNorm1d)(exact).square().sum().backward()

    def program() -> Any:
        module = made(md.SyncBatchNorm)
        part = slice(md.get_rank(), None, 2)
        mine = x[part].clone().requires_grad_(md.get_rank() == 0)
        loss = module(mine).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()  # again, on the same graph
        return mine.grad

    first, second = md.simulate(program, 2)
    torch.testing.assert_close(first, 2 * exact.grad[0::2])
    assert second is None


def test_a_rank_without_a_backward_is_an_error_on_the_others() -> None:
    def program() -> str:
        module = md.SyncBatchNorm(2)
        x = torch.randn(3, 2, requires_grad=True)
        if md.get_rank() == 1:
            with torch.no_grad():
                module(x)
            return ""
        loss = module(x).square().sum()
        with pytest.raises(GradientError) as caught:
            loss.backward()
        return str(caught.value)

    first, _, third = md.simulate(program, 3)
    assert "SyncBatchNorm: the forward of 1 of 3 ranks has no backward" in first
    assert "fix:      run the forward with gradients enabled on every rank" in third


def test_on_an_accelerator_the_flags_are_read_in_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless a graph is captured: then the ranks exchange their parts in any case."""

    def program(captures: bool) -> Any:
        accelerator = Accelerator()
        reader = DeferredReader(CPU, accelerator, accelerator.pinned(2))
        module = md.SyncBatchNorm(2)
        module_readers[md.get_rank()] = reader
        loss = module(torch.eye(2) * (1 + md.get_rank())).square().sum()
        assert ("synchronize" in accelerator.told, bool(accelerator.told)) == (False, not captures)
        loss.backward()
        return "synchronize" in accelerator.told

    module_readers: dict[int, DeferredReader] = {}
    calls: list[int] = []
    original = sync_batch_norm.all_reduce

    def noted(tensor: torch.Tensor, **how: Any) -> None:
        calls.append(tensor.numel())
        original(tensor, **how)

    monkeypatch.setattr(sync_batch_norm, "all_reduce", noted)
    monkeypatch.setattr(sync_batch_norm, "reader_for", lambda *_: module_readers[md.get_rank()])
    assert md.simulate(program, 2, (False,)) == [True, True]
    assert calls == [9, 9]  # no input needs a gradient
    monkeypatch.setattr(device_streams, "is_capturing", lambda _: True)
    assert md.simulate(program, 2, (True,)) == [False, False]
    assert sorted(calls[2:]) == [4, 4, 9, 9]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_on_a_gpu_it_equals_one_device(pool: Pool, dtype: torch.dtype) -> None:
    def program(dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        x = (torch.randn(6, 3, 4, 4, generator=generator) + 4).to(dtype)
        x = x.cuda().to(memory_format=torch.channels_last)
        exact = x.double().clone().requires_grad_()
        whole = nn.BatchNorm2d(3).cuda().double()
        (whole(exact) * weights_for(exact)).sum().backward()
        part = slice(md.get_rank(), None, 2)
        module = md.SyncBatchNorm(3).cuda()
        mine = x[part].clone(memory_format=torch.channels_last).requires_grad_()
        y = module(mine)
        assert y.is_contiguous(memory_format=torch.channels_last)
        (y * weights_for(exact).to(dtype)[part]).sum().backward()
        close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-2 if dtype.itemsize < 4 else 1e-4}
        torch.testing.assert_close(mine.grad.double(), exact.grad[part], **close)
        torch.testing.assert_close(module.running_var, whole.running_var.float())

    pool.run(program, 2, dtype)


def test_without_gradients_on_any_rank_statistics_are_common_all_the_same() -> None:
    def program() -> Any:
        module = md.SyncBatchNorm(1, affine=False)
        with torch.no_grad():
            return module(torch.full((2, 1), float(md.get_rank()))), module.running_mean

    (low, mean), (high, _) = md.simulate(program, 2)
    torch.testing.assert_close(torch.cat([low, high]).sum(), torch.tensor(0.0))
    torch.testing.assert_close(mean, torch.tensor([0.05]))


def test_zeros_in_place_of_a_rank_change_nothing() -> None:
    """What a rank that has left the loop adds: neither count nor sums nor streams."""
    x = torch.randn(6, 3, dtype=torch.float64)
    exact = x.clone().requires_grad_()
    whole = made(nn.BatchNorm1d)
    (whole(exact) * weights_for(exact)).sum().backward()

    def program() -> Any:
        if md.get_rank() == 2:
            md.all_reduce(torch.zeros(12, dtype=torch.float64))
            md.all_reduce(torch.zeros(6, dtype=torch.float64))
            return None
        part = slice(md.get_rank(), None, 2)
        module = made(md.SyncBatchNorm)
        mine = x[part].clone().requires_grad_()
        (module(mine) * weights_for(exact)[part]).sum().backward()
        return mine.grad, state(module)

    for rank, (grad, after) in enumerate(md.simulate(program, 3)[:2]):
        torch.testing.assert_close(grad, exact.grad[rank::2])
        torch.testing.assert_close(after, state(whole))


def test_when_no_rank_has_data_the_estimates_stay() -> None:
    def program() -> Any:
        module = md.SyncBatchNorm(2)
        x = torch.empty(0, 2, 3, requires_grad=True)
        y = module(x)
        y.sum().backward()
        return y.shape, x.grad.shape, module.weight.grad.tolist(), state(module)

    for y, grad, of_weight, after in md.simulate(program, 2):
        assert (y, grad, of_weight) == ((0, 2, 3), (0, 2, 3), [0.0, 0.0])
        assert after["running_mean"].tolist() == [0.0, 0.0]
        assert after["running_var"].tolist() == [1.0, 1.0]
        assert after["num_batches_tracked"].item() == 1  # as torch's on one device


def test_one_value_over_all_ranks_has_no_variance() -> None:
    def program() -> Any:
        module = md.SyncBatchNorm(1)
        y = module(torch.full((1 - md.get_rank(), 1), 5.0))
        return y.tolist(), module.running_mean.item(), module.running_var.item()

    (y, mean, var), (empty, *_) = md.simulate(program, 2)
    assert (y, empty, var) == ([[0.0]], [], 1.0)
    assert mean == pytest.approx(0.5)


# -- where nothing is sent ------------------------------------------------------------------------


def test_alone_and_without_a_world_it_is_torchs() -> None:
    x = torch.randn(4, 3)

    def compare() -> None:
        ours, theirs = md.SyncBatchNorm(3), nn.BatchNorm1d(3)
        assert isinstance(ours, nn.modules.batchnorm._BatchNorm)
        assert torch.equal(ours(x), theirs(x))
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value)
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(x[:1])

    compare()
    md.simulate(compare, 1)


@pytest.mark.parametrize("tracks", [True, False])
def test_in_eval_mode_each_rank_is_alone(tracks: bool) -> None:
    x = torch.randn(4, 3)
    expected = nn.BatchNorm1d(3, track_running_stats=tracks).eval()(x)

    def program() -> torch.Tensor | None:
        if md.get_rank() == 1:
            return None  # nobody waits for it
        return md.SyncBatchNorm(3, track_running_stats=tracks).eval()(x).detach()

    assert torch.equal(md.simulate(program, 2)[0], expected)


# -- groups and copies ----------------------------------------------------------------------------


def test_an_axis_or_several_or_a_group() -> None:
    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("host", "dp", "tp"))
        x = torch.full((1, 1), float(md.get_rank()))
        seen = []
        for group in (mesh["dp"], mesh["host", "dp"], mesh.get_group("tp"), md.group.WORLD, None):
            module = md.SyncBatchNorm(1, momentum=1.0, process_group=group)
            module(x)
            seen.append(module.running_mean.item())
        return seen

    assert md.simulate(program, (2, 2, 2))[5] == [6.0, 4.0, 4.5, 3.5, 3.5]


def test_what_is_no_group_is_rejected_at_once() -> None:
    def program() -> str:
        with pytest.raises(KindError) as caught:
            md.SyncBatchNorm(1, process_group="dp")
        return str(caught.value)

    assert "pass the axis of its mesh: group=mesh['dp']" in md.simulate(program, 1)[0]


def test_inputs_that_do_not_fit_are_rejected_before_anything_is_sent() -> None:
    for shape, told in (
        ((3,), "SyncBatchNorm(3) cannot normalize an input of shape (3,)"),
        ((2, 4), "of size 3 in dimension 1"),
        ((2, 0), "cannot normalize an input of shape (2, 0)"),
    ):
        with pytest.raises(ShapeError) as caught:
            md.SyncBatchNorm(3)(torch.ones(shape))
        assert told in str(caught.value)
    with pytest.raises(ShapeError, match="of size above 0 in dimension 1"):
        md.SyncBatchNorm(0)(torch.ones(2, 0))


def test_a_copy_is_over_the_same_group_and_the_world_is_pickled() -> None:
    def program() -> bool:
        group = md.new_group([0, 1])
        module = nn.Sequential(md.SyncBatchNorm(1, process_group=group))
        clone = copy.deepcopy(module)
        assert clone[0].process_group is group
        assert clone[0].weight is not module[0].weight
        loaded = pickle.loads(pickle.dumps(md.SyncBatchNorm(1, momentum=1.0)))
        loaded(torch.full((1, 1), float(md.get_rank())))
        return bool(loaded.running_mean.item() == 0.5)

    assert md.simulate(program, 2) == [True, True]


# -- converting -----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, eps=0.5, momentum=None))
        self.plain = nn.BatchNorm2d(3, affine=False).eval()
        self.bare = nn.BatchNorm3d(3, track_running_stats=False, **WITHOUT_BIAS)
        self.theirs = nn.SyncBatchNorm(5)
        self.norm = nn.LayerNorm(2)
        self.theirs.qconfig = "kept"


def test_converting_keeps_all_but_the_class() -> None:
    net = Net()
    before = {name: one for name, one in net.named_modules() if "Norm" in type(one).__name__}
    held = {id(value) for value in (*net.parameters(), *net.buffers())}

    def program() -> None:
        group = md.new_group([0])
        converted = md.SyncBatchNorm.convert_sync_batchnorm(net, group)
        assert converted is net
        assert {id(value) for value in (*net.parameters(), *net.buffers())} == held
        for name in ("inner.1", "plain", "bare", "theirs"):
            made, old = net.get_submodule(name), before[name]
            assert type(made) is md.SyncBatchNorm
            assert made.process_group is group
            for field in (
                "num_features",
                "eps",
                "momentum",
                "affine",
                "track_running_stats",
                "training",
            ):
                assert getattr(made, field) == getattr(old, field), (name, field)
            assert made.state_dict().keys() == old.state_dict().keys()
        assert net.theirs.qconfig == "kept"
        assert not hasattr(net.plain, "qconfig")
        assert type(net.norm) is nn.LayerNorm

    md.simulate(program, 1)


def test_a_batch_norm_itself_comes_back_as_a_new_one() -> None:
    old = nn.BatchNorm1d(2)
    made = md.SyncBatchNorm.convert_sync_batchnorm(old)
    assert type(made) is md.SyncBatchNorm
    assert made.weight is old.weight
    again = md.SyncBatchNorm.convert_sync_batchnorm(made)
    assert type(again) is md.SyncBatchNorm


def test_a_lazy_one_without_a_shape_is_rejected() -> None:
    with pytest.raises(ArgumentError) as caught:
        md.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))
    assert "convert_sync_batchnorm() cannot convert an uninitialized LazyBatchNorm1d" in str(
        caught.value
    )
    assert "run one forward of the module before you convert it" in str(caught.value)


@pytest.mark.parametrize("given", [None, [nn.BatchNorm1d(1)]])
def test_what_is_no_module_is_rejected(given: Any) -> None:
    with pytest.raises(KindError) as caught:
        md.SyncBatchNorm.convert_sync_batchnorm(given)
    text = str(caught.value)
    assert f"convert_sync_batchnorm() requires a module, not a {type(given).__name__}" in text
    assert "net = SyncBatchNorm.convert_sync_batchnorm(net)" in text


# -- with the rest --------------------------------------------------------------------------------


def test_under_ddp_training_equals_one_device(run: Run) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6)
        ).double()

    def train(model: nn.Module, x: torch.Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) - x.repeat(1, 2)).square().mean().backward()
            optimizer.step()

    x = torch.randn(8, 3, dtype=torch.float64)
    whole = net()
    train(whole, x)

    def program(x: torch.Tensor) -> dict[str, torch.Tensor]:
        module = md.SyncBatchNorm.convert_sync_batchnorm(net())
        train(md.DDP(module, forward_sync_buffers=False), x[md.get_rank() :: 2])
        return state(module)

    for after in run(program, 2, x):
        torch.testing.assert_close(after, state(whole))


def test_what_follows_may_write_into_the_result() -> None:
    def program(inplace: bool) -> torch.Tensor:
        x = (torch.arange(6.0).view(3, 2) * (1 + md.get_rank())).requires_grad_()
        net = nn.Sequential(md.SyncBatchNorm(2), nn.ReLU(inplace=inplace), nn.Linear(2, 2))
        nn.init.ones_(net[2].weight)
        (net(x) * torch.arange(6.0).view(3, 2)).sum().backward()
        return x.grad

    for mine, other in zip(
        *(md.simulate(program, 2, (how,)) for how in (True, False)), strict=True
    ):
        assert mine.any()
        assert torch.equal(mine, other)


def test_under_autocast_statistics_are_those_of_float32() -> None:
    x = torch.randn(8, 3)

    def program(is_on: bool) -> torch.Tensor:
        module = md.SyncBatchNorm(3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            mine = x[md.get_rank() :: 2].clone().requires_grad_()
            y = module(mine)
            assert y.dtype is torch.float32
            y.square().sum().backward()
        return torch.cat([mine.grad.flatten(), module.running_var])

    on, off = (md.simulate(program, 2, (is_on,)) for is_on in (True, False))
    torch.testing.assert_close(on, off)


def test_a_compiled_model_gives_the_same() -> None:
    x = torch.randn(4, 3)

    def program(compiles: bool) -> torch.Tensor:
        module = nn.Sequential(md.SyncBatchNorm(3), nn.Tanh())
        if compiles:
            module.compile(backend="aot_eager")
        mine = (x + md.get_rank()).requires_grad_()
        module(mine).square().sum().backward()
        return torch.cat([mine.grad.flatten(), module[0].running_var])

    plain, compiled = (md.simulate(program, 2, (how,)) for how in (False, True))
    torch.testing.assert_close(compiled, plain)

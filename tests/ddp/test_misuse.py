"""What a program that trains may forget on one rank: an error, or one warning."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import GradientError, MismatchError
from tests.ddp.everyday_programs import batch_of, mlp
from tests.pool import Pool

Run = Callable[..., list[Any]]
PARTED = "the replicas have diverged: gradients of different models are averaged"


@pytest.fixture(params=["simulated-2", "simulated-3", "shm-3", "gloo-2"])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn)`` on simulated ranks, and on processes over two backends."""
    backend, num_ranks = request.param.split("-")
    if backend == "simulated":
        return lambda fn: md.simulate(fn, int(num_ranks))
    pool: Pool = request.getfixturevalue("pool")
    return lambda fn: pool.run(fn, int(num_ranks), backend=backend)


def texts_of(run: Run, programs: list[Callable[[], Any]]) -> dict[str, list[str]]:
    """What each program warns of, on all ranks together.

    Simulated ranks share the filters of warnings, so that they are caught around all of them.
    """
    if "simulated" in run(md.get_backend):
        return {one.__name__: sorted(warned(lambda one=one: run(one))) for one in programs}
    found = run(lambda: {one.__name__: warned(one) for one in programs})
    return {name: [text for one in found for text in one[name]] for name in found[0]}


def error_in(program: Callable[[], Any]) -> str:
    """The text of the GradientError that ends ``program`` on this rank; "" where none does."""
    try:
        program()
    except GradientError as error:
        return str(error)
    return ""


def errors_of(run: Run, programs: list[Callable[[], Any]]) -> dict[str, list[str]]:
    """The errors that end each program, by rank."""
    found = run(lambda: [error_in(one) for one in programs])
    return {
        one.__name__: list(texts)
        for one, texts in zip(programs, zip(*found, strict=True), strict=True)
    }


def is_odd() -> bool:
    return md.get_rank() == 1


class Sgd:
    """Plain steps; torch's optimizers load much where a process makes its first."""

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        self.parameters = list(model.parameters())
        self.lr = lr

    def zero_grad(self) -> None:
        for one in self.parameters:
            one.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for one in self.parameters:
            if one.grad is not None:
                one -= self.lr * one.grad


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rows = batch_of(step, size=12)[md.get_rank() :: md.get_world_size()]
    return (model(rows.to(next(model.parameters()).dtype)) - 1).square().mean()


def train(
    model: nn.Module,
    optimizer: Any,
    num_steps: int = 5,
    before_step: Callable[[float], Any] = lambda _: None,
) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        before_step(loss.item())
        optimizer.step()


def warned(program: Callable[[], Any]) -> list[str]:
    """What ``program`` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


# -- replicas that part ---------------------------------------------------------------------------


def weights_loaded_on_one_rank() -> None:
    model = md.DDP(mlp())
    if is_odd():
        model.load_state_dict({name: one + 1 for name, one in mlp().state_dict().items()})
    train(model, Sgd(model))


def weights_drawn_anew() -> None:
    model = md.DDP(mlp())
    torch.manual_seed(md.get_rank())
    model.module[0].reset_parameters()
    train(model, Sgd(model))


def weights_never_made_equal() -> None:
    net = mlp()
    torch.manual_seed(md.get_rank())
    net[0].reset_parameters()
    model = md.DDP(net, init_sync=False)
    train(model, Sgd(model))


def another_learning_rate() -> None:
    model = md.DDP(mlp())
    train(model, Sgd(model, 0.1 + 0.01 * is_odd()))


def another_optimizer() -> None:
    model = md.DDP(mlp())
    train(model, torch.optim.Adam(model.parameters()) if is_odd() else Sgd(model))


def a_schedule_on_one_rank() -> None:
    model = md.DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(11):
        train(model, optimizer, 1)
        if step == 1 and is_odd():
            schedule.step()


def steps_on_one_rank() -> None:
    model = md.DDP(mlp())
    train(model, Sgd(model) if is_odd() else Sgd(nn.Linear(1, 1)))


def clipping_by_its_own_loss() -> None:
    model = md.DDP(mlp())
    clip = nn.utils.clip_grad_norm_
    train(model, Sgd(model), before_step=lambda loss: clip(model.parameters(), 0.1 * loss))


def noise_on_averages() -> None:
    model = md.DDP(mlp())
    torch.manual_seed(md.get_rank())

    def add_noise(_: float) -> None:
        for one in model.parameters():
            one.grad += 0.01 * torch.randn_like(one)

    train(model, Sgd(model), before_step=add_noise)


def steps_under_no_sync() -> None:
    model = md.DDP(mlp())
    optimizer = Sgd(model)
    for step in range(10):
        with contextlib.nullcontext() if step % 3 else model.no_sync():
            train(model, optimizer, 1)


def another_scale() -> None:
    model = md.DDP(mlp().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0 if is_odd() else 4.0)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


def a_hook_that_sends_nothing() -> None:
    def hook(_: object, bucket: md.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = md.DDP(mlp())
    model.register_comm_hook(None, hook)
    train(model, Sgd(model))


def eval_on_one_rank() -> None:
    model = md.DDP(nn.Sequential(mlp(), nn.Dropout(0.5)))
    if is_odd():
        model.eval()
    train(model, Sgd(model))


PARTING = [
    weights_loaded_on_one_rank,
    weights_drawn_anew,
    weights_never_made_equal,
    another_learning_rate,
    another_optimizer,
    a_schedule_on_one_rank,
    steps_on_one_rank,
    clipping_by_its_own_loss,
    noise_on_averages,
    steps_under_no_sync,
    another_scale,
    a_hook_that_sends_nothing,
    eval_on_one_rank,
]


def test_replicas_that_part_are_an_error_on_every_rank(run: Run) -> None:
    is_simulated = "simulated" in run(md.get_backend)
    chosen = PARTING if is_simulated else [another_learning_rate, eval_on_one_rank]
    for mistake, texts in errors_of(run, chosen).items():
        assert {text.splitlines()[0] if text else "" for text in texts} == {PARTED}, mistake


def test_the_error_names_the_rank_that_differs_and_its_fix_finds_the_step(run: Run) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (md.get_world_size(),), mesh_dim_names=("dp",))
        model = md.DDP(mlp())
        train(model, Sgd(model, 0.1 + 0.01 * is_odd()), 1)
        with mesh, pytest.raises(md.UnequalError) as error:
            md.assert_equal(model, "dp")
        return error.value.found.splitlines()[0]

    for found in run(program):
        assert found.startswith("module.0.weight, shape (6, 4), float64: rank 1 differs")
    texts = errors_of(run, [another_learning_rate])["another_learning_rate"]
    others = "ranks 0, 2" if len(texts) == 3 else "rank 0"
    for rank, text in enumerate(texts):
        where, expected, parted, *more, fix = text.splitlines()[1:]
        assert where == f"  where:    rank {rank}, backward 2 over the world"
        assert "bitwise equal parameters on every rank, and eval() on all ranks or none" in expected
        assert f"0.weight, shape (6, 4), float64: rank 1 differs from {others}, by up" in parted
        assert len(more) == 3
        assert "learning rate" in fix
        assert f"md.assert_equal(model, md.make_mesh(({len(texts)},), ('dp',)))" in fix
        assert "verify_every=0" in fix


def test_the_call_that_the_error_proposes_runs_as_it_is_written() -> None:
    def program(axes: tuple[str, ...]) -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        over = {"device_mesh": mesh[axes]} if axes else {"process_group": md.group.WORLD}
        model = md.DDP(mlp(), **over)
        with pytest.raises(GradientError, match="have diverged") as diverged:
            train(model, Sgd(model, 0.1 + 0.01 * md.get_rank()), 3)
        fix = diverged.value.fix
        call = fix[fix.index("md.assert_equal(") : fix.index(" (check loaded")]
        with pytest.raises(md.UnequalError, match="not the same on every rank"):
            eval(call, {"md": md, "mesh": mesh, "model": model})
        return call

    for axes, found in (
        ((), "md.make_mesh((4,), ('dp',))"),
        (("dp",), "'dp', mesh=mesh"),
        (("dp", "cp"), "('dp', 'cp'), mesh=mesh"),
    ):
        assert md.simulate(program, 4, (axes,)) == [f"md.assert_equal(model, {found})"] * 4


def wrapped_over(hook: Callable[..., Any] | None = None, state: Any = None) -> nn.Module:
    model = md.DDP(mlp())
    if hook is not None:
        model.register_comm_hook(state, hook)
    return model


def in_a_join() -> None:
    model = md.DDP(mlp())
    with model.join():
        train(model, Sgd(model), 5 + 40 * is_odd())
    train(model, Sgd(model), 5)


def many_steps() -> None:
    model = md.DDP(mlp())
    train(model, Sgd(model), 35)


def local_sgd() -> None:
    hooks = md.comm_hooks
    alone = [md.new_group([rank]) for rank in range(md.get_world_size())][md.get_rank()]
    model = wrapped_over(hooks.post_localSGD_hook, hooks.PostLocalSGDState(None, alone, 1))
    averager = md.PeriodicModelAverager(period=4, warmup_steps=1)
    optimizer = Sgd(model)
    for step in range(35):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())


def no_messages() -> None:
    model = wrapped_over(md.comm_hooks.noop_hook)
    train(model, Sgd(model))


def a_copy() -> None:
    model = md.DDP(mlp())
    train(model, Sgd(model), 2)
    clone = copy.deepcopy(model)
    train(clone, Sgd(clone))


def test_replicas_that_stay_equal_or_part_on_purpose_train_on(run: Run) -> None:
    programs = [in_a_join, many_steps, local_sgd, no_messages, a_copy]
    assert texts_of(run, programs) == {one.__name__: [] for one in programs}


# -- parameters -----------------------------------------------------------------------------------


def test_a_parameter_frozen_on_one_rank_is_an_error_on_all(run: Run) -> None:
    def program(is_late: bool) -> str:
        model = md.DDP(mlp())
        optimizer = Sgd(model)
        train(model, optimizer, 3)
        optimizer.zero_grad()
        loss = loss_of(model, 0) if is_late else None
        if is_odd():
            model.module[0].weight.requires_grad_(False)
        (loss_of(model, 0) if loss is None else loss).backward()
        with pytest.raises(GradientError) as error:
            model.check_gradients()
        model.module[0].weight.requires_grad_(False)  # what the fix says
        train(model, optimizer, 2)
        return str(error.value)

    for texts in run(lambda: [program(is_late) for is_late in (True, False)]):
        for text in texts:
            assert "rank 1: 0.weight (index 0)" in text
            assert "freeze and unfreeze the same parameters on every rank" in text


# -- training past the wrapper --------------------------------------------------------------------


def the_module_is_called() -> None:
    model = md.DDP(mlp())
    train(model.module, Sgd(model), 20)


def the_module_is_called_behind_a_step() -> None:
    model = md.DDP(mlp())
    train(model, Sgd(model), 3)
    train(model.module, Sgd(model), 20)


def parts_are_called_between_evaluations() -> None:
    model = md.DDP(mlp())
    for _ in range(10):
        train(nn.Sequential(*model.module), Sgd(model), 1)
        with torch.no_grad():
            loss_of(model, 0)


def seven_looks_between_steps() -> None:
    model = md.DDP(mlp())
    for _ in range(5):
        train(model, Sgd(model), 1)
        for step in range(7):
            loss_of(model.module, step).backward()


def sums_under_no_sync() -> None:
    model = md.DDP(mlp())
    with model.no_sync():
        for step in range(20):
            loss_of(model, step).backward()


def test_steps_that_never_go_through_the_wrapper_are_warned_of_once(run: Run) -> None:
    num_ranks = len(run(md.get_rank))
    mistakes = [the_module_is_called, the_module_is_called_behind_a_step]
    for texts in texts_of(run, [*mistakes, parts_are_called_between_evaluations]).values():
        assert len(texts) == num_ranks
        for text in texts:
            assert "but none of its outputs, 8 times in a row" in text
            assert "call model(x) on the wrapper instead of model.module(x)" in text
    quiet = [seven_looks_between_steps, sums_under_no_sync]
    assert texts_of(run, quiet) == {one.__name__: [] for one in quiet}


def test_an_array_in_the_place_of_a_view_is_rejected(run: Run) -> None:
    def program() -> tuple[str, list[float]]:
        gradients = md.GradientBuckets({"w": torch.ones(2)})
        view, mine = gradients.views["w"], torch.full((2,), 1.0 + md.get_rank())
        gradients.views["w"] = mine
        with pytest.raises(GradientError) as error:
            gradients.wait()
        gradients.views["w"] = view
        gradients.views["w"][...] = mine  # what the fix says
        return str(error.value), gradients.wait()["w"].tolist()

    found = run(program)
    mean = (1 + len(found)) / 2
    for text, averages in found:
        assert text.startswith("a view of GradientBuckets was replaced by another array")
        assert "views['w'][...] = gradient" in text
        assert averages == [mean] * 2


# -- averagers and samplers -----------------------------------------------------------------------


def four_times(function: Callable[..., None], *args: Any) -> None:
    for _ in range(4):
        function(*args)


def test_averagers_whose_steps_differ_are_an_error_on_all(run: Run) -> None:
    def program(is_loaded: bool) -> str:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        averager = md.PeriodicModelAverager(period=3 if is_odd() and not is_loaded else 2)
        averager.step = int(is_odd() and is_loaded)  # a state that one rank has loaded
        with pytest.raises(MismatchError) as error:
            four_times(averager.average_parameters, [weight])
        return str(error.value)

    for loaded, periods in run(lambda: (program(True), program(False))):
        assert "step: rank" in loaded
        assert "rank 1: 2" in loaded
        assert "rank 1: 3" in periods
        assert "use the same step and period on every rank" in periods


def test_an_epoch_that_was_not_set_is_warned_of_once() -> None:
    def epochs(is_told: bool, **options: Any) -> None:
        sampler = md.DistributedSampler(range(8), 2, 0, **options)
        for epoch in range(4):
            if is_told:
                sampler.set_epoch(epoch)
            list(torch.utils.data.DataLoader(range(8), sampler=sampler))

    assert warned(lambda: epochs(is_told=True)) == []
    assert warned(lambda: epochs(is_told=False, shuffle=False)) == []
    assert warned(lambda: epochs(is_told=False)) == [
        "the sampler repeats the order of epoch 0: call sampler.set_epoch(epoch) before each "
        "epoch, or pass shuffle=False"
    ]


# -- what nothing notices -------------------------------------------------------------------------


def weights_behind(steps: Callable[[nn.Module, Sgd], None]) -> list[float]:
    model = md.DDP(mlp())
    steps(model, Sgd(model))
    return [one.sum().item() for one in model.parameters()]


def test_without_a_sampler_all_ranks_take_the_steps_of_one() -> None:
    def program() -> list[float]:
        def steps(model: nn.Module, optimizer: Sgd) -> None:
            (model(batch_of(0)) - 1).square().mean().backward()
            optimizer.step()

        return weights_behind(steps)

    assert md.simulate(program, 2) == md.simulate(program, 1) * 2


def test_batches_of_unequal_sizes_count_alike() -> None:
    def program() -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        model(torch.full((1 + 3 * md.get_rank(), 1), 1.0 + md.get_rank())).mean().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2) == [1.5] * 2  # of one device with all samples: 9 / 5


def test_gradients_that_were_not_zeroed_are_added_to_and_averaged() -> None:
    def program(zeroes: bool) -> float:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        for _ in range(2):
            if zeroes or is_odd():
                model.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
        return model.module.weight.grad.item()

    assert md.simulate(program, 2, (True,)) == [1.0] * 2
    assert md.simulate(program, 2, (False,)) == [1.5] * 2


def test_steps_inside_of_no_sync_alone_are_each_ranks_own() -> None:
    def program() -> list[float]:
        def steps(model: nn.Module, optimizer: Sgd) -> None:
            with model.no_sync():
                train(model, optimizer)

        return weights_behind(steps)

    first, second = md.simulate(program, 2)
    assert first != second


def test_samplers_of_different_seeds_read_some_samples_twice() -> None:
    def program() -> list[int]:
        return list(md.DistributedSampler(range(12), seed=md.get_rank()))

    first, second = md.simulate(program, 2)
    assert set(first) & set(second)


def test_a_sampler_over_the_world_gives_ranks_of_one_replica_different_samples() -> None:
    def program() -> tuple[list[int], list[int]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        shares = md.DistributedSampler(range(8), mesh["dp"], shuffle=False)
        return list(md.DistributedSampler(range(8), shuffle=False)), list(shares)

    with pytest.warns(UserWarning, match="pass the axis that splits the data"):
        (of_first, right), (of_second, as_right), *_ = md.simulate(program, (2, 2))
    assert set(of_first).isdisjoint(of_second)
    assert right == as_right


def test_views_that_are_not_written_again_are_averaged_again() -> None:
    def program() -> list[float]:
        gradients = md.GradientBuckets({"w": torch.ones(1)})
        gradients.views["w"][...] = float(md.get_rank())
        gradients.wait()
        return gradients.wait()["w"].tolist()

    assert md.simulate(program, 2) == [[0.5]] * 2


def test_uneven_data_without_a_join_context_deadlock() -> None:
    def program() -> None:
        model = md.DDP(mlp())
        train(model, Sgd(model), 3 + md.get_rank())

    with pytest.raises(md.DeadlockError) as error:
        md.simulate(program, 2)
    assert "rank 0: returned" in str(error.value)
    assert error.value.fix.startswith(f"{JOIN}; else call the same collectives")


JOIN = "if ranks have unequal numbers of batches, loop over md.uneven, or use `with ddp.join():`"


def uneven(in_context: bool, then_calls: bool) -> str:
    """The fix of what a rank with more batches than the first is told; "" for nothing."""
    ddp = md.DDP(mlp())
    try:
        with ddp.join() if in_context else contextlib.nullcontext():
            train(ddp, Sgd(ddp), 3 + md.get_rank())
    except md.errors.BackendError as error:
        return error.fix or ""
    if then_calls and not in_context:
        with contextlib.suppress(md.errors.BackendError):
            md.barrier()
    md.destroy_process_group()
    return ""


@pytest.mark.parametrize("then_calls", [False, True])
def test_uneven_data_without_a_join_context_between_processes(pool: Pool, then_calls: bool) -> None:
    _, fix = pool.run(uneven, 2, False, then_calls)
    how = "call the same collectives" if then_calls else "resolve the error of the rank that exited"
    assert fix.startswith(f"{JOIN}; else {how}")
    assert pool.run(uneven, 2, True, then_calls) == ["", ""]


def typed_gradient(enter: Callable[[], Any], is_after: bool = False) -> list[float]:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        weight = nn.Parameter(torch.ones(1))
        x = md.annotate(torch.ones(1) + md.get_rank(), varying="dp")
        with md.typed(mesh), enter():
            loss = (weight * x).sum()
            if not is_after:
                loss.backward()
        if is_after:
            loss.backward()
        return weight.grad.item()

    return md.simulate(program, 2)


def test_a_backward_behind_a_typed_context_takes_any_loss() -> None:
    assert typed_gradient(contextlib.nullcontext, is_after=True) == [3.0] * 2
    with pytest.raises(
        md.AxisTypeError, match="backward cannot start from a loss that varies over 'dp'"
    ):
        typed_gradient(contextlib.nullcontext)


def test_steps_in_an_untyped_context_are_each_ranks_own() -> None:
    assert typed_gradient(md.untyped) == [1.0, 2.0]


def test_eval_of_a_synchronised_norm_on_one_rank_is_told_on_all() -> None:
    def program() -> None:
        net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        model = md.DDP(md.SyncBatchNorm.convert_sync_batchnorm(net))
        if is_odd():
            model.eval()
        train(model, Sgd(model))

    with pytest.raises(MismatchError, match="collective mismatch: ranks made different calls"):
        md.simulate(program, 2)


def test_a_hook_on_one_rank_alone_is_told_on_all() -> None:
    def program() -> None:
        model = md.DDP(mlp())
        if is_odd():
            model.register_comm_hook(None, md.comm_hooks.bf16_compress_hook)
        train(model, Sgd(model))

    with pytest.raises(MismatchError, match="collective mismatch: ranks made different calls"):
        md.simulate(program, 2)


def test_backwards_are_counted_anew_in_another_group() -> None:
    def program() -> list[float]:
        alone = [md.new_group([rank]) for rank in range(2)][md.get_rank()]
        model = md.DDP(mlp(), process_group=alone)
        train(model, Sgd(model), 1 + 2 * md.get_rank())
        with torch.no_grad():
            for one in model.parameters():
                one.fill_(0.1)
        model._update_process_group(md.new_group())
        train(model, Sgd(model), 6)
        return [one.sum().item() for one in model.parameters()]

    first, second = md.simulate(program, 2)
    assert first == second

"""Replicas are compared to the bit, and the model with what was wrapped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import ArgumentError, GradientError, MismatchError
from tests.ddp.everyday_programs import batch_of, mlp
from tests.mpi_job import job_of
from tests.pool import Pool

Run = Callable[..., list[Any]]
PARTED = "the replicas have diverged: gradients of different models are averaged"


ON = ["simulated-1", "simulated-2", "simulated-3", "simulated-5", "shm-3", "gloo-2"]


@pytest.fixture(params=[*ON, pytest.param("mpi-2", marks=[pytest.mark.mpi, pytest.mark.soak])])
def run(request: pytest.FixtureRequest) -> Run:
    """``run(fn)`` on simulated ranks, and on processes over each backend."""
    backend, num_ranks = request.param.split("-")
    if backend == "simulated":
        return lambda fn: md.simulate(fn, int(num_ranks))
    pool: Pool = request.getfixturevalue("pool")
    if backend == "mpi":
        return job_of(pool, int(num_ranks)).run_in_world
    return lambda fn: pool.run(fn, int(num_ranks), backend=backend)


def step(model: Any, number: int = 0, lr: float = 0.1) -> None:
    """One step of training, each rank on its own rows."""
    rows = batch_of(number, size=30)[md.get_rank() :: md.get_world_size()]
    model.zero_grad()
    model(rows.to(next(model.parameters()).dtype)).square().mean().backward()
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one -= lr * one.grad


def is_last() -> bool:
    return md.get_rank() == md.get_world_size() - 1


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit in memory."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().view(-1).view(words[tensor.element_size()])
    flat[element] ^= torch.tensor(1, dtype=flat.dtype) << bit


# -- replicas that part ---------------------------------------------------------------------------


def test_one_bit_that_flips_is_an_error_on_every_rank_that_names_it(run: Run) -> None:
    def program() -> tuple[str, list[float]]:
        model = md.DDP(mlp())
        for number in range(8):
            step(model, number)
        good = {name: one.clone() for name, one in model.state_dict().items()}
        if is_last():
            flip(model.module[2].weight, 4, 0)
        text, counts = "", []
        for number in range(8, 14):
            try:
                step(model, number)
            except GradientError as error:
                text = str(error)
                counts.append(number)
                model.load_state_dict(good)  # what the fix says
        return text, counts

    found = run(program)
    last = len(found) - 1
    if last == 0:
        assert found == [("", [])]
        return
    others = {1: "rank 0", 2: "ranks 0-1", 4: "ranks 0-3"}[last]
    for rank, (text, numbers) in enumerate(found):
        assert numbers == [10]  # the forward behind backward 10
        lines = text.splitlines()
        assert lines[0] == PARTED
        assert lines[1] == f"  where:    rank {rank}, backward 10 over the world"
        assert lines[3].startswith(
            f"  found:    2.weight, shape (3, 6), float64: rank {last} differs from {others}, by"
        )
        assert lines[-2].strip() == "within rounding error"
        assert "torch.use_deterministic_algorithms(True)" in lines[-1]
        assert "load one state on every rank" in lines[-1]


def test_replicas_are_compared_behind_the_backwards_that_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from meshdist.ddp import divergence_checks

    compared: list[int] = []
    steps = [0]
    compare = divergence_checks.find_unequal_digests

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        if md.get_rank() == 0:
            compared.append(steps[0])
        return compare(*arguments, **options)

    monkeypatch.setattr(divergence_checks, "find_unequal_digests", noted)

    def program(every: int, num_steps: int) -> None:
        model = md.DDP(mlp(), verify_every=every)
        for number in range(num_steps):
            steps[0] = number + 1
            step(model, number)
            with torch.no_grad():
                model(batch_of(0))  # no evaluation counts
            with model.no_sync():
                model(batch_of(0)).sum().backward()  # nor does a sum that stays here

    for every, num_steps, expected in [
        (1000, 12, [2, 10]),
        (0, 12, []),
        (1, 4, [1, 2, 3, 4]),
        (40, 101, [2, 10, 40, 80, 100]),
    ]:
        md.simulate(program, 2, (every, num_steps))
        assert compared == expected
        compared.clear()


def test_the_option_is_checked_and_must_be_equal_on_every_rank() -> None:
    def program() -> list[str]:
        texts = []
        for bad in (-1, True, 2.5, None):
            with pytest.raises((ArgumentError, md.KindError)) as error:
                md.DDP(mlp(), verify_every=bad)
            texts.append(str(error.value))
        with pytest.raises(MismatchError) as differing:
            md.DDP(mlp(), verify_every=10 * md.get_rank())
        return [*texts, str(differing.value)]

    for texts in md.simulate(program, 2):
        assert [text.splitlines()[0] for text in texts[:4]] == [
            "verify_every is -1",
            *["verify_every must be an integer"] * 3,
        ]
        assert "0 to never compare" in texts[0]
        assert "verify_every: rank 0: 0; rank 1: 10" in texts[4]


def errors_in(program: Callable[[], Any], num_ranks: int = 2) -> list[str]:
    """The first line of the GradientError that ends ``program`` on each rank, if any."""

    def caught() -> str:
        try:
            program()
        except GradientError as error:
            return str(error).splitlines()[0]
        return ""

    return md.simulate(caught, num_ranks)


def steps(model: Any, num_steps: int = 4) -> None:
    for number in range(num_steps):
        step(model, number)


def a_frozen_weight_on_one_rank() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    model = md.DDP(net)
    if md.get_rank():
        flip(net[0].weight, 3, 20)
    steps(model)


def a_frozen_layer_that_came_later() -> None:
    model = md.DDP(mlp())
    torch.manual_seed(md.get_rank())
    model.module.append(nn.Linear(3, 3).double().requires_grad_(False))
    steps(model)


def under_mixed_precision() -> None:
    model = md.DDP(mlp().float(), mixed_precision=md.MixedPrecision(torch.bfloat16))
    if md.get_rank():
        flip(model.module[0].weight, 3, 0)
    steps(model)


def with_a_hook() -> None:
    model = md.DDP(mlp().float())
    model.register_comm_hook(None, md.comm_hooks.bf16_compress_hook)
    if md.get_rank():
        flip(model.module[0].weight, 3, 0)
    steps(model)


def with_a_static_graph() -> None:
    model = md.DDP(mlp(), static_graph=True)
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    steps(model)


def found_by_the_check() -> None:
    model = md.DDP(mlp())
    step(model)
    model.check_gradients()
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    model(batch_of(0)).sum().backward()
    model.check_gradients()


def through_a_reducer() -> None:
    model = md.DDP(mlp())
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    for number in range(4):
        with model.no_sync():
            outputs = model(batch_of(number))
        model.reducer.prepare_for_backward(outputs)
        outputs.sum().backward()


def over_another_group() -> None:
    model = md.DDP(mlp())
    steps(model, 5)
    model._update_process_group(md.new_group([0, 1]))
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    steps(model)


def of_a_copy() -> None:
    import copy

    model = copy.deepcopy(md.DDP(mlp(), verify_every=3))
    steps(model, 2)
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    steps(model, 2)


@pytest.mark.parametrize(
    "program",
    [
        a_frozen_weight_on_one_rank,
        a_frozen_layer_that_came_later,
        under_mixed_precision,
        with_a_hook,
        with_a_static_graph,
        found_by_the_check,
        through_a_reducer,
        over_another_group,
        of_a_copy,
    ],
)
def test_however_they_train_replicas_that_part_are_found(program: Callable[[], Any]) -> None:
    assert errors_in(program) == [PARTED] * 2


def named_to_be_left_alone() -> None:
    net = mlp()
    md.DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    model = md.DDP(net)
    if md.get_rank():
        flip(net[0].bias, 3, 20)
    steps(model)


def a_shard_by_its_mark() -> None:
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = mlp()
    net[0].bias.requires_grad_(False)
    model = md.DDP(net, device_mesh=mesh["dp"])
    md.annotate(net[0].bias, varying="dp")
    if md.get_rank():
        flip(net[0].bias, 3, 20)
    steps(model)


def with_the_option_off() -> None:
    model = md.DDP(mlp(), verify_every=0)
    if md.get_rank():
        flip(model.module[0].bias, 3, 20)
    steps(model, 12)


def parted_and_equal_again() -> None:
    model = md.DDP(mlp())
    steps(model, 1)
    before = model.module[0].bias.detach().clone()
    if md.get_rank():
        flip(model.module[0].bias, 3, 0)
    model(batch_of(0)).sum().backward()
    with torch.no_grad():
        model.module[0].bias.copy_(before)
    steps(model)


def a_forward_more_on_one_rank() -> None:
    model = md.DDP(mlp())
    for number in range(12):
        step(model, number)
        if md.get_rank():
            model(batch_of(number))  # to look at, and gradients were left on
    md.barrier()


def in_checkpoints() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.net, x, use_reentrant=False)

    steps(md.DDP(Checkpointed()), 12)
    model = md.DDP(mlp())
    for number in range(12):
        checkpoint(model, batch_of(number), use_reentrant=False).sum().backward()


def of_half_precision() -> None:
    steps(md.DDP(mlp().bfloat16()), 12)


def with_modules_of_a_ranks_own() -> None:
    own = [nn.Dropout(0.0) for _ in range(md.get_rank())]
    model = md.DDP(nn.Sequential(*mlp(), *own))
    steps(model)
    model.eval()
    steps(model, 12)


@pytest.mark.parametrize(
    "program",
    [
        named_to_be_left_alone,
        a_shard_by_its_mark,
        with_the_option_off,
        parted_and_equal_again,
        a_forward_more_on_one_rank,
        in_checkpoints,
        of_half_precision,
        with_modules_of_a_ranks_own,
    ],
)
def test_what_is_meant_trains_on(program: Callable[[], Any]) -> None:
    assert errors_in(program) == [""] * 2


def test_a_shard_of_another_axis_is_compared_between_its_replicas() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = mlp()
        md.annotate(net[0].weight, varying="tp")
        model = md.DDP(net, device_mesh=mesh["dp"])
        if mesh.get_local_rank("tp"):
            net[0].weight.data += 1  # another shard
        if md.get_rank() == 3:
            flip(net[0].weight, 0, 40)
        try:
            steps(model)
        except GradientError as error:
            return error.found.splitlines()[0].partition(", by up")[0]
        return ""

    row = "0.weight, shape (6, 4), float64: rank 3 differs from rank 1"
    assert md.simulate(program, (2, 2)) == ["", row, "", row]


# -- a model that is not what was wrapped ---------------------------------------------------------


def a_layer_more(net: nn.Module) -> None:
    net.append(nn.Linear(3, 3).double())


def another_head(net: nn.Module) -> None:
    net[2] = nn.Linear(6, 2).double()


def a_parameter_replaced(net: nn.Module) -> None:
    net[0].weight = nn.Parameter(net[0].weight.detach() * 2)


def adapters(net: nn.Module) -> None:
    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Parameter(torch.ones(1, 4, dtype=torch.float64))
            self.up = nn.Parameter(torch.ones(6, 1, dtype=torch.float64))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.up @ self.down

    parametrize.register_parametrization(net[0], "weight", Lora())


def weight_norm(net: nn.Module) -> None:
    parametrizations.weight_norm(net[0])


def a_state_assigned(net: nn.Module) -> None:
    net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True)


CHANGES = {
    a_layer_more: "3.weight",
    another_head: "2.weight",
    a_parameter_replaced: "0.weight",
    adapters: "0.parametrizations.weight.0.down",
    weight_norm: "0.parametrizations.weight.original0",
    a_state_assigned: "0.weight",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["at once", "later", "checked"])
def test_parameters_that_came_behind_the_wrapper_are_named(
    change: Callable[[nn.Module], None], when: str
) -> None:
    def program() -> str:
        model = md.DDP(mlp(), find_unused_parameters=True)
        steps(model, {"at once": 0, "later": 2, "checked": 5}[when])
        change(model.module)
        if when == "checked":
            step(model)
        with pytest.raises(GradientError) as error:
            model.check_gradients() if when == "checked" else step(model)
        text, module = str(error.value), model.module
        del error, model  # whose frames hold the wrapper
        model = md.DDP(module)  # what the fix says
        steps(model)
        model.check_gradients()
        return text

    for text in md.simulate(program, 2):
        lines = text.splitlines()
        summary = "was added to the module after it was wrapped: its gradient is local"
        assert lines[0] == f"{CHANGES[change]} {summary}"
        assert lines[2].startswith(f"  found:    in Sequential: {CHANGES[change]}")
        assert "add adapters, heads and parametrizations first" in lines[3]
        assert "del ddp" in lines[3]


def test_a_replaced_parameter_is_named_before_the_gradient_that_lacks() -> None:
    def program() -> list[str]:
        texts = []
        for is_checked in (True, False):
            model = md.DDP(mlp())
            steps(model, 5)
            a_parameter_replaced(model.module)
            step(model)
            with pytest.raises(GradientError) as error:
                model.check_gradients() if is_checked else step(model)
            texts.append(str(error.value).splitlines()[0].split()[0])
        return texts

    for names in md.simulate(program, 2):
        assert names == ["0.weight", "0.weight"]


def pruned(model: Any) -> None:
    prune.l1_unstructured(model.module[0], "weight", 0.5)
    steps(model)


def frozen_and_new(model: Any) -> None:
    model.module.append(nn.Linear(3, 3).double().requires_grad_(False))
    nn.init.eye_(model.module[3].weight)
    nn.init.zeros_(model.module[3].bias)
    steps(model)


def new_and_named(model: Any) -> None:
    model.module.append(nn.Linear(3, 3).double())
    names = ["3.weight", "3.bias"]
    md.DDP._set_params_and_buffers_to_ignore_for_model(model.module, names)
    steps(model)


def called_with_other_weights(model: Any) -> None:
    for _ in range(3):
        given = {name: one * 2 for name, one in model.named_parameters()}
        torch.func.functional_call(model, given, (batch_of(0),)).sum().backward()


@pytest.mark.parametrize(
    "change", [pruned, frozen_and_new, new_and_named, called_with_other_weights]
)
def test_changes_that_leave_every_trained_parameter_wrapped_are_taken(
    change: Callable[[Any], None],
) -> None:
    def program() -> None:
        model = md.DDP(mlp())
        change(model)
        model.check_gradients()

    assert errors_in(program) == [""] * 2


# -- parameters that are reduced over further axes ------------------------------------------------


class OneOfTwo(nn.Module):
    """A shard over 'tp', and a bias that is reduced over it."""

    def __init__(self, mesh: md.DeviceMesh) -> None:
        super().__init__()
        self.up = nn.Parameter(md.shard(torch.ones(4, 3), "f@tp d", mesh))
        self.bias = nn.Parameter(md.annotate(torch.ones(2), "d {R:tp}", mesh=mesh))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.up.T + self.bias).square().sum()


@pytest.mark.parametrize(
    ("name", "changed", "found"),
    [
        ("bias", (1, 3), "bias, shape (2,), float32: ranks 1, 3 differ from ranks 0, 2, by"),
        ("bias", (3,), "bias, shape (2,), float32: rank 3 differs from ranks 0-2, by"),
        ("up", (3,), "up, shape (2, 3), float32: rank 3 differs from rank 1, by"),
        ("up", (1, 3), ""),
        ("mode", (3,), "mode: rank 1: train(), except for 0 submodules; rank 3: eval()"),
    ],
)
@pytest.mark.parametrize("reads", ["check", "forward"])
def test_replicas_are_compared_over_all_axes_of_their_gradients(
    name: str, changed: tuple[int, ...], found: str, reads: str
) -> None:
    def program() -> tuple[int, str, str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = OneOfTwo(mesh)
        ddp = md.DDP(net, device_mesh=mesh["dp"], verify_every=1)
        for number in range(4):
            if number == 2 and md.get_rank() in changed:
                if name == "mode":
                    net.eval()
                else:
                    getattr(net, name).data += 1
            try:
                ddp(torch.ones(5, 3)).backward()
                if reads == "check":
                    ddp.check_gradients()
            except GradientError as error:
                return number, str(error), str(error.found)
        return -1, "", ""

    axes = "('dp', 'tp')" if name == "bias" else "'dp'"
    for number, error, text in md.simulate(program, 4):
        if not found:
            assert number == -1
            continue
        assert number == (2 if reads == "check" else 3)
        assert error.startswith(PARTED)
        assert f"md.assert_equal(model, {axes}, mesh=mesh)" in error
        assert text.startswith(found)


@pytest.mark.parametrize("marked", [False, True])
def test_only_further_axes_cost_a_further_message(marked: bool) -> None:
    def program() -> int:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Linear(3, 2)
        if marked:
            md.annotate(net, {"bias": "d {R:tp}"}, mesh=mesh)
        counts = []
        for every in (0, 1):
            ddp = md.DDP(net, device_mesh=mesh["dp"], verify_every=every)
            for _ in range(3):
                out = ddp(torch.ones(5, 3)).sum()
                with (
                    profile(activities=[ProfilerActivity.CPU], acc_events=True)
                    if md.get_rank() == 0
                    else nullcontext() as seen
                ):
                    out.backward()
            events = seen.events() if md.get_rank() == 0 else ()
            counts.append(sum("all_reduce" in event.name for event in events))
            del out, ddp
        return counts[1] - counts[0]

    found = md.simulate(program, 4)
    assert found[0] == (3 if marked else 1)

"""The methods of torch's wrapper that trainers call, each by what it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshdist as md
from meshdist.errors import ArgumentError, GradientError, KindError
from tests.ddp.models import Fragile, Two


def one_weight() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def step(model: Any, value: float) -> float:
    model.zero_grad()
    model(torch.full((1, 1), value)).sum().backward()
    return model.module.weight.grad.item()


# -- _register_builtin_comm_hook -----------------------------------------------------------------


def test_builtin_hooks_are_ours_of_the_same_meaning() -> None:
    kinds = torch.distributed.BuiltinCommHookType

    def program(kind: Any) -> tuple[list[float], str]:
        model = md.DDP(nn.Linear(1, 1, bias=False))
        model._register_builtin_comm_hook(kind)
        steps = [step(model, 1 / 3 + md.get_rank()) for _ in range(3)]
        return steps, model.reducer.reducer_state.hook.name

    exact = (2 * torch.tensor(1 / 3) + 1).div(2).item()
    for steps, name in md.simulate(program, 2, (kinds.ALLREDUCE,)):
        assert steps == [exact] * 3
        assert name == "allreduce_hook"
    for steps, name in md.simulate(program, 2, (kinds.FP16_COMPRESS,)):
        assert steps == pytest.approx([exact] * 3, abs=1e-3)
        assert exact not in steps
        assert name == "fp16_compress_hook"


def test_what_is_no_builtin_hook_is_rejected() -> None:
    model = md.simulate(lambda: md.DDP(nn.Linear(1, 1)), 1)[0]
    with pytest.raises(KindError) as error:
        model._register_builtin_comm_hook(md.comm_hooks.allreduce_hook)
    assert str(error.value) == (
        "comm_hook_type is of type function\n"
        "  expected: a torch.distributed.BuiltinCommHookType\n"
        "  fix:      register other hooks with model.register_comm_hook(state, hook)"
    )


# -- _set_static_graph ----------------------------------------------------------------------------


def test_a_static_graph_may_be_promised_before_the_first_backward() -> None:
    def program() -> list[Any]:
        model = md.DDP(Two())
        model._set_static_graph()
        seen: list[Any] = [model.static_graph]
        for _ in range(3):
            model(torch.ones(1, 1), use="left").backward()
        return [*seen, model.module.right.weight.grad]

    assert md.simulate(program, 2) == [[True, None]] * 2


def test_a_static_graph_cannot_be_promised_later() -> None:
    def program() -> str:
        model = md.DDP(one_weight())
        step(model, 1.0)
        with pytest.raises(GradientError) as error:
            model._set_static_graph()
        assert not model.static_graph
        return str(error.value)

    for rank, text in enumerate(md.simulate(program, 2)):
        assert text == (
            "cannot set static_graph after a backward\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: static_graph set before the first backward, on every rank\n"
            "  fix:      set it right after you wrap the model"
        )


def test_a_promise_that_is_given_twice_or_beside_unused_parameters_warns() -> None:
    def program() -> None:
        model = md.DDP(one_weight(), static_graph=True)
        with pytest.warns(UserWarning, match="static_graph is already True"):
            model._set_static_graph()
        model = md.DDP(one_weight(), find_unused_parameters=True)
        with pytest.warns(UserWarning, match="no effect with static_graph=True"):
            model._set_static_graph()
        assert model.static_graph

    md.simulate(program, 1)


# -- parameters and buffers that are left alone ---------------------------------------------------


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = one_weight()
        self.own = one_weight()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) * self.own(x)


def test_ignored_parameters_and_buffers_are_each_ranks_own() -> None:
    def program() -> list[float]:
        rank = md.get_rank()
        module = Partly()
        module.count.fill_(rank)
        with torch.no_grad():
            module.own.weight.fill_(1.0 + rank)
        md.DDP._set_params_and_buffers_to_ignore_for_model(module, ["own.weight", "count"])
        model = md.DDP(module)
        assert model.parameters_to_ignore == {"own.weight", "count"}
        model(torch.ones(1, 1)).sum().backward()
        grads = [module.shared.weight.grad.item(), module.own.weight.grad.item()]
        return [*grads, module.own.weight.item(), module.count.item()]

    # d/d shared = own: 1 and 2; d/d own = shared = 1
    assert md.simulate(program, 2) == [[1.5, 1.0, 1.0, 0.0], [1.5, 1.0, 2.0, 1.0]]


def test_torchs_wrapper_finds_the_same_names_and_ours_those_that_torchs_has_noted() -> None:
    ours, theirs = Partly(), Partly()
    md.DDP._set_params_and_buffers_to_ignore_for_model(ours, ["own.weight", "count"])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        theirs, ["own.weight", "count"]
    )
    noted = "_ddp_params_and_buffers_to_ignore"
    assert getattr(ours, noted) == getattr(theirs, noted)
    for module in (ours, theirs):
        for wrapper in (md.DDP, DistributedDataParallel):
            assert list(wrapper._get_data_parallel_params(module)) == [module.shared.weight]
        # torch's gives the ignored ones too where names are asked for
        ((name, parameter),) = md.DDP._get_data_parallel_params(module, named_params=True)
        assert name == "shared.weight" and parameter is module.shared.weight


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (
            ["own.bias", "count"],
            "Partly has no parameter or buffer named 'own.bias'\n"
            "  expected: names from named_parameters() or named_buffers()\n"
            "  found:    1 of 2 names unknown\n"
            "  fix:      take the names from dict(module.named_parameters())",
        ),
        ([".count"], "  fix:      pass 'count'"),
    ],
)
def test_names_that_do_not_exist_are_rejected(names: list[str], text: str) -> None:
    module = Partly()
    with pytest.raises(ArgumentError) as error:
        md.DDP._set_params_and_buffers_to_ignore_for_model(module, names)
    assert text in str(error.value)
    assert not hasattr(module, "_ddp_params_and_buffers_to_ignore")


# -- the group, the end of a backward, hooks ------------------------------------------------------


def test_another_group_averages_from_the_next_forward_on() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = md.DDP(one_weight(), device_mesh=mesh["dp"])
        seen = [step(model, 1.0 + md.get_rank()) for _ in range(2)]
        model._update_process_group(mesh.get_group("tp"))
        assert model.process_group is mesh.get_group("tp") and model.device_mesh is None
        return [*seen, *(step(model, 1.0 + md.get_rank()) for _ in range(3))]

    assert md.simulate(program, 4) == [
        [2.0, 2.0, 1.5, 1.5, 1.5],
        [3.0, 3.0, 1.5, 1.5, 1.5],
        [2.0, 2.0, 3.5, 3.5, 3.5],
        [3.0, 3.0, 3.5, 3.5, 3.5],
    ]


def test_another_axis_is_the_wrappers_mesh_from_then_on() -> None:
    def program() -> tuple[float, bool]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = md.DDP(one_weight(), device_mesh=mesh["dp"])
        model._update_process_group(mesh["tp"])
        again = copy.deepcopy(model)
        return step(again, 1.0 + md.get_rank()), again.device_mesh == mesh["tp"]

    assert md.simulate(program, 4) == [(1.5, True), (1.5, True), (3.5, True), (3.5, True)]


def test_buckets_that_a_hooks_state_knows_stay_also_in_another_group() -> None:
    def program() -> list[Any]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = md.DDP(  # weights differ over tp
            Two(), device_mesh=mesh["dp"], find_unused_parameters=True, verify_every=0
        )
        group = mesh.get_group("tp")
        model.register_comm_hook(group, md.comm_hooks.allreduce_hook)
        model._update_process_group(group)
        for number in range(4):
            model.zero_grad()
            is_lacking = number == 1 and md.get_rank() == 0
            x = torch.full((1, 1), 1.0 + md.get_rank())
            model(x, use="left" if is_lacking else "both").backward()
        laid = [bucket.is_deferred for bucket in model.reducer.buckets]
        return [laid, [p.grad.item() for p in model.parameters()]]

    found = md.simulate(program, 4)
    assert found == [[[True], [mean, mean]] for mean in (1.5, 1.5, 3.5, 3.5)]


def test_a_hook_without_a_state_averages_over_the_other_group_too() -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = md.DDP(one_weight(), device_mesh=mesh["dp"])
        model.register_comm_hook(None, md.comm_hooks.allreduce_hook)
        model._update_process_group(mesh.get_group("tp"))
        return [step(model, 1.0 + md.get_rank()) for _ in range(2)]

    assert md.simulate(program, 4) == [[mean] * 2 for mean in (1.5, 1.5, 3.5, 3.5)]


def test_a_backward_that_was_interrupted_has_not_ended() -> None:
    def program() -> str:
        model = md.DDP(Fragile())
        model._check_reducer_finalized()
        model(torch.ones(1, 1)).sum().backward()
        model._check_reducer_finalized()
        with pytest.raises(ArithmeticError):
            model(torch.ones(1, 1), fails=True).sum().backward()
        with pytest.raises(GradientError) as error:
            model._check_reducer_finalized()
        model(torch.ones(1, 1)).sum().backward()
        model._check_reducer_finalized()
        return str(error.value)

    for rank, text in enumerate(md.simulate(program, 2)):
        assert text == (
            "the last backward has not ended\n"
            f"  where:    rank {rank}, in the world\n"
            "  found:    a backward that raised, or is running\n"
            "  fix:      run the forward again, which completes the backward on all ranks"
        )


@pytest.mark.parametrize("num_before", [0, 1, 3])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_without_hooks_gradients_stay_local(num_before: int, is_wrapped: bool) -> None:
    def program() -> list[list[float]]:
        model = md.DDP(Two())
        seen = []
        for number in range(num_before + 3):
            if number == num_before:
                model._remove_autograd_hooks()
            model.zero_grad()
            net = model.module if number >= num_before and not is_wrapped else model
            net(torch.full((1, 1), 1.0 + md.get_rank())).backward()
            seen.append([p.grad.item() for p in model.parameters()])
        model.check_gradients()
        return seen

    means = [[1.5, 1.5]] * num_before
    assert md.simulate(program, 2) == [means + [[own, own]] * 3 for own in (1.0, 2.0)]


@pytest.mark.parametrize("value", [True, False])
def test_outputs_are_the_modules_own_whatever_is_set(value: bool) -> None:
    class Kept(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.out = super().forward(x)
            return self.out

    def program() -> bool:
        model = md.DDP(Kept(1, 1))
        model._set_ddp_sink_clone(value)
        return model(torch.ones(1, 1)) is model.module.out

    assert md.simulate(program, 1) == [True]

"""The check of an optimizer's first step on sharded parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import meshdist as md
from meshdist.errors import KindError
from tests.pool import Pool

ELEMENTWISE = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta"]
ELEMENTWISE += ["RMSprop", "Rprop", "ASGD", "SparseAdam"]
BY_ARRAY = {
    "Muon": "use md.optim.Muon, or torch.optim.AdamW",
    "Adafactor": "use torch.optim.AdamW, or gather the parameters for each step, as docs/how-to/",
    "LBFGS": "use torch.optim.AdamW",
}


class Own(torch.optim.SGD):
    """A subclass of an optimizer that updates each element by itself."""


class Taking(Own):
    takes_shards = True


def shards(num: int = 2, tp: int = 2, *, is_equal: bool = False) -> list[nn.Parameter]:
    """Sharded matrices with gradients, of a mesh of this world."""
    mesh = md.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    whole = torch.arange(6.0 * tp).view(3 * tp, 2)
    if is_equal:
        whole = torch.arange(6.0).view(3, 2).repeat(tp, 1)
    found = [nn.Parameter(md.shard(whole + i, "f@tp d", mesh)) for i in range(num)]
    for p in found:
        p.grad = torch.ones_like(p)
    return found


def warnings_of(program: Callable[[], Any], num_ranks: int = 2) -> list[str]:
    """The texts of the warnings of all simulated ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        md.simulate(program, num_ranks)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_of_single_elements_pass(name: str) -> None:
    def program() -> None:
        parameters = shards()
        if name == "SparseAdam":
            for p in parameters:
                assert p.grad is not None
                p.grad = p.grad.to_sparse()
        kind = getattr(torch.optim, name)
        kind(parameters, lr=0.1).step()

    assert warnings_of(program) == []


def test_the_list_has_all_optimizers_of_torch() -> None:
    names = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    assert names == {*ELEMENTWISE, *BY_ARRAY}


@pytest.mark.parametrize("name", BY_ARRAY)
def test_optimizers_of_global_arrays_raise(name: str) -> None:
    def program() -> str:
        parameters = shards()
        before = copy.deepcopy([p.detach() for p in parameters])
        optimizer = getattr(torch.optim, name)(parameters)
        for _ in range(2):  # it raises again
            with pytest.raises(KindError) as raised:
                optimizer.step(lambda: torch.zeros(()))
        assert all(map(torch.equal, parameters, before))
        return str(raised.value)

    for text in md.simulate(program, 2):
        assert text.startswith(
            f"{name} cannot update sharded parameters: the update of an element depends on the "
            "global array\n"
            "  expected: an optimizer that updates each element by itself, or reads annotations\n"
            "  found:    parameter 0, float32[3, 2]{V:tp}; parameter 1, float32[3, 2]{V:tp}\n"
            f"  fix:      {BY_ARRAY[name]}"
        )


def test_they_pass_without_shards_and_on_an_axis_of_one_rank() -> None:
    def program(tp: int) -> None:
        shards(tp=tp)  # registers the check
        for parameters in ([nn.Parameter(torch.ones(2, 2))], shards() if tp == 1 else []):
            for p in parameters:
                p.grad = torch.ones_like(p)
                for name in BY_ARRAY:
                    getattr(torch.optim, name)([p]).step(lambda: torch.zeros(()))

    md.simulate(program, 2, args=(2,))

    def alone() -> None:
        for p in shards(tp=1):
            torch.optim.Muon([p]).step()

    md.simulate(alone, 1)


def test_a_fix() -> None:
    def program() -> None:
        parameters = shards()
        for kind in (md.optim.Muon, torch.optim.AdamW):
            kind(parameters, lr=0.1).step()

    assert warnings_of(program) == []


def test_another_class_warns_once() -> None:
    def program() -> None:
        optimizer = Own(shards(), lr=0.1)
        for _ in range(3):
            optimizer.step()
        Taking(shards(), lr=0.1).step()

    assert warnings_of(program) == 2 * [
        "Own may train sharded parameters wrongly: meshdist does not know whether it updates "
        "each element by itself\n"
        "  expected: a class with takes_shards = True\n"
        "  found:    parameter 0, float32[3, 2]{V:tp}; parameter 1, float32[3, 2]{V:tp}\n"
        "  fix:      set Own.takes_shards = True if it does, or if it reads annotations; "
        "otherwise use torch.optim.AdamW"
    ]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_check_runs_again_with_other_parameters(is_replaced: bool) -> None:
    def program() -> None:
        parameters = shards()
        optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2)) for _ in parameters])
        optimizer.step()
        if is_replaced:
            optimizer.param_groups[0]["params"][:] = parameters
        else:
            optimizer.add_param_group({"params": parameters})
        with pytest.raises(KindError):
            optimizer.step()

    md.simulate(program, 2)


@pytest.mark.parametrize("way", ["annotate", "module", "parallelize", "copy", "varying"])
def test_every_way_to_annotate_a_parameter_registers_the_check(way: str) -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer: nn.Module = nn.Linear(4, 4, bias=False)
        if way == "annotate":
            md.annotate(layer.weight, "f@tp d", mesh=mesh)
        elif way == "varying":
            md.annotate(layer.weight, varying="tp", mesh=mesh)
        elif way == "parallelize":
            md.parallelize(layer, mesh["tp"], {"": "column"}, check=False)
        else:
            md.annotate(layer, {"weight": "f@tp d"}, mesh=mesh)
        if way == "copy":
            layer = copy.deepcopy(layer)
        with pytest.raises(KindError):
            torch.optim.Muon(layer.parameters()).step()

    md.simulate(program, 2)


# -- scalers --------------------------------------------------------------------------------------


class OfFsdp(torch.amp.GradScaler):
    """It has the method of torch's FSDP scaler, which needs torch's process groups to run."""

    _unscale_grads_ = ShardedGradScaler._unscale_grads_

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.process_group = None


def scaled_step(scaler: Any, optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][0]
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("kind", ["torch", "cuda", "subclass", "fused"])
def test_scalers_of_single_ranks_raise(kind: str) -> None:
    class Scaler(torch.amp.GradScaler):
        pass

    def program() -> str:
        (p,) = shards(1)
        scaler = (Scaler if kind == "subclass" else torch.amp.GradScaler)("cpu", 8.0)
        optimizer = torch.optim.Adam([p], fused=kind == "fused")
        before = p.detach().clone()
        with pytest.raises(KindError) as raised:
            scaled_step(scaler, optimizer)
        assert torch.equal(p, before)
        return str(raised.value)

    for text in md.simulate(program, 2):
        assert text == (
            "torch.amp.GradScaler cannot scale gradients of sharded parameters: each rank checks "
            "its own shards, and ranks would skip different steps\n"
            "  expected: a scaler that skips a step on all ranks or on none\n"
            "  found:    parameter 0, float32[3, 2]{V:tp}\n"
            "  fix:      use md.optim.GradScaler(device, mesh=mesh)"
        )


def test_the_rank_that_does_not_skip_raises() -> None:
    def program() -> str:
        (p,) = shards(1)
        scaler, optimizer = torch.amp.GradScaler("cpu", 8.0), torch.optim.SGD([p])
        scaler.scale(p.sum() * (3e38 if md.get_rank() else 1.0)).backward()
        try:
            scaler.step(optimizer)
        except KindError:
            return "raised"
        return "skipped"

    assert md.simulate(program, 2) == ["raised", "skipped"]


def test_other_scalers_pass() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        scalers = [
            OfFsdp("cpu"),
            md.optim.GradScaler("cpu", mesh=mesh),
            torch.amp.GradScaler("cpu", enabled=False),
        ]
        for scaler in scalers:
            for is_fused in (False, True):
                scaled_step(scaler, torch.optim.Adam(shards(1), fused=is_fused))
        replica = nn.Parameter(torch.ones(2))
        scaled_step(torch.amp.GradScaler("cpu"), torch.optim.SGD([replica]))

    assert warnings_of(program) == []


# -- shards that were drawn after the split -------------------------------------------------------


def test_equal_shards_warn_once() -> None:
    def program() -> None:
        optimizer = torch.optim.SGD([*shards(1), *shards(2, is_equal=True)], lr=0.0)
        optimizer.step()
        optimizer.step()

    assert warnings_of(program) == 2 * [
        "2 sharded parameters of SGD are equal on all ranks along 'tp'\n"
        "  expected: different parts of a global array (equal parts were probably initialized "
        "after the split, from the same seed)\n"
        "  found:    parameter 1, float32[3, 2]{V:tp}; parameter 2, float32[3, 2]{V:tp}\n"
        "  fix:      initialize the model before you split it, or pass the initialization to "
        "md.tensor_parallel.apply(model, fn)"
    ]


def equal_shards_warn() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.optim.SGD(shards(1, tp=3, is_equal=True)).step()
        torch.optim.SGD(shards(1, tp=3)).step()
    return [str(each.message).splitlines()[0] for each in caught]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    text = "1 sharded parameter of SGD is equal on all ranks along 'tp'"
    assert pool.run(equal_shards_warn, 3, backend=backend) == [[text]] * 3


def test_constant_shards_and_separate_values_pass() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        expert = nn.Parameter(torch.arange(3.0))
        md.annotate(expert, varying="tp", mesh=mesh)
        constant = nn.Parameter(md.shard(torch.ones(4), "f@tp", mesh))
        empty = md.annotate(nn.Parameter(torch.zeros(0)), "f@tp", mesh=mesh)
        wide = nn.Parameter(md.shard(torch.zeros(0, 4), "f@tp d", mesh))
        torch.optim.SGD([expert, constant, empty, wide]).step()

    assert warnings_of(program) == []


def test_stages_of_a_pipeline_compare_along_their_own_axes() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        stage = mesh.get_local_rank("pp")
        sharded = torch.arange(6.0).repeat(2 - stage)  # equal shards on the first stage
        p = nn.Parameter(md.shard(sharded, "f@tp", mesh, check=False))
        others = [nn.Parameter(torch.ones(2)) for _ in range(stage)]
        torch.optim.SGD([*others, p]).step()

    found = warnings_of(program, 4)
    assert [text.splitlines()[2] for text in found] == 2 * [
        "  found:    parameter 0, float32[6]{V:tp}"
    ]


def test_meshes_that_other_ranks_may_not_know_are_not_compared() -> None:
    def program() -> None:
        for ranks in ([0, 1], [0, 2]):  # rank 0 has two axes of this name, ranks 1 and 2 have one
            if md.get_rank() in ranks:
                mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=("tp",))
                p = md.annotate(nn.Parameter(torch.arange(3.0)), "f@tp", mesh=mesh)
        if md.get_rank() == 1:
            torch.optim.SGD([p]).step()  # a comparison would wait for rank 0

    assert warnings_of(program, 3) == []


def test_inside_a_backward_nothing_is_compared() -> None:
    def program() -> None:
        (p,) = shards(1, is_equal=True)
        optimizer = torch.optim.SGD([p])
        p.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        if md.get_rank() == 0:
            p.sum().backward()

    assert warnings_of(program) == []

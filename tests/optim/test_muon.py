"""``md.optim.Muon``: steps of shards are torch's steps of global matrices."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist.errors import AxisError, KindError, MeshError, MismatchError
from tests.pool import Pool

from .training import SHAPES, alone, data, matrices, new_model, together

OPTIONS: dict[str, dict[str, Any]] = {
    "torch's defaults": {"lr": 0.02},
    "other options": {
        "lr": 0.1,
        "weight_decay": 0.3,
        "momentum": 0.8,
        "nesterov": False,
        "ns_steps": 3,
        "adjust_lr_fn": "match_rms_adamw",
    },
    "a tensor as lr": {"lr": torch.tensor([0.02])},
}


def muon(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
    return muon_with("torch's defaults")(model, mesh)


def muon_with(name: str, has_mesh: bool = True) -> Any:
    def make(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
        options = OPTIONS[name]
        if mesh is None:
            return torch.optim.Muon(matrices(model), **options)
        named = {"mesh": mesh} if has_mesh else {}
        return md.optim.Muon(matrices(model), **options, **named)

    return make


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_typed", [False, True], ids=["", "typed"])
def test_steps_are_those_of_one_process(shape: tuple[int, ...], is_typed: bool) -> None:
    num_ranks = shape[0] * shape[1] * shape[2]
    found = md.simulate(together, num_ranks, args=(shape, muon, is_typed))
    assert max(found) < 1e-12


@pytest.mark.parametrize("name", [*OPTIONS][1:])
def test_options(name: str) -> None:
    make = muon_with(name, has_mesh=False)
    assert max(md.simulate(together, 3, args=((1, 1, 3), make))) < 1e-12


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    for is_typed in (False, True):
        assert max(pool.run(together, 4, (1, 2, 2), muon, is_typed, backend=backend)) < 1e-12


def test_the_signature_is_that_of_torch_and_a_mesh() -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]
        for kind in (md.optim.Muon, torch.optim.Muon)
    )
    assert ours == [*theirs, ("mesh", None)]


def test_a_mesh_of_another_class() -> None:
    with pytest.raises(KindError, match=r"optim\.Muon needs the groups of a DeviceMesh"):
        md.optim.Muon([nn.Parameter(torch.ones(2, 2))], mesh="tp")  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_keep_the_mesh(way: str) -> None:
    def program() -> bool:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        md.seed(0)
        layer = nn.Linear(4, 6, bias=False)
        md.parallelize(layer, mesh, {"": "column_whole"}, check=False)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer = md.optim.Muon(layer.parameters(), mesh=mesh)
        given = layer, optimizer
        copied = copy.deepcopy(given) if way == "deepcopy" else pickle.loads(pickle.dumps(given))
        md.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))  # also has the axis
        its_layer, its_optimizer = copied
        its_layer.weight.grad = torch.ones_like(its_layer.weight)
        its_optimizer.step()
        optimizer.step()
        return torch.equal(its_layer.weight, layer.weight)

    assert md.simulate(program, 2) == [True, True]


def test_step_hooks_run_once_and_a_closure_is_called_with_gradients() -> None:
    torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])  # torch then adds its hooks to the class
    p = nn.Parameter(torch.ones(2, 2))
    optimizer, calls = md.optim.Muon([p]), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert calls == ["before", "after"]
    assert not torch.equal(p, torch.ones(2, 2))


def trained(
    mesh: md.DeviceMesh, folder: str, steps: int, *, saves: bool = False, loads: bool = False
) -> list[float]:
    model, (x, target), losses = new_model(), data(), []
    md.parallelize(model, mesh["tp"], {"up": "column", "down": "row"})
    optimizer = md.optim.Muon(matrices(model), lr=0.1, mesh=mesh)
    others = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    state = md.checkpoint.State(model=model, optimizer=[optimizer, others])
    with mesh:
        if loads:
            md.checkpoint.load(state, folder)
        for _ in range(steps):
            model.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            md.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            others.step()
            losses.append(loss.item())
        if saves:
            md.checkpoint.save(state, folder)
    return losses


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_checkpoint_goes_on_at_another_size(tp: int, tmp_path: Path) -> None:
    def program(tp: int, **options: Any) -> list[float]:
        mesh = md.init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
        return trained(mesh, str(tmp_path / "saved"), **options)

    whole = md.simulate(program, 2, args=(2,), kwargs={"steps": 6})[0]
    first = md.simulate(program, 2, args=(2,), kwargs={"steps": 3, "saves": True})[0]
    then = md.simulate(program, tp, args=(tp,), kwargs={"steps": 3, "loads": True})[0]
    assert first + then == pytest.approx(whole, abs=1e-12)
    assert whole[-1] < whole[0]


def test_an_expert_is_a_separate_matrix() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        torch.manual_seed(md.get_rank())
        expert = nn.Parameter(torch.randn(3, 4))
        theirs = nn.Parameter(expert.detach().clone())
        expert.grad = torch.randn(3, 4)
        theirs.grad = expert.grad.clone()
        md.annotate(expert, varying="ep", mesh=mesh)
        md.optim.Muon([expert], mesh=mesh).step()
        torch.optim.Muon([theirs]).step()
        assert torch.equal(expert, theirs)

    md.simulate(program, 2)


def test_a_rank_without_the_gradient_is_an_error_on_all_ranks() -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        both = [nn.Parameter(md.shard(torch.eye(4), "f@tp d", mesh)) for _ in range(2)]
        before = [p.detach().clone() for p in both]
        both[md.get_rank()].grad = torch.ones(2, 4)  # of equal shapes: the gathers would match
        with pytest.raises(MismatchError) as raised:
            md.optim.Muon(both, mesh=mesh).step()
        assert all(map(torch.equal, both, before))
        return str(raised.value)

    for text in md.simulate(program, 2):
        assert (
            "rank 0: all_reduce((1,) uint8, MAX) of optim.Muon.step, without gradients of " in text
        )
        assert "parameters 1" in text and "parameters 0" in text


def test_meshes_without_the_axis() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        other = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        whole, p = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 4))
        md.annotate(p, "f@tp d", mesh=mesh)
        whole.grad, p.grad = torch.eye(2), torch.eye(2, 4)
        with pytest.raises(AxisError) as raised:
            md.optim.Muon([whole, p], mesh=other).step()
        assert str(raised.value) == (
            "no axis 'tp' in the mesh\n"
            "  where:    optim.Muon on DeviceMesh(dp=2)\n"
            "  expected: one of 'dp'"
        )
        mesh.close()
        with pytest.raises(MeshError, match=r"optim\.Muon: no open mesh has 'tp'"):
            md.optim.Muon([whole, p]).step()
        assert torch.equal(whole, torch.ones(2, 2)) and torch.equal(p, torch.ones(2, 4))

    md.simulate(program, 2)


def test_the_oracle_learns() -> None:
    losses, _ = alone(muon)
    assert losses[-1] < 0.95 * losses[0]

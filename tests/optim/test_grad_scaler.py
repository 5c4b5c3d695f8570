"""``md.optim.GradScaler``: all ranks of a mesh skip the same steps."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist.errors import KindError, MeshError
from tests.pool import Pool

AXES = ("pod", "dp", "tp")
SHAPES = [(1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2)]


def overflowing(shape: tuple[int, ...], is_typed: bool = False) -> list[tuple[float, float]]:
    """The losses and scales of steps in float16 of which the first overflow on one rank of tp."""
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=AXES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 8))
    x, target = torch.randn(32, 8), torch.randn(32, 8)
    with torch.no_grad():
        model[2].weight[:, 3] *= 300  # one hidden feature with large weights
    md.parallelize(model, mesh["tp"], {"0": "column", "2": "row"})
    ddp = md.DDP(model, device_mesh=mesh["pod", "dp"])
    x, target = (md.shard(each, "b@(pod,dp) d", mesh) for each in (x, target))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = md.optim.GradScaler("cpu", init_scale=2.0**12, mesh=mesh)
    if shape[2] == 1:  # the oracle: DDP makes an infinity one on all ranks
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    found = []

    def step() -> None:
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(ddp(x).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        md.all_reduce(mean, op=md.ReduceOp.AVG, group=mesh["pod", "dp"])
        found.append((mean.item(), scaler.get_scale()))

    for _ in range(8):
        if is_typed:
            with md.typed(mesh):
                step()
        else:
            step()
    return found


def check(found: list[list[tuple[float, float]]], wanted: list[tuple[float, float]]) -> None:
    assert all(each == found[0] for each in found)
    assert [scale for _, scale in found[0]] == [scale for _, scale in wanted]
    for mine, theirs in zip(found[0], wanted, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-2)  # in float16


@cache
def unsplit(pod: int, dp: int) -> list[tuple[float, float]]:
    return md.simulate(overflowing, pod * dp, args=((pod, dp, 1),))[0]


def test_the_oracle_skips_some_steps() -> None:
    losses, scales = zip(*unsplit(1, 1), strict=True)
    assert scales[-1] == 64.0
    assert losses[0] == losses[5] > losses[-1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ranks_skip_the_steps_of_the_unsplit_model(shape: tuple[int, ...]) -> None:
    num_ranks = shape[0] * shape[1] * shape[2]
    check(md.simulate(overflowing, num_ranks, args=(shape,)), unsplit(*shape[:2]))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    check(pool.run(overflowing, 4, (1, 2, 2), backend=backend), unsplit(1, 2))


def test_ranks_without_gradients_or_a_loss_take_part() -> None:
    def program(is_unscaled: bool) -> tuple[float, float]:
        mesh = md.init_device_mesh("cpu", (3,), mesh_dim_names=("pp",))
        stage = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([stage], lr=1.0)
        scaler = md.optim.GradScaler("cpu", 8.0, mesh=mesh)
        if md.get_rank() == 2:  # the last stage, whose gradient overflows; the first has none
            scaler.scale(stage.sum() * 3e38).backward()
        elif md.get_rank() == 1:
            stage.grad = torch.ones(1)
        if is_unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return stage.item(), scaler.get_scale()

    for is_unscaled in (False, True):
        assert md.simulate(program, 3, args=(is_unscaled,)) == [(0.0, 4.0)] * 3


def test_torchs_scaler_on_stages_of_a_pipeline_skips_different_steps() -> None:
    def program() -> tuple[float, float]:
        stage = nn.Parameter(torch.zeros(1))
        optimizer, scaler = torch.optim.SGD([stage], lr=1.0), torch.amp.GradScaler("cpu", 8.0)
        scaler.scale(stage.sum() * (3e38 if md.get_rank() else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return stage.item(), scaler.get_scale()

    assert md.simulate(program, 2) == [(-1.0, 8.0), (0.0, 4.0)]


class Fused(torch.optim.SGD):
    """As fused optimizers do, it skips its own step."""

    _step_supports_amp_scaling = True
    takes_shards = True
    found_inf: torch.Tensor
    found: float

    def step(self, closure: Any = None) -> Any:
        self.found = self.found_inf.item()


def test_optimizers_that_skip_their_own_steps() -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        p = md.annotate(nn.Parameter(torch.ones(1)), "f@tp", mesh=mesh)
        optimizer, scaler = Fused([p]), md.optim.GradScaler("cpu", 8.0, mesh=mesh)
        scaler.scale(p.sum() * (3e38 if md.get_rank() else 1.0)).backward()
        scaler.step(optimizer)
        return optimizer.found

    assert md.simulate(program, 2) == [1.0, 1.0]


def test_inside_typed() -> None:
    def program() -> list[tuple[list[float], float]]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        p = nn.Parameter(md.shard(torch.ones(4), "f@tp", mesh))
        optimizer = torch.optim.SGD([p], lr=1.0)
        scaler = md.optim.GradScaler("cpu", 8.0, mesh=mesh)
        found = []
        for factor in (1e38 * md.get_rank(), 0.5):
            with md.typed(mesh):
                loss = md.lax.psum((p * factor).sum(), "tp")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            found.append((p.tolist(), scaler.get_scale()))
        return found

    assert md.simulate(program, 2) == [[([1.0, 1.0], 4.0), ([0.5, 0.5], 4.0)]] * 2


def test_the_signature_and_the_state_are_those_of_torch() -> None:
    ours, theirs = (
        [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]
        for kind in (md.optim.GradScaler, torch.amp.GradScaler)
    )
    assert ours == [*theirs, ("mesh", None)]

    def program() -> dict[str, Any]:
        with md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)):
            scaler = md.optim.GradScaler("cpu", 8.0)
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
        return scaler.state_dict()

    torchs = torch.amp.GradScaler("cpu", 2.0).state_dict()
    assert md.simulate(program, 1) == [torchs]


def test_no_mesh() -> None:
    with pytest.raises(MeshError) as raised:
        md.optim.GradScaler("cpu")
    assert str(raised.value) == (
        "GradScaler: there is no current mesh\n"
        "  expected: a mesh with named axes\n"
        "  fix:      call it inside `with mesh:`, or pass the mesh: GradScaler(..., mesh=mesh)"
    )
    with pytest.raises(KindError, match="GradScaler needs the groups of a DeviceMesh"):
        md.optim.GradScaler("cpu", mesh="tp")  # type: ignore[arg-type]

"""What torch makes new tensors on by default concerns none of ours: calls on the CPU stay there.

Of the devices that a machine without GPUs has, "meta" is one whose memory nobody can read.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

CPU = torch.device("cpu")
OPS = md.ReduceOp.SUM, md.ReduceOp.AVG, md.ReduceOp.MAX, md.ReduceOp.premul_sum(2)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype, device=CPU)


def reductions(size: int) -> list[Any]:
    found: list[Any] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in OPS:
            x, whole, parts = (
                ones(3, dtype=dtype),
                ones(3 * size, dtype=dtype),
                ones(2, dtype=dtype),
            )
            md.all_reduce(x, op)
            md.reduce(whole[:3], 0, op)
            md.reduce_scatter_tensor(x, whole, op)
            md.reduce_scatter(parts, [ones(4, dtype=dtype)[::2] for _ in range(size)], op)
            found.append((x.tolist(), parts.tolist()))
    factor = md.ReduceOp.premul_sum(1j)
    z = ones(2, dtype=torch.complex64)
    md.all_reduce(z, factor)
    return [*found, z.tolist()]


def moves(size: int, mesh: md.DeviceMesh) -> list[Any]:
    rank = md.get_rank()
    x, parts = ones(3) + rank, [ones(3) for _ in range(size)]
    md.all_gather(parts, x)
    md.gather(x, parts if rank == 0 else None, 0)
    md.scatter(x, parts if rank == 0 else None, 0)
    gives, takes = [1 + rank] * size, [1 + other for other in range(size)]
    y = ones(sum(takes))
    md.all_to_all_single(y, ones(sum(gives)) * rank, takes, gives)
    rows = ones(2 * size, 2).requires_grad_()
    received, _ = md.experts.dispatch(
        rows, torch.arange(2 * size, device=CPU).view(-1, 1) % size, "x", size, mesh=mesh
    )
    moved = md.lax.ragged_all_to_all(
        ones(size),
        ones(size),
        list(range(size)),
        [1] * size,
        [rank] * size,
        [1] * size,
        axis_name="x",
        mesh=mesh,
    )
    shared = md.shared_empty(4).fill_(1.0)
    return [x.tolist(), y.tolist(), received.shape[0], moved.tolist(), shared.sum().item()]


def training(mesh: md.DeviceMesh, folder: str) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2, device=CPU)
    replica = md.DDP(model, device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        replica(ones(3, 4) + md.get_rank()).sum().backward()
        md.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    state = {"model": model.state_dict(), "steps": 2}
    md.checkpoint.save(state, folder)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    md.checkpoint.load(state, folder)
    return [bool((model.weight == before).all()), {p.device.type for p in model.parameters()}]


def everything(device: str | None, size: int, folder: str) -> list[Any]:
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    if device is None:
        return [reductions(size), moves(size, mesh), training(mesh, folder)]
    with torch.device(device):
        return [reductions(size), moves(size, mesh), training(mesh, folder)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_on_the_cpu_stay_there(backend: str, pool: Pool, tmp_path: pathlib.Path) -> None:
    expected = BACKENDS[backend](pool, everything, 2, None, 2, str(tmp_path / "here"))
    assert expected[0][2] == [True, {"cpu"}]
    assert BACKENDS[backend](pool, everything, 2, "meta", 2, str(tmp_path / "meta")) == expected


def compressed(device: str) -> list[float]:
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    torch.manual_seed(0)
    replica = md.DDP(nn.Linear(4, 4, device=CPU), device_mesh=mesh)
    state = md.comm_hooks.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    replica.register_comm_hook(state, md.comm_hooks.powerSGD_hook)
    with torch.device(device):
        for _ in range(4):
            replica.zero_grad()
            replica(ones(3, 4)).sum().backward()
    return replica.module.weight.grad.flatten().tolist()


def test_a_hook_draws_on_the_cpu() -> None:
    assert md.simulate(compressed, 2, args=("meta",)) == md.simulate(compressed, 2, args=("cpu",))

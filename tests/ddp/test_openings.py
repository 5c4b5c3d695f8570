"""Over an axis that NCCL serves a wrapper opens no backend for CPU tensors: all lies on the
device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.distributed import ProcessGroup
from tests.ddp.pretended_gpu import HostTensor, pretended_gpu


class Model(nn.Module):
    """With buffers, and a part that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, is_partial: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))
        return x if is_partial else self.last(x)


def step(model: md.DDP, *, is_partial: bool = False) -> None:
    x = torch.full((5, 3), 1.0 + md.get_rank(), device="cuda")
    x += torch.arange(15, device="cuda").view(5, 3) ** 2
    model(x, is_partial).square().sum().backward()
    with torch.no_grad():
        for one in model.parameters():
            if one.grad is not None:
                one -= one.grad * 1e-3
                one.grad = None


def trains(model: nn.Module, dp: md.DeviceMesh) -> None:
    """Steps with all that travels: buffers, flags, the map, checksums (behind the second)."""
    wrapped = md.DDP(model, device_mesh=dp, find_unused_parameters=True)
    for number in range(4):
        step(wrapped, is_partial=number == 2)
    wrapped.check_gradients()
    with wrapped.no_sync():
        step(wrapped)
    md.DDP(copy.deepcopy(model), device_mesh=dp, static_graph=True, broadcast_buffers=False)


def joins(model: nn.Module, dp: md.DeviceMesh) -> None:
    """An uneven loop, whose ranks without data answer the others' calls."""
    wrapped = md.DDP(model, device_mesh=dp)
    with wrapped.join():
        for _ in range(1 + dp.get_local_rank()):
            step(wrapped)


def differs(model: nn.Module, dp: md.DeviceMesh) -> None:
    extra = nn.Linear(1 + dp.get_local_rank(), 1, device="cuda")
    with pytest.raises(md.MismatchError, match="the ranks wrap different"):
        md.DDP(nn.Sequential(model, extra), device_mesh=dp)


def lacks(model: nn.Module, dp: md.DeviceMesh) -> None:
    wrapped = md.DDP(model, device_mesh=dp)
    step(wrapped, is_partial=dp.get_local_rank() == 1)
    with pytest.raises(md.errors.GradientError, match="parameters got no gradient"):
        step(wrapped)


def parts(model: nn.Module, dp: md.DeviceMesh) -> None:
    wrapped = md.DDP(model, device_mesh=dp)
    step(wrapped)
    if dp.get_local_rank() == 1:
        with torch.no_grad():
            model.last.weight += 1
    step(wrapped)
    with pytest.raises(md.errors.GradientError, match="the replicas have diverged"):
        step(wrapped)


@pytest.mark.parametrize("program", [trains, joins, differs, lacks, parts])
def test_a_wrapper_opens_the_backend_of_its_device_alone(
    program: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[tuple[str, str]] = set()
    open_device_group, model = ProcessGroup.open_device_group, Model()

    def note(self: ProcessGroup, device_type: str, *more: Any) -> Any:
        asked.add((self.name, device_type))
        return open_device_group(self, device_type, *more)

    def rank() -> None:
        mesh = md.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
        program(copy.deepcopy(model), mesh["dp"])

    monkeypatch.setattr(ProcessGroup, "open_device_group", note)
    with pretended_gpu():
        md.simulate(rank, 4)
    axes = [f"axis {axis!r} of DeviceMesh(dp=2, tp=2)" for axis in ("dp", "tp")]
    assert asked == {(axis, "cuda") for axis in axes}


def test_a_tensor_of_the_host_is_told_from_others() -> None:
    def rank() -> list[str]:
        mesh = md.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
        there = torch.ones(2, device="cuda")
        made = [torch.ones(2), torch.ones(2) + 1, there.cpu(), there + 1, torch.ones(2).to("cuda")]
        assert [isinstance(one, HostTensor) for one in made] == [True] * 3 + [False] * 2
        md.all_reduce(made[0], group=mesh["dp"])  # opens the backend for CPU tensors
        return [str(one.device) for one in made]

    with pretended_gpu():
        assert md.simulate(rank, 2) == [["cpu"] * 3 + ["cuda:0"] * 2] * 2

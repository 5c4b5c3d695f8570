"""Split models under torch.compile: the numbers of one device."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

from .split_models import (
    SEQUENCE_PLAN,
    WHOLE_PLAN,
    Sizes,
    copied,
    difference,
    draw_text,
    loss_of,
    make,
)

NOT_A_LEAF = "The .grad attribute of a Tensor"
"""The warning of torch 2.13 at any compiled block that follows another."""


def mesh_of(size: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def compiled_steps(plan: dict[str, str], backend: str, *, is_method: bool) -> float:
    """Return the largest difference from one device in steps of two lengths, compiled."""
    torch._dynamo.reset()
    tp = md.get_world_size()
    mesh = mesh_of(tp)
    sizes = Sizes(heads=tp, hidden=tp + 3)
    whole = make(sizes)
    split = md.parallelize(copied(whole), mesh["tp"], plan)
    compiled: Any = split
    if is_method:
        split.compile(backend=backend)
    else:
        compiled = torch.compile(split, backend=backend)
    worst = 0.0
    for length in (tp, 2 * tp):
        text = draw_text(sizes, 2, length)
        for module, forward in ((split, compiled), (whole, whole)):
            module.zero_grad()
            loss_of(forward, text).backward()
        worst = max(worst, difference(split, whole, mesh))
    return worst


@pytest.mark.filterwarnings(f"ignore:{NOT_A_LEAF}")
@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 3, 5))])
def test_a_compiled_model_has_the_numbers_of_one_device(
    plan: dict[str, str], is_method: bool, size: int
) -> None:
    program = partial(compiled_steps, plan, "eager", is_method=is_method)
    assert max(md.simulate(program, size)) < 1e-13


@pytest.mark.parametrize(
    "backend",
    ["shm", *(pytest.param(backend, marks=pytest.mark.soak) for backend in ("gloo", "mpi"))],
)
def test_a_compiled_model_on_processes(pool: Pool, backend: str) -> None:
    def program() -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", NOT_A_LEAF)
            return compiled_steps(SEQUENCE_PLAN, "aot_eager", is_method=False)

    assert max(BACKENDS[backend](pool, program, 2)) < 1e-13


def test_a_whole_graph_of_a_split_layer_is_rejected() -> None:
    def program() -> str:
        md.seed(0)
        layer = md.parallelize(nn.Linear(4, 4), mesh_of(2), {"": "column"})
        net = torch.compile(nn.Sequential(layer), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
            net(torch.ones(2, 4))
        return str(caught.value)

    assert "meshdist calls cannot be part of a graph" in md.simulate(program, 2)[0]


@pytest.mark.filterwarnings(f"ignore:{NOT_A_LEAF}")
@pytest.mark.parametrize("what", ["module", "wrapper"])
def test_a_compiled_wrapper_of_a_split_model(what: str) -> None:
    def program(what: str) -> list[torch.Tensor]:
        torch._dynamo.reset()
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sizes = Sizes(heads=2, hidden=5)
        split = md.parallelize(make(sizes), mesh["tp"], WHOLE_PLAN)
        if what == "module":
            split.compile(backend="aot_eager")
        model: Any = md.DDP(split, device_mesh=mesh["dp"])
        if what == "wrapper":
            model = torch.compile(model, backend="aot_eager")
        for step in range(3):
            model.zero_grad()
            text = draw_text(sizes, 4, 4 + 2 * step)
            loss_of(model, text.chunk(2)[mesh.get_local_rank("dp")]).backward()
        return [p.grad for p in split.parameters() if p.grad is not None]

    for pair in zip(md.simulate(program, 4, (what,)), md.simulate(program, 4, ("",)), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-13)

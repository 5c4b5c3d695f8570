"""One training program on (dp), (dp, tp) and (pod, dp, tp): the steps of one device on each."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import meshdist as md
from tests.ddp.pretended_gpu import pretended_gpu
from tests.pool import Pool
from tests.two_hosts import TwoHosts

from .split_models import SEQUENCE_PLAN, WHOLE_PLAN, Sizes, difference, draw_text, make

AXES = ("pod", "dp", "tp")
BATCH, LENGTH, STEPS = 8, 12, 3


@dataclass(frozen=True)
class Case:
    """A mesh (pod, dp, tp), a model, and how it is trained.

    Args:
        frozen: so many of the parameters, from the first, are not trained.
        num_parts: a step adds up so many backwards, all but the last without synchronisation.
    """

    shape: tuple[int, ...]
    sizes: Sizes
    cuts_sequence: bool = False
    frozen: int = 0
    num_parts: int = 1
    has_unused: bool = False
    is_copied: bool = False


class Trained(nn.Module):
    """A language model, and a weight that no rank uses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.inner = make(case.sizes)
        self.spare = nn.Parameter(torch.ones(3, dtype=torch.float64)) if case.has_unused else None
        for parameter in list(self.inner.parameters())[: case.frozen]:
            parameter.requires_grad_(False)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(index)
        return logits


def loss_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def alone(case: Case) -> tuple[nn.Module, list[float]]:
    """One device's model behind all steps, with the last gradients, and the norms."""
    model = Trained(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.num_parts):
            loss_of(model, texts_of(case, step, part)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
    return model, norms


def texts_of(case: Case, step: int, part: int) -> torch.Tensor:
    text = draw_text(case.sizes, BATCH, LENGTH)
    return (text + 3 * step + part) % case.sizes.num_classes


def together(case: Case) -> tuple[float, float]:
    """The largest difference from one device: of parameters and gradients; of norms, relative."""
    return trained_together(case, "cpu", Trained(case), *alone(case))


def trained_together(
    case: Case, device: str, model: nn.Module, whole: nn.Module, wanted: list[float]
) -> tuple[float, float]:
    """Train ``model``; the largest differences from one device's model, and from its norms."""
    mesh = md.init_device_mesh(device, case.shape, mesh_dim_names=AXES)
    plan = SEQUENCE_PLAN if case.cuts_sequence else WHOLE_PLAN
    md.parallelize(model, mesh["tp"], {f"inner.{name}": word for name, word in plan.items()})
    if case.is_copied:
        model = copy.deepcopy(model)
    options = {"find_unused_parameters": True} if case.has_unused else {}
    ddp = md.DDP(model, device_mesh=mesh["pod", "dp"], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.num_parts):
            text = texts_of(case, step, part).to(device)
            mine = md.shard(text, "b@(pod,dp) s", mesh)
            ddp.require_backward_grad_sync = part == case.num_parts - 1
            loss_of(ddp, mine).backward()
        norms.append(md.clip_grad_norm_(model.parameters(), 0.5, mesh=mesh).item())
        optimizer.step()
    return difference(model, whole, mesh), max(
        abs(a - b) / b for a, b in zip(norms, wanted, strict=True)
    )


SHAPES = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 1, 2),
    (1, 2, 2),
    (1, 1, 3),
    (1, 2, 3),
    (2, 1, 2),
    (2, 2, 2),
    (1, 4, 2),
    (2, 4, 2),
    (1, 4, 4),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from(SHAPES))
    sizes = Sizes(
        num_classes=draw(st.integers(max(5, shape[2]), 13)),
        heads=shape[2] * draw(st.integers(1, 2)),
        hidden=draw(st.integers(shape[2], 9)),
        layers=draw(st.integers(1, 2)),
        is_tied=draw(st.booleans()),
        has_bias=draw(st.booleans()),
    )
    return Case(
        shape,
        sizes,
        cuts_sequence=draw(st.booleans()),
        frozen=draw(st.integers(0, 3)),
        num_parts=draw(st.integers(1, 2)),
        has_unused=draw(st.booleans()),
        is_copied=draw(st.booleans()),
    )


def check(case: Case) -> None:
    whole, wanted = alone(case)  # once for all ranks

    def program() -> tuple[float, float]:
        return trained_together(case, "cpu", Trained(case), whole, wanted)

    for found, of_norms in md.simulate(program, math.prod(case.shape)):
        assert found < 1e-11 and of_norms < 1e-9  # three steps amplify roundings of the norm


@settings(max_examples=6)
@given(cases())
def test_steps_are_those_of_one_device(case: Case) -> None:
    check(case)


@pytest.mark.soak
@settings(max_examples=300)
@given(cases())
def test_three_hundred(case: Case) -> None:
    check(case)


ON_BACKENDS = [
    Case((1, 2, 2), Sizes(is_tied=True), cuts_sequence=True, num_parts=2),
    Case((1, 1, 3), Sizes(heads=3), cuts_sequence=True, is_copied=True),
    Case((2, 1, 2), Sizes(num_classes=7), has_unused=True),
]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("case", ON_BACKENDS, ids=lambda case: str(case.shape))
def test_over_processes(pool: Pool, backend: str, case: Case) -> None:
    found: Sequence[tuple[float, float]] = pool.run(
        together, math.prod(case.shape), case, backend=backend
    )
    assert max(map(max, found)) < 1e-11


@pytest.mark.parametrize("backend", [None, "gloo"])
@pytest.mark.parametrize("hosts", ["AABB", "ABAB"], ids=["data over hosts", "layers over hosts"])
def test_over_two_hosts(two_hosts: TwoHosts, hosts: str, backend: str | None) -> None:
    for case in (ON_BACKENDS[0], ON_BACKENDS[2]):
        found = two_hosts.run(together, 4, case, backend=backend, hosts=hosts)
        assert max(map(max, found)) < 1e-11


@pytest.mark.parametrize("case", ON_BACKENDS, ids=lambda case: str(case.shape))
def test_over_nccl(case: Case) -> None:
    """As far as a machine without a GPU can show it, by a stand-in."""
    model, (whole, wanted) = Trained(case), alone(case)  # made before, they lie on the GPU

    def rank() -> tuple[float, float]:
        return trained_together(case, "cuda", copy.deepcopy(model), whole, wanted)

    with pretended_gpu():
        found = md.simulate(rank, math.prod(case.shape))
    assert max(map(max, found)) < 1e-11

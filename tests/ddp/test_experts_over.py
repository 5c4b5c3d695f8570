"""`experts_over`: a model with experts trains as on one process, over any mesh and in any way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.errors import (
    AxisError,
    AxisTypeError,
    GradientError,
    JoinError,
    KindError,
    MeshError,
    MismatchError,
)
from tests.pool import Pool

F64 = torch.float64
WIDTH, EXPERTS, CHOSEN, VOCABULARY, LENGTH, BATCH, STEPS = 6, 4, 2, 11, 5, 8, 4
SPECS = {"*.up": "e@ep d f", "*.down": "e@ep f d"}


class Mixture(nn.Module):
    """A router and its experts: this rank's share of them, or all of them without a mesh."""

    def __init__(self, mesh: md.DeviceMesh | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, WIDTH, 8) / 2, torch.randn(EXPERTS, 8, WIDTH) / 2
        if mesh is not None:
            up, down = (md.shard(x, "e@ep a b", mesh) for x in (up, down))
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, probabilities = x.flatten(0, 1), self.router(x.flatten(0, 1)).softmax(-1)
        weights, chosen = probabilities.topk(CHOSEN)
        share = F.one_hot(chosen, EXPERTS).to(x.dtype).mean((0, 1))
        if self.mesh is None:
            every = torch.einsum("tef,efd->ted", self.hidden(rows), self.down)
            y = torch.einsum("tk,tkd->td", weights, every[torch.arange(len(rows))[:, None], chosen])
        else:
            share = lax.pmean(share, ("dp", "ep"), mesh=self.mesh)
            sent, route = md.experts.dispatch(rows, chosen, "ep", EXPERTS, mesh=self.mesh)
            parts = zip(sent.split(route.counts.tolist()), self.up, self.down, strict=True)
            y = md.experts.combine(
                torch.cat([torch.tanh(part @ up) @ down for part, up, down in parts]),
                route,
                weights,
            )
        self.balance = EXPERTS * (share * probabilities.mean(0)).sum()
        return y.view_as(x)

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("td,edf->tef", rows, self.up))


class Gpt(nn.Module):
    """A transformer of one block; its loss includes the balance of the experts."""

    def __init__(self, mesh: md.DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mixture = Mixture(mesh)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.double()
        if mesh is not None:
            md.annotate(self, SPECS, mesh=mesh)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.head(x + self.mixture(self.norm(x)))

    def loss(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        entropy = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return entropy + 0.1 * self.mixture.balance


def texts(step: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=draws)


Backward = Callable[[Any, Gpt, torch.Tensor], None]


def one_batch(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    net.loss(model, tokens).backward()


def two_backwards(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    """Average twice: the second average is of the first and a new increment."""
    for _ in range(2):
        (net.loss(model, tokens) / 2).backward()


def without_sync(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    with model.no_sync():
        (net.loss(model, tokens) / 4).backward()
        (net.loss(model, tokens) / 4).backward()
    (net.loss(model, tokens) / 2).backward()


def a_retained_graph(model: Any, net: Gpt, tokens: torch.Tensor) -> None:
    loss = net.loss(model, tokens) / 2
    loss.backward(retain_graph=True)
    loss.backward()


WAYS = [one_batch, two_backwards, without_sync, a_retained_graph]


def expected() -> list[torch.Tensor]:
    """Return losses, norms and final weights of one process, without meshdist."""
    net = Gpt(None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = net.loss(net, texts(step))
        loss.backward()
        found += [loss.detach(), nn.utils.clip_grad_norm_(net.parameters(), 0.5)]
        optimizer.step()
    return [*found, *(x.detach() for x in net.parameters())]


def trained(
    mesh: md.DeviceMesh, way: Backward = one_batch, steps: int = STEPS, **options: Any
) -> tuple[Gpt, Any, list[torch.Tensor]]:
    """Return the model, its optimizer, and the losses and norms of its steps."""
    net = Gpt(mesh)
    model = md.DDP(net, device_mesh=mesh["dp", "ep"], experts_over="ep", **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    return net, optimizer, steps_of(model, net, optimizer, range(steps), way)


def steps_of(
    model: Any, net: Gpt, optimizer: Any, steps: range, way: Backward = one_batch
) -> list[torch.Tensor]:
    mesh, found = net.mixture.mesh, []
    for step in steps:
        optimizer.zero_grad()
        tokens = md.shard(texts(step), "b@(dp,ep) s", mesh)
        with torch.no_grad():
            loss = lax.pmean(net.loss(net, tokens), ("dp", "ep"), mesh=mesh)
        way(model, net, tokens)
        found += [loss, md.clip_grad_norm_(net.parameters(), 0.5, mesh=mesh)]
        optimizer.step()
    return found


def distance(net: Gpt, found: list[torch.Tensor]) -> float:
    """Return the largest difference from one process."""
    whole = expected()
    pairs = zip(found, whole[: len(found)], strict=True)
    off = [abs(float((a - b).detach())) for a, b in pairs]
    for (name, mine), other in zip(net.named_parameters(), whole[2 * STEPS :], strict=True):
        if name.endswith((".up", ".down")):
            other = md.shard(other, "e@ep a b", net.mixture.mesh)
        off.append(float((mine.detach() - other).abs().max()))
    return max(off)


def program(shape: tuple[int, ...], way: Backward = one_batch, **options: Any) -> float:
    names = ("pod", "dp", "ep")[-len(shape) :]
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=names)
    net, _, found = trained(mesh, way, **options)
    return distance(net, found)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 2), (1, 4), (2, 1), (4, 2)], ids=str)
def test_it_trains_as_one_process(shape: tuple[int, ...]) -> None:
    assert max(md.simulate(program, math.prod(shape), args=(shape,))) < 1e-12


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)
def test_backwards_of_a_step(way: Backward) -> None:
    assert max(md.simulate(program, 4, args=((2, 2), way))) < 1e-12


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"skip_all_reduce_unused_params": True},
        {"init_sync": False},
        {"verify_every": 1},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert max(md.simulate(lambda: program((2, 2), **options), 4)) < 1e-12


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    assert max(pool.run(over_processes, 2, backend=backend)) < 1e-12


def over_processes() -> float:
    return max(program((1, 2), way) for way in WAYS)

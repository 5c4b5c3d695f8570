"""Gradients that a program keeps stay as they are, whatever backwards follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.operations.cases import BACKENDS as WORLDS
from tests.pool import Pool

BACKENDS = [
    "simulated",
    "shm",
    "gloo",
    pytest.param("mpi", marks=pytest.mark.mpi),
    pytest.param("two hosts", marks=pytest.mark.soak),
]

KEEPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "the gradient itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "a view": lambda grad: grad.view(-1),
    "a row": lambda grad: grad[0],
    "an array": lambda grad: grad.numpy(),
    "by DLPack": lambda grad: torch.from_dlpack(grad),
    "its storage": lambda grad: grad.untyped_storage(),
    "the gradient and a view": lambda grad: (grad, grad.view(-1)),
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"gradient_as_bucket_view": False},
    {"bucket_cap_mb": 0.001},
]


def net() -> nn.Module:
    """A large parameter, which is copied alone, and small parameters, which move together."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2048), nn.Linear(2048, 2), nn.Linear(2, 2)).double()


def numbers(kept: Any) -> list[Any]:
    parts = kept if isinstance(kept, tuple) else (kept,)
    from_storage = torch.empty(0, dtype=torch.uint8).set_
    return [
        (
            from_storage(part) if isinstance(part, torch.UntypedStorage) else torch.as_tensor(part)
        ).tolist()
        for part in parts
    ]


def keep(names: list[str], options: dict[str, Any]) -> list[str]:
    """Keep gradients of each step in each way; return the ways and steps that changed."""
    wrong = []
    for name in names:
        model = md.DDP(net(), **options)
        whole = net()
        kept: list[tuple[Any, Any]] = []
        for step in range(5):
            model.zero_grad()
            whole.zero_grad()
            rows = torch.arange(4.0 * md.get_world_size()).view(-1, 4).double().sin() + step
            model(rows[md.get_rank() :: md.get_world_size()]).square().sum().backward()
            (whole(rows).square().sum() / md.get_world_size()).backward()
            for mine, right in zip(model.module.parameters(), whole.parameters(), strict=True):
                assert torch.allclose(mine.grad, right.grad)
                if step != 2 or mine.ndim == 1:  # not always all of them
                    held = KEEPING[name](mine.grad) if mine.grad.ndim == 2 else mine.grad
                    kept.append((held, numbers(held)))
            wrong += [f"{name}, step {step}" for held, before in kept if numbers(held) != before]
    return wrong


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [1, 2, *(pytest.param(n, marks=pytest.mark.soak) for n in (3, 5))])
def test_kept_gradients_stay(size: int, options: dict[str, Any]) -> None:
    assert md.simulate(keep, size, args=([*KEEPING], options)) == [[]] * size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_kept_gradients_stay_on_every_backend(backend: str, size: int, pool: Pool) -> None:
    assert WORLDS[backend](pool, keep, size, [*KEEPING], {}) == [[]] * size


def keep_on_one_rank() -> list[str]:
    """As ``keep``, on rank 0 alone: no rank waits for another's memory."""
    model = md.DDP(net())
    kept, wrong = [], []
    for step in range(5):
        model.zero_grad()
        model(torch.full((1, 4), 1.0 + step).double()).sum().backward()
        if md.get_rank() == 0:
            held = next(model.module.parameters()).grad.detach()
            kept.append((held, held.clone()))
        wrong += [f"step {step}" for held, before in kept if not torch.equal(held, before)]
    sums = torch.stack([p.grad.sum() for p in model.module.parameters()])
    gathered = [torch.empty_like(sums) for _ in range(md.get_world_size())]
    md.distributed.all_gather(gathered, sums)
    return wrong + ["ranks differ"] * any(not torch.equal(sums, other) for other in gathered)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank_alone_may_keep_gradients(backend: str, size: int, pool: Pool) -> None:
    assert WORLDS[backend](pool, keep_on_one_rank, size) == [[]] * size


def places() -> list[int]:
    """Return in how many places the first gradient was, in ordinary steps, and with sums."""
    model, found = md.DDP(net()), []
    for accumulates in (False, True):
        seen = set()
        for step in range(12):
            if not accumulates:
                model.zero_grad()
            model(torch.ones(1, 4).double()).sum().backward()
            if step > 1:  # the first backward is watched; the buckets are laid then
                seen.add(next(model.module.parameters()).grad.data_ptr())
        found.append(len(seen))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_ordinary_steps_use_the_same_memory(backend: str, pool: Pool) -> None:
    assert WORLDS[backend](pool, places, 2) == [[1, 1]] * 2


def sums_in_place() -> list[bool]:
    """Return whether a kept gradient follows the next sum, as on one device."""
    model, alone, follows = md.DDP(net()), net(), []
    for each in (model, alone):
        for _ in range(3):
            each.zero_grad()
            each(torch.ones(1, 4).double()).sum().backward()
        grad = next(each.parameters()).grad
        held, before = grad.detach(), grad.clone()
        each(torch.ones(1, 4).double()).sum().backward()
        follows.append(torch.equal(held, next(each.parameters()).grad))
        assert not torch.equal(held, before)
        each.zero_grad(set_to_none=False)
        follows.append(not held.any())
    return follows


def test_sums_are_made_in_place_as_on_one_device() -> None:
    assert md.simulate(sums_in_place, 2) == [[True] * 4] * 2

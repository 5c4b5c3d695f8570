"""Gradients that reach invariant results: a forgotten cast raises, right programs pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import GradientError
from tests.operations.cases import BACKENDS
from tests.pool import Pool

OPERATIONS = ["psum", "pmean", "pmax", "pmin", "all_gather", "pbroadcast"]


def mesh_of(**sizes: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def told(step: Callable[[], Any]) -> str:
    """Return the text of the GradientError that ``step`` raises, or ""."""
    try:
        step()
    except GradientError as error:
        return str(error)
    return ""


def result_of(operation: str, x: torch.Tensor, mesh: md.DeviceMesh) -> torch.Tensor:
    if operation == "all_gather":
        return md.lax.all_gather(x, "tp", to="invarying", mesh=mesh)
    if operation == "pbroadcast":
        return md.lax.pbroadcast(x, "tp", 0, mesh=mesh)
    return getattr(md.lax, operation)(x, "tp", mesh=mesh)  # type: ignore[no-any-return]


def each_operation(is_cast: bool) -> list[str]:
    """Return what a backward through each collective's result raises, which meets a varying
    value."""
    mesh, found = mesh_of(tp=md.get_world_size()), []
    for operation in OPERATIONS:
        y = result_of(operation, torch.ones(3, requires_grad=True), mesh)
        if is_cast:
            y = md.lax.pvary(y, "tp", mesh=mesh)
        loss = (y * (1.0 + md.get_rank())).sum()
        found.append(told(loss.backward))
        md.barrier()  # else the world of a rank that raised might end the others' backwards
    return found


ON = [*(("simulated", size) for size in (1, 2, 3, 5)), ("gloo", 2), ("shm", 3), ("mpi", 2)]


@pytest.mark.parametrize(("backend", "size"), ON)
def test_a_result_that_meets_varying_values_without_a_cast(
    pool: Pool, backend: str, size: int
) -> None:
    found = BACKENDS[backend](pool, each_operation, size, False)
    for operation, *texts in zip(OPERATIONS, *found, strict=True):
        raised, named = (
            [text for text in texts if text],
            "psum" if operation == "pmean" else operation,
        )
        assert len(raised) == size - 1  # all but the first that came
        for text in raised:
            assert text.startswith(f"the gradient that reaches {named} over axis 'tp' of ")
            assert "expected: equal gradients, since the result of" in text
            assert f"if you combine a result y of {named} with values that vary" in text
            assert "y = lax.pvary(y, axis)" in text


@pytest.mark.parametrize(("backend", "size"), ON)
def test_with_the_cast_each_collective_passes(pool: Pool, backend: str, size: int) -> None:
    assert BACKENDS[backend](pool, each_operation, size, True) == [[""] * len(OPERATIONS)] * size


def test_the_whole_text() -> None:
    def program() -> None:
        mesh = mesh_of(tp=2)
        x = torch.ones(2, requires_grad=True)
        (md.lax.psum(x, "tp", mesh=mesh) * (1.0 + md.get_rank())).sum().backward()

    with pytest.raises(GradientError) as caught:
        md.simulate(program, 2)
    assert str(caught.value).splitlines()[:5] == [
        "the gradient that reaches psum over axis 'tp' of DeviceMesh(tp=2) is not the same on "
        "every rank",
        "  where:    backward of psum, gradient of shape (2,), float32",
        "  expected: equal gradients, since the result of psum is equal on every rank",
        "  found:    rank 1 differs from rank 0, by 1.4 of its norm",
        "  fix:      if you combine a result y of psum with values that vary along the axis, for "
        "example a shard of weights, cast it first: y = lax.pvary(y, axis)",
    ]


# -- right programs, and the others at any backward ------------------------------------------------


def backwards(way: str, factor: float) -> None:
    """Run backwards of ``way`` through sums; the last one's gradient is by ``factor``."""
    mesh = mesh_of(dp=1, tp=md.get_world_size())
    rank = md.get_rank()
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(0.5)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return md.lax.psum(torch.tanh(layer(x * (1 + rank))), "tp", mesh=mesh)

    x = torch.ones(3, 2, requires_grad=True)
    if way == "retained":
        y = summed(x).sum()
        y.backward(retain_graph=True)
        (2 * y).backward(retain_graph=True)
        (factor * y).backward()
    elif way == "twice":
        (grad,) = torch.autograd.grad((summed(x) ** 2).sum(), x, create_graph=True)
        (factor * summed(grad)).sum().backward()
    elif way in ("checkpoint", "reentrant"):
        y = checkpoint(summed, x, use_reentrant=way == "reentrant")
        (factor * y).sum().backward()
    elif way == "accumulated":
        model = md.DDP(layer, device_mesh=mesh["dp"])
        for number in range(3):
            with model.no_sync():
                y = md.lax.psum(model(x), "tp", mesh=mesh).sum()
                ((factor if number == 2 else 1.0) * y).backward()
        md.lax.psum(model(x), "tp", mesh=mesh).sum().backward()
    elif way == "later":
        for number in range(5):
            y = summed(x).sum() * (factor if number == 4 else 1.0)
            y.backward()
    elif way == "several":
        first, second = summed(x), summed(x)  # equal in every word of their calls
        (first.sum() + factor * second.sum()).backward()


WAYS = ["retained", "twice", "checkpoint", "reentrant", "accumulated", "later", "several"]


# torch 2.11 reports it if a rank that an error ended leaves a checkpoint half done.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("way", WAYS)
def test_every_backward_of_simulated_ranks(way: str, size: int) -> None:
    md.simulate(backwards, size, args=(way, 3.0))
    with pytest.raises(GradientError, match="the gradient that reaches psum over axis 'tp'"):
        md.simulate(lambda: backwards(way, 1.0 + md.get_rank()), size)


def right_backwards() -> None:
    for way in WAYS:
        backwards(way, 3.0)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_right_backwards_on_processes(pool: Pool, backend: str) -> None:
    BACKENDS[backend](pool, right_backwards, 2)


def alone() -> list[float]:
    """Run what ranks may do by themselves: none of it waits for another rank, or raises."""
    mesh = mesh_of(tp=md.get_world_size())
    rank = md.get_rank()
    # A sum of which one rank's operand alone has a gradient.
    x = torch.ones(2, requires_grad=rank == 0)
    md.lax.psum(x * 2, "tp", mesh=mesh)
    y = md.lax.psum(x * 2, "tp", mesh=mesh).sum()
    if rank == 0:
        y.backward()
    # A backward of one rank alone, and another loss of it before all ranks' backward.
    w = torch.ones(2, requires_grad=True)
    y = md.lax.psum(w, "tp", mesh=mesh).sum()
    if rank == 0:
        torch.autograd.grad(7 * y, w, retain_graph=True)
    y.backward()
    for other, factor in ((mesh, 2.0), (mesh_of(tp=mesh.size()), 3.0)):
        (md.lax.psum(w, "tp", mesh=other).sum() * factor).backward()
    loss = md.lax.psum((w * rank).sum(), "tp", mesh=mesh)
    torch.func.grad(lambda w: md.lax.psum(w, "tp", mesh=mesh) * (1 + rank))(torch.tensor(1.0))
    with md.typed(mesh):
        batch = md.annotate(torch.ones(2) * rank, varying="tp")
        md.lax.pmean((w * batch).sum(), "tp").backward()
    return [loss.item()]


@pytest.mark.parametrize(("backend", "size"), ON)
def test_what_ranks_do_alone_is_not_waited_for(pool: Pool, backend: str, size: int) -> None:
    assert BACKENDS[backend](pool, alone, size) == [[size * (size - 1.0)]] * size


@pytest.mark.parametrize(
    ("first", "other", "is_rejected"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], False),  # rounding
        ([1.0, 2.0], [1.0, 2.01], True),
        ([1.0, 2.0], [2.0, 1.0], True),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([0.0, 0.0], [0.0, 1e-30], True),
        ([torch.nan, 2.0], [torch.nan, 2.0], False),
        ([torch.nan, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [torch.inf, 2.0], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_what_counts_as_the_same(
    first: list[float], other: list[float], is_rejected: bool, dtype: torch.dtype
) -> None:
    def program() -> str:
        mesh = mesh_of(tp=2)
        y = md.lax.psum(torch.ones(2, dtype=dtype, requires_grad=True), "tp", mesh=mesh)
        grad = torch.tensor([first, other][md.get_rank()]).to(dtype)
        return told(lambda: y.backward(grad))

    assert [bool(text) for text in md.simulate(program, 2)] == [False, is_rejected]

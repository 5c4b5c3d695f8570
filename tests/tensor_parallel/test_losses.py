"""The cross entropy of logits that are cut by classes, against torch's of the whole."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisTypeError,
    DtypeError,
    MeshdistError,
    MismatchError,
    ShapeError,
)
from meshdist.tensor_parallel import cross_entropy
from tests.operations.cases import BACKENDS
from tests.pool import Pool

CPU = [torch.profiler.ProfilerActivity.CPU]


def mesh_of(size: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def draw(shape: tuple[int, ...], num_classes: int, ignored: int) -> tuple[torch.Tensor, Any]:
    generator = torch.Generator().manual_seed(1)
    logits = 9 * torch.randn(*shape, num_classes, generator=generator, dtype=torch.float64)
    target = torch.randint(0, num_classes, shape, generator=generator)
    if target.dim():
        target.view(-1)[::2] = ignored
    return logits, target


@given(
    size=st.integers(1, 3),
    shape=st.sampled_from([(), (4,), (2, 3), (0,)]),
    num_classes=st.integers(3, 9),
    ignored=st.sampled_from([-100, 1]),
    smoothing=st.sampled_from([0.0, 0.3, 1.0]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    is_typed=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_whole(
    size: int,
    shape: tuple[int, ...],
    num_classes: int,
    ignored: int,
    smoothing: float,
    reduction: str,
    is_typed: bool,
) -> None:
    options: Any = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}

    def program() -> tuple[float, float]:
        mesh = mesh_of(size)
        whole, target = draw(shape, num_classes, ignored)
        mine = md.shard(whole, "... c@tp", mesh).requires_grad_()
        with md.typed(mesh) if is_typed else contextlib.nullcontext():
            loss = cross_entropy(mine, target, "tp", num_classes=num_classes, mesh=mesh, **options)
            (loss.sum() * 0.7).backward()
            assert not is_typed or not md.typeof(loss).varying
        whole.requires_grad_()
        flat = whole.flatten(0, -2) if whole.dim() > 1 else whole
        expected = F.cross_entropy(flat, target.flatten() if target.dim() else target, **options)
        (expected.sum() * 0.7).backward()
        part = md.shard(whole.grad, "... c@tp", mesh)
        torch.testing.assert_close(loss, expected.view_as(loss), equal_nan=True)
        torch.testing.assert_close(mine.grad, part, equal_nan=True)
        assert loss.shape == (target.shape if reduction == "none" else ())
        return loss.sum().item(), 0.0

    md.simulate(program, size)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_sends_two_messages_forward_and_none_backward(
    pool: Pool, backend: str, smoothing: float
) -> None:
    def program() -> tuple[list[str], list[str]]:
        mesh = mesh_of(2)
        whole, target = draw((3, 5), 8, -100)
        mine = md.shard(whole, "... c@tp", mesh).requires_grad_()

        def loss() -> torch.Tensor:
            return cross_entropy(mine, target, mesh["tp"], label_smoothing=smoothing)

        loss().backward()
        found = []
        with torch.profiler.profile(activities=CPU, acc_events=True) as profile:
            value = loss()
        found.append([e.name.split()[0] for e in profile.events() if "meshdist::" in e.name])
        with torch.profiler.profile(activities=CPU, acc_events=True) as profile:
            value.backward()
        found.append([e.name.split()[0] for e in profile.events() if "meshdist::" in e.name])
        return found[0], found[1]

    for there, back in pool.run(program, 2, backend=backend):
        assert there == ["meshdist::all_reduce"] * 2
        assert back == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_and_returned_in_float32(dtype: torch.dtype) -> None:
    def program() -> None:
        mesh = mesh_of(2)
        whole, target = draw((6,), 4, -100)
        mine = md.shard(whole.to(dtype), "n c@tp", mesh).requires_grad_()
        loss = cross_entropy(mine, target, mesh["tp"])
        loss.backward()
        assert loss.dtype == torch.float32
        assert mine.grad is not None
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(loss, F.cross_entropy(whole.to(dtype).float(), target))

    md.simulate(program, 2)


def test_huge_logits_stay_finite() -> None:
    def program() -> float:
        mesh = mesh_of(2)
        mine = md.shard(torch.tensor([[1e30, -1e30, 0.0, 1.0]]), "n c@tp", mesh)
        return cross_entropy(mine, torch.tensor([0]), mesh["tp"]).item()

    assert md.simulate(program, 2) == [0.0, 0.0]


def losses_with_an_offset(offset: float) -> list[tuple[float, float]]:
    """Return, for each smoothing, the error of this loss and that of torch's, in float32."""
    tp = md.get_world_size()
    whole, target = draw((6,), 2 * tp, -100)
    whole = (whole + offset).float()
    mesh = mesh_of(tp)
    mine = md.shard(whole, "n c@tp", mesh)
    found = []
    for smoothing in (0.0, 0.1):
        options: Any = {"label_smoothing": smoothing}
        exact = F.cross_entropy(whole.double(), target, **options)
        losses = (
            cross_entropy(mine, target, mesh["tp"], **options),
            F.cross_entropy(whole, target, **options),
        )
        found.append(tuple((loss - exact).abs().item() for loss in losses))
    return found


@pytest.mark.parametrize(
    ("backend", "size"), [*(("simulated", n) for n in (1, 2, 3, 5)), ("gloo", 2), ("shm", 3)]
)
@pytest.mark.parametrize("offset", [1e4, -1e6])
def test_a_common_offset_costs_no_digits(
    pool: Pool, backend: str, size: int, offset: float
) -> None:
    for errors in BACKENDS[backend](pool, losses_with_an_offset, size, offset):
        for mine, torchs in errors:
            assert mine <= torchs + 4e-6  # a few roundings of a loss of about 10


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_targets_of_other_integers(dtype: torch.dtype, size: int) -> None:
    def program() -> None:
        mesh = mesh_of(size)
        whole, target = draw((6,), 4 * size, 0)
        mine = md.shard(whole, "n c@tp", mesh)
        loss = cross_entropy(mine, target.to(dtype), mesh["tp"], ignore_index=0)
        torch.testing.assert_close(loss, F.cross_entropy(whole, target, ignore_index=0))

    md.simulate(program, size)


WRONG: dict[str, tuple[Any, type[MeshdistError], str]] = {
    "targets that are no integers": (
        lambda x, mesh: cross_entropy(x, torch.zeros(2), mesh["tp"]),
        DtypeError,
        "cross_entropy takes class indices as target\n"
        "  expected: a target of an integer dtype\n"
        "  found:    shape (2,), float32\n"
        "  fix:      convert the target: target.long()",
    ),
    "another shape": (
        lambda x, mesh: cross_entropy(x, torch.zeros(2, 3, dtype=torch.int64), mesh["tp"]),
        ShapeError,
        "cross_entropy: the shapes of logits and target do not match\n"
        "  expected: a target of shape (2,) (the last dim holds the classes)\n"
        "  found:    logits of shape (2, 3), target of shape (2, 3)\n"
        "  fix:      pass class indices, not probabilities",
    ),
    "another number of places": (
        lambda x, mesh: cross_entropy(x, torch.zeros(3, dtype=torch.int64), mesh["tp"]),
        ShapeError,
        "cross_entropy: the shapes of logits and target do not match\n"
        "  expected: a target of shape (2,) (the last dim holds the classes)\n"
        "  found:    logits of shape (2, 3), target of shape (3,)\n"
        "  fix:      pass one class index for each position of the logits",
    ),
    "no class": (
        lambda x, mesh: cross_entropy(x, torch.tensor([1, 6]), mesh["tp"]),
        ArgumentError,
        "cross_entropy, target: index out of range for size 6\n"
        "  expected: indices from 0 to 5\n"
        "  found:    6 among 2 indices\n"
        "  fix:      correct these indices, or create the model with a larger size",
    ),
    "a reduction": (
        lambda x, mesh: cross_entropy(x, torch.tensor([1, 5]), mesh["tp"], reduction="max"),
        ArgumentError,
        "cross_entropy does not support reduction='max'\n  expected: one of 'mean', 'sum', 'none'\n"
        "  fix:      pass for example reduction='mean'",
    ),
    "smoothing": (
        lambda x, mesh: cross_entropy(x, torch.tensor([1, 5]), mesh["tp"], label_smoothing=2.0),
        ArgumentError,
        "cross_entropy cannot use label_smoothing=2.0\n  expected: a number from 0 to 1\n"
        "  fix:      pass for example label_smoothing=0.1",
    ),
    "classes": (
        lambda x, mesh: cross_entropy(x, torch.tensor([1, 5]), mesh["tp"], num_classes=9),
        ShapeError,
        "cross_entropy: the logits are not this rank's part of 9 classes\n"
        "  where:    rank 1, axis 'tp' of DeviceMesh(tp=2)\n"
        "  expected: logits of shape [..., 4]\n"
        "  found:    shape (2, 3)\n"
        "  fix:      pass the number of classes of all ranks together: num_classes=...",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_rejected_before_anything_is_sent(name: str) -> None:
    call, kind, text = WRONG[name]

    def program() -> str:
        with pytest.raises(kind) as raised:
            call(torch.zeros(2, 3), mesh_of(2))
        return str(raised.value)

    assert md.simulate(program, 2)[1] == text


def test_ranks_with_other_numbers_of_classes_all_raise() -> None:
    def program() -> str:
        mesh = mesh_of(2)
        mine = torch.zeros(2, 3 - mesh.get_local_rank())
        with pytest.raises(MismatchError) as raised:
            cross_entropy(mine, torch.tensor([0, 1]), mesh["tp"])
        return str(raised.value)

    for text in md.simulate(program, 2):
        assert "(uneven parts need num_classes=)" in text
        assert "logits of 6 classes" in text
        assert "logits of 4 classes" in text


def test_torchs_loss_of_cut_logits_is_rejected_in_a_context() -> None:
    def program() -> tuple[bool, str]:
        mesh = mesh_of(2)
        whole, _ = draw((4,), 6, -100)
        target = torch.tensor([0, 1, 2, 0])
        mine = md.shard(whole, "n c@tp", mesh).requires_grad_()
        alone = F.cross_entropy(mine, target)  # of this rank's classes: nothing warns
        with md.typed(mesh), pytest.raises(AxisTypeError) as raised:
            F.cross_entropy(mine, target).backward()
        return torch.allclose(alone, F.cross_entropy(whole, target)), raised.value.summary

    for is_equal, text in md.simulate(program, 2):
        assert not is_equal
        assert "backward cannot start from a loss that varies over 'tp'" in text


@pytest.mark.parametrize("size", [2, 3, 5])
def test_fewer_classes_than_ranks_raise_on_every_rank(size: int) -> None:
    def program() -> str:
        mesh = mesh_of(size)
        logits = md.shard(torch.zeros(4, size - 1), "n c@tp", mesh)
        with pytest.raises(ShapeError) as caught:
            cross_entropy(logits, torch.zeros(4).long(), mesh["tp"], num_classes=size - 1)
        return str(caught.value)

    for rank, text in enumerate(md.simulate(program, size)):
        assert text == (
            f"cross_entropy: some ranks have none of the {size - 1} classes\n"
            f"  where:    rank {rank}, axis 'tp' of DeviceMesh(tp={size})\n"
            f"  expected: {size} classes or more\n"
            f"  found:    logits of shape (4, {int(rank < size - 1)})\n"
            "  fix:      remove the head from the plan, and call torch.nn.functional.cross_entropy"
        )

"""What users of others have met with gradients and collectives, each right here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError, GradientError
from tests.typed_mode.typed_cases import F64, in_mesh, varying

RANKS = (4,)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64, requires_grad=True)


def test_pytorch_152127_an_all_reduce_in_a_forward_lost_the_gradients_of_other_ranks() -> None:
    # torch's in-place all_reduce gives the local gradient alone, without a word.
    def body(mesh: md.DeviceMesh) -> Any:
        w, mine = leaf(2.0), torch.tensor([1.0 + md.get_rank()], dtype=F64)
        lost = w * mine
        md.all_reduce(lost, group=mesh)
        with pytest.raises(GradientError, match=r"lax\.psum"):
            lost.square().sum().backward()
        with md.typed(mesh):
            total = lax.psum(w * varying(mine), "dp")
            total.square().sum().backward()
        return w.grad.item()

    assert in_mesh(body, shape=RANKS) == [2 * 2 * 10.0 * 10.0] * 4  # d/dw (w (1 + 2 + 3 + 4))**2


def test_pytorch_153016_two_all_gathers_had_two_gradients() -> None:
    # DTensor's gave the own slice of each rank's own loss, the functional one the sum of all.
    def body(mesh: md.DeviceMesh) -> Any:
        found = []
        for to in ("varying", "invarying"):
            x = varying(leaf(1.0, 2.0))
            with md.typed(mesh):
                out = lax.all_gather(x, "dp", tiled=True, to=to)
                loss = (out * varying(torch.tensor(1.0 + md.get_rank()))).sum()  # a loss a rank
                with pytest.raises(AxisTypeError, match="a loss that varies over 'dp'"):
                    loss.backward()
                lax.psum(loss, "dp").backward()
            found.append(x.grad.tolist())
        return found

    assert in_mesh(body, shape=RANKS) == [[[10.0, 10.0]] * 2] * 4  # 1 + 2 + 3 + 4


def test_pytorch_58005_a_sum_and_a_gather_scaled_gradients_by_the_number_of_ranks() -> None:
    # torch.distributed.nn.functional sums gradients of what is one and the same loss.
    def body(mesh: md.DeviceMesh) -> Any:
        x, y = varying(leaf(3.0)), varying(leaf(3.0))
        with md.typed(mesh):
            lax.psum(x, "dp").sum().backward()
            lax.all_gather(y, "dp", tiled=True, to="invarying").sum().backward()
        return x.grad.item(), y.grad.item()

    assert in_mesh(body, shape=RANKS) == [(1.0, 1.0)] * 4


def test_pytorch_190007_the_backward_of_a_mean_was_rejected() -> None:
    # Only sums had a derivative in the functional collectives, though a mean is as linear.
    def body(mesh: md.DeviceMesh) -> Any:
        x = varying(leaf(1.0 + md.get_rank()))
        with md.typed(mesh):
            (slope,) = torch.autograd.grad(lax.pmean(x**3, "dp").sum(), x, create_graph=True)
            (curvature,) = torch.autograd.grad(lax.pmean(slope, "dp").sum(), x)
        return slope.item(), curvature.item()

    for rank, (slope, curvature) in enumerate(in_mesh(body, shape=RANKS)):
        assert slope == pytest.approx(3 * (1 + rank) ** 2 / 4)
        assert curvature == pytest.approx(6 * (1 + rank) / 4 / 4)


# -- norms beside split layers, on parts of the sequence -------------------------------------------


def shard(whole: torch.Tensor, dim: int, tp: md.DeviceMesh | None) -> nn.Parameter:
    if tp is None:
        return nn.Parameter(whole)
    part = whole.chunk(tp.size(), dim)[tp.get_local_rank()].clone()
    return varying(nn.Parameter(part), "tp")


class Mlp(nn.Module):
    """Megatron-LM's layer: between the products each rank has a part of the sequence."""

    def __init__(self, tp: md.DeviceMesh | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8).double()
        self.up = shard(torch.randn(16, 8, dtype=F64) / 2, 0, tp)
        self.down = shard(torch.randn(8, 16, dtype=F64) / 4, 1, tp)
        self.bias = nn.Parameter(torch.zeros(8, dtype=F64))
        self.is_split = tp is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        if self.is_split:
            hidden = lax.all_gather(hidden, "tp", axis=1, tiled=True)
        y = F.linear(F.gelu(F.linear(hidden, self.up)), self.down)
        if self.is_split:
            y = lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)
        return x + y + self.bias


def make(tp: md.DeviceMesh | None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Mlp(tp), Mlp(tp), nn.LayerNorm(8).double())


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
    model.zero_grad()


X, Y = torch.randn(2, 4, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


def train_alone(num_steps: int) -> tuple[nn.Sequential, list[float]]:
    """All but the last step are taken, whose gradients remain."""
    model, losses = make(None), []
    for step in range(num_steps):
        if step:
            descend(model)
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        losses.append(loss.item())
    return model, losses


def train_split(mesh: md.DeviceMesh, num_steps: int) -> tuple[nn.Sequential, list[float]]:
    """The same, over dp with parts of the batch and over tp with parts of the sequence."""
    model, losses = make(mesh["tp"]), []
    dp, tp = mesh.get_coordinate()
    x, y = (varying(one.chunk(2)[dp].chunk(2, 1)[tp].clone(), "dp", "tp") for one in (X, Y))
    for step in range(num_steps):
        if step:
            descend(model)
        with md.typed(mesh):
            loss = lax.pmean(F.mse_loss(model(x), y), ("dp", "tp"))
            loss.backward()
        losses.append(loss.item())
    return model, losses


def test_megatron_443_a_norm_on_parts_of_the_sequence_needs_a_reduction_by_hand() -> None:
    # It stands in the optimizer, and users asked why.
    expected = [one.norm.weight.grad for one in train_alone(1)[0][:2]]

    def body(mesh: md.DeviceMesh) -> Any:
        return [one.norm.weight.grad for one in train_split(mesh, 1)[0][:2]]

    for found in in_mesh(body):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_megatron_1446_the_last_norms_gradients_differed_between_ranks() -> None:
    # The last norm was left out of that reduction.
    expected = train_alone(2)[0][2].weight.grad

    def body(mesh: md.DeviceMesh) -> Any:
        return train_split(mesh, 2)[0][2].weight.grad

    found = in_mesh(body)
    torch.testing.assert_close(found, [expected] * 4, rtol=0, atol=1e-14)
    assert all(torch.equal(one, found[0]) for one in found)


def test_gpt_neox_1257_hooks_that_reduce_never_fired_and_the_loss_stayed_flat() -> None:
    # Nothing here depends on hooks; those that a program puts on see the complete gradient.
    alone, losses = train_alone(6)
    assert losses[-1] < 0.8 * losses[0]

    def body(mesh: md.DeviceMesh) -> Any:
        model, found = train_split(mesh, 6)
        seen: list[torch.Tensor] = []
        weight = model[0].norm.weight
        weight.register_hook(seen.append)
        x = varying(X.chunk(2)[mesh.get_local_rank("dp")].clone())
        with md.typed(mesh):
            lax.pmean(F.layer_norm(x, (8,), weight).square().mean(), "dp").backward()
        return found, [one.norm.weight for one in model[:2]], seen

    gradient = torch.autograd.grad(
        F.layer_norm(X, (8,), alone[0].norm.weight).square().mean(), alone[0].norm.weight
    )
    for found, norms, seen in in_mesh(body):
        assert found == pytest.approx(losses, abs=1e-13)
        torch.testing.assert_close(
            norms, [one.norm.weight for one in alone[:2]], rtol=0, atol=1e-13
        )
        torch.testing.assert_close(seen, list(gradient), rtol=0, atol=1e-14)

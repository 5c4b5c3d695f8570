"""Types that follow values: models against one device, what each place does, what is rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist import lax
from meshdist.errors import AxisTypeError
from tests.typed_mode.typed_cases import F64, in_mesh, refusal, varying


def gap(model: nn.Module, reference: nn.Module, place: int = 0, size: int = 1) -> float:
    """The largest difference of gradients; where a parameter is a shard, from its part."""
    worst = 0.0
    for mine, whole in zip(model.parameters(), reference.parameters(), strict=True):
        grad = whole.grad
        if mine.shape != grad.shape:
            pairs = zip(mine.shape, grad.shape, strict=True)
            dim = next(i for i, (a, b) in enumerate(pairs) if a != b)
            grad = grad.chunk(size, dim)[place]
        worst = max(worst, (mine.grad - grad).abs().max().item())
    return worst


# -- models ---------------------------------------------------------------------------------------


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(6, 16), layer, nn.LayerNorm(16), nn.Linear(16, 5)).double()


def cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def penalty(model: nn.Module) -> torch.Tensor:
    return 0.01 * sum((p**2).sum() for p in model.parameters())


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "behind"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_a_plain_encoder_has_one_devices_gradients(is_checkpointed: bool, is_inside: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 7, 6, dtype=F64, generator=generator)
    y = torch.randint(0, 5, (8, 7), generator=generator)
    reference = encoder()
    whole = cross_entropy(reference(x), y) + penalty(reference)
    whole.backward()

    def body(mesh: md.DeviceMesh) -> Any:
        model, rank = encoder(), mesh.get_local_rank("dp")
        mine = varying(x.chunk(4)[rank].clone()), varying(y.chunk(4)[rank].clone())
        found = []
        for _ in range(3):  # the first casts each parameter alone; then they share buckets
            model.zero_grad()
            with md.typed(mesh):
                if is_checkpointed:
                    hidden = checkpoint(model[:2], mine[0], use_reentrant=False)
                    loss = cross_entropy(model[2:](hidden), mine[1])
                else:
                    loss = cross_entropy(model(mine[0]), mine[1])
                assert str(md.typeof(loss)) == "float64[]{V:dp}"
                loss = lax.pmean(loss, "dp") + penalty(model)
                assert str(md.typeof(loss)) == "float64[]"
                if is_inside:
                    loss.backward()
            if not is_inside:
                loss.backward()
            found.append((gap(model, reference), abs(loss.item() - whole.item())))
        return found

    for found in in_mesh(body, shape=(4,)):
        assert all(error < 1e-12 for step in found for error in step)


def shard(whole: torch.Tensor, dim: int, tp: md.DeviceMesh | None) -> nn.Parameter:
    """This rank's part of a weight, which varies over 'tp'."""
    if tp is None:
        return nn.Parameter(whole.clone())
    part = nn.Parameter(whole.chunk(tp.size(), dim)[tp.get_local_rank()].clone())
    return varying(part, "tp")


class Column(nn.Module):
    def __init__(self, width: int, out: int, tp: md.DeviceMesh | None) -> None:
        super().__init__()
        self.weight = shard(torch.randn(out, width, dtype=F64) / width**0.5, 0, tp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Row(nn.Module):
    def __init__(self, width: int, out: int, tp: md.DeviceMesh | None) -> None:
        super().__init__()
        self.weight = shard(torch.randn(out, width, dtype=F64) / width**0.5, 1, tp)
        self.is_split = tp is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight)
        return lax.psum(y, "tp") if self.is_split else y


def rotated(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[-2])
    angles = torch.outer(places, 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=F64))
    real, imag = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imag * sin, real * sin + imag * cos], -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, tp: md.DeviceMesh | None) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norms = nn.ModuleList(nn.LayerNorm(width).double() for _ in range(2))
        self.qkv, self.out = Column(width, 3 * width, tp), Row(width, width, tp)
        self.up, self.down = Column(width, 4 * width, tp), Row(4 * width, width, tp)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    def __init__(self, tp: md.DeviceMesh | None, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16).double()
        self.blocks = nn.ModuleList(Block(16, 4, tp) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32)).double()
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_a_gpt_over_two_axes_needs_psum_alone(is_checkpointed: bool) -> None:
    tokens = torch.randint(0, 32, (8, 9), generator=torch.Generator().manual_seed(5))
    reference = Gpt(None)
    cross_entropy(reference(tokens[:, :-1]), tokens[:, 1:]).backward()

    def body(mesh: md.DeviceMesh) -> Any:
        tp = mesh["tp"]
        model = Gpt(tp, is_checkpointed=is_checkpointed)
        mine = varying(tokens.chunk(2)[mesh.get_local_rank("dp")].clone())
        for _ in range(2):
            model.zero_grad()
            with md.typed(mesh):
                loss = cross_entropy(model(mine[:, :-1]), mine[:, 1:])
                assert str(md.typeof(loss)) == "float64[]{V:dp}"
                lax.pmean(loss, "dp").backward()
        return gap(model, reference, tp.get_local_rank(), tp.size())

    assert max(in_mesh(body)) < 1e-12


# -- what cannot be right -------------------------------------------------------------------------


def test_a_collective_over_an_axis_where_its_operand_is_invariant() -> None:
    text = refusal(AxisTypeError, lambda mesh: lax.psum(torch.ones(3), "dp"))
    assert text.startswith("psum over axis 'dp' cannot take a value that is invariant over it\n")
    assert "rank 0 (dp=0, tp=0) of DeviceMesh(dp=2, tp=2); axis 'dp' (size 2)" in text
    assert "test_mode.py:" in text
    assert "x: float32[3]" in text
    # Shards without annotations come first: with the data annotated, their gradients are summed.
    assert "  fix:      if it is computed from weights that are sharded over the axis" in text
    assert text.index("md.annotate(weight, 'f@dp d')") < text.index("md.annotate(batch")
    for fix in ("md.annotate(batch, varying='dp')", "lax.axis_size('dp')", "lax.pvary(x, 'dp')"):
        assert fix in text


@pytest.mark.parametrize(
    ("operation", "fix"),
    [
        (lax.pmean, "remove the pmean, because the value equals its mean"),
        (lax.all_gather, "cast it before each rank takes its own part: lax.pvary(x, 'dp')"),
    ],
)
def test_the_way_out_for_equal_values_is_that_of_the_collective(
    operation: Callable[..., Any], fix: str
) -> None:
    text = refusal(AxisTypeError, lambda mesh: operation(torch.ones(3), "dp"))
    assert (
        "after the last copy or slice outside the context: md.annotate(batch, varying='dp')" in text
    )
    assert fix in text and "lax.axis_size" not in text


def test_a_cast_of_what_varies_already() -> None:
    text = refusal(AxisTypeError, lambda mesh: lax.pvary(varying(torch.ones(3)), "dp"))
    assert text.startswith("pvary over axis 'dp' cannot take a value that is varying over it\n")
    assert "a value that is invariant over 'dp'" in text
    assert "x: float32[3]{V:dp}" in text
    assert "lax.psum(x, 'dp')" in text


def test_a_backward_of_a_loss_that_varies() -> None:
    w = torch.ones(3, requires_grad=True)

    def body(mesh: md.DeviceMesh) -> None:
        (w * varying(torch.ones(3), "dp", "tp")).sum().backward()

    text = refusal(AxisTypeError, body)
    assert text.startswith("backward cannot start from a loss that varies over 'dp', 'tp'\n")
    assert "axes 'dp' (size 2), 'tp' (size 2)" in text
    assert "loss: float32[]{V:dp,tp}" in text
    assert "loss = lax.pmean(loss, ('dp', 'tp'))" in text
    for call in (
        lambda loss: torch.autograd.backward([loss]),
        lambda loss: torch.autograd.grad(loss, w),
    ):

        def other(mesh: md.DeviceMesh, call: Any = call) -> None:
            call((w * varying(torch.ones(3))).sum())

        assert "cannot start from a loss that varies over 'dp'\n" in refusal(AxisTypeError, other)


def test_a_backward_of_a_loss_that_is_reduced() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        w = md.annotate(torch.ones(3, requires_grad=True), reduced="dp")
        (lax.pmean((w * varying(torch.ones(3))).sum(), "dp") + (w**2).sum()).backward()

    text = refusal(AxisTypeError, body)
    assert text.startswith("backward cannot start from a loss that is reduced over 'dp'\n")
    assert "loss: float32[]{R:dp}" in text
    assert "loss = lax.pmean(loss + term, 'dp')" in text


def test_a_nonlinear_operation_on_an_unreduced_value() -> None:
    text = refusal(
        AxisTypeError, lambda mesh: torch.relu(md.annotate(torch.ones(3), unreduced="tp"))
    )
    assert text.startswith("relu cannot take a value that is unreduced over 'tp'\n")
    assert "operand 0: float32[3]{U:tp}" in text
    assert "lax.psum(x, 'tp') or lax.psum_scatter(x, 'tp')" in text


def test_an_unreduced_gradient_in_an_optimizers_step() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        w = md.annotate(nn.Parameter(torch.ones(3)), reduced="dp")
        lax.pmean((w * varying(torch.ones(3))).sum(), "dp").backward()
        assert str(md.typeof(w.grad)) == "float32[3]{U:dp}"
        with torch.no_grad():
            w.add_(w.grad, alpha=-0.1)

    text = refusal(AxisTypeError, body)
    assert text.startswith("add_ cannot apply an unreduced gradient to a parameter\n")
    assert "operand 1: float32[3]{U:dp}" in text
    assert (
        "lax.psum(p.grad, 'dp'); or call optimizer.step() after the md.accumulate_gradients block"
        in text
    )


def test_a_history_that_the_context_did_not_see() -> None:
    outside = torch.ones(3, requires_grad=True) * 2
    text = refusal(AxisTypeError, lambda mesh: outside + 1)
    assert text.startswith(
        "add cannot infer the type of an operand: md.typed did not see how it was computed\n"
    )
    assert "computed by MulBackward0 outside the context" in text
    assert "else for example md.annotate(x, varying='dp')" in text

    def annotated(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh):
            return str(md.typeof(md.annotate(outside, varying="tp") + 1))

    assert in_mesh(annotated)[0] == "float32[3]{V:tp}"


def test_a_write_that_would_widen_what_others_rely_on() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        buf = torch.zeros(3)
        view = buf[0]
        buf.copy_(varying(torch.ones(3)))
        del view

    text = refusal(AxisTypeError, body)
    assert text.startswith("copy_ cannot change its target from invariant to varying over 'dp'\n")
    assert "a target of float32[3], whose memory other tensors share" in text
    assert "buf = lax.pvary(buf, 'dp')" in text


def test_an_axis_that_the_mesh_lacks() -> None:
    x = varying(torch.ones(3), "ep")
    text = refusal(AxisTypeError, lambda mesh: x.sum())
    assert text.startswith("axis 'ep' of an operand of sum is not in mesh (dp=2, tp=2)\n")
    assert "float32[3]{V:ep}" in text

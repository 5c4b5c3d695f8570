"""``parallelize(..., example=)``: right models pass, wrong ones raise, and no state changes."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md
from meshdist.errors import KindError, MeshdistError, UnequalError
from tests.pool import Pool

from .split_models import SEQUENCE_PLAN, WHOLE_PLAN, LanguageModel, Sizes, copied, distance

MESHES = [(1,), (2,), (3,), (2, 2), (2, 1, 2)]
HEADS = {"[qkv]": "column", "o": "row"}
MLP = {"up": "column", "down": "row"}
SUMMARY = "parallelize: the split model differs from the unsplit model on the example\n"


def mesh_of(*shape: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp", "tp")[-len(shape) :])


class Attention(nn.Module):
    """Twelve heads of two features; ``kind`` says how the heads are found."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in ("packed", "by head"):
            self.c_attn = nn.Linear(24, 72)
        else:
            self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))
        self.o = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "by head":  # the features of a head lie together: q, k, v
            q, k, v = self.c_attn(x).unflatten(-1, (-1, 3, 2)).unbind(-2)
        elif self.kind == "packed":
            q, k, v = (t.unflatten(-1, (-1, 2)) for t in self.c_attn(x).chunk(3, -1))
        else:
            sizes = (12, -1) if self.kind == "fixed" else (-1, 2)
            q, k, v = (layer(x).unflatten(-1, sizes) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.o(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Mix(nn.Module):
    """A function between two products of which the first is split unevenly."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(24, 7), nn.Linear(7, 24), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(x)))  # type: ignore[no-any-return]


class ReadsWeight(nn.Module):
    """A head that reads the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(24, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.embedding(x.abs().argmax(-1)))
        return F.linear(y, self.embedding.weight)


class Position(nn.Module):
    """A parameter on a split sequence, of which each rank has a part of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.up, self.down = nn.Identity(), nn.Linear(24, 7), nn.Linear(7, 24)
        self.bias, self.last = nn.Parameter(torch.randn(24)), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cut(x) + self.bias
        return self.last(self.down(self.up(y)))  # type: ignore[no-any-return]


POSITION_PLAN = {
    "cut": "cut_sequence",
    "up": "column_sequence",
    "down": "row_sequence",
    "last": "gather_sequence",
}

LANGUAGE = Sizes(heads=6, hidden=7, layers=2)
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "attention": (lambda: Attention("open"), HEADS),
    "packed head by head": (lambda: Attention("by head"), {"c_attn": "column", "o": "row"}),
    "gelu": (lambda: Mix(F.gelu), MLP),
    "language model": (lambda: LanguageModel(LANGUAGE), WHOLE_PLAN),
    "split sequence": (lambda: LanguageModel(LANGUAGE), SEQUENCE_PLAN),
    "split output": (lambda: nn.Sequential(nn.Linear(24, 7)), {"0": "column"}),
}
# With the start of what is found.
WRONG: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "fixed heads": (lambda: Attention("fixed"), HEADS, ""),
    "packed": (lambda: Attention("packed"), {"c_attn": "column", "o": "row"}, "the output of o, "),
    "softmax": (lambda: Mix(lambda h: h.softmax(-1)), MLP, "the output of down, "),
    "norm": (lambda: Mix(lambda h: F.normalize(h, dim=-1)), MLP, "the output of down, "),
    "a read weight": (ReadsWeight, {"embedding": "vocab"}, "the gradient of embedding.weight, "),
    "a part of a gradient": (Position, POSITION_PLAN, "the gradient of bias, "),
}


def example_of(model: nn.Module) -> tuple[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if isinstance(model, LanguageModel):
        return (torch.randint(0, 11, (2, 6), generator=generator),)
    return (torch.randn(2, 6, 24, dtype=torch.float64, generator=generator),)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    md.seed(0)
    return make().double()


def state_of(model: nn.Module) -> Any:
    """Return all that the check must leave as it was, or restore."""
    return (
        [(name, type(m), m.training, sorted(vars(m))) for name, m in model.named_modules()],
        [[*m._forward_hooks, *m._forward_pre_hooks, *m._backward_hooks] for m in model.modules()],
        [(name, id(x), x.tolist()) for name, x in model.named_buffers()],
        [(name, id(p), p.tolist(), p.requires_grad) for name, p in model.named_parameters()],
        [(id(p.grad), None if p.grad is None else p.grad.tolist()) for p in model.parameters()],
        [sorted(vars(p)) for p in model.parameters()],
        [type(m._parameters) for m in model.modules()],
    )


def generators() -> Any:
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), numpy_state[1].tolist(), random.getstate()


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", RIGHT)
def test_right_models_pass(name: str, shape: tuple[int, ...]) -> None:
    make, plan = RIGHT[name]

    def program() -> None:
        mesh = mesh_of(*shape)
        model = made(make)
        whole, before = copied(model), generators()
        example = example_of(model)
        md.parallelize(model, mesh["tp"], plan, example=example)  # a warning is an error here
        assert generators() == before
        assert all(p.grad is None for p in model.parameters())
        assert all(m.training and not m._forward_hooks for m in model.modules())
        if name != "split output":
            assert distance(model(*example), whole(*example)) < 1e-12

    md.simulate(program, math.prod(shape))


@pytest.mark.parametrize("shape", MESHES[1:])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_models_raise_and_are_restored(name: str, shape: tuple[int, ...]) -> None:
    make, plan, start = WRONG[name]

    def program() -> str:
        mesh = mesh_of(*shape)
        model = made(make)
        before = state_of(model), generators()
        with pytest.raises(UnequalError) as raised:
            md.parallelize(model, mesh["tp"], plan, example=example_of(model))
        assert (state_of(model), generators()) == before
        assert raised.value.found is not None
        assert str(raised.value).startswith(SUMMARY)
        return raised.value.found.partition(": ")[2]

    texts = md.simulate(program, math.prod(shape))
    assert all(text.startswith(start) for text in texts)


def checked_over_processes() -> str:
    tp = md.get_world_size()
    model = made(RIGHT["split sequence"][0])
    md.parallelize(model, mesh_of(tp), SEQUENCE_PLAN, example=example_of(model))
    make, plan, _ = WRONG["softmax"]
    wrong = made(make)
    with pytest.raises(UnequalError) as raised:
        md.parallelize(wrong, mesh_of(tp), plan, example=example_of(wrong))
    md.barrier()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    first, second = pool.run(checked_over_processes, 2, backend=backend)
    assert first == second and "the output of down, " in first


def test_the_text_of_a_difference() -> None:
    def program() -> str:
        def make() -> nn.Module:
            mix = Mix(lambda h: h.softmax(-1))
            return nn.Sequential(OrderedDict(norm=nn.LayerNorm(24), mix=mix))

        model = made(make)
        plan = {f"mix.{leaf}": style for leaf, style in MLP.items()}
        with pytest.raises(UnequalError) as raised:
            md.parallelize(model, mesh_of(2), plan, example=example_of(model))
        return str(raised.value)

    first, second = md.simulate(program, 2)
    assert first == second
    head, _, rest = first.partition(" by up to ")
    assert head == (
        f"{SUMMARY}"
        "  where:    over 'tp', 2 ranks\n"
        "  expected: equal outputs and gradients before and after the split\n"
        "  found:    ranks 0-1: the output of mix.down, shape (2, 6, 24), float64, differs"
    )
    assert " of its largest value; the last module with an equal output is norm\n" in rest
    assert "split packed projections, leave the number of heads open (unflatten" in rest


# -- what is left as it was -----------------------------------------------------------------------


class Stateful(nn.Module):
    """A model with buffers that its forward changes, draws, and hooks of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(24, 6), nn.BatchNorm1d(6), nn.Linear(6, 24)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x.flatten()[:3].clone()
        self.register_buffer("made", torch.zeros(1), persistent=False)
        assert not self.training
        noise = torch.randn(()) + np.random.rand() + random.random()
        x.mul_(2)  # of a copy
        h = self.up(x)
        if self.fails and h.shape[-1] < 6:
            raise ValueError("a number of features")
        return self.down(self.dropout(h)) + noise  # type: ignore[no-any-return]


@pytest.mark.parametrize("fails", [False, True])
def test_all_state_is_left_as_it_was(fails: bool) -> None:
    def program() -> None:
        model: Any = made(Stateful)
        model.fails = fails
        model.norm.eval()
        model.down.bias.requires_grad_(False)
        model.norm.weight.grad = torch.ones(6).double()
        ran: list[str] = []
        model.up.weight.register_post_accumulate_grad_hook(lambda p: ran.append("written"))
        model.register_forward_hook(lambda *_: ran.append("forward"))
        (x,) = example_of(model)
        inputs, before, drawn = x.clone(), state_of(model), generators()
        plan = {**MLP, "dropout": "own_draws"}
        if fails:
            with pytest.raises(UnequalError) as raised:
                md.parallelize(model, mesh_of(2), plan, example=(x,))
            assert state_of(model) == before
            text = str(raised.value)
            assert isinstance(raised.value.__cause__, ValueError)
            assert (
                "the split model raises ValueError: a number of features, in the model" in text
                and "fix:      complete the plan: a layer after 'column' needs" in text
            )
        else:
            md.parallelize(model, mesh_of(2), plan, example=(x,))
            after = state_of(model)
            assert [each[2] for each in after[0]] == [each[2] for each in before[0]]
            assert after[2] == before[2] and after[4] == before[4]
            assert [each[3] for each in after[3]] == [each[3] for each in before[3]]
        assert torch.equal(x, inputs) and generators() == drawn
        assert not hasattr(model, "made")
        assert "written" not in ran and "forward" in ran
        model.up.weight.grad = None
        (model.up.weight * 1).sum().backward()
        assert ran[-1] == "written"

    md.simulate(program, 2)


# -- which numbers are compared -------------------------------------------------------------------


def test_arguments_by_name_and_outputs_in_a_dict() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix(lambda h: h.softmax(-1))

        def forward(self, *, inputs: dict[str, torch.Tensor], scale: float) -> Any:
            return {"loss": None, "logits": [self.mix(inputs["x"]) * scale]}

    def program(is_wrong: bool) -> None:
        model: Any = made(Named)
        if not is_wrong:
            model.mix.function = F.gelu
        (x,) = example_of(model)
        plan = {f"mix.{leaf}": style for leaf, style in MLP.items()}
        given = {"inputs": {"x": x}, "scale": 2.0}
        if is_wrong:
            with pytest.raises(UnequalError, match=r"the output of mix\.down"):
                md.parallelize(model, mesh_of(2), plan, example=given)
        else:
            md.parallelize(model, mesh_of(2), plan, example=given)

    md.simulate(program, 2, args=(False,))
    md.simulate(program, 2, args=(True,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_typed", [False, True])
def test_roundings_of_a_dtype_are_no_difference(dtype: torch.dtype, is_typed: bool) -> None:
    def program() -> None:
        mesh = mesh_of(2)
        model = made(RIGHT["attention"][0]).to(dtype)
        x = example_of(model)[0].to(dtype)
        if is_typed:
            with md.typed(mesh):
                md.parallelize(model, mesh, HEADS, example=(x,))
        else:
            md.parallelize(model, mesh, HEADS, example=(x,))

    md.simulate(program, 2)


def test_a_gradient_that_a_wrapper_sums_is_compared_with_the_sum() -> None:
    def program() -> None:
        mesh = mesh_of(2)
        model = md.annotate(made(Position), {"bias": "d {R:tp}"}, mesh=mesh)
        md.parallelize(model, mesh, POSITION_PLAN, example=example_of(model))

    md.simulate(program, 2)


def test_a_frozen_model_is_compared_by_its_outputs() -> None:
    def program() -> None:
        for make, plan, _ in (WRONG["softmax"], (*RIGHT["gelu"], "")):
            model = made(make).requires_grad_(False)
            if make is RIGHT["gelu"][0]:
                md.parallelize(model, mesh_of(2), plan, example=example_of(model))
                continue
            with pytest.raises(UnequalError, match="the output of down"):
                md.parallelize(model, mesh_of(2), plan, example=example_of(model))

    md.simulate(program, 2)


# -- bad input ------------------------------------------------------------------------------------


class Nothing(Mix):
    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": 1.0}


class FailsOnOne(Mix):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if md.get_rank() == 1:
            raise ValueError("no memory")
        return super().forward(x)


def meta() -> nn.Module:
    return Mix(F.gelu).to("meta")


BAD: dict[str, tuple[Callable[[], nn.Module], Any, type[MeshdistError], str]] = {
    "no tuple": (
        lambda: Mix(F.gelu),
        torch.ones(2, 24),
        KindError,
        "parallelize takes the arguments of the model as example\n"
        "  expected: a tuple of arguments, or a dict of keyword arguments\n"
        "  found:    a Tensor\n"
        "  fix:      pass example=(x,)",
    ),
    "meta": (
        meta,
        (torch.ones(2, 24),),
        KindError,
        "parallelize cannot run an example on a model without values\n"
        "  found:    up.weight on the meta device\n"
        "  fix:      call module.to_empty(device=...) and load its values first, or omit example=",
    ),
    "no tensor": (
        lambda: Nothing(F.gelu),
        (torch.ones(2, 24),),
        KindError,
        "parallelize: the model's output on the example holds no tensor\n"
        "  expected: a tensor, or tensors in lists, tuples and dicts\n"
        "  found:    a dict\n"
        "  fix:      return tensors, or omit example=",
    ),
    "another example": (
        lambda: Mix(F.gelu),
        None,
        UnequalError,
        "parallelize: the example differs between ranks\n"
        "  where:    over 'tp', 2 ranks\n"
        "  expected: equal inputs and outputs of the unsplit model on every rank\n"
        "  found:    example tensor 0, shape (2, 24), float32: rank 1 differs from rank 0, by up "
        "to 1 of its largest value",
    ),
    "a failure": (
        lambda: FailsOnOne(F.gelu),
        (torch.ones(2, 24),),
        UnequalError,
        "parallelize: the unsplit model failed on the example on other ranks\n"
        "  where:    over 'tp', 2 ranks\n"
        "  found:    rank 1: ValueError: no memory, in the model\n"
        "  fix:      correct the example or the model on these ranks",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_rejected_on_all_ranks_before_the_split(name: str) -> None:
    make, given, kind, text = BAD[name]

    def program() -> str:
        md.seed(0)
        model = make()
        before = [(type(m), vars(m).keys()) for m in model.modules()]
        example = (torch.ones(2, 24) + md.get_rank(),) if given is None else given
        check = name != "meta"
        own_kind = ValueError if name == "a failure" and md.get_rank() == 1 else kind
        with pytest.raises(own_kind) as raised:
            md.parallelize(model, mesh_of(2), MLP, check=check, example=example)
        assert [(type(m), vars(m).keys()) for m in model.modules()] == before
        return str(raised.value)

    assert md.simulate(program, 2)[0].startswith(text)

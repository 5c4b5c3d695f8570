"""``md.tensor_parallel.apply``: the bits of an initialization before the split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import meshdist as md
from meshdist.errors import ArgumentError, KindError, UnequalError
from tests.pool import Pool

from .split_models import SEQUENCE_PLAN, WHOLE_PLAN, LanguageModel, Sizes, part_of

MESHES = [(1,), (2,), (3,), (2, 2), (2, 1, 2)]


def mesh_of(*shape: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=("pod", "dp", "tp")[-len(shape) :])


def init(module: nn.Module) -> None:
    """Draw as programs do: by class, by name of class, by torch's own method, in every dtype."""
    if type(module) is nn.Linear and module.out_features == 7:
        module.reset_parameters()
    elif isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.weight.data.mul_(0.5)
        if module.bias is not None:
            module.bias.data = torch.randn(module.bias.shape, dtype=module.bias.dtype)
    elif type(module).__name__ == "Embedding":
        nn.init.normal_(module.weight, std=0.02)  # type: ignore[arg-type]
        with torch.no_grad():
            module.weight[1] = 0  # type: ignore[operator, index]
    elif isinstance(module, nn.LayerNorm):
        module.weight = nn.Parameter(torch.rand_like(module.weight))
        nn.init.uniform_(module.bias)
    elif isinstance(module, LanguageModel):
        assert module.head.weight.shape  # a parent may read


TIED, APART = Sizes(heads=6, hidden=7, is_tied=True), Sizes(heads=6, hidden=7)


def initialized(shape: tuple[int, ...], sizes: Sizes, plan: dict[str, str], is_meta: bool) -> None:
    mesh = mesh_of(*shape)
    whole = LanguageModel(sizes).double()
    md.seed(1)
    whole.apply(init)
    after = torch.rand(1)
    md.seed(0)
    split: Any = LanguageModel(sizes).double()
    if is_meta:
        split = split.to("meta")
        md.parallelize(split, mesh["tp"], plan, check=False)
        split.to_empty(device="cpu")
        if sizes.is_tied:
            split.head.weight = split.embedding.weight  # as torch asks for
    else:
        md.parallelize(split, mesh["tp"], plan)
    split.layers[0].o.weight.requires_grad_(False)
    types = [str(md.typeof(p)) for p in split.parameters()]
    same = dict(split.named_parameters())
    md.seed(1)
    assert md.tensor_parallel.apply(split, init) is split
    assert torch.equal(torch.rand(1), after)
    assert [str(md.typeof(p)) for p in split.parameters()] == types
    assert not split.layers[0].o.weight.requires_grad
    assert isinstance(split.head, md.tensor_parallel.ColumnParallelLinear)
    with mesh:
        for (name, mine), theirs in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, part_of(theirs.detach(), mine)), name
            assert mine is same[name] or "norm" in name
        text = torch.zeros(1, 6, dtype=torch.int64)
        assert torch.allclose(split(text), whole(text))


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize(
    ("sizes", "plan", "is_meta"), [(TIED, WHOLE_PLAN, True), (APART, SEQUENCE_PLAN, False)]
)
def test_the_bits_of_an_initialization_before_the_split(
    sizes: Sizes, plan: dict[str, str], is_meta: bool, shape: tuple[int, ...]
) -> None:
    md.simulate(initialized, math.prod(shape), args=(shape, sizes, plan, is_meta))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    pool.run(initialized, 2, (2,), TIED, WHOLE_PLAN, True, backend=backend)


def test_draws_on_parts_are_not_those_of_the_whole() -> None:
    """Without ``apply``, both ranks draw the same part."""

    def program() -> list[float]:
        layer = made()[0]
        md.seed(1)
        nn.init.normal_(layer.weight)
        return layer.weight.flatten().tolist()  # type: ignore[no-any-return]

    first, second = md.simulate(program, 2)
    assert first == second


def made(**options: Any) -> Any:
    md.seed(0)
    model = nn.Sequential(nn.Linear(3, 4, **options), nn.LayerNorm(4), nn.Linear(4, 3))
    return md.parallelize(model, mesh_of(2), {"0": "column", "2": "row"}, check=not options)


def test_values_that_fn_keeps_and_in_a_context() -> None:
    def program() -> None:
        model = made()
        sum(p.square().sum() for p in model.parameters()).backward()
        before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
        md.tensor_parallel.apply(model, lambda module: None)
        for p, (value, grad) in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, value) and torch.equal(p.grad, grad)
        with md.typed(mesh_of(2)), torch.no_grad():
            md.tensor_parallel.apply(model, scaled)
        for p, (value, _) in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, 2 * value)

    def scaled(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.mul_(2)

    md.simulate(program, 2)


def test_ranks_that_draw_different_numbers_all_raise() -> None:
    def program(draws: Callable[[nn.Module], None]) -> str:
        model = made()
        before = model[0].weight.detach().clone()
        md.seed(1, differ_over="tp", mesh=mesh_of(2))
        with pytest.raises(UnequalError) as raised:
            md.tensor_parallel.apply(model, draws)
        assert torch.equal(model[0].weight, before)
        assert (
            model[0].weight.shape == (2, 3) and str(md.typeof(model[0].weight))[-8:] == "2@tp, 3]"
        )
        return str(raised.value)

    def draws_split(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    def draws_other(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)

    for text in md.simulate(program, 2, args=(draws_split,)):
        assert text.startswith(
            "md.tensor_parallel.apply: fn gives ranks different values\n"
            "  where:    over 'tp', 2 ranks\n"
            "  expected: equal parameters on every rank along the axis\n"
            "  found:    0.weight, shape (4, 3), float32: rank 1 differs from rank 0, by up to"
        )
        assert text.endswith(
            "  fix:      call md.seed(0) on every rank before md.tensor_parallel.apply"
        )
    for text in md.simulate(program, 2, args=(draws_other,)):
        assert "1.weight, shape (4,), float32: rank 1 differs from rank 0" in text
        assert "call md.seed(0) on every rank before md.tensor_parallel.apply" in text


def test_an_fn_that_raises_leaves_the_layer_as_it_was() -> None:
    def program() -> None:
        model = made()
        weight, before = model[2].weight, model[2].weight.detach().clone()

        def fails(module: nn.Module) -> None:
            if isinstance(module, nn.Linear) and module.in_features == 4:
                module.weight.data.zero_()
                module.weight = nn.Parameter(torch.ones(3, 4))
                raise ValueError("no")

        with pytest.raises(ValueError, match="no"):
            md.tensor_parallel.apply(model, fails)
        assert model[2].weight is weight and torch.equal(weight, before)
        assert str(md.typeof(weight)) == "float32[3, 2@tp]"
        assert type(model[2]) is md.tensor_parallel.RowParallelLinear

    md.simulate(program, 2)


def reshapes(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.ones(2, 2))


def removes(layer: nn.Linear) -> None:
    layer.bias = None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (reshapes, "weight (2, 2), bias (3,)"),
        (removes, "weight (3, 4)"),
        (parametrizations.orthogonal, "bias (3,)"),
        (nn.utils.weight_norm, "bias (3,), weight_g (3, 1), weight_v (3, 4)"),
    ],
    ids=["reshapes", "removes", "orthogonal", "weight_norm"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_an_fn_that_changes_which_parameters_a_layer_has(change: Any, found: str) -> None:
    def program() -> None:
        model = made()
        own = dict(model[2].named_parameters())
        before = [x.detach().clone() for x in own.values()]

        def fn(module: nn.Module) -> None:
            if isinstance(module, nn.Linear) and module.in_features == 4:
                change(module)

        with pytest.raises(ArgumentError) as raised:
            md.tensor_parallel.apply(model, fn)
        assert str(raised.value).splitlines() == [
            "md.tensor_parallel.apply: fn must not change which parameters 2 has, or their shapes",
            "  expected: weight (3, 4), bias (3,)",
            f"  found:    {found}",
            "  fix:      change the layer before you split it",
        ]
        after = dict(model[2].named_parameters())
        assert [*after] == [*own] and all(after[name] is own[name] for name in own)
        assert all(map(torch.equal, after.values(), before))
        assert type(model[2]) is md.tensor_parallel.RowParallelLinear
        assert str(md.typeof(model[2].weight)) == "float32[3, 2@tp]"

    md.simulate(program, 2)


def test_in_inference_mode_parameters_stay_trainable() -> None:
    def program() -> None:
        model = made()
        with torch.inference_mode():
            md.tensor_parallel.apply(model, lambda module: None)
        model[0](torch.ones(2, 3)).sum().backward()
        assert model[0].weight.grad.shape == (2, 3)

    md.simulate(program, 2)


def writes(model: Any) -> None:
    model[0].weight.data.zero_()


def writes_out(model: Any) -> None:
    torch.add(torch.ones(2, 3), 1, out=model[0].weight.data)


def writes_lists(model: Any) -> None:
    torch._foreach_mul_([model[0].weight.data], 2.0)


def sets_data(model: Any) -> None:
    model[0].weight.data = torch.zeros(2, 3)


def replaces(model: Any) -> None:
    model[0].weight = nn.Parameter(torch.zeros(2, 3))


@pytest.mark.parametrize("write", [writes, writes_out, writes_lists, sets_data, replaces])
def test_a_parent_that_changes_a_split_parameter_is_rejected(write: Any) -> None:
    def program() -> str:
        model = made()
        before = model[0].weight.detach().clone()
        with pytest.raises(ArgumentError) as raised:
            md.tensor_parallel.apply(
                model, lambda module: write(module) if module is model else None
            )
        if write not in (sets_data, replaces):
            assert torch.equal(model[0].weight, before)
        return str(raised.value)

    assert (
        md.simulate(program, 2)
        == [
            "md.tensor_parallel.apply: fn must not change 0.weight while it sees the model\n"
            "  expected: changes of a split layer's parameters while fn sees the layer itself, "
            "with complete parameters\n"
            "  fix:      change the layer when fn gets it: if it depends on the name, find the "
            "name in dict(model.named_modules())"
        ]
        * 2
    )


def test_bad_models() -> None:
    def program() -> None:
        with pytest.raises(KindError, match=r"apply takes a module\n  found:    a list"):
            md.tensor_parallel.apply([], init)  # type: ignore[type-var]
        model = made(device="meta")
        seen: list[nn.Module] = []
        with pytest.raises(KindError) as raised:
            md.tensor_parallel.apply(model, seen.append)
        assert seen == []
        assert str(raised.value) == (
            "md.tensor_parallel.apply cannot initialize a layer without storage\n"
            "  where:    0\n"
            "  found:    parameters on the meta device\n"
            "  fix:      call model.to_empty(device=...) first"
        )
        assert str(md.typeof(model[0].weight)) == "float32[2@tp, 3]" and model[0].weight.is_meta

    md.simulate(program, 2)


# -- weights that are computed from a part --------------------------------------------------------


def spectral(layer: nn.Module) -> None:
    parametrizations.spectral_norm(layer)


def orthogonal(layer: nn.Module) -> None:
    parametrizations.orthogonal(layer)


def normed(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)


class Triangular(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def custom(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Triangular())


def by_hooks(layer: nn.Module) -> None:
    nn.utils.spectral_norm(layer)


PARAMETRIZED = {
    "SpectralNorm": spectral,
    "Orthogonal": orthogonal,
    "WeightNorm": normed,
    "Triangular": custom,
    "SpectralNorm by hooks": by_hooks,
}


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("leaf", ["0", "2"])
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_computed_weight_of_a_split_layer_is_rejected(name: str, leaf: str) -> None:
    def program() -> list[str]:
        model = made()
        layer = model.get_submodule(leaf)
        with md.typed(mesh_of(2)):  # outside, weight_norm loses annotations, and raises itself
            PARAMETRIZED[name](layer)
        x, texts = torch.ones(3 if leaf == "0" else 2), []
        for call in (lambda: layer(x), lambda: md.tensor_parallel.apply(model, init)):
            with pytest.raises(KindError) as raised:
                call()
            texts.append(str(raised.value))
        assert texts[0] == texts[1]
        if name != "SpectralNorm by hooks":  # as the text proposes
            parametrize.remove_parametrizations(layer, "weight")
            layer(x)
        return texts

    style, kind = {"0": "column", "2": "row"}[leaf], name.partition(" ")[0]
    texts = md.simulate(program, 2)[0]
    assert texts[0].startswith(
        f"{style} cannot use a weight that is computed from a part of the matrix\n"
    )
    assert f"found:    {kind}\n" in texts[0]
    assert (
        "remove_parametrizations(layer, 'weight'), or leave the layer out of the plan" in texts[0]
    )

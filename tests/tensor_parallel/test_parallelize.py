"""``md.parallelize``: plans by names, all that it rejects and leaves unchanged, and ``explain``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    KindError,
    MeshdistError,
    MeshError,
    NotInGroupError,
    ShapeError,
    UnequalError,
)
from tests.pool import Pool

from .split_models import SEQUENCE_PLAN, WHOLE_PLAN, LanguageModel, Sizes, copied, distance, make


def mesh_of(*shape: int) -> md.DeviceMesh:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def state_of(model: nn.Module) -> Any:
    """Return all that a rejected call must leave as it was."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        [(name, id(p), tuple(p.shape)) for name, p in model.named_parameters()],
        [sorted(p.__dict__) for p in model.parameters()],
    )


# -- what is done ---------------------------------------------------------------------------------


def test_parameters_are_the_same_objects_with_parts_and_specs() -> None:
    def program() -> list[str]:
        mesh = mesh_of(2)
        model = make(Sizes(is_tied=True))
        model.layers[0].q.weight.requires_grad_(False)
        before = dict(model.named_parameters())
        assert md.parallelize(model, mesh["tp"], WHOLE_PLAN) is model
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
        assert model.head.weight is model.embedding.weight
        assert not model.layers[0].q.weight.requires_grad
        return [f"{name} {md.typeof(p)}" for name, p in after.items()]

    first, second = md.simulate(program, 2)
    assert first == [
        "embedding.weight float64[6@tp, 4]",
        "layers.0.norm1.weight float64[4]",
        "layers.0.norm1.bias float64[4]",
        "layers.0.norm2.weight float64[4]",
        "layers.0.norm2.bias float64[4]",
        "layers.0.q.weight float64[2@tp, 4]",
        "layers.0.q.bias float64[2@tp]",
        "layers.0.k.weight float64[2@tp, 4]",
        "layers.0.k.bias float64[2@tp]",
        "layers.0.v.weight float64[2@tp, 4]",
        "layers.0.v.bias float64[2@tp]",
        "layers.0.o.weight float64[4, 2@tp]",
        "layers.0.o.bias float64[4]",
        "layers.0.up.weight float64[3@tp, 4]",
        "layers.0.up.bias float64[3@tp]",
        "layers.0.down.weight float64[4, 3@tp]",
        "layers.0.down.bias float64[4]",
        "norm.weight float64[4]",
        "norm.bias float64[4]",
    ]
    assert second[0] == "embedding.weight float64[5@tp, 4]"


def test_an_optimizer_that_was_made_before_trains_the_parts() -> None:
    def program() -> float:
        mesh = mesh_of(2)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        md.parallelize(model, mesh["tp"], WHOLE_PLAN)
        before = model.head.weight.detach().clone()
        model(torch.tensor([[1, 2]])).square().sum().backward()
        optimizer.step()
        return distance(before, model.head.weight)

    assert min(md.simulate(program, 2)) > 0.01


def test_a_module_that_has_several_names_is_split_once() -> None:
    def program() -> list[tuple[int, ...]]:
        mesh = mesh_of(2)
        md.seed(0)
        layer = nn.Linear(4, 4)
        model = nn.ModuleDict({"a": layer, "b": layer})
        md.parallelize(model, mesh["tp"], {"b": "column"})
        with pytest.raises(ArgumentError, match="two patterns of the plan match b"):
            md.parallelize(copied(nn.ModuleDict({"b": layer})), mesh, {"b": "row", "*": "row"})
        return [tuple(p.shape) for p in model.parameters()]

    assert md.simulate(program, 2) == [[(2, 4), (2,)]] * 2


def test_two_axes_split_two_parts_of_a_model() -> None:
    def program() -> str:
        mesh = mesh_of(2, 2)
        md.seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        md.parallelize(model, mesh["tp"], {"0": "column_whole"})
        md.parallelize(model, mesh["dp"], {"1": "row_whole"})
        md.seed(0)
        whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        assert distance(model(torch.ones(3, 4)), whole(torch.ones(3, 4))) < 1e-6
        return md.tensor_parallel.explain(model)

    said = md.simulate(program, 4)
    assert (
        said
        == [
            "tensor parallel over tp=2\n"
            "  *  column_whole\n"
            "    forward:  all-gather of the output, [..., 4]\n"
            "    backward: all-reduce of the input's gradient, [..., 4], one for all layers of "
            "this input\n"
            "tensor parallel over dp=2\n"
            "  *  row_whole\n"
            "    forward:  all-reduce of the output, [..., 4]\n"
            "    backward: all-gather of the input's gradient, [..., 4]"
        ]
        * 4
    )


def test_explain_tells_what_was_done_and_what_a_plan_would_do() -> None:
    def program() -> tuple[str, str]:
        mesh = mesh_of(2)
        model = make(Sizes(layers=2))
        before = state_of(model)
        planned = md.tensor_parallel.explain(model, mesh["tp"], SEQUENCE_PLAN)
        assert state_of(model) == before
        assert md.tensor_parallel.explain(model) == "no layer is parallelized"
        return planned, md.tensor_parallel.explain(md.parallelize(model, mesh, SEQUENCE_PLAN))

    for planned, done in md.simulate(program, 2):
        assert sorted(planned.splitlines()) == sorted(done.splitlines())
        assert done.splitlines()[:10] == [
            "tensor parallel over tp=2",
            "  embedding  vocab_sequence",
            "    forward:  reduce-scatter of the output, [..., s, 4]",
            "    backward: all-gather of the output's gradient, [..., s, 4]",
            "  layers.*.norm1  reduced, 2 times",
            "    forward:  nothing",
            "    backward: all-reduce of the gradients of its parameters, 8 elements",
            "  layers.*.norm2  reduced, 2 times",
            "    forward:  nothing",
            "    backward: all-reduce of the gradients of its parameters, 8 elements",
        ]


# -- what is rejected ------------------------------------------------------------------------------


def linear(*sizes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*(sizes or (4, 4))))


class Attention(nn.Module):
    """Three heads of two features."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 2
        self.q_proj = nn.Linear(6, 6)


class Subclass(nn.Linear):
    """Of which nobody knows what it computes."""


def tied_to_a_whole() -> nn.Module:
    return LanguageModel(Sizes(is_tied=True))


def with_gradient() -> nn.Module:
    model = linear()
    model(torch.ones(4)).sum().backward()
    return model


def parallelized() -> nn.Module:
    return md.parallelize(linear(), mesh_of(2)["tp"], {"0": "column"})


def reduced() -> nn.Module:
    return md.parallelize(nn.Sequential(nn.LayerNorm(4)), mesh_of(2)["tp"], {"0": "reduced"})


def wrapped() -> nn.Module:
    model = linear()
    keep.append(md.DDP(model, device_mesh=mesh_of(1, 2)["dp"]))
    return model


keep: list[Any] = []
LEAVE = "remove it from the plan: modules that the plan does not name are not split"
PLAIN = "a torch.nn.Linear (not a subclass) with plain parameters"

# Name: model, plan, error, and the text.
REFUSED: dict[
    str, tuple[Callable[[], nn.Module], dict[str, Any], type[MeshdistError], list[str]]
] = {
    "no module": (
        LanguageModel,
        {"layers.*.upp": "column"},
        ArgumentError,
        [
            "parallelize: 'layers.*.upp' matches no module",
            "  where:    'layers.*.upp': 'column'",
            "  expected: a name as in model.named_modules(), in which * matches one part between "
            "dots",
            "  fix:      did you mean 'layers.*.up'?",
        ],
    ),
    "nothing alike": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        {"up": "column"},
        ArgumentError,
        [
            "parallelize: 'up' matches no module",
            "  where:    'up': 'column'",
            "  expected: a name as in model.named_modules(), in which * matches one part between "
            "dots",
            "  fix:      use module names of this model: '0', '2'",
        ],
    ),
    "nothing inside": (
        lambda: nn.Linear(4, 4),
        {"*": "column"},
        ArgumentError,
        [
            "parallelize: '*' matches no module",
            "  where:    '*': 'column'",
            "  expected: a name as in model.named_modules(), in which * matches one part between "
            "dots",
            "  fix:      use '' for the model itself, which has no submodules",
        ],
    ),
    "two patterns": (
        LanguageModel,
        {"layers.*.up": "column", "layers.0.*p": "column"},
        ArgumentError,
        [
            "parallelize: two patterns of the plan match layers.0.up",
            "  expected: one pattern for each module",
            "  found:    'layers.*.up': 'column' and 'layers.0.*p': 'column'",
            "  fix:      remove one of the patterns, or make it narrower",
        ],
    ),
    "another class": (
        LanguageModel,
        {"layers.*": "column"},
        KindError,
        [
            "parallelize cannot use 'column' for layers.0",
            "  where:    'layers.0': 'column'",
            f"  expected: {PLAIN}",
            "  found:    a tests.tensor_parallel.split_models.Block",
            f"  fix:      {LEAVE}",
        ],
    ),
    "a subclass": (
        lambda: nn.Sequential(Subclass(4, 4)),
        {"0": "row"},
        KindError,
        [
            "parallelize cannot use 'row' for 0",
            "  where:    '0': 'row'",
            f"  expected: {PLAIN}",
            "  found:    a tests.tensor_parallel.test_parallelize.Subclass",
            f"  fix:      {LEAVE}",
        ],
    ),
    "a parametrization": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
        {"0": "row"},
        KindError,
        [
            "parallelize cannot use 'row' for 0",
            "  where:    '0': 'row'",
            f"  expected: {PLAIN}",
            "  found:    ParametrizedLinear parametrized",
            "  fix:      call nn.utils.parametrize.remove_parametrizations first",
        ],
    ),
    "a weight norm": (
        lambda: nn.Sequential(_weight_norm(nn.Linear(4, 4))),
        {"0": "row"},
        KindError,
        [
            "parallelize cannot use 'row' for 0",
            "  where:    '0': 'row'",
            f"  expected: {PLAIN}",
            "  found:    Linear with the parameters bias, weight_g, weight_v",
            "  fix:      remove weight_norm, spectral_norm or pruning first",
        ],
    ),
    "a quantized layer": (
        lambda: nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 4)),
        {"0": "row"},
        KindError,
        [
            "parallelize cannot use 'row' for 0",
            "  where:    '0': 'row'",
            f"  expected: {PLAIN}",
            "  found:    a torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
            f"  fix:      {LEAVE}",
        ],
    ),
    "no values": (
        lambda: nn.Sequential(nn.Linear(4, 4, device="meta")),
        {"0": "row"},
        KindError,
        [
            "parallelize cannot use 'row' for 0",
            "  where:    '0': 'row'",
            f"  expected: {PLAIN}",
            "  found:    Linear on the meta device, without values",
            "  fix:      call module.to_empty(device=...) first; pass check=False if you load "
            "values later",
        ],
    ),
    "an option of embeddings": (
        lambda: nn.Sequential(nn.Embedding(4, 4, max_norm=1.0)),
        {"0": "vocab"},
        KindError,
        [
            "parallelize cannot use 'vocab' for 0",
            "  where:    '0': 'vocab'",
            "  expected: a torch.nn.Embedding (not a subclass) with plain parameters",
            "  found:    Embedding with max_norm, which reads all rows",
            f"  fix:      {LEAVE}",
        ],
    ),
    "nothing to reduce": (
        lambda: nn.Sequential(nn.ReLU()),
        {"0": "reduced"},
        KindError,
        [
            "parallelize: 0, a ReLU, has no plain parameters",
            "  where:    '0': 'reduced'",
            "  expected: a module with plain parameters, such as a norm",
            "  fix:      remove it from the plan, or name its submodules",
        ],
    ),
    "a computed weight to reduce": (
        lambda: nn.Sequential(_weight_norm(nn.Linear(4, 4))),
        {"0": "reduced"},
        KindError,
        [
            "parallelize: 0, a Linear, has no plain parameters",
            "  where:    '0': 'reduced'",
            "  expected: a module with plain parameters, such as a norm",
            "  fix:      remove weight_norm, spectral_norm or pruning first",
        ],
    ),
    "a parametrized weight to reduce": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4))),
        {"0": "reduced"},
        KindError,
        [
            "parallelize: 0, a ParametrizedLinear, has no plain parameters",
            "  where:    '0': 'reduced'",
            "  expected: a module with plain parameters, such as a norm",
            "  fix:      remove weight_norm, spectral_norm or pruning first",
        ],
    ),
    "twice": (
        parallelized,
        {"0": "row"},
        ArgumentError,
        [
            "parallelize: 0 is parallelized already",
            "  where:    '0': 'row'",
            "  found:    column",
            "  fix:      call parallelize once, with the complete plan",
        ],
    ),
    "reduced twice": (
        reduced,
        {"0": "reduced"},
        ArgumentError,
        [
            "parallelize: 0 is parallelized already",
            "  where:    '0': 'reduced'",
            "  found:    reduced",
            "  fix:      call parallelize once, with the complete plan",
        ],
    ),
    "wrapped": (
        wrapped,
        {"0": "row"},
        ArgumentError,
        [
            "parallelize: 0.weight belongs to a DistributedDataParallel",
            "  where:    '0': 'row'",
            "  expected: a model that is not wrapped yet",
            "  fix:      parallelize first: DDP(md.parallelize(model, mesh['tp'], plan), "
            "device_mesh=mesh['dp'])",
        ],
    ),
    "a gradient": (
        with_gradient,
        {"0": "row"},
        ArgumentError,
        [
            "parallelize cannot split 0.weight while it has a gradient",
            "  where:    '0': 'row'",
            "  fix:      call optimizer.zero_grad() or module.zero_grad() first",
        ],
    ),
    "small": (
        lambda: linear(4, 1),
        {"0": "column"},
        ShapeError,
        [
            "parallelize: 0 is too small for the 2 ranks of 'tp'",
            "  where:    '0': 'column'",
            "  expected: out_features of 2 or more",
            "  found:    1",
            f"  fix:      {LEAVE}",
        ],
    ),
    "heads": (
        Attention,
        {"q_proj": "column"},
        ShapeError,
        [
            "parallelize cannot split q_proj inside an attention head",
            "  where:    'q_proj': 'column'",
            "  expected: a number of heads that is divisible by 2, the size of 'tp'",
            "  found:    3 heads of 2 features (head_dim of Attention)",
            "  fix:      use fewer ranks along the axis, or remove the layers of this attention "
            "from the plan",
        ],
    ),
    "read by its parent": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8),
        {"linear1": "column", "linear2": "row"},
        KindError,
        [
            "parallelize: TransformerEncoderLayer may read the weights of linear1 directly",
            "  where:    'linear1': 'column'",
            "  expected: a module that calls its layers",
            "  fix:      call torch.backends.mha.set_fastpath_enabled(False) first",
        ],
    ),
    "tied to what stays whole": (
        tied_to_a_whole,
        {"head": "column_whole"},
        ArgumentError,
        [
            "parallelize cannot split one parameter in two ways: embedding.weight and head.weight "
            "are tied",
            "  expected: styles that split both the same way, such as 'vocab' for an embedding and "
            "'column' for the head that is tied to it",
            "  found:    embedding.weight: not split; head.weight: split along dim 0 of 2",
            "  fix:      name both modules in the plan, or none of them",
        ],
    ),
}


def _weight_norm(layer: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return weight_norm(layer)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_rejected_leaves_the_model_as_it_was(name: str) -> None:
    make_model, plan, kind, lines = REFUSED[name]

    def program() -> str:
        mesh = mesh_of(2)
        md.seed(0)
        model = make_model()
        before = state_of(model)
        # What would be fine comes first: nothing is done before all is read.
        more = {"*norm*": "reduced"} if isinstance(model, LanguageModel) else {}
        with pytest.raises(kind) as raised:
            md.parallelize(model, mesh["tp"], {**more, **plan})
        assert state_of(model) == before
        keep.clear()
        return str(raised.value)

    assert md.simulate(program, 2) == ["\n".join(lines)] * 2


@pytest.mark.parametrize("pattern", ["*", "0", "2"])
def test_a_star_stands_for_a_part_and_not_for_the_model(pattern: str) -> None:
    def program() -> list[tuple[int, ...]]:
        md.seed(0)
        model = nn.ModuleDict({"0": nn.Linear(4, 4), "2": nn.Linear(4, 4)})
        md.parallelize(model, mesh_of(2)["tp"], {pattern: "column"})
        return [tuple(layer.weight.shape) for layer in model.values()]

    shapes = [(2, 4) if pattern in ("*", name) else (4, 4) for name in ("0", "2")]
    assert md.simulate(program, 2) == [shapes] * 2


def test_what_is_no_module_and_no_axis() -> None:
    def program() -> None:
        mesh = mesh_of(1, 2)
        model, plan = linear(), {"0": "column"}
        wrong: list[tuple[Any, Any, type[MeshdistError], str]] = [
            (model.parameters(), mesh["tp"], KindError, "takes a module\n  found:    a generator"),
            (
                model,
                "tp",
                KindError,
                r"takes one axis of a meshdist.DeviceMesh(.|\n)*found:    a builtins.str",
            ),
            (model, mesh, MeshError, r"one named axis of a mesh(.|\n)*expected: mesh\[\"tp\"\]"),
            (model, md.DeviceMesh("cpu", [0]), MeshError, "takes one named axis"),
        ]
        for module, axis, kind, text in wrong:
            with pytest.raises(kind, match=text):
                md.parallelize(module, axis, plan)
        other = md.DeviceMesh("cpu", [1], mesh_dim_names=("tp",))
        if md.get_rank() == 0:
            with pytest.raises(NotInGroupError, match="parallelize"):
                md.parallelize(model, other, plan)

    md.simulate(program, 2)


def unlike(dtype: torch.dtype) -> str:
    mesh = mesh_of(2)
    torch.manual_seed(md.get_rank())  # as without a seed
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    with pytest.raises(UnequalError) as raised:
        md.parallelize(model, mesh["tp"], {"0": "column"})
    assert type(model[0]) is nn.Linear
    md.parallelize(model, mesh["tp"], {"0": "column"}, check=False)
    again = nn.Sequential(nn.Linear(4, 4, dtype=dtype))
    with torch.no_grad():  # equal but for the order of a sum
        for x in again.parameters():
            x.fill_(1 + torch.finfo(dtype).eps * md.get_rank())
    assert type(md.parallelize(again, mesh["tp"], {"0": "column"})[0]) is not nn.Linear
    return str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("is_simulated", [True, False])
def test_models_that_differ_between_ranks_are_told(
    dtype: torch.dtype, is_simulated: bool, pool: Pool
) -> None:
    texts = md.simulate(unlike, 2, args=(dtype,)) if is_simulated else pool.run(unlike, 2, dtype)
    for text in texts:
        shown = str(dtype).removeprefix("torch.")
        assert text.startswith("parallelize: values are not the same on every rank over axis 'tp'")
        assert f"0.weight, shape (4, 4), {shown}: rank 1 differs from rank 0" in text
        assert (
            "fix:      call md.seed(0) on every rank before you create the model, or load" in text
        )


def test_an_encoder_layer_without_its_fast_path() -> None:
    def program() -> float:
        mesh = mesh_of(2)
        md.seed(0)
        whole = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).double().eval()
        plan = {"linear1": "column", "linear2": "row"}
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)
        with torch.no_grad():
            return distance(split(x), whole(x))

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert max(md.simulate(program, 2)) < 1e-14
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_packed_features_are_cut_where_they_lie() -> None:
    """Rank 0 of two has all of q and half of k: nothing warns, as the page says."""

    def program() -> list[bool]:
        mesh = mesh_of(2)
        md.seed(0)
        whole = nn.Linear(2, 6)
        split = md.parallelize(copied(whole), mesh["tp"], {"": "column"})
        x = torch.ones(2)
        q, _, _ = whole(x).chunk(3, -1)
        mine, _, _ = split(x).chunk(3, -1)
        return [torch.equal(mine, half) for half in q.chunk(2)]

    first, second = md.simulate(program, 2)
    assert first == [True, False]
    assert second == [False, False]


# -- what a plan forgets --------------------------------------------------------------------------


def test_norms_that_a_plan_with_a_cut_sequence_leaves_out_are_warned_of() -> None:
    plan = {name: word for name, word in SEQUENCE_PLAN.items() if "norm" not in name}

    def program(kind: str) -> None:
        model = make()
        if kind == "marked":  # as the text proposes
            md.annotate(model, {"*norm*": "..."})
        chosen = {"named": SEQUENCE_PLAN, "whole": WHOLE_PLAN}.get(kind, plan)
        md.parallelize(model, mesh_of(2)["tp"], chosen)

    for kind in ("marked", "named", "whole"):
        md.simulate(program, 2, args=(kind,))  # a warning is an error here
    with pytest.warns(UserWarning, match="omits norm layers") as told:
        md.simulate(program, 2, args=("left out",))
    for warning in told:
        text = str(warning.message)
        assert text.startswith("parallelize: the plan splits the sequence but omits norm layers\n")
        assert "'reduced' for each norm whose input is split over 'tp'" in text
        assert "found:    layers.0.norm1, layers.0.norm2, norm\n" in text
        assert "md.annotate(model, {'norm.*': '...'}, mesh=mesh)" in text


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv", "query_key_value", "to_kv"])
def test_a_column_that_is_named_like_a_packed_projection(name: str) -> None:
    def program(size: int, name: str, word: str) -> None:
        md.seed(0)
        model = nn.Sequential(OrderedDict({name: nn.Linear(6, 12)}))
        md.parallelize(model, mesh_of(size), {name: word})

    for size, other, word in ((1, name, "column"), (2, "up", "column"), (2, name, "column_whole")):
        md.simulate(program, size, args=(size, other, word))  # a warning is an error here
    for word in ("column", "column_sequence"):
        with pytest.warns(UserWarning, match="packed projection") as told:
            md.simulate(program, 2, args=(2, name, word))
        text = str(told[0].message)
        assert text.startswith("parallelize: a column layer is named like a packed projection\n")
        assert f"found:    {name}\n" in text
        assert "split it into one layer for each projection, or use 'column_whole'" in text
        assert "'.*named like a packed projection'" in text


@pytest.mark.parametrize(
    ("word", "num_given", "texts"),
    [
        (
            "row",
            6,
            [
                "expected: an input of shape [..., 3]",
                "use 'column' for the layer before it, or 'row_whole'",
            ],
        ),
        ("row_whole", 3, ["expected: an input of shape [..., 6]", "use 'row', which takes"]),
        ("column", 3, ["expected: an input of shape [..., 6]", "use 'row' or 'column_whole'"]),
    ],
)
def test_a_layer_beside_a_forgotten_word_says_which(
    word: str, num_given: int, texts: list[str]
) -> None:
    def program() -> str:
        md.seed(0)
        layer = md.parallelize(nn.Sequential(nn.Linear(6, 4)), mesh_of(2), {"0": word})
        with pytest.raises(ShapeError) as raised:
            layer(torch.ones(2, num_given))
        return str(raised.value)

    for text in md.simulate(program, 2):
        start = f"{word} cannot take an input with this number of features\n"
        assert text.startswith(start)
        assert f"Linear(in_features=6, out_features=4, bias=True, {word} over tp=2)" in text
        assert f"found:    shape (2, {num_given})" in text and all(each in text for each in texts)

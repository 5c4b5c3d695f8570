"""md.seed: which ranks draw alike, what type a draw has in a context, and what is rejected."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    KindError,
    MeshError,
    NotInGroupError,
)
from meshdist.mesh.layout import Layout
from meshdist.typed_mode.context import find_context
from meshdist.typed_mode.function_rules import OPERATIONS
from meshdist.typed_mode.random_draws import type_of_draw, varying_axes
from tests.typed_mode.typed_cases import in_mesh, kinds, refusal, varying


def three_draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


# -- which ranks draw alike -----------------------------------------------------------------------


def test_without_axes_all_ranks_draw_what_the_libraries_own_seeds_lead_to() -> None:
    def program() -> Any:
        md.seed(5)
        return three_draws()

    torch_state, numpy_state, state = (
        torch.get_rng_state(),
        np.random.get_state(),
        random.getstate(),
    )
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    oracle = three_draws()
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(state)
    assert md.simulate(program, 3) == [oracle] * 3


@pytest.mark.parametrize("axes", ["dp", "tp", ("dp",), ("tp", "dp"), ["pp", "tp"]])
def test_ranks_draw_alike_that_share_their_coordinates_along_the_axes(axes: Any) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        md.seed(5, differ_over=axes, mesh=mesh)
        return three_draws()

    found = in_mesh(body, shape=(2, 2, 2))
    names = (axes,) if isinstance(axes, str) else axes
    places = {"pp": 4, "dp": 2, "tp": 1}
    for draws in zip(*found, strict=True):  # of each library
        for one in range(8):
            for other in range(8):
                differ = any((one ^ other) & places[axis] for axis in names)
                assert (draws[one] != draws[other]) == differ


def test_seeds_differ_by_number_and_by_axis() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        found = []
        for arguments in ((5, "dp"), (6, "dp"), (5, "tp"), (5, ()), (-5, ()), (2**64 - 1, "dp")):
            md.seed(arguments[0], differ_over=arguments[1], mesh=mesh)
            found.append(three_draws())
        return found

    for found in in_mesh(body):
        for draws in zip(*found, strict=True):
            assert len(set(draws)) == 6


def test_a_generator_is_seeded_alone() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        generator = torch.Generator()
        md.seed(1)
        before = three_draws()
        md.seed(1)
        md.seed(7, differ_over="dp", mesh=mesh, generator=generator)
        assert three_draws() == before
        return torch.rand(1, generator=generator).item()

    a, b, c, d = in_mesh(body)
    assert a == b != c == d


# -- types ----------------------------------------------------------------------------------------


LSTM = nn.LSTM(2, 2, 2, dropout=0.5)
DRAWS: dict[str, Any] = {
    "rand": lambda x: torch.rand(3),
    "randn": lambda x: torch.randn(3),
    "randperm": lambda x: torch.randperm(3),
    "rand_like": torch.rand_like,
    "new().normal_": lambda x: torch.empty(3).normal_(),
    "uniform_ by name": lambda x: nn.init.uniform_(tensor=torch.empty(3)),
    "normal": lambda x: torch.normal(torch.zeros(3), torch.ones(3)),
    "bernoulli": lambda x: torch.bernoulli(torch.full((3,), 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(3), 2),
    "dropout": lambda x: F.dropout(torch.ones(3)),
    "dropout_": lambda x: F.dropout(torch.ones(3), inplace=True),
    "torch.dropout": lambda x: torch.dropout(torch.ones(3), p=0.5, train=True),
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones(3), training=True),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(torch.ones(3), p=0.5, train=True),
    "rrelu": lambda x: F.rrelu(torch.ones(3), training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(torch.ones(3)),
    "aten": lambda x: torch.ops.aten.rand([3]),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[torch.ones(1, 2, 4)] * 3, dropout_p=0.5
    ),
    "lstm": lambda x: LSTM(torch.ones(3, 1, 2))[0],
}


def test_a_draw_varies_over_the_axes_of_the_seed() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        x = varying(torch.ones(3), "tp")  # of which rand_like reads no values
        with md.typed(mesh):
            md.seed(0)
            alike = {name: kinds(draw(x)) for name, draw in DRAWS.items()}
            md.seed(0, differ_over="dp")
            found = {name: kinds(draw(x)) for name, draw in DRAWS.items()}
        return alike, found

    expected = dict.fromkeys(DRAWS, ""), dict.fromkeys(DRAWS, "V:dp")
    assert in_mesh(body) == [expected] * 4


def test_what_is_drawn_in_place_is_marked_itself() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        filled, dropped, spoilt = (torch.ones(3) for _ in range(3))
        parameter = nn.Parameter(torch.ones(3))
        with md.typed(mesh):
            md.seed(0, differ_over="dp")
            nn.init.uniform_(tensor=filled)
            assert F.dropout(dropped, inplace=True) is dropped
            F.rrelu(spoilt, training=True, inplace=True)
            with pytest.raises(AxisTypeError, match="normal_ cannot change its target"):
                nn.init.normal_(parameter)
            return kinds(filled), kinds(dropped), kinds(spoilt), kinds(parameter)

    assert in_mesh(body) == [("V:dp", "V:dp", "V:dp", "")] * 4


def test_a_draw_varies_over_its_operands_axes_too() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        x = varying(torch.ones(3), "tp")
        weight = torch.ones(3, requires_grad=True)
        with md.typed(mesh):
            md.seed(0)
            first = kinds(F.dropout(x))
            md.seed(0, differ_over="dp")
            second = kinds(F.dropout(x))
            dropped = F.dropout(weight)
            loss = md.lax.psum(dropped.sum(), "dp")
            loss.backward()
        return first, second, kinds(dropped), dropped.tolist(), weight.grad.tolist()

    found = in_mesh(body)
    total = [sum(column) for column in zip(found[0][3], found[2][3], strict=True)]
    for first, second, third, _, grad in found:
        assert (first, second, third) == ("V:tp", "V:dp,tp", "V:dp")
        assert grad == total  # the psum of both masks, as the cast has it


NO_DRAWS: dict[str, Any] = {
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "dropout in evaluation": lambda x: F.dropout(x, training=False),
    "the module": lambda x: nn.Dropout().eval()(x),
    "torch.dropout": lambda x: torch.dropout(x, p=0.5, train=False),
    "dropout in place": lambda x: torch.dropout_(x.clone(), 0.5, False),
    "alpha_dropout": F.alpha_dropout,
    "alpha_dropout_": lambda x: torch.alpha_dropout_(x.clone(), 0.5, False),
    "rrelu": F.rrelu,
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3)] * 3),
}


def test_what_draws_nothing_needs_no_seed() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            return {name: kinds(call(torch.ones(3))) for name, call in NO_DRAWS.items()}

    assert in_mesh(body) == [dict.fromkeys(NO_DRAWS, "")] * 4


def test_a_recurrent_layer_draws_in_training_alone() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        layer, x = nn.LSTM(2, 2, 2, dropout=0.5), torch.ones(3, 1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(x, [3])
        with md.typed(mesh):
            for given in (x, packed):
                layer.eval()(given)
                with pytest.raises(AxisTypeError, match=r"^lstm cannot draw"):
                    layer.train()(given)

    in_mesh(body)


# -- what is not seeded ---------------------------------------------------------------------------


def test_a_draw_from_a_state_that_seed_did_not_set() -> None:
    text = refusal(AxisTypeError, lambda mesh: F.dropout(varying(torch.ones(3))))
    assert text.startswith("dropout cannot draw from a generator that md.seed did not seed\n")
    assert "rank 0 (dp=0, tp=0) of DeviceMesh(dp=2, tp=2); axis 'tp' (size 2)" in text
    assert "test_random_draws.py:" in text
    assert "operands that vary over 'dp', 'tp'" in text
    assert "torch's default generator, never seeded by md.seed" in text
    assert "operand 0: float32[3]{V:dp}" in text
    assert (
        "md.seed(seed, differ_over='dp') on every rank if the result should be equal along 'tp',"
        in text
    )
    assert (
        "md.seed(seed, differ_over=('dp', 'tp')) if each rank should draw its own numbers" in text
    )
    text = refusal(AxisTypeError, lambda mesh: F.dropout(torch.ones(3)))
    assert "md.seed(seed) on every rank if the result should be equal along 'dp', 'tp'," in text


def test_other_ways_to_seed_are_seen() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        md.seed(3)
        torch.rand(1)
        torch.manual_seed(4)
        torch.rand(1)

    text = refusal(AxisTypeError, body)
    assert text.startswith("rand cannot draw from a generator that md.seed did not seed\n")
    assert "seeded with 4 after md.seed" in text
    assert "differ_over=('dp', 'tp')" in text

    def reseeded(mesh: md.DeviceMesh) -> None:
        md.seed(3)
        torch.seed()
        torch.rand(1)

    assert re.search(r"seeded with \d+ after md.seed", refusal(AxisTypeError, reseeded))


def test_a_generator_of_the_programs_counts_as_unseeded() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        md.seed(3)
        torch.rand(1, generator=torch.Generator().manual_seed(3))

    text = refusal(AxisTypeError, body)
    assert "the generator in generator=, never seeded by md.seed" in text
    assert "md.seed(seed, generator=g) on every rank if the result should be equal along" in text
    assert "differ_over=('dp', 'tp'), generator=g)" in text

    def seeded(mesh: md.DeviceMesh) -> Any:
        generator = torch.Generator()
        with md.typed(mesh):
            md.seed(3, differ_over="tp", generator=generator)
            return kinds(torch.rand(1, generator=generator))

    assert in_mesh(seeded) == ["V:tp"] * 4


def test_operands_that_vary_over_all_axes_need_no_seed() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            return kinds(F.dropout(varying(torch.ones(3), "dp") + varying(torch.ones(3), "tp")))

    assert in_mesh(body) == ["V:dp,tp"] * 4


@pytest.mark.parametrize("seeds", [None, {}, {"differ_over": "dp"}], ids=str)
def test_loaders_draw_numbers_and_need_no_seed(seeds: dict[str, str] | None) -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        if seeds is not None:
            md.seed(3, mesh=mesh, **seeds)
        data = TensorDataset(torch.arange(6.0))
        loaders = [
            DataLoader(data, batch_size=2),
            DataLoader(data, batch_size=2, shuffle=True),
            DataLoader(data, sampler=DistributedSampler(data, 2, md.get_rank() % 2)),
        ]
        with md.typed(mesh):
            return [sorted(x for (batch,) in one for x in batch.tolist()) for one in loaders]

    for plain, shuffled, part in in_mesh(body):
        assert plain == shuffled == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert len(set(part)) == 3


def test_a_data_set_that_draws_needs_a_seed() -> None:
    class Noisy(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(2)

    text = refusal(AxisTypeError, lambda mesh: list(DataLoader(Noisy())))
    assert text.startswith("randn cannot draw from a generator that md.seed did not seed\n")


def test_states_that_are_put_back_keep_their_seed() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        weight = torch.ones(64, requires_grad=True)
        x = varying(torch.ones(64))
        with md.typed(mesh):
            md.seed(0, differ_over="dp")
            with torch.random.fork_rng():
                torch.rand(1)
            dropped = checkpoint(lambda x: F.dropout(weight * x), x, use_reentrant=False)
            md.lax.psum(dropped.sum(), "dp").backward()
            return dropped, weight.grad

    found = in_mesh(body)
    for _, grad in found:  # what was recomputed drew the same
        assert torch.equal(grad, found[0][0] + found[2][0])


def test_each_simulated_rank_and_each_run_has_its_own_seeds() -> None:
    def seeds_some(mesh: md.DeviceMesh) -> None:
        if md.get_rank() != 1:
            md.seed(md.get_rank())  # the number with which a simulated rank begins
        md.all_reduce(torch.ones(1))
        if md.get_rank() == 1:
            with md.typed(mesh), pytest.raises(AxisTypeError, match=r"never seeded by md\.seed"):
                torch.rand(1)

    def seeds_none(mesh: md.DeviceMesh) -> None:
        with md.typed(mesh), pytest.raises(AxisTypeError, match=r"never seeded by md\.seed"):
            torch.rand(1)

    in_mesh(seeds_some)
    in_mesh(seeds_none)


def test_a_context_of_another_mesh_knows_its_own_axes() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        md.seed(0, differ_over="dp", mesh=mesh)
        found = []
        flat = mesh.flatten(name="all")
        for one in (mesh["dp"], mesh["tp"], flat, mesh.transpose("tp", "dp")):
            with md.typed(one):
                found.append(kinds(torch.rand(1)))
        return found

    assert in_mesh(body) == [["V:dp", "", "V:all", "V:dp"]] * 4


def test_axes_along_which_states_differ() -> None:
    mesh = Layout.from_shape((2, 2), ("dp", "tp"))
    assert varying_axes(("tp",), mesh, mesh) == ("tp",)
    assert varying_axes(("tp",), mesh, mesh.slice(("dp",), 0)) == ()
    assert varying_axes(("dp",), mesh.slice(("dp",), 0), mesh) is None
    one = Layout.from_shape((1, 2), ("dp", "tp"))
    assert varying_axes(("dp",), one, one) == ("dp",)  # an axis of one is an axis


def test_a_context_over_ranks_that_were_not_seeded() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        md.seed(0, differ_over="dp", mesh=mesh["dp"])
        with md.typed(mesh), pytest.raises(AxisTypeError) as caught:
            torch.rand(1)
        return str(caught.value)

    assert "seeded by md.seed over a mesh that lacks ranks of this mesh" in in_mesh(body)[0]


def test_each_device_has_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for two CUDA devices: torch seeds them together, and one by itself is seen."""

    def body(mesh: md.DeviceMesh) -> Any:
        devices = tuple(torch.Generator() for _ in range(2))

        def of(device: Any) -> str:
            given = {} if device is None else {"device": device}
            with md.typed(mesh):
                mode = find_context()
                assert mode is not None
                return type_of_draw(mode, OPERATIONS[torch.rand], [], (3,), given)

        md.seed(5, differ_over="dp", mesh=mesh)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "current_device", lambda: 1)
            patch.setattr(torch.cuda, "default_generators", devices)
            for one in devices:
                one.manual_seed(torch.initial_seed())
            assert of("cuda:0") == of("cuda") == of(None) == of("cpu") == "V:dp"
            devices[1].manual_seed(1)
            assert of("cuda:0") == of("cpu") == "V:dp"
            for device in ("cuda:1", "cuda"):
                with pytest.raises(AxisTypeError, match=r"seeded with 1 after md\.seed"):
                    of(device)

    in_mesh(body, shape=(1,))


# -- bad arguments --------------------------------------------------------------------------------


def test_bad_arguments_are_rejected() -> None:
    def body(mesh: md.DeviceMesh) -> None:
        for wrong in (1.0, True, "1", None):
            with pytest.raises(KindError, match=r"md\.seed: seed must be an integer"):
                md.seed(wrong)  # type: ignore[arg-type]
        for large in (2**64, -(2**63) - 1):
            with pytest.raises(ArgumentError, match="64 bits"):
                md.seed(large)
        with pytest.raises(KindError, match=r"takes a torch\.Generator as generator"):
            md.seed(1, generator=np.random.default_rng())  # type: ignore[arg-type]
        with pytest.raises(KindError, match="as differ_over"):
            md.seed(1, differ_over=1, mesh=mesh)  # type: ignore[arg-type]
        with pytest.raises(KindError, match=r"md\.seed takes a mesh"):
            md.seed(1, mesh="dp")  # type: ignore[arg-type]
        with pytest.raises(MeshError, match="there is no current mesh"):
            md.seed(1, differ_over="dp")
        with pytest.raises(AxisError, match="ep"):
            md.seed(1, differ_over="ep", mesh=mesh)
        with pytest.raises(AxisError, match="twice"):
            md.seed(1, differ_over=("dp", "dp"), mesh=mesh)

    in_mesh(body)


def test_a_mesh_without_this_rank_is_rejected() -> None:
    def program() -> None:
        half = md.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
        if md.get_rank() == 1:
            with pytest.raises(NotInGroupError, match="does not contain this rank"):
                md.seed(1, differ_over="dp", mesh=half)

    md.simulate(program, 2)


def test_a_model_that_is_built_behind_a_seed_that_differs() -> None:
    def build(mesh: md.DeviceMesh) -> nn.Module:
        md.seed(1, differ_over="dp", mesh=mesh)
        return nn.Linear(2, 2)

    text = refusal(AxisTypeError, build)
    assert "uniform_ cannot change its target from invariant to varying over 'dp'\n" in text
    assert text.endswith(
        "fix:      if the values are random, call md.seed(..., differ_over=) after "
        "you build the model; or, if each rank has its own part of the target, annotate it: "
        "md.annotate(target, varying='dp')"
    )

    def first(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh):
            md.seed(0)
            net = nn.Linear(2, 2)
            md.seed(1, differ_over="dp", mesh=mesh)
            return net.weight.tolist(), kinds(F.dropout(net.weight))

    def own(mesh: md.DeviceMesh) -> str:
        with md.typed(mesh):
            md.seed(1, differ_over="dp", mesh=mesh)
            weight = nn.init.normal_(varying(nn.Parameter(torch.ones(2, 2))))
            return kinds(weight * 2)

    weights = in_mesh(first)
    assert weights == [weights[0]] * 4 and weights[0][1] == "V:dp"
    assert in_mesh(own) == ["V:dp"] * 4


@pytest.mark.parametrize("init", ["orthogonal_", "trunc_normal_", "kaiming_normal_", "normal_"])
def test_other_inits_behind_a_seed_that_differs(init: str) -> None:
    def draw(mesh: md.DeviceMesh) -> None:
        md.seed(1, differ_over="dp", mesh=mesh)
        getattr(nn.init, init)(nn.Parameter(torch.ones(2, 2)))

    assert "fix:      if the values are random, call md.seed(..., differ_over=) after" in refusal(
        AxisTypeError, draw
    )

"""Layers that are split over an axis: the numbers of one device, what they send and reject."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import ArgumentError, MismatchError, ShapeError
from tests.operations.cases import BACKENDS
from tests.pool import Pool

from .split_models import (
    SEQUENCE_PLAN,
    WHOLE_PLAN,
    LanguageModel,
    Sizes,
    copied,
    difference,
    distance,
    draw_text,
    loss_of,
    make,
)

CPU = [torch.profiler.ProfilerActivity.CPU]
TP = ("tp",)


def mesh_of(*shape: int) -> md.DeviceMesh:
    names = ("dp", "tp")[-len(shape) :]
    return md.init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_ranks(body: Callable[[md.DeviceMesh], Any], *shape: int) -> list[Any]:
    return md.simulate(lambda: body(mesh_of(*shape)), math.prod(shape))


def step(sizes: Sizes, size: int, plan: Any, *, is_copied: bool, is_typed: bool) -> list[Any]:
    """Return each rank's difference from one device behind a backward."""

    def program() -> float:
        mesh = mesh_of(size)
        whole = make(sizes)
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        if is_copied:
            split = copied(split)
        text = draw_text(sizes, 2, 2 * size)
        with md.typed(mesh) if is_typed else contextlib.nullcontext():
            loss = loss_of(split, text)
            loss.backward()
        expected = loss_of(whole, text)
        expected.backward()
        return max(distance(loss, expected), difference(split, whole, mesh))

    return md.simulate(program, size)


SMALL = st.builds(
    Sizes,
    num_classes=st.integers(3, 12),
    heads=st.sampled_from([6]),
    head_dim=st.integers(1, 2),
    hidden=st.integers(3, 8),
    layers=st.integers(1, 2),
    is_tied=st.booleans(),
    has_bias=st.booleans(),
)


@given(
    sizes=SMALL,
    size=st.integers(1, 3),
    plan=st.sampled_from([WHOLE_PLAN, SEQUENCE_PLAN]),
    is_copied=st.booleans(),
    is_typed=st.booleans(),
)
def test_a_step_is_that_of_one_device(
    sizes: Sizes, size: int, plan: Any, is_copied: bool, is_typed: bool
) -> None:
    assert max(step(sizes, size, plan, is_copied=is_copied, is_typed=is_typed)) < 1e-13


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
def test_a_step_on_backends(pool: Pool, backend: str, plan: dict[str, str]) -> None:
    def program() -> float:
        mesh = mesh_of(2)
        sizes = Sizes(is_tied=True)
        whole = make(sizes)
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        text = draw_text(sizes, 2, 4)
        loss_of(split, text).backward()
        loss_of(whole, text).backward()
        return difference(split, whole, mesh)

    assert max(pool.run(program, 2, backend=backend)) < 1e-13


@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
@pytest.mark.parametrize("is_copied", [False, True])
def test_three_steps_with_a_wrapper_and_an_optimizer(plan: dict[str, str], is_copied: bool) -> None:
    def program(mesh: md.DeviceMesh) -> float:
        sizes = Sizes(layers=2)
        whole = make(sizes)
        split: Any = md.parallelize(copied(whole), mesh["tp"], plan)
        split = md.DDP(copied(split) if is_copied else split, device_mesh=mesh["dp"])
        optimizers = [
            torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4) for model in (split, whole)
        ]
        text = draw_text(sizes, 4, 4)
        mine = text.chunk(2)[mesh.get_local_rank("dp")]
        worst = 0.0
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(split, mine).backward()
            loss_of(whole, text).backward()
            worst = max(worst, difference(split, whole, mesh))
            for optimizer in optimizers:
                optimizer.step()
        return worst

    assert max(on_ranks(program, 2, 2)) < 1e-13


@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
def test_a_wrapper_that_casts_parameters_sums_their_gradients_once(plan: dict[str, str]) -> None:
    def program(mesh: md.DeviceMesh) -> float:
        whole = make()
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        low = _MixedPrecision(param_dtype=torch.float32)
        model: Any = md.DDP(split, device_mesh=mesh["dp"], mixed_precision=low)
        text = draw_text(Sizes(), 4, 4)
        loss_of(model, text.chunk(2)[mesh.get_local_rank("dp")]).backward()
        loss_of(whole, text).backward()
        return difference(split, whole, mesh)

    assert max(on_ranks(program, 2, 2)) < 1e-6


@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
@pytest.mark.parametrize("is_copied", [False, True])
def test_two_backwards_of_a_wrapper_in_a_context(plan: dict[str, str], is_copied: bool) -> None:
    def program(mesh: md.DeviceMesh) -> float:
        whole = make()
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        model: Any = md.DDP(copied(split) if is_copied else split, device_mesh=mesh["dp"])
        text = draw_text(Sizes(), 4, 4)
        mine = text.chunk(2)[mesh.get_local_rank("dp")].clone()
        md.annotate(mine, varying="dp")
        for _ in range(2):
            with md.typed(mesh):
                loss_of(model, mine).backward()
            loss_of(whole, text).backward()
        return difference(model.module, whole, mesh)

    assert max(on_ranks(program, 2, 2)) < 1e-13


def test_frozen_parameters_stay_so() -> None:
    def program(mesh: md.DeviceMesh) -> float:
        whole = make()
        for parameter in (whole.layers[0].q.weight, whole.norm.bias, whole.embedding.weight):
            parameter.requires_grad_(False)
        split = md.parallelize(copied(whole), mesh["tp"], SEQUENCE_PLAN)
        text = draw_text(Sizes(), 2, 4)
        loss_of(split, text).backward()
        loss_of(whole, text).backward()
        return difference(split, whole, mesh)

    assert max(on_ranks(program, 2)) < 1e-13


# -- what is sent ---------------------------------------------------------------------------------


def operations_under(body: Callable[[], Any]) -> tuple[list[str], Any]:
    with torch.profiler.profile(activities=CPU, acc_events=True) as profile:
        result = body()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    words = [event.name.split() for event in events if event.name.startswith("meshdist::")]
    return [each[0].removeprefix("meshdist::") for each in words], result


GATHER, SCATTER, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"


class Projections(nn.Module):
    """The products q, k and v of one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = 1 * x
        return self.q(y).sum() + self.k(y).sum() + self.v(y).sum()


# The module, the word of its layers, the input on two ranks, and the collectives forward and
# backward.
SENT: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], list[str], list[str]]] = {
    "q, k, v": (Projections, "column", (2, 4, 4), [], [SUM]),
    "q, k, v of a part": (Projections, "column_sequence", (2, 2, 4), [GATHER], [SCATTER]),
    "column": (lambda: nn.Linear(4, 6), "column", (2, 4, 4), [], [SUM]),
    "column_whole": (lambda: nn.Linear(4, 6), "column_whole", (2, 4, 4), [GATHER], [SUM]),
    "column_sequence_whole": (
        lambda: nn.Linear(4, 6),
        "column_sequence_whole",
        (2, 2, 4),
        [GATHER, GATHER],
        [SCATTER],
    ),
    "row": (lambda: nn.Linear(4, 6), "row", (2, 4, 2), [SUM], []),
    "row_whole": (lambda: nn.Linear(4, 6), "row_whole", (2, 4, 4), [SUM], [GATHER]),
    "row_sequence": (
        lambda: nn.Linear(4, 6, bias=False),
        "row_sequence",
        (2, 4, 2),
        [SCATTER],
        [GATHER],
    ),
    "reduced": (lambda: nn.LayerNorm(4), "reduced", (2, 2, 4), [], [SUM, SUM]),
    "cut_sequence": (nn.ReLU, "cut_sequence", (2, 4, 4), [], [GATHER]),
    "gather_sequence": (nn.ReLU, "gather_sequence", (2, 2, 4), [GATHER], []),
}


def test_collectives_forward_and_backward(pool: Pool) -> None:
    def program() -> dict[str, tuple[list[str], list[str]]]:
        mesh, found = mesh_of(2), {}
        for name, (make_module, word, shape, _, _) in SENT.items():
            md.seed(0)
            module = make_module()
            pattern = "?" if isinstance(module, Projections) else ""
            for each, check in ((make_module(), False), (module, True)):
                sent, _ = operations_under(
                    lambda each=each, pattern=pattern, word=word, check=check: md.parallelize(
                        each, mesh["tp"], {pattern: word}, check=check
                    )
                )
                assert sent == (["all_reduce"] if check else [])
            x = torch.ones(shape, requires_grad=True)

            def forward(module: nn.Module = module, x: torch.Tensor = x) -> torch.Tensor:
                return module(2 * x).sum()  # type: ignore[no-any-return]

            forward().backward()  # opens groups
            there, loss = operations_under(forward)
            found[name] = there, operations_under(loss.backward)[0]
        return found

    for found in pool.run(program, 2, backend="shm"):
        assert found == {name: (there, back) for name, (*_, there, back) in SENT.items()}


def test_a_gathered_sequence_is_kept_while_its_part_lives() -> None:
    def program(mesh: md.DeviceMesh) -> None:
        md.seed(0)
        layer = md.parallelize(nn.Linear(4, 4, bias=False), mesh, {"": "column_sequence"})
        x = 1 * torch.ones(2, 4, requires_grad=True)
        first, second = layer(x), layer(x)
        with torch.no_grad():
            without = layer(x)
            x.mul_(3)
            assert distance(layer(x), 3 * without) < 1e-5  # written to since
        assert not without.requires_grad
        assert distance(first, second) == 0
        x.data = torch.zeros(2, 4)
        assert not layer(x).any()

    on_ranks(program, 2)


def in_inference_mode() -> float:
    tp = md.get_world_size()
    mesh, sizes = mesh_of(tp), Sizes(heads=tp, hidden=tp + 3)
    whole = make(sizes)
    split = md.parallelize(copied(whole), mesh["tp"], SEQUENCE_PLAN)
    text = draw_text(sizes, 2, 2 * tp)[:, 1:]
    with torch.inference_mode():
        worst = distance(split(text), whole(text))
        x = split.embedding(text)
        y = split.layers[0].up(x)
        x.mul_(3)  # which torch does not count
        bias = split.layers[0].up.bias
        return max(worst, distance(split.layers[0].up(x) - bias, 3 * (y - bias)))


@pytest.mark.parametrize(
    ("backend", "size"), [*(("simulated", n) for n in (1, 2, 3, 5)), ("gloo", 2), ("shm", 3)]
)
def test_a_cut_sequence_in_inference_mode(pool: Pool, backend: str, size: int) -> None:
    assert max(BACKENDS[backend](pool, in_inference_mode, size)) < 1e-13


@pytest.mark.parametrize("plan", [WHOLE_PLAN, SEQUENCE_PLAN])
def test_a_checkpoint_recomputes_with_what_it_gathers(plan: dict[str, str]) -> None:
    def program(mesh: md.DeviceMesh) -> float:
        whole = make(Sizes(layers=2))
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        text = draw_text(Sizes(), 2, 4)

        def forward(index: torch.Tensor) -> torch.Tensor:
            x = split.embedding(index)
            for layer in split.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return split.head(split.norm(x))  # type: ignore[no-any-return]

        loss_of(forward, text).backward()
        loss_of(whole, text).backward()
        return difference(split, whole, mesh)

    assert max(on_ranks(program, 2)) < 1e-13


# -- single layers --------------------------------------------------------------------------------


def test_an_embedding_keeps_its_padding_and_masks_what_others_have() -> None:
    def program(mesh: md.DeviceMesh) -> float:
        md.seed(0)
        whole = nn.Embedding(7, 3, padding_idx=5).double()
        split = md.parallelize(copied(whole), mesh, {"": "vocab"})
        split.weight.data[0] = (
            math.inf if mesh.get_local_rank() else 1.0
        )  # row 4, which is not read
        whole.weight.data[0] = 1.0
        index = torch.tensor([[0, 5, 6], [5, 2, 0]])
        scale = torch.rand(2, 3, 3, dtype=torch.float64)
        md.broadcast(scale, src=0)
        for module in (split, whole):
            (module(index) * scale).sum().backward()
        assert split.padding_idx == 5
        with mesh:
            grad = md.shard(whole.weight.grad, "v@tp d")
        return max(distance(split(index), whole(index)), distance(split.weight.grad, grad))

    assert max(on_ranks(program, 2)) < 1e-15


def test_an_embedding_has_sparse_gradients_where_torchs_has() -> None:
    def program(mesh: md.DeviceMesh) -> float:
        md.seed(0)
        whole = nn.Embedding(6, 3, sparse=True)
        split = md.parallelize(copied(whole), mesh, {"": "vocab"})
        index = torch.tensor([0, 5, 5, 2])
        for module in (split, whole):
            module(index).square().sum().backward()
        assert split.weight.grad.is_sparse
        part = md.shard(whole.weight.grad.to_dense(), "v@tp d", mesh)
        return distance(split.weight.grad.to_dense(), part)

    assert max(on_ranks(program, 3)) < 1e-6


@pytest.mark.parametrize("index", [7, -1])
def test_an_index_that_no_row_has_is_rejected_on_all_ranks(index: int) -> None:
    def program(mesh: md.DeviceMesh) -> str:
        layer = md.parallelize(nn.Embedding(7, 3), mesh, {"": "vocab"})
        with pytest.raises(ArgumentError) as raised:
            layer(torch.tensor([0, index, 3]))
        return str(raised.value)

    md.seed(0)
    texts = on_ranks(lambda mesh: (md.seed(0), program(mesh))[1], 2)
    assert (
        texts
        == [
            "vocab: index out of range for size 7\n"
            "  expected: indices from 0 to 6\n"
            f"  found:    {index} among 3 indices\n"
            "  fix:      correct these indices, or create the model with a larger size"
        ]
        * 2
    )


def test_a_sequence_that_cannot_be_cut_is_rejected_before_anything_is_sent() -> None:
    def program(mesh: md.DeviceMesh) -> str:
        md.seed(0)
        model = md.parallelize(LanguageModel(), mesh, SEQUENCE_PLAN)
        with pytest.raises(ShapeError) as raised:
            model(torch.zeros(2, 5, dtype=torch.int64))
        return str(raised.value)

    assert (
        on_ranks(program, 2)
        == [
            "cannot split a sequence of length 5 over 'tp', which has 2 ranks\n"
            "  expected: an output of shape [..., s, f] with s a multiple of 2\n"
            "  found:    shape (2, 5, 4)\n"
            "  fix:      pad the sequence to a multiple of 2, or use styles without _sequence"
        ]
        * 2
    )


def test_parts_of_a_sequence_that_differ_in_length_are_told() -> None:
    def program(mesh: md.DeviceMesh) -> None:
        md.seed(0)
        layer = md.parallelize(nn.Linear(4, 4), mesh, {"": "column_sequence"})
        with pytest.raises(MismatchError, match=r"s@tp d -> \.\.\. s d"):
            layer(torch.zeros(2 + mesh.get_local_rank(), 4))

    on_ranks(program, 2)


def test_a_bias_is_added_once() -> None:
    def program(mesh: md.DeviceMesh) -> list[float]:
        md.seed(0)
        layer = md.parallelize(nn.Linear(4, 2), mesh, {"": "row"})
        layer.weight.data.zero_()
        layer.bias.data.fill_(1.5)
        return layer(torch.ones(2)).tolist()  # type: ignore[no-any-return]

    assert on_ranks(program, 2) == [[1.5, 1.5]] * 2


def test_a_model_whose_sequence_is_cut_and_gathered_by_modules_of_its_own() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.places = nn.Embedding(7, 4), nn.Embedding(6, 4)
            self.dropout = nn.Dropout(0.0)
            self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)
            self.last = nn.Identity()
            self.head = nn.Linear(4, 7)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            x = self.embedding(index) + self.places(torch.arange(index.shape[-1]))
            x = self.dropout(x)
            x = x + self.down(self.up(self.norm(x)).relu())
            return self.head(self.last(x))  # type: ignore[no-any-return]

    plan = {
        "dropout": "cut_sequence",
        "norm": "reduced",
        "up": "column_sequence",
        "down": "row_sequence",
        "last": "gather_sequence",
    }

    def program(is_typed: bool) -> float:
        mesh = mesh_of(2)
        md.seed(0)
        whole = Model().double()
        split = md.parallelize(copied(whole), mesh["tp"], plan)
        text = draw_text(Sizes(num_classes=7), 3, 6)
        with md.typed(mesh) if is_typed else contextlib.nullcontext():
            loss_of(split, text).backward()
        loss_of(whole, text).backward()
        return difference(split, whole, mesh)

    for is_typed in (False, True):
        assert max(md.simulate(program, 2, args=(is_typed,))) < 1e-13


def test_reduced_parameters_are_themselves_again_behind_a_forward() -> None:
    class Failing(nn.LayerNorm):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            assert not isinstance(self.weight, nn.Parameter)
            if input.isnan().any():
                raise KeyboardInterrupt  # torch runs no hooks behind it
            return super().forward(input)

    def program(mesh: md.DeviceMesh) -> None:
        norm = md.parallelize(Failing(4), mesh, {"": "reduced"})
        weight = dict(norm.named_parameters())["weight"]
        x = torch.arange(8.0).view(2, 4)
        norm(x)
        assert norm.weight is weight
        with pytest.raises(KeyboardInterrupt):
            norm(x / 0 * 0)
        assert norm.weight is weight
        assert copy.deepcopy(norm).weight.equal(weight)
        (grad,) = torch.autograd.grad(norm(x).sum(), [norm.bias])
        assert grad.tolist() == [4.0] * 4

    on_ranks(program, 2)


class Twice(nn.Module):
    """A module that calls itself, with a parameter that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.w = self.other = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
        y = x * self.w
        if again:
            with torch.no_grad():
                self(y, again=False)
            y = self(y, again=False)
        return y * self.other


def reentered() -> tuple[list[float], list[float]]:
    mesh = mesh_of(md.get_world_size())
    whole, split = Twice(), md.parallelize(Twice(), mesh, {"": "reduced"})
    x = torch.arange(1.0, 1 + mesh.size())[:, None].expand(-1, 4)
    whole(x).sum().backward()
    split(x[md.get_rank()]).sum().backward()
    return split.w.grad.tolist(), whole.w.grad.tolist()


@pytest.mark.parametrize(
    ("backend", "size"), [*(("simulated", n) for n in (1, 2, 3, 5)), ("gloo", 2), ("shm", 3)]
)
def test_a_reduced_module_that_calls_itself(pool: Pool, backend: str, size: int) -> None:
    for mine, of_one_device in BACKENDS[backend](pool, reentered, size):
        assert mine == of_one_device


def test_without_gradients_nothing_is_wrapped_around_reduced_parameters(pool: Pool) -> None:
    def program() -> list[str]:
        norm = md.parallelize(nn.LayerNorm(4), mesh_of(2), {"": "reduced"})
        with torch.inference_mode():
            return operations_under(lambda: norm(torch.ones(2, 4)))[0]

    assert pool.run(program, 2, backend="shm") == [[], []]


# -- copies ---------------------------------------------------------------------------------------


def test_copies_pickles_and_states() -> None:
    def program(mesh: md.DeviceMesh) -> float:
        model = md.parallelize(make(), mesh["tp"], SEQUENCE_PLAN)
        text = draw_text(Sizes(), 2, 4)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assigned = copied(model)
        assigned.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        loaded = torch.load(file, weights_only=False)
        copies = [copy.deepcopy(model), loaded, assigned]
        loss = loss_of(model, text)
        loss.backward()
        for other in copies:
            assert isinstance(other.head, md.tensor_parallel.ColumnParallelLinear)
            assert isinstance(other.head, nn.Linear)
            assert other.head.mesh == mesh["tp"]
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert str(md.typeof(mine)) == str(md.typeof(theirs))
            again = loss_of(other, text)
            again.backward()
            assert distance(again, loss) == 0
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                assert distance(mine.grad, theirs.grad) == 0
        assert copies[0].head.mesh is model.head.mesh
        return loss.item()

    assert len(set(on_ranks(program, 2))) == 1


def test_what_layers_say_of_themselves() -> None:
    def program(mesh: md.DeviceMesh) -> list[str]:
        model = md.parallelize(make(), mesh["tp"], WHOLE_PLAN)
        return [repr(model.head), repr(model.layers[0].o), repr(model.embedding)]

    assert on_ranks(program, 2)[0] == [
        "ColumnParallelLinear(in_features=4, out_features=11, bias=True, column_whole over tp=2)",
        "RowParallelLinear(in_features=4, out_features=4, bias=True, row over tp=2)",
        "VocabParallelEmbedding(11, 4, vocab over tp=2)",
    ]


def test_in_autocast_products_are_made_in_its_dtype() -> None:
    def program(mesh: md.DeviceMesh) -> None:
        md.seed(0)
        whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        split = md.parallelize(copied(whole), mesh, {"0": "column", "1": "row"})
        with torch.autocast("cpu", torch.bfloat16):
            mine, theirs = split(torch.ones(2, 4)), whole(torch.ones(2, 4))
        assert mine.dtype == theirs.dtype == torch.bfloat16
        assert distance(mine.float(), theirs.float()) < 0.05

    on_ranks(program, 2)


def test_hooks_of_a_layer_see_its_part() -> None:
    def program(mesh: md.DeviceMesh) -> list[tuple[int, ...]]:
        md.seed(0)
        layer = nn.Linear(4, 6)
        seen: list[tuple[int, ...]] = []
        layer.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
        layer.register_full_backward_hook(
            lambda module, grads, outputs: seen.append(tuple(outputs[0].shape))
        )
        md.parallelize(layer, mesh, {"": "column"})
        layer(torch.ones(2, 4, requires_grad=True)).sum().backward()
        return seen

    assert on_ranks(program, 2) == [[(2, 3), (2, 3)]] * 2

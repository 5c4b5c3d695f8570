"""Dispatch and combine against a dense loop over tokens; texts of errors; NumPy; types;
backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    DtypeError,
    GroupClosedError,
    KindError,
    MeshError,
    MismatchError,
    ShapeError,
    WorldError,
)
from tests.pool import Pool

WIDTH, OUT = 3, 2
OPERATIONS = ("dispatch", "combine")


@dataclass(frozen=True)
class Case:
    """Tokens of each rank, and what they chose: lists of k experts, a list for each token."""

    chosen: tuple[tuple[tuple[int, ...], ...], ...]
    num_chosen: int
    num_experts: int
    has_weights: bool = True
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.chosen)

    def experts(self, rank: int) -> torch.Tensor:
        return torch.tensor(self.chosen[rank], dtype=torch.int64).reshape(-1, self.num_chosen)

    def arrays(self) -> list[list[torch.Tensor]]:
        """Tokens, weights, gradients, and second gradients of tokens, of all ranks; matrices."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64)

        counts = [len(tokens) for tokens in self.chosen]
        return [
            [normal(n, WIDTH) for n in counts],
            [normal(n, self.num_chosen) for n in counts],
            [normal(n, OUT) for n in counts],
            [normal(n, WIDTH) for n in counts],
            [normal(WIDTH, OUT) for _ in range(self.num_experts)],
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, 9))
    lowest, highest = draw(st.sampled_from([(-1, num_experts - 1), (0, 0), (-1, 0)]))
    tokens = st.lists(st.tuples(*[st.integers(lowest, highest)] * k), max_size=5)
    chosen = tuple(tuple(draw(tokens)) for _ in range(size))
    return Case(chosen, k, num_experts, draw(st.booleans()), draw(st.integers(0, 99)))


def expert(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ matrix)


def oracle(case: Case) -> list[list[torch.Tensor]]:
    """One token after the other: values, first gradients of tokens, weights and experts, second."""
    tokens, weights, gradients, seconds, matrices = case.arrays()
    leaves = [*tokens, *weights, *matrices]
    for leaf in leaves:
        leaf.requires_grad_()
    values = []
    for rank in range(case.size):
        rows = []
        for i, names in enumerate(case.chosen[rank]):
            row = torch.zeros(OUT, dtype=torch.float64)
            for j, name in enumerate(names):
                if name >= 0:
                    scale = weights[rank][i, j] if case.has_weights else 1.0
                    row = row + scale * expert(tokens[rank][i], matrices[name])
            rows.append(row)
        values.append(torch.stack(rows) if rows else torch.zeros(0, OUT, dtype=torch.float64))
    total = sum((y * g).sum() for y, g in zip(values, gradients, strict=True))
    return [values, *derivatives(total, seconds, tokens, weights, matrices)]


def derivatives(
    total: Any, seconds: list[Any], *leaves: list[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """The gradients of ``total``, and those of the inner product of tokens' gradients."""
    flat = [leaf for group in leaves for leaf in group]
    if not total.requires_grad:
        total = total + 0.0 * sum(leaf.sum() for leaf in flat)
    first = torch.autograd.grad(
        total, flat, create_graph=True, allow_unused=True, materialize_grads=True
    )
    inner = sum((a * b).sum() for a, b in zip(first, seconds, strict=False))
    inner = inner + 0.0 * sum((leaf * leaf).sum() for leaf in flat)
    second = torch.autograd.grad(inner, flat, allow_unused=True, materialize_grads=True)
    found = []
    for gradients in (first, second):
        left = iter(gradients)
        found += [[next(left).detach() for _ in group] for group in leaves]
    return found


def blocks(case: Case) -> list[list[int]]:
    """The experts of each rank: contiguous, the first ranks with one more."""
    return [block.tolist() for block in np.array_split(range(case.num_experts), case.size)]


def program(case: Case) -> list[list[torch.Tensor]]:
    """The same on this rank: its values, and gradients of its tokens, weights and experts."""
    mesh = md.init_device_mesh("cpu", (case.size,), mesh_dim_names=("ep",))
    rank = md.get_rank()
    tokens, weights, gradients, seconds = (part[rank] for part in case.arrays()[:4])
    matrices = [case.arrays()[4][name] for name in blocks(case)[rank]]
    for leaf in (tokens, weights, *matrices):
        leaf.requires_grad_()
    with mesh:
        rows, route = md.experts.dispatch(tokens, case.experts(rank), "ep", case.num_experts)
    counts = route.counts.tolist()
    assert len(counts) == len(matrices) and sum(counts) == len(rows)
    parts = [expert(x, m) for x, m in zip(rows.split(counts), matrices, strict=True)]
    out = torch.cat([rows.new_zeros(0, OUT), *parts])
    out = out + 0.0 * (rows * rows).sum()  # so that every rank has a second derivative
    value = md.experts.combine(out, route, weights if case.has_weights else None)
    total = (value * gradients).sum()
    return [[value.detach()], *derivatives(total, [seconds], [tokens], [weights], matrices)]


def check(case: Case, found: list[list[list[torch.Tensor]]]) -> None:
    wanted = oracle(case)
    for rank, own in enumerate(blocks(case)):
        mine = [
            [wanted[0][rank]],
            *(
                [part[name] for name in own] if place % 3 == 2 else [part[rank]]
                for place, part in enumerate(wanted[1:])
            ),
        ]
        torch.testing.assert_close(found[rank], mine, rtol=1e-12, atol=1e-12)


@given(cases())
@example(Case((((0,), (0,)), ((0,),), ()), 1, 1))
@example(Case((((-1, -1),), ((-1, -1),)), 2, 3))
@example(Case(((), (), ()), 2, 5))
def test_values_and_gradients(case: Case) -> None:
    check(case, md.simulate(program, case.size, args=(case,)))


@pytest.mark.soak
@settings(max_examples=2000)
@given(cases())
def test_many_values_and_gradients(case: Case) -> None:
    check(case, md.simulate(program, case.size, args=(case,)))


THREE = Case((((2, 0), (1, 1), (-1, 3)), (), ((3, 3), (0, -1))), 2, 4)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_over_processes(pool: Pool, backend: str) -> None:
    check(THREE, pool.run(program, 3, THREE, backend=backend))


def over(body: Any, size: int = 2, *args: Any) -> list[Any]:
    """What ``body(mesh, *args)`` returns on simulated ranks of an axis 'ep'."""

    def run() -> Any:
        with md.init_device_mesh("cpu", (size,), mesh_dim_names=("ep",)) as mesh:
            return body(mesh, *args)

    return md.simulate(run, size)


TOKENS = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
SIGNS = torch.tensor([[1.0], [-1.0]])
EXPERTS = torch.tensor([[0, 2], [1, 0]])


def test_rows_lie_by_expert_then_by_sender_then_by_token() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        tokens = 10 * md.get_rank() + torch.arange(3)
        experts = torch.tensor([[1], [0], [1]])
        rows, route = md.experts.dispatch(tokens, experts, "ep", 2)
        return rows.tolist(), route.counts.tolist()

    assert over(body) == [([1, 11], [2]), ([0, 2, 10, 12], [4])]


def test_rows_may_come_back_with_another_width_and_dtype() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        rows, route = md.experts.dispatch(TOKENS, EXPERTS.to(torch.uint8), mesh["ep"], 3)
        wide = rows.to(torch.bfloat16).view(-1, 2, 1).expand(-1, 2, 3)
        weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        return rows, md.experts.combine(wide, route), md.experts.combine(wide, route, weights)

    for rows, narrow, wide in over(body):
        assert rows.dtype == torch.float32
        assert (narrow.shape, narrow.dtype) == ((2, 2, 3), torch.bfloat16)
        assert (wide.shape, wide.dtype) == ((2, 2, 3), torch.float32)
        assert wide[:, :, 0].tolist() == [[3.0, 6.0], [21.0, 28.0]]


def test_numpy_arrays_come_back_as_such() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        rows, route = md.experts.dispatch(TOKENS.numpy(), EXPERTS.numpy(), "ep", 3)
        assert type(rows) is type(route.counts) is np.ndarray
        weights = np.full((2, 2), 0.5)
        return md.experts.combine(rows, route, weights)

    for result in over(body):
        assert isinstance(result, np.ndarray)
        np.testing.assert_array_equal(result, TOKENS.numpy())


def test_weights_of_entries_that_send_nothing_are_not_read() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        experts = torch.tensor([[0, -1], [-1, -1]])
        weights = torch.tensor([[2.0, torch.nan], [torch.inf, torch.nan]], requires_grad=True)
        rows, route = md.experts.dispatch(TOKENS, experts, "ep", 3)
        value = md.experts.combine(rows, route, weights)
        value.sum().backward()
        return value.tolist(), weights.grad.tolist()

    assert over(body) == [([[2.0, 4.0], [0.0, 0.0]], [[3.0, 0.0], [0.0, 0.0]])] * 2


def test_a_rank_without_experts_need_not_use_its_rows() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        tokens = TOKENS.clone().requires_grad_()
        rows, route = md.experts.dispatch(tokens, torch.zeros(2, 1, dtype=torch.int64), "ep", 1)
        out = rows * 3 if len(route.counts) else torch.zeros(0, 2)
        md.experts.combine(out, route).sum().backward()
        return tokens.grad.tolist()

    assert over(body) == [[[3.0, 3.0], [3.0, 3.0]]] * 2


def test_three_exchanges_forward_and_two_backward(pool: Pool) -> None:
    def body() -> Any:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        tokens, weights = TOKENS.clone().requires_grad_(), torch.ones(2, 2, requires_grad=True)
        found = []
        with torch.profiler.profile() as forward:
            rows, route = md.experts.dispatch(tokens, EXPERTS, "ep", 3, mesh=mesh)
            value = md.experts.combine(rows.square(), route, weights)
        with torch.profiler.profile() as backward:
            value.sum().backward()
        for profile in (forward, backward):
            names = [event.name for event in profile.events() if "meshdist::" in event.name]
            found.append([name.partition("(")[0] for name in names])
        return found

    sent, back = (f"meshdist::all_to_all_single of experts.{operation}" for operation in OPERATIONS)
    assert pool.run(body, 2, backend="shm") == [[[sent, sent, back], [back, sent]]] * 2


def test_over_two_axes_and_inside_another() -> None:
    def body() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        rank = md.get_rank()
        tokens = torch.tensor([float(rank)])
        found = []
        with mesh:
            for axis, number in (("ep", 2), (("dp", "ep"), 4)):
                experts = torch.tensor([[number - 1]])
                rows, _ = md.experts.dispatch(tokens, experts, axis, number)
                found.append(rows.tolist())
        return found

    none: list[float] = []
    assert md.simulate(body, 4) == [
        [none, none],
        [[0.0, 1.0], none],
        [none, none],
        [[2.0, 3.0], [0.0, 1.0, 2.0, 3.0]],
    ]


def test_in_typed_contexts() -> None:
    def body() -> Any:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        tokens = md.annotate(TOKENS * SIGNS + md.get_rank(), varying=("dp", "ep"))
        torch.manual_seed(mesh.get_local_rank("ep"))
        up = md.annotate(torch.randn(2, 2, requires_grad=True), varying="ep")
        gate = torch.eye(2, requires_grad=True)
        with md.typed(mesh):
            scores = (tokens @ gate).softmax(-1)
            weights, experts = scores.topk(1)
            rows, route = md.experts.dispatch(tokens, experts, "ep", 2)
            value = md.experts.combine(rows @ up, route, weights)
            types = [str(md.typeof(x)) for x in (rows, route.counts, value)]
            loss = md.lax.psum(value.square().sum(), ("dp", "ep"))
            loss.backward()
        return types, loss.item(), gate.grad, up.grad

    def dense() -> Any:
        ups = []
        for seed in range(2):
            torch.manual_seed(seed)
            ups.append(torch.randn(2, 2, requires_grad=True))
        gate, loss = torch.eye(2, requires_grad=True), torch.zeros(())
        for rank in range(4):
            tokens = TOKENS * SIGNS + rank
            weights, experts = (tokens @ gate).softmax(-1).topk(1)
            rows = [x @ ups[int(name)] for x, name in zip(tokens, experts, strict=True)]
            loss = loss + (torch.stack(rows) * weights).square().sum()
        loss.backward()
        return loss.item(), gate.grad, [up.grad for up in ups]

    loss, of_gate, of_ups = dense()
    for rank, (types, found, gate, up) in enumerate(md.simulate(body, 4)):
        assert [text.partition("{")[2] for text in types] == ["V:dp,ep}"] * 3
        assert found == pytest.approx(loss)
        torch.testing.assert_close(gate, of_gate)
        torch.testing.assert_close(up, of_ups[rank % 2])


def test_tokens_that_do_not_vary_are_rejected_in_typed_contexts() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        with md.typed(mesh), pytest.raises(AxisTypeError) as caught:
            md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)
        return str(caught.value)

    for text in over(body):
        assert text.startswith("experts.dispatch")
        assert "varying" in text


def test_a_transform_of_torch_func() -> None:
    def body(mesh: md.DeviceMesh) -> Any:
        def loss(tokens: torch.Tensor) -> torch.Tensor:
            experts = (tokens.sum(1, keepdim=True) > 5).long()
            rows, route = md.experts.dispatch(tokens, experts, "ep", 2)
            return md.experts.combine(rows.square(), route).sum()

        return torch.func.grad(loss)(TOKENS).tolist()

    assert over(body) == [(2 * TOKENS).tolist()] * 2


# -- bad input ----------------------------------------------------------------------------------


def rejected(kind: type[Exception], call: Any, size: int = 2) -> list[str]:
    """The texts of the errors that all ranks raise; then the group still serves."""

    def body(mesh: md.DeviceMesh) -> str:
        with pytest.raises(kind) as caught:
            call(mesh)
        return str(caught.value)

    return over(body, size)


def test_an_expert_outside_on_one_rank_is_told_to_all() -> None:
    def call(mesh: md.DeviceMesh) -> None:
        with pytest.raises(ArgumentError) as caught:
            md.experts.dispatch(TOKENS, EXPERTS + 4 * (md.get_rank() == 1), "ep", 2)
        rows, _ = md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)  # the group still serves
        assert len(rows) == [6, 3, 3][md.get_rank()]
        raise caught.value

    texts = rejected(ArgumentError, call, 3)
    assert texts == [texts[0]] * 3
    assert texts[0].splitlines() == [
        "experts.dispatch over axis 'ep' of DeviceMesh(ep=3) got experts that do not exist",
        "  expected: experts from 0 to 1, and -1 for an entry that is not sent",
        "  found:    ranks 0, 2: from 0 to 2",
        "            rank 1: from 4 to 6",
        "  fix:      number the experts from 0, pass the number of experts on all ranks "
        "together as "
        "num_experts, and use -1 for an entry that is dropped",
    ]


@pytest.mark.parametrize("backend", ["simulated", "shm", "gloo"])
def test_another_number_of_experts_is_shown_on_all_ranks(pool: Pool, backend: str) -> None:
    def body() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        with pytest.raises(MismatchError) as caught:
            md.experts.dispatch(TOKENS, EXPERTS, "ep", 3 + md.get_rank(), mesh=mesh)
        return str(caught.value)

    texts = md.simulate(body, 2) if backend == "simulated" else pool.run(body, 2, backend=backend)
    for text in texts:
        assert "experts.dispatch(num_experts=3, rows of (2,), float32)" in text
        assert "experts.dispatch(num_experts=4, rows of (2,), float32)" in text


@pytest.mark.parametrize("other", [torch.ones(2, 3), torch.ones(2, 2, dtype=torch.float64)])
def test_rows_that_differ_between_ranks_are_rejected_on_all(other: torch.Tensor) -> None:
    def dispatch(mesh: md.DeviceMesh) -> None:
        md.experts.dispatch([TOKENS, other][md.get_rank()], EXPERTS, "ep", 3)

    def combine(mesh: md.DeviceMesh) -> None:
        rows, route = md.experts.dispatch(TOKENS, EXPERTS % 2, "ep", 2)
        mine = rows if md.get_rank() == 0 else other[:1].expand(len(rows), -1)
        md.experts.combine(mine, route)

    for call, operation in ((dispatch, "dispatch(num_experts=3, "), (combine, "combine(")):
        for text in rejected(MismatchError, call):
            assert f"experts.{operation}rows of (2,), float32)" in text
            name = str(other.dtype).removeprefix("torch.")
            assert f"experts.{operation}rows of {tuple(other.shape[1:])}, {name})" in text


@pytest.mark.parametrize(
    ("tokens", "experts", "number", "kind", "text"),
    [
        (TOKENS, EXPERTS.float(), 3, DtypeError, "experts must be integers"),
        (TOKENS, EXPERTS.bool(), 3, DtypeError, "experts must be integers"),
        (TOKENS, EXPERTS[:1], 3, ShapeError, "experts must have one row per token"),
        (TOKENS, EXPERTS[:1], 3, ShapeError, "fix:      pass one row of experts for each token"),
        (TOKENS, EXPERTS[:, 0], 3, ShapeError, "pass experts.unsqueeze(1) if each token goes to"),
        (TOKENS[0, 0], EXPERTS, 3, ShapeError, "tokens of shape (n, ...) and experts of shape"),
        (TOKENS, EXPERTS, 0, ArgumentError, "experts.dispatch: num_experts is 0"),
        (TOKENS, EXPERTS, 2.0, KindError, "num_experts must be an integer"),
        (TOKENS.tolist(), EXPERTS, 3, KindError, "experts.dispatch cannot take a list as tokens"),
        (TOKENS, EXPERTS.tolist(), 3, KindError, "experts.dispatch cannot take a list as experts"),
    ],
)
def test_arguments_that_do_not_fit(
    tokens: Any, experts: Any, number: Any, kind: type[Exception], text: str
) -> None:
    def call(mesh: md.DeviceMesh) -> None:
        md.experts.dispatch(tokens, experts, "ep", number)

    assert all(text in found for found in rejected(kind, call))


def test_an_unknown_axis() -> None:
    def call(mesh: md.DeviceMesh) -> None:
        md.experts.dispatch(TOKENS, EXPERTS, "tp", 3)

    assert all(text.startswith("no axis 'tp' in the mesh") for text in rejected(AxisError, call))


def test_no_mesh_in_force() -> None:
    def body() -> None:
        md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)

    with pytest.raises(MeshError, match=r"experts\.dispatch over axis 'ep'"):
        md.simulate(body, 1)


def test_combine_rejects_other_rows_weights_and_routes() -> None:
    def body(mesh: md.DeviceMesh) -> list[str]:
        rows, route = md.experts.dispatch(TOKENS, EXPERTS % 2, "ep", 2)
        texts = []
        for kind, args in (
            (ShapeError, (rows[:1], route)),
            (ShapeError, (rows, route, torch.ones(2, 3))),
            (KindError, (rows, route.counts)),
            (KindError, (rows, route, 0.5)),
        ):
            with pytest.raises(kind) as caught:
                md.experts.combine(*args)
            texts.append(str(caught.value))
        assert md.experts.combine(rows, route).tolist() == (2 * TOKENS).tolist()
        return texts

    for rank, (rows, weights, route, scale) in enumerate(over(body)):
        first, where, expected, found, fix = rows.splitlines()
        assert first.endswith("rows must correspond to the rows that experts.dispatch returned")
        assert where == f"  where:    rank {rank}, axis 'ep' of DeviceMesh(ep=2)"
        assert expected == f"  expected: shape ({[6, 2][rank]}, ...)"
        assert found == "  found:    shape (1, 2), float32"
        assert fix.startswith(
            "  fix:      pass one row for each row that experts.dispatch returned"
        )
        assert "weights must have the shape of the experts" in weights
        assert weights.endswith(
            "pass the values of the same topk call: weights, experts = scores.topk(k)"
        )
        assert "expected: shape (2, 2)" in weights and "shape (2, 3), float32" in weights
        assert "route must be the Route that experts.dispatch returned" in route
        assert "experts.combine cannot take a float as weights" in scale


def test_a_route_of_a_mesh_that_has_ended_or_of_another_rank() -> None:
    def dispatched(mesh: md.DeviceMesh) -> Any:
        return md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)

    kept = over(dispatched)
    of_ranks: dict[int, Any] = {}

    def ended(mesh: md.DeviceMesh) -> None:
        md.experts.combine(*kept[md.get_rank()])

    def anothers(mesh: md.DeviceMesh) -> None:
        of_ranks[md.get_rank()] = md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)
        md.barrier()
        with pytest.raises(WorldError) as caught:
            md.experts.combine(*of_ranks[1 - md.get_rank()])
        md.barrier()
        raise caught.value

    assert all("the world was closed" in text for text in rejected(GroupClosedError, ended))
    assert all("was used from another thread" in text for text in rejected(WorldError, anothers))


def test_a_route_of_another_mesh_than_the_typed_context() -> None:
    def body() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        pairs = md.DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("dp", "ep"))
        rows, route = md.experts.dispatch(TOKENS, EXPERTS, "ep", 3, mesh=pairs)
        with md.typed(mesh), pytest.raises(AxisTypeError) as caught:
            md.experts.combine(md.annotate(rows, varying="ep"), route)
        return str(caught.value)

    assert all("experts.combine" in text for text in md.simulate(body, 4))


def test_the_repr_of_a_route_is_short() -> None:
    def body(mesh: md.DeviceMesh) -> str:
        return repr(md.experts.dispatch(TOKENS, EXPERTS, "ep", 3)[1])

    assert over(body) == ["Route(counts=tensor([4, 2]))", "Route(counts=tensor([2]))"]

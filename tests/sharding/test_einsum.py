"""``md.einsum``: what it sends, its marks and types, what it rejects, on every backend."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    DtypeError,
    GradientError,
    KindError,
    MeshdistError,
    MismatchError,
    PatternError,
    ShapeError,
    UnequalError,
)
from tests.operations.cases import BACKENDS
from tests.pool import Pool

from .einsum_cases import AXES, check_in_turn, draw_case

Profile = torch.profiler.profile
CPU = [torch.profiler.ProfilerActivity.CPU]


def mesh_of(*shape: int) -> Any:
    return md.init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])


def on_ranks(body: Callable[..., Any], *shape: int) -> list[Any]:
    return md.simulate(lambda: body(mesh_of(*shape)), math.prod(shape))


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


# -- what is sent ---------------------------------------------------------------------------------

GATHER, SCATTER, SUM = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"

# b=2, s=4, d=4, f=8 on two ranks: the lines of a program, with the shapes of this rank's shards,
# and collectives with their bytes, forward and backward. A profile shows the bytes of the tensors
# that a collective is given: 64 and 128 of a gather.
TABLE: dict[str, tuple[list[tuple[str, tuple[tuple[int, ...], ...]]], list[str], list[str]]] = {
    "column": ([("b s d, d f@dp -> b s f@dp", ((2, 4, 4), (4, 4)))], [], [f"{SUM} 128"]),
    "row": ([("b s f@dp, f@dp d -> b s d", ((2, 4, 4), (4, 4)))], [f"{SUM} 128"], []),
    "column, sequence sharded": (
        [("b s@dp d, d f@dp -> b s f@dp", ((2, 2, 4), (4, 4)))],
        [f"{GATHER} 192"],
        [f"{SCATTER} 192"],
    ),
    "row, sequence sharded": (
        [("b s f@dp, f@dp d -> b s@dp d", ((2, 4, 4), (4, 4)))],
        [f"{SCATTER} 192"],
        [f"{GATHER} 192"],
    ),
    "data parallel": ([("b@dp s d, d f -> b@dp s f", ((1, 4, 4), (4, 8)))], [], [f"{SUM} 128"]),
    "fully sharded": (
        [("b@dp s d, d@dp f -> b@dp s f", ((8, 4, 4), (2, 8)))],
        [f"{GATHER} 192"],
        [f"{SCATTER} 192"],
    ),
    "fully sharded, gathered again": (
        [("b@dp s d, d@dp f -> b@dp s f", ((8, 4, 4), (2, 8)))],
        [f"{GATHER} 192"],
        [f"{GATHER} 192", f"{SCATTER} 192"],
    ),
    "q, k, v": (
        [
            ("b s d, d h@dp -> b s h@dp", ((2, 4, 4), (4, 4))),
            ("b s d, d h@dp -> b s h@dp", ((2, 4, 4), (4, 4))),
            ("b s d, d g@dp -> b s g@dp", ((2, 4, 4), (4, 2))),
        ],
        [],
        [f"{SUM} 128"],
    ),
}


def operations_under(body: Callable[[], Any]) -> tuple[list[str], Any]:
    with Profile(activities=CPU, acc_events=True) as profile:
        result = body()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    words = [event.name.split() for event in events if event.name.startswith("meshdist::")]
    return [f"{each[0].removeprefix('meshdist::')} {each[-2]}" for each in words], result


def test_collectives_and_bytes_forward_and_backward(pool: Pool) -> None:
    def program() -> dict[str, Any]:
        mesh = mesh_of(2)
        found = {}
        for name, (lines, _, _) in TABLE.items():
            x = leaf(*lines[0][1][0])
            weights = [leaf(*shapes[1]) for _, shapes in lines]

            def forward(
                lines: Any = lines, x: Any = x, weights: Any = weights, name: str = name
            ) -> Any:
                middle = 1 * x  # an activation
                return sum(
                    md.einsum(text, middle, w, mesh=mesh, regather="again" in name).sum()
                    for (text, _), w in zip(lines, weights, strict=True)
                )

            operations_under(lambda: forward().backward())  # opens groups
            sent, loss = operations_under(forward)
            found[name] = sent, operations_under(loss.backward)[0]
        return found

    for found in pool.run(program, 2, backend="shm"):
        assert found == {name: (there, back) for name, (_, there, back) in TABLE.items()}


def test_a_plan_tells_the_bytes_and_explains() -> None:
    layout = md.Layout.from_shape((2, 2), ("dp", "tp"))
    plan = md.plan("b@dp s f@tp, f@tp d -> b@dp s d", mesh=layout, b=4, s=2, f=8, d=4, rank=3)
    assert [step.name for step in plan.result.steps] == ["all-reduce"]
    assert plan.bytes_received() == plan.result.bytes_received() == 2 * 2 * 2 * 4 // 2 * 4
    assert [one.bytes_received() for one in plan.operands] == [0, 0]
    assert plan.bytes_received(2, backward=True) == 32
    assert plan.explain().splitlines()[:3] == [
        "einsum 'b@dp s f@tp, f@tp d -> b@dp s d': rank 3 (dp=1, tp=1) of mesh (dp=2, tp=2)",
        "  dp divides 'b': the gradient of operand 1 is summed over it",
        "  tp divides 'f': the result is summed over it",
    ]
    assert "gradient of operand 1: all-reduce over dp" in plan.explain()
    assert repr(plan) == "<EinsumPlan 'b@dp s f@tp, f@tp d -> b@dp s d' at (1, 1)>"
    kept = md.plan("b {U:dp}, b d -> d {U:dp}", mesh=layout, b=2, d=2).explain()
    assert "dp divides the partial sums of operand 0: the result stays unreduced" in kept
    assert "tp divides nothing: each rank along it computes the same" in kept


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (2, 2, 2)])
def test_no_other_layout_moves_less(shape: tuple[int, ...]) -> None:
    """Every assignment of axes to dims that are cut over them, without pruning."""
    from meshdist.sharding.einsum_layouts import LayoutChooser
    from meshdist.sharding.routes import num_received_by_all, route_between

    axes = AXES[: len(shape)]
    layout = md.Layout.from_shape(shape, axes)
    for seed in range(60):
        case = draw_case(seed, axes)
        if len(case.operands) == 1 or case.has_rest:
            continue
        plan = md.plan(case.text, mesh=layout, **case.sizes)
        laid = plan.layout
        for source, target in zip(laid.sources, laid.work.operands, strict=True):
            stages, _ = route_between(source, target, plan.result.links)
            assert num_received_by_all(source, target) == sum(it.num_received for it in stages)
        chooser = LayoutChooser(case.text, layout, laid.operands, laid.sources, laid.result)
        every = []
        for axis, name in enumerate(axes):
            cutting = [
                one for x in (case.result, *case.operands) for one in x.cuts if name in x.cuts[one]
            ]
            every.append(cutting or [None])
            partial_sums = [at for at, x in enumerate(case.operands) if name in x.unreduced]
            if partial_sums and not any(name in sum(x.cuts.values(), ()) for x in case.operands):
                every[axis] = [*every[axis], *partial_sums, None] if not cutting else every[axis]
        works = map(chooser.work, itertools.product(*every))
        prices = [
            (chooser.num_received(work), chooser.num_received(work, is_backward=True))
            for work in works
        ]
        assert laid.num_received <= min(prices), case.text


# -- what is kept ---------------------------------------------------------------------------------


def test_a_cast_copies_nothing_and_is_kept_while_its_operand_lives() -> None:
    def body(mesh: Any) -> Any:
        x, w = 1 * leaf(2, 4), leaf(4, 2)
        text = "b d, d f@dp -> b f@dp"

        def cast_of(y: torch.Tensor) -> Any:
            return y.grad_fn.next_functions[0][0]

        first, second = (md.einsum(text, x, w, mesh=mesh) for _ in range(2))
        assert cast_of(first) is cast_of(second)
        with torch.no_grad():
            x.mul_(2)
            assert not md.einsum(text, x, w, mesh=mesh).requires_grad
        with torch.inference_mode():
            md.einsum(text, x, w, mesh=mesh)
        third = md.einsum(text, x, w, mesh=mesh)
        assert cast_of(third) is not cast_of(first)  # written to since
        y = leaf(2, 4)
        one, other = (md.einsum(text, y, w, mesh=mesh) for _ in range(2))
        assert cast_of(one) is not cast_of(other)  # leaves are not kept
        alive = weakref.ref(x)
        del x
        return alive() is None

    assert on_ranks(body, 2) == [True, True]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_runs_again(use_reentrant: bool) -> None:
    def body(mesh: Any) -> Any:
        found = []
        for is_checkpointed in (False, True):
            x, w, v = 1 * leaf(2, 4), leaf(4, 2), leaf(4, 2)

            def both(h: Any, w: Any = w, v: Any = v) -> Any:
                text = "b d, d f@dp -> b f@dp"
                return md.einsum(text, h, w, mesh=mesh) * md.einsum(text, h, v, mesh=mesh)

            y = checkpoint(both, x, use_reentrant=use_reentrant) if is_checkpointed else both(x)
            (y + both(x)).tanh().sum().backward()
            found.append((w.grad, v.grad))
        return all(map(torch.equal, *found))

    assert on_ranks(body, 2) == [True, True]


def test_gathered_again_it_keeps_the_shard_alone() -> None:
    def body(mesh: Any) -> Any:
        x, w = leaf(8, 3, 4), torch.rand(2, 8, requires_grad=True)
        text = "b@dp s d, d@dp f -> b@dp s f"
        kept, gradients = [], []
        for regather in (False, True):
            y = md.einsum(text, x, w, mesh=mesh, regather=regather)
            seen: set[int] = set()
            node: Any = y.grad_fn
            open_nodes = [node]
            while open_nodes:  # what torch saved, as the hooks pack it
                node = open_nodes.pop()
                for name in dir(node):
                    if name.startswith("_raw_saved"):
                        raw = getattr(node, name)
                        data = None if isinstance(raw, tuple) else raw.data
                        if isinstance(data, torch.Tensor) and data.numel() == 4 * 8:
                            seen.add(data.untyped_storage().data_ptr())
                open_nodes += [up for up, _ in node.next_functions if up is not None]
            kept.append(len(seen))
            (gx,) = torch.autograd.grad(y.tanh().square().sum(), x, create_graph=True)
            gx.square().sum().backward()
            gradients.append((w.grad.clone(), x.grad.clone()))
            w.grad = x.grad = None
        assert all(map(torch.equal, *gradients))
        y = md.einsum(text, x, w, mesh=mesh, regather=True)
        with torch.no_grad():
            w.mul_(2)
        try:
            y.sum().backward()
        except GradientError as error:
            return kept, str(error)
        return kept, ""

    for kept, text in on_ranks(body, 2):
        assert kept[1] == 0
        assert "an operand was modified before the backward" in text
        assert "leave out regather=True" in text


def test_gathered_again_from_the_memory_that_was_gathered() -> None:
    def body(mesh: Any) -> Any:
        x, w = leaf(8, 4), torch.rand(2, 8, requires_grad=True)
        y = md.einsum("b@dp d, d@dp f -> b@dp f", x, w, mesh=mesh, regather=True)
        total = md.lax.psum(w.detach().sum(), mesh)
        w.data = torch.zeros(2, 8)  # the graph keeps what it was made with, as of torch's products
        y.sum().backward()
        return torch.allclose(x.grad.sum(), 8 * total)

    assert on_ranks(body, 2) == [True, True]


def test_an_inference_tensor_is_gathered_again_as_it_was() -> None:
    def body(mesh: Any) -> Any:
        with torch.inference_mode():
            x = torch.ones(2, 4) * (1 + md.get_rank())
        w = leaf(4, 3)
        y = md.einsum("b@dp d, d f@dp -> b f@dp", x, w, mesh=mesh, regather=True)
        with torch.inference_mode():
            x.mul_(5)  # which torch does not count
        y.sum().backward()
        return w.grad.unique().tolist()

    for size in (2, 3, 5):
        total = size * (size + 1.0)
        assert on_ranks(body, size) == [[total]] * size


def test_inside_a_transform_all_is_kept() -> None:
    def body(mesh: Any) -> Any:
        def loss(w: torch.Tensor) -> torch.Tensor:
            text = "b@dp d, d@dp f -> b@dp f"
            return md.einsum(text, torch.ones(4, 4), w, mesh=mesh, regather=True).square().sum()

        gradients = torch.vmap(torch.func.grad(loss))(torch.ones(3, 2, 4))
        return gradients.unique().tolist()

    assert on_ranks(body, 2) == [[64.0]] * 2


# -- marks and types ------------------------------------------------------------------------------


def test_a_marked_operand_keeps_its_partial_sums() -> None:
    def body(mesh: Any) -> Any:
        rank = md.get_rank()
        x = torch.full((1, 2), 1.0 + rank)
        plain, marked = leaf(2, 1), md.annotate(leaf(2, 1), reduced=("dp", "ep"))
        text = "b@dp d, d f -> b@dp f"
        for w in (plain, marked):
            md.einsum(text, x, w, mesh=mesh).sum().backward()
        return plain.grad[0].item(), marked.grad[0].item()

    assert on_ranks(body, 2) == [(3.0, 1.0), (3.0, 2.0)]


def test_the_result_carries_its_spec_and_a_later_line_is_compared_with_it() -> None:
    def body(mesh: Any) -> Any:
        h = md.einsum("b d, d f@dp -> b f@dp", leaf(2, 4), leaf(4, 2), mesh=mesh)
        with pytest.raises(MeshdistError) as caught:
            md.einsum("b f, f d@dp -> b d@dp", h, leaf(2, 2), mesh=mesh)
        return str(md.typeof(h)), str(caught.value)

    for text, message in on_ranks(body, 2):
        assert text == "float32[2, 2@dp]"
        assert "the tensor's annotation does not match the left side" in message
        assert "operand 0 is annotated as P(None, 'dp')" in message


@pytest.mark.parametrize(
    ("kinds", "text", "message"),
    [
        (
            {"unreduced": "dp"},
            "b d, d f@dp -> b f@dp",
            "unreduced over 'dp': its pattern or spec requires invariant",
        ),
        (
            {"varying": "dp"},
            "b d, d f@dp -> b f@dp",
            "varying over 'dp': its pattern or spec requires invariant",
        ),
        (
            {"reduced": "dp"},
            "b@dp d, d f -> b@dp f",
            "reduced over 'dp': its pattern or spec requires varying",
        ),
        (
            {"reduced": "dp"},
            "b d, d f -> b f",
            "annotated as reduced over axis 'dp', which the pattern",
        ),
    ],
)
def test_marks_that_contradict_the_text(kinds: Any, text: str, message: str) -> None:
    def body(mesh: Any) -> Any:
        x = md.annotate(torch.ones(2, 4), **kinds)
        with pytest.raises(AxisTypeError) as caught:
            md.einsum(text, x, torch.ones(4, 2), mesh=mesh)
        return str(caught.value)

    for found in on_ranks(body, 2):
        assert message in found
        assert "fix:" in found


def test_types_inside_a_context_over_all_its_axes() -> None:
    def body(mesh: Any) -> Any:
        x = md.annotate(torch.ones(2, 4), varying="dp")
        w = md.annotate(leaf(4, 2), varying="tp")
        s = md.annotate(torch.ones(2, 2), unreduced="dp")
        with md.typed(mesh):
            y = md.einsum("b d, d f@tp -> b f@tp", x, w, mesh=mesh["tp"])
            md.lax.psum(y.sum(), ("dp", "tp")).backward()
            with pytest.raises(
                AxisTypeError, match="einsum cannot take a value that is unreduced over 'dp'"
            ):
                md.einsum("b f, f d@tp -> b d@tp", s, y, mesh=mesh["tp"])
            bare = leaf(4, 2)
            with pytest.raises(AxisTypeError, match="a leaf without an annotation"):
                md.einsum("b@dp d, d f@tp -> b@dp f@tp", x, bare, mesh=mesh)
        return str(md.typeof(y)), w.grad[0, 0].item()

    assert on_ranks(body, 2, 2) == [("float32[2, 2]{V:dp,tp}", 4.0)] * 4


def gradients_of(how: str, is_typed: bool) -> Any:
    """The gradients of a layer's weights, on a mesh (dp, tp), made in several ways."""
    mesh = mesh_of(2, 2)
    X = torch.arange(32.0, dtype=torch.float64).view(4, 2, 4) % 5 - 2
    W = torch.arange(32.0, dtype=torch.float64).view(4, 8) % 7 - 3
    V = torch.arange(32.0, dtype=torch.float64).view(8, 4) % 3 - 1
    x = md.shard(X, "b@dp s d", mesh)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(md.shard(W, "d f@tp", mesh))
            self.v = torch.nn.Parameter(md.shard(V, "f@tp d", mesh))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if how == "types":
                return md.lax.psum(x @ self.w @ self.v, "tp")
            h = md.einsum("b@dp s d, d f@tp -> b@dp s f@tp", x, self.w, mesh=mesh)
            return md.einsum("b@dp s f@tp, f@tp d -> b@dp s d", h, self.v, mesh=mesh)

    block = Block()
    given = {
        "axis": {"device_mesh": mesh["dp"]},
        "group": {"process_group": mesh.get_group("dp")},
    }.get(how)
    model: Any = block if given is None else md.DDP(block, **given)  # type: ignore[arg-type]
    if is_typed:
        with md.typed(mesh):
            y = model(x)
            loss = y.square().sum()
            loss = loss if given else md.lax.psum(loss, "dp")
            loss.backward()
    else:
        y = model(x)
        y.square().sum().backward()
    factor = 2 if given else 1  # a wrapper takes the mean
    return (block.w.grad * factor).tolist(), (block.v.grad * factor).tolist()


def test_one_model_in_several_ways_has_equal_gradients() -> None:
    ways = [("einsum", False), ("einsum", True), ("types", True)]
    ways += [(how, is_typed) for how in ("axis", "group") for is_typed in (False, True)]
    found = {way: md.simulate(gradients_of, 4, args=way) for way in ways}
    first = found["einsum", False]
    assert first[0] != first[1]
    for way, gradients in found.items():
        assert gradients == first, way


def test_a_wrapper_over_the_world_or_a_group_that_is_no_axis() -> None:
    def body(mesh: Any) -> Any:
        layer = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1)
        layer.forward = lambda x: md.einsum(  # type: ignore[method-assign]
            "b@(dp,tp) d, f d -> b@(dp,tp) f", x, layer.weight, mesh=mesh
        )
        x = torch.full((1, 2), 1.0 + md.get_rank())
        md.DDP(layer, process_group=md.group.WORLD)(x).sum().backward()
        ranks = [0, 3] if md.get_rank() in (0, 3) else [1, 2]
        crossed = md.DDP(torch.nn.Linear(2, 1), process_group=md.new_group(ranks))
        with pytest.raises(AxisTypeError) as caught:
            md.einsum("b@dp d, f d -> b@dp f", x, crossed.module.weight, mesh=mesh)
        return layer.weight.grad[0, 0].item(), str(caught.value)

    for mean, text in on_ranks(body, 2, 2):
        assert mean == 2.5
        assert "ranks that form no axes of the einsum's mesh" in text
        assert "DDP(module, device_mesh=mesh['dp'])" in text


# -- what is rejected ------------------------------------------------------------------------------

ONES = torch.ones
BAD: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "an operand too few": (
        lambda mesh: md.einsum("b d, d f -> b f", ONES(2, 4), mesh=mesh),
        PatternError,
        ["einsum got 1 tensors for a pattern of 2", "found:    2 operands in the text"],
    ),
    "no operand": (
        lambda mesh: md.einsum("->", mesh=mesh),
        PatternError,
        ["einsum got 0 tensors for a pattern of 1"],
    ),
    "a comma outside of brackets": (
        lambda mesh: md.einsum("b@dp,tp d -> b", ONES(2, 4), mesh=mesh),
        PatternError,
        ["write b@(dp,tp) to cut one dim over several axes"],
    ),
    "a comma outside of brackets, in the result": (
        lambda mesh: md.einsum("b d -> b@dp,tp d", ONES(2, 4), mesh=mesh),
        PatternError,
        ["found:    ','", "write b@(dp,tp) to cut one dim over several axes"],
    ),
    "an operand too many": (
        lambda mesh: md.einsum("b d -> b", ONES(2, 4), ONES(4, 5), mesh=mesh),
        PatternError,
        ["einsum got 2 tensors for a pattern of 1", "found:    1 operand in the text"],
    ),
    "operands in a list": (
        lambda mesh: md.einsum("b d -> b", [ONES(2, 4)], mesh=mesh),
        KindError,
        ["operand 0 is not a tensor", "pass the tensors one after the other: einsum(text, x, w)"],
    ),
    "an array of NumPy": (
        lambda mesh: md.einsum("b d -> b", ONES(2, 4).numpy(), mesh=mesh),
        KindError,
        ["found:    an ndarray", "torch.from_numpy(x)"],
    ),
    "letters as torch's": (
        lambda mesh: md.einsum("bd,df->bf", ONES(2, 4), ONES(4, 5), mesh=mesh),
        PatternError,
        ["'bf', which no operand has", "separate dims by spaces, unlike in torch.einsum: b f"],
    ),
    "letters as torch's, of an operand": (
        lambda mesh: md.einsum("bd->bd", ONES(2, 4), mesh=mesh),
        ShapeError,
        ["the pattern names 1 dims, the array has 2", "unlike in torch.einsum: b d"],
    ),
    "a whole in place of a shard": (
        lambda mesh: md.einsum("b d@dp, d@dp f -> b f", ONES(2, 4), ONES(2, 5), mesh=mesh),
        ShapeError,
        [
            "d=8 in operand 0, a shard of shape (2, 4); d=4 in operand 1",
            "shard operand 0 if it is global: md.shard(x, 'b d@dp', mesh)",
        ],
    ),
    "a whole in place of a shard, of a size that is given": (
        lambda mesh: md.einsum("b d@dp -> b", ONES(2, 4), mesh=mesh, d=4),
        ShapeError,
        ["dim 1 has size 4", "pass this rank's shard of the global array: md.shard(x, ...)"],
    ),
    "a text that cuts another dim than the shard": (
        lambda mesh: md.einsum(
            "b d, d@dp f -> b f", ONES(2, 4), md.shard(ONES(4, 6), "d f@dp", mesh), mesh=mesh
        ),
        ArgumentError,
        [
            "operand 1 of einsum 'b d, d@dp f -> b f'",
            "write its sharding: dim 1 is cut over 'dp'; if the annotation is outdated, call "
            "md.annotate",
        ],
    ),
    "two sizes": (
        lambda mesh: md.einsum("b d, d f -> b f", ONES(2, 4), ONES(3, 5), mesh=mesh),
        ShapeError,
        [
            "dim 'd' has two sizes, 4 and 3",
            "d=4 in operand 0, a shard of shape (2, 4); d=3 in operand 1, a shard of shape (3, 5)",
        ],
    ),
    "uneven shards": (
        lambda mesh: md.einsum(
            "b d@dp, d f -> b f", ONES(2, 2 - md.get_rank()), ONES(3, 5), mesh=mesh
        ),
        ShapeError,
        ["dim 'd' has two sizes", "pass the global size: d=..."],
    ),
    "a dim of the result alone": (
        lambda mesh: md.einsum("b d, d f -> b g", ONES(2, 4), ONES(4, 5), mesh=mesh),
        PatternError,
        ["the result of this einsum has a dim that no operand has", "'g', which no operand has"],
    ),
    "no result": (
        lambda mesh: md.einsum("b d, d f", ONES(2, 4), ONES(4, 5), mesh=mesh),
        PatternError,
        ["this einsum has no result"],
    ),
    "unreduced times unreduced": (
        lambda mesh: md.einsum("b {U:dp}, b {U:dp} -> b", ONES(2), ONES(2), mesh=mesh),
        PatternError,
        ["operands 0 and 1 are both unreduced over axis 'dp'", "reduce one first: md.reshard"],
    ),
    "bool": (
        lambda mesh: md.einsum("b, b -> ", ONES(2).bool(), ONES(2), mesh=mesh),
        DtypeError,
        ["cannot multiply and sum bool values", "x.to(torch.int32)"],
    ),
    "two dtypes": (
        lambda mesh: md.einsum("b, b -> ", ONES(2).double(), ONES(2), mesh=mesh),
        DtypeError,
        ["the operands have different dtypes", "float64, float32"],
    ),
    "no tensor": (
        lambda mesh: md.einsum("b, b -> ", [1.0], ONES(2), mesh=mesh),
        KindError,
        ["operand 0 is not a tensor", "found:    a list"],
    ),
    "the mesh as an operand": (
        lambda mesh: md.einsum("b, b -> ", ONES(2), ONES(2), mesh),
        KindError,
        ["pass the mesh by name: mesh=mesh"],
    ),
    "two numbers of whole dims": (
        lambda mesh: md.einsum("... d, ... d -> ...", ONES(2, 3), ONES(2, 2, 3), mesh=mesh),
        ShapeError,
        ['"..." stands for 1 dims of one operand and for 2 of another'],
    ),
    "an axis that the mesh lacks": (
        lambda mesh: md.einsum("b@ep, b -> ", ONES(2), ONES(2), mesh=mesh),
        AxisError,
        ["'ep'", "column 3 of 'b@ep, b -> '"],
    ),
    "a size of no dim": (
        lambda mesh: md.einsum("b, b -> ", ONES(2), ONES(2), mesh=mesh, c=3),
        PatternError,
        ["a size is given for 'c'"],
    ),
    "a shape for a plan": (
        lambda mesh: md.plan("b, b -> ", mesh=mesh, shape=(2,)),
        PatternError,
        ["one array (a comma outside of brackets separates operands)"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_rejected_on_all_ranks(name: str) -> None:
    call, kind, words = BAD[name]

    def body(mesh: Any) -> str:
        with pytest.raises(kind) as caught:
            call(mesh)
        return str(caught.value)

    for text in on_ranks(body, 2):
        for word in words:
            assert word in text


def test_operands_that_differ_are_found_where_parts_of_them_are_taken() -> None:
    def body(mesh: Any) -> str:
        with pytest.raises(UnequalError) as caught:
            md.einsum("b d, d f -> b f@dp", ONES(2, 4), ONES(4, 2) * md.get_rank(), mesh=mesh)
        return str(caught.value)

    for text in on_ranks(body, 2):
        assert "the array is not the same on every rank" in text
        assert "operand 1 of shape (4, 2)" in text
        assert "check=False" not in text


@pytest.mark.parametrize("backend", ["simulated", "shm"])
def test_ranks_with_different_texts_all_raise_and_show_both(pool: Pool, backend: str) -> None:
    def program() -> str:
        mesh = mesh_of(2)
        text = ("b f@dp, f@dp d -> b d", "b f@dp, d f@dp -> b d")[md.get_rank()]
        try:
            md.einsum(text, ONES(4, 2), ONES(*((2, 4), (4, 2))[md.get_rank()]), mesh=mesh)
        except MismatchError as error:
            return str(error)
        return "no error"

    found = (
        md.simulate(program, 2) if backend == "simulated" else pool.run(program, 2, backend=backend)
    )
    for text in found:
        assert "einsum 'b f@dp, f@dp d -> b d': the result" in text
        assert "einsum 'b f@dp, d f@dp -> b d': the result" in text


# -- real backends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("shape", [(3,), (2, 2)])
def test_random_einsums_over_real_backends(
    pool: Pool, backend: str, shape: tuple[int, ...]
) -> None:
    axes = AXES[: len(shape)]
    cases = [draw_case(70_000 + number, axes) for number in range(24)]

    def program() -> None:
        mesh = mesh_of(*shape)
        check_in_turn(cases, mesh)

    pool.run(program, math.prod(shape), backend=backend)


# The text, the sizes of b, d and f, and whether the lines gather again. With sizes that some ranks
# see as 0 or 1, each rank by itself would find another number of collectives for its backward.
UNEVEN = [
    ("b@dp d, d@dp f -> b@dp f", (2, 5, 2), True),
    ("b@dp d, d@dp f -> b@dp f", (5, 1, 3), True),
    ("b@dp d, d f -> f", (3, 4, 2), True),
    ("b@dp d, d f@dp -> b f@dp", (1, 3, 4), True),
    ("b d, d f -> b@dp f", (1, 4, 3), False),
    ("b d, d f -> b f@dp", (2, 4, 1), False),
    ("b d, d f -> b@dp f", (0, 4, 3), False),
]


def check_uneven(size: int) -> None:
    """Compare gradients of three lines with one activation with those of one device."""
    mesh = mesh_of(size)
    for text, sizes, regather in UNEVEN:
        named: dict[str, Any] = dict(zip("bdf", sizes, strict=True))
        torch.manual_seed(0)
        wholes = [
            torch.randint(-3, 4, sizes[:2]).double(),
            torch.randint(-3, 4, sizes[1:]).double(),
        ]
        sides = text.partition(" -> ")[0].split(", ")
        mine = [
            md.shard(x, side, mesh).requires_grad_() for x, side in zip(wholes, sides, strict=True)
        ]
        used = [1 * x for x in mine]
        for x in wholes:
            x.requires_grad_()
        whole = torch.einsum(text.replace("@dp", ""), *wholes)
        whole.square().sum().mul(3).backward()
        lines = [md.einsum(text, *used, mesh=mesh, regather=regather, **named) for _ in range(3)]
        torch.stack([y.square().sum() for y in lines]).sum().backward()
        for x, part, side in zip(wholes, mine, sides, strict=True):
            assert x.grad is not None
            right_part = md.shard(x.grad, side, mesh)
            torch.testing.assert_close(part.grad, right_part, msg=f"{text} {sizes}")


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param(
            backend,
            size,
            marks=[]
            if backend == "simulated" or (size == 3 and backend != "mpi")
            else [pytest.mark.soak],
        )
        for backend in BACKENDS
        for size in (1, 2, 3, 5)
    ],
)
def test_gradients_of_uneven_shards_on_every_backend(pool: Pool, backend: str, size: int) -> None:
    BACKENDS[backend](pool, check_uneven, size, size)

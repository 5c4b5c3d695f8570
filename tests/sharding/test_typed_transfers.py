"""Resharding inside ``md.typed``: types in, types out, and the gradients of whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.errors import AxisTypeError
from tests.sharding.reshard_cases import mesh_of


def typed(body: Callable[..., Any], size: Any = (2, 2)) -> list[Any]:
    """``body(mesh)`` on each rank, inside a context on the mesh."""

    def program() -> Any:
        mesh = mesh_of(size)
        with md.typed(mesh):
            return body(mesh)

    return md.simulate(program, 4)


def kinds(x: torch.Tensor) -> tuple[Any, ...]:
    found = md.typeof(x)
    return found.varying, found.reduced, found.unreduced


def test_results_have_the_types_of_their_side() -> None:
    def body(mesh: Any) -> Any:
        x = md.annotate(torch.ones(2, 4), varying="a")
        return [
            kinds(md.reshard(x, f"s@a d -> {right}", mesh))
            for right in ("s d", "s d@a", "s@b d", "s d {R:a}", "s@(a,b) d", "s d {U:a}")
        ]

    nothing: tuple[str, ...] = ()
    assert typed(body)[0] == [
        (nothing, nothing, nothing),
        (("a",), nothing, nothing),
        (("b",), nothing, nothing),
        (nothing, ("a",), nothing),
        (("a", "b"), nothing, nothing),
        (nothing, nothing, ("a",)),
    ]


def test_types_over_other_axes_stay() -> None:
    def body(mesh: Any) -> Any:
        x = md.annotate(torch.ones(2, 4), varying=("a", "b"))
        with mesh["a"]:
            return kinds(md.reshard(x, "s@a d -> s d"))

    assert typed(body)[0] == (("b",), (), ())


def test_gradients_are_those_of_one_device() -> None:
    """Column and row parallel products, with reshard in place of psum and all_gather."""
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randint(-3, 4, s, generator=generator).double() for s in ((4, 6), (6, 8), (8, 2))]

    leaves = [one.clone().requires_grad_() for one in draw]
    loss = ((leaves[0] @ leaves[1]).relu() @ leaves[2]).square().sum()
    wanted = torch.autograd.grad(loss, leaves)

    def program() -> None:
        mesh = mesh_of((2, 2))
        x, v, w = draw
        mine = [
            md.annotate(md.shard(x, "b@a i", mesh), varying="a").requires_grad_(),
            md.annotate(md.shard(v, "i h@b", mesh), varying="b").requires_grad_(),
            md.annotate(md.shard(w, "h@b o", mesh), varying="b").requires_grad_(),
        ]
        with md.typed(mesh):
            whole = md.reshard(mine[0], "b@a i -> b i", mesh)
            hidden = (whole @ mine[1]).relu()
            out = md.lax.psum(hidden @ mine[2], "b", mesh=mesh)
            part = md.reshard(out, "b o -> b@a o", mesh)
            total = md.reshard(
                md.lax.pcast(part.square().sum(), "a", to="unreduced", mesh=mesh), "{U:a} -> ", mesh
            )
            grads = torch.autograd.grad(total, mine)
        assert torch.equal(total, loss) and kinds(total) == ((), (), ())
        for grad, full, pattern in zip(grads, wanted, ("b@a i", "i h@b", "h@b o"), strict=True):
            assert torch.equal(grad, md.shard(full, pattern, mesh))

    md.simulate(program, 4)


def test_what_is_equal_is_cast_where_a_pattern_says_more() -> None:
    def body(mesh: Any) -> Any:
        w = md.annotate(torch.ones(2, requires_grad=True))  # equal on all ranks, and cut
        y = md.reshard(w, "s@a -> s", mesh)
        scale = torch.arange(1.0, 5)
        (grad,) = torch.autograd.grad((y * scale).sum(), w)
        return y.tolist(), kinds(y), grad.tolist()

    # Each rank's part gets its own gradient, and they are summed over the axis.
    assert typed(body)[0] == ([1.0] * 4, ((), (), ()), [4.0, 6.0])


def rejected(body: Callable[..., Any]) -> str:
    def call(mesh: Any) -> str:
        with pytest.raises(AxisTypeError) as found:
            body(mesh)
        return str(found.value)

    return typed(call)[0]


def test_kinds_that_do_not_fit() -> None:
    def given(pattern: str, **kinds: Any) -> Callable[..., Any]:
        return lambda mesh: md.reshard(md.annotate(torch.ones(2, 4), **kinds), pattern, mesh)

    text = rejected(given("s@a d -> s d", varying=("a", "b")))
    assert "a value that is varying over 'b': its pattern or spec requires invariant" in text
    assert "found:    x: float32[2, 4]{V:a,b}" in text
    assert "write the axis at the dimension that it shards, as in 'n@b'" in text
    text = rejected(given("s d -> s@a d", unreduced="a"))
    assert (
        "unreduced over 'a': its pattern or spec requires invariant" in text
        and "write {U:a} on the left" in text
    )
    text = rejected(given("s d -> s@a d", reduced="b"))
    assert (
        "reduced over 'b': its pattern or spec requires invariant" in text
        and "write {R:b} on the left" in text
    )
    text = rejected(given("s d {U:a} -> s d"))
    assert "invariant over 'a': its pattern or spec requires unreduced" in text
    assert "md.annotate(x, unreduced='a')" in text


def test_what_each_rank_has_is_its_partial_sum_where_the_pattern_says_so() -> None:
    """As for ``lax.psum``: the gradients are equal to those of one, and of the same kinds."""

    def body(mesh: Any) -> Any:
        leaf = torch.full((2, 4), 1.0 + mesh.get_local_rank("a"), requires_grad=True)
        x = md.annotate(leaf, varying="a")
        found = []
        for summed in (
            lambda y: md.reshard(y, "... {U:a} -> ...", mesh),
            lambda y: md.reshard(md.reshard(y, "s d {U:a} -> s d@a", mesh), "s d@a -> s d", mesh),
            lambda y: md.lax.psum(y, "a"),
        ):
            total = summed(x * 2)
            (grad,) = torch.autograd.grad(total.square().sum(), x)
            with md.untyped():
                found.append((total.tolist(), grad.tolist(), kinds(total), kinds(grad)))
        return found

    for first, second, by_operation in typed(body):
        assert first == second == by_operation
        assert first[2:] == (((), (), ()), (("a",), (), ()))

    def cut(mesh: Any) -> Any:  # what is known to be a shard is no partial sum
        return md.reshard(md.shard(torch.ones(2, 4), "s@a d", mesh), "s d {U:a} -> s d", mesh)

    text = rejected(cut)
    assert "varying over 'a': its pattern or spec requires unreduced" in text
    assert "write the axes of the spec that x carries on the left" in text


# -- leaves whose parts differ --------------------------------------------------------------------

WEIGHT = torch.arange(12.0, dtype=torch.float64).view(6, 2)
INPUTS = torch.arange(1.0, 13, dtype=torch.float64).view(6, 2)


def gathered(make: Callable[[torch.Tensor, Any], Any], size: int, use: Any = None) -> list[Any]:
    """What a step with weights kept in parts over the data's axis gives: gradients, or an error."""

    def program() -> Any:
        mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        weight = make(md.shard(WEIGHT, "f@dp d", mesh), mesh)
        batch = md.annotate(md.shard(INPUTS, "b@dp d", mesh).clone(), varying="dp")
        with md.typed(mesh):
            try:
                used = weight if use is None else use(weight)
                whole = md.reshard(used, "f@dp d -> f d {R:dp}", mesh, f=len(WEIGHT))
            except AxisTypeError as error:
                return str(error)
            md.lax.psum((batch @ whole.T).square().sum(), "dp").backward()
        return weight.grad.detach().clone()

    return md.simulate(program, size)


def parts_of_one_device(size: int) -> list[torch.Tensor]:
    weight = WEIGHT.clone().requires_grad_()
    (INPUTS @ weight.T).square().sum().backward()
    layout = md.Layout.from_shape((size,), ("dp",))
    rows = md.NamedSharding(layout, md.P("dp"))
    return [weight.grad[rows.indices_map(WEIGHT.shape)[rank]] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_parameter_keeps_the_mark_of_the_shard_that_it_is_made_from(size: int) -> None:
    wanted = parts_of_one_device(size)
    for make in (
        lambda shard, mesh: torch.nn.Parameter(shard),
        lambda shard, mesh: torch.nn.Parameter(torch.nn.Parameter(shard)),
        lambda shard, mesh: md.annotate(torch.nn.Parameter(shard.clone()), "f@dp d", mesh=mesh),
    ):
        found = gathered(make, size)
        assert all(torch.equal(one, part) for one, part in zip(found, wanted, strict=True)), found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_leaf_that_is_cut_and_lacks_its_mark_is_rejected(size: int) -> None:
    for text in gathered(lambda shard, mesh: torch.nn.Parameter(shard.clone()), size):
        assert text.startswith(
            "reshard cannot take a value that is invariant over 'dp': its pattern or spec shards "
            "it over this axis\n"
        )
        assert "a leaf without an annotation" in text and "found:    weight: float64[" in text
        assert (
            "fix:      annotate how it is sharded: md.annotate(weight, md.P('dp', None)); " in text
        )
        assert "if it is equal on all ranks, call md.annotate(weight)" in text
    wanted = parts_of_one_device(size)
    found = gathered(
        lambda shard, mesh: md.annotate(torch.nn.Parameter(shard.clone()), md.P("dp", None)), size
    )
    assert all(torch.equal(one, part) for one, part in zip(found, wanted, strict=True))


def test_what_is_made_from_such_a_leaf_is_rejected_too() -> None:
    text = gathered(lambda shard, mesh: torch.nn.Parameter(shard.clone()), 2, lambda w: w * 1)[0]
    assert "x: float64[3, 2], computed from values that are invariant over 'dp'" in text
    assert "annotate the tensor that it is computed from: md.annotate(w, varying='dp')" in text
    assert "lax.pvary(x, 'dp')" in text
    # A wrapper's mark over other axes says nothing of this one, and no gradient is no harm.
    with_data = gathered(
        lambda shard, mesh: torch.nn.Parameter(shard.clone()),
        2,
        torch.no_grad()(lambda w: (md.reshard(w, "f@dp d -> f d", f=6), w)[1]),
    )
    assert "a leaf without an annotation" in with_data[0]


def test_meshes_that_are_no_part_of_the_contexts() -> None:
    def body(mesh: Any) -> Any:
        other = md.init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
        md.reshard(torch.ones(2, 4), "s@c d -> s d", other)

    text = rejected(body)
    assert "reshard cannot use 'c' of a mesh that is not part of the md.typed mesh" in text
    assert "expected: axes of DeviceMesh(a=2, b=2)" in text


def test_reading_the_spec_of_a_result() -> None:
    def body(mesh: Any) -> str:
        return repr(md.typeof(md.reshard(torch.ones(2, 4), "s@a d -> s d@(b,a)", mesh)))

    assert typed(body)[0] == "float32[4, 1@(b,a)]"

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
        w = torch.ones(2, requires_grad=True)  # equal on all ranks, and cut all the same
        y = md.reshard(w, "s@a -> s", mesh)
        scale = torch.arange(1.0, 5)
        (grad,) = torch.autograd.grad((y * scale).sum(), w)
        return y.tolist(), kinds(y), grad.tolist()

    # Each rank's part gets its own gradient, and they are summed over the axis.
    assert typed(body)[0] == ([1.0] * 4, ((), (), ()), [4.0, 6.0])


def refused(body: Callable[..., Any]) -> str:
    def call(mesh: Any) -> str:
        with pytest.raises(AxisTypeError) as found:
            body(mesh)
        return str(found.value)

    return typed(call)[0]


def test_kinds_that_do_not_fit() -> None:
    def given(pattern: str, **kinds: Any) -> Callable[..., Any]:
        return lambda mesh: md.reshard(md.annotate(torch.ones(2, 4), **kinds), pattern, mesh)

    text = refused(given("s@a d -> s d", varying=("a", "b")))
    assert "reshard of a value that is varying over 'b', and invariant there" in text
    assert "found:    x: float32[2, 4]{V:a,b}" in text
    assert "write the axis where it cuts a dim, as in 'n@b'" in text
    text = refused(given("s d -> s@a d", unreduced="a"))
    assert "unreduced over 'a', and invariant there" in text and "write {U:a} on the left" in text
    text = refused(given("s d -> s@a d", reduced="b"))
    assert "reduced over 'b', and invariant there" in text and "write {R:b} on the left" in text
    text = refused(given("s d {U:a} -> s d", varying="a"))
    assert "varying over 'a', and unreduced there" in text
    assert "fix:      cast it first: lax.pcast(x, 'a', to='unreduced')" in text
    text = refused(given("s d {U:a} -> s d"))
    assert "invariant over 'a', and unreduced there" in text
    assert "md.annotate(x, unreduced='a')" in text


def test_meshes_that_are_no_part_of_the_contexts() -> None:
    def body(mesh: Any) -> Any:
        other = md.init_device_mesh("cpu", (4,), mesh_dim_names=("c",))
        md.reshard(torch.ones(2, 4), "s@c d -> s d", other)

    text = refused(body)
    assert "reshard over 'c' of a mesh that is no part of the context's" in text
    assert "expected: axes of DeviceMesh(a=2, b=2)" in text


def test_reading_the_spec_of_a_result() -> None:
    def body(mesh: Any) -> str:
        return repr(md.typeof(md.reshard(torch.ones(2, 4), "s@a d -> s d@(b,a)", mesh)))

    assert typed(body)[0] == "float32[4, 1@(b,a)]"

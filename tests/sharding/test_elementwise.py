"""Operators, ufuncs and torch's functions on shards against the same on the whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist import DeviceMesh
from meshdist.errors import ArgumentError, AxisTypeError, KindError
from tests.sharding.array_cases import assemble, error_on_mesh, held, on_mesh

A = np.arange(1.0, 21.0).reshape(5, 4)
B = np.arange(21.0, 1.0, -1.0).reshape(5, 4)[::-1].copy() / 4
BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
WHOLE = [operator.and_, operator.or_, operator.xor]


def put(mesh: DeviceMesh, whole: Any, spec: md.P) -> md.ShardedArray:
    return md.device_put(whole, md.NamedSharding(mesh, spec))


def both(make: Callable[..., Any], *wholes: Any, spec: md.P | None = None) -> None:
    """Compare ``make`` of sharded arrays with ``make`` of the wholes."""
    spec = md.P("dp", "tp") if spec is None else spec
    shards = on_mesh(lambda mesh: held(make(*(put(mesh, one, spec) for one in wholes))))
    expected = np.asarray(make(*wholes))
    found = assemble(shards)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_python_s_operators(library: Callable[..., Any]) -> None:
    def program(mesh: DeviceMesh) -> list[Any]:
        x, y = (put(mesh, library(one), md.P("dp", "tp")) for one in (A, B))
        found = [held(function(x, y)) for function in BINARY]
        found += [held(function(x, 2)) for function in BINARY]
        found += [held(function(2, x)) for function in BINARY]
        n, m = (put(mesh, library(one.astype(np.int64)), md.P("dp")) for one in (A, B))
        found += [held(function(n, m)) for function in WHOLE]
        found += [held(function(n, 3)) for function in [*WHOLE, operator.lshift, operator.rshift]]
        found += [held(function(3, n)) for function in WHOLE]
        found += [held(function(x)) for function in (operator.neg, operator.pos, abs)]
        return [*found, held(~n)]

    x, y = library(A), library(B)
    n, m = library(A.astype(np.int64)), library(B.astype(np.int64))
    expected = [function(x, y) for function in BINARY]
    expected += [function(x, 2) for function in BINARY]
    expected += [function(2, x) for function in BINARY]
    expected += [function(n, m) for function in WHOLE]
    expected += [function(n, 3) for function in [*WHOLE, operator.lshift, operator.rshift]]
    expected += [function(3, n) for function in WHOLE]
    expected += [-x, +x, abs(x), ~n]
    for shards, whole in zip(zip(*on_mesh(program), strict=True), expected, strict=True):
        assert np.array_equal(assemble(shards), np.asarray(whole))
        assert shards[0].local.dtype == np.asarray(whole).dtype


def test_ufuncs_of_numpy_on_arrays_and_tensors() -> None:
    both(lambda x, y: np.hypot(x, y), A, B)
    both(lambda x: np.float64(2) * x - np.float64(1), A)
    both(lambda x: np.sqrt(x, dtype=np.float64), A)

    def tensors(mesh: DeviceMesh) -> list[Any]:
        x = put(mesh, torch.from_numpy(A), md.P("tp"))
        assert isinstance(np.exp(x).local, torch.Tensor)
        return [held(np.float32(2) * x), held(np.exp(x)), held(np.add(x, x))]

    columns = list(zip(*on_mesh(tensors), strict=True))
    for shards, whole in zip(columns, (2 * A, np.exp(A), A + A), strict=True):
        assert np.allclose(assemble(shards), whole, rtol=1e-12)


def test_ufuncs_with_several_results() -> None:
    def program(mesh: DeviceMesh) -> Any:
        fraction, whole = np.modf(put(mesh, B, md.P("dp")))
        return held(fraction), held(whole)

    fractions, wholes = zip(*on_mesh(program), strict=True)
    assert np.array_equal(assemble(fractions), np.modf(B)[0])
    assert np.array_equal(assemble(wholes), np.modf(B)[1])


@pytest.mark.parametrize(
    "function",
    [
        torch.exp,
        torch.nn.functional.gelu,
        torch.nn.functional.silu,
        torch.relu,
        lambda x: torch.clamp(x, 2, 8),
        lambda x: torch.where(x > 3, x, -x),
        lambda x: torch.add(x, x, alpha=3),
        lambda x: torch.mul(other=x, input=2 * x),
        lambda x: torch.square(torch.absolute(x)),
        lambda x: torch.tensor(2.0, dtype=torch.float64) * x,
        lambda x: torch.ones((), dtype=torch.float64) - x,
        lambda x: torch.frexp(x)[0],
    ],
)
def test_functions_of_torch(function: Callable[..., Any]) -> None:
    both(function, torch.from_numpy(A))


def test_gradients_flow_through_the_shards() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x, w = (torch.from_numpy(one).clone().requires_grad_() for one in (A, B))
        rows = md.NamedSharding(mesh, md.P("dp"))
        a = md.ShardedArray(md.shard(x.detach(), rows).requires_grad_(), rows, x.shape)
        b = md.device_put(w, rows)
        (torch.sin(a) * b + a / 2).sum().full().backward()
        gradient = md.ShardedArray(a.local.grad, rows, x.shape)
        return held(gradient), w.grad

    x, w = (torch.from_numpy(one).clone().requires_grad_() for one in (A, B))
    (torch.sin(x) * w + x / 2).sum().backward()
    for gradient, of_w in (found := on_mesh(program)):
        assert np.allclose(of_w, w.grad)
        assert np.allclose(assemble([one for one, _ in found]), x.grad)
        del gradient


def test_reduced_operands_have_unreduced_gradients() -> None:
    def program(mesh: DeviceMesh) -> Any:
        bias = torch.from_numpy(B[0]).clone().requires_grad_()
        x = put(mesh, torch.from_numpy(A), md.P("dp"))
        b = put(mesh, bias, md.P()).reshard(md.P(reduced={"dp"}))
        ((x + b) * b).sum().full().backward()
        return bias.grad

    bias = torch.from_numpy(B[0]).clone().requires_grad_()
    ((torch.from_numpy(A) + bias) * bias).sum().backward()
    assert all(torch.allclose(found, bias.grad) for found in on_mesh(program))


def test_what_is_unreduced_passes_where_an_operation_is_linear_in_it() -> None:
    def program(mesh: DeviceMesh) -> Any:
        u = put(mesh, torch.from_numpy(A), md.P("dp", unreduced={"tp"}))
        r = put(mesh, torch.from_numpy(B), md.P("dp", reduced={"tp"}))
        return [held(one) for one in (u + u - 3 * u, u * r, r * u, u / r, -u / 4, np.negative(u),
                                      torch.sub(u, u, alpha=2), np.conjugate(u))]  # fmt: skip

    expected = [-A, A * B, A * B, A / B, -A / 4, -A, -A, A]
    for shards, whole in zip(zip(*on_mesh(program), strict=True), expected, strict=True):
        assert np.allclose(assemble(shards), whole)
        assert shards[0].type.endswith("{U:tp}")


REFUSED: list[tuple[Callable[..., Any], type[Exception], list[str]]] = [
    (
        lambda x, u: u + 1,
        AxisTypeError,
        ["add: a number would be added to the partial sum", "md.full("],
    ),
    (lambda x, u: 1 - u, AxisTypeError, ["a number would be added"]),
    (lambda x, u: torch.add(u, 1), AxisTypeError, ["a number would be added"]),
    (lambda x, u: np.add(np.float32(1), u), AxisTypeError, ["a number would be added"]),
    (lambda x, u: 1 / u, AxisTypeError, ["true_divide is not linear", "x.reshard(P('dp',))"]),
    (lambda x, u: u * u, AxisTypeError, ["mul is not linear", "one unreduced operand"]),
    (lambda x, u: u**2, AxisTypeError, ["pow is not linear", "float32[5@dp, 4]{U:tp}"]),
    (lambda x, u: u > 0, AxisTypeError, ["gt is not linear"]),
    (lambda x, u: torch.relu(u), AxisTypeError, ["torch.relu is not linear"]),
    (lambda x, u: torch.div(u, 2, rounding_mode="floor"), AxisTypeError, ["not linear"]),
    (
        lambda x, u: u + x,
        AxisTypeError,
        ["not linear in the operand that is unreduced", "all unreduced"],
    ),
    (
        lambda x, u: x @ x,
        KindError,
        ["@ of sharded arrays", "mesh=x.mesh", "x.full() @ y.full"],
    ),
    (
        lambda x, u: torch.ones(2, 5) @ x,
        KindError,
        ["of sharded arrays", "md.einsum('b d@tp, d@tp f -> b f'"],
    ),
    (lambda x, u: np.matmul(x, x), KindError, ["numpy.matmul of sharded arrays"]),
    (lambda x, u: torch.softmax(x, 0), KindError, ["torch.softmax", "x.local", "x.full()"]),
    (lambda x, u: torch.cumsum(x, dim=1), KindError, ["torch.cumsum"]),
    (lambda x, u: torch.where(x > 0), KindError, ["torch.where"]),
    (lambda x, u: torch.max(x), KindError, ["torch.max", "x.local", "x.full()"]),
    (lambda x, u: torch.min(x, 1), KindError, ["torch.min"]),
    (lambda x, u: torch.max(input=x, dim=0), KindError, ["torch.max"]),
    (lambda x, u: torch.nn.functional.dropout(x), KindError, ["torch.dropout"]),
    (lambda x, u: torch.rrelu(x, training=True), KindError, ["torch.rrelu"]),
    (lambda x, u: np.add.reduce(x), KindError, ["numpy.add.reduce"]),
    (lambda x, u: torch.relu_(x), KindError, ["torch.relu_", "new sharded array"]),
    (lambda x, u: torch.exp(x, out=torch.ones(2)), KindError, ["out="]),
    (lambda x, u: np.exp(x, where=np.ones(3, bool)), KindError, ["where="]),
    (lambda x, u: np.spacing(x), KindError, ["numpy.spacing", "torch tensors"]),
    (
        lambda x, u: x + torch.ones(5, 4),
        ArgumentError,
        ["plain array of shape (5, 4)", "device_put"],
    ),
    (
        lambda x, u: np.ones((5, 4)) * x,
        ArgumentError,
        ["a plain array of shape (5, 4) has no sharding", "md.ShardedArray(y"],
    ),
    (lambda x, u: torch.add(torch.ones(4), x), ArgumentError, ["plain array of shape (4,)"]),
    (
        lambda x, u: torch.ones((), requires_grad=True) * x,
        AxisTypeError,
        ["cannot differentiate with respect to a number"],
    ),
]


@pytest.mark.parametrize(("make", "kind", "words"), REFUSED)
def test_what_is_rejected(
    make: Callable[..., Any], kind: type[Exception], words: list[str]
) -> None:
    def program(mesh: DeviceMesh) -> None:
        x = put(mesh, torch.ones(5, 4), md.P("dp"))
        make(x, put(mesh, torch.ones(5, 4), md.P("dp", unreduced={"tp"})))

    text = error_on_mesh(program, kind)
    for word in words:
        assert word in text, text


def test_shards_of_two_libraries_do_not_meet() -> None:
    def program(mesh: DeviceMesh) -> None:
        put(mesh, torch.from_numpy(A), md.P("dp")) + put(mesh, B, md.P("dp"))

    text = error_on_mesh(program, KindError)
    assert "different libraries" in text and "numpy, torch" in text


def test_ufuncs_that_round_are_not_linear() -> None:
    def program(mesh: DeviceMesh) -> None:
        u = put(mesh, A, md.P(unreduced={"tp"}))
        assert np.add(u, u).sharding.spec.unreduced == {"tp"}
        np.add(u, u, dtype=np.int64, casting="unsafe")

    assert "numpy.add is not linear" in error_on_mesh(program, AxisTypeError)


def test_what_is_no_array_is_left_to_python() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = put(mesh, A, md.P("dp"))
        with pytest.raises(TypeError, match="unsupported operand"):
            x + "text"
        return x == None, x != "text", len({x, x})  # noqa: E711

    assert on_mesh(program)[0] == (False, True, 1)


def test_in_place_operators_make_new_arrays() -> None:
    def program(mesh: DeviceMesh) -> Any:
        x = before = put(mesh, A.copy(), md.P("dp"))
        x += 1
        return held(before), held(x)

    before, after = zip(*on_mesh(program), strict=True)
    assert np.array_equal(assemble(before), A) and np.array_equal(assemble(after), A + 1)

"""Attention of a sharded sequence against one process: values, gradients, types, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.attention import context_parallel, positions
from meshdist.errors import (
    ArgumentError,
    AxisTypeError,
    DtypeError,
    GradientError,
    KindError,
    MeshError,
    MismatchError,
    NotInGroupError,
    ShapeError,
)
from tests.mpi_job import job_of
from tests.pool import Pool

METHODS, LAYOUTS = ("ring", "heads"), ("contiguous", "zigzag")
HEADS, LENGTH, WIDTH = 12, 24, 8
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def arrays(kv_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Global q, k and v, and the gradient of the result."""
    random = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, LENGTH, WIDTH, generator=random, dtype=torch.float64).to(dtype)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def derived(call: Callable[..., Any], arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The result of ``call``, and the gradients of q, k and v."""
    *given, grad = arrays
    leaves = [x.clone().requires_grad_() for x in given]
    result = call(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, grad)]


def oracle(kv_heads: int = HEADS, **options: Any) -> list[torch.Tensor]:
    """The same numbers of one process, in float64."""

    def whole(q: Any, k: Any, v: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    return derived(whole, arrays(kv_heads))


def shards(axis: md.DeviceMesh, layout: str, arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    own = positions(LENGTH, axis, layout)
    return [x[:, :, own] for x in arrays]


def program(
    size: int, layout: str, kv_heads: int = HEADS, dtype: Any = torch.float64, **options: Any
) -> list[torch.Tensor]:
    """This rank's result and gradients, of its shards."""
    axis = md.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]

    def call(q: Any, k: Any, v: Any) -> torch.Tensor:
        return context_parallel(q, k, v, axis, layout=layout, **options)

    return derived(call, shards(axis, layout, arrays(kv_heads, dtype)))


def indices(layout: str, size: int) -> list[torch.Tensor]:
    """The tokens of each rank, counted independently of ``positions``."""
    if layout == "contiguous":
        return list(torch.arange(LENGTH).view(size, -1))
    chunks = torch.arange(LENGTH).view(2 * size, -1)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for rank in range(size)]


def check(
    found: Sequence[list[torch.Tensor]],
    wanted: list[torch.Tensor],
    layout: str,
    dtype: torch.dtype = torch.float64,
) -> None:
    limit = LIMITS[dtype]
    for mine, own in zip(found, indices(layout, len(found)), strict=True):
        for x, whole in zip(mine, wanted, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x.double(), whole[:, :, own], rtol=limit, atol=limit)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kv_heads", [HEADS, 4, 1])
def test_values_and_gradients(size: int, method: str, kv_heads: int) -> None:
    if method == "heads" and kv_heads % size:
        kv_heads = size  # a head for each rank
    for layout, causal in product(LAYOUTS, (False, True)):
        options = {"causal": causal, "method": method}
        found = md.simulate(lambda: program(size, layout, kv_heads, **options), size)  # noqa: B023
        check(found, oracle(kv_heads, is_causal=causal), layout)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(method: str, dtype: torch.dtype) -> None:
    options = {"causal": True, "method": method}
    found = md.simulate(lambda: program(3, "zigzag", 6, dtype, **options), 3)
    check(found, oracle(6, is_causal=True), "zigzag", dtype)


@pytest.mark.parametrize("method", METHODS)
def test_another_scale(method: str) -> None:
    found = md.simulate(lambda: program(2, "zigzag", method=method, scale=0.7), 2)
    check(found, oracle(scale=0.7), "zigzag")


@pytest.mark.parametrize("backend", ["shm", "gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_over_processes(pool: Pool, backend: str) -> None:
    def body() -> list[list[torch.Tensor]]:
        return [program(2, layout, 4, causal=True, method=m) for m, layout in cases]

    cases = [*product(METHODS, LAYOUTS)]
    found = (
        job_of(pool, 2).run_in_world(body)
        if backend == "mpi"
        else pool.run(body, 2, backend=backend)
    )
    wanted = oracle(4, is_causal=True)
    for index, (_, layout) in enumerate(cases):
        check([of_rank[index] for of_rank in found], wanted, layout)


def over(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``body(axis, *args)`` returns on simulated ranks of an axis 'cp'."""

    def run() -> Any:
        mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        return body(mesh["cp"], *args)

    return md.simulate(run, size)


@pytest.mark.parametrize("method", METHODS)
def test_only_some_operands_need_a_gradient(method: str) -> None:
    def body(axis: md.DeviceMesh, wanted: str) -> Any:
        *given, grad = shards(axis, "zigzag", arrays())
        q, k, v = given
        leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", given, strict=True)]
        result = context_parallel(q, k, v, axis, causal=True, method=method, layout="zigzag")
        result.backward(grad)
        return [x.grad for x in leaves]

    of_all = [x[1:] for x in md.simulate(lambda: program(2, "zigzag", causal=True), 2)]
    for wanted in ("q", "kv", "v"):
        for found, complete in zip(over(2, body, wanted), of_all, strict=True):
            for name, x, whole in zip("qkv", found, complete, strict=True):
                assert (x is not None) == (name in wanted)
                if x is not None:
                    torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-12)


def test_without_a_gradient_nothing_is_kept() -> None:
    def body(axis: md.DeviceMesh) -> bool:
        q, k, v, _ = shards(axis, "contiguous", arrays())
        return context_parallel(q, k, v, axis).requires_grad

    assert over(2, body) == [False, False]


@pytest.mark.parametrize("method", METHODS)
def test_strided_operands_and_gradients(method: str) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        def call(q: Any, k: Any, v: Any) -> torch.Tensor:
            turned = [x.mT.contiguous().mT for x in (q, k, v)]  # d is not the innermost in memory
            assert turned[0].stride(-1) != 1
            return context_parallel(*turned, axis, causal=True, method=method, layout="zigzag")

        *given, grad = shards(axis, "zigzag", arrays())
        return derived(call, [*given, grad.mT.contiguous().mT])

    check(over(2, body), oracle(is_causal=True), "zigzag")


@pytest.mark.parametrize("method", METHODS)
def test_a_batch_without_samples(method: str) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Size]:
        given = [torch.ones(0, 4, 6, 8, requires_grad=True) for _ in range(3)]
        result = context_parallel(*given, axis, causal=True, method=method, layout="zigzag")
        result.sum().backward()
        return [result.shape, *(x.grad.shape for x in given if x.grad is not None)]

    assert over(2, body) == [[(0, 4, 6, 8)] * 4] * 2


@pytest.mark.parametrize("method", METHODS)
def test_arrays_of_numpy_return_as_such(method: str) -> None:
    def body(axis: md.DeviceMesh) -> np.ndarray:
        q, k, v, _ = (x.numpy() for x in shards(axis, "contiguous", arrays()))
        return context_parallel(q, k, v, axis, method=method)

    found = over(2, body)
    assert all(isinstance(x, np.ndarray) for x in found)
    np.testing.assert_allclose(
        np.concatenate(found, 2), oracle()[0].numpy(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("method", METHODS)
def test_autocast_converts_as_torch_does(method: str) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        q, k, v, _ = shards(axis, "contiguous", arrays(dtype=torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            result = context_parallel(q, k.half(), v, axis, method=method)
            kept = context_parallel(q.double(), k.double(), v.double(), axis, method=method)
        assert kept.dtype == torch.float64
        return [result]

    check(over(2, body), oracle()[:1], "contiguous", torch.bfloat16)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint(method: str, use_reentrant: bool) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        def call(*given: torch.Tensor) -> Any:
            def part(q: Any, k: Any, v: Any) -> torch.Tensor:
                return context_parallel(
                    q, k, v, axis, causal=True, method=method, layout="zigzag"
                ).mul(1)

            return checkpoint(part, *given, use_reentrant=use_reentrant)

        *given, grad = shards(axis, "zigzag", arrays())
        leaves = [x.clone().requires_grad_() for x in given]
        result = call(*leaves)
        result.backward(grad)
        return [result.detach(), *(x.grad for x in leaves)]

    check(over(3, body), oracle(is_causal=True), "zigzag")


@pytest.mark.parametrize("method", METHODS)
def test_two_backwards_of_a_retained_graph(method: str) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        *given, grad = shards(axis, "contiguous", arrays())
        leaves = [x.clone().requires_grad_() for x in given]
        result = context_parallel(*leaves, axis, causal=True, method=method)
        result.backward(grad, retain_graph=True)
        result.backward(grad)
        return [result.detach(), *(x.grad / 2 for x in leaves)]

    check(over(2, body), oracle(is_causal=True), "contiguous")


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_torch_func(method: str) -> None:
    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        *given, grad = shards(axis, "zigzag", arrays())

        def loss(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = context_parallel(*given, axis, causal=True, method=method, layout="zigzag")
            return (y * grad).sum(), y

        gradients, y = torch.func.grad(loss, (0, 1, 2), has_aux=True)(*given)
        return [y, *gradients]

    check(over(2, body), oracle(is_causal=True), "zigzag")


def test_a_second_derivative_of_a_ring_raises() -> None:
    def body(axis: md.DeviceMesh) -> str:
        *given, grad = shards(axis, "contiguous", arrays())
        leaves = [x.requires_grad_() for x in given]
        result = context_parallel(*leaves, axis)
        (of_q,) = torch.autograd.grad(result, leaves[:1], grad, create_graph=True)
        with pytest.raises(GradientError) as caught:
            of_q.sum().backward()
        return str(caught.value)

    for rank, text in enumerate(over(2, body)):
        assert text == (
            "attention.context_parallel has no second derivative with method='ring'\n"
            f"  where:    rank {rank}, axis 'cp' of DeviceMesh(cp=2)\n"
            "  expected: a single backward through the call\n"
            "  fix:      pass method='heads' inside "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def test_a_second_derivative_by_heads() -> None:
    def second(call: Callable[..., Any], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in given]
        with sdpa_kernel(SDPBackend.MATH):
            first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
            return list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))

    def body(axis: md.DeviceMesh) -> list[torch.Tensor]:
        def call(q: Any, k: Any, v: Any) -> torch.Tensor:
            return context_parallel(q, k, v, axis, causal=True, method="heads")

        return second(call, shards(axis, "contiguous", arrays())[:3])

    def whole(q: Any, k: Any, v: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    wanted = second(whole, arrays()[:3])
    for mine, own in zip(over(2, body), indices("contiguous", 2), strict=True):
        for x, its_whole in zip(mine, wanted, strict=True):
            torch.testing.assert_close(x, its_whole[:, :, own], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("size", "sent"), [(1, (0, 0)), (2, (1, 2)), (3, (2, 4))])
def test_transfers_of_a_ring(pool: Pool, size: int, sent: tuple[int, int]) -> None:
    def body() -> tuple[int, ...]:
        axis = md.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))["cp"]
        *given, grad = shards(axis, "zigzag", arrays())
        leaves = [x.requires_grad_() for x in given]
        with torch.profiler.profile(acc_events=True) as forward:
            result = context_parallel(*leaves, axis, causal=True, layout="zigzag")
        with torch.profiler.profile(acc_events=True) as backward:
            result.backward(grad)
        name = "meshdist::all_to_all_single of attention.context_parallel("
        return tuple(
            sum(event.name.startswith(name) for event in profile.events())
            for profile in (forward, backward)
        )

    assert pool.run(body, size, backend="shm") == [sent] * size


def test_the_place_of_a_rank_along_the_axis_counts() -> None:
    def body() -> list[torch.Tensor]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        axis = mesh["cp"]
        q, k, v, _ = shards(axis, "zigzag", arrays())
        return [context_parallel(q, k, v, axis, causal=True, layout="zigzag")]

    found = md.simulate(body, 4)
    for tp in (0, 1):
        check(found[tp::2], oracle(is_causal=True)[:1], "zigzag")


# -- types, wrappers -------------------------------------------------------------------------------


class Layer(nn.Module):
    """One layer of attention with rotary positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.projection = nn.Linear(8, 3 * HEADS * WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, own: torch.Tensor, axis: Any = None) -> torch.Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        angle = own.unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, WIDTH // 2, dtype=x.dtype)
        q, k = rotated(q, angle), rotated(k, angle)
        if axis is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return context_parallel(q, k, v, axis, causal=True, **self.options)


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


def model_and_batch(**options: Any) -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    return Layer(**options), torch.randn(4, LENGTH, 8, dtype=torch.float64)


def gradients_of_one_process() -> list[torch.Tensor]:
    model, batch = model_and_batch()
    model(batch, torch.arange(LENGTH)).square().mean().backward()
    return [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.parametrize("method", METHODS)
def test_inside_typed(method: str) -> None:
    def body() -> tuple[str, list[torch.Tensor]]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model, batch = model_and_batch(method=method, layout="zigzag")
        own = positions(LENGTH, mesh["cp"], "zigzag")
        rows = md.annotate(batch.chunk(2)[mesh.get_local_rank("dp")], varying="dp")
        with md.typed(mesh):
            y = checkpoint(model, rows[:, own], own, mesh["cp"], use_reentrant=False)
            text = repr(md.typeof(y))
            md.lax.pmean(y.square().mean(), ("dp", "cp")).backward()
        return text, [x.grad for x in model.parameters() if x.grad is not None]

    wanted = gradients_of_one_process()
    for text, found in md.simulate(body, 4):
        assert text == "float64[2, 12, 12, 8]{V:cp,dp}"
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_in_a_wrapper_over_two_axes(method: str) -> None:
    def body() -> list[torch.Tensor]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model, batch = model_and_batch(method=method, layout="zigzag")
        wrapped = md.DDP(model, device_mesh=mesh["dp", "cp"])
        own = positions(LENGTH, mesh["cp"], "zigzag")
        rows = batch.chunk(2)[mesh.get_local_rank("dp")]
        wrapped(rows[:, own], own, mesh["cp"]).square().mean().backward()
        return [x.grad.clone() for x in model.parameters() if x.grad is not None]

    wanted = gradients_of_one_process()
    for found in md.simulate(body, 4):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_typed_rejects_operands_that_are_no_shards(method: str, name: str) -> None:
    def body(axis: md.DeviceMesh) -> str:
        given = dict(zip("qkv", shards(axis, "contiguous", arrays()), strict=False))
        for other, x in given.items():
            given[other] = md.annotate(x.clone(), varying=() if other == name else "cp")
        with md.typed(axis), pytest.raises(AxisTypeError) as caught:
            context_parallel(**given, axis=axis, method=method)
        return str(caught.value)

    for text in over(2, body):
        assert text.startswith(
            "attention.context_parallel over axis 'cp' cannot take a value that is invariant over "
        )
        assert f"\n  found:    {name}: float64[2, 12, 12, 8]" in text


# -- positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions(size: int, layout: str) -> None:
    def body(axis: md.DeviceMesh) -> tuple[torch.Tensor, str]:
        own = positions(LENGTH, axis, layout)
        return own, repr(md.typeof(own))

    for (own, text), wanted in zip(over(size, body), indices(layout, size), strict=True):
        assert torch.equal(own, wanted)
        assert text == f"int64[{LENGTH // size}]{{V:cp}}"


def test_positions_are_contiguous_unless_asked() -> None:
    assert over(2, lambda axis: positions(4, axis).tolist()) == [[0, 1], [2, 3]]


def test_positions_have_the_axes_of_a_typed_context() -> None:
    def body() -> str:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        other = md.DeviceMesh("cpu", mesh["cp"].mesh, mesh_dim_names=("sequence",))
        with md.typed(mesh):
            tokens = torch.arange(8)
            return repr(md.typeof(tokens[positions(8, other)]))

    assert md.simulate(body, 4) == ["int64[4]{V:cp}"] * 4


def test_positions_keep_no_whole_sequence() -> None:
    (own,) = over(1, lambda axis: positions(8, axis))
    assert own.untyped_storage().nbytes() == 8 * 8
    assert over(2, lambda axis: positions(8, axis).untyped_storage().nbytes()) == [32, 32]


# -- errors ----------------------------------------------------------------------------------------


def x(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


SHARD = (1, 4, 6, 8)
EVEN = {"q": x(SHARD), "k": x(SHARD), "v": x(SHARD)}
HERE = "  where:    rank 0, axis 'cp' of DeviceMesh(cp=2)\n"


def found(q: str = "(1, 4, 6, 8)", k: str = "(1, 4, 6, 8)", v: str = "") -> str:
    shapes = (("q", q), ("k", k), ("v", v or k))
    return "  found:    " + "; ".join(f"{name} shape {shape}, float32" for name, shape in shapes)


WRONG: dict[str, tuple[type[Exception], dict[str, Any], str]] = {
    "method": (
        ArgumentError,
        {"method": "rings"},
        "attention.context_parallel: unknown method 'rings'\n"
        "  expected: 'ring' or 'heads'\n"
        "  fix:      did you mean method='ring'?",
    ),
    "layout": (
        ArgumentError,
        {"layout": "zig-zag"},
        "attention.context_parallel: unknown layout 'zig-zag'\n"
        "  expected: 'contiguous' or 'zigzag'\n"
        "  fix:      did you mean layout='zigzag'?",
    ),
    "kind of layout": (
        KindError,
        {"layout": None},
        "attention.context_parallel: unknown layout None\n"
        "  expected: 'contiguous' or 'zigzag'\n"
        "  found:    a NoneType",
    ),
    "a mask": (
        KindError,
        {"causal": x(6, 6)},
        "attention.context_parallel: causal must be True or False\n"
        "  found:    a Tensor\n"
        "  fix:      pass causal=True for a causal mask; other masks are not supported",
    ),
    "scale": (
        KindError,
        {"scale": "0.5"},
        "attention.context_parallel: scale must be a number\n  found:    '0.5', a str",
    ),
    "a list": (KindError, {"k": [1.0]}, "attention.context_parallel"),
    "integers": (
        DtypeError,
        {name: x(SHARD, dtype=torch.int64) for name in "qkv"},
        "attention.context_parallel: q, k and v must have the same floating dtype\n",
    ),
    "dtypes": (
        DtypeError,
        {"v": x(SHARD, dtype=torch.float64)},
        "attention.context_parallel: q, k and v must have the same floating dtype\n"
        + HERE
        + found().replace("v shape (1, 4, 6, 8), float32", "v shape (1, 4, 6, 8), float64")
        + "\n  fix:      convert them, for example k.to(torch.float32) and v.to(torch.float32)",
    ),
    "devices": (
        ArgumentError,
        {"k": x(SHARD, device="meta")},
        "attention.context_parallel: q, k and v must be on the same device\n"
        + HERE
        + "  found:    q on cpu, k on meta, v on cpu\n  fix:      move k and v to cpu",
    ),
    "dimensions": (
        ShapeError,
        {"q": x(4, 6, 8)},
        "attention.context_parallel: q, k and v must have 4 dimensions\n"
        + HERE
        + found("(4, 6, 8)")
        + "\n  fix:      arrange each as [batch, heads, tokens, d], for example x.transpose(1, 2)",
    ),
    "length of keys": (
        ShapeError,
        {"k": x(1, 4, 8, 8), "v": x(1, 4, 8, 8)},
        "attention.context_parallel: the shapes of q, k and v do not match\n"
        + HERE
        + "  expected: [batch, heads, tokens, d], equal except for fewer heads of k and v\n"
        + found(k="(1, 4, 8, 8)")
        + "\n  fix:      pass k and v of the same tokens as q; arrange each as [batch, heads, "
        "tokens, d], for example x.transpose(1, 2)",
    ),
    "values of another shape": (
        ShapeError,
        {"v": x(1, 2, 6, 8)},
        "attention.context_parallel: the shapes of q, k and v do not match\n",
    ),
    "no tokens": (
        ShapeError,
        {name: x(1, 4, 0, 8) for name in "qkv"},
        "attention.context_parallel: no dimension except the batch may have size 0\n"
        + HERE
        + found("(1, 4, 0, 8)", "(1, 4, 0, 8)"),
    ),
    "groups of heads": (
        ShapeError,
        {"k": x(1, 3, 6, 8), "v": x(1, 3, 6, 8)},
        "attention.context_parallel: 4 heads of q do not divide by 3 heads of k and v\n"
        + HERE
        + "  expected: 1, 2 or 4 heads of k and v\n"
        + found(k="(1, 3, 6, 8)")
        + "\n  fix:      arrange each as [batch, heads, tokens, d], for example x.transpose(1, 2)",
    ),
    "an odd zigzag": (
        ShapeError,
        {name: x(1, 4, 5, 8) for name in "qkv"} | {"layout": "zigzag"},
        "attention.context_parallel: a zigzag shard of 5 tokens does not divide into two chunks\n"
        + HERE
        + "  expected: an even number of tokens on each rank, a total divisible by 4\n"
        + found("(1, 4, 5, 8)", "(1, 4, 5, 8)")
        + "\n  fix:      pad the sequence to 12 tokens and take each rank's by "
        "attention.positions(length, axis, 'zigzag'), or pass layout='contiguous'",
    ),
    "heads": (
        ShapeError,
        {name: x(1, 3, 6, 8) for name in "qkv"} | {"method": "heads"},
        "attention.context_parallel: 3 heads of k and v do not divide by 2 ranks\n"
        + HERE
        + "  expected: with method='heads', 1 or 3 ranks\n"
        "  found:    q shape (1, 3, 6, 8), float32; k shape (1, 3, 6, 8), float32\n"
        "  fix:      pass method='ring'",
    ),
    "a device without a kernel": (
        DtypeError,
        {name: x(SHARD, device="meta") for name in "qkv"},
        "attention.context_parallel has no flash attention kernel for float32 on a meta device\n"
        + HERE
        + "  expected: for method='ring', a floating dtype on cpu; float16 or bfloat16 and a d "
        "divisible by 8, up to 256, on a cuda device that supports flash attention\n"
        "  found:    q shape (1, 4, 6, 8), float32 on meta\n"
        "  fix:      pass method='heads', which calls F.scaled_dot_product_attention",
    ),
    "a dtype without a kernel": (
        DtypeError,
        {name: x(SHARD, dtype=torch.float8_e5m2) for name in "qkv"},
        "attention.context_parallel has no flash attention kernel for float8_e5m2 on a cpu device",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_raise_before_anything_is_sent(case: str) -> None:
    kind, given, wanted = WRONG[case]

    def body(axis: md.DeviceMesh) -> tuple[type, str, float]:
        with pytest.raises(kind) as caught:
            context_parallel(**{**EVEN, "axis": axis, **given})
        return type(caught.value), str(caught.value), md.lax.psum(torch.ones(()), axis).item()

    (raised, text, total), _ = over(2, body)
    assert (raised, total) == (kind, 2)  # the group is still usable
    assert text == wanted if "\n  fix:" in wanted else text.startswith(wanted)


def test_the_fixes_of_errors_hold() -> None:
    def body(axis: md.DeviceMesh) -> list[int]:
        own = positions(12, axis, "zigzag")
        padded = {name: x(1, 4, 12, 8)[:, :, own] for name in "qkv"}
        three = {name: x(1, 3, 6, 8) for name in "qkv"}
        five = {name: x(1, 4, 5, 8) for name in "qkv"}
        return [
            context_parallel(**padded, axis=axis, layout="zigzag").shape[2],
            context_parallel(**five, axis=axis, layout="contiguous").shape[2],
            context_parallel(**three, axis=axis, method="ring").shape[1],
        ]

    assert over(2, body) == [[6, 5, 3]] * 2


@pytest.mark.parametrize("call", ["context_parallel", "positions"])
def test_axes_that_raise(call: str) -> None:
    def run(axis: Any) -> Any:
        if call == "positions":
            return positions(8, axis)
        return context_parallel(*EVEN.values(), axis)

    def body() -> list[str]:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        texts = []
        for kind, axis in ((KindError, "cp"), (MeshError, mesh), (NotInGroupError, None)):
            if axis is None:
                axis = md.DeviceMesh("cpu", [0, 1], mesh_dim_names=("cp",))["cp"]
                if md.get_rank() < 2:
                    continue
            with pytest.raises(kind) as caught:
                run(axis)
            assert type(caught.value) is kind
            texts.append(str(caught.value))
        return texts

    texts = md.simulate(body, 4)
    assert texts[0] == [
        f"attention.{call} takes a mesh of one axis as axis\n"
        "  expected: a DeviceMesh with one axis\n"
        "  found:    a str\n"
        "  fix:      pass for example axis=mesh['cp']",
        f"attention.{call} cannot use a mesh of 2 axes as axis\n"
        "  expected: one axis, such as mesh['cp']\n"
        "  found:    axis=DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'cp'))\n"
        "  fix:      pass one axis of the mesh, or flatten the mesh",
    ]
    assert len(texts[2]) == 3


@pytest.mark.parametrize(
    ("length", "layout", "wanted"),
    [
        (
            7,
            "contiguous",
            "attention.positions: a sequence of 7 tokens does not divide into 2 equal parts\n"
            "  where:    rank 0, axis 'cp' of DeviceMesh(cp=2)\n"
            "  expected: a length divisible by 2, the axis size\n"
            "  found:    length=7, layout='contiguous'\n"
            "  fix:      pad the sequence to 8 tokens, or shorten it to 6",
        ),
        (
            3,
            "zigzag",
            "attention.positions: a sequence of 3 tokens does not divide into 4 equal parts\n"
            "  where:    rank 0, axis 'cp' of DeviceMesh(cp=2)\n"
            "  expected: a length divisible by 4, two parts for each of 2 ranks\n"
            "  found:    length=3, layout='zigzag'\n"
            "  fix:      pad the sequence to 4 tokens",
        ),
        (0, "zigzag", "attention.positions: length is 0\n  expected: an integer of 1 or more"),
        (
            8.0,
            "zigzag",
            "attention.positions: length must be an integer\n  found:    8.0, a float",
        ),
        (
            8,
            "stripes",
            "attention.positions: unknown layout 'stripes'\n"
            "  expected: 'contiguous' or 'zigzag'\n"
            "  fix:      did you mean layout='contiguous'?",
        ),
    ],
)
def test_positions_that_raise(length: Any, layout: str, wanted: str) -> None:
    def body(axis: md.DeviceMesh) -> str:
        with pytest.raises(ArgumentError) as caught:
            positions(length, axis, layout)
        return str(caught.value)

    assert over(2, body)[0] == wanted


LONGER = {name: x(1, 4, 8, 8) for name in "qkv"}
DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "tokens": ({}, LONGER, "causal=False, scale=0.353553"),
    "heads of keys": ({}, {name: x(1, 2, 6, 8) for name in "kv"}, "k and v (1, 2, 6, 8), float32"),
    "causal": ({}, {"causal": True}, "('ring', 'contiguous', causal=True"),
    "layout": ({}, {"layout": "zigzag"}, "('ring', 'zigzag', causal=False"),
    "method": ({}, {"method": "heads"}, "('heads', 'contiguous', causal=False"),
    "scale": ({}, {"scale": 2}, "scale=2.0"),
    "dtype": ({}, {name: value.double() for name, value in EVEN.items()}, "float64)"),
    "tokens by heads": ({"method": "heads"}, LONGER, "q (1, 4, 8, 8)"),
}


def check_mismatch(run: Callable[[Callable[[], Any]], list[Any]], case: str) -> None:
    both, other, part = DIFFERENT[case]

    def body() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        given = {**EVEN, **both, **(other if md.get_rank() else {})}
        with pytest.raises(MismatchError) as caught:
            context_parallel(**given, axis=mesh["cp"])
        return str(caught.value)

    for text in run(body):
        assert f"attention.context_parallel('{both.get('method', 'ring')}', 'contiguous', " in text
        assert part in text


@pytest.mark.parametrize("case", DIFFERENT)
def test_a_call_that_differs_between_ranks_raises_on_all(case: str) -> None:
    check_mismatch(lambda body: md.simulate(body, 2), case)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("case", ["tokens", "causal", "tokens by heads"])
def test_a_call_that_differs_between_processes_raises_on_all(
    pool: Pool, backend: str, case: str
) -> None:
    check_mismatch(lambda body: pool.run(body, 2, backend=backend), case)


# -- CUDA ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cuda_kernels(size: int, method: str, dtype: torch.dtype) -> None:
    def body(layout: str, causal: bool) -> list[torch.Tensor]:
        axis = md.init_device_mesh("cuda", (size,), mesh_dim_names=("cp",))["cp"]
        given = [x.cuda() for x in arrays(4, dtype)]

        def call(q: Any, k: Any, v: Any) -> torch.Tensor:
            return context_parallel(q, k, v, axis, causal=causal, method=method, layout=layout)

        found = derived(call, shards(axis, layout, given))
        assert positions(LENGTH, axis).device.type == "cuda"
        return [x.cpu() for x in found]

    for layout, causal in product(LAYOUTS, (False, True)):
        found = md.simulate(body, size, args=(layout, causal))
        check(found, oracle(4, is_causal=causal), layout, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 8), (torch.float16, 12)])
def test_cuda_without_a_kernel_raises(dtype: torch.dtype, width: int) -> None:
    def body() -> tuple[str, torch.Size]:
        axis = md.init_device_mesh("cuda", (2,), mesh_dim_names=("cp",))["cp"]
        given = [torch.ones(1, 4, 6, width, dtype=dtype, device="cuda") for _ in range(3)]
        with pytest.raises(DtypeError) as caught:
            context_parallel(*given, axis)
        return str(caught.value), context_parallel(*given, axis, method="heads").shape

    for text, shape in md.simulate(body, 2):
        assert "has no flash attention kernel for" in text
        assert "fix:      pass method='heads'" in text
        assert shape == (1, 4, 6, width)

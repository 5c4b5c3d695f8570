"""Plans on tensors, against slices of whole arrays: values, derivatives, transforms, memory."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.autograd import forward_ad, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshdist as md
from meshdist.errors import AxisTypeError, DtypeError, MismatchError
from meshdist.sharding.planner import plan
from meshdist.sharding.resharding import get_transfer
from tests.pool import Pool
from tests.sharding.reshard_cases import Lie, check_move, mesh_of, move, transitions

# One of each form: exchanges of boxes, collectives, sums, slices, casts, and two of them together.
TRANSITIONS = {
    "gather": "b@a -> b",
    "gather of uneven shards": "b@(a,b) d -> b d",
    "all-to-all": "s@a d -> s d@a",
    "slice": "s d -> s@b d@a",
    "boxes": "s@a d@b -> s@b d@a",
    "sum": "s {U:a} -> s",
    "scattered sum": "s d@b {U:a} -> s@a d@b",
    "sum of all": "s {U:a,b} -> s",
    "sum of some, gathered": "s@b d {U:a} -> s d@a",
    "becomes unreduced": "s -> s {U:a}",
    "padded": "s@a -> s {U:a}",
    "becomes reduced": "s@a -> s {R:a}",
    "nothing": "s@a d -> s@a d",
}
SIZES = {"b": 7, "s": 6, "d": 4}


@given(transitions())
def test_values_and_gradients(case: Any) -> None:
    args = (*case, 1)
    check_move(*args, md.simulate(move, math.prod(case[0]), args=args))


@pytest.mark.soak
@settings(max_examples=2000)
@given(transitions(max_ranks=16))
def test_many_values_and_gradients(case: Any) -> None:
    args = (*case, 2)
    check_move(*args, md.simulate(move, math.prod(case[0]), args=args))


def argument_of(pattern: str, mesh: md.DeviceMesh) -> tuple[Callable[..., Any], torch.Tensor]:
    """What reshards by a pattern, and this rank's integers to reshard."""
    names = pattern.partition("->")[0].partition("{")[0].split()
    sizes = {name: SIZES[name] for name in (one.partition("@")[0] for one in names)}
    known = plan(pattern, mesh=mesh, **sizes)
    shape = known.source.local_shape(known.coordinate)
    x = torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(md.get_rank()))
    return lambda x: md.reshard(x, pattern, mesh, check=False, **sizes), x.double()


def on_pattern(body: Callable[..., Any], pattern: str, size: Any = (2, 2)) -> list[Any]:
    """``body`` of ``argument_of`` on each simulated rank."""

    def program() -> Any:
        return body(*argument_of(pattern, mesh_of(size)))

    return md.simulate(program, math.prod(size))


@pytest.mark.parametrize("pattern", TRANSITIONS.values(), ids=TRANSITIONS)
def test_transforms(pattern: str) -> None:
    def body(call: Any, x: torch.Tensor) -> None:
        y = call(x)
        found, back = torch.func.vjp(call, x)
        assert torch.equal(found, y)
        cotangent = torch.ones_like(y) + md.get_rank()
        other = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(call(other), other, cotangent)
        assert torch.equal(back(cotangent)[0], grad)

        batch = torch.stack([x, -x, 5 * x], dim=-1)
        mapped = torch.func.vmap(call, in_dims=-1)(batch)
        assert torch.equal(mapped, torch.stack([y, -y, 5 * y]))
        twice = torch.func.vmap(torch.func.vmap(call))(torch.stack([batch.movedim(-1, 0)] * 2))
        assert torch.equal(twice, torch.stack([mapped] * 2))
        each = torch.func.vmap(lambda one: torch.func.vjp(call, x)[1](one)[0])
        assert torch.equal(each(torch.stack([cotangent] * 2)), torch.stack([grad] * 2))

    on_pattern(body, pattern)


def test_forward_mode_on_processes(pool: Pool) -> None:
    """A process has forward mode for itself; simulated ranks share one."""

    def program() -> None:
        mesh = mesh_of((2, 2))
        for pattern in TRANSITIONS.values():
            call, x = argument_of(pattern, mesh)
            with warnings.catch_warnings():
                # torch's first use of forward mode compiles its rules with what torch deprecates.
                warnings.filterwarnings("ignore", "`torch.jit.script`", DeprecationWarning)
                found, tangent = torch.func.jvp(call, (x,), (2 * x,))
            y = call(x)
            assert torch.equal(found, y) and torch.equal(tangent, 2 * y), pattern
            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, 3 * x)))
                assert torch.equal(dual.tangent, 3 * y), pattern

    pool.run(program, 4, backend="shm")


def test_finite_differences() -> None:
    """On one rank alone gradcheck sees the whole map; that ranks fit is <Ax, y> = <x, A'y>."""

    def body(call: Any, x: torch.Tensor) -> None:
        assert gradcheck(call, (x.requires_grad_(),))

    on_pattern(body, "s@a d -> d@a s", size=(1, 1))


@pytest.mark.parametrize(
    "pattern",
    [
        "s@a d -> s d@a",
        "s@a d -> s d",
        "s d@a -> s d",
        "s d -> s@a d",
        "s d {U:a} -> s@a d",
        "s d {U:a} -> s d",
        "s d -> s d {U:a}",
        "(h k)@a d -> (k h) d",
        "s@(a,b) d -> s@(b,a) d",
    ],
)
def test_results_may_be_written_to(pattern: str) -> None:
    """Autograd rejects to write to views that a custom Function has made."""

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        mesh = mesh_of((2, 2))
        sizes = {"h": 2} if "h" in pattern else {}
        gradients = []
        for is_written in (False, True):
            x = torch.ones(4, 4, requires_grad=True)
            y = md.reshard(x, pattern, mesh, **sizes)
            y = y.mul_(3) if is_written else y * 3
            y.sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
        return gradients[0], gradients[1]

    for expected, found in md.simulate(program, 4):
        assert torch.equal(found, expected) and found.any()


def test_memory_is_new_and_contiguous() -> None:
    def body(call: Any, x: torch.Tensor) -> None:
        for one in (x, x.T.contiguous().T, torch.stack([x, x], dim=-1)[..., 1]):
            y = call(one)
            assert torch.equal(y, call(x.clone())) and y.is_contiguous()
            y.fill_(99)
            assert torch.equal(one, x) and not (x == 99).any()

    for pattern in ("s@a d -> s@a d", "s d -> s@b d@a", "s@a d@b -> s@b d@a", "s@a d -> d@a s"):
        on_pattern(body, pattern)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def body(call: Any, x: torch.Tensor) -> None:
        given = x.to(dtype)
        assert torch.equal(call(given), call(x).to(dtype))
        if given.is_complex():
            given = given * (1 + 2j)
            assert torch.equal(call(given.conj()), call(given).conj())
            assert torch.equal(call(given.conj().imag), -call(given.imag.clone()))

    on_pattern(body, "s@a d@b -> s@b d@a")
    on_pattern(body, "s@a d -> s d")


def test_bool_partial_sums_are_rejected() -> None:
    def body(call: Any, x: torch.Tensor) -> str:
        with pytest.raises(DtypeError) as found:
            call(x > 0)
        return str(found.value)

    text = on_pattern(body, "s {U:a} -> s")[0]
    assert "reshard cannot sum bool values" in text
    assert "where:    s {U:a} -> s of shape (6,)" in text
    assert "found:    shape (6,), bool" in text
    assert "fix:      count in integers: x.to(torch.int32)" in text


@pytest.mark.parametrize(
    ("kind", "pattern", "fix"),
    [
        ("unreduced", "b d -> b d@dp", "write {U:dp} on the left"),
        ("unreduced", "b d -> b d", "annotate the result: md.annotate(x)"),
        ("reduced", "b d -> b d@dp", "write {R:dp} on the left"),
        (
            "varying",
            "b d -> b d@dp",
            "write the axis at the dimension that it shards, as in 'n@dp'",
        ),
    ],
)
def test_a_mark_that_contradicts_the_left_side_is_rejected(
    kind: str, pattern: str, fix: str
) -> None:
    def program() -> str:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = md.annotate(torch.ones(2, 2), **{kind: "dp"})  # type: ignore[arg-type]
        with pytest.raises(AxisTypeError) as caught:
            md.reshard(x, pattern, mesh)
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert (
            f"reshard cannot take a value that is {kind} over 'dp': its pattern or spec requires "
            "invariant" in text
        )
        assert fix in text


def test_a_mark_over_an_axis_that_is_left_alone_is_none_of_its_business() -> None:
    def program() -> float:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        w = md.annotate(torch.ones(2, 2, requires_grad=True), reduced="dp")
        md.reshard(w, "d f -> d f@tp", mesh).mul(1 + mesh.get_local_rank("dp")).sum().backward()
        return w.grad[0, 0].item()

    assert md.simulate(program, 4) == [1.0, 1.0, 2.0, 2.0]


def test_sums_have_equal_bits_on_all_replicas() -> None:
    """Sum numbers whose sum depends on their order, on ranks with another order of partial sums."""
    generator = np.random.default_rng(0)
    partial_sums = generator.standard_normal((4, 3, 50)) * 10.0 ** generator.integers(
        -8, 8, (4, 3, 50)
    )

    for target in ("s {}", "s@b {}", "s@a {}", "s {R:a}"):
        pattern = f"s {{U:c}} -> {target.replace(' {}', '')}"

        def program(pattern: str = pattern) -> Any:
            mesh = mesh_of((2, 2, 3))
            at = mesh.get_coordinate()
            assert at is not None
            x = torch.from_numpy(partial_sums[0, at[2]].copy()).float()
            y = md.reshard(x, pattern, mesh)
            return md.unshard(y, pattern.partition("->")[2], mesh, shape=(50,)).numpy().tobytes()

        assert len(set(md.simulate(program, 12))) == 1


def test_two_meshes_over_the_same_ranks() -> None:
    whole = torch.arange(48.0).view(8, 6)

    def program() -> Any:
        dense = md.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        experts = md.init_device_mesh("cpu", (4, 2), mesh_dim_names=("ep", "etp"))
        here = md.NamedSharding(dense, md.P("dp", "tp"))
        there = md.NamedSharding(experts, md.P("ep", "etp"))
        x = md.shard(whole, here).requires_grad_()
        y = md.reshard(x, here, there, shape=whole.shape)
        assert torch.equal(y, md.shard(whole, there))
        (grad,) = torch.autograd.grad(y, x, 2 * y)
        assert torch.equal(grad, 2 * x)
        assert torch.equal(md.reshard(y, there, here, shape=whole.shape), x)
        return True

    assert all(md.simulate(program, 8))


# -- disagreement ---------------------------------------------------------------------------------


def test_ranks_with_different_plans_all_raise_and_show_both() -> None:
    def program() -> str:
        mesh = mesh_of((2,))
        pattern = ("s@a d -> s d@a", "d@a s -> d s@a")[md.get_rank()]
        with pytest.raises(MismatchError) as found:
            md.reshard(torch.zeros(2, 4), pattern, mesh)
        return str(found.value)

    for text in md.simulate(program, 2):
        assert "s@a d -> s d@a of shape (4, 4)" in text
        assert "d@a s -> d s@a of shape (4, 4)" in text


def test_uneven_shards_without_their_sizes_disagree() -> None:
    def program() -> str:
        mesh = mesh_of((2,))
        with pytest.raises(MismatchError) as found:
            md.reshard(torch.zeros(3 - md.get_rank()), "s@a -> s", mesh)
        return str(found.value)

    for text in md.simulate(program, 2):
        assert "of shape (6,)" in text and "of shape (4,)" in text


# -- groups ---------------------------------------------------------------------------------------


def test_groups_open_at_the_call_and_none_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transpose's, too, once the input needs a gradient."""
    made: list[int] = []
    make = md.ProcessGroup.__init__

    def noted(group: md.ProcessGroup, *arguments: Any, **more: Any) -> None:
        made.append(md.get_rank())
        make(group, *arguments, **more)

    monkeypatch.setattr(md.ProcessGroup, "__init__", noted)

    def program() -> Any:
        mesh = mesh_of((2, 2))
        x = torch.zeros(8, 2)
        opened = [made.count(md.get_rank())]
        md.reshard(x, "s d -> s@(a,b) d", mesh, check=False)  # a slice, whose transpose gathers
        opened.append(made.count(md.get_rank()))
        y = md.reshard(x.requires_grad_(), "s d -> s@(a,b) d", mesh, check=False)
        opened.append(made.count(md.get_rank()))
        y.sum().backward()
        opened.append(made.count(md.get_rank()))
        return opened

    assert md.simulate(program, 4) == [[2, 2, 3, 3]] * 4


def test_a_transpose_is_its_transposes_transpose() -> None:
    def program() -> bool:
        mesh = mesh_of((2,))
        moved = plan("s@a d -> s d@a", mesh=mesh, s=4, d=4)
        x = torch.ones(2, 4, requires_grad=True)
        y = get_transfer(moved, mesh)(x)
        transfer = get_transfer(moved, mesh)
        return y.requires_grad and transfer.transpose.transpose is transfer

    assert all(md.simulate(program, 2))


# -- memory ---------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that live, as torch's operations give them out."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, key, None)
            self.peak = max(self.peak, sum(self.live.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor):
                self.add(one)
        return result


def peaks(patterns: list[str]) -> list[tuple[str, int, int]]:
    """By pattern the peak on this rank, and what its plan promises."""
    names = {"b": 32, "s": 32, "d": 64}
    mesh = mesh_of((2, 2))
    found = []
    for pattern in patterns:
        left = pattern.partition("->")[0].partition("{")[0].split()
        sizes = {name: names[name] for name in (one.partition("@")[0] for one in left)}
        moved = plan(pattern, mesh=mesh, **sizes)
        x = torch.ones(moved.source.local_shape(moved.coordinate))
        get_transfer(moved, mesh)(x)
        gc.collect()
        with LiveBytes() as counted:
            counted.add(x)
            get_transfer(moved, mesh)(x)
        found.append((pattern, counted.peak, moved.peak_bytes()))
    return found


def test_peak_memory(pool: Pool) -> None:
    """Source, destination, and what is packed and received: as the plan says.

    Over our own backend: torch's Gloo keeps copies of its own of what it gathers.
    """
    for rank in pool.run(peaks, 4, list(TRANSITIONS.values()), backend="shm"):
        for pattern, peak, promised in rank:
            assert peak <= promised, pattern


# -- real backends ---------------------------------------------------------------------------------

CASES = [
    ((2, 2), (5, 4), Lie(((0,), (1,))), Lie(((1,), (0,)))),
    ((2, 2), (8, 6), Lie(((0, 1), ())), Lie(((), (0, 1)))),
    ((2, 2), (5, 3), Lie(((0,), ()), cells=((0, (4, 1)),)), Lie(((), (1,)), reduced=(0,))),
    ((2, 2), (4, 6), Lie(((), ()), unreduced=(0, 1)), Lie(((1,), ()))),
    ((2, 2), (7,), Lie(((1,),), unreduced=(0,)), Lie(((),))),
    ((4,), (6, 2), Lie(((), ())), Lie(((0,), ()))),
    ((4,), (9,), Lie(((0,),)), Lie(((),), unreduced=(0,))),
    ((3,), (), Lie((), unreduced=(0,)), Lie(())),
]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("size", [3, 4])
def test_real_backends(pool: Pool, backend: str, size: int) -> None:
    cases = [case for case in CASES if math.prod(case[0]) == size]

    def program() -> list[Any]:
        return [move(*case, 5) for case in cases]

    results = pool.run(program, size, backend=backend)
    for number, case in enumerate(cases):
        check_move(*case, 5, [result[number] for result in results])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_different_plans_over_real_backends(pool: Pool, backend: str) -> None:
    def program() -> str:
        mesh = mesh_of((2,))
        pattern = ("s@a d -> s d@a", "d@a s -> d s@a")[md.get_rank()]
        try:
            md.reshard(torch.zeros(2, 4), pattern, mesh)
        except MismatchError as error:
            return str(error)
        return "no error"

    for text in pool.run(program, 2, backend=backend):
        assert "s@a d -> s d@a of shape (4, 4)" in text
        assert "d@a s -> d s@a of shape (4, 4)" in text

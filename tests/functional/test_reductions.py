"""Reductions, gathers and casts against one device that holds what all ranks hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.autograd import forward_ad
from torch.distributed import DebugLevel, set_debug_level
from torch.utils.checkpoint import checkpoint

import meshdist as md
from meshdist.errors import (
    ArgumentError,
    DtypeError,
    GradientError,
    KindError,
    ShapeError,
)
from meshdist.functional.reductions import (
    all_gather,
    pcast,
    pmax,
    pmean,
    pmin,
    psum,
    psum_scatter,
    pvary,
)
from tests.functional.operation_cases import (
    FUNCTIONAL,
    PLACES,
    check,
    check_memory,
    check_odd_gradients,
    run_over_mpi,
)
from tests.pool import Pool

# Ranks by coordinate, and the axes to sum over: alone, both, of size 1, permuted.
CASES = [
    ([0, 1, 2, 3], ["tp"]),
    ([[0, 1], [2, 3]], ["dp"]),
    ([[0, 1], [2, 3]], ["tp"]),
    ([[0, 1], [2, 3]], ["tp", "dp"]),
    ([[3, 1], [0, 2]], ["dp"]),
    ([[2, 0, 1]], ["dp"]),
    ([[2, 0, 1]], ["tp"]),
    ([0], ["tp"]),
]


def names_of(ranks: np.ndarray) -> tuple[str, ...]:
    return ("dp", "tp")[2 - ranks.ndim :]


def on_ranks(ranks: Any, axes: Sequence[str], body: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``body(rank, group, *args)`` on simulated ranks; the results by rank."""
    ranks = np.asarray(ranks)

    def program(*args: Any) -> Any:
        mesh = md.DeviceMesh("cpu", ranks, mesh_dim_names=names_of(ranks))
        return body(md.get_rank(), mesh[tuple(axes)].open_group(), *args)

    return md.simulate(program, ranks.size, args=args)


def line(body: Callable[..., Any], *args: Any, size: int = 4) -> list[Any]:
    """The same on one axis."""
    return on_ranks(np.arange(size), ["tp"], body, *args)


def sums(ranks: Any, axes: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """The oracle: by rank, the sum over all places that differ from its own only in ``axes``."""
    ranks = np.asarray(ranks)
    is_summed = [name in axes for name in names_of(ranks)]
    result: list[Any] = [None] * ranks.size
    for place in np.ndindex(ranks.shape):
        total = 0
        for other in np.ndindex(ranks.shape):
            if all(s or a == b for a, b, s in zip(place, other, is_summed, strict=True)):
                total = total + values[ranks[other]]
        result[ranks[place]] = total
    return result


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Integers as floats, whose sums and products are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


# -- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "axes"), CASES)
def test_values(ranks: Any, axes: list[str]) -> None:
    size = np.size(ranks)
    xs = [integers(2, 3, seed=seed) for seed in range(size)]

    def body(rank: int, group: Any) -> Any:
        return psum(xs[rank], group), pmean(xs[rank], group), pvary(xs[rank], group)

    totals = sums(ranks, axes, xs)
    counts = sums(ranks, axes, [1] * size)
    for rank, (total, mean, own) in enumerate(on_ranks(ranks, axes, body)):
        assert torch.equal(total, totals[rank])
        assert torch.equal(mean, totals[rank] / counts[rank])
        assert torch.equal(own, xs[rank])


LAYOUTS = {
    "scalar": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, 4),
    "channels last": lambda x: x.view(1, 2, 2, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def body(rank: int, group: Any) -> Any:
        x = layout(integers(4, 4, seed=rank).requires_grad_())
        (back,) = torch.autograd.grad(
            (psum(x, group) * 3).sum() + (pvary(x, group) * rank).sum(), x
        )
        return psum(x, group).detach(), back

    expected = sum(layout(integers(4, 4, seed=rank)) for rank in range(3))
    for total, back in line(body, size=3):
        assert torch.equal(total, expected)
        assert torch.equal(back, torch.full(expected.shape, 3.0 + 0 + 1 + 2, dtype=torch.float64))


def test_ranks_whose_strides_differ_are_added_by_index() -> None:
    whole = integers(3, 3)

    def body(rank: int, group: Any) -> torch.Tensor:
        return psum(whole if rank else whole.T.contiguous().T, group)

    assert all(torch.equal(total, 2 * whole) for total in line(body, size=2))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.complex64,
        torch.complex128,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.tensor([1, 2, 3], dtype=dtype) + rank
        return psum(x, group), pvary(x, group), pmean(x, group)

    for rank, (total, own, mean) in enumerate(line(body)):
        assert total.tolist() == [10, 14, 18]
        assert own.tolist() == [1 + rank, 2 + rank, 3 + rank]
        assert mean.tolist() == [2.5, 3.5, 4.5]
        assert total.dtype is own.dtype is dtype
        floats = dtype.is_floating_point or dtype.is_complex
        assert mean.dtype is (dtype if floats else torch.get_default_dtype())


def test_bool_is_counted() -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.tensor([True, rank > 0, False])
        return psum(x, group), pmean(x, group), pvary(x, group)

    for total, mean, own in line(body)[1:]:
        assert (total.dtype, total.tolist()) == (torch.int32, [4, 3, 0])
        assert mean.tolist() == [1, 0.75, 0]
        assert (own.dtype, own.tolist()) == (torch.bool, [True, True, False])


def test_lazy_conjugates_are_summed_as_they_read() -> None:
    def body(rank: int, group: Any) -> Any:
        z = torch.tensor([1 + 2j, 3j]) * (rank + 1)
        x = z if rank else z.conj()
        return psum(x, group), pvary(x, group), psum(z.conj().imag, group)

    for rank, (total, own, negative) in enumerate(line(body, size=2)):
        assert total.tolist() == [3 + 2j, 3j]
        assert own.tolist() == [[1 - 2j, -3j], [2 + 4j, 6j]][rank]
        assert negative.tolist() == [-6, -9]


@pytest.mark.parametrize("operation", [psum, pmean, pvary])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_result_shares_nothing_with_its_argument(
    operation: Any, size: int, with_gradient: bool
) -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.ones(3).requires_grad_(with_gradient)
        y = operation(x, group)
        y.mul_(7)
        with torch.no_grad():
            x.add_(1)
        return x.tolist(), (y / y[0]).tolist(), y.requires_grad

    expected = ([2.0] * 3, [1.0] * 3, with_gradient)
    assert line(body, size=size) == [expected] * size


# -- gradients ----------------------------------------------------------------------------------

sizes = st.integers(1, 4)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def inner(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.conj() * b).real.sum())


@settings(max_examples=20)
@given(sizes, shapes, st.sampled_from([torch.float64, torch.complex128]), st.randoms())
def test_psum_and_its_backward_are_transposes(
    size: int, shape: tuple[int, ...], dtype: torch.dtype, random: Any
) -> None:
    seed = random.randrange(10**6)
    xs = [integers(*shape, seed=seed + rank, dtype=dtype) for rank in range(size)]
    y = integers(*shape, seed=seed + size, dtype=dtype)  # of an invariant value: equal everywhere

    def body(rank: int, group: Any) -> Any:
        x = xs[rank].clone().requires_grad_()
        total = psum(x, group)
        return total.detach(), torch.autograd.grad(total, x, y)[0]

    results = line(body, size=size)
    for total, _ in results:
        assert inner(total, y) == sum(inner(x, b) for x, (_, b) in zip(xs, results, strict=True))


@settings(max_examples=20)
@given(sizes, shapes, st.sampled_from([torch.float64, torch.complex128]), st.randoms())
def test_pvary_and_its_backward_are_transposes(
    size: int, shape: tuple[int, ...], dtype: torch.dtype, random: Any
) -> None:
    seed = random.randrange(10**6)
    x = integers(*shape, seed=seed, dtype=dtype)  # invariant
    ys = [integers(*shape, seed=seed + 1 + rank, dtype=dtype) for rank in range(size)]

    def body(rank: int, group: Any) -> Any:
        mine = x.clone().requires_grad_()
        own = pvary(mine, group)
        return own.detach(), torch.autograd.grad(own, mine, ys[rank])[0]

    results = line(body, size=size)
    forward = sum(inner(own, y) for (own, _), y in zip(results, ys, strict=True))
    for _, back in results:
        assert inner(x, back) == forward


def whole_loss(w: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the ranks compute together, on one device."""
    total = sum(torch.sin(w * x) for x in xs)
    mean = sum(torch.cos(w + x) for x in xs) / len(xs)
    return (total**3).sum() + (total * mean).sum()


def loss_of_rank(w: torch.Tensor, x: torch.Tensor, group: Any) -> torch.Tensor:
    """The same on one of the ranks, which holds ``w`` like all others and an ``x`` of its own."""
    mine = pvary(w, group)
    total = psum(torch.sin(mine * x), group)
    return (total**3).sum() + (total * pmean(torch.cos(mine + x), group)).sum()


def reals(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradients_are_those_of_the_whole_and_its_finite_differences() -> None:
    size = 3
    w, xs = reals(2, 2, seed=9), [reals(2, 2, seed=seed) for seed in range(size)]

    def body(rank: int, group: Any, w: torch.Tensor, xs: list[torch.Tensor]) -> Any:
        w, x = w.requires_grad_(), xs[rank].requires_grad_()
        loss = loss_of_rank(w, x, group)
        loss.backward()
        return loss.item(), w.grad, x.grad

    def loss_at(w: torch.Tensor, xs: list[torch.Tensor]) -> float:
        (value,) = {loss for loss, _, _ in line(body, w, xs, size=size)}
        return value

    results = line(body, w, xs, size=size)
    leaves = [w.clone().requires_grad_(), *(x.clone().requires_grad_() for x in xs)]
    whole = whole_loss(leaves[0], leaves[1:])
    wanted = torch.autograd.grad(whole, leaves)
    for rank, (loss, grad_w, grad_x) in enumerate(results):
        torch.testing.assert_close(loss, whole.item())
        torch.testing.assert_close(grad_w, wanted[0])
        torch.testing.assert_close(grad_x, wanted[1 + rank])

    step = 1e-6
    for index, grad in ((0, results[2][1]), (1, results[0][2]), (3, results[2][2])):
        values = []
        for sign in (1, -1):
            moved = [w.clone(), *(x.clone() for x in xs)]
            moved[index][1, 0] += sign * step
            values.append(loss_at(moved[0], moved[1:]))
        difference = (values[0] - values[1]) / (2 * step)
        assert difference == pytest.approx(grad[1, 0].item(), rel=1e-6)


def test_double_backward() -> None:
    size = 3
    w, xs = reals(2, seed=9), [reals(2, seed=seed) for seed in range(size)]

    def body(rank: int, group: Any) -> Any:
        mine, x = w.clone().requires_grad_(), xs[rank].clone().requires_grad_()
        loss = loss_of_rank(mine, x, group)
        by_w, by_x = torch.autograd.grad(loss, (mine, x), create_graph=True)
        penalty = (by_w**2).sum() + psum((by_x**2).sum(), group)
        return penalty.item(), *torch.autograd.grad(penalty, (mine, x))

    leaves = [w.clone().requires_grad_(), *(x.clone().requires_grad_() for x in xs)]
    grads = torch.autograd.grad(whole_loss(leaves[0], leaves[1:]), leaves, create_graph=True)
    penalty = sum((grad**2).sum() for grad in grads)
    wanted = torch.autograd.grad(penalty, leaves)
    for rank, (value, by_w, by_x) in enumerate(line(body, size=size)):
        torch.testing.assert_close(value, penalty.item())
        torch.testing.assert_close(by_w, wanted[0])
        torch.testing.assert_close(by_x, wanted[1 + rank])


# torch's own first use of forward mode compiles its rules with what torch itself deprecates.
@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_forward_mode() -> None:
    def body(rank: int, group: Any) -> Any:
        x = forward_ad.make_dual(torch.ones(2), torch.full((2,), float(rank)))
        return [
            [part.tolist() for part in forward_ad.unpack_dual(operation(x, group))]
            for operation in (psum, pmean, pvary)
        ]

    with forward_ad.dual_level():  # of the process: torch has one for all its threads
        results = line(body)
    for rank, (total, mean, own) in enumerate(results):
        assert total == [[4, 4], [6, 6]]
        assert mean == [[1, 1], [1.5, 1.5]]
        assert own == [[1, 1], [rank, rank]]


@pytest.mark.parametrize(("ranks", "axes"), CASES)
def test_pvary_sums_gradients_over_its_axes_alone(ranks: Any, axes: list[str]) -> None:
    def body(rank: int, group: Any) -> Any:
        w = torch.ones((), requires_grad=True)
        (pvary(w, group) * 10**rank).backward()
        return w.grad.item()

    assert on_ranks(ranks, axes, body) == sums(
        ranks, axes, [10.0**r for r in range(np.size(ranks))]
    )


def test_no_gradient_where_none_is_wanted() -> None:
    def body(rank: int, group: Any) -> Any:
        leaf = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            silent = [operation(leaf, group) for operation in (psum, pmean, pvary)]
        plain = [operation(torch.ones(2), group) for operation in (psum, pmean, pvary)]
        counts = [
            operation(torch.ones(2, dtype=torch.int64), group) for operation in (psum, pmean, pvary)
        ]
        return [y.requires_grad for y in silent + plain + counts]

    assert line(body, size=2) == [[False] * 9] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce:FutureWarning")
def test_torchs_differentiable_all_reduce_is_pvary_after_psum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second opinion: torch's own derivative, on our backend."""
    from torch.distributed.nn import functional as torch_functional

    monkeypatch.setattr(torch.distributed, "all_reduce", md.all_reduce)
    xs, factors = [reals(2, seed=seed) for seed in range(3)], [1.0, 4.0, 9.0]

    def body(rank: int, group: Any) -> Any:
        found = []
        for operation in (torch_functional.all_reduce, lambda x: pvary(psum(x, group), group)):
            x = xs[rank].clone().requires_grad_()
            y = operation(x)
            (y**2 * factors[rank]).sum().backward()
            found += [y.detach(), x.grad]
        return found

    for theirs, their_grad, ours, our_grad in line(body, size=3):
        assert torch.equal(theirs, ours)
        assert torch.equal(their_grad, our_grad)


def test_parameters_take_part() -> None:
    def body(rank: int, group: Any) -> Any:
        weight = torch.nn.Parameter(torch.full((2,), 2.0))
        (psum(pvary(weight, group) * (rank + 1), group) ** 2).sum().backward()
        return weight.grad.tolist()

    # (w (1 + 2))^2 has the derivative 18 w.
    assert line(body, size=2) == [[36.0, 36.0]] * 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_activations_communicate_again(use_reentrant: bool) -> None:
    w, xs = reals(2, seed=9), [reals(2, seed=seed) for seed in range(3)]

    def body(rank: int, group: Any, is_checkpointed: bool) -> Any:
        mine, x = w.clone().requires_grad_(), xs[rank].clone().requires_grad_()
        calls = []

        def block(h: torch.Tensor) -> torch.Tensor:
            calls.append(rank)
            return torch.tanh(psum(torch.sin(pvary(h, group) * x), group))

        h = mine * 2
        for _ in range(2):
            if is_checkpointed:
                h = checkpoint(block, h, use_reentrant=use_reentrant)
            else:
                h = block(h)
        h.sum().backward()
        return mine.grad, x.grad, len(calls)

    stored, recomputed = line(body, False, size=3), line(body, True, size=3)
    for (by_w, by_x, num_calls), again in zip(stored, recomputed, strict=True):
        assert torch.equal(by_w, again[0])
        assert torch.equal(by_x, again[1])
        assert (num_calls, again[2]) == (2, 4)


def test_backward_uses_the_group_of_forward_whatever_is_in_force_by_then() -> None:
    def program() -> float:
        wide = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        narrow = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        w = torch.ones((), requires_grad=True)
        with wide:
            loss = md.lax.pvary(w, "tp") * 10 ** md.get_rank()
        with narrow:
            loss.backward()
        return w.grad.item()

    assert md.simulate(program, 4) == [1111.0] * 4


def test_backward_may_run_in_another_thread(one_rank: Any) -> None:
    w = torch.ones(2, requires_grad=True)
    loss = (psum(pvary(w, one_rank) * 3, one_rank) ** 2).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(30)
    assert w.grad.tolist() == [18.0, 18.0]


@pytest.fixture
def one_rank() -> Iterator[Any]:
    md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
    try:
        yield md.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)).get_group("tp")
    finally:
        md.destroy_process_group()


# -- every form of every collective ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("place", PLACES)
def test_values_adjoints_and_second_derivatives(place: str, dtype: Any) -> None:
    check(place, FUNCTIONAL, dtype)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_same_on_processes(backend: str, pool: Pool) -> None:
    check("permuted", FUNCTIONAL, np.float64, partial(pool.run, backend=backend))


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("place", PLACES)
def test_the_same_over_mpi(place: str, dtype: Any, pool: Pool) -> None:
    check(place, FUNCTIONAL, dtype, partial(run_over_mpi, pool))


@pytest.mark.parametrize("case", FUNCTIONAL, ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_no_form_returns_memory_of_its_argument(case: Any, size: int) -> None:
    check_memory(case, size)


@pytest.mark.parametrize("case", FUNCTIONAL, ids=str)
def test_gradients_that_are_missing_or_lie_otherwise(case: Any) -> None:
    check_odd_gradients(case)


HERE = "rank 0, axis 'tp' of DeviceMesh(tp=4)"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x, group: psum_scatter(x, group, tiled=True),
            ShapeError,
            "psum_scatter cannot split dimension 0 of size 10 into 4 equal blocks\n"
            f"  where:    {HERE}; argument x, shape (10, 16), float32\n"
            "  expected: x.shape[0] divisible by 4, the number of ranks\n"
            "  fix:      pad dimension 0 to 12, or pass scatter_dimension=1",
        ),
        (
            lambda x, group: psum_scatter(x[:8], group),
            ShapeError,
            "psum_scatter cannot split dimension 0 of size 8 into 4 blocks of one index each\n"
            f"  where:    {HERE}; argument x, shape (8, 16), float32\n"
            "  expected: x.shape[0] equal to 4, the number of ranks\n"
            "  fix:      pass tiled=True to split it into equal blocks",
        ),
        (
            lambda x, group: psum_scatter(x, group, scatter_dimension=2),
            ShapeError,
            "psum_scatter: scatter_dimension=2 is out of range for a tensor of 2 dimensions\n"
            "  expected: a number from -2 to 1\n"
            "  fix:      pass scatter_dimension in this range",
        ),
        (
            lambda x, group: all_gather(x.sum(), group, tiled=True),
            ShapeError,
            "all_gather: axis=0 is out of range for a tensor of 0 dimensions\n"
            "  expected: an array with at least one dimension\n"
            "  fix:      pass x.reshape(1)",
        ),
        (
            lambda x, group: all_gather(x, group, axis=1.5),
            KindError,
            "all_gather: axis must be an integer\n  expected: a dim\n  found:    1.5, a float",
        ),
        (
            lambda x, group: all_gather(x, group, to="unreduced"),
            ArgumentError,
            "all_gather cannot return a result that is 'unreduced'\n"
            f"  where:    {HERE}\n"
            "  expected: to as one of 'varying', 'invarying', 'reduced'\n"
            "  fix:      omit to for a varying result, or pass to='invarying' for an invariant "
            "result",
        ),
        (
            lambda x, group: pcast(x, group, to="invarying"),
            ArgumentError,
            "pcast has no cast to 'invarying'\n"
            f"  where:    {HERE}\n"
            "  expected: invariant to 'varying' or 'reduced', varying to 'unreduced', or reduced "
            "to 'varying'\n"
            "  fix:      call psum, pmean or all_gather(..., to='invarying') for an invariant "
            "value",
        ),
        (
            lambda x, group: pcast(x, group, to="reduced", source="varying"),
            ArgumentError,
            "pcast has no cast from varying to 'reduced'\n"
            f"  where:    {HERE}\n"
            "  expected: invariant to 'varying' or 'reduced', varying to 'unreduced', or reduced "
            "to 'varying'\n"
            "  fix:      pass to='varying', to='reduced' or to='unreduced', as the type of x "
            "allows",
        ),
        (
            lambda x, group: pmax(x * 1j, group),
            DtypeError,
            "pmax cannot reduce complex64 with MAX\n"
            "  where:    argument of shape (10, 16)\n"
            "  expected: a dtype that is not complex for MAX\n"
            "  fix:      use another reduction, or convert the tensor",
        ),
    ],
)
def test_refusals(call: Any, error: type[Exception], text: str) -> None:
    """On one rank alone: nothing was sent."""

    def body(rank: int, group: Any) -> str:
        if rank:
            return ""
        with pytest.raises(error) as caught:
            call(torch.ones(10, 16), group)
        assert type(caught.value) is error
        return str(caught.value)

    assert line(body)[0] == text


def test_bool_is_counted_where_it_is_scattered() -> None:
    found = line(lambda rank, group: psum_scatter(torch.tensor([True, rank > 0]), group), size=2)
    assert [(count.dtype, int(count)) for count in found] == [(torch.int32, 2), (torch.int32, 1)]


# -- extremes -------------------------------------------------------------------------------------

EXTREMES = {"pmax": (pmax, np.maximum), "pmin": (pmin, np.minimum)}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize(("ranks", "axes"), CASES)
def test_extremes_and_their_even_split(ranks: Any, axes: list[str], name: str) -> None:
    operation, pick = EXTREMES[name]
    size = np.size(ranks)
    xs = [integers(3, 20, seed=seed) % 3 for seed in range(size)]  # ties everywhere
    y = integers(3, 20, seed=99)  # of an invariant value

    def body(rank: int, group: Any) -> Any:
        x = xs[rank].clone().requires_grad_()
        value = operation(x, group)
        return value.detach(), torch.autograd.grad(value, x, y)[0], group.ranks

    for rank, (value, back, members) in enumerate(on_ranks(ranks, axes, body)):
        wanted = pick.reduce([xs[member].numpy() for member in members])
        attained = [xs[member].numpy() == wanted for member in members]
        share = attained[members.index(rank)] / np.sum(attained, 0)
        assert np.array_equal(value.numpy(), wanted)
        np.testing.assert_allclose(back.numpy(), y.numpy() * share, rtol=1e-15)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_have_the_derivatives_of_one_device(name: str) -> None:
    """Without ties: by first and second derivatives, and by finite differences."""
    operation, size = EXTREMES[name][0], 3
    w, xs = reals(4, seed=9), [reals(4, seed=seed) for seed in range(size)]

    def whole(w: torch.Tensor, xs: list[torch.Tensor]) -> torch.Tensor:
        picked = torch.stack([torch.sin(w * x) for x in xs])
        extreme = picked.amax(0) if name == "pmax" else picked.amin(0)
        return (extreme**3 * w).sum()

    def loss_of(w: torch.Tensor, x: torch.Tensor, group: Any) -> torch.Tensor:
        return (operation(torch.sin(pvary(w, group) * x), group) ** 3 * w).sum()

    def body(rank: int, group: Any) -> Any:
        mine = w.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss_of(mine, xs[rank], group), mine, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), mine)
        moved = [loss_of(w + step, xs[rank], group).item() for step in (1e-6, -1e-6)]
        return first.detach(), second, (moved[0] - moved[1]) / 2e-6

    mine = w.clone().requires_grad_()
    (first,) = torch.autograd.grad(whole(mine, xs), mine, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), mine)
    for by_w, again, difference in line(body, size=size):
        torch.testing.assert_close(by_w, first.detach())
        torch.testing.assert_close(again, second)
        assert difference == pytest.approx(first.sum().item(), rel=1e-6)


def test_the_ranks_that_attain_an_extreme_are_counted_by_one_all_reduce() -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.ones(2, requires_grad=True)
        device_group = group.open_device_group("cpu")
        before = device_group.recorder.sequence
        value = pmax(x, group)
        between = device_group.recorder.sequence
        value.sum().backward()
        return between - before, device_group.recorder.sequence - between, x.grad.tolist()

    assert line(body, size=4) == [(1, 1, [0.25, 0.25])] * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_extremes_of_other_dtypes(dtype: torch.dtype) -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.tensor([0, rank, 1], dtype=dtype)
        return pmax(x, group), pmin(x, group)

    for largest, smallest in line(body, size=2):
        assert (largest.dtype, largest.tolist()) == (dtype, [0, 1, 1])
        assert (smallest.dtype, smallest.tolist()) == (dtype, [0, 0, 1])


def test_a_rank_that_holds_nan_attains_it() -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.tensor([float("nan"), 1.0, 2.0 * rank], requires_grad=True)
        value = pmax(x, group)
        value.nan_to_num(5.0).backward(torch.ones(3))
        return value.tolist()[1:], x.grad.tolist()[1:]

    assert line(body, size=2) == [([1.0, 2.0], [0.5, 0.0]), ([1.0, 2.0], [0.5, 1.0])]


# -- the check at debug level DETAIL ------------------------------------------------------------


@pytest.fixture
def detail() -> None:
    set_debug_level(DebugLevel.DETAIL)


def run_backward(group: Any, factor: Any) -> str | list[float]:
    """psum, then a factor of this rank's own: the gradient, or the text of the error."""
    x = torch.ones(2, requires_grad=True)
    try:
        (psum(x, group) * factor).sum().backward()
    except GradientError as error:
        return str(error)
    return x.grad.tolist()


@pytest.mark.usefixtures("detail")
def test_a_gradient_that_differs_is_rejected_on_every_rank_alike() -> None:
    texts = on_ranks(
        [[0, 1, 2], [3, 4, 5]],
        ["tp"],
        lambda rank, group: run_backward(group, [2.0, 2.0, 2.0, 4.0, 1.0, 3.0][rank]),
    )
    assert texts[:3] == [[2.0, 2.0]] * 3
    text = (
        "the gradient that reaches psum over axis 'tp' of DeviceMesh(dp=2, tp=3) is not the same on"
        " every rank\n"
        "  where:    backward of psum, gradient of shape (2,), float32\n"
        "  expected: equal gradients, since the result of psum is equal on every rank\n"
        "  found:    ranks 4-5 differ from rank 3, by up to 0.75 of its largest value\n"
        "  fix:      if you combine a result y of psum with values that vary along the axis, for "
        "example a shard of weights, cast it first: y = lax.pvary(y, axis)"
    )
    assert texts[3:] == [text] * 3
    both = line(lambda rank, group: run_backward(group, 1.0 + rank), size=2)
    assert "found:    rank 1 differs from rank 0, by up to 1 of its largest value" in both[0]


@pytest.mark.usefixtures("detail")
def test_the_advice_of_that_error_mends_it() -> None:
    def body(rank: int, group: Any) -> Any:
        x = torch.ones(2, requires_grad=True)
        (pvary(psum(x, group), group) * (rank + 1)).sum().backward()
        return x.grad.tolist()

    assert line(body, size=3) == [[6.0, 6.0]] * 3


NAN, INF = float("nan"), float("inf")


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize(
    ("first", "other", "is_rejected"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-6], False),  # rounding
        ([1.0, 2.0], [1.0, 2.01], True),
        ([0.0, 0.0], [0.0, 0.0], False),
        ([0.0, 0.0], [0.0, 1e-30], True),
        ([NAN, 2.0], [NAN, 2.0], False),
        ([NAN, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [NAN, 2.0], True),
        ([INF, 2.0], [INF, 2.0], False),
        ([INF, 2.0], [-INF, 2.0], True),
        ([NAN, NAN], [NAN, 1.0], True),
    ],
)
def test_what_counts_as_the_same_gradient(
    first: list[float], other: list[float], is_rejected: bool
) -> None:
    def body(rank: int, group: Any) -> bool:
        return isinstance(run_backward(group, torch.tensor([first, other][rank])), str)

    assert line(body, size=2) == [is_rejected] * 2


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize(
    "x", [torch.ones(0), torch.ones(()), torch.ones(2, dtype=torch.complex64), torch.ones(1).half()]
)
def test_the_check_takes_every_shape_and_dtype(x: torch.Tensor) -> None:
    def body(rank: int, group: Any) -> Any:
        mine = x.clone().requires_grad_()
        psum(mine, group).abs().sum().backward()
        return mine.grad.real.tolist()

    assert line(body, size=2) == [torch.ones_like(x).real.tolist()] * 2


@pytest.mark.usefixtures("detail")
def test_a_correct_program_passes_the_check_in_both_backwards() -> None:
    test_gradients_are_those_of_the_whole_and_its_finite_differences()
    test_double_backward()


@pytest.mark.usefixtures("detail")
@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (partial(all_gather, to="invarying"), "all_gather"),
        (pmax, "pmax"),
        (pmin, "pmin"),
    ],
)
def test_every_invariant_result_is_checked(operation: Any, name: str) -> None:
    def body(rank: int, group: Any) -> str:
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(GradientError) as caught:
            (operation(x, group) * (rank + 1)).sum().backward()
        return str(caught.value).partition("\n")[0]

    assert (
        line(body, size=2)
        == [
            f"the gradient that reaches {name} over axis 'tp' of DeviceMesh(tp=2) is not the same "
            "on every rank"
        ]
        * 2
    )


@pytest.mark.usefixtures("detail")
def test_transforms_are_not_checked() -> None:
    def body(rank: int, group: Any) -> Any:
        return torch.func.grad(lambda x: psum(x, group) * rank)(torch.ones(())).item()

    assert line(body, size=2) == [0.0, 1.0]

"""Promises about collectives that are not about their values alone: precision, modes, order,
futures."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.dtypes import DTYPES
from tests.operations.cases import BACKENDS, complaint, finish_operation, perform
from tests.operations.plans import OPERATIONS, Case
from tests.pool import Pool

ASYNC = [name for name, operation in OPERATIONS.items() if operation.takes_async]


NARROW = (torch.float16, torch.bfloat16)
COUNTS = (7, 1 << 17, (1 << 19) + 12_345)
"""Small, of one host's slots, and so large that parts are exchanged."""


def rounded_once(parts: list[torch.Tensor], op: Any, factors: list[float]) -> torch.Tensor:
    """The bounds of what float32 makes of the parts, in any order, rounded once."""
    dtype, wide = parts[0].dtype, [part.double() for part in parts]
    if factors:
        wide = [(part * factor).double() for part, factor in zip(parts, factors, strict=True)]
    stacked = torch.stack(wide)
    total = stacked.prod(0) if op == md.ReduceOp.PRODUCT else stacked.sum(0)
    size = stacked.abs().prod(0) if op == md.ReduceOp.PRODUCT else stacked.abs().sum(0)
    if op == md.ReduceOp.AVG:
        total, size = total / len(parts), size / len(parts)
    slack = size * len(parts) * 2.0**-23
    return torch.stack([(total - slack).to(dtype), (total + slack).to(dtype)])


def narrow_sums() -> list[str]:
    """What is not the sum of all members' numbers, made in float32 and rounded once."""
    rank, size = md.get_rank(), md.get_world_size()
    wrong = []

    @cache  # for every op
    def part(dtype: torch.dtype, count: int, member: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(member)
        x = torch.randn(count, generator=generator).to(dtype)
        if dtype is torch.float16 and size > 2:  # the sum is no larger than its parts
            x[:5] = torch.tensor([40000.0, 40000.0, -40000.0, 0.0, 0.0])[member]
        return x

    def compare(dtype: torch.dtype, count: int, op: Any, by: list[float]) -> None:
        parts = [part(dtype, count, member) for member in range(size)]
        mine, (low, high) = parts[rank], rounded_once(parts, op, by)

        def check(operation: str, x: torch.Tensor, start: int = 0) -> None:
            least, most = (end[start : start + len(x)] for end in (low, high))
            bad = int((~((least <= x) & (x <= most))).sum())
            if bad:
                wrong.append(f"{operation} of {count} {dtype}, {op}: {bad} are not right")

        md.all_reduce(x := mine.clone(), op)
        check("all_reduce", x)
        work = md.all_reduce(y := mine.clone(), op, async_op=True)
        md.barrier()  # another collective meanwhile
        assert work is not None and work.wait()
        if not torch.equal(x, y):
            wrong.append(f"all_reduce in flight of {count} {dtype}, {op}: other bits")
        xs = [mine[:3].clone(), mine[3:].clone()]
        md.all_reduce_coalesced(xs, op)
        check("all_reduce_coalesced", torch.cat(xs))
        md.reduce(x := mine.clone(), size - 1, op)
        check("reduce", x if rank == size - 1 else low)
        each = count // size
        md.reduce_scatter_tensor(x := mine.new_empty(each), mine[: each * size], op)
        check("reduce_scatter_tensor", x, each * rank)
        md.reduce_scatter(x, list(mine[: each * size].split(each)), op)
        check("reduce_scatter", x, each * rank)

    factors = [0.5 + member / 2 for member in range(size)]
    ops = [(getattr(md.ReduceOp, name), []) for name in ("SUM", "AVG", "PRODUCT")]
    ops.append((md.ReduceOp.premul_sum(factors[rank]), factors))
    for dtype, count in product(NARROW, COUNTS):
        for op, by in ops[: 4 if count == COUNTS[0] else 2]:
            compare(dtype, count, op, by)
    return wrong


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_floats_are_added_in_float32_and_rounded_once(
    backend: str, size: int, pool: Pool
) -> None:
    assert BACKENDS[backend](pool, narrow_sums, size) == [[]] * size


def cases_of_each(**more: Any) -> list[Case]:
    """One plain case for each collective."""
    cases = []
    for name, operation in OPERATIONS.items():
        settings: dict[str, Any] = {"size": 3, "form": operation.forms[0], **more}
        if operation.reduces:
            settings["op"] = "SUM"
        if operation.root:
            settings["root"] = 1
        cases.append(Case(name, **settings))
    return cases


def in_inference_mode(cases: list[Case]) -> list[Any]:
    with torch.inference_mode():
        return [perform(case) for case in cases]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_in_inference_mode(backend: str, pool: Pool) -> None:
    cases = [*cases_of_each(), *cases_of_each(layout="strided")]
    found = BACKENDS[backend](pool, in_inference_mode, 3, cases)
    for number, case in enumerate(cases):
        assert not complaint(case, [one[number] for one in found]), repr(case)


def without_gradients(cases: list[Case]) -> list[Any]:
    with torch.no_grad():
        return [perform(case) for case in cases]


@pytest.mark.parametrize("layout", ["strided", "turned"])
@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_takes_non_contiguous_arrays(
    backend: str, library: str, layout: str, pool: Pool
) -> None:
    cases = cases_of_each(shape=(2, 3), layout=layout, library=library)
    found = BACKENDS[backend](pool, without_gradients, 3, cases)
    for number, case in enumerate(cases):
        assert not complaint(case, [one[number] for one in found]), repr(case)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_takes_tensors_without_elements(backend: str, pool: Pool) -> None:
    cases = cases_of_each(shape=(0, 2))
    found = BACKENDS[backend](pool, without_gradients, 3, cases)
    for number, case in enumerate(cases):
        assert not complaint(case, [one[number] for one in found]), repr(case)


def of_one_element() -> list[Any]:
    """One element counts as contiguous whatever its stride."""

    def one(value: int) -> torch.Tensor:
        return torch.full((4,), value)[::3][:1]

    rank = md.get_rank()
    lists = [[one(0), one(0)], [one(0), one(0)]]
    md.all_gather_coalesced(lists, [one(rank), one(5)])
    return [[int(x) for x in each] for each in lists]


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_of_one_element_are_gathered(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, of_one_element, 2) == [[[0, 5], [1, 5]]] * 2


def premultiplied_inference_tensors() -> list[Any]:
    with torch.inference_mode():
        x, y = torch.ones(2), torch.ones(1)
    twice = md.ReduceOp.premul_sum(2.0)
    md.all_reduce(x, op=twice)
    md.all_reduce_coalesced([y], op=twice)
    return [x.tolist(), y.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_tensors_are_premultiplied_outside_their_mode(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, premultiplied_inference_tensors, 2)
    assert found == [[[4.0, 4.0], [4.0]]] * 2


def every_work() -> dict[str, md.Work]:
    """One Work of every collective that gives one, on two ranks."""
    rank = md.get_rank()
    x = torch.ones(2)

    def fresh() -> list[torch.Tensor]:
        return [torch.zeros(2) for _ in range(2)]

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: md.all_reduce(x.clone(), async_op=True),
        "all_reduce_coalesced": lambda: md.all_reduce_coalesced(fresh(), async_op=True),
        "reduce": lambda: md.reduce(x.clone(), 0, async_op=True),
        "broadcast": lambda: md.broadcast(x.clone(), 0, async_op=True),
        "all_gather": lambda: md.all_gather(fresh(), x, async_op=True),
        "all_gather_into_tensor": lambda: md.all_gather_into_tensor(
            torch.zeros(4), x, async_op=True
        ),
        "all_gather_single": lambda: md.all_gather_single(torch.zeros(4), x, async_op=True),
        "all_gather_coalesced": lambda: md.all_gather_coalesced(
            [fresh(), fresh()], [x, x], async_op=True
        ),
        "gather": lambda: md.gather(x, None if rank else fresh(), 0, async_op=True),
        "scatter": lambda: md.scatter(torch.zeros(2), None if rank else [x, x], 0, async_op=True),
        "reduce_scatter": lambda: md.reduce_scatter(torch.zeros(2), [x, x], async_op=True),
        "reduce_scatter_tensor": lambda: md.reduce_scatter_tensor(
            torch.zeros(2), torch.ones(4), async_op=True
        ),
        "reduce_scatter_single": lambda: md.reduce_scatter_single(
            torch.zeros(2), torch.ones(4), async_op=True
        ),
        "all_to_all": lambda: md.all_to_all(fresh(), [x, x], async_op=True),
        "all_to_all_single": lambda: md.all_to_all_single(
            torch.zeros(4), torch.ones(4), async_op=True
        ),
    }
    assert sorted(calls) == sorted(ASYNC)
    return {operation: call() for operation, call in calls.items()}


def behind_a_barrier() -> list[str]:
    works = every_work()
    md.barrier()
    # Another thread, or MPI, may be about to note that one is done.
    end = time.monotonic() + 5
    while time.monotonic() < end and not all(work.is_completed() for work in works.values()):
        time.sleep(0.001)
    return [operation for operation, work in works.items() if not work.is_completed()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_barrier_is_behind_every_earlier_collective(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, behind_a_barrier, 2) == [[], []]


def barrier_in_vain(way: str) -> str:
    """Rank 1 does not come; the time is the group's or the call's own."""
    group = md.new_group([0, 1], timeout=timedelta(seconds=0.5 if way == "group" else 60))
    if md.get_rank() == 1:
        time.sleep(1.5)
        return ""
    limit = timedelta(seconds=0.5) if way == "argument" else None
    with pytest.raises(md.CollectiveTimeoutError) as caught:
        md.barrier(group, timeout=limit)
    return str(caught.value)


@pytest.mark.parametrize("way", ["group", "argument"])
def test_a_barrier_that_a_member_misses_names_it(way: str, pool: Pool) -> None:
    text = pool.run(barrier_in_vain, 2, way)[0]
    assert text.startswith("barrier on ")
    assert "rank 1" in text


def futures() -> dict[str, Any]:
    """What each collective's future holds, and what a chained callback made of it."""
    found: dict[str, Any] = {}
    for operation, work in every_work().items():
        future = work.get_future()
        counted = future.then(lambda done: len(done.value()))
        value = future.wait()
        found[operation] = (type(value).__name__, counted.wait() == len(value), future.done())
        finish_operation(Case(operation, 2), work)
        assert work.exception() is None
        with pytest.raises(RuntimeError):
            work.source_rank()
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_has_a_future_that_chains(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, futures, 2) == [dict.fromkeys(ASYNC, ("list", True, True))] * 2


def rooted_results() -> list[Any]:
    x = torch.full((2,), md.get_rank() + 1.0)
    work = md.broadcast(x, src=1, async_op=True)
    first = work.get_future().then(lambda done: done.value()[0].tolist()).wait()
    y = torch.full((2,), md.get_rank() + 1.0)
    work = md.reduce(y, dst=0, async_op=True)
    work.wait()
    parts = [torch.empty(2), torch.empty(2)] if md.get_rank() == 0 else None
    gathered = md.gather(y, parts, dst=0, async_op=True).result()
    own = [id(one) for one in parts or [y]]
    return [first, work.result()[0] is y, [id(one) for one in gathered] == own]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rooted_collectives_have_their_tensor_as_result_on_every_rank(
    backend: str, pool: Pool
) -> None:
    assert BACKENDS[backend](pool, rooted_results, 2) == [[[2.0, 2.0], True, True]] * 2


def sparse() -> str:
    x = torch.eye(3).to_sparse()
    with pytest.raises(md.MeshdistError) as caught:
        md.all_reduce(x)
    md.barrier()
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_tensors_are_rejected(backend: str, pool: Pool) -> None:
    for text in BACKENDS[backend](pool, sparse, 2):
        assert text.startswith("all_reduce cannot take a sparse tensor as tensor")


def read_only() -> list[str]:
    told = []
    x = np.ones(2)
    x.flags.writeable = False
    with pytest.raises(md.ArgumentError) as caught:
        md.all_reduce(x)
    told.append(str(caught.value))
    out = np.zeros(2 * md.get_world_size())
    md.all_gather_into_tensor(out, x)  # which only reads it
    told.append(str(out.tolist()))
    return told


@pytest.mark.parametrize("backend", BACKENDS)
def test_read_only_arrays_are_read_and_never_written(backend: str, pool: Pool) -> None:
    for rejected, out in BACKENDS[backend](pool, read_only, 2):
        assert "read-only" in rejected
        assert out == "[1.0, 1.0, 1.0, 1.0]"


def in_place() -> list[Any]:
    rank, size = md.get_rank(), md.get_world_size()
    x = torch.arange(1000 * size) + 10_000 * rank
    md.all_to_all_single(x, x)
    parts = list((torch.arange(2 * size) + 100 * rank).split(2))
    mine = parts[size - 1]  # on the source the last member's part is where its own comes to
    md.scatter(mine, parts if rank == 0 else None)
    whole = torch.arange(2 * size) + 100 * rank
    md.all_gather_into_tensor(whole, whole[-2:])  # the last member's place, on all of them
    return [x.tolist(), mine.tolist(), whole.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_sent_may_lie_where_the_result_comes_to(backend: str, pool: Pool) -> None:
    for rank, (exchanged, scattered, gathered) in enumerate(BACKENDS[backend](pool, in_place, 3)):
        expected = np.arange(3000).reshape(3, 1000)[rank] + 10_000 * np.arange(3)[:, None]
        assert exchanged == expected.ravel().tolist()
        assert scattered == [2 * rank, 2 * rank + 1]
        assert gathered == [4, 5, 104, 105, 204, 205]


def roots_of_other_kinds() -> list[float]:
    found = []
    for root in (np.int64(1), torch.tensor(1)):
        x = torch.full((1,), float(md.get_rank()))
        md.broadcast(x, root)
        md.broadcast(x, group_src=root)
        out = torch.zeros(2)
        md.all_to_all_single(out, torch.ones(2), np.array([1, 1]), [np.int64(1), np.int64(1)])
        found += [x.item(), *out.tolist()]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_of_any_library_name_ranks_and_splits(backend: str, pool: Pool) -> None:
    assert BACKENDS[backend](pool, roots_of_other_kinds, 2) == [[1.0] * 6] * 2


FLOATS = [one for one in DTYPES if one.is_floating_point]


def extremes_with_nan() -> list[str]:
    """What gave another thing than NaN where a member has one, or than the extreme elsewhere."""
    rank, size = md.get_rank(), md.get_world_size()
    wrong = []

    def check(name: str, x: torch.Tensor, best: float) -> None:
        first, *rest = x.float().tolist()
        if first == first or rest != [best] * len(rest):
            wrong.append(f"{name}: {first}, {rest[:3]}")

    for dtype, op, holder in product(FLOATS, (md.ReduceOp.MIN, md.ReduceOp.MAX), range(size)):
        best = 1.0 if op == md.ReduceOp.MIN else 2.0 ** (size - 1)

        def mine(*shape: int, dtype: Any = dtype, holder: int = holder) -> torch.Tensor:
            x = torch.full(shape, 2.0**rank)
            if rank == holder:
                x[..., 0] = float("nan")
                x[..., 0].copysign_(torch.tensor(1.0 if holder % 2 else -1.0))
            return x.to(dtype)

        for count in (2, 1 << 14):
            x = mine(count)
            md.all_reduce(x, op)
            check(f"all_reduce of {count} {dtype}, {op}, of {holder}", x, best)
        work = md.all_reduce(x := mine(2), op, async_op=True)
        assert work is not None and work.wait()
        check(f"all_reduce in flight of {dtype}, {op}, of {holder}", x, best)
        xs = [mine(2), mine(3)]
        md.all_reduce_coalesced(xs, op)
        for x in xs:
            check(f"all_reduce_coalesced of {dtype}, {op}, of {holder}", x, best)
        for root in {0, size - 1}:
            md.reduce(x := mine(2), root, op)
            if rank == root:
                check(f"reduce of {dtype}, {op}, of {holder}", x, best)
        md.reduce_scatter_tensor(x := mine(3), mine(size, 3), op)
        check(f"reduce_scatter_tensor of {dtype}, {op}, of {holder}", x, best)
        md.reduce_scatter(x := mine(3), list(mine(size, 3)), op)
        check(f"reduce_scatter of {dtype}, {op}, of {holder}", x, best)
    return wrong


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_smallest_and_largest_are_nan_whichever_member_has_one(
    backend: str, size: int, pool: Pool
) -> None:
    assert BACKENDS[backend](pool, extremes_with_nan, size) == [[]] * size


def extremes_given_up() -> list[Any]:
    """The numbers of a MIN that never came to its end, as the program finds them."""
    group = md.new_group([0, 1])
    x = torch.tensor([1.5, -2.5, 0.0, 3e38])
    md.all_reduce(x.clone(), md.ReduceOp.MIN, group)
    if md.get_rank() == 1:
        md.barrier()
        return x.tolist()
    work = md.all_reduce(x, md.ReduceOp.MIN, group, async_op=True)
    assert work is not None
    group.abort("enough")
    with pytest.raises(md.AbortedError):
        work.wait()
    md.barrier()
    return x.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_floats_of_a_failed_min_are_floats(backend: str, pool: Pool) -> None:
    for found in BACKENDS[backend](pool, extremes_given_up, 2):
        np.testing.assert_allclose(found, [1.5, -2.5, 0.0, 3e38])

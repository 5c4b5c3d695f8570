"""Collectives on several tensors per process, on simulated ranks and over Gloo, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from tests.pool import Failure, Pool

COUNT = 3


def values(rank: int, shape: tuple[int, ...] = (2, 2)) -> list[np.ndarray]:
    """Small integers, different on each rank and in each place of a list."""
    draw = np.random.default_rng(rank)
    return [draw.integers(1, 6, shape).astype(np.float32) for _ in range(COUNT)]


def everyones(size: int) -> np.ndarray:
    return np.stack([values(rank) for rank in range(size)])  # [rank, place, 2, 2]


def tensors() -> list[Any]:
    """A plain tensor, a transposed one and an array of NumPy."""
    first, second, third = values(md.get_rank())
    return [torch.from_numpy(first), torch.from_numpy(second.T.copy()).t(), third]


def plain(found: list[Any]) -> list[Any]:
    return [x.tolist() for x in found]


def sixteen() -> list[float]:
    x = [torch.ones(2) for _ in range(8)]
    assert md.all_reduce_multigpu(x) is None
    return sorted({value for one in x for value in one.tolist()})


def test_two_ranks_with_eight_ones_each_make_sixteen_everywhere(on_ranks) -> None:
    assert on_ranks(sixteen, 2) == [[16.0], [16.0]]


def reduced_everywhere(op: Any, is_async: bool) -> list[Any]:
    x = tensors()
    work = md.all_reduce_multigpu(x, op=op, async_op=is_async)
    if is_async:
        assert work.wait() and work.result() == x
    return plain(x)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("op", "oracle"),
    [("SUM", np.sum), ("PRODUCT", np.prod), ("MIN", np.min), ("MAX", np.max), ("AVG", np.mean)],
)
def test_all_reduce(on_ranks, op: str, oracle: Any, size: int, is_async: bool) -> None:
    expected = oracle(everyones(size), axis=(0, 1))
    for found in on_ranks(reduced_everywhere, size, getattr(md.ReduceOp, op), is_async):
        for x in found:
            np.testing.assert_allclose(x, expected, rtol=1e-6)


def averaged() -> list[Any]:
    x = [torch.tensor([-1, 1 + place, 2**62]) for place in range(2)]
    md.all_reduce_multigpu(x, op=md.ReduceOp.AVG)
    y = [torch.tensor([-2, 7]), torch.tensor([-3, 0])]
    md.reduce_multigpu(y, 1, op=md.ReduceOp.AVG, dst_tensor=1)
    return [x, y]


def test_a_mean_of_integers_is_rounded_once(on_ranks) -> None:
    for rank, ((x, same), y) in enumerate(on_ranks(averaged, 2)):
        assert x.tolist() == same.tolist() == [-1, 1, 0]  # 2^62 four times is 0: it wraps
        assert [one.tolist() for one in y] == [[-2, 7], [-2, 3] if rank else [-3, 0]]


def premultiplied() -> list[Any]:
    x = tensors()
    md.all_reduce_multigpu(x, op=md.ReduceOp.premul_sum(md.get_rank() + 1.0))
    return plain(x)


def test_all_reduce_by_a_factor_of_each_rank(on_ranks) -> None:
    parts = everyones(2)
    expected = (parts[0] + 2 * parts[1]).sum(0).tolist()
    assert on_ranks(premultiplied, 2) == [[expected] * COUNT] * 2


def reduced_at_one(root: int, place: int) -> list[Any]:
    x = tensors()
    assert md.reduce_multigpu(x, root, dst_tensor=place) is None
    return plain(x)


@pytest.mark.parametrize(("root", "place"), [(0, 0), (1, 1), (2, 2)])
def test_reduce_writes_one_tensor_of_the_destination_alone(on_ranks, root: int, place: int) -> None:
    for rank, found in enumerate(on_ranks(reduced_at_one, 3, root, place)):
        expected = plain(values(rank))
        if rank == root:
            expected[place] = everyones(3).sum((0, 1)).tolist()
        assert found == expected


def broadcasted(root: int, place: int) -> list[Any]:
    x = tensors()
    assert md.broadcast_multigpu(x, root, src_tensor=place) is None
    return plain(x)


@pytest.mark.parametrize(("root", "place"), [(0, 0), (1, 1), (2, 2)])
def test_broadcast(on_ranks, root: int, place: int) -> None:
    expected = values(root)[place].tolist()
    assert on_ranks(broadcasted, 3, root, place) == [[expected] * COUNT] * 3


def results_of_rooted() -> list[bool]:
    found = []
    for call in (md.reduce_multigpu, md.broadcast_multigpu):
        x = tensors()
        found.append(call(x, 0, async_op=True).result() == x)
    return found


def test_a_work_has_all_tensors_of_its_list(on_ranks) -> None:
    assert on_ranks(results_of_rooted, 2) == [[True, True]] * 2


def gathered(is_async: bool) -> list[Any]:
    x = tensors()
    count = COUNT * md.get_world_size()
    lists = [[torch.zeros(2, 2) for _ in range(count)] for _ in range(COUNT)]
    lists[1][2] = np.zeros((2, 4), dtype=np.float32)[:, ::2]
    work = md.all_gather_multigpu(lists, x, async_op=is_async)
    if is_async:
        work.wait()
    assert plain(x) == plain(values(md.get_rank()))
    return [plain(each) for each in lists]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_gather_lays_rank_after_rank(on_ranks, size: int, is_async: bool) -> None:
    expected = everyones(size).reshape(-1, 2, 2).tolist()
    assert on_ranks(gathered, size, is_async) == [[expected] * COUNT] * size


def on_an_axis() -> list[float]:
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = [torch.tensor([float(md.get_rank())]) for _ in range(2)]
    md.all_reduce_multigpu(x, group=mesh["tp"])
    y = [torch.tensor([float(md.get_rank())]) for _ in range(2)]
    md.broadcast_multigpu(y, md.get_rank() % 2 + 2, mesh["dp"], src_tensor=1)
    return [x[1].item(), y[0].item()]


def test_on_a_mesh_axis(on_ranks) -> None:
    assert on_ranks(on_an_axis, 4) == [[2.0, 2.0], [2.0, 3.0], [10.0, 2.0], [10.0, 3.0]]


CALLS = {
    "all_reduce_multigpu": lambda x: md.all_reduce_multigpu(x),
    "reduce_multigpu": lambda x: md.reduce_multigpu(x, 0),
    "broadcast_multigpu": lambda x: md.broadcast_multigpu(x, 0),
    "all_gather_multigpu": lambda x: md.all_gather_multigpu(
        [[torch.zeros(2) for _ in range(2 * len(x))] for _ in x], x
    ),
}


def unequal_lengths(operation: str) -> None:
    CALLS[operation]([torch.ones(2) for _ in range(2 + md.get_rank())])


@pytest.mark.parametrize("operation", CALLS)
def test_lists_of_other_lengths_are_one_error_on_all_ranks(pool: Pool, operation: str) -> None:
    two, three = (f"[{', '.join(['(2,) float32'] * n)}]" for n in (2, 3))
    for outcome in pool.outcomes(unequal_lengths, 2, operation):
        assert isinstance(outcome, Failure)
        assert isinstance(outcome.exception, md.MismatchError)
        text = str(outcome.exception)
        assert f"rank 0: {operation}({two}" in text
        assert f"rank 1: {operation}({three}" in text


@pytest.mark.parametrize("operation", CALLS)
def test_lists_of_other_lengths_on_simulated_ranks(operation: str) -> None:
    def program() -> list[str]:
        x = [torch.ones(2) for _ in range(2 + md.get_rank())]
        with pytest.raises(md.MismatchError) as caught:
            CALLS[operation](x)
        assert plain(x) == [[1.0, 1.0]] * len(x)
        return str(caught.value)

    two, three = (f"[{', '.join(['(2,) float32'] * n)}]" for n in (2, 3))
    for text in md.simulate(program, 2):
        assert "no data was moved" in text
        assert f"rank 0: {operation}({two}" in text
        assert f"rank 1: {operation}({three}" in text


ONES = (torch.ones(2), torch.ones(2))


def ones() -> list[torch.Tensor]:
    return [one.clone() for one in ONES]


ALIKE: dict[str, tuple[Any, Any]] = {  # what a backend is given looks the same
    "operations": (
        lambda: md.all_gather_coalesced([ones(), ones()], [*ONES]),
        lambda: md.all_gather_into_tensor(torch.zeros(32).byte(), torch.ones(16).byte()),
    ),
    "lists": (
        lambda: CALLS["all_gather_multigpu"]([*ONES]),
        lambda: md.all_gather_coalesced([ones(), ones()], [*ONES]),
    ),
    "dtypes": (
        lambda: CALLS["all_gather_multigpu"]([*ONES]),
        lambda: md.all_gather_multigpu(
            [[x.int() for x in 2 * ONES] for _ in "ab"], [x.int() for x in ONES]
        ),
    ),
    "sizes": (
        lambda: md.all_gather_coalesced(
            [[torch.ones(1), torch.ones(3)] for _ in range(2)], [torch.ones(1), torch.ones(3)]
        ),
        lambda: md.all_gather_coalesced([ones(), ones()], [*ONES]),
    ),
    "lengths": (
        lambda: md.all_reduce_multigpu([torch.ones(2)]),
        lambda: md.all_reduce_multigpu([*ONES]),
    ),
    "one and a list": (
        lambda: md.all_reduce(torch.ones(2)),
        lambda: md.all_reduce_multigpu([*ONES]),
    ),
    "roots": (
        lambda: md.broadcast_multigpu([*ONES], 0),
        lambda: md.broadcast(torch.ones(2), 0),
    ),
    "objects": (
        lambda: md.all_gather_object([None, None], "a"),
        lambda: md.all_gather_into_tensor(torch.zeros(4).long(), torch.ones(2).long()),
    ),
    "two of objects": (
        lambda: md.all_gather_object([None, None], "a"),
        lambda: md.gather_object("a", [None, None] if md.get_rank() == 0 else None, 0),
    ),
    "factors": (
        lambda: md.all_reduce(torch.ones(2), md.ReduceOp.premul_sum(2.0)),
        lambda: md.all_reduce(torch.ones(2)),
    ),
    "ops of what is gathered": (
        lambda: md.all_reduce(torch.ones(2).to(torch.float8_e5m2), md.ReduceOp.MAX),
        lambda: md.all_reduce(torch.ones(2).to(torch.float8_e5m2), md.ReduceOp.MIN),
    ),
    "memory": (
        lambda: md.shared_empty((2,)),
        lambda: md.all_gather_into_tensor(torch.zeros(2).long(), torch.tensor([8])),
    ),
}


def differing(what: str, is_late: bool = False) -> str:
    def call() -> None:
        ALIKE[what][md.get_rank()]()
        if is_late:
            md.destroy_process_group()

    md.barrier()
    with pytest.raises(md.MismatchError) as caught:
        call()
    return str(caught.value)


def check_differing(texts: list[str]) -> None:
    for text in texts:
        assert "collective mismatch: ranks made different calls as call" in text
        assert "rank 0: " in text and "rank 1: " in text


@pytest.mark.parametrize("what", ALIKE)
def test_calls_of_which_a_backend_sees_the_same_are_told_apart(pool: Pool, what: str) -> None:
    check_differing(pool.run(differing, 2, what, backend="shm"))


@pytest.mark.parametrize("what", ALIKE)
def test_calls_of_which_simulated_ranks_see_the_same_are_told_apart(what: str) -> None:
    check_differing(md.simulate(differing, 2, args=(what,)))


def lists_in_turns() -> list[float]:
    """Start calls of lists on two groups, each rank in its own order, before any is waited for."""
    rank, groups, works = md.get_rank(), [md.new_group() for _ in range(2)], []
    for group in groups if rank == 0 else reversed(groups):
        xs = [torch.ones(1), torch.ones(2)]
        lists = [[torch.empty_like(x) for x in xs] for _ in range(md.get_world_size())]
        works.append(md.all_gather_coalesced(lists, xs, group, async_op=True))
        for operation in (md.all_reduce_multigpu, md.broadcast_multigpu):
            given = [torch.ones(3), torch.ones(3)]
            more = {"src": 0} if operation is md.broadcast_multigpu else {}
            works.append(operation(given, group=group, async_op=True, **more))
    for work in works:
        work.wait()
    return [x[0].item() for each in lists for x in each]


@pytest.mark.parametrize("backend", ["gloo"])
def test_lists_between_hosts_start_without_the_others(pool: Pool, backend: str) -> None:
    for found in pool.run(lists_in_turns, 3, backend=backend, hosts="ABA"):
        assert found == [1.0] * 6


def rejected() -> list[str]:
    x, y = torch.ones(2), torch.ones(3)
    calls = [
        lambda: md.all_reduce_multigpu([]),
        lambda: md.all_reduce_multigpu(x),  # type: ignore[arg-type]
        lambda: md.all_reduce_multigpu([x, y]),
        lambda: md.all_reduce_multigpu([x, x.int()]),
        lambda: md.all_reduce_multigpu([x.bool()], op=md.ReduceOp.AVG),
        lambda: md.reduce_multigpu([x, x], 0, dst_tensor=2),
        lambda: md.broadcast_multigpu([x], 0, src_tensor="a"),  # type: ignore[arg-type]
        lambda: md.broadcast_multigpu([x], 5),
        lambda: md.all_gather_multigpu([[x, x]], [x, x]),
        lambda: md.all_gather_multigpu([[x]], [x]),
        lambda: md.all_gather_multigpu([[x, y]], [x]),
    ]
    found = []
    for call in calls:
        with pytest.raises((md.ArgumentError, md.KindError)) as caught:
            call()
        found.append(str(caught.value))
    md.barrier()  # nothing was sent, nothing is broken
    return found


def test_wrong_arguments_are_rejected_before_anything_is_sent(on_ranks) -> None:
    for found in on_ranks(rejected, 2):
        assert [text.splitlines()[0] for text in found] == [
            "all_reduce_multigpu: tensor_list has 0 entries",
            "all_reduce_multigpu: tensor_list must be a list",
            "all_reduce_multigpu: an entry of tensor_list and tensor_list[0] have different "
            "numbers of elements",
            "all_reduce_multigpu has arguments of different dtypes",
            "all_reduce_multigpu cannot reduce bool with AVG",
            "reduce_multigpu: dst_tensor is 2",
            "broadcast_multigpu: src_tensor must be an integer",
            "broadcast_multigpu: src=5 is not a member of the world",
            "all_gather_multigpu: output_tensor_lists has 1 entry",
            "all_gather_multigpu: an entry of output_tensor_lists has 1 entry",
            "all_gather_multigpu: an entry of output_tensor_lists and input_tensor_list[0] have "
            "different numbers of elements",
        ]
        assert "found:    an entry of tensor_list (3,), tensor_list[0] (2,)" in found[2]
        assert "found:    an entry of tensor_list int32, tensor_list[0] float32" in found[3]
        assert found[5].endswith("tensor_list\n  expected: an integer from 0 to 1")


def test_a_tensor_is_a_list_of_itself() -> None:
    def program() -> list[float]:
        x = torch.ones(2)
        md.all_reduce_coalesced(x)
        return x.tolist()

    assert md.simulate(program, 2) == [[2.0, 2.0]] * 2

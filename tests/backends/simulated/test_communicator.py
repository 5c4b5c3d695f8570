"""The backend of simulated ranks: every collective against NumPy, and the states of requests."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from meshdist import simulate
from meshdist.errors import DtypeError, MismatchError
from meshdist.reduce_ops import ReduceOp
from tests.backends.direct import Direct
from tests.backends.samples import (
    DTYPES,
    OPS,
    T,
    bits,
    draw,
    legal_ops,
    open_group,
    reduced_in_numpy,
)
from tests.inner import (
    COMPOSED,
    BackendAborted,
    BackendFailure,
    Chain,
    Communicator,
    Opening,
    OperationArgs,
    Request,
    all_reduce_by_gathering,
    get_backend,
    get_world,
)

SIZES = (1, 2, 3, 4)
COMPLEX_HALF = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

# ---- every collective, every dtype ---------------------------------------------------------------

Tensors = list[torch.Tensor]
Inputs = Sequence[Tensors]
"""What each member brings."""


@dataclass(frozen=True)
class OperationSpec:
    """One collective of a communicator.

    Args:
        counts: how many elements a member's inputs have: of (member, size of the group, whether
            sizes are to differ).
        run: starts the collective on a group with a member's own copies of all inputs, its own
            among them; returns what was started, and the tensors that hold the result.
        expect: the result of each member, as bytes, of all inputs.
        can_differ: whether sizes may differ.
        reduces: whether it takes an op.
    """

    counts: Callable[[int, int, bool], list[int]]
    run: Callable[[Any, Tensors, Inputs, Any], tuple[Any, Tensors]]
    expect: Callable[[Inputs, str], list[list[bytes]]]
    can_differ: bool = False
    reduces: bool = False


def one(member: int, size: int, uneven: bool) -> list[int]:
    return [2 * size]


def own_count(member: int, size: int, uneven: bool) -> list[int]:
    return [(2 * member + 1) % 4 if uneven else 3]


def by_receiver(member: int, size: int, uneven: bool) -> list[int]:
    return [(2 * j + 3) % 5 if uneven else 2 for j in range(size)]


def by_pair(member: int, size: int, uneven: bool) -> list[int]:
    return [(2 * member + j) % 4 if uneven else 2 for j in range(size)]


def like(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Fresh tensors of as many elements, none of which is right yet."""
    return [
        torch.full((x.numel() * x.itemsize,), 7, dtype=torch.uint8).view(x.dtype) for x in tensors
    ]


def root_of(group: Any) -> int:
    return group.size // 2


def all_gather(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    (output,) = like([torch.cat([x for (x,) in inputs])])
    return Direct(group).all_gather(output, mine[0]), [output]


def all_gather_list(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    outputs = like([x for (x,) in inputs])
    return Direct(group).all_gather_list(outputs, mine[0]), outputs


def gather(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    outputs = like([x for (x,) in inputs]) if group.rank == root_of(group) else []
    return Direct(group).gather(outputs, mine[0], root_of(group)), outputs


def scatter(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    root = root_of(group)
    output = like([inputs[root][group.rank]])
    return Direct(group).scatter(output[0], mine if group.rank == root else [], root), output


def reduce_scatter(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    output = like([mine[0][: mine[0].numel() // group.size]])
    return Direct(group).reduce_scatter(output[0], mine[0], op), output


def reduce_scatter_list(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    output = like([mine[group.rank]])
    return Direct(group).reduce_scatter_list(output[0], mine, op), output


def all_to_all(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    outputs = like([theirs[group.rank] for theirs in inputs])
    return Direct(group).all_to_all(outputs, mine), outputs


def all_to_all_single(group: Any, mine: Tensors, inputs: Inputs, op: Any) -> tuple[Any, Tensors]:
    outputs = [theirs[group.rank] for theirs in inputs]
    taken, given = [x.numel() for x in outputs], [x.numel() for x in mine]
    (output,) = like([torch.cat(outputs)])
    return Direct(group).all_to_all_single(output, torch.cat(mine), taken, given), [output]


def columns(inputs: Inputs) -> list[Tensors]:
    return [list(column) for column in zip(*inputs, strict=True)]


def all_reduced(inputs: Inputs, op: str) -> list[list[bytes]]:
    return [[bits(reduced_in_numpy(column, op)) for column in columns(inputs)]] * len(inputs)


def reduced_at_root(inputs: Inputs, op: str) -> list[list[bytes]]:
    root, whole = len(inputs) // 2, bits(reduced_in_numpy([x for (x,) in inputs], op))
    return [[whole if member == root else bits(x)] for member, (x,) in enumerate(inputs)]


def reduced_blocks(inputs: Inputs, op: str) -> list[list[bytes]]:
    whole = reduced_in_numpy([x for (x,) in inputs], op)
    return [[bits(block)] for block in whole.chunk(len(inputs))]


def gathered(inputs: Inputs, op: str) -> list[list[bytes]]:
    return [[bits(x) for (x,) in inputs]] * len(inputs)


def exchanged(inputs: Inputs, op: str) -> list[list[bytes]]:
    return [[bits(x) for x in column] for column in columns(inputs)]


def joined(expected: list[list[bytes]]) -> list[list[bytes]]:
    return [[b"".join(each)] for each in expected]


OPERATIONS = {
    "all_reduce": OperationSpec(
        one, lambda g, x, _, op: (Direct(g).all_reduce(x[0], op), x), all_reduced, reduces=True
    ),
    "all_reduce_list": OperationSpec(
        by_receiver,
        lambda g, x, _, op: (Direct(g).all_reduce_list(x, op), x),
        all_reduced,
        can_differ=True,
        reduces=True,
    ),
    "reduce": OperationSpec(
        one,
        lambda g, x, _, op: (Direct(g).reduce(x[0], op, root_of(g)), x),
        reduced_at_root,
        reduces=True,
    ),
    "broadcast": OperationSpec(
        one,
        lambda g, x, _, op: (Direct(g).broadcast(x[0], root_of(g)), x),
        lambda inputs, _: [[bits(inputs[len(inputs) // 2][0])]] * len(inputs),
    ),
    "gather": OperationSpec(
        one,
        gather,
        lambda inputs, _: [
            [bits(x) for (x,) in inputs] if member == len(inputs) // 2 else []
            for member in range(len(inputs))
        ],
    ),
    "scatter": OperationSpec(
        by_receiver, scatter, lambda inputs, _: [[bits(x)] for x in inputs[len(inputs) // 2]]
    ),
    "all_gather": OperationSpec(one, all_gather, lambda inputs, op: joined(gathered(inputs, op))),
    "all_gather_list": OperationSpec(own_count, all_gather_list, gathered, can_differ=True),
    "reduce_scatter": OperationSpec(one, reduce_scatter, reduced_blocks, reduces=True),
    "reduce_scatter_list": OperationSpec(
        by_receiver,
        reduce_scatter_list,
        lambda inputs, op: [[bits(reduced_in_numpy(column, op))] for column in columns(inputs)],
        can_differ=True,
        reduces=True,
    ),
    "all_to_all": OperationSpec(by_pair, all_to_all, exchanged, can_differ=True),
    "all_to_all_single": OperationSpec(
        by_pair,
        all_to_all_single,
        lambda inputs, op: joined(exchanged(inputs, op)),
        can_differ=True,
    ),
}
WRITE_THEIR_INPUTS = ("all_reduce", "all_reduce_list", "reduce", "broadcast")


@COMPLEX_HALF
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_collective_matches_numpy(operation: str) -> None:
    """Every third dtype, another third for the next collective; tests/operations draws from all of
    them."""
    case = OPERATIONS[operation]
    for dtype, size in product(DTYPES[list(OPERATIONS).index(operation) % 3 :: 3], SIZES):
        ops = legal_ops(dtype) if case.reduces else ["SUM"]
        for uneven in (False, True)[: 1 + case.can_differ]:
            inputs = [
                [
                    draw(dtype, (count,), 100 * member + place)
                    for place, count in enumerate(case.counts(member, size, uneven))
                ]
                for member in range(size)
            ]

            def program(inputs: Inputs = inputs, ops: Sequence[str] = ops) -> list[list[bytes]]:
                group = open_group()
                given = [bits(x) for x in inputs[group.rank]]
                results = []
                for op in ops:
                    mine = [x.clone() for x in inputs[group.rank]]
                    pending, result = case.run(group, mine, inputs, getattr(ReduceOp, op))
                    pending.finish(T)
                    assert operation in WRITE_THEIR_INPUTS or [bits(x) for x in mine] == given
                    results.append([bits(x) for x in result])
                return results

            expected = [case.expect(inputs, op) for op in ops]
            for member, results in enumerate(simulate(program, size)):
                assert results == [each[member] for each in expected], (dtype, size, uneven, member)


def test_what_the_backend_says_it_serves_is_what_the_table_runs() -> None:
    backend = get_backend("simulated")
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            assert backend.support(name, "cpu", dtype) == "native"
            for op in OPS:
                runs = not operation.reduces or op in legal_ops(dtype)
                told = backend.support(name, "cuda", dtype, getattr(ReduceOp, op))
                assert told == ("native" if runs else "")
        assert backend.support(name, "privateuseone", torch.float32) == ""
        told = backend.support(name, "cpu", torch.float4_e2m1fn_x2)
        assert told == ("" if operation.reduces else "native")
    for name in ("send", "recv", "barrier"):
        assert backend.support(name, "cpu", torch.int8) == "native"


@COMPLEX_HALF
@pytest.mark.parametrize("size", SIZES)
def test_messages_carry_every_dtype(size: int) -> None:
    inputs = {dtype: [draw(dtype, (2, 3), member) for member in range(size)] for dtype in DTYPES}

    def program() -> dict[torch.dtype, bytes]:
        group, found = open_group(), {}
        for dtype, sent in inputs.items():
            (received,) = like([sent[0]])
            Direct(group).send(sent[group.rank], (group.rank + 1) % size, 0).finish(T)
            Direct(group).recv(received, (group.rank - 1) % size, 0).finish(T)
            found[dtype] = bits(received)
        return found

    assert simulate(program, size) == [
        {dtype: bits(sent[member - 1]) for dtype, sent in inputs.items()} for member in range(size)
    ]


def test_what_cannot_be_added_is_moved_all_the_same() -> None:
    def program() -> tuple[list[bytes], bytes]:
        group = open_group()
        inputs = [torch.tensor([16 * group.rank + j], dtype=torch.uint8) for j in range(2)]
        inputs = [x.view(torch.float4_e2m1fn_x2) for x in inputs]
        outputs = like(inputs)
        Direct(group).all_to_all(outputs, inputs).finish(T)
        Direct(group).broadcast(inputs[0], 1).finish(T)
        return [bits(x) for x in outputs], bits(inputs[0])

    assert simulate(program, 2) == [([b"\x00", b"\x10"], b"\x10"), ([b"\x01", b"\x11"], b"\x10")]


def test_a_list_of_tensors_may_mix_dtypes_and_be_empty() -> None:
    def program() -> list[Any]:
        group = open_group()
        tensors = [torch.ones(2), torch.full((), 3), torch.zeros(0, dtype=torch.bool)]
        Direct(group).all_reduce_list(tensors, ReduceOp.SUM).finish(T)
        Direct(group).all_reduce_list([], ReduceOp.SUM).finish(T)
        return [x.tolist() for x in tensors]

    assert simulate(program, 3) == [[[3.0, 3.0], 9, []]] * 3


def test_a_list_of_tensors_is_reduced_by_an_op_that_all_of_them_have() -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(DtypeError, match="cannot reduce bool with AVG"):
            Direct(group).all_reduce_list(
                [torch.ones(1), torch.ones(1, dtype=torch.bool)], ReduceOp.AVG
            )

    simulate(program, 2)


@pytest.mark.parametrize("shape", [(), (0,), (4, 2)])
def test_tensors_of_any_layout(shape: tuple[int, ...]) -> None:
    def program() -> list[torch.Tensor]:
        group = open_group()
        x = torch.ones(shape).mT if len(shape) == 2 else torch.ones(shape)
        out = torch.zeros((3, *x.shape))
        Direct(group).all_gather(out, x).finish(T)
        Direct(group).all_reduce(x, ReduceOp.SUM).finish(T)
        return [x, out]

    for x, out in simulate(program, 3):
        assert torch.equal(x, torch.full_like(x, 3.0))
        assert torch.equal(out, torch.ones_like(out))


def test_parameters_and_inference_tensors_are_written() -> None:
    def program() -> None:
        group = open_group()
        parameter = torch.nn.Parameter(torch.full((2,), float(group.rank)))
        with torch.inference_mode(group.rank == 0):
            mixed = torch.full((2,), float(group.rank))
            Direct(group).broadcast(parameter, 1).finish(T)
            Direct(group).broadcast(mixed, 1).finish(T)
        assert parameter.tolist() == mixed.tolist() == [1.0, 1.0]
        assert parameter.requires_grad
        assert not parameter.is_inference()
        assert mixed.is_inference() == (group.rank == 0)

    simulate(program, 2)


@pytest.mark.parametrize(
    ("op", "dtype", "served"),
    [
        ("AVG", torch.bool, "a dtype of numbers for AVG"),
        ("BAND", torch.float32, "an integer dtype or bool for BAND"),
        ("MAX", torch.complex64, "a dtype that is not complex for MAX"),
        (
            "SUM",
            torch.float4_e2m1fn_x2,
            "bool, or integers, floats and complex numbers of 8 bits and more",
        ),
    ],
)
def test_reductions_that_a_dtype_lacks_are_rejected(
    op: str, dtype: torch.dtype, served: str
) -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(DtypeError) as caught:
            Direct(group).all_reduce(torch.empty(2, dtype=dtype), getattr(ReduceOp, op))
        name = str(dtype).removeprefix("torch.")
        assert str(caught.value).splitlines() == [
            f"backend 'simulated' cannot reduce {name} with {op}",
            f"  expected: {served}",
            "  fix:      use another reduction, or convert the tensor",
        ]

    simulate(program, 2)


# ---- asynchronous operations -------------------------------------------------------------------


def test_started_operations_do_not_wait() -> None:
    def program() -> list[float]:
        group = open_group()
        tensors = [torch.full((2,), float(i + group.rank)) for i in range(3)]
        pending = [Direct(group).all_reduce(x, ReduceOp.SUM) for x in tensors]
        for each in reversed(pending):
            each.finish(T)
            each.finish(T)
        return [x[0].item() for x in tensors]

    assert simulate(program, 2) == [[1.0, 3.0, 5.0]] * 2


def test_overlapping_groups_in_different_orders() -> None:
    def program() -> tuple[float, float]:
        rank = get_world().rank
        whole = open_group()
        pair = open_group((0, 1), "pair") if rank < 2 else None
        x, y = torch.ones(1), torch.full((1,), 10.0)
        if rank == 0 and pair is not None:
            first = Direct(pair).all_reduce(y, ReduceOp.SUM)
            second = Direct(whole).all_reduce(x, ReduceOp.SUM)
            second.finish(T)
            first.finish(T)
        elif pair is not None:
            second = Direct(whole).all_reduce(x, ReduceOp.SUM)
            first = Direct(pair).all_reduce(y, ReduceOp.SUM)
            first.finish(T)
            second.finish(T)
        else:
            Direct(whole).all_reduce(x, ReduceOp.SUM).finish(T)
        return x.item(), y.item()

    assert simulate(program, 3) == [(3.0, 20.0), (3.0, 20.0), (3.0, 10.0)]


def test_asking_whether_done_lets_the_others_go_on() -> None:
    def program() -> int:
        group = open_group()
        x = torch.ones(1)
        pending = Direct(group).all_reduce(x, ReduceOp.SUM)
        asked = 0
        while not pending.poll():
            asked += 1
            assert asked < 10
        assert x.item() == get_world().size
        return asked

    assert simulate(program, 3) == [0, 0, 0]
    assert simulate(program, 1) == [0]


def test_a_barrier_completes_what_was_started_before() -> None:
    def program() -> float:
        group = open_group()
        x = torch.ones(1)
        Direct(group).all_reduce(x, ReduceOp.SUM)
        Direct(group).barrier().finish(T)
        return x.item()

    assert simulate(program, 3) == [3.0] * 3


def test_nothing_is_kept_of_a_finished_operation() -> None:
    def program() -> None:
        group = open_group()
        x, block = torch.ones(2), torch.ones(1)
        kept = [weakref.ref(x), weakref.ref(block)]
        pending = [Direct(group).all_reduce(x, ReduceOp.SUM)]
        pending.append(Direct(group).reduce_scatter(block, x, ReduceOp.SUM))
        pending.append(Direct(group).send(x, group.rank, 0))
        y = torch.empty(2)
        kept.append(weakref.ref(y))
        pending.append(Direct(group).recv(y, group.rank, 0))
        for each in pending:
            each.finish(T)
        del x, y, block
        assert [ref() for ref in kept] == [None] * 3

    simulate(program, 2)


# ---- several operations as one ------------------------------------------------------------------


def test_operations_that_end_as_one_bring_their_results_home_once() -> None:
    def program() -> tuple[list[float], int]:
        group = open_group()
        tensors = [torch.full((2,), float(i + group.rank)) for i in range(3)]
        settled: list[int] = []
        chain = Chain(
            [Direct(group).all_reduce(x, ReduceOp.SUM) for x in tensors], lambda: settled.append(1)
        )
        outer = Chain([chain, Direct(group).barrier()])
        outer.finish(T)
        outer.finish(T)
        assert outer.poll()
        return [x[0].item() for x in tensors], len(settled)

    assert simulate(program, 2) == [([1.0, 3.0, 5.0], 1)] * 2


def test_asking_for_a_chain_lets_the_others_go_on() -> None:
    def program() -> list[bool]:
        group = open_group()
        asked = []
        chain = Chain([Direct(group).barrier(), Direct(group).barrier()])
        while not asked or not asked[-1]:
            asked.append(chain.poll())
            assert len(asked) < 10
        return asked

    assert simulate(program, 3)[0] == [True]


def test_a_chain_fails_as_its_part_does() -> None:
    def program() -> None:
        group = open_group()
        chain = Chain([Direct(group).barrier(), Direct(group).broadcast(torch.ones(1), group.rank)])
        with pytest.raises(MismatchError, match="made different calls as call 2"):
            chain.finish(T)

    simulate(program, 2)


class Building:
    """Carries a collective by others of another communicator."""

    def __init__(self, backend: Communicator) -> None:
        self.backend, self.rank, self.size = backend, backend.rank, backend.size

    def start(self, prepared: OperationArgs) -> Request:
        ways = {**COMPOSED, "all_reduce": all_reduce_by_gathering}
        return ways[prepared.backend_operation](self.backend, prepared)


def test_collectives_made_of_others_run_here_too() -> None:
    def program() -> list[Any]:
        group = open_group()
        mine = torch.arange(4.0) + group.rank
        block, outputs = torch.zeros(2), [torch.zeros(2), torch.zeros(2)]
        built = Direct(Building(group))
        started = [
            built.reduce_scatter_list(block, mine.split(2), ReduceOp.SUM),
            built.all_to_all(outputs, mine.split(2)),
            built.all_reduce(mine, ReduceOp.MAX),
        ]
        for each in started:
            each.finish(T)
        return [block.tolist(), [x.tolist() for x in outputs], mine.tolist()]

    first, second = simulate(program, 2)
    assert first == [[1.0, 3.0], [[0.0, 1.0], [1.0, 2.0]], [1.0, 2.0, 3.0, 4.0]]
    assert second == [[5.0, 7.0], [[2.0, 3.0], [3.0, 4.0]], [1.0, 2.0, 3.0, 4.0]]


# ---- abort, end, opening ------------------------------------------------------------------------


def every_kind_of_call(group: Any) -> list[Callable[[], object]]:
    """A collective, a send and a receive, which start as they are called."""
    direct, x = Direct(group), torch.zeros(1)
    peer = (group.rank + 1) % group.size
    return [direct.barrier, lambda: direct.send(x, peer, 0), lambda: direct.recv(x, peer, 0)]


def test_abort_frees_all_members() -> None:
    def program() -> str:
        group = open_group()
        if group.rank == 2:
            group.abort()
        start = [lambda: Direct(group).recv(torch.zeros(1), 1, 0), lambda: Direct(group).barrier()]
        with pytest.raises(BackendAborted) as caught:
            start[min(group.rank, 1)]().finish(T)
        for rejected in every_kind_of_call(group):
            with pytest.raises(BackendAborted):
                rejected()
        return str(caught.value)

    assert simulate(program, 3) == ["the communicator was aborted"] * 3


def test_a_closed_communicator_rejects_calls() -> None:
    def program() -> None:
        group = open_group()
        pending = Direct(group).barrier()
        group.close()
        pending.finish(T)
        for rejected in every_kind_of_call(group):
            with pytest.raises(BackendFailure, match="the communicator was closed"):
                rejected()

    simulate(program, 2)


def test_data_that_cannot_be_moved_is_a_failure_of_every_member() -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(BackendFailure, match="copying the data failed: RuntimeError: shape"):
            Direct(group).all_gather(torch.zeros(3), torch.zeros(2)).finish(T)

    simulate(program, 2)


def test_members_that_disagree_about_the_group() -> None:
    def program() -> None:
        ranks = (0, 1) if get_world().rank == 0 else (1, 0)
        open_group(ranks)

    with pytest.raises(MismatchError) as caught:
        simulate(program, 2)
    assert caught.value.found == "ranks 0-1 on another rank\nranks 1, 0 on this rank"
    assert "passed different lists of ranks" in str(caught.value)


def test_the_backend_serves_simulated_ranks_alone() -> None:
    opening = Opening(HashStore(), HashStore, (0,), 0, "cpu", T)
    with pytest.raises(
        BackendFailure, match=r"works on simulated ranks only: .* meshdist.simulate"
    ):
        get_backend("simulated").open(opening)

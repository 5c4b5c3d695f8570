"""The wire of simulated ranks, and how it reduces, against NumPy."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from meshdist.errors import AgreementError, BackendError, DeadlockError
from meshdist.mesh.simulation import simulate
from meshdist.reduce_ops import ReduceOp
from meshdist.runtime.world import get_world
from meshdist.wires.base import Opening, WireAborted, WireFailure, get_wire
from meshdist.wires.simulated import SimulatedCommunicator

T = timedelta(seconds=1)
SIZES = (1, 2, 3, 5)

INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

IN_NUMPY: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def open_group(ranks: tuple[int, ...] | None = None, name: str = "all") -> SimulatedCommunicator:
    """This rank's side of a group of ``ranks`` (all)."""
    world = get_world()
    members = ranks or tuple(range(world.size))
    store = PrefixStore(name, world.store)
    opening = Opening(store, members, members.index(world.rank), "cpu", T)
    communicator = get_wire("simulated").open(opening)
    assert isinstance(communicator, SimulatedCommunicator)
    return communicator


def legal(op: str, dtype: torch.dtype) -> bool:
    if dtype.is_complex:
        return op in ("SUM", "AVG")
    if dtype.is_floating_point:
        return op not in ("BAND", "BOR", "BXOR")
    return op != "AVG"


CASES = [
    (op, dtype)
    for dtype in (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)
    for op in OPS
    if legal(op, dtype)
]


def draw(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(generator.integers(0, 2, shape).astype(bool))
    if dtype.is_complex:
        parts = generator.standard_normal((2, *shape))
        return torch.from_numpy(parts[0] + 1j * parts[1]).to(dtype)
    if dtype.is_floating_point:
        return torch.from_numpy(generator.standard_normal(shape)).to(dtype)
    info = torch.iinfo(dtype)
    kind = str(dtype).removeprefix("torch.")
    return torch.from_numpy(
        generator.integers(info.min, info.max, shape, dtype=kind, endpoint=True)
    )


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """16-bit floats as float32, in which the wire accumulates."""
    if tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor.numpy().copy()


def oracle(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in group order, in NumPy."""
    total = to_numpy(tensors[0])
    with np.errstate(over="ignore"):
        for tensor in tensors[1:]:
            if total.dtype == bool:
                is_or = op in ("SUM", "MAX", "BOR")
                combine: Any = np.logical_or if is_or else np.logical_and
                combine = np.logical_xor if op == "BXOR" else combine
            else:
                combine = IN_NUMPY[op]
            total = combine(total, to_numpy(tensor))
    if op == "AVG":
        total = (total / len(tensors)).astype(total.dtype)
    return torch.from_numpy(np.asarray(total)).to(tensors[0].dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda case: str(case))
def test_all_reduce_and_reduce_scatter_match_numpy(op: str, dtype: torch.dtype, size: int) -> None:
    shape = (2 * size, 3)
    inputs = [draw(dtype, shape, seed) for seed in range(size)]

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        group = open_group()
        mine = inputs[group.rank].clone()
        block = torch.empty((2, 3), dtype=dtype)
        kind = getattr(ReduceOp, op)
        group.finish(group.reduce_scatter(block, mine, kind, T), T)
        assert bits(mine) == bits(inputs[group.rank])  # an input is read only
        group.finish(group.all_reduce(mine, kind, T), T)
        return mine, block

    whole = oracle(inputs, op)
    for rank, (reduced, block) in enumerate(simulate(program, size)):
        assert reduced.dtype is dtype
        assert bits(reduced) == bits(whole)
        assert bits(block) == bits(whole[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, torch.float8_e4m3fn],
    ids=lambda dtype: str(dtype),
)
def test_broadcast_all_gather_send_recv_copy_every_dtype(dtype: torch.dtype, size: int) -> None:
    inputs = [
        draw(torch.float32 if dtype.itemsize == 1 and dtype.is_floating_point else dtype, (2, 3), s)
        for s in range(size)
    ]
    inputs = [tensor.to(dtype) for tensor in inputs]

    def program() -> list[torch.Tensor]:
        group = open_group()
        mine = inputs[group.rank].clone()
        gathered = torch.empty((size, 2, 3), dtype=dtype)
        group.finish(group.all_gather(gathered, mine, T), T)
        received = torch.empty((2, 3), dtype=dtype)
        group.finish(group.send(mine, (group.rank + 1) % size, 0, T), T)
        group.finish(group.recv(received, (group.rank - 1) % size, 0, T), T)
        group.finish(group.broadcast(mine, size - 1, T), T)
        return [gathered, received, mine]

    for rank, (gathered, received, mine) in enumerate(simulate(program, size)):
        assert bits(gathered) == b"".join(bits(tensor) for tensor in inputs)
        assert bits(received) == bits(inputs[(rank - 1) % size])
        assert bits(mine) == bits(inputs[size - 1])


def test_float8_is_reduced_by_way_of_float32() -> None:
    def program() -> list[float]:
        group = open_group()
        x = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
        group.finish(group.all_reduce(x, ReduceOp.SUM, T), T)
        return x.float().tolist()

    assert simulate(program, 3) == [[3.0, 6.0]] * 3


def test_sixteen_bit_floats_accumulate_in_float32() -> None:
    def program() -> float:
        group = open_group()
        x = torch.tensor([2048.0 if group.rank == 0 else 1.0], dtype=torch.float16)
        group.finish(group.all_reduce(x, ReduceOp.SUM, T), T)
        return x.item()

    assert simulate(program, 5) == [2052.0] * 5  # in float16, 2048 + 1 is 2048


@pytest.mark.parametrize("shape", [(), (0,), (4, 2)])
def test_tensors_of_any_layout(shape: tuple[int, ...]) -> None:
    def program() -> list[torch.Tensor]:
        group = open_group()
        x = torch.ones(shape).mT if len(shape) == 2 else torch.ones(shape)
        out = torch.zeros((3, *x.shape))
        group.finish(group.all_gather(out, x, T), T)
        group.finish(group.all_reduce(x, ReduceOp.SUM, T), T)
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
            group.finish(group.broadcast(parameter, 1, T), T)
            group.finish(group.broadcast(mixed, 1, T), T)
        assert parameter.tolist() == mixed.tolist() == [1.0, 1.0]
        assert parameter.requires_grad
        assert not parameter.is_inference()
        assert mixed.is_inference() == (group.rank == 0)

    simulate(program, 2)


@pytest.mark.parametrize(
    ("op", "dtype", "served"),
    [
        ("AVG", torch.int32, "AVG on floating and complex dtypes"),
        ("BAND", torch.float32, "BAND on integers and bool"),
        ("MAX", torch.complex64, "MAX on dtypes that are not complex"),
    ],
)
def test_reductions_that_a_dtype_lacks_are_refused(
    op: str, dtype: torch.dtype, served: str
) -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(BackendError) as caught:
            group.all_reduce(torch.zeros(2, dtype=dtype), getattr(ReduceOp, op), T)
        name = str(dtype).removeprefix("torch.")
        assert str(caught.value).splitlines() == [
            f"the wire 'simulated' cannot reduce {name} with {op}",
            f"  expected: {served}",
            "  fix:      use another reduction, or convert the tensor",
        ]

    simulate(program, 2)


# ---- asynchronous operations -------------------------------------------------------------------


def test_started_operations_do_not_wait() -> None:
    def program() -> list[float]:
        group = open_group()
        tensors = [torch.full((2,), float(i + group.rank)) for i in range(3)]
        pending = [group.all_reduce(x, ReduceOp.SUM, T) for x in tensors]
        for each in reversed(pending):
            group.finish(each, T)
            group.finish(each, T)
        return [x[0].item() for x in tensors]

    assert simulate(program, 2) == [[1.0, 3.0, 5.0]] * 2


def test_overlapping_groups_in_different_orders() -> None:
    def program() -> tuple[float, float]:
        rank = get_world().rank
        whole = open_group()
        pair = open_group((0, 1), "pair") if rank < 2 else None
        x, y = torch.ones(1), torch.full((1,), 10.0)
        if rank == 0 and pair is not None:
            first = pair.all_reduce(y, ReduceOp.SUM, T)
            second = whole.all_reduce(x, ReduceOp.SUM, T)
            whole.finish(second, T)
            pair.finish(first, T)
        elif pair is not None:
            second = whole.all_reduce(x, ReduceOp.SUM, T)
            first = pair.all_reduce(y, ReduceOp.SUM, T)
            pair.finish(first, T)
            whole.finish(second, T)
        else:
            whole.finish(whole.all_reduce(x, ReduceOp.SUM, T), T)
        return x.item(), y.item()

    assert simulate(program, 3) == [(3.0, 20.0), (3.0, 20.0), (3.0, 10.0)]


def test_asking_whether_done_lets_the_others_go_on() -> None:
    def program() -> int:
        group = open_group()
        x = torch.ones(1)
        pending = group.all_reduce(x, ReduceOp.SUM, T)
        asked = 0
        while not group.is_finished(pending):
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
        group.all_reduce(x, ReduceOp.SUM, T)
        group.finish(group.barrier(T), T)
        return x.item()

    assert simulate(program, 3) == [3.0] * 3


def test_nothing_is_kept_of_a_finished_operation() -> None:
    def program() -> None:
        group = open_group()
        x, block = torch.ones(2), torch.ones(1)
        kept = [weakref.ref(x), weakref.ref(block)]
        pending = [group.all_reduce(x, ReduceOp.SUM, T)]
        pending.append(group.reduce_scatter(block, x, ReduceOp.SUM, T))
        pending.append(group.send(x, group.rank, 0, T))
        y = torch.empty(2)
        kept.append(weakref.ref(y))
        pending.append(group.recv(y, group.rank, 0, T))
        for each in pending:
            group.finish(each, T)
        del x, y, block
        assert [ref() for ref in kept] == [None] * 3

    simulate(program, 2)


# ---- point to point ----------------------------------------------------------------------------


def test_messages_keep_their_order_by_source_and_tag() -> None:
    def program() -> list[float]:
        group = open_group()
        if group.rank == 0:
            for value, tag in ((1.0, 7), (2.0, 8), (3.0, 7), (4.0, 8)):
                x = torch.tensor([value])
                group.finish(group.send(x, 1, tag, T), T)
                x.fill_(-1.0)  # a finished send leaves its tensor free
            return []
        received = []
        for tag in (8, 7, 7, 8):
            x = torch.zeros(1)
            group.finish(group.recv(x, 0, tag, T), T)
            received.append(x.item())
        return received

    assert simulate(program, 2)[1] == [2.0, 1.0, 3.0, 4.0]


def test_receives_that_wait_are_served_in_the_order_they_came() -> None:
    def program() -> list[float]:
        group = open_group()
        if group.rank == 0:
            tensors = [torch.zeros(1) for _ in range(3)]
            pending = [group.recv(x, 1, 0, T) for x in tensors]
            for each in reversed(pending):
                group.finish(each, T)
            return [x.item() for x in tensors]
        for value in (1.0, 2.0, 3.0):
            group.send(torch.tensor([value]), 0, 0, T)
        return []

    assert simulate(program, 2)[0] == [1.0, 2.0, 3.0]


def test_receive_from_any_rank_tells_the_source() -> None:
    def program() -> list[tuple[int, float]]:
        group = open_group()
        if group.rank != 2:
            group.finish(group.send(torch.tensor([float(group.rank)]), 2, 0, T), T)
            return []
        received = []
        for _ in range(3):
            x = torch.zeros(1)
            pending = group.recv(x, None, 0, T)
            group.finish(pending, T)
            received.append((group.source(pending), x.item()))
        return received

    assert simulate(program, 4)[2] == [(0, 0.0), (1, 1.0), (3, 3.0)]


def test_messages_to_oneself() -> None:
    def program() -> list[float]:
        group = open_group()
        x, y = torch.zeros(1), torch.zeros(1)
        early = group.recv(x, group.rank, 5, T)
        group.send(torch.tensor([1.0 + group.rank]), group.rank, 5, T)
        group.send(torch.tensor([9.0]), group.rank, 6, T)
        group.finish(group.recv(y, None, 6, T), T)
        group.finish(early, T)
        assert group.source(early) == group.rank
        return [x.item(), y.item()]

    assert simulate(program, 2) == [[1.0, 9.0], [2.0, 9.0]]


def test_only_a_receive_has_a_source() -> None:
    def program() -> None:
        group = open_group()
        pending = group.barrier(T)
        group.finish(pending, T)
        with pytest.raises(WireFailure, match="only a receive has a source"):
            group.source(pending)

    simulate(program, 2)


def test_a_message_that_does_not_fit_is_told_to_the_receiver() -> None:
    def program() -> str:
        group = open_group()
        if group.rank == 0:
            group.send(torch.zeros(3), 1, 4, T)
            group.send(torch.ones(2), 1, 4, T)
            return ""
        with pytest.raises(AgreementError) as caught:
            group.finish(group.recv(torch.zeros(2, dtype=torch.int64), 0, 4, T), T)
        x = torch.zeros(2)
        group.finish(group.recv(x, 0, 4, T), T)
        assert x.tolist() == [1.0, 1.0]
        return str(caught.value)

    text = re.sub(r"at \S+:\d+", "at LINE", simulate(program, 2)[1])
    assert text == (
        "a message does not fit the tensor that receives it\n"
        "  where:    tag 4 over ranks 0-1\n"
        "  expected: equal dtype and number of elements on both sides\n"
        "  found:    rank 0: send of 3 float32 at LINE\n"
        "            rank 1: recv of 2 int64 at LINE\n"
        "  fix:      receive into a tensor like the one that is sent, or give messages of "
        "different kinds different tags"
    )


# ---- disagreement, deadlock, abort -------------------------------------------------------------


def line_of(function: Callable[..., Any], offset: int) -> str:
    return f"{__file__}:{function.__code__.co_firstlineno + offset}"


def test_members_that_disagree_all_raise_the_same() -> None:
    def program() -> str:
        group = open_group()
        x = torch.ones(4)
        if group.rank == 2:
            pending = group.broadcast(x, 0, T)
        else:
            pending = group.all_reduce(x, ReduceOp.SUM, T)
        with pytest.raises(AgreementError) as caught:
            group.finish(pending, T)
        assert x.tolist() == [1.0] * 4
        group.finish(group.all_reduce(x, ReduceOp.SUM, T), T)  # the next one counts alike
        assert x.tolist() == [4.0] * 4
        return str(caught.value)

    texts = simulate(program, 4)
    assert texts == [texts[0]] * 4
    assert texts[0] == (
        "the members of a group disagree about their collective 1\n"
        "  where:    ranks 0-3; no data was moved\n"
        "  expected: the same verb, dtype, number of elements, op and root on every member\n"
        f"  found:    ranks 0-1: all_reduce(SUM) of 4 float32 at {line_of(program, 6)}\n"
        f"            rank 2: broadcast(from rank 0) of 4 float32 at {line_of(program, 4)}\n"
        "            rank 3: not there yet\n"
        "  fix:      make every member call the same verbs in the same order, on equal tensors"
    )


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (lambda g: g.all_reduce(torch.ones(2 + g.rank), ReduceOp.SUM, T), "3 float32"),
        (lambda g: g.all_reduce(torch.ones(2), (ReduceOp.SUM, ReduceOp.MAX)[g.rank], T), "(MAX)"),
        (lambda g: g.broadcast(torch.ones(2), g.rank, T), "(from rank 1)"),
        (
            lambda g: g.broadcast(torch.ones(2, dtype=(torch.int8, torch.int16)[g.rank]), 0, T),
            "2 int16",
        ),
        (lambda g: g.barrier(T) if g.rank else g.all_reduce(torch.ones(2), ReduceOp.SUM, T), "bar"),
    ],
    ids=["count", "op", "root", "dtype", "verb"],
)
def test_every_part_of_a_call_is_compared(calls: Callable[[Any], Any], shown: str) -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(AgreementError) as caught:
            group.finish(calls(group), T)
        assert shown in (caught.value.found or "").splitlines()[1]

    simulate(program, 2)


def test_deadlock_tells_what_every_rank_waits_for() -> None:
    def program() -> str:
        group = open_group()
        rank = group.rank
        if rank == 3:
            return ""
        try:
            if rank == 0:
                group.finish(group.recv(torch.zeros(2), 3, 7, T), T)
            elif rank == 1:
                PrefixStore("p", get_world().store).get("never")
            else:
                pending = group.all_reduce(torch.zeros(2), ReduceOp.MAX, T)
                group.finish(pending, T)
        except DeadlockError as error:
            return str(error)
        return "no deadlock"

    texts = simulate(program, 5)
    assert texts == [texts[0]] * 3 + ["", texts[0]]
    assert texts[0] == (
        "deadlock: no simulated rank can go on\n"
        "  where:    5 simulated ranks, one at a time\n"
        "  expected: at least one rank that waits for nobody\n"
        "  found:    rank 0: waits in recv from rank 3, tag 7, over ranks 0-4, called at "
        f"{line_of(program, 7)}\n"
        f"            rank 1: waits in store.get('p/never'), called at {line_of(program, 9)}\n"
        "            ranks 2, 4: waits in all_reduce(MAX) of 2 float32 for ranks 0-1, 3; "
        f"collective 1 over ranks 0-4, called at {line_of(program, 11)}\n"
        "            rank 3: returned\n"
        "  fix:      make every member call the same verbs in the same order, give every receive "
        "its send, and set every key that a rank waits for"
    )


def test_asking_in_vain_without_end_is_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdist.wires.turns._MOST_VAIN_POLLS", 100)

    def program() -> None:
        group = open_group()
        if group.rank == 0:
            pending = group.barrier(T)
            while not group.is_finished(pending):
                pass
        else:
            while not get_world().store.check(["never"]):
                pass

    with pytest.raises(DeadlockError) as caught:
        simulate(program, 2)
    rank_0, rank_1 = (caught.value.found or "").splitlines()
    assert rank_0.startswith("rank 0: waits in barrier for rank 1; collective 1 over ranks 0-1")
    assert rank_1.startswith("rank 1: waits in store.check(['never']), called at ")


def test_a_call_site_is_the_line_of_the_program_below_torch() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
            ctx.group = group
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            ctx.group.finish(ctx.group.recv(grad, 0, 0, T), T)

    def program() -> None:
        Waits.apply(torch.ones(1, requires_grad=True), open_group()).backward()

    with pytest.raises(DeadlockError) as caught:
        simulate(program, 1)
    assert line_of(Waits.backward, 2) in str(caught.value)


def test_abort_frees_all_members() -> None:
    def program() -> str:
        group = open_group()
        if group.rank == 2:
            group.abort()
        start = [lambda: group.recv(torch.zeros(1), 1, 0, T), lambda: group.barrier(T)]
        with pytest.raises(WireAborted) as caught:
            group.finish(start[min(group.rank, 1)](), T)
        with pytest.raises(WireAborted):
            group.barrier(T)
        return str(caught.value)

    assert simulate(program, 3) == ["the communicator was aborted"] * 3


def test_a_closed_communicator_refuses_calls() -> None:
    def program() -> None:
        group = open_group()
        pending = group.barrier(T)
        group.close()
        group.finish(pending, T)
        with pytest.raises(WireFailure, match="the communicator was closed"):
            group.barrier(T)

    simulate(program, 2)


def test_data_that_cannot_be_moved_is_a_failure_of_every_member() -> None:
    def program() -> None:
        group = open_group()
        with pytest.raises(WireFailure, match="moving the data failed: RuntimeError: shape"):
            group.finish(group.all_gather(torch.zeros(3), torch.zeros(2), T), T)

    simulate(program, 2)


def test_members_that_disagree_about_the_group() -> None:
    def program() -> None:
        ranks = (0, 1) if get_world().rank == 0 else (1, 0)
        open_group(ranks)

    with pytest.raises(AgreementError) as caught:
        simulate(program, 2)
    assert caught.value.found == "ranks 0-1 elsewhere; ranks 1, 0 here"
    assert "disagree about who they are" in str(caught.value)


def test_the_wire_serves_simulated_ranks_alone() -> None:
    opening = Opening(HashStore(), (0,), 0, "cpu", T)
    with pytest.raises(WireFailure, match=r"serves simulated ranks alone: .* meshdist.simulate"):
        get_wire("simulated").open(opening)

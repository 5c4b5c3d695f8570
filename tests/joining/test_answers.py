"""Neutral elements change no result; every collective has an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import meshdist as md
from meshdist.dtypes import DTYPES
from meshdist.errors import AgreementError, PicklingError
from meshdist.joining import answers
from meshdist.joining.answers import neutral
from meshdist.reduce_ops import PLAIN_OPS, ReduceKind, find_refusal
from meshdist.verb_table import VERBS
from tests.inner import SimulatedCommunicator, reduced

CASES = [
    (op, dtype)
    for op in PLAIN_OPS
    for dtype in DTYPES
    if op != md.ReduceOp.AVG
    and find_refusal(op, dtype) is None
    and SimulatedCommunicator.support("all_reduce", "cpu", dtype, op)
    and dtype is not torch.float8_e8m0fnu  # which has no zero
]


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # what torch says of complex32
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_neutral_element_changes_nothing(op: ReduceKind, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).repeat(dtype.itemsize * 2)
    values = bits.view(dtype) if dtype is not torch.bool else bits > 127
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.linspace(-3, 3, 64).to(wide).to(dtype)
    other = neutral(op, dtype, values.numel())
    assert other.dtype == dtype
    for pair in ([values, other], [other, values]):
        found = reduced([one.clone() for one in pair], op)
        assert torch.equal(found.view(torch.uint8), values.contiguous().view(torch.uint8))


@pytest.mark.parametrize("limit", [float("inf"), float("-inf")])
def test_extremes_of_floats_are_below_and_above_infinity(limit: float) -> None:
    values = torch.full((2,), limit)
    for op in (md.ReduceOp.MIN, md.ReduceOp.MAX):
        assert reduced([values, neutral(op, torch.float32, 2)], op).tolist() == [limit] * 2


def test_every_collective_has_an_answer() -> None:
    messages = {"send", "isend", "recv", "irecv", "batch_isend_irecv"}
    messages |= {"send_object_list", "recv_object_list"}
    others = {*answers._ANSWERS} - {"shared_empty"}
    of_rows = [row for row in VERBS.values() if row.name not in others | messages]
    of_tensors = [row.carrier for row in of_rows if not row.is_of_objects]
    assert others <= {*VERBS}
    assert {(carrier.takes, carrier.gives) for carrier in of_tensors} == answers._DATA.keys()


def test_verbs_of_several_devices_are_answered() -> None:
    def program() -> list[object]:
        rank, found = md.get_rank(), []
        for _ in md.uneven(range(rank)):
            tensors = [torch.full((2,), 1.0 + rank), torch.full((2,), 2.0)]
            md.all_reduce_multigpu(tensors)
            md.broadcast_multigpu(tensors, src=1)
            md.reduce_multigpu(tensors, 1, md.ReduceOp.MAX)
            found.append([x.tolist() for x in tensors])
            lists = [[torch.empty(1) for _ in range(4)] for _ in range(2)]
            md.all_gather_multigpu(lists, [torch.ones(1), torch.ones(1)])
            found.append([x.item() for x in lists[1]])
        return found

    assert md.simulate(program, 2)[1] == [[[4.0, 4.0], [4.0, 4.0]], [0.0, 0.0, 1.0, 1.0]]


def test_older_names_and_factors_are_answered() -> None:
    def program() -> list[object]:
        found = []
        for _ in md.uneven(range(md.get_rank())):
            x = torch.ones(2)
            md.all_reduce(x, md.ReduceOp.premul_sum(3.0))
            gathered, scattered = torch.empty(4), torch.empty(1)
            md.all_gather_single(gathered, x)
            md.reduce_scatter_single(scattered, x)
            shared = md.shared_empty((2, 3), torch.int32).fill_(7)
            md.all_reduce(shared)
            found += [x.tolist(), gathered.tolist(), scattered.item(), shared.sum().item()]
        return found

    assert md.simulate(program, 2)[1] == [[3.0, 3.0], [0.0, 0.0, 3.0, 3.0], 3.0, 42]


def test_tensors_that_lie_otherwise_are_answered() -> None:
    def program() -> list[object]:
        found = []
        for _ in md.uneven(range(md.get_rank())):
            x = torch.arange(6.0).view(2, 3).t()
            md.all_reduce(x)
            found.append(x.tolist())
        return found

    assert md.simulate(program, 2)[1] == [[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]


@pytest.mark.parametrize("wire", ["simulated", "shm"])
def test_objects_that_cannot_be_pickled_are_an_error_on_ranks_with_data_alone(
    wire: str, request: pytest.FixtureRequest
) -> None:
    """A rank without data goes on, and answers what they call next."""

    def program() -> list[object]:
        rank, found = md.get_rank(), []
        thing = (lambda: 0) if rank == 2 else "good"
        room: list[object] = [None] * 3
        calls: list[Callable[[], None]] = [
            lambda: md.all_gather_object(room, thing),
            lambda: md.gather_object(thing, room if rank == 1 else None, dst=1),
            lambda: md.gather_object(thing, None, dst=0),
            lambda: md.broadcast_object_list([thing], src=2),
            lambda: md.scatter_object_list([None], [thing] * 3 if rank == 2 else None, src=2),
            lambda: md.broadcast_object_list([None] * rank, src=2),
        ]
        for number in md.uneven(range(len(calls) if rank else 0)):
            with pytest.raises((PicklingError, AgreementError)) as caught:
                calls[number]()
            x = torch.ones(1)
            md.all_reduce(x)
            found += [str(caught.value).splitlines()[0], x.item()]
        return found

    if wire == "simulated":
        found = md.simulate(program, 3)
    else:
        found = request.getfixturevalue("pool").run(program, 3, backend=wire)
    verbs = ["all_gather_object", "gather_object", "gather_object"]
    verbs += ["broadcast_object_list", "scatter_object_list"]
    expected: list[object] = []
    for verb in verbs:
        expected += [f"{verb}: an object of rank 2 cannot be pickled", 2.0]
    text = "broadcast_object_list: the members' lists of objects have different lengths"
    assert found == [[], [*expected, text, 2.0], [*expected, text, 2.0]]

"""Verbs made from those that every wire has, against NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

import pytest
import torch

import meshdist as md
from meshdist import operation_table
from meshdist.backends import composed_collectives
from meshdist.backends.communicator import Communicator
from meshdist.backends.composed_collectives import BuildingCommunicator
from meshdist.backends.operation_args import PreparedCall, blocks, parts, write
from meshdist.backends.registry import Wire
from meshdist.backends.requests import Chain, Operation
from meshdist.operation_table import Form, WireVerb
from meshdist.reduce_ops import ReduceKind, ReduceOp
from tests.backends.operations import WAITING, check_every_verb, waiting_times
from tests.load import is_within
from tests.operations.cases import WIRES
from tests.pool import Pool

SECONDS = timedelta(seconds=20)


class Bare(Communicator):
    """A connection with no verb but those that every wire must have, over another one."""

    ways: ClassVar[Mapping[str, str]] = {
        "all_reduce": "_all_reduce",
        **dict.fromkeys(("broadcast", "all_gather", "barrier", "send", "recv"), "_below"),
    }

    def __init__(self, wire: Communicator) -> None:
        super().__init__("bare", wire.rank, wire.size)
        self.wire_below = wire
        self.all_reduced: list[torch.dtype] = []

    def _all_reduce(self, prepared: PreparedCall) -> Operation:
        self.all_reduced.append(prepared.outputs[0].dtype)
        return self._below(prepared)

    def _below(self, prepared: PreparedCall) -> Operation:
        return self.wire_below.start(prepared)

    def abort(self) -> None:
        self.wire_below.abort()

    def close(self) -> None:
        self.wire_below.close()


def prepared(
    way: str, tensor: torch.Tensor | None = None, op: ReduceKind | None = None
) -> PreparedCall:
    """A call, in place where it has a tensor."""
    tensors = [] if tensor is None else [tensor]
    return PreparedCall("", way, tensors, tensors, op=op).as_own(SECONDS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_verb_matches_numpy(pool: Pool, size: int) -> None:
    dtypes = (torch.float32, torch.int16, torch.bool, torch.complex64)

    def program() -> str:
        return check_every_verb(Bare(md.group.WORLD.open_channel("cpu").communicator), dtypes)

    assert len(set(pool.run(program, size))) == 1


def test_an_abort_frees_whoever_waits(pool: Pool) -> None:
    answers = pool.run(lambda: waiting_times(Bare, WAITING, "abort"), 2)[0]
    assert [(verb, how) for verb, how, _ in answers] == [(verb, "WireAborted") for verb in WAITING]
    assert is_within(max(seconds for _, _, seconds in answers), 1.9), answers


def test_an_all_reduce_by_gathering_or_in_a_wider_dtype(pool: Pool) -> None:
    def program() -> list[list[float]]:
        wire = Bare(md.group.WORLD.open_channel("cpu").communicator)
        answers = []
        for start in (
            composed_collectives.all_reduce_by_gathering,
            lambda wire, call: composed_collectives.all_reduce_widened(wire, call, torch.float64),
        ):
            x = torch.nn.Parameter(torch.tensor([2.0 + wire.rank, -1.0]))
            start(wire, prepared("all_reduce", x.detach(), ReduceOp.PRODUCT)).finish(SECONDS)
            answers.append(x.tolist())
        assert wire.all_reduced == [torch.float64]
        return answers

    assert pool.run(program, 3) == [[[24.0, -1.0]] * 2] * 3


def test_lists_packed_and_blocks_exchanged(pool: Pool) -> None:
    def program() -> tuple[list[list[int]], list[int]]:
        wire = Bare(md.group.WORLD.open_channel("cpu").communicator)
        inputs = [torch.arange(j) + 10 * wire.rank for j in range(wire.size)]
        outputs = [torch.empty(wire.rank, dtype=torch.int64) for _ in range(wire.size)]
        packed = composed_collectives.all_to_all_by_packing(
            wire, prepared("all_to_all"), outputs, inputs
        )
        packed.finish(SECONDS)
        mine = torch.empty(2, dtype=torch.int64)
        whole = torch.arange(2 * wire.size)
        sizes = [2] * wire.size
        exchanged = composed_collectives.reduce_scatter_by_exchange(
            wire, prepared("reduce_scatter", op=ReduceOp.SUM), mine, whole, sizes
        )
        exchanged.finish(SECONDS)
        assert wire.all_reduced == []
        return [x.tolist() for x in outputs], mine.tolist()

    assert pool.run(program, 3) == [
        ([[], [], []], [0, 3]),
        ([[0], [10], [20]], [6, 9]),
        ([[0, 1], [10, 11], [20, 21]], [12, 15]),
    ]


@pytest.mark.parametrize(
    ("dtype", "total", "mean"),
    [
        (torch.float32, [6.0, -9.0, 1.5], [1.5, -2.25, 0.375]),
        (torch.complex64, [4 + 8j], [1 + 2j]),
        (torch.int8, [7, -7, 8, -128], [1, -1, 2, -32]),
        (torch.int64, [-(2**62) - 1, 3], [-(2**60), 0]),
        (torch.uint64, [2**64 - 1, 7], [2**62 - 1, 1]),
    ],
    ids=str,
)
def test_means_of_whole_numbers_are_rounded_toward_zero(
    dtype: torch.dtype, total: list[complex], mean: list[complex]
) -> None:
    x = torch.tensor(total, dtype=dtype)
    composed_collectives.divide(x, 4)
    assert x.dtype is dtype and x.tolist() == mean


def test_what_torch_cannot_reduce_is_refused_before_anything_is_sent() -> None:
    wire, x = Bare(_nothing()), torch.zeros(2, dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(md.DtypeError) as caught:
        composed_collectives.all_reduce_by_gathering(wire, prepared("all_reduce", x, ReduceOp.MAX))
    assert str(caught.value) == (
        "the wire 'bare' cannot reduce float4_e2m1fn_x2 with MAX\n"
        "  expected: bool, or integers, floats and complex numbers of 8 bits and more\n"
        "  fix:      use another reduction, or convert the tensor"
    )


NEW = WireVerb("take_next", Form.ONE, Form.ONE)


def take_next(wire: BuildingCommunicator, prepared: PreparedCall) -> Operation:
    """What the next member brings, of an all-gather."""
    (tensor,), (output,) = prepared.inputs, prepared.outputs
    whole = tensor.new_empty(wire.size * tensor.numel())
    gathered = wire.start(prepared.by("all_gather", [tensor], [whole]))
    following = blocks(whole, wire.size)[(wire.rank + 1) % wire.size]
    return Chain([gathered], lambda: write(output, following))


def next_of_each() -> tuple[str, list[float]]:
    channel = md.group.WORLD.open_channel("cpu")
    kind = type(channel.communicator)
    operation_table.WIRE_VERBS[NEW.name], composed_collectives.BUILT[NEW.name] = NEW, take_next
    try:
        x, y = torch.full((2,), 1.0 + md.get_rank()), torch.empty(2)
        channel.run(PreparedCall("all_gather_into_tensor", NEW.name, [x], [y], x))
        support = kind.support(NEW.name, "cpu", x.dtype, ReduceOp.SUM)
        md.barrier()
    finally:
        for table in (
            operation_table.WIRE_VERBS,
            composed_collectives.BUILT,
        ):  # simulated ranks share them
            table.pop(NEW.name, None)
    return support, y.tolist()


@pytest.mark.parametrize("wire", ["simulated", "gloo", "shm", "gloo across hosts", "mpi"])
def test_a_wire_does_what_it_lacks_by_a_row_alone(wire: str, pool: Pool) -> None:
    found = WIRES[wire](pool, next_of_each, 3)
    assert found == [("built", [2.0, 2.0]), ("built", [3.0, 3.0]), ("built", [1.0, 1.0])]


def test_parts_are_views() -> None:
    x = torch.arange(6).view(2, 3)
    pieces = parts(x, [1, 0, 3, 2])
    assert [piece.tolist() for piece in pieces] == [[0], [], [1, 2, 3], [4, 5]]
    pieces[3].zero_()
    assert x.tolist() == [[0, 1, 2], [3, 0, 0]]


def test_a_wire_without_means_of_its_own_builds_what_it_can() -> None:
    class BareWire(Wire):
        name = "bare"
        device_types = frozenset({"cpu"})
        communicator_kind = Bare

        def is_available(self) -> bool:
            return True

        def open(self, opening: object) -> Communicator:
            raise NotImplementedError

    support = BareWire().support

    def kinds(verbs: Sequence[str]) -> set[str]:
        return {support(verb, "cpu", torch.float32) for verb in verbs}

    assert kinds(["all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"]) == {"native"}
    assert kinds(["all_reduce_list", "reduce", "gather", "scatter", "all_gather_list"]) == {"built"}
    assert kinds(["reduce_scatter", "reduce_scatter_list", "all_to_all"]) == {"built"}
    assert support("all_reduce", "cuda", torch.float32) == ""
    assert support("reduce", "cpu", torch.float32, ReduceOp.BAND) == ""
    assert support("reduce", "cpu", torch.int8, ReduceOp.BAND) == "built"


def _nothing() -> Communicator:
    from meshdist.backends.c10d.communicator import C10dCommunicator

    return C10dCommunicator("nothing", 0, 2, None)

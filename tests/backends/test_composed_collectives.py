"""Collectives made from those that every backend has, against NumPy."""

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
from meshdist.backends.composed_collectives import ComposingCommunicator
from meshdist.backends.operation_args import OperationArgs, blocks, parts, write
from meshdist.backends.registry import BackendType
from meshdist.backends.requests import Chain, Request
from meshdist.operation_table import BackendOperation, TensorLayout
from meshdist.reduce_ops import ReduceKind, ReduceOp
from tests.backends.operations import WAITING, check_every_operation, waiting_times
from tests.load import is_within
from tests.operations.cases import BACKENDS
from tests.pool import Pool

SECONDS = timedelta(seconds=20)


class Bare(Communicator):
    """A connection with no collective but those that every backend must have, over another one."""

    implementations: ClassVar[Mapping[str, str]] = {
        "all_reduce": "_all_reduce",
        **dict.fromkeys(("broadcast", "all_gather", "barrier", "send", "recv"), "_below"),
    }

    def __init__(self, backend: Communicator) -> None:
        super().__init__("bare", backend.rank, backend.size)
        self.backend_below = backend
        self.all_reduced: list[torch.dtype] = []

    def _all_reduce(self, prepared: OperationArgs) -> Request:
        self.all_reduced.append(prepared.outputs[0].dtype)
        return self._below(prepared)

    def _below(self, prepared: OperationArgs) -> Request:
        return self.backend_below.start(prepared)

    def abort(self) -> None:
        self.backend_below.abort()

    def close(self) -> None:
        self.backend_below.close()


def prepared(
    way: str, tensor: torch.Tensor | None = None, op: ReduceKind | None = None
) -> OperationArgs:
    """A call, in place where it has a tensor."""
    tensors = [] if tensor is None else [tensor]
    return OperationArgs("", way, tensors, tensors, op=op).as_own(SECONDS)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_matches_numpy(pool: Pool, size: int) -> None:
    dtypes = (torch.float32, torch.int16, torch.bool, torch.complex64)

    def program() -> str:
        return check_every_operation(
            Bare(md.group.WORLD.open_device_group("cpu").communicator), dtypes
        )

    assert len(set(pool.run(program, size))) == 1


def test_an_abort_frees_whoever_waits(pool: Pool) -> None:
    answers = pool.run(lambda: waiting_times(Bare, WAITING, "abort"), 2)[0]
    assert [(operation, how) for operation, how, _ in answers] == [
        (operation, "BackendAborted") for operation in WAITING
    ]
    assert is_within(max(seconds for _, _, seconds in answers), 1.9), answers


def test_an_all_reduce_by_gathering_or_in_a_wider_dtype(pool: Pool) -> None:
    def program() -> list[list[float]]:
        backend = Bare(md.group.WORLD.open_device_group("cpu").communicator)
        answers = []
        for start in (
            composed_collectives.all_reduce_by_gathering,
            lambda backend, call: composed_collectives.all_reduce_widened(
                backend, call, torch.float64
            ),
        ):
            x = torch.nn.Parameter(torch.tensor([2.0 + backend.rank, -1.0]))
            start(backend, prepared("all_reduce", x.detach(), ReduceOp.PRODUCT)).finish(SECONDS)
            answers.append(x.tolist())
        assert backend.all_reduced == [torch.float64]
        return answers

    assert pool.run(program, 3) == [[[24.0, -1.0]] * 2] * 3


def test_lists_packed_and_blocks_exchanged(pool: Pool) -> None:
    def program() -> tuple[list[list[int]], list[int]]:
        backend = Bare(md.group.WORLD.open_device_group("cpu").communicator)
        inputs = [torch.arange(j) + 10 * backend.rank for j in range(backend.size)]
        outputs = [torch.empty(backend.rank, dtype=torch.int64) for _ in range(backend.size)]
        packed = composed_collectives.all_to_all_by_packing(
            backend, prepared("all_to_all"), outputs, inputs
        )
        packed.finish(SECONDS)
        mine = torch.empty(2, dtype=torch.int64)
        whole = torch.arange(2 * backend.size)
        sizes = [2] * backend.size
        exchanged = composed_collectives.reduce_scatter_by_exchange(
            backend, prepared("reduce_scatter", op=ReduceOp.SUM), mine, whole, sizes
        )
        exchanged.finish(SECONDS)
        assert backend.all_reduced == []
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
def test_means_of_integers_are_rounded_toward_zero(
    dtype: torch.dtype, total: list[complex], mean: list[complex]
) -> None:
    x = torch.tensor(total, dtype=dtype)
    composed_collectives.divide(x, 4)
    assert x.dtype is dtype and x.tolist() == mean


def test_what_torch_cannot_reduce_is_rejected_before_anything_is_sent() -> None:
    backend, x = Bare(_nothing()), torch.zeros(2, dtype=torch.float4_e2m1fn_x2)
    with pytest.raises(md.DtypeError) as caught:
        composed_collectives.all_reduce_by_gathering(
            backend, prepared("all_reduce", x, ReduceOp.MAX)
        )
    assert str(caught.value) == (
        "backend 'bare' cannot reduce float4_e2m1fn_x2 with MAX\n"
        "  expected: bool, or integers, floats and complex numbers of 8 bits and more\n"
        "  fix:      use another reduction, or convert the tensor"
    )


NEW = BackendOperation("take_next", TensorLayout.ONE, TensorLayout.ONE)


def take_next(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """What the next member brings, of an all-gather."""
    (tensor,), (output,) = prepared.inputs, prepared.outputs
    whole = tensor.new_empty(backend.size * tensor.numel())
    gathered = backend.start(prepared.by("all_gather", [tensor], [whole]))
    following = blocks(whole, backend.size)[(backend.rank + 1) % backend.size]
    return Chain([gathered], lambda: write(output, following))


def next_of_each() -> tuple[str, list[float]]:
    device_group = md.group.WORLD.open_device_group("cpu")
    kind = type(device_group.communicator)
    operation_table.BACKEND_OPERATIONS[NEW.name], composed_collectives.COMPOSED[NEW.name] = (
        NEW,
        take_next,
    )
    try:
        x, y = torch.full((2,), 1.0 + md.get_rank()), torch.empty(2)
        device_group.run(OperationArgs("all_gather_into_tensor", NEW.name, [x], [y], x))
        support = kind.support(NEW.name, "cpu", x.dtype, ReduceOp.SUM)
        md.barrier()
    finally:
        for table in (
            operation_table.BACKEND_OPERATIONS,
            composed_collectives.COMPOSED,
        ):  # simulated ranks share them
            table.pop(NEW.name, None)
    return support, y.tolist()


@pytest.mark.parametrize("backend", ["simulated", "gloo", "shm", "gloo across hosts", "mpi"])
def test_a_backend_does_what_it_lacks_by_a_row_alone(backend: str, pool: Pool) -> None:
    found = BACKENDS[backend](pool, next_of_each, 3)
    assert found == [("built", [2.0, 2.0]), ("built", [3.0, 3.0]), ("built", [1.0, 1.0])]


def test_parts_are_views() -> None:
    x = torch.arange(6).view(2, 3)
    pieces = parts(x, [1, 0, 3, 2])
    assert [piece.tolist() for piece in pieces] == [[0], [], [1, 2, 3], [4, 5]]
    pieces[3].zero_()
    assert x.tolist() == [[0, 1, 2], [3, 0, 0]]


def test_a_backend_without_means_of_its_own_builds_what_it_can() -> None:
    class BareBackend(BackendType):
        name = "bare"
        device_types = frozenset({"cpu"})
        communicator_kind = Bare

        def is_available(self) -> bool:
            return True

        def open(self, opening: object) -> Communicator:
            raise NotImplementedError

    support = BareBackend().support

    def kinds(operations: Sequence[str]) -> set[str]:
        return {support(operation, "cpu", torch.float32) for operation in operations}

    assert kinds(["all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"]) == {"native"}
    assert kinds(["all_reduce_list", "reduce", "gather", "scatter", "all_gather_list"]) == {"built"}
    assert kinds(["reduce_scatter", "reduce_scatter_list", "all_to_all"]) == {"built"}
    assert support("all_reduce", "cuda", torch.float32) == ""
    assert support("reduce", "cpu", torch.float32, ReduceOp.BAND) == ""
    assert support("reduce", "cpu", torch.int8, ReduceOp.BAND) == "built"


def _nothing() -> Communicator:
    from meshdist.backends.c10d.communicator import C10dCommunicator

    return C10dCommunicator("nothing", 0, 2, None)

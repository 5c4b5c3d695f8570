"""Every collective of a communicator on every dtype, against NumPy; run by each of its members."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import PrefixStore

from meshdist.backends.communicator import Communicator
from meshdist.backends.operation_args import OperationArgs
from meshdist.backends.registry import Opening, get_backend
from meshdist.backends.requests import BackendFailure, Chain, Request
from meshdist.reduce_ops import ReduceOp
from tests.backends.direct import Direct
from tests.backends.samples import DTYPES, bits, draw, legal_ops, reduced_in_numpy
from tests.inner import get_world

SECONDS = timedelta(seconds=30)
SHAPES = ((5,), (), (2, 3), (0,), (3, 0))


class Table:
    """One member's calls, their results compared as they come."""

    def __init__(self, communicator: Any, waits: bool) -> None:
        self.backend = communicator
        self.call = Direct(communicator, SECONDS, waits)
        self.rank = communicator.rank
        self.size = communicator.size
        self.seed = 0
        self.finished = 0
        self.shared = hashlib.sha256()

    def drawn(self, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """One tensor for each member, the same list on all."""
        self.seed += self.size
        return [draw(dtype, shape, self.seed + member) for member in range(self.size)]

    def finish(self, request: Request) -> None:
        self.finished += 1
        if self.finished % 5 == 0:  # some poll before they wait
            while not request.poll():
                time.sleep(0.0001)
        request.finish(SECONDS)

    def reducing(self, dtype: torch.dtype, op: str, shape: tuple[int, ...]) -> None:
        backend, kind = self.backend, getattr(ReduceOp, op)
        data = self.drawn(dtype, shape)
        expected = reduced_in_numpy(data, op)
        case = f"{backend.backend} of {self.size}: %s of {dtype} {shape} with {op}"

        x = data[self.rank].clone()
        self.finish(self.call.all_reduce(x, kind))
        expect(x, expected, op, case % "all_reduce")
        self.shared.update(bits(x))

        root = self.seed % self.size
        x = data[self.rank].clone()
        self.finish(self.call.reduce(x, kind, root))
        expect(x, expected if self.rank == root else data[self.rank], op, case % "reduce")

        tensors = [data[self.rank].clone() for _ in range(2)] + [torch.ones(3)]
        if op != "SUM":
            tensors.pop()
        self.finish(self.call.all_reduce_list(tensors, kind))
        for x in tensors[:2]:
            expect(x, expected, op, case % "all_reduce_list")
            self.shared.update(bits(x))
        assert tensors[2:] == [] or torch.equal(tensors[2], torch.full((3,), float(self.size)))

        whole = self.drawn(dtype, (self.size, *shape))
        x = torch.empty(shape, dtype=dtype)
        self.finish(self.call.reduce_scatter(x, whole[self.rank].clone(), kind))
        mine = [tensor[self.rank] for tensor in whole]
        expect(x, reduced_in_numpy(mine, op), op, case % "reduce_scatter")

        parts = [self.drawn(dtype, (1 + (j + self.seed) % 3,)) for j in range(self.size)]
        x = torch.empty_like(parts[self.rank][0])
        inputs = [part[self.rank].clone() for part in parts]
        self.finish(self.call.reduce_scatter_list(x, inputs, kind))
        expect(x, reduced_in_numpy(parts[self.rank], op), op, case % "reduce_scatter_list")

    def moving(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        backend, rank, size = self.backend, self.rank, self.size
        data = self.drawn(dtype, shape)
        count = data[0].numel()
        root = self.seed % size

        x = data[rank].clone()
        self.finish(self.call.broadcast(x, root))
        assert bits(x) == bits(data[root])

        x = torch.empty((size, *shape), dtype=dtype)
        self.finish(self.call.all_gather(x, data[rank]))
        assert bits(x) == bits(torch.stack(data))

        outputs = [torch.empty(count, dtype=dtype) for _ in range(size)]
        self.finish(self.call.all_gather_list(outputs, data[rank]))
        assert [bits(x) for x in outputs] == [bits(x) for x in data]

        uneven = [self.drawn(dtype, ((j + self.seed) % 3,))[j] for j in range(size)]
        outputs = [torch.empty_like(x) for x in uneven]
        self.finish(self.call.all_gather_list(outputs, uneven[rank]))
        assert [bits(x) for x in outputs] == [bits(x) for x in uneven]

        outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)] if rank == root else []
        self.finish(self.call.gather(outputs, data[rank], root))
        assert [bits(x) for x in outputs] == ([bits(x) for x in data] if outputs else [])

        x = torch.empty(shape, dtype=dtype)
        self.finish(self.call.scatter(x, data if rank == root else [], root))
        assert bits(x) == bits(data[rank])

        # Member i sends j as many elements as this table says; some rows are even, some not.
        for table in ((lambda i, j: (i + 2 * j) % 3), (lambda i, j: count), (lambda i, j: i)):
            sent = [[self.pair(dtype, table(i, j), i, j) for j in range(size)] for i in range(size)]
            expected = [sent[i][rank] for i in range(size)]
            outputs = [torch.empty_like(x) for x in expected]
            self.finish(self.call.all_to_all(outputs, sent[rank]))
            assert [bits(x) for x in outputs] == [bits(x) for x in expected]

            x = torch.empty(sum(len(x) for x in expected), dtype=dtype)
            input_sizes = [len(x) for x in sent[rank]]
            output_sizes = [len(x) for x in expected]
            together = joined(sent[rank])
            self.finish(self.call.all_to_all_single(x, together, output_sizes, input_sizes))
            assert bits(x) == bits(joined(expected))

        x = torch.empty(shape, dtype=dtype)
        later = Direct(backend, SECONDS)
        right, left = (rank + 1) % size, (rank - 1) % size
        received = later.recv(x, left, 7)
        sending = later.send(data[rank], right, 7)
        self.finish(received)
        self.finish(sending)
        assert bits(x) == bits(data[left])
        assert received.source() == left
        self.finish(self.call.barrier())

    def pair(self, dtype: torch.dtype, count: int, i: int, j: int) -> torch.Tensor:
        return draw(dtype, (count,), 1000 * self.seed + 10 * i + j)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    data = b"".join(map(bits, tensors))
    if not data:
        return tensors[0].new_empty(0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensors[0].dtype)


def expect(x: torch.Tensor, expected: torch.Tensor, op: str, case: str) -> None:
    """Exact, but for sums and products of floats, whose order is the backend's own."""
    assert (x.dtype, x.shape) == (expected.dtype, expected.shape), case
    is_rounded = x.dtype.is_floating_point or x.dtype.is_complex
    if not is_rounded or op in ("MIN", "MAX") or x.numel() == 0:
        assert bits(x) == bits(expected), f"{case}: {x} is not {expected}"
        return
    if x.dtype.is_complex:
        x, expected = (torch.view_as_real(t.to(torch.complex128)) for t in (x, expected))
        step = 1e-2 if "complex32" in case else 1e-6
    else:
        step = 4 * torch.finfo(x.dtype).eps
        x, expected = x.double(), expected.double()
    torch.testing.assert_close(x, expected, rtol=step, atol=step, equal_nan=True, msg=case)


def check_every_operation(
    communicator: Communicator | OnDevice,
    dtypes: Iterable[torch.dtype] = DTYPES,
    *,
    waits: bool = False,
) -> str:
    """Run the whole table; returns a digest of what every member must hold alike.

    Args:
        communicator: this member's.
        dtypes: of the tensors.
        waits: whether collectives are started by a caller that waits at once.
    """
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    table = Table(communicator, waits)
    case = 0
    for dtype in dtypes:
        for op in legal_ops(dtype):
            case += 1
            table.reducing(dtype, op, SHAPES[case % len(SHAPES)])
        table.moving(dtype, SHAPES[case % len(SHAPES)])
    for shape in SHAPES:
        table.reducing(torch.float32, "SUM", shape)
        table.reducing(torch.int16, "MAX", shape)
        table.moving(torch.float32, shape)
        table.moving(torch.complex128, shape)
    return table.shared.hexdigest()


class OnDevice:
    """A communicator for tensors in host memory that hands copies on a device to another one.

    Args:
        backend: the other one.
        device: of the copies.
    """

    def __init__(self, backend: Communicator, device: str) -> None:
        self.backend, self.rank, self.size = backend.backend, backend.rank, backend.size
        self._of_device = backend
        self._device = device

    def start(self, prepared: OperationArgs) -> Request:
        inputs, outputs = prepared.inputs, prepared.outputs
        tensors = {id(x): x for x in (*inputs, *outputs)}
        copies = {key: x.to(self._device, copy=True) for key, x in tensors.items()}
        moved = copy(prepared)
        moved.inputs = [copies[id(x)] for x in inputs]
        moved.outputs = moved.inputs if outputs is inputs else [copies[id(x)] for x in outputs]

        def copy_back() -> None:
            for key, x in tensors.items():
                x.copy_(copies[key])

        return Chain([self._of_device.start(moved)], copy_back)


def start_waiting_for_another(
    backend: Communicator, operation: str, timeout: timedelta = SECONDS
) -> Request:
    """Start ``operation`` on member 0 of 2 so that it cannot end before member 1 starts it."""
    one, two = torch.ones(4), torch.ones(8)
    call = Direct(backend, timeout)
    pair = [torch.ones(4), torch.ones(4)]
    uneven = [torch.ones(4), torch.ones(3)]
    wide = torch.ones(4, dtype=torch.int16)
    starts: dict[str, Callable[[], Request]] = {
        "all_reduce": lambda: call.all_reduce(one, ReduceOp.SUM),
        "all_reduce, widened": lambda: call.all_reduce(wide, ReduceOp.SUM),
        "all_reduce, gathered": lambda: call.all_reduce(wide.view(torch.uint64), ReduceOp.MAX),
        "all_reduce_list": lambda: call.all_reduce_list(pair, ReduceOp.SUM),
        "all_reduce_list, two dtypes": lambda: call.all_reduce_list(
            [one, two.double()], ReduceOp.SUM
        ),
        "reduce": lambda: call.reduce(one, ReduceOp.SUM, 0),
        "broadcast": lambda: call.broadcast(one, 1),
        "all_gather": lambda: call.all_gather(two, one),
        "all_gather_list": lambda: call.all_gather_list(pair, one),
        "all_gather_list, uneven": lambda: call.all_gather_list(uneven, one),
        "gather": lambda: call.gather(pair, one, 0),
        "scatter": lambda: call.scatter(one, [], 1),
        "reduce_scatter": lambda: call.reduce_scatter(one, two, ReduceOp.SUM),
        "reduce_scatter_list": lambda: call.reduce_scatter_list(one, uneven, ReduceOp.SUM),
        "all_to_all": lambda: call.all_to_all(pair, pair),
        "all_to_all_single": lambda: call.all_to_all_single(torch.ones(8), two, [4, 4], [4, 4]),
        "barrier": lambda: call.barrier(),
        "recv": lambda: call.recv(one, 1, 3),
        "recv from anyone": lambda: call.recv(one, None, 3),
    }
    return starts[operation]()


WAITING = (
    "all_reduce",
    "all_reduce, widened",
    "all_reduce, gathered",
    "all_reduce_list",
    "all_reduce_list, two dtypes",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_list",
    "all_gather_list, uneven",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_list",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "recv",
    "recv from anyone",
)
"""What ``start_waiting_for_another`` starts."""


def waiting_times(
    wrap: Callable[[Communicator], Communicator],
    operations: Sequence[str],
    ends: str,
    backend_name: str = "gloo",
    hosts: tuple[int, ...] = (0, 0),
) -> list[tuple[str, str, float]]:
    """How each collective ends for member 0 where member 1 never comes, and after how many seconds.

    Args:
        wrap: called with each collective's own communicator of two members.
        collectives: of WAITING.
        ends: "abort" after 0.3 s from another thread, or "timeout" after 0.6 s.
        backend_name: of the communicators.
        hosts: of the members.
    """
    limit = SECONDS if ends == "abort" else timedelta(seconds=0.6)
    world = get_world()
    backends = []
    for operation in operations:
        keys = partial(PrefixStore, f"{ends} {operation}", world.store)
        is_one_host = len(set(hosts)) == 1
        opening = Opening(
            keys(), keys, (0, 1), world.rank, "cpu", SECONDS, is_one_host, hosts=hosts
        )
        backends.append(get_backend(backend_name).open(opening))
    if world.rank == 1:
        world.store.wait(["over"])
        return []

    def wait(operation: str, backend: Communicator) -> tuple[str, str, float]:
        request = start_waiting_for_another(backend, operation, limit)
        begin = time.monotonic()
        try:
            request.finish(limit)
            how = "done"
        except BackendFailure as failure:
            how = type(failure).__name__
        return operation, how, time.monotonic() - begin

    members = [wrap(backend) for backend in backends]
    with ThreadPoolExecutor(len(operations)) as threads:
        waiting = threads.map(wait, operations, members)
        if ends == "abort":
            time.sleep(0.3)
            for member in members:
                member.abort()
        answers = list(waiting)
    world.store.set("over", "")
    return answers

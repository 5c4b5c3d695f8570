"""The examples of torch.distributed's documentation: their inputs, and the outputs it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshdist as dist
from tests.operations.cases import BACKENDS
from tests.pool import Pool

I64, C64 = torch.int64, torch.complex64

EXAMPLES: dict[str, tuple[int, Callable[[], Any], list[Any]]] = {}
"""name -> how many ranks, the program, what it returns by rank."""


def example(size: int, *by_rank: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Note a program; one value means that every rank returns it."""
    wanted = list(by_rank) if len(by_rank) > 1 else [by_rank[0]] * size

    def note(program: Callable[[], Any]) -> Callable[[], Any]:
        EXAMPLES[program.__name__] = (size, program, wanted)
        return program

    return note


def lists(tensors: Any) -> list[Any]:
    return [tensor.tolist() for tensor in tensors]


def complex_row(rank: int) -> torch.Tensor:
    return torch.tensor([1 + 1j, 2 + 2j], dtype=C64) + 2 * rank * (1 + 1j)


@pytest.mark.parametrize(
    "backend",
    [pytest.param(one, marks=[pytest.mark.soak] if one == "mpi" else []) for one in BACKENDS],
)
def test_documented_examples(backend: str, pool: Pool) -> None:
    """All examples of one world size are one program, so that few worlds are made."""
    for size in sorted({size for size, _, _ in EXAMPLES.values()}):
        of_size = {name: one for name, one in EXAMPLES.items() if one[0] == size}
        programs = {name: program for name, (_, program, _) in of_size.items()}
        found = BACKENDS[backend](pool, run_all, size, programs)
        for name, (_, _, wanted) in of_size.items():
            assert [one[name] for one in found] == wanted, name


def run_all(programs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: program() for name, program in programs.items()}


# -- reductions -----------------------------------------------------------------------------------


@example(2, [4, 6])
def all_reduce() -> list[int]:
    tensor = torch.arange(2, dtype=I64) + 1 + 2 * dist.get_rank()
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.tolist()


@example(2, [4 + 4j, 6 + 6j])
def all_reduce_complex() -> list[complex]:
    tensor = complex_row(dist.get_rank())
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    return tensor.tolist()


@example(2, [0, 2], [4, 6])
def reduce_scatter_tensor_concatenated() -> list[int]:
    tensor_out = torch.zeros(2, dtype=I64)
    dist.reduce_scatter_tensor(tensor_out, torch.arange(2 * 2, dtype=I64))
    return tensor_out.tolist()


@example(2, [0, 2], [4, 6])
def reduce_scatter_tensor_stacked() -> list[int]:
    tensor_out = torch.zeros(2, dtype=I64)
    dist.reduce_scatter_tensor(tensor_out, torch.arange(2 * 2, dtype=I64).reshape(2, 2))
    return tensor_out.tolist()


@example(2, [0, 2], [4, 6])
def reduce_scatter_single() -> list[int]:
    tensor_out = torch.zeros(2, dtype=I64)
    dist.reduce_scatter_single(tensor_out, torch.arange(2 * 2, dtype=I64))
    return tensor_out.tolist()


# -- gathering and spreading ----------------------------------------------------------------------


@example(2, [[1, 2], [3, 4]])
def all_gather() -> list[Any]:
    tensor_list = [torch.zeros(2, dtype=I64) for _ in range(2)]
    dist.all_gather(tensor_list, torch.arange(2, dtype=I64) + 1 + 2 * dist.get_rank())
    return lists(tensor_list)


@example(2, [[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]])
def all_gather_complex() -> list[Any]:
    tensor_list = [torch.zeros(2, dtype=C64) for _ in range(2)]
    dist.all_gather(tensor_list, complex_row(dist.get_rank()))
    return lists(tensor_list)


@example(2, [1, 2, 3, 4])
def all_gather_into_tensor_concatenated() -> list[int]:
    tensor_out = torch.zeros(2 * 2, dtype=I64)
    tensor_in = torch.arange(2, dtype=I64) + 1 + 2 * dist.get_rank()
    dist.all_gather_into_tensor(tensor_out, tensor_in)
    return tensor_out.tolist()


@example(2, [[1, 2], [3, 4]])
def all_gather_into_tensor_stacked() -> list[Any]:
    tensor_out = torch.zeros(2, 2, dtype=I64)
    tensor_in = torch.arange(2, dtype=I64) + 1 + 2 * dist.get_rank()
    dist.all_gather_into_tensor(tensor_out, tensor_in)
    return tensor_out.tolist()


@example(2, [1, 2, 3, 4])
def all_gather_single() -> list[int]:
    tensor_out = torch.zeros(2 * 2, dtype=I64)
    tensor_in = torch.arange(2, dtype=I64) + 1 + 2 * dist.get_rank()
    dist.all_gather_single(tensor_out, tensor_in)
    return tensor_out.tolist()


@example(2, [[[[1, 1], [1, 1]], [2], [3, 3]], [[[3, 3], [3, 3]], [5], [1, 1]]])
def all_gather_coalesced() -> list[Any]:
    inputs = [
        [torch.tensor([[1, 1], [1, 1]]), torch.tensor([2]), torch.tensor([3, 3])],
        [torch.tensor([[3, 3], [3, 3]]), torch.tensor([5]), torch.tensor([1, 1])],
    ][dist.get_rank()]
    outputs = [[torch.full_like(one, -1) for one in inputs] for _ in range(2)]
    dist.all_gather_coalesced(outputs, inputs)
    return [lists(one) for one in outputs]


@example(2, [[1.0, 1.0], [2.0, 2.0]], None)
def gather() -> list[Any] | None:
    tensor = torch.ones(2) + dist.get_rank()
    if dist.get_rank() == 0:
        gather_list = [torch.zeros_like(tensor) for _ in range(2)]
        dist.gather(tensor, gather_list, dst=0)
        return lists(gather_list)
    return dist.gather(tensor, None, dst=0)


@example(2, [1.0, 1.0], [5.0, 5.0])
def scatter() -> list[float]:
    output_tensor = torch.zeros(2)
    if dist.get_rank() == 0:
        # Only tensors, all of which must be the same size.
        scatter_list = [torch.ones(2), torch.ones(2) * 5]
    else:
        scatter_list = None
    dist.scatter(output_tensor, scatter_list, src=0)
    return output_tensor.tolist()


# -- all to all -----------------------------------------------------------------------------------

INPUT_SPLITS = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
OUTPUT_SPLITS = [[2, 3, 2, 2], [2, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 1]]
UNEVEN_RESULTS = [
    [0, 1, 10, 11, 12, 20, 21, 30, 31],
    [2, 3, 13, 14, 22, 32, 33],
    [4, 15, 16, 23, 34, 35],
    [5, 17, 18, 24, 36],
]
TURNED = [[rank, rank + 4, rank + 8, rank + 12] for rank in range(4)]
TURNED_COMPLEX = [[(number + 1) * (1 + 1j) for number in row] for row in TURNED]


def uneven_input(rank: int) -> torch.Tensor:
    return [torch.arange(6), torch.arange(10, 19), torch.arange(20, 25), torch.arange(30, 37)][rank]


def complex_input(rank: int) -> torch.Tensor:
    return torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j], dtype=C64) + 4 * rank * (1 + 1j)


@example(4, *TURNED)
def all_to_all() -> list[int]:
    inputs = list((torch.arange(4) + dist.get_rank() * 4).chunk(4))
    outputs = list(torch.empty([4], dtype=I64).chunk(4))
    dist.all_to_all(outputs, inputs)
    return torch.cat(outputs).tolist()


@example(4, *UNEVEN_RESULTS)
def all_to_all_uneven() -> list[int]:
    rank = dist.get_rank()
    inputs = list(uneven_input(rank).split(INPUT_SPLITS[rank]))
    outputs = [torch.empty(size, dtype=I64) for size in OUTPUT_SPLITS[rank]]
    dist.all_to_all(outputs, inputs)
    return torch.cat(outputs).tolist()


@example(4, *TURNED_COMPLEX)
def all_to_all_complex() -> list[complex]:
    inputs = list(complex_input(dist.get_rank()).chunk(4))
    outputs = list(torch.empty([4], dtype=C64).chunk(4))
    dist.all_to_all(outputs, inputs)
    return torch.cat(outputs).tolist()


@example(4, *TURNED)
def all_to_all_single() -> list[int]:
    output = torch.empty([4], dtype=I64)
    dist.all_to_all_single(output, torch.arange(4) + dist.get_rank() * 4)
    return output.tolist()


@example(4, *UNEVEN_RESULTS)
def all_to_all_single_uneven() -> list[int]:
    rank = dist.get_rank()
    output = torch.empty(sum(OUTPUT_SPLITS[rank]), dtype=I64)
    dist.all_to_all_single(output, uneven_input(rank), OUTPUT_SPLITS[rank], INPUT_SPLITS[rank])
    return output.tolist()


@example(4, *TURNED_COMPLEX)
def all_to_all_single_complex() -> list[complex]:
    output = torch.empty([4], dtype=C64)
    dist.all_to_all_single(output, complex_input(dist.get_rank()))
    return output.tolist()


# -- point to point -------------------------------------------------------------------------------


@example(2, [2.0, 3.0], [0.0, 1.0])
def batch_isend_irecv() -> list[float]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    send_tensor = torch.arange(2, dtype=torch.float32) + 2 * rank
    recv_tensor = torch.randn(2, dtype=torch.float32)
    send_op = dist.P2POp(dist.isend, send_tensor, (rank + 1) % world_size)
    recv_op = dist.P2POp(dist.irecv, recv_tensor, (rank - 1 + world_size) % world_size)
    for req in dist.batch_isend_irecv([send_op, recv_op]):
        req.wait()
    return recv_tensor.tolist()


@example(2, 1.0)
def tutorial_blocking() -> float:
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    else:
        dist.recv(tensor=tensor, src=0)
    return tensor[0].item()


@example(2, 1.0)
def tutorial_immediate() -> float:
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 1
        req = dist.isend(tensor=tensor, dst=1)
    else:
        req = dist.irecv(tensor=tensor, src=0)
    req.wait()
    return tensor[0].item()


@example(2, 2.0)
def tutorial_group() -> float:
    group = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor[0].item()


@example(4, [10.0, 10.0])
def tutorial_ring() -> list[float]:
    """The tutorial's all-reduce: each rank passes on what it received, and adds it up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    send = torch.full((2,), rank + 1.0)
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    left, right = ((rank - 1) + size) % size, (rank + 1) % size
    for step in range(size - 1):
        sent, received = (send_buff, recv_buff) if step % 2 == 0 else (recv_buff, send_buff)
        send_req = dist.isend(sent, right)
        dist.recv(received, left)
        accum += received
        send_req.wait()
    return accum.tolist()


# -- objects --------------------------------------------------------------------------------------

OBJECTS = ["foo", 12, {1: 2}]


@example(3, OBJECTS)
def all_gather_object() -> list[Any]:
    output: list[Any] = [None for _ in OBJECTS]
    dist.all_gather_object(output, OBJECTS[dist.get_rank()])
    return output


@example(3, OBJECTS, None, None)
def gather_object() -> list[Any] | None:
    output: list[Any] | None = [None for _ in OBJECTS] if dist.get_rank() == 0 else None
    dist.gather_object(OBJECTS[dist.get_rank()], output, dst=0)
    return output


@example(3, OBJECTS)
def broadcast_object_list() -> list[Any]:
    objects = list(OBJECTS) if dist.get_rank() == 0 else [None, None, None]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
    return objects


@example(3, ["foo"], [12], [{1: 2}])
def scatter_object_list() -> list[Any]:
    objects = list(OBJECTS) if dist.get_rank() == 0 else [None, None, None]
    output: list[Any] = [None]
    dist.scatter_object_list(output, objects, src=0)
    return output


@example(2, OBJECTS)
def send_object_list() -> list[Any]:
    if dist.get_rank() == 0:
        objects = list(OBJECTS)
        dist.send_object_list(objects, dst=1, device=torch.device("cpu"))
    else:
        objects = [None, None, None]
        assert dist.recv_object_list(objects, src=0, device=torch.device("cpu")) == 0
    return objects


# -- the old package ------------------------------------------------------------------------------


@example(2, [[16.0]] * 8)
def all_reduce_multigpu() -> list[Any]:
    tensor_list = [torch.ones(1) for _ in range(8)]
    dist.all_reduce_multigpu(tensor_list)
    return lists(tensor_list)


# -- CUDA -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_two_streams() -> None:
    """The documentation's example for the meaning of wait: the add comes after the reduction."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def program() -> float:
        rank = dist.get_rank()
        torch.cuda.set_device(0)
        output = torch.tensor([rank]).cuda()
        side = torch.cuda.Stream()
        handle = dist.all_reduce(output, async_op=True)
        handle.wait()  # enqueued, not necessarily done
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            output.add_(100)
        side.synchronize()
        return float(output.item())

    assert dist.simulate(program, 2) == [101.0, 101.0]

"""Verbs, reductions and dtypes that a wire lacks, made from what it has.

Each function starts what it is built from and returns one operation that ends when all of it has
ended. Results are the same bits on every member, since every member reduces in group order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ..reduce_ops import ReduceKind
from .pending import Chain
from .reductions import check_reducible, reduce_into, reduced

if TYPE_CHECKING:
    from .base import Communicator

__all__ = [
    "all_gather_list",
    "all_reduce_by_gathering",
    "all_reduce_widened",
    "all_to_all",
    "all_to_all_by_packing",
    "all_to_all_single",
    "gather",
    "parts",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_by_exchange",
    "reduce_scatter_list",
    "scatter",
]

EXCHANGE_TAG = (1 << 30) - 1
"""The tag of messages that belong to an all-to-all; no program's message bears it."""


def all_reduce_by_gathering(
    wire: Communicator, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
) -> Chain:
    """An all-reduce of an op or dtype that the wire cannot reduce: gathered, then reduced here."""
    check_reducible(wire.wire, op, tensor.dtype)
    whole = tensor.new_empty(wire.size * tensor.numel())
    gathered = wire.all_gather(whole, tensor, timeout)
    return Chain([gathered], lambda: _write(tensor, reduced(_blocks(whole, wire.size), op)))


def all_reduce_widened(
    wire: Communicator,
    tensor: torch.Tensor,
    op: ReduceKind,
    dtype: torch.dtype,
    timeout: timedelta,
) -> Chain:
    """An all-reduce in another dtype, which holds all values of the tensor's; rounded once."""
    wide = tensor.to(dtype)
    return Chain([wire.all_reduce(wide, op, timeout)], lambda: _write(tensor, wide))


def reduce(
    wire: Communicator, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
) -> Chain:
    """An all-reduce, in a copy on all members but the root."""
    target = tensor if wire.rank == root else tensor.clone()
    return Chain([wire.all_reduce(target, op, timeout)])


def gather(
    wire: Communicator,
    outputs: Sequence[torch.Tensor],
    tensor: torch.Tensor,
    root: int,
    timeout: timedelta,
) -> Chain:
    """An all-gather, of which the root alone keeps the result."""
    whole = tensor.new_empty(wire.size * tensor.numel())
    gathered = wire.all_gather(whole, tensor, timeout)
    return Chain([gathered], lambda: _write_parts(outputs, whole))


def scatter(
    wire: Communicator,
    tensor: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    root: int,
    timeout: timedelta,
) -> Chain:
    """A broadcast of everything, of which each member keeps its part."""
    count = tensor.numel()
    whole = _packed(inputs) if wire.rank == root else tensor.new_empty(wire.size * count)
    sent = wire.broadcast(whole, root, timeout)
    return Chain([sent], lambda: _write(tensor, whole[wire.rank * count :][:count]))


def all_gather_list(
    wire: Communicator, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
) -> Chain:
    """One all-gather where sizes are equal, else one broadcast from each member."""
    if all(output.numel() == tensor.numel() for output in outputs):
        whole = tensor.new_empty(wire.size * tensor.numel())
        gathered = wire.all_gather(whole, tensor, timeout)
        return Chain([gathered], lambda: _write_parts(outputs, whole))
    _write(outputs[wire.rank], tensor)
    return Chain([wire.broadcast(output, root, timeout) for root, output in enumerate(outputs)])


def reduce_scatter(
    wire: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceKind,
    timeout: timedelta,
) -> Chain:
    """An all-reduce, of which each member keeps its block."""
    return reduce_scatter_list(wire, output, _blocks(tensor, wire.size), op, timeout)


def reduce_scatter_list(
    wire: Communicator,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    op: ReduceKind,
    timeout: timedelta,
) -> Chain:
    """An all-reduce of all inputs one after the other, of which each member keeps its own."""
    whole = _packed(inputs)
    start = sum(part.numel() for part in inputs[: wire.rank])
    reduction = wire.all_reduce(whole, op, timeout)
    return Chain([reduction], lambda: _write(output, whole[start:][: output.numel()]))


def reduce_scatter_by_exchange(
    wire: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    sizes: Sequence[int],
    op: ReduceKind,
    timeout: timedelta,
) -> Chain:
    """An all-to-all of the parts of ``tensor``, of which each member reduces those for it.

    ``sizes[j]`` is the number of elements of member j's part.
    """
    check_reducible(wire.wire, op, tensor.dtype)
    count = output.numel()
    mine = wire.scratch.take(wire.size * count, tensor)
    exchanged = wire.all_to_all_single(mine, tensor, [count] * wire.size, sizes, timeout)

    def settle() -> None:
        with torch.inference_mode():  # it may be a parameter, or an inference tensor
            reduce_into(output.view(-1), _blocks(mine, wire.size), op)
        wire.scratch.give(mine)

    return Chain([exchanged], settle)


def all_to_all(
    wire: Communicator,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    timeout: timedelta,
) -> Chain:
    """One message to and from each other member."""
    _write(outputs[wire.rank], inputs[wire.rank])
    others = [peer for peer in range(wire.size) if peer != wire.rank]
    receives = [wire.recv(outputs[j], j, EXCHANGE_TAG, timeout) for j in others]
    return Chain([*receives, *(wire.send(inputs[j], j, EXCHANGE_TAG, timeout) for j in others)])


def all_to_all_by_packing(
    wire: Communicator,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    timeout: timedelta,
) -> Chain:
    """An all-to-all over consecutive parts of two scratch tensors."""
    packed = _packed(inputs)
    output_sizes = [output.numel() for output in outputs]
    whole = packed.new_empty(sum(output_sizes))
    input_sizes = [part.numel() for part in inputs]
    exchanged = wire.all_to_all_single(whole, packed, output_sizes, input_sizes, timeout)
    return Chain([exchanged], lambda: _write_all(outputs, parts(whole, output_sizes)))


def all_to_all_single(
    wire: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    timeout: timedelta,
) -> Chain:
    """An all-to-all over views of both tensors."""
    outputs = parts(output, output_sizes)
    inputs = parts(tensor, input_sizes)
    return Chain([wire.all_to_all(outputs, inputs, timeout)])


def parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive parts of a contiguous tensor, flat; sizes in elements."""
    return list(tensor.view(-1).split(list(sizes)))


def _blocks(whole: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, ...]:
    return whole.view(num_blocks, whole.numel() // num_blocks).unbind()


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write_parts(outputs: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
    if outputs:
        _write_all(outputs, _blocks(whole, len(outputs)))


def _write_all(outputs: Sequence[torch.Tensor], data: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        for output, part in zip(outputs, data, strict=True):
            output.view(-1).copy_(part)


def _write(output: torch.Tensor, data: torch.Tensor) -> None:
    _write_all((output,), (data.view(-1),))

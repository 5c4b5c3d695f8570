"""Reductions and exchanges in another way than a wire's own, for what its own cannot do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dtypes import DTYPES, IN_ORDER
from ..reduce_ops import ReduceKind, ReduceOp
from .communicator import Communicator
from .operations import Chain, Operation, Terms
from .packing import Tensors, blocks, packed, parts, write, write_all
from .reductions import check_reducible, divide, flip, reduce_into, reduced, to_order

__all__ = [
    "all_reduce_by_gathering",
    "all_reduce_dividing",
    "all_reduce_widened",
    "all_to_all_by_packing",
    "reduce_scatter_by_exchange",
]


def all_reduce_by_gathering(
    wire: Communicator, tensor: torch.Tensor, op: ReduceKind, terms: Terms
) -> Operation:
    """An all-reduce of an op or dtype that the wire cannot reduce: gathered, then reduced here."""
    check_reducible(wire.wire, op, tensor.dtype)
    whole = tensor.new_empty(wire.size * tensor.numel())
    gathered = wire.all_gather(whole, tensor, terms)
    return Chain([gathered], lambda: write(tensor, reduced(blocks(whole, wire.size), op)))


def all_reduce_dividing(wire: Communicator, tensor: torch.Tensor, terms: Terms) -> Operation:
    """An all-reduce to the mean: the sum, divided where it lies."""
    check_reducible(wire.wire, ReduceOp.AVG, tensor.dtype)
    summed = wire.all_reduce(tensor, ReduceOp.SUM, terms)
    return Chain([summed], lambda: divide(tensor, wire.size))


def all_reduce_widened(
    wire: Communicator, tensor: torch.Tensor, op: ReduceKind, dtype: torch.dtype, terms: Terms
) -> Operation:
    """An all-reduce in another dtype, which holds all values of the tensor's; rounded once.

    Where that is one of whole numbers, floats are compared there in their order, and NaN is kept.
    A copy is sent, so that a call that fails leaves the caller's floats as they were.
    """
    is_ordered = dtype in IN_ORDER.values() and tensor.dtype.is_floating_point
    held = (DTYPES[tensor.dtype].wide or tensor.dtype) if is_ordered else dtype
    wide = tensor.to(held, copy=True)
    sent = to_order(wide.view(-1), op) if is_ordered else wide
    started = wire.all_reduce(sent, op, terms)
    return Chain([started], lambda: write(tensor, flip(sent).view(held) if is_ordered else wide))


def reduce_scatter_by_exchange(
    wire: Communicator,
    output: torch.Tensor,
    tensor: torch.Tensor,
    sizes: Sequence[int],
    op: ReduceKind,
    terms: Terms,
) -> Operation:
    """Exchange the parts, ``sizes[j]`` elements for member j; each member reduces those for it."""
    check_reducible(wire.wire, op, tensor.dtype)
    count = output.numel()
    mine = wire.scratch.take(wire.size * count, tensor)
    exchanged = wire.all_to_all_single(mine, tensor, [count] * wire.size, sizes, terms)

    def reduce_mine() -> None:
        with torch.inference_mode():  # it may be a parameter, or an inference tensor
            reduce_into(output.view(-1), blocks(mine, wire.size), op)
        wire.scratch.give(mine)

    return Chain([exchanged], reduce_mine)


def all_to_all_by_packing(
    wire: Communicator, outputs: Tensors, inputs: Tensors, terms: Terms
) -> Operation:
    """An all-to-all over consecutive parts of two scratch tensors."""
    together = packed(inputs)
    output_sizes = [output.numel() for output in outputs]
    whole = together.new_empty(sum(output_sizes))
    input_sizes = [part.numel() for part in inputs]
    exchanged = wire.all_to_all_single(whole, together, output_sizes, input_sizes, terms)
    return Chain([exchanged], lambda: write_all(outputs, parts(whole, output_sizes)))

"""Reductions and exchanges in another way than a wire's own, for what its own cannot do.

Where tensors of several ranks are reduced in this process, equal parts give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtypes import DTYPES, IN_ORDER, SIGNED, dtype_name
from ..errors import DtypeError
from ..reduce_ops import ON_BOOL, ReduceKind, ReduceOp, find_refusal
from .communicator import Communicator
from .operations import Chain, Operation, Terms
from .packing import Tensors, blocks, packed, parts, write, write_all

__all__ = [
    "all_reduce_by_gathering",
    "all_reduce_dividing",
    "all_reduce_widened",
    "all_to_all_by_packing",
    "check_reducible",
    "divide",
    "find_lack",
    "flip",
    "reduce_into",
    "reduce_scatter_by_exchange",
    "reduced",
    "to_order",
]

_EXACT = (torch.float32, torch.float64)
"""Dtypes that are reduced in their own arithmetic."""

_PIECE = 1 << 15  # elements: they stay in a core's cache, and torch starts no threads for them

_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)

_IN_PLACE: dict[ReduceKind, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def find_lack(op: ReduceKind, dtype: torch.dtype) -> str | None:
    """Return what ``op`` serves, for messages, where ``reduced`` cannot reduce ``dtype``."""
    if dtype not in DTYPES:
        return "bool, or integers, floats and complex numbers of 8 bits and more"
    return find_refusal(op, dtype)


def check_reducible(wire: str, op: ReduceKind, dtype: torch.dtype) -> None:
    """Raise DtypeError where ``reduced`` cannot reduce ``dtype``, and so ``wire`` cannot."""
    lack = find_lack(op, dtype)
    if lack is not None:
        raise DtypeError(
            f"the wire {wire!r} cannot reduce {dtype_name(dtype)} with {op.name}",
            expected=lack,
            fix="use another reduction, or convert the tensor",
        )


def reduce_into(output: torch.Tensor, parts: Tensors, op: ReduceKind) -> None:
    """Reduce flat tensors, first to last, into ``output``, which none of them overlaps."""
    dtype = output.dtype
    if dtype in _EXACT and output.is_cpu:
        output.copy_(parts[0])
        for part in parts[1:]:
            _IN_PLACE[op](output, part)
        if op == ReduceOp.AVG:
            divide(output, len(parts))
    else:
        output.copy_(reduced(parts, op))


def reduced(parts: Tensors, op: ReduceKind) -> torch.Tensor:
    """Reduce flat tensors, first to last, into a new one; narrow floats by way of float32."""
    dtype = parts[0].dtype
    device = parts[0].device
    if dtype is torch.bool:
        op = ON_BOOL[op]
    if dtype in SIGNED:
        return _reduced_unsigned(parts, op)
    facts = DTYPES[dtype]
    wide = (None if facts.is_whole else facts.wide) or dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _IN_PLACE[op](total, part.to(device, wide))
    if op == ReduceOp.AVG:
        divide(total, len(parts))
    return total.to(dtype)


def divide(total: torch.Tensor, num: int) -> None:
    """Make a mean of the sum of ``num`` parts, in place; of whole numbers rounded toward zero."""
    facts = DTYPES[total.dtype]
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        if not facts.is_whole:
            total.div_(num)
        elif total.dtype is torch.uint64:
            _divide_unsigned(total.view(torch.int64), num)
        elif facts.wide is not None:  # where ``num`` may be too large for its own
            total.copy_(total.to(facts.wide).div_(num, rounding_mode="trunc"))
        else:
            total.div_(num, rounding_mode="trunc")


def to_order(x: torch.Tensor, op: ReduceKind) -> torch.Tensor:
    """Flat floats, turned where they lie into whole numbers in their order; NaN is ``op``'s end."""
    bits = x.view(IN_ORDER[x.dtype])
    info = torch.iinfo(bits.dtype)
    with torch.inference_mode():  # it may be a parameter, or an inference tensor
        for numbers, some in zip(x.split(_PIECE), bits.split(_PIECE), strict=True):
            is_nan = numbers.isnan()
            flip(some).masked_fill_(is_nan, info.max if op == ReduceOp.MAX else info.min)
    return bits


def flip(bits: torch.Tensor) -> torch.Tensor:
    """Turn bits of floats into places in the order, or back: behind a sign, which counts down."""
    info = torch.iinfo(bits.dtype)
    with torch.inference_mode():
        for some in bits.split(_PIECE):
            some.bitwise_xor_((some >> (info.bits - 1)).bitwise_and_(info.max))
    return bits


def _divide_unsigned(bits: torch.Tensor, num: int) -> None:
    """Divide numbers of 64 bits, read as signed ones, without their sign: no dtype is wider."""
    halves = (bits >> 1).bitwise_and_(torch.iinfo(bits.dtype).max)
    quotient = halves.div_(num, rounding_mode="trunc").mul_(2)
    rest = bits - quotient * num  # from 0 to 2 * num
    bits.copy_(quotient.add_(rest >= num))


def _reduced_unsigned(parts: Tensors, op: ReduceKind) -> torch.Tensor:
    """Wrapping sums and bits do not know the sign; the order does, so its bit is flipped."""
    dtype = parts[0].dtype
    signed = SIGNED[dtype]
    flip = torch.iinfo(signed).min if op in _ORDERED else 0
    step = ReduceOp.SUM if op == ReduceOp.AVG else op
    total = reduced([part.view(signed).bitwise_xor(flip) for part in parts], step)
    whole = total.bitwise_xor_(flip).view(dtype)
    if op == ReduceOp.AVG:
        divide(whole, len(parts))
    return whole


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

"""What a wire is asked to reduce in place of an op or dtype that it lacks.

Where the same bits read as another dtype give the same result, nothing is copied: sums of uint32
are sums of int32, bits of int16 are bits of bytes, the or of bool is its maximum. Where a wider
dtype holds all values, a copy is reduced and rounded once. What has neither (bits over NCCL, the
order of uint64) is gathered and reduced in this process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ..reduce_ops import ReduceKind, ReduceOp

__all__ = ["GLOO", "NCCL", "UCC", "Arithmetic", "StandIn", "read_as"]

_SUM, _AVG, _PRODUCT = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT
_MIN, _MAX = ReduceOp.MIN, ReduceOp.MAX
_BITS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_WRAPPING = frozenset({_SUM, _PRODUCT, *_BITS})

_SAME_BITS = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
"""The dtype whose sums are the sums of these, bit for bit."""

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
}
"""The next dtype that holds all values of these."""

_OF_BOOL = {
    _SUM: _MAX,
    ReduceOp.BOR: _MAX,
    _PRODUCT: _MIN,
    ReduceOp.BAND: _MIN,
}
"""Equal on bool, and right on bytes that are 0 or 1."""


@dataclass(frozen=True)
class StandIn:
    """What to reduce instead.

    Args:
        op: the op to ask for.
        dtype: the dtype to reduce in.
        is_view: whether the tensor's own bits are read as ``dtype``; else its values are
            converted, and the result is converted back.
    """

    op: ReduceKind
    dtype: torch.dtype
    is_view: bool


class Arithmetic:
    """Which reductions a wire computes rightly.

    Args:
        ops: by dtype, the ops that it has.
    """

    def __init__(self, ops: Mapping[torch.dtype, frozenset[ReduceKind]]) -> None:
        self._ops = ops
        self.find = cache(self._find)

    def has(self, op: ReduceKind, dtype: torch.dtype) -> bool:
        """Whether the wire reduces ``dtype`` by ``op`` as it is."""
        return op in self._ops.get(dtype, ())

    def _find(self, op: ReduceKind, dtype: torch.dtype) -> StandIn | None:
        """Return what to ask for; None where there is nothing but gathering."""
        for candidate in _candidates(op, dtype):
            if self.has(candidate.op, candidate.dtype):
                return candidate
        return None


def _candidates(op: ReduceKind, dtype: torch.dtype) -> Iterator[StandIn]:
    yield StandIn(op, dtype, True)
    if dtype is torch.bool and op in _OF_BOOL:
        yield StandIn(_OF_BOOL[op], dtype, True)
    if dtype in _SAME_BITS and (op in _WRAPPING or dtype.is_complex):
        yield StandIn(op, _SAME_BITS[dtype], True)
    if op in _BITS:
        yield StandIn(op, torch.uint8, True)
    if dtype in _WIDER:
        yield StandIn(op, _WIDER[dtype], False)


def read_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of ``dtype``."""
    if dtype is tensor.dtype:
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    # One element, or none, counts as contiguous whatever its stride, but is not read as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)


_NUMBERS = frozenset({_SUM, _PRODUCT, _MIN, _MAX})
_MEAN = frozenset({*_NUMBERS, _AVG})
_INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

GLOO = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS | _BITS)
    | dict.fromkeys(_FLOATS, _MEAN)
    # Gloo averages by a sum, which float16 overflows; and adds bool as bytes, up to 255.
    | {torch.float16: _NUMBERS, torch.bool: frozenset({_MIN, _MAX, *_BITS})}
    | {torch.complex32: frozenset({_SUM})}
    | dict.fromkeys((torch.complex64, torch.complex128), frozenset({_SUM, _AVG}))
)
UCC = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS | _BITS)
    | dict.fromkeys(_FLOATS, _MEAN)
    | {torch.bool: frozenset({_MIN, _MAX, *_BITS})}
)
NCCL = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS)
    | dict.fromkeys(_FLOATS, _MEAN)
    | {torch.bool: frozenset({_MIN, _MAX})}
)

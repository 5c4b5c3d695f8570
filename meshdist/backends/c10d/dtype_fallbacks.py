"""Find an op and dtype that replace a reduction that a backend lacks.

If the same bits, read as another dtype, give the same result, nothing is copied: uint32 is summed
as int32, int16 is combined bitwise as bytes, the OR of bool is its maximum. Else, if a wider dtype
holds all values, a copy is reduced and rounded once. MIN and MAX of floats run on integers of the
same order, because in c10d the rank that holds a NaN decides whether the result is NaN. All else
(bitwise ops over NCCL, the order of uint64) is gathered and reduced in this process. A mean of
integers is a sum, which wraps in its dtype, and a division. Data of unknown dtypes are moved as
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ...dtypes import DTYPES, IN_ORDER, DtypeFacts
from ...reduce_ops import ON_BOOL, ReduceKind, ReduceOp, is_whole_mean

_SUM, _AVG, _PRODUCT = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT
_MIN, _MAX = ReduceOp.MIN, ReduceOp.MAX
_BITS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_WRAPPING = frozenset({_SUM, _PRODUCT, *_BITS})

_OF_BYTES = {ReduceOp.BOR: _MAX, ReduceOp.BAND: _MIN}
"""Equal on bytes that are 0 or 1."""


@dataclass(frozen=True)
class DtypeFallback:
    """Op and dtype that replace a reduction that a backend lacks.

    Args:
        is_view: whether the bits are read as ``dtype``; else values are converted, and the result
            back (floats to integers of the same order).
    """

    op: ReduceKind
    dtype: torch.dtype
    is_view: bool


class Arithmetic:
    """The ops, by dtype, that a backend reduces correctly."""

    def __init__(self, ops: Mapping[torch.dtype, frozenset[ReduceKind]]) -> None:
        self._ops = ops
        self.find = cache(self._find)

    def has(self, op: ReduceKind, dtype: torch.dtype) -> bool:
        """Return whether the backend itself reduces ``dtype`` with ``op``."""
        return op in self._ops.get(dtype, ())

    def _find(self, op: ReduceKind, dtype: torch.dtype) -> DtypeFallback | None:
        """Return the first supported fallback for ``op`` on ``dtype``, or None."""
        for candidate in _candidates(op, dtype):
            if self.has(candidate.op, candidate.dtype):
                return candidate
        return None


def _candidates(op: ReduceKind, dtype: torch.dtype) -> Iterator[DtypeFallback]:
    yield DtypeFallback(op, dtype, True)
    if is_whole_mean(op, dtype):
        return
    if dtype is torch.bool and ON_BOOL.get(op) in _OF_BYTES:
        yield DtypeFallback(_OF_BYTES[ON_BOOL[op]], dtype, True)
    facts = DTYPES.get(dtype, DtypeFacts(dtype, ""))
    if facts.same_bits is not None and (op in _WRAPPING or dtype.is_complex):
        yield DtypeFallback(op, facts.same_bits, True)
    if op in _BITS:
        yield DtypeFallback(op, torch.uint8, True)
    wide = facts.wide or dtype
    if op in (_MIN, _MAX) and wide in IN_ORDER:
        yield DtypeFallback(op, IN_ORDER[wide], False)
    elif wide is not dtype:
        yield DtypeFallback(op, wide, False)


def read_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the memory of a contiguous tensor as a flat tensor of ``dtype``."""
    if dtype is tensor.dtype:
        return tensor if tensor.dim() == 1 else tensor.view(-1)
    # A tensor of at most one element is contiguous with any stride, but cannot be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory, flat; as bytes if c10d cannot move its dtype."""
    if tensor.dtype not in _MOVED:
        return read_as(tensor, torch.uint8)
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def all_movable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [movable(tensor) for tensor in tensors]


_ADDED = frozenset({_SUM, _PRODUCT})
_NUMBERS = frozenset({*_ADDED, _MIN, _MAX})
_MEAN = frozenset({*_ADDED, _AVG})
_KNOWN = [facts for facts in DTYPES.values() if facts.is_in_c10d]
_MOVED = frozenset(facts.dtype for facts in _KNOWN)
_INTEGERS = [facts.dtype for facts in _KNOWN if facts.is_whole and facts.group != "bool"]
_FLOATS = [facts.dtype for facts in _KNOWN if facts.group == "floating"]

GLOO = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS | _BITS)
    # Gloo rounds 16-bit floats at every step, so float16 may overflow in between.
    | dict.fromkeys((torch.float32, torch.float64), _MEAN)
    | {torch.bool: frozenset({_MIN, _MAX, *_BITS})}  # it adds bool as bytes, up to 255
    | dict.fromkeys((torch.complex64, torch.complex128), frozenset({_SUM, _AVG}))
)
UCC = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS | _BITS)
    | dict.fromkeys(_FLOATS, _MEAN)
    | {torch.bool: frozenset({_MIN, _MAX, *_BITS})}
)
NCCL = Arithmetic(
    dict.fromkeys(_INTEGERS, _NUMBERS | _MEAN)
    | dict.fromkeys(_FLOATS, _MEAN)
    | {torch.bool: frozenset({_MIN, _MAX})}
)

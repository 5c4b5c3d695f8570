"""The reductions, under torch's names."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

import torch
from torch.distributed import ReduceOp

from .errors import KindError

__all__ = ["ReduceKind", "ReduceOp", "find_refusal", "get_reduce_op", "op_name"]

ReduceKind: TypeAlias = ReduceOp.RedOpType
"""A plain reduction: ``ReduceOp.SUM`` and its like."""

_BY_NAME: dict[str, ReduceKind] = {
    name: getattr(ReduceOp, name)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def get_reduce_op(op: object) -> ReduceKind:
    """Return ``op`` as the plain kind (``ReduceOp.SUM`` ...); raises KindError otherwise."""
    if isinstance(op, ReduceKind):
        return op
    for plain in _BY_NAME.values():
        if isinstance(op, ReduceOp) and op == plain:  # type: ignore[comparison-overlap]
            return plain
    raise KindError(
        f"{op!r} is not a reduction",
        expected="one of ReduceOp." + ", ReduceOp.".join(_BY_NAME),
        fix="pass for example op=meshdist.ReduceOp.SUM; a group or mesh goes as group=",
    )


def op_name(op: ReduceKind) -> str:
    """The short name of a plain kind, for example ``SUM``."""
    return str(op.name)


@cache
def find_refusal(op: ReduceKind, dtype: torch.dtype) -> str | None:
    """Return what ``op`` serves, for messages, where it cannot reduce ``dtype``; else None.

    Example:
        >>> find_refusal(ReduceOp.AVG, torch.int32)
        'AVG on floating and complex dtypes'
    """
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    if op == ReduceOp.AVG:
        return "AVG on floating and complex dtypes" if is_whole else None
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return None if is_whole else f"{op_name(op)} on integers and bool"
    if op == ReduceOp.SUM or not dtype.is_complex:
        return None
    return f"{op_name(op)} on dtypes that are not complex"

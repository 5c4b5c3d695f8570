"""The reductions, under torch's names."""

from __future__ import annotations

from typing import TypeAlias

from torch.distributed import ReduceOp

from .errors import KindError

__all__ = ["ReduceKind", "ReduceOp", "get_reduce_op", "op_name"]

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
        fix="pass for example op=meshdist.ReduceOp.SUM",
    )


def op_name(op: ReduceKind) -> str:
    """The short name of a plain kind, for example ``SUM``."""
    return str(op.name)

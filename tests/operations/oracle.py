"""What every collective must leave behind, in NumPy: short loops over the members of a group.

Each function takes one array (or list of arrays) per member, in group order, and returns one per
member. Nothing here imports torch or meshdist, so nothing of what is tested decides what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

REAL = ("float64", "float32", "float16", "bfloat16")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
DTYPES = (*REAL, *SIGNED, *UNSIGNED, "bool", *COMPLEX)
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
BITWISE = ("BAND", "BOR", "BXOR")

EPSILON = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "complex64": 2**-23}
"""Distance of 1 from the next number; that of float64 and complex128 is the default."""


def has_meaning(op: str, dtype: str) -> bool:
    """Whether ``op`` can reduce ``dtype``; elsewhere the collectives must reject."""
    if op in BITWISE:
        return dtype in (*SIGNED, *UNSIGNED, "bool")
    if op == "AVG":
        return dtype != "bool"
    if op in ("PRODUCT", "MIN", "MAX"):
        return dtype not in COMPLEX
    return (op, dtype) != ("PREMUL_SUM", "bool")


def dtype_in_numpy(dtype: str) -> str:
    """NumPy has no bfloat16; what the cases write in it float32 holds as well."""
    return "float32" if dtype == "bfloat16" else dtype


def values(rank: int, shape: Sequence[int], dtype: str, slot: int = 0) -> Array:
    """Different on every rank and in every slot; sums are exact in every dtype.

    Integers come near both ends of their range, so that sums wrap and the order of unsigned
    ones shows.
    """
    count = int(np.prod(shape))
    small = (np.arange(count) * 3 + rank * 5 + slot * 11) % 7
    if dtype == "bool":
        return np.asarray(small % 3 != 0).reshape(shape)
    if dtype in COMPLEX:
        return (small - 2 + 1j * (small + rank - 3)).astype(dtype).reshape(shape)
    if dtype in REAL:
        return (small - 2).astype(dtype_in_numpy(dtype)).reshape(shape)
    plain = small.astype(dtype)
    far = (np.arange(count) + rank + slot) % 4 == 3
    plain[far] = np.iinfo(dtype).max - plain[far]
    if dtype in SIGNED:
        plain[(np.arange(count) + rank) % 3 == 1] *= -1
    return plain.reshape(shape)


def factor(index: int, dtype: str) -> float | int:
    """What member ``index`` multiplies its partial sum by in PREMUL_SUM; exact in ``dtype``."""
    if dtype in REAL or dtype in COMPLEX:
        return (0.5, 2.0, 1.5, 1.0)[index % 4]
    return (2, 3, 1, 2)[index % 4]


_STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def total(parts: Sequence[Array], op: str) -> Array:
    """The reduction of ``parts``; NumPy's + and * of bools are or and and.

    What has no meaning is never written anywhere: the first part stands in for it.
    """
    first = parts[0]
    if not has_meaning(op, first.dtype.name):
        return first
    result = first.copy()
    with np.errstate(over="ignore"):
        for index, part in enumerate(parts):
            if op == "PREMUL_SUM":
                part = np.asarray(part * factor(index, first.dtype.name), first.dtype)
            result = np.asarray(_STEPS[op](result, part)) if index else part.copy()
    if op == "AVG" and first.dtype.kind in "iu":  # toward zero, as fmod has it
        result = (result - np.fmod(result, len(parts))) // len(parts)
    elif op == "AVG":
        result = result / len(parts)
    return np.asarray(result, first.dtype)


def all_reduce(parts: Sequence[Array], op: str) -> list[Array]:
    return [total(parts, op) for _ in parts]


def all_reduce_coalesced(lists: Sequence[Sequence[Array]], op: str) -> list[list[Array]]:
    one = [total([mine[slot] for mine in lists], op) for slot in range(len(lists[0]))]
    return [one for _ in lists]


def reduce(parts: Sequence[Array], op: str, root: int) -> list[Array]:
    return [total(parts, op) if member == root else part for member, part in enumerate(parts)]


def broadcast(parts: Sequence[Array], root: int) -> list[Array]:
    return [parts[root] for _ in parts]


def all_gather(parts: Sequence[Array]) -> list[list[Array]]:
    return [list(parts) for _ in parts]


def gather(parts: Sequence[Array], root: int) -> list[list[Array] | None]:
    return [list(parts) if member == root else None for member in range(len(parts))]


def scatter(lists: Sequence[Sequence[Array]], root: int) -> list[Array]:
    return [lists[root][member] for member in range(len(lists))]


def reduce_scatter(lists: Sequence[Sequence[Array]], op: str) -> list[Array]:
    return [total([mine[member] for mine in lists], op) for member in range(len(lists))]


def all_to_all(lists: Sequence[Sequence[Array]]) -> list[list[Array]]:
    return [[sent[member] for sent in lists] for member in range(len(lists))]


def shift(parts: Sequence[Array]) -> list[Array]:
    """Every member sends to the next, the last to the first."""
    return [parts[member - 1] for member in range(len(parts))]


def tolerance(dtype: str, op: str | None, size: int) -> float:
    """How far a result may lie from NumPy's, relative to it: only where something is rounded."""
    if op == "AVG" and (dtype in REAL or dtype in COMPLEX):
        return (size + 1) * EPSILON.get(dtype, 2**-52)
    return 0.0

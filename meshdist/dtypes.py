"""Define the properties of each dtype in one table, from which all lists of dtypes derive.

To add a dtype, add an entry here and in ``native/codes.h``, and loops that reduce it in
``native/kernels_level.h``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch or NumPy: ``float32``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class DtypeFacts:
    """The properties of a dtype.

    Args:
        group: similar dtypes that share an entry in the table of capabilities.
        wide: the dtype for reductions if a backend lacks this dtype or rounds too often.
        same_bits: a dtype of equal or half width with bitwise equal sums, for libraries without
            this dtype.
        mpi: the name of the MPI datatype; "" if MPI can only move it.
        is_in_c10d: whether all c10d backends support it; other dtypes move as bytes.
        is_in_numpy: whether NumPy and CuPy have it under this name.
        in_files: the name in safetensors files; "" if they lack it.
    """

    dtype: torch.dtype
    group: str
    wide: torch.dtype | None = None
    same_bits: torch.dtype | None = None
    mpi: str = ""
    is_in_c10d: bool = False
    is_in_numpy: bool = True
    in_files: str = ""

    @property
    def name(self) -> str:
        """The dtype's name in torch, in NumPy and in the native core."""
        return dtype_name(self.dtype)

    @property
    def is_whole(self) -> bool:
        """Return whether values are integers or bool."""
        return self.group in ("integers", "unsigned", "bool")


_TABLE = (
    DtypeFacts(torch.float64, "floating", mpi="DOUBLE", is_in_c10d=True, in_files="F64"),
    DtypeFacts(torch.float32, "floating", mpi="FLOAT", is_in_c10d=True, in_files="F32"),
    DtypeFacts(torch.float16, "floating", torch.float32, is_in_c10d=True, in_files="F16"),
    DtypeFacts(
        torch.bfloat16,
        "floating",
        torch.float32,
        is_in_c10d=True,
        is_in_numpy=False,
        in_files="BF16",
    ),
    DtypeFacts(torch.int64, "integers", mpi="INT64_T", is_in_c10d=True, in_files="I64"),
    DtypeFacts(torch.int32, "integers", mpi="INT32_T", is_in_c10d=True, in_files="I32"),
    DtypeFacts(torch.int16, "integers", torch.int32, mpi="INT16_T", in_files="I16"),
    DtypeFacts(torch.int8, "integers", torch.int32, mpi="INT8_T", is_in_c10d=True, in_files="I8"),
    DtypeFacts(torch.uint64, "unsigned", None, torch.int64, "UINT64_T", in_files="U64"),
    DtypeFacts(torch.uint32, "unsigned", torch.int64, torch.int32, "UINT32_T", in_files="U32"),
    DtypeFacts(torch.uint16, "unsigned", torch.int32, torch.int16, "UINT16_T", in_files="U16"),
    DtypeFacts(torch.uint8, "unsigned", torch.int32, mpi="UINT8_T", is_in_c10d=True, in_files="U8"),
    DtypeFacts(
        torch.bool, "bool", mpi="UINT8_T", is_in_c10d=True, in_files="BOOL"
    ),  # the byte that stores it
    DtypeFacts(torch.complex128, "complex", None, torch.float64, "C_DOUBLE_COMPLEX"),
    DtypeFacts(torch.complex64, "complex", None, torch.float32, "C_FLOAT_COMPLEX", in_files="C64"),
    DtypeFacts(torch.complex32, "complex", torch.complex64, torch.float16, is_in_numpy=False),
    DtypeFacts(torch.float8_e4m3fn, "float8", torch.float32, is_in_numpy=False, in_files="F8_E4M3"),
    DtypeFacts(torch.float8_e4m3fnuz, "float8", torch.float32, is_in_numpy=False),
    DtypeFacts(torch.float8_e5m2, "float8", torch.float32, is_in_numpy=False, in_files="F8_E5M2"),
    DtypeFacts(torch.float8_e5m2fnuz, "float8", torch.float32, is_in_numpy=False),
    DtypeFacts(torch.float8_e8m0fnu, "float8", torch.float32, is_in_numpy=False),
)

DTYPES = {facts.dtype: facts for facts in _TABLE}
"""The dtypes that can be reduced. All others, such as bits that share a byte, are only moved."""

SIGNED = {
    dtype: facts.same_bits
    for dtype, facts in DTYPES.items()
    if facts.group == "unsigned" and facts.same_bits is not None
}
"""torch adds, orders and multiplies these only as signed numbers of the same width."""

IN_ORDER = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The integers among which the smallest or largest of floats is found."""

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes that need the scale of their tensor, which is not sent."""

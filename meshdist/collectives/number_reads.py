"""A warning where a number that differs between ranks leaves a tensor."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch

from ..checking.call_sites import program_frame
from ..dtypes import DTYPES
from ..error_text import explain
from ..errors import VaryingNumberWarning
from ..mesh.device_mesh import DeviceMesh
from .axis_types import kinds_in, shown
from .type_errors import tensor_text, type_of

__all__ = ["warn_of_number"]

_UNTYPED = "read it in `with md.untyped():`, where it may differ"


def warn_of_number(name: str, operands: Sequence[torch.Tensor], mesh: DeviceMesh) -> None:
    """Warn, once a place, where one of the operands varies over some axis."""
    kinds = {axis: kind for one in operands for axis, kind in kinds_in(type_of(one)).items()}
    varying = sorted(axis for axis, kind in kinds.items() if kind == "V")
    if not varying:
        return
    frame = program_frame(sys._getframe(1))
    ways = [f"make it equal first, for example lax.pmean(x, {varying[0]!r}) or lax.pmax", _UNTYPED]
    if any(DTYPES[one.dtype].group in ("integers", "unsigned") for one in operands):
        ways.reverse()  # sizes and counts are data: the ranks' own, such as tokens of each expert
    text = explain(
        f"{name} of a value that varies over {shown(varying)} gives another number on each rank",
        found=", ".join(map(tensor_text, operands)),
        expected="an invariant value: what a program decides by the number, its ranks decide alike",
        fix="; or ".join(ways),
    )
    warnings.warn_explicit(
        text,
        VaryingNumberWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )

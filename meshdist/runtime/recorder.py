"""What this rank called last, cheap enough to note at every verb; and the debug level."""

from __future__ import annotations

import os
import sys
from time import monotonic
from typing import Any

import torch
from torch.distributed import DebugLevel, get_debug_level

from ..arrays import dtype_name

__all__ = ["DebugLevel", "Recorder", "debug_level"]

_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
)


def debug_level() -> DebugLevel:
    """The debug level in force: OFF, INFO or DETAIL (TORCH_DISTRIBUTED_DEBUG)."""
    return get_debug_level()


class Recorder:
    """The last verb that one rank called on one group.

    Noting keeps a frame's code and position, which cost nothing to take; text is made only when
    somebody asks.
    """

    __slots__ = (
        "_code",
        "_dtype",
        "_instruction",
        "_shape",
        "_verb",
        "is_collective",
        "moment",
        "sequence",
    )

    def __init__(self) -> None:
        self.sequence = 0
        self.moment = 0.0
        self.is_collective = True
        self._verb = ""
        self._shape: torch.Size | None = None
        self._dtype: torch.dtype | None = None
        self._code: Any = None
        self._instruction = 0

    def note(self, verb: str, tensor: torch.Tensor | None, *, is_collective: bool = True) -> None:
        """Note a call of ``verb``; only collectives count in the members' common sequence."""
        self.is_collective = is_collective
        self.sequence += is_collective
        self.moment = monotonic()
        self._verb = verb
        if tensor is None:
            self._shape = self._dtype = None
        else:
            self._shape = tensor.shape
            self._dtype = tensor.dtype
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            frame = frame.f_back
        self._code = frame.f_code
        self._instruction = frame.f_lasti

    def describe(self) -> dict[str, Any]:
        """What was called last, as plain values: sequence, verb, tensor, where."""
        tensor = ""
        if self._shape is not None:
            tensor = f"{tuple(self._shape)} {dtype_name(self._dtype)}"
        return {
            "sequence": self.sequence,
            "verb": self._verb,
            "tensor": tensor,
            "where": self._where(),
        }

    def _where(self) -> str:
        if self._code is None:
            return ""
        line = self._code.co_firstlineno
        for start, end, number in self._code.co_lines():
            if start <= self._instruction < end and number is not None:
                line = number
                break
        return f"{self._code.co_filename}:{line} in {self._code.co_name}"

"""Encode how each rank's backward ended, in numbers sent with the last bucket's gradients.

They are a flag per ending, and the used-parameter map: per parameter, 1 if this rank has its
gradient. ``backward_outcome`` has a worked example.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from .device_streams import reader_for


class Ending(IntEnum):
    """The endings of a rank's backward, as indices of flags."""

    COMPLETE = 0
    PARTIAL = 1
    """Gradients are missing, which is no error."""
    LACKING = 2
    """Gradients are missing, which the next forward raises."""
    INTERRUPTED = 3
    ABSENT = 4
    UNEXPECTED = 5
    """Gradients were computed that options exclude, or too late."""


class StatusFlags:
    """Numbers averaged with a backward's gradients: endings, and which gradients existed.

    Args:
        unit: a rank's part of an average: 1, or 1 / p if sums of p ranks are sent.
    """

    def __init__(self, numbers: torch.Tensor, unit: float) -> None:
        self.numbers = numbers
        self._unit = unit
        # Compare averages of flags only with 0: sums of ones are inexact in half precision.
        eye = torch.eye(len(Ending), dtype=numbers.dtype, device=numbers.device)
        self._flags_of = eye.mul_(unit).unbind()
        self._whole = torch.full_like(numbers, unit)
        self._whole[: len(Ending)] = self._flags_of[Ending.COMPLETE]
        self.reader = reader_for(numbers.device, len(numbers))

    def write(self, ending: Ending | None, has_gradient: Sequence[bool] | None) -> None:
        """Write how this rank's backward ended, and which gradients it had.

        Args:
            ending: None on a rank without data, which sets no flag.
            has_gradient: for each parameter; None if all have a gradient, or none.
        """
        if ending is Ending.COMPLETE:
            self.numbers.copy_(self._whole)
            return
        self.numbers.zero_()
        if ending is not None:
            self.numbers[: len(Ending)] = self._flags_of[ending]
        if has_gradient is not None:
            numbers = self.numbers[len(Ending) :]
            # A copy from unpinned memory would wait for the device.
            found = torch.tensor(
                has_gradient, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda
            )
            numbers.copy_(found, non_blocking=True).mul_(self._unit)

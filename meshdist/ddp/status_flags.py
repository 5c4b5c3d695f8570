"""The numbers that travel after the gradients of the last bucket: what each rank says of its end.

They are one flag for each way in which a backward may end, and a map with one number for each
parameter, 1 where this rank has its gradient. ``outcome`` has a drawn case of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from .device_streams import reader_for


class Ending(IntEnum):
    """The way in which a rank's backward ended, and the index of its flag in ``StatusFlags``'s
    numbers."""

    WHOLE = 0
    PARTIAL = 1
    """Gradients are missing, which is no error."""
    LACKING = 2
    """Gradients are missing, which the next forward raises."""
    INTERRUPTED = 3
    ABSENT = 4
    UNEXPECTED = 5
    """Gradients came which were promised, or expected, not to come."""


class StatusFlags:
    """Numbers that are averaged behind a backward's gradients: endings, who had gradients.

    Args:
        unit: one rank's part of an average: 1, or 1 / p where sums are sent, of p ranks.
    """

    def __init__(self, numbers: torch.Tensor, unit: float) -> None:
        self.numbers = numbers
        self._unit = unit
        # Averages of flags are compared with 0 alone: sums of 1 are inexact in half precision.
        eye = torch.eye(len(Ending), dtype=numbers.dtype, device=numbers.device)
        self._flags_of = eye.mul_(unit).unbind()
        self._whole = torch.full_like(numbers, unit)
        self._whole[: len(Ending)] = self._flags_of[Ending.WHOLE]
        self.reader = reader_for(numbers.device, len(numbers))

    def write(self, ending: Ending | None, has_gradient: Sequence[bool] | None) -> None:
        """Write how this rank's backward ended, and which gradients it had.

        Args:
            ending: None on a rank that has no data, which sets no flag.
            has_gradient: for each parameter; None where all have a gradient, or none.
        """
        if ending is Ending.WHOLE:
            self.numbers.copy_(self._whole)
            return
        self.numbers.zero_()
        if ending is not None:
            self.numbers[: len(Ending)] = self._flags_of[ending]
        if has_gradient is not None:
            numbers = self.numbers[len(Ending) :]
            # A copy from memory that is not pinned would wait for the device.
            found = torch.tensor(
                has_gradient, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda
            )
            numbers.copy_(found, non_blocking=True).mul_(self._unit)

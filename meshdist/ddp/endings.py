"""How a backward ended on each rank: with every gradient, lacking some, interrupted, or absent.

Each rank sets one of four flags behind the last bucket, whose all-reduce counts them. So all ranks
raise the same error: on the CPU as soon as the all-reduce has ended; on an accelerator, where
reading the counts then would make the CPU wait for the device, at the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import torch

from ..collectives.objects import all_gather_object
from ..groups.process_group import ProcessGroup
from .flags import reader_for
from .reports import Reports

__all__ = ["Ending", "Endings"]

T = TypeVar("T")


class Ending(IntEnum):
    """How one rank's backward ended; the place of its flag."""

    WHOLE = 0
    LACKING = 1
    INTERRUPTED = 2
    ABSENT = 3


class Endings:
    """Which parameters lack a gradient here, and whether all ranks may go on.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        reports: makes the errors.
        group: over which gradients are averaged.
        device: where the flags lie at first.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        reports: Reports,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self._reports = reports
        self._group = group
        self._lacking: Sequence[int] = range(len(parameters))
        self._someone_lacks = False  # equal on every rank
        self._ending: Ending | None = (
            Ending.WHOLE
        )  # here, of the backward whose flags are read next
        self.place_flags(device)

    def place_flags(self, device: torch.device) -> None:
        """Expect the flags on ``device`` from now on."""
        # Sums of flags are compared with 0 alone: sums of many ones are inexact in half precision.
        self._flags_of = torch.eye(len(Ending), device=device).unbind()
        self._reader = reader_for(device, len(Ending))

    def forward_begins(self) -> None:
        """Expect a gradient for every parameter from now on.

        Raises:
            GradientError: as ``check_complete``.
        """
        lacking, self._lacking = self._lacking, range(len(self._parameters))
        self._refuse_lacking(lacking)

    def check_complete(self) -> None:
        """Look whether every parameter has got a gradient on every rank; raised once.

        Raises:
            GradientError: parameters got none since the last forward; on every rank.
        """
        self._refuse_lacking(self._lacking)

    def backward_ends(self, came: bytearray) -> Ending:
        """Note which parameters got a gradient: those whose place in ``came`` is not 0."""
        self._lacking = [index for index in self._lacking if not came[index]] if 0 in came else ()
        return Ending.LACKING if self._lacking else Ending.WHOLE

    def set_flag(self, flags: torch.Tensor, ending: Ending) -> None:
        """Write this rank's part of what is summed."""
        flags.copy_(self._flags_of[ending])

    def flags_summed(self, flags: torch.Tensor, ending: Ending | None) -> None:
        """Take the summed flags of a backward that ended here with ``ending``; None: it had none.

        Raises:
            GradientError: as ``read_flags``, where that need not be put off.
        """
        if self._reader.note(flags):
            self._ending = ending
        if not self._reader.is_deferred:
            self.read_flags()

    def read_flags(self) -> None:
        """Learn how the last backward ended on the other ranks, unless that is known.

        Where every rank was interrupted, or had no backward, nothing is lost, since each has seen
        its own error; otherwise all raise. No rank keeps gradients of an interrupted backward.

        Raises:
            GradientError: the backward was interrupted, or absent, but not on every rank.
        """
        counts = self._reader.take()
        if counts is None:
            return
        if self._reader.is_deferred:  # an all-reduce that was cut off has left any numbers
            self._group.open_channel(self._flags_of[0].device.type).refuse_broken()
        has_whole, has_lacking, has_interrupted, has_absent = (count > 0 for count in counts)
        self._someone_lacks = has_lacking
        if not (has_interrupted or (has_absent and (has_whole or has_lacking))):
            return
        for parameter in self._parameters:
            parameter.grad = None
        if has_whole or has_lacking:
            self._someone_lacks = False  # one error says it
            found = self._gather(self._ending)
            cut, absent = (
                [rank for rank, ending in found.items() if ending is wanted]
                for wanted in (Ending.INTERRUPTED, Ending.ABSENT)
            )
            raise self._reports.interrupted(cut, absent)

    def _refuse_lacking(self, lacking: Sequence[int]) -> None:
        if self._someone_lacks:
            self._someone_lacks = False
            raise self._reports.lacking(self._gather(lacking))

    def _gather(self, mine: T) -> dict[int, T]:
        """What all ranks have, by rank."""
        found = [mine] * self._group.size()
        with torch.cuda.device_of(self._flags_of[0]):
            all_gather_object(found, mine, self._group)
        return dict(zip(self._group.ranks, found, strict=True))

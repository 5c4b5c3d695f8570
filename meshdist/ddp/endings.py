"""How a backward ended on each rank: with every gradient, lacking some, or interrupted.

Each rank sets one of three flags behind the last bucket, whose all-reduce counts them. So on the
CPU all ranks raise the same error. On an accelerator reading the counts would make the
CPU wait for the device: there only the rank concerned raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import torch

from ..collectives.objects import all_gather_object
from ..groups.process_group import ProcessGroup
from .reports import Reports

__all__ = ["Ending", "Endings"]

T = TypeVar("T")


class Ending(IntEnum):
    """How one rank's backward ended; the place of its flag."""

    WHOLE = 0
    LACKING = 1
    INTERRUPTED = 2


class Endings:
    """Which parameters lack a gradient here, and whether all ranks may go on.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        reports: makes the errors.
        group: over which gradients are averaged.
        device: where the flags lie.
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
        self._all_ranks_know = device.type == "cpu"
        # Sums of flags are compared with 0 alone: sums of many ones are inexact in half precision.
        self._flags_of = torch.eye(len(Ending), device=device).unbind()
        self._lacking: Sequence[int] = range(len(parameters))
        self._someone_lacks = False

    def forward_begins(self) -> None:
        """Expect a gradient for every parameter from now on.

        Raises:
            GradientError: parameters got none since the last forward; collective on the CPU.
        """
        lacking, self._lacking = self._lacking, range(len(self._parameters))
        if self._someone_lacks:
            self._someone_lacks = False
            raise self._reports.lacking(self._gather(lacking))

    def backward_ends(self, came: bytearray) -> Ending:
        """Note which parameters got a gradient: those whose place in ``came`` is not 0."""
        self._lacking = [index for index in self._lacking if not came[index]] if 0 in came else ()
        self._someone_lacks = bool(self._lacking)
        return Ending.LACKING if self._someone_lacks else Ending.WHOLE

    def set_flag(self, flags: torch.Tensor, ending: Ending) -> None:
        """Write this rank's part of what is summed."""
        flags.copy_(self._flags_of[ending])

    def read_flags(self, flags: torch.Tensor, ending: Ending) -> None:
        """Read from the summed flags how the backward ended on the other ranks.

        Where every rank was interrupted nothing is lost, since each has seen its own error;
        otherwise all raise. No rank keeps gradients of an interrupted backward.

        Raises:
            GradientError: the backward was interrupted, but not on every rank.
        """
        was_interrupted = ending is Ending.INTERRUPTED
        is_spoilt = is_partial = was_interrupted
        if self._all_ranks_know:
            counts = (flags.real if flags.is_complex() else flags).tolist()
            self._someone_lacks = counts[Ending.LACKING] > 0
            is_spoilt = counts[Ending.INTERRUPTED] > 0
            is_partial = counts[Ending.WHOLE] > 0 or self._someone_lacks
        if not is_spoilt:
            return
        for parameter in self._parameters:
            parameter.grad = None
        if is_partial:
            found = self._gather(was_interrupted)
            raise self._reports.interrupted([rank for rank, was_cut in found.items() if was_cut])

    def _gather(self, mine: T) -> dict[int, T]:
        """What all ranks have, by rank; this one alone where the others raise nothing."""
        if not self._all_ranks_know:
            return {self._group.world.rank: mine}
        found = [mine] * self._group.size()
        all_gather_object(found, mine, self._group)
        return dict(zip(self._group.ranks, found, strict=True))

"""How a backward ended on each rank, and which gradients it had: what all ranks learn and raise.

Behind the last bucket travel one flag for each way in which a backward may end, and a map with one
number for each parameter: 1 where this rank has its gradient. The averages say on every rank
whether any rank set a flag, and which gradients no rank, some ranks or all ranks had. So all ranks
raise the same error: on the CPU as soon as the reduction has ended; on an accelerator, where
reading then would make the CPU wait for the device, at the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import torch

from ..collectives.objects import all_gather_object
from ..groups.process_group import ProcessGroup
from .buckets import ReductionOptions
from .device_streams import reader_for
from .history import History
from .reports import Reports

__all__ = ["Ending", "Verdict"]

T = TypeVar("T")


class Ending(IntEnum):
    """How one rank's backward ended; the place of its flag."""

    WHOLE = 0
    PARTIAL = 1
    """Gradients are missing, which is no error."""
    LACKING = 2
    """Gradients are missing, which the next forward raises."""
    INTERRUPTED = 3
    ABSENT = 4
    UNEXPECTED = 5
    """Gradients came which were promised, or expected, not to come."""


_HAD_ONE = (Ending.WHOLE, Ending.PARTIAL, Ending.LACKING, Ending.UNEXPECTED)


class Verdict:
    """Numbers that this rank sends behind the last bucket, and what it learns there of all."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        arrivals: History,
        options: ReductionOptions,
        reports: Reports,
        group: ProcessGroup,
    ) -> None:
        self._parameters = parameters
        self._arrivals = arrivals
        self.options = options
        self._reports = reports
        self._group = group
        self.size = len(Ending) + len(parameters)
        """How many numbers travel behind the last bucket."""
        self._lacking: Sequence[int] = range(len(parameters))
        self._missing: list[int] = []  # in the last backward, also of frozen ones
        self._someone_lacks = False  # equal on every rank
        self._ending: Ending | None = Ending.WHOLE  # here, of the backward that is read next
        self._unexpected: list[str] = []  # here, of that backward
        self._counts: list[float] | None = None  # the averaged flags, until all is raised
        self._shares: list[float] | None = None  # the averaged map, if it was needed
        self.must_rebuild = False
        """Whether the buckets are to be laid anew; equal on every rank."""
        self.num_at_work = group.size()
        """How many ranks have data in this step; the others have no part in the map."""
        self._num_in_map = group.size()  # of the backward that is read next
        self.stays = False
        """Whether buckets stay as they are once laid: a communication hook's state knows them."""

    def place(self, behind: torch.Tensor, unit: float) -> None:
        """Expect the numbers in memory like ``behind`` from now on.

        One rank's part of an average is ``unit``: 1, or 1 / p where sums are sent, of p ranks.
        """
        self._device = behind.device
        self._unit = unit
        # Averages of flags are compared with 0 alone: sums of ones are inexact in half precision.
        eye = torch.eye(len(Ending), dtype=behind.dtype, device=behind.device)
        self._flags_of = eye.mul_(unit).unbind()
        self._whole = torch.full_like(behind, unit)
        self._whole[: len(Ending)] = self._flags_of[Ending.WHOLE]
        self._reader = reader_for(behind.device, self.size)

    # -- a forward, and the end of a backward -----------------------------------------------------

    def forward_begins(self, *, is_synchronised: bool) -> None:
        """Expect a gradient for every parameter from now on, if this forward is synchronised."""
        lacking = self._lacking
        if is_synchronised:
            self._lacking = range(len(self._parameters))
        self._refuse_lacking(lacking)

    def check_complete(self) -> None:
        """Raise once, on every rank, if parameters got no gradient since the last forward."""
        self._refuse_lacking(self._lacking)

    def backward_ends(self, came: Sequence[bool], unexpected: Sequence[str]) -> Ending:
        """Note which gradients came here, and what is wrong with that; return the flag to set."""
        self._unexpected = list(unexpected)
        is_complete = False not in came
        self._missing = [] if is_complete else [at for at, one in enumerate(came) if not one]
        self._lacking = (
            ()
            if is_complete
            else [
                index
                for index in self._lacking
                if not came[index] and self._parameters[index].requires_grad
            ]
        )
        if self.options.may_lack:
            self._lacking = ()
        if unexpected:
            return Ending.UNEXPECTED
        if self._lacking:
            return Ending.LACKING
        return Ending.WHOLE if is_complete else Ending.PARTIAL

    def has_no_data(self) -> None:
        """Expect no gradient of this rank."""
        self._lacking, self._unexpected, self._missing = (), [], []

    def write(
        self, behind: torch.Tensor, ending: Ending | None, has_gradient: Sequence[bool] | None
    ) -> None:
        """Write this rank's numbers; ``has_gradient`` is None where all or none have one.

        A rank that has no data says nothing: its ``ending`` is None.
        """
        if ending is None:
            behind.zero_()
            return
        if ending is Ending.WHOLE:
            behind.copy_(self._whole)
            return
        flags, used = behind.split([len(Ending), len(self._parameters)])
        flags.copy_(self._flags_of[ending])
        if has_gradient is None:
            used.zero_()
        else:
            used.copy_(torch.tensor(has_gradient).mul(self._unit))

    # -- what all ranks learn ---------------------------------------------------------------------

    def note(self, behind: torch.Tensor, ending: Ending | None) -> None:
        """Take the averaged numbers of a backward that ended here with ``ending``."""
        if self._reader.note(behind):
            self._ending = ending
            self._num_in_map = self.num_at_work

    def find_used(self, *, is_complete: bool) -> list[bool] | None:
        """Return for every parameter whether any rank had a gradient.

        None where all ranks had all, or where it is not known before the device has done its work;
        that is awaited only where this rank lacks some and may.
        """
        if self._reader.is_deferred and (is_complete or not self.options.finds_unused):
            return None
        self._look()
        return None if self._shares is None else [share > 0 for share in self._shares]

    @property
    def is_deferred(self) -> bool:
        """Whether reading right after ``note`` would make the CPU wait for a device."""
        return self._reader.is_deferred

    def read(self) -> None:
        """Learn how the last backward ended on the other ranks, unless that is known.

        Where every rank was interrupted, or had no backward, nothing is lost, since each has seen
        its own error; otherwise all raise. No rank keeps gradients of an interrupted backward.
        """
        self._look()
        if self._counts is None:
            return
        counts, self._counts = self._counts, None
        has = {ending for ending, count in zip(Ending, counts, strict=True) if count > 0}
        self._someone_lacks = Ending.LACKING in has
        if not self._someone_lacks and self._has_uneven_shares():  # frozen on some ranks
            self._someone_lacks, self._lacking = True, self._missing
        is_cut = Ending.INTERRUPTED in has or (
            Ending.ABSENT in has and not has.isdisjoint(_HAD_ONE)
        )
        if not (is_cut or Ending.UNEXPECTED in has):
            if Ending.ABSENT not in has:
                self._settle()
            return
        for parameter in self._parameters:
            parameter.grad = None
        if has.isdisjoint(_HAD_ONE):
            return
        self._someone_lacks = False  # one error says it
        found = self._gather((self._ending, self._unexpected))
        endings = {rank: ending for rank, (ending, _) in found.items()}
        if is_cut:
            cut, absent = (
                [rank for rank, ending in endings.items() if ending is wanted]
                for wanted in (Ending.INTERRUPTED, Ending.ABSENT)
            )
            raise self._reports.interrupted(cut, absent)
        self._arrivals.forget()
        self.must_rebuild = True
        raise self._reports.unexpected({rank: lines for rank, (_, lines) in found.items()})

    def _look(self) -> None:
        sums = self._reader.take()
        if sums is None:
            return
        if self._reader.is_deferred:  # a reduction that was cut off has left any numbers
            self._group.open_channel(self._device.type).refuse_broken()
        self._counts = sums[: len(Ending)].tolist()
        is_partial = self._counts[Ending.PARTIAL] > 0 or self._counts[Ending.LACKING] > 0
        self._shares = sums[len(Ending) :].tolist() if is_partial else None

    def _has_uneven_shares(self) -> bool:
        """Whether some ranks lack a gradient that others have, where no argument allows it."""
        shares = () if self.options.may_lack else self._shares or ()
        num_ranks = self._group.size()
        return any(0.5 < share * num_ranks < self._num_in_map - 0.5 for share in shares)

    def _settle(self) -> None:
        shares, self._shares = self._shares, None
        all_or_none = 0.5 / self._group.size()
        most = self._num_in_map / self._group.size()
        # In half precision the sum may fall short of what all have: the parameter trails then, on
        # every rank alike, which costs overlap and nothing else.
        limit = all_or_none if self.options.skips_unused else most - all_or_none
        trailing = [i for i, share in enumerate(shares or ()) if share < limit]
        was_learned = self._arrivals.is_learned
        may_move = self.options.may_move and not self.stays if was_learned else True
        has_moved = self._arrivals.settle(trailing, may_move=may_move and self.options.may_lack)
        if has_moved or not was_learned:
            self.must_rebuild = True

    def _refuse_lacking(self, lacking: Sequence[int]) -> None:
        if self._someone_lacks:
            self._someone_lacks = False
            raise self._reports.lacking(self._gather(lacking))

    def _gather(self, mine: T) -> dict[int, T]:
        """The values of all ranks, by rank."""
        found = [mine] * self._group.size()
        with torch.cuda.device_of(self._flags_of[0]):
            all_gather_object(found, mine, self._group)
        return dict(zip(self._group.ranks, found, strict=True))

"""Exchange how a backward ended on each rank, and raise the same error on all ranks.

The averaged status flags show whether any rank set a flag, and whether none, some or all ranks had
each gradient. So all ranks raise the same error: on the CPU when the reduction ends; on an
accelerator at the next forward, so that the CPU does not wait for the device.

Worked example: a model has parameters v and w; rank 1 of 2 may lack the gradient of w, and does.

              flags: complete, partial, lacking, interrupted, absent, unexpected map: v   w
    rank 0           1      0        0        0            0       0                  1   1
    rank 1           0      1        0        0            0       0                  1   0
    average          0.5    0.5      0        0            0       0                  1   0.5

Both ranks read the average. No error flag is above 0, but "partial" is, so they read the map. Some
rank had each gradient, so both ranks write both averages to ``.grad``. As w had 0.5 * 2 ranks, not
2, it is deferred from now on. If "interrupted" were above 0, both would raise.

    >>> from types import SimpleNamespace as Fake
    >>> from .bucket_layout import ReductionOptions; from .status_flags import StatusFlags
    >>> flags, other = (StatusFlags(torch.empty(8), unit=1 / 2) for _ in range(2))
    >>> flags.write(Ending.COMPLETE, None); other.write(Ending.PARTIAL, [True, False])
    >>> flags.numbers.add_(other.numbers).tolist()
    [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5]
    >>> options, pair = ReductionOptions((8,), finds_unused=True), Fake(size=lambda: 2)
    >>> terms = Fake(options=options, extra_groups=Fake(all_ranks=pair))
    >>> layout = Fake(status_flags=flags, terms=terms)
    >>> outcome, expected_gradients = BackwardOutcome(layout, num_active=2), ExpectedGradients(2)
    >>> outcome.note_flags(), outcome.find_used(is_complete=True)
    (True, [True, True])
    >>> outcome._teach(expected_gradients, stays=False); expected_gradients.deferred
    frozenset({1})
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ..collectives.objects import gather_from_all
from .bucket_layout import BucketLayout
from .expected_gradients import ExpectedGradients
from .status_flags import Ending

T = TypeVar("T")

_HAD_BACKWARD = (Ending.COMPLETE, Ending.PARTIAL, Ending.LACKING, Ending.UNEXPECTED)


class BackwardOutcome:
    """The outcome of one backward: on this rank at first, on all ranks once the flags are read.

    Args:
        ending: on this rank; None if it has no data.
        num_active: the number of ranks with data.
        computed: by parameter, whether this rank computed its gradient.
        lacking: parameters that require a gradient and got none since the forward.
        unexpected: error lines.
    """

    def __init__(
        self,
        layout: BucketLayout,
        ending: Ending | None = Ending.COMPLETE,
        num_active: int = 0,
        computed: Sequence[bool] = (),
        lacking: Sequence[int] = (),
        unexpected: Sequence[str] = (),
    ) -> None:
        self.ending = ending
        self.computed = computed
        self._layout = layout
        self._lacking = lacking
        self._unexpected = unexpected
        self._num_active = num_active
        self._counts: list[float] | None = None  # the averaged flags, until errors are raised
        self._shares: list[float] | None = None  # the averaged map, if it was needed
        self._someone_lacks = False  # equal on every rank
        self._is_noted = False  # flags are stored but not read

    def followed_by(
        self, computed: Sequence[bool], unexpected: Sequence[str], num_active: int
    ) -> BackwardOutcome:
        """Return the next backward's outcome; arguments as for ``BackwardOutcome``."""
        is_complete = False not in computed
        lacking: Sequence[int] = ()
        if not (is_complete or self._layout.terms.options.may_lack):
            parameters = self._layout.terms.parameters
            # Several backwards after one forward may each compute some gradients.
            lacking = [i for i in self._lacking if not computed[i] and parameters[i].requires_grad]
        ending = Ending.COMPLETE if is_complete else Ending.PARTIAL
        if unexpected or lacking:
            ending = Ending.UNEXPECTED if unexpected else Ending.LACKING
        return BackwardOutcome(self._layout, ending, num_active, computed, lacking, unexpected)

    def followed_by_none(self, ending: Ending | None, num_active: int) -> BackwardOutcome:
        """Return the next outcome, without gradients; ``ending`` is None without data."""
        lacking = () if ending is None else self._lacking
        return BackwardOutcome(self._layout, ending, num_active, lacking=lacking)

    def expect_all(self) -> None:
        """Expect every gradient, at the start of a synchronized forward."""
        self._lacking = range(len(self._layout.terms.parameters))

    def reject_lacking(self) -> None:
        """Raise once, on every rank, if parameters got no gradient since the last forward."""
        if self._someone_lacks:
            self._someone_lacks = False
            raise self._layout.terms.gradient_errors.lacking(self._gather(self._lacking))

    # -- outcome on all ranks ----------------------------------------------------------------------

    def note_flags(self) -> bool:
        """Store the reduced flags for reading; return False in a graph capture."""
        status_flags = self._layout.status_flags
        self._is_noted = status_flags.reader.note(status_flags.numbers)
        return self._is_noted

    def find_used(self, *, is_complete: bool) -> list[bool] | None:
        """Return for each parameter whether any rank had a gradient; None if all, or if unknown.

        Args:
            is_complete: whether this rank has all gradients.
        """
        # Wait for the device only if this rank lacks gradients, and may.
        is_deferred = self._layout.status_flags.reader.is_deferred
        if is_deferred and (is_complete or not self._layout.terms.options.finds_unused):
            return None
        self._look()
        return None if self._shares is None else [share > 0 for share in self._shares]

    def _look(self) -> None:
        """Read the averaged flags once; raise if the group can no longer be used."""
        status_flags = self._layout.status_flags
        found = status_flags.reader.take() if self._is_noted else None
        if found is None:
            return
        self._is_noted = False
        if status_flags.reader.is_deferred:  # an aborted reduction leaves arbitrary numbers
            device_group = self._layout.terms.extra_groups.all_ranks.open_device_group(
                status_flags.numbers.device.type
            )
            device_group.reject_broken()
        self._counts = found[: len(Ending)].tolist()
        is_partial = self._counts[Ending.PARTIAL] > 0 or self._counts[Ending.LACKING] > 0
        self._shares = found[len(Ending) :].tolist() if is_partial else None

    def raise_or_learn(self, expected_gradients: ExpectedGradients, *, stays: bool) -> None:
        """Read once how the backward ended on all ranks; update ``expected_gradients`` or raise.

        Args:
            stays: whether a hook's state refers to the buckets, which must then stay fixed.
        """
        if self._is_noted:
            self._look()
        if self._counts is None:
            return
        counts, self._counts = self._counts, None
        parameters, gradient_errors = (
            self._layout.terms.parameters,
            self._layout.terms.gradient_errors,
        )
        has = {ending for ending, count in zip(Ending, counts, strict=True) if count > 0}
        self._someone_lacks = Ending.LACKING in has
        if self._shares and not (self._someone_lacks or self._layout.terms.options.may_lack):
            most, num_ranks = (
                self._num_active - 0.5,
                self._layout.terms.extra_groups.all_ranks.size(),
            )
            if any(0.5 < share * num_ranks < most for share in self._shares):
                # The parameter is frozen on some ranks.
                self._someone_lacks = True
                self._lacking = [
                    index for index, is_computed in enumerate(self.computed) if not is_computed
                ]
        is_cut = Ending.INTERRUPTED in has or (
            Ending.ABSENT in has and not has.isdisjoint(_HAD_BACKWARD)
        )
        if not (is_cut or Ending.UNEXPECTED in has):
            is_news = (
                self._shares or expected_gradients.deferred or not expected_gradients.is_learned
            )
            if is_news and Ending.ABSENT not in has:
                self._teach(expected_gradients, stays=stays)
            return
        for parameter in parameters:  # no rank keeps gradients of an interrupted backward
            parameter.grad = None
        if has.isdisjoint(_HAD_BACKWARD):  # each rank raised its error, or had none
            return
        self._someone_lacks = False  # the error below reports it
        found = self._gather((self.ending, self._unexpected))
        if not is_cut:
            expected_gradients.forget()
            raise gradient_errors.unexpected({rank: lines for rank, (_, lines) in found.items()})
        cut, absent = (
            [rank for rank, (ending, _) in found.items() if ending is wanted]
            for wanted in (Ending.INTERRUPTED, Ending.ABSENT)
        )
        raise gradient_errors.interrupted(cut, absent)

    def _teach(self, expected_gradients: ExpectedGradients, *, stays: bool) -> None:
        """Defer the parameters whose gradient some rank lacked.

        Args:
            stays: whether the set is final once learned.
        """
        options, num_ranks = (
            self._layout.terms.options,
            self._layout.terms.extra_groups.all_ranks.size(),
        )
        # In half precision a sum of ones may be too small. The parameter is then deferred on every
        # rank, which only costs overlap.
        limit = 0.5 if options.skips_unused else self._num_active - 0.5
        shares = enumerate(self._shares or ())
        deferred = [index for index, share in shares if share * num_ranks < limit]
        may_move = not expected_gradients.is_learned or (options.may_move and not stays)
        expected_gradients.update_deferred(deferred, may_move=may_move and options.may_lack)

    def _gather(self, mine: T) -> dict[int, T]:
        group = self._layout.terms.extra_groups.all_ranks
        with torch.cuda.device_of(self._layout.status_flags.numbers):
            return dict(zip(group.ranks, gather_from_all(mine, group), strict=True))

"""All buckets of one model: how they are laid, and what they know together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..collectives.shared_buffers import flat_memory
from ..groups.process_group import ProcessGroup
from .arrivals import Arrivals
from .buckets import ReductionOptions, items_of, lay_out
from .flat_bucket import Bucket
from .reports import Reports
from .single_bucket import InPlaceBucket, SparseBucket

__all__ = ["AnyBucket", "BucketList"]

AnyBucket: TypeAlias = Bucket | SparseBucket | InPlaceBucket

# From here on a message of its own costs less than to copy the gradient.
_IN_PLACE_BYTES = 8 * 1024 * 1024


class BucketList:
    """The buckets in the order in which they are sent.

    Attributes:
        order: every index, in the order in which gradients are expected.
        all: the buckets.
        unsent: the parameters that have none, since no rank had their gradient at first.
        behind: the numbers behind the gradients.
        rides: whether these are sent with the last bucket, and not by themselves.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], num_behind: int, reports: Reports
    ) -> None:
        self._parameters = parameters
        self._num_behind = num_behind
        self._reports = reports
        self.order: tuple[int, ...] = tuple(range(len(parameters) - 1, -1, -1))
        self.all: list[AnyBucket] = []
        self.unsent: frozenset[int] = frozenset()

    def lay(
        self,
        arrivals: Arrivals,
        options: ReductionOptions,
        group: ProcessGroup,
        scale: float | None,
    ) -> None:
        """Make the buckets anew; gradients keep their values.

        Collective once arrivals are learned: then the buckets lie in memory that the group shares,
        if its wire shares any.
        """
        is_learned = arrivals.is_learned
        old_views = {
            index: view
            for bucket in self.dense()
            for index, view in zip(bucket.indices, bucket.views, strict=True)
            if self._parameters[index].grad is view
        }
        self.unsent = arrivals.trailing if options.skips_unused else frozenset()
        # Where the wire shares memory, or divides by itself, buckets cost less than they save.
        in_place = {
            index
            for index, one in enumerate(self._parameters)
            if scale is not None and options.dtype is None and one.nbytes >= _IN_PLACE_BYTES
        }
        laid = lay_out(
            items_of(self._parameters, options.dtype, options.sparse | in_place),
            [index for index in self.order if index not in self.unsent],
            options.caps,
            trailing=arrivals.trailing - self.unsent,
            delayed=options.delayed,
            delayed_behind=options.delayed_behind,
        )

        def allocate(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if is_learned:
                return flat_memory(count, dtype, device, group)
            return torch.empty(count, dtype=dtype, device=device)

        self.all = []
        for one in laid:
            is_last = one is laid[-1]
            is_trailing = one.is_trailing or is_last or not is_learned
            first, where = one.indices[0], (self._parameters,)
            self.all.append(
                SparseBucket(first, *where, group, is_trailing=is_trailing)
                if first in options.sparse
                else InPlaceBucket(first, *where, is_trailing=is_trailing, scale=scale)
                if scale is not None and first in in_place
                else Bucket(
                    one.indices,
                    self._parameters,
                    is_trailing=is_trailing,
                    num_behind=self._num_behind if is_last else 0,
                    allocate=allocate,
                    dtype=options.dtype,
                    scale=scale,
                    as_views=options.as_views,
                    hooked=arrivals.by_count if is_learned else None,
                    reports=self._reports,
                )
            )
        for bucket in self.dense():
            for member, index, view in zip(
                bucket.members, bucket.indices, bucket.views, strict=True
            ):
                if index in old_views:
                    member.grad = view.copy_(old_views[index])
        last = self.all[-1]
        self.rides = isinstance(last, Bucket)
        self.behind = (
            last.behind
            if isinstance(last, Bucket)
            else torch.empty(self._num_behind, device=last.device)
        )

    def dense(self) -> list[Bucket]:
        """The buckets that lie in memory of their own."""
        return [bucket for bucket in self.all if isinstance(bucket, Bucket)]

    def find_missing(self, counts: Sequence[int], by_count: set[int]) -> set[int]:
        """The parameters whose gradient has not come in this backward."""
        missing = {one for one in self.unsent if self._parameters[one].grad is None}
        for bucket in self.all:
            if bucket.num_pending:
                for index, is_hooked in zip(bucket.indices, bucket.is_hooked, strict=True):
                    if is_hooked and not counts[index]:
                        missing.add(index)
            if bucket.work is None:
                missing.update(bucket.indices[slot] for slot in bucket.find_missing())
        missing.update(
            index
            for index in by_count
            if not counts[index] or self._parameters[index].grad is None  # undefined
        )
        return missing

    def find_gradients(self, came: Sequence[bool], *, has_local_sums: bool) -> list[bool]:
        """For each parameter, whether this rank has a gradient to share.

        One that lies in its bucket and did not come is what all ranks have had from there, unless
        sums have been kept apart since.
        """
        has = list(came)
        for bucket in self.all:
            for index, member, view in zip(
                bucket.indices, bucket.members, bucket.views, strict=True
            ):
                grad = member.grad
                has[index] = grad is not None and (
                    came[index] or has_local_sums or grad is not view
                )
        return has

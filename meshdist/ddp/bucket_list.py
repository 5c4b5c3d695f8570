"""All buckets of one model: how they are laid, and what they know together.

A bucket of one gradient, dense or sparse, sends it as autograd has made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from ..collectives.flat_sums import dense_stride, items_of, sum_rows
from ..collectives.shared_buffers import flat_memory
from ..collectives.torch_private import storage_uses
from ..collectives.verbs import all_gather_into_tensor, all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import ReductionOptions, lay_out
from .flat_bucket import Bucket, Pending
from .history import History
from .reports import Reports

__all__ = ["AnyBucket", "BucketList", "InPlaceBucket", "SingleBucket", "SparseBucket"]


class SingleBucket:
    """One gradient with the methods of ``Bucket``, and memory of its own only in its backward."""

    at_once = (False,)
    is_hooked = (True,)
    as_views = False
    streams = None
    taken = frozenset[int]()
    local = ()

    def __init__(
        self, index: int, parameters: Sequence[torch.nn.Parameter], *, is_trailing: bool
    ) -> None:
        self.indices = (index,)
        self.members = [parameters[index]]
        self.views = [self.members[0].detach()]  # of its shape; gradients never lie there
        self.device = parameters[index].device
        self.is_trailing = is_trailing
        self._mine: torch.Tensor | None = None
        self.average: torch.Tensor | None = None
        """The result of the reduction; None where no rank had a gradient."""
        self.reset()

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.work: Pending | None = None
        self.num_pending = 1
        self.must_wait = self.is_trailing
        self._mine = self.average = None

    def hook_all(self) -> None:
        """Nothing to do: its hook tells what comes, and it is read on the stream that waits."""

    forward_ends = backward_begins = await_streams = hook_all

    def find_missing(self) -> list[int]:
        """No slots: its hook tells."""
        return []

    find_late = find_missing

    def move_in_early(self) -> bool:
        """Take the gradient as it is."""
        self.move_in_rest()
        return True

    def move_in(self, slot: int) -> None:
        """Take the gradient as it is."""
        self.move_in_rest()

    def move_in_rest(self) -> None:
        """Take the gradient as it is."""
        self._mine = self.members[0].grad

    def clear(self) -> None:
        """Send nothing of what is here."""
        self._mine = None

    def scale_average(self, factor: float) -> None:
        """Multiply the average."""
        if self.average is not None:
            self.average = self.average * factor

    def hand_out(self, is_used: Sequence[bool] | None, *, is_complete: bool) -> None:
        """Let ``.grad`` be the average."""
        index = self.indices[0]
        if self.average is not None and (is_complete or is_used is None or is_used[index]):
            self.members[0].grad = self.average


class InPlaceBucket(SingleBucket):
    """One large dense gradient, averaged where it lies.

    Where ranks share no memory, to copy it into a bucket would only cost time and memory. It is
    copied all the same where its memory is not its own: autograd lets a gradient share memory with
    that of a view, or of another parameter, which a backward may still read.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        *,
        is_trailing: bool,
        scale: float,
    ) -> None:
        super().__init__(index, parameters, is_trailing=is_trailing)
        self._scale = scale
        self._stride = dense_stride(self.views[0].shape, self.views[0].stride())

    @property
    def sent(self) -> torch.Tensor:
        """The tensor to sum, once in a backward; zeros where there is no gradient."""
        if self.average is None:
            mine = self._mine
            if mine is not None and mine.stride() == self._stride and storage_uses(mine) == 1:
                self.average = mine.mul_(self._scale)
            else:
                apart = self.views[0].new_empty_strided(self.views[0].shape, self._stride)
                self.average = (
                    apart.zero_() if mine is None else torch.mul(mine, self._scale, out=apart)
                )
        return self.average


_DENSE = -1
_NONE = -2


class SparseBucket(SingleBucket):
    """One gradient, of which ranks send the rows that they have.

    What is sent depends on the gradient, so it is sent where the reduction is waited for: that
    comes in one order on every rank. Where some rank has a dense gradient, it is dense on all.
    """

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        group: ProcessGroup,
        *,
        is_trailing: bool,
    ) -> None:
        super().__init__(index, parameters, is_trailing=is_trailing)
        self._group = group

    @property
    def flat(self) -> torch.Tensor:
        """The tensor that a communication hook is given, and writes its average into."""
        if self.average is None:
            self.average = self._rows() if self._mine is None else self._mine.detach().clone()
        return self.average

    def _rows(self) -> torch.Tensor:
        """No rows at all."""
        member = self.members[0]
        return torch.sparse_coo_tensor(
            torch.empty(1, 0, dtype=torch.int64, device=self.device),
            member.detach().new_empty(0, *member.shape[1:]),
            member.shape,
            check_invariants=False,
        ).coalesce()

    def wait(self) -> None:
        """Average over the group; collective."""
        member, mine, group = self.members[0], self._mine, self._group
        rows = None if mine is None or mine.layout is torch.strided else mine.detach().coalesce()
        count = _NONE if mine is None else _DENSE if rows is None else rows._nnz()
        counts = torch.empty(group.size(), dtype=torch.int64, device=self.device)
        all_gather_into_tensor(counts, torch.tensor([count], device=self.device), group)
        sizes = counts.tolist()
        if _DENSE in sizes:
            if mine is None:
                dense = torch.zeros_like(member)
            else:
                dense = (mine.to_dense() if rows is not None else mine.clone()).contiguous()
            all_reduce(dense, ReduceOp.AVG, group)
            self.average = dense
            return
        if all(size == _NONE for size in sizes):
            self.average = None
            return
        sizes = [max(size, 0) for size in sizes]
        if rows is None:
            rows = self._rows()
        if not any(sizes):
            self.average = rows
            return
        self.average = sum_rows(group, rows / group.size(), sizes)


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
        arrivals: History,
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

        def allocate(indices: Sequence[int], num_behind: int) -> torch.Tensor:
            """Memory for the gradients of some parameters, and for numbers behind them."""
            first = self._parameters[indices[0]]
            dtype, device = options.dtype or first.dtype, first.device
            count = sum(self._parameters[index].numel() for index in indices) + num_behind
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
                    replace(one, is_trailing=is_trailing),
                    self._parameters,
                    options,
                    sent=allocate(one.indices, self._num_behind if is_last else 0),
                    scale=scale,
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

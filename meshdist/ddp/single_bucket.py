"""Buckets of one gradient, dense or sparse, which is sent as autograd has made it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.sparse_sums import sum_rows
from ..collectives.torch_private import storage_uses
from ..collectives.verbs import all_gather_into_tensor, all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import dense_stride
from .flat_bucket import Pending

__all__ = ["InPlaceBucket", "SingleBucket", "SparseBucket"]


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
            if mine is not None and mine.stride() == self._stride and _has_own_memory(mine):
                self.average = mine.mul_(self._scale)
            else:
                apart = self.views[0].new_empty_strided(self.views[0].shape, self._stride)
                self.average = (
                    apart.zero_() if mine is None else torch.mul(mine, self._scale, out=apart)
                )
        return self.average


def _has_own_memory(gradient: torch.Tensor) -> bool:
    """Whether no other tensor lies in the memory of ``gradient``, which a parameter holds."""
    return storage_uses(gradient) == 1


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

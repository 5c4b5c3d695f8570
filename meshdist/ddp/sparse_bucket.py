"""The bucket of one sparse gradient, as sparse embeddings have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.list_verbs import all_gather
from ..collectives.verbs import all_gather_into_tensor, all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .flat_bucket import Pending

__all__ = ["SparseBucket"]

_DENSE = -1


class SparseBucket:
    """One gradient, of which ranks send the rows that they have; it has the methods of ``Bucket``.

    What is sent depends on the gradient, so it is sent where the reduction is waited for: that
    comes in one order on every rank. Where some rank has a dense gradient, it is dense on all.

    Args:
        index: which parameter.
        parameters: all of them.
        group: over which gradients are averaged.

    Attributes:
        is_trailing: whether it is sent at the end of the backward, whatever has come before.
    """

    at_once = (False,)
    is_hooked = (True,)
    as_views = False
    streams = None
    taken = frozenset[int]()

    def __init__(
        self,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        group: ProcessGroup,
    ) -> None:
        self.indices = (index,)
        self.members = [parameters[index]]
        self.views = [self.members[0].detach()]  # gradients never lie there
        self.device = parameters[index].device
        self.is_trailing = False
        self._group = group
        self._mine: torch.Tensor | None = None
        self.average: torch.Tensor | None = None
        """What the reduction has given; None where no rank had a gradient."""
        self.reset()

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.work: Pending | None = None
        self.num_pending = 1
        self.must_wait = self.is_trailing
        self._mine = self.average = None

    def hook_all(self) -> None:
        """Its parameter has a hook."""

    def backward_begins(self) -> None:
        """Its hook tells when it has come."""

    def find_missing(self) -> list[int]:
        """Its hook tells."""
        return []

    def find_late(self) -> list[int]:
        """Its hook tells."""
        return []

    def await_streams(self) -> None:
        """It is read on the stream that waits for it."""

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

    @property
    def flat(self) -> torch.Tensor:
        """What a communication hook is given, and writes its average into."""
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

    def reduction(self) -> _SparseReduction:
        """What averages the gradient when it is waited for."""
        return _SparseReduction(self)

    def exchange(self) -> None:
        """Average over the group; collective."""
        member, mine, group = self.members[0], self._mine, self._group
        rows = None if mine is None or mine.layout is torch.strided else mine.detach().coalesce()
        count = 0 if mine is None else _DENSE if rows is None else rows._nnz()
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
        if not any(sizes):
            self.average = mine
            return
        if rows is None:
            rows = self._rows()
        # Indices are gathered along their last dim, values along their first.
        indices = [rows.indices().new_empty(rows.sparse_dim(), size) for size in sizes]
        values = [rows.values().new_empty(size, *rows.values().shape[1:]) for size in sizes]
        all_gather(indices, rows.indices().contiguous(), group)
        all_gather(values, rows.values().contiguous(), group)
        self.average = torch.sparse_coo_tensor(
            torch.cat(indices, 1),
            torch.cat(values).div_(group.size()),
            member.shape,
            check_invariants=False,
        ).coalesce()

    def scale_average(self, factor: float) -> None:
        """Multiply the average."""
        if self.average is not None:
            self.average = self.average * factor

    def hand_out(self, is_used: Sequence[bool] | None, *, is_complete: bool) -> None:
        """Let ``.grad`` be the average."""
        index = self.indices[0]
        if self.average is not None and (is_complete or is_used is None or is_used[index]):
            self.members[0].grad = self.average


class _SparseReduction:
    def __init__(self, bucket: SparseBucket) -> None:
        self._bucket = bucket

    def wait(self) -> None:
        """Average over the group; collective."""
        self._bucket.exchange()

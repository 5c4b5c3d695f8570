"""The bucket of one sparse gradient, as sparse embeddings have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collectives.sparse_sums import sum_rows
from ..collectives.verbs import all_gather_into_tensor, all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .single_bucket import SingleBucket

__all__ = ["SparseBucket"]

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

"""Sums of sparse tensors over a group: each member sends the rows that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..groups.process_group import ProcessGroup
from .verbs import all_gather_into_tensor

__all__ = ["sparse_psum", "sum_rows"]


def sparse_psum(grad: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Every member holds the sum of all members' sparse ``grad``, coalesced; it has no gradient."""
    rows = grad.detach().coalesce()
    count = torch.tensor([rows._nnz()], device=grad.device)
    counts = count.new_empty(group.size())
    all_gather_into_tensor(counts, count, group)
    return sum_rows(group, rows, counts.tolist())


def sum_rows(group: Any, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the sum of the members' coalesced rows, ``counts`` of each, coalesced; collective."""
    # Along their last dimension indices go, values along their first.
    indices = [mine.indices().new_empty(mine.sparse_dim(), count) for count in counts]
    values = [mine.values().new_empty(count, *mine.values().shape[1:]) for count in counts]
    group.allgather([indices], [mine.indices().contiguous()]).wait()
    group.allgather([values], [mine.values().contiguous()]).wait()
    summed = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    )
    return summed.coalesce()

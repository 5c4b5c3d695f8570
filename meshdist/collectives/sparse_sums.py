"""The sum of sparse gradients over a group: each member sends the rows that it has."""

from __future__ import annotations

import torch

from ..groups.process_group import ProcessGroup
from .list_verbs import all_gather
from .verbs import all_gather_into_tensor

__all__ = ["sparse_psum"]


def sparse_psum(grad: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Every member holds the sum of all members' sparse ``grad``, coalesced; it has no gradient."""
    rows = grad.detach().coalesce()
    count = torch.tensor([rows._nnz()], device=grad.device)
    counts = count.new_empty(group.size())
    all_gather_into_tensor(counts, count, group)
    sizes = counts.tolist()
    if not any(sizes):
        return rows
    # Indices are gathered along their last dim, values along their first.
    indices = [rows.indices().new_empty(rows.sparse_dim(), size) for size in sizes]
    values = [rows.values().new_empty(size, *rows.values().shape[1:]) for size in sizes]
    all_gather(indices, rows.indices().contiguous(), group)
    all_gather(values, rows.values().contiguous(), group)
    return torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), grad.shape, check_invariants=False
    ).coalesce()

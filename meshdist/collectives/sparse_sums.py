"""Sums of sparse tensors over a group, as the gradients of sparse embeddings are.

Each member sends the rows that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import ArgumentError, DtypeError
from ..reduce_ops import ReduceKind, ReduceOp

__all__ = ["sparse_psum", "sum_rows", "sum_sparse"]


def sparse_psum(grad: torch.Tensor, group: Any) -> torch.Tensor:
    """Every member holds the sum of all members' sparse ``grad``, coalesced; it has no gradient."""
    rows = grad.detach().coalesce()
    count = torch.tensor([rows._nnz()], device=grad.device)
    counts = count.new_empty(group.size())
    group.all_gather_single(counts, count).wait()
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


def sum_sparse(group: Any, tensor: torch.Tensor, op: ReduceKind) -> None:
    """Sum a sparse COO tensor of one shape over all members in place; indices may differ."""
    if tensor.layout is not torch.sparse_coo:
        raise ArgumentError(
            "all_reduce of a tensor that is neither dense nor of coordinates",
            expected="layout torch.strided or torch.sparse_coo",
            found=f"layout {tensor.layout}",
            fix="pass tensor.to_dense()",
        )
    if op != ReduceOp.SUM:
        raise DtypeError(
            f"all_reduce cannot reduce a sparse tensor with {op.name}",
            expected="SUM",
            fix="pass tensor.to_dense()",
        )
    with torch.no_grad():
        tensor.copy_(sparse_psum(tensor, group))

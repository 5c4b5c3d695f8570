"""Sums of sparse tensors, as the gradients of sparse embeddings are."""

from __future__ import annotations

from typing import Any

import torch

from ..collectives.sparse_sums import sum_rows
from ..errors import ArgumentError, DtypeError
from ..reduce_ops import ReduceKind, ReduceOp

__all__ = ["sum_sparse"]


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
    mine = tensor.detach().coalesce()
    counts = torch.empty(group.size(), dtype=torch.int64, device=mine.device)
    group.all_gather_single(counts, torch.tensor([mine._nnz()], device=mine.device)).wait()
    with torch.no_grad():
        tensor.copy_(sum_rows(group, mine, counts.tolist()))

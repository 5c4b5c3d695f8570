"""Send gradients outside flat buckets: large gradients in place, sparse gradients by rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..collectives.flat_sums import dense_stride, sum_rows
from ..collectives.tensor_collectives import all_gather_into_tensor, all_reduce
from ..collectives.torch_private import storage_uses
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import BucketState, GradientCopy, Pending


class _Single(GradientCopy):
    """Sends a gradient that is not in a flat tensor."""

    def take(self, bucket_state: BucketState, slot: int | None = None) -> None:
        """Store ``.grad``, which may be None, for sending; ignore ``slot``."""
        bucket_state.read = [bucket_state.bucket.members[0].grad]

    def clear(self, bucket_state: BucketState) -> None:
        """Store None as the gradient; keep ``.grad``."""
        bucket_state.read = [None]

    def give(
        self,
        bucket_state: BucketState,
        is_used: Sequence[bool] | None,
        *,
        is_complete: bool,
        share: float,
    ) -> None:
        """Set ``.grad`` to the average times ``share``, unless no rank used the parameter."""
        average, index = bucket_state.average, bucket_state.bucket.indices[0]
        if average is not None and (is_complete or is_used is None or is_used[index]):
            bucket_state.bucket.members[0].grad = average if share == 1.0 else average * share


class InPlace(_Single):
    """Averages a large dense gradient in its own memory."""

    # Without shared memory, a copy into a bucket would only cost time and memory.

    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        """Return the scaled gradient (a copy if its memory is shared), or zeros for None."""
        mine, like = bucket_state.read[0], bucket_state.bucket.views[0]
        scale = bucket_state.bucket.averaging.scale or 1.0
        stride = dense_stride(like.shape, like.stride())
        # Autograd may let a gradient share memory with another gradient, which a backward may
        # still read.
        has_own = mine is not None and storage_uses(mine) == 1 and not mine._is_zerotensor()
        if mine is not None and has_own and mine.stride() == stride:
            return mine.mul_(scale)
        apart = like.new_empty_strided(like.shape, stride)
        return apart.zero_() if mine is None else torch.mul(mine, scale, out=apart)

    def start(self, bucket_state: BucketState) -> Pending:
        bucket_state.average = self.buffer(bucket_state)
        return bucket_state.bucket.averaging.start(bucket_state.average)


_DENSE = -1
_NONE = -2


class Sparse(_Single):
    """Averages a sparse gradient; each rank sends its rows."""

    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        """Return a copy of this rank's gradient, or a sparse tensor without rows."""
        mine, like = bucket_state.read[0], bucket_state.bucket.views[0]
        bucket_state.average = _no_rows(like) if mine is None else mine.detach().clone()
        return bucket_state.average

    def start(self, bucket_state: BucketState) -> Pending:
        """Return a reduction that starts in its ``wait``."""
        return _SparseReduction(bucket_state.bucket.averaging.group, bucket_state)


class _SparseReduction(NamedTuple):
    """A reduction of a sparse gradient, inside ``wait``."""

    group: ProcessGroup
    bucket_state: BucketState

    def wait(self) -> None:
        """Average the gradient and store it in the bucket state; collective."""
        # The messages depend on the gradients. All ranks wait in the same order.
        self.bucket_state.average = self._average()

    def _average(self) -> torch.Tensor | None:
        """Return the average: dense if any gradient is, None if no rank has any."""
        mine, like, group = self.bucket_state.read[0], self.bucket_state.bucket.views[0], self.group
        rows = None if mine is None or mine.layout is torch.strided else mine.detach().coalesce()
        count = _NONE if mine is None else _DENSE if rows is None else rows._nnz()
        counts = torch.empty(group.size(), dtype=torch.int64, device=like.device)
        all_gather_into_tensor(counts, torch.tensor([count], device=like.device), group)
        sizes = counts.tolist()
        if _DENSE in sizes:
            if mine is None:
                dense = torch.zeros_like(like)
            else:
                dense = (mine.to_dense() if rows is not None else mine.clone()).contiguous()
            all_reduce(dense, ReduceOp.AVG, group)
            return dense
        if all(size == _NONE for size in sizes):
            return None
        sizes = [max(size, 0) for size in sizes]
        if rows is None:
            rows = _no_rows(like)
        return sum_rows(group, rows / group.size(), sizes) if any(sizes) else rows


def _no_rows(like: torch.Tensor) -> torch.Tensor:
    """Return a sparse tensor without rows, like ``like``."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=like.device),
        like.new_empty(0, *like.shape[1:]),
        like.shape,
        check_invariants=False,
    ).coalesce()

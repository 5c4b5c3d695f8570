"""PowerSGD on the whole bucket: a square matrix, sent as the product of two thin ones."""

from __future__ import annotations

import math

import torch

from ...collectives.verbs import all_reduce
from ...reduce_ops import ReduceOp
from .bucket import GradBucket
from .reducing import averaged
from .states import PowerSGDState, group_for

__all__ = ["batched_powerSGD_hook"]


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average an approximation of low rank of the whole bucket; what it lacks is added next time.

    The first ``state.start_powerSGD_iter`` backwards average exactly.

    Args:
        state: torch's; its ``process_group`` is a group or a mesh, and None that of the wrapper.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory and dtype.

    Cost: two all-reduces of ``matrix_approximation_rank * sqrt(n)`` elements, for n in the bucket.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1.
    """
    group = group_for(state.process_group, bucket)
    buffer, index = bucket.buffer(), bucket.index()
    if state.iter < state.start_powerSGD_iter or not buffer.numel():
        state.maybe_increase_iter(bucket)
        return averaged(buffer, group)

    numel = buffer.numel()
    side = math.ceil(math.sqrt(numel))
    rank = min(state.matrix_approximation_rank, side)
    state.total_numel_before_compression += numel
    state.total_numel_after_compression += 2 * side * rank
    wanted = buffer.new_zeros(side * side)
    wanted[:numel] = buffer
    if state.use_error_feedback and index in state.error_dict:
        wanted += state.error_dict[index]
    matrix = wanted.view(side, side)
    q = state.q_memory_dict.get(index) if state.warm_start else None
    if q is None:
        seed = state.rng.randint(1_000_000_000)  # equal on all ranks, another in each step
        q = torch.randn(side, rank, generator=torch.Generator().manual_seed(seed))
    p = matrix @ _orthogonal(q.to(buffer))

    def approximate(_: object) -> torch.Tensor:
        columns = _orthogonal(p)
        rows = matrix.t() @ columns
        all_reduce(rows, ReduceOp.AVG, group)
        found = (columns @ rows.t()).view(-1)
        if state.use_error_feedback:
            state.error_dict[index] = wanted - found
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = columns, rows
        state.maybe_increase_iter(bucket)
        return buffer.copy_(found[:numel])

    work = all_reduce(p, ReduceOp.SUM, group, async_op=True)
    return work.get_future().then(approximate)  # type: ignore[union-attr]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of ``matrix``, which may be zeros."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    columns: torch.Tensor = torch.linalg.qr(wide).Q
    return columns.to(matrix.dtype)

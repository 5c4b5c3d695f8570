"""Hooks that average as they are asked to: plainly, or not at all."""

from __future__ import annotations

from typing import Any

import torch

from ...collectives.verbs import all_reduce
from ...groups.process_group import ProcessGroup
from ...reduce_ops import ReduceKind, ReduceOp
from ...torch_process_groups.sparse import sum_sparse
from .bucket import GradBucket
from .states import group_for

__all__ = ["allreduce_hook", "averaged", "done_with", "noop_hook", "reduced"]


def allreduce_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average by one all-reduce, as the wrapper does without a hook.

    Args:
        process_group: a group or a mesh; None is that of the wrapper.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory.

    Cost: one all-reduce of the bucket.
    """
    return averaged(bucket.buffer(), group_for(process_group, bucket))


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave every rank its own gradients: shows what a step costs without communication.

    Args:
        bucket: the gradients.

    Returns:
        A Future of them.
    """
    return done_with(bucket.buffer())


def averaged(tensor: torch.Tensor, group: ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """A Future of ``tensor``, once it holds the average over ``group``."""
    return reduced(tensor, ReduceOp.AVG, group).then(lambda done: done.value()[0])


def reduced(
    tensor: torch.Tensor, op: ReduceKind, group: ProcessGroup
) -> torch.futures.Future[list[torch.Tensor]]:
    """A Future of a list of ``tensor``, once it holds the sum or average over ``group``.

    A sparse one is summed at once.
    """
    if not tensor.is_sparse:
        return all_reduce(tensor, op, group, async_op=True).get_future()  # type: ignore[union-attr]
    sum_sparse(group, tensor, ReduceOp.SUM)
    if op == ReduceOp.AVG:
        tensor.div_(group.size())
    return done_with([tensor])


def done_with(value: Any) -> torch.futures.Future[Any]:
    """A Future that is complete."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future

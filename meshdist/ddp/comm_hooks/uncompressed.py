"""Hooks that average as asked: plainly, after some steps in each host alone, or not at all."""

from __future__ import annotations

from typing import Any

import torch

from ...collectives.sparse_sums import sum_sparse
from ...collectives.verbs import all_reduce
from ...groups.process_group import ProcessGroup, resolve_group
from ...reduce_ops import ReduceKind, ReduceOp
from .bucket import GradBucket, PostLocalSGDState, group_for

__all__ = ["allreduce_hook", "averaged", "done_with", "noop_hook", "post_localSGD_hook", "reduced"]


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


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average over the group for some steps, and over ``state.subgroup`` from then on.

    Args:
        state: torch's. Its ``process_group`` and ``subgroup`` are groups or meshes;
            ``process_group=None`` is that of the wrapper, and ``subgroup=None`` its members on this
            host. Where ``post_local_gradient_allreduce`` is False gradients stay local then.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory.

    Cost: one all-reduce of the bucket, or nothing.
    """
    group = group_for(state.process_group, bucket)
    buffer = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return averaged(buffer, group)
    if not state.post_local_gradient_allreduce:
        return done_with(buffer)
    if state.subgroup is None:
        state.subgroup = _on_this_host(group)
    return averaged(buffer, resolve_group(state.subgroup))


def _on_this_host(group: ProcessGroup) -> ProcessGroup:
    """The members of ``group`` on this host; each host's come here at the same step."""
    world = group.world
    if not world.spans_hosts(group.ranks):
        return group
    here = world.hosts[world.rank]
    ranks = tuple(rank for rank in group.ranks if world.hosts[rank] == here)
    name = f"the members of {group.name} on one host"
    return ProcessGroup(world, ranks, name=name, timeout=group.own_timeout)

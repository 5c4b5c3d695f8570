"""Local SGD: after some steps gradients are averaged inside each host alone, or not at all."""

from __future__ import annotations

import torch

from ...groups.process_group import ProcessGroup, resolve_group
from .bucket import GradBucket
from .reducing import averaged, done_with
from .states import PostLocalSGDState, group_for

__all__ = ["post_localSGD_hook"]


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

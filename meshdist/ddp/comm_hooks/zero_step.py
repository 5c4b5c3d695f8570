"""Hooks that step torch's ZeroRedundancyOptimizer bucket by bucket, where averages are awaited.

Torch's own refuse Gloo, and ask torch's world for the group of the wrapper. The bookkeeping is
torch's, on the optimizer; parameters travel by our verbs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import ref

import torch
import torch.distributed as torch_distributed

from ...collectives.verbs import broadcast
from ...errors import ArgumentError, GradientError, KindError
from ...groups.process_group import ProcessGroup
from .bucket import GradBucket
from .registered import ours_for

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved"]

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def hook_with_zero_step(hook: Hook, ddp: Any, zero: Any, shard_buckets: bool = False) -> Hook:
    """Let ``hook`` average each bucket, and the optimizer step its share of it behind that.

    When ``backward()`` returns, all ranks have the new parameters; the program calls no ``step()``.
    As with torch's, the first two backwards change no parameter: they show how buckets lie.

    Args:
        hook: any communication hook, such as ``allreduce_hook``.
        ddp: the wrapper with which the result is registered.
        zero: torch's ``ZeroRedundancyOptimizer`` of the wrapper's parameters, made with
            ``overlap_with_ddp=True`` over torch's group of the same ranks.
        shard_buckets: whether to cut buckets into parts that make the ranks' shares more equal; by
            default a bucket's parameters are all of one rank.

    Returns:
        A hook for ``register_comm_hook``, with the state of ``hook``.

    Cost: that of ``hook``, and a broadcast of each part of a bucket from the rank that steps it.

    Raises:
        KindError: ``zero`` is something else.
        ArgumentError: it was made without ``overlap_with_ddp=True``, or over other ranks.

    Source: Rajbhandari, Rasley, Ruwase and He, "ZeRO" (2019), stage 1.
    """
    optimizers = _check(zero, ddp.process_group)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    torchs: Any = ddp_zero_hook
    ddp_of: Any = ref(ddp)
    if shard_buckets:
        zero._overlap_info.shard_buckets = True
        zero._overlap_info.total_size = 0

    def hook_with_zero(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, info = bucket.buffer(), zero._overlap_info
        if info.params_per_bucket and not ddp_of().reducer.has_final_buckets:
            raise _other_buckets(bucket)
        future: torch.futures.Future[Any] = ours_for(hook, state)(state, bucket)
        with _rank_in_group(zero):
            torchs._hook_with_zero_step_setup(ddp_of, zero, bucket)
        if info.status != optimizers._OverlapStatus.INITIALIZED:
            return future

        def step(done: torch.futures.Future[Any]) -> Any:
            value = done.value()
            average = value[0] if isinstance(value, (list, tuple)) else value
            if not isinstance(average, torch.Tensor) or average.numel() != buffer.numel():
                return value  # which the wrapper refuses
            if average is not buffer:
                buffer.copy_(average.view_as(buffer))
            bucket.set_buffer(buffer)  # a wrapped hook may have set another
            if zero.rank in info.assigned_ranks_per_bucket[bucket.index()]:
                torchs._perform_local_step(bucket, zero, zero.rank)
            _share_parameters(zero, bucket)
            return buffer

        return future.then(step)

    return hook_with_zero


hook_with_zero_step_interleaved = hook_with_zero_step
"""torch's other name: here the first steps as soon as a bucket is averaged, too."""


@contextmanager
def _rank_in_group(zero: Any) -> Iterator[None]:
    """Set the optimizer's ``global_rank`` to its rank in the group, inside this context."""
    # Torch compares it with places in the group.
    in_world, zero.global_rank = zero.global_rank, zero.rank
    try:
        yield
    finally:
        zero.global_rank = in_world


def _share_parameters(zero: Any, bucket: GradBucket) -> None:
    """Start to broadcast a bucket's parameters from ranks that step them; at the last await all."""
    info, index = zero._overlap_info, bucket.index()
    for rank in sorted(info.assigned_ranks_per_bucket[index]):
        part = zero._bucket_assignments_per_rank[rank][index].tensor
        work = broadcast(part, group=bucket.group(), group_src=rank, async_op=True)
        info.broadcast_handles.append(work)
    if bucket.is_last():
        info.wait_for_broadcasts()


def _other_buckets(bucket: GradBucket) -> GradientError:
    """Return the error for buckets that were laid anew after the optimizer has learned them."""
    return GradientError(
        "the buckets are no longer those that the ZeroRedundancyOptimizer has learned",
        where=f"rank {bucket.group().world.rank}, {bucket!r}",
        fix="make the optimizer and the wrapper anew in place of _update_process_group",
    )


def _check(zero: Any, group: ProcessGroup) -> Any:
    """Return the module of torch's ``zero``; raise unless it overlaps DDP on the same ranks."""
    where = f"rank {group.world.rank}"
    module = sys.modules.get(_MODULE)  # to import it warns; an optimizer of it has done so
    if module is None or not isinstance(zero, module.ZeroRedundancyOptimizer):
        raise KindError(
            f"zero is of type {type(zero).__name__}",
            where=where,
            expected="a ZeroRedundancyOptimizer of torch.distributed.optim",
            fix="torch makes one in a world of its own: mesh.to_torch() begins that beside ours",
        )
    if not zero._overlap_with_ddp:
        raise ArgumentError(
            "the ZeroRedundancyOptimizer does not step inside the backward",
            where=where,
            expected="one that was made with overlap_with_ddp=True",
            fix="make it so; or register no hook, and call its step()",
        )
    ranks = tuple(torch_distributed.get_process_group_ranks(zero.process_group))
    if ranks != tuple(group.ranks):
        raise ArgumentError(
            "the ZeroRedundancyOptimizer and the wrapper are over different ranks",
            where=where,
            expected=f"the ranks of {group.group_name}: {list(group.ranks)}",
            found=f"process_group of ranks {list(ranks)}",
            fix="pass the axis as torch's group: process_group=mesh.to_torch().get_group('dp')",
        )
    return module

"""Run torch's collectives on one tensor per rank, in place.

``group`` is a ProcessGroup, a mesh (``mesh["tp"]``; several axes are flattened, row-major) or None
for the world. Collectives accept torch tensors, NumPy and CuPy arrays, and copy only non-contiguous
arrays. They return None, or a Work with ``async_op=True``, and check arguments before they send
anything. They have no gradients: use ``meshdist.lax``.

All raise MismatchError if ranks call different collectives or pass mismatched tensors,
CollectiveTimeoutError (with each rank's last call) if a rank does not reach the call, AbortedError
after an abort, and BackendError if the backend fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..arguments import check_timeout
from ..backends.operation_args import OperationArgs
from ..backends.work import Work, joined
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..reduce_ops import ReduceOp, Reduction
from .argument_checks import check_flag, first_cuda_device, get_peer
from .normalize_args import prepare
from .registration import collective

__all__ = [
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
]


@collective(has_fast_path=True)
def all_reduce(
    tensor: Any, op: Reduction = ReduceOp.SUM, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Reduce ``tensor`` across the group in place; every rank gets the same bits.

    Args:
        tensor: an array of any shape, with equal dtype and element count on every rank: floating,
            complex (SUM and AVG only), integer or bool (no AVG). Written in place.
        op: a ReduceOp.
        group: a ProcessGroup, a mesh, or None for the world.
        async_op: return a Work immediately; do not use ``tensor`` until ``wait()`` returns.

    Cost: 2 n (p - 1) / p bytes sent per rank for n bytes over p ranks.

    Raises:
        DtypeError: the dtype does not support ``op``.
        KindError: ``tensor`` is not an array, or ``op`` is not a ReduceOp.
        NotInGroupError: this rank is not in the group.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     x = torch.arange(2) + 1 + 2 * md.get_rank()
        ...     md.all_reduce(x)
        ...     return x.tolist()
        >>> md.simulate(program, 2)
        [[4, 6], [4, 6]]
    """
    return prepare("all_reduce", group, tensor, op).run(async_op)


@collective(has_fast_path=True)
def broadcast(
    tensor: Any,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy the source's ``tensor`` to every rank of the group.

    Args:
        tensor: an array; equal dtype and element count on every rank. Written in place except on
            the source.
        src: the source's global rank; or
        group_src: its group rank; pass either.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes received by every rank except the source.

    Raises:
        ArgumentError: no source, or both ``src`` and ``group_src``.
        NotInGroupError: the source or this rank is not in the group.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     x = torch.full((2,), md.get_rank())
        ...     md.broadcast(x, src=1)
        ...     return x.tolist()
        >>> md.simulate(program, 3)
        [[1, 1], [1, 1], [1, 1]]
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    root = get_peer(group, src, group_src, "broadcast", "src")
    return prepare("broadcast", group, tensor, root).run(async_op)


@collective(has_fast_path=True)
def reduce(
    tensor: Any,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce ``tensor`` across the group into the destination's tensor.

    Args:
        tensor: an array; equal dtype and element count on every rank. Written in place on the
            destination only.
        dst: the destination's global rank; or
        group_dst: its group rank; pass either.
        op, group, async_op: as in ``all_reduce``.

    Cost: n bytes sent by every rank except the destination.

    Raises:
        As ``broadcast``, for ``dst``. DtypeError: the dtype does not support ``op``.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     x = torch.full((2,), md.get_rank() + 1)
        ...     dist.reduce(x, dst=0)
        ...     return x.tolist()
        >>> md.simulate(program, 3)
        [[6, 6], [2, 2], [3, 3]]
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    root = get_peer(group, dst, group_dst, "reduce", "dst")
    return prepare("reduce", group, tensor, op, root).run(async_op)


@collective(has_fast_path=True)
def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Gather the inputs of all ranks into one tensor on every rank.

    Args:
        output_tensor: the inputs in group order, concatenated, [p * n, ...], or stacked,
            [p, n, ...]. Written in place.
        input_tensor: shape [n, ...], the same on every rank; any dtype.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank.

    Raises:
        ShapeError: the output has neither shape. DtypeError: the dtypes differ.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     out = torch.empty(4, dtype=torch.int64)
        ...     md.all_gather_into_tensor(out, torch.arange(2) + 1 + 2 * md.get_rank())
        ...     return out.tolist()
        >>> md.simulate(program, 2)
        [[1, 2, 3, 4], [1, 2, 3, 4]]
    """
    return prepare("all_gather_into_tensor", group, output_tensor, input_tensor).run(async_op)


@collective(has_fast_path=True)
def all_gather_single(
    output_tensor: Any, input_tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Alias of ``all_gather_into_tensor``, torch's newer name."""
    return prepare("all_gather_single", group, output_tensor, input_tensor).run(async_op)


@collective(has_fast_path=True)
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the inputs of all ranks and scatter the result: each rank gets one block.

    Args:
        output: shape [n, ...]. Written in place.
        input: one block per rank, concatenated, [p * n, ...], or stacked, [p, n, ...].
        op, group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for a block of n bytes.

    Raises:
        ShapeError: the input has neither shape.
        DtypeError: the dtypes differ, or do not support the reduction.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     out = torch.empty(2, dtype=torch.int64)
        ...     md.reduce_scatter_tensor(out, torch.arange(4))
        ...     return out.tolist()
        >>> md.simulate(program, 2)
        [[0, 2], [4, 6]]
    """
    return prepare("reduce_scatter_tensor", group, output, input, op).run(async_op)


@collective(has_fast_path=True)
def reduce_scatter_single(
    output: Any,
    input: Any,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Alias of ``reduce_scatter_tensor``, torch's newer name."""
    return prepare("reduce_scatter_single", group, output, input, op).run(async_op)


@collective(has_fast_path=True, stays_off_streams=True)
def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Wait until every rank of the group has called it; earlier collectives are then complete.

    If the group uses NCCL and a CPU backend, the barrier waits for both.

    Args:
        group, async_op: as in ``all_reduce``.
        device_ids: the CUDA device for an NCCL barrier; by default the device bound to this rank,
            else the current device. Ignored with CPU backends only.
        timeout: overrides the group's timeout.

    Raises:
        KindError, ArgumentError: a wrong timeout, or a missing CUDA device.
        CollectiveTimeoutError: a rank, which the error lists, did not call.
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    check_flag(async_op, "barrier")
    check_timeout(timeout)
    device = None if device_ids is None else first_cuda_device(device_ids, "barrier")
    is_on_cuda = device is not None and "cuda" in group.backends
    device_groups = group.idle_device_groups("cuda" if is_on_cuda else group.first_device_type())
    works: list[Work] = []
    for device_group in device_groups:
        prepared = OperationArgs("barrier", "barrier", (), ())
        prepared.device, prepared.limit = device, timeout
        started = device_group.run(prepared, is_async=async_op)
        if started is not None:
            works.append(started)
    return joined(works) if works else None

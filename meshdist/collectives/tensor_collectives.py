"""torch's collectives on one tensor per member: in place, on a group, a mesh axis or several axes.

``group`` is a ProcessGroup, a mesh (``mesh["tp"]``; several axes are flattened, row-major) or None
for the world. Every collective takes torch tensors, NumPy and CuPy arrays, without copies where
they are contiguous; returns None, or a Work with ``async_op=True``; and rejects bad arguments
before anything is sent. None of them has a gradient: see ``meshdist.lax`` for collectives that
differentiate.

All of them raise MismatchError where members call different collectives, or on tensors that do not
fit; CollectiveTimeoutError where a member does not come, with a report of what each member called
last; AbortedError after an abort; and BackendError where the backend fails.
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
    """Every member's tensor becomes the reduction of all; the same bits on every member.

    Args:
        tensor: any shape, of as many elements and one dtype on all members; floating, complex (SUM
            and AVG only), integer or bool (no AVG). Written in place.
        op: a ReduceOp.
        group: whose members take part.
        async_op: return a Work at once; leave ``tensor`` alone until it is waited for.

    Cost: 2 n (p - 1) / p bytes sent per rank for n bytes over p ranks.

    Raises:
        DtypeError: a reduction that the dtype lacks.
        KindError: no array, or no ReduceOp.
        NotInGroupError: this rank is no member.

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
    """Every member's tensor becomes that of the source.

    Args:
        tensor: any shape and dtype, equal in number and dtype on all members. Written in place
            on all but the source.
        src: the source's global rank; or
        group_src: its rank in the group. One of the two is required.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes reach every rank but the source.

    Raises:
        ArgumentError: no source, or two.
        NotInGroupError: the source or this rank is no member.

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
    """The destination's tensor becomes the reduction of all; the others' stay as they were.

    Args:
        tensor: any shape, equal in number and dtype on all members. Written in place on the
            destination alone.
        dst: the destination's global rank; or
        group_dst: its rank in the group. One of the two is required.
        op, group, async_op: as in ``all_reduce``.

    Cost: n bytes sent by every rank but the destination, for n bytes.

    Raises:
        ArgumentError: no destination, or two. DtypeError: a reduction that the dtype lacks.
        NotInGroupError: the destination or this rank is no member.

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
    """Every member's output holds all members' inputs, in group order, along dim 0.

    Args:
        output_tensor: the members' inputs concatenated, shape [p * n, ...], or stacked,
            [p, n, ...]. Written in place.
        input_tensor: shape [n, ...], equal on all members, any dtype.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank.

    Raises:
        ShapeError: the output is neither form. DtypeError: two dtypes.

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
    """The same as ``all_gather_into_tensor``, under its newer name."""
    return prepare("all_gather_single", group, output_tensor, input_tensor).run(async_op)


@collective(has_fast_path=True)
def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Each member's output is its own block of the reduction of all inputs.

    Args:
        output: shape [n, ...]. Written in place.
        input: one block per member, concatenated, [p * n, ...], or stacked, [p, n, ...].
        op, group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for a block of n bytes.

    Raises:
        ShapeError: the input is neither form. DtypeError: two, or a dtype that the op lacks.

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
    """The same as ``reduce_scatter_tensor``, under its newer name."""
    return prepare("reduce_scatter_single", group, output, input, op).run(async_op)


@collective(has_fast_path=True, stays_off_streams=True)
def barrier(
    group: GroupLike = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Return when every member has called it; earlier collectives of the group are complete then.

    Where the group has NCCL open as well as a backend for CPU tensors, both are at rest then.

    Args:
        group, async_op: as in ``all_reduce``.
        device_ids: the CUDA device that an NCCL barrier runs on; by default the device bound to
            this rank, else the current device. A group of CPU backends alone ignores it.
        timeout: in place of the group's.

    Raises:
        KindError, ArgumentError: a wrong timeout; device_ids that name no CUDA device.
        CollectiveTimeoutError: a member did not come; the text names it.
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

"""torch's collectives, in place, on a group, a mesh axis or several axes.

``group`` is a ProcessGroup, a mesh (``mesh["tp"]``; several axes count as one, row-major) or None
for the world. Every verb takes torch tensors, NumPy and CuPy arrays, without copies where they are
contiguous; returns None, or a Work with ``async_op=True``; and refuses bad arguments before
anything is sent. None of them has a gradient: see ``meshdist.lax`` for verbs that differentiate.

All of them raise CollectiveTimeoutError where a member does not come, with a report of what each
member called last, AbortedError after an abort, and BackendError where the wire fails.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from ..arrays import finish_writes
from ..mesh.channel import Channel
from ..mesh.groups import ProcessGroup, resolve_group
from ..reduce_ops import ReduceKind, ReduceOp, get_reduce_op
from ..runtime.timeouts import check_timeout
from ..wires.base import Pending, WireFailure
from ..wires.work import Work
from .checks import (
    check_alike,
    check_blocks,
    check_reducible,
    dense,
    first_cuda_device,
    forbid_gradient,
    get_peer,
    is_overwriting_history,
    note_write,
)

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "copy_home",
    "reduce_scatter_tensor",
]


def all_reduce(
    tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Every member's tensor becomes the reduction of all; the same bits on every member.

    Args:
        tensor: any shape, equal on all members; floating, complex (SUM and AVG only), integer
            or bool dtype. Written in place.
        op: a ReduceOp.
        group: who takes part.
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
    target = group if type(group) is ProcessGroup else resolve_group(group)
    data, buffer = dense(tensor, "tensor", "all_reduce", writable=True)
    kind = op if type(op) is ReduceKind else get_reduce_op(op)
    check_reducible(kind, buffer, "all_reduce")
    channel = target.channel("cpu" if buffer.is_cpu else buffer.device.type)
    channel.enter("all_reduce", buffer, kind)
    note_write(data)
    communicator = channel.communicator
    try:
        pending = communicator.all_reduce(buffer, kind, channel.timeout)
        if buffer is tensor and not async_op:  # nothing to bring home
            communicator.finish(pending, channel.timeout)
            return None
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return _conclude(target, channel, pending, "all_reduce", tensor, data, buffer, async_op)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
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
    target = group if type(group) is ProcessGroup else resolve_group(group)
    root = get_peer(target, src, group_src, "broadcast", "src")
    data, buffer = dense(tensor, "tensor", "broadcast", writable=True)
    channel = target.channel(buffer.device.type)
    channel.enter("broadcast", buffer, None, root)
    if root != target.rank():
        note_write(data)
    try:
        pending = channel.communicator.broadcast(buffer, root, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return _conclude(target, channel, pending, "broadcast", tensor, data, buffer, async_op)


def all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
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
    target = group if type(group) is ProcessGroup else resolve_group(group)
    verb = "all_gather_into_tensor"
    data, buffer = dense(output_tensor, "output_tensor", verb, writable=True)
    _, block = dense(input_tensor, "input_tensor", verb, writable=False)
    check_alike(buffer, block, verb, ("output_tensor", "input_tensor"))
    check_blocks(buffer, block, target, verb, ("output_tensor", "input_tensor"))
    channel = target.channel(buffer.device.type)
    channel.enter(verb, block)
    note_write(data)
    try:
        pending = channel.communicator.all_gather(buffer, block, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return _conclude(target, channel, pending, verb, output_tensor, data, buffer, async_op)


def reduce_scatter_tensor(
    output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Each member's output is its own block of the reduction of all inputs.

    Args:
        output: shape [n, ...]. Written in place.
        input: one block per member, concatenated, [p * n, ...], or stacked, [p, n, ...].
        op, group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for a block of n bytes.

    Raises:
        ShapeError: the input is neither form. DtypeError: two dtypes, or one that the op lacks.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     out = torch.empty(2, dtype=torch.int64)
        ...     md.reduce_scatter_tensor(out, torch.arange(4))
        ...     return out.tolist()
        >>> md.simulate(program, 2)
        [[0, 2], [4, 6]]
    """
    target = group if type(group) is ProcessGroup else resolve_group(group)
    verb = "reduce_scatter_tensor"
    data, buffer = dense(output, "output", verb, writable=True)
    _, whole = dense(input, "input", verb, writable=False)
    kind = op if type(op) is ReduceKind else get_reduce_op(op)
    check_reducible(kind, buffer, verb)
    check_alike(buffer, whole, verb, ("output", "input"))
    check_blocks(whole, buffer, target, verb, ("input", "output"))
    channel = target.channel(buffer.device.type)
    channel.enter(verb, whole, kind)
    note_write(data)
    try:
        pending = channel.communicator.reduce_scatter(buffer, whole, kind, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return _conclude(target, channel, pending, verb, output, data, buffer, async_op)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> Work | None:
    """Return when every member has called it; earlier verbs of the group are complete then.

    Args:
        group, async_op: as in ``all_reduce``.
        device_ids: the CUDA device that an NCCL barrier runs on; by default the one bound to this
            rank, else the one that the group has used.
        timeout: in place of the group's.

    Raises:
        KindError, ArgumentError: a wrong timeout; device_ids that name no CUDA device.
        CollectiveTimeoutError: a member did not come; the text names it.
    """
    target = resolve_group(group)
    check_timeout(timeout)
    device = target.device if device_ids is None else first_cuda_device(device_ids, "barrier")
    channel = target.channel("cuda" if device_ids else target.first_device_type())
    limit = timeout or channel.timeout
    channel.enter("barrier", None)
    try:
        pending = channel.communicator.barrier(limit, device)
        if async_op:
            return target.work(channel, pending, [])
        channel.communicator.finish(pending, limit)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return None


def _conclude(
    target: ProcessGroup,
    channel: Channel,
    pending: Pending,
    verb: str,
    original: Any,
    data: torch.Tensor,
    buffer: torch.Tensor,
    async_op: bool,
) -> Work | None:
    """Wait for a started verb and bring its result home, or return the Work that will."""
    if async_op:
        if is_overwriting_history(data):
            forbid_gradient(data, verb)
        return target.work(channel, pending, [original], lambda: copy_home(original, data, buffer))
    try:
        channel.communicator.finish(pending, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    if data is not buffer or data is not original:
        if is_overwriting_history(data):
            forbid_gradient(data, verb)
        copy_home(original, data, buffer)
    return None


def copy_home(original: Any, data: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copy what a verb wrote into ``buffer`` back to the caller's array, where they differ."""
    if data.data_ptr() != buffer.data_ptr() or data.stride() != buffer.stride():
        data.detach().copy_(buffer)
    if data is not original:
        finish_writes(original)

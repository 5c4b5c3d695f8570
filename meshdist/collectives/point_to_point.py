"""torch's point-to-point verbs, on a group, a mesh axis or several axes.

Peers are named by global rank (``dst``, ``src``), also in a group, or by their place in the group
(``group_dst``, ``group_src``). Between two ranks messages with one tag arrive in the order sent.
None of these verbs has a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, KindError
from ..mesh.channel import Channel
from ..mesh.groups import ProcessGroup, resolve_group
from ..wires.base import Pending, WireFailure
from ..wires.work import Work
from .checks import dense, find_peer, forbid_gradient, get_peer, is_overwriting_history, note_write
from .running import bring_one_home as copy_home

__all__ = ["irecv", "isend", "recv", "send"]

_LARGEST_TAG = (1 << 30) - 1
"""What every wire takes; wires use larger ones for themselves."""


def send(
    tensor: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to one member; it may be written again when this returns.

    Args:
        tensor: any shape and dtype.
        dst: the receiver's global rank; or
        group_dst: its rank in the group. One of the two is required.
        group: who may be named.
        tag: matches sends to receives.

    Raises:
        ArgumentError: the receiver is this rank (use isend), none or two receivers are named.
        NotInGroupError: the receiver is no member.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     x = torch.full((2,), md.get_rank())
        ...     if md.get_rank() == 0:
        ...         md.send(x, dst=1)
        ...         return None
        ...     return md.recv(x, src=0), x.tolist()
        >>> md.simulate(program, 2)[1]
        (0, [0, 0])
    """
    target = resolve_group(group)
    peer = get_peer(target, dst, group_dst, "send", "dst")
    _check_not_me(target, peer, "send", "isend")
    channel, pending = _start_send(target, peer, tensor, tag, "send")
    _finish(target, channel, pending)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into ``tensor`` from one member, or from any; return the sender's global rank.

    Args:
        tensor: the sent tensor's number of elements and dtype. Written in place.
        src: the sender's global rank; or
        group_src: its rank in the group; neither means any member.
        group, tag: as in ``send``.

    Raises:
        ArgumentError: the sender is this rank (use irecv), or two senders are named.
        NotInGroupError: the sender is no member.
    """
    target = resolve_group(group)
    peer = find_peer(target, src, group_src, "recv", "src")
    if peer is not None:
        _check_not_me(target, peer, "recv", "irecv")
    channel, pending, data, buffer = _start_recv(target, peer, tensor, tag, "recv")
    _finish(target, channel, pending)
    if is_overwriting_history(data):
        forbid_gradient(data, "recv")
    copy_home(tensor, data, buffer)
    return target.ranks[channel.communicator.source(pending)]


def isend(
    tensor: Any,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start sending ``tensor``; leave it alone until the Work is waited for.

    Args:
        tensor, dst, group, tag, group_dst: as in ``send``; sending to oneself is legal.

    Raises:
        ArgumentError: none or two receivers are named.
        NotInGroupError: the receiver is no member.
    """
    target = resolve_group(group)
    peer = get_peer(target, dst, group_dst, "isend", "dst")
    channel, pending = _start_send(target, peer, tensor, tag, "isend")
    return target.work(channel, pending, [tensor])


def irecv(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start receiving into ``tensor``; leave it alone until the Work is waited for.

    Args:
        tensor, src, group, tag, group_src: as in ``recv``; receiving from oneself is legal.

    Returns:
        A Work, whose ``source_rank()`` tells the sender's group rank.

    Raises:
        ArgumentError: two senders are named.
        NotInGroupError: the sender is no member.
    """
    target = resolve_group(group)
    peer = find_peer(target, src, group_src, "irecv", "src")
    channel, pending, data, buffer = _start_recv(target, peer, tensor, tag, "irecv")
    if is_overwriting_history(data):
        forbid_gradient(data, "irecv")
    return target.work(channel, pending, [tensor], lambda: copy_home(tensor, data, buffer))


def _start_send(
    target: ProcessGroup, peer: int, tensor: Any, tag: int, verb: str
) -> tuple[Channel, Pending]:
    _, buffer = dense(tensor, "tensor", verb, writable=False)
    channel = _enter(target, buffer, peer, tag, verb, is_send=True)
    try:
        return channel, channel.communicator.send(buffer, peer, tag, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None


def _start_recv(
    target: ProcessGroup, peer: int | None, tensor: Any, tag: int, verb: str
) -> tuple[Channel, Pending, torch.Tensor, torch.Tensor]:
    """Start receiving into a buffer, which ``copy_home`` brings to the tensor beside it."""
    data, buffer = dense(tensor, "tensor", verb, writable=True)
    channel = _enter(target, buffer, peer, tag, verb, is_send=False)
    note_write(data)
    try:
        pending = channel.communicator.recv(buffer, peer, tag, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None
    return channel, pending, data, buffer


def _enter(
    target: ProcessGroup,
    buffer: torch.Tensor,
    peer: int | None,
    tag: int,
    verb: str,
    *,
    is_send: bool,
) -> Channel:
    """Return the channel for ``buffer``, once the tag is known to be fit; note the call."""
    channel = target.channel(buffer.device.type)
    _check_tag(channel, tag)
    channel.enter_message(verb, buffer, peer, tag, is_send=is_send)
    return channel


def _finish(target: ProcessGroup, channel: Channel, pending: Pending) -> None:
    try:
        channel.communicator.finish(pending, channel.timeout)
    except WireFailure as failure:
        raise target.explain(failure, channel) from None


def _check_not_me(target: ProcessGroup, peer: int, verb: str, other: str) -> None:
    if peer == target.rank():
        raise ArgumentError(
            f"{verb} between a rank and itself would wait for ever",
            where=f"rank {target.world.rank}, {target.name}",
            fix=f"use {other}, which is legal between a rank and itself",
        )


def _check_tag(channel: Channel, tag: int) -> None:
    if isinstance(tag, bool) or not isinstance(tag, int):
        raise KindError(
            f"{tag!r} is not a tag",
            expected=f"a whole number from 0 to {_LARGEST_TAG}",
            found=type(tag).__name__,
        )
    if not 0 <= tag <= _LARGEST_TAG:
        raise ArgumentError(f"there is no tag {tag}", expected=f"0 to {_LARGEST_TAG}")
    if tag != 0 and channel.wire.name == "nccl":
        raise ArgumentError(
            f"tag={tag} on NCCL, which has no tags",
            expected="tag=0",
            fix="leave the tag out, and rely on the order of messages",
        )

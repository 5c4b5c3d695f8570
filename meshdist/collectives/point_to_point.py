"""Run torch's point-to-point operations, singly and in batches.

Pass a peer as a global rank (``dst``, ``src``) or a group rank (``group_dst``, ``group_src``).
Messages between two ranks with the same tag arrive in order. No operation here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arguments import get_integer
from ..arrays import as_tensor, shape_text
from ..backends.operation_args import LARGEST_TAG, OperationArgs
from ..backends.work import Work
from ..dtypes import dtype_name
from ..errors import ArgumentError, LengthError
from ..groups.device_group import DeviceGroup
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from .argument_checks import find_peer, get_peer
from .collective import OperationCall
from .registration import collective

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "send"]

ANSWER_TAG = LARGEST_TAG + 1
"""The tag of a receiver's answer to a sender; reserved."""


@collective(has_fast_path=True)
def send(
    tensor: Any,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to one rank; you may write to it again when this returns.

    Args:
        tensor: an array of any shape and dtype.
        dst: the receiver's global rank; or
        group_dst: its group rank; pass either.
        group: as in ``all_reduce``.
        tag: must match on both sides; NCCL supports only 0.

    Raises:
        ArgumentError: the receiver is this rank (use isend); no receiver, or both ``dst`` and
            ``group_dst``.
        NotInGroupError: the receiver is not in the group.

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
    group = group if type(group) is ProcessGroup else resolve_group(group)
    peer = get_peer(group, dst, group_dst, "send", "dst")
    check_not_self(group, peer, "send", "isend")
    message = prepare_message("send", group, peer, tensor, tag, is_send=True)
    open_device_group(group, message).run(message)


@collective(has_fast_path=True, missing=(None,))
def recv(
    tensor: Any,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into ``tensor`` from one rank, or from any; return the global rank of the sender.

    Args:
        tensor: an array with the sender's dtype and element count. Written in place.
        src: the sender's global rank; or
        group_src: its group rank. Omit both to receive from any rank.
        group, tag: as in ``send``.

    Raises:
        ArgumentError: the sender is this rank (use irecv), or both ``src`` and ``group_src``.
        NotInGroupError: the sender is not in the group.
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    peer = find_peer(group, src, group_src, "recv", "src")
    check_not_self(group, peer, "recv", "irecv")
    message = prepare_message("recv", group, peer, tensor, tag, is_send=False)
    open_device_group(group, message).run(message)
    return group.ranks[message.request.source()]


@collective()
def isend(
    tensor: Any,
    dst: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work:
    """Start sending ``tensor``; do not write to it until ``wait()`` of the Work returns.

    Args:
        tensor, dst, group, tag, group_dst: as in ``send``; a rank can send to itself.

    Raises:
        ArgumentError: no receiver, or both ``dst`` and ``group_dst``.
        NotInGroupError: the receiver is not in the group.
    """
    target = group if type(group) is ProcessGroup else resolve_group(group)
    peer = get_peer(target, dst, group_dst, "isend", "dst")
    message = prepare_message("isend", target, peer, tensor, tag, is_send=True)
    return open_device_group(target, message).run(message, is_async=True)  # type: ignore[return-value]


@collective()
def irecv(
    tensor: Any,
    src: int | None = None,
    group: GroupLike = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work:
    """Start receiving into ``tensor``; do not use it until ``wait()`` of the Work returns.

    Args:
        tensor, src, group, tag, group_src: as in ``recv``; a rank can receive from itself.

    Returns:
        A Work; its ``source_rank()`` is the sender's rank in the group.

    Raises:
        ArgumentError: both ``src`` and ``group_src``.
        NotInGroupError: the sender is not in the group.
    """
    target = group if type(group) is ProcessGroup else resolve_group(group)
    peer = find_peer(target, src, group_src, "irecv", "src")
    message = prepare_message("irecv", target, peer, tensor, tag, is_send=False)
    return open_device_group(target, message).run(message, is_async=True)  # type: ignore[return-value]


@dataclass(eq=False, repr=False)
class P2POp:
    """One send or receive for ``batch_isend_irecv``; creating it starts nothing.

    Args:
        op: ``isend`` or ``irecv`` of this package.
        tensor: the array to send, or to write.
        peer: the other side's global rank; or
        group: as in ``all_reduce``.
        tag: must match on both sides; NCCL supports only 0.
        group_peer: its group rank; pass either.

    Attributes:
        op, tensor, tag: as passed.
        group: the ProcessGroup.
        peer, group_peer: the other side's global and group rank.

    Raises:
        ArgumentError: another function; no peer, or both ``peer`` and ``group_peer``.
        KindError: ``tensor`` is not an array.
        NotInGroupError: the peer or this rank is not in the group.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     return dist.P2POp(dist.isend, torch.ones(2), 1)
        >>> md.simulate(program, 2)[0]
        P2POp(isend, (2,) float32, group_src=0, group_dst=1, group=the world, tag=0)
    """

    op: Callable[..., Any]
    tensor: Any
    peer: int | None = None
    group: Any = None
    tag: int = 0
    group_peer: int | None = None

    def __post_init__(self) -> None:
        op = self.op
        if op is not isend and op is not irecv:
            raise ArgumentError(
                "P2POp accepts only isend or irecv",
                expected="meshdist.distributed.isend or meshdist.distributed.irecv",
                found=f"{getattr(op, '__module__', '?')}.{getattr(op, '__qualname__', repr(op))}",
                fix="pass dist.isend or dist.irecv as op",
            )
        as_tensor(self.tensor, argument="tensor", operation="P2POp", writable=op is irecv)
        self.group = resolve_group(self.group)
        self.group_peer = get_peer(self.group, self.peer, self.group_peer, "P2POp", "peer")
        self.peer = self.group.ranks[self.group_peer]

    def __repr__(self) -> str:
        ends = (self.group.rank(), self.group_peer)
        source, target = ends if self.op is isend else ends[::-1]
        data = as_tensor(self.tensor, argument="tensor", operation="P2POp", writable=False)
        return (
            f"P2POp({self.op.__name__}, {shape_text(data.shape)} {dtype_name(data.dtype)}, "
            f"group_src={source}, group_dst={target}, group={self.group.name}, tag={self.tag})"
        )


@collective()
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start a list of sends and receives together; do not use their tensors until ``wait()``.

    Messages between the same ranks with the same tag arrive in list order; order does not matter
    otherwise.

    Args:
        p2p_op_list: the operations, of one group and one backend.

    Returns:
        A Work per operation, in order.

    Raises:
        ArgumentError: not a list of P2POp, an empty list, two groups or two backends.
        MismatchError: the other side has another dtype or element count.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     rank, size = md.get_rank(), md.get_world_size()
        ...     x = torch.empty(2)
        ...     operations = [
        ...         dist.P2POp(dist.irecv, x, (rank - 1) % size),
        ...         dist.P2POp(dist.isend, torch.arange(2.0) + 2 * rank, (rank + 1) % size),
        ...     ]
        ...     for work in dist.batch_isend_irecv(operations):
        ...         work.wait()
        ...     return x.tolist()
        >>> md.simulate(program, 2)
        [[2.0, 3.0], [0.0, 1.0]]
    """
    target = _group_of(p2p_op_list)
    messages = []
    for p2p_op in p2p_op_list:
        name, is_send = p2p_op.op.__name__, p2p_op.op is isend
        given = name, target, p2p_op.group_peer, p2p_op.tensor, p2p_op.tag
        messages.append(prepare_message(*given, is_send=is_send))
    backends = {target.backend_name(message.noted.device.type): message for message in messages}
    if len(backends) > 1:
        raise ArgumentError(
            "batch_isend_irecv cannot send tensors over different backends",
            where=target.name,
            found=", ".join(f"{x.noted.device.type} over {name}" for name, x in backends.items()),
            fix="call batch_isend_irecv once for each device type",
        )
    device_group = open_device_group(target, messages[0])
    device_group.start_together(messages)
    return [device_group.work(message) for message in messages]


def prepare_message(
    operation: str,
    target: ProcessGroup,
    peer: int | None,
    tensor: Any,
    tag: int = 0,
    *,
    is_send: bool,
) -> OperationArgs:
    """Return a checked send or receive, ready to run on a device group.

    Args:
        peer: the group rank of the other side; None receives from any rank.
    """
    message = OperationCall(operation, target, peer)
    buffer = message.noted = message.take(tensor, "tensor", writes=not is_send)
    if tag.__class__ is not int or tag:  # a plain 0 is the common case
        tag = _get_tag(tag, operation, target.backend_name(buffer.device.type))
    message.tag, message.is_message = tag, True
    if is_send:
        message.backend_operation, message.inputs, message.result = "send", [buffer], [tensor]
    else:
        message.backend_operation, message.outputs = "recv", [buffer]
    return message


def open_device_group(target: ProcessGroup, message: OperationArgs) -> DeviceGroup:
    """Return the device group for the message's device, opened if necessary."""
    tensor = message.noted
    return target.open_device_group("cpu" if tensor.is_cpu else tensor.device.type)


def check_not_self(target: ProcessGroup, peer: int | None, operation: str, other: str = "") -> None:
    if peer == target.rank():
        raise ArgumentError(
            f"{operation} between a rank and itself would never return",
            where=f"rank {target.world.rank}, {target.name}",
            fix=f"use {other}, which a rank can call with itself" if other else "pass another rank",
        )


def _get_tag(given: object, operation: str, backend_name: str) -> int:
    tag = get_integer(given, f"{operation}: tag", 0, LARGEST_TAG)
    if tag != 0 and backend_name == "nccl":
        raise ArgumentError(
            f"{operation} cannot use tag={tag} because NCCL has no tags",
            expected="tag=0",
            fix="omit the tag, and send and receive in the same order on both ranks",
        )
    return tag


def _group_of(operations: Any) -> ProcessGroup:
    """Return the common group of a list of P2POps; or raise."""
    is_list = isinstance(operations, (list, tuple))
    if not is_list or not operations:
        raise LengthError(
            "batch_isend_irecv needs a list of at least one P2POp",
            found="an empty list" if is_list else type(operations).__name__,
            fix="pass for example [P2POp(isend, x, 1)], or skip the call if there is no message",
        )
    first = operations[0]
    for index, operation in enumerate(operations):
        if not isinstance(operation, P2POp):
            raise ArgumentError(
                "batch_isend_irecv accepts only a list of P2POp",
                found=f"{type(operation).__name__} at index {index}",
                fix="create each with P2POp(isend, tensor, peer) or P2POp(irecv, tensor, peer)",
            )
        if operation.group is not first.group:
            raise ArgumentError(
                "batch_isend_irecv cannot use operations of different groups",
                found=f"{first.group.name} and {operation.group.name}",
                fix="call batch_isend_irecv once for each group",
            )
    return first.group  # type: ignore[no-any-return]

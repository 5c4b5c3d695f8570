"""Several sends and receives started together, so that their order in the list does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arrays import as_tensor, shape_text
from ..dtypes import dtype_name
from ..errors import ArgumentError
from ..groups.process_group import ProcessGroup, resolve_group
from ..wires.work import Work
from .checks import get_peer
from .instruments import verb
from .point_to_point import Message, irecv, isend, start_together

__all__ = ["P2POp", "batch_isend_irecv"]


class P2POp:
    """One send or receive of a list for ``batch_isend_irecv``; it starts nothing.

    Args:
        op: ``isend`` or ``irecv``, of this package.
        tensor: what is sent, or written.
        peer: the other side's global rank; or
        group: whose members may be named.
        tag: matches sends to receives; NCCL has none.
        group_peer: the other side's rank in the group. One of the two is required.

    Attributes:
        op, tensor, tag: as given.
        group: the ProcessGroup.
        peer, group_peer: the other side, both ways.

    Raises:
        ArgumentError: another function; none or two peers.
        KindError: no array.
        NotInGroupError: the peer or this rank is no member.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     return md.P2POp(md.isend, torch.ones(2), 1)
        >>> md.simulate(program, 2)[0]
        P2POp(isend, (2,) float32, group_src=0, group_dst=1, group=the world, tag=0)
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Any,
        peer: int | None = None,
        group: Any = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise ArgumentError(
                "P2POp takes isend or irecv alone",
                expected="meshdist.isend or meshdist.irecv",
                found=f"{getattr(op, '__module__', '?')}.{getattr(op, '__qualname__', repr(op))}",
            )
        as_tensor(tensor, argument="tensor", verb="P2POp", writable=op is irecv)
        self.op = op
        self.tensor = tensor
        self.group: ProcessGroup = resolve_group(group)
        self.group_peer = get_peer(self.group, peer, group_peer, "P2POp", "peer")
        self.peer = self.group.ranks[self.group_peer]
        self.tag = tag

    def __repr__(self) -> str:
        ends = (self.group.rank(), self.group_peer)
        source, target = ends if self.op is isend else ends[::-1]
        data = as_tensor(self.tensor, argument="tensor", verb="P2POp", writable=False)
        return (
            f"P2POp({self.op.__name__}, {shape_text(data.shape)} {dtype_name(data.dtype)}, "
            f"group_src={source}, group_dst={target}, group={self.group.name}, tag={self.tag})"
        )


@verb()
def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Start all of a list's sends and receives; leave their tensors alone until waited for.

    In which order sends stand to receives, or messages of one pair of ranks to those of another,
    does not matter. Messages from one rank to another under one tag arrive in the list's order.

    Args:
        p2p_op_list: the operations, of one group and on devices that one wire serves.

    Returns:
        A Work for each operation, in the list's order.

    Raises:
        ArgumentError: no list of P2POp, an empty one, two groups or two wires.
        AgreementError: a counterpart has another dtype or number of elements.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     rank, size = md.get_rank(), md.get_world_size()
        ...     x = torch.empty(2)
        ...     operations = [
        ...         md.P2POp(md.irecv, x, (rank - 1) % size),
        ...         md.P2POp(md.isend, torch.arange(2.0) + 2 * rank, (rank + 1) % size),
        ...     ]
        ...     for work in md.batch_isend_irecv(operations):
        ...         work.wait()
        ...     return x.tolist()
        >>> md.simulate(program, 2)
        [[2.0, 3.0], [0.0, 1.0]]
    """
    target = _group_of(p2p_op_list)
    messages = []
    for one in p2p_op_list:
        name, is_send = one.op.__name__, one.op is isend
        messages.append(Message(name, target, one.group_peer, one.tensor, one.tag, is_send=is_send))
    wires = {target.wire_name(message.device_type): message for message in messages}
    if len(wires) > 1:
        raise ArgumentError(
            "batch_isend_irecv has tensors that travel over different wires",
            where=target.name,
            found=", ".join(f"{one.device_type} over {name}" for name, one in wires.items()),
            fix="make one batch for each device type",
        )
    start_together(messages)
    return [message.work() for message in messages]


def _group_of(operations: Any) -> ProcessGroup:
    """The one group of a list of operations."""
    is_list = isinstance(operations, (list, tuple))
    if not is_list or not operations:
        raise ArgumentError(
            "batch_isend_irecv takes a list of at least one P2POp",
            found="an empty list" if is_list else type(operations).__name__,
        )
    first = operations[0]
    for place, one in enumerate(operations):
        if not isinstance(one, P2POp):
            raise ArgumentError(
                "batch_isend_irecv takes a list of P2POp alone",
                found=f"{type(one).__name__} at place {place}",
                fix="make each with P2POp(isend, tensor, peer) or P2POp(irecv, tensor, peer)",
            )
        if one.group is not first.group:
            raise ArgumentError(
                "batch_isend_irecv has operations of different groups",
                found=f"{first.group.name} and {one.group.name}",
                fix="make one batch for each group",
            )
    return first.group  # type: ignore[no-any-return]

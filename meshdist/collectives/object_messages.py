"""torch's messages of Python objects between two ranks.

A call sends the sizes, waits for the receiver's answer and sends the bytes. ``objects`` says what
all verbs on objects have in common.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import BackendError
from ..groups.process_group import ProcessGroup, resolve_group
from .checks import find_peer, get_peer
from .instruments import verb
from .parcels import (
    Parcel,
    check_is_list,
    entries,
    find_device,
    other_length,
    raise_unpicklable,
    unpack,
)
from .point_to_point import ANSWER_TAG, Message, check_not_me, start_together

__all__ = ["recv_object_list", "send_object_list"]

_MARK = int.from_bytes(b"objects\0", "little")
"""The first number of every list of objects that is sent, so that nothing else is taken for one."""


@verb()
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to one member, which calls ``recv_object_list`` with a list of this length.

    Args:
        object_list: what is sent.
        dst: the receiver's global rank; or
        group: whose members may be named.
        device: through which the bytes travel; equal in type on both sides.
        group_dst: the receiver's rank in the group. One of the two is required.
        use_batch: send as ``batch_isend_irecv`` does; equal on both sides.

    Raises:
        AgreementError: the receiver's list has another length; on both sides.
        KindError: an object cannot be pickled, on both sides; or no list.
        ArgumentError: the receiver is this rank; none or two receivers are named.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     if md.get_rank() == 0:
        ...         return md.send_object_list(["foo", 12], dst=1)
        ...     objects = [None, None]
        ...     return md.recv_object_list(objects, src=0), objects
        >>> md.simulate(program, 2)[1]
        (0, ['foo', 12])
    """
    name = "send_object_list"
    target = resolve_group(group)
    peer = get_peer(target, dst, group_dst, name, "dst")
    check_not_me(target, peer, name)
    check_is_list(object_list, "object_list", name, is_written=False)
    line = _Line(name, target, device, use_batch)
    num_sent = len(object_list)
    parcel = Parcel(entries("object_list", object_list))
    line.move(line.numbers(_MARK, num_sent, parcel.signed_size), peer, is_send=True)
    answer = line.numbers(0)
    line.move(answer, peer, is_send=False, tag=ANSWER_TAG)
    num_taken = int(answer.view(torch.int64))
    if parcel.error is not None or num_taken == num_sent:
        line.move(parcel.data.to(line.device), peer, is_send=True)
    if parcel.error is not None:
        raise_unpicklable([(target.world.rank, parcel.data)], name, parcel.error)
    _check_same_length(num_sent, target.world.rank, num_taken, target.ranks[peer], target)


@verb()
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects from one member, or from any; return the sender's global rank.

    Args:
        object_list: a list as long as the sender's, whose entries are replaced.
        src: the sender's global rank; or
        group: whose members may be named.
        device: through which the bytes travel; equal in type on both sides.
        group_src: the sender's rank in the group; neither means any member.
        use_batch: receive as ``batch_isend_irecv`` does; equal on both sides.

    Raises:
        AgreementError: the sender's list has another length; on both sides.
        KindError: an object cannot be pickled, on both sides; or no list.
        ArgumentError: the sender is this rank, or two senders are named.
        BackendError: what the sender sent cannot be unpickled here, or is no list of objects.
    """
    name = "recv_object_list"
    target = resolve_group(group)
    peer = find_peer(target, src, group_src, name, "src")
    check_not_me(target, peer, name)
    check_is_list(object_list, "object_list", name, is_written=True)
    num_taken = len(object_list)
    line = _Line(name, target, device, use_batch)
    numbers = line.numbers(0, 0, 0)
    source = line.move(numbers, peer, is_send=False).operation.source()
    mark, num_sent, signed_size = numbers.view(torch.int64).tolist()
    sender = target.ranks[source]
    if mark != _MARK:
        raise BackendError(
            f"recv_object_list received what is no list of objects from rank {sender}",
            where=f"rank {target.world.rank}, {target.name}",
            fix=f"let rank {sender} call send_object_list",
        )
    line.move(line.numbers(num_taken), source, is_send=True, tag=ANSWER_TAG)
    if signed_size >= 0:
        _check_same_length(num_sent, sender, num_taken, target.world.rank, target)
    data = torch.empty(abs(signed_size), dtype=torch.uint8, device=line.device)
    line.move(data, source, is_send=False)
    if signed_size < 0:
        raise_unpicklable([(sender, data)], "send_object_list")
    object_list[:] = unpack(data.cpu(), sender, name, target)
    return sender


class _Line:
    """The messages of one call between two members."""

    def __init__(self, verb: str, target: ProcessGroup, device: Any, use_batch: bool) -> None:
        self.verb = verb
        self.target = target
        self.use_batch = use_batch
        self.device = find_device(target, device, verb)

    def numbers(self, *values: int) -> torch.Tensor:
        """Whole numbers to send, or room for them.

        In a dtype that programs hardly send, since wires take what has the dtype and size of a
        tensor that waits.
        """
        return torch.tensor(values, dtype=torch.int64, device=self.device).view(torch.uint64)

    def move(
        self, tensor: torch.Tensor, peer: int | None, *, is_send: bool, tag: int = 0
    ) -> Message:
        """Send ``tensor`` to a member, or receive into it; return the finished message."""
        message = Message(self.verb, self.target, peer, tensor, is_send=is_send)
        message.tag = tag  # unchecked: no program may name an answer's
        if self.use_batch:
            start_together([message])
        else:
            message.start()
        message.finish()
        return message


def _check_same_length(
    num_sent: int, sender: int, num_taken: int, receiver: int, target: ProcessGroup
) -> None:
    """Raise one and the same error on both sides of a message, where their lists differ."""
    if num_sent != num_taken:
        found = f"rank {sender} sends {num_sent} entries\nrank {receiver} takes {num_taken}"
        raise other_length("send_object_list", target, found)

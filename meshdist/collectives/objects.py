"""Run torch's collectives on Python objects: pickle, send as bytes, unpickle.

Unpickling can run any code, so use them only if you trust every rank. A collective takes two
rounds, sizes and bytes; a message between two ranks takes sizes, the receiver's answer and bytes.
Bytes are sent from ``device``, by default with NCCL the current CUDA device, else host memory. An
unpickled tensor keeps its sender's device index.

Every call blocks. If pickling fails, every rank raises the same error; if unpickling fails, the
receiver raises. The group stays usable, and a failed call does not change its lists.
"""

from __future__ import annotations

from typing import Any

import torch

from ..backends.operation_args import OperationArgs
from ..errors import BackendError
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from .argument_checks import find_peer, get_peer, get_root
from .object_protocol import (
    PickledObject,
    Rounds,
    check_is_list,
    entries,
    find_device,
    other_length,
    raise_unpicklable,
    unpack,
)
from .point_to_point import ANSWER_TAG, check_not_self, open_device_group, prepare_message
from .registration import collective
from .torch_private import untransformed

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
]


_MARK = int.from_bytes(b"objects\0", "little")
"""The first number of every sent list of objects, which receivers check."""


@untransformed
@collective()
def all_gather_object(object_list: list[Any], obj: Any, group: GroupLike = None) -> None:
    """Gather the objects of all ranks into a list on every rank, in group order.

    Args:
        object_list: a list with at least one entry per rank; the first entries are replaced.
        obj: any object that pickle supports.
        group: as in ``all_reduce``.

    Cost: the pickled bytes, p - 1 times, per rank.

    Raises:
        PicklingError: an object of any rank cannot be pickled. KindError: not a list.
        LengthError: the list is too short.
        BackendError: a received object cannot be unpickled.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     found = [None] * md.get_world_size()
        ...     dist.all_gather_object(found, {"rank": md.get_rank()})
        ...     return found
        >>> md.simulate(program, 2)[0]
        [{'rank': 0}, {'rank': 1}]
    """
    rounds = Rounds("all_gather_object", group)
    size = rounds.group.size()
    rounds.check_list(object_list, "object_list", size, may_be_longer=True)
    check_is_list(object_list, "object_list", rounds.operation, is_written=True)
    pickled = PickledObject({"obj": obj})
    sizes = rounds.agree(pickled)
    parts = rounds.all_gather_bytes(pickled.data, sizes)
    object_list[:size] = [rounds.unpack(part, member)[0] for member, part in enumerate(parts)]


def gather_from_all(obj: Any, group: ProcessGroup) -> list[Any]:
    """Return the objects of all ranks, in group order; collective."""
    of_all: list[Any] = [None] * group.size()
    all_gather_object(of_all, obj, group)
    return of_all


@untransformed
@collective()
def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    group_dst: int | None = None,
) -> None:
    """Gather the objects of all ranks into a list on the destination, in group order.

    Args:
        obj: any object that pickle supports.
        object_gather_list: on the destination a list with at least one entry per rank; the first
            are replaced. None or [] elsewhere.
        dst: the destination's global rank (default 0); or
        group_dst: its group rank.
        group: as in ``all_reduce``.

    Raises:
        As ``all_gather_object``. ArgumentError: a list on another rank.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     found = [None, None] if md.get_rank() == 0 else None
        ...     dist.gather_object("ab"[md.get_rank()], found, dst=0)
        ...     return found
        >>> md.simulate(program, 2)
        [['a', 'b'], None]
    """
    rounds, argument = Rounds("gather_object", group), "object_gather_list"
    root = rounds.root = get_root(rounds.group, dst, group_dst, rounds.operation, "dst")
    size = rounds.group.size()
    rounds.check_list(object_gather_list, argument, size, role="destination", may_be_longer=True)
    if rounds.is_root:
        check_is_list(object_gather_list, argument, rounds.operation, is_written=True)
    pickled = PickledObject({"obj": obj})
    sizes = rounds.agree(pickled)
    sent = [0] * size
    sent[root] = pickled.data.numel()
    parts = rounds.exchange(pickled.data, sent, sizes if rounds.is_root else [0] * size)
    if object_gather_list and rounds.is_root:
        object_gather_list[:size] = [
            rounds.unpack(part, member)[0] for member, part in enumerate(parts)
        ]


@untransformed
@collective()
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Copy the source's list of objects to every rank of the group.

    Args:
        object_list: the objects on the source; elsewhere a list of the same length, which is
            overwritten.
        src: the source's global rank (default 0); or
        group: as in ``all_reduce``.
        device: the device of the bytes; the same type on every rank.
        group_src: the source's group rank.

    Raises:
        MismatchError: the lists have different lengths; on every rank.
        PicklingError: an object cannot be pickled; on every rank. KindError: not a list.
        BackendError: a received object cannot be unpickled.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     objects = ["foo", 12, {1: 2}] if md.get_rank() == 0 else [None, None, None]
        ...     dist.broadcast_object_list(objects, src=0)
        ...     return objects
        >>> md.simulate(program, 2)[1]
        ['foo', 12, {1: 2}]
    """
    rounds = Rounds("broadcast_object_list", group, device)
    root = rounds.root = get_root(rounds.group, src, group_src, rounds.operation, "src")
    check_is_list(object_list, "object_list", rounds.operation, is_written=not rounds.is_root)
    pickled = PickledObject(entries("object_list", object_list) if rounds.is_root else {})
    sizes = rounds.agree(pickled, len(object_list))
    arrived = rounds.broadcast(pickled.data if rounds.is_root else rounds.empty(sizes[root]))
    if not rounds.is_root:
        object_list[:] = rounds.unpack(arrived, root)


@untransformed
@collective()
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    group_src: int | None = None,
) -> None:
    """Scatter the source's list of objects: rank j receives entry j.

    Args:
        scatter_object_output_list: a list of at least one entry; the first is replaced.
        scatter_object_input_list: on the source one object per rank; ignored elsewhere.
        src: the source's global rank (default 0); or
        group: as in ``all_reduce``.
        group_src: the source's group rank.

    Raises:
        As ``broadcast_object_list``. ArgumentError: an empty output list, or not one object per
            rank.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mine = [None]
        ...     dist.scatter_object_list(mine, ["a", "b"] if md.get_rank() == 0 else None, src=0)
        ...     return mine
        >>> md.simulate(program, 2)
        [['a'], ['b']]
    """
    name, argument = "scatter_object_list", "scatter_object_input_list"
    rounds = Rounds(name, group)
    size = rounds.group.size()
    root = rounds.root = get_root(rounds.group, src, group_src, name, "src")
    rounds.check_list(scatter_object_output_list, "scatter_object_output_list")
    check_is_list(scatter_object_output_list, "scatter_object_output_list", name, is_written=True)
    pickled_objects = []
    if rounds.is_root:
        objects = rounds.check_list(scatter_object_input_list, argument, size, role="source")
        pickled_objects = [
            PickledObject({entry: x}) for entry, x in entries(argument, objects).items()
        ]
    data = (
        torch.cat([pickled.data for pickled in pickled_objects])
        if pickled_objects
        else rounds.empty(0)
    )
    sizes = rounds.broadcast_sizes(pickled_objects)
    received = [0] * size
    received[root] = sizes[rounds.group.rank()]
    arrived = rounds.exchange(data, sizes if pickled_objects else [0] * size, received)[root]
    scatter_object_output_list[0] = rounds.unpack(arrived, root)[0]


@untransformed
@collective()
def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to a rank that calls ``recv_object_list`` with a list of the same length.

    Args:
        object_list: the objects to send.
        dst: the receiver's global rank; or
        group: as in ``all_reduce``.
        device: the device of the bytes; the same type on both sides.
        group_dst: the receiver's group rank; pass either.
        use_batch: send like ``batch_isend_irecv``; the same on both sides.

    Raises:
        MismatchError: the receiver's list has another length; on both sides.
        PicklingError: an object cannot be pickled; on both sides. KindError: not a list.
        ArgumentError: the receiver is this rank; no receiver, or both ``dst`` and ``group_dst``.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     if md.get_rank() == 0:
        ...         return dist.send_object_list(["foo", 12], dst=1)
        ...     objects = [None, None]
        ...     return dist.recv_object_list(objects, src=0), objects
        >>> md.simulate(program, 2)[1]
        (0, ['foo', 12])
    """
    name = "send_object_list"
    target = resolve_group(group)
    peer = get_peer(target, dst, group_dst, name, "dst")
    check_not_self(target, peer, name)
    check_is_list(object_list, "object_list", name, is_written=False)
    line = _Conversation(name, target, device, use_batch)
    num_sent = len(object_list)
    pickled = PickledObject(entries("object_list", object_list))
    line.move(line.numbers(_MARK, num_sent, pickled.signed_size), peer, is_send=True)
    answer = line.numbers(0)
    line.move(answer, peer, is_send=False, tag=ANSWER_TAG)
    num_received = int(answer.view(torch.int64))
    if pickled.error is not None or num_received == num_sent:
        line.move(pickled.data.to(line.device), peer, is_send=True)
    if pickled.error is not None:
        raise_unpicklable([(target.world.rank, pickled.data)], name, pickled.error)
    _check_same_length(num_sent, target.world.rank, num_received, target.ranks[peer], target)


@untransformed
@collective()
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: GroupLike = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects from one rank, or from any; return the global rank of the sender.

    Args:
        object_list: a list as long as the sender's; its entries are replaced.
        src: the sender's global rank; or
        group: as in ``all_reduce``.
        device, use_batch: as in ``send_object_list``.
        group_src: the sender's group rank. Omit both to receive from any rank.

    Raises:
        As ``send_object_list``, for the sender.
        BackendError: an object cannot be unpickled, or the message has no list of objects.
    """
    name = "recv_object_list"
    target = resolve_group(group)
    peer = find_peer(target, src, group_src, name, "src")
    check_not_self(target, peer, name)
    check_is_list(object_list, "object_list", name, is_written=True)
    num_received = len(object_list)
    line = _Conversation(name, target, device, use_batch)
    numbers = line.numbers(0, 0, 0)
    source = line.move(numbers, peer, is_send=False).request.source()
    mark, num_sent, signed_size = numbers.view(torch.int64).tolist()
    sender = target.ranks[source]
    if mark != _MARK:
        raise BackendError(
            f"recv_object_list received a message that is not a list of objects from rank {sender}",
            where=f"rank {target.world.rank}, {target.name}",
            fix=f"call send_object_list on rank {sender}",
        )
    line.move(line.numbers(num_received), source, is_send=True, tag=ANSWER_TAG)
    if signed_size >= 0:
        _check_same_length(num_sent, sender, num_received, target.world.rank, target)
    data = torch.empty(abs(signed_size), dtype=torch.uint8, device=line.device)
    line.move(data, source, is_send=False)
    if signed_size < 0:
        raise_unpicklable([(sender, data)], "send_object_list")
    object_list[:] = unpack(data.cpu(), sender, name, target)
    return sender


class _Conversation:
    """The messages of a call between two ranks."""

    def __init__(self, operation: str, target: ProcessGroup, device: Any, use_batch: bool) -> None:
        self.operation = operation
        self.target = target
        self.use_batch = use_batch
        self.device = find_device(target, device, operation)

    def numbers(self, *values: int) -> torch.Tensor:
        """Return a tensor of ``values`` to send, or to receive into."""
        # Use a dtype that programs rarely send: backends match a message with any receive of its
        # dtype and size.
        return torch.tensor(values, dtype=torch.int64, device=self.device).view(torch.uint64)

    def move(
        self, tensor: torch.Tensor, peer: int | None, *, is_send: bool, tag: int = 0
    ) -> OperationArgs:
        """Send ``tensor`` to ``peer``, or receive into it, and wait; return the message."""
        message = prepare_message(self.operation, self.target, peer, tensor, is_send=is_send)
        message.tag = tag  # not checked: the tag of an answer is reserved
        device_group = open_device_group(self.target, message)
        if self.use_batch:
            device_group.start_together([message])
            device_group.finish(message)
        else:
            device_group.run(message)
        return message


def _check_same_length(
    num_sent: int, sender: int, num_received: int, receiver: int, target: ProcessGroup
) -> None:
    if num_sent != num_received:
        found = f"rank {sender} sends {num_sent} entries\nrank {receiver} receives {num_received}"
        raise other_length("send_object_list", target, found)

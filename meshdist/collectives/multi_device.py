"""Collectives of torch's old package on several tensors per process, one on each of its devices.

Each process first reduces its own tensors, then communicates once, then spreads the result over its
list. The tensors of a list are alike in dtype and number of elements; the lists of all members are
equally long. CPU tensors will do as well as several CUDA devices, and NumPy and CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..arrays import shape_text
from ..dtypes import dtype_name
from ..error_text import grouped_text
from ..errors import AgreementError, ArgumentError, DtypeError, KindError, ShapeError
from ..groups.channel import Channel
from ..groups.process_group import ProcessGroup, resolve_group
from ..reduce_ops import ReduceKind, ReduceOp, split_premul
from ..wires.communicator import Communicator
from ..wires.operations import Chain, Operation, Terms
from ..wires.reductions import reduced
from ..wires.work import Work
from .checks import (
    as_wire_tensors,
    check_list,
    check_reducible,
    declared_op,
    get_peer,
    premultiplied,
)
from .coalesced import gather_packed
from .instruments import verb
from .running import Written, run

__all__ = [
    "all_gather_multigpu",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
]


@verb
def broadcast_multigpu(
    tensor_list: list[Any],
    src: int,
    group: Any = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Every tensor of every member becomes one of the source's.

    Args:
        tensor_list: arrays of one dtype and number of elements, as many on all members. Written
            in place, but for the one that is sent.
        src: the source's global rank.
        group, async_op: as in ``all_reduce``.
        src_tensor: which of the source's tensors is sent.

    Raises:
        AgreementError: the members' lists are not alike; on all members.
        ArgumentError: no such ``src_tensor``. ShapeError, DtypeError: a list of unlike tensors.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     tensors = [torch.full((2,), 10 * md.get_rank() + place) for place in range(2)]
        ...     md.broadcast_multigpu(tensors, src=1, src_tensor=1)
        ...     return [x.tolist() for x in tensors]
        >>> md.simulate(program, 2)
        [[[11, 11], [11, 11]], [[11, 11], [11, 11]]]
    """
    name = "broadcast_multigpu"
    target = resolve_group(group)
    root = get_peer(target, src, None, name, "src")
    written = _written(tensor_list, "tensor_list", target, name)
    place = _place(src_tensor, "src_tensor", name, written)
    buffers = [buffer for _, _, buffer in written]
    channel = _enter(name, target, buffers, None, root)
    is_root = root == target.rank()
    sent = buffers[place if is_root else 0]

    def start(wire: Communicator, terms: Terms) -> Operation:
        return Chain([wire.broadcast(sent, root, terms)], lambda: _spread(sent, buffers))

    if is_root:  # what is sent stays as it is
        del written[place]
    return run(channel, name, start, written, async_op)


@verb
def all_reduce_multigpu(
    tensor_list: list[Any], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Every tensor of every member becomes the reduction of all tensors of all members.

    Args:
        tensor_list: arrays of one dtype and number of elements, as many on all members. Written
            in place.
        op, group, async_op: as in ``all_reduce``.

    Cost: that of one ``all_reduce`` of one of the tensors.

    Raises:
        AgreementError: the members' lists are not alike; on all members.
        DtypeError: a reduction that the dtype lacks. ShapeError, DtypeError: unlike tensors.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     tensors = [torch.ones(1) for _ in range(8)]
        ...     md.all_reduce_multigpu(tensors)
        ...     return [x.item() for x in tensors]
        >>> md.simulate(program, 2)[1]
        [16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]
    """
    name = "all_reduce_multigpu"
    target = resolve_group(group)
    written = _written(tensor_list, "tensor_list", target, name)
    buffers = [buffer for _, _, buffer in written]
    channel, kind, total = _enter_reducing(name, target, buffers, op)

    def start(wire: Communicator, terms: Terms) -> Operation:
        return Chain([wire.all_reduce(total, kind, terms)], lambda: _spread(total, buffers))

    return run(channel, name, start, written, async_op)


@verb
def reduce_multigpu(
    tensor_list: list[Any],
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """One tensor of the destination becomes the reduction of all tensors of all members.

    Args:
        tensor_list: arrays of one dtype and number of elements, as many on all members. All but
            the one that takes the result stay as they were.
        dst: the destination's global rank.
        op, group, async_op: as in ``all_reduce``.
        dst_tensor: which of the destination's tensors takes the result. Written in place.

    Raises:
        AgreementError: the members' lists are not alike; on all members.
        ArgumentError: no such ``dst_tensor``. ShapeError, DtypeError: a list of unlike tensors.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     tensors = [torch.ones(1), torch.full((1,), 2.0)]
        ...     md.reduce_multigpu(tensors, dst=0, dst_tensor=1)
        ...     return [x.item() for x in tensors]
        >>> md.simulate(program, 2)
        [[1.0, 6.0], [1.0, 2.0]]
    """
    name = "reduce_multigpu"
    target = resolve_group(group)
    root = get_peer(target, dst, None, name, "dst")
    is_root = root == target.rank()
    written = _written(tensor_list, "tensor_list", target, name, is_read=True)
    place = _place(dst_tensor, "dst_tensor", name, written)
    if is_root:
        (written[place],) = _written([tensor_list[place]], "tensor_list", target, name)
    buffers = [buffer for _, _, buffer in written]
    channel, kind, total = _enter_reducing(name, target, buffers, op, root)
    written = [written[place]] if is_root else []

    def start(wire: Communicator, terms: Terms) -> Operation:
        operation = wire.reduce(total, kind, root, terms)
        return Chain([operation], lambda: _spread(total, [buffer for _, _, buffer in written]))

    return run(channel, name, start, written, async_op)


@verb
def all_gather_multigpu(
    output_tensor_lists: list[list[Any]],
    input_tensor_list: list[Any],
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Each of a member's output lists holds all tensors of all members, member by member.

    Args:
        output_tensor_lists: for each tensor of ``input_tensor_list`` a list of arrays like it,
            one for each tensor of each member; member k's j-th tensor comes to place
            ``k * len(input_tensor_list) + j``. Written in place.
        input_tensor_list: arrays of one dtype and number of elements, as many on all members.
        group, async_op: as in ``all_reduce``.

    Raises:
        AgreementError: the members' lists are not alike; on all members.
        ArgumentError: lists of another length. ShapeError, DtypeError: unlike tensors.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     mine = [torch.full((1,), 10 * md.get_rank() + place) for place in range(2)]
        ...     lists = [[torch.empty(1, dtype=torch.int64) for _ in range(4)] for _ in mine]
        ...     md.all_gather_multigpu(lists, mine)
        ...     return [[x.item() for x in each] for each in lists]
        >>> md.simulate(program, 2)[0]
        [[0, 1, 10, 11], [0, 1, 10, 11]]
    """
    name = "all_gather_multigpu"
    target = resolve_group(group)
    sources = _written(input_tensor_list, "input_tensor_list", target, name, is_read=True)
    buffers = [buffer for _, _, buffer in sources]
    count = len(buffers) * target.size()
    written: list[Written] = []
    for outputs in check_list(
        output_tensor_lists, "output_tensor_lists", target, name, len(buffers)
    ):
        check_list(outputs, "an entry of output_tensor_lists", target, name, count)
        written += _written(outputs, "output_tensor_lists", target, name, like=buffers[0])
    channel = _enter(name, target, buffers)
    outputs = [buffer for _, _, buffer in written]
    return run(
        channel,
        name,
        lambda wire, terms: gather_packed(wire, outputs, buffers, terms),
        written,
        async_op,
    )


def _enter(
    name: str,
    target: ProcessGroup,
    buffers: list[torch.Tensor],
    op: ReduceKind | None = None,
    root: int | None = None,
) -> Channel:
    """Return the channel, once the members' lists are known to be alike, as far as can be seen."""
    channel = target.open_channel(buffers[0].device.type)
    channel.enter(name, buffers, op, root)
    if target.world.is_simulated or channel.spans_hosts:
        _check_lengths(name, target, channel, buffers)
    return channel


def _enter_reducing(
    name: str,
    target: ProcessGroup,
    buffers: list[torch.Tensor],
    op: Any,
    root: int | None = None,
) -> tuple[Channel, ReduceKind, torch.Tensor]:
    """As ``_enter``; returns the wire's reduction too, and this rank's tensors reduced by it."""
    kind, factor = split_premul(op)
    check_reducible(kind, buffers[0], name, factor)
    channel = _enter(name, target, buffers, declared_op(kind, factor), root)
    parts = buffers if factor is None else [premultiplied(part, factor) for part in buffers]
    return channel, kind, reduced([part.view(-1) for part in parts], kind)


def _check_lengths(
    name: str, target: ProcessGroup, channel: Channel, buffers: list[torch.Tensor]
) -> None:
    """Compare the lengths of the members' lists in a round of their own.

    One tensor of each member travels, so nothing else shows a difference where no headers do.
    """
    mine = torch.tensor([len(buffers)], device=buffers[0].device)
    gathered = mine.new_empty(target.size())
    run(channel, name, lambda wire, terms: wire.all_gather(gathered, mine, terms), [], False)
    lengths = gathered.tolist()
    if len(set(lengths)) > 1:
        found = [(rank, f"{n} tensors") for rank, n in zip(target.ranks, lengths, strict=True)]
        raise AgreementError(
            f"{name}: the members' lists have different lengths",
            where=f"{target.name}; no data was moved",
            expected="as many tensors on every member",
            found=grouped_text(found),
        )


def _written(
    given: Any,
    argument: str,
    target: ProcessGroup,
    name: str,
    *,
    is_read: bool = False,
    like: torch.Tensor | None = None,
) -> list[Written]:
    """The arrays of a list, once they are known to be alike, and like ``like``."""
    written = as_wire_tensors(given, argument, target, name, writable=not is_read)
    first = written[0][2] if like is None else like
    for _, _, buffer in written:
        if buffer.dtype is not first.dtype:
            raise DtypeError(
                f"{name} has tensors of different dtypes",
                expected="one dtype",
                found=f"{dtype_name(first.dtype)} and, in {argument}, {dtype_name(buffer.dtype)}",
            )
        if buffer.numel() != first.numel():
            raise ShapeError(
                f"{name} has tensors of different numbers of elements",
                found=f"{shape_text(first.shape)} and, in {argument}, {shape_text(buffer.shape)}",
            )
    return written


def _place(place: object, argument: str, name: str, written: Sequence[Written]) -> int:
    """Return ``place`` if the list has it."""
    if isinstance(place, bool) or not isinstance(place, int):
        raise KindError(f"{name}: {argument} must be a whole number", found=type(place).__name__)
    if not 0 <= place < len(written):
        raise ArgumentError(
            f"{name}: there is no tensor number {place} in tensor_list",
            expected=f"{argument} from 0 to {len(written) - 1}",
        )
    return place


def _spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy a flat tensor into others, on whatever devices."""
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for target in targets:
            if target is not source:
                target.view(-1).copy_(source.view(-1))

"""Run torch's collectives on several tensors at once: ``coalesced``, or one tensor per device.

The ``multigpu`` collectives of torch's old package work on the tensors of several devices of a
process: each process first reduces its own tensors, then communicates once, then copies the result
to its list. All tensors have the same dtype and number of elements, and all ranks pass lists of
the same length. CPU tensors, NumPy and CuPy arrays work too.

Arguments, errors and results follow the rules of ``tensor_collectives``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ..arguments import get_integer
from ..backends.c10d.dtype_fallbacks import read_as
from ..backends.composed_collectives import divide, reduced
from ..backends.work import Work
from ..groups.process_group import GroupLike
from ..reduce_ops import ReduceKind, ReduceOp, Reduction, is_whole_mean
from .argument_checks import get_peer
from .collective import Collective
from .normalize_args import check_devices, prepare
from .registration import collective

__all__ = [
    "all_gather_coalesced",
    "all_gather_multigpu",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "broadcast_multigpu",
    "reduce_multigpu",
]


@collective()
def all_reduce_coalesced(
    tensors: Any,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce each tensor of a list across the group in place.

    Args:
        tensors: arrays of any shapes, with the same number, sizes and dtypes on every rank; written
            in place. They must not overlap in memory. A single tensor counts as a list.
        op, group, async_op: as in ``all_reduce``.

    Cost: one ``all_reduce`` of all tensors together, if the backend can combine them.

    Raises:
        ArgumentError: not a list, or an empty list.
        DtypeError: a dtype does not support the reduction.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     x, y = torch.ones(1), torch.full((2,), md.get_rank())
        ...     dist.all_reduce_coalesced([x, y])
        ...     return x.tolist(), y.tolist()
        >>> md.simulate(program, 2)
        [([2.0], [1, 1]), ([2.0], [1, 1])]
    """
    return prepare("all_reduce_coalesced", group, tensors, op).run(async_op)


@collective()
def all_gather_coalesced(
    output_tensor_lists: list[list[Any]],
    input_tensor_list: list[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Gather the lists of tensors of all ranks: list j receives the tensors of rank j.

    Args:
        output_tensor_lists: for each rank a list of arrays like ``input_tensor_list``. Written in
            place.
        input_tensor_list: arrays of any shapes, with the same number, sizes and dtypes on every
            rank.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for n bytes in total over p ranks.

    Raises:
        ArgumentError: not one list per rank, or a list of another length. ShapeError: other sizes.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mine = [torch.full((1,), md.get_rank()), torch.full((2,), md.get_rank())]
        ...     lists = [[torch.empty_like(x) for x in mine] for _ in range(2)]
        ...     dist.all_gather_coalesced(lists, mine)
        ...     return [[x.tolist() for x in each] for each in lists]
        >>> md.simulate(program, 2)
        [[[[0], [0, 0]], [[1], [1, 1]]], [[[0], [0, 0]], [[1], [1, 1]]]]
    """
    call = Collective("all_gather_coalesced", group)
    names = ("output_tensor_lists", "input_tensor_list")
    inputs = [call.take(x, names[1]) for x in call.check_list(input_tensor_list, names[1])]
    buffers = call.write_lists(output_tensor_lists, names[0], call.group.size(), len(inputs))
    for buffer, source in zip(buffers, itertools.cycle(inputs)):
        call.check_alike(buffer, source, names)
        call.check_same_size(buffer, source, names)
    check_devices(call, inputs, names[1])
    return _gather_packed(call, buffers, inputs, async_op)


@collective()
def broadcast_multigpu(
    tensor_list: list[Any],
    src: int,
    group: GroupLike = None,
    async_op: bool = False,
    src_tensor: int = 0,
) -> Work | None:
    """Copy one tensor of the source to every tensor of every rank.

    Args:
        tensor_list: arrays of one dtype and number of elements, equally many on every rank. Written
            in place, except the tensor that is sent.
        src: the global rank of the source.
        group, async_op: as in ``all_reduce``.
        src_tensor: the index of the tensor to send in the source's list.

    Raises:
        MismatchError: the lists of the ranks do not match; on every rank.
        ArgumentError: ``src_tensor`` is out of range.
        ShapeError, DtypeError: tensors of a list differ.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     tensors = [torch.full((2,), 10 * md.get_rank() + place) for place in range(2)]
        ...     dist.broadcast_multigpu(tensors, src=1, src_tensor=1)
        ...     return [x.tolist() for x in tensors]
        >>> md.simulate(program, 2)
        [[[11, 11], [11, 11]], [[11, 11], [11, 11]]]
    """
    call = Collective("broadcast_multigpu", group)
    call.root = get_peer(call.group, src, None, call.operation, "src")
    buffers = _take_alike(call, tensor_list, writes=True)
    place = _checked_place(call, src_tensor, "src_tensor", buffers)
    sent = buffers[place if call.is_root else 0]
    if call.is_root:  # the sent tensor is only read
        del call.written[place]
    call.then = partial(_spread, sent, buffers)
    call.carry("broadcast", tensors := [sent], tensors, buffers, tensor_list)
    return call.run(async_op)


@collective()
def all_reduce_multigpu(
    tensor_list: list[Any],
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all tensors of all ranks, and write the result to each of them.

    Args:
        tensor_list: arrays of one dtype and number of elements, equally many on every rank. Written
            in place.
        op, group, async_op: as in ``all_reduce``.

    Cost: one ``all_reduce`` of one tensor.

    Raises:
        MismatchError: the lists of the ranks do not match; on every rank.
        DtypeError: the dtype does not support the reduction.
        ShapeError, DtypeError: tensors of a list differ.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     tensors = [torch.ones(1) for _ in range(8)]
        ...     dist.all_reduce_multigpu(tensors)
        ...     return [x.item() for x in tensors]
        >>> md.simulate(program, 2)[1]
        [16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]
    """
    call = Collective("all_reduce_multigpu", group)
    buffers = _take_alike(call, tensor_list, writes=True)
    call.take_op(op, buffers[0])
    return _reduce_as_one(call, "all_reduce", buffers, buffers, async_op, None)


@collective()
def reduce_multigpu(
    tensor_list: list[Any],
    dst: int,
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
    dst_tensor: int = 0,
) -> Work | None:
    """Reduce all tensors of all ranks into one tensor of the destination.

    Args:
        tensor_list: arrays of one dtype and number of elements, equally many on every rank. Only
            the destination's ``dst_tensor`` is written.
        dst: the global rank of the destination.
        op, group, async_op: as in ``all_reduce``.
        dst_tensor: the index of the tensor that receives the result in the destination's list.

    Raises:
        MismatchError: the lists of the ranks do not match; on every rank.
        ArgumentError: ``dst_tensor`` is out of range.
        ShapeError, DtypeError: tensors of a list differ.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     tensors = [torch.ones(1), torch.full((1,), 2.0)]
        ...     dist.reduce_multigpu(tensors, dst=0, dst_tensor=1)
        ...     return [x.item() for x in tensors]
        >>> md.simulate(program, 2)
        [[1.0, 6.0], [1.0, 2.0]]
    """
    call = Collective("reduce_multigpu", group)
    call.root = get_peer(call.group, dst, None, call.operation, "dst")
    buffers = _take_alike(call, tensor_list)
    place = _checked_place(call, dst_tensor, "dst_tensor", buffers)
    outputs = [call.take(tensor_list[place], "tensor_list", writes=True)] if call.is_root else []
    call.take_op(op, buffers[0])
    return _reduce_as_one(call, "reduce", buffers, outputs, async_op, tensor_list)


@collective()
def all_gather_multigpu(
    output_tensor_lists: list[list[Any]],
    input_tensor_list: list[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Gather all tensors of all ranks into each output list, rank by rank.

    Args:
        output_tensor_lists: for each tensor of ``input_tensor_list`` a list with one array for each
            tensor of each rank. Tensor j of rank k is written to index
            ``k * len(input_tensor_list) + j``.
        input_tensor_list: arrays of one dtype and number of elements, equally many on every rank.
        group, async_op: as in ``all_reduce``.

    Raises:
        MismatchError: the lists of the ranks do not match; on every rank.
        ArgumentError: a list has another length. ShapeError, DtypeError: tensors differ.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mine = [torch.full((1,), 10 * md.get_rank() + place) for place in range(2)]
        ...     lists = [[torch.empty(1, dtype=torch.int64) for _ in range(4)] for _ in mine]
        ...     dist.all_gather_multigpu(lists, mine)
        ...     return [[x.item() for x in each] for each in lists]
        >>> md.simulate(program, 2)[0]
        [[0, 1, 10, 11], [0, 1, 10, 11]]
    """
    call = Collective("all_gather_multigpu", group)
    inputs = _take_alike(call, input_tensor_list, "input_tensor_list")
    count = len(inputs) * call.group.size()
    outputs = call.write_lists(output_tensor_lists, "output_tensor_lists", len(inputs), count)
    names = ("an entry of output_tensor_lists", "input_tensor_list[0]")
    _check_same(call, outputs, inputs[0], names)
    return _gather_packed(call, outputs, inputs, async_op)


def _take_alike(
    call: Collective, given: Any, argument: str = "tensor_list", *, writes: bool = False
) -> list[torch.Tensor]:
    """Return the tensors of a list to read or write; raise if their dtypes or sizes differ."""
    tensors = [call.take(x, argument, writes=writes) for x in call.check_list(given, argument)]
    _check_same(call, tensors, tensors[0], (f"an entry of {argument}", f"{argument}[0]"))
    return tensors


def _check_same(
    call: Collective, tensors: Sequence[torch.Tensor], like: torch.Tensor, names: tuple[str, str]
) -> None:
    """Raise unless all tensors have the dtype and size of ``like``."""
    for tensor in tensors:
        call.check_same_dtype(tensor, like, names)
        call.check_same_size(tensor, like, names)


def _checked_place(
    call: Collective, place: object, argument: str, tensors: Sequence[torch.Tensor]
) -> int:
    """Return ``place`` as an index of ``tensors``; raise if it is out of range."""
    last = len(tensors) - 1
    return get_integer(place, f"{call.operation}: {argument}", 0, last, where="tensor_list")


def _reduce_as_one(
    call: Collective,
    way: str,
    buffers: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    async_op: bool,
    result: Sequence[Any] | None,
) -> Work | None:
    """Reduce ``buffers`` locally, then across ranks with ``way``; copy the result to ``outputs``.

    Args:
        result: the result() of the Work; None for the reduced tensor.
    """
    kind = call.op
    assert kind is not None  # a collective that reduces
    # Round a mean of integers only once, at the end; until then it is a sum.
    step = ReduceOp.SUM if is_whole_mean(kind, buffers[0].dtype) else kind
    total = reduced([call.scaled(part).view(-1) for part in buffers], step)
    call.op = step
    call.then = partial(_spread_reduction, total, kind, call.group.size() * len(buffers), outputs)
    call.carry(way, sent := [total], sent, buffers, result)
    return call.run(async_op)


def _spread_reduction(
    total: torch.Tensor, kind: ReduceKind, num: int, targets: Sequence[torch.Tensor]
) -> None:
    """Copy ``total``, the reduction of ``num`` tensors, to ``targets``; divide an integer mean."""
    if targets and is_whole_mean(kind, total.dtype):
        divide(total, num)
    _spread(total, targets)


def _spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the elements of ``source`` into each of ``targets``, on any device."""
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for target in targets:
            if target is not source:
                target.view(-1).copy_(source.view(-1))


def _gather_packed(
    call: Collective, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool
) -> Work | None:
    """Gather the inputs of all ranks as bytes in one operation.

    Args:
        outputs: a tensor on any device for each input of each rank; or several such lists,
            concatenated, which receive the same values.
        inputs: this rank's tensors; they are sent from the device of the first.
    """
    packed = torch.cat([read_as(part, torch.uint8).to(inputs[0].device) for part in inputs])
    size = call.group.size()
    whole = packed.new_empty(size * packed.numel())
    parts = whole.split([part.nbytes for part in inputs] * size)

    def unpack() -> None:
        with torch.inference_mode():  # they may be parameters, or inference tensors
            for output, part in zip(outputs, itertools.cycle(parts)):
                read_as(output, torch.uint8).copy_(part)

    call.then = unpack
    call.carry("all_gather", [packed], [whole], inputs)
    return call.run(async_op)

"""Run torch's collectives on several tensors at once: ``coalesced``, or one tensor per device.

torch's old ``multigpu`` collectives take a tensor per device: each process reduces its tensors,
communicates once, and copies the result to its list. All tensors have the same dtype and element
count, and all ranks pass equally long lists. CPU tensors and arrays work too. The rules of
``tensor_collectives`` apply.
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
        tensors: arrays of any shapes, equal in number, sizes and dtypes on every rank; written in
            place. They must not overlap. A single tensor counts as a list.
        op, group, async_op: as in ``all_reduce``.

    Cost: one ``all_reduce`` of all tensors together, if the backend can combine them.

    Raises:
        ArgumentError: not a list, or empty.
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
        output_tensor_lists: per rank, a list of arrays like ``input_tensor_list``. Written in
            place.
        input_tensor_list: as ``tensors`` in ``all_reduce_coalesced``.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for n bytes in total over p ranks.

    Raises:
        ArgumentError: a wrong number of lists or arrays. ShapeError: other sizes.

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
        tensor_list: arrays of one dtype and element count, equally many on every rank. Written in
            place, except the sent tensor.
        src: the source's global rank.
        group, async_op: as in ``all_reduce``.
        src_tensor: the sent tensor's index in the source's list.

    Raises:
        MismatchError: the ranks' lists do not match; on every rank.
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
    index = _checked_index(call, src_tensor, "src_tensor", buffers)
    sent = buffers[index if call.is_root else 0]
    if call.is_root:  # the sent tensor is only read
        del call.written[index]
    call.then = partial(_spread, sent, buffers)
    call.set_data("broadcast", tensors := [sent], tensors, buffers, tensor_list)
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
        tensor_list: as in ``broadcast_multigpu``. Written in place.
        op, group, async_op: as in ``all_reduce``.

    Cost: one ``all_reduce`` of one tensor.

    Raises:
        As ``broadcast_multigpu``. DtypeError: the dtype does not support the reduction.

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
        tensor_list: as in ``broadcast_multigpu``. Only the destination's ``dst_tensor`` is written.
        dst: the destination's global rank.
        op, group, async_op: as in ``all_reduce``.
        dst_tensor: the index of the result in the destination's list.

    Raises:
        As ``broadcast_multigpu``, for ``dst_tensor``.

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
    index = _checked_index(call, dst_tensor, "dst_tensor", buffers)
    outputs = [call.take(tensor_list[index], "tensor_list", writes=True)] if call.is_root else []
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
        output_tensor_lists: per input tensor, a list with an array per tensor of each rank; tensor
            j of rank k gets index ``k * len(input_tensor_list) + j``.
        input_tensor_list: as ``tensor_list`` in ``broadcast_multigpu``.
        group, async_op: as in ``all_reduce``.

    Raises:
        As ``broadcast_multigpu``. ArgumentError: a list has another length.

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
    """Return a list's tensors to read or write; raise if dtypes or sizes differ."""
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


def _checked_index(
    call: Collective, index: object, argument: str, tensors: Sequence[torch.Tensor]
) -> int:
    """Return ``index`` as an index of ``tensors``; or raise."""
    last = len(tensors) - 1
    return get_integer(index, f"{call.operation}: {argument}", 0, last, where="tensor_list")


def _reduce_as_one(
    call: Collective,
    backend_operation: str,
    buffers: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    async_op: bool,
    result: Sequence[Any] | None,
) -> Work | None:
    """Reduce ``buffers`` locally, then across ranks; copy the result to ``outputs``.

    Args:
        result: the Work's result(); None for the reduced tensor.
    """
    kind = call.op
    assert kind is not None  # a collective that reduces
    # Round a mean of integers only once, at the end; until then it is a sum.
    step = ReduceOp.SUM if is_whole_mean(kind, buffers[0].dtype) else kind
    total = reduced([call.scaled(part).view(-1) for part in buffers], step)
    call.op = step
    call.then = partial(_spread_reduction, total, kind, call.group.size() * len(buffers), outputs)
    call.set_data(backend_operation, sent := [total], sent, buffers, result)
    return call.run(async_op)


def _spread_reduction(
    total: torch.Tensor, kind: ReduceKind, num: int, targets: Sequence[torch.Tensor]
) -> None:
    """Copy ``total``, the reduction of ``num`` tensors, to ``targets``; divide an integer mean."""
    if targets and is_whole_mean(kind, total.dtype):
        divide(total, num)
    _spread(total, targets)


def _spread(source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy ``source`` into each of ``targets``, on any device."""
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for target in targets:
            if target is not source:
                target.view(-1).copy_(source.view(-1))


def _gather_packed(
    call: Collective, outputs: list[torch.Tensor], inputs: list[torch.Tensor], async_op: bool
) -> Work | None:
    """Gather the inputs of all ranks as bytes in one operation.

    Args:
        outputs: a tensor per input and rank, on any device; or several such lists, concatenated.
        inputs: this rank's tensors, sent from the device of the first.
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
    call.set_data("all_gather", [packed], [whole], inputs)
    return call.run(async_op)

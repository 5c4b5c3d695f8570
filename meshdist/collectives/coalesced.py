"""torch's collectives on several tensors at once.

Arguments, errors and results follow the rules of ``verbs``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..errors import ArgumentError
from ..groups.process_group import resolve_group
from ..reduce_ops import ReduceOp, multiply, split_premul
from ..wires.c10d.substitutes import read_as
from ..wires.communicator import Communicator
from ..wires.operations import Chain, Operation, Terms
from ..wires.work import Work
from .checks import (
    as_wire_tensors,
    check_alike,
    check_list,
    check_reducible,
    check_same_size,
    declared_op,
)
from .instruments import verb
from .running import Written, run

__all__ = ["all_gather_coalesced", "all_reduce_coalesced", "gather_packed"]


@verb
def all_reduce_coalesced(
    tensors: list[Any], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Work | None:
    """Each of every member's tensors becomes the reduction of all members' in its place.

    Args:
        tensors: arrays of any shapes, equal in number, sizes and dtypes on all members; written
            in place. They must not overlap in memory, nor may one be listed twice.
        op, group, async_op: as in ``all_reduce``.

    Cost: that of one ``all_reduce`` of all of them together, where the wire can join them.

    Raises:
        ArgumentError: no list, or an empty one. DtypeError: a reduction that a dtype lacks.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     x, y = torch.ones(1), torch.full((2,), md.get_rank())
        ...     md.all_reduce_coalesced([x, y])
        ...     return x.tolist(), y.tolist()
        >>> md.simulate(program, 2)
        [([2.0], [1, 1]), ([2.0], [1, 1])]
    """
    target = resolve_group(group)
    name = "all_reduce_coalesced"
    kind, factor = split_premul(op)
    written = as_wire_tensors(tensors, "tensors", target, name, writable=True)
    buffers = [buffer for _, _, buffer in written]
    for buffer in buffers:
        check_reducible(kind, buffer, name, factor)
        _check_device(buffer, buffers[0], name, "tensors")
    channel = target.open_channel(buffers[0].device.type)
    channel.enter(name, buffers, declared_op(kind, factor))
    if factor is not None:
        for buffer in buffers:
            multiply(buffer, factor)
    return run(
        channel,
        name,
        lambda wire, terms: wire.all_reduce_list(buffers, kind, terms),
        written,
        async_op,
    )


@verb
def all_gather_coalesced(
    output_tensor_lists: list[list[Any]],
    input_tensor_list: list[Any],
    group: Any = None,
    async_op: bool = False,
) -> Work | None:
    """Every member's j-th list holds copies of member j's tensors.

    Args:
        output_tensor_lists: for each member a list of arrays like ``input_tensor_list``, written
            in place.
        input_tensor_list: arrays of any shapes, equal in number, sizes and dtypes on all members.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for n bytes in all over p ranks.

    Raises:
        ArgumentError: not one list per member, or of another length. ShapeError: other sizes.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     mine = [torch.full((1,), md.get_rank()), torch.full((2,), md.get_rank())]
        ...     lists = [[torch.empty_like(one) for one in mine] for _ in range(2)]
        ...     md.all_gather_coalesced(lists, mine)
        ...     return [[one.tolist() for one in each] for each in lists]
        >>> md.simulate(program, 2)
        [[[[0], [0, 0]], [[1], [1, 1]]], [[[0], [0, 0]], [[1], [1, 1]]]]
    """
    target = resolve_group(group)
    name = "all_gather_coalesced"
    names = ("output_tensor_lists", "input_tensor_list")
    sources = as_wire_tensors(input_tensor_list, names[1], target, name, writable=False)
    inputs = [source for _, _, source in sources]
    written: list[Written] = []
    for outputs in check_list(output_tensor_lists, names[0], target, name, target.size()):
        check_list(outputs, "an entry of output_tensor_lists", target, name, len(inputs))
        row = as_wire_tensors(outputs, names[0], target, name, writable=True)
        for (_, _, buffer), source in zip(row, inputs, strict=True):
            check_alike(buffer, source, target, name, names)
            check_same_size(buffer, source, target, name, names)
        written += row
    for source in inputs:
        _check_device(source, inputs[0], name, names[1])
    channel = target.open_channel(inputs[0].device.type)
    channel.enter(name, inputs)
    buffers = [buffer for _, _, buffer in written]
    return run(
        channel,
        name,
        lambda wire, terms: gather_packed(wire, buffers, inputs, terms),
        written,
        async_op,
    )


def gather_packed(
    wire: Communicator, outputs: list[torch.Tensor], inputs: list[torch.Tensor], terms: Terms
) -> Operation:
    """Gather all inputs, as bytes one after the other, in one operation.

    Args:
        wire: the communicator that gathers.
        outputs: for each input of each member a tensor like it, on any device; or several such
            lists, one after the other, which all get the same.
        inputs: this rank's tensors; they travel from the first one's device.
        terms: of the call.
    """
    packed = torch.cat([read_as(part, torch.uint8).to(inputs[0].device) for part in inputs])
    whole = packed.new_empty(wire.size * packed.numel())
    parts = whole.split([part.nbytes for part in inputs] * wire.size)

    def unpack() -> None:
        with torch.inference_mode():  # they may be parameters, or inference tensors
            for output, part in zip(outputs, itertools.cycle(parts)):
                read_as(output, torch.uint8).copy_(part)

    return Chain([wire.all_gather(whole, packed, terms)], unpack)


def _check_device(tensor: torch.Tensor, first: torch.Tensor, name: str, argument: str) -> None:
    if tensor.device != first.device:
        raise ArgumentError(
            f"{name} has tensors on different devices in {argument}",
            found=f"{first.device} and {tensor.device}",
        )

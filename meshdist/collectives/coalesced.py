"""torch's collectives on several tensors at once.

Arguments, errors and results follow the rules told in ``verbs``.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError
from ..mesh.groups import resolve_group
from ..reduce_ops import ReduceOp, multiply, split_premul
from ..wires.base import Communicator, Pending
from ..wires.pending import Chain
from ..wires.stand_ins import read_as
from ..wires.work import Work
from .checks import check_alike, check_list, check_reducible, check_same_size, dense, stated
from .instruments import verb
from .running import Written, run

__all__ = ["all_gather_coalesced", "all_reduce_coalesced"]


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
    written: list[Written] = [
        (one, *dense(one, "tensors", name, writable=True))
        for one in check_list(tensors, "tensors", target, name)
    ]
    buffers = [buffer for _, _, buffer in written]
    for buffer in buffers:
        check_reducible(kind, buffer, name, factor)
        _check_device(buffer, buffers[0], name, "tensors")
    channel = target.channel(buffers[0].device.type)
    channel.enter(name, buffers, stated(kind, factor))
    if factor is not None:
        for buffer in buffers:
            multiply(buffer, factor)
    return run(
        channel,
        name,
        lambda wire, timeout: wire.all_reduce_list(buffers, kind, timeout),
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
    inputs = [
        dense(one, "input_tensor_list", name, writable=False)[1]
        for one in check_list(input_tensor_list, "input_tensor_list", target, name)
    ]
    written: list[Written] = []
    names = ("output_tensor_lists", "input_tensor_list")
    for outputs in check_list(output_tensor_lists, names[0], target, name, target.size()):
        for one, source in zip(
            check_list(outputs, "an entry of output_tensor_lists", target, name, len(inputs)),
            inputs,
            strict=True,
        ):
            data, buffer = dense(one, names[0], name, writable=True)
            check_alike(buffer, source, target, name, names)
            check_same_size(buffer, source, target, name, names)
            written.append((one, data, buffer))
    for source in inputs:
        _check_device(source, inputs[0], name, "input_tensor_list")
    channel = target.channel(inputs[0].device.type)
    channel.enter(name, inputs)
    buffers = [buffer for _, _, buffer in written]
    return run(
        channel,
        name,
        lambda wire, timeout: _gather_packed(wire, buffers, inputs, timeout),
        written,
        async_op,
    )


def _gather_packed(
    wire: Communicator, outputs: list[torch.Tensor], inputs: list[torch.Tensor], timeout: Any
) -> Pending:
    """Gather all inputs, as bytes one after the other, in one go."""
    packed = torch.cat([read_as(part, torch.uint8) for part in inputs])
    whole = packed.new_empty(wire.size * packed.numel())
    sizes = [part.numel() * part.element_size() for part in inputs] * wire.size

    def settle() -> None:
        with torch.inference_mode():
            for output, part in zip(outputs, whole.split(sizes), strict=True):
                read_as(output, torch.uint8).copy_(part)

    return Chain([wire.all_gather(whole, packed, timeout)], settle)


def _check_device(tensor: torch.Tensor, first: torch.Tensor, name: str, argument: str) -> None:
    if tensor.device != first.device:
        raise ArgumentError(
            f"{name} has tensors on different devices in {argument}",
            found=f"{first.device} and {tensor.device}",
        )

"""torch's collectives on several tensors at once.

Arguments, errors and results follow the rules of ``verbs``.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..errors import ArgumentError
from ..reduce_ops import ReduceOp, multiply
from ..wires.c10d.substitutes import read_as
from ..wires.communicator import Communicator
from ..wires.operations import Chain, Operation, Terms
from ..wires.work import Work
from .collective import Collective
from .instruments import verb

__all__ = ["all_gather_coalesced", "all_reduce_coalesced", "gather_packed"]


@verb()
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
    call = Collective("all_reduce_coalesced", group)
    buffers = [call.write(one, "tensors") for one in call.check_list(tensors, "tensors")]
    kind = call.take_op(op, *buffers)
    _check_devices(call, buffers, "tensors")

    def start(wire: Communicator, terms: Terms) -> Operation:
        if call.factor is not None:
            for buffer in buffers:
                multiply(buffer, call.factor)
        return wire.all_reduce_list(buffers, kind, terms)

    return call.run(start, buffers, async_op)


@verb()
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
    call = Collective("all_gather_coalesced", group)
    names = ("output_tensor_lists", "input_tensor_list")
    inputs = [call.read(one, names[1]) for one in call.check_list(input_tensor_list, names[1])]
    buffers = call.write_lists(output_tensor_lists, names[0], call.group.size(), len(inputs))
    for buffer, source in zip(buffers, itertools.cycle(inputs)):
        call.check_alike(buffer, source, names)
        call.check_same_size(buffer, source, names)
    _check_devices(call, inputs, names[1])
    return call.run(
        lambda wire, terms: gather_packed(wire, buffers, inputs, terms), inputs, async_op
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


def _check_devices(call: Collective, tensors: list[torch.Tensor], argument: str) -> None:
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ArgumentError(
                f"{call.name} has tensors on different devices in {argument}",
                found=f"{tensors[0].device} and {tensor.device}",
            )

"""The bodies of verbs that go by one name in programs and, under a title, in plans and ``lax``.

Arguments are those of the verb of the same name, and come as the program gave them; ``title`` says
what the call is a part of: it is noted, compared and reported with the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..arguments import find_whole_numbers
from ..arrays import apart, apart_from_all, shape_text
from ..errors import KindError, ShapeError
from ..groups.process_group import ProcessGroup
from ..wires.work import Work
from .collective import Collective

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
]


def all_reduce(
    tensor: Any, op: Any, group: ProcessGroup, async_op: bool = False, title: str = ""
) -> Work | None:
    """Of ``all_reduce``."""
    call = Collective("all_reduce", group, title=title, is_elementwise=True)
    buffer = call.take(tensor, "tensor", writes=True)
    call.take_op(op, buffer)
    return call.run("all_reduce", sent := [buffer], sent, buffer, async_op)


def broadcast(
    tensor: Any, root: int, group: ProcessGroup, async_op: bool = False, title: str = ""
) -> Work | None:
    """Of ``broadcast``, from member ``root``."""
    call = Collective("broadcast", group, root, title=title, is_elementwise=True)
    buffer = call.take(tensor, "tensor", writes=True)
    if call.is_root:  # what is sent stays as it is
        call.written.clear()
    return call.run("broadcast", sent := [buffer], sent, buffer, async_op, result=[tensor])


def all_gather(
    name: str,
    output: Any,
    input: Any,
    group: ProcessGroup,
    async_op: bool = False,
    title: str = "",
) -> Work | None:
    """Of ``all_gather_into_tensor``, under either of its names."""
    names = ("output_tensor", "input_tensor")
    call = Collective(name, group, title=title)
    buffer = call.take(output, names[0], writes=True)
    block = call.take(input, names[1])
    call.check_alike(buffer, block, names)
    call.check_blocks(buffer, block, names)
    if block.data_ptr() != buffer.data_ptr() + call.group.rank() * block.nbytes:
        block = apart(block, buffer)  # but for its own place there, where it may lie
    return call.run("all_gather", [block], [buffer], block, async_op)


def reduce_scatter(
    name: str,
    output: Any,
    input: Any,
    op: Any,
    group: ProcessGroup,
    async_op: bool = False,
    title: str = "",
) -> Work | None:
    """Of ``reduce_scatter_tensor``, under either of its names."""
    call = Collective(name, group, title=title)
    buffer = call.take(output, "output", writes=True)
    whole = call.take(input, "input")
    call.take_op(op, buffer)
    call.check_alike(buffer, whole, ("output", "input"))
    call.check_blocks(whole, buffer, ("input", "output"))
    return call.run("reduce_scatter", [call.scaled(whole)], [buffer], whole, async_op)


def all_to_all(
    output_tensor_list: Any,
    input_tensor_list: Any,
    group: ProcessGroup,
    async_op: bool = False,
    title: str = "",
) -> Work | None:
    """Of ``all_to_all``."""
    given = "input_tensor_list"
    call = Collective("all_to_all", group, title=title)
    first = call.check_list(input_tensor_list, given, call.group.size())[0]
    like = call.take(first, given)
    inputs = call.take_list(input_tensor_list, given, like, given)
    outputs = call.take_list(output_tensor_list, "output_tensor_list", like, given, writes=True)
    me = call.group.rank()
    call.check_same_size(outputs[me], inputs[me], ("my output", "my input for myself"))
    inputs = apart_from_all(inputs, outputs)
    sizes = [part.numel() for part in inputs], [output.numel() for output in outputs]
    return call.run("all_to_all", inputs, outputs, like, async_op, sizes=sizes)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any,
    input_split_sizes: Any,
    group: ProcessGroup,
    async_op: bool = False,
    title: str = "",
) -> Work | None:
    """Of ``all_to_all_single``."""
    call = Collective("all_to_all_single", group, title=title)
    buffer = call.take(output, "output", writes=True)
    source = call.take(input, "input")
    call.check_alike(buffer, source, ("output", "input"))
    taken = _sizes(call, buffer, output_split_sizes, "output")
    sent = _sizes(call, source, input_split_sizes, "input")
    is_flat = buffer.dim() == source.dim() == 1
    if not is_flat and buffer.shape[1:].numel() != source.shape[1:].numel():
        raise ShapeError(
            "all_to_all_single: the rows of output and input have different sizes",
            where=call.here,
            found=f"output {shape_text(buffer.shape)}, input {shape_text(source.shape)}",
            fix="give both the same shape but for dim 0",
        )
    me = call.group.rank()
    if taken[me] != sent[me]:
        raise ShapeError(
            "all_to_all_single: what this rank takes from itself is not what it sends to itself",
            where=call.here,
            found=f"{taken[me]} elements taken, {sent[me]} sent",
            fix=f"make entry {me} of both split sizes equal",
        )
    source = apart(source, buffer)
    sizes = sent, taken
    return call.run("all_to_all_single", [source], [buffer], source, async_op, sizes=sizes)


def _sizes(
    call: Collective, tensor: torch.Tensor, rows: Sequence[int] | None, role: str
) -> list[int]:
    """How many elements of ``tensor`` belong to each member."""
    name, size = call.verb, call.group.size()
    if rows is None and tensor.dim() and not tensor.shape[0] % size:
        return [tensor.numel() // size] * size  # the common case
    where = f"{call.here} of {size} ranks"
    if tensor.dim() == 0:
        raise ShapeError(
            f"{name} cuts along dim 0, and {role} has none",
            where=where,
            found=f"{role} {shape_text(tensor.shape)}",
            fix=f"pass {role}.view(1), or a tensor with a row per member",
        )
    num_rows = tensor.shape[0]
    row = math.prod(tensor.shape[1:])
    rows = _whole_numbers(rows, f"{role}_split_sizes", name)
    if not rows:
        if num_rows % size:
            raise ShapeError(
                f"{name} cannot cut {role} into {size} equal parts",
                where=where,
                expected=f"{role}.shape[0] a multiple of {size}",
                found=f"{role} {shape_text(tensor.shape)}",
                fix=f"give {role}_split_sizes, or pad dim 0 to {-(-num_rows // size) * size}",
            )
        return [num_rows // size * row] * size
    if len(rows) != size or sum(rows) != num_rows or any(one < 0 for one in rows):
        raise ShapeError(
            f"{name}: {role}_split_sizes do not cut {role} into one part per member",
            where=where,
            expected=f"{size} numbers, none negative, whose sum is {num_rows}",
            found=f"{rows}, whose sum is {sum(rows)}; {role} {shape_text(tensor.shape)}",
        )
    return [one * row for one in rows]


def _whole_numbers(given: Any, argument: str, name: str) -> list[int]:
    """Return split sizes as a list of plain ints; [] for None."""
    if given is None:
        return []
    numbers = find_whole_numbers(given.tolist() if hasattr(given, "tolist") else given)
    if numbers is not None:
        return numbers
    raise KindError(
        f"{name}: {argument} must be whole numbers",
        found=repr(given),
        fix="for example [2, 1, 1], one number per member",
    )

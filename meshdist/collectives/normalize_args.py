"""Check and normalize the arguments of tensor collectives, by their operation specs.

A spec lists the roles of a collective's parameters; the backend operation determines input and
output tensors. ``prepare`` returns a checked call, its ``run`` runs it, and ``run_named`` does both
for a plan or a collective of ``lax``.

Ranks with different operation names raise MismatchError, which lists the names. Otherwise such a
call behaves like the public collective: it waits, uses the fast path if possible, and appears in
torch's profiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.autograd.profiler as profiler

from ..arguments import find_integers
from ..arrays import apart, apart_from_all, shape_text
from ..backends.work import Work
from ..checking.call_sites import run_unnested
from ..errors import KindError, ShapeError
from ..groups.process_group import ProcessGroup
from ..operation_table import OPERATIONS, OperationSpec, TensorLayout
from ..runtime.graph_breaks import untraced
from .collective import Collective
from .registration import num_bytes, recorded


@lru_cache(maxsize=4096)  # the native core also compares names by address
def lax_name(operation: str, leaf_name: str, shape: torch.Size) -> str:
    """Return the operation name of a call of lax: "lax.psum((2, 3) at tree['w'])"."""
    return f"lax.{operation}({tuple(shape)} at {leaf_name})"


def prepare(operation: str, group: Any, *given: Any, op_name: str = "") -> Collective:
    """Return the checked call of a collective, not yet run.

    Args:
        given: the arguments in the order of the operation spec; a root is a group rank.
    """
    recipe = _RECIPES[operation]
    call = Collective(
        operation, group, given[-1] if recipe.root else None, op_name, recipe.is_elementwise
    )
    call.backend_operation = recipe.backend_operation
    recipe.prepare(call, recipe, *given)
    return call


@untraced
def run_named(
    operation: str, group: ProcessGroup, op_name: str, *given: Any, async_op: bool = False
) -> Work | None:
    """Run a collective on plain tensors under ``op_name``; return a Work if ``async_op``."""
    if not profiler._is_profiler_enabled:
        for path in (group.fast_path, group.fast_path_on_device):
            if async_op and path is not None:
                path = path.starting
            if (
                path is not None
                and (work := getattr(path, operation)(*given, op_name)) is not False
            ):
                return work  # type: ignore[no-any-return]
        return run_unnested(operation, _run, operation, group, op_name, given, async_op)
    count = sum(map(num_bytes, given))
    with recorded(f"meshdist::{operation} of {op_name} {group.name} {count} bytes"):
        return run_unnested(operation, _run, operation, group, op_name, given, async_op)


def _run(
    operation: str, group: ProcessGroup, op_name: str, given: Sequence[Any], async_op: bool
) -> Work | None:
    return prepare(operation, group, *given, op_name=op_name).run(async_op)


class _Recipe(NamedTuple):
    """Facts about a collective, for ``prepare``."""

    prepare: Callable[..., None]  # reads and checks the arguments
    backend_operation: str  # the backend operation; the next two fields describe it
    reduces: bool
    root: str
    names: tuple[str, str]  # the written and the read parameter
    is_elementwise: bool  # whether tensors correspond element by element on all ranks


def _in_place(call: Collective, recipe: _Recipe, tensor: Any, *op_and_root: Any) -> None:
    root = recipe.root
    buffer = call.take(tensor, recipe.names[0], writes=root != "to" or call.is_root)
    if recipe.reduces:
        call.take_op(op_and_root[0], buffer)
    if root:
        call.result = [tensor]
        if root == "to":  # other ranks' tensors must not change
            buffer = call.scaled(buffer)
            call.written = [(x, data, buffer) for x, data, _ in call.written]
        elif call.is_root:  # the sent tensor is only read
            call.written.clear()
    call.inputs = call.outputs = [buffer]
    call.noted = buffer


def _several_in_place(call: Collective, recipe: _Recipe, tensors: Any, op: Any) -> None:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    (name, _), given = recipe.names, call.check_list(tensors, recipe.names[0])
    buffers = [call.take(x, name, writes=True) for x in given]
    call.take_op(op, *buffers)
    check_devices(call, buffers, name)
    call.inputs = call.outputs = call.noted = buffers


def _blocks(call: Collective, recipe: _Recipe, output: Any, input: Any, *op: Any) -> None:
    names = recipe.names
    buffer = call.take(output, names[0], writes=True)
    tensor = call.take(input, names[1])
    if op:
        call.take_op(op[0], buffer)
    call.check_alike(buffer, tensor, names)
    if op:
        call.check_blocks(tensor, buffer, names[::-1])
        sent = call.scaled(tensor)
    else:
        call.check_blocks(buffer, tensor, names)
        sent = tensor
        if sent.data_ptr() != buffer.data_ptr() + call.group.rank() * sent.nbytes:
            sent = apart(sent, buffer)  # it may be its own block of the output
    call.inputs, call.outputs, call.noted = [sent], [buffer], tensor


def _to_each(call: Collective, recipe: _Recipe, outputs: Any, tensor: Any) -> None:
    written, read = recipe.names
    block = call.take(tensor, read)
    buffers = call.take_list(outputs, written, block, read, writes=True)
    mine = buffers[call.group.rank()]
    call.check_same_size(mine, block, (f"my {written}", read))
    call.sizes = [block.numel()] * len(buffers), [buffer.numel() for buffer in buffers]
    call.inputs, call.outputs, call.noted = [block], buffers, block


def _to_root(call: Collective, recipe: _Recipe, tensor: Any, outputs: Any, _: int) -> None:
    written, read = recipe.names
    block = call.take(tensor, read)
    buffers = call.take_list(outputs, written, block, read, "destination", writes=True)
    call.result = outputs or [tensor]
    call.inputs, call.outputs, call.noted = [block], buffers, block


def _from_each(call: Collective, recipe: _Recipe, output: Any, inputs: Any, op: Any) -> None:
    written, read = recipe.names
    buffer = call.take(output, written, writes=True)
    call.take_op(op, buffer)
    tensors = call.take_list(inputs, read, buffer, written)
    mine = tensors[call.group.rank()]
    call.check_same_size(mine, buffer, (f"my {read}", written))
    call.inputs, call.outputs, call.noted = list(map(call.scaled, tensors)), [buffer], tensors


def _from_root(call: Collective, recipe: _Recipe, output: Any, inputs: Any, _: int) -> None:
    written, read = recipe.names
    buffer = call.take(output, written, writes=True)
    tensors = call.take_list(inputs, read, buffer, written, "source")
    call.inputs, call.outputs, call.noted = [apart(x, buffer) for x in tensors], [buffer], buffer


def _exchanged_lists(call: Collective, recipe: _Recipe, outputs: Any, inputs: Any) -> None:
    written, read = recipe.names
    first = call.check_list(inputs, read, call.group.size())[0]
    like = call.take(first, read)
    sent = call.take_list(inputs, read, like, read)
    buffers = call.take_list(outputs, written, like, read, writes=True)
    me = call.group.rank()
    call.check_same_size(buffers[me], sent[me], ("my output", "my input for myself"))
    call.sizes = [part.numel() for part in sent], [buffer.numel() for buffer in buffers]
    call.inputs, call.outputs, call.noted = apart_from_all(sent, buffers), buffers, like


def _exchanged_parts(
    call: Collective, recipe: _Recipe, output: Any, input: Any, output_sizes: Any, input_sizes: Any
) -> None:
    names = recipe.names
    buffer = call.take(output, names[0], writes=True)
    source = call.take(input, names[1])
    call.check_alike(buffer, source, names)
    received = _sizes(call, buffer, output_sizes, names[0])
    sent = _sizes(call, source, input_sizes, names[1])
    is_flat = buffer.dim() == source.dim() == 1
    if not is_flat and buffer.shape[1:].numel() != source.shape[1:].numel():
        raise ShapeError(
            f"{call.operation}: the rows of output and input have different sizes",
            where=call.here,
            found=f"output {shape_text(buffer.shape)}, input {shape_text(source.shape)}",
            fix="pass tensors of the same shape except in dimension 0",
        )
    me = call.group.rank()
    if received[me] != sent[me]:
        raise ShapeError(
            f"{call.operation}: this rank sends itself more or fewer elements than it receives",
            where=call.here,
            found=f"{sent[me]} elements sent, {received[me]} received",
            fix=f"make entry {me} of both split sizes equal",
        )
    source = apart(source, buffer)
    call.sizes = sent, received
    call.inputs, call.outputs, call.noted = [source], [buffer], source


_Layouts: TypeAlias = tuple[TensorLayout, TensorLayout]
_PREPARE: dict[_Layouts, Callable[..., None]] = {
    (TensorLayout.IN_PLACE, TensorLayout.ONE): _in_place,
    (TensorLayout.IN_PLACE, TensorLayout.ANY): _several_in_place,
    (TensorLayout.ONE, TensorLayout.ONE): _blocks,
    (TensorLayout.ONE, TensorLayout.EACH): _to_each,
    (TensorLayout.ONE, TensorLayout.AT_ROOT): _to_root,
    (TensorLayout.EACH, TensorLayout.ONE): _from_each,
    (TensorLayout.AT_ROOT, TensorLayout.ONE): _from_root,
    (TensorLayout.EACH, TensorLayout.EACH): _exchanged_lists,
    (TensorLayout.PARTS, TensorLayout.PARTS): _exchanged_parts,
}


def _make_recipe(spec: OperationSpec) -> _Recipe:
    executor = spec.executor
    names = spec.writes, "".join(spec.reads)
    is_elementwise = executor.takes is TensorLayout.IN_PLACE
    prepare = _PREPARE[executor.takes, executor.gives]
    return _Recipe(prepare, executor.name, executor.reduces, executor.root, names, is_elementwise)


_RECIPES = {
    spec.name: _make_recipe(spec)
    for spec in OPERATIONS.values()
    if spec.is_plain and (spec.executor.takes, spec.executor.gives) in _PREPARE
}


def check_devices(call: Collective, tensors: Sequence[torch.Tensor], argument: str) -> None:
    names = (f"an entry of {argument}", f"{argument}[0]")
    for tensor in tensors:
        call.check_same_device(tensor, tensors[0], names)


def _sizes(
    call: Collective, tensor: torch.Tensor, rows: Sequence[int] | None, role: str
) -> list[int]:
    """Return the elements of ``tensor`` per rank, from ``rows`` or equal; or raise."""
    name, size = call.operation, call.group.size()
    if rows is None and tensor.dim() and not tensor.shape[0] % size:
        return [tensor.numel() // size] * size  # the common case
    where = f"{call.here} of {size} ranks"
    if tensor.dim() == 0:
        raise ShapeError(
            f"{name} cannot split {role} because it has no dimensions",
            where=where,
            found=f"{role} {shape_text(tensor.shape)}",
            fix=f"pass {role}.view(1), or a tensor with one row per rank",
        )
    num_rows = tensor.shape[0]
    row_size = math.prod(tensor.shape[1:])
    rows = _integers(rows, f"{role}_split_sizes", name)
    if not rows:
        if num_rows % size:
            raise ShapeError(
                f"{name} cannot split {role} into {size} equal parts",
                where=where,
                expected=f"{role}.shape[0] divisible by {size}",
                found=f"{role} {shape_text(tensor.shape)}",
                fix=f"pass {role}_split_sizes, or pad dimension 0 to {-(-num_rows // size) * size}",
            )
        return [num_rows // size * row_size] * size
    if len(rows) != size or sum(rows) != num_rows or any(count < 0 for count in rows):
        raise ShapeError(
            f"{name}: {role}_split_sizes do not split {role} into one part per rank",
            where=where,
            expected=f"{size} non-negative numbers with the sum {num_rows}",
            found=f"{rows} with the sum {sum(rows)}; {role} {shape_text(tensor.shape)}",
            fix="pass the number of rows for each rank, in group order",
        )
    return [count * row_size for count in rows]


def _integers(given: Any, argument: str, name: str) -> list[int]:
    """Return ``given`` split sizes as a list of ints, [] for None; else raise."""
    if given is None:
        return []
    numbers = find_integers(given.tolist() if hasattr(given, "tolist") else given)
    if numbers is not None:
        return numbers
    raise KindError(
        f"{name}: {argument} must be integers",
        found=repr(given),
        fix="pass one integer per rank, for example [2, 1, 1]",
    )

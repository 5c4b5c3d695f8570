"""Hold the arguments of one operation in a backend's form.

Tensors are dense; a flat tensor may hold consecutive parts for several members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._C import _increment_version as increment_version, _InferenceMode

from ..arrays import find_cupy_sync
from ..checking.calls import Call, CallRecord
from ..checking.recorder import Recorder
from ..errors import GradientError
from ..reduce_ops import Factor, ReduceKind, multiply
from .requests import DONE, Request

Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""The sizes and strides of the dimensions with several elements."""

ROW_MAJOR: Layout = ((), ())
"""The layout of every tensor that is contiguous."""


Tensors: TypeAlias = Sequence[torch.Tensor]
"""Tensors for the members, or a list that one operation transfers together."""

Sizes: TypeAlias = Sequence[int]
"""Numbers of elements of the members."""

_NO_TIME = timedelta()

LARGEST_TAG = (1 << 30) - 3
"""The largest tag of programs; larger tags are reserved for collectives and backends."""

EXCHANGE_TAG = (1 << 30) - 1
"""The reserved tag of the messages of an all-to-all."""

Written: TypeAlias = tuple[Any, torch.Tensor, torch.Tensor]
"""An array that an operation writes: the caller's, a tensor on its memory, and the sent tensor."""

writing = partial(_InferenceMode, True)
"""torch.inference_mode without its Python code: allows writes to parameters, for example."""


def find_layout(tensor: torch.Tensor) -> Layout | None:
    """Return a tensor's layout; None if it has gaps or elements overlap.

    Example:
        >>> find_layout(torch.empty(2, 1, 3).transpose(0, 2))
        ((3, 2), (1, 3))
        >>> find_layout(torch.empty(4, 4)[:, :2]) is None
        True
    """
    if tensor.is_contiguous():
        return ROW_MAJOR
    dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    expected = 1
    for step, n in sorted((step, n) for n, step in dims):
        if step != expected:
            return None
        expected *= n
    return tuple(n for n, _ in dims), tuple(step for _, step in dims)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a tensor with a layout, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def parts(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Return flat views of consecutive parts, of ``sizes`` elements, of a contiguous tensor."""
    return list(tensor.view(-1).split_with_sizes(list(sizes)))


def parts_like(whole: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """Return views of consecutive parts of ``whole``, as large as ``tensors``."""
    return parts(whole, [tensor.numel() for tensor in tensors])


def blocks(tensor: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Return flat views of ``num_blocks`` equal parts of a contiguous tensor."""
    return tensor.view(num_blocks, tensor.numel() // num_blocks).unbind()


def packed(tensors: Tensors) -> torch.Tensor:
    """Concatenate the elements of ``tensors`` in a new flat tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def write(output: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into a contiguous ``output``."""
    with writing():
        output.view(-1).copy_(data.view(-1))


def write_all(outputs: Tensors, data: Tensors) -> None:
    """Copy each tensor of ``data`` into the contiguous output at its index."""
    with writing():
        for output, part in zip(outputs, data, strict=True):
            output.view(-1).copy_(part.view(-1))


def write_blocks(outputs: Tensors, whole: torch.Tensor) -> None:
    """Copy the equal parts of ``whole`` into the outputs, if any."""
    if outputs:
        write_all(outputs, blocks(whole, len(outputs)))


def cuts(count: int, num_parts: int) -> list[int]:
    """Return sizes of ``num_parts`` parts of ``count`` elements, equal up to 1.

    Example:
        >>> cuts(7, 3)
        [3, 2, 2]
    """
    least, more = divmod(count, num_parts)
    return [least + (part < more) for part in range(num_parts)]


class OperationArgs:
    """Arguments of one call, for a device group and a backend.

    Args:
        operation: the public name of the collective; "" for a call that meshdist makes itself.
        backend_operation: the name of the communicator's operation that runs it.
        inputs: one tensor, a tensor per member, or a list that is sent together.
        outputs: this member's result, in any of these forms.
        noted: the tensor or tensors whose dtype and size members compare.
        op: the backend's reduction.
        root: the group rank of the root, or of a message's peer (None: any).
        sizes: numbers of elements to send to and receive from each member, if these may differ.
    """

    # Tensors have no gradient and are contiguous; in an elementwise operation they may have another
    # order, if the backend takes layouts. An in-place operation has equal inputs and outputs.

    # Most calls use the defaults of the class, which cost a call nothing.
    operation: str = ""
    backend_operation: str = ""
    inputs: Tensors = ()
    outputs: Tensors = ()
    noted: Any = None
    op: ReduceKind | None = None
    root: int | None = None
    sizes: tuple[Sizes, Sizes] | None = None
    tag: int = 0
    device: torch.device | None = None
    """The device of a barrier; None means the connected device."""
    op_name: str = ""
    """The plan or collective that it belongs to, equal on all members; "" if none."""
    limit: timedelta | None = None
    """Its timeout, which overrides the group's."""
    written: Sequence[Written] = ()
    """The arrays that it writes."""
    foreign: Sequence[Any] = ()
    """The arrays of libraries other than torch that it reads or writes."""
    result: Sequence[Any] | None = None
    """The arrays that its Work returns, if these are more than the written arrays."""
    factor: Factor | None = None
    """The factor of PREMUL_SUM, by which ``outputs`` are multiplied before the call."""
    noted_op: ReduceKind | None = None
    """The reduction that members compare."""
    then: Callable[[], None] | None = None
    """Completes the result once the backend is done."""
    lies_otherwise: bool = False
    """Whether tensors of an elementwise operation are sent in another order than row-major."""
    shows_all: bool = True
    """Whether ``backend_operation`` and tensors determine all that must be equal on all members."""
    is_message: bool = False
    """Whether it is recorded and compared as a send or receive."""

    # A device group fills these in.
    call: Call | None = None
    """The call that members compare; None for a call that a backend makes itself."""
    timeout: timedelta = _NO_TIME
    waits: bool = False
    """Whether its caller waits immediately."""
    sequence: int = 0
    """Its number among the group's collectives, or a message's in the recorder."""
    number: int | None = None
    """The number of its record; None for a call that a backend makes itself."""
    recorder: Recorder | None = None
    request: Request = DONE
    """The request that the backend has started."""
    is_elsewhere: bool = False
    """Whether a written array is transferred through another tensor."""

    def __init__(
        self,
        operation: str,
        backend_operation: str,
        inputs: Tensors,
        outputs: Tensors,
        noted: Any = None,
        op: ReduceKind | None = None,
        root: int | None = None,
        sizes: tuple[Sizes, Sizes] | None = None,
        tag: int = 0,
    ) -> None:
        self.operation, self.backend_operation = operation, backend_operation
        self.inputs, self.outputs, self.noted = inputs, outputs, noted
        self.op, self.root, self.sizes, self.tag = op, root, sizes, tag

    @property
    def note(self) -> CallRecord | None:
        return None if self.recorder is None else self.recorder.find_note(self.number)

    def as_own(self, timeout: timedelta) -> OperationArgs:
        """Set ``timeout`` and ``waits`` for a call that meshdist makes itself; return self."""
        self.timeout, self.waits = timeout, True
        return self

    def by(
        self,
        backend_operation: str,
        inputs: Tensors,
        outputs: Tensors,
        op: ReduceKind | None = None,
        root: int | None = None,
        sizes: tuple[Sizes, Sizes] | None = None,
        tag: int = 0,
    ) -> OperationArgs:
        """Return a call of ``backend_operation`` on other tensors, with this record and timeout."""
        other = OperationArgs(
            self.operation, backend_operation, inputs, outputs, self.noted, op, root, sizes, tag
        )
        other.shows_all, other.call = False, self.call
        other.timeout, other.waits = self.timeout, self.waits
        other.sequence, other.number, other.recorder = self.sequence, self.number, self.recorder
        return other

    def as_async(self) -> OperationArgs:
        """Set that the caller does not wait immediately; return self."""
        self.waits = False
        return self

    def begin_here(self) -> None:
        """Count a version of each written array in autograd; multiply outputs by the factor."""
        # A backward that needs the overwritten values then raises instead of being wrong.
        for array, data, travelling in self.written:
            increment_version((data,))  # twice as fast as the function in torch.autograd.graph
            if array is not travelling:
                self.is_elsewhere = True
        if self.factor is not None:
            for output in self.outputs:
                multiply(output, self.factor)

    def travel_as(self, tensors: Tensors, *, are_copies: bool) -> None:
        """Replace inputs and outputs by ``tensors``, flat views or copies."""
        if are_copies:
            copies = {id(x): copy for x, copy in zip(self.inputs, tensors, strict=True)}
            self.written = [(x, data, copies[id(sent)]) for x, data, sent in self.written]
        self.inputs = self.outputs = tensors

    def find_copy_back(self) -> Callable[[], None] | None:
        """Return a function that copies the result to the caller's arrays; None if needless."""
        if not self.is_elsewhere:
            return None
        elsewhere = [array for array in self.written if array[0] is not array[2]]
        for _, data, _ in elsewhere:
            if torch.is_grad_enabled() and data.requires_grad and data.grad_fn is not None:
                # Its backward must raise: the operation overwrites a value that autograd needs.
                _Overwritten.apply(data, self.operation)  # type: ignore[no-untyped-call]

        def copy_back() -> None:
            for _, data, buffer in elsewhere:
                if data.data_ptr() != buffer.data_ptr() or data.stride() != buffer.stride():
                    with writing():
                        data.copy_(buffer)

        return copy_back

    def finish_here(self) -> None:
        """Copy the result to the caller's arrays; make CuPy's streams wait for torch's."""
        if copy_back := self.find_copy_back():
            copy_back()
        if self.foreign and (sync_cupy := find_cupy_sync(self.foreign)):
            sync_cupy()


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, operation: str) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        ctx.operation = operation
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise GradientError(
            f"{ctx.operation} cannot be differentiated: it overwrote a tensor with gradient "
            "history",
            expected="a differentiable collective",
            fix="use meshdist.lax.psum(x, axis, mesh=mesh), which returns a new tensor; or call "
            f"{ctx.operation} on x.detach(), so that gradients ignore the call",
        )

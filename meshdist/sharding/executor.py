"""Run a plan's steps on this rank: pack, communicate, unpack.

Flat buffers are packed and unpacked with at most one strided copy per part. Constructors prepare
each plan once, so that calls run little Python. Methods that may return a view say so.

Worked example: two boxes of a 3 x 4 array, A for one member and B for another, are packed.

                                         x in memory    0 1 2 3 4 5 6 7 8 9 10 11
     0   1  [ 2   3 ]  A: rows 0:2,                         A A     A A B B B
     4   5  [ 6   7 ]     columns 2:4    the buffer     2 3 6 7 | 8 9 10
    [8   9  10]  11    B: row 2:3,                         A         B
                          columns 0:3

          sizes    offset, in x     strides, in x    at, in the buffer    packed: strides there
    A     2, 2     0 * 4 + 2 = 2    4, 1             0                    2, 1
    B     1, 3     2 * 4 + 0 = 8    4, 1             2 * 2 = 4            3, 1

So each box is one strided copy, into the buffer and out of it. Boxes that follow one another in
memory, as whole rows do, need none: the buffer is then a view of the array.

    >>> x = torch.arange(12).view(3, 4)
    >>> a_and_b = Boxes((3, 4), [((0, 2), (2, 4)), ((2, 3), (0, 3))])
    >>> a_and_b.pack(x).tolist()
    [2, 3, 6, 7, 8, 9, 10]
    >>> rows = Boxes((3, 4), [((0, 1), (0, 4)), ((1, 3), (0, 4))])
    >>> rows.pack(x).data_ptr() == x.data_ptr()
    True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import itemgetter, methodcaller
from typing import Any, TypeAlias

import torch

from ..collectives.normalize_args import run_named
from ..collectives.torch_private import call_function
from ..functional.linear_function import LinearFunction
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..mesh.placement import Box, Placement, index_of, shape_of, volume
from ..operation_table import OPERATIONS, Role
from ..reduce_ops import ReduceOp
from ..runtime.memory import new_like
from .lowering import root_exchanges
from .steps import Arrangement, CollectiveStep, Exchange, Pad, Step, Take


def fresh_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor in new memory."""
    return new_like(x).copy_(x)


class Rearrangement:
    """Callable that applies an ``Arrangement`` (reshape, index, permute) to one shape."""

    __slots__ = ("_index", "_is_plain", "_order", "_shape", "_sizes", "_view")

    def __init__(self, arrangement: Arrangement) -> None:
        self._is_plain = arrangement.is_plain
        self._view = arrangement.view
        self._shape = arrangement.shape
        taken = arrangement.taken
        self._index = None
        if any(index is not None for index in taken):
            self._index = tuple(slice(None) if index is None else index for index in taken)
        kept = [size for size, index in zip(arrangement.view, taken, strict=True) if index is None]
        self._order = arrangement.order
        self._sizes = tuple(kept[dim] for dim in arrangement.order)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` rearranged and contiguous: a view if possible, else new memory."""
        if self._is_plain and x.is_contiguous():
            return x.view(self._shape)
        out = new_like(x, self._shape)
        parts = x.reshape(self._view)
        if self._index is not None:
            parts = parts[self._index]
        out.view(self._sizes).copy_(parts.permute(self._order))
        return out


class Boxes:
    """Non-empty boxes of a local array, packed in a flat buffer of ``total`` items."""

    __slots__ = ("_boxes", "_parts", "_start", "total")

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]) -> None:
        strides = _row_major(shape)
        volumes = [volume(box) for box in boxes]
        self.total = sum(volumes)
        self._boxes = [index_of(box) for box in boxes]
        # Per box: sizes, then strides and start in a contiguous array and in the buffer.
        self._parts = []
        at = 0
        for box, size in zip(boxes, volumes, strict=True):
            sizes = shape_of(box)
            offset = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
            self._parts.append((sizes, strides, offset, _row_major(sizes), at))
            at += size
        offsets = [part[2] for part in self._parts]
        is_run = all(_is_run(box, shape) for box in boxes) and all(
            before + size == after
            for (before, after), size in zip(pairwise(offsets), volumes, strict=False)
        )
        self._start = offsets[0] if is_run and offsets else None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the boxes in one flat buffer: a view of ``x`` if adjacent, else new memory."""
        run = self.find_run(x)
        if run is not None:
            return run
        flat = new_like(x, (self.total,))
        if x.is_contiguous():
            origin = x.storage_offset()
            for sizes, strides, offset, packed, at in self._parts:
                part = x.as_strided(sizes, strides, origin + offset)
                flat.as_strided(sizes, packed, at).copy_(part)
        else:
            for part, index in zip(self.parts(flat), self._boxes, strict=True):
                part.copy_(x[index])
        return flat

    def find_run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the boxes as a flat view of ``x``, or None if they are not adjacent in it."""
        start = self._start
        if start is None or not x.is_contiguous():
            return None
        return x.view(-1).narrow(0, start, self.total)

    def unpack(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the boxes from the buffer ``flat`` into ``out``, which must be contiguous."""
        for sizes, strides, offset, packed, at in self._parts:
            out.as_strided(sizes, strides, offset).copy_(flat.as_strided(sizes, packed, at))

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of ``flat`` for each box, in the box's shape."""
        return [flat.as_strided(sizes, packed, at) for sizes, _, _, packed, at in self._parts]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array.

    Example:
        >>> _row_major((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _is_run(box: Box, shape: Sequence[int]) -> bool:
    """Return whether a box is adjacent in a contiguous array of this shape.

    Example:
        >>> _is_run(((1, 3), (0, 4)), (5, 4)), _is_run(((1, 3), (0, 2)), (5, 4))
        (True, False)
    """
    sizes = shape_of(box)
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    return sizes[first + 1 :] == tuple(shape[first + 1 :])


_Action: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class PlanExecutor:
    """Callable that runs steps on a local array; its constructor opens their groups.

    Args:
        shape: of the local array before the steps.
        op_name: equal on all ranks, to compare the steps' collectives.
    """

    __slots__ = ("_actions", "_is_fresh")

    def __init__(
        self, steps: Sequence[Step], shape: tuple[int, ...], mesh: DeviceMesh, op_name: str
    ) -> None:
        self._actions: list[_Action] = []
        self._is_fresh = False
        for step in steps:
            self._actions.append(self._action(step, shape, mesh, op_name))
            self._is_fresh = not isinstance(step, Take)
            shape = step.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result of the steps on ``x``: contiguous, new memory, no gradient."""
        if x.is_complex() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        for action in self._actions:
            x = action(x)
        return x if self._is_fresh else fresh_copy(x)

    def _action(
        self, step: Step, shape: tuple[int, ...], mesh: DeviceMesh, op_name: str
    ) -> _Action:
        if isinstance(step, Take):
            return itemgetter(index_of(step.box))
        if isinstance(step, Pad):
            return _PadAction(step)
        assert isinstance(step, (CollectiveStep, Exchange)), step
        group = mesh[tuple(mesh.axis_names[axis] for axis in step.axes)].open_group()
        if isinstance(step, CollectiveStep):
            return _CollectiveAction(step, group, op_name, is_fresh=self._is_fresh)
        return _ExchangeAction(step, shape, group, op_name)


class _PadAction:
    def __init__(self, step: Pad) -> None:
        self._shape = step.shape
        self._index = None if step.box is None else index_of(step.box)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = new_like(x, self._shape).zero_()
        if self._index is not None:
            out[self._index] = x
        return out


class _CollectiveAction:
    def __init__(
        self, step: CollectiveStep, group: ProcessGroup, op_name: str, *, is_fresh: bool
    ) -> None:
        spec = OPERATIONS[step.operation]
        self._call = step.operation, group, op_name
        self._rest = (ReduceOp.SUM,) if spec.reduces else (None,) * len(spec.named(Role.SIZES))
        self._is_in_place, self._is_fresh = not spec.reads, is_fresh
        self._shape = step.part if spec.reduces else (step.size, *step.part)
        self._pack = torch.Tensor.contiguous if step.pack is None else Rearrangement(step.pack)
        # Never return a view: autograd rejects writes to a view that a custom Function returned.
        self._unpack: _Action | None = None
        if step.unpack is not None:
            is_plain, shape = step.unpack.is_plain, step.unpack.shape
            self._unpack = (
                methodcaller("resize_", shape) if is_plain else Rearrangement(step.unpack)
            )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_in_place:
            total = x if self._is_fresh else new_like(x).copy_(x)
            run_named(*self._call, total, *self._rest)
            return total
        received = new_like(x, self._shape)
        run_named(*self._call, received, self._pack(x), *self._rest)
        return received if self._unpack is None else self._unpack(received)


class _ExchangeAction:
    """Callable that exchanges boxes with members, copied or summed into a new array."""

    def __init__(
        self, step: Exchange, shape: tuple[int, ...], group: ProcessGroup, op_name: str
    ) -> None:
        self._shape = step.shape
        self._is_covered = step.is_covered
        self._sends = Boxes(shape, [box for _, box in step.sends])
        self._receives = Boxes(step.shape, [box for _, box in step.receives])
        given, received = [0] * step.size, [0] * step.size
        for sizes, parts in ((given, step.sends), (received, step.receives)):
            for peer, box in parts:
                sizes[peer] = volume(box)
        self._own = tuple(map(index_of, step.own or ()))  # indices in the input and the result
        self._call = "all_to_all_single", group, op_name
        self._rows = received, given
        numbers = {peer: number for number, (peer, _) in enumerate(step.receives)}
        # For each box of the result, the received boxes that are its partial sums; None is this
        # rank's partial sum.
        sums = step.sums if step.is_summed else ()
        self._sums = [(index_of(box), [*map(numbers.get, peers)]) for box, peers in sums]
        self._is_summed = step.is_summed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = new_like(x, self._shape)
        if not self._is_covered:
            out.zero_()
        landing = None if self._is_summed else self._receives.find_run(out)
        packed = self._sends.pack(x)
        received = new_like(x, (self._receives.total,)) if landing is None else landing
        run_named(*self._call, received, packed, *self._rows)
        if self._is_summed:
            self._add_up(x, self._receives.parts(received), out)
            return out
        if landing is None:
            self._receives.unpack(received, out)
        if self._own:
            out[self._own[1]] = x[self._own[0]]
        return out

    def _add_up(self, x: torch.Tensor, received: list[torch.Tensor], out: torch.Tensor) -> None:
        """Write each box's sum into ``out``, added in the order of the group's members."""
        for index, numbers in self._sums:
            total = out[index]
            for turn, number in enumerate(numbers):
                partial_sum = x[self._own[0]] if number is None else received[number]
                if turn:
                    total.add_(partial_sum)
                else:
                    total.copy_(partial_sum)


def gather_to_root(
    x: torch.Tensor, mesh: DeviceMesh, placement: Placement, root: int, op_name: str
) -> torch.Tensor | None:
    """Return the global array in new memory on the root, else None; inverse of ``scatter``.

    Args:
        placement: without unreduced axes.
        op_name: equal on all ranks, for reports.
    """
    # Of replicas, only ranks with the root's coordinates along the free axes send, so that the
    # group contains only the axes that cut dims.
    here, there = mesh.get_coordinate() or (), mesh.layout.coordinate_of(root) or ()
    if any(here[axis] != there[axis] for axis in placement.free_axes):
        return None
    steps = (root_exchanges(placement, here, there)[0],) if placement.cut_axes else ()
    found = PlanExecutor(steps, tuple(x.shape), mesh, op_name)(x)
    return found if here == there else None


def scatter(
    x: torch.Tensor, mesh: DeviceMesh, placement: Placement, root: int, op_name: str
) -> torch.Tensor:
    """Return this rank's part of an array that the root holds, differentiably; collective.

    Args:
        x: the global array on the root; elsewhere an empty tensor of its dtype and device.
        placement: has no free (replicating) axis. Along an unreduced axis, coordinate 0 gets the
            values and the others zeros.
        op_name: equal on all ranks, for reports.
    """
    here = mesh.get_coordinate() or ()
    gather, send = root_exchanges(placement, here, mesh.layout.coordinate_of(root) or ())
    executors = (
        PlanExecutor((send,), tuple(x.shape), mesh, op_name),
        PlanExecutor((gather,), send.shape, mesh, f"gradient of {op_name}"),
    )
    return call_function(_Rooted, x, *executors)


class _Rooted(LinearFunction):
    @staticmethod
    def forward(x: torch.Tensor, executor: PlanExecutor, transpose: PlanExecutor) -> torch.Tensor:
        return executor(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_Rooted, grad, *reversed(ctx.rest)), None, None

"""A plan's steps as this rank takes them: what is packed, what is called, what is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ..collectives.titled import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    reduce_scatter_tensor,
)
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..mesh.splits import index_of, volume
from ..runtime.buffer_pool import new_like
from .packing import Boxes, Rearrangement, fresh_copy
from .steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Pad,
    ReduceScatter,
    Step,
    SummedExchange,
    Take,
)

__all__ = ["Carrier"]

_Action: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Carrier:
    """Carries out the steps of this rank's plan; making one opens their groups, collectively.

    Args:
        shape: of its local array before the steps.
        title: under which the steps' verbs are entered, equal on all ranks.
    """

    __slots__ = ("_actions", "_is_fresh")

    def __init__(
        self, steps: Sequence[Step], shape: tuple[int, ...], mesh: DeviceMesh, title: str
    ) -> None:
        self._actions: list[_Action] = []
        self._is_fresh = False
        for step in steps:
            self._actions.append(self._action(step, shape, mesh, title))
            self._is_fresh = not isinstance(step, Take)
            shape = step.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result of the steps on ``x``: contiguous, in new memory, without a gradient."""
        if x.is_complex() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        for action in self._actions:
            x = action(x)
        return x if self._is_fresh else fresh_copy(x)

    def _action(self, step: Step, shape: tuple[int, ...], mesh: DeviceMesh, title: str) -> _Action:
        if isinstance(step, Take):
            return _Take(step)
        if isinstance(step, Pad):
            return _Pad(step)
        group = _open_group(mesh, step.axes)
        if isinstance(step, AllReduce):
            return _AllReduce(group, title, is_in_place=self._is_fresh)
        if isinstance(step, AllGather):
            return _AllGather(step, group, title)
        if isinstance(step, ReduceScatter):
            return _ReduceScatter(step, group, title)
        if isinstance(step, AllToAll):
            return _AllToAll(step, group, title)
        if isinstance(step, SummedExchange):
            return _SummedExchange(step, shape, group, title)
        return _Exchange(step, shape, group, title)


def _open_group(mesh: DeviceMesh, axes: Sequence[int]) -> ProcessGroup:
    return mesh[tuple(mesh.axis_names[axis] for axis in axes)].open_group()


class _Take:
    def __init__(self, step: Take) -> None:
        self._index = index_of(step.box)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._index]


class _Pad:
    def __init__(self, step: Pad) -> None:
        self._shape = step.shape
        self._index = None if step.box is None else index_of(step.box)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = new_like(x, self._shape).zero_()
        if self._index is not None:
            out[self._index] = x
        return out


class _AllReduce:
    def __init__(self, group: ProcessGroup, title: str, *, is_in_place: bool) -> None:
        self._group = group
        self._title = title
        self._is_in_place = is_in_place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = x if self._is_in_place else fresh_copy(x)
        all_reduce(total, self._group, self._title)
        return total


class _AllGather:
    def __init__(self, step: AllGather, group: ProcessGroup, title: str) -> None:
        self._shape = (step.size, *step.part)
        self._unpack = Rearrangement(step.unpack)
        self._group = group
        self._title = title

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gathered = new_like(x, self._shape)
        all_gather_into_tensor(gathered, x.contiguous(), self._group, self._title)
        return self._unpack.of_received(gathered)


class _ReduceScatter:
    def __init__(self, step: ReduceScatter, group: ProcessGroup, title: str) -> None:
        self._pack = Rearrangement(step.pack)
        self._shape = step.shape
        self._group = group
        self._title = title

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        total = new_like(x, self._shape)
        reduce_scatter_tensor(total, self._pack(x), self._group, self._title)
        return total


class _AllToAll:
    def __init__(self, step: AllToAll, group: ProcessGroup, title: str) -> None:
        self._pack = Rearrangement(step.pack)
        self._unpack = Rearrangement(step.unpack)
        self._group = group
        self._title = title

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        packed = self._pack(x)
        received = new_like(packed)
        all_to_all_single(received, packed, None, None, self._group, self._title)
        return self._unpack.of_received(received)


class _Exchange:
    """Boxes to and from the members of a group; what stays is copied beside them."""

    def __init__(
        self, step: Exchange, shape: tuple[int, ...], group: ProcessGroup, title: str
    ) -> None:
        self._shape = step.shape
        self._is_covered = step.is_covered
        self._sends = Boxes(shape, [box for _, box in step.sends])
        self._receives = Boxes(step.shape, [box for _, box in step.receives])
        self._send_sizes = [0] * step.size
        self._receive_sizes = [0] * step.size
        for sizes, parts in ((self._send_sizes, step.sends), (self._receive_sizes, step.receives)):
            for place, box in parts:
                sizes[place] = volume(box)
        self._kept = tuple(map(index_of, step.kept or ()))  # in the array before, in the result
        self._group = group
        self._title = title

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = new_like(x, self._shape)
        if not self._is_covered:
            out.zero_()
        landing = self._receives.find_run(out)
        received = self._received(x, landing)
        if landing is None:
            self._receives.unpack(received, out)
        if self._kept:
            out[self._kept[1]] = x[self._kept[0]]
        return out

    def _received(self, x: torch.Tensor, landing: torch.Tensor | None) -> torch.Tensor:
        """All boxes that come from the group, in a flat buffer; ``landing`` where it is given."""
        packed = self._sends.pack(x)
        received = new_like(x, (self._receives.total,)) if landing is None else landing
        all_to_all_single(
            received, packed, self._receive_sizes, self._send_sizes, self._group, self._title
        )
        return received


class _SummedExchange(_Exchange):
    """The same where received boxes are summands, added in the order of the group's members."""

    def __init__(
        self, step: SummedExchange, shape: tuple[int, ...], group: ProcessGroup, title: str
    ) -> None:
        super().__init__(step, shape, group, title)
        numbers = {place: number for number, (place, _) in enumerate(step.receives)}
        # Per box of the result, which of the received boxes are its summands; None is the own one.
        self._sums = [
            (index_of(box), [numbers.get(place) for place in places]) for box, places in step.sums
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        received = self._receives.parts(self._received(x, None))
        out = new_like(x, self._shape)
        if not self._is_covered:
            out.zero_()
        for index, numbers in self._sums:
            total = out[index]
            for turn, number in enumerate(numbers):
                summand = x[self._kept[0]] if number is None else received[number]
                if turn:
                    total.add_(summand)
                else:
                    total.copy_(summand)
        return out

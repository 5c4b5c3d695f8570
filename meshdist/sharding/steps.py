"""The steps of a plan: what one rank does to its local array, one step after the other.

Each step takes the local array that the step before it gave, and tells the shape that it gives.
Boxes are (start, stop) per dim of a local array. ``axes`` are indices of the plan's mesh axes, in
mesh order; the group of a step is the ranks along them, row-major, and a *place* is a rank's index
in it. Every member of that group has a step of the same class at the same point of its plan, also
where it has nothing to send. Numbers are elements: bytes are these times the size of one element.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

from ..mesh.splits import Box, shape_of, volume

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Arrangement",
    "Box",
    "Exchange",
    "Pad",
    "Part",
    "ReduceScatter",
    "Step",
    "SummedExchange",
    "Take",
]

Part = tuple[int, Box]
"""A place in a step's group, and the box that goes there or comes from there."""


@dataclass(frozen=True)
class Arrangement:
    """A view of an array whose dims are split, taken from, permuted and merged again.

    In NumPy's words: ``x.reshape(view)[taken].transpose(order).reshape(shape)``, which costs one
    strided copy, or none where ``is_plain``.

    Args:
        view: the sizes after the split.
        taken: per dim of the view an index to take, which drops the dim, or None to keep it all.
        order: the dims that are left, in their new order.
        shape: the shape in the end.
    """

    view: tuple[int, ...]
    taken: tuple[int | None, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def is_plain(self) -> bool:
        """Whether it keeps all elements in their order, so that a reshape alone does it."""
        sizes = self.view
        if any(index is not None and sizes[dim] != 1 for dim, index in enumerate(self.taken)):
            return False
        kept = [sizes[dim] for dim, index in enumerate(self.taken) if index is None]
        moved = [dim for dim in self.order if kept[dim] != 1]
        return moved == sorted(moved)


@dataclass(frozen=True)
class Take:
    """Keep one box of the local array. Nothing is sent."""

    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape afterwards."""
        return shape_of(self.box)


@dataclass(frozen=True)
class Pad:
    """Put the local array into zeros, as a summand of a value that becomes unreduced.

    Args:
        shape: the local shape afterwards.
        box: where the whole local array goes; None where another rank keeps the value and this
            one has zeros alone.
    """

    shape: tuple[int, ...]
    box: Box | None


@dataclass(frozen=True)
class _SendingStep(ABC):
    """A step in which a rank sends as much as it receives, to and from each other member."""

    axes: tuple[int, ...]
    size: int
    place: int

    @property
    @abstractmethod
    def received(self) -> int:
        """Elements received; a rank's own part does not travel."""

    @property
    def sent(self) -> int:
        """Elements sent."""
        return self.received

    @property
    def num_peers(self) -> int:
        """How many members send to this rank."""
        return self.size - 1


@dataclass(frozen=True)
class AllReduce(_SendingStep):
    """Sum the local arrays of the group; every member has the sum."""

    shape: tuple[int, ...]

    @property
    def received(self) -> int:
        """Elements received: the others' summands of this rank's part, then the others' parts."""
        count = math.prod(self.shape)
        share = count // self.size + (self.place < count % self.size)
        return (self.size - 1) * share + count - share

    @property
    def num_peers(self) -> int:
        """How many members send to this rank, counted once for each of the two halves."""
        return 2 * (self.size - 1)


@dataclass(frozen=True)
class AllGather(_SendingStep):
    """Gather the local arrays of the group, which have equal shapes, on every member.

    Args:
        part: the local shape before.
        unpack: from the gathered buffer, the members' arrays in group order, to the result.
    """

    part: tuple[int, ...]
    unpack: Arrangement

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape afterwards."""
        return self.unpack.shape

    @property
    def received(self) -> int:
        """Elements received."""
        return (self.size - 1) * math.prod(self.part)


@dataclass(frozen=True)
class ReduceScatter(_SendingStep):
    """Sum the local arrays of the group; each member has an equal part of the sum.

    Args:
        pack: from the local array to the buffer, whose first dim is the group: a part per member.
        shape: the local shape afterwards: one part.
    """

    pack: Arrangement
    shape: tuple[int, ...]

    @property
    def received(self) -> int:
        """Elements received."""
        return (self.size - 1) * math.prod(self.shape)


@dataclass(frozen=True)
class AllToAll(_SendingStep):
    """Exchange equal parts between all members of the group, this rank's own part included.

    Args:
        pack: from the local array to the buffer, whose first dim is the group: a part per member.
        unpack: from the received buffer, laid out alike, to the result.
    """

    pack: Arrangement
    unpack: Arrangement

    @property
    def shape(self) -> tuple[int, ...]:
        """The local shape afterwards."""
        return self.unpack.shape

    @property
    def received(self) -> int:
        """Elements received."""
        return math.prod(self.pack.shape[1:]) * (self.size - 1)


@dataclass(frozen=True)
class Exchange(_SendingStep):
    """Send boxes to members of the group and receive boxes from them.

    Args:
        sends: per member that gets something its place and the box of the local array before, by
            place; at most one box each.
        receives: per member that sends something its place and the box of the result, by place.
        kept: the box of the local array, and the box of the result, that stay on this rank.
        shape: the local shape afterwards.
        is_covered: whether boxes and ``kept`` fill the result; else the rest of it is zeros.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    kept: tuple[Box, Box] | None
    shape: tuple[int, ...]
    is_covered: bool = field(default=True, kw_only=True)

    @cached_property
    def received(self) -> int:
        """Elements received."""
        return sum(volume(box) for _, box in self.receives)

    @cached_property
    def sent(self) -> int:
        """Elements sent."""
        return sum(volume(box) for _, box in self.sends)

    @property
    def num_peers(self) -> int:
        """How many members send to this rank."""
        return len(self.receives)


@dataclass(frozen=True)
class SummedExchange(Exchange):
    """An exchange whose received boxes are summands: equal boxes of the result are added.

    Two boxes of the result are equal or disjoint, ``kept`` among them.
    """

    @cached_property
    def sums(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Per box of the result the places of its summands, ascending, this rank's among them.

        Added in this order, a sum has equal bits on every rank that makes it.
        """
        places: dict[Box, list[int]] = {}
        kept = [] if self.kept is None else [(self.place, self.kept[1])]
        for place, box in sorted([*self.receives, *kept]):
            places.setdefault(box, []).append(place)
        return tuple((box, tuple(found)) for box, found in places.items())


Step = Take | Pad | AllReduce | AllGather | ReduceScatter | AllToAll | Exchange | SummedExchange

"""The steps of a plan: what one rank does to its local array, step by step.

There are four kinds. Each says its price and its words, and ``executor`` has an action for each. A
step takes the local array that the step before it gave, and ``shape`` is what it gives. Boxes are
(start, stop) per dim of a local array. ``axes`` are indices of the plan's mesh axes, in mesh order;
the group of a step is the ranks along them, row-major, and a *place* is a rank's index in it. Every
member of that group has a step of the same kind at the same point of its plan, also where it has
nothing to send.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..mesh.placement import Box, box_text, volume
from ..operation_table import OPERATIONS

Part = tuple[int, Box]
"""A place in a step's group, and the box that goes there or comes from there."""


@dataclass(frozen=True)
class Arrangement:
    """A view of an array whose dims are split, taken from, permuted and merged again.

    Args:
        taken: per dim of the view an index to take, which drops the dim, or None to keep it all.
        order: the dims that are left, in their new order.
        shape: the shape in the end.
    """

    # In NumPy's words: x.reshape(view)[taken].transpose(order).reshape(shape), which costs one
    # strided copy, or none where it is plain.
    view: tuple[int, ...]
    taken: tuple[int | None, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def is_plain(self) -> bool:
        """Return whether all elements stay in their order, so that a reshape alone is enough."""
        sizes = self.view
        if any(index is not None and sizes[dim] != 1 for dim, index in enumerate(self.taken)):
            return False
        kept = [sizes[dim] for dim, index in enumerate(self.taken) if index is None]
        moved = [dim for dim in self.order if kept[dim] != 1]
        return moved == sorted(moved)


class Price(NamedTuple):
    """The cost of a step for one rank, counted in elements.

    Args:
        num_peers: the number of members that send to this rank, in turn.
        buffered: elements packed and received beside the step's input and its result.
    """

    received: int = 0  # a rank's own part does not travel
    sent: int = 0
    num_peers: int = 0
    buffered: int = 0


@dataclass(frozen=True)
class Step(ABC):
    """A step of a plan, with its result's shape, its cost and its words for reports."""

    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the step's kind, or of its collective."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def price(self) -> Price:
        """The cost of the step for this rank."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The step in a few words, for reports."""


@dataclass(frozen=True)
class Take(Step):
    """A step that keeps one box of the local array."""

    box: Box
    price = Price()

    @property
    def words(self) -> str:
        """The step as text: "keep [0:4, 0:2]"."""
        return f"keep {box_text(self.box)}"


@dataclass(frozen=True)
class Pad(Step):
    """A step that puts the local array into zeros, as a partial sum of a value that becomes
    unreduced.

    Args:
        box: the part of the result that gets the local array; None where another rank keeps the
            value and this rank has zeros alone.
    """

    box: Box | None
    price = Price()

    @property
    def words(self) -> str:
        """The box that the zeros surround, as text."""
        return "zeros" if self.box is None else f"zeros around {box_text(self.box)}"


@dataclass(frozen=True)
class GroupStep(Step):
    """A step in which the members of a group send and receive."""

    axes: tuple[int, ...]
    size: int
    place: int


@dataclass(frozen=True)
class CollectiveStep(GroupStep):
    """A step in which a collective moves equal parts between all members.

    Args:
        collective: a name in ``OPERATIONS``.
        part: the shape of the part that goes to, or comes from, each member.
        pack: from the local array to a part for each member, which are sent; None sends it as it
            lies.
        unpack: from the received parts, in group order, to the result; None where they are that.
    """

    operation: str
    part: tuple[int, ...]
    pack: Arrangement | None = None
    unpack: Arrangement | None = None

    @cached_property
    def price(self) -> Price:
        """The cost: a part to and from each other member; an all-reduce moves its shares twice."""
        others, count = self.size - 1, math.prod(self.part)
        copies = (how for how in (self.pack, self.unpack) if how is not None and not how.is_plain)
        buffered = sum(math.prod(how.shape) for how in copies)
        if OPERATIONS[self.operation].kind == "I" and OPERATIONS[self.operation].reduces:
            # 10 elements on 4 ranks: place 0 receives 3 partial sums of its 3 elements, then the
            # other 7 sums
            share = count // self.size + (self.place < count % self.size)
            moved = others * share + count - share
            return Price(moved, moved, 2 * others, buffered)
        return Price(others * count, others * count, others, buffered)

    @property
    def name(self) -> str:
        """The name of the step's collective in reports: "all-to-all"."""
        return OPERATIONS[self.operation].executor.name.removesuffix("_single").replace("_", "-")

    words = name


@dataclass(frozen=True)
class Exchange(GroupStep):
    """A step that sends boxes to members of the group and receives boxes from them.

    Args:
        sends: per member that gets something its place and the box of the local array before, by
            place; at most one box each.
        receives: per member that sends something its place and the box of the result, by place.
        kept: the box of the local array that stays on this rank, and that box of the result.
        is_covered: whether boxes and ``kept`` fill the result; else the rest of it is zeros.
        is_summed: whether equal boxes of the result are added, ``kept`` among them; any two are
            equal or disjoint.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    kept: tuple[Box, Box] | None
    is_covered: bool = field(default=True, kw_only=True)
    is_summed: bool = field(default=False, kw_only=True)

    @cached_property
    def price(self) -> Price:
        """The cost: the elements of all boxes sent and received, each copied through a buffer."""
        received, sent = (sum(volume(box) for _, box in x) for x in (self.receives, self.sends))
        return Price(received, sent, len(self.receives), received + sent)

    @property
    def words(self) -> str:
        """The step as text, with the numbers of boxes received and sent."""
        summed = " and sum" if self.is_summed else ""
        receives, sends = len(self.receives) or "none", len(self.sends) or "none"
        return f"exchange{summed} boxes ({receives} in, {sends} out)"

    @cached_property
    def sums(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Each box of the result, and the places, ascending, of the members whose parts it sums."""
        # Added in this order, a sum has equal bits on every rank that makes it.
        places: dict[Box, list[int]] = {}
        kept = [] if self.kept is None else [(self.place, self.kept[1])]
        for place, box in sorted([*self.receives, *kept]):
            places.setdefault(box, []).append(place)
        return tuple((box, tuple(found)) for box, found in places.items())

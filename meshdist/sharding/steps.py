"""The steps of a plan: what one rank does to its local array, one step after the other.

There are four kinds. Each says its price and its words, and ``carrying`` has an action for each. A
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
from ..verb_table import VERBS

__all__ = [
    "Arrangement",
    "Box",
    "Exchange",
    "GroupStep",
    "Pad",
    "Part",
    "Price",
    "Step",
    "Take",
    "VerbStep",
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
        """Return whether it keeps all elements in their order, so that a reshape alone does it."""
        sizes = self.view
        if any(index is not None and sizes[dim] != 1 for dim, index in enumerate(self.taken)):
            return False
        kept = [sizes[dim] for dim, index in enumerate(self.taken) if index is None]
        moved = [dim for dim in self.order if kept[dim] != 1]
        return moved == sorted(moved)


class Price(NamedTuple):
    """The cost of a step for one rank in elements: bytes are these times the size of an element.

    Args:
        received, sent: a rank's own part does not travel.
        num_peers: how many members send to this rank, one after the other.
        buffered: elements packed and received beside the step's input and its result.
    """

    received: int = 0
    sent: int = 0
    num_peers: int = 0
    buffered: int = 0


@dataclass(frozen=True)
class Step(ABC):
    """One step: a kind that does not say its price and its words cannot be made."""

    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The kind's name, or the verb's."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def price(self) -> Price:
        """The cost for this rank."""

    @property
    @abstractmethod
    def words(self) -> str:
        """A few words for reports."""


@dataclass(frozen=True)
class Take(Step):
    """Keep one box of the local array."""

    box: Box
    price = Price()

    @property
    def words(self) -> str:
        """Which box is kept."""
        return f"keep {box_text(self.box)}"


@dataclass(frozen=True)
class Pad(Step):
    """Put the local array into zeros, as a summand of a value that becomes unreduced.

    Args:
        box: where the whole local array goes; None where another rank keeps the value and this
            rank has zeros alone.
    """

    box: Box | None
    price = Price()

    @property
    def words(self) -> str:
        """The box that the zeros surround."""
        return "zeros" if self.box is None else f"zeros around {box_text(self.box)}"


@dataclass(frozen=True)
class GroupStep(Step):
    """A step in which the members of a group send and receive."""

    axes: tuple[int, ...]
    size: int
    place: int


@dataclass(frozen=True)
class VerbStep(GroupStep):
    """A verb by which equal parts move between all members.

    Args:
        verb: a name in ``VERBS``.
        part: the shape of what goes to, or comes from, each member.
        pack: from the local array to a part per member, which are sent; None sends it as it lies.
        unpack: from the received parts, in group order, to the result; None where they are that.
    """

    verb: str
    part: tuple[int, ...]
    pack: Arrangement | None = None
    unpack: Arrangement | None = None

    @cached_property
    def price(self) -> Price:
        """A part to and from each other member; twice that for a sum which all shall have."""
        others, count = self.size - 1, math.prod(self.part)
        copies = (how for how in (self.pack, self.unpack) if how is not None and not how.is_plain)
        buffered = sum(math.prod(how.shape) for how in copies)
        if VERBS[self.verb].kind == "I" and VERBS[self.verb].reduces:
            # 10 elements on 4 ranks: place 0 receives 3 summands of its 3 elements, then the
            # other 7 sums
            share = count // self.size + (self.place < count % self.size)
            moved = others * share + count - share
            return Price(moved, moved, 2 * others, buffered)
        return Price(others * count, others * count, others, buffered)

    @property
    def name(self) -> str:
        """The verb, as reports call it."""
        return VERBS[self.verb].carrier.name.removesuffix("_single").replace("_", "-")

    words = name


@dataclass(frozen=True)
class Exchange(GroupStep):
    """Send boxes to members of the group and receive boxes from them.

    Args:
        sends: per member that gets something its place and the box of the local array before, by
            place; at most one box each.
        receives: per member that sends something its place and the box of the result, by place.
        kept: the box of the local array, and the box of the result, that stay on this rank.
        is_covered: whether boxes and ``kept`` fill the result; else the rest of it is zeros.
        is_summed: whether received boxes are summands: equal boxes of the result are added. Two of
            them are equal or disjoint, ``kept`` among them.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    kept: tuple[Box, Box] | None
    is_covered: bool = field(default=True, kw_only=True)
    is_summed: bool = field(default=False, kw_only=True)

    @cached_property
    def price(self) -> Price:
        """All boxes; each is packed or unpacked."""
        received, sent = (sum(volume(box) for _, box in x) for x in (self.receives, self.sends))
        return Price(received, sent, len(self.receives), received + sent)

    @property
    def words(self) -> str:
        """How many boxes come and go."""
        summed = " and sum" if self.is_summed else ""
        receives, sends = len(self.receives) or "none", len(self.sends) or "none"
        return f"exchange{summed} boxes ({receives} in, {sends} out)"

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

"""Define the four kinds of steps of a plan, which change one rank's local array.

Boxes are (start, stop) per dim of a local array. ``axes`` are indices of the plan's mesh axes, in
mesh order. A step's group is the ranks along them, row-major, and a *place* is a rank's index in
it. Every member has a step of the same kind at the same point of its plan, even if it sends
nothing.
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
"""A place in a step's group, and the box to send there or receive from there."""


@dataclass(frozen=True)
class Arrangement:
    """A view of an array whose dims are split, indexed, permuted and merged.

    Args:
        taken: per dim of the view, an index to take, which drops the dim, or None to keep it.
        order: the remaining dims, in their new order.
    """

    # In NumPy: x.reshape(view)[taken].transpose(order).reshape(shape), with at most a single
    # strided copy, and none if ``is_plain``.
    view: tuple[int, ...]
    taken: tuple[int | None, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    @cached_property
    def is_plain(self) -> bool:
        """Return whether the elements keep their order, so that a reshape suffices."""
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
        buffered: elements packed and received in buffers.
    """

    received: int = 0  # from other ranks only
    sent: int = 0
    num_peers: int = 0
    buffered: int = 0


@dataclass(frozen=True)
class Step(ABC):
    """A step of a plan, with its result's shape, its cost and its description."""

    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the step's kind or collective."""
        return type(self).__name__.lower()

    @property
    @abstractmethod
    def price(self) -> Price:
        """The cost of the step for this rank."""

    @property
    @abstractmethod
    def words(self) -> str:
        """A short description for reports."""


@dataclass(frozen=True)
class Take(Step):
    """A step that keeps one box of the local array."""

    box: Box
    price = Price()

    @property
    def words(self) -> str:
        return f"keep {box_text(self.box)}"


@dataclass(frozen=True)
class Pad(Step):
    """A step that places the local array in zeros, as a partial sum.

    Args:
        box: the local array's part of the result; None if the result is all zeros.
    """

    box: Box | None
    price = Price()

    @property
    def words(self) -> str:
        return "zeros" if self.box is None else f"zeros around {box_text(self.box)}"


@dataclass(frozen=True)
class GroupStep(Step):
    """A step in which the members of a group send and receive."""

    axes: tuple[int, ...]
    size: int
    group_rank: int


@dataclass(frozen=True)
class CollectiveStep(GroupStep):
    """A collective that moves equal parts between all members.

    Args:
        operation: a name in ``OPERATIONS``.
        part: the shape of each member's part.
        pack: from the local array to the parts to send; None sends it unchanged.
        unpack: from the received parts, in group order, to the result; None if unchanged.
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
            # 10 elements on 4 ranks: rank 0 receives 3 partial sums of its 3 elements, then the
            # other 7 sums.
            share = count // self.size + (self.group_rank < count % self.size)
            moved = others * share + count - share
            return Price(moved, moved, 2 * others, buffered)
        return Price(others * count, others * count, others, buffered)

    @property
    def name(self) -> str:
        return OPERATIONS[self.operation].executor.name.removesuffix("_single").replace("_", "-")

    words = name


@dataclass(frozen=True)
class Exchange(GroupStep):
    """A step in which members of the group exchange boxes.

    Args:
        sends: each receiver's place and its box of the local array, at most one box each, by place.
        receives: each sender's place and its box of the result, by place.
        own: the box of the local array that stays on this rank, and that box of the result.
        is_covered: whether boxes and ``own`` fill the result; else the rest is zeros.
        is_summed: whether equal boxes of the result are added, including ``own``; any two boxes
            are equal or disjoint.
    """

    sends: tuple[Part, ...]
    receives: tuple[Part, ...]
    own: tuple[Box, Box] | None
    is_covered: bool = field(default=True, kw_only=True)
    is_summed: bool = field(default=False, kw_only=True)

    @cached_property
    def price(self) -> Price:
        """The cost: the elements of all boxes, each copied through a buffer."""
        received, sent = (sum(volume(box) for _, box in x) for x in (self.receives, self.sends))
        return Price(received, sent, len(self.receives), received + sent)

    @property
    def words(self) -> str:
        summed = " and sum" if self.is_summed else ""
        receives, sends = len(self.receives) or "none", len(self.sends) or "none"
        return f"exchange{summed} boxes ({receives} in, {sends} out)"

    @cached_property
    def sums(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Each box of the result, and the ascending places of the summed members."""
        # This order makes the sum bitwise equal on every rank that computes it.
        peers: dict[Box, list[int]] = {}
        own = [] if self.own is None else [(self.group_rank, self.own[1])]
        for peer, box in sorted([*self.receives, *own]):
            peers.setdefault(box, []).append(peer)
        return tuple((box, tuple(found)) for box, found in peers.items())

"""Plan the least communication between two placements of an array.

Each rank plans its own part without communication; all ranks find the same route (see ``routes``).
This module handles only integers; it neither sends nor uses tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ..arguments import get_integer
from ..mesh.layout import Layout
from ..mesh.placement import Placement
from .placement_diff import bare
from .routes import DEFAULT_LINK, Link, num_held_in_all, phase_steps, route_between, slowest
from .steps import GroupStep, Pad, Step

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def step_time_s(step: Step, links: Sequence[Link], itemsize: int) -> float:
    if not isinstance(step, GroupStep):
        return 0.0
    price = step.price
    num_bytes = max(price.received, price.sent) * itemsize
    return slowest(links, step.axes).time_s(price.num_peers, num_bytes)


def step_text(step: Step, layout: Layout, links: Sequence[Link], itemsize: int) -> str:
    """Return a step's collective, ranks, result shape, bytes and time as a line."""
    shape = _shape_text(step.shape)
    if not isinstance(step, GroupStep):
        return f"{step.words}: {shape}; nothing is sent"
    names = layout.names or tuple(map(str, range(layout.ndim)))
    axes = ", ".join(names[axis] for axis in step.axes)
    return (
        f"{step.words} over {axes}, {step.size} ranks: {shape}; "
        f"{bytes_text(step.price.received * itemsize)} in, "
        f"{bytes_text(step.price.sent * itemsize)} out, "
        f"{step_time_s(step, links, itemsize) * 1e6:.0f} us"
    )


def bytes_text(count: int) -> str:
    """Return a number of bytes as short text with its unit.

    Example:
        >>> bytes_text(1000), bytes_text(1536), bytes_text(64 << 20)
        ('1000 bytes', '1.5 KiB', '64.0 MiB')
    """
    if count < 1024:
        return f"{count} bytes"
    power = min((count.bit_length() - 1) // 10, len(_UNITS))
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


def checked_itemsize(given: Any) -> int:
    """Return the bytes of an element; raise KindError for a dtype."""
    fix = "pass the bytes of an element, such as dtype.itemsize"
    return get_integer(given, "itemsize", 1, fix=fix)


# The default bytes of an element, as float32.
_ITEMSIZE = 4
_TRANSPOSE = "transpose of "


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A rank's route between two placements of an array over the same axes.

    Args:
        layout: the ranks along the axes, for the steps' groups.
        op_name: equal on all ranks, for reports.
    """

    source: Placement
    target: Placement
    coordinate: tuple[int, ...]
    layout: Layout
    links: tuple[Link, ...]
    op_name: str

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The steps of this rank, in order; () if its part does not change."""
        route, void = route_between(self.source, self.target, self.links)
        if any(self.coordinate[axis] for axis in void):
            return (Pad(self.target.local_shape(self.coordinate), None),)
        return tuple(step for phase in route for step in phase_steps(phase, self.coordinate))

    @cached_property
    def is_identity(self) -> bool:
        """Return whether no rank's part changes: the same answer on all ranks."""
        # ``steps`` depends on the rank: if 2 ranks slice a dim of size 1, rank 0 keeps it all.
        return bare(self.source) == bare(self.target)

    @cached_property
    def grows(self) -> bool:
        """Return whether all ranks hold more elements in total afterwards; the same on all."""
        return num_held_in_all(self.source) < num_held_in_all(self.target)

    @cached_property
    def T(self) -> Plan:
        """The transposed plan, from the target's cotangent to the source's."""
        once = self.op_name.removeprefix(_TRANSPOSE)
        return make_plan(
            self.target.transposed(),
            self.source.transposed(),
            self.coordinate,
            layout=self.layout,
            links=self.links,
            op_name=once if once != self.op_name else _TRANSPOSE + once,
        )

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The axis numbers of each group that the steps need, by first use."""
        axes = (step.axes for step in self.steps if isinstance(step, GroupStep))
        return tuple(dict.fromkeys(axes))

    def bytes_received(self, itemsize: int = _ITEMSIZE) -> int:
        """Return the bytes that this rank receives."""
        return checked_itemsize(itemsize) * sum(step.price.received for step in self.steps)

    def bytes_sent(self, itemsize: int = _ITEMSIZE) -> int:
        """Return the bytes that this rank sends."""
        return checked_itemsize(itemsize) * sum(step.price.sent for step in self.steps)

    def peak_bytes(self, itemsize: int = _ITEMSIZE) -> int:
        """Return the peak bytes in use, from the source's part to the result."""
        itemsize = checked_itemsize(itemsize)
        # The source's part stays allocated in addition to a step's input, result and buffers.
        before = math.prod(self.source.local_shape(self.coordinate))
        peak, held, is_copy = before, before, False
        for step in self.steps:
            result = math.prod(step.shape)
            live = held + result + step.price.buffered
            peak = max(peak, live + before * is_copy)
            held, is_copy = result, True
        return itemsize * (peak if is_copy else 2 * before)

    def estimated_s(
        self, links: tuple[Link, ...] | None = None, itemsize: int = _ITEMSIZE
    ) -> float:
        """Return this rank's estimated seconds, by ``links`` or the plan's links."""
        itemsize = checked_itemsize(itemsize)
        chosen = self.links if links is None else links
        return sum(step_time_s(step, chosen, itemsize) for step in self.steps)

    def explain(self, itemsize: int = _ITEMSIZE) -> str:
        """Describe the plan: a line per step, then total bytes, memory and time.

        Example:
            >>> from meshdist import plan
            >>> mesh = Layout.from_shape((2, 2), ("dp", "tp"))
            >>> moved = plan("b@dp s@tp d -> b@dp s d@tp", mesh=mesh, shape=(8, 16, 32))
            >>> print(moved.explain())
            b@dp s@tp d -> b@dp s d@tp of shape (8, 16, 32)
              rank 0 (dp=0, tp=0) of mesh (dp=2, tp=2) holds 4 x 8 x 32
              1. all-to-all over tp, 2 ranks: 4 x 16 x 16; 2.0 KiB in, 2.0 KiB out, 6 us
              total: 2.0 KiB in, 2.0 KiB out, 16.0 KiB at peak, 6 us, at 4 bytes an element
        """
        itemsize = checked_itemsize(itemsize)
        layout, coordinate = self.layout, self.coordinate
        rank = layout.rank_at(coordinate)
        held = _shape_text(self.source.local_shape(coordinate))
        lines = [
            self.op_name,
            f"  rank {rank} ({layout.coordinate_text(rank)}) of mesh ({layout.axis_text()}) "
            f"holds {held}",
        ]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"  {number}. {step_text(step, layout, self.links, itemsize)}")
        if not self.steps:
            lines.append("  this rank's part does not change")
        lines.append(
            f"  total: {bytes_text(self.bytes_received(itemsize))} in, "
            f"{bytes_text(self.bytes_sent(itemsize))} out, "
            f"{bytes_text(self.peak_bytes(itemsize))} at peak, "
            f"{self.estimated_s(itemsize=itemsize) * 1e6:.0f} us, at {itemsize} bytes an element"
        )
        return "\n".join(lines)

    def __repr__(self) -> str:
        names = ", ".join(step.name for step in self.steps)
        return f"<Plan {self.op_name!r} at {self.coordinate}: {names or 'nothing to do'}>"


@lru_cache(maxsize=4096)
def make_plan(
    source: Placement,
    target: Placement,
    coordinate: tuple[int, ...],
    *,
    layout: Layout | None = None,
    links: tuple[Link, ...] | None = None,
    op_name: str = "a plan",
) -> Plan:
    """Return one rank's plan between two placements over the same axes; calls are cached.

    Args:
        layout: the ranks along the axes; None numbers them row-major.
        links: a link per axis, equal on all ranks; None takes shared memory's.
        op_name: equal on all ranks, for reports.
    """
    sizes = source.mesh_sizes
    layout, links = layout or Layout.from_shape(sizes), links or (DEFAULT_LINK,) * len(sizes)
    return Plan(source, target, coordinate, layout, links, op_name)

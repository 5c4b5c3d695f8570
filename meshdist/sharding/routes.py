"""Choose the cheapest route of a plan: its phases from one placement to another.

Without a sum the only route is a single exchange. With a sum there are these candidates: (1) every
destination receives all partial sums; (2) ranks that end up equal each receive a part and gather
the others; (3) an all-reduce, then an exchange; (4) a reduce-scatter, then an exchange. The last
two are also tried after slices along free axes, so that replicas share the work. The best route has
the fewest elements received by all ranks, then fewer box exchanges (collectives are faster), then
the shorter time in whole nanoseconds, then fewer collectives.

All ranks must choose the same route, so times use constants, never a rank's measurements. A link
follows from the axis's backend and from whether a group along the axis spans hosts.

Worked example: each of 4 ranks holds a partial sum of 8 numbers, and all shall have the sum.

    rank 0    aaaaaaaa      AA......      AAAAAAAA    A: a sum; each rank makes 2 of the 8
    rank 1    bbbbbbbb      ..AA....      AAAAAAAA    first arrow: a reduce-scatter
    rank 2    cccccccc  ->  ....AA..  ->  AAAAAAAA    second arrow: an all-gather
    rank 3    dddddddd      ......AA      AAAAAAAA    both at once: an all-reduce

    candidate                               all ranks receive    waits for messages  collectives
    each takes all other partial sums           4 * 3 * 8   = 96     3 * 5 us = 15 us    1, of boxes
    an all-reduce                           2 * 4 * 3*2 = 48     6 * 5 us = 30 us    1
    a reduce-scatter, then an all-gather    24 + 24     = 48     6 * 5 us = 30 us    2

The first receives more, though it waits less. The others differ in their number of collectives.
If each rank needs only its own 2 sums, the reduce-scatter suffices, and the ranks receive 24.

    >>> from ..mesh.placement import split_dim
    >>> source = Placement((4,), (8,), (split_dim(8, (), ()),), unreduced=(0,))
    >>> sums, links = replace(source, unreduced=()), (DEFAULT_LINK,)
    >>> [price for price, _ in _candidates(change_between(source, sums))]  # two are scatter, gather
    [96, 48, 48, 48]
    >>> [step.name for it in find_route(source, sums, links) for step in phase_steps(it, (0,))]
    ['all-reduce']
    >>> two_each = replace(sums, dims=(split_dim(8, (0,), (4,)),))
    >>> [stage.num_received for stage in find_route(source, two_each, links)]
    [24]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import product

from ..errors import ArgumentError, KindError
from ..mesh.layout import Layout
from ..mesh.placement import DimSplit, Placement
from .lowering import exchange_steps, group_at, local_steps, operation_steps
from .placement_diff import Change, bare, change_between, dim_of_largest_blocks, extended
from .steps import CollectiveStep, Step

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """The speed of one rank's connection to the others along a mesh axis.

    Args:
        latency_s: the time of one message, however short.
        bytes_per_s: the bytes that a rank receives per second while it sends as many.

    Raises:
        ArgumentError: a negative or infinite latency, or a rate that is not positive.

    Example:
        >>> Link(latency_s=2e-6, bytes_per_s=1e11).time_s(messages=3, num_bytes=10**8)
        0.001006
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < float("inf") and self.bytes_per_s > 0):
            raise ArgumentError(
                "a Link needs a finite latency of at least 0 and a rate above 0",
                found=f"latency_s={self.latency_s}, bytes_per_s={self.bytes_per_s}",
            )

    def time_s(self, messages: int, num_bytes: float) -> float:
        """Return the time of this many sequential messages and bytes."""
        return messages * self.latency_s + num_bytes / self.bytes_per_s


DEFAULT_LINK = Link(5e-6, 4e9)
"""The link of shared memory, and of a mesh without processes."""

# For each backend: the link inside a host, and the link between hosts.
_LINKS = {
    "shm": (DEFAULT_LINK, Link(5e-5, 2e9)),
    "simulated": (DEFAULT_LINK, DEFAULT_LINK),
    "gloo": (Link(5e-5, 1e9), Link(1e-4, 1e9)),
    "mpi": (Link(1e-5, 4e9), Link(2e-5, 2e9)),
    "nccl": (Link(1e-5, 1e11), Link(2e-5, 2e10)),
}


def default_link(backend: str, *, spans_hosts: bool) -> Link:
    """Return a backend's assumed link; Gloo's for an unknown backend."""
    return _LINKS.get(backend, _LINKS["gloo"])[spans_hosts]


def links_of(
    layout: Layout, links: Mapping[str | int, Link] | Link | None, defaults: Sequence[Link]
) -> tuple[Link, ...]:
    """Return a link per axis from ``links``, by name or index, or ``defaults``."""
    if links is None:
        return tuple(defaults)
    if isinstance(links, Link):
        return (links,) * layout.ndim
    if not isinstance(links, Mapping):
        raise KindError(
            "links must be one Link, or a mapping from axes to Links",
            where="argument links",
            found=type(links).__name__,
        )
    found = list(defaults)
    for axis, link in links.items():
        if not isinstance(link, Link):
            raise KindError(
                f"the link of axis {axis!r} is not a Link",
                where="argument links",
                expected="md.Link(latency_s, bytes_per_s)",
                found=repr(link),
            )
        found[layout.axis_index(axis)] = link
    return tuple(found)


def slowest(links: Sequence[Link], axes: Sequence[int]) -> Link:
    """Return the largest latency and the smallest rate of ``links`` at ``axes`` as a link."""
    chosen = [links[axis] for axis in axes]
    return Link(max(c.latency_s for c in chosen), min(c.bytes_per_s for c in chosen))


# Up to this many free axes, try all subsets for slices; beyond, only none, all, and each kind.
_FEW_AXES = 3
# Plans do not know the dtype: choices weigh latencies against bytes for elements of this size.
_NOMINAL_BYTES = 4


@dataclass(frozen=True)
class Sum:
    """A phase of a route: an all-reduce of local arrays over ``axes``."""

    placement: Placement
    axes: tuple[int, ...]

    @property
    def group(self) -> tuple[int, ...]:
        """The axes of the groups that communicate."""
        return self.axes

    @cached_property
    def num_received(self) -> int:
        """The number of elements that all ranks receive together."""
        members = math.prod(self.placement.mesh_sizes[axis] for axis in self.axes)
        return 2 * (members - 1) * (num_held_in_all(self.placement) // members)


Phase = Change | Sum
# A candidate's intermediate placements: of an all-reduce, or None, then of an exchange.
_Between = tuple[Placement | None, Placement | None]


@lru_cache(maxsize=4096)
def find_route(source: Placement, target: Placement, links: tuple[Link, ...]) -> tuple[Phase, ...]:
    """Return the phases with the fewest elements received; ``links`` break ties."""
    whole = change_between(source, target)
    if not whole.summed:
        return (whole,)
    priced = list(_candidates(whole))
    fewest = min(price for price, _ in priced)
    routes = [_route(ends, whole) for price, ends in priced if price == fewest]
    if len(routes) == 1:
        return routes[0]
    # min returns the first of equal routes.
    return min(routes, key=lambda route: _boxes_time_and_operations(route, links))


def route_between(
    source: Placement, target: Placement, links: tuple[Link, ...]
) -> tuple[tuple[Phase, ...], tuple[int, ...]]:
    """Return the best phases, and the axes where only coordinate 0 gets values."""
    source, target, void = _without_zeros(source, target)
    return find_route(source, target, links), void


def _without_zeros(
    source: Placement, target: Placement
) -> tuple[Placement, Placement, tuple[int, ...]]:
    """Return both without axes where only coordinate 0 gets values, and these axes."""
    source, target = bare(source), bare(target)
    # If a free axis becomes unreduced, coordinate 0 runs the route as if the axis had size 1, and
    # the other coordinates get zeros.
    free = source.free_axes
    void = tuple(axis for axis in target.unreduced if axis in free)
    if void:
        sizes = tuple(1 if axis in void else n for axis, n in enumerate(source.mesh_sizes))
        kept = tuple(axis for axis in target.unreduced if axis not in void)
        source = replace(source, mesh_sizes=sizes)
        target = replace(target, mesh_sizes=sizes, unreduced=kept)
    return source, target, void


@lru_cache(maxsize=4096)
def num_received_by_all(source: Placement, target: Placement) -> int:
    """Return the cost of the best route: the elements that all ranks receive together.

    Example:
        >>> from ..mesh.placement import split_dim
        >>> rows = Placement((4,), (8,), (split_dim(8, (0,), (4,)),))
        >>> num_received_by_all(rows, replace(rows, dims=(split_dim(8, (), ()),)))
        24
    """
    source, target, _ = _without_zeros(source, target)
    whole = change_between(source, target)
    if not whole.summed:
        return whole.num_received
    return min(price for price, _ in _candidates(whole))


def phase_steps(phase: Phase, coordinate: tuple[int, ...]) -> tuple[Step, ...]:
    if isinstance(phase, Sum):
        group = group_at(phase.axes, phase.placement.mesh_sizes, coordinate)
        shape = phase.placement.local_shape(coordinate)
        return (CollectiveStep(shape, *group, "all_reduce", shape),)
    if phase.num_received == 0:
        return local_steps(phase, coordinate)
    if phase.has_product_form:
        return operation_steps(phase, coordinate)
    return exchange_steps(phase, coordinate)


# -- candidates ---------------------------------------------------------------------------------


def _candidates(whole: Change) -> Iterator[tuple[int, _Between]]:
    """Yield (elements received by all, placements before and after the sum or None) by route."""
    source, target, summed = whole.source, whole.target, whole.summed
    yield whole.num_received, (None, None)
    if target.dims:
        copies = [axis for axis in target.free_axes if target.mesh_sizes[axis] > 1]
        homes = {axis: _home(axis, target, source) for axis in copies}
        for once in _with_more_cuts(target, source, homes, target.unreduced) if copies else ():
            price = change_between(source, once).num_received
            yield price + change_between(once, target).num_received, (None, once)
    members = math.prod(source.mesh_sizes[axis] for axis in summed)
    kept = tuple(axis for axis in source.unreduced if axis not in summed)
    for sliced in _slicings(whole):
        homes = {axis: _home(axis, source, target) for axis in sliced}
        part = next(_with_more_cuts(source, target, homes, source.unreduced))
        done = replace(part, unreduced=kept)
        price = 2 * (members - 1) * (num_held_in_all(part) // members)
        yield price + change_between(done, target).num_received, (part, done)
        if not source.dims:
            continue  # A scalar cannot be cut.
        homes |= {axis: _home(axis, source, target) for axis in summed}
        for scattered in _with_more_cuts(source, target, homes, kept):
            price = (members - 1) * num_held_in_all(scattered)
            yield price + change_between(scattered, target).num_received, (None, scattered)


def _route(between: _Between, whole: Change) -> tuple[Phase, ...]:
    part, middle = between
    phases: list[Phase] = []
    here = whole.source
    if part is not None:
        phases += [change_between(here, part), Sum(part, whole.summed)]
    elif middle is not None:
        phases.append(change_between(here, middle))
    phases.append(change_between(here if middle is None else middle, whole.target))
    return tuple(s for s in phases if isinstance(s, Sum) or s.source != s.target)


def _slicings(whole: Change) -> Iterator[tuple[int, ...]]:
    """Yield sets of replicated axes along which to slice before a sum."""
    target = whole.target
    useful = [axis for axis in whole.source.free_axes if target.mesh_sizes[axis] > 1]
    if not target.dims:
        useful = []
    if len(useful) <= _FEW_AXES:
        for chosen in product((False, True), repeat=len(useful)):
            yield tuple(axis for axis, is_in in zip(useful, chosen, strict=True) if is_in)
        return
    cutting = tuple(axis for axis in useful if axis in target.cut_axes)
    others = tuple(axis for axis in useful if axis not in target.cut_axes)
    yield from dict.fromkeys([(), cutting, others, tuple(useful)])


def _home(axis: int, source: Placement, target: Placement) -> int:
    """Return the dim that ``axis`` cuts in the target, else the dim with the largest blocks."""
    for number, dim in enumerate(target.dims):
        if axis in dim.axes:
            return number
    return dim_of_largest_blocks(source.dims)


def _with_more_cuts(
    start: Placement, end: Placement, homes: dict[int, int], unreduced: tuple[int, ...]
) -> Iterator[Placement]:
    """Yield ``start`` with its dims cut further by the axes of ``homes``, in either order.

    Args:
        end: gives the order of its axes; other axes follow, in either order.
        homes: the dim that each new axis cuts.
        unreduced: the unreduced axes of the results.
    """
    sizes = start.mesh_sizes
    tried: list[Placement] = []
    for axes in (list(homes), list(homes)[::-1]):
        dims: list[DimSplit] = []
        for number, dim in enumerate(start.dims):
            mine = [axis for axis in axes if homes[axis] == number]
            first = [axis for axis in end.dims[number].axes if axis in mine]
            order = (*first, *(axis for axis in mine if axis not in first))
            dims.append(extended(dim, order, tuple([sizes[axis] for axis in order])))
        placed = Placement(sizes, start.shape, tuple(dims), unreduced)
        if placed not in tried:
            tried.append(placed)
            yield placed


# -- prices -------------------------------------------------------------------------------------


def num_held_in_all(placement: Placement) -> int:
    sizes = placement.mesh_sizes
    copies = (size for axis, size in enumerate(sizes) if axis not in placement.cut_axes)
    return math.prod(placement.shape) * math.prod(copies)


def _boxes_time_and_operations(
    route: Sequence[Phase], links: tuple[Link, ...]
) -> tuple[int, int, int]:
    """Return a route's (box exchanges, nanoseconds, collectives); smaller is better."""
    # Times are added as fractions, because rounded sums of equal times can differ. 4 elements on
    # 2 ranks: an all-reduce takes 10 us + 4 ns; a reduce-scatter and an all-gather take
    # (5 us + 2 ns) twice, as floats 1.7e-21 s less.
    time, boxes, operations = Fraction(0), 0, 0
    for phase in route:
        if phase.num_received == 0:
            continue
        if isinstance(phase, Sum):
            sizes, groups, rounds = phase.placement.mesh_sizes, [phase.axes], 2
        else:
            sizes, groups, rounds = phase.source.mesh_sizes, [phase.group], 1
            boxes += not phase.has_product_form
            if phase.has_product_form and phase.moving and phase.gathered:
                groups = [phase.moving, phase.gathered]
        for axes in groups:
            members = math.prod(sizes[axis] for axis in axes)
            time += rounds * (members - 1) * round(slowest(links, axes).latency_s * 1e9)
            operations += 1
        mean_bytes = Fraction(_NOMINAL_BYTES * phase.num_received, math.prod(sizes))
        time += mean_bytes * Fraction(1e9 / slowest(links, phase.group).bytes_per_s)
    return boxes, round(time), operations

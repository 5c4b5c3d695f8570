"""How fast a mesh axis is, as constants: what estimates, and choices between equal bytes, read.

All ranks of a mesh must choose alike, so nothing that one rank measures may enter: a link follows
from the wire of the axis and from whether some group along it spans hosts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, KindError
from ..mesh.layout import Layout

__all__ = ["DEFAULT_LINK", "Link", "default_link", "links_of", "slowest"]


@dataclass(frozen=True)
class Link:
    """The speed of one rank's connection to the others along a mesh axis.

    Args:
        latency_s: the time of one message, however short.
        bytes_per_s: how many bytes a rank receives in a second; it sends as many meanwhile.

    Raises:
        ArgumentError: a latency that is negative or infinite, or a rate that is not positive.

    Example:
        >>> Link(latency_s=2e-6, bytes_per_s=1e11).time_s(messages=3, num_bytes=10**8)
        0.001006
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < float("inf") and self.bytes_per_s > 0):
            raise ArgumentError(
                "a link's latency is finite and not negative, and its rate is above zero",
                found=f"latency_s={self.latency_s}, bytes_per_s={self.bytes_per_s}",
            )

    def time_s(self, messages: int, num_bytes: float) -> float:
        """Return the time of so many messages one after the other, and of their bytes."""
        return messages * self.latency_s + num_bytes / self.bytes_per_s


DEFAULT_LINK = Link(5e-6, 4e9)
"""Shared memory's, and that of a mesh without processes."""

# Per wire: the link inside a host, and between hosts.
_LINKS = {
    "shm": (DEFAULT_LINK, Link(5e-5, 2e9)),
    "simulated": (DEFAULT_LINK, DEFAULT_LINK),
    "gloo": (Link(5e-5, 1e9), Link(1e-4, 1e9)),
    "mpi": (Link(1e-5, 4e9), Link(2e-5, 2e9)),
    "nccl": (Link(1e-5, 1e11), Link(2e-5, 2e10)),
}


def default_link(wire: str, *, spans_hosts: bool) -> Link:
    """Return the constants of a wire; those of Gloo for a wire that is not listed."""
    return _LINKS.get(wire, _LINKS["gloo"])[spans_hosts]


def links_of(
    layout: Layout, links: Mapping[str | int, Link] | Link | None, defaults: Sequence[Link]
) -> tuple[Link, ...]:
    """Return one link per axis of ``layout``: those given, by name or index, else the defaults."""
    if links is None:
        return tuple(defaults)
    if isinstance(links, Link):
        return (links,) * layout.ndim
    if not isinstance(links, Mapping):
        raise KindError(
            "links are one Link, or a mapping of axes to Links",
            where="argument links",
            found=type(links).__name__,
        )
    found = list(defaults)
    for axis, link in links.items():
        if not isinstance(link, Link):
            raise KindError(
                f"the link of axis {axis!r} is no Link",
                where="argument links",
                expected="md.Link(latency_s, bytes_per_s)",
                found=repr(link),
            )
        found[layout.axis_index(axis)] = link
    return tuple(found)


def slowest(links: Sequence[Link], axes: Sequence[int]) -> Link:
    """Return the link of a group over several axes: the worst of theirs in both numbers."""
    chosen = [links[axis] for axis in axes]
    return Link(max(c.latency_s for c in chosen), min(c.bytes_per_s for c in chosen))

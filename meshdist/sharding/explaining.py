"""Plans in words: each step's verb, axes, shape, bytes and time."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh.layout import Layout
from ..mesh.splits import box_text
from .links import Link, slowest
from .steps import AllGather, AllReduce, AllToAll, Exchange, Pad, ReduceScatter, Step, Take

__all__ = ["SENDING", "bytes_text", "step_text", "step_time_s"]

SENDING = (AllReduce, AllGather, ReduceScatter, AllToAll, Exchange)
"""The steps in which ranks send."""

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")

_VERBS: dict[type, str] = {
    AllReduce: "all-reduce",
    AllGather: "all-gather",
    ReduceScatter: "reduce-scatter",
    AllToAll: "all-to-all",
}


def step_time_s(step: Step, links: Sequence[Link], itemsize: int) -> float:
    """Return how long a step takes one rank by the constants of its axes' links."""
    if not isinstance(step, SENDING):
        return 0.0
    link = slowest(links, step.axes)
    return link.time_s(step.num_peers, max(step.received, step.sent) * itemsize)


def step_text(step: Step, layout: Layout, links: Sequence[Link], itemsize: int) -> str:
    """Return one line: what a rank does, with whom, what shape it has then, bytes and time."""
    if isinstance(step, Take):
        return f"keep {box_text(step.box)}: {_shape_text(step.shape)}; nothing is sent"
    if isinstance(step, Pad):
        how = "zeros" if step.box is None else f"zeros around {box_text(step.box)}"
        return f"{how}: {_shape_text(step.shape)}; nothing is sent"
    verb = _VERBS.get(type(step), "")
    if isinstance(step, Exchange):
        summed = " and sum" if type(step) is not Exchange else ""
        verb = (
            f"exchange{summed} boxes ({_count_text(len(step.receives))} in, "
            f"{_count_text(len(step.sends))} out)"
        )
    names = layout.names or tuple(map(str, range(layout.ndim)))
    axes = ", ".join(names[axis] for axis in step.axes)
    time = step_time_s(step, links, itemsize)
    return (
        f"{verb} over {axes}, {step.size} ranks: {_shape_text(step.shape)}; "
        f"{bytes_text(step.received * itemsize)} in, "
        f"{bytes_text(step.sent * itemsize)} out, {time * 1e6:.0f} us"
    )


def bytes_text(count: int) -> str:
    """Return a number of bytes, shortly.

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


def _count_text(count: int) -> str:
    return f"{count or 'none'}"

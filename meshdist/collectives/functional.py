"""Pure verbs with derivatives, each beside its transpose.

Over the ranks of a group a value is *varying* (V: each rank holds its own) or *invariant* (I: equal
on every rank), and the gradient of a value is of the value's own kind. Two verbs take one kind to
the other, and each is the other's transpose:

    verb    from -> to     backward
    psum    V -> I         pvary: the gradient, equal on every rank, reaches each summand (free)
    pvary   I -> V (free)  psum: the ranks' gradients of what was one value are summed
    pmean   V -> I         psum's, divided by the size

"Free" means that nothing is sent. The verbs trust the caller about the kinds; at debug level
DETAIL psum's backward checks that its gradient is invariant.

Every verb returns a new tensor that shares no memory with its argument, for a group of one as
well. Backward uses the group that forward used, whatever mesh is in force by then, and is itself
made of these verbs, so that it can be differentiated again. A verb whose backward communicates
must be run backward on every rank of the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from ..arrays import describe
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..error_text import ranks_text
from ..errors import GradientError
from ..groups.process_group import ProcessGroup, resolve_group
from ..runtime.buffer_pool import new_like
from .verbs import all_gather_into_tensor, all_reduce, broadcast

__all__ = ["pmean", "psum", "pvary"]


def psum(x: torch.Tensor, group: object = None) -> torch.Tensor:
    """Every member holds the sum of all members' ``x``; V -> I, transpose ``pvary``.

    A bool ``x`` is counted, in int32. ``group`` is what the in-place verbs take.
    """
    if x.dtype is torch.bool:
        x = x.to(torch.int32)
    result: torch.Tensor = _Psum.apply(x, resolve_group(group))  # type: ignore[no-untyped-call]
    return result


def pmean(x: torch.Tensor, group: object = None) -> torch.Tensor:
    """Every member holds the mean of all members' ``x``; V -> I. Integers give a float dtype."""
    group = resolve_group(group)
    return psum(x, group) / group.size()


def pvary(x: torch.Tensor, group: object = None) -> torch.Tensor:
    """Every member holds its own copy of ``x``, equal so far; I -> V, transpose ``psum``."""
    result: torch.Tensor = _Pvary.apply(x, resolve_group(group))  # type: ignore[no-untyped-call]
    return result


class _Psum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        # Contiguous, as the wires want it: all_reduce would copy anything else once more.
        total = new_like(x).copy_(x)
        all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if get_debug_level() == DebugLevel.DETAIL:
            _check_invariant(grad.detach(), ctx.group)
        # Only a backward that will be differentiated again needs the verb; else the gradient
        # itself passes on, without a copy.
        return pvary(grad, ctx.group) if torch.is_grad_enabled() else grad, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return psum(tangent, ctx.group)


class _Pvary(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return new_like(x).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return psum(grad, ctx.group), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return pvary(tangent, ctx.group)


@torch.no_grad()
def _check_invariant(grad: torch.Tensor, group: ProcessGroup) -> None:
    """Raise the same GradientError on every member unless all hold the same gradient.

    Half of the dtype's digits must agree: equal computations may still add in another order.
    """
    mine = grad.clone(memory_format=torch.contiguous_format)
    first = mine.clone()
    broadcast(first, group=group, group_src=0)
    distance = torch.tensor([_relative_distance(mine, first)], dtype=torch.float64)
    distance = distance.to(grad.device)
    distances = distance.new_empty(group.size())
    all_gather_into_tensor(distances, distance, group=group)
    limit = torch.finfo(grad.dtype).eps ** 0.5
    far = {
        rank: value
        for rank, value in zip(group.ranks, distances.tolist(), strict=True)
        if value > limit
    }
    if far:
        raise GradientError(
            f"the gradient that reaches psum over {group.name} is not the same on every rank",
            where=f"backward of psum, gradient of {describe(grad)}",
            expected="equal gradients, since the result of psum is equal on every rank",
            found=f"{ranks_text(tuple(far))} differ{'s' if len(far) == 1 else ''} from rank "
            f"{group.ranks[0]}, by up to {max(far.values()):.2g} of its largest value",
            fix="where a result of psum meets values that vary along the axis, as a shard of "
            "weights does, mark it first: y = lax.pvary(y, axis)",
        )


def _relative_distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    """The largest |mine - first| over the largest |first|; NaN and infinity equal themselves."""
    differs = (mine != first) & ~(mine.isnan() & first.isnan())
    if not bool(differs.any()):
        return 0.0
    gap = float((mine - first)[differs].abs().nan_to_num(nan=torch.inf).max())
    finite = first[first.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return gap / scale if scale else torch.inf

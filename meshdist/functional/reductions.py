"""Reduce values and cast their types, with derivatives.

Over a group a value is varying, invariant, unreduced or reduced (V, I, U, R: see ``axis_types``).
The collectives convert between these types:

    collective     from -> to          backward
    psum           V -> I; U -> I      pvary (the gradient reaches each rank, free); pcast I -> R
    pmean          V -> I              as psum, divided by the size
    pmax, pmin     V -> I              an even split among the ranks that hold the extreme
    pvary          I -> V (free)       psum of the ranks' gradients
    pcast          I -> R (free)       psum, U -> I
    pcast          V -> U, R -> V      R -> V, V -> U (all free)
    all_gather     V -> V, V -> R      psum_scatter
    all_gather     V -> I              own block (free)
    psum_scatter   V -> V; U -> V      all_gather, V -> V; V -> R

"Free" means without communication. Collectives trust the caller about types; the backward of an
invariant result compares its gradient between ranks (``equality_checks``). A type states the
program's intent, so collectives that differ only in types share a function.

Every collective returns new memory, also in a group of one rank. Backward uses the group of the
forward, regardless of the current mesh, and can be differentiated again. If it communicates, run it
on every rank. Each call, also in a backward, has an operation name, which ranks compare: the
collective, ``leaf_name`` (the path of ``x`` in its tree) and the shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function

from ..annotations.axis_types import CASTS, GATHERED, KINDS
from ..arrays import describe
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..collectives.argument_checks import check_reducible
from ..collectives.normalize_args import lax_name, run_named
from ..collectives.torch_private import call_function
from ..errors import ArgumentError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceKind, ReduceOp
from ..runtime.memory import new_like
from .equality_checks import PVARY_FIX, check_invariant, compare_reached, keep_number
from .linear_function import LinearFunction, cut, get_dim, keep_line, note_complete, stack_blocks


def psum(x: torch.Tensor, group: ProcessGroup, *, leaf_name: str = "x") -> torch.Tensor:
    """Sum ``x`` over the group, as int32 for bool; V, U -> I."""
    return call_function(_Psum, x, group, lax_name("psum", leaf_name, x.shape))


def pmean(x: torch.Tensor, group: ProcessGroup, *, leaf_name: str = "x") -> torch.Tensor:
    """Average ``x`` over the group, integers in a float dtype; V -> I."""
    op_name = lax_name("pmean", leaf_name, x.shape)
    return call_function(_Psum, x, group, op_name) / group.size()


def pmax(x: torch.Tensor, group: ProcessGroup, *, leaf_name: str = "x") -> torch.Tensor:
    """Return the elementwise maximum of ``x`` over the group; V -> I."""
    return _extreme("pmax", x, group, ReduceOp.MAX, leaf_name)


def pmin(x: torch.Tensor, group: ProcessGroup, *, leaf_name: str = "x") -> torch.Tensor:
    """Return the elementwise minimum of ``x`` over the group; V -> I."""
    return _extreme("pmin", x, group, ReduceOp.MIN, leaf_name)


def pvary(x: torch.Tensor, group: ProcessGroup, *, leaf_name: str = "x") -> torch.Tensor:
    """Cast ``x`` to varying by a copy; I -> V."""
    return call_function(_Pvary, x, group, lax_name("pvary", leaf_name, x.shape))


def pcast(
    x: torch.Tensor, group: ProcessGroup, *, to: str, source: str = "", leaf_name: str = "x"
) -> torch.Tensor:
    """Cast ``x`` to another type by a copy; raise for unknown casts.

    Args:
        to: "varying", "reduced" or "unreduced".
        source: the type of ``x``; by default the first that the cast accepts.
    """
    kinds = {KINDS[kind]: kind for kind in CASTS.get(to, ())}
    if not kinds or source not in ("", *kinds):
        raise ArgumentError(
            f"pcast has no cast{source and f' from {source}'} to {to!r}",
            where=f"rank {group.world.rank}, {group.name}",
            expected="invariant to 'varying' or 'reduced', varying to 'unreduced', or reduced to "
            "'varying'",
            fix=_TO_INVARIANT if to in ("invariant", "invarying") else _OTHER_CAST,
        )
    kind = kinds[source] if source else next(iter(kinds.values()))
    function = _Pvary if kind == "I" else _Recast
    return call_function(function, x, group, lax_name("pcast", leaf_name, x.shape))


_TO_INVARIANT = "call psum, pmean or all_gather(..., to='invarying') for an invariant value"
_OTHER_CAST = "pass to='varying', to='reduced' or to='unreduced', as the type of x allows"


def all_gather(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    leaf_name: str = "x",
) -> torch.Tensor:
    """Gather ``x`` of all ranks, stacked or concatenated; V -> V, V -> R, V -> I.

    Args:
        axis: the new dimension that counts the ranks; if ``tiled``, the concatenated dimension.
        to: the result's type: "varying", "reduced" or "invarying".
    """
    if to not in GATHERED:
        raise ArgumentError(
            f"all_gather cannot return a result that is {to!r}",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"to as one of {', '.join(map(repr, GATHERED))}",
            fix="omit to for a varying result, or pass to='invarying' for an invariant result",
        )
    dim = get_dim(axis, x.dim() + (not tiled), "axis", "all_gather")
    gather = _AllGatherInvariant if to == "invarying" else _AllGather
    op_name = lax_name("all_gather", leaf_name, x.shape)
    return stack_blocks(call_function(gather, x, group, op_name), dim, tiled=tiled)


def psum_scatter(
    x: torch.Tensor,
    group: ProcessGroup,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    leaf_name: str = "x",
) -> torch.Tensor:
    """Sum ``x`` over the group; each rank gets one block of the sum; V -> V, U -> V."""
    x = x.to(torch.int32) if x.dtype is torch.bool else x
    blocks = blocks_to_scatter(x, group, scatter_dimension, tiled)
    return call_function(_PsumScatter, blocks, group, lax_name("psum_scatter", leaf_name, x.shape))


def blocks_to_scatter(
    x: torch.Tensor, group: ProcessGroup, scatter_dimension: int, tiled: bool
) -> torch.Tensor:
    """Return the blocks to sum, stacked in dim 0, without the split dim unless ``tiled``."""
    dim = get_dim(scatter_dimension, x.dim(), "scatter_dimension", "psum_scatter")
    return cut(x, dim, group, "psum_scatter", "scatter_dimension", tiled=tiled)


def _extreme(
    operation: str, x: torch.Tensor, group: ProcessGroup, op: ReduceKind, leaf_name: str
) -> torch.Tensor:
    check_reducible(op, x, operation)
    op_name = lax_name(operation, leaf_name, x.shape)
    return call_function(_Extreme, x, group, op, operation, op_name)


class InvariantFunction(LinearFunction):
    """A linear collective whose result and gradient are equal on every rank."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        LinearFunction.setup_context(ctx, inputs, output)
        keep_number(ctx, *inputs[:2])


class _Psum(InvariantFunction):
    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        if x.dtype is torch.bool:  # the sum is a count
            x = x.to(torch.int32)
        # Backends need contiguous tensors: all_reduce would copy any other tensor once more.
        total = new_like(x).copy_(x)
        run_named("all_reduce", group, op_name, total, ReduceOp.SUM)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        check_gradient(ctx, grad, ctx.rest[0], "psum")
        # Only a backward that is differentiated again needs the collective; otherwise the gradient
        # passes through without a copy.
        again = torch.is_grad_enabled()
        return call_function(_Pvary, grad, *ctx.rest) if again else grad, None, None


class _Recast(LinearFunction):
    """Autograd function that copies for the casts V -> U and R -> V, transposes of each other."""

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        return new_like(x).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        again = torch.is_grad_enabled()
        return call_function(_Recast, grad, *ctx.rest) if again else grad, None, None


class _Pvary(_Recast):
    """Autograd function that copies for the cast I -> V; its backward is a psum."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        note_complete(ctx, ctx.rest[0], is_sum=True)
        return call_function(_Psum, grad, *ctx.rest), None, None


class _Extreme(Function):
    """Autograd function of pmax and pmin; splits the gradient among ranks with the extreme."""

    @staticmethod
    def forward(
        x: torch.Tensor, group: ProcessGroup, op: ReduceKind, operation: str, op_name: str
    ) -> torch.Tensor:
        extreme = new_like(x).copy_(x)
        run_named("all_reduce", group, op_name, extreme, op)
        return extreme

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.group, _, ctx.operation, ctx.op_name = inputs
        keep_line(ctx, x, ctx.group)
        keep_number(ctx, x, ctx.group)
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        check_gradient(ctx, grad, ctx.group, ctx.operation)
        if torch.is_grad_enabled():
            grad = call_function(_Pvary, grad, ctx.group, ctx.op_name)
        return grad * _share(ctx), None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: torch.Tensor, *rest: Any) -> tuple[Any, int]:
        return call_function(_Extreme, x, *rest), in_dims[0]

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return call_function(_Psum, tangent * _share(ctx), ctx.group, ctx.op_name)


def _share(ctx: Any) -> torch.Tensor:
    """Return per element 1 / n if this rank and n - 1 others hold the extreme, else 0."""
    saved: tuple[torch.Tensor, ...] = ctx.saved_tensors
    x, extreme = (tensor.detach() for tensor in saved)
    attains = (x == extreme) | (x.isnan() & extreme.isnan())
    return attains.to(x.dtype) / call_function(_Psum, attains, ctx.group, ctx.op_name)


class _AllGather(LinearFunction):
    """Autograd function that gathers the tensors of all ranks as blocks of dim 0."""

    gives_blocks = True

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        blocks = new_like(x.unsqueeze(0).expand(group.size(), *x.shape))
        run_named("all_gather_into_tensor", group, op_name, blocks, x)
        return blocks

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_PsumScatter, grad, *ctx.rest), None, None


class _PsumScatter(LinearFunction):
    """Autograd function that returns the sum of all ranks' blocks for this rank."""

    takes_blocks = True

    @staticmethod
    def forward(blocks: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        total = new_like(blocks[0])
        run_named("reduce_scatter_tensor", group, op_name, total, blocks, ReduceOp.SUM)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_AllGather, grad, *ctx.rest), None, None


class _AllGatherInvariant(InvariantFunction, _AllGather):
    """An ``_AllGather`` with an invariant result, whose gradient is equal on every rank."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        check_gradient(ctx, grad, ctx.rest[0], "all_gather")
        return call_function(_OwnSlice, grad, *ctx.rest), None, None


class _OwnSlice(LinearFunction):
    """Autograd function that returns this rank's block of an invariant tensor; I -> V, free."""

    takes_blocks = True

    @staticmethod
    def forward(blocks: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        mine = blocks[group.rank()]
        return new_like(mine).copy_(mine)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_AllGatherInvariant, grad, *ctx.rest), None, None


def check_gradient(node: Any, grad: torch.Tensor, group: ProcessGroup, operation: str) -> None:
    """Record that a backward reached ``node``, and compare ``grad`` between ranks."""
    note_complete(node, group)
    if get_debug_level() != DebugLevel.DETAIL:
        compare_reached(node, grad.detach(), group, operation)
    else:
        check_invariant(
            grad.detach(),
            group,
            f"the gradient that reaches {operation}",
            where=f"backward of {operation}, gradient of {describe(grad)}",
            expected=f"equal gradients, since the result of {operation} is equal on every rank",
            fix=PVARY_FIX.format(operation=operation),
        )

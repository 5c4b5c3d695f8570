"""Send tokens to the experts of a mixture along a mesh axis, and combine the results.

    collective   from -> to   backward
    dispatch     V -> V       combine without weights
    combine      V -> V       dispatch of the gradient, times the weights

Nothing is dropped or padded: each expert gets a row per token that selects it. A layer's forward
exchanges counts once and rows twice, its backward rows twice. Router, losses, capacity (-1 drops an
entry) and shared experts belong to your model.

Worked example: 3 experts on 2 ranks; rank 0 has experts 0 and 1. Each token selects 2 experts.

                 rank 0                 rank 1
    tokens       a        b             c        d
    experts      [0, 2]   [1, 0]        [2, -1]  [0, 1]
    entries by expert, grouped by rank:
                 a0 b0 b1 | a2          d0 d1 | c2
    arrived      a0 b0 b1 | d0 d1       a2 | c2
    rows         a0 b0 d0  b1 d1        a2 c2
    counts       [3, 2]                 [2]

    >>> import torch, meshdist as md
    >>> def program():
    ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    ...     tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]][md.get_rank()])
    ...     experts = torch.tensor([[[0, 2], [1, 0]], [[2, -1], [0, 1]]][md.get_rank()])
    ...     rows, route = md.experts.dispatch(tokens, experts, "ep", 3, mesh=mesh)
    ...     print(rows.tolist(), route.counts.tolist(), md.experts.combine(rows, route).tolist())
    >>> _ = md.simulate(program, 2)
    [1.0, 2.0, 4.0, 2.0, 4.0] [3, 2] [2.0, 4.0]
    [1.0, 3.0] [2] [3.0, 8.0]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from .arguments import get_integer
from .arrays import as_tensor, describe, like, shape_text
from .checking.call_sites import one_frame
from .collectives.normalize_args import run_named
from .collectives.torch_private import HiddenFromModes, call_function, outside_transforms
from .dtypes import dtype_name
from .error_text import grouped_text, with_article
from .errors import ArgumentError, DtypeError, KindError, ShapeError
from .functional.data_movement import exchange_rows
from .functional.linear_function import LinearFunction
from .groups.process_group import ProcessGroup, resolve_group
from .lax.axes import AxisName, get_axes
from .mesh.device_mesh import DeviceMesh
from .mesh.placement import balanced_boundaries
from .runtime.memory import new_like
from .typed_mode.collective_calls import find_typed_operation
from .typed_mode.context import mark

__all__ = ["Route", "combine", "dispatch"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Route:
    """The route of the rows of a ``dispatch``, which ``combine`` reverses.

    Attributes:
        counts: rows per expert of this rank, in order; int64, in the library and on the device of
            the tokens. ``counts.cumsum(0)`` in int32 is the ``offs`` argument of
            ``torch.nn.functional.grouped_mm``.
    """

    counts: Any
    _axes: DeviceMesh = field(repr=False)
    _shape: tuple[int, int] = field(repr=False)  # of the experts argument: n, k
    _entries: torch.Tensor = field(repr=False)  # its indices of the sent rows, in order
    _by_expert: torch.Tensor = field(repr=False)  # the index of each row among received rows
    _sent: tuple[int, ...] = field(repr=False)  # rows sent to each rank
    _received: tuple[int, ...] = field(repr=False)  # rows received from each rank
    _empty: torch.Tensor | None = field(repr=False)  # the rows, if this rank received none


@one_frame
def dispatch(
    tokens: T,
    experts: Any,
    axis_name: AxisName,
    num_experts: int,
    *,
    mesh: DeviceMesh | None = None,
) -> tuple[T, Route]:
    """Send each token to the ranks of its experts; return the received rows, sorted by expert.

    Varying -> varying. Each rank along ``axis_name`` has a contiguous, balanced block of experts:
    of 5 experts on 2 ranks, rank 0 has 3. A rank may have none.

    Args:
        tokens: an array of shape [n, ...] and any dtype; n may differ between ranks.
        experts: the experts of each token, integers of shape [n, k]. -1 sends nothing (a dropped
            entry, or padding). A token may select an expert twice.
        num_experts: the total number of experts, equal on every rank.
        axis_name, mesh: as for ``lax.psum``.

    Returns:
        The rows of this rank's experts, shape [rows, ...] and dtype as ``tokens``, in new memory,
        sorted by expert, then sender, then token; and the ``Route``, with the rows per expert as
        ``counts``.

    Gradient:
        ``combine`` without weights: a token gets the sum of its rows' gradients.

    Cost:
        An all-to-all of 2 p + num_experts int64 per rank, and an all-to-all of n k rows.

    Raises:
        AxisError, MeshError, NotInGroupError: as for ``lax.psum``.
        KindError, DtypeError: ``tokens`` or ``experts`` is not an array; ``experts`` or
            ``num_experts`` is not of integers. ShapeError: their lengths differ.
        ArgumentError: an expert outside -1 to num_experts - 1 on any rank; on every rank.
        MismatchError: ``num_experts``, dtype or shape of tokens differ; on every rank.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        ...     tokens = torch.tensor([[1.0], [2.0]]) + 10 * md.get_rank()
        ...     experts = torch.tensor([[0, 1], [1, 2]])
        ...     rows, route = md.experts.dispatch(tokens, experts, "ep", 3, mesh=mesh)
        ...     return rows.flatten().tolist(), route.counts.tolist()
        >>> md.simulate(program, 2)
        [([1.0, 11.0, 1.0, 2.0, 11.0, 12.0], [2, 4]), ([2.0, 12.0], [2])]

    Source:
        Shazeer et al., "Outrageously large neural networks" (arXiv:1701.06538), section 3.1;
        without a capacity as in Gale et al., "MegaBlocks" (arXiv:2211.15841).
    """
    axes = get_axes("experts.dispatch", axis_name, mesh)
    typed = find_typed_operation("experts.dispatch", axes)
    if typed is None:
        return _dispatch(tokens, experts, axes, num_experts)
    (x, chosen), text = typed.joined(tokens, experts)
    with HiddenFromModes():
        rows, route = _dispatch(x, chosen, axes, num_experts)
        mark([rows, route.counts], text)  # an array of another library has no type
    return rows, route


@one_frame
def combine(rows: T, route: Route, weights: Any = None) -> T:
    """Send rows back to their tokens; return the weighted sum of each token's rows.

    Varying -> varying. It reverses ``dispatch``.

    Args:
        rows: one row, of any width, for each that ``dispatch`` returned, in order.
        route: the ``Route`` that ``dispatch`` returned.
        weights: the factor of each row, of shape [n, k] like the experts, ignored for entries that
            sent nothing (-1); None for 1.

    Returns:
        An array of shape [n, ...], in new memory: for token i the sum over j of weights[i, j] times
        the row of entry j, or zeros if it sent nothing; in the dtype of the product.

    Gradient:
        ``rows`` get the dispatched gradient times the weights; ``weights`` get the inner product of
        gradient and row, zero if nothing was sent. As in every collective, rows must require a
        gradient on all ranks or on none, also without experts.

    Cost:
        An all-to-all of the rows, also in the backward.

    Raises:
        KindError: ``route`` is not a Route. ShapeError: a wrong number of rows or shape of weights.
        GroupClosedError, MeshError: the mesh of the route is closed, or of another rank.
        MismatchError: dtype or shape of rows differ between ranks; on every rank.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        ...     tokens = torch.tensor([[1.0], [2.0]]) + 10 * md.get_rank()
        ...     experts, weights = torch.tensor([[0, 1], [1, -1]]), torch.full((2, 2), 0.5)
        ...     rows, route = md.experts.dispatch(tokens, experts, "ep", 2, mesh=mesh)
        ...     return md.experts.combine(10 * rows, route, weights).flatten().tolist()
        >>> md.simulate(program, 2)
        [[10.0, 10.0], [110.0, 60.0]]

    Source:
        As ``dispatch``.
    """
    if not isinstance(route, Route):
        raise KindError(
            "experts.combine: route must be the Route that experts.dispatch returned",
            found=f"{route!r}, {with_article(type(route).__name__)}",
            fix="call rows, route = experts.dispatch(...), then experts.combine(rows, route)",
        )
    typed = find_typed_operation("experts.combine", route._axes)
    result: T
    if typed is None:
        result = _combine(rows, route, weights)
        return result
    (y, scale), text = typed.joined(rows, weights)
    with HiddenFromModes():
        result = _combine(y, route, scale)
        mark(result, text)
    return result


def _dispatch(tokens: Any, experts: Any, axes: DeviceMesh, num_experts: int) -> tuple[Any, Route]:
    """Send rows to their experts; return the received rows by expert, and the route."""
    x = as_tensor(tokens, argument="tokens", operation="experts.dispatch", writable=False)
    chosen = as_tensor(experts, argument="experts", operation="experts.dispatch", writable=False)
    num_experts = get_integer(num_experts, "experts.dispatch: num_experts", 1)
    group = resolve_group(axes)
    _check_here(x, chosen, group)
    op_name = f"experts.dispatch(num_experts={num_experts}, {_row_text(x)})"
    with outside_transforms():
        flat = chosen.detach().flatten().to(x.device, torch.int64)
        sent, theirs = _exchange_counts(flat, num_experts, group, op_name)
        dropped = len(flat) - sum(sent)
        entries = flat.argsort(stable=True)[dropped:]  # -1 sorts before all experts
        # Received rows are sorted by sender, then by expert: experts 0 1 0 1 of two senders.
        of_rows = (
            torch.arange(theirs.shape[1], device="cpu")
            .repeat(len(theirs))
            .repeat_interleave(theirs.ravel())
        )
        by_expert = of_rows.argsort(stable=True).to(x.device)
    received = tuple(theirs.sum(1).tolist())
    rows = call_function(_TakeRows, x, entries // chosen.shape[1], len(x))
    rows = exchange_rows(rows, group, sent, received, op_name)
    rows = call_function(_TakeRows, rows, by_expert, len(rows))
    route = Route(
        counts=like(theirs.sum(0).to(x.device), tokens),
        _axes=axes,
        _shape=(chosen.shape[0], chosen.shape[1]),
        _entries=entries,
        _by_expert=by_expert,
        _sent=sent,
        _received=received,
        _empty=None if len(rows) else rows,
    )
    return like(rows, tokens), route


def _check_here(x: torch.Tensor, chosen: torch.Tensor, group: ProcessGroup) -> None:
    where = f"rank {group.world.rank}, {group.name}"
    is_whole = not (chosen.is_floating_point() or chosen.is_complex())
    if not is_whole or chosen.dtype == torch.bool:
        raise DtypeError(
            "experts.dispatch: experts must be integers",
            where=where,
            found=f"experts {describe(chosen)}",
            fix="pass the indices that topk returns: scores.topk(k).indices",
        )
    if chosen.dim() != 2 or x.shape[:1] != chosen.shape[:1]:
        raise ShapeError(
            "experts.dispatch: experts must have one row per token",
            where=where,
            expected="tokens of shape (n, ...) and experts of shape (n, k)",
            found=f"tokens {describe(x)}; experts {describe(chosen)}",
            fix="pass experts.unsqueeze(1) if each token goes to a single expert"
            if chosen.dim() == 1
            else "pass one row of experts for each token, for example scores.topk(k).indices",
        )


def _exchange_counts(
    flat: torch.Tensor, num_experts: int, group: ProcessGroup, op_name: str
) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the rows sent to each rank, and received from each rank by expert.

    Args:
        flat: the expert of each row; -1 for a row that is not sent.

    Raises:
        ArgumentError: an expert of any rank does not exist; on every rank.
    """
    # Send each rank the lowest and highest selected expert, then a count for each of its experts,
    # so that every rank, also one without experts, detects errors of any rank.
    size = group.size()
    bounds = balanced_boundaries(num_experts, (size,))
    lowest, highest = (int(end) for end in flat.aminmax()) if len(flat) else (-1, -1)
    counts = torch.bincount(flat.clamp(-1, num_experts - 1) + 1, minlength=num_experts + 1)
    of_experts = counts[1:].tolist()
    blocks = [of_experts[start:stop] for start, stop in pairwise(bounds)]
    mine = torch.tensor(
        [number for block in blocks for number in (lowest, highest, *block)], device="cpu"
    )
    theirs = mine.new_empty(size * (num_own := 2 + len(blocks[group.rank()])))
    device = group.first_device_type()
    mine, theirs = mine.to(device), theirs.to(device)
    splits = [num_own] * size, [2 + len(block) for block in blocks]
    run_named("all_to_all_single", group, op_name, theirs, mine, *splits)
    theirs = theirs.cpu().view(size, num_own)
    ranges = dict(zip(group.ranks, theirs[:, :2].tolist(), strict=True))
    wrong = {rank: ends for rank, ends in ranges.items() if ends[0] < -1 or ends[1] >= num_experts}
    if wrong:
        raise ArgumentError(
            f"experts.dispatch over {group.name} got experts that do not exist",
            expected=f"experts from 0 to {num_experts - 1}, and -1 for an entry that is not sent",
            found=grouped_text(
                (rank, f"from {low} to {high}") for rank, (low, high) in wrong.items()
            ),
            fix="number the experts from 0, pass the number of experts on all ranks together as "
            "num_experts, and use -1 for an entry that is dropped",
        )
    return tuple(map(sum, blocks)), theirs[:, 2:]


def _combine(rows: Any, route: Route, weights: Any) -> Any:
    """Send rows back along ``route``; return their weighted sum for each token."""
    y = as_tensor(rows, argument="rows", operation="experts.combine", writable=False)
    group = resolve_group(route._axes)
    num_rows = sum(route._received)
    if y.shape[:1] != (num_rows,):
        raise ShapeError(
            "experts.combine: rows must correspond to the rows that experts.dispatch returned",
            where=f"rank {group.world.rank}, {group.name}",
            expected=f"shape ({num_rows}, ...)",
            found=describe(y),
            fix="pass one row for each row that experts.dispatch returned with this route, in the "
            "same order; to exclude a row, set its weight to 0",
        )
    factors = None
    if weights is not None:
        scale = as_tensor(weights, argument="weights", operation="experts.combine", writable=False)
        if scale.shape != route._shape:
            raise ShapeError(
                "experts.combine: weights must have the shape of the experts",
                where=f"rank {group.world.rank}, {group.name}",
                expected=f"shape {route._shape}",
                found=describe(scale),
                fix="pass the values of the same topk call: weights, experts = scores.topk(k)",
            )
        factors = scale.flatten().index_select(0, route._entries).view(-1, *[1] * (y.dim() - 1))
    if route._empty is not None:
        # On a rank without experts the result may not depend on the empty rows. Its backward must
        # still reach both exchanges, because the other ranks wait there.
        y = y + route._empty.sum().to(y.dtype)
    op_name = f"experts.combine({_row_text(y)})"
    y = call_function(_AddRows, y, route._by_expert, num_rows)
    y = exchange_rows(y, group, route._received, route._sent, op_name)
    y = y if factors is None else y * factors
    num_tokens, num_chosen = route._shape
    return like(call_function(_AddRows, y, route._entries // num_chosen, num_tokens), rows)


class _TakeRows(LinearFunction):
    """Autograd function that selects rows by index; backward adds them at these indices."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(x: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
        found = new_like(x, (len(indices), *x.shape[1:]))
        return torch.index_select(x, 0, indices, out=found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_AddRows, grad, *ctx.rest), None, None


class _AddRows(LinearFunction):
    """Autograd function that adds rows to zeros at ``places``; backward selects them."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(rows: torch.Tensor, indices: torch.Tensor, num_rows: int) -> torch.Tensor:
        return new_like(rows, (num_rows, *rows.shape[1:])).zero_().index_add_(0, indices, rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_TakeRows, grad, *ctx.rest), None, None


def _row_text(x: torch.Tensor) -> str:
    return f"rows of {shape_text(x.shape[1:])}, {dtype_name(x.dtype)}"

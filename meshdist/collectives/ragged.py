"""``ragged_all_to_all``: slices of sizes of their own, exchanged between members.

V -> V. Its transpose is itself with offsets and sizes exchanged; the gradient of ``output`` is
zero where rows arrived. It is made of a selection of rows, an exchange and a placing of rows, each
with a derivative, of which the exchange alone sends anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..arrays import describe
from ..error_text import ranks_text
from ..errors import ArgumentError, DtypeError, KindError, ShapeError
from ..groups.process_group import ProcessGroup, resolve_group
from .checks import find_whole_numbers
from .linear_function import LinearFunction
from .list_verbs import all_to_all_single
from .torch_private import call_function, outside_transforms
from .verbs import all_gather_into_tensor

__all__ = ["ragged_all_to_all"]

_NUMBERS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
_FAULTS = (
    "recv_sizes are not what is sent to it",
    "rows sent to it end beyond its output",
    "rows sent to it overlap in its output",
)


def ragged_all_to_all(
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    group: object = None,
) -> torch.Tensor:
    """Every member holds ``output``, with the rows in it that the members have sent.

    Args:
        operand, output: rows along dim 0, of one shape and dtype.
        input_offsets, send_sizes: where in ``operand`` each slice begins, and its number of rows;
            k slices, k a multiple of the group's size, the first ones for its first member.
        output_offsets: where in the *receiver's* output each slice goes.
        recv_sizes: the number of rows of each slice that arrives here, in the order of senders.
        group: whose members take part.

    Raises:
        KindError, ShapeError, DtypeError, ArgumentError: the arguments do not fit one another;
            nothing was sent. Where they do not fit another member's, every member raises the same
            ArgumentError.
    """
    group = resolve_group(group)
    given = (input_offsets, send_sizes, output_offsets, recv_sizes)
    lists = [_whole_numbers(one, name) for one, name in zip(given, _NUMBERS, strict=True)]
    _check_here(operand, output, lists, group)
    starts, sent, places, taken = lists
    with outside_transforms():
        arriving, offsets = _announced(sent, places, group)
        _check_everywhere(output, arriving, offsets, taken, group)
    count = len(sent) // group.size()
    rows = operand.index_select(0, _rows(starts, sent, operand.device))
    arrived = call_function(_Exchange, rows, group, _sums(sent, count), _sums(taken, count))
    return output.index_copy(0, _rows(offsets, taken, output.device), arrived)


def _whole_numbers(given: Any, argument: str) -> list[int]:
    numbers = find_whole_numbers(given.tolist() if hasattr(given, "tolist") else given)
    if numbers is None:
        raise KindError(
            f"ragged_all_to_all: {argument} must be whole numbers",
            expected="a one-dim integer array, or a list of ints",
            found=f"{given!r}, a {type(given).__name__}",
        )
    return numbers


def _check_here(
    operand: torch.Tensor, output: torch.Tensor, lists: Sequence[list[int]], group: ProcessGroup
) -> None:
    """Raise unless this member's arguments fit one another."""
    where = f"rank {group.world.rank}, {group.name}"
    shown = f"operand {describe(operand)}; output {describe(output)}"
    if not operand.dim() or not output.dim() or operand.shape[1:] != output.shape[1:]:
        raise ShapeError(
            "ragged_all_to_all: operand and output must hold rows of one shape",
            where=where,
            expected="equal shapes but for dim 0",
            found=shown,
        )
    if operand.dtype != output.dtype or operand.device != output.device:
        raise DtypeError(
            "ragged_all_to_all: operand and output must have one dtype and device",
            where=where,
            found=f"{shown}; on {operand.device} and {output.device}",
        )
    lengths = {name: len(one) for name, one in zip(_NUMBERS, lists, strict=True)}
    count = lengths["send_sizes"]
    if len(set(lengths.values())) > 1 or count % group.size() or not count:
        raise ShapeError(
            "ragged_all_to_all: offsets and sizes must be as many, a multiple of the group's size",
            where=where,
            expected=f"four lists of k numbers, k a multiple of {group.size()}",
            found=", ".join(f"{length} {name}" for name, length in lengths.items()),
        )
    starts, sent, places, taken = lists
    ends = [start + size for start, size in zip(starts, sent, strict=True)]
    if min(map(min, lists)) < 0 or max(ends) > operand.shape[0]:
        raise ArgumentError(
            "ragged_all_to_all: slices must lie in operand",
            where=where,
            expected=f"no negative number, and no slice beyond row {operand.shape[0]}",
            found=f"input_offsets {starts}, send_sizes {sent}, output_offsets {places}, "
            f"recv_sizes {taken}",
        )


def _announced(
    sent: list[int], places: list[int], group: ProcessGroup
) -> tuple[list[int], list[int]]:
    """The size of each slice that will arrive here, and where its sender wants it."""
    mine = torch.tensor([sent, places]).T.contiguous()
    theirs = torch.empty_like(mine)
    device = group.first_device_type()
    mine, theirs = mine.to(device), theirs.to(device)
    all_to_all_single(theirs, mine, group=group)
    sizes, offsets = theirs.T.tolist()
    return sizes, offsets


def _check_everywhere(
    output: torch.Tensor,
    arriving: list[int],
    offsets: list[int],
    taken: list[int],
    group: ProcessGroup,
) -> None:
    """Raise the same error on every member unless what is sent to each fits its output."""
    spans = sorted(
        (start, start + size) for start, size in zip(offsets, arriving, strict=True) if size
    )
    fault = 0
    if arriving != taken:
        fault = 1
    elif spans and max(end for _, end in spans) > output.shape[0]:
        fault = 2
    elif any(end > start for (_, end), (start, _) in pairwise(spans)):
        fault = 3
    mine = torch.tensor([fault], device=group.first_device_type())
    faults = mine.new_empty(group.size())
    all_gather_into_tensor(faults, mine, group=group)
    found = dict(zip(group.ranks, faults.tolist(), strict=True))
    if any(found.values()):
        lines = [
            f"{ranks_text([rank for rank in found if found[rank] == kind])}: {text}"
            for kind, text in enumerate(_FAULTS, 1)
            if kind in found.values()
        ]
        raise ArgumentError(
            f"ragged_all_to_all over {group.name}: offsets and sizes do not fit between ranks",
            expected="recv_sizes as the senders' send_sizes, and slices that lie apart in output",
            found="\n".join(lines),
            fix="recv_sizes = lax.all_to_all(send_sizes, axis, 0, 0, tiled=True)",
        )


def _rows(starts: list[int], sizes: list[int], device: torch.device) -> torch.Tensor:
    """The rows of all slices, in their order."""
    slices = zip(starts, sizes, strict=True)
    return torch.cat([torch.arange(start, start + size) for start, size in slices]).to(device)


def _sums(sizes: list[int], count: int) -> tuple[int, ...]:
    """The number of rows for each member, of ``count`` slices each."""
    return tuple(sum(sizes[at : at + count]) for at in range(0, len(sizes), count))


class _Exchange(LinearFunction):
    """Rows for each member sent, rows of each member taken; the transpose exchanges both."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(
        rows: torch.Tensor, group: ProcessGroup, sent: tuple[int, ...], taken: tuple[int, ...]
    ) -> torch.Tensor:
        arrived = rows.new_empty((sum(taken), *rows.shape[1:]))
        all_to_all_single(arrived, rows, list(taken), list(sent), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, sent, taken = ctx.rest
        return call_function(_Exchange, grad, group, taken, sent), None, None, None

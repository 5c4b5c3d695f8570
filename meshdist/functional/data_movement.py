"""Move values between ranks with collectives that have derivatives.

    collective    from -> to   backward
    all_to_all    V -> V       all_to_all with both dimensions exchanged
    pswapaxes     V -> V       itself
    ppermute      V -> V       ppermute with reversed pairs
    pshuffle      V -> V       the inverse permutation
    pbroadcast    V -> I       the gradient on the source, zero on other ranks (free)

The rules of ``reductions`` apply. ``ragged_all_to_all`` exchanges slices of different sizes,
V -> V; its transpose swaps offsets and sizes, and the gradient of ``output`` is zero in received
rows. Each of its steps (select, exchange and place rows) has a derivative; only the exchange
communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ..arguments import find_integers, get_integer
from ..arrays import describe
from ..collectives import list_collectives
from ..collectives.normalize_args import lax_name, run_named
from ..collectives.tensor_collectives import all_gather_into_tensor
from ..collectives.torch_private import call_function, outside_transforms
from ..error_text import ranks_text, with_article
from ..errors import ArgumentError, DtypeError, KindError, ShapeError
from ..groups.process_group import ProcessGroup
from ..runtime.memory import new_like
from .linear_function import LinearFunction, cut, get_dim, stack_blocks
from .reductions import InvariantFunction, check_gradient

_NUMBERS = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")
_FAULTS = (
    "recv_sizes differ from the sizes that are sent to it",
    "rows sent to it go beyond the end of its output",
    "rows sent to it overlap in its output",
)


def ragged_all_to_all(
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    group: ProcessGroup,
) -> torch.Tensor:
    """Return ``output`` with all ranks' slices of ``operand``, as ``lax.ragged_all_to_all``."""
    given = (input_offsets, send_sizes, output_offsets, recv_sizes)
    lists = []
    for numbers, name in zip(given, _NUMBERS, strict=True):
        plain = numbers.tolist() if hasattr(numbers, "tolist") else numbers
        lists.append(_integers(plain, "ragged_all_to_all", name, "a one-dim array or a list"))
    _check_here(operand, output, lists, group)
    starts, sent, starts_there, received = lists
    with outside_transforms():
        arriving_sizes, offsets = _exchange_sizes(sent, starts_there, group)
        _check_everywhere(output, arriving_sizes, offsets, received, group)
    count = len(sent) // group.size()
    rows = operand.index_select(0, _rows(starts, sent, operand.device))
    op_name = f"lax.ragged_all_to_all(rows of {tuple(rows.shape[1:])})"
    arrived = exchange_rows(rows, group, _sums(sent, count), _sums(received, count), op_name)
    return output.index_copy(0, _rows(offsets, received, output.device), arrived)


def _check_here(
    operand: torch.Tensor, output: torch.Tensor, lists: Sequence[list[int]], group: ProcessGroup
) -> None:
    """Raise unless operand, output and ``lists`` of offsets and sizes match."""
    where = f"rank {group.world.rank}, {group.name}"
    shown = f"operand {describe(operand)}; output {describe(output)}"
    if not operand.dim() or not output.dim() or operand.shape[1:] != output.shape[1:]:
        raise ShapeError(
            "ragged_all_to_all: operand and output must have rows of the same shape",
            where=where,
            expected="equal shapes except in dimension 0",
            found=shown,
            fix="create output with the row shape of operand",
        )
    if operand.dtype != output.dtype or operand.device != output.device:
        raise DtypeError(
            "ragged_all_to_all: operand and output must have the same dtype and device",
            where=where,
            found=f"{shown}; on {operand.device} and {output.device}",
            fix="create output with the dtype and device of operand",
        )
    lengths = {name: len(numbers) for name, numbers in zip(_NUMBERS, lists, strict=True)}
    count = lengths["send_sizes"]
    if len(set(lengths.values())) > 1 or count % group.size() or not count:
        raise ShapeError(
            "ragged_all_to_all: offsets and sizes must have the same length, a multiple of the "
            "group's size",
            where=where,
            expected=f"four lists of k numbers, k a multiple of {group.size()}",
            found=", ".join(f"{length} {name}" for name, length in lengths.items()),
            fix="pass the same number of slices for each rank, in all four lists",
        )
    starts, sent, offsets, received = lists
    ends = [start + size for start, size in zip(starts, sent, strict=True)]
    if min(map(min, lists)) < 0 or max(ends) > operand.shape[0]:
        raise ArgumentError(
            "ragged_all_to_all: slices must be within operand",
            where=where,
            expected=f"no negative number, and no slice that ends after row {operand.shape[0]}",
            found=f"input_offsets {starts}, send_sizes {sent}, output_offsets {offsets}, "
            f"recv_sizes {received}",
            fix="pass the first row of each slice in input_offsets, and its rows in send_sizes",
        )


def _exchange_sizes(
    sent: list[int], starts_there: list[int], group: ProcessGroup
) -> tuple[list[int], list[int]]:
    """Exchange the size and output offset of each slice; return the received numbers."""
    mine = torch.tensor([sent, starts_there], device="cpu").T.contiguous()
    theirs = torch.empty_like(mine)
    device = group.first_device_type()
    mine, theirs = mine.to(device), theirs.to(device)
    list_collectives.all_to_all_single(theirs, mine, group=group)
    sizes, offsets = theirs.T.tolist()
    return sizes, offsets


def _check_everywhere(
    output: torch.Tensor,
    arriving_sizes: list[int],
    offsets: list[int],
    expected_sizes: list[int],
    group: ProcessGroup,
) -> None:
    """Raise the same error on every rank unless the received slices fit into every output.

    Args:
        arriving_sizes: the rows of each slice, by sender.
        offsets: the first row of each slice in ``output``, by sender.
    """
    spans = sorted(
        (start, start + size) for start, size in zip(offsets, arriving_sizes, strict=True) if size
    )
    fault = 0
    if arriving_sizes != expected_sizes:
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
            f"ragged_all_to_all over {group.name}: offsets and sizes do not match between ranks",
            expected="recv_sizes equal to the senders' send_sizes, and separate slices in output",
            found="\n".join(lines),
            fix="compute recv_sizes = lax.all_to_all(send_sizes, axis, 0, 0, tiled=True)",
        )


def _rows(starts: list[int], sizes: list[int], device: torch.device) -> torch.Tensor:
    """Return the indices of the rows of all slices, in order."""
    slices = zip(starts, sizes, strict=True)
    return torch.cat(
        [torch.arange(start, start + size, device="cpu") for start, size in slices]
    ).to(device)


def _sums(sizes: list[int], count: int) -> tuple[int, ...]:
    """Return the rows per rank: the sum of each run of ``count`` sizes."""
    return tuple(sum(sizes[at : at + count]) for at in range(0, len(sizes), count))


def exchange_rows(
    rows: torch.Tensor,
    group: ProcessGroup,
    sent: tuple[int, ...],
    received: tuple[int, ...],
    op_name: str,
) -> torch.Tensor:
    """Exchange ``rows`` in sizes that both sides know; return received rows by sender; V -> V.

    Args:
        sent, received: rows to send to, and receive from, each rank.
    """
    return call_function(_RowExchange, rows, group, sent, received, op_name)


class _RowExchange(LinearFunction):
    """Autograd function of an uneven all-to-all of rows; backward swaps the sizes."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(
        rows: torch.Tensor,
        group: ProcessGroup,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        op_name: str,
    ) -> torch.Tensor:
        arrived = new_like(rows, (sum(received), *rows.shape[1:]))
        run_named("all_to_all_single", group, op_name, arrived, rows, list(received), list(sent))
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        group, sent, received, op_name = ctx.rest
        return (
            call_function(_RowExchange, grad, group, received, sent, op_name),
            None,
            None,
            None,
            None,
        )


Pairs = tuple[tuple[int, int], ...]


def all_to_all(
    x: torch.Tensor,
    group: ProcessGroup,
    split_axis: int = 0,
    concat_axis: int = 0,
    *,
    tiled: bool = False,
    leaf_name: str = "x",
) -> torch.Tensor:
    """Send block j of ``x`` along ``split_axis`` to rank j, and join received blocks; V -> V.

    Args:
        tiled: keep ``split_axis``; else remove it, and add ``concat_axis`` as a new dimension.
    """
    blocks, concat = blocks_to_exchange(x, group, split_axis, concat_axis, tiled)
    op_name = lax_name("all_to_all", leaf_name, x.shape)
    return stack_blocks(call_function(_AllToAll, blocks, group, op_name), concat, tiled=tiled)


def pswapaxes(
    x: torch.Tensor, group: ProcessGroup, axis: int = 0, *, leaf_name: str = "x"
) -> torch.Tensor:
    """Swap dimension ``axis`` of ``x`` with the ranks of the group; V -> V."""
    blocks, dim = blocks_to_swap(x, group, axis)
    op_name = lax_name("pswapaxes", leaf_name, x.shape)
    return stack_blocks(call_function(_AllToAll, blocks, group, op_name), dim, tiled=False)


def blocks_to_exchange(
    x: torch.Tensor, group: ProcessGroup, split_axis: int, concat_axis: int, tiled: bool
) -> tuple[torch.Tensor, int]:
    """Return the blocks of ``x``, stacked in dim 0, and ``concat_axis`` counted from 0; or raise.

    Args:
        tiled: keep the split dimension in the blocks; else it becomes dim 0.
    """
    split = get_dim(split_axis, x.dim(), "split_axis", "all_to_all")
    concat = get_dim(concat_axis, x.dim(), "concat_axis", "all_to_all")
    return cut(x, split, group, "all_to_all", "split_axis", tiled=tiled), concat


def blocks_to_swap(x: torch.Tensor, group: ProcessGroup, axis: int) -> tuple[torch.Tensor, int]:
    """Return the blocks of ``x`` that ``pswapaxes`` sends, and the split dim; or raise."""
    dim = get_dim(axis, x.dim(), "axis", "pswapaxes")
    return cut(x, dim, group, "pswapaxes", "axis", tiled=False), dim


def ppermute(
    x: torch.Tensor, group: ProcessGroup, perm: Sequence[Any] = (), *, leaf_name: str = "x"
) -> torch.Tensor:
    """Send ``x`` from source to destination of each pair; other ranks get zeros; V -> V."""
    op_name = lax_name("ppermute", leaf_name, x.shape)
    return call_function(_Ppermute, x, group, _checked_pairs(perm, group), op_name)


def pshuffle(
    x: torch.Tensor, group: ProcessGroup, perm: Sequence[int] = (), *, leaf_name: str = "x"
) -> torch.Tensor:
    """Permute ``x``: group rank i gets the ``x`` of group rank ``perm[i]``; V -> V."""
    sources = _integers(perm, "pshuffle", "perm")
    if sorted(sources) != list(range(group.size())):
        raise ArgumentError(
            f"pshuffle over {group.name}: perm is not a permutation of its ranks",
            expected=f"each index from 0 to {group.size() - 1} once",
            found=repr(perm),
            fix="pass each index once, or call ppermute with pairs for some ranks only",
        )
    pairs = tuple((source, index) for index, source in enumerate(sources))
    return call_function(_Ppermute, x, group, pairs, lax_name("pshuffle", leaf_name, x.shape))


def pbroadcast(
    x: torch.Tensor, group: ProcessGroup, source: int = 0, *, leaf_name: str = "x"
) -> torch.Tensor:
    """Broadcast ``x`` of group rank ``source`` to every rank; V -> I."""
    last = group.size() - 1
    root = get_integer(source, "pbroadcast: source", 0, last, where=group.name)
    return call_function(_Pbroadcast, x, group, root, lax_name("pbroadcast", leaf_name, x.shape))


def _integers(
    given: Any, operation: str, argument: str, takes: str = "a list or tuple"
) -> list[int]:
    numbers = find_integers(given)
    if numbers is None:
        raise KindError(
            f"{operation}: {argument} must be {takes} of integers",
            found=f"{given!r}, {with_article(type(given).__name__)}",
            fix=f"pass {takes} of integers",
        )
    return numbers


def _checked_pairs(perm: Any, group: ProcessGroup) -> Pairs:
    """Return ``perm`` as pairs; raise if a source or a destination is repeated."""
    pairs: list[tuple[int, int]] = []
    is_list = isinstance(perm, (list, tuple))
    for pair in perm if is_list else [perm]:
        if not is_list or not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise KindError(
                "ppermute: perm must be a list of pairs (source, destination)",
                found=f"{perm!r}, {with_article(type(perm).__name__)}",
                fix="pass for example [(0, 1), (1, 0)]; for a permutation of all ranks, call "
                "pshuffle(x, axis, [1, 0])",
            )
        source, destination = _integers(pair, "ppermute", "each pair of perm")
        pairs.append((source, destination))
    size = group.size()
    for members, role in zip(zip(*pairs, strict=True), ("source", "destination"), strict=False):
        if len({*members}) < len(members) or not 0 <= min(members) <= max(members) < size:
            outside = [member for member in members if not 0 <= member < size]
            twice = [member for member in members if members.count(member) > 1]
            wrong = (outside or twice)[0]
            raise ArgumentError(
                f"ppermute over {group.name}: {role} {wrong} "
                + ("is not in the group" if outside else "appears twice"),
                expected=f"indices along the axis from 0 to {size - 1}"
                if outside
                else "each index at most once as a source and at most once as a destination",
                found=repr(perm),
                fix="pass indices along the axis, not global ranks"
                if outside
                else "remove the repeated pair, or call ppermute once for each pair",
            )
    return tuple(pairs)


class _AllToAll(LinearFunction):
    """Autograd function of an all-to-all of equal blocks, its own transpose."""

    takes_blocks = gives_blocks = True

    @staticmethod
    def forward(blocks: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
        arrived = new_like(blocks)
        run_named("all_to_all_single", group, op_name, arrived, blocks, None, None)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return call_function(_AllToAll, grad, *ctx.rest), None, None


class _Ppermute(LinearFunction):
    """Autograd function of ``ppermute``: each rank sends and receives at most once."""

    # A collective instead of messages: ranks compare their calls, so different pairs cannot hang.
    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, pairs: Pairs, op_name: str) -> torch.Tensor:
        me, size, count = group.rank(), group.size(), x.numel()
        sent, received = [0] * size, [0] * size
        for source, destination in pairs:
            if source == me:
                sent[destination] = count
            if destination == me:
                received[source] = count
        arrived = new_like(x)
        parts = arrived.view(-1)[: sum(received)], x.reshape(-1)[: sum(sent)]
        run_named("all_to_all_single", group, op_name, *parts, received, sent)
        return arrived if any(received) else arrived.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        group, pairs, op_name = ctx.rest
        inverse = tuple((destination, source) for source, destination in pairs)
        return call_function(_Ppermute, grad, group, inverse, op_name), None, None, None


class _Pbroadcast(InvariantFunction):
    """Autograd function of a broadcast from a source to all ranks."""

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, source: int, op_name: str) -> torch.Tensor:
        result = new_like(x)
        if group.rank() == source:
            result.copy_(x)
        run_named("broadcast", group, op_name, result, source)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        check_gradient(ctx, grad, ctx.rest[0], "pbroadcast")
        return call_function(_KeepOnRoot, grad, *ctx.rest), None, None, None


class _KeepOnRoot(LinearFunction):
    """Autograd function I -> V: rank ``root`` keeps the value, others get zeros; free."""

    @staticmethod
    def forward(x: torch.Tensor, group: ProcessGroup, root: int, op_name: str) -> torch.Tensor:
        result = new_like(x)
        return result.copy_(x) if group.rank() == root else result.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return call_function(_Pbroadcast, grad, *ctx.rest), None, None, None

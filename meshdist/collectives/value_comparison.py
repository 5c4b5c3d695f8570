"""Compare texts and tensors between the ranks of a group.

Each rank makes a 64-bit digest of its texts and its tensors' bits. A MAX all-reduce of digests and
complements shows every rank whether all are equal:

    rank 0: 7    rank 1: 7    rank 2: 9        MAX of (d, ~d) over the ranks: (9, ~7)

Only if digests differ, the first rank broadcasts its texts, and each rank sends at most 8 entries
of 300 characters, little even with thousands of ranks.

A tensor's checksum is an integer sum of its 32-bit words, equal in any order. Odd, distinct weights
make it change if a bit flips or values swap:

    words 3 5 6, weights 1 7 9:  3 + 35 + 54 = 92        5 3 6:  5 + 21 + 54 = 80

Floating tensors count as equal if half of their digits agree, relative to the tensor's largest
value, because equal computations may add in another order. Other dtypes must be identical. NaN
equals NaN, and infinities of one sign are equal.

Worked example: rank 2 of 3 has another value of "step", lacks "lr", and has "eps".

                      rank 0                   rank 1     rank 2
    texts             step: 1, lr: 0.1         as 0       step: 2, eps: 0
    unlike rank 0's   -                        -          step, lr, eps

    >>> import meshdist as md
    >>> def program():
    ...     texts = {"step": "2", "eps": "0"} if md.get_rank() == 2 else {"step": "1", "lr": "0.1"}
    ...     return agree(md.group.WORLD, texts, {}, op_name="options").found
    >>> print(md.simulate(program, 3)[0])
    step: ranks 0-1: 1; rank 2: 2
    lr: ranks 0-1: 0.1; rank 2: missing
    eps: ranks 0-1: missing; rank 2: 0
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import compress
from typing import Any
from zlib import crc32

import torch
from torch._utils import _flatten_dense_tensors, _take_tensors

from ..arrays import describe
from ..backends.operation_args import flat
from ..dtypes import DTYPES
from ..error_text import grouped_text, ranks_text
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .normalize_args import run_named
from .object_protocol import find_device
from .objects import broadcast_object_list, gather_from_all
from .tensor_collectives import broadcast
from .torch_private import hidden_from_modes

Tensors = Mapping[str, torch.Tensor]

_CHUNK = 1 << 16  # words, and as many sums, which stay in a core's cache
_FACTOR, _SPREAD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd: nothing is lost modulo 2^64
_WORDS = {1: torch.int8, 2: torch.int16}  # of smaller elements; else 32 bits
_MOST_SHOWN = 8
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Difference:
    """Difference of texts or tensors between ranks, equal on all of them.

    Args:
        found: a line for each of the first differing entries, for an error.
        differing: the ranks that differ from the group's first rank in the first such entry.
        is_rounding: whether only tensors differ, by less than half of their digits.
    """

    found: str
    differing: Sequence[int] = ()
    is_rounding: bool = False


@hidden_from_modes
@torch.no_grad()
def agree(
    group: ProcessGroup,
    texts: Mapping[str, str],
    tensors: Tensors,
    *,
    op_name: str,
    device: torch.device | None = None,
) -> Difference | None:
    """Return None if all ranks have equal texts and tensors, else the difference; collective.

    Args:
        texts: by label; other labels or another order are a difference.
        tensors: dense, by label. A text under a tensor's label replaces the comparison of shape and
            dtype.
        op_name: names the comparison if ranks call different collectives.
        device: where digests are reduced; None for the group's first.
    """
    differs = find_unequal_digests(group, texts, tensors, op_name=op_name, device=device)
    if not differs:
        return None
    with torch.cuda.device_of(differs):  # the device that sends objects
        held = _with_shapes(texts, tensors)
        short = {label: _shortened(text) for label, text in held.items()}
        if difference := _find_different(short, group, grouped_text):
            return difference
        distances = _distances_to_first(tensors, group, differs.device, op_name)
        for is_rounding in (False, True):
            counted = {
                f"{label}, {held[label]}" * bool(label): distances[label]
                * (is_rounding or distances[label] > tolerance(x))
                for label, x in tensors.items()
            }
            if difference := _find_different(counted, group, _odd_ranks):
                return replace(difference, is_rounding=is_rounding)
    return Difference("the same entries, in another order")


def find_unequal_digests(
    group: ProcessGroup,
    texts: Mapping[str, str],
    tensors: Tensors,
    *,
    op_name: str,
    device: torch.device | None,
) -> torch.Tensor:
    """Return whether texts or tensors differ, as a tensor on ``device``; collective."""
    text = json.dumps([*_with_shapes(texts, tensors).items()]).encode()
    number = int.from_bytes(blake2b(text, digest_size=8).digest(), "little", signed=True)
    digest = checksum([*tensors.values()], find_device(group, device, op_name)) + number
    return find_unequal(digest, group, op_name)


def find_unequal(numbers: torch.Tensor, group: ProcessGroup, op_name: str) -> torch.Tensor:
    """Return whether each integer differs between ranks; collective."""
    both = torch.stack([numbers, ~numbers])
    run_named("all_reduce", group, op_name, both, ReduceOp.MAX)
    return both[0] != ~both[1]


def is_any(is_so: bool, group: ProcessGroup, op_name: str) -> bool:
    """Return whether ``is_so`` is True on any rank; collective."""
    flag = torch.tensor([is_so], dtype=torch.uint8, device=group.first_device_type())
    run_named("all_reduce", group, op_name, flag, ReduceOp.MAX)
    return bool(flag.item())


def _with_shapes(texts: Mapping[str, str], tensors: Tensors) -> dict[str, str]:
    """Return ``texts``, and shape and dtype of each tensor whose label has no text."""
    return {**texts, **{label: describe(x) for label, x in tensors.items()}, **texts}


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}... ({len(text)} characters, {crc32(text.encode()):08x})"


def _find_different(
    mine: Mapping[str, Any],
    group: ProcessGroup,
    show: Callable[[Iterable[tuple[int, Any]], str], str],
) -> Difference | None:
    """Return how short values by label differ between ranks, or None; collective.

    Args:
        show: formats pairs of rank and value, with a separator.
    """
    box: list[Any] = [mine]
    broadcast_object_list(box, group=group, group_src=0)
    (first,) = box
    unlike = [label for label in {**first, **mine} if first.get(label) != mine.get(label)]
    of_all = gather_from_all((unlike[:_MOST_SHOWN], len(unlike)), group)
    of_some = dict.fromkeys(label for some, _ in of_all for label in some)
    labels = [label for label in {**first, **of_some} if label in of_some][:_MOST_SHOWN]
    if not labels:
        return None
    rows = gather_from_all([mine.get(label, "missing") for label in labels], group)
    columns = [*zip(*rows, strict=True)]
    lines = [
        f"{label}: " * bool(label) + show(zip(group.ranks, column, strict=True), "; ")
        for label, column in zip(labels, columns, strict=True)
    ]
    if (num_more := max(num for _, num in of_all) - len(lines)) > 0:
        lines.append(f"and {num_more} more")
    is_differing = [value != columns[0][0] for value in columns[0]]
    return Difference("\n".join(lines), [*compress(group.ranks, is_differing)])


def _odd_ranks(distances: Iterable[tuple[int, float]], _: str) -> str:
    """Return a text of the ranks whose distance from the first rank is not the most frequent."""
    by_rank = dict(distances)
    usual = Counter(by_rank.values()).most_common(1)[0][0]
    odd, rest = (
        [rank for rank, distance in by_rank.items() if (distance == usual) is i]
        for i in (False, True)
    )
    return (
        f"{ranks_text(odd)} {'differs' if len(odd) == 1 else 'differ'} from {ranks_text(rest)}, "
        f"by up to {max(by_rank.values()):.2g} of its largest value"
    )


def _distances_to_first(
    tensors: Tensors, group: ProcessGroup, device: torch.device, op_name: str
) -> dict[str, float]:
    """Return the distance of each tensor from the group's first rank's; collective.

    Args:
        tensors: labels, shapes and dtypes are equal on all ranks, in any order.
    """
    labels, distances = sorted(tensors), dict.fromkeys(tensors, 0.0)
    sums = [int(checksum([tensors[label]], device)) for label in labels]
    unequal = find_unequal(torch.tensor(sums, dtype=torch.int64, device=device), group, op_name)
    for label in compress(labels, unequal.tolist()):
        mine = tensors[label].to(device).clone(memory_format=torch.contiguous_format)
        first = mine.clone()
        broadcast(first, group=group, group_src=0)
        # Numbers of other bits may be equal in double precision: zeros, NaNs, large integers.
        least = 0.0 if torch.equal(_words(mine), _words(first)) else math.ulp(0.0)
        distances[label] = relative_distance(mine, first) or least
    return distances


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a 64-bit checksum of dense tensors on ``device``, without waiting for accelerators.

    Example:
        >>> x, y = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])
        >>> bool(checksum([x], x.device) == checksum([y], x.device))
        False
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for own in dict.fromkeys(tensor.device for tensor in tensors):
        here = [_words(x) for x in tensors if x.device == own]
        length = min(_CHUNK if own.type == "cpu" else 64 * _CHUNK, sum(map(len, here)))
        sums = torch.zeros(length, dtype=torch.int64, device=own)
        for alike in _take_tensors(
            here, 4 * _CHUNK
        ):  # a large tensor alone, small tensors together
            for chunk in _flatten_dense_tensors(alike).split(max(length, 1)):
                part = sums[: len(chunk)]  # times a factor, plus the row: one pass, little memory
                torch.add(chunk, part, alpha=_FACTOR, out=part)
        weights = torch.arange(1, length + 1, device=own).mul_(_FACTOR)
        weights = (weights ^ (weights >> 29)).mul_(_SPREAD).bitwise_or_(1)
        # Wait for the copy to the CPU before reading it.
        mine = sums.mul_(weights).sum().to(device, non_blocking=device.type != "cpu")
        total = total * _FACTOR + mine
    return total


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as a flat tensor of integers."""
    # The stride of a single element may be 0.
    bits = flat(x.resolve_conj().resolve_neg().contiguous())
    return bits.view(_WORDS.get(x.itemsize, torch.int32))


def tolerance(x: torch.Tensor) -> float:
    """Return the relative distance up to which tensors of this dtype count as equal."""
    is_inexact = x.dtype in DTYPES and (x.is_floating_point() or x.is_complex())
    return torch.finfo(x.dtype).eps ** 0.5 if is_inexact else 0.0


def relative_distance(mine: torch.Tensor, first: torch.Tensor) -> float:
    """Return the largest |mine - first| over the largest |first|; NaN and infinities are equal."""
    gap = largest_gap(mine, first)
    if not gap:
        return 0.0
    scale = largest_value(first)
    return gap / scale if scale else torch.inf


def largest_gap(mine: torch.Tensor, first: torch.Tensor) -> float:
    """Return the largest |mine - first|; NaN and infinities of one sign are equal."""
    mine, first = _widened(mine), _widened(first)
    differs = (mine != first) & ~(mine.isnan() & first.isnan())
    gaps = (mine - first)[differs].abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(gaps.max()) if gaps.numel() else 0.0


def largest_value(x: torch.Tensor) -> float:
    """Return the largest finite |x|; 0 if there is none."""
    wide = _widened(x)
    finite = wide[wide.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _widened(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in double precision, as bytes first if torch has no arithmetic of its dtype."""
    numbers = x if x.dtype in DTYPES else x.contiguous().view(torch.uint8)
    return numbers.to(torch.complex128 if x.is_complex() else torch.float64)

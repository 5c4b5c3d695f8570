"""What one member's call says of itself, and whether the members' calls make one collective.

A header holds numbers of elements, never data. Where sizes may differ between members, what one
sends to another has to be what that one takes from it; all else is equal on all members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..arrays import dtype_name
from ..error_text import ranks_text
from ..reduce_ops import ReduceKind, op_name

__all__ = ["Header", "Sizes", "data_text", "find_mismatch", "sizes_of"]

Sizes: TypeAlias = int | tuple[int, ...] | None
"""Elements for each member of the group, or the same for all; None where nothing is said."""

_TO_THE_ROOT = ("reduce", "gather")


@dataclass(frozen=True)
class Header:
    """One call, without its data.

    Args:
        verb: the communicator's name for it.
        dtypes: one, or one for each tensor of a list that may mix them.
        counts: elements of the tensor, or of each tensor of a list; equal on all members. None
            for verbs whose sizes may differ.
        op: the reduction, or None.
        root: the member that a rooted verb starts from or leads to, or None.
        sends, takes: elements to and from each member, where they are compared pair by pair.
        caller: the public verb that it belongs to, if one does.
    """

    verb: str
    dtypes: tuple[torch.dtype, ...] = ()
    counts: Sizes = None
    op: ReduceKind | None = None
    root: int | None = None
    sends: Sizes = None
    takes: Sizes = None
    caller: str = ""

    def agrees_with(self, other: Header) -> bool:
        """Whether what has to be equal on all members is equal."""
        return (
            self.verb == other.verb
            and self.caller == other.caller
            and self.dtypes == other.dtypes
            and self.counts == other.counts
            and self.op == other.op
            and self.root == other.root
        )

    def show(self, ranks: Sequence[int]) -> str:
        """The call in words; ``ranks`` are the members' global ranks.

        Example:
            >>> sizes = {"sends": (2, 2), "takes": (2, 3)}
            >>> Header("all_to_all", (torch.float32,), **sizes).show((4, 5))
            'all_to_all of [2, 2] float32, taking [2, 3]'
            >>> Header("gather", (torch.int8,), counts=4, root=1).show((4, 5))
            'gather(to rank 5) of 4 int8'
        """
        how = [] if self.op is None else [op_name(self.op)]
        if self.root is not None:
            word = "to" if self.verb in _TO_THE_ROOT else "from"
            how.append(f"{word} {ranks_text([ranks[self.root]])}")
        text = (self.caller or self.verb) + (f"({', '.join(how)})" if how else "")
        is_uneven = self.counts is None
        amount = self.sends if is_uneven else self.counts
        if amount is None:
            return text
        text += f" of {data_text(amount, self.dtypes)}"
        if not is_uneven and _differ(self.sends, amount):
            text += f", sending {_sizes_text(self.sends)}"
        if is_uneven or _differ(self.takes, amount):
            text += f", taking {_sizes_text(self.takes)}"
        return text


def sizes_of(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """The number of elements of each."""
    return tuple(tensor.numel() for tensor in tensors)


def data_text(amount: Sizes, dtypes: Sequence[torch.dtype]) -> str:
    """Elements and dtype, for messages.

    Example:
        >>> data_text((2, 3), (torch.int8,)), data_text((2, 3), (torch.int8, torch.bool))
        ('[2, 3] int8', '[2 int8, 3 bool]')
    """
    names = [dtype_name(dtype) for dtype in dtypes]
    if isinstance(amount, tuple) and len(set(names)) != 1:
        pairs = zip(amount, names, strict=True)
        return f"[{', '.join(f'{count} {name}' for count, name in pairs)}]"
    return f"{_sizes_text(amount)} {names[0]}"


def find_mismatch(
    member: int, header: Header, others: Mapping[int, Header], ranks: Sequence[int]
) -> str | None:
    """Say which pair disagrees about what moves between ``member`` and ``others``, if one does."""
    for other in sorted(others):
        for source, sent, target, taken in (
            (member, header.sends, other, others[other].takes),
            (other, others[other].sends, member, header.takes),
        ):
            if sent is None or taken is None:
                continue
            gives = sent if isinstance(sent, int) else sent[target]
            wants = taken if isinstance(taken, int) else taken[source]
            if gives != wants:
                whom = "itself" if source == target else f"rank {ranks[target]}"
                does = "and takes" if source == target else "which takes"
                return f"rank {ranks[source]} sends {gives} to {whom}, {does} {wants}"
    return None


def _differ(sizes: Sizes, amount: Sizes) -> bool:
    """Whether ``sizes`` say more than that everyone has ``amount``."""
    if sizes is None or sizes == amount:
        return False
    return isinstance(sizes, int) or any(size != amount for size in sizes)


def _sizes_text(sizes: Sizes) -> str:
    return str(list(sizes) if isinstance(sizes, tuple) else sizes)

"""What each member hands to a collective, and what it must hold afterwards, for one case of the
table.

A plan is one ``Call`` per member: the collective's arguments by torch's names, arrays as NumPy, and
what those that the collective writes must become. All other arguments must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.operations import oracle
from tests.operations.oracle import Array


@dataclass(frozen=True)
class Case:
    """One call of one collective; its repr can be pasted.

    Args:
        shape: of one member's array; uneven cases change its first dim.
        layout: how arrays lie in memory: "plain", "strided" or "turned".
        form: one of the collective's ways to be called, see ``OPERATIONS``.
        root: the root as a group rank.
        is_root_global: whether the root is given as a global rank.
    """

    operation: str
    size: int
    library: str = "torch"
    dtype: str = "float32"
    op: str | None = None
    shape: tuple[int, ...] = (3,)
    layout: str = "plain"
    is_uneven: bool = False
    form: str = ""
    root: int | None = None
    is_root_global: bool = False
    is_async: bool = False


@dataclass(frozen=True)
class Call:
    """One member's part of a case."""

    arguments: dict[str, Any]
    expected: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OperationSpec:
    """How a collective can be called.

    Args:
        plan: makes the members' calls of a case.
        reduces: whether it takes ``op``.
        root: "src" or "dst" where it has a root.
        forms: its ways to be called.
        least_dims: fewer make no sense.
        can_be_uneven: whether members may hold different sizes, none among them.
        takes_async: whether it has ``async_op``.
    """

    plan: Callable[[Case, Sequence[int]], list[Call]]
    reduces: bool = False
    root: str | None = None
    forms: tuple[str, ...] = ("",)
    least_dims: int = 0
    can_be_uneven: bool = False
    takes_async: bool = True


def plan(case: Case, ranks: Sequence[int] | None = None) -> list[Call]:
    """The members' calls; ``ranks`` are their global ranks, 0, 1, ... by default.

    Arrays differ by global rank, so that what another group's member wrote is told apart.
    """
    return OPERATIONS[case.operation].plan(case, list(range(case.size)) if ranks is None else ranks)


def given(case: Case, rank: int, slot: int = 0, shape: Sequence[int] | None = None) -> Array:
    return oracle.values(rank, case.shape if shape is None else shape, case.dtype, slot)


def junk(like: Array, case: Case) -> Array:
    """What an output holds before: no result of any case by chance in all its elements."""
    return oracle.values(17, like.shape, case.dtype, slot=5)


def shape_of_part(case: Case, sender: int, receiver: int) -> tuple[int, ...]:
    """The part that one member has for another; where cases are uneven, some are empty."""
    if not case.is_uneven:
        return case.shape
    return ((case.shape[0] + sender + 2 * receiver) % 4, *case.shape[1:])


def joined(parts: Sequence[Array], form: str) -> Array:
    if form == "stacked" or not parts[0].ndim:
        return np.stack(parts)
    return np.concatenate(parts)


def _all_reduce(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [given(case, rank) for rank in ranks]
    after = oracle.all_reduce(parts, str(case.op))
    return [Call({"tensor": x}, {"tensor": y}) for x, y in zip(parts, after, strict=True)]


def _all_reduce_coalesced(case: Case, ranks: Sequence[int]) -> list[Call]:
    shapes = [case.shape, (2,), ()]
    lists = [[given(case, rank, slot, s) for slot, s in enumerate(shapes)] for rank in ranks]
    after = oracle.all_reduce_coalesced(lists, str(case.op))
    return [Call({"tensors": x}, {"tensors": y}) for x, y in zip(lists, after, strict=True)]


def _reduce(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [given(case, rank) for rank in ranks]
    assert case.root is not None
    after = oracle.reduce(parts, str(case.op), case.root)
    return [Call({"tensor": x}, {"tensor": y}) for x, y in zip(parts, after, strict=True)]


def _broadcast(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [given(case, rank) for rank in ranks]
    assert case.root is not None
    after = oracle.broadcast(parts, case.root)
    return [Call({"tensor": x}, {"tensor": y}) for x, y in zip(parts, after, strict=True)]


def _all_gather(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [
        given(case, rank, shape=shape_of_part(case, member, 0)) for member, rank in enumerate(ranks)
    ]
    return [
        Call(
            {"tensor_list": [junk(part, case) for part in parts], "tensor": mine},
            {"tensor_list": after},
        )
        for mine, after in zip(parts, oracle.all_gather(parts), strict=True)
    ]


def _all_gather_into_tensor(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [given(case, rank) for rank in ranks]
    whole = joined(parts, case.form)
    return [
        Call({"output_tensor": junk(whole, case), "input_tensor": mine}, {"output_tensor": whole})
        for mine in parts
    ]


def _all_gather_coalesced(case: Case, ranks: Sequence[int]) -> list[Call]:
    shapes = [case.shape, (2,), ()]
    lists = [[given(case, rank, slot, s) for slot, s in enumerate(shapes)] for rank in ranks]
    empty = [[junk(part, case) for part in mine] for mine in lists]
    return [
        Call(
            {"output_tensor_lists": empty, "input_tensor_list": mine},
            {"output_tensor_lists": lists},
        )
        for mine in lists
    ]


def _gather(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [given(case, rank) for rank in ranks]
    assert case.root is not None
    calls = []
    for mine, after in zip(parts, oracle.gather(parts, case.root), strict=True):
        if after is None:
            off_root = {"none": None, "empty": []}[case.form]
            calls.append(Call({"tensor": mine, "gather_list": off_root}))
        else:
            outputs = [junk(part, case) for part in parts]
            calls.append(Call({"tensor": mine, "gather_list": outputs}, {"gather_list": after}))
    return calls


def _scatter(case: Case, ranks: Sequence[int]) -> list[Call]:
    assert case.root is not None
    lists = [[given(case, rank, slot) for slot in range(len(ranks))] for rank in ranks]
    calls = []
    for member, after in enumerate(oracle.scatter(lists, case.root)):
        off_root = {"none": None, "empty": []}[case.form]
        inputs = lists[member] if member == case.root else off_root
        calls.append(Call({"tensor": junk(after, case), "scatter_list": inputs}, {"tensor": after}))
    return calls


def _parts_by_receiver(case: Case, ranks: Sequence[int]) -> list[list[Array]]:
    """For a reduce-scatter: every member has equal sizes for one receiver."""
    return [
        [given(case, rank, slot, shape_of_part(case, 0, slot)) for slot in range(len(ranks))]
        for rank in ranks
    ]


def _reduce_scatter(case: Case, ranks: Sequence[int]) -> list[Call]:
    lists = _parts_by_receiver(case, ranks)
    after = oracle.reduce_scatter(lists, str(case.op))
    return [
        Call({"output": junk(y, case), "input_list": mine}, {"output": y})
        for mine, y in zip(lists, after, strict=True)
    ]


def _reduce_scatter_tensor(case: Case, ranks: Sequence[int]) -> list[Call]:
    lists = _parts_by_receiver(case, ranks)
    after = oracle.reduce_scatter(lists, str(case.op))
    return [
        Call({"output": junk(y, case), "input": joined(mine, case.form)}, {"output": y})
        for mine, y in zip(lists, after, strict=True)
    ]


def _parts_by_pair(case: Case, ranks: Sequence[int]) -> list[list[Array]]:
    """For an all-to-all: every pair of members has a size of its own."""
    return [
        [given(case, rank, slot, shape_of_part(case, member, slot)) for slot in range(len(ranks))]
        for member, rank in enumerate(ranks)
    ]


def _all_to_all(case: Case, ranks: Sequence[int]) -> list[Call]:
    lists = _parts_by_pair(case, ranks)
    return [
        Call(
            {"output_tensor_list": [junk(y, case) for y in after], "input_tensor_list": mine},
            {"output_tensor_list": after},
        )
        for mine, after in zip(lists, oracle.all_to_all(lists), strict=True)
    ]


def _all_to_all_single(case: Case, ranks: Sequence[int]) -> list[Call]:
    lists = _parts_by_pair(case, ranks)
    calls = []
    for mine, parts in zip(lists, oracle.all_to_all(lists), strict=True):
        after = np.concatenate(parts)
        splits: tuple[Any, Any]
        if case.is_uneven or case.form == "given":
            splits = [len(part) for part in parts], [len(part) for part in mine]
        else:
            splits = {"none": (None, None), "empty": ([], [])}[case.form]
        arguments = {
            "output": junk(after, case),
            "input": np.concatenate(mine),
            "output_split_sizes": splits[0],
            "input_split_sizes": splits[1],
        }
        calls.append(Call(arguments, {"output": after}))
    return calls


def _shift(case: Case, ranks: Sequence[int]) -> list[Call]:
    parts = [
        given(case, rank, shape=shape_of_part(case, member, 0)) for member, rank in enumerate(ranks)
    ]
    return [
        Call({"sent": mine, "received": junk(after, case)}, {"received": after})
        for mine, after in zip(parts, oracle.shift(parts), strict=True)
    ]


_BLOCKS = ("joined", "stacked")
_OFF_ROOT = ("none", "empty")
_SPLITS = ("none", "empty", "given")

OPERATIONS = {
    "all_reduce": OperationSpec(_all_reduce, reduces=True),
    "all_reduce_coalesced": OperationSpec(_all_reduce_coalesced, reduces=True),
    "reduce": OperationSpec(_reduce, reduces=True, root="dst"),
    "broadcast": OperationSpec(_broadcast, root="src"),
    "all_gather": OperationSpec(_all_gather, can_be_uneven=True),
    "all_gather_into_tensor": OperationSpec(_all_gather_into_tensor, forms=_BLOCKS),
    "all_gather_single": OperationSpec(_all_gather_into_tensor, forms=_BLOCKS),
    "all_gather_coalesced": OperationSpec(_all_gather_coalesced),
    "gather": OperationSpec(_gather, root="dst", forms=_OFF_ROOT),
    "scatter": OperationSpec(_scatter, root="src", forms=_OFF_ROOT),
    "reduce_scatter": OperationSpec(_reduce_scatter, reduces=True, can_be_uneven=True),
    "reduce_scatter_tensor": OperationSpec(_reduce_scatter_tensor, reduces=True, forms=_BLOCKS),
    "reduce_scatter_single": OperationSpec(_reduce_scatter_tensor, reduces=True, forms=_BLOCKS),
    "all_to_all": OperationSpec(_all_to_all, can_be_uneven=True),
    "all_to_all_single": OperationSpec(
        _all_to_all_single, forms=_SPLITS, least_dims=1, can_be_uneven=True
    ),
    # Not collectives, but ways to shift arrays by one member with messages, see ``runs``.
    "send and recv": OperationSpec(_shift, can_be_uneven=True, takes_async=False),
    "recv from anyone": OperationSpec(_shift, can_be_uneven=True, takes_async=False),
    "isend and irecv": OperationSpec(_shift, can_be_uneven=True, takes_async=False),
    "batch_isend_irecv": OperationSpec(_shift, can_be_uneven=True, takes_async=False),
}

"""Run torch's collectives on lists with one tensor per rank, whose sizes may differ.

The rules of ``tensor_collectives`` apply. Lists are lists or tuples of torch tensors, NumPy or CuPy
arrays of one dtype and device type. Ranks compare sent and received sizes before any data moves.
"""

from __future__ import annotations

from typing import Any

from ..backends.work import Work
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..reduce_ops import ReduceOp, Reduction
from .argument_checks import get_root
from .normalize_args import prepare
from .registration import collective

__all__ = [
    "all_gather",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "reduce_scatter",
    "scatter",
]


@collective(has_fast_path=True)
def all_gather(
    tensor_list: list[Any], tensor: Any, group: GroupLike = None, async_op: bool = False
) -> Work | None:
    """Gather the tensors of all ranks into a list on every rank, in group order.

    Args:
        tensor_list: one array per rank, as large as that rank's tensor; sizes may differ. Written
            in place.
        tensor: any shape; the same dtype on every rank.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for equal sizes of n bytes over p ranks.

    Raises:
        ArgumentError: not one array per rank. ShapeError: this rank's entry has another size.
        MismatchError: sent and received sizes differ between ranks.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     mine = torch.full((md.get_rank() + 1,), md.get_rank())
        ...     parts = [torch.empty(n + 1, dtype=torch.int64) for n in range(2)]
        ...     dist.all_gather(parts, mine)
        ...     return [part.tolist() for part in parts]
        >>> md.simulate(program, 2)
        [[[0], [1, 1]], [[0], [1, 1]]]
    """
    return prepare("all_gather", group, tensor_list, tensor).run(async_op)


@collective(has_fast_path=True, missing=(0,))
def gather(
    tensor: Any,
    gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gather the tensors of all ranks into a list on the destination, in group order.

    Args:
        tensor: an array; equal dtype and element count on every rank.
        gather_list: on the destination one array per rank, written in place; None or [] elsewhere.
        dst: the destination's global rank (default 0); or
        group_dst: its group rank.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes sent by every rank except the destination.

    Raises:
        ArgumentError: no list on the destination, a list elsewhere, or both ``dst`` and
            ``group_dst``.
        NotInGroupError: the destination or this rank is not in the group.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     is_root = md.get_rank() == 0
        ...     parts = [torch.empty(2) for _ in range(2)] if is_root else None
        ...     dist.gather(torch.ones(2) + md.get_rank(), parts, dst=0)
        ...     return [part.tolist() for part in parts or []]
        >>> md.simulate(program, 2)
        [[[1.0, 1.0], [2.0, 2.0]], []]
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    root = get_root(group, dst, group_dst, "gather", "dst")
    return prepare("gather", group, tensor, gather_list, root).run(async_op)


@collective(has_fast_path=True, missing=(0,))
def scatter(
    tensor: Any,
    scatter_list: list[Any] | None = None,
    src: int | None = None,
    group: GroupLike = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Scatter the source's list of tensors: rank j receives entry j.

    Args:
        tensor: an array; equal dtype and element count on every rank. Written in place.
        scatter_list: on the source one array per rank; None or [] elsewhere.
        src: the source's global rank (default 0); or
        group_src: its group rank.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes received by every rank except the source.

    Raises:
        As ``gather``, for the source.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     parts = [torch.ones(2), torch.full((2,), 5.0)] if md.get_rank() == 0 else None
        ...     x = torch.empty(2)
        ...     dist.scatter(x, parts, src=0)
        ...     return x.tolist()
        >>> md.simulate(program, 2)
        [[1.0, 1.0], [5.0, 5.0]]
    """
    group = group if type(group) is ProcessGroup else resolve_group(group)
    root = get_root(group, src, group_src, "scatter", "src")
    return prepare("scatter", group, tensor, scatter_list, root).run(async_op)


@collective()
def reduce_scatter(
    output: Any,
    input_list: list[Any],
    op: Reduction = ReduceOp.SUM,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce lists of tensors and scatter the results: rank j receives the reduction of entry j.

    Args:
        output: any shape. Written in place.
        input_list: one array per rank, the same sizes on every rank; sizes within the list may
            differ. This rank's entry is as large as ``output``.
        op, group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for parts of n bytes.

    Raises:
        As ``all_gather``. DtypeError: the dtypes differ, or do not support the reduction.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     out = torch.empty(md.get_rank() + 1)
        ...     dist.reduce_scatter(out, [torch.ones(1), torch.full((2,), 2.0)])
        ...     return out.tolist()
        >>> md.simulate(program, 2)
        [[2.0], [4.0, 4.0]]
    """
    return prepare("reduce_scatter", group, output, input_list, op).run(async_op)


@collective(has_fast_path=True)
def all_to_all(
    output_tensor_list: list[Any],
    input_tensor_list: list[Any],
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Send entry j of a list to rank j, and receive a tensor from each rank.

    Args:
        output_tensor_list: one array per rank, as large as that rank's tensor for this rank.
            Written in place.
        input_tensor_list: one array per rank, of any sizes.
        group, async_op: as in ``all_reduce``.

    Cost: each rank sends its inputs once, except its own.

    Raises:
        As ``all_gather``. DtypeError: the dtypes differ.

    Example:
        >>> import meshdist as md, torch
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     inputs = list((torch.arange(2) + 2 * md.get_rank()).split(1))
        ...     outputs = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
        ...     dist.all_to_all(outputs, inputs)
        ...     return torch.cat(outputs).tolist()
        >>> md.simulate(program, 2)
        [[0, 2], [1, 3]]
    """
    return prepare("all_to_all", group, output_tensor_list, input_tensor_list).run(async_op)


@collective(has_fast_path=True)
def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: GroupLike = None,
    async_op: bool = False,
) -> Work | None:
    """Split ``input`` along dimension 0, and exchange the parts between all ranks.

    Args:
        output: shape [m, ...]. Written in place.
        input: shape [n, ...]; part j is sent to rank j.
        output_split_sizes, input_split_sizes: the rows from and for each rank; None or [] for equal
            parts.
        group, async_op: as in ``all_reduce``.

    Cost: as ``all_to_all``.

    Raises:
        ShapeError: dimension 0 is not divisible, sizes do not add up to it, or row sizes differ.
        DtypeError: the dtypes differ.
        MismatchError: sent and received sizes differ between ranks.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     rank = md.get_rank()
        ...     out = torch.empty(2 + rank, dtype=torch.int64)
        ...     sizes = ([1, 1], [1, 2])[rank]
        ...     md.all_to_all_single(out, torch.arange(2 + rank) + 10 * rank, sizes, sizes)
        ...     return out.tolist()
        >>> md.simulate(program, 2)
        [[0, 10], [1, 11, 12]]
    """
    sizes = output_split_sizes, input_split_sizes
    return prepare("all_to_all_single", group, output, input, *sizes).run(async_op)

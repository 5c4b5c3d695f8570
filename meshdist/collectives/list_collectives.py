"""torch's collectives on lists of a tensor per member, whose sizes may differ.

Arguments, errors and results follow the rules of ``operations``. Lists are lists or tuples of
torch tensors, NumPy or CuPy arrays, of one dtype and one device type; what one member takes must
be what the other sends, which is compared before any data moves.
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
    """Every member's list holds all members' tensors, in group order.

    Args:
        tensor_list: one array per member, written in place: as many elements as that member's
            tensor has, which may differ between members.
        tensor: any shape and dtype; the same dtype on all members.
        group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank where sizes are equal, for n bytes over p ranks.

    Raises:
        ArgumentError: not one array per member. ShapeError: my own place has another size.
        MismatchError: a member takes another size than I send.

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
    """The destination's list holds all members' tensors, in group order.

    Args:
        tensor: any shape and dtype, equal in number and dtype on all members.
        gather_list: on the destination one array per member, written in place; None or [] on
            the others.
        dst: the destination's global rank (0 if neither is given); or
        group_dst: its rank in the group.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes sent by every rank but the destination, for n bytes.

    Raises:
        ArgumentError: a list is missing on the destination, or given elsewhere; two destinations.
        NotInGroupError: the destination or this rank is no member.

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
    """Every member's tensor becomes its own of the source's list.

    Args:
        tensor: any shape and dtype, equal in number and dtype on all members. Written in place.
        scatter_list: on the source one array per member; None or [] on the others.
        src: the source's global rank (0 if neither is given); or
        group_src: its rank in the group.
        group, async_op: as in ``all_reduce``.

    Cost: n bytes reach every rank but the source, for n bytes each.

    Raises:
        ArgumentError: a list is missing on the source, or given elsewhere; two sources.
        NotInGroupError: the source or this rank is no member.

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
    """Each member's output is the reduction of all members' inputs for it.

    Args:
        output: any shape. Written in place.
        input_list: one array per member, equal in sizes on all members; they may differ within
            the list, and this rank's own has as many elements as ``output``.
        op, group, async_op: as in ``all_reduce``.

    Cost: n (p - 1) bytes sent per rank for parts of n bytes.

    Raises:
        ArgumentError: not one array per member. ShapeError: my own input has another size.
        DtypeError: two dtypes, or a dtype that the op lacks.

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
    """Each member's j-th output is what member j holds for it.

    Args:
        output_tensor_list: one array per member, written in place: as many elements as that
            member's input for this rank has.
        input_tensor_list: one array per member, of any sizes; the j-th goes to member j.
        group, async_op: as in ``all_reduce``.

    Cost: everything but my own part is sent once.

    Raises:
        ArgumentError: not one array per member. DtypeError: two dtypes.
        MismatchError: a member takes another size than I send.

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
    """Each member's output holds, along dim 0, what every member's input has for it.

    Args:
        output: shape [m, ...]. Written in place.
        input: shape [n, ...], cut along dim 0; the j-th part goes to member j.
        output_split_sizes: how many rows come from each member; None or [] for equal parts.
        input_split_sizes: how many rows go to each member; None or [] for equal parts.
        group, async_op: as in ``all_reduce``.

    Cost: everything but my own part is sent once.

    Raises:
        ShapeError: dim 0 does not divide, or the sizes do not add up to it; rows of two sizes.
        DtypeError: two dtypes. MismatchError: a member takes another size than I send.

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

"""Reduce many tensors with few messages: flatten dense tensors, sum sparse tensors by rows.

A bucket has tensors of one dtype and device, so a single flat tensor and all-reduce suffice.
Elements are in row-major order, or in each tensor's memory order if views need its strides:

    a = [[1, 2], [3, 4]] of strides (1, 2), and b = [5]     row-major: 1 2 3 4 5     own: 1 3 2 4 5
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from ..backends.work import Work, may_be_dropped
from ..errors import ArgumentError, DtypeError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceKind, ReduceOp
from ..runtime.memory import new_like
from .tensor_collectives import all_reduce, broadcast

Item: TypeAlias = tuple[int, Hashable]
"""The bytes of a parameter's gradient, and the kind that all gradients of its bucket share."""

CHUNK_BYTES = 32 * 1024 * 1024
_ALIGNMENT = 16  # a piece of the flat buffer is viewed as any dtype


def items_of(
    parameters: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    alone: Collection[int] = (),
) -> list[Item]:
    """Return (bytes, kind) of each parameter; a bucket takes parameters of a single kind.

    Args:
        dtype: of the sent gradients; None for each parameter's dtype.
        alone: indices of parameters that share a bucket with no other.
    """
    return [
        (
            p.numel() * (dtype or p.dtype).itemsize,
            ((dtype or p.dtype, p.device), index if index in alone else None),
        )
        for index, p in enumerate(parameters)
    ]


def assign_buckets(
    items: Sequence[Item], order: Sequence[int], caps: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return buckets as tuples of item indices, in order of completion.

    Args:
        order: the indices in the expected order of gradients.
        caps: bytes of each kind's first bucket, second, ...; the last repeats. A larger item gets
            its own bucket.

    Example:
        >>> items = [(4, "f32"), (8, "f32"), (2, "f16"), (4, "f32")]
        >>> assign_buckets(items, [3, 2, 1, 0], caps=(4, 12))
        ((3,), (2,), (1, 0))
    """
    buckets: list[list[int]] = []
    bucket_state: dict[Hashable, tuple[list[int], int]] = {}  # latest bucket, free bytes
    counts: dict[Hashable, int] = {}
    for index in order:
        num_bytes, kind = items[index]
        bucket, free = bucket_state.get(kind, ([], 0))
        if not bucket or num_bytes > free:
            nth = counts.get(kind, 0)
            bucket, free = [], caps[min(nth, len(caps) - 1)]
            counts[kind] = nth + 1
            buckets.append(bucket)
        bucket.append(index)
        bucket_state[kind] = bucket, free - num_bytes
    positions = {index: position for position, index in enumerate(order)}
    return tuple(sorted(map(tuple, buckets), key=lambda bucket: positions[bucket[-1]]))


def views_into(flat: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return adjacent views into ``flat`` with the shapes of ``likes``, in order.

    Example:
        >>> flat = torch.arange(5)
        >>> views_into(flat, [torch.zeros(1), torch.zeros(2, 2)])
        [tensor([0]), tensor([[1, 2], [3, 4]])]
    """
    parts = zip(flat.split([like.numel() for like in likes]), likes, strict=True)
    return [
        part.as_strided(like.shape, dense_stride(like.shape, like.stride())) for part, like in parts
    ]


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return a tensor's strides if it has no gaps or overlaps in memory, else row-major strides.

    Example:
        >>> dense_stride((2, 3), (1, 2)), dense_stride((2, 3), (6, 2))
        ((1, 2), (3, 1))
    """
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            break
        expected *= size
    else:
        return tuple(stride)
    return torch.empty(tuple(shape), device="meta").stride()


def start_reduction(flat: torch.Tensor, op: ReduceKind, group: ProcessGroup) -> Work:
    """Return the Work of an in-place all-reduce; no warning is logged if nothing waits for it."""
    work = all_reduce(flat, op, group, async_op=True)
    assert work is not None
    return may_be_dropped(work)


def reduce_together(
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    op: ReduceKind = ReduceOp.SUM,
    *,
    likes: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Return the reductions of dense tensors of one dtype and device, by one all-reduce.

    Args:
        likes: tensors with the strides for results, equal on all ranks; None for row-major.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     return reduce_together([torch.ones(1), torch.ones(2)], dist.group.WORLD)
        >>> md.simulate(program, 2)[0]
        [tensor([2.]), tensor([2., 2.])]
    """
    sizes = [tensor.numel() for tensor in tensors]
    flat = new_like(tensors[0].new_empty(1).expand(sum(sizes)))
    if likes is None:
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
        parts = zip(flat.split(sizes), tensors, strict=True)
        found = [part.view(tensor.shape) for part, tensor in parts]
    else:
        found = views_into(flat, likes)
        torch._foreach_copy_(found, list(tensors))
    all_reduce(flat, op, group)
    return found


@torch.no_grad()
def broadcast_from(source: int, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Write the values of group rank ``source`` into every member's tensors; collective."""
    for chunk in _chunks(tensors):
        sizes = [_padded_bytes(tensor) for tensor in chunk]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=chunk[0].device)
        pieces = [
            part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(flat.split(sizes), chunk, strict=True)
        ]
        if group.rank() == source:
            torch._foreach_copy_(pieces, chunk)
        broadcast(flat, group=group, group_src=source)
        if group.rank() != source:
            torch._foreach_copy_(chunk, pieces)


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of non-empty tensors of one device, up to 32 MiB; larger tensors alone."""
    bucket_state: dict[torch.device, list[torch.Tensor]] = {}
    filled: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.device
        if tensor.numel() == 0:
            continue
        num_bytes = filled.get(device, 0) + _padded_bytes(tensor)
        if num_bytes > CHUNK_BYTES and device in bucket_state:
            yield bucket_state.pop(device)
            num_bytes = _padded_bytes(tensor)
        bucket_state.setdefault(device, []).append(tensor)
        filled[device] = num_bytes
    yield from bucket_state.values()


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def sparse_psum(grad: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of all members' sparse tensors, coalesced, without a gradient; collective."""
    rows = grad.detach().coalesce()
    count = torch.tensor([rows._nnz()], device=grad.device)
    counts = count.new_empty(group.size())
    group.all_gather_single(counts, count).wait()
    return sum_rows(group, rows, counts.tolist())


def sum_rows(group: Any, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Return the coalesced sum of all members' sparse rows, ``counts`` of each; collective."""
    # Concatenate indices along their last dimension, values along their first.
    indices = [mine.indices().new_empty(mine.sparse_dim(), count) for count in counts]
    values = [mine.values().new_empty(count, *mine.values().shape[1:]) for count in counts]
    group.allgather([indices], [mine.indices().contiguous()]).wait()
    group.allgather([values], [mine.values().contiguous()]).wait()
    summed = torch.sparse_coo_tensor(
        torch.cat(indices, 1), torch.cat(values), mine.shape, check_invariants=False
    )
    return summed.coalesce()


def sum_sparse(group: Any, tensor: torch.Tensor, op: ReduceKind) -> None:
    """Write the members' sum of sparse ``tensor`` into it; raise unless COO and SUM; collective."""
    if tensor.layout is not torch.sparse_coo:
        raise ArgumentError(
            "all_reduce cannot reduce a tensor that is neither dense nor sparse COO",
            expected="layout torch.strided or torch.sparse_coo",
            found=f"layout {tensor.layout}",
            fix="pass tensor.to_dense()",
        )
    if op != ReduceOp.SUM:
        raise DtypeError(
            f"all_reduce cannot reduce a sparse tensor with {op.name}",
            expected="SUM",
            fix="pass tensor.to_dense()",
        )
    with torch.no_grad():
        tensor.copy_(sparse_psum(tensor, group))

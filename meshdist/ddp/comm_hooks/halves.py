"""Hooks that send 16-bit numbers in place of the gradients' own.

On the CPU a large bucket is converted inside its own memory, piece by piece while a piece is in the
cache: new memory of that size would cost more than the bytes that are not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from ...groups.process_group import ProcessGroup
from ...reduce_ops import ReduceOp
from .bucket import GradBucket
from .reducing import reduced
from .states import group_for

__all__ = [
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

_PIECE = 1 << 17  # elements

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def fp16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in float16: half the bytes of float32, 11 bits of precision, at most 65,504.

    Each rank's gradients are divided by the number of ranks before they are added.

    Args:
        process_group: a group or a mesh; None is that of the wrapper.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory and dtype.

    Cost: one all-reduce of 2 bytes per element.
    """
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in bfloat16: half the bytes of float32, 8 bits of precision, float32's range.

    Args:
        process_group: a group or a mesh; None is that of the wrapper.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory and dtype.

    Cost: one all-reduce of 2 bytes per element.
    """
    return _compressed(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` work on float16: its bucket is converted before, and its result after.

    Args:
        hook: any communication hook, such as ``powerSGD_hook``.

    Returns:
        A hook for ``register_comm_hook``, with the state of ``hook``.
    """

    def fp16_compress_wrapper_hook(
        state: Any, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _converted(torch.float16, hook, state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Let ``hook`` work on bfloat16: its bucket is converted before, and its result after.

    Args:
        hook: any communication hook, such as ``powerSGD_hook``.

    Returns:
        A hook for ``register_comm_hook``, with the state of ``hook``.
    """

    def bf16_compress_wrapper_hook(
        state: Any, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _converted(torch.bfloat16, hook, state, bucket)

    return bf16_compress_wrapper_hook


def _compressed(
    dtype: torch.dtype, process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    group = group_for(process_group, bucket)
    buffer = bucket.buffer()
    if _fits_inside(buffer, dtype):
        half = _shrunk(buffer, dtype, group.size())
        return reduced(half, ReduceOp.SUM, group).then(lambda _: _grown(half, buffer))
    half = buffer.to(dtype, copy=True).div_(group.size())
    return reduced(half, ReduceOp.SUM, group).then(lambda done: buffer.copy_(done.value()[0]))


def _fits_inside(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``buffer`` is to be converted inside its own memory."""
    is_large = buffer.layout is torch.strided and buffer.numel() > _PIECE
    has_room = buffer.element_size() >= 2 * dtype.itemsize and not buffer.is_complex()
    return is_large and has_room and buffer.is_cpu and buffer.is_contiguous()


def _shrunk(buffer: torch.Tensor, dtype: torch.dtype, num_ranks: int) -> torch.Tensor:
    """``buffer / num_ranks`` in ``dtype``, where ``buffer`` begins, which it overwrites."""
    half = buffer.view(dtype)[: buffer.numel()]
    for is_first, part, into in _pieces(buffer, half):
        # The first piece alone would be read and written in one place.
        into.copy_(part.to(dtype) if is_first else part).div_(num_ranks)
    return half


def _grown(half: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """``buffer``, with the values of ``half``, which lies where it begins."""
    for is_first, into, part in reversed([*_pieces(buffer, half)]):
        into.copy_(part.clone() if is_first else part)
    return buffer


def _pieces(
    buffer: torch.Tensor, half: torch.Tensor
) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """The pieces of both, in order; and whether one is the first."""
    pairs = zip(buffer.split(_PIECE), half.split(_PIECE), strict=True)
    return ((place == 0, *pair) for place, pair in enumerate(pairs))


def _converted(
    dtype: torch.dtype, hook: Hook, state: Any, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype, copy=True))

    def convert_back(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        return buffer.copy_(value[0] if isinstance(value, (list, tuple)) else value)

    return hook(state, bucket).then(convert_back)

"""Hooks that send 16-bit numbers in place of the gradients' own."""

from __future__ import annotations

from collections.abc import Callable
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
    half = buffer.to(dtype, copy=True).div_(group.size())
    return reduced(half, ReduceOp.SUM, group).then(lambda done: buffer.copy_(done.value()[0]))


def _converted(
    dtype: torch.dtype, hook: Hook, state: Any, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype, copy=True))

    def convert_back(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        return buffer.copy_(value[0] if isinstance(value, (list, tuple)) else value)

    return hook(state, bucket).then(convert_back)

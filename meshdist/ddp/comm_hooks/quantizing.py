"""Hooks that send 8-bit numbers: each gradient as a step between the least and the greatest.

All ranks gather what every rank has sent, and add it up themselves in one order, so that all have
the same averages. They work piece by piece, while a piece is in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...collectives.verbs import all_gather_into_tensor
from ...groups.process_group import ProcessGroup
from .bucket import GradBucket
from .reducing import done_with
from .states import group_for

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_STEPS = 255
_LEAST_SCALE = torch.finfo(torch.float32).eps
_CHANNEL_SIZE = 512
_PIECE = 1 << 16  # elements


def quantization_pertensor_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in 8 bits, with one scale for the whole bucket.

    Args:
        process_group: a group or a mesh; None is that of the wrapper.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's own memory and dtype.

    Cost: one all-gather of a byte per element: less than an all-reduce of float32 on up to 8 ranks.
    """
    return _averaged(process_group, bucket, _CHANNEL_SIZE, shares_scale=True)


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = _CHANNEL_SIZE
) -> torch.futures.Future[torch.Tensor]:
    """Average in 8 bits, with a scale for each ``bucket_size`` elements, so more exactly.

    Args:
        process_group: a group or a mesh; None is that of the wrapper.
        bucket: the gradients.
        bucket_size: how many elements share a scale.

    Returns:
        A Future of the averages, in the bucket's own memory and dtype.

    Cost: one all-gather of a byte per element, and 8 per scale.
    """
    return _averaged(process_group, bucket, bucket_size, shares_scale=False)


def _averaged(
    process_group: ProcessGroup | None, bucket: GradBucket, size: int, *, shares_scale: bool
) -> torch.futures.Future[torch.Tensor]:
    group = group_for(process_group, bucket)
    buffer = bucket.buffer()
    if not buffer.numel():
        return done_with(buffer)
    mine = _packed(buffer, size, shares_scale)
    gathered = mine.new_empty(group.size() * mine.numel())

    def add_up(_: object) -> torch.Tensor:
        parts = [_parts(packed, buffer.numel()) for packed in gathered.split(mine.numel())]
        for channels, elements in _pieces(buffer.numel(), size):
            total = buffer.new_zeros(elements.stop - elements.start, dtype=torch.float32)
            for facts, steps in parts:
                scale, zero = facts if shares_scale else facts[:, channels]
                total += (_rows(steps[elements], channels) - zero).mul_(scale).view(-1)
            buffer[elements] = total.div_(group.size())
        return buffer

    work = all_gather_into_tensor(gathered, mine, group, async_op=True)
    return work.get_future().then(add_up)  # type: ignore[union-attr]


def _packed(values: torch.Tensor, size: int, shares_scale: bool) -> torch.Tensor:
    """Scales and zero points of channels of ``size`` values, then a step per value; as bytes."""
    ends = [
        _rows(values[one], channels).aminmax(dim=1)
        for channels, one in _pieces(values.numel(), size)
    ]
    least = torch.cat([end.min for end in ends]).float()
    greatest = torch.cat([end.max for end in ends]).float()
    if shares_scale:
        least, greatest = least.amin(0, keepdim=True), greatest.amax(0, keepdim=True)
    least, greatest = least.clamp(max=0), greatest.clamp(min=0)
    scale = ((greatest - least) / _STEPS).clamp(min=_LEAST_SCALE)
    zero = (-least / scale).round().clamp(0, _STEPS)
    facts = torch.stack([scale, zero])[..., None]
    packed = torch.empty(facts.nbytes + values.numel(), dtype=torch.uint8, device=values.device)
    packed[: facts.nbytes] = facts.view(-1).view(torch.uint8)
    steps = packed[facts.nbytes :]
    for channels, elements in _pieces(values.numel(), size):
        scale, zero = facts if shares_scale else facts[:, channels]
        # A value that is not finite gets any step: its scale makes the sum NaN, or infinite.
        found = (_rows(values[elements], channels) / scale).round_().add_(zero)
        steps[elements] = found.clamp_(0, _STEPS).view(-1)
    return packed


def _parts(packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of ``_packed``: scales and zero points, shape (2, n, 1); the steps."""
    facts, steps = packed.split([packed.numel() - numel, numel])
    return facts.clone().view(torch.float32).view(2, -1, 1), steps


def _pieces(numel: int, size: int) -> Iterator[tuple[slice, slice]]:
    """The channels, and the elements, of each piece; the last one may be part of a channel."""
    whole = numel - numel % size
    step = max(_PIECE // size, 1) * size
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield slice(start // size, stop // size), slice(start, stop)
    if whole < numel:
        yield slice(whole // size, whole // size + 1), slice(whole, numel)


def _rows(elements: torch.Tensor, channels: slice) -> torch.Tensor:
    """The elements of a piece, one channel in each row."""
    return elements.view(channels.stop - channels.start, -1)

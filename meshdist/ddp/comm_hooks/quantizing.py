"""Hooks that send 8-bit numbers: each gradient as a step between the least and the greatest.

All ranks gather what every rank has sent, and add it up themselves in one order, so that all have
the same averages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...collectives.verbs import all_gather_into_tensor
from ...groups.process_group import ProcessGroup
from .bucket import GradBucket
from .states import group_for

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]

_STEPS = 255
_LEAST_SCALE = torch.finfo(torch.float32).eps
_SCALE_BYTES = 8  # of a channel: its scale and its zero point, as float32


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
    return _averaged(process_group, bucket, max(bucket.buffer().numel(), 1))


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = 512
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
    return _averaged(process_group, bucket, bucket_size)


def _averaged(
    process_group: ProcessGroup | None, bucket: GradBucket, channel_size: int
) -> torch.futures.Future[torch.Tensor]:
    group = group_for(process_group, bucket)
    buffer = bucket.buffer()
    mine = _packed(buffer, channel_size)
    gathered = mine.new_empty(group.size() * mine.numel())

    def add_up(_: object) -> torch.Tensor:
        total = torch.zeros_like(buffer, dtype=torch.float32)
        for packed in gathered.split(mine.numel()):
            total += _unpacked(packed, channel_size, buffer.numel())
        return buffer.copy_(total.div_(group.size()))

    work = all_gather_into_tensor(gathered, mine, group, async_op=True)
    return work.get_future().then(add_up)  # type: ignore[union-attr]


def _packed(values: torch.Tensor, channel_size: int) -> torch.Tensor:
    """The scales and zero points of all channels, then a byte for each value, as bytes."""
    numel = values.numel()
    padding = -numel % channel_size
    channels = F.pad(values.to(torch.float32), (0, padding)).view(-1, channel_size)
    least, greatest = channels.amin(1).clamp(max=0), channels.amax(1).clamp(min=0)
    scale = ((greatest - least) / _STEPS).clamp(min=_LEAST_SCALE)
    zero = (-least / scale).round().clamp(0, _STEPS)
    steps = (channels / scale[:, None]).round_().add_(zero[:, None])
    # What is not finite has no step; its scale, infinite or NaN, makes the sum NaN on all ranks.
    steps = steps.nan_to_num_(0).clamp_(0, _STEPS).to(torch.uint8)
    return torch.cat([torch.stack([scale, zero]).view(torch.uint8).view(-1), steps.view(-1)])


def _unpacked(packed: torch.Tensor, channel_size: int, numel: int) -> torch.Tensor:
    """The values of ``_packed``, as float32."""
    num_channels = packed.numel() // (channel_size + _SCALE_BYTES)
    facts, steps = packed.split([num_channels * _SCALE_BYTES, num_channels * channel_size])
    scale, zero = facts.clone().view(torch.float32).view(2, num_channels, 1)
    values: torch.Tensor = (steps.view(num_channels, channel_size) - zero) * scale
    return values.view(-1)[:numel]

"""Broadcasts of many tensors, whatever their dtypes, as few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..groups.process_group import ProcessGroup
from .verbs import broadcast

__all__ = ["broadcast_from"]

_CHUNK_BYTES = 32 * 1024 * 1024
_ALIGNMENT = 16  # a piece of the flat buffer is viewed as any dtype


@torch.no_grad()
def broadcast_from(source: int, tensors: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    """Give every member the values of group rank ``source``, in place; collective over ``group``.

    Cost: one broadcast per device and 32 MiB, whatever the number and dtypes of the tensors.
    """
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
    """Cut into lists of one device and, but for single larger tensors, at most 32 MiB."""
    filling: dict[torch.device, list[torch.Tensor]] = {}
    filled: dict[torch.device, int] = {}
    for tensor in tensors:
        device = tensor.device
        if tensor.numel() == 0:
            continue
        num_bytes = filled.get(device, 0) + _padded_bytes(tensor)
        if num_bytes > _CHUNK_BYTES and device in filling:
            yield filling.pop(device)
            num_bytes = _padded_bytes(tensor)
        filling.setdefault(device, []).append(tensor)
        filled[device] = num_bytes
    yield from filling.values()


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

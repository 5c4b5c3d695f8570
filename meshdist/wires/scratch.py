"""Memory for the copies that some verbs need while they run."""

from __future__ import annotations

import threading

import torch

__all__ = ["Scratch"]

_MOST_BYTES = 256 << 20


class Scratch:
    """CPU memory that is used again: fresh pages cost more than what is done with them.

    The two blocks that were given back last are kept, of at most 256 MiB each; no verb needs more.
    A block that is never given back, since its verb failed, is the garbage collector's.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._changing = threading.Lock()  # any thread may copy results back

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of ``count`` elements of ``like``'s dtype and device, of any values."""
        if not like.is_cpu:
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        with self._changing:
            for place, block in enumerate(self._kept):
                if block.numel() >= num_bytes:
                    del self._kept[place]
                    return block[:num_bytes].view(like.dtype)
        return torch.empty(num_bytes, dtype=torch.uint8).view(like.dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what ``take`` gave; the caller must not use it any more."""
        if tensor.is_cpu and tensor.untyped_storage().nbytes() <= _MOST_BYTES:
            block = torch.empty(0, dtype=torch.uint8)
            block.set_(tensor.untyped_storage())
            with self._changing:
                self._kept = [block, *self._kept[:1]]

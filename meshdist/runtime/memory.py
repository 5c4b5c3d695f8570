"""Memory that is used again: of results, and of the copies that some collectives need while they
run.

Linux hands out memory as pages that it clears at first touch: of 4 KiB that takes longer than to
write the page, of 2 MiB a fraction. So large results lie on huge pages, and when the last tensor on
such memory has gone, the next result takes it.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

_HUGE_PAGE = 2 << 20
_SMALLEST = 1 << 20
MOST_KEPT = 512 << 20
_MOST_WASTE = 2  # times as large as needed


class _Pool:
    """Unused blocks of memory for large results, of 512 MiB at most."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()
        self._changing = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray | None:
        """Return bytes that come back here with their last reference; None if memory lacks."""
        with self._changing:
            self._collect()
            most = _MOST_WASTE * num_bytes
            fits = [block for block in self._free if num_bytes <= _room(block) <= most]
            if fits:
                block = min(fits, key=_room)
                self._free.remove(block)
            else:
                try:
                    block = _new_block(num_bytes)
                except OSError:
                    self._free.clear()
                    return None
        whole = np.frombuffer(block, np.uint8)
        weakref.finalize(whole, self._give, block).atexit = False
        start = -whole.ctypes.data % _HUGE_PAGE
        return whole[start : start + num_bytes]

    def _give(self, block: mmap.mmap) -> None:
        # Called wherever a tensor dies, also by the garbage collector amidst ``take``.
        self._returned.append(block)
        if self._changing.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._changing.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if _room(block) <= MOST_KEPT:  # a larger one would push out all others
                self._free.append(block)
        while sum(map(_room, self._free)) > MOST_KEPT:
            del self._free[0]


def _new_block(num_bytes: int) -> mmap.mmap:
    # Where mappings need not begin at a huge page, the first of them is looked for inside.
    pages = -(-num_bytes // _HUGE_PAGE) + 1
    block = mmap.mmap(-1, pages * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may have none
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _room(block: mmap.mmap) -> int:
    return len(block) - _HUGE_PAGE


_pool = _Pool()


def forget() -> None:
    """Give the unused memory that is kept for new results back to the system."""
    global _pool
    _pool = _Pool()


os.register_at_fork(after_in_child=forget)  # a thread of the parent may hold the pool's lock


def new_like(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return an uninitialized contiguous tensor like ``tensor``, in its shape or ``shape``."""
    if tensor.layout is not torch.strided:  # sparse tensors have no contiguous form
        return torch.empty_like(tensor)
    num_bytes = tensor.element_size() * (tensor.numel() if shape is None else math.prod(shape))
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu
    if is_plain and num_bytes >= _SMALLEST and hasattr(mmap, "MADV_HUGEPAGE"):
        memory = _pool.take(num_bytes)
        if memory is not None:
            flat = torch.from_numpy(memory).view(tensor.dtype)
            return flat.view(tensor.shape if shape is None else tuple(shape))
    if shape is not None:
        return tensor.new_empty(shape)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


MOST_BYTES = 256 << 20


class Scratch:
    """A pool of two blocks of CPU memory, for copies that collectives need while they run."""

    # The two blocks that were given back last are kept, of at most 256 MiB each; no collective
    # needs more. A block that is never given back, since its collective failed, is the garbage
    # collector's.

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._changing = threading.Lock()  # any thread may copy results back

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return ``count`` uninitialized elements, flat, of the dtype and device of ``like``."""
        if not like.is_cpu:
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        with self._changing:
            for place, block in enumerate(self._kept):
                if block.numel() >= num_bytes:
                    del self._kept[place]
                    return block[:num_bytes].view(like.dtype)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").view(like.dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Put memory from ``take`` back into the pool; the caller must not use it any more."""
        if tensor.is_cpu and tensor.untyped_storage().nbytes() <= MOST_BYTES:
            block = torch.empty(0, dtype=torch.uint8, device="cpu")
            block.set_(tensor.untyped_storage())
            with self._changing:
                self._kept = [block, *self._kept[:1]]

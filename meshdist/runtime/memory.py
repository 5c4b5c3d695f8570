"""Reuse memory of large results and of temporary copies in collectives.

Linux clears pages on first access: 4 KiB pages take longer than writing them, 2 MiB pages a
fraction. So large results use huge pages, and freed memory is reused.
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
MAX_FREE_BYTES = 512 << 20
_MOST_WASTE = 2  # times as large as needed


class _Pool:
    """Unused memory blocks for large results, at most 512 MiB."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._returned: deque[mmap.mmap] = deque()
        self._changing = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray | None:
        """Return memory that returns to the pool when unreferenced; None if out of memory."""
        with self._changing:
            self._collect()
            most = _MOST_WASTE * num_bytes
            fits = [block for block in self._free if num_bytes <= _size_of(block) <= most]
            if fits:
                block = min(fits, key=_size_of)
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
        # Called wherever a tensor is freed, possibly by the garbage collector inside ``take``.
        self._returned.append(block)
        if self._changing.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._changing.release()

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if _size_of(block) <= MAX_FREE_BYTES:  # a larger block would evict all others
                self._free.append(block)
        while sum(map(_size_of, self._free)) > MAX_FREE_BYTES:
            del self._free[0]


def _new_block(num_bytes: int) -> mmap.mmap:
    # One more page, because mappings need not start at a huge-page boundary.
    pages = -(-num_bytes // _HUGE_PAGE) + 1
    block = mmap.mmap(-1, pages * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel may have none
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def _size_of(block: mmap.mmap) -> int:
    return len(block) - _HUGE_PAGE


_pool = _Pool()


def forget() -> None:
    """Return unused memory to the system."""
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
    """Pool of two blocks of CPU memory, for temporary copies in collectives."""

    # Keeps the two blocks returned last, of at most 256 MiB each; no collective needs more. If a
    # collective fails and does not return its block, the garbage collector frees it.

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._changing = threading.Lock()  # any thread may copy results back

    def take(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Return ``count`` uninitialized elements, flat, of the dtype and device of ``like``."""
        if not like.is_cpu:
            return like.new_empty(count)
        num_bytes = count * like.element_size()
        with self._changing:
            for index, block in enumerate(self._blocks):
                if block.numel() >= num_bytes:
                    del self._blocks[index]
                    return block[:num_bytes].view(like.dtype)
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").view(like.dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return memory from ``take`` to the pool; the caller must not use it afterwards."""
        if tensor.is_cpu and tensor.untyped_storage().nbytes() <= MOST_BYTES:
            block = torch.empty(0, dtype=torch.uint8, device="cpu")
            block.set_(tensor.untyped_storage())
            with self._changing:
                self._blocks = [block, *self._blocks[:1]]

"""Whether ranks can read each other's memory here, and memory that nobody else can read."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from functools import cache

import pytest
import torch

MEMFD_SECRET = 447
PAGE = mmap.PAGESIZE


@cache
def may_read_others() -> bool:
    """Whether the kernel lets a child of this process read another one's memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    text = ctypes.create_string_buffer(b"proof")
    reader, writer = os.pipe()
    other = os.fork()
    if other == 0:
        time.sleep(20.0)
        os._exit(0)
    asker = os.fork()
    if asker == 0:
        found = ctypes.create_string_buffer(5)
        here, there = ((ctypes.c_size_t * 2)(ctypes.addressof(x), 5) for x in (found, text))
        num_read = libc.process_vm_readv(other, here, 1, there, 1, 0)
        os.write(writer, b"yes" if num_read == 5 and found.raw == b"proof" else b"no")
        os._exit(0)
    answer = os.read(reader, 3)
    os.kill(other, signal.SIGKILL)
    for child in (other, asker):  # and no other child of this process
        os.waitpid(child, 0)
    for end in (reader, writer):
        os.close(end)
    return answer == b"yes"


reads_others = pytest.mark.skipif(
    not may_read_others(), reason="the kernel does not let processes read each other"
)


def secret_memory(num_pages: int, secret: range) -> torch.Tensor | None:
    """Memory of which the kernel lets nobody read the ``secret`` pages but its process.

    None where it has no such thing.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fd = libc.syscall(MEMFD_SECRET, 0)
    if fd < 0:
        return None
    os.ftruncate(fd, num_pages * PAGE)
    memory = torch.frombuffer(mmap.mmap(-1, num_pages * PAGE), dtype=torch.float32)
    if secret:
        place = memory.data_ptr() + secret.start * PAGE
        read_and_write, shared_at_this_place = 3, 0x11
        libc.mmap(place, len(secret) * PAGE, read_and_write, shared_at_this_place, fd, 0)
    return memory

"""What makes the CPU wait for the GPU is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Let what makes the CPU wait for the GPU raise."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")  # it sees not all waits
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

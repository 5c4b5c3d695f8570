"""Data parallelism over a mesh axis."""

from . import comm_hooks

__all__ = ["comm_hooks"]

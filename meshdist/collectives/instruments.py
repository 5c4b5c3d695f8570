"""What every public verb wears: a place in torch's profiler, a clean end of torch.compile's graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["verb"]

_F = TypeVar("_F", bound=Callable[..., object])


def verb(function: _F) -> _F:
    """Mark ``function`` as a verb."""
    return function

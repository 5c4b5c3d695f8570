"""Functions that torch.compile runs as they are, between two graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
    set_code_exec_strategy,
)

_F = TypeVar("_F", bound=Callable[..., Any])

_WHY_NOT_TRACED = (
    "meshdist calls cannot be part of a graph: a collective waits for other ranks, and annotations "
    "are not visible there; without fullgraph=True, torch.compile breaks the graph at the call"
)


def untraced(function: _F) -> _F:
    """Mark ``function`` so that torch.compile runs its whole call untraced; return it."""
    # As torch.compiler.disable, without importing the whole compiler and without a wrapper. Behind
    # ``contextmanager`` it serves a context.
    never = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, never)  # once it runs
    marked = cast(Any, function)
    marked._torchdynamo_disable = True  # where a graph comes to its call
    marked._torchdynamo_disable_msg = _WHY_NOT_TRACED
    return function

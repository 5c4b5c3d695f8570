"""Exclude functions from tracing by torch.compile."""

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
    "meshdist calls cannot be part of a graph: a collective waits for other ranks, and "
    "annotations are not visible there; without fullgraph=True, torch.compile breaks the graph at "
    "the call"
)


def untraced(function: _F) -> _F:
    """Mark ``function`` so that torch.compile never traces its call; return it."""
    # Like torch.compiler.disable, but without importing the compiler and without a wrapper. Apply
    # it below ``contextmanager`` for a context.
    never = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, never)  # when the function runs
    marked = cast(Any, function)
    marked._torchdynamo_disable = True  # when a traced function calls it
    marked._torchdynamo_disable_msg = _WHY_NOT_TRACED
    return function

"""Break the graphs of torch.compile at untraced functions, and split them at DDP's buckets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction as FrameAction,
    _FrameExecStrategy as FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.distributed import _DEFAULT_FIRST_BUCKET_BYTES as SMALLEST_CAP
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .fork_safe_locks import ForkSafeLock

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


def untraced_frame(function: _F) -> _F:
    """Mark ``function`` so that torch.compile starts with the functions it calls; return it."""
    code = function.__code__
    set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT))
    return function


def traceable(module: nn.Module) -> Callable[..., Any]:
    """Return ``module``, or a function that calls it, with which torch.compile can start."""
    # torch.compile starts with no forward of torch's own classes, such as nn.Sequential. Other
    # models need no such frame, and all that share it also share a limit of recompilations.
    name = getattr(module.forward, "__module__", None) or ""
    return partial(_call, module) if name.startswith("torch.") else module


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


class _Forwards(threading.local):
    """Stand-in for torch's DDP: torch.compile reads its cap; false outside a thread's forwards."""

    bucket_bytes_cap = 0  # this thread's, while a forward runs

    def __bool__(self) -> bool:
        return self.bucket_bytes_cap > 0


_forwards = _Forwards()
_lock = ForkSafeLock()
_num_running, _outer = 0, None


@contextmanager
def graphs_split_at_buckets(bucket_bytes_cap: int) -> Iterator[None]:
    """Let torch.compile split a forward's graph at buckets of this size, at least 1 MiB."""
    # A bucket is then sent before the backward of the graph before it. torch's compiler raises if
    # the cap is below 1 MiB, the cap of its first bucket.
    # torch has one attribute for the process, and simulated ranks switch inside a forward.
    global _num_running, _outer
    before = _forwards.bucket_bytes_cap
    with _lock.current:
        if not _num_running:
            _outer, TorchDDP._active_ddp_module = TorchDDP._active_ddp_module, cast(Any, _forwards)
        _num_running += 1
    _forwards.bucket_bytes_cap = max(bucket_bytes_cap, SMALLEST_CAP)
    try:
        yield
    finally:
        _forwards.bucket_bytes_cap = before
        with _lock.current:
            _num_running -= 1
            if not _num_running:
                TorchDDP._active_ddp_module, _outer = _outer, None

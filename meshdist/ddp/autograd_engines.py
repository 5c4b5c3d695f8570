"""Private names of torch 2.13 that tell which backward runs.

A *graph task* is autograd's name for one run of its engine, by a backward or ``autograd.grad``. A
re-entrant checkpoint runs a task inside of another task.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable

NO_TASK = -1

current_task = torch._C._current_graph_task_id
"""The number of the innermost task that runs in this thread, or ``NO_TASK``; never used twice."""


def is_in_distributed_context() -> bool:
    """Return whether this thread is in a ``torch.distributed.autograd.context()``."""
    rpc = getattr(torch._C, "_distributed_rpc", None)
    if rpc is None or not rpc._is_current_rpc_agent_set():
        return False
    try:
        torch._C._distributed_autograd._current_context()
    except RuntimeError:
        return False
    return True


def at_end_of_task(callback: Callable[[], None]) -> Callable[[], bool]:
    """Call ``callback`` if the running backward succeeds; return a test whether it still runs."""
    # The engine drops the callback with the task, also where an exception has ended it.
    held = partial(callback)
    Variable._execution_engine.queue_callback(held)
    found = weakref.ref(held)
    return lambda: found() is not None

"""Graph tasks: autograd's name for one run of its engine, by a backward or ``autograd.grad``.

A re-entrant checkpoint runs a task inside of another task. Here stand the private names of torch
2.13 that tell of tasks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

NO_TASK = -1

current_task = torch._C._current_graph_task_id
"""The number of the innermost task that runs in this thread, or ``NO_TASK``; never used twice."""


def is_in_task(leaf: torch.Tensor) -> bool:
    """Return whether the current task brings ``leaf`` a gradient at any time."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # it requires no gradient, or autograd.grad returns the gradient
        return False


def at_end_of_task(callback: Callable[[], None]) -> Callable[[], bool]:
    """Call ``callback`` if the current task ends well, and return a test that it still runs."""
    # The engine drops the callback with the task, also where an exception has ended it.
    held = partial(callback)
    Variable._execution_engine.queue_callback(held)
    found = weakref.ref(held)
    return lambda: found() is not None

"""Identify the running backward with private names of torch 2.13.

A *graph task* is one run of autograd's engine, by a backward or ``autograd.grad``. A reentrant
checkpoint runs a task inside another task.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable, graph

NO_TASK = -1

current_task = torch._C._current_graph_task_id
"""The unique number of the innermost task in this thread, or ``NO_TASK``."""

next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of this thread's next graph node; numbers increase."""

_run: Any = graph._engine_run_backward
_is_in_task: Any = torch._C._will_engine_execute_node
_OF_LEAVES = (1 << 64) - 1  # the number of all nodes of leaves


def is_made_within(numbers: Sequence[range]) -> bool:
    """Return whether the running backward passes nodes with these numbers."""
    first, seen = min((each.start for each in numbers), default=_OF_LEAVES), set()
    waiting = [node for node in _find_roots() if node is not None]
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        # A node is newer than its next functions.
        if node in seen or number < first or number == _OF_LEAVES:
            continue
        if any(number in each for each in numbers):
            return True
        seen.add(node)
        waiting.extend(after for after, _ in node.next_functions if after is not None)
    return False


def _find_roots() -> Iterator[Any]:
    """Yield the root nodes of the running backward, and of backwards around it."""
    # A device's thread has no frame of the call. Simulated ranks may run other backwards.
    for thread, frame in sys._current_frames().items():
        caller: Any = frame
        while caller is not None:
            roots = caller.f_locals["t_outputs"] if caller.f_code is _run.__code__ else ()
            for root in roots:
                node = root.grad_fn if isinstance(root, torch.Tensor) else root.node
                # Autograd does not count the first node.
                edges = () if node is None else node.next_functions
                is_current = thread == threading.get_ident()
                if is_current or any(_is_in_task(after) for after, _ in edges if after is not None):
                    yield node
            caller = caller.f_back


def is_in_distributed_context() -> bool:
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
    # The engine drops the callback with the task, also after an exception.
    held = partial(callback)
    Variable._execution_engine.queue_callback(held)
    found = weakref.ref(held)
    return lambda: found() is not None

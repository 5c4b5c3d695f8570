"""Torch's two engines of autograd, whose private names in torch 2.13 stand here.

A *graph task* is autograd's name for one run of its engine, by a backward or ``autograd.grad``. A
re-entrant checkpoint runs a task inside of another task.

The gradients of ``torch.distributed.autograd.backward`` lie in a context, not in ``.grad``. Its
engine calls none of the hooks behind an accumulation, but those of the node that accumulates. They
tell of the context; at the backward's end its gradients stand in for ``.grad`` while they are
averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge

NO_TASK = -1

current_task = torch._C._current_graph_task_id
"""The number of the innermost task that runs in this thread, or ``NO_TASK``; never used twice."""


def is_in_task(leaf: torch.Tensor) -> bool:
    """Return whether the backward that runs in this thread adds to ``leaf.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # it requires no gradient, or autograd.grad returns the gradient
        return False


def at_end_of_task(callback: Callable[[], None]) -> Callable[[], bool]:
    """Call ``callback`` if the running backward succeeds; return a test whether it still runs."""
    # The engine drops the callback with the task, also where an exception has ended it.
    held = partial(callback)
    Variable._execution_engine.queue_callback(held)
    found = weakref.ref(held)
    return lambda: found() is not None


# -- distributed autograd ------------------------------------------------------------------------


def is_rpc_on() -> bool:
    """Return whether torch's RPC is initialised in this process."""
    rpc = getattr(torch._C, "_distributed_rpc", None)
    return rpc is not None and rpc._is_current_rpc_agent_set()


def find_context() -> int | None:
    """Return the number of this thread's context of distributed autograd, None without."""
    if not is_rpc_on():
        return None
    try:
        return int(torch._C._distributed_autograd._current_context()._context_id())
    except RuntimeError:
        return None


class ContextGradients:
    """The gradients that a backward of distributed autograd brings into its context.

    Args:
        context_id: of the forward's context.
        check: raises for a context of such a backward in which gradients cannot be averaged.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        context_id: int | None,
        check: Callable[[int | None], int],
    ) -> None:
        self._parameters = parameters
        self._context_id = context_id
        self._check = check
        self._is_ordinary = self._is_distributed = False
        self._handles: list[Any] = []
        for parameter in parameters:
            if parameter.requires_grad:
                self._handles += [
                    parameter.register_post_accumulate_grad_hook(self._accumulated),
                    get_gradient_edge(parameter).node.register_hook(self._node_has_run),
                ]

    def _accumulated(self, _: torch.Tensor) -> None:
        self._is_ordinary = True

    def _node_has_run(self, *_: Any) -> None:
        self._is_distributed = not self._is_ordinary

    @contextmanager
    def in_place_of_grad(self) -> Iterator[list[bool] | None]:
        """Swap ``.grad`` for the context's gradients; yield which exist, None without a context."""
        for handle in self._handles:
            handle.remove()
        if not self._is_distributed:
            yield None  # behind an ordinary backward; else whether each parameter has a gradient
            return
        # Here, since torch drops the text of what a node's hook raises.
        grads = torch.distributed.autograd.get_gradients(self._check(self._context_id))
        found = [grads.get(parameter) for parameter in self._parameters]
        before = [parameter.grad for parameter in self._parameters]
        kept = [(grad, None if grad is None else grad.clone()) for grad in before]
        for parameter, grad in zip(self._parameters, found, strict=True):
            parameter.grad = None if grad is None else grad.detach()
        try:
            yield [grad is not None for grad in found]
        finally:
            for parameter, grad, (old, copied) in zip(self._parameters, found, kept, strict=True):
                if grad is not None and parameter.grad is not None:
                    grad.copy_(parameter.grad)
                parameter.grad = old
                if old is not None and copied is not None:
                    old.copy_(copied)  # it may lie in a bucket

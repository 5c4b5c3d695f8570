"""Gradients that are multiplied as they come, where a parameter is reduced over further axes.

In backwards of wrapped forwards alone: of each gradient that such a backward adds to ``.grad``.
What ``torch.autograd.grad`` returns, and other backwards, are as without a wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ..collectives.torch_private import hidden_from_modes
from ..runtime.untraced import untraced
from .autograd_engines import NO_TASK, at_end_of_task, current_task


class Increments:
    """Hooks that multiply gradients in wrapped backwards before ``.grad`` takes them.

    Args:
        factors: by parameter.
        is_wrapped: tells whether the current backward has reached outputs of a wrapped forward.
    """

    def __init__(
        self, factors: Mapping[torch.nn.Parameter, int], is_wrapped: Callable[[], bool]
    ) -> None:
        self._is_wrapped = is_wrapped
        self._task = NO_TASK
        # Of a backward that may yet reach outputs, as where a loss uses a weight beside them.
        self._early: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        self._nodes = []  # which live as long as they are kept
        self._handles = []
        for parameter, factor in factors.items():
            node = get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._hook(parameter, factor)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._nodes.clear()

    def outputs_reached(self) -> None:
        """Multiply by ``factors`` gradients that came before this backward reached an output."""
        if self._early and self._task == current_task():  # seldom, so that others pay nothing
            self._multiply_early()

    @hidden_from_modes
    @torch.no_grad()
    def _multiply_early(self) -> None:
        for parameter, grad, factor in self._early:
            if parameter.grad is not None:
                parameter.grad.add_(grad, alpha=factor - 1)
        self._early.clear()

    def _hook(
        self, parameter: torch.nn.Parameter, factor: int
    ) -> Callable[[tuple[torch.Tensor | None, ...]], Any]:
        @untraced
        @hidden_from_modes
        def gradient_comes(grads: tuple[torch.Tensor | None, ...]) -> Any:
            (grad,) = grads
            if grad is None:
                return None
            if self._is_wrapped():
                return (grad * factor,)
            task = current_task()
            if task != self._task:
                self._task = task
                self._early.clear()
                at_end_of_task(self._early.clear)
            self._early.append((parameter, grad, factor))
            return None

        return gradient_comes

"""Optimizers that step inside the backward, as soon as gradients are averaged."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ..errors import GradientError, KindError
from .backward import Backward, Moment

_MARK = "_in_backward_optimizers"
"""Where ``torch.distributed.optim._apply_optimizer_in_backward`` notes them on a parameter."""


def marked_optimizers(
    parameters: Sequence[torch.nn.Parameter],
) -> dict[torch.nn.Parameter, list[torch.optim.Optimizer]]:
    """Return the optimizers that torch has noted on parameters, and take off torch's hooks."""
    # Those hooks would step with the gradients of this rank alone.
    found = {parameter: list(getattr(parameter, _MARK, ())) for parameter in parameters}
    marked = {parameter: optimizers for parameter, optimizers in found.items() if optimizers}
    noted = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = getattr(noted, "param_to_optim_hook_handle_map", {})
    for parameter in marked:
        for handle in handles.pop(parameter, ()):
            handle.remove()
    return marked


def refuse_late_marks(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raise if torch has marked parameters for in-backward optimizers after the first forward."""
    if hasattr(parameters[0], _MARK) or hasattr(parameters[-1], _MARK):
        raise GradientError(
            "an optimizer in the backward was noted on parameters after the first forward",
            expected="_apply_optimizer_in_backward called before the wrapper's first forward",
            fix="call it right before or after the model is wrapped",
        )


class InBackward:
    """Steps optimizers as soon as gradients are averages, and drops gradients unless kept."""

    def __init__(
        self,
        optimizers: dict[torch.nn.Parameter, list[torch.optim.Optimizer]],
        *,
        keeps_gradients: bool,
    ) -> None:
        self._optimizers = optimizers
        self._keeps_gradients = keeps_gradients

    @classmethod
    def fused(
        cls,
        optimizer: type[torch.optim.Optimizer],
        parameters: Iterable[torch.nn.Parameter],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> InBackward:
        """Return an InBackward with a new ``optimizer`` per parameter; ``.grad`` stays set."""
        if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
            raise KindError(
                f"{optimizer!r} is no class of optimizers",
                expected="a subclass of torch.optim.Optimizer",
                fix="pass for example torch.optim.SGD, and its arguments behind it",
            )
        made = {parameter: [optimizer([parameter], *args, **kwargs)] for parameter in parameters}
        return cls(made, keeps_gradients=True)

    def calls(self) -> Mapping[Moment, Callable[[Any], None]]:
        """Return the stepping method by the moment at which it is called."""
        return {Moment.AVERAGED: self._step}

    def _step(self, backward: Backward) -> None:
        """Step the optimizers of parameters with a gradient; drop gradients unless kept."""
        buckets = backward.layout.buckets
        for parameter in chain.from_iterable(bucket.members for bucket in buckets):
            optimizers = self._optimizers.get(parameter)
            if optimizers and parameter.grad is not None:
                with torch.enable_grad():  # as outside of a backward
                    for optimizer in optimizers:
                        optimizer.step()
                if not self._keeps_gradients:
                    parameter.grad = None

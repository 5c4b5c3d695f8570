"""An optimizer that steps on this rank alone, and averages parameters every few steps."""

from __future__ import annotations

from typing import Any

import torch

from ..checking.call_sites import warn_caller
from .averaging import ModelAverager

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Each step is ``optim``'s, and then the averager's: some steps leave all replicas equal.

    A step that averages is collective over the averager's group; all ranks step equally often. The
    state of ``optim`` (momentum, say) stays each rank's own.

    Args:
        optim: the optimizer of this rank's parameters.
        averager: a ``PeriodicModelAverager`` or ``HierarchicalModelAverager``, or one of your own
            that has a number ``step`` and a method ``average_parameters(params=)``.

    Example:
        >>> import meshdist as md, torch
        >>> def program():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = md.PostLocalSGDOptimizer(
        ...         torch.optim.SGD([weight], lr=1.0), md.PeriodicModelAverager(period=3)
        ...     )
        ...     for _ in range(4):  # averages in the first step and the fourth
        ...         (weight * (1.0 + md.get_rank())).backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return weight.item()
        >>> md.simulate(program, 2)
        [-6.0, -6.0]

    Source: Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD" (2018).
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        # The base class would make groups and hooks of its own; all that it keeps is optim's.
        self.optim = optim
        self.averager = averager
        self.defaults = optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of ``optim``, which replaces them where a state is loaded."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of ``optim``."""
        return self.optim.state

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``optim``, and the averager's step as ``"step"``."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave.

        A state without a step, such as that of ``optim`` alone, begins at 0, with a warning.
        """
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            warn_caller(
                "the state has no step of an averager: steps count from 0, warm-up included"
            )
        self.averager.step = state_dict.get("step", 0)

    def step(self) -> None:  # type: ignore[override]
        """Step this rank's optimizer, then count the step, and average where it is due."""
        self.optim.step()
        self.averager.average_parameters(params=self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters of ``optim``."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to ``optim``."""
        self.optim.add_param_group(param_group)

"""Whether the replicas of a model are equal: looked at behind backwards 4, 32, 256, 2048, ...

Nothing else compares weights once a model is wrapped: where one rank alone loads a state, or steps
by another learning rate, gradients of different weights would be averaged in silence. So the norms
of the parameters before the step, and the number of modules in training mode, are compared:

    rank 0: norms 3, 5; 2 training        rank 1: norms 3, 6; 2 training -> rank 1 differs

The first elements of a parameter stand for it, since a step changes them all: so little is read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn

from ..checking.call_sites import warn_caller
from ..collectives.equal_values import difference_text, find_differing
from ..collectives.torch_private import unseen
from ..error_text import explain
from ..errors import GradientError
from ..groups.process_group import ProcessGroup
from .streams import is_capturing
from .wrapping import ignored_names, trainable_parameters

__all__ = ["Parting"]

_FIRST, _GROWTH = 4, 8  # backwards 4, 32, 256, ...: four comparisons in the first 10,000
_NUM_ELEMENTS = 4096  # of each parameter


class Parting:
    """Compares the replicas of ``module``, whose gradients of ``parameters`` are averaged."""

    def __init__(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._module = module
        self._parameters = parameters
        self.count_anew()

    def count_anew(self) -> None:
        """Begin again, as over another group, whose ranks may have counted otherwise."""
        self._num_backwards = 0
        self._next = _FIRST  # equal on every rank
        self._differing: dict[int, float] | None = None  # by rank; None where nothing is to tell

    def backward_ends(self, group: ProcessGroup, *, is_compared: bool) -> None:
        """Count a backward, which all ranks come to; compare where that is due, and meant."""
        self._num_backwards += 1
        if self._num_backwards >= self._next:
            self._next *= _GROWTH
            if is_compared and not is_capturing(self._parameters[0].device):
                self._compare(group)

    @unseen
    @torch.no_grad()
    def _compare(self, group: ProcessGroup) -> None:
        """Learn which ranks differ from the first."""
        device = self._parameters[0].device
        real = (torch.view_as_real(one) if one.is_complex() else one for one in self._parameters)
        parts = [one.reshape(-1)[:_NUM_ELEMENTS].to(device) for one in real]
        norms = torch._foreach_norm(parts, 2, dtype=torch.float64)
        num_training = norms[0].new_tensor(sum(one.training for one in self._module.modules()))
        (self._differing,) = find_differing([torch.stack([*norms, num_training])], group)
        if self._differing:
            self._next = sys.maxsize  # one warning is enough

    def report(self, group: ProcessGroup) -> None:
        """Tell at a forward what was found behind the last backward."""
        if self._differing is None:
            return
        differing, self._differing = self._differing, None
        where = f"rank {group.world.rank}, backward {self._num_backwards} over {group.name}"
        known = {id(one) for one in self._parameters}
        for name, one in trainable_parameters(self._module, ignored_names(self._module)).items():
            if id(one) not in known:
                raise GradientError(
                    f"{name} came into the module after it was wrapped: its gradient is local",
                    where=where,
                    expected="the parameters that the module had when it was wrapped",
                    fix="del ddp, and wrap the model again, when it is complete",
                )
        if differing:
            text = explain(
                "the replicas have parted: gradients of different models are averaged",
                where=where,
                expected="equal parameters on every rank, and eval() on all or none",
                found=f"norms of the parameters: {difference_text(differing, group.ranks[0])}",
                fix="look for what one rank does otherwise (weights loaded or drawn, learning "
                "rate, clipping, steps under no_sync(), eval()) by md.assert_equal(model, 'dp')",
            )
            warn_caller(text)

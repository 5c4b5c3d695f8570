"""Errors about gradients, each naming the parameters and ranks concerned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..error_text import first_line, grouped_text, ranks_text
from ..errors import GradientError
from ..groups.process_group import ProcessGroup

__all__ = ["Reports"]

_SHOWN_PARAMETERS = 20


class Reports:
    """Makes the errors of one model's gradients; raising them is the caller's part.

    Args:
        names: one per parameter.
        group: over which gradients are averaged.
    """

    def __init__(self, names: Sequence[str], group: ProcessGroup) -> None:
        self._names = list(names)
        self._where = f"rank {group.world.rank}, in {group.group_name}"

    def lacking(self, held: Mapping[int, Sequence[int]]) -> GradientError:
        """Parameters got no gradient: which ones, by rank."""
        found = []
        for rank, indices in held.items():
            line = ", ".join(self.describe(index) for index in indices[:_SHOWN_PARAMETERS])
            if len(indices) > _SHOWN_PARAMETERS:
                line += f" and {len(indices) - _SHOWN_PARAMETERS} more"
            if indices:
                found.append((rank, line))
        return GradientError(
            "parameters got no gradient in the backward since the last forward",
            where=self._where,
            expected="every parameter that requires a gradient takes part in every rank's loss",
            found=grouped_text(found),
            fix="let the loss depend on all of the module's outputs, or call "
            "requires_grad_(False) on unused parameters before the model is wrapped",
        )

    def interrupted(self, cut: Sequence[int], absent: Sequence[int]) -> GradientError:
        """An exception ended the backward on some ranks alone, or kept it from beginning there."""
        found = []
        if cut:
            found.append(f"{ranks_text(cut)}: an exception was raised inside backward()")
        if absent:
            found.append(f"{ranks_text(absent)}: no backward reached the model after its forward")
        return GradientError(
            "the gradients of this step are wrong: a backward was interrupted",
            where=self._where,
            expected="a backward that ends on every rank, or raises on every rank",
            found="\n".join(found),
            fix="look at the exception there; after zero_grad() a new step may begin",
        )

    def overlapping(self, summary: str) -> GradientError:
        """One backward began before another had ended."""
        return GradientError(
            summary,
            where=self._where,
            expected="one gradient for each parameter in each backward, and one backward at a time",
            found="an earlier backward that was interrupted, with no forward since; or a reentrant "
            "checkpoint that reaches a parameter, or the model, twice",
            fix="run the forward again, or use checkpoint(..., use_reentrant=False)",
        )

    def running(self) -> GradientError:
        """Gradients were to be checked before the backward had ended."""
        return GradientError(
            "gradients cannot be checked while a backward runs",
            where=self._where,
            fix="call check_gradients() after backward() has returned",
        )

    def captured_early(self) -> GradientError:
        """A CUDA graph is captured while the buckets are still those of the first step."""
        return GradientError(
            "a CUDA graph cannot be captured before the buckets are rebuilt",
            where=self._where,
            expected="two steps, forward and backward, before the capture",
            fix="run some steps on a side stream first, as torch.cuda.graph asks for",
        )

    def with_graph(self) -> GradientError:
        """The backward would be differentiated again."""
        return GradientError(
            "backward(create_graph=True) cannot be reduced over a group",
            where=self._where,
            found="gradients with a graph of their own, which the all-reduce would cut",
            fix="use torch.autograd.grad(..., create_graph=True) for the inner derivative, and "
            "a plain backward() for the parameters",
        )

    def sparse(self, index: int, layout: torch.layout) -> GradientError:
        """A gradient is not dense."""
        return GradientError(
            f"{self.describe(index)} has a sparse gradient",
            where=self._where,
            expected="dense gradients",
            found=f"layout {str(layout).removeprefix('torch.')}",
            fix="make the embedding with sparse=False",
        )

    def stopped(self, failure: Exception) -> GradientError:
        """An all-reduce has failed, and the ranks are no longer in step."""
        return GradientError(
            "the gradients cannot be reduced any more: an earlier all-reduce failed",
            where=self._where,
            found=first_line(failure),
            fix="end this job, or make the mesh and the model's wrapper anew",
        )

    def describe(self, index: int) -> str:
        """A parameter, for messages."""
        return f"{self._names[index]} (index {index})"

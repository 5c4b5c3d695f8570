"""Gathered operands of a product, of which autograd keeps the shard, and gathers again.

A product saves its operands for the backward. What it would save of a gathered operand is a view of
the gathered memory: in its place stand this rank's shard and the form of the view. The first view
that the backward asks for gathers again, the others share that memory, and the last one drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import GradientError
from ..mesh.device_mesh import DeviceMesh
from .plans import Plan
from .resharding import get_transfer


class GatheredOperand:
    """A gathered operand of which autograd saves the shard, gathered again in the backward."""

    def __init__(
        self, whole: torch.Tensor, shard: torch.Tensor, plan: Plan, mesh: DeviceMesh
    ) -> None:
        self.memory = whole.untyped_storage().data_ptr()
        # Detached, it keeps the memory that was gathered, whatever `shard.data =` sets later; both
        # count the same versions. An inference tensor counts none: a copy cannot be written to.
        self._shard = shard.clone() if shard.is_inference() else shard.detach()
        self._was_at = self._shard._version
        self._transfer = get_transfer(plan, mesh)
        self._where = plan.title
        self._num_saved = 0
        self._again: torch.Tensor | None = None

    def pack(self, saved: torch.Tensor) -> tuple[GatheredOperand, Any]:
        """Return this object and the geometry of the view ``saved``, to be saved in its place."""
        self._num_saved += 1
        return self, (saved.shape, saved.stride(), saved.storage_offset())

    def unpack(self, form: Any) -> torch.Tensor:
        """Return the view that ``pack`` saved, gathering once; raise if the shard was changed."""
        if self._shard._version != self._was_at:
            raise GradientError(
                "einsum: an operand was written to before the backward, which gathers it again",
                where=self._where,
                expected=f"the tensor as it was, at version {self._was_at}",
                found=f"version {self._shard._version}",
                fix="step behind the backward, or leave out regather=True",
            )
        if self._again is None:
            with torch.no_grad():
                self._again = self._transfer(self._shard)
            self._num_left = self._num_saved
        view = self._again.as_strided(*form)
        self._num_left -= 1
        if not self._num_left:
            self._again = None
        return view


def saved_as_shards(gathered: Sequence[GatheredOperand]) -> Any:
    """Return a context in which autograd saves shards in place of ``gathered`` operands."""
    by_memory = {each.memory: each for each in gathered}

    def pack(saved: torch.Tensor) -> Any:
        each = by_memory.get(saved.untyped_storage().data_ptr())
        return saved if each is None else each.pack(saved)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        each, form = kept
        view: torch.Tensor = each.unpack(form)
        return view

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

"""Rematerialize gathered operands: autograd saves the shard and gathers again.

A product saves its operands for the backward. In place of a view of a gathered operand, autograd
saves this rank's shard and the view's geometry. The backward first gathers again, on every rank.
All views share that memory; the last one releases it.
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
    """A gathered operand whose shard autograd saves, gathered again in the backward."""

    def __init__(
        self, whole: torch.Tensor, shard: torch.Tensor, plan: Plan, mesh: DeviceMesh
    ) -> None:
        self.memory = whole.untyped_storage().data_ptr()
        # The detached tensor keeps the original memory after `shard.data =` and shares the version
        # counter. An inference tensor has no counter, so a copy protects it from writes.
        self._shard = shard.clone() if shard.is_inference() else shard.detach()
        self._was_at = self._shard._version
        self._transfer = get_transfer(plan, mesh)
        self._where = plan.op_name
        self._num_saved = self._num_unread = 0
        self._again: torch.Tensor | None = None

    def gather(self) -> None:
        """Gather the operand again, or raise if the shard was changed; collective."""
        if self._shard._version != self._was_at:
            raise GradientError(
                "einsum: an operand was modified before the backward, which gathers it again",
                where=self._where,
                expected=f"the tensor at version {self._was_at}",
                found=f"version {self._shard._version}",
                fix="call optimizer.step() after backward(), or leave out regather=True",
            )
        with torch.no_grad():
            found = self._transfer(self._shard)
        self._again = found if self._num_saved else None
        self._num_unread = self._num_saved

    def pack(self, saved: torch.Tensor) -> tuple[GatheredOperand, Any]:
        """Return this object and the geometry of ``saved``, for autograd."""
        self._num_saved += 1
        return self, (saved.shape, saved.stride(), saved.storage_offset())

    def unpack(self, view_args: Any) -> torch.Tensor:
        """Return the view that ``pack`` saved; the last one drops the memory."""
        if self._again is None:  # The program reads a node's saved tensors itself.
            self.gather()
        assert self._again is not None
        view = self._again.as_strided(*view_args)
        self._num_unread -= 1
        if not self._num_unread:
            self._again = None
        return view


def saved_as_shards(gathered: Sequence[GatheredOperand]) -> Any:
    """Return a context in which autograd saves shards in place of ``gathered`` operands."""
    by_memory = {each.memory: each for each in gathered if each.memory}  # 0 means no elements

    def pack(saved: torch.Tensor) -> Any:
        each = by_memory.get(saved.untyped_storage().data_ptr())
        return saved if each is None else each.pack(saved)

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        each, view_args = kept
        view: torch.Tensor = each.unpack(view_args)
        return view

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def gather_before_backward(product: torch.Tensor, gathered: Sequence[GatheredOperand]) -> None:
    """Make the backward of ``product`` first gather operands again, on every rank."""
    # torch saves different tensors by size: for "b d, d f -> f" it saves the operand if b is 1,
    # else its sum over b. So every rank gathers all operands first, and the collectives match.

    def gather(_: Any) -> None:
        for each in gathered:
            each.gather()

    if gathered and product.grad_fn is not None:
        product.grad_fn.register_prehook(gather)

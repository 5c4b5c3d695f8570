"""One bucket's memory: gradients of several parameters as views into one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..wires.work import Work
from .buckets import dense_stride

__all__ = ["Bucket"]

# A gradient of this size or more is copied and scaled at once, in one pass, while it is in the
# cache, and its memory is free again; smaller ones wait for the bucket and go by one call together.
_AT_ONCE_BYTES = 64 * 1024


class Bucket:
    """Gradients that travel together.

    Args:
        indices: which parameters, in the order in which they shall lie.
        parameters: all of them.
        num_flags: how many numbers follow the gradients.
        allocate: memory for so many numbers, of dtype and device like a parameter's.

    Attributes:
        indices: which parameters, in the order in which they lie in the bucket.
        views: the gradient of each, a view into ``flat``.
        flat: all gradients, one after the other.
        sent: what is sent: ``flat``, and in the last bucket the flags behind it.
        num_pending: how many gradients have not come yet in this backward.
        work: the all-reduce in flight, or None.
        at_once: for each gradient, whether it moves in as soon as it comes.
        later: parameter and view of the others.
    """

    __slots__ = ("at_once", "flat", "indices", "later", "num_pending", "sent", "views", "work")

    def __init__(
        self,
        indices: tuple[int, ...],
        parameters: Sequence[torch.Tensor],
        num_flags: int,
        allocate: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> None:
        members = [parameters[index] for index in indices]
        size = sum(parameter.numel() for parameter in members)
        like = members[0]
        self.indices = indices
        self.sent = allocate(size + num_flags, like).zero_()
        self.flat = self.sent[:size]
        self.views: list[torch.Tensor] = []
        offset = 0
        for member in members:
            stride = dense_stride(member.shape, member.stride())
            self.views.append(self.flat.as_strided(member.shape, stride, offset))
            offset += member.numel()
        pairs = list(zip(members, self.views, strict=True))
        self.at_once = [view.nbytes >= _AT_ONCE_BYTES for view in self.views]
        self.later = [pair for pair, now in zip(pairs, self.at_once, strict=True) if not now]
        self.num_pending = len(indices)
        self.work: Work | None = None

    @property
    def flags(self) -> torch.Tensor:
        """The numbers behind the gradients; empty but in the last bucket."""
        return self.sent[self.flat.numel() :]

    def hand_out_missing(self, parameters: Sequence[torch.nn.Parameter], *, as_views: bool) -> None:
        """Give a parameter without a gradient here what other ranks had; None if none had any.

        Where gradients lie outside the bucket, ``hand_out_copies`` fills them.
        """
        for index, view in zip(self.indices, self.views, strict=True):
            parameter = parameters[index]
            if parameter.grad is None and bool(view.any()):
                parameter.grad = view if as_views else torch.empty_like(view)

    def hand_out_copies(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Copy the averages into gradients that lie outside the bucket."""
        pairs = [
            (grad, view)
            for index, view in zip(self.indices, self.views, strict=True)
            if (grad := parameters[index].grad) is not None
        ]
        if pairs:
            torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])

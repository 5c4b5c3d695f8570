"""One bucket: gradients of several parameters, as views into one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..wires.work import Work
from .buckets import dense_stride
from .reports import Reports
from .streams import streams_for

__all__ = ["Bucket"]

# A gradient of this size or more is copied and scaled at once, in one pass, while it is in the
# cache, and its memory is free again; smaller ones wait for the bucket and go by one call together.
_AT_ONCE_BYTES = 64 * 1024


class Bucket:
    """Gradients that travel together.

    Args:
        indices: which parameters, in the order in which their gradients are to lie.
        parameters: all of them.
        num_flags: how many numbers follow the gradients.
        allocate: memory like a parameter's in dtype and device, for so many numbers.
        scale: by what a gradient is multiplied on its way into the bucket.
        as_views: whether ``.grad`` becomes the view, or stays apart from the bucket.
        reports: makes the error for a gradient that cannot lie here.

    Attributes:
        indices: which parameters, in the order in which they lie in the bucket.
        members: the parameters themselves.
        views: the gradient of each, a view into ``flat``.
        flat: all gradients, one after the other.
        sent: what is sent: ``flat``, and in the last bucket the flags behind it.
        flags: the numbers behind the gradients; empty but in the last bucket.
        num_pending: how many gradients have not come yet in this backward.
        work: the all-reduce in flight, or None.
        at_once: for each gradient, whether it moves in as soon as it comes.
        later: parameter and view of the others.
        streams: notes on which streams gradients come; None on the CPU.
    """

    def __init__(
        self,
        indices: tuple[int, ...],
        parameters: Sequence[torch.nn.Parameter],
        *,
        num_flags: int,
        allocate: Callable[[torch.Tensor, int], torch.Tensor],
        scale: float,
        as_views: bool,
        reports: Reports,
    ) -> None:
        self.indices = indices
        self.members = [parameters[index] for index in indices]
        counts = [member.numel() for member in self.members]
        size = sum(counts)
        self.sent = allocate(self.members[0], size + num_flags).zero_()
        self.flat, self.flags = self.sent.split([size, num_flags])
        self.views: list[torch.Tensor] = [
            part.as_strided(member.shape, dense_stride(member.shape, member.stride()))
            for part, member in zip(self.flat.split(counts), self.members, strict=True)
        ]
        self.at_once = [view.nbytes >= _AT_ONCE_BYTES for view in self.views]
        places = zip(self.members, self.views, self.at_once, strict=True)
        self.later = [(member, view) for member, view, is_at_once in places if not is_at_once]
        self.streams = streams_for(self.sent.device)
        self.num_pending = len(indices)
        self.work: Work | None = None
        self._scale = scale
        self._as_views = as_views
        self._reports = reports

    def await_streams(self) -> None:
        """Let the current stream wait for the others on which gradients came."""
        if self.streams is not None:
            apart = [grad for member, view in self.later if (grad := member.grad) is not view]
            self.streams.await_others([grad for grad in apart if grad is not None])

    def move_in(self, slot: int) -> None:
        """Copy one gradient into its view, scaled; zeros where there is none."""
        member, view = self.members[slot], self.views[slot]
        grad = member.grad
        if grad is view:
            view.mul_(self._scale)
        elif grad is None:
            view.zero_()
        else:
            self._refuse_sparse(member, grad)
            torch.mul(grad, self._scale, out=view)
            if self._as_views:
                member.grad = view

    def move_in_later_ones(self) -> None:
        """Copy the small gradients into their views, scaled, by few calls."""
        apart = [(one, view, grad) for one, view in self.later if (grad := one.grad) is not view]
        found = [(one, view, grad) for one, view, grad in apart if grad is not None]
        if len(found) < len(apart):
            torch._foreach_zero_([view for _, view, grad in apart if grad is None])
        if found:
            try:
                torch._foreach_copy_([view for _, view, _ in found], [grad for *_, grad in found])
            except RuntimeError:  # checked only now, since checking costs as much as copying
                for member, _, grad in found:
                    self._refuse_sparse(member, grad)
                raise
            if self._as_views:
                for member, view, _ in found:
                    member.grad = view
        if self._scale == 1.0:
            return
        if len(self.later) == len(self.views):
            self.flat.mul_(self._scale)
        elif self.later:
            torch._foreach_mul_([view for _, view in self.later], self._scale)

    def hand_out(self, *, is_complete: bool) -> None:
        """Let ``.grad`` hold the averages, and be ready for the next backward.

        Args:
            is_complete: whether every parameter has a gradient here. One that has none gets what
                other ranks had. If they had none either, it stays None on the CPU; elsewhere, where
                looking would make the CPU wait for the device, it gets zeros.
        """
        if not is_complete:
            is_elsewhere = self.streams is not None  # work is enqueued
            for member, view in zip(self.members, self.views, strict=True):
                if member.grad is None and (is_elsewhere or bool(view.any())):
                    member.grad = view if self._as_views else torch.empty_like(view)
        if not self._as_views:
            places = zip(self.members, self.views, strict=True)
            pairs = [(grad, view) for one, view in places if (grad := one.grad) is not None]
            if pairs:
                torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])
        self.work = None
        self.num_pending = len(self.indices)

    def _refuse_sparse(self, member: torch.Tensor, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            place = next(place for place, one in enumerate(self.members) if one is member)
            raise self._reports.sparse(self.indices[place], grad.layout)

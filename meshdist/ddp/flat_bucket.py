"""One bucket: gradients of several parameters, as views into one flat tensor."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Protocol, TypeAlias, cast

import torch

from ..collectives.flat_sums import assign_buckets, views_into
from .buckets import LaidBucket, ReductionOptions
from .device_streams import streams_for
from .graph_tasks import is_in_task
from .reports import Reports

__all__ = ["Bucket", "Pending"]

# A gradient of this size or more is copied at once, while it is in the cache, and its memory is
# free again; smaller ones wait for the bucket and go by one call together.
_AT_ONCE_BYTES = 64 * 1024

# So much is scaled while it is in the cache, just after it was copied.
_SCALED_TOGETHER_BYTES = 512 * 1024

_grad_of = attrgetter("grad")
_version_of = attrgetter("_version")

_Kept: TypeAlias = list[tuple[torch.Tensor | None, int]]


class Pending(Protocol):
    """A reduction in flight."""

    def wait(self) -> object:
        """Return when the bucket holds its result."""


class Bucket:
    """Gradients that travel together.

    A hook on every parameter costs more than to copy a small gradient. So the small ones of a
    bucket but the last have none: whether they have come is seen by their ``.grad``, which is
    another tensor than when the backward began, or has another version.

    Args:
        laid: which parameters, in the order in which their gradients are expected, and whether it
            is sent at the end of the backward, whatever has come before.
        parameters: all of them.
        options: how gradients are sent, and whether ``.grad`` becomes the view.
        sent: memory for the gradients, and for the numbers that follow them.
        scale: by what gradients are multiplied on their way into the bucket, or None.
        hooked: the indices that need a hook whatever their size; None where all do.
        reports: makes the error for a gradient that cannot lie here.

    Attributes:
        indices: which parameters, large ones first, in the order in which they lie in the bucket.
        members: the parameters themselves.
        views: the gradient of each, a view into ``flat``, with a version counter of its own.
        flat: all gradients, one after the other.
        behind: the numbers behind the gradients.
        sent: both.
        at_once: for each gradient, whether it moves in as soon as it has come.
        is_hooked: for each gradient, whether a hook tells that it has come.
        num_pending: how many of those with a hook have not come yet in this backward.
        must_wait: whether the bucket waits for the end of this backward.
        work: the reduction in flight, or None.
        taken: the slots that have moved in and been scaled, so that nothing may be added to them.
        local: the slots without a hook to which another backward has brought gradients since the
            forward; known once this one has ended.
        streams: notes on which streams gradients come; None on the CPU.
    """

    def __init__(
        self,
        laid: LaidBucket,
        parameters: Sequence[torch.nn.Parameter],
        options: ReductionOptions,
        *,
        sent: torch.Tensor,
        scale: float | None,
        hooked: Collection[int] | None,
        reports: Reports,
    ) -> None:
        indices, dtype = laid.indices, sent.dtype
        first = parameters[indices[0]]
        self.streams = streams_for(first.device)
        sizes = {index: parameters[index].numel() * dtype.itemsize for index in indices}
        large = [index for index in indices if sizes[index] >= _AT_ONCE_BYTES]
        small = [index for index in indices if sizes[index] < _AT_ONCE_BYTES]
        self.indices = (*large, *small)  # equal on every rank, whatever has a hook on this one
        self.members = [parameters[index] for index in self.indices]
        self.is_trailing = laid.is_trailing
        counts = [member.numel() for member in self.members]
        self.device = first.device
        self.sent = sent.zero_()
        self.flat, self.behind = sent[: sum(counts)], sent[sum(counts) :]
        # A view taken through ``.data`` has a version counter of its own.
        self.views = [view.data for view in views_into(self.flat, self.members)]
        self.at_once = [True] * len(large) + [False] * len(small)
        self.as_views = options.as_views and dtype == first.dtype
        self.work: Pending | None = None
        self._scale = scale
        self.taken: set[int] = set()
        self._reports = reports
        self._small = self.members[len(large) :]
        self._small_views = self.views[len(large) :]
        self._small_flat = self.flat[sum(counts[: len(large)]) :]
        self._is_row_major = dtype == first.dtype and all(
            view.is_contiguous() for view in self._small_views
        )
        self._is_1d = all(view.dim() == 1 for view in self._small_views)
        self._runs = self._cut_small(sys.maxsize if scale is None else _SCALED_TOGETHER_BYTES)
        self._num_large = len(large)
        # When the last small one comes, the others are looked for.
        is_looked_for = hooked is not None and self.streams is None
        self._look_for(
            [
                slot
                for slot, index in enumerate(small[:-1], len(large))
                if is_looked_for and index not in (hooked or ())
            ]
        )
        self.reset()

    def hook_all(self) -> None:
        """Expect a hook on every parameter; call it between backwards."""
        self._look_for([])
        self.reset()

    def _look_for(self, slots: Sequence[int]) -> None:
        """Expect a hook on all but the small gradients in ``slots``."""
        without = {*slots}
        self.is_hooked = [slot not in without for slot in range(len(self.indices))]
        self._seen_slots = slots
        self._seen_places = [slot - self._num_large for slot in slots]
        self._seen = [self.members[slot] for slot in slots]
        self._seen_views = [self.views[slot] for slot in slots]

    def _cut_small(self, cap_bytes: int) -> list[tuple[slice, torch.Tensor]]:
        """The small gradients in runs of at most ``cap_bytes``, and where each run lies."""
        sizes = [view.numel() for view in self._small_views]
        itemsize = self._small_flat.itemsize
        items = [(size * itemsize, None) for size in sizes]
        runs = assign_buckets(items, range(len(items)), (cap_bytes,))
        targets = self._small_flat.split([sum(sizes[place] for place in run) for run in runs])
        cuts = [slice(run[0], run[-1] + 1) for run in runs]
        return list(zip(cuts, targets, strict=True))

    def reset(self) -> None:
        """Be ready for the next backward."""
        self.work = None
        self.taken.clear()
        self.num_pending = sum(self.is_hooked)
        self.must_wait = self.is_trailing
        self._kept: _Kept = []
        self._at_forward: _Kept | None = None
        self.local: Sequence[int] = ()
        self._moved_versions: list[int | None] | None = None
        self._read: Sequence[torch.Tensor | None] | None = None

    # -- which have come --------------------------------------------------------------------------

    def forward_ends(self) -> None:
        """Remember the gradients that are there before any backward."""
        self._at_forward = self._seen_now()

    def backward_begins(self) -> None:
        """Remember the gradients that are there already: outputs have theirs, and it goes on."""
        self._kept = self._seen_now()
        self.local = ()
        if self._at_forward is None or not self._kept:
            return
        before = self._at_forward or [(None, -1)] * len(self._kept)
        rows = zip(self._seen_slots, self._kept, before, strict=True)
        new = [
            (slot, grad)
            for slot, (grad, version), (then, old) in rows
            if grad is not None and (grad is not then or version != old)
        ]
        if new:  # ``zero_grad`` leaves zeros
            norms = torch._foreach_norm([grad for _, grad in new])
            self.local = [slot for (slot, _), norm in zip(new, norms, strict=True) if norm != 0]

    def _seen_now(self) -> _Kept:
        """The gradients without a hook, with their versions; empty where there is none."""
        grads = list(map(_grad_of, self._seen))
        if {*map(type, grads)} <= {type(None)}:
            return []
        return [(grad, -1 if grad is None else grad._version) for grad in grads]

    def find_missing(self) -> list[int]:
        """Return the slots without a hook whose gradient has not come in this backward.

        ``move_in_rest`` comes next, and takes the gradients that are read here.
        """
        self._read = list(map(_grad_of, self._small))  # reading one costs more than to keep it
        missing = self._missing(list(map(self._read.__getitem__, self._seen_places)))
        if not self.local:
            return missing
        # What this backward has brought before the outputs' gradients does not come again: that of
        # a weight which the loss uses beside the outputs alone. Else another backward brought it.
        came = {slot for slot in self.local if slot in missing and is_in_task(self.members[slot])}
        self.local = [slot for slot in self.local if slot not in came]
        return [slot for slot in missing if slot not in came]

    def _missing(self, grads: Sequence[torch.Tensor | None]) -> list[int]:
        if not self._kept:
            if type(None) not in {*map(type, grads)}:
                return []
            pairs = zip(self._seen_slots, grads, strict=True)
            return [slot for slot, grad in pairs if grad is None]
        return [
            slot
            for slot, grad, (kept, version) in zip(self._seen_slots, grads, self._kept, strict=True)
            if grad is None or (grad is kept and grad._version == version)
        ]

    def find_late(self) -> list[int]:
        """Return the slots without a hook to which was added after they had moved in."""
        if self._moved_versions is None:
            return []
        versions = self._versions()
        if versions == self._moved_versions:
            return []
        found = zip(self._seen_slots, self._moved_versions, versions, strict=True)
        return [slot for slot, before, now in found if now not in (before, None)]

    def _versions(self) -> list[int | None]:
        """The versions of what has moved in; None for a gradient that was taken away since."""
        if self.as_views:
            return list(map(_version_of, self._seen_views))
        grads = map(_grad_of, self._seen)
        return [None if grad is None else grad._version for grad in grads]

    # -- moving in --------------------------------------------------------------------------------

    def await_streams(self) -> None:
        """Let the current stream wait for the others on which gradients came."""
        if self.streams is not None:
            pairs = zip(self._small, self._small_views, strict=True)
            apart = [grad for member, view in pairs if (grad := member.grad) is not view]
            self.streams.await_others([grad for grad in apart if grad is not None])

    def move_in_early(self) -> bool:
        """Copy the small gradients into their views if all have come; return whether they have."""
        grads = list(map(_grad_of, self._small))
        seen = list(map(grads.__getitem__, self._seen_places))
        if seen and self._missing(seen):
            return False
        self._take_small(grads)
        if self._seen:
            self._moved_versions = self._versions()
        return True

    def move_in(self, slot: int) -> None:
        """Copy one gradient into its view; zeros where there is none."""
        member, view, scale = self.members[slot], self.views[slot], self._scale
        grad = member.grad
        if grad is None:
            view.zero_()
        elif grad is view:
            if scale is not None:
                view.mul_(scale)
        else:
            self._refuse_sparse(member, grad)
            if scale is None:
                view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)  # one pass
            if self.as_views:
                member.grad = view
        if scale is not None:
            self.taken.add(slot)

    def move_in_small(self) -> None:
        """Copy the small gradients into their views by few calls; zeros where there is none."""
        read, self._read = self._read, None
        self._take_small(list(map(_grad_of, self._small)) if read is None else read)

    def _take_small(self, grads: Sequence[torch.Tensor | None]) -> None:
        members, views = self._small, self._small_views
        try:
            if (
                self._is_row_major
                and grads
                and type(None) not in {*map(type, grads)}
                and not any(map(is_, grads, views))
            ):
                found = cast("list[torch.Tensor]", grads)
                parts = found if self._is_1d else [grad.reshape(-1) for grad in found]
                for run, target in self._runs:
                    torch.cat(parts[run], out=target)
                    self._scale_small(target)
            else:
                members, views, grads = self._apart(members, views, grads)
                if grads:
                    torch._foreach_copy_(views, grads)
                self._scale_small(self._small_flat)
        except RuntimeError:  # checked only now, since checking costs as much as copying
            for member in members:
                self._refuse_sparse(member, member.grad)
            # One may lie in its place already, as another tensor: ``grad = grad.detach()``.
            torch._foreach_copy_(views, cast("list[torch.Tensor]", grads))
            self._scale_small(self._small_flat)
        if self.as_views:
            deque(map(setattr, members, repeat("grad"), views), maxlen=0)

    def _scale_small(self, moved: torch.Tensor) -> None:
        if self._scale is not None:
            moved.mul_(self._scale)

    def move_in_rest(self) -> None:
        """Copy all gradients that lie elsewhere; zeros where there is none."""
        for slot, is_large in enumerate(self.at_once):
            if is_large and slot not in self.taken:
                self.move_in(slot)
        self.move_in_small()

    def clear(self) -> None:
        """Send zeros."""
        self.flat.zero_()

    def _apart(
        self,
        members: Sequence[torch.nn.Parameter],
        views: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
    ) -> tuple[list[torch.nn.Parameter], list[torch.Tensor], list[torch.Tensor]]:
        """Those whose gradient lies elsewhere; zeros into the views of those that have none."""
        lacking = [view for view, grad in zip(views, grads, strict=True) if grad is None]
        if lacking:
            torch._foreach_zero_(lacking)
        found = [
            (member, view, grad)
            for member, view, grad in zip(members, views, grads, strict=True)
            if grad is not None and grad is not view
        ]
        return [one for one, _, _ in found], [one for _, one, _ in found], [g for *_, g in found]

    # -- handing out ------------------------------------------------------------------------------

    def scale_average(self, factor: float) -> None:
        """Multiply the averages."""
        self.flat.mul_(factor)

    def hand_out(self, is_used: Sequence[bool] | None, *, is_complete: bool) -> None:
        """Let ``.grad`` hold the averages.

        ``is_used`` tells of every parameter whether some rank had a gradient: one that has none
        here gets the average then, and else is left alone. It is None where that is not known, as
        on accelerators, where looking would make the CPU wait: then it gets what was reduced.
        """
        if not is_complete:
            for index, member, view in zip(self.indices, self.members, self.views, strict=True):
                if member.grad is None and (is_used is None or is_used[index]):
                    member.grad = (
                        view if self.as_views else torch.empty_like(view, dtype=member.dtype)
                    )
        if not self.as_views:
            pairs = [
                (grad, view)
                for index, member, view in zip(self.indices, self.members, self.views, strict=True)
                if (grad := member.grad) is not None and (is_used is None or is_used[index])
            ]
            if pairs:
                torch._foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])

    def _refuse_sparse(self, member: torch.Tensor, grad: torch.Tensor | None) -> None:
        if grad is not None and grad.layout is not torch.strided:
            place = next(place for place, one in enumerate(self.members) if one is member)
            raise self._reports.sparse(self.indices[place], grad.layout)

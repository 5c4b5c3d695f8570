"""Copy gradients into buckets, send each bucket as one message, and write averages back.

A bucket is one flat tensor with gradients as views, or a single gradient
(``unbucketed_gradients``). Its state in one backward is a ``BucketState``.

A hook costs more than the copy of a small gradient, so only the last of a bucket's small gradients
has a hook. The others were computed if their ``.grad`` has changed its identity or version since
the backward began.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ..collectives.flat_sums import assign_buckets, views_into
from ..collectives.shared_buffers import copy_past_caches
from ..collectives.torch_private import storage_uses, tensor_uses
from ..groups.process_group import ProcessGroup
from .device_streams import GradientStreams, is_capturing, streams_for
from .gradient_errors import GradientErrors
from .status_flags import StatusFlags

# Gradients of at least this size are copied immediately, while they are in the cache, which frees
# their memory; smaller gradients are copied together once the bucket is full.
_AT_ONCE_BYTES = 64 * 1024

# At most this much is scaled together, while it is still in the cache after the copy.
_SCALED_TOGETHER_BYTES = 512 * 1024

_grad_of = attrgetter("grad")

_NUM_ALONE = max(map(sys.getrefcount, [torch.empty(0)]))
"""The reference count, measured in this way, of a tensor referenced by one list only."""

_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()

Grads: TypeAlias = Sequence[torch.Tensor | None]


class Pending(Protocol):
    """A reduction in flight."""

    def wait(self) -> object:
        """Wait until the bucket holds the result."""


class Averaging(NamedTuple):
    """The method of averaging over one group.

    Args:
        scale: applied to gradients as they are copied; None if the backend averages, and for a
            communication hook.
        start: starts to average a tensor in place.
    """

    group: ProcessGroup
    scale: float | None
    start: Callable[[torch.Tensor], Pending]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are averaged in one message.

    Args:
        indices: of the parameters, in the order of their gradients in memory.
        views: each gradient's view into ``flat``, or a tensor of its shape.
        flat: memory for the gradients; empty if the gradient keeps its own.
        sent: ``flat``, followed by the status flags.
        is_deferred: whether it is sent at the end of a backward, since a rank may lack a gradient.
        num_at_once: the number of leading gradients that are copied when computed.
    """

    indices: tuple[int, ...]
    members: Sequence[torch.nn.Parameter]
    copy_mode: GradientCopy
    views: list[torch.Tensor]
    flat: torch.Tensor
    sent: torch.Tensor
    is_deferred: bool
    averaging: Averaging
    num_at_once: int = 0

    def __post_init__(self) -> None:
        self.new_streams: Callable[[], GradientStreams] | None = None  # also None on the CPU
        self.status_flags: StatusFlags | None = None  # stored after the gradients in ``sent``
        # Tensors in the memory, not counting the user's; 0 if ``.grad`` are not views.
        self.num_users = 0
        if isinstance(self.copy_mode, Flat):
            self.new_streams = streams_for(self.sent.device)

    @classmethod
    def of_several(
        cls,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        sent: torch.Tensor,
        averaging: Averaging,
        *,
        as_views: bool,
        is_deferred: bool,
        gradient_errors: GradientErrors,
    ) -> Bucket:
        """Return a bucket with its gradients contiguous in ``sent``, the large before the small.

        Args:
            indices: of the parameters, in the expected order of gradients.
            parameters: all parameters of the model.
            sent: memory for the gradients and the status flags after them.
        """
        is_small = {
            index: parameters[index].numel() * sent.itemsize < _AT_ONCE_BYTES for index in indices
        }
        num_large = len(indices) - sum(is_small.values())
        laid = (*sorted(indices, key=is_small.__getitem__),)
        members = [parameters[index] for index in laid]
        flat = sent.zero_()[: sum(member.numel() for member in members)]
        # A view taken through ``.data`` has a separate version counter.
        views = [view.data for view in views_into(flat, members)]
        is_cast = sent.dtype != members[0].dtype
        small = flat[sum(member.numel() for member in members[:num_large]) :]
        return cls(
            laid,
            members,
            Flat(
                views[num_large:],
                small,
                averaging.scale,
                as_views and not is_cast,
                is_cast,
                gradient_errors,
            ),
            views,
            flat,
            sent,
            is_deferred,
            averaging,
            num_large,
        )

    @classmethod
    def of_one(
        cls,
        index: int,
        parameter: torch.nn.Parameter,
        copy_mode: GradientCopy,
        averaging: Averaging,
        *,
        is_deferred: bool,
    ) -> Bucket:
        """Return a bucket of one gradient, which keeps its memory."""
        like = parameter.detach()
        none = like.new_empty(0)
        return cls((index,), [parameter], copy_mode, [like], none, none, is_deferred, averaging)

    def note_users(self) -> None:
        """Count the library's tensors in the memory, once all exist."""
        if isinstance(self.copy_mode, Flat) and self.copy_mode.as_views:
            self.num_users = storage_uses(self.sent)

    def release_kept(self) -> None:
        """Move away from gradients that the user kept, before a backward fills the bucket."""
        # A tensor that still is ``.grad`` is accumulated in place, as on one device.
        if not self.num_users or is_capturing(self.sent.device):
            return
        is_shared = not _COUNTS_ARE_EXACT or storage_uses(self.sent) > self.num_users
        uses = [*map(tensor_uses, self.views)]  # ``kept = torch.from_dlpack(p.grad)`` adds a use
        if not is_shared and max(map(sys.getrefcount, self.views)) == _NUM_ALONE and max(uses) == 1:
            return
        pairs = zip(self.members, self.views, strict=True)
        apart = [slot for slot, (member, view) in enumerate(pairs) if member.grad is not view]
        is_shared = is_shared or any(uses[slot] > 1 for slot in apart)
        if is_shared and apart:  # such as ``kept = p.grad.detach()``: of an unknown gradient
            self._move()
            return
        counts = [*map(sys.getrefcount, self.views)]
        for slot in apart:
            if counts[slot] > _NUM_ALONE:  # ``kept = p.grad``
                view = self.views[slot]
                self.views[slot] = view.data
                view.data = view.clone()

    def _move(self) -> None:
        """Move to new memory, with the gradients that still are ``.grad``."""
        before, sent = self.views, self.sent.clone()
        self.sent, self.flat = sent, sent[: len(self.flat)]
        self.views = [view.data for view in views_into(self.flat, self.members)]
        for member, old, view in zip(self.members, before, self.views, strict=True):
            if member.grad is old:
                member.grad = view
        assert isinstance(self.copy_mode, Flat)
        self.copy_mode.move_to(self.flat)
        if self.status_flags is not None:
            self.status_flags.numbers = sent[len(self.flat) :]
        self.note_users()


class BucketState:
    """A bucket's state in one backward: pending and copied gradients."""

    def __init__(self, bucket: Bucket) -> None:
        bucket.release_kept()
        self.bucket = bucket
        self.num_pending = len(bucket.members)
        self.streams = None if bucket.new_streams is None else bucket.new_streams()
        self.taken: set[int] = set()  # slots whose gradient was copied in
        self.read: Grads = ()  # the sent tensor of a gradient without a flat bucket
        # The average of such a gradient; None if no rank has a gradient.
        self.average: torch.Tensor | None = None

    def take(self, *, is_zero: bool = False) -> None:
        """Copy all gradients into the bucket; zeros if missing, or for ``is_zero``."""
        bucket, first = self.bucket, self.bucket.num_at_once
        if self.streams is not None:
            pairs = zip(bucket.members[first:], bucket.views[first:], strict=True)
            apart = [grad for member, view in pairs if (grad := member.grad) is not view]
            self.streams.await_others([grad for grad in apart if grad is not None])
        if is_zero:
            bucket.copy_mode.clear(self)
        else:
            bucket.copy_mode.take(self)


class GradientCopy(ABC):
    """Copies gradients into a bucket, sends them, and writes averages back."""

    @abstractmethod
    def take(self, bucket_state: BucketState, slot: int | None = None) -> None:
        """Copy the gradient at ``slot`` for sending, or all gradients for None."""

    @abstractmethod
    def clear(self, bucket_state: BucketState) -> None:
        """Make this rank contribute zeros instead of its gradients."""

    @abstractmethod
    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        """Return the tensor that a communication hook averages in place."""

    @abstractmethod
    def start(self, bucket_state: BucketState) -> Pending:
        """Start the bucket's average without a communication hook."""

    @abstractmethod
    def give(
        self,
        bucket_state: BucketState,
        is_used: Sequence[bool] | None,
        *,
        is_complete: bool,
        share: float,
    ) -> None:
        """Write the averages, times ``share``, to ``.grad``.

        Args:
            is_used: for each parameter of the model, whether some rank had a gradient: if so, it
                gets the average even without a gradient here; if not, it stays without. None if
                unknown, as on accelerators: then all get the average.
            is_complete: whether this rank computed all gradients.
        """


class Flat(GradientCopy):
    """Copies of gradients in one flat tensor.

    Args:
        small: views of gradients that are copied together into a full bucket.
        small_flat: the memory of these views.
        as_views: whether ``.grad`` becomes the view.
        is_cast: whether bucket and parameters differ in dtype.
    """

    def __init__(
        self,
        small: Sequence[torch.Tensor],
        small_flat: torch.Tensor,
        scale: float | None,
        as_views: bool,
        is_cast: bool,
        gradient_errors: GradientErrors,
    ) -> None:
        self.as_views = as_views
        self._scale = scale
        self._gradient_errors = gradient_errors
        self._is_row_major = not is_cast and all(view.is_contiguous() for view in small)
        self._is_1d = all(view.dim() == 1 for view in small)
        sizes = [view.numel() for view in small]
        items = [(size * small_flat.itemsize, None) for size in sizes]
        cap = sys.maxsize if scale is None else _SCALED_TOGETHER_BYTES
        runs = assign_buckets(items, range(len(items)), (cap,))
        self._sizes = [sum(sizes[index] for index in run) for run in runs]
        self._cuts = [slice(run[0], run[-1] + 1) for run in runs]
        self.move_to(small_flat)

    def move_to(self, flat: torch.Tensor) -> None:
        """Copy gradients into ``flat`` from now on, with the small at its end."""
        self._small_flat = flat[len(flat) - sum(self._sizes) :]
        self._runs = list(zip(self._cuts, self._small_flat.split(self._sizes), strict=True))

    def take(self, bucket_state: BucketState, slot: int | None = None) -> None:
        """Copy the gradient at ``slot``, or all, into the bucket; zeros for None."""
        if slot is not None:
            self._take_large(bucket_state, slot)
            return
        for large in {*range(bucket_state.bucket.num_at_once)} - bucket_state.taken:
            self._take_large(bucket_state, large)
        self._take_small(bucket_state.bucket, list(map(_grad_of, bucket_state.bucket.members)))

    def _take_large(self, bucket_state: BucketState, slot: int) -> None:
        member, view, scale = (
            bucket_state.bucket.members[slot],
            bucket_state.bucket.views[slot],
            self._scale,
        )
        grad = member.grad
        if grad is None:
            view.zero_()
        elif grad is view:
            self._multiply(view)
        else:
            self._reject_mismatched(bucket_state.bucket, slot, grad)
            copy_past_caches(view, grad, scale)
            if self.as_views:
                member.grad = view
        bucket_state.taken.add(slot)

    def _take_small(self, bucket: Bucket, read: Grads) -> None:
        first = bucket.num_at_once
        members, views = bucket.members[first:], list(bucket.views[first:])
        grads = [grad for grad in read[first:] if grad is not None]
        try:
            if (
                self._is_row_major
                and 0 < len(grads) == len(views)
                and not any(map(is_, grads, views))
            ):
                parts = grads if self._is_1d else [grad.reshape(-1) for grad in grads]
                for run, target in self._runs:
                    size = target.shape
                    torch.cat(parts[run], out=target)
                    if target.shape != size:  # ``cat`` resizes it for gradients of other shapes
                        target.resize_(size)
                        raise RuntimeError
                    self._multiply(target)
            else:
                rows = list(zip(members, views, read[first:], strict=True))
                lacking, members, views, grads = [], [], [], []
                for member, view, grad in rows:
                    if grad is None:
                        lacking.append(view)
                    elif grad is not view:
                        members.append(member)
                        views.append(view)
                        grads.append(grad)
                if lacking:
                    torch._foreach_zero_(lacking)
                if grads:
                    torch._foreach_copy_(views, grads)
                self._multiply(self._small_flat)
        # Check only after a failure: a check costs as much as the copy. ``cat`` warns before it
        # resizes.
        except (RuntimeError, UserWarning):
            for slot, grad in enumerate(read[first:], first):
                self._reject_mismatched(bucket, slot, grad)
            # A gradient may already be in the bucket as another tensor: ``grad = grad.detach()``.
            torch._foreach_copy_(views, grads)
            self._multiply(self._small_flat)
        if self.as_views:
            deque(map(setattr, members, repeat("grad"), views), maxlen=0)

    def _multiply(self, moved: torch.Tensor) -> None:
        if self._scale is not None:
            moved.mul_(self._scale)

    def _reject_mismatched(self, bucket: Bucket, slot: int, grad: torch.Tensor | None) -> None:
        index, shape = bucket.indices[slot], bucket.views[slot].shape
        if grad is None:
            return
        if grad.layout is not torch.strided:
            raise self._gradient_errors.sparse(index, grad.layout)
        if grad.shape != shape:
            raise self._gradient_errors.reshaped(index, grad.shape, shape)

    def clear(self, bucket_state: BucketState) -> None:
        bucket_state.bucket.flat.zero_()

    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        return bucket_state.bucket.flat

    def start(self, bucket_state: BucketState) -> Pending:
        """Start to average the gradients, with the status flags after them."""
        return bucket_state.bucket.averaging.start(bucket_state.bucket.sent)

    def give(
        self,
        bucket_state: BucketState,
        is_used: Sequence[bool] | None,
        *,
        is_complete: bool,
        share: float,
    ) -> None:
        """Scale the averages by ``share``; copy them to used parameters unless they are views."""
        bucket = bucket_state.bucket
        if share != 1.0:
            bucket.flat.mul_(share)
        if is_complete and self.as_views:
            return
        apart = []
        for index, member, view in zip(bucket.indices, bucket.members, bucket.views, strict=True):
            if is_used is not None and not is_used[index]:
                continue
            if member.grad is None and not is_complete:
                member.grad = view if self.as_views else torch.empty_like(view, dtype=member.dtype)
            if member.grad is None or self.as_views:
                continue
            if member.grad.is_conj() or member.grad.is_neg():  # not supported by ``_foreach_copy_``
                member.grad.copy_(view)
            else:
                apart.append((member.grad, view))
        if apart:
            torch._foreach_copy_([grad for grad, _ in apart], [view for _, view in apart])

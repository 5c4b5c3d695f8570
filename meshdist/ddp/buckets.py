"""Buckets: gradients that travel together, how a backward takes them in, and gives averages out.

A bucket is one flat tensor, and its gradients are views into it; or it is a single gradient
(``single_gradients``). What a bucket is does not change; what one backward knows of it stands in a
``BucketState``.

A hook on every parameter costs more than to copy a small gradient. So of the small gradients of a
bucket only the last has a hook; that the others have come is seen by their ``.grad``, which is
another tensor than when the backward began, or has another version.
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

# A gradient of this size or more is copied at once, while it is in the cache, and its memory is
# free again; smaller gradients wait for the bucket and go by one call together.
_AT_ONCE_BYTES = 64 * 1024

# So much is scaled while it is in the cache, just after it was copied.
_SCALED_TOGETHER_BYTES = 512 * 1024

_grad_of = attrgetter("grad")

_NUM_ALONE = max(map(sys.getrefcount, [torch.empty(0)]))
"""The reference count, looked at like this, of a tensor that one list alone refers to."""

_COUNTS_ARE_EXACT = getattr(sys, "_is_gil_enabled", lambda: True)()

Grads: TypeAlias = Sequence[torch.Tensor | None]


class Pending(Protocol):
    """A reduction in flight."""

    def wait(self) -> object:
        """Wait until the bucket holds the result of the reduction."""


class Averaging(NamedTuple):
    """A way to average over one group.

    Args:
        scale: a factor of gradients as they are copied; None where the backend averages, and for a
            communication hook.
        start: starts the average of a tensor in place.
    """

    group: ProcessGroup
    scale: float | None
    start: Callable[[torch.Tensor], Pending]


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients are averaged by one message.

    Args:
        indices: of the parameters, in the order in which their gradients lie.
        members: these parameters.
        copy_mode: how gradients get in, and averages out.
        views: of each gradient, where it lies in ``flat``; or a tensor of its shape.
        flat: memory for the gradients; empty where a gradient lies in its own.
        sent: that memory, and behind it that of the tail.
        is_deferred: whether it waits for the end of a backward, since some rank may lack a
            gradient of it.
        averaging: over which group they are averaged, and how.
        num_at_once: so many gradients, the first, are taken as soon as they have come.
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
        self.new_streams: Callable[[], GradientStreams] | None = None  # None on the CPU, too
        self.status_flags: StatusFlags | None = None  # which lies behind the gradients in ``sent``
        self.num_users = 0  # of the memory, if the program has none; 0 if ``.grad`` are no views
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
        """Return a bucket with its gradients in a row in ``sent``, the large before the small.

        Args:
            indices: of the parameters, in the order in which their gradients are expected.
            parameters: all parameters of the model.
            sent: memory for the gradients and the tail behind them.
            as_views: whether ``.grad`` become views into ``sent``.
            is_deferred: whether the bucket waits for the end of a backward.
        """
        is_small = {
            index: parameters[index].numel() * sent.itemsize < _AT_ONCE_BYTES for index in indices
        }
        num_large = len(indices) - sum(is_small.values())
        laid = (*sorted(indices, key=is_small.__getitem__),)
        members = [parameters[index] for index in laid]
        flat = sent.zero_()[: sum(member.numel() for member in members)]
        # A view taken through ``.data`` has a version counter of its own.
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
        """Return a bucket of one gradient, without own memory, sent last if ``is_deferred``."""
        like = parameter.detach()
        none = like.new_empty(0)
        return cls((index,), [parameter], copy_mode, [like], none, none, is_deferred, averaging)

    def note_users(self) -> None:
        """Count the tensors in the memory that the library itself has, once all of them exist."""
        if isinstance(self.copy_mode, Flat) and self.copy_mode.as_views:
            self.num_users = storage_uses(self.sent)

    def release_kept(self) -> None:
        """Leave gradients that the program has kept to it: a backward will fill the bucket."""
        # What still is ``.grad`` is added to in place, as on one device, with all that shares it.
        if not self.num_users or is_capturing(self.sent.device):
            return
        is_shared = not _COUNTS_ARE_EXACT or storage_uses(self.sent) > self.num_users
        uses = [*map(tensor_uses, self.views)]  # ``kept = torch.from_dlpack(p.grad)`` adds one
        if not is_shared and max(map(sys.getrefcount, self.views)) == _NUM_ALONE and max(uses) == 1:
            return
        pairs = zip(self.members, self.views, strict=True)
        apart = [slot for slot, (member, view) in enumerate(pairs) if member.grad is not view]
        is_shared = is_shared or any(uses[slot] > 1 for slot in apart)
        if is_shared and apart:  # ``kept = p.grad.detach()``, or an array: of an unknown gradient
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
    """A bucket's state in one backward: gradients awaited, and gradients copied in."""

    def __init__(self, bucket: Bucket) -> None:
        bucket.release_kept()
        self.bucket = bucket
        self.num_pending = len(bucket.members)
        self.streams = None if bucket.new_streams is None else bucket.new_streams()
        self.taken: set[int] = set()  # slots whose gradient has moved in
        self.read: Grads = ()  # of a gradient that is sent alone: what is sent
        self.average: torch.Tensor | None = None  # of a gradient that is sent alone, if any has it

    def take(self, *, is_zero: bool = False) -> None:
        """Copy all gradients into the bucket, zeros for missing gradients or with ``is_zero``."""
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
    """A way in which gradients get into a bucket, are sent, and come out as averages."""

    @abstractmethod
    def take(self, bucket_state: BucketState, slot: int | None = None) -> None:
        """Take the gradient at ``slot``, or all gradients for None, in order to send it."""

    @abstractmethod
    def clear(self, bucket_state: BucketState) -> None:
        """Let this rank contribute zeros in place of its gradients."""

    @abstractmethod
    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        """Return the tensor that a communication hook averages in place."""

    @abstractmethod
    def start(self, bucket_state: BucketState) -> Pending:
        """Start the bucket's average, without a communication hook; return it in flight."""

    @abstractmethod
    def give(
        self,
        bucket_state: BucketState,
        is_used: Sequence[bool] | None,
        *,
        is_complete: bool,
        share: float,
    ) -> None:
        """Let ``.grad`` hold the averages, times ``share``.

        Args:
            is_used: whether some rank had a gradient, for each parameter of the model: if so, a
                parameter without a gradient here gets the average, and else stays without. None
                where that is not known, as on accelerators, where looking would make the CPU wait:
                all get the average then.
            is_complete: whether all gradients came here.
        """


class Flat(GradientCopy):
    """Copies of gradients in one flat tensor.

    Args:
        small: the views of the gradients that move together, once the bucket is full.
        small_flat: the memory of these.
        scale: a factor of gradients as they move in, or None.
        as_views: whether ``.grad`` becomes the view.
        is_cast: whether the bucket has another dtype than its parameters.
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
        """Let gradients move into ``flat`` from now on; those that move together are its end."""
        self._small_flat = flat[len(flat) - sum(self._sizes) :]
        self._runs = list(zip(self._cuts, self._small_flat.split(self._sizes), strict=True))

    def take(self, bucket_state: BucketState, slot: int | None = None) -> None:
        """Copy the gradient at ``slot``, or all for None, into the bucket; zeros if it is None."""
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
                    if target.shape != size:  # ``cat`` makes it fit gradients of other shapes
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
        # Checked only now: checking costs as much as copying. ``cat`` warns before it resizes.
        except (RuntimeError, UserWarning):
            for slot, grad in enumerate(read[first:], first):
                self._reject_mismatched(bucket, slot, grad)
            # A gradient may lie in its place already, as another tensor: ``grad = grad.detach()``.
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
        """Fill the bucket with zeros."""
        bucket_state.bucket.flat.zero_()

    def buffer(self, bucket_state: BucketState) -> torch.Tensor:
        """Return the flat tensor of all gradients in the bucket."""
        return bucket_state.bucket.flat

    def start(self, bucket_state: BucketState) -> Pending:
        """Start to average the gradients, and the tail behind them; return it in flight."""
        return bucket_state.bucket.averaging.start(bucket_state.bucket.sent)

    def give(
        self,
        bucket_state: BucketState,
        is_used: Sequence[bool] | None,
        *,
        is_complete: bool,
        share: float,
    ) -> None:
        """Scale the averages by ``share``; copy those of used parameters unless they are views."""
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
            if member.grad.is_conj() or member.grad.is_neg():  # ``_foreach_copy_`` writes none such
                member.grad.copy_(view)
            else:
                apart.append((member.grad, view))
        if apart:
            torch._foreach_copy_([grad for grad, _ in apart], [view for _, view in apart])

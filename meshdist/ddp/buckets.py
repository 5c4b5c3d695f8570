"""Buckets: gradients that travel together, how a backward takes them in, and gives averages out.

A bucket is one flat tensor, and its gradients are views into it; or it is one gradient alone, sent
in the memory in which autograd has made it, or by its rows where it is sparse. What a bucket is
does not change; what one backward knows of it stands in a ``Filling``.

A hook on every parameter costs more than to copy a small gradient. So the small ones of a bucket
but the last have none: whether they have come is seen by their ``.grad``, which is another tensor
than when the backward began, or has another version.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import attrgetter, is_
from types import NoneType
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ..collectives.flat_sums import assign_buckets, dense_stride, sum_rows, views_into
from ..collectives.torch_private import storage_uses
from ..collectives.verbs import all_gather_into_tensor, all_reduce
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .device_streams import streams_for
from .graph_tasks import is_in_task
from .reports import Reports

__all__ = ["Bucket", "Filling", "Flat", "InPlace", "Pending", "Seen", "Sparse", "Taking"]

# A gradient of this size or more is copied at once, while it is in the cache, and its memory is
# free again; smaller ones wait for the bucket and go by one call together.
_AT_ONCE_BYTES = 64 * 1024

# So much is scaled while it is in the cache, just after it was copied.
_SCALED_TOGETHER_BYTES = 512 * 1024

_grad_of = attrgetter("grad")

Grads: TypeAlias = Sequence[torch.Tensor | None]

Seen: TypeAlias = list[tuple[torch.Tensor | None, int]]
"""Gradients and their versions."""


class Pending(Protocol):
    """A reduction in flight."""

    def wait(self) -> object:
        """Return when the bucket holds its result."""


class Bucket:
    """Gradients that travel together.

    Args:
        indices: which parameters, in the order in which their gradients lie.
        parameters: all of them.
        taking: how gradients get in, and averages out.
        views: of each gradient, where it lies in ``flat``; or a tensor of its shape.
        flat: memory for the gradients; empty where a gradient lies in its own.
        sent: that memory, and behind it that of the numbers that follow.
        is_trailing: whether it waits for the end of a backward, since some rank may lack a
            gradient of it.
        num_at_once: so many gradients, the first, are taken as soon as they have come.
        seen_slots: the places of those that have no hook.

    Attributes:
        members: its parameters.
        seen: those without a hook.
        new_streams: makes notes on which streams gradients come; None on the CPU.
    """

    def __init__(
        self,
        indices: tuple[int, ...],
        parameters: Sequence[torch.nn.Parameter],
        taking: Taking,
        views: Sequence[torch.Tensor],
        flat: torch.Tensor,
        sent: torch.Tensor,
        *,
        is_trailing: bool,
        num_at_once: int = 0,
        seen_slots: Sequence[int] = (),
    ) -> None:
        self.indices = indices
        self.members = [parameters[index] for index in indices]
        self.taking = taking
        self.views, self.flat, self.sent = views, flat, sent
        self.is_trailing = is_trailing
        self.num_at_once = num_at_once
        self.seen_slots = seen_slots
        self.seen = [self.members[slot] for slot in seen_slots]
        self.new_streams = streams_for(sent.device) if isinstance(taking, Flat) else None

    @classmethod
    def of_several(
        cls,
        indices: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        sent: torch.Tensor,
        *,
        scale: float | None,
        as_views: bool,
        hooked: Collection[int] | None,
        is_trailing: bool,
        reports: Reports,
    ) -> Bucket:
        """A bucket of gradients that lie one after the other in ``sent``, large ones first.

        They are expected in the order of ``indices``. Those in ``hooked`` need a hook whatever
        their size; all do where it is None. The rest is as for ``Bucket`` and ``Flat``.
        """
        size = {index: parameters[index].numel() * sent.itemsize for index in indices}
        # Equal on every rank, whatever has a hook on this one.
        laid = (*sorted(indices, key=lambda index: size[index] < _AT_ONCE_BYTES),)
        num_large = sum(size[index] >= _AT_ONCE_BYTES for index in indices)
        members = [parameters[index] for index in laid]
        flat = sent.zero_()[: sum(member.numel() for member in members)]
        # A view taken through ``.data`` has a version counter of its own.
        views = [view.data for view in views_into(flat, members)]
        is_cast = sent.dtype != members[0].dtype
        small = flat[sum(member.numel() for member in members[:num_large]) :]
        seen_slots = []
        # When the last small one comes, the others are looked for.
        if hooked is not None and streams_for(sent.device) is None:
            last = len(laid) - 1
            seen_slots = [slot for slot in range(num_large, last) if laid[slot] not in hooked]
        return cls(
            laid,
            parameters,
            Flat(views[num_large:], small, scale, as_views and not is_cast, is_cast, reports),
            views,
            flat,
            sent,
            is_trailing=is_trailing,
            num_at_once=num_large,
            seen_slots=seen_slots,
        )

    @classmethod
    def of_one(
        cls,
        index: int,
        parameters: Sequence[torch.nn.Parameter],
        taking: Taking,
        *,
        is_trailing: bool,
    ) -> Bucket:
        """A bucket of one gradient, without memory of its own."""
        like = parameters[index].detach()
        none = like.new_empty(0)
        return cls((index,), parameters, taking, [like], none, none, is_trailing=is_trailing)

    def with_all_hooks(self) -> Bucket:
        """The same bucket, of which hooks tell every gradient."""
        other = copy.copy(self)
        other.seen_slots, other.seen = (), []
        return other

    @property
    def is_hooked(self) -> list[bool]:
        """For each gradient, whether a hook tells that it has come."""
        return [slot not in self.seen_slots for slot in range(len(self.indices))]

    def see(self) -> Seen:
        """The gradients without a hook, with their versions; empty where there is none."""
        grads = list(map(_grad_of, self.seen))
        if {*map(type, grads)} <= {NoneType}:
            return []
        return [(grad, -1 if grad is None else grad._version) for grad in grads]


class Filling:
    """A bucket as one backward fills it.

    Args:
        bucket: which.
        at_forward: the gradients without a hook as they were behind the forward, if that is known.

    Attributes:
        num_pending: how many of those with a hook have not come yet.
        must_wait: whether the bucket waits for the end of this backward.
        streams: notes on which streams gradients come, if there are several.
        taken: the slots that have moved in.
        local: the slots without a hook to which another backward has brought gradients since the
            forward; known once this one has ended.
        read: all gradients, as they were looked at last.
        average: the result of a gradient alone; None where no rank had one.
    """

    def __init__(self, bucket: Bucket, at_forward: Seen | None = None) -> None:
        self.bucket = bucket
        self.num_pending = len(bucket.members) - len(bucket.seen)
        self.must_wait = bucket.is_trailing
        self.streams = None if bucket.new_streams is None else bucket.new_streams()
        self.taken: set[int] = set()
        self.local: Sequence[int] = ()
        self.read: Grads = ()
        self.average: torch.Tensor | None = None
        self._moved: Seen = []  # what moved in early
        self._kept = bucket.see()  # outputs have their gradients, and the backward goes on
        if at_forward is not None and self._kept:
            new = self._find_new([grad for grad, _ in self._kept], at_forward)
            if new:  # ``zero_grad`` leaves zeros
                norms = torch._foreach_norm([*new.values()])
                self.local = [slot for slot, norm in zip(new, norms, strict=True) if norm != 0]

    def _find_new(self, grads: Grads, before: Seen) -> dict[int, torch.Tensor]:
        """Of gradients without a hook those that were not there before, or had another version."""
        rows = zip(self.bucket.seen_slots, grads, before or repeat((None, -1)), strict=False)
        return {
            slot: grad
            for slot, grad, (then, version) in rows
            if grad is not None and (grad is not then or grad._version != version)
        }

    # -- which have come --------------------------------------------------------------------------

    def find_missing(self) -> list[int]:
        """The slots without a hook whose gradient has not come; ``take`` takes what is read here.

        To read a gradient costs more than to keep it.
        """
        grads = self.read = list(map(_grad_of, self.bucket.members))
        if not self._kept and NoneType not in {*map(type, grads)}:
            return []
        slots = self.bucket.seen_slots
        new = self._find_new([grads[slot] for slot in slots], self._kept)
        return [slot for slot in slots if slot not in new]

    def find_missing_at_end(self) -> list[int]:
        """The same once the backward has ended, when ``local`` is known, too."""
        missing = self.find_missing()
        if not self.local:
            return missing
        # What this backward has brought before the outputs' gradients does not come again: that of
        # a weight which the loss uses beside the outputs alone. Else another backward brought it.
        members = self.bucket.members
        came = {slot for slot in self.local if slot in missing and is_in_task(members[slot])}
        self.local = [slot for slot in self.local if slot not in came]
        return [slot for slot in missing if slot not in came]

    def find_late(self) -> list[int]:
        """The slots without a hook to which was added after they had moved in."""
        rows = zip(self.bucket.seen_slots, self._moved, strict=False)
        return [slot for slot, (grad, old) in rows if grad is not None and grad._version != old]

    # -- taking in --------------------------------------------------------------------------------

    def take_early(self) -> bool:
        """Take all gradients if they have come, which must not grow from now on; else wait."""
        self.must_wait = bool(self.find_missing())
        if self.must_wait:
            return False
        self.take()
        self._moved = self.bucket.see()
        return True

    def take(self, *, is_zero: bool = False) -> None:
        """Take all gradients, also from other streams; zeros where there is none, or for all."""
        bucket, first = self.bucket, self.bucket.num_at_once
        if self.streams is not None:
            pairs = zip(bucket.members[first:], bucket.views[first:], strict=True)
            apart = [grad for member, view in pairs if (grad := member.grad) is not view]
            self.streams.await_others([grad for grad in apart if grad is not None])
        if is_zero:
            bucket.taking.clear(self)
        else:
            bucket.taking.take(self)


class Taking(ABC):
    """How gradients get into a bucket, what is sent of it, and how averages get out."""

    @abstractmethod
    def take(self, filling: Filling, slot: int | None = None) -> None:
        """Take the gradient at ``slot``, or all."""

    @abstractmethod
    def clear(self, filling: Filling) -> None:
        """Send nothing of what is here."""

    @abstractmethod
    def buffer(self, filling: Filling) -> torch.Tensor:
        """The tensor that a communication hook is given, and writes its average into."""

    @abstractmethod
    def start(self, filling: Filling, average: Callable[[torch.Tensor], Pending]) -> Pending:
        """Start the reduction, where there is no such hook, by ``average``, which is in place."""

    @abstractmethod
    def give(
        self, filling: Filling, is_used: Sequence[bool] | None, *, is_complete: bool, share: float
    ) -> None:
        """Let ``.grad`` hold the averages, times ``share``.

        Where all gradients came here the backward ``is_complete``. ``is_used`` tells of every
        parameter whether some rank had a gradient: one that has none here gets the average then,
        and else is left alone. It is None where that is not known, as on accelerators, where
        looking would make the CPU wait: then it gets what was reduced.
        """


class Flat(Taking):
    """Gradients are copied into one flat tensor.

    Args:
        small: the views of those that move together, as the bucket is full.
        small_flat: the memory of these.
        scale: by what all are multiplied on their way, or None.
        as_views: whether ``.grad`` becomes the view.
        is_cast: whether the bucket has another dtype.
        reports: makes the error for a gradient that cannot lie here.
    """

    def __init__(
        self,
        small: Sequence[torch.Tensor],
        small_flat: torch.Tensor,
        scale: float | None,
        as_views: bool,
        is_cast: bool,
        reports: Reports,
    ) -> None:
        self.as_views = as_views
        self._scale = scale
        self._reports = reports
        self._small_flat = small_flat
        self._is_row_major = not is_cast and all(view.is_contiguous() for view in small)
        self._is_1d = all(view.dim() == 1 for view in small)
        sizes = [view.numel() for view in small]
        items = [(size * small_flat.itemsize, None) for size in sizes]
        cap = sys.maxsize if scale is None else _SCALED_TOGETHER_BYTES
        runs = assign_buckets(items, range(len(items)), (cap,))
        targets = small_flat.split([sum(sizes[place] for place in run) for run in runs])
        cuts = [slice(run[0], run[-1] + 1) for run in runs]
        self._runs = list(zip(cuts, targets, strict=True))

    def take(self, filling: Filling, slot: int | None = None) -> None:
        """Copy the gradient into its view, or all that lie elsewhere; zeros where there is none."""
        if slot is not None:
            self._take_one(filling, slot)
            return
        for large in {*range(filling.bucket.num_at_once)} - filling.taken:
            self._take_one(filling, large)
        grads, filling.read = filling.read, ()  # whose memory is free behind the copy
        self._take_small(filling.bucket, grads or list(map(_grad_of, filling.bucket.members)))

    def _take_one(self, filling: Filling, slot: int) -> None:
        member, view, scale = filling.bucket.members[slot], filling.bucket.views[slot], self._scale
        grad = member.grad
        if grad is None:
            view.zero_()
        elif grad is view:
            self._multiply(view)
        else:
            self._refuse_sparse(filling.bucket, slot, grad)
            if scale is None:
                view.copy_(grad)
            else:
                torch.mul(grad, scale, out=view)  # one pass
            if self.as_views:
                member.grad = view
        filling.taken.add(slot)

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
                    torch.cat(parts[run], out=target)
                    self._multiply(target)
            else:
                rows = list(zip(members, views, read[first:], strict=True))
                lacking = [view for _, view, grad in rows if grad is None]
                if lacking:
                    torch._foreach_zero_(lacking)
                apart = [(m, v, g) for m, v, g in rows if g is not None and g is not v]
                members, views = [member for member, _, _ in apart], [view for _, view, _ in apart]
                grads = [grad for _, _, grad in apart]
                if grads:
                    torch._foreach_copy_(views, grads)
                self._multiply(self._small_flat)
        except RuntimeError:  # checked only now, since checking costs as much as copying
            for slot, grad in enumerate(read[first:], first):
                self._refuse_sparse(bucket, slot, grad)
            # One may lie in its place already, as another tensor: ``grad = grad.detach()``.
            torch._foreach_copy_(views, grads)
            self._multiply(self._small_flat)
        if self.as_views:
            deque(map(setattr, members, repeat("grad"), views), maxlen=0)

    def _multiply(self, moved: torch.Tensor) -> None:
        if self._scale is not None:
            moved.mul_(self._scale)

    def _refuse_sparse(self, bucket: Bucket, slot: int, grad: torch.Tensor | None) -> None:
        if grad is not None and grad.layout is not torch.strided:
            raise self._reports.sparse(bucket.indices[slot], grad.layout)

    def clear(self, filling: Filling) -> None:
        """Send zeros."""
        filling.bucket.flat.zero_()

    def buffer(self, filling: Filling) -> torch.Tensor:
        """All gradients, one after the other."""
        return filling.bucket.flat

    def start(self, filling: Filling, average: Callable[[torch.Tensor], Pending]) -> Pending:
        """Average the gradients, and the numbers behind them."""
        return average(filling.bucket.sent)

    def give(
        self, filling: Filling, is_used: Sequence[bool] | None, *, is_complete: bool, share: float
    ) -> None:
        """Copy the averages out of the bucket, where ``.grad`` is no view."""
        bucket = filling.bucket
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
            if member.grad is not None and not self.as_views:
                apart.append((member.grad, view))
        if apart:
            torch._foreach_copy_([grad for grad, _ in apart], [view for _, view in apart])


class _Alone(Taking):
    """One gradient, which is taken as it is."""

    def take(self, filling: Filling, slot: int | None = None) -> None:
        """Take the gradient as it is."""
        filling.read = [filling.bucket.members[0].grad]

    def clear(self, filling: Filling) -> None:
        """Send nothing of what is here."""
        filling.read = [None]

    def give(
        self, filling: Filling, is_used: Sequence[bool] | None, *, is_complete: bool, share: float
    ) -> None:
        """Let ``.grad`` be the average."""
        average, index = filling.average, filling.bucket.indices[0]
        if average is not None and (is_complete or is_used is None or is_used[index]):
            filling.bucket.members[0].grad = average if share == 1.0 else average * share


class InPlace(_Alone):
    """One large dense gradient is averaged where it lies.

    Where ranks share no memory, to copy it into a bucket would only cost time and memory. It is
    copied all the same where its memory is not its own: autograd lets a gradient share memory with
    that of a view, or of another parameter, which a backward may still read.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def buffer(self, filling: Filling) -> torch.Tensor:
        """The tensor to sum; zeros where there is no gradient."""
        mine, like = filling.read[0], filling.bucket.views[0]
        stride = dense_stride(like.shape, like.stride())
        if mine is not None and mine.stride() == stride and storage_uses(mine) == 1:
            return mine.mul_(self._scale)
        apart = like.new_empty_strided(like.shape, stride)
        return apart.zero_() if mine is None else torch.mul(mine, self._scale, out=apart)

    def start(self, filling: Filling, average: Callable[[torch.Tensor], Pending]) -> Pending:
        """Average the gradient."""
        filling.average = self.buffer(filling)
        return average(filling.average)


_DENSE = -1
_NONE = -2


class Sparse(_Alone):
    """One gradient, of which ranks send the rows that they have.

    What is sent depends on the gradient, so it is sent where the reduction is waited for: that
    comes in one order on every rank. Where some rank has a dense gradient, it is dense on all.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def buffer(self, filling: Filling) -> torch.Tensor:
        """This rank's rows, of which a communication hook makes the average."""
        mine, like = filling.read[0], filling.bucket.views[0]
        filling.average = _no_rows(like) if mine is None else mine.detach().clone()
        return filling.average

    def start(self, filling: Filling, average: Callable[[torch.Tensor], Pending]) -> Pending:
        """Put the reduction off."""
        return _AtTheWait(self, filling)

    def find_average(self, filling: Filling) -> torch.Tensor | None:
        """Average over the group; collective."""
        mine, like, group = filling.read[0], filling.bucket.views[0], self._group
        rows = None if mine is None or mine.layout is torch.strided else mine.detach().coalesce()
        count = _NONE if mine is None else _DENSE if rows is None else rows._nnz()
        counts = torch.empty(group.size(), dtype=torch.int64, device=like.device)
        all_gather_into_tensor(counts, torch.tensor([count], device=like.device), group)
        sizes = counts.tolist()
        if _DENSE in sizes:
            if mine is None:
                dense = torch.zeros_like(like)
            else:
                dense = (mine.to_dense() if rows is not None else mine.clone()).contiguous()
            all_reduce(dense, ReduceOp.AVG, group)
            return dense
        if all(size == _NONE for size in sizes):
            return None
        sizes = [max(size, 0) for size in sizes]
        if rows is None:
            rows = _no_rows(like)
        return sum_rows(group, rows / group.size(), sizes) if any(sizes) else rows


def _no_rows(like: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter of which this rank has no rows."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64, device=like.device),
        like.new_empty(0, *like.shape[1:]),
        like.shape,
        check_invariants=False,
    ).coalesce()


class _AtTheWait(NamedTuple):
    """The reduction of a sparse gradient."""

    taking: Sparse
    filling: Filling

    def wait(self) -> None:
        """Reduce it; collective."""
        self.filling.average = self.taking.find_average(self.filling)

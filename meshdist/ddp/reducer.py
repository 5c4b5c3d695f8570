"""Averages gradients over a group while the backward goes on.

Each bucket is one flat tensor; the gradients are views into it. A hook on every parameter counts
the gradients that have come; when all of a bucket are in, its all-reduce starts, strictly in bucket
order on every rank. A callback of the autograd engine waits for them at the end of the backward, so
that ``.grad`` holds averages when ``backward()`` returns.

What the reducer guarantees:

* Every backward through the model averages, also the second one on a retained graph: averaging what
  is averaged already changes nothing, so sums of several backwards are right too.
* No rank waits for a gradient that another rank does not have: zeros stand in for it, and the next
  forward raises. A backward that raised midway is completed in the same way.
* The last bucket carries three numbers more: how many ranks lacked a gradient, were interrupted,
  and went on. So on the CPU all ranks know, and raise the same error. (On an accelerator reading
  them would make the CPU wait for the device: there only the rank concerned raises.)

A rank whose backward reaches no parameter at all is not seen, and is missed by the others.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..collectives.shared_buffers import shared_empty
from ..collectives.verbs import all_reduce, broadcast
from ..errors import GradientError
from ..mesh.groups import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import assign_buckets, items_of
from .flat_bucket import Bucket
from .replicas import gather_texts
from .reports import Reports

__all__ = ["Reducer", "is_reduced", "tensors_in"]

# Places of the flags; each is 1 on a rank for which it holds, and their sums are compared with 0
# alone, since sums of many ones are inexact in half precision.
_LACKING, _INTERRUPTED, _WENT_ON = 0, 1, 2
_NUM_FLAGS = 3


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether a Reducer averages the gradient of ``parameter``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "is_reducing", False) for hook in hooks.values())


class Reducer:
    """Keeps the gradients of ``parameters`` averaged over ``group``.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        names: one per parameter, for messages.
        group: over whose members gradients are averaged; open for the parameters' devices.
        first_cap_bytes: the cap of the first bucket.
        cap_bytes: the cap of every other bucket.
        gradient_as_bucket_view: whether ``.grad`` is a view into the bucket, or a copy.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        *,
        first_cap_bytes: int,
        cap_bytes: int,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        self._parameters = list(parameters)
        self._reports = Reports(names, group)
        self._group = group
        self._first_cap_bytes = first_cap_bytes
        self._cap_bytes = cap_bytes
        self._as_views = gradient_as_bucket_view
        self._scale = 1.0 / group.size()
        self._lock = threading.RLock()  # a module on several devices has a thread on each
        self._handles: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._next = 0  # the bucket whose all-reduce starts next
        self._is_open = False  # a gradient has come, and the backward has not ended
        self._task: int | None = None  # the backward that will call _finish
        self._came = bytearray(len(self._parameters))  # in this backward
        self._came_since_forward = bytearray(len(self._parameters))
        self._someone_lacks = False
        self._num_rounds = 0  # equal on every rank
        self._failure: Exception | None = None
        self._arrivals: list[int] | None = []  # of the first backward; None once rebuilt
        self._build(range(len(self._parameters) - 1, -1, -1), _own_memory)
        self._flags_of = {
            (lacks, is_interrupted): torch.tensor(
                [lacks, is_interrupted, not is_interrupted], device=self._buckets[-1].sent.device
            )
            for lacks in (False, True)
            for is_interrupted in (False, True)
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets, in the order in which they are reduced."""
        return tuple(self._buckets)

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Whether the buckets follow the order in which gradients came in the first backward."""
        return self._arrivals is None

    # -- before and after the module's forward ----------------------------------------------------

    def before_forward(self) -> None:
        """Settle what the last backward left, and once rebuild the buckets.

        Raises:
            GradientError: parameters got no gradient since the last forward, the last backward was
                interrupted on some ranks, or an all-reduce failed.
        """
        if torch._C._current_graph_task_id() != -1:  # a forward computed again by a checkpoint
            return
        if self._failure is not None:
            raise self._reports.stopped(self._failure) from self._failure
        has_not_ended = self._is_open or self._task is not None
        self._task = None
        if has_not_ended:
            self._complete_interrupted()
        if not torch.is_grad_enabled():
            return
        if self._someone_lacks:
            self._someone_lacks = False
            raise self._lacking_error()
        if self._arrivals is not None and self._num_rounds:
            self._rebuild(self._arrivals)
        self._came_since_forward = bytearray(len(self._parameters))

    def after_forward(self, outputs: object, owner: object) -> None:
        """Learn from the module's outputs when a backward begins.

        The outermost backward must be known where checkpoints run inner ones. ``owner`` is kept
        alive as long as a backward may come.
        """

        def backward_begins(_: torch.Tensor, owner: object = owner) -> None:
            self._enter()

        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(backward_begins)

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- buckets ----------------------------------------------------------------------------------

    def _build(
        self, order: Sequence[int], allocate: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> None:
        """Lay the buckets out for gradients that come in ``order``; gradients keep their values."""
        old_views = {
            index: view
            for bucket in self._buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
            if self._parameters[index].grad is view
        }
        self.close()
        self._buckets = []
        assignment = assign_buckets(
            items_of(self._parameters),
            order,
            first_cap_bytes=self._first_cap_bytes,
            cap_bytes=self._cap_bytes,
        )
        for place, indices in enumerate(assignment):
            num_flags = _NUM_FLAGS if place == len(assignment) - 1 else 0
            bucket = Bucket(indices, self._parameters, num_flags, allocate)
            self._buckets.append(bucket)
            for slot, index in enumerate(indices):
                parameter = self._parameters[index]
                old_view = old_views.pop(index, None)
                if old_view is not None:
                    bucket.views[slot].copy_(old_view)
                    parameter.grad = bucket.views[slot]
                hook = self._make_hook(index, bucket, slot)
                handle = parameter.register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)

    def _rebuild(self, arrivals: list[int]) -> None:
        """Rebuild the buckets once, in the order in which gradients came on group rank 0."""
        expected = [index for bucket in self._buckets for index in bucket.indices]
        order = list(dict.fromkeys(arrivals + expected))
        device = self._buckets[-1].sent.device
        agreed = torch.tensor(order, dtype=torch.int64, device=device)
        broadcast(agreed, group=self._group, group_src=0)
        self._arrivals = None
        with torch.no_grad():
            self._build(agreed.tolist(), self._shared_memory)

    def _shared_memory(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Memory that the group reduces where it lies, if its wire shares any; collective."""
        if like.is_cpu:
            return shared_empty(count, like.dtype, self._group)
        return _own_memory(count, like)

    def _make_hook(self, index: int, bucket: Bucket, slot: int) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls when the gradient of one parameter is in ``.grad``.

        This runs once per parameter and backward, so it does as little as it can.
        """
        came = self._came
        arrivals = self._arrivals
        view = bucket.views[slot]
        goes_at_once = bucket.at_once[slot]

        def gradient_came(parameter: torch.Tensor) -> None:
            if came[index]:
                raise self._reports.twice(index)
            if not self._is_open:
                self._open()
            came[index] = 1
            if arrivals is not None:
                arrivals.append(index)
            if goes_at_once:
                self._move_in(parameter, view)
            bucket.num_pending -= 1
            if not bucket.num_pending:
                self._start_full_buckets()

        gradient_came.is_reducing = True  # type: ignore[attr-defined]
        return gradient_came

    # -- one backward -----------------------------------------------------------------------------

    def _enter(self) -> None:
        """A gradient reached an output of the module: a backward has begun."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._is_open:
            raise self._reports.overlapping("a backward began before another had ended")
        self._task = task
        Variable._execution_engine.queue_callback(self._finish)

    def _open(self) -> None:
        """The first gradient of a backward has come."""
        if torch.is_grad_enabled():
            raise self._reports.with_graph()
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            Variable._execution_engine.queue_callback(self._finish)
        self._is_open = True

    def _move_in(self, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Bring one gradient into its view, scaled."""
        grad = parameter.grad
        if grad is view:
            view.mul_(self._scale)
        elif grad is None:
            view.zero_()
        else:
            self._check_dense(grad, parameter)
            torch.mul(grad, self._scale, out=view)
            if self._as_views:
                parameter.grad = view

    def _move_in_later_ones(self, bucket: Bucket) -> None:
        """Bring the small gradients of a bucket into their views, scaled, by few calls."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        owners: list[torch.Tensor] = []
        for parameter, view in bucket.later:
            grad = parameter.grad
            if grad is view:
                continue
            if grad is None:
                view.zero_()
                continue
            views.append(view)
            grads.append(grad)
            owners.append(parameter)
        if views:
            try:
                torch._foreach_copy_(views, grads)
            except RuntimeError:  # looked into only now, since looking costs as much as copying
                for parameter, grad in zip(owners, grads, strict=True):
                    self._check_dense(grad, parameter)
                raise
            if self._as_views:
                for parameter, view in zip(owners, views, strict=True):
                    parameter.grad = view
        if self._scale == 1.0:
            return
        if len(bucket.later) == len(bucket.views):
            bucket.flat.mul_(self._scale)
        elif bucket.later:
            torch._foreach_mul_([view for _, view in bucket.later], self._scale)

    def _start_full_buckets(self) -> None:
        """Start the all-reduce of every full bucket that has no unfull one before it."""
        with self._lock, torch.no_grad():
            while self._next < len(self._buckets) and not self._buckets[self._next].num_pending:
                bucket = self._buckets[self._next]
                self._move_in_later_ones(bucket)
                self._start(bucket, lacks=False, is_interrupted=False)

    def _start(self, bucket: Bucket, *, lacks: bool, is_interrupted: bool) -> None:
        if bucket is self._buckets[-1]:
            bucket.flags.copy_(self._flags_of[lacks, is_interrupted])
        bucket.work = all_reduce(bucket.sent, ReduceOp.SUM, self._group, async_op=True)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward has ended: fill in what did not come, and wait for every bucket."""
        self._task = None
        if not self._is_open:  # no parameter took part, for example in autograd.grad of inputs
            return
        if self._next == len(self._buckets):
            self._came_since_forward[:] = self._came
            lacks = False
        else:
            lacks = self._fill_in()
        self._someone_lacks = lacks
        self._wait()
        self._read_flags(was_interrupted=False)

    def _fill_in(self) -> bool:
        """Start the buckets that are not full; returns whether a parameter still lacks a gradient.

        A parameter lacks one if no backward since the last forward has reached it.
        """
        for index, came in enumerate(self._came):
            if came:
                self._came_since_forward[index] = 1
        lacks = not all(self._came_since_forward)
        for bucket in self._buckets[self._next :]:
            for slot, index in enumerate(bucket.indices):
                if bucket.at_once[slot] and not self._came[index]:
                    self._move_in(self._parameters[index], bucket.views[slot])
            self._move_in_later_ones(bucket)
            self._start(bucket, lacks=lacks, is_interrupted=False)
        return lacks

    @torch.no_grad()
    def _complete_interrupted(self) -> None:
        """Keep in step with ranks whose backward went on, after this rank's raised midway.

        Zeros stand in for what this rank did not send. Where every rank was interrupted nothing is
        lost, since each has seen its own error; otherwise all raise. No rank keeps the gradients.
        """
        is_cut = self._next < len(self._buckets)
        for bucket in self._buckets[self._next :]:
            bucket.flat.zero_()
            self._start(bucket, lacks=False, is_interrupted=True)
        self._wait()
        self._read_flags(was_interrupted=is_cut)

    def _wait(self) -> None:
        """Wait for all buckets, hand out the gradients, and be ready for the next backward."""
        try:
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
        except Exception as failure:
            self._failure = failure
            raise
        is_complete = all(self._came)
        for bucket in self._buckets:
            if not is_complete:
                bucket.hand_out_missing(self._parameters, as_views=self._as_views)
            if not self._as_views:
                bucket.hand_out_copies(self._parameters)
            bucket.work = None
            bucket.num_pending = len(bucket.indices)
        self._came[:] = bytes(len(self._came))
        self._next = 0
        self._is_open = False
        self._num_rounds += 1

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _read_flags(self, *, was_interrupted: bool) -> None:
        """Learn how the backward went on the other ranks; all of them raise where one must."""
        if not self._all_ranks_know:
            if was_interrupted:
                self._drop_gradients()
                raise self._reports.interrupted([self._group.world.rank])
            return
        flags = self._buckets[-1].flags
        counts = (flags.real if flags.is_complex() else flags).tolist()
        self._someone_lacks = counts[_LACKING] > 0
        if counts[_INTERRUPTED] == 0:
            return
        self._drop_gradients()
        if counts[_WENT_ON] > 0:
            texts = gather_texts(str(int(was_interrupted)), self._group, device=flags.device)
            ranks = [r for r, text in zip(self._group.ranks, texts, strict=True) if text == "1"]
            raise self._reports.interrupted(ranks)

    @property
    def _all_ranks_know(self) -> bool:
        """Whether the flags are read: not where that would make the CPU wait for a device."""
        return self._buckets[-1].sent.device.type == "cpu"

    def _lacking_error(self) -> GradientError:
        """Which parameters got no gradient, on which ranks; collective on the CPU."""
        mine = [index for index, came in enumerate(self._came_since_forward) if not came]
        held = {self._group.world.rank: mine}
        if self._all_ranks_know:
            device = self._buckets[-1].sent.device
            texts = gather_texts(json.dumps(mine), self._group, device=device)
            held = dict(zip(self._group.ranks, map(json.loads, texts), strict=True))
        self._came_since_forward[:] = bytes(len(self._came_since_forward))
        return self._reports.lacking(held)

    def _check_dense(self, grad: torch.Tensor, parameter: torch.Tensor) -> None:
        if grad.layout is not torch.strided:
            index = next(i for i, mine in enumerate(self._parameters) if mine is parameter)
            raise self._reports.sparse(index, grad.layout)


def _own_memory(count: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(count, dtype=like.dtype, device=like.device)


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for entry in tree:
            yield from tensors_in(entry)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))

"""Averages gradients over a group while the backward goes on.

Each bucket is one flat tensor; the gradients are views into it. A hook on every parameter counts
the gradients that have come; when all of a bucket are in, its all-reduce starts, strictly in bucket
order on every rank. A callback of the autograd engine waits for them at the end of the backward, so
that ``.grad`` holds averages when ``backward()`` returns.

What the reducer guarantees:

* Every backward through the model averages, also the second one on a retained graph: averaging what
  is averaged already changes nothing, so sums of several backwards are right too.
* No rank waits for a gradient that another rank does not have: zeros stand in for it, and the next
  forward raises. A backward that raised midway is completed in the same way. The last bucket
  carries flags that say so, see ``endings``.
* No backward makes the CPU wait for an accelerator, but a second one without a forward between
  them, which first reads how the one before it ended.

Where no backward reaches the model on a rank, since its forward or its loss raised, the rank stands
in for one when the program checks the gradients; else it is out of step from then on.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ..collectives.shared_buffers import shared_empty
from ..collectives.verbs import all_reduce, broadcast
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .buckets import assign_buckets, items_of
from .endings import Ending, Endings
from .flat_bucket import Bucket
from .reports import Reports
from .streams import is_capturing

__all__ = ["Reducer", "is_reduced", "tensors_in"]


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
        caps: of the first bucket and of every other one, in bytes.
        gradient_as_bucket_view: whether ``.grad`` is a view into the bucket, or a copy.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        *,
        caps: tuple[int, int],
        gradient_as_bucket_view: bool = True,
    ) -> None:
        self._parameters = list(parameters)
        self._reports = Reports(names, group)
        self._group = group
        self._caps = caps
        self._as_views = gradient_as_bucket_view
        self._lock = threading.RLock()  # a module on several devices has a thread on each
        self._handles: list[RemovableHandle] = []
        self.buckets: list[Bucket] = []
        self._next = 0  # the bucket whose all-reduce starts next
        self._is_open = False  # a gradient has come, and the backward has not ended
        self._task: int | None = None  # the backward that will call _finish
        self._came = bytearray(len(self._parameters))  # 1 for each gradient of this backward
        self._has_reduced = False  # equal on every rank
        self._has_begun = False  # a forward, since the last check
        self._has_ended = False  # a backward, since the last check
        self._failure: Exception | None = None
        self.source = 0  # the member from which the order of buckets comes
        self.share = 1.0  # by which averages over all members are multiplied
        self.calls_inside: Callable[[], AbstractContextManager[None]] = nullcontext
        self.arrivals: list[int] | None = []  # of the first backward; None once rebuilt
        self._build(range(len(self._parameters) - 1, -1, -1), torch.Tensor.new_empty)
        device = self.buckets[-1].sent.device
        self._endings = Endings(self._parameters, self._reports, group, device)

    # -- before and after the module's forward ----------------------------------------------------

    def before_forward(self) -> None:
        """Finish what the last backward left open, and once rebuild the buckets.

        Raises:
            GradientError: parameters got no gradient since the last forward, the last backward was
                interrupted on some ranks, an all-reduce failed, or a CUDA graph is captured before
                the buckets are rebuilt.
        """
        if torch._C._current_graph_task_id() != -1:  # a forward computed again by a checkpoint
            return
        self._end_backward()
        if not torch.is_grad_enabled():
            return
        self._endings.forward_begins()
        self._has_begun = True
        if self.arrivals is not None:
            if is_capturing(self.buckets[-1].sent.device):  # the graph would keep buckets that go
                raise self._reports.captured_early()
            if self._has_reduced:
                self._rebuild(self.arrivals)

    def check(self) -> None:
        """Raise what the next forward would raise of the last backward, on every rank.

        Raises:
            GradientError: as ``before_forward``, or a backward is running.
        """
        if torch._C._current_graph_task_id() != -1:
            raise self._reports.running()
        self.complete_open()
        is_absent = self._has_begun and not self._has_ended
        self._has_begun = self._has_ended = False
        if is_absent and not is_capturing(self.buckets[-1].sent.device):
            self._stand_in(Ending.ABSENT)
        self._endings.read_flags()
        self._endings.check_complete()

    def after_forward(self, outputs: object, owner: object) -> None:
        """Put hooks on the module's outputs, which run when a backward begins.

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
        self, order: Sequence[int], allocate: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> None:
        """Make the buckets for gradients that come in ``order``; gradients keep their values."""
        old_views = {
            index: view
            for bucket in self.buckets
            for index, view in zip(bucket.indices, bucket.views, strict=True)
            if self._parameters[index].grad is view
        }
        self.close()
        self.buckets = []
        assignment = assign_buckets(items_of(self._parameters), order, self._caps)
        for place, indices in enumerate(assignment):
            bucket = Bucket(
                indices,
                self._parameters,
                num_flags=len(Ending) if place == len(assignment) - 1 else 0,
                allocate=allocate,
                scale=1.0 / self._group.size(),
                as_views=self._as_views,
                reports=self._reports,
            )
            self.buckets.append(bucket)
            for slot, index in enumerate(indices):
                old_view = old_views.pop(index, None)
                if old_view is not None:
                    bucket.members[slot].grad = bucket.views[slot].copy_(old_view)
                hook = self._make_hook(index, bucket, slot)
                handle = bucket.members[slot].register_post_accumulate_grad_hook(hook)
                self._handles.append(handle)

    def _rebuild(self, arrivals: list[int]) -> None:
        """Rebuild the buckets once, in the order in which gradients came on group rank 0."""
        expected = [index for bucket in self.buckets for index in bucket.indices]
        order = list(dict.fromkeys(arrivals + expected))
        device = self.buckets[-1].sent.device
        agreed = torch.tensor(order, dtype=torch.int64, device=device)
        broadcast(agreed, group=self._group, group_src=self.source)
        self.arrivals = None
        with torch.no_grad():
            self._build(agreed.tolist(), self._shared_memory)
        self._endings.place_flags(self.buckets[-1].sent.device)

    def _shared_memory(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Memory that the group reduces where it lies, if its wire shares any; collective."""
        if like.is_cpu:
            return shared_empty(count, like.dtype, self._group)
        return like.new_empty(count)

    def _make_hook(self, index: int, bucket: Bucket, slot: int) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls when the gradient of one parameter is in ``.grad``.

        This runs once per parameter and backward, so it does as little as it can.
        """
        came = self._came
        arrivals = self.arrivals
        goes_at_once = bucket.at_once[slot]
        streams = bucket.streams

        def gradient_came(_: torch.Tensor) -> None:
            if came[index]:
                name = self._reports.describe(index)
                raise self._reports.overlapping(f"{name} got its gradient twice")
            if not self._is_open:
                self._open()
            came[index] = 1
            if arrivals is not None:
                arrivals.append(index)
            if streams is not None:
                streams.note()
            if goes_at_once:
                bucket.move_in(slot)
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
        self._endings.read_flags()  # where no forward came since the last backward
        self._task = task
        Variable._execution_engine.queue_callback(self._finish)

    def _open(self) -> None:
        """The first gradient of a backward has come."""
        if torch.is_grad_enabled():
            raise self._reports.with_graph()
        if self._task is None:
            self._enter()
        self._is_open = True

    def _start_full_buckets(self) -> None:
        """Start the all-reduce of every full bucket that has no unfull one before it."""
        with self._lock, torch.no_grad():
            while self._next < len(self.buckets) and not self.buckets[self._next].num_pending:
                bucket = self.buckets[self._next]
                bucket.await_streams()
                bucket.move_in_later_ones()
                self._start(bucket, Ending.WHOLE)

    def _start(self, bucket: Bucket, ending: Ending | None) -> None:
        if bucket is self.buckets[-1] and ending is not None:
            self._endings.set_flag(bucket.flags, ending)
        with self.calls_inside():
            bucket.work = all_reduce(bucket.sent, ReduceOp.SUM, self._group, async_op=True)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        """The backward has ended: fill in what did not come, and wait for every bucket."""
        self._task = None
        if not self._is_open:  # no parameter took part, for example in autograd.grad of inputs
            return
        ending = self._endings.backward_ends(self._came)
        for bucket in self.buckets[self._next :]:
            bucket.await_streams()
            for slot, index in enumerate(bucket.indices):
                if bucket.at_once[slot] and not self._came[index]:
                    bucket.move_in(slot)
            bucket.move_in_later_ones()
            self._start(bucket, ending)
        self._wait(ending)

    def _end_backward(self) -> None:
        """Finish what the last backward left open, and learn how it ended on the other ranks."""
        self.complete_open()
        self._endings.read_flags()

    def complete_open(self) -> None:
        """Finish what the last backward left open here."""
        if self._failure is not None:
            raise self._reports.stopped(self._failure) from self._failure
        has_not_ended = self._is_open or self._task is not None
        self._task = None
        if has_not_ended:
            self._complete_interrupted()

    @torch.no_grad()
    def _complete_interrupted(self) -> None:
        """Keep in step with ranks whose backward went on, after this rank's raised midway.

        Zeros stand in for what this rank did not send.
        """
        is_cut = self._next < len(self.buckets)
        ending = Ending.INTERRUPTED if is_cut else Ending.WHOLE
        for bucket in self.buckets[self._next :]:
            bucket.await_streams()
            bucket.flat.zero_()
            self._start(bucket, ending)
        self._wait(ending)

    def take_part(self) -> None:
        """Take part in a backward of the others, on a rank that has no data for one."""
        self._endings.backward_ends(bytearray(b"\1") * len(self._parameters))
        self._has_ended = True
        self._stand_in(None)

    @torch.no_grad()
    def _stand_in(self, ending: Ending | None) -> None:
        """Take part with zeros in the backward of the others: here none has reached the model.

        Where no rank has had one, all is as before. Gradients stay as they are.

        Args:
            ending: what this rank says of its own; None says nothing.
        """
        kept = [bucket.flat.clone() for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.sent.zero_()
            self._start(bucket, ending)
        self._wait_for_buckets()
        self._next = 0
        self._has_reduced = True
        try:
            self._endings.flags_summed(self.buckets[-1].flags, ending)
            self._endings.read_flags()
        finally:
            for bucket, before in zip(self.buckets, kept, strict=True):
                bucket.flat.copy_(before)

    def _wait_for_buckets(self) -> None:
        try:
            for bucket in self.buckets:
                assert bucket.work is not None
                bucket.work.wait()
        except Exception as failure:
            self._failure = failure
            raise

    def _wait(self, ending: Ending) -> None:
        """Wait for all buckets, hand out the gradients, and be ready for the next backward."""
        self._wait_for_buckets()
        if self.share != 1.0:
            for bucket in self.buckets:
                bucket.flat.mul_(self.share)
        is_complete = 0 not in self._came
        for bucket in self.buckets:
            bucket.hand_out(is_complete=is_complete)
        self._came[:] = bytes(len(self._came))
        self._next = 0
        self._is_open = False
        self._has_reduced = self._has_ended = True
        self._endings.flags_summed(self.buckets[-1].flags, ending)


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

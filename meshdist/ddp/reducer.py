"""Averages gradients over a group while the backward goes on.

Each bucket is one flat tensor; the gradients are views into it. The first synchronised backward is
watched and sent at its end; then the buckets are laid in the order in which gradients came. From
then on a bucket goes as soon as it has as many arrivals as in the backward before, strictly in
bucket order on every rank; the last one, and those of parameters that some rank lacked, go at the
end of the backward. A callback of the autograd engine waits for them there, so that ``.grad`` holds
averages when ``backward()`` returns.

What the reducer guarantees:

* Every backward through the model averages, also the second one on a retained graph: averaging what
  is averaged already changes nothing, so sums of several backwards are right too.
* No rank waits for a gradient that another rank does not have: zeros stand in for it. A backward
  that raised midway is completed in the same way. What is missing, where, and what that means
  travels behind the last bucket, see ``settling``.
* No gradient that comes after its bucket has gone is lost in silence: every rank raises.
* No backward makes the CPU wait for an accelerator, but a second one without a forward between
  them, which first reads how the one before it ended, and one that lacks gradients where that may
  be.

Where no backward reaches the model on a rank, since its forward or its loss raised, the rank stands
in for one when the program checks the gradients; else it is out of step from then on.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ..collectives.verbs import all_reduce, broadcast
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .arrivals import Arrivals
from .bucket_list import AnyBucket, BucketList
from .comm_hooks.bucket import GradBucket
from .comm_hooks.registered import RegisteredHook
from .flat_bucket import Bucket, Pending
from .logging_data import DataLogger, Timing, notes_errors
from .options import ReductionOptions
from .reports import Reports
from .settling import Ending, Settling
from .single_bucket import InPlaceBucket
from .sparse_bucket import SparseBucket
from .streams import is_capturing

__all__ = ["Reducer", "is_reduced", "tensors_in"]


_reduced_parameters = WeakIdKeyDictionary()  # a mark on the parameter would be pickled with it


def is_reduced(parameter: torch.Tensor) -> bool:
    """Whether a Reducer averages the gradient of ``parameter``."""
    return parameter in _reduced_parameters


class Reducer:
    """Keeps the gradients of ``parameters`` averaged over ``group``.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        names: one per parameter, for messages.
        group: over whose members gradients are averaged; open for the parameters' devices.
        options: how.

    Attributes:
        parameters: as given.
        buckets: in the order in which they are sent.
        arrivals: what is expected of the next backward.
        awaited: futures that the end of the next backward waits for.
        when_averaged: is called with the parameters of each bucket whose gradients are averages.
        logger: is told of iterations and errors, if there is one.
        source: the member whose buffers and order of buckets the others take.
        calls_inside: a context for the calls of one backward.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        options: ReductionOptions,
    ) -> None:
        self.parameters = list(parameters)
        self._reports = Reports(names, group)
        self._group = group
        self._options = options
        self._lock = threading.RLock()  # a module on several devices has a thread on each
        self._handles: list[RemovableHandle] = []
        self.buckets: list[AnyBucket] = []
        self.arrivals = Arrivals(len(self.parameters))
        self._settling = Settling(self.parameters, self.arrivals, options, self._reports, group)
        self._next = 0  # the bucket whose reduction starts next
        self._is_synchronised = True  # as the last forward said
        self._has_local_sums = False  # a forward was not synchronised since gradients were averaged
        self._is_open = False  # a gradient has come, and the backward has not ended
        self._task: int | None = None  # the backward that will call _finish
        self._has_graph = False  # gradients of that backward could be differentiated again
        self._late: list[int] = []  # what came after its bucket had gone
        self._has_begun = False  # a synchronised forward, since the last check
        self._has_ended = False  # a backward, since the last check
        self._failure: Exception | None = None
        self._behind_work: Pending | None = None  # where those numbers do not ride with a bucket
        self.hook: RegisteredHook | None = None
        self.awaited: list[Any] = []
        self.logger: DataLogger | None = None
        self._timing: Timing | None = None  # in a sampled iteration
        self.when_averaged: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
        self.source = 0
        self._share = 1.0  # by which averages over all members are multiplied
        self.calls_inside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._list = BucketList(self.parameters, self._settling.size, self._reports)
        self._lay()

    # -- before and after the module's forward ----------------------------------------------------

    @notes_errors
    def before_forward(self, *, is_synchronised: bool = True) -> None:
        """Finish what the last backward left open, and lay the buckets anew where that is due.

        Args:
            is_synchronised: whether the backwards that follow are averaged; if not, gradients add
                up on each rank.

        Raises:
            GradientError: parameters got no gradient since the last forward, the last backward was
                interrupted on some ranks or brought what was not expected, a reduction failed, or a
                CUDA graph is captured before the buckets are laid as gradients come.
        """
        if torch._C._current_graph_task_id() != -1:  # a forward computed again by a checkpoint
            return
        self.end_last()
        if not torch.is_grad_enabled():
            return
        self._settling.forward_begins(is_synchronised=is_synchronised)
        self._is_synchronised = is_synchronised
        if not is_synchronised:
            self._has_local_sums = True
            return
        self._has_begun = True
        if self.logger is not None:
            self._timing = self.logger.iteration_begins(self.buckets)
        is_settled = self.arrivals.is_learned and not self._settling.must_rebuild
        if not is_settled and is_capturing(self._list.behind.device):
            raise self._reports.captured_early()  # the graph would keep buckets that go
        if self._settling.must_rebuild:
            self._rebuild()

    @notes_errors
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
        if is_absent and not is_capturing(self._list.behind.device):
            self._stand_in()
        self._settling.read()
        self._settling.check_complete()

    def after_forward(self, outputs: object, owner: object) -> None:
        """Put hooks on the module's outputs, which run when a backward begins.

        The outermost backward must be known where checkpoints run inner ones. ``owner`` is kept
        alive as long as a backward may come.
        """

        def backward_begins(_: torch.Tensor, owner: object = owner) -> None:
            if self._is_synchronised:
                self._enter(is_beginning=True)

        if self._timing is not None:
            self._timing.mark("forward_end")
        can_tell = False
        for tensor in tensors_in(outputs):
            if tensor.grad_fn is not None:
                tensor.register_hook(backward_begins)
                can_tell = True
        if not can_tell:
            self._hook_all()

    def prepare_for_backward(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Let the next backward be averaged, whatever was said at its forward.

        Torch's pipeline stages, and trainers with several losses, call this on a wrapper's reducer:
        their forwards run under ``no_sync``, since only later they know which backward is the last.
        """
        self.before_forward()
        self.after_forward([outputs] if isinstance(outputs, torch.Tensor) else list(outputs), self)

    @staticmethod
    def _rebuild_buckets() -> bool:
        """What those trainers call before: here buckets are laid anew without being told."""
        return False

    def check_finished(self) -> None:
        """Raise if a backward has begun and not ended.

        Raises:
            GradientError: it was interrupted, and no forward has come since.
        """
        if self._is_open or self._task is not None:
            raise self._reports.unfinished()

    @notes_errors
    def change_options(self, **changes: Any) -> None:
        """Change options before the first backward.

        Raises:
            GradientError: a backward has been run.
        """
        if self._has_ended or self.arrivals.is_learned:
            raise self._reports.too_late(next(iter(changes)))
        self._options = self._settling.options = dataclasses.replace(self._options, **changes)

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on, and learn arrivals anew."""
        self.complete_open()
        self._group = group
        self._reports = self._reports.of(group)
        self.arrivals.forget()
        stays = self._settling.stays
        self._settling = Settling(
            self.parameters, self.arrivals, self._options, self._reports, group
        )
        self._settling.stays = stays
        self._has_begun = self._has_ended = False
        self._lay()

    @notes_errors
    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let a communication hook average the buckets from now on.

        Raises:
            KindError, ArgumentError: the hook does not fit, is not the first, or comes too late.
        """
        if self._options.dtype is not None or self.when_averaged is not None:
            is_stepping = self.when_averaged is not None
            raise self._reports.hook_beside(
                "an optimizer in the backward" if is_stepping else "mixed_precision"
            )
        if self.hook is not None:
            raise self._reports.hook_again(self.hook.name)
        if self._is_open or self._has_ended or self.arrivals.is_learned:
            raise self._reports.hook_late()
        self.hook = RegisteredHook(state, hook, self._group)
        self._settling.stays = True
        self._lay()

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay local from then on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for parameter in self.parameters:
            _reduced_parameters.pop(parameter, None)

    # -- buckets and hooks -------------------------------------------------------------------------

    def _lay(self) -> None:
        """Make the buckets anew, and put hooks on their parameters."""
        self.close()
        with torch.no_grad():
            # Where the wire divides afterwards, gradients are scaled as they are copied.
            channel = self._group.open_channel(self.parameters[0].device.type)
            averages = channel.communicator.averages_at_once or self.hook is not None
            scale = None if averages else 1.0 / self._group.size()
            self._op = ReduceOp.AVG if averages else ReduceOp.SUM
            self._list.lay(self.arrivals, self._options, self._group, scale)
        self.buckets = self._list.all
        self._settling.place(self._list.behind, 1.0 if scale is None else scale)
        for parameter in self.parameters:
            _reduced_parameters[parameter] = True
        for bucket in self.buckets:
            for slot in range(len(bucket.members)):
                if bucket.is_hooked[slot]:
                    self._put_hook(bucket, slot)

    def _rebuild(self) -> None:
        """Lay the buckets anew: the first time as gradients came on group rank 0.

        What changes later is known to all ranks already, so nothing is sent for it.
        """
        self._settling.must_rebuild = False
        if self.arrivals.is_learned and self.arrivals.order:
            order = self.arrivals.laid_order(self._list.order)
            agreed = torch.tensor(order, dtype=torch.int64, device=self._list.behind.device)
            broadcast(agreed, group=self._group, group_src=self.source)
            self.arrivals.order.clear()
            self._list.order = tuple(agreed.tolist())
        self._lay()

    def _hook_all(self) -> None:
        """Put hooks on all parameters: nothing else shows when a backward begins."""
        for bucket in self.buckets:
            bare = [slot for slot, is_hooked in enumerate(bucket.is_hooked) if not is_hooked]
            if bare:
                bucket.hook_all()
            for slot in bare:
                self._put_hook(bucket, slot)

    def _put_hook(self, bucket: AnyBucket, slot: int) -> None:
        hook = self._make_hook(bucket.indices[slot], bucket, slot)
        member = bucket.members[slot]
        is_trained = member.requires_grad  # else it may be again, and keeps its hook meanwhile
        member.requires_grad_(True)
        self._handles.append(member.register_post_accumulate_grad_hook(hook))
        member.requires_grad_(is_trained)

    def _make_hook(
        self, index: int, bucket: AnyBucket, slot: int
    ) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls when the gradient of one parameter is in ``.grad``.

        This runs once per parameter and backward, so it does as little as it can.
        """
        arrivals = self.arrivals
        counts = arrivals.counts
        streams = bucket.streams

        def gradient_is_watched(parameter: torch.Tensor) -> None:
            if not self._is_synchronised:
                return
            if self._task is None or parameter.grad is None:
                arrivals.by_count.add(index)
            if not self._is_open:
                self._open()
            if streams is not None:
                streams.note()
            arrivals.note_first(index)

        if not arrivals.is_learned:
            return gradient_is_watched
        goes_at_once = bucket.at_once[slot]

        def gradient_came(parameter: torch.Tensor) -> None:
            if not self._is_synchronised:
                return
            if not self._is_open:
                self._open()
            if parameter.grad is None:  # a backward of its own has left it undefined
                arrivals.by_count.add(index)
            counts[index] += 1
            if streams is not None:
                streams.note()
            more = counts[index] - arrivals.expected[index]
            if more < 0:
                return
            if bucket.work is not None or slot in bucket.taken:
                self._late.append(index)
                return
            if goes_at_once:
                bucket.move_in(slot)
            if more == 0:
                bucket.num_pending -= 1
                if not bucket.num_pending:
                    self._start_full_buckets()

        return gradient_came

    # -- one backward -----------------------------------------------------------------------------

    def _enter(self, *, is_beginning: bool) -> None:
        """A backward has begun; ``is_beginning`` if no gradient can have come before."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._is_open:
            raise self._reports.overlapping()
        self._settling.read()  # where no forward came since the last backward
        self._task = task
        if self._timing is not None:
            self._timing.backward_begins()
        self._has_graph = torch.is_grad_enabled()
        self.arrivals.backward_begins()
        self._late.clear()
        if is_beginning:
            for bucket in self.buckets:
                bucket.backward_begins()
        Variable._execution_engine.queue_callback(self._finish)

    @notes_errors
    def _open(self) -> None:
        """The first gradient of a backward has come."""
        if self._task is None:
            self._enter(is_beginning=False)
        if self._has_graph:
            raise self._reports.with_graph()
        self._is_open = True

    def _start_full_buckets(self) -> None:
        """Start the reduction of every full bucket that has no unfull one before it."""
        with self._lock, torch.no_grad():
            for bucket in self.buckets[self._next :]:
                if bucket.must_wait or bucket.num_pending:
                    return
                bucket.await_streams()
                if not bucket.move_in_early():
                    bucket.must_wait = True
                    return
                self._start(bucket)

    def _start(self, bucket: AnyBucket) -> None:
        if self._timing is not None and not self._next:
            self._timing.mark("comm_begin")
        if self.hook is not None and not isinstance(bucket, InPlaceBucket):
            bucket.work = self._start_hook(self.hook, bucket)
        elif isinstance(bucket, SparseBucket):
            bucket.work = bucket.reduction()
        else:
            bucket.work = self._average(bucket.sent)
        self._next += 1

    def _start_hook(self, hook: RegisteredHook, bucket: Bucket | SparseBucket) -> Pending:
        is_last = bucket is self.buckets[-1]
        args = bucket.members, bucket.views, self._next, is_last, self._group
        try:
            with self.calls_inside():
                return hook.start(GradBucket(bucket.flat, *args))
        except Exception as failure:  # after which verbs of the hook's, no other rank knows
            self._failure = failure
            raise

    def _average(self, sent: torch.Tensor) -> Pending:
        with self.calls_inside():
            work = all_reduce(sent, self._op, self._group, async_op=True)
        assert work is not None
        return work

    @notes_errors
    @torch.no_grad()
    def _finish(self) -> None:
        """The backward has ended: fill in what did not come, and wait for every bucket."""
        if self._timing is not None:
            self._timing.mark("backward_end")
        missing = self._list.find_missing(self.arrivals.counts, self.arrivals.by_count)
        came = [True] * len(self.parameters)
        for index in missing:
            came[index] = False
        if not self._is_open and True in came:
            self._open()
        self._task = None
        if not self._is_open:  # no parameter took part, for example in autograd.grad of inputs
            return
        unexpected = self._find_unexpected(came)
        ending = self._settling.backward_ends(came, unexpected)
        self.arrivals.backward_ends(came)
        if self.logger is not None and (self._timing is not None or ending is not Ending.WHOLE):
            self.logger.gradients_came(came, self.arrivals, self._list.order, len(self.buckets))
        for bucket in self.buckets[self._next :]:
            bucket.await_streams()
            bucket.move_in_rest()
        has_gradient = None
        if ending is not Ending.WHOLE:
            has_gradient = self._list.find_gradients(came, has_local_sums=self._has_local_sums)
        self._send_rest(ending, has_gradient)
        self._wait(ending, is_complete=ending is Ending.WHOLE)

    def _find_unexpected(self, came: Sequence[bool]) -> list[str]:
        """What came though it was expected, or promised, not to."""
        late = [*self._late]
        for bucket in self.buckets[: self._next]:
            late += [bucket.indices[slot] for slot in bucket.find_late()]
        lines = [self._reports.came_late(index) for index in dict.fromkeys(late)]
        arrivals = self.arrivals
        if arrivals.is_learned and self._options.is_static:
            lines += [
                self._reports.changed(
                    index, max(arrivals.counts[index], int(came[index])), arrivals.learned[index]
                )
                for index in arrivals.changes(came)
            ]
        elif arrivals.is_learned and self._options.skips_unused:
            lines += [
                self._reports.was_skipped(index) for index in self._list.unsent if came[index]
            ]
        return lines

    def _send_rest(self, ending: Ending | None, has_gradient: Sequence[bool] | None = None) -> None:
        """Start the reductions of all buckets that have not gone."""
        rest = self.buckets[self._next :]
        if rest:
            self._settling.write(self._list.behind, ending, has_gradient)
        for bucket in rest:
            self._start(bucket)
        if rest and (self.hook is not None or not self._list.rides):
            self._behind_work = self._average(self._list.behind)

    def end_last(self) -> None:
        """Finish what the last backward left open, and learn how it ended on the other ranks.

        Raises:
            GradientError: it was interrupted on some ranks, or brought what was not expected.
        """
        self.complete_open()
        self._settling.read()

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
        for bucket in self.buckets[self._next :]:
            bucket.await_streams()
            bucket.clear()
        is_cut = self._next < len(self.buckets)
        ending = Ending.INTERRUPTED if is_cut else Ending.WHOLE
        self._send_rest(ending)
        self._wait(ending, is_complete=False)

    def work_among(self, at_work: Sequence[bool], *, divides_by_all: bool) -> None:
        """Know which members have data, while some may have none.

        Args:
            at_work: for each member, whether it has.
            divides_by_all: whether averages are over all members, or those that have data.
        """
        self.source = list(at_work).index(True)
        self._share = 1.0 if divides_by_all else len(at_work) / sum(at_work)
        self._settling.num_at_work = sum(at_work)

    def take_part(self) -> None:
        """Take part in a backward of the others, on a rank that has no data for one.

        What all ranks learn of it is learned here, too; gradients stay as they are.
        """
        self._settling.has_no_data()
        if not self.arrivals.is_learned:
            self.arrivals.is_absent(self._list.order)
        self._has_ended = True
        self._stand_in(None)

    @torch.no_grad()
    def _stand_in(self, ending: Ending | None = Ending.ABSENT) -> None:
        """Take part with zeros in the backward of the others: here none has reached the model.

        Where no rank has had one, all is as before.

        Args:
            ending: what this rank says of its own; None says nothing.
        """
        dense = self._list.dense()
        kept = [bucket.flat.clone() for bucket in dense]
        for bucket in self.buckets:
            bucket.clear()
        self._send_rest(ending)
        self._wait_for_buckets()
        self._next = 0
        try:
            self._settling.note(self._list.behind, ending)
            self._settling.read()
        finally:
            for bucket, before in zip(dense, kept, strict=True):
                bucket.flat.copy_(before)
            for bucket in self.buckets:
                bucket.reset()

    def _wait_for_buckets(self) -> None:
        try:
            for bucket in self.buckets:
                assert bucket.work is not None
                with self.calls_inside():  # of a sparse bucket, or a hook's callbacks
                    bucket.work.wait()
            if self._behind_work is not None:
                self._behind_work.wait()
                self._behind_work = None
            if self._timing is not None:
                self._timing.mark("comm_end")
        except Exception as failure:
            self._failure = failure
            raise

    def _wait(self, ending: Ending, *, is_complete: bool) -> None:
        """Wait for all buckets, hand out the gradients, and be ready for the next backward."""
        self._wait_for_buckets()
        self._settling.note(self._list.behind, ending)
        is_used = self._settling.find_used(is_complete=is_complete)
        for bucket in self.buckets:
            if self._share != 1.0 and self.hook is None:
                bucket.scale_average(self._share)
            bucket.hand_out(is_used, is_complete=is_complete)
            bucket.reset()
        self._next = 0
        self._is_open = self._has_local_sums = False
        self._has_ended = True
        for future in self.awaited:
            future.wait()
        self.awaited.clear()
        if not self._settling.is_deferred:
            self._settling.read()
        if self.when_averaged is not None:
            for bucket in self.buckets:
                self.when_averaged(bucket.members)


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

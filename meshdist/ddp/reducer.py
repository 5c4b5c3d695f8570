"""Averages gradients over a group while the backward goes on.

A bucket is one flat tensor, and the gradients are views into it; or one gradient as it is, where it
is sparse, or large and the wire shares no memory (``bucket_list``). The first synchronised
backward is watched and sent at its end; then the buckets are laid in the order in which gradients
came. From then on a bucket goes as soon as it has as many arrivals as in the backward before,
strictly in bucket order on every rank; the last one, and those of parameters that some rank lacked,
go at the end of the backward. A callback of the autograd engine waits for them there, so that
``.grad`` holds averages when ``backward()`` returns.

What the reducer guarantees:

* Every backward that reaches outputs of a synchronised forward averages, also the second one on a
  retained graph: averaging what is averaged already changes nothing, so sums of several are right
  too. Every other backward is local, and none of its gradients counts as an arrival.
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

import sys
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ..runtime.untraced import untraced
from .device_streams import is_capturing
from .distributed_autograd import ContextGradients, find_context, is_rpc_on
from .gradient_hooks import Hook, tensors_in
from .graph_tasks import NO_TASK, at_end_of_task, current_task
from .logging_data import notes_errors
from .reduction_setup import ReductionSetup
from .settling import Ending

__all__ = ["Reducer"]

_MANY = 8
"""So many local backwards, and none between them that is averaged, are warned of."""


class Reducer(ReductionSetup):
    """Keeps gradients averaged over a group; made and changed as a ``ReductionSetup``."""

    # -- before and after the module's forward ----------------------------------------------------

    @notes_errors
    def before_forward(self, *, is_synchronised: bool = True) -> None:
        """Finish what the last backward left open, and lay the buckets anew where that is due."""
        is_again = current_task() != NO_TASK  # computed again by a checkpoint
        if is_again or self._is_closed:
            return
        self.end_last()
        if not torch.is_grad_enabled():
            return
        self._settling.forward_begins(is_synchronised=is_synchronised)
        if not is_synchronised:
            self._has_local_sums = True
            return
        if self._parting is not None:
            self._parting.report(self._group)
        self._has_begun, self._has_ended = True, False
        if self.logger is not None:
            self._sending.timing = self.logger.iteration_begins(self.buckets)
        if not self.has_final_buckets and is_capturing(self._list.behind.device):
            raise self._reports.captured_early()  # the graph would keep buckets that go
        if self._settling.must_rebuild:
            self._rebuild()
        else:
            self._hooks.come_last(self.buckets)

    @notes_errors
    def check(self) -> None:
        """Raise what the next forward would raise of the last backward, on every rank."""
        if current_task() != NO_TASK:
            raise self._reports.running()
        try:
            self.complete_open()
        finally:  # what it raises has been checked then, too
            is_absent = self._has_begun and not self._has_ended
            self._has_begun = self._has_ended = False
        if is_absent and not is_capturing(self._list.behind.device):
            self._stand_in()
        self._settling.read()
        self._settling.check_complete()
        if self._parting is not None:
            self._parting.report(self._group)

    def after_forward(
        self, outputs: object, owner: object, *, is_synchronised: bool = True
    ) -> None:
        """Put hooks on the module's outputs: a backward that reaches one of them is averaged.

        Of a forward that ``is_synchronised``; of another one it is meant to stay local. The hooks
        keep ``owner`` alive as long as a backward may come.
        """

        @untraced
        def output_is_reached(_: torch.Tensor, owner: object = owner) -> None:
            if self._is_closed:
                return
            if is_synchronised:
                self._enter(context_id)
            else:
                self._local_task = current_task()
                self._is_local_running = at_end_of_task(lambda: None)

        if self._is_closed:
            return
        context_id = find_context()
        seen = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        for tensor in seen:
            tensor.register_hook(output_is_reached)
        if not is_synchronised:
            return
        if self._sending.timing is not None:
            self._sending.timing.mark("forward_compute_time_end")
        self._sees_outputs = bool(seen)
        self._takes_any = not seen
        if not seen:
            self._hooks.put_all(self.buckets)
        if current_task() == NO_TASK:
            self._awaits_backward = True
            for bucket in self.buckets:
                bucket.forward_ends()

    def prepare_for_backward(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """The wrapper's method, which torch's pipeline stages and trainers call here."""
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            raise self._reports.split_backward()
        self.before_forward()
        self.after_forward(tensors, self)

    @staticmethod
    def _rebuild_buckets() -> bool:
        """Do nothing: those trainers call it, and here buckets are laid anew without being told."""
        return False

    def check_finished(self) -> None:
        """Raise if a backward has begun and not ended."""
        if self.is_open or self.task is not None:
            raise self._reports.unfinished()

    # -- one backward -----------------------------------------------------------------------------

    def _refuse_traced(self) -> None:
        tracing = sys.modules.get("torch._dynamo.compiled_autograd")
        if tracing is not None and tracing.in_compiled_autograd_region:
            raise self._reports.traced()

    def takes(self, index: int, hook: Hook, parameter: torch.Tensor) -> bool:
        """Whether a gradient counts that did not come in ``task`` itself.

        It does in a task inside of that one, as re-entrant checkpoints run them. Else it counts
        once its own task reaches an output: of ``model(x).sum() + w.square().sum()`` the gradient
        of the second term comes first. Where none is reached, the backward was local.
        """
        self._refuse_traced()
        with self._lock:
            if self.task is not None and self._is_running():
                return True
            if self._takes_any:
                self._enter()
                return True
            self._has_local_sums = True
            task = current_task()
            if task != self._early_task:
                self._early_task = task
                self._early.clear()
                at_end_of_task(partial(self._end_local, task))
            self._early.append((index, hook, parameter))
            return False

    def _end_local(self, task: int) -> None:
        """A backward has ended of which gradients came early."""
        if task == self._early_task:  # and no output
            self._early_task = None
            self._early.clear()
            if task == self._local_task or self._is_local_running():  # or a checkpoint inside
                return
            self._num_local += 1
            if self._awaits_backward or not self._sees_outputs:
                self._warn_of_local()
            elif self._num_local == _MANY:  # the program trains so: it does not look only
                self._warn_of_local(num_local=_MANY)

    def _warn_of_local(self, num_local: int = 0) -> None:
        """Warn, once, of a backward that stays local, where one that is averaged is expected."""
        if not self._has_warned:
            self._has_warned = True
            self._reports.warn_of_local(sees_outputs=self._sees_outputs, num_local=num_local)

    def _warn_of_complete(self, task: int | None) -> None:
        """Warn, once, where that backward came through a result that all ranks have made."""
        noted, ranks, place = self._group.world.complete
        if noted == task and place and self.hook is None and not self._has_warned_of_complete:
            self._has_warned_of_complete = len({*ranks} & {*self._group.ranks}) > 1
            if self._has_warned_of_complete:
                self._reports.warn_of_complete(place)

    def _enter(self, context_id: int | None = None) -> None:
        """A backward has reached the outputs of a synchronised forward, made in such a context."""
        self._refuse_traced()
        task = current_task()
        with self._lock:  # outputs on several devices come here on a thread each
            if task == self.task:
                return
            self._refuse_broken()
            if self.is_open:
                raise self._reports.overlapping()
            self._settling.read()  # where no forward came since the last backward
            self.task = task
            if self._sending.timing is not None:
                self._sending.timing.backward_begins()
            self._has_graph = torch.is_grad_enabled()
            self.arrivals.backward_begins()
            self.late.clear()
            finish = self._finish
            if is_rpc_on():
                found = ContextGradients(self.parameters, context_id, self._check_context)
                finish = partial(self._finish_in_context, found)
            self._is_running = at_end_of_task(finish)
            self._takes_any = False
            self._awaits_backward = False
            self._num_local = 0
            for bucket in self.buckets:
                bucket.backward_begins()
            if task == self._early_task:
                early, self._early, self._early_task = self._early, [], None
                for index, hook, parameter in early:
                    if not self.arrivals.is_learned:
                        self.arrivals.by_count.add(index)  # it is too late to look for others
                    hook(parameter)

    @notes_errors
    def open(self) -> None:
        """The first gradient of a backward has come."""
        if self._has_graph:
            raise self._reports.with_graph()
        self.is_open = True

    def start_full_buckets(self) -> None:
        """Start the reduction of every full bucket that has no unfull one before it."""
        with self._lock, torch.no_grad():
            for bucket in self._sending.rest():
                if bucket.must_wait or bucket.num_pending:
                    return
                bucket.await_streams()
                if not bucket.move_in_early():
                    bucket.must_wait = True
                    return
                self._sending.start(bucket)

    def _check_context(self, context_id: int | None) -> int:
        """Refuse, before anything is sent, what a context of distributed autograd cannot hold."""
        self._has_graph = False
        if self._options.may_lack or context_id is None:
            self.task = None
            raise self._reports.lacking_in_context(knows_context=context_id is not None)
        return context_id

    @torch.no_grad()
    def _finish_in_context(self, found: ContextGradients) -> None:
        """End a backward that may be one of distributed autograd."""
        with found.in_place_of_grad() as came:
            if came is not None:
                self.arrivals.counts[:] = map(int, came)
            self._finish()

    @notes_errors
    @torch.no_grad()
    def _finish(self) -> None:
        """The backward has ended: fill in what did not come, and wait for every bucket."""
        if self._sending.timing is not None:
            self._sending.timing.mark("backward_compute_time_end")
        missing = self._list.find_missing(self.arrivals.counts, self.arrivals.by_count)
        has_local = any(bucket.local for bucket in self.buckets)
        self._has_local_sums |= has_local
        came = [True] * len(self.parameters)
        for index in missing:
            came[index] = False
        if not self.is_open and True in came:
            self.open()
        task, self.task = self.task, None
        if not self.is_open:  # no parameter took part, for example in autograd.grad of inputs
            self._takes_any = self._has_graph  # a loss of that derivative may reach no output
            self._awaits_backward = True
            return
        unexpected = self._find_unexpected(came)
        ending = self._settling.backward_ends(came, unexpected)
        self.arrivals.backward_ends(came)
        if self.logger is not None and (
            self._sending.timing is not None or ending is not Ending.WHOLE
        ):
            self.logger.gradients_came(came, self.arrivals, self._list.order, len(self.buckets))
        for bucket in self._sending.rest():
            bucket.await_streams()
            bucket.move_in_rest()
        has_gradient = None
        if ending is not Ending.WHOLE:
            has_gradient = self._list.find_gradients(came, has_local_sums=self._has_local_sums)
        self._send_rest(ending, has_gradient)
        self._wait(ending, is_complete=ending is Ending.WHOLE)
        self._warn_of_complete(task)
        if has_local:
            self._warn_of_local()

    def _find_unexpected(self, came: Sequence[bool]) -> list[str]:
        """A line for each gradient that came though it was expected, or promised, not to."""
        late = [*self.late]
        for bucket in self.buckets[: self._sending.num_started]:
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
        if self._sending.rest():
            self._settling.write(self._list.behind, ending, has_gradient)
        self._sending.start_rest()

    def end_last(self) -> None:
        """Finish what the last backward left open, and learn how it ended on the other ranks."""
        self.complete_open()
        self._settling.read()

    def complete_open(self) -> None:
        """Finish what the last backward left open here."""
        self._refuse_broken()
        has_not_ended = self.is_open or self.task is not None
        self.task = None
        if has_not_ended:
            self._complete_interrupted()

    def _refuse_broken(self) -> None:
        """Raise where a reduction has failed: the members are no longer in step."""
        if self._sending.failure is not None:
            raise self._reports.stopped(self._sending.failure) from self._sending.failure

    @torch.no_grad()
    def _complete_interrupted(self) -> None:
        """Keep in step with ranks whose backward went on, after this rank's raised midway.

        Zeros stand in for what this rank did not send.
        """
        for bucket in self._sending.rest():
            bucket.await_streams()
            bucket.clear()
        ending = Ending.INTERRUPTED if self._sending.rest() else Ending.WHOLE
        self._send_rest(ending)
        self._wait(ending, is_complete=False)

    def work_among(self, at_work: Sequence[bool], *, divides_by_all: bool) -> None:
        """Know which members have data, while some may have none."""
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
        """
        dense = self._list.dense()
        kept = [bucket.flat.clone() for bucket in dense]
        for bucket in self.buckets:
            bucket.clear()
        self._send_rest(ending)
        self._sending.wait()
        try:
            self._settling.note(self._list.behind, ending)
            self._settling.read()
        finally:
            for bucket, before in zip(dense, kept, strict=True):
                bucket.flat.copy_(before)
            for bucket in self.buckets:
                bucket.reset()

    def _wait(self, ending: Ending, *, is_complete: bool) -> None:
        """Wait for all buckets, hand out the gradients, and be ready for the next backward."""
        self._sending.wait()
        self._settling.note(self._list.behind, ending)
        is_used = self._settling.find_used(is_complete=is_complete)
        for bucket in self.buckets:
            if self._share != 1.0 and self.hook is None:
                bucket.scale_average(self._share)
            bucket.hand_out(is_used, is_complete=is_complete)
            bucket.reset()
        self.is_open = self._has_local_sums = False
        self._has_ended = True
        for future in self.awaited:
            future.wait()
        self.awaited.clear()
        if not self._settling.is_deferred:
            self._settling.read()
        if self.when_averaged is not None:
            for bucket in self.buckets:
                self.when_averaged(bucket.members)

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

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from ..collectives.verbs import broadcast
from ..errors import GradientError
from ..groups.process_group import ProcessGroup
from ..runtime.untraced import untraced
from .backward import Backward, Sending
from .bucket_list import AnyBucket, BucketList
from .buckets import ReductionOptions
from .comm_hooks.registered import RegisteredHook
from .device_streams import is_capturing
from .distributed_autograd import ContextGradients, find_context, is_rpc_on
from .gradient_hooks import GradientHooks, Hook, RunningBackward, tensors_in
from .graph_tasks import NO_TASK, at_end_of_task, current_task
from .history import History
from .local_backwards import LocalBackwards
from .logging_data import DataLogger, notes_errors
from .parting import Parting
from .reports import Reports
from .settling import Ending, Verdict

__all__ = ["Reducer"]


class State(Enum):
    """The stages of a reducer; it runs while it has a backward, and is broken by a failure."""

    IDLE = auto()
    AWAITED = auto()
    """A synchronised forward has come, and its backward has not ended."""
    ENDED = auto()
    CLOSED = auto()
    """Gradients stay local."""


class Reducer:
    """Keeps gradients averaged over a group, from one backward to the next.

    Args:
        parameters: those that require gradients, in the same order on every rank.
        names: one per parameter, for messages.
        group: over whose members gradients are averaged; open for the parameters' devices.
        options: how.
        parting: compares the replicas, if anything does.

    Attributes:
        backward: it has reached outputs, and has not ended, or raised midway; None without.
        arrivals: what is expected of the next backward.
        awaited: futures that the end of the next backward waits for.
        when_averaged: is called with the parameters of each bucket whose gradients are averages.
        logger: is told of iterations and errors, if there is one.
        source: the member whose buffers and order of buckets the others take.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        options: ReductionOptions,
        parting: Parting | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._reports = Reports(names, group)
        self._lock = threading.RLock()  # a module on several devices has a thread on each
        self.arrivals = History(len(self.parameters))
        self._settling = Verdict(self.parameters, self.arrivals, options, self._reports, group)
        self._list = BucketList(self.parameters, self._settling.size, self._reports)
        self._sending = Sending(self._list, group, parting)
        self._hooks = GradientHooks(self.parameters, self.arrivals, self)
        self.backward: Backward | None = None
        self._local = LocalBackwards()
        self._has_local_sums = False  # a backward since the last averaged one was local
        self._has_warned_of_complete = False
        self._state = State.IDLE
        self.awaited: list[Any] = []
        self.logger: DataLogger | None = None
        self.when_averaged: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
        self.source = 0
        self._share = 1.0  # by which averages over all members are multiplied
        self._lay()

    @property
    def buckets(self) -> Sequence[AnyBucket]:
        """All buckets, in the order in which they are sent."""
        return self._list.all

    @property
    def hook(self) -> RegisteredHook | None:
        """The communication hook, if one is registered."""
        return self._sending.hook

    @property
    def has_final_buckets(self) -> bool:
        """Whether the buckets were laid as gradients came; equal on every rank."""
        return self.arrivals.is_learned and not self._settling.must_rebuild

    def shared_options(self) -> dict[str, object]:
        """The settings that must be equal on every rank, by the wrapper's arguments."""
        return self._settling.options.shared(self._reports.names)

    def set_calls_inside(self, inside: Callable[[], AbstractContextManager[None]]) -> None:
        """Make the calls of each backward inside of such a context."""
        self._sending.calls_inside = inside

    def close(self) -> None:
        """Take the hooks off the parameters; gradients stay local from then on."""
        self._state = State.CLOSED
        self._hooks.close()

    @notes_errors
    def change_options(self, what: str, **changes: Any) -> None:
        """Change options; raises after the first backward, and ``what`` names the change there."""
        if self._state is State.ENDED or self.arrivals.is_learned:
            raise self._reports.too_late(what)
        self._settling.options = dataclasses.replace(self._settling.options, **changes)

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on, and learn arrivals anew."""
        self.complete_open()
        self._sending.change_group(group)
        self._reports = Reports(self._reports.names, group)
        self.arrivals.forget()
        before = self._settling
        self._settling = Verdict(
            self.parameters, self.arrivals, before.options, self._reports, group
        )
        self._settling.stays = before.stays
        self._become(State.IDLE)
        self._lay()

    @notes_errors
    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Let a hook average the buckets from now on; raises if it does not fit or comes late."""
        if self._settling.options.dtype is not None or self.when_averaged is not None:
            is_stepping = self.when_averaged is not None
            raise self._reports.hook_beside(
                "an optimizer in the backward" if is_stepping else "mixed_precision"
            )
        if self.hook is not None:
            raise self._reports.hook_again(self.hook.name)
        if self._is_open() or self._state is State.ENDED or self.arrivals.is_learned:
            raise self._reports.hook_late()
        self._sending.hook = RegisteredHook(state, hook, self._sending.group)
        self._settling.stays = True
        self._lay()

    # -- buckets ----------------------------------------------------------------------------------

    def _lay(self) -> None:
        """Make the buckets anew, and put hooks on their parameters."""
        self._sending.group.world.averaged.add(frozenset(self._sending.group.ranks))
        with torch.no_grad():
            scale = self._sending.find_scale(self.parameters[0].device)
            self._list.lay(self.arrivals, self._settling.options, self._sending.group, scale)
        self._settling.place(self._list.behind, 1.0 if scale is None else scale)
        self._hooks.put(self.buckets)

    def _rebuild(self) -> None:
        """Lay the buckets anew: the first time as gradients came on group rank 0.

        What changes later is known to all ranks already, so nothing is sent for it.
        """
        self._settling.must_rebuild = False
        if self.arrivals.is_learned and self.arrivals.order:
            order = self.arrivals.laid_order(self._list.order)
            agreed = torch.tensor(order, dtype=torch.int64, device=self._list.behind.device)
            broadcast(agreed, group=self._sending.group, group_src=self.source)
            self.arrivals.order.clear()
            self._list.order = tuple(agreed.tolist())
        self._lay()

    # -- before and after the module's forward ----------------------------------------------------

    @notes_errors
    def before_forward(self, *, is_synchronised: bool = True) -> None:
        """Finish what the last backward left open, and lay the buckets anew where that is due."""
        is_again = current_task() != NO_TASK  # computed again by a checkpoint
        if is_again or self._state is State.CLOSED:
            return
        self.end_last()
        if not torch.is_grad_enabled():
            return
        self._settling.forward_begins(is_synchronised=is_synchronised)
        if not is_synchronised:
            self._has_local_sums = True
            return
        if self._sending.parting is not None:
            self._sending.parting.report(self._sending.group)
        self._become(State.AWAITED)
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
            is_absent = self._state is State.AWAITED
            self._become(State.IDLE)
        if is_absent and not is_capturing(self._list.behind.device):
            self._stand_in()
        self._settling.read()
        self._settling.check_complete()
        if self._sending.parting is not None:
            self._sending.parting.report(self._sending.group)

    def after_forward(
        self, outputs: object, owner: object, *, is_synchronised: bool = True
    ) -> None:
        """Put hooks on the module's outputs: a backward that reaches one of them is averaged.

        Of a forward that ``is_synchronised``; of another one it is meant to stay local. The hooks
        keep ``owner`` alive as long as a backward may come.
        """

        @untraced
        def output_is_reached(_: torch.Tensor, owner: object = owner) -> None:
            if self._state is State.CLOSED:
                return
            if is_synchronised:
                self._enter(context_id)
            else:
                self._local.output_is_reached()

        if self._state is State.CLOSED:
            return
        context_id = find_context()
        seen = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        for tensor in seen:
            tensor.register_hook(output_is_reached)
        if not is_synchronised:
            return
        if self._sending.timing is not None:
            self._sending.timing.mark("forward_compute_time_end")
        self._local.forward_ends(sees_outputs=bool(seen))
        if not seen:
            self._hooks.put_all(self.buckets)
        if current_task() == NO_TASK:
            self._local.is_averaged_expected = True
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
        if self.backward is not None:
            raise self._reports.unfinished()

    # -- one backward -----------------------------------------------------------------------------

    def _refuse_traced(self) -> None:
        tracing = sys.modules.get("torch._dynamo.compiled_autograd")
        if tracing is not None and tracing.in_compiled_autograd_region:
            raise self._reports.traced()

    def _is_open(self) -> bool:
        return self.backward is not None and self.backward.is_open

    def _become(self, state: State) -> None:
        """Change the state; a reducer that is closed stays so."""
        if self._state is not State.CLOSED:
            self._state = state

    def takes(self, index: int, hook: Hook, parameter: torch.Tensor) -> Backward | None:
        """The backward for which a gradient counts that did not come in its task itself.

        It does in a task inside of that one, as re-entrant checkpoints run them. Else it counts
        once its own task reaches an output.
        """
        self._refuse_traced()
        with self._lock:
            if self.backward is not None and self.backward.is_running():
                return self.backward
            if self._local.takes_any:
                self._enter()
                return self.backward
            self._has_local_sums = True
            self._local.keep((index, hook, parameter), self._reports)
            return None

    def _warn_of_complete(self, task: int) -> None:
        """Warn, once, where that backward came through a result that all ranks have made."""
        noted, ranks, place = self._sending.group.world.complete
        if noted == task and place and self.hook is None and not self._has_warned_of_complete:
            self._has_warned_of_complete = len({*ranks} & {*self._sending.group.ranks}) > 1
            if self._has_warned_of_complete:
                self._reports.warn_of_complete(place)

    def _enter(self, context_id: int | None = None) -> None:
        """A backward has reached the outputs of a synchronised forward, made in such a context."""
        self._refuse_traced()
        task = current_task()
        with self._lock:  # outputs on several devices come here on a thread each
            if self.backward is not None and task == self.backward.task:
                return
            self._refuse_broken()
            if self._is_open():
                raise self._reports.overlapping()
            self._settling.read()  # where no forward came since the last backward
            if self._sending.timing is not None:
                self._sending.timing.backward_begins()
            backward = Backward(self._sending, task, has_graph=torch.is_grad_enabled())
            self.backward = backward
            self.arrivals.backward_begins()
            finish = partial(self._finish, backward)
            if is_rpc_on():
                check = partial(self._check_context, backward)
                found = ContextGradients(self.parameters, context_id, check)
                finish = partial(self._finish_in_context, backward, found)
            backward.is_running = at_end_of_task(finish)
            for bucket in self.buckets:
                bucket.backward_begins()
            for index, hook, parameter in self._local.backward_begins(task):
                if not self.arrivals.is_learned:
                    self.arrivals.by_count.add(index)  # it is too late to look for others
                hook(parameter)

    @notes_errors
    def open(self, backward: RunningBackward) -> None:
        """The first gradient of a backward has come."""
        assert isinstance(backward, Backward)
        if backward.has_graph:
            raise self._reports.with_graph()
        backward.is_open = True

    def start_full_buckets(self) -> None:
        """Start the reduction of every full bucket that has no unfull one before it."""
        with self._lock, torch.no_grad():
            backward = self.backward
            assert backward is not None
            for bucket in backward.rest():
                if bucket.must_wait or bucket.num_pending:
                    return
                bucket.await_streams()
                if not bucket.move_in_early():
                    bucket.must_wait = True
                    return
                backward.start(bucket)

    def _check_context(self, backward: Backward, context_id: int | None) -> int:
        """Refuse, before anything is sent, what a context of distributed autograd cannot hold."""
        backward.has_graph = False
        if self._settling.options.may_lack or context_id is None:
            self.backward = None
            raise self._reports.lacking_in_context(knows_context=context_id is not None)
        return context_id

    @torch.no_grad()
    def _finish_in_context(self, backward: Backward, found: ContextGradients) -> None:
        """End a backward that may be one of distributed autograd."""
        with found.in_place_of_grad() as came:
            if came is not None:
                self.arrivals.counts[:] = map(int, came)
            self._finish(backward)

    @notes_errors
    @torch.no_grad()
    def _finish(self, backward: Backward) -> None:
        """The backward has ended: fill in what did not come, and wait for every bucket."""
        if self._sending.timing is not None:
            self._sending.timing.mark("backward_compute_time_end")
        missing = self._list.find_missing(self.arrivals.counts, self.arrivals.by_count)
        has_local = any(bucket.local for bucket in self.buckets)
        self._has_local_sums |= has_local
        came = [True] * len(self.parameters)
        for index in missing:
            came[index] = False
        if not backward.is_open and True in came:
            self.open(backward)
        if not backward.is_open:  # no parameter took part, for example in autograd.grad of inputs
            self.backward = None
            self._local.takes_any = backward.has_graph  # a loss of that derivative may reach none
            self._local.is_averaged_expected = True
            return
        unexpected = self._find_unexpected(backward, came)
        ending = self._settling.backward_ends(came, unexpected)
        self.arrivals.backward_ends(came)
        if self.logger is not None and (
            self._sending.timing is not None or ending is not Ending.WHOLE
        ):
            self.logger.gradients_came(came, self.arrivals, self._list.order, len(self.buckets))
        for bucket in backward.rest():
            bucket.await_streams()
            bucket.move_in_rest()
        has_gradient = None
        if ending is not Ending.WHOLE:
            has_gradient = self._list.find_gradients(came, has_local_sums=self._has_local_sums)
        self._send_rest(backward, ending, has_gradient)
        self._wait(backward, ending, is_complete=ending is Ending.WHOLE)
        self._warn_of_complete(backward.task)
        if has_local:
            self._local.warn(self._reports)

    def _find_unexpected(self, backward: Backward, came: Sequence[bool]) -> list[str]:
        """A line for each gradient that came though it was expected, or promised, not to."""
        late = [*backward.late]
        for bucket in self.buckets[: backward.num_started]:
            late += [bucket.indices[slot] for slot in bucket.find_late()]
        lines = [self._reports.came_late(index) for index in dict.fromkeys(late)]
        arrivals = self.arrivals
        if arrivals.is_learned and self._settling.options.is_static:
            lines += [
                self._reports.changed(
                    index, max(arrivals.counts[index], int(came[index])), arrivals.learned[index]
                )
                for index in arrivals.changes(came)
            ]
        elif arrivals.is_learned and self._settling.options.skips_unused:
            lines += [
                self._reports.was_skipped(index) for index in self._list.unsent if came[index]
            ]
        return lines

    def _send_rest(
        self,
        backward: Backward,
        ending: Ending | None,
        has_gradient: Sequence[bool] | None = None,
    ) -> None:
        """Start the reductions of all buckets that have not gone."""
        if backward.rest():
            self._settling.write(self._list.behind, ending, has_gradient)
        backward.start_rest()

    def end_last(self) -> None:
        """Finish what the last backward left open, and learn how it ended on the other ranks."""
        self.complete_open()
        self._settling.read()

    def complete_open(self) -> None:
        """Finish what the last backward left open here."""
        self._refuse_broken()
        if self.backward is not None:
            self._complete_interrupted(self.backward)

    def _refuse_broken(self) -> None:
        """Raise where a reduction has failed: the members are no longer in step."""
        if self._sending.failure is not None:
            raise self._reports.stopped(self._sending.failure) from self._sending.failure

    @torch.no_grad()
    def _complete_interrupted(self, backward: Backward) -> None:
        """Keep in step with ranks whose backward went on, after this rank's raised midway.

        Zeros stand in for what this rank did not send.
        """
        for bucket in backward.rest():
            bucket.await_streams()
            bucket.clear()
        ending = Ending.INTERRUPTED if backward.rest() else Ending.WHOLE
        self._send_rest(backward, ending)
        self._wait(backward, ending, is_complete=False)

    def work_among(self, at_work: Sequence[bool], *, divides_by_all: bool) -> None:
        """Know which members have data, while some may have none."""
        self.source = list(at_work).index(True)
        self._share = 1.0 if divides_by_all else len(at_work) / sum(at_work)
        self._settling.num_at_work = sum(at_work)

    def take_part(self) -> None:
        """Take part in a backward of the others, on a rank that has no data for one.

        What all ranks learn of it is learned here, too; gradients stay as they are.
        """
        if self.backward is not None and self.backward.rest():
            self._refuse_broken()
            with suppress(GradientError):  # its own raised midway: this rank has seen that
                self.end_last()
            return
        self._settling.has_no_data()
        if not self.arrivals.is_learned:
            self.arrivals.is_absent(self._list.order)
        self._become(State.ENDED)
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
        zeros = Backward(self._sending)
        self._send_rest(zeros, ending)
        zeros.wait()
        try:
            self._settling.note(self._list.behind, ending)
            self._settling.read()
        finally:
            for bucket, before in zip(dense, kept, strict=True):
                bucket.flat.copy_(before)
            for bucket in self.buckets:
                bucket.reset()

    def _wait(self, backward: Backward, ending: Ending, *, is_complete: bool) -> None:
        """Wait for all buckets, hand out the gradients, and be ready for the next backward."""
        backward.wait()
        self._settling.note(self._list.behind, ending)
        is_used = self._settling.find_used(is_complete=is_complete)
        for bucket in self.buckets:
            if self._share != 1.0 and self.hook is None:
                bucket.scale_average(self._share)
            bucket.hand_out(is_used, is_complete=is_complete)
            bucket.reset()
        self.backward, self._has_local_sums = None, False
        self._become(State.ENDED)
        for future in self.awaited:
            future.wait()
        self.awaited.clear()
        if not self._settling.is_deferred:
            self._settling.read()
        if self.when_averaged is not None:
            for bucket in self.buckets:
                self.when_averaged(bucket.members)

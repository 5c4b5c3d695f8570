"""One backward: its reductions are started in bucket order, and waited for in bucket order.

A ``Backward`` is made at its first sign, when outputs have their gradients, and dropped once every
rank's part is averaged: nothing of it is reset for the next backward. A backward that raised midway
is still there afterwards; the next forward, or check, completes it with zeros.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..checking.call_sites import end_here
from ..error_text import without_frames
from ..errors import AgreementError, CollectiveTimeoutError, DeadlockError, MeshdistError
from ..runtime.graph_breaks import untraced
from ..runtime.hosts import IN_GOOD_ORDER
from .autograd_engines import NO_TASK
from .backward_outcome import Verdict
from .bucket_layout import BucketLayout
from .buckets import Filling, Pending
from .comm_hooks.bucket import GradBucket
from .comm_hooks.registered_hooks import RegisteredHook
from .expected_gradients import History
from .status_flags import Ending


class Phase(Enum):
    """The state of a reducer: idle, awaiting a backward, past its end, or closed for good."""

    IDLE = auto()
    AWAITED = auto()
    """A synchronised forward has come, and its backward has not ended."""
    ENDED = auto()
    CLOSED = auto()
    """Gradients stay local."""


class AtWork(NamedTuple):
    """The ranks that have data, in a join context.

    Args:
        source: the member whose buffers and order of buckets the others take.
        share: multiplies averages over all members: 1, or their number divided by ``num``.
        num: how many members have data.
        is_joining: whether the model is in a join context.
    """

    num: int
    source: int = 0
    share: float = 1.0
    is_joining: bool = False


class Sending:
    """State of a reducer across backwards: the hook, failures, futures, a lock."""

    def __init__(self, history: History, at_work: AtWork) -> None:
        self.history = history  # what is expected of a backward
        self.at_work = at_work
        self.hook: RegisteredHook | None = None  # averages buckets in place of an all-reduce
        self.failure: Exception | None = None  # since which the members are not in step
        self.awaited: list[Any] = []  # futures, by the end of the next backward
        self.lock = threading.RLock()  # a module on several devices has a thread on each


_UNCOME = DeadlockError, AgreementError, CollectiveTimeoutError
"""Errors of a rank whose others do not come to its backward."""

_JOIN = "if ranks have unequal numbers of batches, loop over md.uneven, or use `with ddp.join():`"

F = TypeVar("F", bound=Callable[..., Any])


def adds_join_fix(method: F) -> F:
    """Decorate a reducer's method: errors of ranks that do not call it name ``join()``."""

    @functools.wraps(method)
    def with_fix(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except MeshdistError as error:
            has_left = any(how in str(error) for how in IN_GOOD_ORDER)
            # A communication hook's own errors are not of ranks that do not come.
            if (isinstance(error, _UNCOME) or has_left) and self.sending.hook is None:
                error.add_fix(_JOIN)
            __tracebackhide__ = True
            end_here(error)
            raise

    # Untraced, since parts of a backward run inside a compiled step, too.
    return cast(F, untraced(with_fix))


class Backward:
    """A backward that is averaged, or zeros in place of a backward.

    Args:
        task: the number that autograd has given it; ``NO_TASK`` where zeros stand in.
        has_graph: whether its gradients could be differentiated again.
    """

    def __init__(
        self,
        layout: BucketLayout,
        sending: Sending,
        task: int = NO_TASK,
        *,
        has_graph: bool = False,
    ) -> None:
        self.layout = layout
        self.sending = sending
        self.task = task
        self.has_graph = has_graph
        self.fillings = [*map(Filling, layout.buckets)]  # in the order of sending
        # How often each gradient has come.
        self.counts = [0] * len(layout.terms.parameters)
        # Reductions of buckets that have gone, in order; then of the tail, if it goes alone.
        self.works: list[Pending] = []
        self.is_open = False  # whether a gradient has come
        self.is_running: Callable[[], bool] = bool  # whether it has not ended, nor raised
        self.verdict: Verdict | None = None  # until it has ended
        self._late: list[int] = []  # parameters whose gradient came after its bucket had gone
        self._places, self._is_learned = layout.places, layout.is_learned

    # -- gradients come ---------------------------------------------------------------------------

    def open(self) -> None:
        """Note that a first gradient came; raise if the backward has create_graph=True."""
        if self.has_graph:
            raise self.layout.terms.reports.with_graph()
        self.is_open = True

    def arrived(self, index: int) -> None:
        """Count gradient ``index``; send full buckets in order once the order is learned."""
        if not self.is_open:
            self.open()
        count = self.counts[index] = self.counts[index] + 1
        place = self._places.get(index)
        if place is None:  # it is never sent
            return
        number, slot = place
        filling = self.fillings[number]
        if filling.streams is not None:
            filling.streams.note()
        if not self._is_learned:
            self.sending.history.order.append(index)
            return
        more = count - self.sending.history.expected[index]
        if more < 0:
            return
        is_scaled = slot in filling.taken and filling.bucket.averaging.scale is not None
        if number < len(self.works) or is_scaled:  # nothing may be added to it
            self._late.append(index)
            return
        if slot < filling.bucket.num_at_once:
            filling.bucket.taking.take(filling, slot)
        if more == 0:
            filling.num_pending -= 1
            if not filling.num_pending:
                self._start_full()

    def _start_full(self) -> None:
        """Start the reduction of each full bucket, up to the first that is not full."""
        with self.sending.lock, torch.no_grad():
            for filling in self.rest():
                if filling.bucket.is_trailing or filling.num_pending:
                    return
                filling.take()
                self._start(filling)

    def find_came(self) -> list[bool]:
        """Return for each parameter whether the backward, which has ended, brought its gradient."""
        # A backward of its own may have left a gradient undefined.
        rows = zip(self.counts, self.layout.terms.parameters, strict=True)
        return [count > 0 and parameter.grad is not None for count, parameter in rows]

    def find_unexpected(self, came: Sequence[bool]) -> list[str]:
        """Return error lines of gradients too late for their bucket, or that options exclude."""
        history = self.sending.history
        options, reports = self.layout.terms.options, self.layout.terms.reports
        lines = [reports.came_late(index) for index in dict.fromkeys(self._late)]
        if history.is_learned and options.is_static:
            changes = history.find_changes(self.counts, came)
            lines += [
                reports.came_unlike_first(index, *counts) for index, counts in changes.items()
            ]
        elif history.is_learned and options.skips_unused:
            lines += [reports.was_skipped(index) for index in self.layout.unsent if came[index]]
        return lines

    # -- averages ---------------------------------------------------------------------------------

    def rest(self) -> Sequence[Filling]:
        """Return the fillings of the buckets that have not been sent."""
        return self.fillings[len(self.works) :]

    def reduce(self, verdict: Verdict, *, has_local_sums: bool = False) -> None:
        """Send the remaining buckets, zeros if no gradient came, and wait for all averages.

        Args:
            has_local_sums: whether unaveraged backwards have added to ``.grad`` since the last.
        """
        sending, layout, rest = self.sending, self.layout, self.rest()
        for filling in rest:
            filling.take(is_zero=not verdict.came)
        if rest:
            has_gradient = self._find_gradients(verdict, has_local_sums=has_local_sums)
            layout.tail.write(verdict.ending, has_gradient)
            for filling in rest:
                self._start(filling)
            if layout.tail_average is not None:
                self.works.append(layout.tail_average(layout.tail.numbers))
        try:
            for work in self.works:
                work.wait()
        except Exception as failure:
            sending.failure = without_frames(failure)
            raise

    def _find_gradients(self, verdict: Verdict, *, has_local_sums: bool) -> list[bool] | None:
        """Return for each parameter if this rank adds a new gradient; None if all or none came.

        Args:
            has_local_sums: whether ``.grad`` holds sums of backwards that were not averaged.
        """
        if verdict.ending is Ending.WHOLE or not verdict.came:
            return None
        has = list(verdict.came)
        for bucket in self.layout.buckets:
            rows = zip(bucket.indices, bucket.members, bucket.views, strict=True)
            for index, member, view in rows:
                # A gradient in its bucket that did not come is an average that all ranks have had,
                # unless sums have been kept apart since.
                is_new = has[index] or has_local_sums or member.grad is not view
                has[index] = member.grad is not None and is_new
        return has

    def _start(self, filling: Filling) -> None:
        """Start the reduction of a bucket, by a hook that serves it; add it to ``works``."""
        number, sending = len(self.works), self.sending
        bucket = filling.bucket
        if sending.hook is None or not self.layout.is_hooked(bucket):
            self.works.append(bucket.taking.start(filling))
            return
        behind = self.layout.buckets[number + 1 :]
        is_last = not any(map(self.layout.is_hooked, behind))
        args = bucket.members, bucket.views, number, is_last
        given = GradBucket(bucket.taking.buffer(filling), *args, self.layout.terms.group)
        try:
            self.works.append(sending.hook.start(given))
        except Exception as failure:  # after which verbs of the hook's, no other rank knows
            sending.failure = without_frames(failure)
            raise

    def give(self, verdict: Verdict) -> None:
        """Write averages into ``.grad`` of each parameter of which any rank had a gradient."""
        is_complete = verdict.ending is Ending.WHOLE
        is_used = verdict.find_used(is_complete=is_complete)
        share = 1.0 if self.sending.hook is not None else self.sending.at_work.share
        for filling in self.fillings:
            filling.bucket.taking.give(filling, is_used, is_complete=is_complete, share=share)

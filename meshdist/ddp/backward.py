"""Run one backward: start its reductions and wait for them, both in bucket order.

A ``Backward`` exists from the first gradient of outputs until all ranks' gradients are averaged. If
it raised, it is kept; the next forward, or check, completes it with zeros.
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
from ..errors import CollectiveTimeoutError, DeadlockError, MeshdistError, MismatchError
from ..runtime.graph_breaks import untraced
from ..runtime.hosts import IN_GOOD_ORDER
from .autograd_engines import NO_TASK
from .backward_outcome import BackwardOutcome
from .bucket_layout import BucketLayout
from .buckets import BucketState, Pending
from .comm_hooks.bucket import GradBucket
from .comm_hooks.registered_hooks import RegisteredHook
from .expected_gradients import ExpectedGradients
from .status_flags import Ending


class Phase(Enum):
    """The states of a reducer."""

    IDLE = auto()
    AWAITED = auto()
    """A synchronized forward has run, and its backward has not ended."""
    ENDED = auto()
    CLOSED = auto()
    """Gradients stay local."""


class ActiveRanks(NamedTuple):
    """The ranks that have data, in a join context.

    Args:
        source: the group rank whose buffers and bucket order the others use.
        share: a factor of averages over all ranks: 1, or their number divided by ``num``.
        num: the number of ranks with data.
    """

    num: int
    source: int = 0
    share: float = 1.0
    is_joining: bool = False


class ReducerState:
    """A reducer's state across backwards."""

    def __init__(self, expected_gradients: ExpectedGradients, active_ranks: ActiveRanks) -> None:
        self.expected_gradients = expected_gradients
        self.active_ranks = active_ranks
        self.hook: RegisteredHook | None = None  # averages buckets instead of an all-reduce
        self.failure: Exception | None = None  # after it, ranks are out of step
        self.awaited: list[Any] = []  # futures to wait for at the end of the next backward
        self.lock = threading.RLock()  # autograd uses one thread per device


_UNCOME = DeadlockError, MismatchError, CollectiveTimeoutError
"""Errors of a rank whose backward other ranks do not reach."""

_JOIN = "if ranks have unequal numbers of batches, loop over md.uneven, or use `with ddp.join():`"

F = TypeVar("F", bound=Callable[..., Any])


def adds_join_fix(method: F) -> F:
    """Make a reducer's method suggest ``join()`` if other ranks do not call it."""

    @functools.wraps(method)
    def with_fix(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except MeshdistError as error:
            has_exited = any(how in str(error) for how in IN_GOOD_ORDER)
            # Errors of a communication hook have other causes.
            if (isinstance(error, _UNCOME) or has_exited) and self.reducer_state.hook is None:
                error.add_fix(_JOIN)
            __tracebackhide__ = True
            end_here(error)
            raise

    # Untraced, since parts of a backward also run inside a compiled step.
    return cast(F, untraced(with_fix))


class Backward:
    """A backward whose gradients are averaged, or zeros that replace it.

    Args:
        task: autograd's number of the backward; ``NO_TASK`` for zeros.
        has_graph: whether gradients could be differentiated again.
    """

    def __init__(
        self,
        layout: BucketLayout,
        reducer_state: ReducerState,
        task: int = NO_TASK,
        *,
        has_graph: bool = False,
    ) -> None:
        self.layout = layout
        self.reducer_state = reducer_state
        self.task = task
        self.has_graph = has_graph
        self.bucket_states = [*map(BucketState, layout.buckets)]  # in the order of sending
        # How often each gradient was computed.
        self.counts = [0] * len(layout.terms.parameters)
        # Reductions of sent buckets, in order; then of the status flags, if they are sent alone.
        self.works: list[Pending] = []
        self.is_open = False  # whether a gradient was computed
        self.is_running: Callable[[], bool] = bool  # whether it has neither ended nor raised
        self.outcome: BackwardOutcome | None = None  # None until its end
        # Parameters whose gradient was computed after its bucket was sent.
        self._late: list[int] = []
        self._slots = layout.positions

    # -- gradients --------------------------------------------------------------------------------

    def open(self) -> None:
        """Record that a first gradient was computed; raise for create_graph=True."""
        if self.has_graph:
            raise self.layout.terms.gradient_errors.with_graph()
        self.is_open = True

    def arrived(self, index: int) -> None:
        """Count gradient ``index``; send full buckets once the order is learned."""
        if not self.is_open:
            self.open()
        count = self.counts[index] = self.counts[index] + 1
        found = self._slots.get(index)
        if found is None:  # never sent
            return
        number, slot = found
        bucket_state = self.bucket_states[number]
        if bucket_state.streams is not None:
            bucket_state.streams.note()
        if not self.layout.is_learned:
            self.reducer_state.expected_gradients.order.append(index)
            return
        more = count - self.reducer_state.expected_gradients.expected[index]
        if more < 0:
            return
        is_scaled = slot in bucket_state.taken and bucket_state.bucket.averaging.scale is not None
        if number < len(self.works) or is_scaled:  # too late to add to it
            self._late.append(index)
            return
        if slot < bucket_state.bucket.num_at_once:
            bucket_state.bucket.copy_mode.take(bucket_state, slot)
        if more == 0:
            bucket_state.num_pending -= 1
            if not bucket_state.num_pending:
                self._start_full()

    def _start_full(self) -> None:
        """Start the reductions of the leading full buckets."""
        with self.reducer_state.lock, torch.no_grad():
            for bucket_state in self.rest():
                if bucket_state.bucket.is_deferred or bucket_state.num_pending:
                    return
                bucket_state.take()
                self._start(bucket_state)

    def find_computed(self) -> list[bool]:
        """Return for each parameter whether this backward computed its gradient."""
        # A custom autograd function may leave a gradient undefined.
        rows = zip(self.counts, self.layout.terms.parameters, strict=True)
        return [count > 0 and parameter.grad is not None for count, parameter in rows]

    def find_unexpected(self, computed: Sequence[bool]) -> list[str]:
        """Return error lines for gradients too late for their bucket or excluded by options."""
        expected_gradients = self.reducer_state.expected_gradients
        options, gradient_errors = self.layout.terms.options, self.layout.terms.gradient_errors
        lines = [gradient_errors.late_text(index) for index in dict.fromkeys(self._late)]
        if expected_gradients.is_learned and options.is_static:
            changes = expected_gradients.find_changes(self.counts, computed)
            lines += [
                gradient_errors.unlike_first_text(index, *counts)
                for index, counts in changes.items()
            ]
        elif expected_gradients.is_learned and options.skips_unused:
            lines += [
                gradient_errors.was_skipped(index)
                for index in self.layout.unsent
                if computed[index]
            ]
        return lines

    # -- averages ---------------------------------------------------------------------------------

    def rest(self) -> Sequence[BucketState]:
        return self.bucket_states[len(self.works) :]

    def reduce(self, outcome: BackwardOutcome, *, has_local_sums: bool = False) -> None:
        """Send the remaining buckets (zeros without gradients), and wait for all averages.

        Args:
            has_local_sums: whether local backwards added to ``.grad`` since the last average.
        """
        reducer_state, layout, rest = self.reducer_state, self.layout, self.rest()
        for bucket_state in rest:
            bucket_state.take(is_zero=not outcome.computed)
        if rest:
            has_gradient = self._find_gradients(outcome, has_local_sums=has_local_sums)
            layout.status_flags.write(outcome.ending, has_gradient)
            for bucket_state in rest:
                self._start(bucket_state)
            if layout.flags_average is not None:
                self.works.append(layout.flags_average(layout.status_flags.numbers))
        try:
            for work in self.works:
                work.wait()
        except Exception as failure:
            reducer_state.failure = without_frames(failure)
            raise

    def _find_gradients(
        self, outcome: BackwardOutcome, *, has_local_sums: bool
    ) -> list[bool] | None:
        """Return for each parameter if this rank adds a new gradient; None if all or none."""
        if outcome.ending is Ending.COMPLETE or not outcome.computed:
            return None
        has = list(outcome.computed)
        for bucket in self.layout.buckets:
            rows = zip(bucket.indices, bucket.members, bucket.views, strict=True)
            for index, member, view in rows:
                # A gradient in its bucket that was not computed now is an earlier average, unless
                # local sums were kept elsewhere since.
                is_new = has[index] or has_local_sums or member.grad is not view
                has[index] = member.grad is not None and is_new
        return has

    def _start(self, bucket_state: BucketState) -> None:
        """Start a bucket's reduction, by the hook if it serves the bucket."""
        number, reducer_state = len(self.works), self.reducer_state
        bucket = bucket_state.bucket
        if reducer_state.hook is None or not self.layout.is_hooked(bucket):
            self.works.append(bucket.copy_mode.start(bucket_state))
            return
        later = self.layout.buckets[number + 1 :]
        is_last = not any(map(self.layout.is_hooked, later))
        args = bucket.members, bucket.views, number, is_last
        given = GradBucket(bucket.copy_mode.buffer(bucket_state), *args, self.layout.terms.group)
        try:
            self.works.append(reducer_state.hook.start(given))
        except Exception as failure:  # other ranks cannot know which collectives the hook started
            reducer_state.failure = without_frames(failure)
            raise

    def give(self, outcome: BackwardOutcome) -> None:
        """Write averages to ``.grad`` of parameters with a gradient on any rank."""
        is_complete = outcome.ending is Ending.COMPLETE
        is_used = outcome.find_used(is_complete=is_complete)
        share = (
            1.0 if self.reducer_state.hook is not None else self.reducer_state.active_ranks.share
        )
        for bucket_state in self.bucket_states:
            bucket_state.bucket.copy_mode.give(
                bucket_state, is_used, is_complete=is_complete, share=share
            )

"""Decide whether a gradient belongs to the current synchronized backward or a local backward.

In ``model(x).sum() + w.square().sum()`` the second term's gradient is computed first. It counts
once its backward reaches an output. If the backward reaches no output, it is local.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from ..groups.process_group import ProcessGroup
from .autograd_engines import NO_TASK, at_end_of_task, current_task, is_made_within, next_number
from .gradient_errors import GradientErrors

_NUM_FORWARDS = 64

_MANY = 8
"""The number of local backwards, with no averaged one between them, that triggers a warning."""


class LocalBackwards:
    """The gradients of backwards that have not reached an output."""

    def __init__(self) -> None:
        self.is_averaged_expected = False  # a synchronised forward awaits its backward
        self.takes_any = False  # count the next backward, since its outputs are unknown
        self.has_sums = False  # a backward since the last average was local
        self._early: list[int] = []  # indices of gradients, in order of computation
        self._early_task: int | None = None  # a task that may still reach an output
        self._num_local = 0  # since the last backward that was averaged
        self._local_task: int | None = None  # the backward that reached an output under no_sync
        self._is_local_running: Callable[[], bool] = bool  # whether that backward has not ended
        self._has_warned = False
        self._has_warned_of_complete = False
        self._first_number = 0
        # The numbers of the nodes created by the last synchronised forwards.
        self._forwards: deque[range] = deque(maxlen=_NUM_FORWARDS)

    def forward_begins(self) -> None:
        """Record the first node of a synchronized forward."""
        self._first_number = next_number()

    def passes_forward(self) -> bool:
        """Return whether this backward passes a synchronized forward."""
        return self._early_task != current_task() and is_made_within(self._forwards)

    def forward_ends(self, *, sees_outputs: bool) -> None:
        """Expect an averaged backward, of outputs if ``sees_outputs``."""
        self.takes_any = not sees_outputs
        if current_task() == NO_TASK:
            self.is_averaged_expected = True
            self._forwards.append(range(self._first_number, next_number()))

    def output_is_reached(self, ends: Callable[[], None]) -> None:
        """Record that this backward reached a ``no_sync`` output; call ``ends`` at its end."""
        if self._local_task != current_task():
            self._local_task = current_task()
            self._is_local_running = at_end_of_task(ends)

    def keep(self, index: int, gradient_errors: GradientErrors) -> None:
        """Keep gradient ``index`` until its backward reaches an output or ends."""
        self.has_sums = True
        task = current_task()
        if task != self._early_task:
            self._early_task = task
            self._early.clear()
            at_end_of_task(partial(self._end, task, gradient_errors))
        self._early.append(index)

    def backward_begins(self, task: int) -> list[int]:
        """Reset counts for averaged backward ``task``; return its gradients so far."""
        self.takes_any = self.is_averaged_expected = False
        self._num_local = 0
        if task != self._early_task:
            return []
        early, self._early, self._early_task = self._early, [], None
        return early

    def warn(self, gradient_errors: GradientErrors, num_local: int = 0) -> None:
        """Warn once of ``num_local`` local backwards in a row; 0 if a forward awaits its own."""
        if not self._has_warned:
            self._has_warned = True
            gradient_errors.warn_of_local(num_local=num_local)

    def warn_of_complete(
        self, task: int, group: ProcessGroup, gradient_errors: GradientErrors
    ) -> None:
        """Warn once if the loss of autograd task ``task`` was already reduced over ``group``."""
        noted, ranks, group_and_line = group.world.complete
        if noted == task and group_and_line and not self._has_warned_of_complete:
            self._has_warned_of_complete = len({*ranks} & {*group.ranks}) > 1
            if self._has_warned_of_complete:
                gradient_errors.warn_of_complete(group_and_line)

    def _end(self, task: int, gradient_errors: GradientErrors) -> None:
        """Drop the gradients of ``task``, if it reached no output; warn if that looks wrong."""
        if task != self._early_task:
            return
        self._early_task = None  # it reached no output
        self._early.clear()
        # It, or the backward around it, reached an output computed under ``no_sync``.
        if current_task() == self._local_task or self._is_local_running():
            return
        self._num_local += 1
        if self.is_averaged_expected:
            self.warn(gradient_errors)
        elif self._num_local == _MANY:  # repeated, so the program trains this way
            self.warn(gradient_errors, _MANY)

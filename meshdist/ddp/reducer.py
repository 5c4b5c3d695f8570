"""Average gradients over a group during the backward.

A bucket is one flat tensor with gradients as views; or a single gradient, if it is sparse, or large
while the backend shares no memory. The first synchronized backward is observed and sent at its end.
Then buckets are laid out in its order of gradients. From then on a bucket is sent, in the same
order on every rank, once its gradients have been added to as often as in the previous backward. The
last bucket, and buckets of gradients that some rank lacked, are sent at the end of the backward.
There an autograd callback waits for them, so ``.grad`` holds averages when ``backward()`` returns.

The reducer guarantees:

* Every backward that reaches outputs of a synchronized forward averages, also the second on a
  retained graph: averaging an average changes nothing. Every other backward is local.
* No rank waits for a gradient that another rank lacks, or whose backward raised: zeros replace it.
  Status flags after the last bucket report it (``backward_outcome``).
* If a gradient is computed after its bucket was sent, every rank raises.
* The CPU waits for an accelerator only in a second backward after one forward, which reads how the
  first ended, and in a backward that lacks gradients if options allow that.

If a rank's forward or loss raised, so that no backward reaches the model, the rank contributes
zeros in ``check_gradients``; without this call it is out of step.

Worked example: parameters a b c d of 4 bytes, buckets of 8 bytes, on 2 ranks. Rank 0 never uses c.

    first backward, observed   d b a on rank 0, c d b a on rank 1: c is deferred, rank 0 lacks it
    buckets are laid out       in rank 0's order, then the parameters it lacked: d b a c
    later backwards            [..]: the rank starts the all-reduce of a bucket

    time      ------------------------------------------>
    rank 0    d   b [d b]   a [a]             end [0]         zeros replace c
    rank 1      c   d   b [d b]   a [a]         end [c]

If b were computed before d, ``[d b]`` would wait for d, and ``[a]`` after it, since all ranks send
buckets in one order. ``[c]`` waits for the end of the backward, until every rank has computed c in
16 consecutive backwards.

    >>> from .bucket_layout import lay_out
    >>> a, b, c, d, expected = 0, 1, 2, 3, ExpectedGradients(4)
    >>> for index in (d, b, a):  # on rank 0
    ...     expected.order.append(index)
    >>> expected.update_deferred([c], may_move=True)
    >>> order, items = expected.laid_order([d, c, b, a]), [(4, "float32")] * 4
    >>> [bucket.indices for bucket in lay_out(items, order, (8,), deferred=expected.deferred)]
    [(3, 1), (0,), (2,)]
    >>> for _ in range(16): expected.update_deferred([], may_move=True)
    >>> expected.deferred
    frozenset()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..collectives.tensor_collectives import broadcast
from ..groups.process_group import ProcessGroup
from ..runtime.graph_breaks import untraced
from .autograd_engines import NO_TASK, at_end_of_task, current_task, is_in_distributed_context
from .backward import ActiveRanks, Backward, Phase, ReducerState, adds_join_fix
from .backward_outcome import BackwardOutcome
from .backward_tracking import LocalBackwards
from .bucket_layout import BucketLayout, ReductionOptions, ReductionTerms, lay
from .buckets import Bucket
from .comm_hooks.registered_hooks import RegisteredHook
from .device_streams import is_capturing
from .divergence_checks import DivergenceChecks
from .expected_gradients import ExpectedGradients
from .extra_axis_groups import ExtraAxisGroups
from .gradient_errors import GradientErrors
from .gradient_hooks import GradientHooks, tensors_in
from .norm_flags import mark_local, unmark_local
from .reduction import multiply_increments
from .status_flags import Ending


class Reducer:
    """Averages gradients over a group, backward after backward.

    Args:
        parameters: they require gradients, in the same order on every rank.
        group: open for the parameters' devices, like the additional groups.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        group: ProcessGroup,
        options: ReductionOptions,
        extra_groups: ExtraAxisGroups,
        divergence_checks: DivergenceChecks,
    ) -> None:
        num = len(parameters)
        self._divergence_checks = divergence_checks
        self.reducer_state = ReducerState(
            ExpectedGradients(num), ActiveRanks(extra_groups.all_ranks.size())
        )
        self.backward: Backward | None = None  # set from its first output to its end
        self._local = LocalBackwards()
        self._hooks = GradientHooks(list(parameters), self._on_gradient)
        self._state = Phase.IDLE
        gradient_errors, order = GradientErrors(names, group), range(num - 1, -1, -1)
        self._lay(
            ReductionTerms(list(parameters), group, options, gradient_errors, order, extra_groups),
            (),
        )
        self._multiplied = [
            multiply_increments(parameters[index], over.size() / group.size())
            for index, over in extra_groups.groups.items()
        ]

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        return self.layout.terms.parameters

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All buckets, in sending order."""
        return self.layout.buckets

    @property
    def has_final_buckets(self) -> bool:
        """Return whether buckets are laid out as learned and stay so; equal on every rank."""
        return self.layout.is_learned and self.layout.fits(self.reducer_state.expected_gradients)

    def close(self) -> None:
        """Remove all hooks; later gradients stay local."""
        self._state = Phase.CLOSED
        self._hooks.close()
        while self._multiplied:
            _, handle = self._multiplied.pop()
            handle.remove()

    @adds_join_fix
    def change_options(self, what: str, **changes: Any) -> None:
        """Change fields of the options; raise, naming ``what``, after the first backward."""
        terms = self.layout.terms
        if self._state is Phase.ENDED or self.reducer_state.expected_gradients.is_learned:
            raise terms.gradient_errors.too_late(what)
        options = replace(terms.options, **changes)
        self._use(replace(self.layout, terms=terms._replace(options=options)))

    def change_group(self, group: ProcessGroup) -> None:
        """Average over ``group`` from now on; learn the order of gradients again."""
        self.complete_open()
        terms, reducer_state = self.layout.terms, self.reducer_state
        reducer_state.expected_gradients.forget()
        reducer_state.active_ranks = ActiveRanks(group.size())
        if reducer_state.hook is not None:
            reducer_state.hook.group = group  # of a hook whose state is None
        self._become(Phase.IDLE)
        gradient_errors = GradientErrors(terms.gradient_errors.names, group)
        terms = terms._replace(
            group=group, gradient_errors=gradient_errors, extra_groups=ExtraAxisGroups(group)
        )
        self._lay(terms, self.buckets)
        self._divergence_checks.count_anew()

    @adds_join_fix
    def register_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Average with a communication hook; raise if invalid, late or second."""
        terms, reducer_state = self.layout.terms, self.reducer_state
        if terms.options.dtype is not None:
            raise terms.gradient_errors.hook_with_precision()
        if reducer_state.hook is not None:
            raise terms.gradient_errors.hook_again(reducer_state.hook.name)
        if (
            self.backward is not None
            or self._state is Phase.ENDED
            or reducer_state.expected_gradients.is_learned
        ):
            raise terms.gradient_errors.hook_late()
        if terms.extra_groups.groups:
            terms.gradient_errors.warn_of_hook_with_extra_groups(terms.extra_groups.groups)
        reducer_state.hook = RegisteredHook(state, hook, terms.group)
        self._lay(terms, self.buckets)

    # -- buckets ----------------------------------------------------------------------------------

    def _lay(self, terms: ReductionTerms, before: Sequence[Bucket]) -> None:
        """Replace the buckets ``before`` with buckets for ``terms``; gradients move along."""
        for group in (terms.group, *terms.extra_groups.groups.values()):
            group.world.averaged.add(frozenset(group.ranks))
        has_hook = self.reducer_state.hook is not None
        self._use(
            lay(terms, self.reducer_state.expected_gradients, has_hook=has_hook, before=before)
        )

    def _use(self, layout: BucketLayout) -> None:
        """Use ``layout`` from the next backward on, with a new outcome."""
        self.layout = layout
        self._outcome = BackwardOutcome(layout, lacking=range(len(layout.terms.parameters)))

    def _rebuild(self) -> None:
        """Lay the buckets out again; the first time in group rank 0's order of gradients."""
        # Later changes follow from numbers that all ranks have read.
        terms, expected_gradients = self.layout.terms, self.reducer_state.expected_gradients
        if expected_gradients.is_learned and expected_gradients.order:
            order = expected_gradients.laid_order(terms.order)
            device = self.layout.status_flags.numbers.device
            agreed = torch.tensor(order, dtype=torch.int64, device=device)
            broadcast(
                agreed,
                group=terms.extra_groups.all_ranks,
                group_src=self.reducer_state.active_ranks.source,
            )
            expected_gradients.order.clear()
            terms = terms._replace(order=tuple(agreed.tolist()))
        self._lay(terms, self.buckets)

    # -- before and after the module's forward ----------------------------------------------------

    @adds_join_fix
    def before_forward(self, *, is_synchronised: bool = True) -> None:
        """Complete the last backward, raise its errors, and rebuild buckets unless in no_sync."""
        is_again = current_task() != NO_TASK  # recomputed by a checkpoint
        if is_again or self._state is Phase.CLOSED:
            return
        self.end_last()
        if not torch.is_grad_enabled():
            return
        self._reject_engine()
        self._outcome.reject_lacking()
        if not is_synchronised:
            self._local.has_sums = True
            return
        self._outcome.expect_all()
        self._local.forward_begins()
        layout, expected_gradients = self.layout, self.reducer_state.expected_gradients
        self._divergence_checks.report(layout.terms)
        self._state = Phase.AWAITED
        is_fitting = layout.fits(expected_gradients)
        if not (layout.is_learned and is_fitting) and is_capturing(
            layout.status_flags.numbers.device
        ):
            # The graph would keep buckets that are replaced later.
            raise layout.terms.gradient_errors.captured_early()
        self._hooks.move_to_end()
        if not is_fitting:
            self._rebuild()

    @adds_join_fix
    def check(self) -> None:
        """Complete the last backward; raise the next forward's errors on every rank."""
        if current_task() != NO_TASK:
            raise self.layout.terms.gradient_errors.running()
        try:
            self.complete_open()
        finally:  # if it raises, that backward has been checked too
            is_absent = self._state is Phase.AWAITED
            self._become(Phase.IDLE)
        if is_absent and not is_capturing(self.layout.status_flags.numbers.device):
            self._stand_in(Ending.ABSENT)
        self._learn()
        self._outcome.reject_lacking()
        self._divergence_checks.report(self.layout.terms)

    def after_forward(
        self, outputs: object, owner: object, *, is_synchronised: bool = True
    ) -> None:
        """Register hooks on outputs: a backward that reaches them is averaged, or stays local.

        Args:
            owner: kept alive by the hooks, as long as a backward is possible.
        """

        @untraced
        def output_is_reached(_: torch.Tensor, owner: object = owner) -> None:
            if self._state is Phase.CLOSED:
                return
            if is_synchronised:
                self._enter()
            else:
                all_ranks = self.layout.terms.extra_groups.all_ranks.ranks
                self._local.output_is_reached(partial(mark_local, self.parameters, all_ranks))

        if self._state is Phase.CLOSED:
            return
        seen = [tensor for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
        for tensor in seen:
            tensor.register_hook(output_is_reached)
        if not is_synchronised:
            return
        self._local.forward_ends(sees_outputs=bool(seen))

    def prepare_for_backward(self, outputs: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Average the next backward that reaches ``outputs``; raise if they have no graph."""
        # Called by the wrapper's method, torch's pipeline stages and trainers.
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if tensors and not any(tensor.requires_grad for tensor in tensors):
            raise self.layout.terms.gradient_errors.split_backward()
        self.before_forward()
        self.after_forward(tensors, self)

    @staticmethod
    def _rebuild_buckets() -> bool:
        """Return False: trainers call it, but buckets are rebuilt without a call."""
        return False

    # -- one backward -----------------------------------------------------------------------------

    def _reject_engine(self) -> None:
        """Raise in a backward of compiled or distributed autograd."""
        if is_in_distributed_context():
            raise self.layout.terms.gradient_errors.in_distributed_context()
        tracing = sys.modules.get("torch._dynamo.compiled_autograd")
        if tracing is not None and tracing.in_compiled_autograd_region:
            raise self.layout.terms.gradient_errors.traced()

    def _become(self, state: Phase) -> None:
        if self._state is not Phase.CLOSED:
            self._state = state

    @untraced
    def _on_gradient(self, index: int, _: torch.Tensor) -> None:
        """Count gradient ``index`` in the backward to average; store it if that has not begun."""
        backward = self.backward
        if backward is None or current_task() != backward.task:
            self._reject_engine()
            with self.reducer_state.lock:
                backward = self._find_running()
                if backward is None:
                    self._local.keep(index, self.layout.terms.gradient_errors)
                    return
        backward.arrived(index)

    def _find_running(self) -> Backward | None:
        """Return the running backward to average, begun if it belongs to a forward; else None."""
        # Reentrant checkpoints run tasks inside the backward's task. A gradient of any other task
        # counts once that task reaches an output. If the wrapper cannot see the loss, such as in
        # an attribute, its backward still passes nodes of the forward.
        if self.backward is not None and self.backward.is_running():
            return self.backward
        if self._local.takes_any or self._local.passes_forward():
            self._enter()
            return self.backward
        return None

    def _enter(self) -> None:
        """Begin a backward to average, unless begun; raise if an earlier backward is unfinished."""
        self._reject_engine()
        task, reducer_state = current_task(), self.reducer_state
        with reducer_state.lock:  # each device's thread calls this
            if self.backward is not None and task == self.backward.task:
                return
            self._reject_broken()
            if self.backward is not None and self.backward.is_open:
                raise self.layout.terms.gradient_errors.overlapping()
            self._learn()  # in case no forward ran since the last backward
            backward = self.backward = Backward(
                self.layout,
                reducer_state,
                task,
                has_graph=torch.is_grad_enabled(),
            )
            backward.is_running = at_end_of_task(partial(self._finish, backward))
            for index in self._local.backward_begins(task):
                backward.arrived(index)

    @adds_join_fix
    @torch.no_grad()
    def _finish(self, backward: Backward) -> None:
        """End a backward: average its gradients, zeros if missing; drop it if it has none."""
        reducer_state, local = self.reducer_state, self._local
        computed = backward.find_computed()
        if not backward.is_open and True in computed:
            backward.open()
        if not backward.is_open:  # no parameter was involved, such as in autograd.grad of inputs
            self.backward = None
            local.takes_any = backward.has_graph  # a loss of that derivative may reach no output
            local.is_averaged_expected = True
            return
        unexpected = backward.find_unexpected(computed)
        outcome = self._outcome.followed_by(computed, unexpected, reducer_state.active_ranks.num)
        backward.outcome = outcome
        reducer_state.expected_gradients.backward_ends(backward.counts, computed)
        self._end(backward, outcome)
        terms = backward.layout.terms
        if reducer_state.hook is None:
            local.warn_of_complete(backward.task, terms.group, terms.gradient_errors)

    def _end(self, backward: Backward, outcome: BackwardOutcome) -> None:
        """Reduce all buckets, write averages to ``.grad``, wait for hooks."""
        self._reduce(backward, outcome)
        backward.give(outcome)
        if self._local.has_sums:
            unmark_local(self.parameters)
        self.backward, self._local.has_sums = None, False
        self._become(Phase.ENDED)
        while self.reducer_state.awaited:
            self.reducer_state.awaited.pop(0).wait()
        if not backward.layout.status_flags.reader.is_deferred:
            self._learn()

    def _reduce(self, backward: Backward, outcome: BackwardOutcome) -> None:
        """Reduce all buckets; keep ``outcome`` for later, unless a graph is captured."""
        backward.reduce(outcome, has_local_sums=self._local.has_sums)
        self._divergence_checks.backward_ends(backward)
        if outcome.note_flags():
            self._outcome = outcome

    def _learn(self) -> None:
        """Read how the last backward ended on all ranks; update expected gradients, or raise."""
        stays = self.reducer_state.hook is not None
        self._outcome.raise_or_learn(self.reducer_state.expected_gradients, stays=stays)

    def end_last(self) -> None:
        """Complete an interrupted backward with zeros; read its outcome on all ranks, or raise."""
        self.complete_open()
        self._learn()

    def complete_open(self) -> None:
        """Complete, with zeros, a backward that raised here; raise if a reduction failed."""
        self._reject_broken()
        if self.backward is not None:
            self._complete_interrupted(self.backward)

    def _reject_broken(self) -> None:
        # The ranks are out of step.
        failure = self.reducer_state.failure
        if failure is not None:
            raise self.layout.terms.gradient_errors.stopped(failure) from failure

    @torch.no_grad()
    def _complete_interrupted(self, backward: Backward) -> None:
        """End a backward that raised, with zeros for unsent gradients."""
        outcome = None if backward.rest() else backward.outcome  # everything was sent
        if outcome is None:
            num = self.reducer_state.active_ranks.num
            outcome = self._outcome.followed_by_none(Ending.INTERRUPTED, num)
        self._end(backward, outcome)

    @torch.no_grad()
    def shadow(self) -> None:
        """Contribute zeros to the other ranks' backward; write the averages; collective."""
        if not self.reducer_state.expected_gradients.is_learned:
            self.reducer_state.expected_gradients.note_absence(self.layout.terms.order)
        zeros = Backward(self.layout, self.reducer_state)
        self._end(zeros, self._outcome.followed_by_none(None, self.reducer_state.active_ranks.num))

    @torch.no_grad()
    def _stand_in(self, ending: Ending) -> None:
        """Reduce zeros instead of gradients, with the flag ``ending``; restore the buckets."""
        kept = [bucket.flat.clone() for bucket in self.buckets]
        zeros = Backward(self.layout, self.reducer_state)
        self._reduce(
            zeros, self._outcome.followed_by_none(ending, self.reducer_state.active_ranks.num)
        )
        try:
            self._learn()
        finally:
            for bucket, before in zip(self.buckets, kept, strict=True):
                bucket.flat.copy_(before)

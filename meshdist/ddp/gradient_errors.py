"""Build errors about gradients that name the affected parameters and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from ..checking.call_sites import warn_caller
from ..error_text import explain, first_line, first_texts, grouped_text, ranks_text
from ..errors import ArgumentError, GradientError, JoinError
from ..groups.process_group import ProcessGroup

_SHOWN_PARAMETERS = 20


class GradientErrors:
    """A factory of errors and warnings about gradients."""

    def __init__(self, names: Sequence[str], group: ProcessGroup) -> None:
        self.names = list(names)
        self._where = f"rank {group.world.rank}, in {group.group_name}"
        self._error = partial(GradientError, where=self._where)
        self._argument_error = partial(ArgumentError, where=self._where)

    def warn_of_local(self, *, num_local: int) -> None:
        """Warn at the user's line about a backward that reached parameters but no outputs.

        Args:
            num_local: how many in a row; 0 if a forward awaits its backward.
        """
        summary = "a backward reached parameters of a DistributedDataParallel"
        if num_local:
            summary += f" but none of its outputs, {num_local} times in a row"
            expected = "each step calls the forward of the wrapper"
            fix = "call model(x) on the wrapper instead of model.module(x) or its submodules"
        else:
            summary += " but none of its outputs, while a forward awaits its own backward"
            expected = "a loss computed from the outputs of the synchronized forward"
            fix = "add terms of parameters alone, such as a penalty, to that loss; if the local "
            fix += "gradient is intended, differentiate before the forward, or with "
            fix += "torch.autograd.grad"
        summary += ": its gradients stay local"
        warn_caller(explain(summary, where=self._where, expected=expected, fix=fix))

    def warn_of_complete(self, group_and_line: str) -> None:
        """Warn that a collective (``group_and_line``) reduced the loss before backward()."""
        summary = "DistributedDataParallel averages the gradients of a loss that was already "
        summary += "reduced over its ranks: they are divided by the number of ranks once too often"
        where = f"{self._where}; the loss depends on the values of all ranks along {group_and_line}"
        expected = "the loss of this rank's own samples: the wrapper computes the mean"
        fix = "call backward() on the loss before you reduce or gather it; if the loss depends on "
        fix += "such a result, cast the result: y = lax.pvary(lax.pmean(x, axis), axis)"
        warn_caller(explain(summary, where=where, expected=expected, fix=fix))

    def lacking(self, indices_by_rank: Mapping[int, Sequence[int]]) -> GradientError:
        lines = {rank: [*map(self.describe, indices)] for rank, indices in indices_by_rank.items()}
        return self._error(
            "parameters got no gradient in the backward since the last forward",
            expected="every rank's loss depends on every parameter that requires a gradient",
            found=_shown(lines, ", "),
            fix="use all outputs of the module in the loss, or pass find_unused_parameters=True, "
            "or call requires_grad_(False) on unused parameters before you wrap the model; freeze "
            "and unfreeze the same parameters on every rank",
        )

    def interrupted(self, cut: Sequence[int], absent: Sequence[int]) -> GradientError:
        """Return the error for ranks whose backward raised (``cut``) or is missing (``absent``)."""
        found = []
        if cut:
            found.append(f"{ranks_text(cut)}: an exception was raised inside backward()")
        if absent:
            found.append(f"{ranks_text(absent)}: no backward reached the model after its forward")
        return self._error(
            "the gradients of this step are wrong: a backward was interrupted",
            expected="backward() to succeed on every rank or fail on every rank",
            found="\n".join(found),
            fix="remove the cause of the exception on those ranks, or skip this step on every "
            "rank: call zero_grad() and start a new step",
        )

    def unexpected(self, lines_by_rank: Mapping[int, Sequence[str]]) -> GradientError:
        return self._error(
            "unexpected gradients: the gradients of this step are dropped",
            expected="the same gradients, each as often, as in earlier backwards",
            found=_shown(lines_by_rank, "; "),
            fix="pass find_unused_parameters=True if steps use different parameters, and neither "
            "static_graph=True nor skip_all_reduce_unused_params=True; pass use_reentrant=False "
            "to checkpoint()",
        )

    def late_text(self, index: int) -> str:
        return f"{self.describe(index)} was added to after its bucket had been sent"

    def unlike_first_text(self, index: int, count: int, learned: int) -> str:
        """Return a line on a gradient computed ``count`` times, but ``learned`` in step 1."""
        return (
            f"{self.describe(index)}: computed {_times(count)}, in the first step {_times(learned)}"
        )

    def was_skipped(self, index: int) -> str:
        return f"{self.describe(index)} has a gradient, but was unused at first and is not sent"

    def overlapping(self) -> GradientError:
        return self._error(
            "a backward began before the previous one ended",
            expected="one backward at a time",
            found="an earlier backward that was interrupted, with no forward since; or a reentrant "
            "checkpoint around the model",
            fix="run the forward again, or use checkpoint(..., use_reentrant=False)",
        )

    def split_backward(self) -> GradientError:
        """Return the error for outputs without a graph, as of schedules that split a backward."""
        return self._error(
            "prepare_for_backward() got outputs without a graph: no backward can reach them",
            expected="a last backward that runs from the stage's outputs to its parameters",
            found="outputs that were computed without gradients or detached; or cut off their "
            "graph by a schedule that accumulates weight gradients separately, such as "
            "InterleavedZeroBubble, ZBVZeroBubble or DualPipeV",
            fix="in a hand-written schedule, pass the outputs of the wrapped forward unchanged; "
            "with such a schedule do not wrap the stage: after schedule.step() call "
            "md.distributed.all_reduce_coalesced(gradients, md.ReduceOp.AVG, mesh['dp']); "
            "or use torch's fully_shard",
        )

    def unfinished(self) -> GradientError:
        return self._error(
            "the last backward has not ended",
            found="a backward that raised, or is running",
            fix="run the forward again, which completes the backward on all ranks",
        )

    def too_late(self, what: str) -> GradientError:
        return self._error(
            f"cannot set {what} after a backward",
            expected=f"{what} set before the first backward, on every rank",
            fix="set it right after you wrap the model",
        )

    def warn_of_hook_with_extra_groups(self, indices: Iterable[int]) -> None:
        """Warn that a communication hook skips ``indices``, reduced over other axes."""
        summary = "a communication hook averages over the wrapper's group only"
        names = [self.names[index] for index in indices]
        found = f"averaged over other axes: {first_texts(names, ', ')}"
        expected = "all gradients averaged over one group; these are averaged without the hook"
        warn_caller(explain(summary, where=self._where, expected=expected, found=found))

    def group_with_extra_groups(self) -> GradientError:
        return self._error(
            "cannot change the group of a wrapper whose parameters are annotated as reduced or as "
            "experts",
            expected="parameters without annotations of axes",
            fix="del ddp and its outputs, and wrap the model again with device_mesh=",
        )

    def joined_with_extra_groups(self) -> JoinError:
        return JoinError(
            "cannot use a join context with parameters that are averaged over other axes than the "
            "wrapper's",
            where=self._where,
            expected="a model whose gradients are averaged over one group, in which each rank "
            "without data substitutes only for itself",
            fix="loop over md.uneven(loader, mesh), which gives all ranks equally many steps",
        )

    def running(self) -> GradientError:
        return self._error(
            "cannot check gradients while a backward runs",
            fix="call check_gradients() after backward() returns",
        )

    def captured_early(self) -> GradientError:
        return self._error(
            "cannot capture a CUDA graph before the buckets are rebuilt",
            expected="two steps, forward and backward, before the capture",
            fix="run a few steps on a side stream first, as torch.cuda.graph requires",
        )

    def with_graph(self) -> GradientError:
        return self._error(
            "cannot reduce the gradients of backward(create_graph=True) over a group",
            found="gradients with a graph, which the all-reduce would cut",
            fix="use torch.autograd.grad(..., create_graph=True) for the inner derivative, and "
            "a plain backward() for the parameters",
        )

    def traced(self) -> GradientError:
        return self._error(
            "compiled autograd cannot run the backward of a DistributedDataParallel",
            found="a backward that torch.compile traces entirely, without the callbacks at its end",
            fix="leave torch._dynamo.config.compiled_autograd off; you can compile forwards, and "
            "steps with their backward",
        )

    def in_distributed_context(self) -> GradientError:
        return self._error(
            "DistributedDataParallel cannot average gradients of torch.distributed.autograd",
            expected="forward and backward outside torch.distributed.autograd.context()",
            found="a distributed autograd context, whose gradients are not in .grad",
            fix="call loss.backward() outside the context, or pass activations between ranks with "
            "lax.ppermute, which is differentiable",
        )

    def sparse(self, index: int, layout: torch.layout) -> GradientError:
        return self._error(
            f"{self.describe(index)} has a sparse gradient",
            expected="dense gradients",
            found=f"layout {str(layout).removeprefix('torch.')}",
            fix="create the embedding with sparse=False",
        )

    def reshaped(self, index: int, shape: torch.Size, wrapped: torch.Size) -> GradientError:
        """Return the error for a gradient of ``shape``; its parameter had ``wrapped`` at first."""
        return self._error(
            f"{self.describe(index)} changed its shape after the model was wrapped",
            expected=f"a gradient of shape {tuple(wrapped)}",
            found=f"shape {tuple(shape)}",
            fix="change the model first, then wrap it: del ddp and its outputs, and wrap again",
        )

    def hook_again(self, name: str) -> ArgumentError:
        return self._argument_error(
            "a communication hook is already registered",
            expected="register_comm_hook() at most once per wrapper",
            found=f"hook {name}",
            fix="call both in one hook, or wrap the model again",
        )

    def hook_with_precision(self) -> ArgumentError:
        return self._argument_error(
            "a communication hook cannot be used with mixed_precision",
            expected="a hook, or mixed_precision",
            fix="convert the buckets in the hook: md.distributed.comm_hooks.bf16_compress_hook",
        )

    def hook_late(self) -> ArgumentError:
        return self._argument_error(
            "cannot register a communication hook after the first backward",
            expected="register_comm_hook() before gradients are first averaged",
            fix="register it right after you wrap the model",
        )

    def stopped(self, failure: Exception) -> GradientError:
        return self._error(
            "cannot reduce gradients: an earlier all-reduce failed",
            found=first_line(failure),
            fix="restart the job, or create a new mesh and wrap the model again",
        )

    def describe(self, index: int) -> str:
        return f"{self.names[index]} (index {index})"


def _shown(lines: Mapping[int, Sequence[str]], separator: str) -> str:
    """Return the first lines of each rank, joined, grouped by ranks."""
    return grouped_text(
        (rank, first_texts(mine, separator, _SHOWN_PARAMETERS))
        for rank, mine in lines.items()
        if mine
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

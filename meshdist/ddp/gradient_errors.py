"""Errors about gradients, each naming the parameters and ranks concerned."""

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
    """Makes errors about gradients of the parameters ``names``, to be raised, and warns."""

    def __init__(self, names: Sequence[str], group: ProcessGroup) -> None:
        self.names = list(names)
        self._where = f"rank {group.world.rank}, in {group.group_name}"
        self._error = partial(GradientError, where=self._where)
        self._argument_error = partial(ArgumentError, where=self._where)

    def warn_of_local(self, *, num_local: int) -> None:
        """Warn at the program's line of a backward that reached parameters and no outputs.

        Args:
            num_local: how many such backwards came in a row; 0 if a forward awaits its backward.
        """
        summary = "a backward reached parameters of a DistributedDataParallel"
        if num_local:
            summary += f" and none of its outputs, {num_local} times in a row"
            expected = "steps that are made of forwards through the wrapper"
            fix = "call model(x), the wrapper, in place of model.module(x) or of parts of it"
        else:
            summary += " and none of its outputs, while a forward waits for its own"
            expected = "a loss of what a synchronised forward has computed"
            fix = "add a term of parameters alone, such as a penalty, to that loss; where it is "
            fix += "meant, differentiate before the forward, or by torch.autograd.grad"
        summary += ": its gradients stay local"
        warn_caller(explain(summary, where=self._where, expected=expected, fix=fix))

    def warn_of_complete(self, group_and_line: str) -> None:
        """Warn that a loss was reduced over ranks before backward(), by that group's collective."""
        summary = "a DistributedDataParallel averages the gradients of a loss that its ranks made "
        summary += "together: they are divided by the number of ranks once too often"
        where = f"{self._where}; the loss is made of what all ranks have along {group_and_line}"
        expected = "the loss of this rank's own samples: the wrapper takes the mean"
        fix = "call backward() on the loss before it is reduced, or gathered; where it is made of "
        fix += "such a result, cast that: y = lax.pvary(lax.pmean(x, axis), axis)"
        warn_caller(explain(summary, where=where, expected=expected, fix=fix))

    def lacking(self, indices_by_rank: Mapping[int, Sequence[int]]) -> GradientError:
        """Return the error for parameters that got no gradient."""
        lines = {rank: [*map(self.describe, indices)] for rank, indices in indices_by_rank.items()}
        return self._error(
            "parameters got no gradient in the backward since the last forward",
            expected="every parameter that requires a gradient takes part in every rank's loss",
            found=_shown(lines, ", "),
            fix="let the loss depend on all of the module's outputs, or pass "
            "find_unused_parameters=True, or call requires_grad_(False) on unused parameters "
            "before the model is wrapped; freeze and unfreeze alike on every rank",
        )

    def interrupted(self, cut: Sequence[int], absent: Sequence[int]) -> GradientError:
        """Return the error for ranks whose backward raised (``cut``) or never came (``absent``)."""
        found = []
        if cut:
            found.append(f"{ranks_text(cut)}: an exception was raised inside backward()")
        if absent:
            found.append(f"{ranks_text(absent)}: no backward reached the model after its forward")
        return self._error(
            "the gradients of this step are wrong: a backward was interrupted",
            expected="a backward that ends on every rank, or raises on every rank",
            found="\n".join(found),
            fix="look at the exception there; after zero_grad() a new step may begin",
        )

    def unexpected(self, lines_by_rank: Mapping[int, Sequence[str]]) -> GradientError:
        """Return the error for unexpected gradients, which the lines name."""
        return self._error(
            "gradients came that were not expected: those of this step are dropped",
            expected="the gradients that the backwards before had, each as often",
            found=_shown(lines_by_rank, "; "),
            fix="pass find_unused_parameters=True where steps differ in the parameters they use, "
            "and neither static_graph=True nor skip_all_reduce_unused_params=True; let checkpoints "
            "be use_reentrant=False",
        )

    def came_late(self, index: int) -> str:
        """Return a line on a gradient that grew after its bucket had been sent."""
        return f"{self.describe(index)} got more after its bucket had been sent"

    def came_unlike_first(self, index: int, count: int, learned: int) -> str:
        """Return a line that gradient ``index`` came ``count`` times, and ``learned`` in step 1."""
        return f"{self.describe(index)} came {_times(count)}, in the first step {_times(learned)}"

    def was_skipped(self, index: int) -> str:
        """Return a line on a gradient that came though the wrapper never sends it."""
        return f"{self.describe(index)} got a gradient, and is not sent: it was unused at first"

    def overlapping(self) -> GradientError:
        """Return the error for a backward that began before another had ended."""
        return self._error(
            "a backward began before another had ended",
            expected="one backward at a time",
            found="an earlier backward that was interrupted, with no forward since; or a reentrant "
            "checkpoint around the model",
            fix="run the forward again, or use checkpoint(..., use_reentrant=False)",
        )

    def split_backward(self) -> GradientError:
        """Return the error for outputs without a graph, as of schedules that split a backward."""
        return self._error(
            "outputs without a graph were given to prepare_for_backward: no backward comes to them",
            expected="a last backward that goes through the stage's outputs to its parameters",
            found="outputs made without gradients, or detached; or cut off their graph by a "
            "schedule that adds up the weights' gradients apart, as InterleavedZeroBubble, "
            "ZBVZeroBubble, DualPipeV",
            fix="by hand, pass what the wrapped forward returned, as it is; under such a schedule "
            "leave the stage bare: behind schedule.step() call "
            "md.distributed.all_reduce_coalesced(gradients, md.ReduceOp.AVG, mesh['dp']); "
            "or take torch's fully_shard",
        )

    def unfinished(self) -> GradientError:
        """Return the error for a backward that has begun but not ended."""
        return self._error(
            "the last backward has not ended",
            found="it raised, or is running",
            fix="run the forward again, which completes it on all ranks",
        )

    def too_late(self, what: str) -> GradientError:
        """Return the error for an option (``what``) that was set after a backward."""
        return self._error(
            f"{what} was set after a backward",
            expected="it set before the first backward, on every rank",
            fix="set it right after the model is wrapped",
        )

    def warn_of_hook_beside_wider(self, indices: Iterable[int]) -> None:
        """Warn that a communication hook leaves out ``indices``, reduced over further axes."""
        summary = "a communication hook averages over the wrapper's group alone"
        names = [self.names[index] for index in indices]
        found = f"reduced over further axes: {first_texts(names, ', ')}"
        expected = "gradients that all go over one group; these are averaged as without the hook"
        warn_caller(explain(summary, where=self._where, expected=expected, found=found))

    def group_beside_wider(self) -> GradientError:
        """Return the error for a new group while marks have parameters averaged over more axes."""
        return self._error(
            "the group of a wrapper cannot change while parameters are marked as reduced",
            expected="parameters that no mark names axes for, over which they are averaged",
            fix="del ddp and its outputs, and wrap again with device_mesh=",
        )

    def joined_beside_wider(self) -> JoinError:
        """Return the error for a join context where parameters are reduced over further axes."""
        return JoinError(
            "a model with parameters that are reduced over further axes is in a join context",
            where=self._where,
            expected="a model whose gradients are averaged over one group, in which ranks without "
            "data stand in for themselves alone",
            fix="loop over md.uneven(loader, mesh), which gives all ranks equally many steps",
        )

    def running(self) -> GradientError:
        """Return the error for a check of gradients while a backward runs."""
        return self._error(
            "gradients cannot be checked while a backward runs",
            fix="call check_gradients() after backward() has returned",
        )

    def captured_early(self) -> GradientError:
        """Return the error for a CUDA graph that would capture the buckets of the first step."""
        return self._error(
            "a CUDA graph cannot be captured before the buckets are rebuilt",
            expected="two steps, forward and backward, before the capture",
            fix="run some steps on a side stream first, as torch.cuda.graph asks for",
        )

    def with_graph(self) -> GradientError:
        """Return the error for a backward that could be differentiated again."""
        return self._error(
            "backward(create_graph=True) cannot be reduced over a group",
            found="gradients with a graph of their own, which the all-reduce would cut",
            fix="use torch.autograd.grad(..., create_graph=True) for the inner derivative, and "
            "a plain backward() for the parameters",
        )

    def traced(self) -> GradientError:
        """Return the error for a backward that torch.compile traces as a whole."""
        return self._error(
            "compiled autograd cannot run the backward of a replica",
            found="a backward that torch.compile traces as a whole, without the calls at its end",
            fix="leave torch._dynamo.config.compiled_autograd off; forwards, and steps with their "
            "backward, may be compiled",
        )

    def in_distributed_context(self) -> GradientError:
        """Return the error for a forward or backward in a context of torch.distributed.autograd."""
        return self._error(
            "DistributedDataParallel cannot average gradients of torch.distributed.autograd",
            expected="forward and backward outside torch.distributed.autograd.context()",
            found="a distributed autograd context, whose gradients are not in .grad",
            fix="call loss.backward() outside the context, or pass activations between ranks by "
            "lax.ppermute, which has a gradient",
        )

    def sparse(self, index: int, layout: torch.layout) -> GradientError:
        """Return the error for a gradient that is not dense."""
        return self._error(
            f"{self.describe(index)} has a sparse gradient",
            expected="dense gradients",
            found=f"layout {str(layout).removeprefix('torch.')}",
            fix="make the embedding with sparse=False",
        )

    def reshaped(self, index: int, shape: torch.Size, wrapped: torch.Size) -> GradientError:
        """Return the error for a gradient of ``shape``; its parameter was wrapped in another."""
        return self._error(
            f"{self.describe(index)} has another shape than when the model was wrapped",
            expected=f"a gradient of shape {tuple(wrapped)}",
            found=f"shape {tuple(shape)}",
            fix="change the model first, then wrap it: del ddp and its outputs, and wrap again",
        )

    def hook_again(self, name: str) -> ArgumentError:
        """Return the error for a second communication hook."""
        return self._argument_error(
            "a communication hook is registered already",
            expected="register_comm_hook at most once for each wrapper",
            found=f"hook {name}",
            fix="call both in one hook, or wrap the model anew",
        )

    def hook_beside_precision(self) -> ArgumentError:
        """Return the error for a communication hook beside ``mixed_precision``."""
        return self._argument_error(
            "a communication hook cannot be used with mixed_precision",
            expected="a hook, or mixed_precision",
            fix="cast the buckets in the hook: md.distributed.comm_hooks.bf16_compress_hook",
        )

    def hook_late(self) -> ArgumentError:
        """Return the error for a communication hook that was registered after a backward."""
        return self._argument_error(
            "a communication hook was registered after the first backward",
            expected="register_comm_hook before gradients are first averaged",
            fix="register it right after the model is wrapped",
        )

    def stopped(self, failure: Exception) -> GradientError:
        """Return the error for a backward after an all-reduce that failed."""
        return self._error(
            "the gradients cannot be reduced any more: an earlier all-reduce failed",
            found=first_line(failure),
            fix="end this job, or make the mesh and the model's wrapper anew",
        )

    def describe(self, index: int) -> str:
        """Return the name and index of a parameter, for messages."""
        return f"{self.names[index]} (index {index})"


def _shown(lines: Mapping[int, Sequence[str]], separator: str) -> str:
    """Return the first lines of each rank, joined by ``separator``, as a text grouped by ranks."""
    return grouped_text(
        (rank, first_texts(mine, separator, _SHOWN_PARAMETERS))
        for rank, mine in lines.items()
        if mine
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

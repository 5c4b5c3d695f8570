"""Check that the wrapped model is unchanged and all replicas are bitwise equal.

If a rank loads another state, uses another learning rate, or has a bit flip in its memory, DDP
would average gradients of different weights. So after some backwards the ranks compare digests of
parameters, and read the result at the next forward. They compare parameters only if digests differ.
"""

from __future__ import annotations

import torch
from torch import nn

from ..annotations.axis_types import kinds_in, type_of
from ..collectives.normalize_args import run_named
from ..collectives.objects import gather_from_all
from ..collectives.torch_private import hidden_from_modes
from ..collectives.value_comparison import agree, find_unequal_digests
from ..error_text import first_texts
from ..errors import GradientError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from .backward import Backward
from .bucket_layout import ReductionTerms
from .device_streams import is_capturing, reader_for
from .model_checks import ignored_names, module_state, trainable_parameters

_FIRST = (2, 10, 100)  # replicas are compared after these backwards and each n-th
_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")  # replicas diverge on purpose
_LOOKS, _LOOK_EVERY = 3, 100  # forwards that check for gradients that are not averaged
_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute that torch's ``_apply_optimizer_in_backward`` sets on parameters."""
_DIVERGED = (
    "find the rank that differs with {} (check loaded or initialized weights, learning rate, "
    "clipping, steps under no_sync(), eval(), hardware faults)"
)
_TITLE = "a comparison of replicas"
_ROUNDED = (
    "use the same processor and thread count on all ranks, and call "
    "torch.use_deterministic_algorithms(True)"
)


class DivergenceChecks:
    """Compares replicas after a few early backwards and each ``every``-th; never if 0."""

    def __init__(self, module: nn.Module, every: int, device: torch.device) -> None:
        self._module = module
        self._every = every
        self._device = device
        self._wrapped = {id(parameter): parameter for parameter in module.parameters()}
        self._reader = reader_for(device, 1, torch.bool)
        self._num_forwards = 0
        self.count_anew()

    def forward_begins(self) -> None:
        """Raise, in the first 3 and every 100th forward, if gradients would not be averaged."""
        if torch.is_grad_enabled():
            self._num_forwards += 1
            if self._num_forwards <= _LOOKS or self._num_forwards % _LOOK_EVERY == 0:
                self.reject_local_gradients()

    def reject_local_gradients(self) -> None:
        """Raise for new parameters, and for optimizers that step in the backward."""
        if any(hasattr(parameter, _IN_BACKWARD) for parameter in self._wrapped.values()):
            raise GradientError(
                "an optimizer steps during the backward, before gradients are averaged",
                expected="parameters without _apply_optimizer_in_backward",
                found=f"{type(self._module).__name__} has parameters with {_IN_BACKWARD}",
                fix="call optimizer.step() after backward(); to shard optimizer states, "
                "use torch's ZeroRedundancyOptimizer or fully_shard on mesh.to_torch()",
            )
        if all(id(parameter) in self._wrapped for parameter in self._module.parameters()):
            return
        trained = trainable_parameters(self._module, ignored_names(self._module))
        new = [
            name
            for name, parameter in trained.items()
            if id(parameter) not in self._wrapped
            and isinstance(parameter, nn.Parameter)  # torch.func.functional_call sets tensors
        ]
        if new:
            raise GradientError(
                f"{new[0]} was added to the module after it was wrapped: its gradient is local",
                expected="the parameters that the module had when it was wrapped",
                found=f"in {type(self._module).__name__}: {first_texts(new, ', ')}",
                fix="add adapters, heads and parametrizations first, then wrap the model: "
                "del ddp and its outputs, wrap again, and pass all parameters to the optimizer",
            )

    def count_anew(self) -> None:
        """Reset the count of backwards, which may differ on another group's ranks."""
        self._num_backwards = 0  # equal on every rank
        self._reader.take()

    def backward_ends(self, backward: Backward) -> None:
        """Count an averaged backward and compare replicas after some of them."""
        self._num_backwards += 1
        number, every = self._num_backwards, self._every
        if every > 0 and (number in _FIRST or number % every == 0):
            reducer_state, terms = backward.reducer_state, backward.layout.terms
            averages = reducer_state.hook is None or reducer_state.hook.name not in _LOCAL_HOOKS
            # In a join context, the weights of joined ranks are out of date.
            is_meant = averages and not reducer_state.active_ranks.is_joining
            num_ranks = terms.extra_groups.all_ranks.size()
            if is_meant and num_ranks > 1 and not is_capturing(self._device):
                self._compare(terms)

    @hidden_from_modes
    @torch.no_grad()
    def _compare(self, terms: ReductionTerms) -> None:
        """Start to compare the ranks' digests; collective."""
        found = [
            find_unequal_digests(group, *state, op_name=_TITLE, device=self._device)
            for group, state in self._states(terms).items()
        ]
        differs = torch.stack(found).any().view(1)
        if len(found) > 1:  # the ranks of all groups raise alike
            differs = differs.to(torch.uint8)
            all_ranks = terms.extra_groups.all_ranks
            run_named("all_reduce", all_ranks, _TITLE, differs, ReduceOp.MAX)
        self._reader.note(differs)  # read later, to not synchronize with the device

    def _states(
        self, terms: ReductionTerms
    ) -> dict[ProcessGroup, tuple[dict[str, str], dict[str, torch.Tensor]]]:
        """Return, by group, texts and named tensors that must be equal on its ranks."""
        root = self._module.training  # ranks may have different submodules, which follow the root
        num_other = sum(module.training != root for module in self._module.modules())
        mode = f"{'train' if root else 'eval'}(), except for {num_other} submodules"
        groups = terms.extra_groups.by_name
        states: dict[ProcessGroup, tuple[dict[str, str], dict[str, torch.Tensor]]]
        states = {terms.group: ({"mode": mode}, {})}
        states |= {group: ({}, {}) for group in groups.values() if group not in states}
        found = module_state(self._module, ignored_names(self._module), with_buffers=False)
        for name, parameter in found.items():
            group = groups.get(name, terms.group)
            kinds = kinds_in(type_of(parameter))
            # Other tensors that are annotated as shards differ between ranks.
            is_shard = any(kinds.get(axis) in ("V", "U") for axis in group.axis_names or kinds)
            if name in groups or not is_shard:
                states[group][1][name] = parameter.detach()
        return states

    @hidden_from_modes
    def report(self, terms: ReductionTerms) -> None:
        """Raise on every rank if replicas differed after the last backward, and still do."""
        if not self._reader.take():
            return
        found: list[tuple[str, bool, str]] = []
        states = self._states(terms)
        for group, state in states.items():
            difference = agree(group, *state, op_name=_TITLE, device=self._device)
            if difference:
                found.append((difference.found, difference.is_rounding, _comparison(group)))
        if len(states) > 1:  # ranks of other groups may have found none
            with torch.cuda.device_of(terms.parameters[0]):
                everyone = gather_from_all(found, terms.extra_groups.all_ranks)
            found = [*dict.fromkeys(entry for entries in everyone for entry in entries)]
        if found:
            is_rounding = all(is_rounding for _, is_rounding, _ in found)
            group, comparison = terms.group, found[0][2]
            raise GradientError(
                "the replicas have diverged: gradients of different models are averaged",
                where=f"rank {group.world.rank}, backward {self._num_backwards} over {group.name}",
                expected="bitwise equal parameters on every rank, and eval() on all ranks or none",
                found="\n".join(text for text, _, _ in found)
                + "\nwithin rounding error" * is_rounding,
                fix=f"{_ROUNDED if is_rounding else _DIVERGED.format(comparison)}; then load "
                "one state on every rank; if replicas should differ, wrap with verify_every=0",
            )


def _comparison(group: ProcessGroup) -> str:
    """Return the code of an md.assert_equal call for the model over ``group``."""
    names = group.axis_names
    if not names and group.size() == group.world.size:
        return f"md.assert_equal(model, md.make_mesh(({group.size()},), ('dp',)))"
    axis = repr(names[0] if len(names) == 1 else names) if names else "axis"
    return f"md.assert_equal(model, {axis}, mesh=mesh)"

"""Whether a model still is what was wrapped, and whether its replicas are equal, to the bit.

Nothing else compares weights once a model is wrapped: where one rank alone loads a state, steps by
another learning rate, or has a bit flipped in its memory, gradients of different weights would be
averaged in silence. So behind a few backwards each rank makes a checksum of its parameters, and the
largest checksum of all ranks meets the smallest, in one message of 16 bytes:

    rank 0: 7    rank 1: 7    rank 2: 9        MAX of (c, ~c) over the ranks: (9, ~7)

All ranks see that 9 is not 7. Only then do they exchange the checksums of each parameter.

A checksum is a sum of integers, equal in any order. The words of 32 bits have odd weights, each its
own, so that the sum tells of a bit that flipped and of values that changed places:

    words 3 5 6, weights 1 7 9:  3 + 35 + 54 = 92        5 3 6:  5 + 21 + 54 = 80
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _take_tensors

from ..collectives.objects import all_gather_object
from ..collectives.torch_private import hidden_from_modes
from ..collectives.verbs import all_reduce
from ..dtypes import dtype_name
from ..error_text import first_texts, ranks_text
from ..errors import GradientError
from ..functional.axis_types import kinds_in
from ..functional.value_checks import find_differing
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from ..typed_contexts.refusals import type_of
from .backward import Backward
from .device_streams import is_capturing, reader_for
from .wrapping import ignored_names, module_state, trainable_parameters

_ROW = 1 << 16  # words, and as many sums, which stay in a core's cache
_FACTOR, _SPREAD = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd: nothing is lost modulo 2^64
_WORDS = {1: torch.int8, 2: torch.int16}  # of smaller elements; else 32 bits


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a checksum of 64 bits on ``device`` of dense tensors; no device is awaited.

    Example:
        >>> x, y = torch.tensor([1.0, -1.0]), torch.tensor([-1.0, 1.0])
        >>> bool(checksum([x], x.device) == checksum([y], x.device))
        False
    """
    total = torch.zeros((), dtype=torch.int64, device=device)
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        length = _ROW if device.type == "cpu" else 64 * _ROW  # else: by few kernels
        sums = torch.zeros(length, dtype=torch.int64, device=device)
        here = [x.resolve_conj().resolve_neg() for x in tensors if x.device == device]
        for alike in _take_tensors(here, 4 * _ROW):  # a large tensor alone, small together
            words = _WORDS.get(alike[0].itemsize, torch.int32)
            for row in _flatten_dense_tensors(alike).view(words).split(length):
                part = sums[: len(row)]  # times a factor, plus the row: one pass, little memory
                torch.add(row, part, alpha=_FACTOR, out=part)
        weights = torch.arange(1, length + 1, device=device).mul_(_FACTOR)
        weights = (weights ^ (weights >> 29)).mul_(_SPREAD).bitwise_or_(1)
        total = total * _FACTOR + sums.mul_(weights).sum().to(device, non_blocking=True)
    return total


_FIRST = (2, 10, 100)  # backwards behind which replicas are compared, besides each n-th
_LOCAL_HOOKS = ("noop_hook", "post_localSGD_hook")  # replicas part, as is meant
_LOOKS, _LOOK_EVERY = 3, 100  # forwards that look for gradients that are not averaged
_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute that torch's ``_apply_optimizer_in_backward`` sets on parameters."""
_PARTED = (
    "look for what one rank does otherwise (weights loaded or drawn, learning rate, clipping, "
    "steps under no_sync(), eval()) by {}, or for a bit that flipped"
)
_ROUNDED = "use equal processors and threads, and torch.use_deterministic_algorithms(True)"


class Parting:
    """Compares a model's replicas after a few early and each ``every``-th backward; never for 0."""

    def __init__(self, module: nn.Module, every: int, device: torch.device) -> None:
        self._module = module
        self._every = every
        self._device = device
        self._wrapped = {id(parameter): parameter for parameter in module.parameters()}
        self._reader = reader_for(device, 2, torch.int64)
        self._num_forwards = 0
        self.count_anew()

    def forward_begins(self) -> None:
        """Raise, in the first 3 and each 100th forward, if gradients would not be averaged."""
        if torch.is_grad_enabled():
            self._num_forwards += 1
            if self._num_forwards <= _LOOKS or self._num_forwards % _LOOK_EVERY == 0:
                self.refuse_local_gradients()

    def refuse_local_gradients(self) -> None:
        """Raise GradientError for new parameters, and for optimizers that step in the backward."""
        if any(hasattr(parameter, _IN_BACKWARD) for parameter in self._wrapped.values()):
            raise GradientError(
                "an optimizer steps inside the backward, before gradients are averaged",
                expected="parameters without _apply_optimizer_in_backward",
                found=f"{type(self._module).__name__} has parameters with {_IN_BACKWARD}",
                fix="call optimizer.step() after backward(); to keep optimizer states in shards, "
                "use torch's ZeroRedundancyOptimizer or fully_shard on mesh.to_torch()",
            )
        if all(id(parameter) in self._wrapped for parameter in self._module.parameters()):
            return
        trained = trainable_parameters(self._module, ignored_names(self._module))
        new = [
            name
            for name, parameter in trained.items()
            if id(parameter) not in self._wrapped
            and isinstance(parameter, nn.Parameter)  # functional_call of torch.func puts tensors
        ]
        if new:
            raise GradientError(
                f"{new[0]} came into the module after it was wrapped: its gradient is local",
                expected="the parameters that the module had when it was wrapped",
                found=f"in {type(self._module).__name__}: {first_texts(new, ', ')}",
                fix="complete the model first (adapters, heads, parametrizations), then wrap it: "
                "del ddp and its outputs, wrap again, and make the optimizer of all parameters",
            )

    def count_anew(self) -> None:
        """Count backwards from 0 again, as another group's ranks may have counted otherwise."""
        self._num_backwards = 0  # equal on every rank
        self._reader.take()

    def backward_ends(self, backward: Backward) -> None:
        """Count a backward; compare replicas after some, by number, if gradients were averaged."""
        self._num_backwards += 1
        number, every = self._num_backwards, self._every
        if every > 0 and (number in _FIRST or number % every == 0):
            sending, group = backward.sending, backward.layout.terms.group
            averages = sending.hook is None or sending.hook.name not in _LOCAL_HOOKS
            # In a join context the weights of ranks that joined are behind.
            is_meant = averages and not sending.at_work.is_joining
            if is_meant and group.size() > 1 and not is_capturing(self._device):
                self._compare(group)

    @hidden_from_modes
    @torch.no_grad()
    def _compare(self, group: ProcessGroup) -> None:
        """Start to compare the ranks' checksums, read at the next forward; collective."""
        mine = checksum([*self._state(group).values()], self._device)
        numbers = torch.stack([mine, ~mine])
        all_reduce(numbers, ReduceOp.MAX, group)
        self._reader.note(numbers)  # read later: a device is not awaited

    def _state(self, group: ProcessGroup) -> dict[str, torch.Tensor]:
        """Return, by name, training modes and the tensors that must be equal in ``group``."""
        root = self._module.training  # ranks may have modules of their own, which follow the root
        num_other = sum(module.training != root for module in self._module.modules())
        modes = torch.full((), num_other if root else ~num_other, device=self._device)
        state = {"modules in training mode": modes}
        found = module_state(self._module, ignored_names(self._module), with_buffers=False)
        for name, parameter in found.items():
            kinds = kinds_in(type_of(parameter))
            # Shards, by their marks, differ between ranks.
            if not any(kinds.get(axis) in ("V", "U") for axis in group.axis_names or kinds):
                state[name] = parameter.detach()
        return state

    def report(self, group: ProcessGroup) -> None:
        """Raise on every rank if replicas differed behind the last backward, and still do."""
        numbers = self._reader.take()
        if numbers is not None:
            self._compare_parameters(numbers, group)

    @hidden_from_modes
    def _compare_parameters(self, numbers: torch.Tensor, group: ProcessGroup) -> None:
        if int(numbers[0]) == ~int(numbers[1]):
            return
        state = {
            f"{name} {tuple(x.shape)} {dtype_name(x.dtype)}" if x.ndim else name: x
            for name, x in self._state(group).items()
        }
        held: list[dict[str, int]] = [{}] * group.size()
        with torch.cuda.device_of(next(iter(state.values()))):
            mine = {name: int(checksum([x], self._device)) for name, x in state.items()}
            all_gather_object(held, mine, group)
        lines = _differences(held, group.ranks)
        is_rounding = len({*map(frozenset, held)}) == 1 and not any(
            find_differing([state[name] for name in lines], group)
        )
        if lines:
            raise GradientError(
                "the replicas have parted: gradients of different models are averaged",
                where=f"rank {group.world.rank}, backward {self._num_backwards} over {group.name}",
                expected="the same bits in every parameter on every rank, eval() on all or none",
                found=first_texts([*lines.values()]) + "\nby roundings alone" * is_rounding,
                fix=f"{_ROUNDED if is_rounding else _PARTED.format(_comparison(group))}; then load "
                "one state on every rank; where it is meant, wrap with verify_every=0",
            )


def _comparison(group: ProcessGroup) -> str:
    """Return the text of a call md.assert_equal that compares the model over ``group``."""
    names = group.axis_names
    if not names and group.size() == group.world.size:
        return f"md.assert_equal(model, md.make_mesh(({group.size()},), ('dp',)))"
    axis = repr(names[0] if len(names) == 1 else names) if names else "axis"
    return f"md.assert_equal(model, {axis}, mesh=mesh)"


def _differences(held: Sequence[Mapping[str, int]], ranks: Sequence[int]) -> dict[str, str]:
    """Return, by name, a line on the ranks whose number differs from the most frequent."""
    lines = {}
    for name in dict.fromkeys(name for mine in held for name in mine):
        numbers = [mine.get(name) for mine in held]
        usual = Counter(numbers).most_common(1)[0][0]
        odd = [rank for rank, number in zip(ranks, numbers, strict=True) if number != usual]
        if odd:
            verb = "differs" if len(odd) == 1 else "differ"
            rest = ranks_text([rank for rank in ranks if rank not in odd])
            lines[name] = f"{name}: {ranks_text(odd)} {verb} from {rest}"
    return lines

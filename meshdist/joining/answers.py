"""The part of a rank without data in a call of the others: it changes nothing for them.

That is the neutral element of a reduction, zeros where tensors are gathered or exchanged, None
where objects are. The call is made by the verb itself, so that it is compared and carried out like
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ..checking.program import run_unnested
from ..collectives.monitored_barrier import skip_barrier
from ..collectives.object_rounds import Rounds
from ..collectives.prepare import run_titled
from ..collectives.shared_buffers import shared_empty
from ..groups.process_group import ProcessGroup
from ..groups.verb_methods import verbs
from ..reduce_ops import ReduceKind, ReduceOp
from ..verb_table import VERBS, Form, Role
from ..wires.work import Work
from .announcements import Statement

__all__ = ["answer", "neutral"]


def answer(
    group: ProcessGroup, device_type: str, said: Sequence[Statement], going: Statement
) -> Work | None:
    """Take part in the call of those that go on, by what each member ``said``; change nothing.

    A rank that waited here could not come to a call on another group for which a third one, which
    answers that first, waits in turn. So what can be started is not waited for.

    Returns:
        What has been started; None where it is done.
    """
    verb = going.call.verb
    make = _ANSWERS.get(verb) or (_objects if VERBS[verb].is_of_objects else _of_tensors)
    work = make(_NeutralArguments(group, device_type, said, going))
    return work if isinstance(work, Work) else None


def neutral(op: ReduceKind | None, dtype: torch.dtype, count: int) -> torch.Tensor:
    """``count`` elements that change no result of ``op``; zeros where it is None.

    Example:
        >>> neutral(ReduceOp.MAX, torch.int8, 2).tolist(), neutral(ReduceOp.BAND, torch.bool, 1)
        ([-128, -128], tensor([True]))
    """
    if op == ReduceOp.PRODUCT:
        return torch.ones(count).to(dtype)
    is_least = op == ReduceOp.MAX
    if not is_least and op not in (ReduceOp.MIN, ReduceOp.BAND):
        return torch.zeros(count, dtype=dtype)
    if dtype.is_floating_point:
        return torch.full((count,), _extreme(dtype, is_least=is_least)).to(dtype)
    if op == ReduceOp.BAND or not dtype.is_signed:
        value = 1 if dtype is torch.bool else 255
        bits = torch.full((count * dtype.itemsize,), 0 if is_least else value, dtype=torch.uint8)
        return bits.view(dtype)
    limits = torch.iinfo(dtype)
    return torch.full((count,), limits.min if is_least else limits.max, dtype=dtype)


def _extreme(dtype: torch.dtype, *, is_least: bool) -> float:
    """The least or greatest number of a floating dtype."""
    infinity = float("-inf" if is_least else "inf")
    if bool(torch.tensor(infinity).to(dtype).float().isinf()):
        return infinity
    limits = torch.finfo(dtype)
    return limits.min if is_least else limits.max


class _NeutralArguments:
    """The arguments of one answer, as for ``answer``."""

    def __init__(
        self,
        group: ProcessGroup,
        device_type: str,
        said: Sequence[Statement],
        going: Statement,
    ) -> None:
        self.group = group
        self.call = call = going.call
        self.root = call.root
        self.size = group.size()
        self.is_root = call.root == group.rank()
        is_scaled = call.op == ReduceOp.PREMUL_SUM
        self._kind = ReduceOp.SUM if is_scaled else call.op
        self.op: Any = ReduceOp.premul_sum(1) if is_scaled else self._kind
        self.sizes = going.sizes
        self._said = said
        bound = group.device
        self.device = bound if bound and bound.type == device_type else torch.device(device_type)

    def tensor(self, count: int | None = None) -> torch.Tensor:
        """As many neutral elements; None means as many as the call's one tensor has."""
        shape, dtype = self.call.parts[0]
        return self._neutral(prod(shape) if count is None else count, dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Neutral elements like each of the call's tensors."""
        return [self._neutral(prod(shape), dtype) for shape, dtype in self.call.parts]

    def _neutral(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return neutral(self._kind, dtype, count).to(self.device)

    def gathered(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Room for the tensors of an all_gather, and this rank's own.

        All members take the same of each; of one without data what the others expect.
        """
        _, taken = self.sizes
        counts = [
            taken[member] if one.has_joined else one.sizes[0][0]
            for member, one in enumerate(self._said)
        ]
        return [self.tensor(count) for count in counts], self.tensor(taken[self.group.rank()])

    def exchanged(self) -> tuple[list[int], list[int]]:
        """How much comes from and goes to each member of an all-to-all: what those expect.

        Nothing goes between two that have no data.
        """
        me = self.group.rank()
        takes = [0 if one.has_joined else one.sizes[0][me] for one in self._said]
        gives = [0 if one.has_joined else one.sizes[1][me] for one in self._said]
        return takes, gives

    def exchanged_parts(self) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
        """Output and input of an all-to-all of one tensor, and the sizes of their parts."""
        takes, gives = self.exchanged()
        return self.tensor(sum(takes)), self.tensor(sum(gives)), takes, gives

    def exchanged_lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and inputs of an all-to-all of lists."""
        takes, gives = ([self.tensor(count) for count in counts] for counts in self.exchanged())
        return takes, gives

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a verb, where the larger has a block for each member."""
        tensor = self.tensor()
        is_scattered, count = VERBS[self.call.verb].reduces, tensor.numel()
        return tensor.new_empty(count // self.size if is_scattered else self.size * count), tensor

    def gathered_at_root(self) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
        """Outputs, on the root, and input of a gather."""
        outputs = [self.tensor() for _ in range(self.size)] if self.is_root else None
        return outputs, self.tensor()

    def scattered_lists(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output and inputs of a reduce-scatter of a list."""
        inputs = self.tensors()
        return inputs[self.group.rank()].clone(), inputs


_DATA: dict[tuple[Form, Form], Callable[[_NeutralArguments], tuple[Any, ...]]] = {
    (Form.NONE, Form.NONE): lambda _: (),
    (Form.IN_PLACE, Form.ONE): lambda it: (it.tensor(),),
    (Form.IN_PLACE, Form.ANY): lambda it: (it.tensors(),),
    (Form.ONE, Form.ONE): _NeutralArguments.blocks,
    (Form.ONE, Form.EACH): _NeutralArguments.gathered,
    (Form.ONE, Form.AT_ROOT): _NeutralArguments.gathered_at_root,
    (Form.EACH, Form.ONE): _NeutralArguments.scattered_lists,
    (Form.AT_ROOT, Form.ONE): lambda it: (it.tensor(), None),
    (Form.EACH, Form.EACH): _NeutralArguments.exchanged_lists,
    (Form.PARTS, Form.PARTS): _NeutralArguments.exchanged_parts,
}
"""The data that a verb of a communicator writes, reads, and cuts them by, by its forms."""

_ORDER = (Role.IN_PLACE, Role.OUTPUT, Role.INPUT, Role.SIZES)


def _of_tensors(it: _NeutralArguments) -> object:
    """Call a verb with the data that its wire verb takes, in the parameters of its row."""
    row, root = VERBS[it.call.verb], it.root
    forms = row.carrier.takes, row.carrier.gives
    data = _DATA[forms](it) if row.is_plain else (it.tensors(),)
    named = dict(zip(row.named(*_ORDER), data, strict=True))
    named |= dict.fromkeys(row.named(Role.OP), it.op)
    if it.call.title:
        given = [named.get(one.name, root) for one in row.parameters]
        return run_titled(row.name, it.group, it.call.title, *given, async_op=True)
    if root is not None:
        named |= dict.fromkeys(row.named(Role.ROOT), it.group.ranks[root])
    return verbs[row.name](**named, group=it.group, async_op=True)


def _all_gather_coalesced(it: _NeutralArguments) -> object:
    outputs = [it.tensors() for _ in range(it.size)]
    return verbs["all_gather_coalesced"](outputs, it.tensors(), it.group, async_op=True)


def _all_gather_multigpu(it: _NeutralArguments) -> object:
    inputs = it.tensors()
    outputs = [[it.tensor() for _ in range(it.size * len(inputs))] for _ in inputs]
    return verbs["all_gather_multigpu"](outputs, inputs, it.group, async_op=True)


def _objects(it: _NeutralArguments) -> object:
    rounds = Rounds(it.call.verb, it.group, it.device)
    rounds.root = it.root
    takes, gives = it.exchanged() if it.sizes else ([], [])
    return run_unnested(it.call.verb, rounds.answer, it.call, it.sizes, gives, takes)


_ANSWERS: dict[str, Callable[[_NeutralArguments], object]] = {
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_multigpu": _all_gather_multigpu,
    "monitored_barrier": lambda it: skip_barrier(it.group),
    "shared_empty": lambda it: shared_empty(it.tensor().numel(), it.tensor().dtype, it.group),
}
"""Verbs that take something else."""

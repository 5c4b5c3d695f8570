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
from ..groups.announcements import Statement
from ..groups.process_group import ProcessGroup
from ..groups.verb_methods import verbs
from ..reduce_ops import ReduceKind, ReduceOp
from ..verb_table import VERBS, WIRE_VERBS
from ..wires.work import Work
from . import titled
from .monitored import pass_by
from .object_rounds import Rounds
from .shared_buffers import shared_empty

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
    if going.call.title:
        make = _TITLED_ANSWERS[verb]
    else:
        make = _ANSWERS.get(verb) or (_objects if VERBS[verb].is_of_objects else _of_tensors)
    work = make(_Answer(group, device_type, said, going))
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


class _Answer:
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

    def exchanged_at_once(self) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
        """Output and input of an all-to-all of one tensor, and the sizes of their parts."""
        takes, gives = self.exchanged()
        return self.tensor(sum(takes)), self.tensor(sum(gives)), takes, gives

    def exchanged_lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and inputs of an all-to-all of lists."""
        takes, gives = ([self.tensor(count) for count in counts] for counts in self.exchanged())
        return takes, gives

    def gathered_at_once(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a gather into one tensor."""
        tensor = self.tensor()
        return tensor.new_empty(self.size * tensor.numel()), tensor

    def gathered_at_root(self) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
        """Outputs, on the root, and input of a gather."""
        outputs = [self.tensor() for _ in range(self.size)] if self.is_root else None
        return outputs, self.tensor()

    def scattered_lists(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output and inputs of a reduce-scatter of a list."""
        inputs = self.tensors()
        return inputs[self.group.rank()].clone(), inputs

    def scattered_at_once(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input of a reduce-scatter of one tensor."""
        tensor = self.tensor()
        return tensor.new_empty(tensor.numel() // self.size), tensor


def _of_tensors(it: _Answer) -> object:
    """Call a verb with the data that its wire verb takes, under the names of its row."""
    row = VERBS[it.call.verb]
    carried, names = WIRE_VERBS[row.wire_verbs[0]], dict.fromkeys([row.writes, *row.reads])
    named = dict(zip(names, _DATA[carried.name](it), strict=False))
    if row.reduces:
        named["op"] = it.op
    if carried.root:
        named["group_dst" if carried.root == "to" else "group_src"] = it.root
    return verbs[row.name](**named, group=it.group, async_op=True)


def _all_gather_coalesced(it: _Answer) -> object:
    outputs = [it.tensors() for _ in range(it.size)]
    return verbs["all_gather_coalesced"](outputs, it.tensors(), it.group, async_op=True)


def _all_gather_multigpu(it: _Answer) -> object:
    inputs = it.tensors()
    outputs = [[it.tensor() for _ in range(it.size * len(inputs))] for _ in inputs]
    return verbs["all_gather_multigpu"](outputs, inputs, it.group, async_op=True)


def _rooted_multigpu(it: _Answer) -> object:
    assert it.root is not None
    root, op = it.group.ranks[it.root], () if it.op is None else (it.op,)
    return verbs[it.call.verb](it.tensors(), root, *op, group=it.group, async_op=True)


def _objects(it: _Answer) -> object:
    rounds = Rounds(it.call.verb, it.group, it.device)
    rounds.root = it.root
    takes, gives = it.exchanged() if it.sizes else ([], [])
    return run_unnested(it.call.verb, rounds.answer, it.call, it.sizes, gives, takes)


_DATA: dict[str, Callable[[_Answer], tuple[Any, ...]]] = {
    "all_reduce": lambda it: (it.tensor(),),
    "all_reduce_list": lambda it: (it.tensors(),),
    "reduce": lambda it: (it.tensor(),),
    "reduce_scatter": _Answer.scattered_at_once,
    "reduce_scatter_list": _Answer.scattered_lists,
    "broadcast": lambda it: (it.tensor(),),
    "all_gather": _Answer.gathered_at_once,
    "all_gather_list": _Answer.gathered,
    "gather": _Answer.gathered_at_root,
    "scatter": lambda it: (it.tensor(),),
    "all_to_all": _Answer.exchanged_lists,
    "barrier": lambda _: (),
}
"""The data that a verb of a communicator writes and reads, in this order."""

_ANSWERS: dict[str, Callable[[_Answer], object]] = {
    "all_to_all_single": lambda it: verbs["all_to_all_single"](
        *it.exchanged_at_once(), it.group, async_op=True
    ),
    "all_reduce_multigpu": lambda it: verbs["all_reduce_multigpu"](
        it.tensors(), it.op, it.group, async_op=True
    ),
    "reduce_multigpu": _rooted_multigpu,
    "broadcast_multigpu": _rooted_multigpu,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_multigpu": _all_gather_multigpu,
    "monitored_barrier": lambda it: pass_by(it.group),
    "shared_empty": lambda it: shared_empty(it.tensor().numel(), it.tensor().dtype, it.group),
}
"""Verbs that take something else."""

_TITLED_ANSWERS: dict[str, Callable[[_Answer], object]] = {
    "all_reduce": lambda it: titled.all_reduce(
        it.tensor(), it.group, it.call.title, it.op, async_op=True
    ),
    "broadcast": lambda it: titled.broadcast(
        it.tensor(), it.root or 0, it.group, it.call.title, async_op=True
    ),
    "all_gather_into_tensor": lambda it: titled.all_gather_into_tensor(
        *it.gathered_at_once(), it.group, it.call.title, async_op=True
    ),
    "reduce_scatter_tensor": lambda it: titled.reduce_scatter_tensor(
        *it.scattered_at_once(), it.group, it.call.title, async_op=True
    ),
    "all_to_all": lambda it: titled.all_to_all(
        *it.exchanged_lists(), it.group, it.call.title, async_op=True
    ),
    "all_to_all_single": lambda it: titled.all_to_all_single(
        *it.exchanged_at_once(), it.group, it.call.title, async_op=True
    ),
}

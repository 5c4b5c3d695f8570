"""The answers of a rank without data to calls of the others, which change no result of theirs.

An answer brings the neutral element of a reduction, zeros where tensors are gathered or exchanged,
None where objects are. It is made by the verb itself, so that it is compared and carried out like
any other call.
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
from .statements import Statement


def answer(
    group: ProcessGroup, device_type: str, said: Sequence[Statement], going: Statement
) -> Work | None:
    """Make the call of ``going`` with neutral arguments; return its Work, or None if it is done.

    Args:
        said: the statements of all members.
        going: that of the members which have data.
    """
    # The call is not waited for: a third rank that it needs may answer a call on another group
    # first, which needs this rank.
    verb = going.call.verb
    make = _ANSWERS.get(verb) or (_objects if VERBS[verb].is_of_objects else _of_tensors)
    work = make(_NeutralArguments(group, device_type, said, going))
    return work if isinstance(work, Work) else None


def neutral(op: ReduceKind | None, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return ``count`` elements that change no result of ``op``; zeros if ``op`` is None.

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
    """Return the least or greatest value of a floating dtype, infinite if the dtype allows it."""
    infinity = float("-inf" if is_least else "inf")
    if bool(torch.tensor(infinity).to(dtype).float().isinf()):
        return infinity
    limits = torch.finfo(dtype)
    return limits.min if is_least else limits.max


class _NeutralArguments:
    """Arguments that change no result, for a call that a rank without data joins."""

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
        """Return a tensor of neutral elements; None means as many as the call's tensor has."""
        shape, dtype = self.call.parts[0]
        return self._neutral(prod(shape) if count is None else count, dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Return tensors of neutral elements, as large as each of the call's."""
        return [self._neutral(prod(shape), dtype) for shape, dtype in self.call.parts]

    def _neutral(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return neutral(self._kind, dtype, count).to(self.device)

    def gathered(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the outputs and the input of an all_gather, in the sizes that others expect."""
        _, taken = self.sizes
        counts = [
            taken[member] if statement.has_joined else statement.sizes[0][0]
            for member, statement in enumerate(self._said)
        ]
        return [self.tensor(count) for count in counts], self.tensor(taken[self.group.rank()])

    def exchanged(self) -> tuple[list[int], list[int]]:
        """Return an all-to-all's elements from, and to, each member; 0 where it has joined."""
        me = self.group.rank()
        takes = [0 if statement.has_joined else statement.sizes[0][me] for statement in self._said]
        gives = [0 if statement.has_joined else statement.sizes[1][me] for statement in self._said]
        return takes, gives

    def exchanged_parts(self) -> tuple[torch.Tensor, torch.Tensor, list[int], list[int]]:
        """Return the output and input of an all_to_all_single, and the sizes of their parts."""
        takes, gives = self.exchanged()
        return self.tensor(sum(takes)), self.tensor(sum(gives)), takes, gives

    def exchanged_lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and inputs of an all-to-all of lists of tensors."""
        takes, gives = ([self.tensor(count) for count in counts] for counts in self.exchanged())
        return takes, gives

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and input of a verb whose larger tensor has a block per member."""
        tensor = self.tensor()
        is_scattered, count = VERBS[self.call.verb].reduces, tensor.numel()
        return tensor.new_empty(count // self.size if is_scattered else self.size * count), tensor

    def gathered_at_root(self) -> tuple[list[torch.Tensor] | None, torch.Tensor]:
        """Return a gather's outputs, None but on the root, and its input."""
        outputs = [self.tensor() for _ in range(self.size)] if self.is_root else None
        return outputs, self.tensor()

    def scattered_lists(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output and inputs of a reduce-scatter of a list."""
        inputs = self.tensors()
        return inputs[self.group.rank()].clone(), inputs


_DATA: dict[tuple[Form, Form], Callable[[_NeutralArguments], tuple[Any, ...]]] = {
    (Form.NONE, Form.NONE): lambda _: (),
    (Form.IN_PLACE, Form.ONE): lambda arguments: (arguments.tensor(),),
    (Form.IN_PLACE, Form.ANY): lambda arguments: (arguments.tensors(),),
    (Form.ONE, Form.ONE): _NeutralArguments.blocks,
    (Form.ONE, Form.EACH): _NeutralArguments.gathered,
    (Form.ONE, Form.AT_ROOT): _NeutralArguments.gathered_at_root,
    (Form.EACH, Form.ONE): _NeutralArguments.scattered_lists,
    (Form.AT_ROOT, Form.ONE): lambda arguments: (arguments.tensor(), None),
    (Form.EACH, Form.EACH): _NeutralArguments.exchanged_lists,
    (Form.PARTS, Form.PARTS): _NeutralArguments.exchanged_parts,
}
"""The outputs, inputs and sizes of a call, by the forms of the verb that carries it."""

_ORDER = (Role.IN_PLACE, Role.OUTPUT, Role.INPUT, Role.SIZES)


def _of_tensors(arguments: _NeutralArguments) -> object:
    """Start the verb of ``arguments``, which change no member's result; return its Work."""
    row, root = VERBS[arguments.call.verb], arguments.root
    forms = row.carrier.takes, row.carrier.gives
    data = _DATA[forms](arguments) if row.is_plain else (arguments.tensors(),)
    named = dict(zip(row.named(*_ORDER), data, strict=True))
    named |= dict.fromkeys(row.named(Role.OP), arguments.op)
    if arguments.call.title:
        given = [named.get(parameter.name, root) for parameter in row.parameters]
        return run_titled(row.name, arguments.group, arguments.call.title, *given, async_op=True)
    if root is not None:
        named |= dict.fromkeys(row.named(Role.ROOT), arguments.group.ranks[root])
    return verbs[row.name](**named, group=arguments.group, async_op=True)


def _all_gather_coalesced(arguments: _NeutralArguments) -> object:
    inputs = arguments.tensors()
    outputs = [arguments.tensors() for _ in range(arguments.size)]
    return verbs["all_gather_coalesced"](outputs, inputs, arguments.group, async_op=True)


def _all_gather_multigpu(arguments: _NeutralArguments) -> object:
    inputs = arguments.tensors()
    outputs = [[arguments.tensor() for _ in range(arguments.size * len(inputs))] for _ in inputs]
    return verbs["all_gather_multigpu"](outputs, inputs, arguments.group, async_op=True)


def _objects(arguments: _NeutralArguments) -> object:
    call, sizes = arguments.call, arguments.sizes
    rounds = Rounds(call.verb, arguments.group, arguments.device)
    rounds.root = arguments.root
    takes, gives = arguments.exchanged() if sizes else ([], [])
    return run_unnested(call.verb, rounds.answer, call, sizes, gives, takes)


_ANSWERS: dict[str, Callable[[_NeutralArguments], object]] = {
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_multigpu": _all_gather_multigpu,
    "monitored_barrier": lambda arguments: skip_barrier(arguments.group),
    "shared_empty": lambda arguments: shared_empty(
        arguments.tensor().numel(), arguments.tensor().dtype, arguments.group
    ),
}
"""The verbs whose arguments are of another form."""

"""How each collective moves data between members that share a process.

Every function reads all it needs, then says what is to be written where; ``move`` writes. Results
are the same bits on every member, since all of them are given one and the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ...reduce_ops import ReduceKind, ReduceOp
from ..packing import Tensors, blocks
from ..reductions import reduced

__all__ = ["Round", "move", "synchronize", "write"]

Writes: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""A tensor of one member's, and what is to be written into it."""


@dataclass
class Round:
    """The members' parts in one collective, in group order.

    Args:
        inputs: what each member brings: one tensor, or one for each member, or a list.
        outputs: what each member's results are written into.
        op: the reduction, of verbs that reduce.
        root: the member that a rooted verb starts from or leads to.
    """

    inputs: Sequence[Tensors]
    outputs: Sequence[Tensors]
    op: ReduceKind = ReduceOp.SUM
    root: int = 0


def move(verb: str, round_: Round) -> None:
    """Do one collective: read everything, then write each member's results."""
    # Members may be in inference mode or not, and hold parameters: this mode writes to all.
    with torch.inference_mode():
        writes = _MOVES[verb](round_)
        written = {_memory_of(output) for output, _ in writes}
        ready = [
            (output, _kept(data, output, written).reshape(output.shape)) for output, data in writes
        ]
        for output, data in ready:
            output.copy_(data)
    for output, _ in ready:
        synchronize(output)


def write(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into ``tensor``, of any shape with as many elements."""
    with torch.inference_mode():
        tensor.copy_(data.reshape(tensor.shape))
    synchronize(tensor)


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the caller's stream, since the member that moves the data may use another."""
    if tensor.device.type in ("cuda", "xpu"):
        torch.accelerator.current_stream(tensor.device).synchronize()


# -- one function a verb ---------------------------------------------------------------------------


def _all_reduce(round_: Round) -> Writes:
    """Each tensor of the members' lists, reduced in group order, for everyone."""
    writes: Writes = []
    for place in range(len(round_.inputs[0])):
        total = _total(round_, place)
        writes += [(outputs[place], total) for outputs in round_.outputs]
    return writes


def _reduce(round_: Round) -> Writes:
    return [(round_.outputs[round_.root][0], _total(round_, 0))]


def _broadcast(round_: Round) -> Writes:
    (data,) = round_.inputs[round_.root]
    others = (member for member in range(len(round_.outputs)) if member != round_.root)
    return [(round_.outputs[member][0], data) for member in others]


def _scatter(round_: Round) -> Writes:
    inputs = round_.inputs[round_.root]
    return [(output, data) for (output,), data in zip(round_.outputs, inputs, strict=True)]


def _all_gather(round_: Round) -> Writes:
    parts = [data.reshape(-1) for (data,) in round_.inputs]
    whole = torch.cat([part.to(parts[0].device) for part in parts])
    return [(output, whole) for (output,) in round_.outputs]


def _gather(round_: Round) -> Writes:
    """Everyone's tensor, for each member that has outputs."""
    return [
        (output, data)
        for outputs in filter(None, round_.outputs)
        for output, (data,) in zip(outputs, round_.inputs, strict=True)
    ]


def _reduce_scatter(round_: Round) -> Writes:
    """Reduced as a whole, then cut."""
    mine = blocks(_total(round_, 0), len(round_.outputs))
    return [(output, block) for (output,), block in zip(round_.outputs, mine, strict=True)]


def _reduce_scatter_list(round_: Round) -> Writes:
    return [(output, _total(round_, member)) for member, (output,) in enumerate(round_.outputs)]


def _all_to_all(round_: Round) -> Writes:
    return [
        (output, inputs[member])
        for member, outputs in enumerate(round_.outputs)
        for output, inputs in zip(outputs, round_.inputs, strict=True)
    ]


_MOVES: dict[str, Callable[[Round], Writes]] = {
    "all_gather": _all_gather,
    "all_gather_list": _gather,
    "all_reduce": _all_reduce,
    "all_reduce_list": _all_reduce,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all,
    "barrier": lambda _: [],
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_list": _reduce_scatter_list,
    "scatter": _scatter,
}


def _total(round_: Round, place: int) -> torch.Tensor:
    """The reduction of the members' tensors at ``place``, flat."""
    return reduced([inputs[place].reshape(-1) for inputs in round_.inputs], round_.op)


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kept(data: torch.Tensor, output: torch.Tensor, written: set[int]) -> torch.Tensor:
    """``data``, copied where something else may be written over it before it is read."""
    is_own = data.data_ptr() == output.data_ptr()
    return data.clone() if not is_own and _memory_of(data) in written else data

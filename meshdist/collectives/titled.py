"""The verbs that plans use, each called under a title: the text of the plan that it is a step of.

Members whose titles differ raise the AgreementError of calls that differ, as if they had called
different verbs, and reports name the title. All else is as the verb of the same name says: a call
waits for its result, takes part in join contexts, and is shown by a profiler. Tensors are torch's
and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.profiler as profiler

from ..checking.nesting import run_unnested
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp
from ..wires.work import Work
from . import bodies
from .instruments import leave_untraced

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "reduce_scatter_tensor",
]


@leave_untraced
def all_reduce(
    tensor: torch.Tensor, group: ProcessGroup, title: str, *, async_op: bool = False
) -> Work | None:
    """Every member's tensor becomes the sum of all, in place."""
    given = (tensor, ReduceOp.SUM, group, async_op, title)
    return _run("all_reduce", bodies.all_reduce, given, group, title, tensor.nbytes)


@leave_untraced
def all_gather_into_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Every member's output holds all members' inputs, in group order, along dim 0."""
    name = "all_gather_into_tensor"
    given = (name, output, input, group, async_op, title)
    return _run(name, bodies.all_gather, given, group, title, output.nbytes + input.nbytes)


@leave_untraced
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Each member's output is its own block of the sum of all inputs."""
    name = "reduce_scatter_tensor"
    given = (name, output, input, ReduceOp.SUM, group, async_op, title)
    return _run(name, bodies.reduce_scatter, given, group, title, output.nbytes + input.nbytes)


@leave_untraced
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Each member's output holds, along dim 0, what every member's input has for it."""
    name = "all_to_all_single"
    given = (output, input, output_split_sizes, input_split_sizes, group, async_op, title)
    num_bytes = output.nbytes + input.nbytes
    return _run(name, bodies.all_to_all_single, given, group, title, num_bytes)


@leave_untraced
def all_to_all(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Each member's j-th output is what member j holds for it."""
    given = (outputs, inputs, group, async_op, title)
    num_bytes = sum(one.nbytes for one in (*outputs, *inputs))
    return _run("all_to_all", bodies.all_to_all, given, group, title, num_bytes)


def _run(
    verb: str,
    body: Callable[..., Work | None],
    given: Sequence[Any],
    group: ProcessGroup,
    title: str,
    num_bytes: int,
) -> Work | None:
    if not profiler._is_profiler_enabled:
        return run_unnested(verb, body, *given)
    with profiler.record_function(f"meshdist::{verb} of {title} {group.name} {num_bytes} bytes"):
        return run_unnested(verb, body, *given)

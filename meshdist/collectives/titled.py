"""Verbs under a title: the plan that a call is a step of, or the verb of lax and its leaf.

Members whose titles differ raise the AgreementError of calls that differ, as if they had called
different verbs, and reports name the title. All else is as the verb of the same name says: a call
waits for its result, takes the fast path where it can, takes part in join contexts, and is shown by
a profiler. Tensors are torch's and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.autograd.profiler as profiler

from ..checking.program import run_unnested
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceKind, ReduceOp
from ..runtime.untraced import leave_untraced
from ..wires.work import Work
from . import bodies
from .instruments import recorded

__all__ = [
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "lax_title",
    "reduce_scatter_tensor",
]

_SUM = ReduceOp.SUM


@lru_cache(maxsize=4096)  # the native core knows a title by its address, too
def lax_title(verb: str, leaf: str, shape: torch.Size) -> str:
    """The title of a verb of lax: the verb, the leaf that it is called on, the leaf's shape."""
    return f"lax.{verb}({tuple(shape)} at {leaf})"


@leave_untraced
def all_reduce(
    tensor: torch.Tensor,
    group: ProcessGroup,
    title: str,
    op: ReduceKind = _SUM,
    *,
    async_op: bool = False,
) -> Work | None:
    """Every member's tensor becomes the reduction of all, in place."""
    path = _fast_path(group, async_op) if op is _SUM else None
    if path is not None and path.all_reduce(tensor, title) is not False:
        return None
    given = (tensor, op, group, async_op, title)
    return _run("all_reduce", bodies.all_reduce, given, group, title, [tensor])


@leave_untraced
def broadcast(
    tensor: torch.Tensor, root: int, group: ProcessGroup, title: str, *, async_op: bool = False
) -> Work | None:
    """Every member's tensor becomes that of member ``root``, in place."""
    path = _fast_path(group, async_op)
    if path is not None and path.broadcast(tensor, root, title) is not False:
        return None
    given = (tensor, root, group, async_op, title)
    return _run("broadcast", bodies.broadcast, given, group, title, [tensor])


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
    path, name = _fast_path(group, async_op), "all_gather_into_tensor"
    if path is not None and path.all_gather_into_tensor(output, input, title) is not False:
        return None
    given = (name, output, input, group, async_op, title)
    return _run(name, bodies.all_gather, given, group, title, [output, input])


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
    path, name = _fast_path(group, async_op), "reduce_scatter_tensor"
    if path is not None and path.reduce_scatter_tensor(output, input, _SUM, title) is not False:
        return None
    given = (name, output, input, _SUM, group, async_op, title)
    return _run(name, bodies.reduce_scatter, given, group, title, [output, input])


@leave_untraced
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Each member's output holds, along dim 0, what every member's input has for it."""
    path, sizes = _fast_path(group, async_op), (output_split_sizes, input_split_sizes)
    if path is not None and path.all_to_all_single(output, input, *sizes, title) is not False:
        return None
    given, tensors = (output, input, *sizes, group, async_op, title), [output, input]
    return _run("all_to_all_single", bodies.all_to_all_single, given, group, title, tensors)


@leave_untraced
def all_to_all(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: ProcessGroup,
    title: str,
    *,
    async_op: bool = False,
) -> Work | None:
    """Each member's j-th output is what member j holds for it."""
    path = _fast_path(group, async_op)
    if path is not None and path.all_to_all(outputs, inputs, title) is not False:
        return None
    given = (outputs, inputs, group, async_op, title)
    return _run("all_to_all", bodies.all_to_all, given, group, title, [*outputs, *inputs])


def _fast_path(group: ProcessGroup, async_op: bool) -> Any:
    """The group's fast path, for a blocking call that no profiler watches; else None."""
    return None if async_op or profiler._is_profiler_enabled else group.fast_path


def _run(
    verb: str,
    body: Callable[..., Work | None],
    given: Sequence[Any],
    group: ProcessGroup,
    title: str,
    tensors: Sequence[torch.Tensor],
) -> Work | None:
    if not profiler._is_profiler_enabled:
        return run_unnested(verb, body, *given)
    num_bytes = sum(one.nbytes for one in tensors)
    with recorded(f"meshdist::{verb} of {title} {group.name} {num_bytes} bytes"):
        return run_unnested(verb, body, *given)

"""Find the axes over which an operand's gradient stays a partial sum that is summed later.

DDP and ``md.annotate(w, reduced=...)`` annotate single tensors. Outside ``md.typed``, ``w.T``,
``w.bfloat16()`` and ``torch.cat([q, k, v])`` of DDP's parameters have no annotation. If einsum
summed their gradients before DDP averages, the parameters' gradients would be too large by the
number of ranks. If DDP averages along an axis that the text leaves out, einsum therefore searches
the operand's graph down to its leaves. A meshdist collective along the axis ends the search, since
its result is not a parameter in another form.

Worked example: on 2 ranks along dp, over which a wrapper averages the gradients of w and v.

    operand           graph, down to the leaves    its gradient over dp
    w.T               T: w                         a partial sum, as w's is
    w + v @ u.T       add: w, mm: v, T: u          rejected: DDP does not average leaf u
    x @ w             mm: w                        not asked for: "b@dp d" is cut there
    psum(x @ w)       psum                         summed, as for any other operand

    >>> w, v = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    >>> [node.name().rpartition(":")[2] for node in _nodes_above(w + v @ v)]
    ['AddBackward0', 'MmBackward0', 'AccumulateGrad', 'AccumulateGrad']
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..annotations.axis_types import annotation_of, axes_of_kind, type_of
from ..error_text import first_texts, ranks_text
from ..errors import AxisTypeError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.pattern import parse
from ..typed_mode.type_errors import tensor_text
from .resharding import Transfer

_PACKAGE = __name__.partition(".")[0]


def axes_of_marks(x: torch.Tensor, mesh: DeviceMesh, where: str) -> set[str]:
    """Return axes over which ``x`` is reduced or averaged; raise if ranks fit none."""
    marked = {axis for axis in axes_of_kind(type_of(x), "R") if axis in mesh.axis_names}
    owners = annotation_of(x).owner_ranks
    together = {*owners} & {*mesh.layout.ranks().ravel().tolist()}
    if len(together) > 1:
        ranks_along = {axis: mesh.get_group(axis).ranks for axis in mesh.axis_names}
        owned = [
            axis for axis, ranks in ranks_along.items() if len(ranks) > 1 and together >= {*ranks}
        ]
        if math.prod(len(ranks_along[axis]) for axis in owned) != len(together):
            raise AxisTypeError(
                "einsum of a parameter whose wrapper averages over ranks that form no axes of the "
                "einsum's mesh",
                where=where,
                expected=f"ranks along axes of {mesh!r}",
                found=f"gradients are averaged over {ranks_text(owners)}",
                fix="wrap with an axis, DDP(module, device_mesh=mesh['dp']), and pass einsum the "
                "mesh that has the axis",
            )
        marked.update(owned)
    return marked


def axes_of_leaves(
    text: str, operands: Sequence[torch.Tensor], mesh: DeviceMesh
) -> tuple[tuple[str, ...], ...]:
    """Return, by operand, the axes over which all leaves are annotated.

    Raises:
        AxisTypeError: only some leaves of an operand are annotated.
    """
    averaged = mesh.world.averaged
    found = []
    for number, (x, side) in enumerate(zip(operands, parse(text).operands, strict=True)):
        ranks_along = {}
        if x.requires_grad and not x.is_leaf:
            free = [axis for axis in mesh.axis_names if axis not in side.axes]
            ranks_along = {axis: {*mesh.get_group(axis).ranks} for axis in free}
        asked = {
            axis: ranks
            for axis, ranks in ranks_along.items()
            if any(len(it & ranks) > 1 for it in averaged)
        }
        where = f"operand {number} of einsum {text!r}"
        found.append(_axes_of_leaves(x, asked, mesh, where) if asked else ())
    return tuple(found)


def _axes_of_leaves(
    x: torch.Tensor, ranks_along: Mapping[str, Collection[int]], mesh: DeviceMesh, where: str
) -> tuple[str, ...]:
    """Return the axes over which all leaves of ``x`` are annotated; raise if only some are.

    Args:
        ranks_along: the ranks along each candidate axis.
    """
    asked = dict(ranks_along)
    leaves = []
    for node in _nodes_above(x):
        asked = {axis: ranks for axis, ranks in asked.items() if not _moves_among(node, ranks)}
        if not asked:
            return ()
        if hasattr(node, "variable"):
            leaves.append((node.variable, axes_of_marks(node.variable, mesh, where)))
    found = []
    for axis in asked:
        marked = [leaf for leaf, axes in leaves if axis in axes]
        others = [leaf for leaf, axes in leaves if axis not in axes]
        if marked and others:
            raise _mixed(axis, marked, others, where)
        if marked:
            found.append(axis)
    return tuple(found)


def _nodes_above(x: torch.Tensor) -> Iterator[Any]:
    """Yield each node of ``x``'s autograd graph once."""
    open_nodes: list[Any] = [x.grad_fn]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            open_nodes += [up for up, _ in node.next_functions]


def _moves_among(node: Any, ranks: Collection[int]) -> bool:
    """Return whether an autograd node is a meshdist collective that moves data among ``ranks``."""
    function = getattr(type(node), "_forward_cls", None)
    if function is None or function.__module__.partition(".")[0] != _PACKAGE:
        return False
    rest = getattr(node, "rest", ())
    return not (rest and isinstance(rest[0], Transfer)) or rest[0].moves_among(ranks)


def _mixed(
    axis: str, marked: Sequence[torch.Tensor], others: Sequence[torch.Tensor], where: str
) -> AxisTypeError:
    texts = [f"{tensor_text(leaf)}, averaged over {axis!r}" for leaf in marked[:1]]
    texts += [f"{tensor_text(leaf)}, not averaged there" for leaf in others]
    return AxisTypeError(
        f"einsum of a tensor that mixes parameters that a wrapper averages over axis {axis!r} with "
        "leaves that it does not average",
        where=where,
        expected="leaves of one kind, since either the wrapper or einsum sums the operand's "
        "gradient",
        found=first_texts(texts),
        fix="put all of them into the wrapped module, or call einsum once for each of them",
    )

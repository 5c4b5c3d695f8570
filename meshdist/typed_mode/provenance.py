"""Track the operation and the leaf that made a value vary over an axis.

Until a mesh's first typed backward begins, each autograd node gets a note of its operation. If the
loss varies, the error follows the notes. An example over 'tp' in which the psum after ``down`` is
missing:

    norm(x)  ->  up(x)       ->  gelu(h)     ->  down(h)      ->  x + y        ->  loss
    {V:dp}       {V:dp,tp}       {V:dp,tp}       {V:dp,tp}        {V:dp,tp}        {V:dp,tp}
                 up.weight                       down.weight

The walk ends at results that do not vary over 'tp', such as ``norm`` and every psum. ``up`` is the
first operation that joined the axis, and ``down`` the last operation with a varying leaf: after it,
ranks hold partial sums.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..annotations.axis_types import axes_of_kind, shown, type_of
from ..checking.call_sites import Site, program_frame, show_site
from ..errors import AxisTypeError
from ..mesh.device_mesh import DeviceMesh
from .function_rules import LINEARITY, tensors_in
from .type_errors import axes_argument, name_of, tensor_text, where

_NOTE = "meshdist: where types joined"
"""The key of a note in the metadata of a node of autograd."""


@dataclass(frozen=True)
class _Operand:
    """A varying parameter or data: an operand without a gradient history."""

    tensor: weakref.ref[torch.Tensor]
    axes: tuple[str, ...]
    is_trained: bool
    text: str

    def __str__(self) -> str:
        tensor = self.tensor()
        name = "" if tensor is None else name_of(tensor, "")
        return f"{name}: {self.text}" if name else self.text


@dataclass(frozen=True)
class _MakingOperation:
    """The operation that created a value, and the value's varying axes.

    Args:
        leaves: its varying leaf operands, also through functions of parameters alone.
        is_of_leaves: whether all operands are parameters, as in ``weight.T``.
    """

    number: int
    name: str
    axes: tuple[str, ...]
    leaves: tuple[_Operand, ...]
    is_of_leaves: bool
    site: Site

    def __str__(self) -> str:
        return f"{self.name} at {show_site(self.site)}"

    def leaves_over(self, axis: str) -> list[_Operand]:
        return [leaf for leaf in self.leaves if axis in leaf.axes]


class Notes:
    """The notes of a mesh's contexts."""

    are_recorded = True
    count = 0

    def add(self, result: Any, name: str, operands: Any) -> None:
        """Record the operation on the autograd nodes of its results."""
        for made in tensors_in(result):
            # If the node has a note, the operation has returned an operand.
            node: Any = made.grad_fn
            if node is not None and _NOTE not in node.metadata:
                leaves, is_of_leaves = _leaves(tensors_in(operands))
                if LINEARITY.get(name) == "add" and not is_of_leaves:
                    # In loss + penalty(shard), the psum belongs after penalty, not after this sum.
                    leaves = [leaf for leaf in leaves if not leaf.is_trained]
                frame = program_frame(sys._getframe())
                node.metadata[_NOTE] = _MakingOperation(
                    self.count,
                    name,
                    axes_of_kind(type_of(made), "V"),
                    tuple(leaves),
                    is_of_leaves,
                    (frame.f_code.co_filename, frame.f_lineno),
                )
                self.count += 1


def _leaves(operands: Sequence[torch.Tensor]) -> tuple[list[_Operand], bool]:
    """Return varying leaves of operands, and whether all operands derive from parameters."""
    leaves: list[_Operand] = []
    is_of_leaves = bool(operands)
    for operand in operands:
        below: Any = operand.grad_fn
        if below is None:
            axes = axes_of_kind(type_of(operand), "V")
            text, is_trained = tensor_text(operand), operand.requires_grad
            if axes:
                leaves.append(_Operand(weakref.ref(operand), axes, is_trained, text))
            is_of_leaves &= is_trained
        elif _NOTE in below.metadata and below.metadata[_NOTE].is_of_leaves:
            leaves += below.metadata[_NOTE].leaves
        else:
            is_of_leaves = False
    return leaves, is_of_leaves


def _find_joins(loss: torch.Tensor, axis: str) -> list[_MakingOperation]:
    """Return the recorded operations that made ``loss`` vary over ``axis``, in call order."""
    open_nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    found: list[_MakingOperation] = []
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        note: _MakingOperation | None = node.metadata.get(_NOTE)
        if note is not None:
            if axis not in note.axes:
                continue
            found.append(note)
        open_nodes.extend(below for below, _ in node.next_functions)
    return sorted(found, key=lambda note: note.number)


def varying_loss(
    loss: torch.Tensor, axes: Sequence[str], mesh: DeviceMesh, operation: str, *, is_noted: bool
) -> AxisTypeError:
    """Return the error of a varying loss, with operations if recorded."""
    mesh.caches.of(Notes).are_recorded = True  # The next context takes notes.
    # If data vary over the axis, the fix is a mean of the loss. If parameters vary, a mean would
    # train another model: a psum is missing after the last varying parameter.
    found, fixes, means = [f"loss: {tensor_text(loss)}"], [], []
    for axis in axes:
        joins = _find_joins(loss, axis) if is_noted else []
        with_leaves = [join for join in joins if join.leaves_over(axis)]
        bringing = [join for join in with_leaves if not join.is_of_leaves] or with_leaves or joins
        of = {leaf.is_trained for join in bringing for leaf in join.leaves_over(axis)}
        if joins:
            first, last = bringing[0], bringing[-1]
            by = ", through " * bool(of) + " and ".join(map(str, first.leaves_over(axis)))
            found.append(f"varies over {axis!r} since {first}{by}")
        if not joins or of == {False}:
            means.append(axis)
            continue
        if last is not first and of:
            leaves = " and ".join(map(str, last.leaves_over(axis)))
            found.append(f"last leaf that varies over {axis!r}, used in {last}: {leaves}")
        fixes.append(
            f"sum the result of {last}, of which each rank along {axis!r} holds a part: "
            f"y = lax.psum(y, {axis!r})"
        )
        if False in of:
            fixes.append(
                f"or, if the batch differs along {axis!r}, average the loss: "
                f"loss = lax.pmean(loss, {axis!r})"
            )
    if means:
        unknown = "" if len(found) > 1 else "if the batch varies, "
        fixes.append(
            f"{unknown}reduce the loss over the ranks: "
            f"loss = lax.pmean(loss, {axes_argument(means)}), or lax.psum; or differentiate each "
            "rank's own loss: pass torch.ones_like(loss) as its gradient"
        )
    if not is_noted:
        fixes.append(
            "if parameters vary, a lax.psum is missing after them: run the step again to make this "
            "error show where"
        )
    return AxisTypeError(
        f"{operation} cannot start from a loss that varies over {shown(axes)}",
        where=where(mesh, axes),
        expected="one loss that is equal on all ranks",
        found="\n".join(found),
        fix="\n".join(fixes),
    )

"""Compare values that are typed as invariant between ranks, at debug level DETAIL.

Types cannot detect wrong annotations, or Python numbers that differ between ranks. So cast
operands, losses, and gradients of leaves are compared.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..annotations.axis_types import kinds_in, type_of
from ..checking.debug_levels import DebugLevel, get_debug_level
from ..functional.equality_checks import check_invariant
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from .type_errors import axes_argument, tensor_text, where


def is_checked() -> bool:
    """Return whether the debug level is DETAIL."""
    return get_debug_level() == DebugLevel.DETAIL


def check_cast(x: torch.Tensor, group: ProcessGroup, mesh: DeviceMesh) -> None:
    """Raise GradientError unless all ranks of ``group`` hold equal values of ``x``; collective."""
    check_invariant(
        x.detach(),
        group,
        f"an operand of type {tensor_text(x)}, used with varying operands,",
        where=where(mesh),
        expected="equal values, as its type says",
        fix=lambda differing: (
            "annotate it after you create or load it: "
            f"md.annotate(x, varying={_differing_axes(mesh, group, differing)})"
        ),
    )


def check_loss(loss: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise GradientError unless ``loss`` is equal along its invariant axes; collective."""
    group = _invariant_group(type_of(loss), mesh)
    if group is not None:
        check_invariant(
            loss.detach(),
            group,
            f"a loss of type {tensor_text(loss)}",
            where=where(mesh),
            expected="equal values, as its type says",
            fix="annotate the data that differ between ranks, and convert Python numbers that "
            "differ to annotated tensors",
        )


def check_gradient_of(
    leaf: torch.Tensor, grad: torch.Tensor | None, text: str, mesh: DeviceMesh
) -> None:
    """Raise unless ``grad`` is equal along the invariant axes of ``text``; collective."""
    group = _invariant_group(text, mesh)
    if group is None:
        return
    # A flag after the values distinguishes None from a gradient of zeros.
    dense = torch.zeros_like(leaf) if grad is None else grad.detach().to_dense()
    is_there = dense.new_full((1,), grad is not None)
    check_invariant(
        torch.cat([dense.reshape(-1), is_there]),
        group,
        f"the gradient of a leaf of type {tensor_text(leaf)}",
        where=where(mesh),
        expected="equal gradients, because the leaf is invariant along these axes",
        fix=lambda differing: (
            "annotate the data that differ between ranks: "
            f"md.annotate(x, varying={_differing_axes(mesh, group, differing)})"
        ),
    )


def _differing_axes(mesh: DeviceMesh, group: ProcessGroup, differing: Collection[int]) -> str:
    """Return the axes along which ``differing`` ranks differ from the first, as an argument."""
    # If ranks 2 and 3 of (dp=2, tp=2) differ from rank 0, the axis is 'dp', the only axis along
    # which rank 2 differs.
    first, *others = (
        mesh.layout.coordinate_of(rank) or () for rank in (group.ranks[0], *differing)
    )
    differences = [
        [axis for axis, a, b in zip(mesh.axis_names, first, other, strict=True) if a != b]
        for other in others
    ]
    named = {
        axis for axes in differences if len(axes) == min(map(len, differences)) for axis in axes
    }
    return axes_argument([axis for axis in mesh.axis_names if axis in named])


def _invariant_group(text: str, mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group along the invariant axes of ``text``, or None."""
    kinds = kinds_in(text)
    axes = tuple(axis for axis in mesh.axis_names if axis not in kinds)
    return resolve_group(mesh[axes]) if axes else None

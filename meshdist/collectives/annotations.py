"""``md.annotate`` and ``md.typeof``: what a tensor is over mesh axes, said and asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import AxisError, AxisTypeError, KindError
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from .axis_types import ATTRIBUTE, axes_of_kind, type_text
from .contexts import PLAIN_TENSORS
from .type_errors import mesh_text, of_a_subclass, tensor_text, type_of

__all__ = ["TensorType", "annotate", "typeof"]

_Axes = str | tuple[str, ...]


def annotate(
    tensor: torch.Tensor,
    *,
    varying: _Axes = (),
    reduced: _Axes = (),
    unreduced: _Axes = (),
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Say of which kind ``tensor`` is over mesh axes: where data enter, or a shard of weights.

    It is invariant over every axis that is not named. What was said before is overwritten. Nothing
    is sent, copied or checked; it works outside ``md.typed`` as well.

    Args:
        tensor: this rank's; a plain tensor or parameter.
        varying: the axes along which ranks hold their own values.
        reduced: the axes along which it is equal on all ranks, and its gradient a summand on each.
        unreduced: the axes along which each rank holds a summand of the value.
        mesh: has the axes; None takes the mesh in force, and checks no names where there is none.

    Returns:
        ``tensor`` itself.

    Raises:
        KindError: no tensor, a subclass, or an axis that is no name.
        AxisError: the mesh has no such axis.
        AxisTypeError: an axis is named under two kinds.

    Example:
        >>> import torch, meshdist as md
        >>> batch = md.annotate(torch.zeros(8, 4), varying="dp")
        >>> md.typeof(batch)
        float32[8, 4]{V:dp}
    """
    if not isinstance(tensor, torch.Tensor):
        raise KindError(
            "annotate takes a tensor",
            found=f"a {type(tensor).__name__}",
            fix="annotate each tensor of a nesting by itself",
        )
    if type(tensor) not in PLAIN_TENSORS:
        raise of_a_subclass(tensor, "annotate")
    kinds: dict[str, str] = {}
    given = {"varying": ("V", varying), "reduced": ("R", reduced), "unreduced": ("U", unreduced)}
    mesh = mesh or find_current_mesh()
    for argument, (kind, axes) in given.items():
        for axis in _names(axes, argument):
            if mesh is not None and axis not in mesh.axis_names:
                raise AxisError(
                    f"annotate: axis {axis!r} is not in the mesh",
                    where=mesh_text(mesh),
                    expected=f"some of {', '.join(map(repr, mesh.axis_names))}",
                    found=f"{argument}={axes!r}",
                )
            if kinds.setdefault(axis, kind) != kind:
                raise AxisTypeError(
                    f"annotate: a value is of one kind over axis {axis!r}",
                    found=f"varying={varying!r}, reduced={reduced!r}, unreduced={unreduced!r}",
                    fix="name the axis once",
                )
    tensor.__dict__[ATTRIBUTE] = type_text(kinds)
    return tensor


def _names(axes: object, argument: str) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(one, str) and one.isidentifier() for one in names
    ):
        raise KindError(
            f"annotate cannot take {axes!r} as {argument}",
            expected="the name of an axis, or a tuple of names",
        )
    return tuple(names)


@dataclass(frozen=True)
class TensorType:
    """What a tensor is: shape, dtype, and its kind over mesh axes.

    Args:
        shape: of this rank's tensor.
        dtype: its dtype.
        varying, reduced, unreduced: the axes over which it is so, sorted; it is invariant over
            all others.
        text: the whole, as it is printed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[str, ...]
    reduced: tuple[str, ...]
    unreduced: tuple[str, ...]
    text: str

    def __repr__(self) -> str:
        return self.text


def typeof(x: torch.Tensor) -> TensorType:
    """What ``x`` is over mesh axes; prints as ``float32[8, 4]{V:dp}``, ``float32[8, 4]`` where it
    is invariant.

    Args:
        x: a tensor. Outside a context, one made from annotated tensors has no type of its own, and
            counts as invariant.

    Raises:
        KindError: no tensor.

    Example:
        >>> import torch, meshdist as md
        >>> md.typeof(md.annotate(torch.zeros(3), varying=("dp", "tp"), unreduced="ep")).varying
        ('dp', 'tp')
    """
    if not isinstance(x, torch.Tensor):
        raise KindError("typeof takes a tensor", found=f"a {type(x).__name__}")
    text = type_of(x)
    return TensorType(
        tuple(x.shape),
        x.dtype,
        varying=axes_of_kind(text, "V"),
        reduced=axes_of_kind(text, "R"),
        unreduced=axes_of_kind(text, "U"),
        text=tensor_text(x),
    )

"""``md.annotate`` and ``md.typeof`` set and return a tensor's type over mesh axes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import nn

from ..annotations.axis_types import (
    axes_of_kind,
    find_owner_axes,
    set_spec,
    shown,
    type_of,
    type_text,
    with_kinds,
)
from ..annotations.tensor_specs import (
    checked_spec,
    dims_text,
    find_spec,
    layout_of,
    mark_spec,
    spec_texts,
)
from ..errors import AxisError, AxisTypeError, KindError
from ..mesh.current_mesh import find_current_mesh, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout_arguments import no_axis
from ..mesh.partition_spec import PartitionSpec
from ..mesh.spec import NamedSharding
from .context import PLAIN_TENSORS
from .module_annotations import annotate_module
from .type_errors import mesh_text, of_a_subclass, tensor_text, type_as_text

__all__ = ["annotate", "typeof"]

M = TypeVar("M", bound=nn.Module)
Spec: TypeAlias = PartitionSpec | NamedSharding | str


@overload
def annotate(tensor: M, spec: Mapping[str, Spec], *, mesh: DeviceMesh | None = None) -> M: ...
@overload
def annotate(
    tensor: torch.Tensor,
    spec: Spec | None = None,
    *,
    varying: str | tuple[str, ...] = (),
    reduced: str | tuple[str, ...] = (),
    unreduced: str | tuple[str, ...] = (),
    mesh: DeviceMesh | None = None,
) -> torch.Tensor: ...
def annotate(
    tensor: Any,
    spec: Any = None,
    *,
    varying: str | tuple[str, ...] = (),
    reduced: str | tuple[str, ...] = (),
    unreduced: str | tuple[str, ...] = (),
    mesh: DeviceMesh | None = None,
) -> Any:
    """Set the kinds of ``tensor`` over mesh axes: where data enter, or on a shard of weights.

    It is invariant over every axis that is not named. An earlier annotation is overwritten. Nothing
    is sent or copied, and values are not checked; it works outside ``md.typed`` as well.

    Of a module each parameter and buffer that ``spec`` names is annotated, once all is checked.
    The module notes their marks too, and is copied and pickled with them: tensors that take the
    place of its own, by ``copy.deepcopy``, ``load_state_dict(assign=True)`` or ``to_empty``, have
    them at once.

    Args:
        tensor: this rank's; a plain tensor or parameter, or a module.
        spec: in place of the kinds: where the tensor lies, as a ``PartitionSpec``, a
            ``NamedSharding`` or a pattern such as "f@tp d {R:dp}". It is varying over the axes
            that cut a dim, and carries the spec, which ``md.typeof`` shows. Of a module a mapping
            from names, in which ``*`` stands for any text, to such specs.
        varying: the axes along which ranks hold their own values.
        reduced: the axes along which it is equal on all ranks, and its gradient a partial sum on
            each.
        unreduced: the axes along which each rank holds a partial sum of the value.
        mesh: has the axes; None takes the sharding's, or the mesh in force, and checks no names
            where there is none.

    Returns:
        ``tensor`` itself.

    Raises:
        KindError: no tensor, a subclass, an axis that is no name, or a spec beside kinds.
        AxisError: the mesh has no such axis.
        AxisTypeError: an axis is named under two kinds, or the module is wrapped already, or the
            parameter is, by a wrapper that does not reduce it over an axis that is named so.
        PatternError: a text that is no pattern of one array, or names a whole dim as an axis of
            the mesh ("tp" where "f@tp" or ``varying="tp"`` is meant).
        ShapeError: a spec or a pattern for another number of dims.
        DtypeError: booleans whose spec is unreduced.
        MeshError: the sharding is of another mesh.
        ArgumentError: a name that fits no tensor of the module, two that fit the same, or two
            specs for a tensor that has several names.

    Example:
        >>> import torch, meshdist as md
        >>> batch = md.annotate(torch.zeros(8, 4), varying="dp")
        >>> md.typeof(batch)
        float32[8, 4]{V:dp}
        >>> md.typeof(md.annotate(torch.zeros(8, 4), "f@tp d {R:dp}"))
        float32[8@tp, 4]{R:dp}
        >>> layer = md.annotate(torch.nn.Linear(4, 8), {"weight": "f@tp d", "bi*": "f@tp"})
        >>> md.typeof(layer.bias)
        float32[8@tp]
    """
    if not isinstance(tensor, (torch.Tensor, nn.Module)):
        raise KindError(
            "annotate takes a tensor or a module",
            found=f"a {type(tensor).__name__}",
            fix="annotate each tensor of a nested structure separately",
        )
    if (varying or reduced or unreduced) and (spec is not None or isinstance(tensor, nn.Module)):
        raise KindError(
            "annotate takes either a spec or varying=, reduced= and unreduced=, not both"
            if spec is not None
            else "annotate cannot take varying=, reduced= or unreduced= for a module",
            found=f"{spec!r} with varying={varying!r}, reduced={reduced!r}, "
            f"unreduced={unreduced!r}",
            fix='write all axes in the spec, such as "b@dp d {R:tp}"',
        )
    if isinstance(tensor, nn.Module):
        return annotate_module(tensor, spec, mesh)
    if type(tensor) not in PLAIN_TENSORS:
        raise of_a_subclass(tensor, "annotate")
    if spec is not None:
        try:
            checked = checked_spec(tensor, spec, layout_of(spec, mesh), "annotate")
        except AxisError as error:
            raise with_hidden_mesh(error, mesh) from None
        _reject_late(tensor, spec_texts(checked, tuple(tensor.shape))[0])
        return mark_spec(tensor, checked)
    kinds: dict[str, str] = {}
    given = {"varying": ("V", varying), "reduced": ("R", reduced), "unreduced": ("U", unreduced)}
    given_mesh, mesh = mesh, mesh or find_current_mesh()
    for argument, (kind, axes) in given.items():
        for axis in _names(axes, argument):
            if mesh is not None and axis not in mesh.axis_names:
                where = f"annotate(x, {argument}={axes!r}) on {mesh_text(mesh)}"
                raise with_hidden_mesh(no_axis(axis, mesh.axis_names, where), given_mesh)
            if kinds.setdefault(axis, kind) != kind:
                raise AxisTypeError(
                    f"annotate cannot give a tensor two types over axis {axis!r}",
                    found=f"varying={varying!r}, reduced={reduced!r}, unreduced={unreduced!r}",
                    fix="name the axis in one argument only",
                )
    _reject_late(tensor, type_text(kinds))
    set_spec(tensor, type_text(kinds), None)
    return tensor


def _reject_late(tensor: torch.Tensor, text: str) -> None:
    """Raise if ``text`` marks a wrapper's parameter reduced over axes unknown to the wrapper."""
    owned = find_owner_axes(tensor) or ()
    late = [axis for axis in axes_of_kind(text, "R") if axis not in owned]
    if owned and late:
        raise AxisTypeError(
            f"annotate cannot make a wrapped parameter reduced over {shown(late)}",
            expected="an annotation before the model is wrapped; the wrapper reduces over "
            f"{shown(owned)}",
            found=tensor_text(tensor),
            fix="annotate the parameter first, then wrap the model",
        )


def _names(axes: object, argument: str) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(name, str) and name.isidentifier() for name in names
    ):
        raise KindError(
            f"annotate cannot take {axes!r} as {argument}",
            expected="the name of an axis, or a tuple of names",
            fix=f"pass for example {argument}='dp' or {argument}=('dp', 'tp')",
        )
    return tuple(names)


@dataclass(frozen=True)
class TensorType:
    """A tensor's shape, dtype, and kind over mesh axes.

    Args:
        shape: of this rank's tensor.
        varying, reduced, unreduced: the axes over which it is so, sorted; it is invariant over
            all others.
        spec: the spec that the tensor carries, or None.
        text: the whole, as it is printed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[str, ...]
    reduced: tuple[str, ...]
    unreduced: tuple[str, ...]
    spec: PartitionSpec | None
    text: str

    def __repr__(self) -> str:
        return self.text


def typeof(x: torch.Tensor) -> TensorType:
    """Return the type of ``x`` over mesh axes, which prints as ``float32[8, 4]{V:dp}``.

    An invariant tensor's prints as ``float32[8, 4]``. With a spec, dims show the axes that cut
    them: ``float32[8@dp, 4]{U:tp}``; sizes are those of this rank's shard.

    Args:
        x: a tensor. A tensor made outside a context from annotated tensors has no type of its own,
            and counts as invariant.

    Raises:
        KindError: no tensor.

    Example:
        >>> import torch, meshdist as md
        >>> md.typeof(md.annotate(torch.zeros(3), varying=("dp", "tp"), unreduced="ep")).varying
        ('dp', 'tp')
    """
    if not isinstance(x, torch.Tensor):
        raise KindError("typeof takes a tensor", found=f"a {type(x).__name__}")
    text, spec = type_of(x), find_spec(x)
    shown = tensor_text(x)
    if spec is not None:
        apart = with_kinds(text, dict.fromkeys(axes_of_kind(text, "V"), "I"))
        shown = type_as_text(x.dtype, dims_text(tuple(x.shape), spec), apart)
    return TensorType(
        tuple(x.shape),
        x.dtype,
        varying=axes_of_kind(text, "V"),
        reduced=axes_of_kind(text, "R"),
        unreduced=axes_of_kind(text, "U"),
        spec=spec,
        text=shown,
    )

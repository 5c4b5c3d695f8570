"""Set and return a tensor's type over mesh axes."""

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
from ..arguments import mesh_kind_error
from ..error_text import with_article
from ..errors import AxisError, AxisTypeError, KindError
from ..mesh.current_mesh import find_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout_arguments import no_axis
from ..mesh.partition_spec import PartitionSpec, axes_of
from ..mesh.spec import NamedSharding
from .context import PLAIN_TENSORS
from .module_annotations import annotate_module
from .step_checks import watch_steps
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
    """Annotate ``tensor`` with its type over mesh axes: input data, or a shard of weights.

    The tensor is invariant over every axis that you do not name. The call replaces an earlier
    annotation, sends and copies nothing, and does not check values. It also works outside
    ``md.typed``.

    For a module, annotate each parameter and buffer that ``spec`` names. The module keeps these
    annotations when it is copied or pickled, and applies them to replacement tensors, for example
    of ``load_state_dict(assign=True)`` or ``to_empty``.

    Args:
        tensor: this rank's plain tensor or parameter, or a module.
        spec: how the tensor is sharded: a ``PartitionSpec``, a ``NamedSharding`` or a pattern such
            as "f@tp d {R:dp}". The tensor varies over the axes that shard a dimension, and carries
            the spec, which ``md.typeof`` shows. For a module, a mapping from names to specs; ``*``
            in a name matches any text. Replaces ``varying``, ``reduced`` and ``unreduced``.
        varying: the axes along which each rank holds its own values.
        reduced: the axes along which the tensor is equal on all ranks and its gradient is a partial
            sum.
        unreduced: the axes along which each rank holds a partial sum of the value.
        mesh: the mesh of these axes. None means the sharding's mesh, or the current mesh; without
            either, axis names are not checked.

    Returns:
        ``tensor`` itself.

    Raises:
        KindError: if ``tensor`` is neither a plain tensor nor a module, an axis is not a name, or a
            spec is combined with other axes.
        AxisError: if the mesh has no such axis.
        AxisTypeError: if an axis has two types, the module is wrapped already, or a wrapper does
            not reduce the parameter over an axis in ``reduced``.
        PatternError: if the pattern is invalid, or names a dimension like an axis ("tp" instead of
            "f@tp" or ``varying="tp"``).
        ShapeError: if the spec has the wrong number of dimensions.
        DtypeError: if a bool tensor is unreduced.
        MeshError: if the sharding has another mesh.
        ArgumentError: if a name matches no tensor of the module, two names match the same tensor,
            or a tensor with several names has two specs.

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
            found=with_article(type(tensor).__name__),
            fix="annotate each tensor of a nested structure separately",
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error("annotate takes a mesh", mesh)
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
            raise with_outer_mesh_hint(error, mesh) from None
        _reject_late(tensor, spec_texts(checked, tuple(tensor.shape))[0])
        mark_spec(tensor, checked)
        watch_steps([tensor], mesh)
        return tensor
    kinds: dict[str, str] = {}
    given = {"varying": ("V", varying), "reduced": ("R", reduced), "unreduced": ("U", unreduced)}
    given_mesh, mesh = mesh, mesh or find_current_mesh()
    for argument, (kind, axes) in given.items():
        for axis in _names(axes, argument):
            if mesh is not None and axis not in mesh.axis_names:
                where = f"annotate(x, {argument}={axes!r}) on {mesh_text(mesh)}"
                raise with_outer_mesh_hint(no_axis(axis, mesh.axis_names, where), given_mesh)
            if kinds.setdefault(axis, kind) != kind:
                raise AxisTypeError(
                    f"annotate cannot give a tensor two types over axis {axis!r}",
                    found=f"varying={varying!r}, reduced={reduced!r}, unreduced={unreduced!r}",
                    fix="name the axis in one argument only",
                )
    _reject_late(tensor, type_text(kinds))
    set_spec(tensor, type_text(kinds), None)
    watch_steps([tensor], mesh)
    return tensor


def _reject_late(tensor: torch.Tensor, text: str) -> None:
    """Raise if ``text`` makes a wrapped parameter reduced over axes unknown to its wrapper."""
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
    """A tensor's shape, dtype and type over mesh axes.

    Args:
        shape: the shape of this rank's tensor.
        varying, reduced, unreduced: the axes of each type, sorted; all other axes are invariant.
        spec: the spec that the tensor carries, or None.
        text: the printed form.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    varying: tuple[str, ...]
    reduced: tuple[str, ...]
    unreduced: tuple[str, ...]
    spec: PartitionSpec | None
    text: str

    @property
    def cut_dims(self) -> dict[int, tuple[str, ...]]:
        """The axes that shard each dimension, by dimension, such as ``{0: ("tp",)}``."""
        entries = () if self.spec is None else self.spec.partitions
        return {dim: axes_of(entry) for dim, entry in enumerate(entries) if entry}

    def __repr__(self) -> str:
        return self.text


def typeof(x: torch.Tensor) -> TensorType:
    """Return the type of ``x`` over mesh axes, which prints as ``float32[8, 4]{V:dp}``.

    Braces show the axes over which the tensor is not invariant. With a spec, dimensions show the
    axes that shard them: ``float32[8@dp, 4]{U:tp}``. Sizes are this rank's.

    Args:
        x: a tensor. The result of an operation outside ``md.typed`` counts as invariant.

    Raises:
        KindError: if ``x`` is not a tensor.

    Example:
        >>> import torch, meshdist as md
        >>> md.typeof(md.annotate(torch.zeros(3), varying=("dp", "tp"), unreduced="ep")).varying
        ('dp', 'tp')
        >>> md.typeof(md.annotate(torch.zeros(8, 4), "f@tp d")).cut_dims
        {0: ('tp',)}
    """
    if not isinstance(x, torch.Tensor):
        raise KindError("typeof takes a tensor", found=with_article(type(x).__name__))
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

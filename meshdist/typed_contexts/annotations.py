"""``md.annotate`` and ``md.typeof`` set and return a tensor's type over mesh axes.

A tensor carries its spec as text, beside the text of its type: each dim's size on this rank with
the axes that cut it, such as ``"4@dp, 6@(ep,tp), 3"``. Unreduced and reduced axes stand in the type
alone. The text is valid while the tensor has these sizes and its type varies over just these axes;
a tensor that another operation has written over has no spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..bootstrap.world import find_world
from ..errors import AxisError, AxisTypeError, DtypeError, KindError, MeshError, ShapeError
from ..functional.axis_types import ATTRIBUTE, SPEC_ATTRIBUTE, axes_of_kind, type_text, with_kinds
from ..mesh.current_mesh import find_current_mesh, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout
from ..mesh.layout_arguments import no_axis
from ..mesh.partition_spec import PartitionSpec, axes_of
from ..mesh.pattern import cut_text
from ..mesh.pattern_sizes import parse_side, spec_of
from ..mesh.spec import NamedSharding
from .context import PLAIN_TENSORS
from .refusals import mesh_text, of_a_subclass, tensor_text, type_as_text, type_of

__all__ = ["annotate", "typeof"]


def mark_spec(tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """Attach ``spec``, unchecked, and the type that follows to ``tensor``; return ``tensor``."""
    types, text = _texts(spec, tuple(tensor.shape))
    marks = tensor.__dict__
    marks[ATTRIBUTE] = types
    marks[SPEC_ATTRIBUTE] = text
    return tensor


def find_spec(tensor: torch.Tensor) -> PartitionSpec | None:
    """Return the valid spec that ``mark_spec`` attached, with an entry for each dim, or None."""
    text = tensor.__dict__.get(SPEC_ATTRIBUTE)
    return None if text is None else _read(text, tuple(tensor.shape), type_of(tensor))


def dims_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """Return the text of an array's dims with the axes that cut them.

    Example:
        >>> dims_text((8, 4, 6), PartitionSpec("dp", None, ("ep", "tp")))
        '8@dp, 4, 6@(ep,tp)'
    """
    entries = (*spec.partitions, *(None,) * (len(shape) - len(spec)))
    dims = zip(map(str, shape), map(axes_of, entries), strict=True)
    return ", ".join(cut_text(size, axes) for size, axes in dims)


def checked_spec(
    tensor: torch.Tensor, given: object, layout: Layout | None, call: str
) -> PartitionSpec:
    """Return the PartitionSpec of a given spec, sharding or pattern; raise if it cannot fit.

    Args:
        layout: has the axes; None leaves the names of axes unchecked.
        call: the name of the public call, for messages.
    """
    if isinstance(given, str):
        # Without a layout a dim is still refused that has the name of an axis of any known mesh.
        world = find_world()
        known_axes = world.axis_names if world is not None else ()
        spec = spec_of(*parse_side(given), layout, tensor.ndim, known_axes)
    elif isinstance(given, NamedSharding):
        spec = given.spec
    elif isinstance(given, PartitionSpec):
        spec = given if layout is None else NamedSharding(layout, given).spec
    else:
        raise KindError(
            f"{call} takes a spec or a pattern",
            expected='P("dp", None), a NamedSharding, or a pattern such as "b@dp d"',
            found=f"{given!r}, a {type(given).__name__}",
        )
    if len(spec) > tensor.ndim:
        raise ShapeError(
            f"{call}: {spec!r} has entries for {len(spec)} dims, the tensor has {tensor.ndim}",
            expected=f"a tensor of at least {len(spec)} dims",
            found=f"shape {tuple(tensor.shape)}",
            fix="write P() for a scalar" if not tensor.ndim else None,
        )
    if spec.unreduced and tensor.dtype == torch.bool:
        raise DtypeError(
            f"{call}: a tensor of booleans cannot be unreduced, since they have no sum",
            expected="numbers, of which each rank holds a summand",
            found=f"torch.bool with {spec!r}",
        )
    return spec


@lru_cache(maxsize=4096)
def _texts(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[str, str]:
    kinds = {axis: "V" for entry in spec.partitions for axis in axes_of(entry)}
    kinds |= dict.fromkeys(spec.unreduced, "U") | dict.fromkeys(spec.reduced, "R")
    return type_text(kinds), dims_text(shape, spec)


@lru_cache(maxsize=4096)
def _read(text: str, shape: tuple[int, ...], types: str) -> PartitionSpec | None:
    words = [word.partition("@") for word in text.split(", ")] if text else []
    entries = [tuple(axes.strip("()").split(",")) if axes else () for _, _, axes in words]
    cut = tuple(sorted(axis for axes in entries for axis in axes))
    if tuple(int(size) for size, _, _ in words) != shape or cut != axes_of_kind(types, "V"):
        return None
    unreduced, reduced = (frozenset(axes_of_kind(types, kind)) for kind in "UR")
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)


def annotate(
    tensor: torch.Tensor,
    spec: PartitionSpec | NamedSharding | str | None = None,
    *,
    varying: str | tuple[str, ...] = (),
    reduced: str | tuple[str, ...] = (),
    unreduced: str | tuple[str, ...] = (),
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Set the kinds of ``tensor`` over mesh axes: where data enter, or on a shard of weights.

    It is invariant over every axis that is not named. An earlier annotation is overwritten. Nothing
    is sent or copied, and values are not checked; it works outside ``md.typed`` as well.

    Args:
        tensor: this rank's; a plain tensor or parameter.
        spec: in place of the kinds: where the tensor lies, as a ``PartitionSpec``, a
            ``NamedSharding`` or a pattern such as "f@tp d {R:dp}". It is varying over the axes
            that cut a dim, and carries the spec, which ``md.typeof`` shows.
        varying: the axes along which ranks hold their own values.
        reduced: the axes along which it is equal on all ranks, and its gradient a summand on each.
        unreduced: the axes along which each rank holds a summand of the value.
        mesh: has the axes; None takes the sharding's, or the mesh in force, and checks no names
            where there is none.

    Returns:
        ``tensor`` itself.

    Raises:
        KindError: no tensor, a subclass, an axis that is no name, or a spec beside kinds.
        AxisError: the mesh has no such axis.
        AxisTypeError: an axis is named under two kinds.
        PatternError: a text that is no pattern of one array, or names a whole dim as an axis of
            the mesh ("tp" where "f@tp" or ``varying="tp"`` is meant).
        ShapeError: a spec or a pattern for another number of dims.
        DtypeError: booleans whose spec is unreduced.
        MeshError: the sharding is of another mesh.

    Example:
        >>> import torch, meshdist as md
        >>> batch = md.annotate(torch.zeros(8, 4), varying="dp")
        >>> md.typeof(batch)
        float32[8, 4]{V:dp}
        >>> md.typeof(md.annotate(torch.zeros(8, 4), "f@tp d {R:dp}"))
        float32[8@tp, 4]{R:dp}
    """
    if not isinstance(tensor, torch.Tensor):
        raise KindError(
            "annotate takes a tensor",
            found=f"a {type(tensor).__name__}",
            fix="annotate each tensor of a nesting by itself",
        )
    if type(tensor) not in PLAIN_TENSORS:
        raise of_a_subclass(tensor, "annotate")
    if spec is not None:
        if varying or reduced or unreduced:
            raise KindError(
                "annotate takes a spec or kinds, not both",
                found=f"{spec!r} beside varying={varying!r}, reduced={reduced!r}, "
                f"unreduced={unreduced!r}",
                fix='say it all in the spec, such as "b@dp d {R:tp}"',
            )
        try:
            checked = checked_spec(tensor, spec, _layout(spec, mesh), "annotate")
        except AxisError as error:
            raise with_hidden_mesh(error, mesh) from None
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
                    f"annotate: a value is of one kind over axis {axis!r}",
                    found=f"varying={varying!r}, reduced={reduced!r}, unreduced={unreduced!r}",
                    fix="name the axis once",
                )
    tensor.__dict__[ATTRIBUTE] = type_text(kinds)
    tensor.__dict__.pop(SPEC_ATTRIBUTE, None)
    return tensor


def _layout(spec: object, mesh: DeviceMesh | None) -> Layout | None:
    if isinstance(spec, NamedSharding):
        if mesh is not None and mesh.layout != spec.layout:
            raise MeshError(
                "annotate: the sharding is one of another mesh",
                expected=mesh_text(mesh),
                found=repr(spec),
                fix="leave mesh= out, or give the sharding's spec",
            )
        return spec.layout
    mesh = mesh or find_current_mesh()
    return None if mesh is None else mesh.layout


def _names(axes: object, argument: str) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else axes
    if not isinstance(names, (tuple, list)) or not all(
        isinstance(name, str) and name.isidentifier() for name in names
    ):
        raise KindError(
            f"annotate cannot take {axes!r} as {argument}",
            expected="the name of an axis, or a tuple of names",
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
    return TensorType(
        tuple(x.shape),
        x.dtype,
        varying=axes_of_kind(text, "V"),
        reduced=axes_of_kind(text, "R"),
        unreduced=axes_of_kind(text, "U"),
        spec=spec,
        text=tensor_text(x) if spec is None else _spec_text(x, spec),
    )


def _spec_text(x: torch.Tensor, spec: PartitionSpec) -> str:
    kinds = with_kinds(type_of(x), dict.fromkeys(axes_of_kind(type_of(x), "V"), "I"))
    return type_as_text(x.dtype, dims_text(tuple(x.shape), spec), kinds)

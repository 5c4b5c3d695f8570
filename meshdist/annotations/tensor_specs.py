"""Check the specs of tensors, attach them, and read them back.

A tensor carries its spec as text: each dimension's size on this rank with the axes that shard it,
such as ``"4@dp, 6@(ep,tp), 3"``. Unreduced and reduced axes are only in its type. The text is valid
while the tensor has these sizes and varies over exactly these axes.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..bootstrap.world import find_world
from ..error_text import with_article
from ..errors import DtypeError, KindError, MeshError, ShapeError
from ..mesh.current_mesh import find_current_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout
from ..mesh.partition_spec import PartitionSpec, axes_of, fix_of_entries, sharding_axes
from ..mesh.pattern import cut_text
from ..mesh.pattern_sizes import parse_side, spec_of
from ..mesh.spec import NamedSharding
from .axis_types import (
    ANNOTATION,
    EMPTY,
    INVARIANT,
    GlobalSizes,
    axes_of_kind,
    set_spec,
    type_text,
)


def mark_spec(tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """Attach ``spec``, unchecked, and its axis type to ``tensor``; return ``tensor``."""
    types, text = spec_texts(spec, tuple(tensor.shape))
    set_spec(tensor, types, text)
    return tensor


def sizes_of(sharding: NamedSharding, shape: tuple[int, ...]) -> GlobalSizes:
    """Return the ``global_sizes`` of the annotation of a shard of an array of ``shape``.

    Example:
        >>> mesh = Layout.from_shape((2,), ("tp",))
        >>> sizes_of(NamedSharding(mesh, PartitionSpec("tp"), shard_sizes={0: (6, 4)}), (10, 3))
        ((6, 4), 3)
    """
    return tuple(sharding.shard_sizes.get(dim, size) for dim, size in enumerate(shape))


def find_spec(tensor: torch.Tensor) -> PartitionSpec | None:
    """Return the attached spec; None if it is missing or outdated."""
    kinds, dims, *_ = tensor.__dict__.get(ANNOTATION, EMPTY)
    return None if dims is None else read_spec(kinds or INVARIANT, dims, tuple(tensor.shape))


def dims_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """Return an array's dims with the axes that cut them.

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
    """Return the PartitionSpec of a spec, sharding or pattern; raise if it does not match.

    Args:
        layout: None skips the check of axis names.
        call: the name of the public call.
    """
    if isinstance(given, str):
        # Without a layout, a dimension must not have the name of an axis of any known mesh.
        world = find_world()
        known_axes = world.axis_layouts if world is not None else ()
        spec = spec_of(*parse_side(given), layout, tensor.ndim, known_axes)
    elif isinstance(given, NamedSharding):
        spec = given.spec
    elif isinstance(given, PartitionSpec):
        spec = given if layout is None else NamedSharding(layout, given).spec
    else:
        raise KindError(
            f"{call} takes a spec or a pattern",
            expected="a PartitionSpec, a NamedSharding, or a pattern",
            found=f"{given!r}, {with_article(type(given).__name__)}",
            fix='pass for example P("dp", None) or "b@dp d"',
        )
    if len(spec) > tensor.ndim:
        raise ShapeError(
            f"{call}: {spec!r} has entries for {len(spec)} dims, the tensor has {tensor.ndim}",
            expected=f"a tensor of at least {len(spec)} dims",
            found=f"shape {tuple(tensor.shape)}",
            fix=fix_of_entries(tensor.ndim),
        )
    if spec.unreduced and tensor.dtype == torch.bool:
        raise DtypeError(
            f"{call}: a bool tensor cannot be unreduced, because bool has no sum",
            expected="a dtype of numbers, of which each rank holds a partial sum",
            found=f"torch.bool with {spec!r}",
            fix="convert it first, for example x.to(torch.int32)",
        )
    return spec


def layout_of(spec: object, mesh: DeviceMesh | None) -> Layout | None:
    """Return the mesh layout of a sharding ``spec``, else of ``mesh`` or the current mesh; or None.

    Raises:
        MeshError: ``spec`` is a sharding on another mesh than ``mesh``.
    """
    if isinstance(spec, NamedSharding):
        if mesh is not None and mesh.layout != spec.layout:
            raise MeshError(
                "annotate cannot use a sharding of another mesh than mesh=",
                expected=f"DeviceMesh({mesh.layout.axis_text()})",
                found=repr(spec),
                fix="omit mesh=, or pass only the spec: sharding.spec",
            )
        return spec.layout
    mesh = mesh or find_current_mesh()
    return None if mesh is None else mesh.layout


@lru_cache(maxsize=4096)
def spec_texts(spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[str, str]:
    """Return (axis type of ``spec``, text of the dims of ``shape``, such as "8@dp, 4")."""
    kinds = dict.fromkeys(sharding_axes(spec), "V")
    kinds |= dict.fromkeys(spec.unreduced, "U") | dict.fromkeys(spec.reduced, "R")
    return type_text(kinds), dims_text(shape, spec)


@lru_cache(maxsize=4096)
def read_spec(types: str, dims: str, shape: tuple[int, ...]) -> PartitionSpec | None:
    """Return the spec from texts of ``spec_texts``; None if shape or axis type do not match."""
    words = [word.partition("@") for word in dims.split(", ")] if dims else []
    entries = [tuple(axes.strip("()").split(",")) if axes else () for _, _, axes in words]
    cut = tuple(sorted(axis for axes in entries for axis in axes))
    if tuple(int(size) for size, _, _ in words) != shape or cut != axes_of_kind(types, "V"):
        return None
    unreduced, reduced = (frozenset(axes_of_kind(types, kind)) for kind in "UR")
    return PartitionSpec(*entries, unreduced=unreduced, reduced=reduced)

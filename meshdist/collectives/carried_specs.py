"""The spec that a tensor carries beside its axis types: which axes cut its dims.

A tensor carries it as text, as it does its types: each dim's size on this rank with the axes that
cut it, such as ``"4@dp, 6@(ep,tp), 3"``. What is unreduced and reduced stands in the
types alone. The text speaks for the tensor as long as the sizes are its own and its types vary over
just these axes; one that another operation has written over carries none.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from ..bootstrap.world import find_world
from ..errors import DtypeError, KindError, ShapeError
from ..mesh.dim_sizes import spec_of
from ..mesh.layout import Layout
from ..mesh.named_dims import parse_side
from ..mesh.partition_spec import PartitionSpec, axes_of
from ..mesh.pattern import cut_text
from ..mesh.spec import NamedSharding
from .axis_types import ATTRIBUTE, SPEC_ATTRIBUTE, axes_of_kind, type_text
from .type_errors import type_of

__all__ = ["checked_spec", "dims_text", "find_spec", "mark_spec"]


def mark_spec(tensor: torch.Tensor, spec: PartitionSpec) -> torch.Tensor:
    """Let ``tensor``, a shard of an array that lies by ``spec``, carry it, and the types that
    follow: varying over the axes that cut, unreduced and reduced as the spec says.

    The inverse of ``find_spec``. Returns the tensor itself; checks nothing.
    """
    types, text = _texts(spec, tuple(tensor.shape))
    marks = tensor.__dict__
    marks[ATTRIBUTE] = types
    marks[SPEC_ATTRIBUTE] = text
    return tensor


def find_spec(tensor: torch.Tensor) -> PartitionSpec | None:
    """Return the spec that ``tensor`` carries, with an entry for each dim; None where it has none.

    The inverse of ``mark_spec``.
    """
    text = tensor.__dict__.get(SPEC_ATTRIBUTE)
    return None if text is None else _read(text, tuple(tensor.shape), type_of(tensor))


def dims_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """The dims of an array as types print them.

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
    """Return the spec that a caller gives for ``tensor``, as a spec, a sharding or a pattern.

    Without a ``layout``, which has the axes, no more is checked than that no dim is named as an
    axis of a mesh that was made before. Messages name ``call``.

    Raises:
        KindError: something else.
        PatternError: a text that is no pattern of one side, or names a dim as an axis.
        AxisError: an axis that the mesh does not have, or one twice.
        ShapeError: another number of dims than the tensor has.
        DtypeError: booleans that are unreduced.
    """
    if isinstance(given, str):
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

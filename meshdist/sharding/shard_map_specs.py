"""Match the arguments and results of a mapped function with their specs.

A call raises a single error that shows all arrays that do not fit their specs, on every rank with
the same arguments, or results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import optree
import torch

from ..annotations.axis_types import KINDS, kinds_in, type_of
from ..annotations.tensor_specs import checked_spec
from ..arrays import as_tensor, describe, shape_text
from ..collectives.objects import gather_from_all
from ..collectives.torch_private import HiddenFromModes
from ..error_text import first_texts, grouped_text, with_article
from ..errors import (
    ArgumentError,
    AxisError,
    AxisTypeError,
    KindError,
    MeshdistError,
    MeshError,
    ShapeError,
)
from ..lax.reductions import pcast
from ..mesh.current_mesh import with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import P
from ..mesh.placement import Placement
from ..mesh.spec import NamedSharding, sized_by_shards
from ..typed_mode.type_errors import tensor_text
from .descriptions import mesh_text
from .resharding import kinds_of
from .sharded_array import ShardedArray

_NUMBERS = (bool, int, float, complex)  # exact types: numpy.float64 is a float and an array

_CASTS: Mapping[tuple[str, str], str] = {("I", "V"): "varying", ("V", "U"): "unreduced"}
"""How a result of one kind is cast to its spec's kind, in the same cases as in JAX."""


class _Infer:
    """The class of the sentinel ``Infer``: use the argument's own sharding."""

    def __repr__(self) -> str:
        return "shard_map.Infer"

    def __reduce__(self) -> str:
        return "Infer"


Infer = _Infer()


@dataclass(frozen=True)
class MappedArray:
    """An array of a mapped function's arguments or results, with its global sharding.

    Args:
        path: the array in messages, such as ``params['w']``.
        shape: the global shape.
    """

    value: Any
    path: str
    sharding: NamedSharding
    shape: tuple[int, ...]

    @property
    def is_even(self) -> bool:
        """Return whether all shards have one size."""
        return all(split.is_even for split in self.sharding.placement(self.shape).dims)


def specs_of_leaves(name: str, side: str, specs: Any, tree: Any) -> list[Any]:
    """Return the spec of each leaf of ``tree``; ``specs`` is a tree prefix of it.

    Args:
        name, side: the mapped function's name, and the parameter that has the specs.
    """
    try:
        found: list[Any] = optree.broadcast_prefix(specs, tree, none_is_leaf=True)
        return found
    except ValueError:
        first, *_ = optree.prefix_errors(specs, tree, none_is_leaf=True)
    is_list = side == "in_specs" and isinstance(specs, list)
    what = "the tuple of arguments" if side == "in_specs" else "the result"
    raise ArgumentError(
        f"shard_map of {name}: {side} is not a tree prefix of {what}",
        expected=f"{side} with the structure of {what}, or one spec for a subtree of it",
        found=str(first(side)),
        fix="write a tuple of specs, one for each argument"
        if is_list
        else f"pass one spec for a subtree of equally sharded arrays: {side}=P(...)",
    )


# -- arguments ------------------------------------------------------------------------------------


def find_argument(
    mesh: DeviceMesh, given_mesh: DeviceMesh | None, x: Any, spec: Any, path: str
) -> MappedArray | None:
    """Return an argument's array and sharding; None for a number, for None, or without ``spec``.

    Args:
        given_mesh: the mesh that the program passes; None for the current mesh.
    """
    if spec is None or x is None:
        return None
    if isinstance(x, ShardedArray):
        _check_sharding(mesh, given_mesh, x, spec, path)
        return MappedArray(x, path, x.sharding, x.shape)
    given_spec = P() if spec is Infer else spec
    if type(x) in _NUMBERS:
        if given_spec != P():
            raise KindError(
                "a number has no dims and no shards",
                expected="an array, or the spec P() or None",
                fix="write P(), which passes a number unchanged",
            )
        return None
    tensor = as_tensor(x, argument=path, operation="shard_map", writable=False)
    for axis, kind in sorted(kinds_in(type_of(tensor)).items()):
        if axis in mesh.axis_names:
            raise AxisTypeError(
                f"it is {KINDS[kind]} over {axis!r}, and a global array is equal on all ranks",
                expected="an array that is invariant over all axes, or a ShardedArray",
                fix=f"pass md.ShardedArray({path}, sharding) if it is this rank's shard",
            )
    shape = tuple(tensor.shape)
    sharding = _sharding(mesh, given_mesh, tensor, given_spec)
    if isinstance(given_spec, str):  # A pattern's groups must be cut between whole parts.
        try:
            sharding = NamedSharding.from_pattern(given_spec, mesh, shape)
        except ShapeError as error:
            raise ShapeError(
                error.summary,
                expected="a pattern whose groups of dims are cut evenly",
                fix="pass the sizes: md.NamedSharding(mesh, spec, shard_sizes={dim: sizes})",
            ) from None
    sharding.placement(shape)  # Raise if given shard sizes do not fit.
    return MappedArray(x, path, sharding, shape)


def _check_sharding(
    mesh: DeviceMesh, given_mesh: DeviceMesh | None, x: ShardedArray, spec: Any, path: str
) -> None:
    """Raise unless ``x`` is sharded on ``mesh`` as ``spec`` states."""
    if x.mesh != mesh:
        raise MeshError(
            f"it is on another mesh, ({x.mesh.layout.axis_text()})",
            expected=f"an array on the mesh of the call, ({mesh.layout.axis_text()})",
            fix=f"pass {path}.reshard(md.NamedSharding(mesh, spec)), with the spec that it needs",
        )
    if spec is Infer:
        return
    local = as_tensor(x.local, argument=path, operation="shard_map", writable=False)
    expected_kind = _sharding(mesh, given_mesh, local, spec)
    here, there = x.sharding.placement(x.shape), expected_kind.placement(x.shape)
    # A spec does not state sizes, so any shard sizes of the array are accepted.
    if here != there and (expected_kind.shard_sizes or _axes(here) != _axes(there)):
        raise ArgumentError(
            f"it is sharded as {x.sharding.spec!r}",
            expected="an array that is sharded as its spec, since shard_map never reshards",
            fix=f"pass {path}.reshard({spec!r}); or leave in_specs out",
        )


def _axes(placement: Placement) -> tuple[Any, ...]:
    """Return (axes that cut each dim, unreduced axes, reduced axes) of ``placement``."""
    return [split.axes for split in placement.dims], placement.unreduced, placement.reduced


def _sharding(
    mesh: DeviceMesh, given_mesh: DeviceMesh | None, x: torch.Tensor, spec: Any
) -> NamedSharding:
    key = ("shard_map", spec, x.dim(), x.dtype is torch.bool)
    found = mesh.caches.find(NamedSharding, key)
    if found is not None:
        return found
    try:
        checked = checked_spec(x, spec, mesh.layout, "shard_map")
    except AxisError as error:
        raise with_outer_mesh_hint(error, given_mesh) from None
    if not isinstance(spec, NamedSharding):
        return mesh.caches.keep(NamedSharding, key, NamedSharding(mesh, checked))
    if spec.layout != mesh.layout:
        raise MeshError(
            f"the sharding is on another mesh, ({spec.layout.axis_text()})",
            expected=f"a sharding on the mesh of the call, ({mesh.layout.axis_text()})",
            fix="pass its spec alone",
        )
    return NamedSharding(mesh, checked, shard_sizes=spec.shard_sizes)


# -- results --------------------------------------------------------------------------------------


def get_result(
    mesh: DeviceMesh,
    given_mesh: DeviceMesh | None,
    y: Any,
    spec: Any,
    path: str,
    *,
    is_typed: bool,
) -> MappedArray:
    """Return a result with its sharding, assuming equal shard sizes; or raise.

    Args:
        given_mesh: the mesh that the program passes; None for the current mesh.
        is_typed: whether a tensor must have its spec's kinds, and is cast to them.
    """
    if spec is None or spec is Infer:
        raise KindError(
            f"{spec!r} is not a spec for a result",
            expected="P(...), a pattern or a NamedSharding",
            fix="write P() for a value that is equal on all ranks",
        )
    with HiddenFromModes():
        tensor = as_tensor(y, argument=path, operation="shard_map", writable=False)
        try:
            sharding = _sharding(mesh, given_mesh, tensor, spec)
        except ShapeError as error:
            raise error if tensor.dim() else _scalar_with_dims(error) from None
        shape = sharding.whole_shape(tuple(tensor.shape))
    if is_typed and isinstance(y, torch.Tensor):
        y = _cast(y, sharding)
    return MappedArray(y, path, sharding, shape)


def _scalar_with_dims(error: ShapeError) -> ShapeError:
    """Return the error of a scalar with a spec for dims."""
    return ShapeError(
        error.summary,
        expected=error.expected,
        found=error.found,
        fix="return y[None] to concatenate the ranks' values; or write P() for one value that is "
        "equal on all ranks, such as lax.psum(y, axis)",
    )


def _cast(y: torch.Tensor, sharding: NamedSharding) -> torch.Tensor:
    """Return ``y`` cast to its spec's types; raise if no cast allows it."""
    mesh, kinds = sharding.mesh, kinds_in(type_of(y))
    casts: dict[str, list[str]] = {}
    for axis, expected_kind in kinds_of(sharding).items():
        kind = kinds.get(axis, "I")
        if kind != expected_kind:
            to = _CASTS.get((kind, expected_kind))
            if to is None:
                raise _rejected_kind(axis, mesh.axis_sizes[axis], kind, expected_kind, y.dim())
            casts.setdefault(to, []).append(axis)
    for to, axes in casts.items():
        y = pcast(y, tuple(axes), to=to, mesh=mesh)
    return y


def _rejected_kind(axis: str, size: int, kind: str, expected_kind: str, ndim: int) -> AxisTypeError:
    dim = "" if ndim else ", and give the value a dim: y[None]"
    fixes = {
        "V": "make one value with lax.psum, lax.pmean or lax.all_gather(..., to='invarying') over "
        f"{axis!r}; or, to concatenate the ranks' values, name {axis!r} in the spec{dim}",
        "U": f"add the partial sums: lax.psum(y, {axis!r}); or write P(unreduced={{{axis!r}}})",
        "R": f"write P(reduced={{{axis!r}}})",
        "I": f"call lax.pcast(y, {axis!r}, to={KINDS[expected_kind]!r}) first",
    }
    says = {"I": "leaves out", "V": "mentions"}.get(expected_kind, f"calls {KINDS[expected_kind]}")
    return AxisTypeError(
        f"it is {KINDS[kind]} over {axis!r} (size {size}), which its spec {says}",
        expected=f"a value that is {KINDS[expected_kind]} over {axis!r}",
        fix=fixes[kind],
    )


def with_common_shapes(
    name: str, mesh: DeviceMesh, arrays: list[MappedArray], *, is_even: bool
) -> list[MappedArray]:
    """Return the results with global shapes; collective.

    Args:
        name: of the mapped function.
        is_even: whether the shards of each result must have one size.
    """
    group = mesh[mesh.axis_names].open_group()
    with HiddenFromModes():
        of_all = gather_from_all([tuple(array.value.shape) for array in arrays], group)
    counts = {rank: len(each) for rank, each in zip(group.ranks, of_all, strict=True)}
    if len({*counts.values()}) > 1:
        raise ShapeError(
            f"shard_map of {name}: ranks returned different numbers of arrays",
            where=mesh_text(mesh),
            expected="the same number on every rank",
            found=grouped_text(((rank, f"{num} arrays") for rank, num in counts.items()), "; "),
            fix="return the same structure from f on every rank",
        )
    found = []
    for index, array in enumerate(arrays):
        shapes = {rank: each[index] for rank, each in zip(group.ranks, of_all, strict=True)}
        sharding, shape = (
            (array.sharding, array.shape) if is_even else sized_by_shards(array.sharding, shapes)
        )
        if any(sharding.shard_shape(shape, rank) != shapes[rank] for rank in shapes):
            raise _no_global_array(name, array, shapes, is_even=is_even)
        found.append(replace(array, sharding=sharding, shape=shape))
    return found


def _no_global_array(
    name: str, array: MappedArray, shapes: Mapping[int, tuple[int, ...]], *, is_even: bool
) -> ShapeError:
    spec = array.sharding.spec
    sizes = f"out_specs=md.NamedSharding(mesh, {spec!r}, shard_sizes={{dim: sizes}})"
    texts = ((rank, shape_text(shape)) for rank, shape in shapes.items())
    return ShapeError(
        f"shard_map of {name}: the shards of {array.path} do not form a global array",
        where=f"{mesh_text(array.sharding.mesh)}, spec {spec!r}",
        expected="shards of one size, since all arguments are cut evenly"
        if is_even
        else "sizes that differ only along the axes that cut the dim",
        found=grouped_text(texts, "; "),
        fix=f"pass the sizes: {sizes}"
        if is_even
        else "return equal shapes from f along axes that do not cut the dim",
    )


# -- errors ---------------------------------------------------------------------------------------


def reject(
    summary: str, mesh: DeviceMesh, problems: Sequence[tuple[str, MeshdistError]]
) -> NoReturn:
    """Raise an error on all ``problems`` (array text, error)."""
    first = problems[0][1]
    error = type(first)(
        summary,
        where=mesh_text(mesh),
        expected=first.expected,
        found=first_texts([f"{shown}: {error.summary}" for shown, error in problems]),
        fix=first.fix,
    )
    if isinstance(first, AxisError) and isinstance(error, AxisError):
        error.axis = first.axis
    raise error


def value_text(value: Any) -> str:
    if isinstance(value, ShardedArray):
        return f"ShardedArray of shape {shape_text(value.shape)}"
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    return describe(value) if hasattr(value, "dtype") else with_article(type(value).__name__)

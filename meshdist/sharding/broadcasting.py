"""How the sharded operands of an operation on elements meet, and how its result lies.

Nothing moves: each rank computes with what it holds. So operands are cut alike, dim by dim, and of
kinds that join by themselves (``axis_types.join``) over every axis. An operand that lacks an axis
over which another differs between ranks would need a cast, whose gradient is summed over that axis:
it is refused, since that sum is to be asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import AxisTypeError, MeshError, ShapeError
from ..functional.axis_types import Refusal, axes_of_kind, join_types, kinds_in, shown, type_text
from ..mesh.placement import DimSplit
from ..mesh.spec import NamedSharding
from .resharding import kinds_of
from .shardings import array_type, mesh_text, sharding_of

__all__ = ["Operand", "join_operands"]

Operand = tuple[object, tuple[int, ...], NamedSharding]
"""The dtype, the shape and the sharding of an operand."""


def join_operands(
    operands: Sequence[Operand], linearity: str, call: str
) -> tuple[tuple[int, ...], NamedSharding]:
    """Shape and sharding of what ``call`` makes of ``operands``; raises where they do not fit.

    ``linearity`` is how the operation is linear in unreduced operands; see ``axis_types.join``.
    """
    _, shape, sharding = operands[0]
    if not sharding.spec.unreduced and all(
        one[2] == sharding and one[1] == shape for one in operands
    ):
        return shape, sharding
    for _, _, other in operands[1:]:
        if other.mesh != sharding.mesh:
            raise MeshError(
                f"{call}: the operands lie on different meshes",
                where=mesh_text(sharding.mesh),
                expected="one mesh",
                found=_listed(operands, with_meshes=True),
                fix="reshard one onto the other's mesh: y.reshard(NamedSharding(x.sharding.mesh, "
                "spec))",
            )
    try:
        shape = np.broadcast_shapes(*(one[1] for one in operands))
    except ValueError:
        raise ShapeError(
            f"{call}: the operands' shapes do not broadcast",
            where=mesh_text(sharding.mesh),
            found=_listed(operands),
        ) from None
    dims = _joined_dims(operands, shape, call)
    kinds = _joined_kinds(operands, linearity, call)
    return shape, sharding_of(
        sharding.mesh,
        dims,
        unreduced=axes_of_kind(kinds, "U"),
        reduced=axes_of_kind(kinds, "R"),
    )


def _joined_dims(
    operands: Sequence[Operand], shape: tuple[int, ...], call: str
) -> tuple[DimSplit, ...]:
    """How the result is cut: as every operand that has the dim in full."""
    found: list[DimSplit | None] = [None] * len(shape)
    for _, own_shape, sharding in operands:
        shift = len(shape) - len(own_shape)
        for dim, split in enumerate(sharding.placement(own_shape).dims, start=shift):
            is_stretched = split.size != shape[dim]
            if is_stretched and split.axes:
                raise _cut_otherwise(operands, dim - len(shape), call)
            if not is_stretched:
                if found[dim] not in (None, split):
                    raise _cut_otherwise(operands, dim - len(shape), call)
                found[dim] = split
    dims = tuple(split if split is not None else DimSplit(1) for split in found)
    axes = [axis for split in dims for axis in split.axes]
    if len(set(axes)) < len(axes):
        twice = next(axis for axis in axes if axes.count(axis) > 1)
        dim = max(dim for dim, split in enumerate(dims) if twice in split.axes)
        raise _cut_otherwise(operands, dim - len(shape), call)
    return dims


def _joined_kinds(operands: Sequence[Operand], linearity: str, call: str) -> str:
    types = [type_text(kinds_of(sharding)) for _, _, sharding in operands]
    joined = join_types(types, linearity)
    where = mesh_text(operands[0][2].mesh)
    if isinstance(joined, Refusal):
        raise AxisTypeError(
            f"{call} is not linear in what is unreduced over {joined.axis!r}: each rank holds a "
            "summand",
            where=where,
            expected=_PASSES.get(linearity, "no unreduced operand"),
            found=_listed(operands),
            fix=_sum_first(operands, joined.operand),
        )
    for place, lacking in enumerate(joined.missing):
        if lacking:
            raise _lacking(operands, place, lacking, joined.text, call)
    return joined.text


_PASSES = {
    "add": "operands that are all unreduced over the same axes",
    "multiply": "one unreduced operand, the others reduced over its axes",
    "first": "an unreduced operand only as the first, the others reduced over its axes",
}


def _sum_first(operands: Sequence[Operand], place: int) -> str:
    _, _, sharding = operands[place]
    spec = sharding.spec.update(unreduced=set())
    return f"sum the summands first: {_letter(place)}.reshard({spec!r})"


def _lacking(
    operands: Sequence[Operand], place: int, lacking: str, result: str, call: str
) -> AxisTypeError:
    axes = tuple(kinds_in(lacking))
    spec = operands[place][2].spec
    reduced = spec.update(reduced={*spec.reduced, *axes})
    letter = _letter(place)
    return AxisTypeError(
        f"{call}: operand {letter} is equal on all ranks along {shown(axes)}, and another is not: "
        f"the gradient of {letter} would be a sum over {shown(axes)}, which nothing asks for",
        where=mesh_text(operands[0][2].mesh),
        expected=f"operands of equal shardings, or {letter} reduced over {shown(axes)}",
        found=_listed(operands),
        fix=f"{letter}.reshard({reduced!r}): nothing is sent; its gradient is then summed",
    )


def _cut_otherwise(operands: Sequence[Operand], dim: int, call: str) -> AxisTypeError:
    _, shape, sharding = operands[0]
    fix = None
    if all(one[1] == shape for one in operands):
        fix = f"y.reshard(x.sharding), or x.reshard({operands[-1][2].spec!r})"
    return AxisTypeError(
        f"{call}: the operands are cut differently along dim {dim}",
        where=mesh_text(sharding.mesh),
        expected="equal shardings: nothing is sent unasked",
        found=_listed(operands),
        fix=fix or "reshard one of them, so that this dim is cut alike, or is whole in both",
    )


def _letter(place: int) -> str:
    """The name of an operand in messages: x, y, z, then by number."""
    return "xyz"[place] if place < 3 else f"operand {place}"


def _listed(operands: Sequence[Operand], *, with_meshes: bool = False) -> str:
    lines = []
    for place, (dtype, shape, sharding) in enumerate(operands):
        sizes = f", shard_sizes={sharding.shard_sizes}" if sharding.shard_sizes else ""
        mesh = f" on mesh ({sharding.layout.axis_text()})" if with_meshes else ""
        lines.append(f"{_letter(place)}: {array_type(dtype, shape, sharding)}{sizes}{mesh}")
    return "\n".join(lines)

"""Plan reshards and einsums: ``md.plan``, einsum plans, and the links of a mesh."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ..arguments import get_integer, get_shape
from ..error_text import with_article
from ..errors import ArgumentError, AxisError, KindError
from ..mesh.current_mesh import require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout, get_layout
from ..mesh.partition_spec import PartitionSpec
from ..mesh.pattern import parse
from ..mesh.pattern_sizes import checked_sizes
from ..mesh.spec import NamedSharding, shardings_of_sides
from .einsum_layouts import EinsumLayout, lay_out_einsum
from .plans import Plan, bytes_text, make_plan, step_text
from .refinement import refine
from .routes import DEFAULT_LINK, Link, default_link, links_of

__all__ = ["plan"]

Links = Mapping[str | int, Link] | Link
# A plan's title lists up to this many shard sizes; above it shows a number computed from them.
_FEW_SIZES = 8


def plan(
    src: NamedSharding | PartitionSpec | str,
    dst: NamedSharding | PartitionSpec | None = None,
    mesh: DeviceMesh | Layout | None = None,
    shape: Sequence[int] | None = None,
    *,
    links: Links | None = None,
    rank: int | None = None,
    **sizes: int,
) -> Any:
    """Plan how one rank moves an array from one sharding to another; sends nothing.

    Among known routes the plan has the fewest bytes received by all ranks in total, then the
    shortest time, then the fewest steps. All ranks choose the same route.

    Args:
        src: the current sharding: a pattern with "->", such as ``"b@dp s -> b s@dp"``, a
            ``NamedSharding``, or a ``PartitionSpec``. A pattern of several operands, such as
            ``"b d, d f@tp -> b f@tp"``, plans an einsum.
        dst: the new sharding; None with a pattern.
        mesh: of a pattern or specs; None takes the current mesh. A ``Layout`` plans without
            processes.
        shape: the global shape. A pattern accepts ``sizes`` instead, an einsum requires them.
        links: the speed of each axis, by name or index, or one ``md.Link`` for all; equal on all
            ranks. By default constants of the axis's backend, within a host or between hosts.
        rank: the rank to plan for; None takes this process's on a ``DeviceMesh``, the first of a
            ``Layout``.
        sizes: the global sizes of a pattern's dims, by name.

    Returns:
        The ``Plan``: ``steps``, ``explain()``, ``bytes_received()``, ``bytes_sent()``,
        ``peak_bytes()``, ``estimated_s()``, and ``T``, the gradient's plan. Equal arguments return
        the same object. A pattern's plan has the named parts as dims, in the order of its left
        side. For an einsum: an ``EinsumPlan`` with the plans ``operands`` and ``result``,
        ``bytes_received()``, also with ``backward=True``, and ``explain()``.

    Gradient: ``plan.T``: from the destination's cotangent to the source's, with the same dims,
        and unreduced and reduced exchanged.

    Cost: nothing is sent; planning time covers only this rank's part.

    Raises:
        ArgumentError: no destination, two, or no shape.
        KindError: the arguments are not patterns, specs or shardings.
        MeshError: no mesh, meshes over other ranks, or without a common refinement.
        NotInGroupError: the mesh does not contain the rank.
        PatternError, AxisError, ShapeError: a pattern or spec does not fit the mesh or shape.

    Example:
        >>> import meshdist as md
        >>> mesh = md.Layout.from_shape((2, 2), ("dp", "tp"))
        >>> P = md.P
        >>> moved = md.plan(P("dp", "tp"), P("tp", "dp"), mesh, (8, 8))
        >>> moved.bytes_received(), moved.T.bytes_received()
        (0, 0)
        >>> moved = md.plan("a@dp b@tp -> a@tp b@dp", mesh=mesh, a=8, b=8, rank=1)
        >>> moved.bytes_received(), moved.steps[0].receives
        (64, ((2, ((0, 4), (0, 4))),))
    """
    if isinstance(src, str):
        if dst is not None:
            raise ArgumentError(
                "a pattern has both the source and the destination",
                where="md.plan",
                expected='one pattern with "->", or two specs',
                found=f"{src!r} and {dst!r}",
                fix=None
                if isinstance(dst, (PartitionSpec, NamedSharding, str))
                else "pass the mesh by name: plan(pattern, mesh=mesh)",
            )
        given_mesh, mesh = mesh, require_current_mesh("plan") if mesh is None else mesh
        layout, pattern = get_layout(mesh, "plan"), parse(src)
        asked = tuple(checked_sizes(pattern, sizes).items())
        at, speeds = mesh_rank(mesh, rank), mesh_links(mesh, links)
        is_einsum = shape is None and len(pattern.operands) > 1 and pattern.result is not None
        whole = None if shape is None else get_shape(shape, "plan")
        try:
            if is_einsum:
                laid = lay_out_einsum(src, layout, at, None, asked, ((),) * len(pattern.operands))
                return plan_einsum(laid, layout, layout.get_coordinate(at), speeds)
            return _plan_pattern(src, layout, whole, asked, at, speeds)
        except AxisError as error:
            raise with_outer_mesh_hint(error, given_mesh) from None
    if sizes:
        raise ArgumentError(
            "sizes by name need a pattern, whose dims have names",
            where="md.plan",
            found=", ".join(f"{name}={size!r}" for name, size in sizes.items()),
            fix="pass the global shape: shape=(...)",
        )
    source, target = _sharding(src, "src", mesh), _sharding(dst, "dst", mesh)
    if shape is None:
        raise ArgumentError(
            "a plan between specs needs the global shape",
            where="md.plan",
            fix="call plan(src, dst, mesh, shape)",
        )
    at, speeds = mesh_rank(source.mesh, rank), mesh_links(source.mesh, links)
    return plan_move(source, target, get_shape(shape, "plan"), at, speeds)


@lru_cache(maxsize=4096)
def _plan_pattern(
    text: str,
    layout: Layout,
    shape: tuple[int, ...] | None,
    sizes: tuple[tuple[str, int], ...],
    rank: int,
    links: tuple[Link, ...],
) -> Plan:
    source, target = shardings_of_sides(text, layout, shape, dict(sizes))
    ends = source, target, source.parts.shape
    return plan_move(*ends, rank, links, text, source.parts.names)


def plan_move(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    rank: int,
    links: tuple[Link, ...],
    pattern: str | None = None,
    names: Sequence[str] = (),
) -> Plan:
    """Return one rank's plan between two shardings.

    Args:
        links: of the source's axes.
        pattern: the text with "->" that states both shardings, or None.
        names: of a pattern's parts, in the order of the plan's dims.
    """
    layout = source.layout
    if pattern is None:
        here, there = source.placement(shape), target.placement(shape)
    else:
        here, there = (
            side.parts.placement.permuted([side.parts.names.index(name) for name in names])
            for side in (source, target)
        )
    if layout != target.layout:
        both = refine(layout, target.layout)
        here, there = both.source_placement(here), both.target_placement(there)
        layout, links = both.layout, tuple(links[axis] for axis in both.source_axis_of_each)
    op_name = move_title(source, target, shape, pattern)
    return make_plan(
        here, there, layout.get_coordinate(rank), layout=layout, links=links, op_name=op_name
    )


def mesh_rank(mesh: DeviceMesh | Layout, rank: int | None = None) -> int:
    """Return ``rank``, else this process's rank, else a Layout's first."""
    if rank is not None:
        return get_integer(rank, "plan: rank")
    return mesh.rank_at((0,) * mesh.ndim) if isinstance(mesh, Layout) else mesh.get_rank()


def mesh_links(mesh: DeviceMesh | Layout, links: Links | None = None) -> tuple[Link, ...]:
    """Return a link per axis, by default of its backend; raise if invalid."""
    layout = get_layout(mesh, "plan")
    bare = (DEFAULT_LINK,) * layout.ndim
    defaults = bare if isinstance(mesh, Layout) else backend_links(mesh)
    return links_of(layout, links, defaults)


def backend_links(mesh: DeviceMesh) -> tuple[Link, ...]:
    """Return the cached backend constants of a mesh's axes."""
    return mesh.caches.of(tuple[Link, ...], partial(_new_backend_links, mesh))


def _new_backend_links(mesh: DeviceMesh) -> tuple[Link, ...]:
    hosts = np.array(mesh.world.hosts)[mesh.layout.ranks()]
    return tuple(
        default_link(
            mesh.backend_of(axis), spans_hosts=bool((hosts != hosts.take([0], axis)).any())
        )
        for axis in range(mesh.ndim)
    )


# -- arguments ----------------------------------------------------------------------------------


def _sharding(given: Any, name: str, mesh: DeviceMesh | Layout | None) -> NamedSharding:
    if isinstance(given, NamedSharding):
        return given
    if isinstance(given, PartitionSpec):
        chosen = require_current_mesh("plan") if mesh is None else mesh
        get_layout(chosen, "plan")
        try:
            return NamedSharding(chosen, given)
        except AxisError as error:
            raise with_outer_mesh_hint(error, mesh) from None
    is_missing = name == "dst" and given is None
    raise KindError(
        "a plan needs a destination" if is_missing else f"{name} is not a spec",
        where=f"md.plan, argument {name}",
        expected="a NamedSharding or a PartitionSpec",
        found=f"{given!r}, {with_article(type(given).__name__)}",
        fix='pass a pattern as the only positional argument: plan("b@dp s -> b s@dp", mesh=mesh)',
    )


def move_title(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    pattern: str | None = None,
) -> str:
    """Return the operation name of a plan, equal on all ranks."""
    text = pattern or " -> ".join(map(_sharding_text, (source, target)))
    return f"{text} of shape {shape}"


def _sharding_text(sharding: NamedSharding) -> str:
    sizes = sharding.shard_sizes
    if not sizes:
        return repr(sharding.spec)
    text = repr(sizes)
    if sum(map(len, sizes.values())) > _FEW_SIZES:
        text = f"#{zlib.crc32(text.encode()):08x}"
    return f"{sharding.spec!r} with shard sizes {text}"


# -- einsums --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class EinsumPlan:
    """A rank's plan of an einsum.

    Args:
        operands: a plan for each operand, from its sharding to the product's.
        result: from the product's sharding to the result's.
    """

    layout: EinsumLayout
    operands: tuple[Plan, ...]
    result: Plan

    def bytes_received(self, itemsize: int = 4, *, backward: bool = False) -> int:
        """Return the bytes that this rank receives, in the forward or the backward."""
        plans = (*self.operands, self.result)
        return sum((plan.T if backward else plan).bytes_received(itemsize) for plan in plans)

    def explain(self, itemsize: int = 4) -> str:
        """Describe the plan: the dims that axes divide, the steps and the sums.

        Example:  # doctest: +ELLIPSIS
            >>> mesh = Layout.from_shape((2,), ("tp",))
            >>> print(plan("b d, d f@tp -> b f@tp", mesh=mesh, b=2, d=4, f=8).explain())
            einsum 'b d, d f@tp -> b f@tp': rank 0 (tp=0) of mesh (tp=2)
              tp divides 'f': the gradient of operand 0 is summed over it
              forward: 0 bytes in
              backward: 32 bytes in
                gradient of operand 0: all-reduce over tp, 2 ranks: 2 x 4; 32 bytes in, ...
        """
        mesh = self.result.layout
        coordinate = self.result.coordinate
        lines = [
            f"einsum {self.layout.text!r}: rank {mesh.rank_at(coordinate)} "
            f"({mesh.coordinate_text(mesh.rank_at(coordinate))}) of mesh ({mesh.axis_text()})"
        ]
        lines += [f"  {self._axis_text(axis)}" for axis in range(mesh.ndim)]
        named = [(f"operand {at}", plan) for at, plan in enumerate(self.operands)]
        named.append(("result", self.result))
        back = [(f"gradient of {name}", plan.T) for name, plan in reversed(named)]
        for which, plans in (("forward", named), ("backward", back)):
            total = sum(plan.bytes_received(itemsize) for _, plan in plans)
            lines.append(f"  {which}: {bytes_text(total)} in")
            for name, plan in plans:
                lines += [
                    f"    {name}: {step_text(step, mesh, plan.links, itemsize)}"
                    for step in plan.steps
                ]
        return "\n".join(lines)

    def _axis_text(self, axis: int) -> str:
        """Return a line on the dim and the sums of ``axis``."""
        work, choice = self.layout.work, self.layout.choices[axis]
        name = (self.result.layout.names or ())[axis] if self.result.layout.names else str(axis)
        if choice is None:
            return f"{name} divides nothing: each rank along it computes the same"
        what = f"{name} divides {choice!r}"
        if isinstance(choice, int):
            what = f"{name} divides the partial sums of operand {choice}"
        sums = []
        if axis in work.result.unreduced:
            kept = axis in self.layout.result.parts.placement.unreduced
            sums.append("the result stays unreduced" if kept else "the result is summed over it")
        for at, (taken, source) in enumerate(zip(work.operands, self.layout.sources, strict=True)):
            if axis in taken.reduced:
                stays = axis in source.reduced
                sums.append(
                    f"the gradient of operand {at} "
                    + ("stays unreduced" if stays else "is summed over it")
                )
        return f"{what}: {', '.join(sums) or 'nothing is summed over it'}"

    def __repr__(self) -> str:
        return f"<EinsumPlan {self.layout.text!r} at {self.result.coordinate}>"


def plan_einsum(
    laid: EinsumLayout, layout: Layout, coordinate: tuple[int, ...], links: tuple[Link, ...]
) -> EinsumPlan:
    moves = [*zip(laid.operands, laid.sources, laid.work.operands, strict=True)]
    moves.append((laid.result, laid.work.result, laid.result.parts.placement))
    which = [*(f"operand {number}" for number in range(len(laid.operands))), "the result"]
    *operands, result = [
        make_plan(
            source,
            target,
            coordinate,
            layout=layout,
            links=links,
            op_name=f"einsum {laid.text!r}: {name} of shape {side.parts.shape}",
        )
        for (side, source, target), name in zip(moves, which, strict=True)
    ]
    return EinsumPlan(laid, tuple(operands), result)

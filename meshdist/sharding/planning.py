"""``plan``: from specs or a pattern on meshes to one rank's plan."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arguments import get_shape, get_whole_number
from ..errors import ArgumentError, AxisError, KindError
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout
from ..mesh.partition_spec import PartitionSpec
from ..mesh.pattern_sizes import Regrouping, regroup
from ..mesh.spec import NamedSharding
from .plans import Plan, make_plan
from .refinement import refine
from .routes import DEFAULT_LINK, Link, default_link, links_of

__all__ = ["mesh_links", "mesh_rank", "plan", "plan_regrouping", "plan_shardings"]

Links = Mapping[str | int, Link] | Link
# So many sizes of shards are written out in a plan's title, more as a number made of them.
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
) -> Plan:
    """Return what one rank does to bring an array from one sharding to another; sends nothing.

    The plan receives the fewest bytes, of all ranks together, among the ways that are known; ways
    that receive equal bytes are chosen by time, then by steps. All ranks choose alike.

    Args:
        src: how the array lies: a pattern with "->", such as ``"b@dp s -> b s@dp"``, or a
            ``NamedSharding``, or a ``PartitionSpec``.
        dst: how it shall lie; None with a pattern.
        mesh: of a pattern, and of specs; None takes the mesh in force. A ``Layout`` plans without
            processes.
        shape: of the whole array. A pattern can take ``sizes`` instead.
        links: how fast each axis is, by name or index, or one ``md.Link`` for all; equal on all
            ranks. By default constants of the axis's wire, which differ where it leaves the host.
        rank: whose plan; None takes this process's on a ``DeviceMesh``, a ``Layout``'s first.
        sizes: the whole sizes of a pattern's dims, by name.

    Returns:
        The ``Plan``: ``steps``, ``explain()``, ``bytes_received()``, ``bytes_sent()``,
        ``peak_bytes()``, ``estimated_s()``, and ``T``, the plan of the gradient. It is kept: the
        same arguments give the same object. The dims of a pattern's plan are its named parts, in
        the order of its left side.

    Gradient: ``plan.T``: from the destination's cotangent to the source's, dims alike, unreduced
        and reduced exchanged.

    Cost: nothing is sent; the time is that of the rank's own part.

    Raises:
        ArgumentError: no destination, two, or no shape.
        KindError: something else than patterns, specs or shardings.
        MeshError: no mesh, meshes over other ranks, or without a common refinement.
        NotInGroupError: the mesh does not hold the rank.
        PatternError, AxisError, ShapeError: a pattern or spec that does not fit mesh or shape.

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
                "a pattern is source and destination in one",
                where="md.plan",
                expected='one pattern with "->", or two specs',
                found=f"{src!r} and {dst!r}",
                fix=None
                if isinstance(dst, (PartitionSpec, NamedSharding, str))
                else "name the mesh: plan(pattern, mesh=mesh)",
            )
        given, mesh = mesh, mesh_in_force("plan") if mesh is None else mesh
        layout = _layout_of(mesh)
        whole = None if shape is None else get_shape(shape, "plan")
        try:
            moved = regroup(src, layout, shape=whole, sizes=sizes)
        except AxisError as error:
            raise with_hidden_mesh(error, given) from None
        return plan_regrouping(src, moved, layout, mesh_rank(mesh, rank), mesh_links(mesh, links))
    if sizes:
        raise ArgumentError(
            "sizes by name are for patterns, whose dims have names",
            where="md.plan",
            found=", ".join(f"{name}={size!r}" for name, size in sizes.items()),
            fix="give the shape of the whole array: shape=(...)",
        )
    source, target = _sharding(src, "src", mesh), _sharding(dst, "dst", mesh)
    if shape is None:
        raise ArgumentError(
            "a plan between specs needs the shape of the whole array",
            where="md.plan",
            fix="write plan(src, dst, mesh, shape)",
        )
    whole = get_shape(shape, "plan")
    at, speeds = mesh_rank(source.mesh, rank), mesh_links(source.mesh, links)
    return plan_shardings(source, target, whole, at, speeds)


def plan_regrouping(
    text: str, moved: Regrouping, layout: Layout, rank: int, links: tuple[Link, ...]
) -> Plan:
    """Return one rank's plan for a pattern, sized by ``regroup``; its dims are the named parts."""
    return make_plan(
        moved.placement,
        moved.target_placement,
        layout.get_coordinate(rank),
        layout=layout,
        links=links,
        title=f"{text} of shape {moved.source.shape}",
    )


def plan_shardings(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    rank: int,
    links: tuple[Link, ...],
) -> Plan:
    """Return one rank's plan between two shardings; ``links`` are of the source's axes.

    Raises:
        MeshError: meshes over other ranks, or without a common refinement.
        NotInGroupError: the mesh does not hold the rank.
        ShapeError: a spec does not fit the shape.
    """
    here, there = source.placement(shape), target.placement(shape)
    title = _title(source, target, shape)
    if source.layout == target.layout:
        coordinate = source.layout.get_coordinate(rank)
        return make_plan(here, there, coordinate, layout=source.layout, links=links, title=title)
    both = refine(source.layout, target.layout)
    return make_plan(
        both.source_placement(here),
        both.target_placement(there),
        both.layout.get_coordinate(rank),
        layout=both.layout,
        links=tuple(links[owner] for owner in both.owners),
        title=title,
    )


def mesh_rank(mesh: DeviceMesh | Layout, rank: int | None = None) -> int:
    """Return the rank whose plan is meant: this process's, or a bare layout's first."""
    if rank is not None:
        return get_whole_number(rank, "plan: rank")
    return mesh.rank_at((0,) * mesh.ndim) if isinstance(mesh, Layout) else mesh.get_rank()


def mesh_links(mesh: DeviceMesh | Layout, links: Links | None = None) -> tuple[Link, ...]:
    """Return one link per axis: those given, else the constants of the axes' wires."""
    layout = _layout_of(mesh)
    if isinstance(mesh, Layout):
        return links_of(layout, links, (DEFAULT_LINK,) * layout.ndim)
    defaults = mesh.caches.of(tuple[Link, ...], partial(_wire_links, mesh))
    return defaults if links is None else links_of(layout, links, defaults)


def _wire_links(mesh: DeviceMesh) -> tuple[Link, ...]:
    hosts = np.array(mesh.world.hosts)[mesh.layout.ranks()]
    return tuple(
        default_link(mesh.wire_of(axis), spans_hosts=bool((hosts != hosts.take([0], axis)).any()))
        for axis in range(mesh.ndim)
    )


# -- arguments ----------------------------------------------------------------------------------


def _layout_of(mesh: Any) -> Layout:
    layout = mesh if isinstance(mesh, Layout) else getattr(mesh, "layout", None)
    if not isinstance(layout, Layout):
        raise KindError(
            "a plan lies on a mesh",
            where="argument mesh",
            expected="a DeviceMesh or a Layout",
            found=f"a {type(mesh).__name__}",
        )
    return layout


def _sharding(given: Any, name: str, mesh: DeviceMesh | Layout | None) -> NamedSharding:
    if isinstance(given, NamedSharding):
        return given
    if isinstance(given, PartitionSpec):
        chosen = mesh_in_force("plan") if mesh is None else mesh
        _layout_of(chosen)
        try:
            return NamedSharding(chosen, given)
        except AxisError as error:
            raise with_hidden_mesh(error, mesh) from None
    is_missing = name == "dst" and given is None
    raise KindError(
        "a plan needs a destination" if is_missing else f"{name} is no spec",
        where=f"md.plan, argument {name}",
        expected="a NamedSharding or a PartitionSpec",
        found=f"{given!r}, a {type(given).__name__}",
        fix='write a pattern alone as the first argument: plan("b@dp s -> b s@dp", mesh=mesh)',
    )


def _spec_text(spec: PartitionSpec, sizes: tuple[tuple[int, tuple[int, ...]], ...]) -> str:
    if not sizes:
        return repr(spec)
    text = repr(dict(sizes))
    if sum(len(cells) for _, cells in sizes) > _FEW_SIZES:
        text = f"#{zlib.crc32(text.encode()):08x}"
    return f"{spec!r} with shard sizes {text}"


def _title(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> str:
    here, there = (
        _spec_text(one.spec, tuple(one.shard_sizes.items()) if one.shard_sizes else ())
        for one in (source, target)
    )
    return f"{here} -> {there} of shape {shape}"

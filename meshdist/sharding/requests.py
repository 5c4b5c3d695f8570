"""Plans, and the requests of ``reshard``, ``shard`` and ``unshard`` that lead to them.

Whatever does not fit is refused here, before anything is sent.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..arguments import get_shape, get_whole_number, mesh_kind_error
from ..errors import ArgumentError, AxisError, KindError, ShapeError
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh, coordinate_in
from ..mesh.layout import Layout
from ..mesh.partition_spec import P, PartitionSpec, axes_of
from ..mesh.pattern import parse
from ..mesh.pattern_sizes import Regrouping, regroup, size_side
from ..mesh.spec import NamedSharding
from .einsum_layouts import lay_out_einsum
from .einsum_plans import EinsumPlan, plan_einsum
from .plans import Plan, make_plan
from .refinement import refine
from .routes import DEFAULT_LINK, Link, default_link, links_of

__all__ = ["plan"]

Links = Mapping[str | int, Link] | Link
# So many sizes of shards are written out in a plan's title, more as a number made of them.
_FEW_SIZES = 8

_Sizes = Mapping[str, int]


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
    """Return what one rank does to bring an array from one sharding to another; sends nothing.

    The plan receives the fewest bytes, of all ranks together, among the ways that are known; ways
    that receive equal bytes are chosen by time, then by steps. All ranks choose alike.

    Args:
        src: how the array lies: a pattern with "->", such as ``"b@dp s -> b s@dp"``, or a
            ``NamedSharding``, or a ``PartitionSpec``. A pattern of several operands, such as
            ``"b d, d f@tp -> b f@tp"``, is that of an einsum.
        dst: how it shall lie; None with a pattern.
        mesh: of a pattern, and of specs; None takes the mesh in force. A ``Layout`` plans without
            processes.
        shape: of the whole array. A pattern can take ``sizes`` instead, that of an einsum must.
        links: the speed of each axis, by name or index, or one ``md.Link`` for all; equal on all
            ranks. By default constants of the axis's wire, which differ where it leaves the host.
        rank: whose plan; None takes this process's on a ``DeviceMesh``, a ``Layout``'s first.
        sizes: the whole sizes of a pattern's dims, by name.

    Returns:
        The ``Plan``: ``steps``, ``explain()``, ``bytes_received()``, ``bytes_sent()``,
        ``peak_bytes()``, ``estimated_s()``, and ``T``, the plan of the gradient. It is kept: the
        same arguments give the same object. The dims of a pattern's plan are its named parts, in
        the order of its left side. Of an einsum: an ``EinsumPlan`` with the plans ``operands`` and
        ``result``, ``bytes_received()``, also of the ``backward=True``, and ``explain()``.

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
        given_mesh, mesh = mesh, mesh_in_force("plan") if mesh is None else mesh
        layout = _layout_of(mesh)
        if shape is None and len((pattern := parse(src)).operands) > 1 and pattern.result:
            return _plan_of_einsum(src, given_mesh, mesh, mesh_links(mesh, links), rank, sizes)
        whole = None if shape is None else get_shape(shape, "plan")
        try:
            moved = regroup(src, layout, shape=whole, sizes=sizes)
        except AxisError as error:
            raise with_hidden_mesh(error, given_mesh) from None
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


def _plan_of_einsum(
    text: str,
    given_mesh: Any,
    mesh: DeviceMesh | Layout,
    links: tuple[Link, ...],
    rank: int | None,
    sizes: _Sizes,
) -> EinsumPlan:
    """Return one rank's plan of an einsum whose sizes are given by name.

    Args:
        given_mesh: the mesh that the program names; None if it is in force, which errors then say.
    """
    check_sizes(text, sizes)
    layout, at = _layout_of(mesh), mesh_rank(mesh, rank)
    marks = ((),) * len(parse(text).operands)
    try:
        laid = lay_out_einsum(text, layout, at, None, tuple(sizes.items()), marks)
    except AxisError as error:
        raise with_hidden_mesh(error, given_mesh) from None
    return plan_einsum(laid, layout, layout.get_coordinate(at), links)


def plan_regrouping(
    text: str, moved: Regrouping, layout: Layout, rank: int, links: tuple[Link, ...]
) -> Plan:
    """Return one rank's plan of a reshard pattern, whose dims are the pattern's named parts."""
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
    """Return one rank's plan between two shardings; ``links`` are of the source's axes."""
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
        links=tuple(links[axis] for axis in both.source_axis_of_each),
        title=title,
    )


def mesh_rank(mesh: DeviceMesh | Layout, rank: int | None = None) -> int:
    """Return ``rank``, or this process's rank on a mesh, or the first rank of a Layout."""
    if rank is not None:
        return get_whole_number(rank, "plan: rank")
    return mesh.rank_at((0,) * mesh.ndim) if isinstance(mesh, Layout) else mesh.get_rank()


def mesh_links(mesh: DeviceMesh | Layout, links: Links | None = None) -> tuple[Link, ...]:
    """Return a link per axis: ``links``, or the constants of the axes' wires; or raise."""
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
        _spec_text(sharding.spec, tuple(sharding.shard_sizes.items()))
        for sharding in (source, target)
    )
    return f"{here} -> {there} of shape {shape}"


@dataclass(frozen=True)
class ReshardRequest:
    """A call that moves an array: its shardings before and after, and this rank's plan between.

    Args:
        verb: the public call.
        mesh: the mesh whose groups the plan's axes mean.
        meshes: the source's and the target's.
        split: einops' pattern that splits a local array into parts, with the local sizes that it
            needs; None for nothing.
        merge: einops' pattern that merges the parts of the result; None for nothing.
    """

    # A pattern's groups stand for several parts. What moves are parts, in the order of the right
    # side, so that the result needs no copy to be merged.

    verb: str
    mesh: DeviceMesh
    meshes: tuple[DeviceMesh, DeviceMesh]
    source: NamedSharding
    target: NamedSharding
    plan: Plan
    split: tuple[str, Mapping[str, int]] | None = None
    merge: str | None = None


def get_mesh(verb: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``mesh``, or the mesh in force for None; raise unless this rank is in it."""
    mesh = mesh_in_force(verb) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(
            f"{verb} needs the groups of a DeviceMesh",
            mesh,
            fix="plan on a Layout with md.plan; move data on a DeviceMesh",
        )
    coordinate_in(mesh, verb)
    return mesh


def pattern_request(
    text: str,
    mesh: DeviceMesh,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
    sizes: _Sizes,
) -> ReshardRequest:
    """Return the request of ``reshard(x, "left -> right")``; None: infer the whole shape."""
    check_sizes(text, sizes)
    found = regroup(
        text, mesh.layout, rank=mesh.get_rank(), local_shape=local_shape, shape=shape, sizes=sizes
    )
    left, right = found.source, found.target
    plan = make_plan(
        left.placement.permuted(found.order),
        right.placement,
        mesh.get_coordinate() or (),
        layout=mesh.layout,
        links=mesh_links(mesh),
        title=f"{text} of shape {left.shape}",
    )
    split = merge = None
    if found.is_reordered or any(count != 1 for count in (*left.counts, *right.counts)):
        letters = {name: f"d{place}" for place, name in enumerate(left.names)}
        names = [letters[name] for name in right.names]
        local = plan.source.local_shape(plan.coordinate)
        split = (
            f"{_side_text(left.names, left.counts, letters)} -> {' '.join(names)}",
            dict(zip(names, local, strict=True)),
        )
        merge = f"{' '.join(names)} -> {_side_text(right.names, right.counts, letters)}"
    meshes = (mesh, mesh)
    return ReshardRequest(
        "reshard", mesh, meshes, left.sharding, right.sharding, plan, split, merge
    )


def sharding_request(
    source: NamedSharding,
    target: NamedSharding,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
) -> ReshardRequest:
    """Return the request of ``reshard(x, source, target)``; the whole ``shape`` may be inferred."""
    shape = whole_shape(source, local_shape) if shape is None else shape
    check_shard("reshard", get_mesh("reshard", source.mesh), source, shape, local_shape)
    get_mesh("reshard", target.mesh)
    return move_request("reshard", source, target, shape)


def shard_request(
    pattern: str | NamedSharding, mesh: DeviceMesh, shape: tuple[int, ...], sizes: _Sizes
) -> ReshardRequest:
    """Return the request of ``shard``, from the whole on each rank; ``sizes`` are of named dims."""
    target = pattern
    if not isinstance(target, NamedSharding):
        check_sizes(target, sizes)
        target = size_side(target, mesh.layout, shape=shape, sizes=sizes).sharding
    return move_request("shard", NamedSharding(mesh, P()), on_mesh(mesh, target), shape)


def unshard_request(
    pattern: str | NamedSharding,
    mesh: DeviceMesh,
    local_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
    sizes: _Sizes,
) -> ReshardRequest:
    """Return the request of ``unshard``: from shards to the whole array on each rank."""
    if isinstance(pattern, NamedSharding):
        source = pattern
        shape = whole_shape(source, local_shape) if shape is None else shape
    else:
        check_sizes(pattern, sizes)
        side = size_side(
            pattern,
            mesh.layout,
            rank=mesh.get_rank(),
            local_shape=local_shape,
            shape=shape,
            sizes=sizes,
        )
        source, shape = side.sharding, side.shape
    check_shard("unshard", mesh, source, shape, local_shape)
    return move_request("unshard", on_mesh(mesh, source), NamedSharding(mesh, P()), shape)


def move_request(
    verb: str, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]
) -> ReshardRequest:
    """Return the request to move an array of the whole ``shape`` from one sharding to another."""
    mesh, other = source.mesh, target.mesh
    plan = plan_shardings(source, target, shape, mesh.get_rank(), mesh_links(mesh))
    whole = mesh
    if plan.layout != mesh.layout:
        whole = mesh.refined(plan.layout, refine(mesh.layout, other.layout).source_axis_of_each)
    return ReshardRequest(verb, whole, (mesh, other), source, target, plan)


def whole_shape(sharding: NamedSharding, local_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the whole's shape by a shard's; dims without given sizes count as even."""
    # Entries of the spec beyond the array's dims are left to the placement, which refuses them.
    sizes, entries = sharding.layout.axis_sizes, sharding.spec.partitions
    whole = []
    for dim, size in enumerate(local_shape):
        if dim in sharding.shard_sizes:
            whole.append(sum(sharding.shard_sizes[dim]))
        else:
            axes = axes_of(entries[dim]) if dim < len(entries) else ()
            whole.append(size * math.prod(sizes[axis] for axis in axes))
    return tuple(whole)


def sized_by_shards(
    sharding: NamedSharding, shapes: Mapping[int, Sequence[int]]
) -> tuple[NamedSharding, tuple[int, ...]]:
    """Return a sharding with the sizes of its dims' parts, and the shape of the whole.

    Args:
        shapes: of the ranks' shards, by rank.

    Example: along 'i' of a mesh (i=2, j=2) ranks 0 and 1 hold part 0, ranks 2 and 3 part 1; the
    shapes of ranks 0 and 2 tell the sizes, those of ranks 1 and 3 must be the same.
    """
    layout, mesh, spec = sharding.layout, sharding.mesh, sharding.spec
    sizes = dict(sharding.shard_sizes)
    for dim, entry in enumerate(spec.partitions):
        axes = layout.axis_indices(axes_of(entry)) if entry else ()
        if axes and dim not in sizes:
            count = math.prod(layout.sizes[axis] for axis in axes)
            ranks = np.moveaxis(layout.ranks(), axes, range(len(axes))).reshape(count, -1)
            sizes[dim] = tuple([shapes[rank][dim] for rank in ranks[:, 0].tolist()])
    sized = NamedSharding(mesh, spec, shard_sizes=sizes)
    shape = whole_shape(sized, next(iter(shapes.values())))
    dims = sized.placement(shape).dims
    sizes = {dim: split.cell_sizes for dim, split in enumerate(dims) if split.cell_sizes}
    return NamedSharding(mesh, spec, shard_sizes=sizes), shape  # a balanced cut says none


def check_shard(
    verb: str,
    mesh: DeviceMesh,
    sharding: NamedSharding,
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> None:
    """Raise ShapeError unless a local shape is that of this rank's shard."""
    expected = sharding.shard_shape(shape, mesh.get_rank())
    if expected != local_shape:
        raise ShapeError(
            f"{verb}: the local array is no shard of the whole",
            where=f"rank {mesh.get_rank()}, {sharding.spec!r} on mesh ({mesh.layout.axis_text()})",
            expected=f"shape {expected}, this rank's shard of {shape}",
            found=f"shape {local_shape}",
            fix="give the shape of the whole array, equal on all ranks: shape=(...); and parts of "
            "other sizes than a balanced cut has by md.NamedSharding(mesh, spec, "
            "shard_sizes={dim: sizes})",
        )


def check_sizes(text: str, sizes: _Sizes) -> None:
    """Raise unless ``text`` is a pattern and ``sizes`` are whole numbers."""
    parse(text)  # both are keys of caches, and must be hashable
    for name, size in sizes.items():
        get_whole_number(size, f"the size of dim {name!r}", where=f"pattern {text!r}")


def on_mesh(mesh: DeviceMesh, sharding: NamedSharding) -> NamedSharding:
    """Return ``sharding``, which may be on a mere layout, as a sharding on ``mesh``."""
    if sharding.mesh is mesh:
        return sharding
    return NamedSharding(mesh, sharding.spec, shard_sizes=sharding.shard_sizes)


def _side_text(names: Sequence[str], counts: Sequence[int], letters: Mapping[str, str]) -> str:
    """Return a side of einops' pattern.

    Example:
        >>> _side_text(("h", "k", "s"), (2, 0, 1), {"h": "d0", "k": "d1", "s": "d2"})
        '(d0 d1) 1 d2'
    """
    rest = iter(names)
    groups = [" ".join([letters[next(rest)] for _ in range(count)]) for count in counts]
    return " ".join(f"({group})" if " " in group else group or "1" for group in groups)

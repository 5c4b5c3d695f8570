"""Move arrays between shardings: ``reshard``, ``shard``, ``unshard`` and ``device_put``.

``device_put`` from a root sends each element once. If replicas hold the array, the root scatters
distinct parts among them, and they exchange the parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..annotations.tensor_specs import mark_spec
from ..arguments import get_integer, get_shape
from ..arrays import Array, as_tensor, like as as_given
from ..checking.call_sites import one_frame
from ..collectives.objects import broadcast_object_list
from ..collectives.torch_private import HiddenFromModes
from ..error_text import ranks_text, with_article
from ..errors import (
    ArgumentError,
    AxisError,
    GradientError,
    KindError,
    MeshdistError,
    MismatchError,
    NotInGroupError,
)
from ..functional.equality_checks import check_replicas
from ..mesh.current_mesh import get_mesh, require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import P, PartitionSpec
from ..mesh.pattern import parse
from ..mesh.spec import NamedSharding, sharding_of, shardings_of_sides
from ..typed_mode.context import find_context
from .array_creation import in_library, library_of, mesh_device
from .descriptions import mesh_text
from .executor import gather_to_root, scatter
from .like_tensor import sharding_like
from .planner import move_title
from .resharding import Move, cut_further, move
from .sharded_array import ShardedArray, check_shard, checked_sharding

__all__ = ["device_put", "reshard", "shard", "unshard"]


@one_frame
def reshard(
    x: Array | ShardedArray,
    pattern: str | NamedSharding | PartitionSpec,
    /,
    mesh: DeviceMesh | NamedSharding | None = None,
    *,
    shape: Sequence[int] | None = None,
    check: bool | None = None,
    **sizes: int,
) -> Any:
    """Change the sharding of an array from a pattern's left side to its right side; collective.

    Any collective is a pattern: ``"b@dp -> b"`` gathers, ``"b {U:dp} -> b"`` sums,
    ``"b {U:dp} -> b@dp"`` sums and scatters, ``"s@tp d -> s d@tp"`` is an all-to-all, and
    ``"b -> b@dp"`` slices without communication. The right side may reorder and regroup dims.

    Args:
        x: this rank's shard, an array of any library and memory layout; or a ``ShardedArray``.
        pattern: the current and the new sharding; or the current ``NamedSharding``. For a
            ``ShardedArray``, the new sharding only: one side, a sharding or a spec.
        mesh: the mesh whose axes the pattern names; None takes the current mesh. After a
            ``NamedSharding``: the target sharding.
        shape: the global shape; None multiplies shard sizes by shard counts, or uses ``sizes``.
        check: if True, ranks compare values along axes that the right side cuts or sums and the
            left does not name; None compares on simulated ranks and at debug level DETAIL.
        sizes: global sizes by dim, for uneven shards and inside of groups: ``b=10, k=4``.

    Returns:
        An array like ``x``, in new memory, bitwise equal on replicas. A ``ShardedArray`` itself if
        nothing changes.

    Gradient:
        The transposed communication, from the right side's cotangent to the left side's, with U
        and R exchanged.

    Cost:
        ``md.plan`` with the same arguments computes it; the plan sends the fewest bytes.

    Raises:
        PatternError, AxisError, ShapeError: the pattern does not fit the mesh or ``x``.
        DtypeError: partial sums are bool. MeshError: there is no current mesh.
        NotInGroupError: this rank is not in the mesh.
        MismatchError: ranks have different plans. UnequalError: compared values differ.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     rows = torch.arange(4).view(1, 4) + 10 * md.get_rank()     # one of two rows
        ...     with mesh:
        ...         return md.reshard(rows, "s@tp d -> s d@tp").tolist()   # two of four columns
        >>> md.simulate(program, 2)
        [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]
    """
    if isinstance(x, ShardedArray):
        if shape is not None or mesh not in (None, x.mesh):
            raise ArgumentError(
                "reshard of a ShardedArray takes no mesh and no shape",
                found=f"mesh={mesh!r}, shape={shape!r}",
                fix="leave them out: reshard(x, target)",
            )
        local = as_tensor(x.local, argument="x", operation="reshard", writable=False)
        check_replicas(local, x.mesh, x.sharding.replicated_axes, f"reshard {x.shape}", bool(check))
        return x.reshard(pattern, **sizes)
    tensor = as_tensor(x, argument="x", operation="reshard", writable=False)
    known = None if shape is None else get_shape(shape, "reshard")
    target: Any
    asked: Any
    target, asked = (mesh, None) if isinstance(pattern, NamedSharding) else (None, mesh)
    key = "reshard", pattern, target, tensor.shape, known, *sizes.items()
    return _moved(x, tensor, key, asked, check)


@one_frame
def shard(
    whole: Array,
    pattern: str | NamedSharding | None = None,
    /,
    mesh: DeviceMesh | None = None,
    *,
    like: torch.Tensor | None = None,
    check: bool | None = None,
    **sizes: int,
) -> Any:
    """Return this rank's shard of an array that all ranks hold; inverse of ``unshard``.

    Args:
        whole: the same array on every rank; of any library.
        pattern: the new sharding, such as ``"b@dp s d"`` or a ``NamedSharding``; None with
            ``like``.
        mesh: as for ``reshard``.
        like: a tensor whose annotation has the sharding, such as a parameter; see ``unshard``.
        check: if True, all ranks call it and compare ``whole``; None as in ``reshard``.
        sizes: of dims inside of groups: ``shard(w, "(h k)@tp d", mesh, k=64)``.

    Returns:
        An array like ``whole``, in new memory. Along unreduced axes, coordinate 0 has the values
        and the others have zeros.

    Gradient:
        ``unshard``.

    Cost:
        Nothing is sent; the backward gathers. With ``like``, 8 bytes per dim in the first call if
        its global shape is not known.

    Raises:
        PatternError, AxisError, ShapeError: the pattern does not fit the mesh or the array.
        DtypeError: partial sums are bool. MeshError, NotInGroupError: see ``reshard``.
        ArgumentError: ``like`` has no spec. ShapeError: it has another global shape.

    Example:
        >>> import numpy as np, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     return md.shard(np.arange(5), "b@dp", mesh).tolist()
        >>> md.simulate(program, 2)
        [[0, 1, 2], [3, 4]]
    """
    tensor = as_tensor(whole, argument="whole", operation="shard", writable=False)
    if like is not None or pattern is None:
        _check_like("shard", pattern, like, sizes)
        pattern, _ = sharding_like("shard", like, mesh, None, tuple(tensor.shape))
        mesh = None
    key = "shard", pattern, None, tensor.shape, tuple(tensor.shape), *sizes.items()
    return _moved(whole, tensor, key, mesh, check)


@one_frame
def unshard(
    local: Array | ShardedArray,
    pattern: str | NamedSharding | None = None,
    /,
    mesh: DeviceMesh | None = None,
    root: int | None = None,
    *,
    shape: Sequence[int] | None = None,
    like: torch.Tensor | None = None,
    **sizes: int,
) -> Any:
    """Gather an array on every rank, or on a root; inverse of ``shard``; collective.

    Args:
        local: this rank's shard, an array of any library; or a ``ShardedArray``.
        pattern: its sharding, such as ``"b@dp s d"`` or a ``NamedSharding``; None for a
            ``ShardedArray`` or with ``like``.
        root: the world rank that gets the global array, the same on all ranks; None for every rank.
        mesh, shape, sizes: as for ``reshard``.
        like: a tensor of the same shape whose annotation has the sharding, such as the parameter of
            a gradient: ``unshard(p.grad, like=p)``. Parts may be uneven. Without ``mesh``, and if
            the current mesh lacks its axes, they are looked up in the open meshes.

    Returns:
        An array like ``local``, in new memory, bitwise equal on every rank. With a root, None on
        the other ranks.

    Gradient:
        ``shard``, without communication. With a root, none.

    Cost:
        Each rank receives the elements it lacks; for partial sums, as many as in an all-reduce.
        With a root, each element is sent once, after partial sums are added. With ``like``, 8 bytes
        per dim more in the first call, unless ``parallelize``, ``shard`` or ``reshard`` made it.

    Raises:
        As ``reshard``. KindError, NotInGroupError: the root is not in the mesh.
        ArgumentError: ``like`` has no spec. ShapeError: it has another shape, or the parts of the
        ranks do not form a global array. MeshError: no open mesh has its axes, or several.
        GradientError: with a root, a tensor requires a gradient.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     return md.unshard(torch.full((1,), md.get_rank()), "b@dp", mesh).tolist()
        >>> md.simulate(program, 2)
        [[0, 1], [0, 1]]
    """
    if isinstance(local, ShardedArray):
        if pattern is not None:
            raise ArgumentError(
                "unshard of a ShardedArray takes no pattern",
                expected="unshard(array), or unshard(array, root=0)",
                found=f"pattern {pattern!r}",
            )
        local, pattern, shape = local.local, local.sharding, local.shape
    tensor = as_tensor(local, argument="local", operation="unshard", writable=False)
    if like is not None or pattern is None:
        given = sizes if shape is None else {"shape": shape, **sizes}
        _check_like("unshard", pattern, like, given)
        pattern, shape = sharding_like("unshard", like, mesh, tuple(tensor.shape))
        mesh = None
    lies: Any = pattern
    known = None if shape is None else get_shape(shape, "unshard")

    key = "unshard", lies, None, tensor.shape, known, *sizes.items()
    if root is None:
        return _moved(local, tensor, key, mesh, False)
    found_mesh = _mesh_of("unshard", lies, mesh)
    rank = _checked_root(root, "unshard", found_mesh)
    caches = found_mesh.caches
    ends = caches.find(tuple, key) or caches.keep(tuple, key, _find_ends(key, mesh))
    source, _, whole_shape, _ = ends
    whole = _gathered(tensor, source, whole_shape, rank)
    return None if whole is None else as_given(whole, local)


def device_put(
    x: Array | ShardedArray | None,
    sharding: NamedSharding | PartitionSpec,
    root: int | None = None,
    *,
    check: bool | None = None,
) -> ShardedArray:
    """Shard ``x``: return it as a ``ShardedArray`` with this sharding.

    Args:
        x: without ``root``: the global array, equal on every rank, of any library; or a
            ``ShardedArray``, which is resharded. With ``root``: the global array there, ignored
            on the other ranks.
        sharding: the new sharding; a ``PartitionSpec`` uses the current mesh.
        root: the world rank that holds the global array, the same on every rank. Makes the call
            collective over the mesh.
        check: without ``root``, whether all ranks compare ``x``; None as in ``reshard``.

    Returns: an array in new memory, of the library of ``x``; tensors are on the mesh's device.
        Along unreduced axes, coordinate 0 has the values and the others have zeros.

    Gradient: gathered on every rank, or with a root on the root. Every rank must then take part
        in the backward.

    Cost: nothing is sent without a root. With a root, each element leaves it once; replicas
        exchange their parts.

    Raises:
        KindError: ``x`` is not an array. If it is None on the root, every rank raises.
        NotInGroupError: this rank, or the root, is not in the mesh.
        ShapeError: the sharding does not fit the shape.
        MismatchError: ranks pass different roots. UnequalError: compared values differ.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     whole = torch.arange(5) if md.get_rank() == 0 else None
        ...     return md.device_put(whole, md.NamedSharding(mesh, md.P("dp")), root=0).local
        >>> md.simulate(program, 2)
        [tensor([0, 1, 2]), tensor([3, 4])]
    """
    where = checked_sharding(sharding, "device_put")
    if root is not None:
        return _put_from_root(x, where, root)
    if isinstance(x, ShardedArray):
        local = as_tensor(x.local, argument="x", operation="device_put", writable=False)
        check_replicas(local, x.mesh, x.sharding.replicated_axes, f"put {x.shape}", bool(check))
        return x.reshard(where)
    tensor = as_tensor(x, argument="x", operation="device_put", writable=False)
    library = library_of(x)
    if library == "torch":
        tensor = tensor.to(mesh_device(where.mesh))
    shape = tuple(tensor.shape)
    where.placement(shape)  # Raise before anything is sent.
    check_replicas(
        tensor, where.mesh, where.mesh.axis_names, f"device_put as {where.spec!r}", check
    )
    moved = move(tensor, NamedSharding(where.mesh, P()), where, shape)
    return ShardedArray(in_library(moved, library), where, shape)


# -- moves ----------------------------------------------------------------------------------------


def _moved(
    x: Array, tensor: torch.Tensor, key: tuple[Any, ...], given_mesh: Any, check: bool | None
) -> Array:
    """Return the result of a call on ``tensor``, in the library of ``x``.

    Args:
        key: of the mesh's cache: the collective, the pattern or sharding, the target sharding or
            None, the local shape, the global shape or None, the sizes.
    """
    operation, pattern = key[:2]
    mesh = given_mesh
    if mesh is None:
        mesh = (
            pattern.mesh if isinstance(pattern, NamedSharding) else require_current_mesh(operation)
        )
    found = mesh.caches.find(Move, key) if isinstance(mesh, DeviceMesh) else None
    if found is None:
        ends = _find_ends(key, given_mesh)
        found = mesh.caches.keep(Move, key, Move(*ends, operation=operation))
    try:
        return as_given(found(tensor, check), x)
    except MismatchError as error:
        _add_sizes(error, key)
        raise


def _add_sizes(error: MismatchError, key: tuple[Any, ...]) -> None:
    """Add the missing sizes to the fix of ``error`` if ranks inferred different global shapes.

    Example: for "b@dp d -> b d@dp" rank 0 infers shape (6, 4) and rank 1 (8, 4), each twice its
    own 3 or 4 rows; the fix asks for b=...
    """
    _, pattern, _, _, shape, *sizes = key
    op_names = set(re.findall(r" of (\S.* of shape )(\([\d, ]*\))", error.found or ""))
    if shape is not None or len({op_name for op_name, _ in op_names}) != 1 or len(op_names) == 1:
        return
    missing = "shape=(...)"
    if isinstance(pattern, str):
        dims = [dim for dim in parse(pattern).get_operand().dims if dim.axes]
        names = [dim.names[0] for dim in dims if dim.names[0] not in dict(sizes)]
        missing = ", ".join(f"{name}=..." for name in names if name.isidentifier()) or missing
    error.add_fix(
        "if the parts are uneven, pass the global size, the sum of all parts, on every rank: "
        f"{missing}"
    )


def _find_ends(
    key: tuple[Any, ...], given_mesh: DeviceMesh | None
) -> tuple[NamedSharding, NamedSharding, tuple[int, ...], str | None]:
    """Return source, target, global shape, and the pattern that states both, or None."""
    operation, pattern, target, local_shape, shape, *pairs = key
    mesh, sizes = _mesh_of(operation, pattern, given_mesh), dict(pairs)
    here: dict[str, Any] = {"local_shape": tuple(local_shape), "rank": mesh.get_rank()}
    try:
        if operation == "shard":
            if not isinstance(pattern, NamedSharding):
                pattern = NamedSharding.from_pattern(pattern, mesh, shape, sizes)
            return NamedSharding(mesh, P()), pattern, shape, None
        if isinstance(pattern, NamedSharding):
            if operation == "reshard":
                _check_target(target, sizes)
            else:
                target = NamedSharding(mesh, P())
            shape = pattern.whole_shape(local_shape) if shape is None else shape
            check_shard(operation, pattern, shape, tuple(local_shape))
            return pattern, target, shape, None
        if operation == "unshard":
            source = NamedSharding.from_pattern(pattern, mesh, shape, sizes, **here)
            return source, NamedSharding(mesh, P()), source.parts.shape, None
        source, target = shardings_of_sides(pattern, mesh, shape, sizes, **here)
        return source, target, source.parts.shape, pattern
    except AxisError as error:
        raise with_outer_mesh_hint(error, given_mesh) from None


def _check_like(operation: str, pattern: object, like: object, given: Mapping[str, Any]) -> None:
    """Raise unless exactly one of ``pattern`` and ``like`` is given, and no sizes with ``like``."""
    if pattern is None and like is None:
        raise KindError(
            f"{operation} requires a sharding",
            fix=f'pass a pattern, {operation}(x, "b@dp d"), or an annotated tensor: '
            f"{operation}(x, like=p)",
        )
    others = [repr(pattern)] * (pattern is not None) + [f"{k}={v!r}" for k, v in given.items()]
    if others:
        raise ArgumentError(
            f"{operation} takes either like= or a pattern with sizes",
            found=f"like= and {', '.join(others)}",
            fix=f"leave them out: {operation}(x, like=p)",
        )


def _check_target(target: object, sizes: Mapping[str, int]) -> None:
    if not isinstance(target, NamedSharding):
        raise KindError(
            "reshard from a NamedSharding needs a target NamedSharding",
            expected="reshard(x, source, target)",
            found=f"{with_article(type(target).__name__)} as target",
        )
    if sizes:
        raise ArgumentError(
            "reshard between NamedShardings takes no sizes by name",
            found=", ".join(f"{name}={size}" for name, size in sizes.items()),
            fix="pass the global shape: shape=(...)",
        )
    get_mesh("reshard", target.mesh)


def _mesh_of(operation: str, pattern: Any, mesh: DeviceMesh | None) -> DeviceMesh:
    if not isinstance(pattern, NamedSharding):
        return get_mesh(operation, mesh)
    if mesh is not None and mesh != pattern.mesh:
        raise ArgumentError(
            f"{operation}: mesh= is not the mesh of the NamedSharding",
            expected=f"{pattern.mesh!r}, or none",
            found=f"mesh={mesh!r}",
            fix="leave mesh= out",
        )
    return get_mesh(operation, pattern.mesh)


# -- one rank that holds the whole ----------------------------------------------------------------


def _checked_root(root: Any, operation: str, mesh: DeviceMesh) -> int:
    rank = get_integer(root, f"{operation}: root", expected="a rank")
    if mesh.layout.coordinate_of(rank) is None:
        raise NotInGroupError(
            f"{operation}: the mesh does not contain the root, rank {rank}",
            where=f"rank {mesh.get_rank()}, mesh ({mesh.layout.axis_text()})",
            expected=f"one of {ranks_text(mesh.layout.ranks().ravel().tolist())}",
        )
    return rank


def _gathered(
    x: torch.Tensor, source: NamedSharding, shape: tuple[int, ...], root: int
) -> torch.Tensor | None:
    """Return the global array on the root, in new memory; None on all other ranks."""
    mesh, whole = source.mesh, NamedSharding(source.mesh, P())
    op_name = f"{move_title(source, whole, shape)} on rank {root}"
    if x.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            "unshard with a root has no gradient",
            where=op_name,
            expected="a tensor without requires_grad, since ranks without a result have no "
            "backward",
            fix="pass local.detach(), or leave root= out, so that every rank gets the global array",
        )
    if source.spec.unreduced:  # Add partial sums first, scattered over their axes.
        axes = source.layout.axis_indices(tuple(source.spec.unreduced))
        target = cut_further(source, shape, tuple(sorted(axes))) if shape else whole
        x, source = Move(source, target, shape, operation="unshard")(x), target
    return gather_to_root(x, mesh, source.placement(shape), root, op_name)


@dataclass(frozen=True)
class _Facts:
    """The shape, dtype and library of the root's array, which the other ranks receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    library: str
    requires_grad: bool


def _put_from_root(x: Any, target: NamedSharding, root: object) -> ShardedArray:
    mesh = target.mesh
    rank = _checked_root(root, "device_put", mesh)
    group_rank = mesh.open_group().ranks.index(rank)
    tensor, facts = _share_facts(x, target, group_rank, is_root=mesh.get_rank() == rank)
    # A scalar has no dim to divide among replicas.
    shape = facts.shape or (1,)
    wide = sharding_of(mesh, (), unreduced=target.spec.unreduced, reduced=target.spec.reduced)
    lying = target if facts.shape else wide
    free = lying.placement(shape).free_axes  # Replicas receive distinct parts along these.
    source = cut_further(lying, shape, free)
    device = mesh_device(mesh) if facts.library != "numpy" else torch.device("cpu")
    if tensor is None:
        tensor = torch.empty(0, dtype=facts.dtype, device=device)
        tensor.requires_grad_(facts.requires_grad)
    else:
        tensor = tensor.to(device).reshape(shape)
    op_name = f"device_put {source.spec!r} of {shape} from rank {rank}"
    with HiddenFromModes() if find_context() is not None else nullcontext():
        own = mark_spec(scatter(tensor, mesh, source.placement(shape), rank, op_name), source.spec)
    local = move(own, source, lying, shape)
    if not facts.shape:
        local = local.reshape(())
    return ShardedArray(in_library(local, facts.library), target, facts.shape)


def _share_facts(
    x: Any, target: NamedSharding, group_rank: int, *, is_root: bool
) -> tuple[torch.Tensor | None, _Facts]:
    """Return (root's tensor, else None; its facts); raise the root's errors on all ranks."""
    shared: list[Any] = [None]
    tensor = None
    if is_root:
        try:
            tensor = _checked_global(x, target)
            shared = [
                _Facts(tuple(tensor.shape), tensor.dtype, library_of(x), tensor.requires_grad)
            ]
        except MeshdistError as error:
            shared = [error]
    broadcast_object_list(shared, group=target.mesh.open_group(), group_src=group_rank)
    if isinstance(shared[0], MeshdistError):
        raise shared[0]
    return tensor, shared[0]


def _checked_global(x: Any, target: NamedSharding) -> torch.Tensor:
    where = f"the root, {mesh_text(target.mesh)}"
    if x is None or isinstance(x, ShardedArray):
        raise KindError(
            "device_put: the root passed no global array",
            where=where,
            expected="the global array on the root",
            found="None" if x is None else "a ShardedArray",
            fix="pass it on the root, or pass the rank that has it: root=..."
            if x is None
            else "leave root= out, since all ranks hold a ShardedArray",
        )
    tensor = as_tensor(x, argument="x", operation="device_put", writable=False)
    target.placement(tuple(tensor.shape))
    if target.spec.unreduced and tensor.dtype == torch.bool:
        raise ArgumentError(
            "device_put: bool values cannot be partial sums", where=where, found=repr(target.spec)
        )
    return tensor

"""The public calls that place arrays on a mesh: ``reshard``, ``shard`` and ``unshard``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..arguments import get_shape
from ..arrays import Array, as_tensor, like
from ..checking.program import one_frame
from ..errors import AgreementError, ArgumentError, AxisError, KindError
from ..functional.value_checks import check_replicas
from ..mesh.current_mesh import mesh_in_force, with_hidden_mesh
from ..mesh.device_mesh import DeviceMesh
from ..mesh.partition_spec import P, PartitionSpec
from ..mesh.pattern import parse
from ..mesh.spec import NamedSharding, shardings_of_sides
from .requests import get_mesh
from .resharding import Move
from .sharded_array import ShardedArray
from .shardings import check_shard
from .whole_arrays import RootedGather, checked_root

__all__ = ["reshard", "shard", "unshard"]


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
    """Every rank holds the shard that the right side of a pattern gives it; collective.

    Any collective is a pattern: ``"b@dp -> b"`` gathers, ``"b {U:dp} -> b"`` sums,
    ``"b {U:dp} -> b@dp"`` sums and scatters, ``"s@tp d -> s d@tp"`` is an all-to-all, and
    ``"b -> b@dp"`` slices, for free. Dims may stand in another order on the right, and be grouped
    anew. The fewest bytes are sent.

    Args:
        x: this rank's shard, an array of any library, in any memory layout; or a ``ShardedArray``,
            which knows its mesh and shape.
        pattern: how it lies, and how it shall lie; or the ``NamedSharding`` that it has. Of a
            ``ShardedArray`` how it shall lie is enough: one side, a sharding or a spec.
        mesh: whose axes the pattern names; None takes the mesh in force. After a ``NamedSharding``:
            the sharding that it shall have.
        shape: of the whole array; None takes each dim as the shard's size times the number of
            shards, or as ``sizes`` says.
        check: whether ranks compare what they hold, along axes that the right side cuts or sums and
            the left does not name; None does on simulated ranks, and at debug level DETAIL.
        sizes: whole sizes by dim, where shards are uneven, and inside of groups: ``b=10, k=4``.

    Returns:
        An array like ``x``, in new memory. Ranks that hold equal parts hold equal bits. Of a
        ``ShardedArray``: itself where nothing changes.

    Gradient:
        The same communication transposed: the plan from the right side's cotangent, with U and R
        exchanged, to the left side's.

    Cost:
        What ``md.plan`` with the same arguments tells.

    Raises:
        PatternError, AxisError, ShapeError: a pattern that does not fit the mesh or ``x``.
        DtypeError: bool values that are summands.
        MeshError: no mesh is in force. NotInGroupError: this rank is not in the mesh.
        AgreementError: ranks have different plans. UnequalError: a comparison finds a difference.

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
                "reshard: a sharded array knows its mesh and its shape",
                found=f"mesh={mesh!r}, shape={shape!r}",
                fix="leave them out: reshard(x, target)",
            )
        local = as_tensor(x.local, argument="x", verb="reshard", writable=False)
        check_replicas(local, x.mesh, x.sharding.replicated_axes, f"reshard {x.shape}", bool(check))
        return x.reshard(pattern, **sizes)
    tensor = as_tensor(x, argument="x", verb="reshard", writable=False)
    known = None if shape is None else get_shape(shape, "reshard")
    target: Any
    asked: Any
    target, asked = (mesh, None) if isinstance(pattern, NamedSharding) else (None, mesh)
    key = "reshard", pattern, target, tensor.shape, known, *sizes.items()
    return _moved(x, tensor, key, asked, check)


@one_frame
def shard(
    whole: Array,
    pattern: str | NamedSharding,
    /,
    mesh: DeviceMesh | None = None,
    *,
    check: bool | None = None,
    **sizes: int,
) -> Any:
    """Every rank keeps its own shard of an array that all ranks hold. Inverse of ``unshard``.

    Args:
        whole: the same array on every rank; of any library.
        pattern: how it shall lie, such as ``"b@dp s d"``; or a ``NamedSharding``.
        mesh: whose axes the pattern names; None takes the mesh in force.
        check: whether all ranks of the mesh call it, and compare ``whole``, as for ``reshard``.
        sizes: of dims inside of groups: ``shard(w, "(h k)@tp d", mesh, k=64)``.

    Returns:
        An array like ``whole``, in new memory. Over axes that the pattern calls unreduced,
        coordinate 0 keeps the values and all others hold zeros.

    Gradient:
        ``unshard``: the ranks' gradients are gathered.

    Cost:
        Nothing is sent; the backward gathers.

    Raises:
        PatternError, AxisError, ShapeError: a pattern that does not fit the mesh or the array.
        DtypeError: bool values that shall be summands. MeshError, NotInGroupError: as ``reshard``.

    Example:
        >>> import numpy as np, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     return md.shard(np.arange(5), "b@dp", mesh).tolist()
        >>> md.simulate(program, 2)
        [[0, 1, 2], [3, 4]]
    """
    tensor = as_tensor(whole, argument="whole", verb="shard", writable=False)

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
    **sizes: int,
) -> Any:
    """Every rank holds the whole array, or one rank alone. Inverse of ``shard``; collective.

    Args:
        local: this rank's shard, an array of any library; or a ``ShardedArray``.
        pattern: how it lies, such as ``"b@dp s d"``; or its ``NamedSharding``. None for a
            ``ShardedArray``, which knows.
        mesh: whose axes the pattern names; None takes the mesh in force.
        root: the one rank that shall hold the whole, as a rank of the world, equal on all ranks;
            None for every rank.
        shape, sizes: as for ``reshard``.

    Returns:
        An array like ``local``, in new memory, with equal bits on every rank. With a root: there;
        None on the other ranks.

    Gradient:
        ``shard``: each rank takes its own part, for free. With a root there is none.

    Cost:
        Each rank receives what it does not hold; of summands, what an all-reduce receives. With a
        root each element leaves one rank that holds it, once; summands are added before.

    Raises:
        What ``reshard`` raises. KindError, NotInGroupError: a root that is no rank of the mesh.
        GradientError: with a root, a tensor that needs a gradient.

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
                "unshard: a ShardedArray knows how it lies",
                expected="unshard(array), or unshard(array, root=0)",
                found=f"pattern {pattern!r}",
            )
        local, pattern, shape = local.local, local.sharding, local.shape
    lies: Any = pattern
    tensor = as_tensor(local, argument="local", verb="unshard", writable=False)
    known = None if shape is None else get_shape(shape, "unshard")

    key = "unshard", lies, None, tensor.shape, known, *sizes.items()
    if root is None:
        return _moved(local, tensor, key, mesh, False)
    found_mesh = _mesh_of("unshard", lies, mesh)
    rank = checked_root(root, "unshard", found_mesh)
    source, _, whole_shape, _ = _find_ends(key, mesh)
    whole = RootedGather(source, whole_shape, rank)(tensor)
    return None if whole is None else like(whole, local)


def _moved(
    x: Array, tensor: torch.Tensor, key: tuple[Any, ...], given_mesh: Any, check: bool | None
) -> Array:
    """Return the result of a call on ``tensor``, in the library of ``x``.

    Args:
        key: under which the mesh keeps the move of such a call: the verb, the pattern or sharding,
            the target sharding or None, the local shape, the whole shape or None, the sizes.
    """
    verb, pattern = key[:2]
    mesh = given_mesh
    if mesh is None:
        mesh = pattern.mesh if isinstance(pattern, NamedSharding) else mesh_in_force(verb)
    move = mesh.caches.find(Move, key) if isinstance(mesh, DeviceMesh) else None
    if move is None:
        ends = _find_ends(key, given_mesh)
        move = mesh.caches.keep(Move, key, Move(*ends, verb=verb))
    try:
        return like(move(tensor, check), x)
    except AgreementError as error:
        _add_sizes(error, key)
        raise


def _add_sizes(error: AgreementError, key: tuple[Any, ...]) -> None:
    """Add the sizes to give to the fix of ``error`` if ranks took different wholes by their parts.

    Example: of "b@dp d -> b d@dp" rank 0 shows "... of shape (6, 4)", and rank 1 "... of shape
    (8, 4)", since each took its own 3 or 4 rows twice: b=... says it.
    """
    _, pattern, _, _, shape, *sizes = key
    titles = set(re.findall(r" of (\S.* of shape )(\([\d, ]*\))", error.found or ""))
    if shape is not None or len({title for title, _ in titles}) != 1 or len(titles) == 1:
        return
    missing = "shape=(...)"
    if isinstance(pattern, str):
        dims = [dim for dim in parse(pattern).get_operand().dims if dim.axes]
        names = [dim.names[0] for dim in dims if dim.names[0] not in dict(sizes)]
        missing = ", ".join(f"{name}=..." for name in names if name.isidentifier()) or missing
    error.add_fix(
        "where parts are uneven, give the size of the whole, the sum of all parts, on every rank: "
        f"{missing}"
    )


def _find_ends(
    key: tuple[Any, ...], given_mesh: DeviceMesh | None
) -> tuple[NamedSharding, NamedSharding, tuple[int, ...], str | None]:
    """Return source, target, whole shape, and the pattern of which both are sides, or None."""
    verb, pattern, target, local_shape, shape, *pairs = key
    mesh, sizes = _mesh_of(verb, pattern, given_mesh), dict(pairs)
    whole = NamedSharding(mesh, P())
    here = {"local_shape": tuple(local_shape), "rank": mesh.get_rank()}
    try:
        if verb == "shard":
            if not isinstance(pattern, NamedSharding):
                pattern = NamedSharding.from_pattern(pattern, mesh, shape, sizes)
            return whole, pattern, shape, None
        if isinstance(pattern, NamedSharding):
            if verb == "reshard":
                _check_target(target, sizes)
            shape = pattern.whole_shape(local_shape) if shape is None else shape
            check_shard(verb, pattern, shape, tuple(local_shape))
            return pattern, whole if target is None else target, shape, None
        if verb == "unshard":
            source = NamedSharding.from_pattern(pattern, mesh, shape, sizes, **here)
            return source, whole, source.parts.shape, None
        source, target = shardings_of_sides(pattern, mesh, shape, sizes, **here)
        return source, target, source.parts.shape, pattern
    except AxisError as error:
        raise with_hidden_mesh(error, given_mesh) from None


def _check_target(target: object, sizes: Mapping[str, int]) -> None:
    if not isinstance(target, NamedSharding):
        raise KindError(
            "reshard from a NamedSharding needs another to go to",
            expected="reshard(x, source, target)",
            found=f"a {type(target).__name__} as target",
        )
    if sizes:
        raise ArgumentError(
            "reshard between NamedShardings knows no dims by name",
            found=", ".join(f"{name}={size}" for name, size in sizes.items()),
            fix="give the shape of the whole array: shape=(...)",
        )
    get_mesh("reshard", target.mesh)


def _mesh_of(verb: str, pattern: Any, mesh: DeviceMesh | None) -> DeviceMesh:
    if not isinstance(pattern, NamedSharding):
        return get_mesh(verb, mesh)
    if mesh is not None and mesh != pattern.mesh:
        raise ArgumentError(
            f"{verb}: a NamedSharding has a mesh of its own",
            expected=f"{pattern.mesh!r}, or none",
            found=f"mesh={mesh!r}",
            fix="leave mesh out",
        )
    return get_mesh(verb, pattern.mesh)

"""Resolve axis names to submeshes, and apply collectives to every leaf of a pytree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

import optree
import torch

from ..arguments import mesh_kind_error
from ..arrays import as_tensor, like
from ..checking.call_sites import one_frame
from ..collectives.torch_private import HiddenFromModes
from ..errors import ArgumentError, AxisError, KindError, MeshError
from ..groups.process_group import ProcessGroup
from ..mesh.current_mesh import find_current_mesh, require_current_mesh, with_outer_mesh_hint
from ..mesh.device_mesh import DeviceMesh
from ..typed_mode.collective_calls import TypedOperation, find_typed_operation

T = TypeVar("T")

AxisName: TypeAlias = str | tuple[str, ...] | list[str] | DeviceMesh
"""An axis of the current mesh, several axes to flatten, or a 1-D mesh."""

OnTensor: TypeAlias = Callable[..., Any]
"""A function of a tensor, a group and a ``leaf_name``; returns a tensor."""

_NUMBERS = (bool, int, float, complex)  # exactly these: numpy.float64 is a float, and an array
_WIDE = {float: torch.float64, complex: torch.complex128}
_KEYS = (str, int, float, bytes, type(None))  # of dicts, shown and compared by their repr
_LIMIT = 1 << 63  # of numbers in 64 bits
_OVER_NO_AXES = ("psum", "pmean", "pmax", "pmin", "pvary", "pcast")  # these return their argument
_MOST_TREES = 64
_SHOWN_LETTERS = 240
_trees: dict[Any, tuple[list[str], list[str]]] = {}


def on_leaves(
    operation: str,
    on_tensor: OnTensor,
    x: T,
    axis_name: AxisName,
    mesh: DeviceMesh | None,
    axis_index_groups: object = None,
    *,
    on_number: Callable[[Any], Any] | None = None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None = None,
    to: str | None = None,
) -> T:
    """Check all leaves of ``x``, then apply a collective to each.

    Args:
        on_number: returns the number to send for a Python number; None rejects numbers, ``unsent``
            returns them without sending.
        check: raises for an invalid tensor.
        to: the collective's argument ``to``, which selects the axis type of the result; or None.
    """
    if axis_index_groups is not None:
        reject_groups(operation, axis_index_groups, get_axes(operation, axis_name, mesh))
    if operation in _OVER_NO_AXES and names_no_axis(axis_name):
        result: T = _over_no_axes(operation, x, on_number, check)
        return result
    axes = get_axes(operation, axis_name, mesh)
    typed = find_typed_operation(operation, axes, to)
    if typed is None:
        if not isinstance(x, torch.Tensor):
            result = _on_leaves(operation, on_tensor, x, axes, on_number, check, None)
        else:  # the common case needs no tree
            plain = as_tensor(x, argument="x", operation=operation, writable=False)
            result = on_tensor(plain, axes.open_group())
        return result
    with HiddenFromModes():
        if not isinstance(x, torch.Tensor):
            result = _on_leaves(operation, on_tensor, x, axes, on_number, check, typed)
        else:
            plain = as_tensor(x, argument="x", operation=operation, writable=False)
            group = axes.open_group()
            if check is not None:  # raise for arguments before types
                check(plain, group)
            result = typed.run(on_tensor, plain, group, typed.result_type(plain))
    return result


def names_no_axis(axis_name: object) -> bool:
    """Return whether ``axis_name`` is an empty tuple or list."""
    return not axis_name and isinstance(axis_name, (tuple, list))


def _over_no_axes(
    operation: str,
    x: Any,
    on_number: Callable[[Any], Any] | None,
    check: Callable[[torch.Tensor, Any], object] | None,
) -> Any:
    """Return a copy of ``x``, for ``pmean`` in a float dtype, without communication."""
    leaves, tree = optree.tree_flatten(x)
    results = []
    for path, leaf in zip(_paths_and_names(tree)[0], leaves, strict=True):
        if on_number is not None and type(leaf) in _NUMBERS:
            results.append(leaf if on_number is unsent else on_number(leaf))
            continue
        tensor = as_tensor(leaf, argument=path, operation=operation, writable=False)
        if check is not None:
            check(tensor, None)
        results.append(like(tensor / 1 if operation == "pmean" else tensor.clone(), leaf))
    return tree.unflatten(results)


def itself(number: Any) -> Any:
    """Return ``number``; as ``on_number`` of ``on_leaves``, it sends Python numbers unchanged."""
    return number


def unsent(number: Any) -> None:
    """Do nothing; as ``on_number`` of ``on_leaves``, it returns Python numbers without sending."""


def _on_leaves(
    operation: str,
    on_tensor: OnTensor,
    x: Any,
    axes: DeviceMesh,
    on_number: Callable[[Any], Any] | None,
    check: Callable[[torch.Tensor, ProcessGroup], object] | None,
    typed: TypedOperation | None,
) -> Any:
    leaves, tree = optree.tree_flatten(x)
    paths, names = _paths_and_names(tree)
    tensors = [
        _tensor_to_send(leaf, operation, path, axes, on_number)
        if on_number is not None and type(leaf) in _NUMBERS
        else as_tensor(leaf, argument=path, operation=operation, writable=False)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    if check is not None:
        for tensor in tensors:
            if tensor is not None:
                check(tensor, axes.open_group())
    types = [  # arrays of other libraries have no type
        typed.result_type(leaf, path) if typed and isinstance(leaf, torch.Tensor) else None
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    results = []
    for text, leaf, tensor, name in zip(types, leaves, tensors, names, strict=True):
        if tensor is None:
            results.append(leaf)
            continue
        group = axes.open_group()
        if typed is None or text is None:
            result = on_tensor(tensor, group, leaf_name=name)
        else:
            result = typed.run(on_tensor, tensor, group, text, name)
        results.append(result.item() if type(leaf) in _NUMBERS else like(result, leaf))
    return tree.unflatten(results)


def _tensor_to_send(
    number: Any, operation: str, path: str, axes: DeviceMesh, on_number: Callable[[Any], Any]
) -> torch.Tensor | None:
    """Return ``on_number(number)`` as a 0-dim tensor to send, None for ``unsent``; or raise."""
    if on_number is unsent:
        return None
    group = axes.open_group()
    num_added = group.size() if operation == "psum" else 1
    if isinstance(number, int) and not -_LIMIT <= number * num_added < _LIMIT:
        raise ArgumentError(
            f"{operation} cannot send {number} as {path} because integers have 64 bits",
            where=group.name,
            expected="an integer of 64 bits, also for the sum over all ranks in psum",
            fix=f"pass a float: {path} = float({path})",
        )
    sent = on_number(number)
    return torch.tensor(sent, dtype=_WIDE.get(type(sent)), device=group.first_device_type())


def _has_plain_text(key: Any) -> bool:
    """Return whether the repr of ``key`` is equal on every rank."""
    return all(map(_has_plain_text, key)) if isinstance(key, tuple) else isinstance(key, _KEYS)


def _paths_and_names(tree: Any) -> tuple[list[str], list[str]]:
    """Return the paths (``x['loss']``) and names (path, index, all paths) of the leaves."""
    found = _trees.get(tree)
    if found is None:
        accessors = tree.accessors()
        paths = [
            path.codify("x")
            if all(_has_plain_text(step.entry) for step in path)
            else "x" + "".join(f"[{type(step.entry).__name__}]" for step in path)
            for path in accessors
        ]
        whole = ", ".join(paths)
        if len(whole) > _SHOWN_LETTERS:
            whole = f"{whole[:_SHOWN_LETTERS]}... ({len(paths)}, {crc32(whole.encode()):08x})"
        names = [f"{path}, leaf {index} of {whole}" for index, path in enumerate(paths, 1)]
        found = paths, paths if paths == ["x"] else names
        # Do not cache trees with user objects, because the cache would keep the objects alive.
        is_plain = all(type(step.entry) in (str, int) for path in accessors for step in path)
        if is_plain and "CustomTreeNode" not in str(tree):
            if len(_trees) >= _MOST_TREES:
                _trees.clear()
            _trees[tree] = found
    return found


@one_frame
def axis_index(axis_name: AxisName, *, mesh: DeviceMesh | None = None) -> int:
    """Return this rank's index along ``axis_name``, from 0, without communication.

    Args:
        axis_name, mesh: as for ``psum``; in a tuple of axes the first is major.

    Returns:
        An int; 0 over no axes, ``()``.

    Raises:
        AxisError, MeshError: as for ``psum``.
        NotInGroupError: this rank is not in the mesh.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
        ...         return [md.lax.axis_index(axis) for axis in ("dp", "tp", ("tp", "dp"))]
        >>> md.simulate(program, 4)
        [[0, 0, 0], [0, 1, 2], [1, 0, 1], [1, 1, 3]]
    """
    if names_no_axis(axis_name):
        return 0
    axes = get_axes("axis_index", axis_name, mesh)
    index = 0
    for axis in range(axes.ndim):
        index = index * axes.size(axis) + axes.get_local_rank(axis)
    return index


@one_frame
def axis_size(axis_name: AxisName, *, mesh: DeviceMesh | None = None) -> int:
    """Return the number of ranks along ``axis_name``; for several axes the product.

    Args:
        axis_name, mesh: as for ``psum``.

    Returns:
        An int; 1 over no axes, ``()``. Nothing is sent.

    Raises:
        AxisError, MeshError: as for ``psum``.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")):
        ...         return md.lax.axis_size("tp"), md.lax.axis_size(("dp", "tp"))
        >>> md.simulate(program, 6)[0]
        (3, 6)
    """
    return 1 if names_no_axis(axis_name) else get_axes("axis_size", axis_name, mesh).size()


def get_axes(
    operation: str, axis_name: AxisName, mesh: DeviceMesh | None, *, argument: str = "axis_name"
) -> DeviceMesh:
    """Return the submesh of the axes in ``axis_name``, in that order; or raise."""
    if isinstance(axis_name, DeviceMesh):
        return _alone(operation, axis_name, mesh, argument)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(f"{operation} takes a mesh as mesh", mesh)
    given_mesh, mesh = mesh, mesh or find_current_mesh()
    mesh = mesh or require_current_mesh(operation, f" over axis {axis_name!r}")
    names: Any = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    is_tuple = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    if not (isinstance(names, str) or is_tuple):
        raise KindError(
            f"{operation} cannot use {axis_name!r} as {argument}",
            expected="the name of an axis, a tuple of names, or a 1-D mesh",
            found=type(axis_name).__name__,
            fix=f"pass for example {argument}='tp', or mesh['tp']",
        )
    try:
        if mesh.layout.names is None:
            mesh.layout.axis_indices(names)  # raises
        return mesh[names]
    except AxisError as error:
        fix = f"pass the mesh: {operation}(..., mesh=mesh)"
        raise with_outer_mesh_hint(error, given_mesh, fix) from None


def _alone(operation: str, axis: DeviceMesh, mesh: DeviceMesh | None, argument: str) -> DeviceMesh:
    if mesh is not None:
        raise ArgumentError(
            f"{operation} got a mesh as {argument}, and another as mesh",
            found=f"{argument}={axis!r}, mesh={mesh!r}",
            fix="omit mesh, or pass the name of one of its axes",
        )
    if axis.ndim != 1:
        raise MeshError(
            f"{operation} cannot use a mesh of {axis.ndim} axes as {argument}",
            expected="one axis, such as mesh['tp']",
            found=f"{argument}={axis!r}",
            fix=f"pass the names of its axes, {argument}=('dp', 'tp'), mesh=mesh; or flatten the "
            "mesh",
        )
    return axis


def reject_groups(operation: str, axis_index_groups: Any, axes: DeviceMesh) -> None:
    names = axes.axis_names or (0,)
    mesh = "mesh" if len(names) == 1 else f"mesh.flatten({names})"
    axis = names[0] if len(names) == 1 else "_".join(map(str, names))
    count = len(axis_index_groups) if isinstance(axis_index_groups, (list, tuple)) else 2
    raise KindError(
        f"{operation} does not support axis_index_groups",
        expected="None",
        found=repr(axis_index_groups),
        fix="split the axis: "
        f"mesh = {mesh}.unflatten({axis!r}, ({count}, -1), ('outer', 'inner')), "
        "then pass 'inner' for groups of neighbors, or 'outer' for groups with strides",
    )

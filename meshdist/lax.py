"""JAX's names for communication along a mesh axis: functional, differentiable, on pytrees.

``axis_name`` is the name of an axis of the mesh in force (``with mesh:``, or ``mesh=``), or a tuple
of names, which means those axes flattened, the first one major. ``x`` is an array of torch, NumPy
or CuPy, or any nesting of dicts, lists, tuples and other nodes that optree knows, with arrays and
Python numbers as leaves. Results have the nesting, the library and the device of ``x`` and share no
memory with it. Torch tensors carry gradients, by the table in ``docs/gradients.md``.

A Python number is a constant, equal on every rank, as in JAX: ``psum(1, "tp")`` is the size of
the axis and sends nothing. A number that differs between ranks goes in as an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import torch

from .arrays import as_tensor, like
from .collectives import functional
from .errors import KindError, MeshError
from .groups.process_group import ProcessGroup, resolve_group
from .mesh.current_mesh import find_current_mesh
from .mesh.device_mesh import DeviceMesh

__all__ = ["axis_index", "axis_size", "pmean", "psum", "pvary"]

AxisNames = str | tuple[str, ...]

_NUMBERS = (bool, int, float, complex)  # exactly these: numpy.float64 is a float, and an array


def psum(x: Any, axis_name: AxisNames, *, mesh: DeviceMesh | None = None) -> Any:
    """Every rank holds the sum of ``x`` over the ranks along ``axis_name``.

    Args:
        x: this rank's array of any shape and numeric dtype, or a pytree; equal shapes and dtypes
            along the axis.
        axis_name: an axis of the mesh, or a tuple of axes.
        mesh: the mesh; None takes the one in force.

    Returns:
        Arrays of the shape and dtype of ``x`` (bool is counted in int32), equal along the axis;
        fresh memory. A Python number c gives c times the size of the axis.

    Gradient:
        pvary: each rank's gradient passes through, unchanged and for free. It must be equal along
        the axis, which is checked at debug level DETAIL.

    Cost:
        One all-reduce a leaf: each of p ranks sends 2 n (p - 1) / p bytes for n bytes.

    Raises:
        AxisError: the mesh has no such axis, or the tuple names one twice or none.
        MeshError: no mesh is in force and none is given.
        KindError, DtypeError: a leaf is no array, or of a dtype that cannot be summed.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ...     x = torch.tensor([float(md.get_rank())])
        ...     with mesh:
        ...         return [md.lax.psum(x, axis).item() for axis in ("dp", "tp", ("dp", "tp"))]
        >>> for sums in md.simulate(program, 4):
        ...     print(sums)
        [2.0, 1.0, 6.0]
        [4.0, 1.0, 6.0]
        [2.0, 5.0, 6.0]
        [4.0, 5.0, 6.0]
    """
    return _on_leaves(functional.psum, x, axis_name, mesh, lambda number, size: number * size)


def pmean(x: Any, axis_name: AxisNames, *, mesh: DeviceMesh | None = None) -> Any:
    """Every rank holds the mean of ``x`` over the ranks along ``axis_name``.

    Args:
        x, axis_name, mesh: as for ``psum``.

    Returns:
        Arrays of the shape and dtype of ``x`` (integers and bool give the default float dtype),
        equal along the axis; fresh memory. A Python number is its own mean.

    Gradient:
        psum's, divided by the size of the axis.

    Cost:
        That of ``psum``; the division follows the sum.

    Raises:
        What ``psum`` raises.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        ...     return md.lax.pmean({"loss": torch.tensor(float(md.get_rank()))}, "dp", mesh=mesh)
        >>> md.simulate(program, 4)[3]
        {'loss': tensor(1.5000)}
    """
    return _on_leaves(functional.pmean, x, axis_name, mesh, lambda number, _: number / 1)


def pvary(x: Any, axis_name: AxisNames, *, mesh: DeviceMesh | None = None) -> Any:
    """Every rank holds ``x`` as its own, from here on free to differ along ``axis_name``.

    It stands where a value that is equal along the axis meets values that are not, for example
    where replicated activations meet a rank's shard of weights.

    Args:
        x: an array, or a pytree, equal along the axis.
        axis_name, mesh: as for ``psum``.

    Returns:
        A copy of ``x``.

    Gradient:
        psum: the ranks' gradients are summed over the axis.

    Cost:
        Forward sends nothing; backward is one all-reduce a leaf.

    Raises:
        What ``psum`` raises.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ...     weight = torch.tensor(1.0, requires_grad=True)      # equal on every rank
        ...     with mesh:
        ...         mine = md.lax.pvary(weight, "tp") * md.get_rank()
        ...     mine.backward()
        ...     return weight.grad.item()                           # 0 + 1 + 2 + 3
        >>> md.simulate(program, 4)
        [6.0, 6.0, 6.0, 6.0]
    """
    return _on_leaves(functional.pvary, x, axis_name, mesh, lambda number, _: number)


def axis_index(axis_name: AxisNames, *, mesh: DeviceMesh | None = None) -> int:
    """This rank's place along ``axis_name``, from 0.

    Args:
        axis_name, mesh: as for ``psum``; over a tuple of axes the first is major.

    Returns:
        An int; nothing is sent.

    Raises:
        AxisError: the mesh has no such axis, or the tuple names one twice or none.
        MeshError: no mesh is in force and none is given.
        NotInGroupError: this rank is not in the mesh.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")):
        ...         return [md.lax.axis_index(axis) for axis in ("dp", "tp", ("tp", "dp"))]
        >>> md.simulate(program, 4)
        [[0, 0, 0], [0, 1, 2], [1, 0, 1], [1, 1, 3]]
    """
    mesh, names = _resolve("axis_index", axis_name, mesh)
    index = 0
    for name in names:
        index = index * mesh.size(name) + mesh.get_local_rank(name)
    return index


def axis_size(axis_name: AxisNames, *, mesh: DeviceMesh | None = None) -> int:
    """The number of ranks along ``axis_name``; over a tuple of axes, the product.

    Args:
        axis_name, mesh: as for ``psum``.

    Returns:
        An int; nothing is sent.

    Raises:
        AxisError: the mesh has no such axis, or the tuple names one twice or none.
        MeshError: no mesh is in force and none is given.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")):
        ...         return md.lax.axis_size("tp"), md.lax.axis_size(("dp", "tp"))
        >>> md.simulate(program, 6)[0]
        (3, 6)
    """
    mesh, names = _resolve("axis_size", axis_name, mesh)
    return math.prod(map(mesh.size, names))


def _resolve(
    verb: str, axis_name: AxisNames, mesh: DeviceMesh | None
) -> tuple[DeviceMesh, tuple[str, ...]]:
    """The mesh that the call means, and its axes as a tuple of names."""
    mesh = mesh or find_current_mesh()
    if mesh is None:
        raise MeshError(
            f"{verb} over axis {axis_name!r}: no mesh is in force",
            expected="a mesh whose axes include it",
            fix=f"call it inside `with mesh:`, or name the mesh: {verb}(..., mesh=mesh)",
        )
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise KindError(
            f"{verb} cannot take {axis_name!r} as axis_name",
            expected="the name of an axis, or a tuple of names",
            found=type(axis_name).__name__,
        )
    mesh.layout.axis_indices(names)  # raises unless they are different axes of this mesh
    return mesh, names


def _on_leaves(
    on_tensor: Callable[[torch.Tensor, ProcessGroup], torch.Tensor],
    x: Any,
    axis_name: AxisNames,
    mesh: DeviceMesh | None,
    on_number: Callable[[Any, int], Any],
) -> Any:
    """Apply a verb to every leaf of ``x``, once all of them are known to be fit for it.

    ``on_number`` does so for a Python number, given the size of the axis.
    """
    verb = on_tensor.__name__
    mesh, names = _resolve(verb, axis_name, mesh)
    if isinstance(x, torch.Tensor):  # by far the most frequent, and needs no tree
        plain = as_tensor(x, argument="x", verb=verb, writable=False)
        return on_tensor(plain, resolve_group(mesh[names]))
    paths, leaves, tree = optree.tree_flatten_with_accessor(x)
    tensors = [
        None
        if type(leaf) in _NUMBERS
        else as_tensor(leaf, argument=path.codify("x"), verb=verb, writable=False)
        for path, leaf in zip(paths, leaves, strict=True)
    ]
    return tree.unflatten(
        on_number(leaf, math.prod(map(mesh.size, names)))
        if tensor is None
        else like(on_tensor(tensor, resolve_group(mesh[names])), leaf)
        for leaf, tensor in zip(leaves, tensors, strict=True)
    )

"""Which axis a verb means, this rank's place along it, and its size."""

from __future__ import annotations

from typing import Any, TypeAlias

from ...checking.program import one_frame
from ...errors import ArgumentError, AxisError, KindError, MeshError
from ...mesh.current_mesh import find_current_mesh, with_hidden_mesh
from ...mesh.device_mesh import DeviceMesh

__all__ = ["AxisName", "axis_index", "axis_size", "get_axes", "refuse_groups"]

AxisName: TypeAlias = str | tuple[str, ...] | DeviceMesh
"""An axis of the mesh in force, several of them flattened, or an axis as a 1-D mesh."""


@one_frame
def axis_index(axis_name: AxisName, *, mesh: DeviceMesh | None = None) -> int:
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
    axes = get_axes("axis_index", axis_name, mesh)
    index = 0
    for axis in range(axes.ndim):
        index = index * axes.size(axis) + axes.get_local_rank(axis)
    return index


@one_frame
def axis_size(axis_name: AxisName, *, mesh: DeviceMesh | None = None) -> int:
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
    return get_axes("axis_size", axis_name, mesh).size()


def get_axes(
    verb: str, axis_name: AxisName, mesh: DeviceMesh | None, *, argument: str = "axis_name"
) -> DeviceMesh:
    """Return the mesh of just the axes that a call of ``verb`` means by ``argument``, in order.

    Raises:
        AxisError, MeshError, KindError, ArgumentError: there are none such.
    """
    if isinstance(axis_name, DeviceMesh):
        return _alone(verb, axis_name, mesh, argument)
    given, mesh = mesh, mesh or find_current_mesh()
    if mesh is None:
        raise MeshError(
            f"{verb} over axis {axis_name!r}: no mesh is in force",
            expected="a mesh whose axes include it",
            fix=f"call it inside `with mesh:`, or name the mesh: {verb}(..., mesh=mesh)",
        )
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise KindError(
            f"{verb} cannot take {axis_name!r} as {argument}",
            expected="the name of an axis, a tuple of names, or a 1-D mesh",
            found=type(axis_name).__name__,
        )
    try:
        mesh.layout.axis_indices(names)  # raises unless they are different axes of this mesh
    except AxisError as error:
        fix = f"name the mesh that is meant: {verb}(..., mesh=mesh)"
        raise with_hidden_mesh(error, given, fix) from None
    return mesh[names]


def _alone(verb: str, axis: DeviceMesh, mesh: DeviceMesh | None, argument: str) -> DeviceMesh:
    if mesh is not None:
        raise ArgumentError(
            f"{verb} has a mesh as {argument}, and another as mesh",
            found=f"{argument}={axis!r}, mesh={mesh!r}",
            fix="leave mesh out, or give the name of an axis of it",
        )
    if axis.ndim != 1:
        raise MeshError(
            f"{verb} over a mesh of {axis.ndim} axes",
            expected="one axis, such as mesh['tp']",
            found=f"{argument}={axis!r}",
            fix=f"name the axes: {argument}=('dp', 'tp'), mesh=mesh; or flatten the mesh",
        )
    return axis


def refuse_groups(verb: str, axis_index_groups: Any) -> None:
    """Raise unless ``axis_index_groups`` is None: parts of an axis are axes here."""
    if axis_index_groups is not None:
        raise KindError(
            f"{verb} takes no axis_index_groups",
            expected="None",
            found=repr(axis_index_groups),
            fix="make the parts an axis of their own: "
            "mesh = mesh.unflatten('tp', (2, 2), ('outer', 'inner')), then name 'inner' or 'outer'",
        )

"""Track the current mesh, set by ``with mesh:``."""

from __future__ import annotations

from collections.abc import Collection

from ..arguments import mesh_kind_error
from ..bootstrap.world import find_world
from ..errors import AxisError, MeshError
from .device_mesh import DeviceMesh, coordinate_in, current_meshes

__all__ = ["get_current_mesh"]


def find_current_mesh() -> DeviceMesh | None:
    return next(reversed(current_meshes.get()), None)


def get_current_mesh() -> DeviceMesh:
    """Return the current mesh; raises MeshError if there is none."""
    return require_current_mesh("get_current_mesh", naming="")


def require_current_mesh(call: str, about: str = "", naming: str | None = None) -> DeviceMesh:
    """Return the current mesh; raise MeshError in the name of ``call`` if there is none.

    Args:
        about: text after ``call`` in the error's summary, such as the missing axis.
        naming: the code in the error's fix that passes a mesh; "" if there is none, None for
            ``call(..., mesh=mesh)``.
    """
    meshes = current_meshes.get()
    if not meshes:
        naming = f"{call}(..., mesh=mesh)" if naming is None else naming
        raise MeshError(
            f"{call}{about}: there is no current mesh",
            expected="a mesh with named axes",
            fix="call it inside `with mesh:`" + (f", or pass the mesh: {naming}" if naming else ""),
        )
    return meshes[-1]


def find_meshes_with(axes: Collection[str]) -> list[DeviceMesh]:
    """Return the current mesh if it has all ``axes``, else the open meshes that have them."""
    # If ``axes`` connect this rank with the same ranks in several meshes, the oldest is returned.
    current, world = find_current_mesh(), find_world()
    if current is not None and {*axes} <= {*current.axis_names}:
        return [current]
    found: dict[tuple[int, ...], DeviceMesh] = {}
    for mesh in [] if world is None else [*world.meshes.values()]:
        if mesh.get_coordinate() is not None and {*axes} <= {*mesh.axis_names}:
            ranks = mesh.layout.ranks_of_axes(tuple(axes), mesh.get_rank()) if axes else ()
            found.setdefault(ranks, mesh)
    return [*found.values()]


def get_mesh(operation: str, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return ``mesh`` or the current mesh; raise unless this rank is in it."""
    mesh = require_current_mesh(operation) if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise mesh_kind_error(
            f"{operation} needs the groups of a DeviceMesh",
            mesh,
            fix="pass a DeviceMesh; a Layout only plans: md.plan",
        )
    coordinate_in(mesh, operation)
    return mesh


def with_outer_mesh_hint(
    error: AxisError, given_mesh: object, fix: str = "pass the mesh: mesh=..."
) -> AxisError:
    """Return ``error``, with a hint if an outer ``with mesh:`` has the missing axis.

    Args:
        given_mesh: None for the current mesh.
        fix: how to pass a mesh.
    """
    if given_mesh is not None or not error.axis:
        return error
    for outer in reversed(current_meshes.get()[:-1]):
        if error.axis in outer.axis_names:
            hinted = AxisError(
                error.summary,
                where=error.where,
                expected=error.expected,
                found=f"an outer `with mesh:` of DeviceMesh({outer.layout.axis_text()}), which has "
                f"axis {error.axis!r}, hidden by the innermost `with mesh:`",
                fix=fix,
            )
            hinted.axis = error.axis
            return hinted
    return error

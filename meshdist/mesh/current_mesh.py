"""The mesh in force: the innermost ``with mesh:`` of this context."""

from __future__ import annotations

from ..errors import MeshError
from .device_mesh import DeviceMesh, meshes_in_force

__all__ = ["find_current_mesh", "get_current_mesh"]


def find_current_mesh() -> DeviceMesh | None:
    """Return the mesh in force (the innermost ``with mesh:``), or None."""
    return next(reversed(meshes_in_force.get()), None)


def get_current_mesh() -> DeviceMesh:
    """Return the mesh in force; raises MeshError where there is none."""
    mesh = find_current_mesh()
    if mesh is None:
        raise MeshError(
            "no mesh is in force",
            expected="a call inside `with mesh:`, or the argument mesh=",
            fix="wrap the call: with mesh: ...",
        )
    return mesh

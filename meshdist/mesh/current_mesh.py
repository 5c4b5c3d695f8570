"""The mesh in force: the innermost ``with mesh:`` of this context."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

from ..errors import MeshError

if TYPE_CHECKING:
    from .device_mesh import DeviceMesh

__all__ = ["enter_mesh", "find_current_mesh", "get_current_mesh", "leave_mesh"]

_stack: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("meshdist_mesh", default=())


def enter_mesh(mesh: DeviceMesh) -> None:
    """Put ``mesh`` in force. The inverse of ``leave_mesh``."""
    _stack.set((*_stack.get(), mesh))


def leave_mesh() -> None:
    """Put the mesh in force that was so before the last ``enter_mesh``."""
    _stack.set(_stack.get()[:-1])


def find_current_mesh() -> DeviceMesh | None:
    """Return the mesh in force (the innermost ``with mesh:``), or None."""
    stack = _stack.get()
    return stack[-1] if stack else None


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

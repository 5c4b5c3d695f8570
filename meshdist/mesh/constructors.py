"""Create row-major meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..checking.call_sites import one_frame
from .definition import AxisOptions, define_mesh
from .device_mesh import DeviceMesh
from .layout import Layout

__all__ = ["init_device_mesh", "make_mesh"]


@one_frame
def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[str | int, Any] | None = None,
    axis_options: Mapping[str | int, AxisOptions] | None = None,
    timeout: timedelta | None = None,
    open_groups: bool = True,
) -> DeviceMesh:
    """Create a row-major mesh of ranks 0, 1, 2, ...; collective over its ranks.

    Initializes meshdist on first use. With "cuda" it selects this rank's device, unless the program
    has.

    Args:
        device_type: "cpu", "cuda", ..., without an index.
        mesh_shape: the size of each axis; one size may be -1, which is inferred from the world.
        mesh_dim_names: one name per axis.
        backend_override: as in torch, by axis: a backend name, backend options, or both.
        axis_options: AxisOptions by axis name or index.
        timeout: for creating the mesh, and for collectives on axes without a timeout.
        open_groups: if False, groups open in ``warmup()`` or on first use.

    Returns:
        The mesh, equal on every rank. Outside of it, ``get_coordinate()`` is None.

    Raises:
        MeshError: If a size is 0, two sizes are -1, or the world has too few ranks.
        KindError, ArgumentError: If the timeout is invalid or an axis has options twice.

    See ``DeviceMesh`` for other errors.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2, -1), mesh_dim_names=("dp", "tp"))
        ...     return mesh.shape, mesh.get_local_rank("tp")
        >>> md.simulate(program, 8)[6]
        ((2, 4), 2)
    """
    definition = define_mesh(
        device_type,
        lambda size: Layout.from_shape(mesh_shape, mesh_dim_names, world_size=size),
        axis_options,
        backend_override,
        timeout,
        open_groups=open_groups,
    )
    return DeviceMesh.from_definition(definition, open_groups=open_groups)


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    *,
    device_type: str | None = None,
) -> DeviceMesh:
    """Create a mesh with JAX's signature; collective over its ranks. See ``init_device_mesh``.

    Args:
        axis_shapes: the size of each axis; one size may be -1.
        axis_names: one name per axis.
        device_type: None means "cuda" if there is a GPU, else "cpu".

    Example:
        >>> import meshdist as md
        >>> md.simulate(lambda: md.make_mesh((2, 2), ("dp", "tp")).axis_sizes, 4)[0]
        {'dp': 2, 'tp': 2}
    """
    chosen = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(chosen, axis_shapes, mesh_dim_names=axis_names)

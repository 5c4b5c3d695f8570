"""Open the groups of a wrapper whose parameters are reduced over additional axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..annotations.axis_types import annotation_of, axes_of_kind, shown, type_of, with_kinds
from ..errors import AxisTypeError
from ..groups.process_group import ProcessGroup, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout
from ..typed_mode.type_errors import mesh_text, tensor_text
from .reduction import find_further_axes


@dataclass(frozen=True)
class ExtraAxisGroups:
    """The groups over which one wrapper averages gradients, in addition to its own.

    Args:
        all_ranks: the union of all groups, which exchanges status flags.
        groups: by parameter index, the group over its additional axes and the wrapper's.
    """

    all_ranks: ProcessGroup
    groups: Mapping[int, ProcessGroup] = field(default_factory=dict)


def axes_spanned(layout: Layout, ranks: Sequence[int]) -> tuple[str, ...]:
    """Return the named axes along which the coordinates of ``ranks`` differ; ignore other ranks.

    Example:
        >>> mesh = Layout.from_shape((2, 2), ("dp", "tp"))
        >>> axes_spanned(mesh, [0, 2]), axes_spanned(mesh, [0, 1, 2, 3, 4])
        (('dp',), ('dp', 'tp'))
    """
    coordinates = np.argwhere(np.isin(layout.ranks(), np.asarray(ranks)))
    if not len(coordinates):
        return ()
    differ = (coordinates != coordinates[0]).any(axis=0)
    return tuple(
        name for name, is_spanned in zip(layout.names or (), differ, strict=False) if is_spanned
    )


def layouts_with(axis: str, group: ProcessGroup, axes: DeviceMesh | None) -> list[Layout]:
    """Return the layouts that have ``axis``: the wrapper's mesh, else open or earlier meshes."""
    # Meshes may use one name for different ranks.
    if axes is not None and axis in axes.root.axis_names:
        return [axes.root.layout]
    return group.world.layouts_with(axis)


def covers(layout: Layout, ranks: Sequence[int], axis: str) -> bool:
    """Return whether ``ranks`` contains all or no ranks of each line along ``axis``.

    Example:
        >>> mesh = Layout.from_shape((2, 3), ("dp", "tp"))
        >>> covers(mesh, [0, 1, 2], "tp"), covers(mesh, [0, 1], "tp")
        (True, False)
    """
    is_member = np.isin(layout.ranks(), np.asarray(ranks))
    dim = layout.axis_index(axis)
    return bool((is_member.any(axis=dim) == is_member.all(axis=dim)).all())


def further_axes(
    parameters: Mapping[str, torch.Tensor], group: ProcessGroup, axes: DeviceMesh | None
) -> dict[str, tuple[str, ...]]:
    """Return, by name, the additional axes over which parameters are reduced.

    Args:
        parameters: by name, trained, without the wrapper's annotations.

    Raises:
        AxisError: a parameter is reduced over an axis that the wrapper's mesh lacks.
        AxisTypeError: the wrapper has no mesh, and its group does not cover the axis.
    """
    if axes is None or axes.mesh_dim_names is None:
        for name, x in parameters.items():
            _reject_without_mesh(name, x, group)
        return {}
    mesh, own = axes.root, _own_axes(group, axes)
    sizes = {**axes.axis_sizes, **mesh.axis_sizes}
    further: dict[str, tuple[str, ...]] = {}
    for name, x in parameters.items():
        summed = annotation_of(x).summed_axes
        text = with_kinds(type_of(x), {axis: "R" for axis in summed if axis in sizes})
        where = f"{shown(axes.axis_names)} of {mesh_text(mesh)}"
        about = f"DDP over {where}; {name}: {tensor_text(x)}"
        if found := find_further_axes(text, own, sizes, about):
            further[name] = found
    return further


def _own_axes(group: ProcessGroup, axes: DeviceMesh) -> set[str]:
    return {*axes.axis_names, *axes_spanned(axes.root.layout, group.ranks)}


def open_wider_groups(
    further: Mapping[str, tuple[str, ...]],
    names: Sequence[str],
    group: ProcessGroup,
    axes: DeviceMesh | None,
    device: torch.device,
) -> ExtraAxisGroups:
    """Open and return the groups of a wrapper over ``group``; collective.

    Args:
        further: the result of ``further_axes``.
        names: of all trained parameters.
        axes: the wrapper's submesh; None, for a group only, opens no additional groups.
    """
    if axes is None or not further:
        return ExtraAxisGroups(group)
    mesh, own = axes.root, _own_axes(group, axes)

    def group_over(more: Sequence[str]) -> ProcessGroup:
        names = tuple(axis for axis in mesh.axis_names if axis in own or axis in more)
        opened = resolve_group(mesh[names])
        opened.connect(device)
        return opened

    # Opening a group is collective, so open them in the order of their first parameters.
    groups = {more: group_over(more) for more in dict.fromkeys(further.values())}
    all_ranks = group_over([axis for more in groups for axis in more])
    indices = {name: index for index, name in enumerate(names)}
    return ExtraAxisGroups(
        all_ranks, {indices[name]: groups[more] for name, more in further.items()}
    )


def _reject_without_mesh(name: str, parameter: torch.Tensor, group: ProcessGroup) -> None:
    """Raise if a parameter is reduced over an axis outside ``group``."""
    for axis in axes_of_kind(type_of(parameter), "R"):
        layouts = layouts_with(axis, group, None)
        is_covered = layouts and all(covers(layout, group.ranks, axis) for layout in layouts)
        if not is_covered and axis not in group.axis_names:
            raise AxisTypeError(
                f"{name} is reduced over {axis!r}, but the group of this DDP has no axis of that "
                "name",
                where=f"rank {group.world.rank}, {group.name}",
                expected="an axis of the wrapper's device_mesh",
                found=f"{name}: {tensor_text(parameter)}",
                fix="pass axes of the mesh that has this axis: device_mesh=mesh['dp']",
            )

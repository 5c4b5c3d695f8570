"""Open the groups of a wrapper that averages some parameters over more or fewer axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..annotations.axis_types import annotation_of, axes_of_kind, shown, type_of, with_kinds
from ..error_text import first_texts
from ..errors import AxisTypeError, KindError, MeshError
from ..groups.process_group import ProcessGroup, group_of_one, resolve_group
from ..mesh.device_mesh import DeviceMesh
from ..mesh.layout import Layout
from ..mesh.layout_arguments import no_axis
from ..typed_mode.type_errors import mesh_text, tensor_text
from .reduction import find_further_axes


@dataclass(frozen=True)
class ExtraAxisGroups:
    """The groups over which one wrapper averages gradients, in addition to its own.

    Args:
        all_ranks: the union of all groups, which exchanges status flags.
        by_name: for experts and for parameters with additional axes, by name: the group over the
            wrapper's axes and the additional axes, without axes over which the parameter varies.
        groups: the same for trained parameters, by index, if it is not the wrapper's group.
    """

    all_ranks: ProcessGroup
    by_name: Mapping[str, ProcessGroup] = field(default_factory=dict)
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


def open_extra_groups(
    further: Mapping[str, tuple[str, ...]],
    experts: Mapping[str, tuple[str, ...]],
    names: Sequence[str],
    group: ProcessGroup,
    axes: DeviceMesh | None,
    device: torch.device,
) -> ExtraAxisGroups:
    """Open and return the groups of a wrapper over ``group``; collective.

    Args:
        further: the result of ``further_axes``.
        experts: the result of ``find_experts``.
        names: of all trained parameters.
        axes: the wrapper's submesh; None, for a group only, opens no additional groups.
    """
    sizes = axes.axis_sizes if axes is not None and experts else {}
    experts = {
        name: tuple(axis for axis in varying if sizes[axis] > 1)
        for name, varying in experts.items()
    }
    if axes is None or not (further or experts):
        return ExtraAxisGroups(group)
    mesh, own = axes.root, _own_axes(group, axes)

    def group_over(more: tuple[str, ...], cut: tuple[str, ...] = ()) -> ProcessGroup:
        rest = tuple(axis for axis in axes.axis_names if axis not in cut)
        if not cut:
            opened = resolve_group(mesh[tuple(a for a in mesh.axis_names if a in own or a in more)])
        elif rest and more:
            opened = resolve_group(DeviceMesh.concatenate([axes[rest], mesh[more]]))
        elif rest or more:
            opened = resolve_group(axes[rest] if rest else mesh[more])
        else:  # each rank holds other experts
            opened = group_of_one(group.world)
        opened.connect(device)
        return opened

    # Opening a group is collective, so open them in the order of their first parameters.
    keys = {name: (further.get(name, ()), experts.get(name, ())) for name in {**further, **experts}}
    groups = {key: group_over(*key) if any(key) else group for key in dict.fromkeys(keys.values())}
    all_ranks = group_over(tuple(a for more, _ in groups for a in more)) if further else group
    by_name = {name: groups[key] for name, key in keys.items()}
    indices = {name: index for index, name in enumerate(names)}
    return ExtraAxisGroups(
        all_ranks,
        by_name,
        {indices[x]: over for x, over in by_name.items() if x in indices and over is not group},
    )


# -- experts ---------------------------------------------------------------------------------------


def check_experts_over(given: object, axes: DeviceMesh | None) -> tuple[str, ...]:
    """Return the axes of ``experts_over``; raise unless they are axes of the wrapper's mesh."""
    names = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise KindError(
            f"experts_over is {given!r}",
            expected="the name of an axis of device_mesh, or a tuple of names",
            fix="pass for example experts_over='ep'",
        )
    if names and (axes is None or axes.mesh_dim_names is None):
        raise MeshError(
            f"experts_over={given!r} requires a device_mesh with this axis",
            expected="the axes along which the ranks have different data, as device_mesh=",
            found="no device_mesh" if axes is None else "a device_mesh without axis names",
            fix=f"pass for example device_mesh=mesh['dp', {names[0]!r}], experts_over={given!r}",
        )
    for axis in names:
        if axes is not None and axis not in axes.axis_names:
            where = f"experts_over of DDP over {shown(axes.axis_names)} of {mesh_text(axes.root)}"
            error = no_axis(axis, axes.axis_names, where)
            if axis in axes.root.axis_names:
                both = [a for a in axes.root.axis_names if a in axes.axis_names or a == axis]
                error.add_fix(
                    f"pass device_mesh=mesh[{shown(both)}] if the ranks along {axis!r} have "
                    "different data"
                )
            raise error
    return tuple(dict.fromkeys(names))


def find_experts(
    parameters: Mapping[str, torch.Tensor], experts_over: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return, by name, the axes of ``experts_over`` over which parameters vary."""
    found = {
        name: tuple(axis for axis in axes_of_kind(type_of(x), "V") if axis in experts_over)
        for name, x in parameters.items()
    }
    return {name: cut for name, cut in found.items() if cut}


def reject_no_experts(
    parameters: Mapping[str, torch.Tensor],
    experts: Mapping[str, tuple[str, ...]],
    experts_over: Sequence[str],
    axes: DeviceMesh | None,
) -> None:
    """Raise if no parameter varies over an axis of ``experts_over``."""
    for axis in experts_over:
        if axes is not None and not any(axis in cut for cut in experts.values()):
            raise AxisTypeError(
                f"experts_over={axis!r}: no parameter is annotated as varying over {axis!r}",
                where=f"DDP over {shown(axes.axis_names)} of {mesh_text(axes.root)}",
                expected=f"experts that are annotated as sharded over {axis!r}",
                found=first_texts([f"{n}: {tensor_text(x)}" for n, x in parameters.items()]),
                fix=f"annotate the experts before you wrap the model: "
                f"md.annotate(model, {{'*.experts.*': 'e@{axis} ...'}}, mesh=mesh); or remove "
                "experts_over",
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

"""Annotate the parameters of a DDP wrapper as reduced over its axes inside ``md.typed``.

They keep casts from summing the gradients again, and mark ``.grad`` as complete over the axes. If a
wrapper has only a group, its parameters store the group's ranks, and ``md.einsum`` looks up the
axes in its mesh. A forward inside a context claims the axes: each rank's loss must then vary over
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from ..annotations.axis_types import (
    ANNOTATION,
    KINDS,
    annotation_of,
    axes_of_kind,
    change_annotation,
    find_owner_axes,
    find_type,
    kinds_in,
    shown,
    type_of,
    type_text,
    with_kinds,
)
from ..error_text import ranks_text
from ..errors import AxisTypeError
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..runtime.graph_breaks import untraced
from ..typed_mode.context import find_context
from ..typed_mode.type_errors import mesh_text, tensor_text, where

OWNER = "DDP"
"""The wrapper's name in messages."""


class AxisReducer:
    """Annotates a wrapper's parameters with ``axes``, or with the group's ranks.

    Args:
        further: additional reduction axes, by parameter.
        experts: axes over which a parameter varies and is not reduced, by parameter.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        group: ProcessGroup,
        axes: DeviceMesh | None,
        further: Mapping[str, tuple[str, ...]],
        experts: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._parameters = parameters
        self._further = further
        self._experts = experts
        # These are the user's annotations, which outlive the wrapper.
        self._reduced = {name: axes_of_kind(type_of(x), "R") for name, x in parameters.items()}
        self._untyped = {name for name, x in parameters.items() if find_type(x) is None}
        self._axes: tuple[str, ...] = ()
        self._found: tuple[DeviceMesh, ProcessGroup, tuple[str, ...]] | None = None
        if axes is not None and axes.mesh_dim_names is not None:
            self._mark(axes, axes.axis_names, is_reduced=True)
            return
        for parameter in parameters.values():
            change_annotation(parameter, owner_ranks=tuple(group.ranks))

    @property
    def has_reduced(self) -> bool:
        """Return whether the user has annotated a parameter as reduced."""
        return any(self._reduced.values())

    @untraced
    def claim(self, group: ProcessGroup, axes: DeviceMesh | None, *, is_reduced: bool) -> None:
        """Annotate the parameters, and own the group's axes in the open typed context, if any.

        Args:
            axes: the wrapper's ``device_mesh``; None if it has a group.
            is_reduced: whether this forward's backward is averaged.
        """
        mode = find_context()
        if mode is None or not torch.is_grad_enabled():
            return
        mesh = mode.mesh
        if self._found is None or self._found[0] is not mesh or self._found[1] is not group:
            given = axes.axis_names if axes is not None and axes.mesh_dim_names else ()
            self._found = mesh, group, _axes_of(mesh, group, given)
        names = self._found[2]
        self._mark(mesh, names, is_reduced=is_reduced)
        mode.owners.update(dict.fromkeys(names, OWNER))

    @untraced
    def close(self) -> None:
        for name, parameter in self._parameters.items():
            kinds = type_of(parameter)
            if find_owner_axes(parameter) is not None:
                kinds = self._without_own(name, kinds)
            is_untyped = not kinds and name in self._untyped
            change_annotation(
                parameter, kinds=None if is_untyped else kinds, owner_axes=None, owner_ranks=()
            )
        self._axes = ()

    def _mark(self, mesh: DeviceMesh, names: tuple[str, ...], *, is_reduced: bool) -> None:
        made: dict[tuple[object, ...], tuple[Any, ...]] = {}
        found = []
        for name, parameter in self._parameters.items():
            further, cut = self._further.get(name, ()), self._experts.get(name, ())
            key = parameter.__dict__.get(ANNOTATION), further, cut, self._reduced[name]
            if key not in made:
                axes = (*(axis for axis in names if axis not in cut), *further)
                kinds = dict(kinds_in(self._without_own(name, type_of(parameter))))
                for axis in axes:
                    if kinds.get(axis, "I") in "VU":
                        raise of_a_shard(name, parameter, axis, where(mesh, [axis]))
                    kinds[axis] = "R"
                before = annotation_of(parameter)
                owned = axes if is_reduced else ()
                made[key] = tuple(before._replace(kinds=type_text(kinds), owner_axes=owned))
            found.append(made[key])
        for parameter, annotation in zip(self._parameters.values(), found, strict=True):
            parameter.__dict__[ANNOTATION] = annotation
        self._axes = names

    def _without_own(self, name: str, text: str) -> str:
        own = {*self._axes, *self._further.get(name, ())}.difference(self._reduced[name])
        return with_kinds(text, dict.fromkeys(own.intersection(axes_of_kind(text, "R")), "I"))


def of_a_shard(name: str, tensor: torch.Tensor, axis: str, where: str) -> AxisTypeError:
    """Return the error for a ``tensor`` whose type is not equal along ``axis``."""
    kind = KINDS[kinds_in(type_of(tensor))[axis]]
    fix = f"pass as device_mesh= only axes along which the model is replicated, without {axis!r}"
    if not isinstance(tensor, torch.nn.Parameter):
        fix += "; or pass broadcast_buffers=False, which leaves buffers as they are"
    elif kind == KINDS["V"]:
        fix = (
            f"if the ranks along {axis!r} have different data, as with experts to which "
            f"md.experts.dispatch sends tokens, pass a device_mesh with {axis!r}, and "
            f"experts_over={axis!r}; if they have the same data, {fix}"
        )
    return AxisTypeError(
        f"{OWNER} cannot replicate {name}: it is annotated as {kind} over {axis!r}",
        where=where,
        expected=f"a tensor that is equal on all ranks along {axis!r}",
        found=f"{name}: {tensor_text(tensor)}",
        fix=fix,
    )


def _axes_of(mesh: DeviceMesh, group: ProcessGroup, given: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of ``mesh`` whose group is ``group``, ``given`` first; raise if none."""
    choices: list[tuple[str, ...]] = [
        names for count in range(1, mesh.ndim + 1) for names in combinations(mesh.axis_names, count)
    ]
    if given and all(axis in mesh.axis_names for axis in given):
        choices.insert(0, tuple(given))
    for names in choices:
        if tuple(mesh[names].layout.ranks().ravel().tolist()) == tuple(group.ranks):
            return names
    raise AxisTypeError(
        f"{OWNER} averages over ranks that form no axes of the context's mesh",
        where=where(mesh),
        expected=f"the ranks along one or several of {shown(mesh.axis_names)} of {mesh_text(mesh)}",
        found=f"{group.name}, {ranks_text(group.ranks)}",
        fix=f"wrap with an axis, {OWNER}(module, device_mesh=mesh['dp']); or open the context with "
        "a mesh that has this axis",
    )

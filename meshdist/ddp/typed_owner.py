"""A wrapper as typed contexts see it: the owner of the axes over which it reduces gradients.

Its parameters are marked reduced there, so that no cast sums their gradients a second time, and
their ``.grad`` counts as complete there. A wrapper of a group knows no axes: its parameters keep
the group's ranks, of which ``md.einsum`` finds the axes on its own mesh. A forward inside a context
claims the axes: from then on each rank's loss must be its own over them, since the wrapper takes
the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import torch

from ..error_text import ranks_text
from ..errors import AxisTypeError
from ..functional.axis_types import (
    ATTRIBUTE,
    KINDS,
    RANKS_OF_OWNER,
    REDUCED_BY_OWNER,
    axes_of_kind,
    kinds_in,
    shown,
    type_text,
    with_kinds,
)
from ..groups.process_group import ProcessGroup
from ..mesh.device_mesh import DeviceMesh
from ..runtime.untraced import untraced
from ..typed_contexts.context import find_context
from ..typed_contexts.refusals import mesh_text, tensor_text, type_of, where
from ..typed_contexts.verb_calls import kinds_over

OWNER = "DDP"
"""As messages call it."""


class TypedOwner:
    """Marker of the types of a wrapper's parameters: with ``axes``, or with the group's ranks.

    Args:
        further: the axes beside the wrapper's over which it reduces gradients, by parameter.
    """

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        group: ProcessGroup,
        axes: DeviceMesh | None,
        further: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._parameters = parameters
        self._further = further
        # Which the program has marked: they stay when the wrapper goes.
        self._reduced = {name: axes_of_kind(type_of(x), "R") for name, x in parameters.items()}
        self._unmarked = [x for x in parameters.values() if ATTRIBUTE not in x.__dict__]
        self._axes: tuple[str, ...] = ()
        self._found: tuple[DeviceMesh, ProcessGroup, tuple[str, ...]] | None = None
        if axes is not None and axes.mesh_dim_names is not None:
            self._mark(axes, axes.axis_names, is_reduced=True)
            return
        for parameter in parameters.values():
            parameter.__dict__[RANKS_OF_OWNER] = tuple(group.ranks)

    @property
    def has_reduced(self) -> bool:
        """Return whether the program, not the wrapper, has marked a parameter as reduced."""
        return any(self._reduced.values())

    @untraced
    def claim(self, group: ProcessGroup, axes: DeviceMesh | None, *, is_reduced: bool) -> None:
        """Mark the parameters, and own the group's axes in the open typed context, if any.

        Args:
            axes: the mesh of axes that the wrapper was given; None if it was given a group.
            is_reduced: whether the wrapper averages the backward of the forward that begins.
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
        """Remove the wrapper's marks from the parameters."""
        for name, parameter in self._parameters.items():
            marks = parameter.__dict__
            marks.pop(RANKS_OF_OWNER, None)
            if marks.pop(REDUCED_BY_OWNER, None) is not None:
                marks[ATTRIBUTE] = self._without_own(name, marks.get(ATTRIBUTE, ""))
        for parameter in self._unmarked:
            if not type_of(parameter):
                parameter.__dict__.pop(ATTRIBUTE, None)
        self._axes = ()

    def _mark(self, mesh: DeviceMesh, names: tuple[str, ...], *, is_reduced: bool) -> None:
        texts: dict[tuple[object, ...], str] = {}
        for name, parameter in self._parameters.items():
            key = self._key(name, parameter)
            if key not in texts:
                texts[key] = self._marked(mesh, name, parameter, names)
        for name, parameter in self._parameters.items():
            marks = parameter.__dict__
            marks[ATTRIBUTE] = texts[self._key(name, parameter)]
            owned = (*names, *self._further.get(name, ())) if is_reduced else ()
            marks[REDUCED_BY_OWNER] = ",".join(owned)
        self._axes = names

    def _key(self, name: str, parameter: torch.Tensor) -> tuple[object, ...]:
        """Return a key of all that decides the type with which a parameter is marked."""
        has_marks = REDUCED_BY_OWNER in parameter.__dict__
        return type_of(parameter), has_marks, self._further.get(name), self._reduced[name]

    def _marked(
        self, mesh: DeviceMesh, name: str, parameter: torch.Tensor, names: tuple[str, ...]
    ) -> str:
        kinds = dict(kinds_in(self._without_own(name, type_of(parameter))))
        for axis in (*names, *self._further.get(name, ())):
            if kinds.get(axis, "I") in "VU":
                raise of_a_shard(name, parameter, axis, where(mesh, [axis]))
            kinds[axis] = "R"
        return type_text(kinds)

    def _without_own(self, name: str, text: str) -> str:
        own = {*self._axes, *self._further.get(name, ())}.difference(self._reduced[name])
        kinds = kinds_in(text)
        return type_text(
            {axis: kind for axis, kind in kinds.items() if kind != "R" or axis not in own}
        )


def of_a_shard(name: str, tensor: torch.Tensor, axis: str, where: str) -> AxisTypeError:
    """Return a wrapper's error for ``tensor``, which by its type is not equal along ``axis``."""
    kind = KINDS[kinds_in(type_of(tensor))[axis]]
    return AxisTypeError(
        f"{name} is {kind} over {axis!r}, over which {OWNER} keeps it equal",
        where=where,
        expected=f"a tensor that is equal on all ranks along {axis!r}",
        found=f"{name}: {tensor_text(tensor)}",
        fix=f"give {OWNER} the axes alone along which the model is replicated, such as "
        "device_mesh=mesh['dp']; or leave the tensor alone and average it by hand: "
        f"md.DDP._set_params_and_buffers_to_ignore_for_model(module, [{name!r}])",
    )


def _axes_of(mesh: DeviceMesh, group: ProcessGroup, given: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of ``mesh`` whose group is ``group``, ``given`` first; raise without any."""
    choices: list[tuple[str, ...]] = [
        names for count in range(1, mesh.ndim + 1) for names in combinations(mesh.axis_names, count)
    ]
    if given and all(axis in mesh.axis_names for axis in given):
        choices.insert(0, tuple(given))
    for names in choices:
        if tuple(mesh[names].layout.ranks().ravel().tolist()) == tuple(group.ranks):
            return names
    raise AxisTypeError(
        f"{OWNER} averages over ranks that lie along no axes of the context's mesh",
        where=where(mesh),
        expected=f"the ranks along one or several of {shown(mesh.axis_names)} of {mesh_text(mesh)}",
        found=f"{group.name}, {ranks_text(group.ranks)}",
        fix=f"wrap with an axis, {OWNER}(module, device_mesh=mesh['dp']); or open the context with "
        "the mesh that has it",
    )


def note_equal(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Type ``tensors`` as invariant over ``group`` in the open typed context, if any."""
    mode = find_context(is_awake=False)
    if mode is not None and not mode.is_asleep:
        kinds = kinds_over(mode.mesh, group, "I")
        for tensor in tensors:
            tensor.__dict__[ATTRIBUTE] = with_kinds(type_of(tensor), kinds)

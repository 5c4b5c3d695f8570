"""Provide ``DeviceMesh``."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..bootstrap.world import Caches, World, get_usable_world
from ..checking.call_sites import end_here, one_frame, run_unnested
from ..error_text import explain
from ..errors import MeshdistError, MeshError
from ..groups.process_group import ProcessGroup
from .definition import (
    AxisOptions,
    MeshDefinition,
    check_device,
    define_mesh,
    definition_of_groups,
    layout_of_ranks,
)
from .layout import Axis, Layout
from .torch_interop import (
    NAMES_OF_TORCHS,
    make_torch_mesh,
    parts_of_torch_mesh,
    reject_torch,
    torch_name_error,
)
from .visualize import draw, draw_svg

__all__ = ["DeviceMesh"]


class DeviceMesh:
    """Arrange ranks along named axes; creating a mesh is collective over its ranks.

    The ranks compare their definitions, then open one group per axis. Slices and transposes open
    nothing.

    A mesh is immutable. Meshes are equal if world, device type, axis names and options, and the
    rank at every coordinate are equal.

    Args:
        device_type: the tensors' device type, without an index: "cpu", "cuda", ...
        mesh: global ranks in any order, one dim per axis: an array, tensor or nested sequence; or a
            Layout, which has axis names.
        mesh_dim_names: one name per axis.
        axis_options: AxisOptions by axis name or index.
        open_groups: if False, groups open in ``warmup()`` or on first use.

    Raises:
        MeshError: If a rank does not exist or repeats, or the device type has an index.
        AxisError: If the names repeat, are empty, or do not match the axes in number.
        BackendError: If the device type is "cuda" and there is no GPU.
        MismatchError: If ranks define different meshes; raised on every rank.
        CollectiveTimeoutError: If a rank does not make this call.
        NotInGroupError: If a method needs a coordinate and this rank is outside of the mesh.

    Cost: at most a dozen store requests per rank and one group per axis, whatever the mesh's size.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mesh = md.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["tp"].get_group().ranks
        >>> md.simulate(program, 4)[2]
        ((1, 0), (2, 3))
    """

    @one_frame
    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_options: Mapping[str | int, AxisOptions] | None = None,
        open_groups: bool = True,
    ) -> None:
        layout_in = partial(layout_of_ranks, mesh, mesh_dim_names)
        definition = define_mesh(device_type, layout_in, axis_options, open_groups=open_groups)
        self._set_up(definition, open_groups=open_groups)

    @classmethod
    def from_definition(cls, definition: MeshDefinition, **how: Any) -> DeviceMesh:
        """Return the mesh of a checked definition; collective if groups open."""
        mesh = object.__new__(cls)
        mesh._set_up(definition, **how)
        return mesh

    def _set_up(
        self,
        definition: MeshDefinition,
        *,
        root: DeviceMesh | None = None,
        groups: tuple[ProcessGroup, ...] | None = None,
        open_groups: bool = False,
    ) -> None:
        """Set the attributes.

        Args:
            root: the mesh that this mesh was derived from, or None.
            groups: the groups of its axes; None creates them.
        """
        coordinate = definition.layout.coordinate_of(definition.world.rank)
        own_groups = [] if root is None else root._own_groups
        if groups is None:
            axes = () if coordinate is None else range(definition.layout.ndim)
            groups = tuple(definition.make_group((axis,)) for axis in axes)
            own_groups.extend(groups)
        vars(self).update(
            device_type=definition.device_type,
            layout=definition.layout,
            world=definition.world,
            _definition=definition,
            root=root or self,
            _coordinate=coordinate,
            _groups=groups,
            _own_groups=own_groups,
            _flat_group=None,
            _derived={},
            caches=Caches(),
        )
        if open_groups and coordinate is not None:
            run_unnested("DeviceMesh", definition.open_groups, groups)
        is_open = root is None and any(group.is_open for group in groups)
        definition.world.note_mesh(self, is_open=is_open)

    device_type: str
    """The device type of the tensors: "cpu", "cuda", ..."""
    layout: Layout
    """The arrangement of ranks, without processes."""
    world: World
    """The world of its ranks."""
    root: DeviceMesh
    """The mesh that this mesh was derived from and is closed with, or the mesh itself."""
    caches: Caches
    """Objects that higher modules cache with this mesh."""
    _definition: MeshDefinition
    _coordinate: tuple[int, ...] | None
    _groups: tuple[ProcessGroup, ...]
    _own_groups: list[ProcessGroup]  # The groups of the root and all derived meshes.
    _flat_group: ProcessGroup | None
    _derived: dict[Any, DeviceMesh]

    def __setattr__(self, name: str, value: object = None) -> NoReturn:
        raise AttributeError(
            explain(
                f"a mesh is immutable: its attribute {name!r} cannot be set or deleted",
                where=self._definition.text,
                fix="derive another mesh with flatten, unflatten, transpose or a slice",
            )
        )

    __delattr__ = __setattr__

    if not TYPE_CHECKING:  # A type checker would accept every attribute name.

        def __getattr__(self, name: str) -> NoReturn:
            if name in NAMES_OF_TORCHS:
                has_ours = hasattr(self, name[1:])
                raise torch_name_error(self._definition, self.root.layout, name, has_ours=has_ours)
            raise AttributeError(f"'DeviceMesh' object has no attribute {name!r}")

    def _new_group(
        self, definition: MeshDefinition, axes: tuple[int, ...], *, opens: bool = False
    ) -> ProcessGroup:
        """Return a group over ``axes`` of a derived mesh, opened if this mesh has open groups."""
        group = definition.make_group(axes)
        self._own_groups.append(group)
        if opens or any(mine.is_open for mine in self._groups):
            definition.open_group(group)
        return group

    # ------------------------------------------------------------------ properties

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as a fresh int32 CPU tensor, one dim per axis."""
        return torch.from_numpy(self.layout.ranks()).to(torch.int)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self.layout.sizes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        reject_torch(self._definition, self.root.layout)
        return self.layout.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axes' names, or None."""
        return self.layout.names

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes' names; empty for an unnamed mesh."""
        return self.layout.names or ()

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis by name, in axis order."""
        return self.layout.axis_sizes

    def size(self, mesh_dim: Axis | None = None) -> int:
        """The size of one axis, or the number of ranks."""
        if mesh_dim is None:
            return self.layout.num_ranks
        return self.layout.sizes[self.layout.axis_index(mesh_dim)]

    def get_rank(self) -> int:
        """Return this process's rank in the world."""
        return self.world.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's coordinate, or None outside the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """Return this rank's index along an axis, which may be omitted in a 1-D mesh."""
        index = self._own_axis(mesh_dim, "get_local_rank")
        assert self._coordinate is not None
        return self._coordinate[index]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """Return this rank's group along an axis, which may be omitted in a 1-D mesh."""
        reject_torch(self._definition, self.root.layout)
        return self._groups[self._own_axis(mesh_dim, "get_group")]

    def backend_of(self, axis: Axis) -> str:
        """Return an axis's configured backend, which is equal on all ranks."""
        asked = self._definition.options[self.layout.axis_index(axis)].backend
        return asked or self.world.backends.get(self.device_type, "")

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return this rank's group along each axis, in axis order."""
        coordinate_in(self, "get_all_groups")
        return list(self._groups)

    def open_group(self) -> ProcessGroup:
        """Return the group over all axes of this mesh, row-major.

        The first call opens it, collectively over its members, unless the mesh has a single axis.
        """
        if self._coordinate is not None and len(self._groups) == 1:
            return self._groups[0]
        if self._flat_group is None:
            coordinate_in(self, "a collective")
            group = self._new_group(self._definition, tuple(range(self.ndim)), opens=True)
            vars(self).update(_flat_group=group)
            return group
        return self._flat_group

    # ------------------------------------------------------------------ derived meshes

    def __getitem__(self, axes: Axis | tuple[Axis, ...] | list[str]) -> DeviceMesh:
        """Return the submesh of these axes, in this order, that contains this rank; opens nothing.

        Outside the mesh, it has no coordinate.
        """
        try:
            return self._derived[axes]
        except (KeyError, TypeError):
            pass
        try:
            return self._slice(tuple(axes) if isinstance(axes, list) else axes)
        except MeshdistError as error:
            __tracebackhide__ = True
            end_here(error)
            raise

    def _slice(self, axes: Axis | tuple[Axis, ...]) -> DeviceMesh:
        names = self._definition.names_to_slice(axes)
        indices = self.layout.axis_indices(names)
        if indices == tuple(range(self.ndim)):
            part = self
        else:
            first = self.layout.rank_at((0,) * self.ndim)
            through = first if self._coordinate is None else self.world.rank
            part = self._derive(self.layout.slice(names, through), indices)
        self._derived[axes] = part
        return part

    def transpose(self, *axes: Axis) -> DeviceMesh:
        """Return the mesh with its axes in this order; opens nothing."""
        indices = self.layout.axis_indices(axes)
        return self._derive(self.layout.transpose(indices), indices)

    def flatten(self, axes: Sequence[Axis] | None = None, name: str | None = None) -> DeviceMesh:
        """Merge ``axes`` (by default all) into one axis, row-major. Inverse of ``unflatten``.

        Opens the new axis's group, collectively, if this mesh has open groups.
        """
        indices = self.layout.axis_indices(range(self.ndim) if axes is None else axes)
        key = ("flatten", indices, name)
        if key not in self._derived:
            layout = self.layout.flatten(indices, name)
            kept = [i for i in range(self.ndim) if i == indices[0] or i not in indices]
            new = [kept.index(indices[0])] if len(indices) > 1 else []
            self._derived[key] = self._derive(layout, kept, new)
        return self._derived[key]

    def unflatten(
        self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Split ``axis``, row-major, into axes of these sizes. Inverse of ``flatten``.

        One size may be -1. Opens the new axes' groups, collectively, if this mesh has open groups.
        """
        index = self.layout.axis_index(axis)
        names = None if names is None else tuple(names)
        key = ("unflatten", index, tuple(sizes), names)
        if key not in self._derived:
            layout = self.layout.unflatten(index, sizes, names)
            new = range(index, index + layout.ndim - self.ndim + 1)
            kept = [*range(index), *(index for _ in new), *range(index + 1, self.ndim)]
            self._derived[key] = self._derive(layout, kept, new)
        return self._derived[key]

    def refined(self, layout: Layout, owners: Sequence[Axis]) -> DeviceMesh:
        """Return the mesh of ``layout``, whose axis i is a part of this mesh's axis ``owners[i]``.

        Opens the axes' groups, collectively, if this mesh has open groups.
        """
        kept = [self.layout.axis_index(owner) for owner in owners]
        key = ("refined", layout, tuple(kept))
        if key not in self._derived:
            self._derived[key] = self._derive(layout, kept, range(layout.ndim))
        return self._derived[key]

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh with the axes of all parts, in order; opens nothing.

        The parts must be slices of one mesh, or of meshes over the same ranks.
        """
        definition = MeshDefinition.concatenate([part._definition for part in meshes])
        groups = tuple(group for part in meshes for group in part._groups)
        return DeviceMesh.from_definition(definition, root=meshes[0].root, groups=groups)

    def _derive(self, layout: Layout, kept: Sequence[int], new: Container[int] = ()) -> DeviceMesh:
        """Return the mesh of ``layout`` with the options and groups of the axes ``kept``.

        Args:
            new: axes that get new groups, opened if this mesh's groups are open.
        """
        options = tuple(self._definition.options[index] for index in kept)
        definition = replace(self._definition, layout=layout, options=options)
        groups = tuple(
            run_unnested("DeviceMesh", self._new_group, definition, (axis,))
            if axis in new
            else self._groups[index]
            for axis, index in enumerate(kept if self._groups else ())
        )
        return self.from_definition(definition, root=self.root, groups=groups)

    # ------------------------------------------------------------------ opening and closing

    def warmup(self) -> None:
        """Open and connect the groups of all axes; collective over the mesh's ranks."""
        coordinate_in(self, "warmup")
        check_device(self.device_type, is_planned=True)
        run_unnested("warmup", self._definition.open_groups, self._groups)

    def abort(self, reason: str = "mesh.abort() was called") -> None:
        """Abort the groups of this mesh: every rank that waits in one of them raises.

        Meshes that share a communicator with it become unusable too. An axis with
        ``AxisOptions(private=True)`` shares none.
        """
        for group in (*self._groups, self._flat_group):
            if group is not None:
                group.abort(reason)

    def close(self) -> None:
        """Close the mesh and all meshes derived from it.

        Communicators that another mesh shares stay open.

        Raises:
            MeshError: If this mesh was derived from another mesh.
        """
        if self.root is not self:
            raise MeshError(
                "a derived mesh cannot be closed by itself",
                where=self._definition.text,
                fix=f"close the mesh that it was derived from, {self.root._definition.text}",
            )
        if self.world.open_layouts[self.layout] and any(group.is_open for group in self._groups):
            self.world.open_layouts[self.layout] -= 1
        self.world.meshes.pop(id(self), None)
        with ExitStack() as closing:  # All groups close, even if one raises.
            for group in reversed(self._own_groups):
                closing.callback(group.close)

    def __enter__(self) -> DeviceMesh:
        current_meshes.set((*current_meshes.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        current_meshes.set(current_meshes.get()[:-1])

    # ------------------------------------------------------------------ conversions

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create a mesh from existing groups.

        Args:
            group: one group for a 1-D mesh, or a list with one group per axis.
            device_type: as in the constructor.
            mesh: the global ranks; required for a list of groups.
            mesh_dim_names: required for a list of groups.

        Raises:
            MeshError: If the mesh and the groups have different ranks.
        """
        definition, groups = definition_of_groups(group, device_type, mesh, mesh_dim_names)
        return DeviceMesh.from_definition(definition, groups=groups)

    def to_torch(self) -> torch.distributed.device_mesh.DeviceMesh:
        """Return a torch DeviceMesh of the same ranks, for FSDP2 and DTensor.

        Collective over the world. Initializes torch.distributed, or reuses its process group.
        Inverse of ``from_torch``.
        """
        return make_torch_mesh(self._definition)

    @staticmethod
    def from_torch(
        mesh: torch.distributed.device_mesh.DeviceMesh,
        *,
        axis_options: Mapping[str | int, AxisOptions] | None = None,
    ) -> DeviceMesh:
        """Create a mesh of the ranks of a torch DeviceMesh; collective. Inverse of ``to_torch``."""
        device_type, ranks, names = parts_of_torch_mesh(mesh)
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, axis_options=axis_options)

    def __repr__(self) -> str:
        names = "" if self.layout.names is None else f", mesh_dim_names={self.layout.names!r}"
        ranks = self.layout.ranks().tolist() if self.layout.num_ranks <= 64 else self.shape
        return f"DeviceMesh({self.device_type!r}, {ranks}{names})"

    def __format__(self, format_spec: str) -> str:
        reject_torch(self._definition, self.root.layout)  # Functional collectives read this.
        return format(str(self), format_spec)

    def __str__(self) -> str:
        rank = None if self._coordinate is None else self.world.rank
        hosts = None if self.world.is_one_host else self.world.hosts
        return draw(self.layout, highlight_rank=rank, hosts=hosts)

    def _repr_svg_(self) -> str:
        """The SVG drawing for notebooks."""
        rank = None if self._coordinate is None else self.world.rank
        return draw_svg(self.layout, highlight_rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._definition == other._definition

    def __hash__(self) -> int:
        return hash(self._definition)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy reuses open equal groups, or opens new groups at their first use.
        return _unpickled, (self.device_type, self.layout, self._definition.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ------------------------------------------------------------------ checks

    def _own_axis(self, axis: Axis | None, call: str) -> int:
        if axis is None and self.ndim != 1:
            raise MeshError(
                f"{call} needs an axis on a mesh of {self.ndim} axes",
                where=self._definition.text,
                fix=f"pass an axis, for example {call}({next(iter(self.axis_names), 0)!r})",
            )
        index = 0 if axis is None else self.layout.axis_index(axis)
        coordinate_in(self, call)
        return index


def coordinate_in(mesh: DeviceMesh, call: str) -> tuple[int, ...]:
    """Return this rank's coordinate in ``mesh``; else raise an error of ``call``."""
    if mesh._coordinate is None:
        raise mesh._definition.outside_error(call, mesh.root.layout)
    return mesh._coordinate


def _unpickled(device_type: str, layout: Layout, options: tuple[AxisOptions, ...]) -> DeviceMesh:
    definition = MeshDefinition(get_usable_world(), device_type, layout, options)
    return DeviceMesh.from_definition(definition)


current_meshes: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("meshdist_mesh", default=())
"""The open ``with mesh:`` blocks of this context, the innermost last."""

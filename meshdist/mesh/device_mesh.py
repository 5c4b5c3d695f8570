"""DeviceMesh: an n-d array of ranks with named axes, and the groups along them."""

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
    """Ranks arranged along named axes; making a mesh is collective over its ranks.

    Every rank first compares the definition with the others', then opens one group per axis,
    together with that group's members alone. Slices and transposes open nothing.

    A mesh never changes. Two meshes are equal when programs can use either in the other's place:
    the same world and device type, the same rank at every coordinate, equal axis names, and equal
    options (backend, timeout, backend options, whether private) for each axis.

    Args:
        device_type: "cpu", "cuda", ...: where the tensors live, without an index.
        mesh: global ranks, one dim per axis, in any order: an array, tensor or nested sequence; or
            a Layout, which has its own names.
        mesh_dim_names: one name per axis.
        axis_options: AxisOptions by axis name or index.
        open_groups: False leaves opening to ``warmup()`` or to the first use.

    Raises:
        MeshError: no such ranks in the world, a rank twice, a device type with an index.
        AxisError: names that repeat, are empty, or more or fewer than the axes.
        BackendError: "cuda" without a GPU.
        MismatchError: the ranks define different meshes; every one raises and shows both.
        CollectiveTimeoutError: a rank did not come; the text names it.
        NotInGroupError: of methods that need this rank's place or groups, where it has none.

    Cost: at most a dozen requests to the store per rank, and one opening per axis: independent of
        how many ranks and groups the mesh has.

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
        """Return the mesh of a checked definition; collective over its ranks if it opens groups."""
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
        """Set the attributes of the mesh of a definition; every way to make a mesh ends here.

        Args:
            root: the mesh that it was derived from, and that it is closed with; None: itself.
            groups: those of its axes; None makes them.
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
        definition.world.note_mesh(definition.layout, is_open=is_open)

    device_type: str
    """Where the tensors live: "cpu", "cuda", ..."""
    layout: Layout
    """The arrangement of ranks, without processes."""
    world: World
    """The world of its ranks."""
    root: DeviceMesh
    """The mesh that it was derived from, and is closed with; itself if none."""
    caches: Caches
    """Objects that modules above keep with this mesh, for as long as it lives."""
    _definition: MeshDefinition
    _coordinate: tuple[int, ...] | None
    _groups: tuple[ProcessGroup, ...]
    _own_groups: list[ProcessGroup]  # of the root and all that was derived from it
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

    if not TYPE_CHECKING:  # a type checker would think that a mesh has every name

        def __getattr__(self, name: str) -> NoReturn:
            if name in NAMES_OF_TORCHS:
                has_ours = hasattr(self, name[1:])
                raise torch_name_error(self._definition, self.root.layout, name, has_ours=has_ours)
            raise AttributeError(f"'DeviceMesh' object has no attribute {name!r}")

    def _new_group(
        self, definition: MeshDefinition, axes: tuple[int, ...], *, opens: bool = False
    ) -> ProcessGroup:
        """Return a group over ``axes`` of a derived mesh; opens it if this mesh has open groups."""
        group = definition.make_group(axes)
        self._own_groups.append(group)
        if opens or any(mine.is_open for mine in self._groups):
            definition.open_group(group)
        return group

    # ------------------------------------------------------------------ what it is

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
        """This rank in the world."""
        return self.world.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's place along each axis; None on a rank outside the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """This rank's place along one axis; the axis may be left out in a 1-D mesh."""
        index = self._own_axis(mesh_dim, "get_local_rank")
        assert self._coordinate is not None
        return self._coordinate[index]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """The group along one axis through this rank; the axis may be left out in a 1-D mesh."""
        reject_torch(self._definition, self.root.layout)
        return self._groups[self._own_axis(mesh_dim, "get_group")]

    def backend_of(self, axis: Axis) -> str:
        """The backend that groups along an axis were asked to take, equal on all ranks of the mesh."""
        asked = self._definition.options[self.layout.axis_index(axis)].backend
        return asked or self.world.backends.get(self.device_type, "")

    def get_all_groups(self) -> list[ProcessGroup]:
        """The group of each axis through this rank, in axis order."""
        coordinate_in(self, "get_all_groups")
        return list(self._groups)

    def open_group(self) -> ProcessGroup:
        """The group that a collective on this mesh uses: its axis, or its axes flattened row-major.

        Several axes open their group at the first call, collectively over its members.
        """
        if self._coordinate is not None and len(self._groups) == 1:
            return self._groups[0]
        if self._flat_group is None:
            coordinate_in(self, "a collective")
            group = self._new_group(self._definition, tuple(range(self.ndim)), opens=True)
            vars(self).update(_flat_group=group)
            return group
        return self._flat_group

    # ------------------------------------------------------------------ the algebra

    def __getitem__(self, axes: Axis | tuple[Axis, ...] | list[str]) -> DeviceMesh:
        """The part with only these axes, in this order, through this rank; opens nothing.

        On a rank outside the mesh the part has the same shape and no coordinate.
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
        """The same ranks and groups with the axes in this order; opens nothing."""
        indices = self.layout.axis_indices(axes)
        return self._derive(self.layout.transpose(indices), indices)

    def flatten(self, axes: Sequence[Axis] | None = None, name: str | None = None) -> DeviceMesh:
        """The mesh with ``axes`` (all of them by default) as one axis, the first the slowest.

        Opens the new axis's group, collectively over its members, unless this mesh is only planned.
        ``unflatten`` undoes it.
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
        """The mesh with ``axis`` split, row-major, into axes of these sizes; one size may be -1.

        Opens the new axes' groups, collectively over their members, unless this mesh is only
        planned. Undoes ``flatten``.
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
        """The mesh over the same ranks with the axes of ``layout``, whose axis i is a part of this
        mesh's axis ``owners[i]`` and has its options.

        Opens the groups along them, collectively, unless this mesh is only planned.
        """
        kept = [self.layout.axis_index(owner) for owner in owners]
        key = ("refined", layout, tuple(kept))
        if key not in self._derived:
            self._derived[key] = self._derive(layout, kept, range(layout.ndim))
        return self._derived[key]

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh with the axes of all parts, in order, through this rank; opens nothing.

        The parts are slices of one mesh, or of several meshes over the same ranks.
        """
        definition = MeshDefinition.concatenate([part._definition for part in meshes])
        groups = tuple(group for part in meshes for group in part._groups)
        return DeviceMesh.from_definition(definition, root=meshes[0].root, groups=groups)

    def _derive(self, layout: Layout, kept: Sequence[int], new: Container[int] = ()) -> DeviceMesh:
        """Return the mesh of ``layout`` with the options and groups of the axes ``kept``.

        Args:
            new: the axes of ``layout`` that get new groups, open where this mesh's groups are.
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

    # ------------------------------------------------------------------ its groups' lives

    def warmup(self) -> None:
        """Open and connect the groups of all axes; collective over the mesh's ranks."""
        coordinate_in(self, "warmup")
        check_device(self.device_type, is_planned=True)
        run_unnested("warmup", self._definition.open_groups, self._groups)

    def abort(self, reason: str = "mesh.abort() was called") -> None:
        """Free every rank that waits in a group of this mesh; its groups are unusable then.

        A communicator that another mesh shares (the world's, where an axis holds every rank) is
        unusable for it too; ``AxisOptions(private=True)`` keeps an axis apart.
        """
        for group in (*self._groups, self._flat_group):
            if group is not None:
                group.abort(reason)

    def close(self) -> None:
        """End communication on the mesh and all that was derived from it.

        Communicators that another mesh shares stay open for it.

        Raises:
            MeshError: it was derived from another mesh, with which it is closed.
        """
        if self.root is not self:
            raise MeshError(
                "a derived mesh cannot be closed by itself",
                where=self._definition.text,
                fix=f"close the mesh that it was derived from, {self.root._definition.text}",
            )
        if self.world.open_layouts[self.layout] and any(group.is_open for group in self._groups):
            self.world.open_layouts[self.layout] -= 1
        with ExitStack() as closing:  # all close, though one raises
            for group in reversed(self._own_groups):
                closing.callback(group.close)

    def __enter__(self) -> DeviceMesh:
        meshes_in_force.set((*meshes_in_force.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        meshes_in_force.set(meshes_in_force.get()[:-1])

    # ------------------------------------------------------------------ other forms

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh on groups that are there: one group gives 1-D, a list one axis per group.

        Args:
            group: one group, or a group per axis, in axis order.
            device_type: as in the constructor.
            mesh: the global ranks; needed for a list of groups.
            mesh_dim_names: needed for a list of groups.

        Raises:
            MeshError: the mesh and the groups' ranks do not fit together.
        """
        definition, groups = definition_of_groups(group, device_type, mesh, mesh_dim_names)
        return DeviceMesh.from_definition(definition, groups=groups)

    def to_torch(self) -> torch.distributed.device_mesh.DeviceMesh:
        """torch's DeviceMesh on the same ranks in the same order, for FSDP2 and DTensor.

        Collective over the world; starts or adopts torch.distributed's own world.
        The inverse of ``from_torch``.
        """
        return make_torch_mesh(self._definition)

    @staticmethod
    def from_torch(
        mesh: torch.distributed.device_mesh.DeviceMesh,
        *,
        axis_options: Mapping[str | int, AxisOptions] | None = None,
    ) -> DeviceMesh:
        """Our mesh on the ranks of torch's, in the same order; collective over them.

        The inverse of ``to_torch``.
        """
        device_type, ranks, names = parts_of_torch_mesh(mesh)
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, axis_options=axis_options)

    def __repr__(self) -> str:
        names = "" if self.layout.names is None else f", mesh_dim_names={self.layout.names!r}"
        ranks = self.layout.ranks().tolist() if self.layout.num_ranks <= 64 else self.shape
        return f"DeviceMesh({self.device_type!r}, {ranks}{names})"

    def __format__(self, format_spec: str) -> str:
        reject_torch(self._definition, self.root.layout)  # torch's functional collectives
        return format(str(self), format_spec)

    def __str__(self) -> str:
        rank = None if self._coordinate is None else self.world.rank
        hosts = None if self.world.is_one_host else self.world.hosts
        return draw(self.layout, highlight_rank=rank, hosts=hosts)

    def _repr_svg_(self) -> str:
        """The drawing that a notebook shows."""
        rank = None if self._coordinate is None else self.world.rank
        return draw_svg(self.layout, highlight_rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._definition == other._definition

    def __hash__(self) -> int:
        return hash(self._definition)

    def __reduce__(self) -> tuple[Any, ...]:
        # The copy finds open equal groups, or opens its own at their first use.
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
    """Return this rank's coordinate in ``mesh``; raise an error of ``call`` outside of it."""
    if mesh._coordinate is None:
        raise mesh._definition.outside_error(call, mesh.root.layout)
    return mesh._coordinate


def _unpickled(device_type: str, layout: Layout, options: tuple[AxisOptions, ...]) -> DeviceMesh:
    definition = MeshDefinition(get_usable_world(), device_type, layout, options)
    return DeviceMesh.from_definition(definition)


meshes_in_force: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("meshdist_mesh", default=())
"""The meshes of this context's ``with mesh:``, the innermost last."""

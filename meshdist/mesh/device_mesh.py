"""DeviceMesh: an n-d array of ranks with named axes, and the groups along them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ..error_text import ranks_text
from ..errors import ArgumentError, AxisError, MeshError, NotInGroupError
from ..runtime.timeouts import DEFAULT_TIMEOUT
from ..runtime.world import World, find_world, get_usable_world
from ..wires.names import backends_in
from .agreement import agree
from .axis_options import AxisOptions, options_of_axes
from .current_mesh import enter_mesh, leave_mesh
from .devices import check_device, check_device_type, select_device
from .drawing import draw
from .groups import ProcessGroup, resolve_group
from .layout import Axis, Layout
from .registry import get_registry
from .session import init_process_group
from .svg import draw_svg
from .torch_interop import make_torch_mesh, parts_of_torch_mesh

__all__ = ["DeviceMesh"]


class DeviceMesh:
    """Ranks arranged along named axes; making one is collective over its ranks.

    Every rank first compares the definition with the others', then opens one group per axis,
    together with that group's members alone. Slices and transposes open nothing.

    Args:
        device_type: "cpu", "cuda", ...: where the tensors live, without an index.
        mesh: global ranks, one dim per axis, in any order: an array, tensor or nested sequence; or
            a Layout, which has its own names.
        mesh_dim_names: one name per axis.
        axis_options: AxisOptions by axis name or index.
        open_groups: False leaves opening to ``warmup()`` or to the first use.

    Raises:
        MeshError: no such ranks in the world, a rank twice, a device type with an index.
        AxisError: names that repeat, are empty, or are not one per axis.
        BackendError: "cuda" without a GPU.
        AgreementError: the ranks define different meshes; every one raises and shows both.
        CollectiveTimeoutError: a rank did not come; the text names it.

    Cost: one store round per rank, and one opening per axis: independent of how many groups the
        mesh has.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     mesh = md.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        ...     return mesh.get_coordinate(), mesh["tp"].get_group().ranks
        >>> md.simulate(program, 4)[2]
        ((1, 0), (2, 3))
    """

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_options: Mapping[str | int, AxisOptions] | None = None,
        open_groups: bool = True,
    ) -> None:
        check_device_type(device_type)
        if open_groups:
            check_device(device_type)
        if find_world() is None:
            init_process_group()
        world = get_usable_world()
        layout = _layout_of(mesh, mesh_dim_names, world)
        self._set_up(world, device_type, layout, options_of_axes(layout, axis_options))
        if open_groups:
            self._open()

    # ------------------------------------------------------------------ making

    def _set_up(
        self,
        world: World,
        device_type: str,
        layout: Layout,
        options: tuple[AxisOptions, ...],
        *,
        root: DeviceMesh | None = None,
        groups: tuple[ProcessGroup, ...] | None = None,
    ) -> None:
        self._world = world
        self._device_type = device_type
        self._layout = layout
        self._options = options
        self._root = root or self
        self._coordinate = layout.coordinate_of(world.rank)
        self._derived: dict[Any, DeviceMesh] = {}
        self._own_groups: list[ProcessGroup] = []
        self._flat_group: ProcessGroup | None = None
        if groups is not None or self._coordinate is None:
            self._groups = groups or ()
            return
        self._groups = tuple(self._make_group((axis,)) for axis in range(layout.ndim))

    @classmethod
    def _make(
        cls,
        world: World,
        device_type: str,
        layout: Layout,
        options: tuple[AxisOptions, ...],
        **more: Any,
    ) -> DeviceMesh:
        mesh = cls.__new__(cls)
        mesh._set_up(world, device_type, layout, options, **more)
        return mesh

    def _make_group(self, axes: tuple[int, ...]) -> ProcessGroup:
        """The group over ``axes`` through this rank; opens nothing."""
        options = self._options[axes[0]]
        layout = self._layout
        labels = ", ".join(repr(layout.names[a]) if layout.names else str(a) for a in axes)
        backends = None
        if options.backend is not None:
            backends = {**self._world.backends, self._device_type: options.backend}
            backends = backends_in(self._world, backends)
        group = ProcessGroup(
            self._world,
            layout.ranks_of_axes(axes, self._world.rank),
            name=f"{'axis' if len(axes) == 1 else 'axes'} {labels} of {self._short()}",
            backends=backends,
            named_for="" if backends is None else self._device_type,
            timeout=options.timeout,
            options=options.options if options.options is not None else self._world.options,
            is_private=options.private,
        )
        self._root._own_groups.append(group)
        return group

    def _open(self) -> None:
        if self._coordinate is None:
            return
        select_device(self._device_type, self._world)
        members = tuple(self._layout.ranks().ravel().tolist())
        timeout = max(self._timeout_of(options) for options in self._options)
        offer: dict[str, str] = {}
        for axis, group in enumerate(self._groups):
            offer |= group.offer(self._device_type, f"{axis}/")
        with get_registry(self._world).opening():
            agreed = agree(self._world, members, "mesh", self._definition(), timeout, offer)
            for axis, group in enumerate(self._groups):
                group.open(self._device_type, agreed, f"{axis}/")

    def _timeout_of(self, options: AxisOptions) -> timedelta:
        return options.timeout or self._world.timeout or DEFAULT_TIMEOUT

    def _definition(self) -> dict[str, Any]:
        return {
            "text": self._short(),
            "device_type": self._device_type,
            "ranks": repr(self._layout),
            "options": [repr((o.backend, str(o.timeout), o.private)) for o in self._options],
        }

    def _short(self) -> str:
        return f"DeviceMesh({self._layout.axis_text()})"

    # ------------------------------------------------------------------ what it is

    @property
    def device_type(self) -> str:
        """Where the tensors live: "cpu", "cuda", ..."""
        return self._device_type

    @property
    def layout(self) -> Layout:
        """The arrangement of ranks, without processes."""
        return self._layout

    @property
    def world(self) -> World:
        """The world of its ranks."""
        return self._world

    @property
    def mesh(self) -> torch.Tensor:
        """The global ranks as a fresh int32 CPU tensor, one dim per axis."""
        return torch.from_numpy(self._layout.ranks()).to(torch.int)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return self._layout.sizes

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._layout.ndim

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The axes' names, or None."""
        return self._layout.names

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes' names; empty for an unnamed mesh."""
        return self._layout.names or ()

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size of each axis by name, in axis order."""
        return self._layout.axis_sizes

    def size(self, mesh_dim: Axis | None = None) -> int:
        """The size of one axis, or the number of ranks."""
        if mesh_dim is None:
            return self._layout.num_ranks
        return self._layout.sizes[self._layout.axis_index(mesh_dim)]

    def get_rank(self) -> int:
        """This rank in the world."""
        return self._world.rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's place along each axis; None on a rank outside the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """This rank's place along one axis; the axis may be left out in a 1-D mesh."""
        index = self._only_axis(mesh_dim, "get_local_rank")
        self._check_member("get_local_rank")
        assert self._coordinate is not None
        return self._coordinate[index]

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """The group along one axis through this rank; it may be left out in a 1-D mesh."""
        index = self._only_axis(mesh_dim, "get_group")
        self._check_member("get_group")
        return self._groups[index]

    def get_all_groups(self) -> list[ProcessGroup]:
        """The group of each axis through this rank, in axis order."""
        self._check_member("get_all_groups")
        return list(self._groups)

    def communication_group(self) -> ProcessGroup:
        """The group that a verb on this mesh uses: its axis, or its axes flattened row-major.

        Several axes open their group at the first call, collectively over its members.
        """
        if self._coordinate is not None and len(self._groups) == 1:
            return self._groups[0]
        if self._flat_group is None:
            self._check_member("a verb")
            group = self._make_group(tuple(range(self.ndim)))
            group.open(self._device_type)
            self._flat_group = group
        return self._flat_group

    # ------------------------------------------------------------------ the algebra

    def __getitem__(self, axes: Axis | tuple[Axis, ...]) -> DeviceMesh:
        """The part with only these axes, in this order, through this rank; opens nothing.

        On a rank outside the mesh the part has the same shape and no coordinate.
        """
        try:
            return self._derived[axes]
        except KeyError:
            pass
        except TypeError as error:
            raise AxisError(f"a mesh is sliced by axis names, not by {axes!r}") from error
        if self._layout.names is None:
            raise MeshError(
                "an unnamed mesh cannot be sliced",
                where=self._short(),
                fix="give it names: mesh_dim_names=('dp', 'tp')",
            )
        names: tuple[Axis, ...] = axes if isinstance(axes, tuple) else (axes,)
        for name in names:
            if not isinstance(name, str):
                raise AxisError(
                    f"a mesh is sliced by axis names, not by {name!r}",
                    where=self._short(),
                    expected=f"some of {', '.join(map(repr, self._layout.names))}",
                )
        indices = self._layout.axis_indices(names)
        if indices == tuple(range(self.ndim)):
            part = self
        else:
            through = self._some_rank()
            part = self._with_axes(self._layout.slice(names, through), indices)
        self._derived[axes] = part
        return part

    def transpose(self, *axes: Axis) -> DeviceMesh:
        """The same ranks and groups with the axes in this order; opens nothing."""
        indices = self._layout.axis_indices(axes)
        return self._with_axes(self._layout.transpose(indices), indices)

    def flatten(self, axes: Sequence[Axis] | None = None, name: str | None = None) -> DeviceMesh:
        """The mesh with ``axes`` (all of them by default) as one axis, the first the slowest.

        Opens the new axis's group, collectively over its members. ``unflatten`` undoes it.
        """
        indices = self._layout.axis_indices(range(self.ndim) if axes is None else axes)
        key = ("flatten", indices, name)
        if key not in self._derived:
            layout = self._layout.flatten(indices, name)
            kept = [i for i in range(self.ndim) if i == indices[0] or i not in indices]
            old = {kept.index(i): i for i in kept if i not in indices or len(indices) == 1}
            self._derived[key] = self._with_new_axes(layout, [self._options[i] for i in kept], old)
        return self._derived[key]

    def unflatten(
        self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """The mesh with ``axis`` split, row-major, into axes of these sizes (one may be -1).

        Opens the new axes' groups, collectively over their members. Undoes ``flatten``.
        """
        index = self._layout.axis_index(axis)
        names = None if names is None else tuple(names)
        key = ("unflatten", index, tuple(sizes), names)
        if key not in self._derived:
            layout = self._layout.unflatten(index, sizes, names)
            grown = layout.ndim - self.ndim
            old = {i if i < index else i + grown: i for i in range(self.ndim) if i != index}
            options = [
                *self._options[:index],
                *([self._options[index]] * (grown + 1)),
                *self._options[index + 1 :],
            ]
            self._derived[key] = self._with_new_axes(layout, options, old)
        return self._derived[key]

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh with the axes of all parts, in order, through this rank; opens nothing.

        The parts are slices of one mesh, or of several meshes over the same ranks.
        """
        if not meshes:
            raise MeshError("concatenate has no meshes", expected="at least one")
        first = meshes[0]
        if any(part.device_type != first.device_type for part in meshes):
            raise MeshError(
                "meshes of different device types do not concatenate",
                found=", ".join(part.device_type for part in meshes),
            )
        layout = Layout.concatenate([part.layout for part in meshes])
        return DeviceMesh._make(
            first._world,
            first._device_type,
            layout,
            tuple(options for part in meshes for options in part._options),
            root=first._root,
            groups=tuple(group for part in meshes for group in part._groups),
        )

    def _with_axes(self, layout: Layout, indices: tuple[int, ...]) -> DeviceMesh:
        """A mesh of ``layout`` on the groups of these axes."""
        return self._make(
            self._world,
            self._device_type,
            layout,
            tuple(self._options[index] for index in indices),
            root=self._root,
            groups=tuple(self._groups[index] for index in indices) if self._groups else (),
        )

    def _with_new_axes(
        self, layout: Layout, options: Sequence[AxisOptions], old: dict[int, int]
    ) -> DeviceMesh:
        """A mesh of ``layout`` that keeps the groups of its ``old`` axes and opens the others'."""
        mesh = self._make(
            self._world, self._device_type, layout, tuple(options), root=self._root, groups=()
        )
        if self._coordinate is None:
            return mesh
        groups: list[ProcessGroup] = []
        for axis in range(layout.ndim):
            if axis in old:
                groups.append(self._groups[old[axis]])
                continue
            group = mesh._make_group((axis,))
            group.open(self._device_type)
            groups.append(group)
        mesh._groups = tuple(groups)
        return mesh

    # ------------------------------------------------------------------ its groups' lives

    def warmup(self) -> None:
        """Open the groups of all axes; collective over the mesh's ranks."""
        self._check_member("warmup")
        check_device(self._device_type)
        self._open()

    def abort(self, reason: str = "mesh.abort() was called") -> None:
        """Free every rank that waits in a group of this mesh; its groups are unusable then.

        A communicator that another mesh shares (the world's, where an axis holds every rank) is
        unusable for it too; ``AxisOptions(private=True)`` keeps an axis apart.
        """
        for group in [*self._groups, *([self._flat_group] if self._flat_group else [])]:
            group.abort(reason)

    def close(self) -> None:
        """End communication on the mesh and all that was derived from it.

        Communicators that another mesh shares stay open for it.
        """
        if self._root is not self:
            raise MeshError(
                "a part of a mesh cannot be closed on its own",
                where=self._short(),
                fix=f"close the whole mesh, {self._root._short()}",
            )
        for group in self._own_groups:
            group.close()

    def __enter__(self) -> DeviceMesh:
        enter_mesh(self)
        return self

    def __exit__(self, *_: object) -> None:
        leave_mesh()

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
            group: one group, or one per axis, in axis order.
            device_type: as in the constructor.
            mesh: the global ranks; needed for a list of groups.
            mesh_dim_names: needed for a list of groups.

        Raises:
            MeshError: the mesh and the groups' ranks do not fit together.
        """
        check_device_type(device_type)
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if not groups:
            raise MeshError("from_group has no groups", expected="one group per axis")
        groups = [resolve_group(each) for each in groups]
        world = groups[0].world
        if mesh is None:
            if not isinstance(group, ProcessGroup):
                raise MeshError(
                    "from_group has several groups and no mesh",
                    expected="mesh and mesh_dim_names, with as many dims as groups",
                )
            mesh = groups[0].ranks
        elif not isinstance(group, ProcessGroup) and mesh_dim_names is None:
            raise MeshError("from_group has several groups and no mesh_dim_names")
        layout = Layout.from_ranks(mesh, mesh_dim_names, world_size=world.size)
        if layout.ndim != len(groups):
            raise MeshError(
                f"from_group has {len(groups)} groups for a mesh of {layout.ndim} dims",
                expected="one group per axis, in axis order",
            )
        for axis, each in enumerate(groups):
            is_member = layout.coordinate_of(world.rank) is not None
            expected = layout.ranks_of_axis(axis, world.rank) if is_member else ()
            if expected != each.ranks:
                raise MeshError(
                    f"the group of axis {axis} has other ranks than the mesh",
                    where=f"rank {world.rank} of DeviceMesh({layout.axis_text()})",
                    expected=str(list(expected)),
                    found=str(list(each.ranks)),
                )
        options = tuple(AxisOptions() for _ in groups)
        return DeviceMesh._make(world, device_type, layout, options, groups=tuple(groups))

    def to_torch(self) -> torch.distributed.device_mesh.DeviceMesh:
        """torch's DeviceMesh on the same ranks in the same order, for FSDP2 and DTensor.

        Collective over the world; starts or adopts torch.distributed's own world.
        The inverse of ``from_torch``.
        """
        return make_torch_mesh(self._world, self._layout, self._device_type)

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
        names = "" if self._layout.names is None else f", mesh_dim_names={self._layout.names!r}"
        ranks = self._layout.ranks().tolist() if self._layout.num_ranks <= 64 else self.shape
        return f"DeviceMesh({self._device_type!r}, {ranks}{names})"

    def __str__(self) -> str:
        rank = None if self._coordinate is None else self._world.rank
        hosts = None if self._world.is_one_host else self._world.hosts
        return draw(self._layout, highlight_rank=rank, hosts=hosts)

    def _repr_svg_(self) -> str:
        """The drawing that a notebook shows."""
        rank = None if self._coordinate is None else self._world.rank
        return draw_svg(self._layout, highlight_rank=rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self is other or (
            self._device_type == other._device_type and self._layout == other._layout
        )

    def __hash__(self) -> int:
        return hash((self._device_type, self._layout))

    def __reduce__(self) -> tuple[Any, ...]:
        """Without its groups: the copy finds open equal ones, or opens its own at first use."""
        return _unpickled, (self._device_type, self._layout, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    # ------------------------------------------------------------------ checks

    def _only_axis(self, axis: Axis | None, call: str) -> int:
        if axis is not None:
            return self._layout.axis_index(axis)
        if self.ndim != 1:
            raise MeshError(
                f"{call} needs an axis on a mesh of {self.ndim} axes",
                where=self._short(),
                fix=f"name one, for example {call}({self._example_axis()!r})",
            )
        return 0

    def _example_axis(self) -> Axis:
        return self._layout.names[0] if self._layout.names else 0

    def _some_rank(self) -> int:
        if self._coordinate is not None:
            return self._world.rank
        return self._layout.rank_at((0,) * self.ndim)

    def _check_member(self, call: str) -> None:
        if self._coordinate is None:
            raise NotInGroupError(
                f"{call} on a mesh that does not hold this rank",
                where=f"rank {self._world.rank}, {self._short()}",
                expected=f"a member: {ranks_text(self._layout.ranks().ravel().tolist())}",
                fix="skip the call where mesh.get_coordinate() is None",
            )


def _unpickled(device_type: str, layout: Layout, options: tuple[AxisOptions, ...]) -> DeviceMesh:
    return DeviceMesh._make(get_usable_world(), device_type, layout, options)


def _layout_of(mesh: Any, names: Sequence[str] | None, world: World) -> Layout:
    if not isinstance(mesh, Layout):
        return Layout.from_ranks(mesh, names, world_size=world.size)
    if names is not None:
        raise ArgumentError(
            "a Layout has its own axis names",
            where=f"layout ({mesh.axis_text()}), mesh_dim_names={names!r}",
            fix="name the axes where the Layout is made",
        )
    if mesh.largest_rank >= world.size:
        raise MeshError(
            f"the mesh names rank {mesh.largest_rank}, which the world lacks",
            where=f"layout ({mesh.axis_text()})",
            expected=f"ranks from 0 to {world.size - 1}",
            fix=f"start {mesh.largest_rank + 1} ranks, or use fewer",
        )
    return mesh

"""Check the definition of a mesh, and select devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from ..arguments import DEFAULT_TIMEOUT, check_timeout
from ..backends.backend_names import backends_in
from ..backends.registry import reserve_resources
from ..bootstrap.world import World, find_world, get_usable_world
from ..checking.call_sites import call_site
from ..error_text import ranks_text
from ..errors import (
    ArgumentError,
    AxisError,
    BackendError,
    KindError,
    MeshdistError,
    MeshError,
    NotInGroupError,
)
from ..groups.communicators import get_registry
from ..groups.process_group import ProcessGroup, resolve_group, world_group
from ..worlds.lazy_init import begin_for_mesh
from ..worlds.queries import get_node_local_rank
from .layout import Layout
from .layout_arguments import num_ranks_text

__all__ = ["AxisOptions"]


def check_device_type(device_type: object) -> None:
    """Raise unless ``device_type`` is text without an index."""
    if not isinstance(device_type, str):
        raise KindError(
            f"device_type must be a string, not {device_type!r}", expected="'cpu', 'cuda', ..."
        )
    if not device_type.isalpha():
        base = device_type.split(":")[0]
        raise MeshError(
            f"device type {device_type!r} is not a plain device type",
            expected=f"the type without an index: {base!r}",
            fix=f"choose the device with torch.{base}.set_device(...) before you create the mesh"
            if base not in ("", "cpu")
            else None,
        )


def check_device(device_type: str, *, is_planned: bool = False) -> None:
    """Raise unless groups on ``device_type`` can communicate; ``is_planned`` changes the fix."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "a 'cuda' mesh needs a GPU, and torch sees none",
            found=f"torch {torch.__version__}, torch.cuda.is_available() is False",
            fix="open a planned mesh on a machine with GPUs and a CUDA build of torch"
            if is_planned
            else "use init_device_mesh('cpu', ...), install a CUDA build of torch, or plan without "
            "communication: open_groups=False",
        )
    known = ("cpu", "cuda", "xpu", "mps", "meta", "hpu", "xla", "mtia", "npu")
    if device_type not in known:
        raise ArgumentError(
            f"unknown device type {device_type!r}", expected=f"one of {', '.join(known)}"
        )


def select_device(device_type: str, world: World) -> torch.device | None:
    """Return this rank's CUDA device, set if the program set none; else None."""
    if device_type != "cuda":
        return None
    bound = world.device if world.device is not None and world.device.type == "cuda" else None
    if not torch.cuda.is_initialized():  # The program has not selected a device.
        torch.cuda.set_device(_index_by_local_rank(world) if bound is None else bound.index)
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound


def _index_by_local_rank(world: World) -> int:
    count = torch.cuda.device_count()
    local_rank = get_node_local_rank()
    if local_rank >= count:
        file, line = call_site() or (__file__, 0)
        warnings.warn_explicit(
            f"rank {world.rank} has local rank {local_rank} on a host with {count} CUDA devices "
            f"and uses device {local_rank % count}; to choose another, call "
            "torch.cuda.set_device before you create the mesh",
            UserWarning,
            file,
            line,
        )
    return local_rank % count


@dataclass(frozen=True)
class AxisOptions:
    """Configure the groups along one mesh axis.

    Args:
        backend: for example "gloo"; None takes the world's backend for the mesh's device type.
        timeout: how long a collective may wait; None takes the mesh's timeout, else the world's.
        options: torch's options object for the backend, or None.
        private: if True, the axis never shares communicators. Use it for collectives on a second
            thread.

    Example:
        >>> from datetime import timedelta
        >>> AxisOptions(backend="gloo", timeout=timedelta(seconds=30)).private
        False
    """

    backend: str | None = None
    timeout: timedelta | None = None
    options: Any = None
    private: bool = False

    def __post_init__(self) -> None:
        check_timeout(self.timeout)


@dataclass(frozen=True)
class MeshDefinition:
    """A mesh without groups."""

    world: World
    device_type: str
    layout: Layout
    options: tuple[AxisOptions, ...]  # In axis order.

    def __hash__(self) -> int:  # A backend's options may not be hashable.
        return hash((self.device_type, self.layout))

    @property
    def text(self) -> str:
        """The mesh in messages: ``"DeviceMesh(dp=2, tp=4)"``."""
        return f"DeviceMesh({self.layout.axis_text()})"

    @property
    def timeout(self) -> timedelta:
        """The timeout for creating the mesh: the longest of its axes."""
        default = self.world.timeout or DEFAULT_TIMEOUT
        return max(options.timeout or default for options in self.options)

    def entries(self) -> dict[str, Any]:
        """Return the properties that must be equal on all ranks."""
        return {
            "text": self.text,
            "device_type": self.device_type,
            "ranks": repr(self.layout),
            "options": [repr((o.backend, str(o.timeout), o.private)) for o in self.options],
        }

    def make_group(self, axes: tuple[int, ...]) -> ProcessGroup:
        """Return this rank's unopened group along ``axes``, with the first axis's options."""
        world, layout, options = self.world, self.layout, self.options[axes[0]]
        labels = ", ".join(repr(layout.names[a]) if layout.names else str(a) for a in axes)
        backends = None
        if options.backend is not None:
            backends = backends_in(world, {**world.backends, self.device_type: options.backend})
        return ProcessGroup(
            world,
            layout.ranks_of_axes(axes, world.rank),
            name=f"{'axis' if len(axes) == 1 else 'axes'} {labels} of {self.text}",
            backends=backends,
            named_for="" if backends is None else self.device_type,
            timeout=options.timeout,
            options=options.options if options.options is not None else world.options,
            is_private=options.private,
            axis_names=tuple(layout.names[a] for a in axes) if layout.names else (),
        )

    def open_group(self, group: ProcessGroup) -> None:
        """Open ``group`` and connect its device; collective over its members."""
        check_device(self.device_type, is_planned=True)
        group.open_device_group(self.device_type)
        device = select_device(self.device_type, self.world)
        if device is not None:
            group.connect(device)

    def open_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Agree with all ranks on the definition; open this rank's group per axis."""
        device = select_device(self.device_type, self.world)
        members = tuple(self.layout.ranks().ravel().tolist())
        offer: dict[str, tuple[str, tuple[int, ...]]] = {}
        needs = {}
        registry = get_registry(self.world)
        with registry.opening() as agree:
            for axis, group in enumerate(groups):
                offer |= group.offer(self.device_type, f"{axis}/")
                name = self.layout.names[axis] if self.layout.names else axis
                needs[f"axis {name!r}"] = group.needs(self.device_type)
            lack = reserve_resources(needs, self.world.num_here(members))
            agreement = agree(
                members, "mesh", self.entries(), self.timeout, offers=offer, lack=lack
            )
            for axis, group in enumerate(groups):
                group.open_device_group(self.device_type, agreement, f"{axis}/")
                if device is not None:
                    group.connect(device)
        if device is not None and len(members) == self.world.size:
            world_group(self.world).has_devices = True

    def outside_error(self, call: str, whole: Layout) -> NotInGroupError:
        """Return the error of ``call`` on a rank outside the mesh."""
        ranks = whole.ranks().ravel().tolist()
        return NotInGroupError(
            f"{call} on a mesh that does not contain this rank",
            where=f"rank {self.world.rank}, mesh ({self.layout.axis_text()})",
            expected=f"one of {ranks_text(ranks)}",
            found=f"the mesh has {len(ranks)} of {self.world.size} ranks",
            fix=f"start {num_ranks_text(len(ranks))}, or create a mesh of all {self.world.size}; "
            "to leave ranks out on purpose, skip the call if mesh.get_coordinate() is None",
        )

    @staticmethod
    def concatenate(parts: Sequence[MeshDefinition]) -> MeshDefinition:
        """Return the mesh with the axes of all parts, in order."""
        if not parts:
            raise MeshError("concatenate needs at least one mesh", expected="at least one")
        first = parts[0]
        if any(part.device_type != first.device_type for part in parts):
            raise MeshError(
                "concatenate needs meshes of one device type",
                found=", ".join(part.device_type for part in parts),
            )
        layout = Layout.concatenate([part.layout for part in parts])
        options = tuple(options for part in parts for options in part.options)
        return replace(first, layout=layout, options=options)

    def names_to_slice(self, axes: object) -> tuple[str, ...]:
        """Return ``axes`` of ``mesh[axes]`` as a tuple of names, checked."""
        if not isinstance(axes, Hashable):
            raise AxisError(f"a mesh must be sliced by axis names, not by {axes!r}")
        if self.layout.names is None:
            raise MeshError(
                "an unnamed mesh cannot be sliced",
                where=self.text,
                fix="name its axes: mesh_dim_names=('dp', 'tp')",
            )
        names = axes if isinstance(axes, tuple) else (axes,)
        for name in names:
            if not isinstance(name, str):
                raise AxisError(
                    f"a mesh must be sliced by axis names, not by {name!r}",
                    where=self.text,
                    expected=f"some of {', '.join(map(repr, self.layout.names))}",
                )
        return names


def define_mesh(
    device_type: str,
    layout_in: Callable[[int], Layout],
    axis_options: Mapping[str | int, AxisOptions] | None = None,
    backend_override: Mapping[str | int, Any] | None = None,
    timeout: timedelta | None = None,
    *,
    open_groups: bool = True,
) -> MeshDefinition:
    """Return the checked definition of a mesh; initializes the world if needed.

    Args:
        layout_in: returns the layout for a world size.
    """
    check_device_type(device_type)
    check_timeout(timeout)
    if open_groups:
        check_device(device_type)
    world = find_world()
    if world is None or world.is_orphan:
        begin_for_mesh(timeout, is_alone=_holds_rank_0_alone(layout_in))
    world = get_usable_world()
    layout = layout_in(world.size)
    options = options_of_axes(layout, axis_options, backend_override, timeout)
    return MeshDefinition(world, device_type, layout, options)


def _holds_rank_0_alone(layout_in: Callable[[int], Layout]) -> bool:
    """Return whether the layout is only rank 0 in any world."""
    try:
        layout = layout_in(2)  # A size of -1 becomes 2 here.
    except MeshdistError:  # The same error is raised when the world's size is known.
        return False
    return layout.num_ranks == 1 and layout.largest_rank == 0


def options_of_axes(
    layout: Layout,
    axis_options: Mapping[str | int, AxisOptions] | None,
    backend_override: Mapping[str | int, Any] | None = None,
    timeout: timedelta | None = None,
) -> tuple[AxisOptions, ...]:
    """Return the checked options of each axis of ``layout``."""
    chosen: dict[int, AxisOptions] = {}
    for what, given in (("axis_options", axis_options), ("backend_override", backend_override)):
        if given is not None and not isinstance(given, Mapping):
            raise KindError(
                f"{what} must be a mapping with axes as keys",
                expected="for example {'dp': ...}",
                found=f"{given!r}",
            )
    from_torch = [
        (axis, _from_torch_override(override))
        for axis, override in (backend_override or {}).items()
    ]
    for axis, options in [*(axis_options or {}).items(), *from_torch]:
        if not isinstance(options, AxisOptions):
            raise KindError(
                f"axis_options[{axis!r}] must be an AxisOptions, not {options!r}",
                expected="an AxisOptions",
                fix=f"axis_options={{{axis!r}: AxisOptions(backend='gloo')}}",
            )
        index = layout.axis_index(axis)
        if index in chosen:
            raise ArgumentError(
                f"axis {axis!r} has options twice",
                where=f"DeviceMesh({layout.axis_text()})",
                fix="pass each axis once, by name or by index, in one of the two arguments",
            )
        if options.backend is not None:
            backends_in(find_world(), {"": options.backend})  # Raises if there is none.
        chosen[index] = options
    all_chosen = (chosen.get(index, AxisOptions()) for index in range(layout.ndim))
    return tuple(replace(options, timeout=options.timeout or timeout) for options in all_chosen)


def _from_torch_override(value: Any) -> AxisOptions:
    if isinstance(value, str):
        return AxisOptions(backend=value.lower())
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[0], (str, type(None))):
            raise KindError(
                "an entry of backend_override must be a backend, backend options, or both as a "
                "pair",
                expected="for example ('nccl', options)",
                found=f"{value!r}",
            )
        name, options = value
        return AxisOptions(backend=None if name is None else name.lower(), options=options)
    name = getattr(value, "backend", None)
    return AxisOptions(backend=name if isinstance(name, str) else None, options=value)


def layout_of_ranks(mesh: Any, names: Sequence[str] | None, world_size: int) -> Layout:
    """Return the layout of ranks or a Layout; raise if the world lacks ranks."""
    if not isinstance(mesh, Layout):
        return Layout.from_ranks(mesh, names, world_size=world_size)
    if names is not None:
        raise ArgumentError(
            "mesh_dim_names= cannot be passed with a Layout, which has its own axis names",
            where=f"layout ({mesh.axis_text()}), mesh_dim_names={names!r}",
            fix="name the axes when you create the Layout",
        )
    if mesh.largest_rank >= world_size:
        raise MeshError(
            f"the mesh names rank {mesh.largest_rank}, which does not exist in the world",
            where=f"layout ({mesh.axis_text()})",
            expected=f"ranks from 0 to {world_size - 1}",
            fix=f"start {mesh.largest_rank + 1} ranks, or use fewer",
        )
    return mesh


def definition_of_groups(
    group: ProcessGroup | Sequence[ProcessGroup],
    device_type: str,
    mesh: Any,
    names: Sequence[str] | None,
) -> tuple[MeshDefinition, tuple[ProcessGroup, ...]]:
    """Return a mesh's definition on existing groups, and these in axis order."""
    check_device_type(device_type)
    is_one = isinstance(group, ProcessGroup)
    groups = tuple(map(resolve_group, [group] if isinstance(group, ProcessGroup) else group))
    if not groups:
        raise MeshError("from_group needs at least one group", expected="one group per axis")
    for argument, value in (("mesh", mesh), ("mesh_dim_names", names)):
        if not is_one and value is None:
            raise MeshError(
                f"from_group needs {argument} for several groups",
                expected="mesh and mesh_dim_names, with one dim per group",
            )
    world = groups[0].world
    ranks = groups[0].ranks if mesh is None else mesh
    layout = Layout.from_ranks(ranks, names, world_size=world.size)
    if layout.ndim != len(groups):
        raise MeshError(
            f"from_group got {len(groups)} groups for a mesh of {layout.ndim} axes",
            expected="one group per axis, in axis order",
        )
    is_member = layout.coordinate_of(world.rank) is not None
    for axis, member_group in enumerate(groups):
        expected = layout.ranks_of_axis(axis, world.rank) if is_member else ()
        if expected != member_group.ranks:
            raise MeshError(
                f"the group of axis {axis} does not have the ranks of the mesh",
                where=f"rank {world.rank} of DeviceMesh({layout.axis_text()})",
                expected=str(list(expected)),
                found=str(list(member_group.ranks)),
            )
    options = tuple(_options_of(member_group, device_type) for member_group in groups)
    return MeshDefinition(world, device_type, layout, options), groups


def _options_of(group: ProcessGroup, device_type: str) -> AxisOptions:
    backend = group.backends.get(device_type)
    return AxisOptions(
        backend=None if backend == group.world.backends.get(device_type) else backend,
        timeout=group.own_timeout,
        options=None if group.options is group.world.options else group.options,
        private=group.is_private,
    )

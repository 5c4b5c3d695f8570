"""Define process groups and their connections."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import ref

import torch
from torch.distributed import PrefixStore, ProcessGroup as TorchGroup

from ..backends.registry import (
    BackendType,
    Needs,
    Opening,
    find_backend,
    get_backend,
    lack_error,
    reserve_resources,
)
from ..backends.requests import BackendUnsupported
from ..backends.work import Work, bound
from ..bootstrap.world import World, get_usable_world, get_world, give_group
from ..checking.call_sites import call_site, show_site, warn_once_at
from ..checking.calls import GroupFacts
from ..error_text import explain, ranks_text
from ..errors import BackendError, GroupClosedError, GroupKindError, NotInGroupError
from ..runtime.hosts import forks, num_forks
from .agreement import Agreement
from .communicators import get_registry
from .device_group import DeviceGroup
from .failure_diagnosis import explained_opening
from .group_methods import Asked, GroupMethods, operations
from .peer_status import LatePeers, WorldPeers, silent_ranks

if TYPE_CHECKING:
    from ..backends.native import FastPath

__all__ = ["NON_GROUP_MEMBER", "GroupLike", "ProcessGroup", "resolve_group", "world_group"]

_log = logging.getLogger("meshdist.groups")

NON_GROUP_MEMBER = -100
"""The result of ``new_group`` on a rank outside the group, as in torch."""


class ProcessGroup(GroupMethods):
    """An ordered set of ranks that communicate.

    Use ``new_group`` or a mesh to create groups. The class also has torch's methods, which start
    collectives.

    Args:
        ranks: Global ranks in group order, including this rank.
        name: For messages, as ``axis 'tp' of DeviceMesh(dp=2, tp=2)``.
        backends: The program's backend of each device type (None: the world's).
        named_for: The device type for which the program named a backend, or "".
        timeout: The timeout of collectives (None: the world's, else the backend's default).
        is_private: Whether the group shares no communicators.
        axis_names: The group's mesh axes; () without named axes.
        device: The device on which the backend connects at opening (None: the world's).
        agreement: The members' agreement (None: agree at the first communicator).
    """

    def __init__(
        self,
        world: World,
        ranks: tuple[int, ...],
        *,
        name: str,
        backends: dict[str, str] | None = None,
        named_for: str = "",
        timeout: timedelta | None = None,
        options: Any = None,
        is_private: bool = False,
        desc: str = "",
        axis_names: tuple[str, ...] = (),
        device: torch.device | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        self._device_groups: dict[str, DeviceGroup] = {}
        self.world = world
        self.ranks = ranks
        self.name = name
        self._chooses_backends = world.chooses_backends and backends is None
        self.backends = backends or world.backends
        self.named_for = named_for
        if self._chooses_backends and world.spans_hosts(ranks):
            types = {kind: find_backend(name) for kind, name in self.backends.items()}
            across = {kind: backend.replacement for kind, backend in types.items() if backend}
            self.backends = {kind: across.get(kind) or name for kind, name in self.backends.items()}
        self.options = options
        self.device = device or world.device
        self.is_private = is_private
        self.group_desc = desc or name
        self.axis_names = axis_names
        self.own_timeout = timeout
        self._group_rank = ranks.index(world.rank)
        self._num_forks = num_forks()
        self._agreement = agreement
        self._site = call_site() if world.has_processes else None
        self._closed = False
        self.fast_path: FastPath | None = None
        """The fast path of plain calls on CPU tensors, if the open backend has a fast path."""
        self.fast_path_on_device: FastPath | None = None
        """The fast path of plain calls on a device's tensors, which are enqueued there."""
        self.is_on_stream = False
        """Whether a backend is open whose collectives are enqueued on a device."""
        self.has_devices = True
        """Whether all members have chosen their devices, as far as that is known."""

    def __del__(self) -> None:
        """Keep the group registered while members use its communicators; warn once."""
        is_over = not self._device_groups or self._num_forks != num_forks() or self.is_closed
        if is_over or sys.is_finalizing() or not get_registry(self.world).drop(self):
            return
        if self._site:
            text = partial(
                explain,
                f"{self.name} was dropped without being closed",
                where=f"rank {self.world.rank}, made at {show_site(self._site)}",
                found="its communicator, which stays open until all ranks have dropped the group "
                "and create another",
                fix="call mesh.close() or destroy_process_group(group), or keep a reference to it",
            )
            warn_once_at(self._site, text, ResourceWarning)

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self._group_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    @property
    def group_name(self) -> str:
        """The name in messages; not unique."""
        return self.name

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device of the group or its world."""
        return self.device

    @property
    def timeout(self) -> timedelta:
        """The timeout of collectives; on CPU tensors if supported."""
        return self._timeout_on(get_backend(self.backend_name(self._main_device_type())))

    @property
    def is_closed(self) -> bool:
        """Whether the group or its world is closed."""
        return self._closed or self.world.is_closed

    def __repr__(self) -> str:
        return f"ProcessGroup({self.name}, ranks={list(self.ranks)}, rank={self._group_rank})"

    def backend_name(self, device_type: str) -> str:
        """Return the backend for tensors of ``device_type``."""
        name = self.backends.get(device_type)
        if name is None:
            registered = ",".join(
                f"{device}:{backend}" for device, backend in self.backends.items()
            )
            raise BackendError(
                f"{self.name} has no backend for {device_type} tensors",
                expected=f"a tensor of one of its device types: {registered}",
                fix="pass a tensor with values, for example torch.empty_like(x, device='cpu')"
                if device_type == "meta"
                else "name one when you initialize, for example "
                f"backend='{registered},{device_type}:gloo'",
            )
        return name

    def open_device_group(
        self, device_type: str, agreement: Agreement | None = None, slot: str = ""
    ) -> DeviceGroup:
        """Return the device group for ``device_type``; the first call opens it with all members.

        Args:
            agreement: the members' recent agreement, with their offers (None: agree now).
            slot: of each member's offer.
        """
        is_own_process = self._num_forks == forks[0]  # else this is a forked child
        if is_own_process and (device_group := self._device_groups.get(device_type)) is not None:
            return device_group
        return self._open_device_group(device_type, agreement, slot)

    def offer(self, device_type: str, slot: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return this member's sharable communicators for ``device_type``, for an agreement."""
        if self.is_private:
            return {}
        connection = get_backend(self.backend_name(device_type)).connection_for(device_type)
        label = get_registry(self.world).find_label(connection, self.ranks, self.options)
        return {f"{slot}{connection}": (label, self.ranks)} if label else {}

    def needs(self, device_type: str) -> Needs:
        """Return the resources to open ``device_type``; none if a communicator can be shared."""
        if device_type in self._device_groups or self.offer(device_type):
            return Needs(0, 0)
        backend = get_backend(self.backend_name(device_type))
        opening = self._opening("", device_type, self._timeout_on(backend))
        descriptors, threads = backend.needs(opening)
        # If the backend does not compare calls, processes of a host map a file of each other.
        counts_host = self.world.has_processes and not backend.compares_calls
        words = 0 if not counts_host else opening.hosts.count(opening.hosts[opening.rank]) - 1
        return Needs(descriptors + words, threads)

    def reserve_resources(self, *kinds: str) -> str:
        """Call the function of this name for device types, by default all of ``open_all``."""
        needs = {f"{kind} tensors": self.needs(kind) for kind in kinds or self._types_to_open()}
        return reserve_resources(needs, self.world.num_here(self.ranks))

    def open_all(self, agreement: Agreement | None = None) -> None:
        """Open every backend of the group that works on this machine, with all other members.

        NCCL connects at its first collective, unless a device is bound. Next to NCCL, the default
        CPU backend, which may need a connection to each member, opens at first use.
        """
        for device_type in self._types_to_open():
            self.open_device_group(device_type, agreement)
        self.has_devices = "cpu" in self._device_groups or self.device is not None
        self._agreement = None  # later openings make a new agreement

    def _types_to_open(self) -> list[str]:
        types = {kind: find_backend(name) for kind, name in self.backends.items()}
        usable = {
            kind
            for kind, backend in types.items()
            if backend is not None and backend.is_available()
        }
        if self._chooses_backends and usable > {"cpu"}:
            usable.remove("cpu")
        here = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        return [kind for kind in types if kind in usable.intersection(here)]

    def connect(self, device: torch.device) -> None:
        """Open, if needed, and connect the backend for ``device``; collective.

        A bound device of this type takes precedence.
        """
        device_group = self.open_device_group(device.type)
        self.has_devices = True
        if device.type != "cpu" and (self.device is None or self.device.type != device.type):
            self.device = device
        self._connect(device_group, device.type)

    def first_device_type(self) -> str:
        """The device type of collectives without a tensor: opened first, with devices."""
        first = next(iter(self._device_groups), "") if self.has_devices else ""
        return first or self._main_device_type()

    @property
    def is_open(self) -> bool:
        """Whether a backend of the group is open."""
        return bool(self._device_groups)

    def idle_device_groups(self, device_type: str) -> list[DeviceGroup]:
        """Return the device groups on which a barrier runs.

        Open the group for ``device_type``. Return all groups that enqueue on a device, and at most
        one other, preferably for ``device_type``.
        """
        opened = dict.fromkeys([self.open_device_group(device_type), *self._device_groups.values()])
        waiting = [each for each in opened if not each.communicator.on_stream]
        return [*(each for each in opened if each.communicator.on_stream), *waiting[:1]]

    @property
    def device_groups(self) -> list[DeviceGroup]:
        """The open device groups."""
        return list(
            dict.fromkeys(c for c in self._device_groups.values() if not c.opened.is_closed)
        )

    def check_open(self) -> None:
        """Raise if the group or its world is closed."""
        if self.is_closed:
            raise GroupClosedError(
                f"{self.name} was closed",
                where=f"rank {self.world.rank}",
                fix="create a new mesh or group",
            )

    def check_usable(self) -> None:
        """Raise if the world or group is closed, or this is a forked child."""
        self.world.check_usable()
        self.check_open()

    def close(self) -> None:
        """Close this group, but no communicators that other groups share.

        Raises:
            MismatchError: The last calls of two hosts differ; the group is closed.
        """
        if self._closed:
            return
        last_used = [each for each in self.device_groups if len(each.opened.users) == 1]
        error = get_registry(self.world).compare_last(last_used) if last_used else None
        self._closed = True
        opened = dict.fromkeys(device_group.opened for device_group in self._device_groups.values())
        self.forget_device_groups()
        for each in opened:
            get_registry(self.world).release(each, self)
        if error is not None:
            raise error

    def forget_device_groups(self) -> None:
        """Drop all communicators as the world closes."""
        self._device_groups = {}
        self.fast_path = self.fast_path_on_device = None

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort every rank's wait in this group; the group can no longer be used."""
        labels = [device_group.opened.label for device_group in self._device_groups.values()]
        get_registry(self.world).abort(labels, {"reason": reason, "group": self.name})

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """``monitored_barrier``, which waits."""
        operations["monitored_barrier"](self, timeout, wait_all_ranks)

    def _start(self, operation: str, asked: Asked, given: dict[str, Any]) -> Work:
        work: Work = operations[operation](**given, group=self, async_op=True)
        if asked.timeout is not None:
            bound(work, asked.timeout)
        if not asked.is_async:
            work.wait()
        return work

    def _message(self, operation: str, tensor: Any, peer: int | None, tag: int) -> Work:
        return operations[f"i{operation}"](tensor, None, self, tag, peer)  # type: ignore[no-any-return]

    def _main_device_type(self) -> str:
        return "cpu" if "cpu" in self.backends else next(iter(self.backends))

    def _timeout_on(self, backend: BackendType) -> timedelta:
        return self.own_timeout or self.world.timeout or backend.default_timeout

    def _open_device_group(
        self, device_type: str, agreement: Agreement | None, slot: str
    ) -> DeviceGroup:
        self.check_usable()
        backend = get_backend(self.backend_name(device_type))
        rank, timeout = self.world.rank, self._timeout_on(backend)
        registry, connection = get_registry(self.world), backend.connection_for(device_type)
        for device_group in self._device_groups.values():
            if device_group.backend.connection_for(device_group.device_type) == connection:
                self._device_groups[device_type] = device_group
                self._connect(device_group, device_type)
                return device_group
        if agreement is None:
            lack = self.reserve_resources(device_type)
            if (known := self._agreement) is not None:
                if lack:  # of the world, whose ranks have not agreed upon anything
                    raise lack_error(rank, self.name, self.ranks, f"rank {rank}: {lack}")
                known = replace(known, name=f"{known.name}/{connection}", opened=[])
            agree_args = (
                self.ranks,
                "group",
                {"text": self.name, "ranks": self.ranks, "backend": backend.name},
            )
            with registry.opening(known) as agree:
                agreed = known or agree(
                    *agree_args, timeout, offers=self.offer(device_type), lack=lack
                )
                return self._open_device_group(device_type, agreed, slot)
        label = agreement.label_for(self.ranks, f"{slot}{connection}")
        find_lost = registry.liveness.make_search(agreement, self.ranks)
        opening = replace(
            self._opening(label, device_type, timeout),
            find_lost=find_lost,
            has_died=registry.endings.has_died,
        )
        with self._explained_opening(backend):
            try:
                opened = registry.acquire(backend, opening, agreement, label, self)
            except BackendUnsupported as refusal:
                if not (self._chooses_backends and backend.replacement):
                    raise
                _log.info("%s uses backend %s: %s", self.name, backend.replacement, refusal)
                self.backends = {**self.backends, device_type: backend.replacement}
                return self._open_device_group(device_type, agreement, slot)
        try:
            of_group = self.name, self.ranks, self._group_rank
            facts = GroupFacts(*of_group, opened.label, backend.name, timeout)
            if registry.look is None:
                registry.look = LatePeers(self.world).look
            others = WorldPeers(self.world, facts, opened)
            device_group = DeviceGroup(facts, backend, opened, device_type, others, ref(self))
            self._device_groups[device_type] = device_group
        except BaseException:  # an interrupt: without a device group `__del__` would not give it up
            registry.release(opened, self)
            raise
        self.is_on_stream |= device_group.communicator.on_stream
        self._connect(device_group, device_type)
        if device_type == "cpu":
            self.fast_path = device_group.fast_path
        elif device_group.communicator.on_stream:
            self.fast_path_on_device = device_group.fast_path
        where = f"rank {rank} opened {self.name}, {ranks_text(self.ranks)}"
        _log.debug("%s, on backend %s for %s tensors", where, backend.name, device_type)
        return device_group

    def _connect(self, device_group: DeviceGroup, device_type: str) -> None:
        """Connect the device group now if a device of ``device_type`` is bound."""
        if self.device is None or self.device.type != device_type:
            return

        def report(text: str) -> None:
            reason = f"{self.name} did not connect: {text}"
            get_registry(self.world).break_here(device_group.opened.label, reason)

        with self._explained_opening(device_group.backend, report):
            device_group.communicator.connect(self.device)

    def _opening(self, label: str, device_type: str, timeout: timedelta) -> Opening:
        world = self.world
        return Opening(
            store=PrefixStore(label, world.store),
            make_torch_store=lambda: PrefixStore(label, world.make_torch_store()),
            ranks=self.ranks,
            rank=self._group_rank,
            device_type=device_type,
            timeout=timeout,
            is_one_host=not world.spans_hosts(self.ranks),
            options=self.options,
            name=self.name,
            num_local=world.local_size,
            hosts=tuple(world.hosts[rank] for rank in self.ranks),
        )

    def _explained_opening(
        self, backend: BackendType, report: Callable[[str], None] | None = None
    ) -> AbstractContextManager[None]:
        where = f"rank {self.world.rank}, among {ranks_text(self.ranks)}"
        find_silent = partial(silent_ranks, self.world, self.ranks)
        return explained_opening(self.name, self.ranks, backend, where, find_silent, report)


def world_group(world: World | None = None) -> ProcessGroup:
    """Return the group of all ranks of ``world`` (None: the current), made at first use."""
    world = world or get_world()
    found = world.group
    if not isinstance(found, ProcessGroup):
        found = ProcessGroup(
            world,
            tuple(range(world.size)),
            name="the world",
            options=world.options,
            desc="default_pg",
            # A world is all of its ranks by nature; there is nothing to agree upon.
            agreement=Agreement("world", tuple(range(world.size))),
        )
        give_group(world, found)
    return found


def group_of_one(world: World) -> ProcessGroup:
    """Return the group of this rank alone, made at first use and closed with the world."""
    found = world.group_of_one
    if not isinstance(found, ProcessGroup):
        found = ProcessGroup(world, (world.rank,), name=f"rank {world.rank} alone")
        world.group_of_one = found
    return found


class MeshLike(Protocol):
    """A mesh as the argument ``group``: this rank's group along all its axes."""

    def open_group(self) -> ProcessGroup:
        """Return this rank's open group along the mesh axes, flattened row-major."""


GroupLike: TypeAlias = "ProcessGroup | MeshLike | None"
"""The argument ``group`` of a collective: a group, a mesh such as ``mesh["tp"]``, None for the
world."""


def resolve_group(group: object) -> ProcessGroup:
    """Return the ProcessGroup for the argument ``group``.

    Raises:
        NotInGroupError: This rank is not a member.
        GroupKindError: ``group`` is not a ProcessGroup, a mesh or None.
    """
    if group is None:
        found = get_usable_world().group
        return found if isinstance(found, ProcessGroup) else world_group()
    if isinstance(group, ProcessGroup):
        return group
    if (group_of_mesh := getattr(group, "open_group", None)) is not None:
        return group_of_mesh()  # type: ignore[no-any-return]
    if group == NON_GROUP_MEMBER:
        raise NotInGroupError(
            "this rank is not a member of the group",
            where=f"rank {get_world().rank}",
            expected="a call only on ranks of the group",
            fix="skip the call on ranks where new_group() returned GroupMember.NON_GROUP_MEMBER",
        )
    raise GroupKindError(
        f"{group!r} is not a group of meshdist",
        expected="a ProcessGroup, a mesh such as mesh['tp'], or None for the world",
        found=f"{type(group).__module__}.{type(group).__qualname__}",
        fix=_instead_of(group),
    )


def _instead_of(group: object) -> str | None:
    """Return a fix for an argument that is not a meshdist group, or None."""
    names = group if isinstance(group, (tuple, list)) else [group]
    if all(isinstance(name, str) for name in names):
        return f"pass the axis of its mesh: group=mesh[{group!r}]"
    if isinstance(group, TorchGroup):
        return "create a meshdist group of the same ranks: meshdist.distributed.new_group(ranks)"
    if type(group).__module__ == "torch.distributed.device_mesh":
        return "convert it: DeviceMesh.from_torch(mesh)"
    return None

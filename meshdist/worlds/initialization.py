"""Start and end of the process's world, and what can be asked about it: torch's names."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from ..arguments import DEFAULT_TIMEOUT, check_timeout
from ..bootstrap.environments import read_local_rank
from ..bootstrap.generations import Rendezvous
from ..bootstrap.init_methods import Terms, meet
from ..bootstrap.stores import HashStore, PrefixStore, Store
from ..bootstrap.world import (
    World,
    enter_world,
    find_unjoined_place,
    find_world,
    get_world,
    install_world,
    remove_world,
)
from ..checking.program import one_frame, warn_caller
from ..error_text import first_line
from ..errors import ArgumentError, KindError, NotInitializedError, WorldError
from ..groups.process_group import NON_GROUP_MEMBER, GroupLike, resolve_group, world_group
from ..runtime import memory
from ..runtime.untraced import untraced
from ..wires.names import (
    Backend,
    backends_text,
    default_wires,
    parse_backends,
    usable_defaults,
)
from ..wires.registry import find_wire, get_wire
from .taking_over import take_over

__all__ = [
    "destroy_process_group",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
]


@one_frame
def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Afterwards every rank of the job is in one world; returns when all have joined.

    Args:
        backend: the wire: "gloo", "nccl", a registered name, or pairs as in
            "cpu:gloo,cuda:nccl"; None serves CPU and CUDA tensors, each by its default wire.
        init_method: ``env://`` (the default: what the launcher has set), ``tcp://host:port``, or
            ``file:///path``; excludes ``store``.
        timeout: how long to wait for the other ranks, and how long a verb may wait; default 30
            minutes, 10 on NCCL.
        world_size: how many ranks there are; wins over WORLD_SIZE.
        rank: this process's rank; wins over RANK. With tcp:// and file:// it may be left out:
            ranks then follow the order of arrival.
        store: a store that all ranks share; needs ``rank`` and ``world_size``.
        group_name: worlds of different names may meet at one address; no other meaning.
        pg_options: the wire's own options.
        device_id: binds this rank to a device; NCCL then connects at once.

    Inside a simulated rank this adopts the simulated world, whatever the arguments name; where
    torch.distributed has a world already, that world, its store and backends are adopted. Where
    this process has joined its world at its first verb or mesh, that world is taken over.

    Raises:
        ArgumentError, KindError: wrong or contradicting arguments; nothing was sent.
        BackendError: no such wire, or none on this machine; nothing was sent.
        RendezvousError: the ranks did not find each other; the text names the missing ranks.
        WorldError: the process group is initialized already, or was joined at the first touch and
            the arguments disagree with it.
    """
    check_timeout(timeout)
    backends = parse_backends(backend)
    if backend is None:
        backends = _available(backends)
    is_mpi = set(backends.values()) == {"mpi"}
    if is_mpi and (rank != -1 or world_size != -1):
        warn_caller(
            f"rank={rank} and world_size={world_size} are ignored with backend 'mpi': mpiexec "
            "assigns both"
        )
        rank = world_size = -1
    limit = timeout or DEFAULT_TIMEOUT
    terms = Terms(init_method, rank, world_size, store, group_name, limit, usable_defaults())
    found = find_world()
    if found is not None and found.is_simulated:
        _adopt_simulated(found, rank, world_size)
        return
    if found is not None:
        found.check_usable()
        if not found.first_touch:
            install_world(found)  # raises: there is one
        take_over(
            found,
            None if backend is None else backends,
            terms,
            timeout=timeout,
            options=pg_options,
            device=_checked_device(device_id),
        )
        return
    for name in set(backends.values()):
        get_wire(name)
    device = _checked_device(device_id)
    if store is None and torch_distributed.is_initialized():
        joined = _meet_in_torch_world(terms)
        named = parse_backends(torch_distributed.get_backend_config())
        common = _available(named) or backends
    else:
        joined = meet(terms, is_mpi_asked=is_mpi)
        common = _available(default_wires(joined.wires))
    chosen = common if backend is None else backends
    world = _make_world(joined, store, chosen, timeout, pg_options, device)
    world.chooses_wires = backend is None
    install_world(world)
    try:
        world_group(world).open_all()
    except BaseException:
        world.close()
        remove_world(world)
        raise


def destroy_process_group(group: GroupLike = None) -> None:
    """Afterwards ``group``, or with None the whole world, is closed on this rank.

    Does not wait for the other ranks, but for two seconds at most where hosts compare their last
    calls. A new world may be made afterwards, at the same address too.

    Args:
        group: one group, for example from ``new_group``; other groups are not harmed. Ignored
            where it is ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        AgreementError: calls of two hosts differed, and no call has said so yet; it is closed.
        NotInitializedError: there is no world; it was closed before, or never made.
        GroupClosedError: the group was destroyed before.
    """
    world = find_world()
    if world is None or world.is_closed:
        raise NotInitializedError(
            "there is no process group to destroy",
            expected="destroy_process_group() once after each init_process_group()",
            found="none was initialized in this process, or it was destroyed before",
            fix="drop this call, or guard it: if is_initialized(): destroy_process_group()",
        )
    if _is_outsider(group):
        return
    if group is not None:
        closing = resolve_group(group)
        if closing is not world_group(world):
            closing.check_open()
            closing.close()
            return
    world.check_usable()
    try:
        world.close()
    finally:
        remove_world(world)
        memory.forget()


# -- what can be asked --------------------------------------------------------------------------


def is_available() -> bool:
    """Return whether this package can be used: always."""
    return True


def is_initialized() -> bool:
    """Return whether there is a world: made by ``init_process_group``, or of simulated ranks."""
    world = find_world()
    return world is not None and not world.is_closed


@untraced
def get_rank(group: GroupLike = None) -> int:
    """Return this rank's number in ``group`` (None: the world); -1 outside the group.

    Answers in a forked child too. Before this process has joined its world the launcher's variables
    answer, or torch's world that is there to adopt; nothing is sent.

    Raises:
        NotInitializedError: there is no world, and no launcher.
        GroupClosedError: the group was destroyed.
    """
    if group is None:
        place = find_unjoined_place()
        return get_world().rank if place is None else place[0]
    if _is_outsider(group):
        return -1
    target = resolve_group(group)
    target.check_open()
    return target.rank()


@untraced
def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in ``group`` (None: the world); -1 outside the group.

    Answers in a forked child too. Before this process has joined its world the launcher's variables
    answer, or torch's world that is there to adopt; nothing is sent.

    Raises:
        NotInitializedError: there is no world, and no launcher.
    """
    if group is None:
        place = find_unjoined_place()
        return get_world().size if place is None else place[1]
    return -1 if _is_outsider(group) else resolve_group(group).size()


def get_backend(group: GroupLike = None) -> Backend:
    """Return the name of the wire of ``group`` (None: the world).

    Where several wires serve it, by device type: the wire that AxisOptions named for the mesh's;
    the accelerator's if there is any and no pairs were named; else the pairs as text.

    Raises:
        GroupClosedError: the group was destroyed.
    """
    target = world_group() if group is None else resolve_group(group)
    target.check_open()
    backends = target.backends
    if target.named_for in backends:
        return Backend(backends[target.named_for])
    if len(set(backends.values())) == 1:
        return Backend(next(iter(backends.values())))
    world = get_world()
    if world.chooses_wires and backends.keys() == world.backends.keys():
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        return Backend(backends.get(kind) or next(iter(backends.values())))
    return Backend(backends_text(backends))


def get_backend_config(group: GroupLike = None) -> str:
    """Return the wire for each device type in ``group``, as in "cpu:gloo,cuda:nccl"."""
    target = world_group() if group is None else resolve_group(group)
    return backends_text(target.backends)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the name of the wire that serves ``device`` where none is named.

    Raises:
        ArgumentError: no such device, or none that has a wire.
    """
    try:
        kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is no device", found=first_line(error)) from None
    wires = default_wires()
    if kind not in wires:
        raise ArgumentError(
            f"no backend is known for device type {kind!r}",
            expected=f"one of {', '.join(wires)}",
            fix=f"name a backend: init_process_group('{kind}:NAME')",
        )
    return wires[kind]


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this rank's number on its host: LOCAL_RANK, else the fallback, else the world's.

    Raises:
        WorldError: none of the three is there. RendezvousError: LOCAL_RANK is no number.
    """
    world = find_world()
    if world is not None and world.is_simulated:
        return world.local_rank
    if "LOCAL_RANK" in os.environ:
        return read_local_rank(os.environ)
    if fallback_rank is not None:
        return int(fallback_rank)
    if world is not None:
        return world.local_rank
    raise WorldError(
        "nothing tells the rank on this host",
        expected="LOCAL_RANK in the environment, a world, or fallback_rank",
        fix="start with `meshdist run -n 4 script.py`, or pass get_node_local_rank(0)",
    )


def is_backend_available(backend: str) -> bool:
    """Return whether every wire that ``backend`` names is there and can be used on this machine."""
    wires = [find_wire(name) for name in set(parse_backends(backend).values())]
    return all(wire is not None and wire.is_available() for wire in wires)


def is_gloo_available() -> bool:
    """Return whether the wire "gloo" can be used on this machine."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return whether the wire "nccl" can be used on this machine."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether the wire "mpi" can be used on this machine."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether the wire "ucc" can be used on this machine."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether the wire "xccl" can be used on this machine."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


# -- inside -------------------------------------------------------------------------------------


def _available(backends: dict[str, str]) -> dict[str, str]:
    wires = {device_type: find_wire(name) for device_type, name in backends.items()}
    return {
        device_type: wire.name
        for device_type, wire in wires.items()
        if wire is not None and wire.is_available()
    }


def _checked_device(device_id: torch.device | int | None) -> torch.device | None:
    if device_id is None:
        return None
    accelerator = torch.accelerator.current_accelerator()
    if isinstance(device_id, int):
        if accelerator is None:
            raise ArgumentError(
                f"device_id={device_id} names an accelerator, and torch has none here",
                fix="leave device_id out, or install a build of torch for your accelerator",
            )
        device_id = torch.device(accelerator.type, device_id)
    if not isinstance(device_id, torch.device):
        raise KindError("device_id must be a torch.device or an int", found=f"{device_id!r}")
    if device_id.type == "cpu":
        return device_id
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if (
        accelerator is None
        or device_id.type != accelerator.type
        or device_id.index is None
        or device_id.index >= count
    ):
        here = f"{accelerator.type}:0 to {count - 1}" if accelerator is not None else "cpu alone"
        raise ArgumentError(
            f"device_id={device_id} is not a device of this machine",
            expected="a device with its index, for example torch.device('cuda', 0)",
            found=f"this machine has {here}",
        )
    return device_id


def _adopt_simulated(world: World, rank: int, world_size: int) -> None:
    for name, given, real in (
        ("rank", rank, world.rank),
        ("world_size", world_size, world.size),
    ):
        if given not in (-1, real):
            raise ArgumentError(
                f"this simulated rank has {name} {real}, not {given}",
                where=f"rank {world.rank} of {world.size} simulated ranks",
                fix=f"leave {name} out, so that the program runs in any world",
            )
    if world.is_adopted and not world.is_closed:
        raise WorldError(
            "the process group is initialized already",
            where=f"rank {world.rank} of {world.size} simulated ranks",
            fix="call destroy_process_group() first, or drop the second init_process_group",
        )
    if world.is_closed:
        # Keys of the world that was closed are not read again.
        world = dataclasses.replace(world, store=PrefixStore("again", world.store))
        enter_world(world)
    world.is_adopted = True


def _meet_in_torch_world(terms: Terms) -> Rendezvous:
    asked = terms.rank, terms.world_size
    real = torch_distributed.get_rank(), torch_distributed.get_world_size()
    for name, given, there in zip(("rank", "world_size"), asked, real, strict=True):
        if given not in (-1, there):
            raise ArgumentError(
                f"torch.distributed has a world already, with {name} {there}, not {given}",
                expected="to adopt that world",
                fix=f"leave {name} out, or call torch.distributed.destroy_process_group() before",
            )
    store = distributed_c10d._get_default_store()
    known = Terms(None, *real, store, terms.group_name, terms.timeout)
    return meet(known, origin="the world of torch.distributed")


def _make_world(
    joined: Rendezvous,
    given_store: Store | None,
    backends: dict[str, str],
    timeout: timedelta | None,
    options: Any,
    device: torch.device | None,
) -> World:
    world = World(
        rank=joined.rank,
        size=joined.size,
        store=joined.store,
        backends=backends,
        timeout=timeout,
        local_rank=joined.local_rank,
        local_size=joined.local_size,
        hosts=joined.hosts,
        origin=joined.origin,
        options=options,
        device=device,
        given_torch_store=joined.make_torch_store,
        handle=joined.handle,
        server=joined.server,
    )
    world.kept.append(given_store)
    world.closers.append(functools.partial(_leave, world, joined.leave))
    return world


def _leave(world: World, leave: Callable[[], None]) -> None:
    # Release the store first: the end of its last handle touches what leaving may remove.
    if world.handle is not None:
        world.handle.close()
    world.kept.clear()
    world.handle = world.given_torch_store = None
    world.store = PrefixStore("closed", HashStore())
    leave()


def _is_outsider(group: object) -> bool:
    return isinstance(group, int) and group == NON_GROUP_MEMBER

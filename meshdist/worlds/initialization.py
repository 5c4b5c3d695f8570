"""Start and end of the process's world, and what can be asked about it: torch's names."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import distributed_c10d

from ..arguments import DEFAULT_TIMEOUT, check_timeout
from ..backends.backend_names import (
    default_backends,
    parse_backends,
    usable_defaults,
)
from ..backends.registry import find_backend, get_backend
from ..bootstrap.init_methods import InitArguments, meet
from ..bootstrap.rendezvous_rounds import Rendezvous
from ..bootstrap.stores import HashStore, PrefixStore, Store
from ..bootstrap.world import (
    World,
    enter_world,
    find_world,
    get_world,
    install_world,
    remove_world,
)
from ..checking.call_sites import one_frame, warn_caller
from ..errors import ArgumentError, BackendError, KindError, NotInitializedError, WorldError
from ..groups.process_group import GroupLike, resolve_group, world_group
from ..runtime import memory
from .late_init import take_over
from .queries import is_outsider

__all__ = [
    "destroy_process_group",
    "init_process_group",
    "world",
]

_log = logging.getLogger("meshdist.worlds")


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
        backend: the backend: "gloo", "nccl", a registered name, or pairs as in
            "cpu:gloo,cuda:nccl"; None serves CPU and CUDA tensors, each by its default backend.
        init_method: ``env://`` (the default: what the launcher has set), ``tcp://host:port``, or
            ``file:///path``; excludes ``store``.
        timeout: how long to wait for the other ranks, and how long a collective may wait; default
            30 minutes, 10 on NCCL.
        world_size: how many ranks there are; wins over WORLD_SIZE.
        rank: this process's rank; wins over RANK. With tcp:// and file:// it may be left out:
            ranks then follow the order of arrival.
        store: a store that all ranks share; needs ``rank`` and ``world_size``.
        group_name: worlds of different names may meet at one address; no other meaning.
        pg_options: the backend's own options.
        device_id: binds this rank to a device; NCCL then connects at once.

    Inside a simulated rank this adopts the simulated world, whatever the arguments name; where
    torch.distributed has a world already, that world, its store and backends are adopted. Where
    this process has joined its world at its first collective or mesh, that world is taken over.

    Raises:
        ArgumentError, KindError: wrong or contradicting arguments; nothing was sent.
        BackendError: no such backend, or none on this machine; nothing was sent.
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
    end_orphan()
    limit = timeout or DEFAULT_TIMEOUT
    init_arguments = InitArguments(
        init_method, rank, world_size, store, group_name, limit, usable_defaults()
    )
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
            init_arguments,
            timeout=timeout,
            options=pg_options,
            device=_checked_device(device_id),
        )
        return
    for name in set(backends.values()):
        get_backend(name)
    device = _checked_device(device_id)
    find_adopted: Callable[[], Store | None] | None = None
    if store is None and torch_distributed.is_initialized():
        joined = _meet_in_torch_world(init_arguments)
        named = parse_backends(torch_distributed.get_backend_config())
        common = _available(named) or backends
        find_adopted = weakref.ref(distributed_c10d._get_default_store())
    else:
        joined = meet(init_arguments, is_mpi_asked=is_mpi)
        common = _available(default_backends(joined.backends))
    chosen = common if backend is None else backends
    world = _make_world(joined, store, chosen, timeout, pg_options, device)
    world.chooses_backends = backend is None
    world.find_adopted = find_adopted
    if find_adopted is not None and world.chooses_backends:
        _tell_adopted_backend(world, default_backends(joined.backends))
    install_world(world)
    try:
        world_group(world).open_all()
    except BaseException:
        world.close()
        remove_world(world)
        raise


@one_frame
def destroy_process_group(group: GroupLike = None) -> None:
    """Afterwards ``group``, or with None the whole world, is closed on this rank.

    Does not wait for the other ranks, except for at most two seconds if hosts compare their last
    calls. A new world may be made afterwards, at the same address too.

    Args:
        group: one group, for example from ``new_group``; other groups are not harmed. Ignored
            where it is ``GroupMember.NON_GROUP_MEMBER``.

    Raises:
        MismatchError: the last calls of two hosts differ; it is closed.
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
    if is_outsider(group):
        return
    if group is not None:
        closing = resolve_group(group)
        if closing is not world_group(world):
            closing.check_open()
            closing.close()
            return
    world.check_usable()
    _end(world)


@contextmanager
def world(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Begin a world, and end it behind the ``with`` block, whatever happens there.

    Where an exception leaves the block, the other ranks are told at once which, and where it was
    raised, though this process lives on: a worker of a pool, an actor, a notebook.

    Args:
        args, kwargs: as for ``init_process_group``.

    Raises:
        as ``init_process_group``; and what the block raises.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.world():
        ...         size = md.get_world_size()
        ...     return size, md.is_initialized()
        >>> md.simulate(program, 2)
        [(2, False), (2, False)]
    """
    init_process_group(*args, **kwargs)
    made = get_world()
    try:
        yield
    except BaseException:
        if not made.is_closed:
            with suppress(Exception):  # the exception under way says more
                _end(made)
        raise
    if not made.is_closed:
        _end(made)


# -- inside -------------------------------------------------------------------------------------


def _end(world: World) -> None:
    try:
        world.close()
    finally:
        remove_world(world)
        memory.forget()


def end_orphan() -> None:
    """Close this process's world if it was adopted from torch, whose own world has ended."""
    world = find_world()
    if world is not None and world.is_orphan and not world.is_closed:
        _end(world)


def _tell_adopted_backend(world: World, usual: dict[str, str]) -> None:
    """Warn on rank 0 if an adopted world has no shm for the CPU though ``usual`` names shm."""
    taken, best = world.backends.get("cpu"), usual.get("cpu")
    if world.rank == 0 and world.size > 1 and world.is_one_host and taken != best == "shm":
        _log.warning(
            "meshdist: CPU tensors go over %r, as in the world of torch.distributed that was "
            "adopted; shared memory is faster on this host, and md.init_process_group('cpu:shm') "
            "before the first mesh takes it",
            taken,
        )


def _available(backends: dict[str, str]) -> dict[str, str]:
    types = {device_type: find_backend(name) for device_type, name in backends.items()}
    return {
        device_type: backend.name
        for device_type, backend in types.items()
        if backend is not None and backend.is_available()
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


def _meet_in_torch_world(init_arguments: InitArguments) -> Rendezvous:
    asked = init_arguments.rank, init_arguments.world_size
    real = torch_distributed.get_rank(), torch_distributed.get_world_size()
    config = torch_distributed.get_backend_config()
    if "fake" in parse_backends(config).values():
        raise BackendError(
            "a world of torch's fake backend has no other ranks to join",
            where=f"rank {real[0]} of {real[1]}",
            expected="a world of torch.distributed with a process for each rank",
            found=f"backend {config!r}",
            fix=f"simulate the ranks: meshdist.simulate(program, {real[1]}); or plan without "
            f"processes: meshdist.Layout.from_shape(({real[1]},), ('dp',))",
        )
    for name, given, there in zip(("rank", "world_size"), asked, real, strict=True):
        if given not in (-1, there):
            raise ArgumentError(
                f"torch.distributed has a world already, with {name} {there}, not {given}",
                expected="to adopt that world",
                fix=f"leave {name} out, or call torch.distributed.destroy_process_group() before",
            )
    store = distributed_c10d._get_default_store()
    known = dataclasses.replace(
        init_arguments, init_method=None, rank=real[0], world_size=real[1], store=store
    )
    joined = meet(known, origin="the world of torch.distributed")
    return dataclasses.replace(joined, leave=lambda: None)  # torch's store is torch's to end


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

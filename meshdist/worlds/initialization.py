"""Initialize and destroy the process's world, with torch's names."""

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
    """Initialize the default process group; return when all ranks have called this.

    A simulated rank uses the simulated world and ignores the other arguments. If torch.distributed
    is initialized, meshdist reuses its ranks, store and backends. If meshdist already initialized
    itself at the first collective or mesh, the arguments must match.

    Args:
        backend: "gloo", "nccl", another registered name, or pairs such as "cpu:gloo,cuda:nccl".
            None uses the default backends for CPU and CUDA tensors.
        init_method: ``env://`` (the default, the launcher's variables), ``tcp://host:port`` or
            ``file:///path``. Mutually exclusive with ``store``.
        timeout: How long to wait for the other ranks, and how long a collective may wait. Default
            30 minutes, 10 on NCCL.
        world_size: The number of ranks; overrides WORLD_SIZE.
        rank: This process's rank; overrides RANK. Optional with tcp:// and file://, which number
            ranks in order of arrival.
        store: A shared store; needs ``rank`` and ``world_size``.
        group_name: Separates several process groups at the same address.
        pg_options: Options of the backend.
        device_id: This rank's device; NCCL then connects immediately.

    Raises:
        ArgumentError, KindError: An argument is invalid or contradicts another; nothing was sent.
        BackendError: The backend is unknown or unusable on this machine; nothing was sent.
        RendezvousError: The ranks did not find each other; the text names the missing ranks.
        WorldError: Already initialized, or initialized lazily with different arguments.
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
            install_world(found)  # raises because a world exists
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
        _log_reused_backend(world, default_backends(joined.backends))
    install_world(world)
    try:
        world_group(world).open_all()
    except BaseException:
        world.close()
        remove_world(world)
        raise


@one_frame
def destroy_process_group(group: GroupLike = None) -> None:
    """Destroy ``group``, or all process groups, on this rank.

    Does not wait for other ranks, except up to two seconds if hosts compare their last calls. You
    can initialize again afterwards, also at the same address.

    Args:
        group: None for the world and all groups. ``GroupMember.NON_GROUP_MEMBER`` does nothing.

    Raises:
        MismatchError: The last calls of two hosts differ; the group is closed.
        NotInitializedError: Nothing is initialized, or it was already destroyed.
        GroupClosedError: The group was already destroyed.
    """
    world = find_world()
    if world is None or world.is_closed:
        raise NotInitializedError(
            "there is no process group to destroy",
            expected="destroy_process_group() once after each init_process_group()",
            found="none was initialized in this process, or it was destroyed before",
            fix="remove this call, or guard it: if is_initialized(): destroy_process_group()",
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
    """Initialize the default process group, and destroy it at the end of the ``with`` block.

    If the block raises, the other ranks immediately learn the exception and its source line, even
    if this process continues (a pool worker, an actor or a notebook).

    Args:
        args, kwargs: The arguments of ``init_process_group``.

    Raises:
        Exception: Any exception of ``init_process_group`` or the block.

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
    """Close this process's world if it reuses an ended torch world."""
    world = find_world()
    if world is not None and world.is_orphan and not world.is_closed:
        _end(world)


def _log_reused_backend(world: World, usual: dict[str, str]) -> None:
    """Warn on rank 0 if a reused world lacks shm for the CPU though ``usual`` has it."""
    taken, best = world.backends.get("cpu"), usual.get("cpu")
    if world.rank == 0 and world.size > 1 and world.is_one_host and taken != best == "shm":
        _log.warning(
            "meshdist: CPU tensors use backend %r, as in the torch.distributed process group that "
            "meshdist reuses; shared memory is faster on this host: call "
            "md.init_process_group('cpu:shm') before the first mesh",
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
                f"device_id={device_id} needs an accelerator, but torch finds none here",
                fix="remove device_id, or install a build of torch for your accelerator",
            )
        device_id = torch.device(accelerator.type, device_id)
    if not isinstance(device_id, torch.device):
        raise KindError(
            "device_id must be a torch.device or an int",
            found=f"{device_id!r}",
            fix="pass a device, for example torch.device('cuda', 0)",
        )
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
            fix="pass a device of this machine, or leave device_id out",
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
            "the process group is already initialized",
            where=f"rank {world.rank} of {world.size} simulated ranks",
            fix="call destroy_process_group() first, or remove the second init_process_group",
        )
    if world.is_closed:
        # A new prefix hides the keys of the world that was closed.
        world = dataclasses.replace(world, store=PrefixStore("again", world.store))
        enter_world(world)
    world.is_adopted = True


def _meet_in_torch_world(init_arguments: InitArguments) -> Rendezvous:
    asked = init_arguments.rank, init_arguments.world_size
    real = torch_distributed.get_rank(), torch_distributed.get_world_size()
    config = torch_distributed.get_backend_config()
    if "fake" in parse_backends(config).values():
        raise BackendError(
            "cannot reuse the process group of torch.distributed: its backend 'fake' has no "
            "other ranks",
            where=f"rank {real[0]} of {real[1]}",
            expected="a torch.distributed process group with one process per rank",
            found=f"backend {config!r}",
            fix=f"simulate the ranks: meshdist.simulate(program, {real[1]}); or plan without "
            f"processes: meshdist.Layout.from_shape(({real[1]},), ('dp',))",
        )
    for name, given, there in zip(("rank", "world_size"), asked, real, strict=True):
        if given not in (-1, there):
            raise ArgumentError(
                f"torch.distributed is already initialized with {name} {there}, not {given}",
                expected="the values of that process group, which meshdist reuses",
                fix=f"leave {name} out, or call torch.distributed.destroy_process_group() before",
            )
    store = distributed_c10d._get_default_store()
    known = dataclasses.replace(
        init_arguments, init_method=None, rank=real[0], world_size=real[1], store=store
    )
    joined = meet(known, origin="the world of torch.distributed")
    return dataclasses.replace(joined, leave=lambda: None)  # torch closes its own store


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
    # Release the store first: closing its last handle uses files that leaving may remove.
    if world.handle is not None:
        world.handle.close()
    world.kept.clear()
    world.handle = world.given_torch_store = None
    world.store = PrefixStore("closed", HashStore())
    leave()

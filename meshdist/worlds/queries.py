"""Query the process's world, its groups and their backends, with torch's names."""

from __future__ import annotations

import os

import torch

from ..backends.backend_names import Backend, backends_text, default_backends, parse_backends
from ..backends.registry import find_backend
from ..bootstrap.launch_environment import read_local_rank
from ..bootstrap.world import find_launched_rank, find_world, get_world
from ..error_text import first_line
from ..errors import ArgumentError, WorldError
from ..groups.process_group import NON_GROUP_MEMBER, GroupLike, resolve_group, world_group
from ..runtime.graph_breaks import untraced

__all__ = [
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "get_rank",
    "get_world_size",
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


def is_available() -> bool:
    """Return True: meshdist is always available."""
    return True


def is_initialized() -> bool:
    """Return whether the default process group is initialized; True on simulated ranks."""
    world = find_world()
    return world is not None and not world.is_closed and not world.is_orphan


@untraced
def get_rank(group: GroupLike = None) -> int:
    """Return this process's rank in ``group``, or -1 if it is not a member.

    Works in forked children, too. Before initialization, reads the rank from torch.distributed or
    the launcher's variables, without communication.

    Args:
        group: None means the world.

    Raises:
        NotInitializedError: Nothing is initialized and no launcher started this process.
        GroupClosedError: The group was destroyed.
    """
    if group is None:
        rank_and_size = find_launched_rank()
        return get_world().rank if rank_and_size is None else rank_and_size[0]
    if is_outsider(group):
        return -1
    target = resolve_group(group)
    target.check_open()
    return target.rank()


@untraced
def get_world_size(group: GroupLike = None) -> int:
    """Return the number of ranks in ``group``, or -1 if this process is not a member.

    Works in forked children and before initialization, as ``get_rank``.

    Args:
        group: None means the world.

    Raises:
        NotInitializedError: Nothing is initialized and no launcher started this process.
    """
    if group is None:
        rank_and_size = find_launched_rank()
        return get_world().size if rank_and_size is None else rank_and_size[1]
    return -1 if is_outsider(group) else resolve_group(group).size()


def get_backend(group: GroupLike = None) -> Backend:
    """Return the name of the backend of ``group``.

    If backends differ between device types, return the backend that AxisOptions named, else the
    accelerator's if the backends are defaults, else the pairs.

    Args:
        group: None means the world.

    Raises:
        GroupClosedError: The group was destroyed.
    """
    target = world_group() if group is None else resolve_group(group)
    target.check_open()
    backends = target.backends
    if target.named_for in backends:
        return Backend(backends[target.named_for])
    if len(set(backends.values())) == 1:
        return Backend(next(iter(backends.values())))
    world = get_world()
    if world.chooses_backends and backends.keys() == world.backends.keys():
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        return Backend(backends.get(kind) or next(iter(backends.values())))
    return Backend(backends_text(backends))


def get_backend_config(group: GroupLike = None) -> str:
    """Return the backend of each device type in ``group``, for example "cpu:gloo,cuda:nccl"."""
    target = world_group() if group is None else resolve_group(group)
    return backends_text(target.backends)


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the name of the default backend for ``device``.

    Raises:
        ArgumentError: The device does not exist or has no backend.
    """
    try:
        kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    except RuntimeError as error:
        raise ArgumentError(
            f"{device!r} is not a device",
            found=first_line(error),
            fix="pass a device type, for example 'cpu' or 'cuda'",
        ) from None
    found_types = default_backends()
    if kind not in found_types:
        raise ArgumentError(
            f"no backend is known for device type {kind!r}",
            expected=f"one of {', '.join(found_types)}",
            fix=f"name a backend: init_process_group('{kind}:NAME')",
        )
    return found_types[kind]


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """Return this process's rank on its host: LOCAL_RANK, else ``fallback_rank``, else the world's.

    Raises:
        WorldError: None of the three is available.
        RendezvousError: LOCAL_RANK is not a number.
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
        "cannot determine this rank's number on its host",
        expected="LOCAL_RANK in the environment, an initialized process group, or fallback_rank",
        fix="start with `meshdist run -n 4 script.py`, or pass get_node_local_rank(0)",
    )


def is_backend_available(backend: str) -> bool:
    """Return whether this machine can use every backend in ``backend``."""
    found_types = [find_backend(name) for name in set(parse_backends(backend).values())]
    return all(found is not None and found.is_available() for found in found_types)


def is_gloo_available() -> bool:
    """Return whether this machine can use the backend "gloo"."""
    return is_backend_available("gloo")


def is_nccl_available() -> bool:
    """Return whether this machine can use the backend "nccl"."""
    return is_backend_available("nccl")


def is_mpi_available() -> bool:
    """Return whether this machine can use the backend "mpi"."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether this machine can use the backend "ucc"."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether this machine can use the backend "xccl"."""
    return is_backend_available("xccl")


def is_torchelastic_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_outsider(group: object) -> bool:
    return isinstance(group, int) and group == NON_GROUP_MEMBER

"""Device types: which a mesh can have, and which device a rank takes."""

from __future__ import annotations

import warnings

import torch

from ..bootstrap.world import World
from ..checking.program import call_site
from ..errors import ArgumentError, BackendError, KindError, MeshError
from ..worlds.initialization import get_node_local_rank

__all__ = ["check_device", "check_device_type", "select_device"]


def check_device_type(device_type: object) -> None:
    """Return if ``device_type`` is text without an index."""
    if not isinstance(device_type, str):
        raise KindError(
            f"device_type must be text, not {device_type!r}", expected="'cpu', 'cuda', ..."
        )
    if not device_type.isalpha():
        base = device_type.split(":")[0]
        raise MeshError(
            f"device type {device_type!r} is not a plain device type",
            expected=f"the type without an index: {base!r}",
            fix=f"torch.{base}.set_device(...) chooses the device before the mesh is made"
            if base not in ("", "cpu")
            else None,
        )


def check_device(device_type: str, *, is_planned: bool = False) -> None:
    """Return if groups of such a mesh can communicate here; it may be planned without."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "a 'cuda' mesh needs a GPU, and torch sees none",
            found=f"torch {torch.__version__}, torch.cuda.is_available() is False",
            fix="open a planned mesh where there are GPUs, and a CUDA build of torch"
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
    """Return this rank's CUDA device: the one bound to its world, else the current one.

    Where the program has chosen no current device, it becomes the bound one, else that of the local
    rank. None for other device types.
    """
    if device_type != "cuda":
        return None
    bound = world.device if world.device is not None and world.device.type == "cuda" else None
    if not torch.cuda.is_initialized():
        torch.cuda.set_device(_index_by_local_rank(world) if bound is None else bound.index)
    return torch.device("cuda", torch.cuda.current_device()) if bound is None else bound


def _index_by_local_rank(world: World) -> int:
    count = torch.cuda.device_count()
    local_rank = get_node_local_rank()
    if local_rank >= count:
        file, line = call_site() or (__file__, 0)
        warnings.warn_explicit(
            f"rank {world.rank} has local rank {local_rank} on a host with {count} CUDA devices "
            f"and takes device {local_rank % count}; call torch.cuda.set_device before the mesh "
            "is made to choose another",
            UserWarning,
            file,
            line,
        )
    return local_rank % count

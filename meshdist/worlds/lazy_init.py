"""Initialize lazily: a launched process joins its world at its first collective or mesh."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch.distributed as torch_distributed
from torch.utils.data import get_worker_info

from ..bootstrap.launch_environment import find_rank_and_size
from ..bootstrap.stores import HashStore
from ..bootstrap.world import find_launched_rank, find_world, join_by
from ..checking.call_sites import call_site, show_site
from ..errors import WorldError
from ..runtime.fork_safe_locks import ForkSafeLock
from .initialization import end_orphan, init_process_group

_joining = ForkSafeLock(threading.RLock)
"""Lets one thread initialize while others wait."""


def begin_for_mesh(timeout: timedelta | None, *, is_alone: bool) -> None:
    """Initialize for a first mesh; with ``is_alone``, the mesh has rank 0 only."""
    with _joining.current:
        end_orphan()
        if find_world() is not None:
            return
        has_others = (
            torch_distributed.is_initialized() or find_rank_and_size(os.environ) is not None
        )
        if is_alone and not has_others:
            init_process_group(timeout=timeout, store=HashStore(), rank=0, world_size=1)
        else:
            init_process_group(timeout=timeout)
        _note("a mesh")


def _join_for_operation() -> None:
    """Initialize if a launcher started this process; else do nothing."""
    with _joining.current:
        # Do not reuse torch's world here: only the program knows whether all of its ranks
        # will reach this collective.
        if torch_distributed.is_initialized() or find_launched_rank() is None:
            return
        if get_worker_info() is not None:  # it inherits its parent's variables
            raise WorldError(
                "a DataLoader worker cannot join the process group in place of its rank",
                where=f"process {os.getpid()}, called at {show_site(call_site())}",
                expected="collectives in the process that the launcher started",
                fix="call only get_rank() and get_world_size() in a worker",
            )
        init_process_group()
        _note("a collective")


def _note(touch: str) -> None:
    world = find_world()
    assert world is not None
    world.first_touch = f"{touch} at {show_site(call_site())}"


join_by(_join_for_operation)

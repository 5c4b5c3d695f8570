"""Worlds of torch.distributed on a backend of ours, or of torch's own, in the pool's workers."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.pool import Pool

KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters  # since torch 2.12

# Before torch 2.13 these have only their older names, which warn since.
all_gather_single_of_torch: Any = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single_of_torch: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def functional_ops() -> Any:
    return vars(torch)["ops"]._c10d_functional  # ``torch.ops`` in a function cannot be pickled


def in_world(
    rank: int, program: Callable[..., Any], size: int, backend: str, url: str, seconds: float
) -> Any:
    import meshdist.torch_backends  # noqa: F401 (offers shm to torch)

    limit = timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, timeout=limit)
    try:
        return program()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_torch(
    pool: Pool,
    program: Callable[..., Any],
    size: int,
    backend: str = "shm",
    *,
    seconds: float = 20.0,
) -> list[Any]:
    """What ``program()`` returns on each rank of a world of torch's own."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/world"
        return pool.call(in_world, size, program, size, backend, url, seconds)


def outcomes_on_torch(
    pool: Pool, program: Callable[..., Any], size: int, *, seconds: float = 20.0
) -> list[Any]:
    """As ``on_torch`` over shm; a rank that failed gives a Failure in its place."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"file://{folder}/world"
        return pool.outcomes(in_world, size, program, size, "shm", url, seconds, has_world=False)

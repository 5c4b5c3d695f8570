"""Detect workers of schedulers that start processes without ranks (Ray, Dask, submitit, joblib).

Errors in such a worker suggest the scheduler's recipe instead of a launcher. Detection reads
environment variables and imported modules, and imports no scheduler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from typing import Any


@dataclass(frozen=True)
class ClusterScheduler:
    """A scheduler that starts processes without ranks.

    Args:
        name: the title of its section in docs/how-to/schedulers.md.
        is_here: returns whether a process with these variables is its worker.
        is_service: whether workers inherit a long-running service's variables, so that a launcher's
            variables do not belong to the job.
    """

    name: str
    is_here: Callable[[Mapping[str, str]], bool]
    is_service: bool = False

    @property
    def fix(self) -> str:
        """The fix that errors show in its workers."""
        return (
            "pass each worker its rank and a shared store, before its first collective or mesh: "
            "init_process_group(store=store, rank=rank, world_size=size); "
            "docs/how-to/schedulers.md has a "
            f"complete program under {self.name!r}"
        )


def _is_dask(_: Mapping[str, str]) -> bool:
    worker: Any = getattr(sys.modules.get("distributed.worker"), "Worker", None)
    return bool(getattr(worker, "_instances", ()))  # the workers that run in this process


SCHEDULERS = (
    ClusterScheduler(
        "Ray", lambda them: "ray" in sys.modules and "RAY_RAYLET_PID" in them, is_service=True
    ),
    ClusterScheduler("Dask", _is_dask, is_service=True),
    ClusterScheduler("submitit", lambda them: "SUBMITIT_EXECUTOR" in them),
    ClusterScheduler("joblib", lambda _: current_process().name.startswith("LokyProcess")),
    ClusterScheduler("Process pools", lambda _: parent_process() is not None),
)


def find_scheduler(environment: Mapping[str, str]) -> ClusterScheduler | None:
    """Return the scheduler of this worker process, or None."""
    return next((scheduler for scheduler in SCHEDULERS if scheduler.is_here(environment)), None)

"""The engine whose worker this process is: Ray, Dask, submitit, joblib, a process pool.

They start processes, and no ranks: an error's fix names their recipe in place of a launcher. They
are recognised by what is set and what is imported; nothing of theirs is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import current_process, parent_process
from typing import Any


@dataclass(frozen=True)
class ClusterScheduler:
    """An engine that starts processes.

    Args:
        name: its name, and that of its section in docs/engines.md.
        is_here: whether a process with these variables is its worker.
        is_service: whether its workers have the variables of a service that ran before the job, so
            that a launcher's variables in them tell nothing.
    """

    name: str
    is_here: Callable[[Mapping[str, str]], bool]
    is_service: bool = False

    @property
    def fix(self) -> str:
        """The fix that errors give to a worker of this engine, in place of a launcher's command."""
        return (
            "give each worker its rank and a store that all share, before its first collective or mesh: "
            "init_process_group(store=store, rank=rank, world_size=size); the program that does so "
            f"stands in docs/engines.md under {self.name!r}"
        )


def _is_dask(_: Mapping[str, str]) -> bool:
    worker: Any = getattr(sys.modules.get("distributed.worker"), "Worker", None)
    return bool(getattr(worker, "_instances", ()))  # the workers that run in this process


ENGINES = (
    ClusterScheduler(
        "Ray", lambda them: "ray" in sys.modules and "RAY_RAYLET_PID" in them, is_service=True
    ),
    ClusterScheduler("Dask", _is_dask, is_service=True),
    ClusterScheduler("submitit", lambda them: "SUBMITIT_EXECUTOR" in them),
    ClusterScheduler("joblib", lambda _: current_process().name.startswith("LokyProcess")),
    ClusterScheduler("Process pools", lambda _: parent_process() is not None),
)


def find_engine(environment: Mapping[str, str]) -> ClusterScheduler | None:
    """Return the engine (such as Ray) whose worker this process is, None without any."""
    return next((engine for engine in ENGINES if engine.is_here(environment)), None)

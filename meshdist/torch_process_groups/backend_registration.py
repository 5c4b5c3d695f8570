"""Register meshdist's backends with torch.distributed, loaded on first use.

Imports no module that imports torch: if the package is installed, every ``import torch`` calls
``offer_at_import`` at its end, also while the package or this module imports torch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from ..launching.launcher_variables import STARTERS


def offer_at_import() -> None:
    """Register the backends with torch, ``mpi`` only in a process that may be an MPI rank."""
    # Programs that did not ask for meshdist choose a backend by ``is_mpi_available()``: it stays
    # False in processes in which MPI could not work.
    offer(is_mpi_offered=any(it.is_mpi and it.has_started(os.environ) for it in STARTERS))


def offer(*, is_mpi_offered: bool = True) -> None:
    """Register ``shm``, ``simulated`` and, if ``is_mpi_offered``, ``mpi`` with torch."""
    import torch.distributed as torch_distributed
    from torch.distributed import distributed_c10d

    if not torch_distributed.is_available():
        return
    if "SHM" not in torch_distributed.Backend._plugins:
        torch_distributed.Backend.register_backend(
            "shm", _make_shm, extended_api=True, devices=["cpu"]
        )
        torch_distributed.Backend.register_backend(
            "simulated", _make_simulated, extended_api=True, devices=["cpu", "cuda"]
        )
        torch_distributed.register_rendezvous_handler("simulated", _meet_simulated)
    # ``mpi`` is torch's own name of a class that its wheels lack. From here on torch's
    # ``is_mpi_available()`` returns True.
    torchs: Any = distributed_c10d
    if is_mpi_offered and not torchs._MPI_AVAILABLE and find_spec("mpi4py") is not None:
        torchs.ProcessGroupMPI = _Mpi
        torchs._MPI_AVAILABLE = True


def _make_shm(options: Any, backend_options: Any) -> Any:
    from .construction import open_group

    return open_group("shm", options, backend_options)


def _make_simulated(options: Any, _: Any) -> Any:
    from .construction import open_simulated_group

    return open_simulated_group(options)


def _meet_simulated(url: str, **terms: Any) -> Any:
    from .construction import meet_simulated

    return meet_simulated(url, **terms)


class _Mpi:
    """Replacement of torch's class that opens groups over MPI."""

    @staticmethod
    def create(ranks: list[int]) -> Any:
        """Open the group of these global ranks ([] means all), on members only."""
        from .construction import open_mpi_group

        return open_mpi_group(ranks)

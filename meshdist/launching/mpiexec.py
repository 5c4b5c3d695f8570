"""mpiexec: which one belongs to this environment, and the environment in which to execute it.

Imports the standard library alone, so that the command line can use it without loading torch.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["find_mpiexec", "mpiexec_environment"]

_OF_OTHER_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    # of Open MPI, release 5
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # of release 4, which Debian and Ubuntu have
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def find_mpiexec() -> str | None:
    """The mpiexec that a wheel has put beside this interpreter, else the one on the PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def mpiexec_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which to execute it.

    Open MPI refuses more ranks than cores, and binds each rank to one core, unless variables
    say otherwise: they do here, where the user has not set them.
    """
    mine = {name: value for name, value in environment.items() if name not in _OF_OTHER_LAUNCHERS}
    return {**_DEFAULTS, **mine}

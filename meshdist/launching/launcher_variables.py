"""Define the environment variables in which each launcher passes a process its rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BATCH_STEPS = 0xFFFFFFF0
"""Slurm's first reserved step number: batch scripts and interactive shells, which have no ranks."""


@dataclass(frozen=True)
class LauncherVariables:
    """A launcher and the names of its variables; "" or () if it does not set the variable.

    Args:
        rank: this process's rank; "" if it follows from ``host`` and ``local_rank``.
        size: the number of ranks; in all tuples, the first variable that is set is used.
        local_rank: this process's rank on its host, which has ``local_size`` ranks.
        host: the host's number, out of ``num_hosts``; ``hosts`` lists all hosts, rank 0's first.
        address: of rank 0's store, with ``port``, in addition to MASTER_ADDR and MASTER_PORT.
        marks: variables that are all set in a process of this launcher; () means ``rank``.
        about_process: a pattern of all variables about a single process.
        is_mpi: whether its ranks can be MPI ranks.
        remedy: the fix if a variable is missing.
    """

    name: str
    rank: str = ""
    size: tuple[str, ...] = ()
    local_rank: str = ""
    local_size: str = ""
    host: str = ""
    num_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    address: str = ""
    port: str = ""
    marks: tuple[str, ...] = ()
    about_process: str = ""
    is_mpi: bool = False
    remedy: str = ""

    @property
    def names(self) -> set[str]:
        own = {self.rank, self.local_rank, self.local_size, self.host, self.address, self.port}
        return own.union(self.size, self.num_hosts, self.hosts, self.marks) - {""}

    def has_started(self, environment: Mapping[str, str]) -> bool:
        step = environment.get("SLURM_STEP_ID", "") if self.name == "Slurm" else ""
        is_batch = step.isdecimal() and int(step) >= _BATCH_STEPS
        return not is_batch and all(name in environment for name in self.marks or (self.rank,))


def _mpi_variables(name: str, prefix: str) -> LauncherVariables:
    rank, size = f"{prefix}_RANK", (f"{prefix}_SIZE",)
    local = f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"
    return LauncherVariables(name, rank, size, *local, about_process=f"{prefix}_.*", is_mpi=True)


_Variables = LauncherVariables
BY_HAND = _Variables(
    "env", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE", port="MASTER_PORT"
)
"""Set by ``meshdist run``, torchrun and many others, or by hand."""
LIGHTNING = _Variables(
    *("Lightning", "", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    port="MASTER_PORT",
    marks=("NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"),
    remedy="set LOCAL_WORLD_SIZE to the number of processes on each host, or RANK",
)
KUBEFLOW = _Variables(
    *("Kubeflow", "", ("PET_NNODES",), "", "PET_NPROC_PER_NODE", "PET_NODE_RANK"),
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    marks=("PET_NODE_RANK", "PET_NNODES"),
    remedy="start the program with torchrun, which reads PET_* and starts the processes of a host",
)
SLURM = _Variables(
    *("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
    num_hosts=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
    marks=("SLURM_PROCID", "SLURM_STEP_ID"),
    about_process=r"SLURM_(PROCID|LOCALID|GTIDS|NTASKS|NPROCS|STEP_NUM_TASKS)",
)
STARTERS = (  # if several apply, the first is used
    _mpi_variables("Open MPI", "OMPI_COMM_WORLD"),
    _Variables(
        *("Hydra", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        about_process=r"PMI_.*|MPI_LOCAL(RANKID|NRANKS)",
        is_mpi=True,
    ),
    _mpi_variables("MVAPICH", "MV2_COMM_WORLD"),
    _mpi_variables("jsrun", "JSM_NAMESPACE"),
    _Variables(
        *("Flux", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
        num_hosts=("FLUX_JOB_NNODES",),
        about_process=r"FLUX_(TASK_RANK|TASK_LOCAL_ID|JOB_SIZE|JOB_NNODES)",
        is_mpi=True,
    ),
    SLURM,
    _Variables(
        *("PMIx", "PMIX_RANK", ("WORLD_SIZE",)),
        about_process=r"PMIX_(?!MCA_).*",
        is_mpi=True,
        remedy="set WORLD_SIZE to the number of ranks: PMIx tells a process its rank alone",
    ),
)
NAMES = set[str]().union(
    *(variables.names for variables in (BY_HAND, LIGHTNING, KUBEFLOW, *STARTERS))
)
"""The names of all variables in the table."""
_MANAGERS = ("jsrun", "Flux", "Slurm")
"""Launchers that start MPI ranks themselves and also set MPI's variables."""


def first_value(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first variable's value that is set and not empty, else ""."""
    return next((environment[name] for name in names if environment.get(name)), "")


def find_launcher(environment: Mapping[str, str], *, is_mpi_asked: bool) -> LauncherVariables:
    """Return the launcher that started this process, or ``BY_HAND`` if none is recognized.

    Args:
        is_mpi_asked: whether to consider only launchers of MPI ranks.

    Example:
        >>> both = {"PMI_RANK": "1", "PMI_SIZE": "4", "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"}
        >>> find_launcher(both, is_mpi_asked=False).name
        'Flux'
        >>> find_launcher({**both, "FLUX_JOB_SIZE": "2"}, is_mpi_asked=False).name
        'Hydra'
    """

    def rank_and_size(variables: LauncherVariables) -> tuple[str, str]:
        return environment[variables.rank], first_value(environment, variables.size)

    found = [variables for variables in STARTERS if variables.has_started(environment)]
    if is_mpi_asked:
        return next((variables for variables in found if variables.is_mpi), BY_HAND)
    if "RANK" in environment:
        return BY_HAND
    if LIGHTNING.has_started(environment):
        return LIGHTNING
    if not found:
        return KUBEFLOW if KUBEFLOW.has_started(environment) else BY_HAND
    # Nested mpiexec: the outer scheduler's variables describe mpiexec, not the ranks.
    managers = (
        variables
        for variables in found
        if variables.name in _MANAGERS and rank_and_size(variables) == rank_and_size(found[0])
    )
    return next(managers, found[0])

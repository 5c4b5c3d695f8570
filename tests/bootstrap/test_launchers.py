"""A row of the table of launchers each, with the variables that its documents tell of."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

import meshdist as md
from meshdist.bootstrap.launch_environment import (
    LaunchEnvironment,
    find_rank_and_size,
    read_launch_environment,
)
from meshdist.bootstrap.schedulers import find_scheduler

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
}
# What a batch shell really had: gist.github.com/jerinphilip/212b3814264c3b8da512afc2cfda4bcb
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_NODELIST": "gnode[10,20,25,37]",
    "SLURM_TASK_PID": "16360",
    "SLURM_GTIDS": "0",
}


def endpoint_of(found: LaunchEnvironment) -> tuple[str, int, int, int | None]:
    return found.launcher, found.rank, found.size, found.local_rank


def refusal_of_rank() -> str:
    """What ``get_rank`` tells in a forked child, which has had no world: other tests make some."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            md.get_rank()
        except md.errors.NotInitializedError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as told:
        text = told.read()
    os.waitpid(child, 0)
    return text


def error_of(environment: Mapping[str, str]) -> str:
    with pytest.raises(md.RendezvousError) as caught:
        read_launch_environment(environment)
    return str(caught.value)


# -- rows ---------------------------------------------------------------------------------------


def test_open_mpi() -> None:
    """https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html."""
    told = {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "4",
        "PMIX_RANK": "3",
    }
    assert endpoint_of(read_launch_environment(told)) == ("Open MPI", 3, 4, 1)
    # A size that a script exports for others does not hide mpiexec.
    assert endpoint_of(read_launch_environment({**told, "WORLD_SIZE": "4"})) == (
        "Open MPI",
        3,
        4,
        1,
    )


def test_mpich() -> None:
    """https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md.

    Seen with the mpich 5 of PyPI.
    """
    told = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"}
    found = read_launch_environment({**told, "MPI_LOCALRANKID": "1"})
    assert endpoint_of(found) == ("Hydra", 1, 2, 1)
    assert found.is_one_host


def test_mvapich() -> None:
    """https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    told = dict(zip((f"MV2_COMM_WORLD_{name}" for name in names), "2402", strict=True))
    assert endpoint_of(read_launch_environment(told)) == ("MVAPICH", 2, 4, 0)


def test_flux() -> None:
    """https://github.com/flux-framework/flux-core/blob/master/src/shell/task.c."""
    told = {
        "FLUX_TASK_RANK": "1",
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_JOB_SIZE": "4",
        "FLUX_JOB_NNODES": "1",
        "FLUX_JOB_ID": "\u0192uqhSDB9",
        "FLUX_URI": "local:///tmp/flux-a/local-0",
        "PMI_FD": "14",
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "PMI_SPAWNED": "0",
    }
    found = read_launch_environment(told)
    assert endpoint_of(found) == ("Flux", 1, 4, 1)
    assert (found.is_one_host, found.address, found.job) == (True, None, "\u0192uqhSDB9")
    # On several hosts the user says where rank 0 is.
    there = {"FLUX_JOB_NNODES": "2", "MASTER_ADDR": "tioga7", "MASTER_PORT": "29500"}
    found = read_launch_environment({**told, **there})
    assert (found.is_one_host, found.address, found.port) == (False, "tioga7", 29500)
    # mpiexec in a task of Flux: the task is mpiexec's.
    assert endpoint_of(read_launch_environment({**told, "PMI_SIZE": "8"}))[:3] == ("Hydra", 1, 8)


def test_jsrun() -> None:
    """https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.plugins.environments.LSFEnvironment.html."""
    told = {
        "LSB_JOBID": "12",
        "JSM_NAMESPACE_RANK": "5",
        "JSM_NAMESPACE_SIZE": "8",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "4",
        "PMIX_RANK": "5",
        "PMIX_NAMESPACE": "1",
    }
    assert endpoint_of(read_launch_environment(told)) == ("jsrun", 5, 8, 1)
    spectrum = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    assert endpoint_of(read_launch_environment({**told, **spectrum})) == ("jsrun", 5, 8, 1)
    found = read_launch_environment({**told, **spectrum}, is_mpi_asked=True)
    assert (found.rank, found.size) == (5, 8)


def test_pmix_alone_tells_no_size() -> None:
    """https://openpmix.github.io/support/faq/rm-provided-information: a library call gives it."""
    told = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prte-1@1", "PMIX_SERVER_URI41": "x;tcp4://y:1"}
    text = error_of(told)
    assert "WORLD_SIZE is missing" in text
    assert "started by PMIx" in text
    assert "set WORLD_SIZE to the number of ranks: PMIx tells a process its rank alone" in text
    found = read_launch_environment({**told, "WORLD_SIZE": "4"})
    assert endpoint_of(found) == ("PMIx", 1, 4, None)
    assert read_launch_environment({**told, "WORLD_SIZE": "4"}, is_mpi_asked=True).rank == 1


def test_srun_tells_the_step_s_size() -> None:
    """https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES."""
    told = {**STEP, "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4"}
    found = read_launch_environment(told)
    assert endpoint_of(found) == ("Slurm", 3, 4, 1)
    assert (found.address, found.is_one_host) == ("gnode10", False)


def test_srun_with_ntasks_per_node_alone() -> None:
    """https://slurm.schedmd.com/srun.html#OPT_ntasks-per-node: a number of tasks for each host."""
    told = {**STEP, "SLURM_NTASKS_PER_NODE": "2"}
    assert endpoint_of(read_launch_environment(told)) == ("Slurm", 3, 4, 1)
    assert find_rank_and_size(told) == (3, 4)
    text = error_of({name: told[name] for name in told if name != "SLURM_NTASKS_PER_NODE"})
    assert "SLURM_NTASKS is missing" in text
    assert "started by Slurm" in text


def test_srun_that_starts_mpi_s_ranks() -> None:
    """https://slurm.schedmd.com/mpi_guide.html: --mpi=pmix tells ranks by PMIx, too."""
    told = {**STEP, "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "3"}
    assert endpoint_of(read_launch_environment(told)) == ("Slurm", 3, 4, 1)


def test_kubeflow_under_plain_python() -> None:
    """https://kubeflow.org/docs/components/trainer/user-guides/pytorch."""
    told = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    }
    found = read_launch_environment(told)
    assert endpoint_of(found) == ("Kubeflow", 1, 2, None)
    assert (found.address, found.port) == ("train-node-0-0.train", 29500)
    for several in ("8", "auto"):
        text = error_of({**told, "PET_NPROC_PER_NODE": several})
        assert f"PET_NPROC_PER_NODE={several!r} asks for more than 1 process" in text
        assert "started by Kubeflow" in text
        assert "start the program with torchrun, which reads PET_*" in text
    text = error_of({name: told[name] for name in told if name != "PET_MASTER_PORT"})
    assert "PET_MASTER_PORT is missing" in text


def test_a_child_of_lightning() -> None:
    """https://lightning.ai/docs/fabric/stable/_modules/lightning/fabric/plugins/environments/lightning.html."""
    told = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "41233",
        "NODE_RANK": "0",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
    }
    found = read_launch_environment(told)
    assert endpoint_of(found) == ("Lightning", 1, 2, 1)
    assert (found.address, found.port) == ("127.0.0.1", 41233)
    second_host = {**told, "NODE_RANK": "1", "WORLD_SIZE": "4"}
    text = error_of(second_host)
    assert "LOCAL_WORLD_SIZE is missing" in text
    assert "started by Lightning" in text
    assert "set LOCAL_WORLD_SIZE to the number of processes on each host, or RANK" in text
    assert read_launch_environment({**second_host, "LOCAL_WORLD_SIZE": "2"}).rank == 3
    assert endpoint_of(read_launch_environment({**second_host, "RANK": "3"})) == ("env", 3, 4, 1)


# -- no rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_batch_shell_is_no_rank(step: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """https://slurm.schedmd.com/sbatch.html: the script has SLURM_PROCID 0, and is in no step.

    The steps that Slurm numbers itself, of a script and of an interactive shell: slurm.h.
    """
    told = BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step}
    assert find_rank_and_size(told) is None
    text = error_of(told)
    assert "RANK, WORLD_SIZE, MASTER_PORT are missing" in text
    assert (
        "SLURM_PROCID=0 without an srun step: a batch shell, or a process with its variables"
        in text
    )
    assert "srun -n 4 python" in text
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert "without an srun step" in refusal_of_rank()


ENGINES = {
    "Ray": {"RAY_RAYLET_PID": "8", "RAY_JOB_ID": "01000000"},
    "Dask": {},
    "submitit": {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1"},
    "joblib": {},
    "Process pools": {},
}


def make_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look as an engine's worker was seen to look."""
    for variable, value in ENGINES[name].items():
        monkeypatch.setenv(variable, value)
    if name == "Ray":
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    if name == "Dask":
        module = SimpleNamespace(Worker=SimpleNamespace(_instances=[object()]))
        monkeypatch.setitem(sys.modules, "distributed.worker", module)
    if name == "joblib":
        monkeypatch.setattr(multiprocessing.current_process(), "name", "LokyProcess-1")
    if name == "Process pools":
        monkeypatch.setattr("multiprocessing.process._parent_process", object())


@pytest.mark.parametrize("name", ENGINES)
def test_the_fix_fits_an_engine(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine(name, monkeypatch)
    fix = (
        "init_process_group(store=store, rank=rank, world_size=size); "
        "docs/how-to/schedulers.md has a "
        f"complete program under {name!r}"
    )
    text = " ".join(refusal_of_rank().split())
    assert f"a worker of {name}, which does not assign ranks" in text
    assert fix in text
    assert "meshdist run" not in text
    with pytest.raises(md.RendezvousError) as rejected:
        md.init_process_group()
    text = " ".join(str(rejected.value).split())
    assert f"{name} does not assign ranks to its workers: RANK, WORLD_SIZE, MASTER_PORT" in text
    assert f"a worker of {name}, init_method env://" in text
    assert fix in text


@pytest.mark.parametrize("name", ["Ray", "Dask"])
def test_a_service_s_own_place_is_not_its_workers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {**STEP, "SLURM_STEP_NUM_TASKS": "4"}
    assert find_rank_and_size(step) == (3, 4)
    make_engine(name, monkeypatch)
    told = {**step, **ENGINES[name]}
    assert find_rank_and_size(told) is None
    assert find_rank_and_size({**told, "RANK": "0", "WORLD_SIZE": "2"}) == (0, 2)


def test_a_program_of_no_engine() -> None:
    assert find_scheduler({}) is None

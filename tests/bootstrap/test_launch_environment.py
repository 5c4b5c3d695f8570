"""What launchers say, from the variables they set."""

from __future__ import annotations

import sys

import pytest

import meshdist as md
from meshdist.bootstrap.launch_environment import (
    LaunchEnvironment,
    first_host,
    read_launch_environment,
)

ENV = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[07-09],login",
    "SLURM_NNODES": "4",
}


def error_of(environment: dict[str, str], **given: int) -> str:
    with pytest.raises(md.RendezvousError) as caught:
        read_launch_environment(environment, **given)
    return str(caught.value)


# -- each launcher ------------------------------------------------------------------------------


def test_variables_set_by_hand() -> None:
    assert read_launch_environment(ENV) == LaunchEnvironment("env", 1, 4, "host0", 29500)


def test_what_the_call_names_wins_one_by_one() -> None:
    assert read_launch_environment(ENV, rank=2).rank == 2
    assert read_launch_environment(ENV, rank=2).size == 4
    assert read_launch_environment(ENV, world_size=9).size == 9
    both = read_launch_environment({"MASTER_PORT": "1", "MASTER_ADDR": "a"}, rank=1, world_size=2)
    assert (both.rank, both.size) == (1, 2)


def test_rank_0_may_lack_the_address() -> None:
    rest = {name: value for name, value in ENV.items() if name != "MASTER_ADDR"}
    assert read_launch_environment({**rest, "RANK": "0"}).address is None
    assert "MASTER_ADDR is missing" in error_of(rest)


def test_on_one_host_the_address_is_loopback() -> None:
    told = {**ENV, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    found = read_launch_environment(told)
    assert (found.address, found.local_rank, found.is_one_host) == ("127.0.0.1", 1, True)
    assert read_launch_environment({**told, "LOCAL_WORLD_SIZE": "2"}).address == "host0"


def test_our_own_launcher_knows_its_address() -> None:
    told = {**ENV, "LOCAL_WORLD_SIZE": "4", "MESHDIST_LAUNCH": "/ab", "MESHDIST_RUN_ID": "ab"}
    found = read_launch_environment(told)
    assert (found.launcher, found.address, found.rendezvous_round) == (
        "meshdist run",
        "host0",
        "ab",
    )


def test_torchrun() -> None:
    told = {
        **ENV,
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "1",
    }
    found = read_launch_environment(told)
    assert (found.launcher, found.rendezvous_round, found.has_agent_store) == (
        "torchrun",
        "2",
        True,
    )
    assert found.address == "host0"  # the agent's server, not one of ours
    without = read_launch_environment({**told, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert (without.has_agent_store, without.address) == (False, "127.0.0.1")
    # Each agent counts its own restarts: across hosts the count tells nothing.
    assert read_launch_environment({**told, "GROUP_WORLD_SIZE": "2"}).rendezvous_round == ""


def test_open_mpi() -> None:
    found = read_launch_environment(OPEN_MPI)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("Open MPI", 1, 4, 1)
    assert (found.address, found.port, found.job) == (None, None, "prterun-host-77@1")
    assert not found.is_one_host
    assert read_launch_environment({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).is_one_host


def test_mpich_hydra() -> None:
    found = read_launch_environment(HYDRA)
    assert (found.launcher, found.rank, found.size, found.is_one_host) == ("Hydra", 2, 4, True)


def test_the_address_may_be_named_under_mpiexec() -> None:
    found = read_launch_environment({**OPEN_MPI, "MASTER_ADDR": "host0", "MASTER_PORT": "7"})
    assert (found.launcher, found.address, found.port) == ("Open MPI", "host0", 7)


def test_slurm() -> None:
    found = read_launch_environment(SLURM)
    assert (found.launcher, found.rank, found.size, found.local_rank) == ("Slurm", 3, 8, 1)
    assert (found.address, found.is_one_host) == ("gpu07", False)
    assert found.port is not None
    assert 12000 <= found.port < 32000
    assert read_launch_environment({**SLURM, "SLURM_STEP_ID": "3"}).port != found.port
    assert read_launch_environment({**SLURM, "SLURM_PROCID": "0"}).port == found.port


def test_slurm_on_one_host() -> None:
    found = read_launch_environment({**SLURM, "SLURM_NNODES": "1"})
    assert (found.address, found.is_one_host) == ("127.0.0.1", True)


def test_slurm_with_a_step_on_fewer_hosts() -> None:
    step = {**SLURM, "SLURM_STEP_NODELIST": "login", "SLURM_STEP_NUM_NODES": "2"}
    assert read_launch_environment(step).address == "login"


def test_who_wins() -> None:
    assert read_launch_environment({**OPEN_MPI, **SLURM, **ENV}).launcher == "env"
    assert read_launch_environment({**OPEN_MPI, **SLURM}).launcher == "Open MPI"
    # mpiexec inside a Slurm job: Slurm's variables tell of mpiexec's own processes.
    assert read_launch_environment({**HYDRA, **SLURM}).launcher == "Hydra"
    # srun --mpi=pmi2: both tell the same, and Slurm knows the hosts.
    same = {**HYDRA, **SLURM, "PMI_RANK": "3", "PMI_SIZE": "8"}
    assert read_launch_environment(same).launcher == "Slurm"


def test_only_mpiexec_counts_where_mpi_is_asked_for() -> None:
    found = read_launch_environment({**ENV, **OPEN_MPI}, is_mpi_asked=True)
    assert (found.launcher, found.rank) == ("Open MPI", 1)
    with pytest.raises(md.RendezvousError, match="mpiexec did not start the program") as caught:
        read_launch_environment(ENV, is_mpi_asked=True)
    text = str(caught.value)
    assert "expected: the variables of mpiexec, from which backend 'mpi' reads its ranks" in text
    assert "meshdist run --launcher mpi -n 4" in text and "mpiexec -n 4 python" in text


# -- one error that lists everything ------------------------------------------------------------


def test_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/some/where/train.py", "--fast"])
    text = error_of({"HOME": "/root"})
    assert "RANK, WORLD_SIZE, MASTER_PORT are missing" in text
    assert "found:    none of them: the program was started without a launcher" in text
    for command in (
        "meshdist run -n 4 train.py",
        "torchrun --nproc-per-node 4 train.py",
        "mpiexec -n 4 python train.py",
        "srun -n 4 python train.py",
    ):
        assert command in text
    monkeypatch.setattr("sys.argv", ["examples/train.py"])
    assert "meshdist run -n 4 examples/train.py" in error_of({"HOME": "/root"})


def test_all_that_is_wrong_is_told_at_once() -> None:
    text = error_of({"RANK": "one", "WORLD_SIZE": "0", "MASTER_PORT": "70000"})
    assert "RANK='one' is not an integer of at least 0" in text
    assert "WORLD_SIZE='0' is not an integer of at least 1" in text
    assert "MASTER_PORT='70000' is not a port (1 to 65535)" in text
    assert "found:    MASTER_PORT=70000, RANK=one, WORLD_SIZE=0" in text


@pytest.mark.parametrize("text", ["²", "٣", "1_0", "+1", "9" * 5000, "1.0", "0x1", "\udcff"])
def test_what_only_looks_like_a_number_is_told(text: str) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        assert f"{name}={text[:20]!r}"[:-1] in error_of({**ENV, name: text})
    assert "is not a port (1 to 65535)" in error_of({**ENV, "MASTER_PORT": text})
    assert len(error_of({**ENV, "RANK": text, "MASTER_PORT": text})) < 2000
    told = read_launch_environment({**ENV, "LOCAL_RANK": text, "LOCAL_WORLD_SIZE": text})
    assert (told.local_rank, told.is_one_host) == (None, False)


def test_a_world_that_is_too_large_is_told_at_once() -> None:
    text = error_of({**ENV, "WORLD_SIZE": "999999999999999"})
    assert "WORLD_SIZE='999999999999999' is more than 1048576" in text


def test_half_of_the_variables() -> None:
    text = error_of({"RANK": "1", **{k: v for k, v in OPEN_MPI.items() if "LOCAL" not in k}})
    assert "WORLD_SIZE, MASTER_PORT, MASTER_ADDR are missing" in text
    assert "OMPI_COMM_WORLD_SIZE=4" in text  # so that one sees where a stray RANK got in the way


def test_a_rank_beyond_the_world() -> None:
    assert "rank 4 does not exist in a world of 4" in error_of({**ENV, "RANK": "4"})


def test_slurm_without_a_list_of_hosts() -> None:
    rest = {name: value for name, value in SLURM.items() if name != "SLURM_JOB_NODELIST"}
    assert "SLURM_JOB_NODELIST is missing" in error_of(rest)
    text = error_of({**SLURM, "SLURM_JOB_NODELIST": "gpu[a-b]"})
    assert "SLURM_JOB_NODELIST='gpu[a-b]' is not a list of hosts" in text


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3]", "a1"),
        ("a[007-010,12],b", "a007"),
        ("a[12,1-3]", "a12"),
        ("rack[2-4]-node[01-16]", "rack2-node01"),
        ("host.example.org,other", "host.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",a", "a[", "a[]", "a[x]", "a b"])
def test_no_list_of_hosts(nodes: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of hosts|substring not found"):
        first_host(nodes)


def test_a_notebook_is_told_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(md.RendezvousError) as caught:
        read_launch_environment({}, rank=-1, world_size=-1, is_mpi_asked=False)
    assert "meshdist.simulate(program, 4)" in str(caught.value)
    assert "meshdist run" not in str(caught.value)

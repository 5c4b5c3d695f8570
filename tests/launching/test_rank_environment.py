"""What a rank is told, and the port that is kept for rank 0."""

from __future__ import annotations

import socket
import sys

import pytest

from meshdist.launching.rank_environment import (
    JobNode,
    LaunchError,
    foreign_rank_variables,
    mpiexec_environment,
    rank_environment,
    reserve_port,
)

# -- the environment of a rank ------------------------------------------------------------------


@pytest.mark.parametrize(("nnodes", "nprocs"), [(1, 1), (1, 4), (3, 2)])
def test_every_rank_is_told_its_place(nnodes: int, nprocs: int) -> None:
    ranks = []
    for node in range(nnodes):
        for local in range(nprocs):
            env = rank_environment(
                {"PATH": "/bin"},
                JobNode(nnodes, node, "host0", 1234),
                local_rank=local,
                nprocs=nprocs,
                mark="abc",
            )
            assert env["PATH"] == "/bin"
            assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(local), str(nprocs))
            assert (env["GROUP_RANK"], env["WORLD_SIZE"]) == (str(node), str(nnodes * nprocs))
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("host0", "1234")
            assert env.get("MESHDIST_RUN_ID") == ("abc" if nnodes == 1 else None)
            assert env.get("OMP_NUM_THREADS") == ("1" if nprocs > 1 else None)
            assert env["THP_MEM_ALLOC_ENABLE"] == "1"
            assert "MESHDIST_LISTEN_FD" not in env
            ranks.append(int(env["RANK"]))
    assert ranks == list(range(nnodes * nprocs))


def endpoint_of(base: dict[str, str], listen_fd: int | None = None) -> dict[str, str]:
    return rank_environment(
        base,
        JobNode(master_addr="127.0.0.1", master_port=1),
        local_rank=0,
        nprocs=2,
        mark="new",
        listen_fd=listen_fd,
    )


def test_the_users_number_of_threads_and_size_of_pages_are_kept() -> None:
    mine = {"OMP_NUM_THREADS": "7", "THP_MEM_ALLOC_ENABLE": "0"}
    assert mine.items() <= endpoint_of(mine).items()
    assert mine.items() <= mpiexec_environment(mine).items()
    assert mpiexec_environment({})["THP_MEM_ALLOC_ENABLE"] == "1"


def test_a_launch_inside_another_is_told_nothing_of_the_outer_one() -> None:
    outer = endpoint_of({"TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "3"}, listen_fd=9)
    assert outer["MESHDIST_LISTEN_FD"] == "9"
    inner = endpoint_of(outer | {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "5"})
    assert [name for name in inner if name.startswith("TORCHELASTIC")] == []
    assert (inner["ROLE_NAME"], inner["ROLE_RANK"]) == ("default", inner["RANK"])
    assert inner["GROUP_WORLD_SIZE"] == "1"
    assert "MESHDIST_LISTEN_FD" not in inner
    assert inner["MESHDIST_LAUNCH"] == "/new/new"


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "n",
    "PMIX_MCA_psec": "native",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5", "MPI_LOCALRANKID": "1"}


@pytest.mark.parametrize(
    ("variables", "removed"),
    [
        (SLURM, ["SLURM_LOCALID", "SLURM_NTASKS", "SLURM_PROCID"]),
        (
            OPEN_MPI,
            ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE", "PMIX_RANK"],
        ),
        (HYDRA, sorted(HYDRA)),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, []),
    ],
)
def test_other_launchers_are_believed_only_where_their_processes_are_the_ranks(
    variables: dict[str, str], removed: list[str]
) -> None:
    def foreign(nprocs: int, nnodes: int, node_rank: int) -> list[str]:
        return foreign_rank_variables(variables, nprocs=nprocs, nnodes=nnodes, node_rank=node_rank)

    assert foreign(nprocs=4, nnodes=2, node_rank=1) == removed
    assert foreign(nprocs=1, nnodes=2, node_rank=0) == removed
    assert foreign(nprocs=1, nnodes=2, node_rank=1) == []


# -- the port -----------------------------------------------------------------------------------


def is_rejected(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_a_reserved_port_does_not_listen_until_rank_0_does() -> None:
    reservation = reserve_port()
    try:
        assert reservation.address == "127.0.0.1"
        assert reservation.listener.getsockname() == ("127.0.0.1", reservation.port)
        assert is_rejected(reservation.port)
        reservation.listener.listen()
        assert not is_rejected(reservation.port)
        reservation.listener.close()
        assert is_rejected(reservation.port)
    finally:
        reservation.close()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's rule for SO_REUSEADDR")
def test_a_plain_torch_program_can_bind_the_reserved_port_on_every_interface() -> None:
    reservation = reserve_port()
    try:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("0.0.0.0", reservation.port))
            other.listen()
            assert not is_rejected(reservation.port)
        with socket.socket() as careless, pytest.raises(OSError, match="in use"):
            careless.bind(("127.0.0.1", reservation.port))
    finally:
        reservation.close()


def test_a_port_that_is_taken_is_rejected() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError) as caught:
            reserve_port(port=port)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"rank 0 cannot listen on 127.0.0.1, port {port}: ")
    assert "in use" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["where:", "expected:", "fix:"]


def test_an_address_of_another_host_is_rejected() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192.0.2.1, port \d+: Cannot assign"):
        reserve_port("192.0.2.1")


@pytest.mark.parametrize("name", ["a" * 300, "a..b", "\udcff"])
def test_what_is_no_name_of_a_host_is_rejected(name: str) -> None:
    with pytest.raises(LaunchError, match="rank 0 cannot listen on "):
        reserve_port(name)


def test_a_name_without_an_address_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find_nothing)
    with pytest.raises(LaunchError, match="cannot listen on nowhere: Name or service not known"):
        reserve_port("nowhere")

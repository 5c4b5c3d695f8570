"""The launcher's parts, and run_processes as Python calls it; the command line is tested apart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshdist.runtime import launcher
from meshdist.runtime.launcher import (
    Ending,
    LaunchError,
    Watch,
    exit_code_of,
    foreign_rank_variables,
    rank_environment,
    reserve_port,
    run_processes,
    signal_name,
)

PYTHON = [sys.executable, "-S", "-c"]
SLEEP = [*PYTHON, "import time; time.sleep(60)"]
DEAF = [
    *PYTHON,
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
]


# -- the environment of a rank ------------------------------------------------------------------


@pytest.mark.parametrize(("nnodes", "nprocs"), [(1, 1), (1, 4), (3, 2)])
def test_every_rank_is_told_its_place(nnodes: int, nprocs: int) -> None:
    ranks = []
    for node in range(nnodes):
        for local in range(nprocs):
            env = rank_environment(
                {"PATH": "/bin"},
                local_rank=local,
                nprocs=nprocs,
                nnodes=nnodes,
                node_rank=node,
                master_addr="host0",
                master_port=1234,
                mark="abc",
            )
            assert env["PATH"] == "/bin"
            assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(local), str(nprocs))
            assert (env["GROUP_RANK"], env["WORLD_SIZE"]) == (str(node), str(nnodes * nprocs))
            assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("host0", "1234")
            assert env.get("MESHDIST_RUN_ID") == ("abc" if nnodes == 1 else None)
            assert env.get("OMP_NUM_THREADS") == ("1" if nprocs > 1 else None)
            assert "MESHDIST_LISTEN_FD" not in env
            ranks.append(int(env["RANK"]))
    assert ranks == list(range(nnodes * nprocs))


def place_of(base: dict[str, str], listen_fd: int | None = None) -> dict[str, str]:
    return rank_environment(
        base,
        local_rank=0,
        nprocs=2,
        master_addr="127.0.0.1",
        master_port=1,
        mark="new",
        listen_fd=listen_fd,
    )


def test_the_users_number_of_threads_is_kept() -> None:
    assert place_of({"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_a_launch_inside_another_is_told_nothing_of_the_outer_one() -> None:
    outer = place_of({"TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "3"}, listen_fd=9)
    assert outer["MESHDIST_LISTEN_FD"] == "9"
    inner = place_of(outer | {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "5"})
    names = {name for name in inner if name.startswith(("TORCHELASTIC", "ROLE", "GROUP_W"))}
    assert names == set()
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


def is_refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


def test_a_reserved_port_does_not_listen_until_rank_0_does() -> None:
    reservation = reserve_port()
    try:
        assert reservation.address == "127.0.0.1"
        assert reservation.listener.getsockname() == ("127.0.0.1", reservation.port)
        assert is_refused(reservation.port)
        reservation.listener.listen()
        assert not is_refused(reservation.port)
        reservation.listener.close()
        assert is_refused(reservation.port)
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
            assert not is_refused(reservation.port)
        with socket.socket() as careless, pytest.raises(OSError, match="in use"):
            careless.bind(("127.0.0.1", reservation.port))
    finally:
        reservation.close()


def test_a_port_that_is_taken_is_refused() -> None:
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


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192.0.2.1, port \d+: Cannot assign"):
        reserve_port("192.0.2.1")


def test_a_name_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find_nothing)
    with pytest.raises(LaunchError, match="cannot listen on nowhere: Name or service not known"):
        reserve_port("nowhere")


# -- how a process ended ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        (1, 1, "failed with exit code 1"),
        (-11, 139, "was ended by SIGSEGV"),
        (-9, 137, "was ended by SIGKILL (the system does this when memory runs out)"),
        (-40, 168, "was ended by signal 40"),
    ],
)
def test_an_ending_is_told_in_words(code: int, exit_code: int, text: str) -> None:
    assert str(Ending(0, 1, code)) == text
    assert Ending(0, 1, code).exit_code == exit_code_of(code) == exit_code


def test_signals_have_names() -> None:
    assert signal_name(15) == "SIGTERM"


# -- watching -----------------------------------------------------------------------------------


@pytest.fixture(params=["told by the system", "polled"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    if request.param == "polled":

        def refuse(pid: int) -> int:
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    watch = Watch()
    yield watch
    watch.stop(())
    watch.close()


def start(command: list[str], *, leads: bool = True) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=leads, stdout=subprocess.PIPE)


def end_of(watch: Watch) -> list[Ending]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if ended := watch.step(0.5):
            return ended
    raise AssertionError("nobody ended")


def test_endings_are_told_in_order_and_the_first_failure_is_kept(watch: Watch) -> None:
    gate = [*PYTHON, "import sys; sys.exit(int(sys.stdin.readline()))"]
    children = [subprocess.Popen(gate, stdin=subprocess.PIPE, text=True) for _ in range(3)]
    for rank, child in enumerate(children):
        watch.add(rank, child)
    for rank, code in [(2, 0), (1, 7), (0, 3)]:
        children[rank].communicate(f"{code}\n")
        assert end_of(watch) == [Ending(rank, children[rank].pid, code)]
    assert watch.failed == Ending(1, children[1].pid, 7)
    assert watch.running == {}


def test_a_step_without_news_ends_at_its_time(watch: Watch) -> None:
    with start(SLEEP) as child:
        watch.add(0, child)
        begin = time.monotonic()
        assert watch.step(0.05) == []
        assert time.monotonic() - begin < 2
        watch.stop()


def test_stop_asks_first_and_kills_who_does_not_listen(watch: Watch) -> None:
    with start(SLEEP) as willing, start(DEAF) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        watch.add(0, willing)
        watch.add(1, deaf)
        begin = time.monotonic()
        ended = watch.stop([(signal.SIGTERM, 0.3)])
        assert time.monotonic() - begin < 3
    assert [(e.rank, e.code) for e in ended] == [(0, -15), (1, -9)]


def test_stop_in_a_hurry_does_not_wait(watch: Watch) -> None:
    with start(DEAF) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        watch.add(0, deaf)
        watch.hurried = True
        begin = time.monotonic()
        (ended,) = watch.stop([(signal.SIGTERM, 30.0)])
        assert (ended.code, time.monotonic() - begin < 5) == (-9, True)


def test_a_child_of_the_callers_own_process_group_is_signalled_alone(watch: Watch) -> None:
    with start(SLEEP, leads=False) as child:
        assert os.getpgid(child.pid) == os.getpgid(0)
        watch.add(0, child)
        (ended,) = watch.stop()
    assert ended.code == -15


# -- run_processes ------------------------------------------------------------------------------


def show_of(tmp_path: Path) -> list[str]:
    """A command whose ranks each write a file that holds their arguments."""
    code = (
        "import os, sys, pathlib\n"
        f"path = pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])\n"
        "path.write_text(' '.join([os.environ.get('COLOUR', '-'), *sys.argv[1:]]))\n"
    )
    return [*PYTHON, code]


def test_the_command_may_depend_on_the_local_rank(tmp_path: Path) -> None:
    show = show_of(tmp_path)
    env = dict(os.environ, COLOUR="red")
    assert run_processes(lambda local: [*show, f"local={local}"], 3, env=env) == 0
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {str(rank): f"red local={rank}" for rank in range(3)}


def test_the_first_failure_is_repeated_last(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise SystemExit('I am unwell')\n"
        "time.sleep(60)\n"
    )
    assert run_processes([*PYTHON, code], 3) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "I am unwell"
    assert lines[1].startswith("meshdist: rank 1 (pid ")
    assert lines[1].endswith(
        ") failed with exit code 1; stopped 2 other rank(s) of this host. The end of its stderr:"
    )
    assert lines[2:] == ["I am unwell"]


def test_a_silent_failure_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_processes([*PYTHON, "import os; os.kill(os.getpid(), 11)"], 1) == 139
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("was ended by SIGSEGV. It wrote nothing to stderr.")


def test_of_long_output_whole_lines_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(9999): print('line', i, file=sys.stderr)\nsys.exit(5)"
    assert run_processes([*PYTHON, code], 1) == 5
    lines = capfd.readouterr().err.splitlines()
    assert lines[:9999] == [f"line {i}" for i in range(9999)]
    again = lines[10000:]
    assert again == [f"line {i}" for i in range(9999 - len(again), 9999)]
    assert 1000 < len(again) < 9999


def test_prefixed_lines_stay_whole(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time\n"
        "for part in ['a', 'b\\n10%\\r', '20%\\r', '\\nlast']:\n"
        "    sys.stdout.write(part); sys.stdout.flush(); time.sleep(0.02)\n"
        "print('!', file=sys.stderr)\n"
    )
    assert run_processes([*PYTHON, code], 2, prefix=True) == 0
    out, err = capfd.readouterr()
    shown = out.replace("\r\n", "\n").replace("\r", "\n")
    for rank in range(2):
        mine = [line[9:] for line in shown.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert mine == ["ab", "10%", "20%", "last"]
    assert len(shown.splitlines()) == 8
    assert sorted(err.splitlines()) == ["[rank 0] !", "[rank 1] !"]


def children() -> set[str]:
    """The processes that threads of this one have started and not reaped."""
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


def test_it_works_in_a_thread_and_leaves_the_process_as_it_was() -> None:
    before = children()
    handlers = [signal.getsignal(number) for number in (2, 15, 1)]
    open_files = sorted(os.listdir("/proc/self/fd")) if sys.platform == "linux" else []
    codes: list[int] = []
    command = [*PYTHON, "import sys; sys.exit(3)"]
    thread = threading.Thread(target=lambda: codes.append(run_processes(command, 2)))
    thread.start()
    thread.join(30)
    codes.append(run_processes([*PYTHON, ""], 2))
    assert codes == [3, 0]
    assert [signal.getsignal(number) for number in (2, 15, 1)] == handlers
    if open_files:
        assert sorted(os.listdir("/proc/self/fd")) == open_files
    assert children() == before


def test_a_program_that_cannot_be_started_stops_what_has_been(tmp_path: Path) -> None:
    show = show_of(tmp_path)
    before = children()
    with pytest.raises(LaunchError) as caught:
        run_processes(lambda local: ["/no/such/program", "x y"] if local else SLEEP, 2)
    assert str(caught.value).splitlines() == [
        "cannot start '/no/such/program': No such file or directory",
        "  where:    rank 1, the command: /no/such/program 'x y'",
        "  expected: a program that can be executed",
        "  fix:      check its path and its permissions",
    ]
    assert children() == before
    assert run_processes(show, 1) == 0


@pytest.mark.parametrize(
    ("arguments", "summary", "where"),
    [
        ({"command": []}, "there is no command to start", None),
        ({"nprocs": 0}, "cannot start 0 processes", "-n (nprocs)"),
        ({"nnodes": 0}, "a job cannot run on 0 hosts", "--nnodes"),
        ({"node_rank": 1}, "host number 1 does not exist in a job on 1 host(s)", "--node-rank"),
        ({"node_rank": -1}, "host number -1 does not exist in a job on 1 host(s)", "--node-rank"),
        ({"nnodes": 2}, "a job on 2 hosts needs the address of host 0", "--master-addr"),
        ({"master_port": 65536}, "65536 is no port", "--master-port"),
    ],
)
def test_what_cannot_be_started_is_refused(
    arguments: dict[str, object], summary: str, where: str | None
) -> None:
    with pytest.raises(LaunchError) as caught:
        run_processes(**({"command": SLEEP, "nprocs": 1} | arguments))  # type: ignore[arg-type]
    first, *rest = str(caught.value).splitlines()
    assert first == summary
    assert any(line.startswith("  expected: ") for line in rest)
    if where is not None:
        assert rest[0] == f"  where:    {where}"


def test_the_launcher_says_where_the_store_can_be_reached(
    capfd: pytest.CaptureFixture[str],
) -> None:
    nothing = [*PYTHON, ""]

    def said(**arguments: object) -> str:
        assert run_processes(nothing, 1, **arguments) == 0  # type: ignore[arg-type]
        return capfd.readouterr().err

    assert said() == said(master_addr="localhost") == ""
    two = said(nnodes=2, master_addr="host0")
    assert "listens on every interface of this host, port 29500, for the others to reach" in two
    assert "as host0" in two
    assert "it asks for no password" in two
    assert "listens on 127.0.0.1, port 1234;" in said(
        nnodes=2, master_addr="127.0.0.1", master_port=1234
    )
    assert said(nnodes=2, node_rank=1, master_addr="host0") == ""


def test_the_grace_leaves_room_within_five_seconds() -> None:
    assert launcher.GRACE_S + 1 < 5

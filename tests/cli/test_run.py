"""meshdist run as a user types it: what ranks see, and what is left when something goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshdist.cli import run as run_command
from tests.load import is_within

ROOT = Path(__file__).resolve().parents[2]
RUN = [sys.executable, "-m", "meshdist", "run"]
ENV = dict(os.environ, PYTHONPATH=str(ROOT))

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a script whose ranks can say(...): one line of JSON, whole."""
    opening = (
        "import json, os, signal, subprocess, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def say(*what): os.write(1, (json.dumps(what) + '\\n').encode())\n"
    )

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(opening + text)
        return str(path)

    return write


def run(*words: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *map(str, words)], capture_output=True, text=True, timeout=60, cwd=cwd, env=ENV | env
    )


def said(done: subprocess.CompletedProcess[str]) -> list[list[object]]:
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(json.loads(line) for line in done.stdout.splitlines())


# -- the command --------------------------------------------------------------------------------


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from meshdist.cli.main import main\n"
        "try:\n"
        "    main(['run', '--help'])\n"
        "except SystemExit as leaving:\n"
        "    assert leaving.code == 0\n"
        "heavy = {'torch', 'numpy', 'meshdist.errors'} & set(sys.modules)\n"
        "import time\n"
        "print(time.process_time(), file=sys.stderr)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        # Processor time from the start of the process: what else this machine does does not count.
        seconds.append(float(done.stderr))
        for flag in ("-n", "--nproc-per-node", "--node-rank", "--prefix", "--no-python", "-m"):
            assert f"{flag} " in done.stdout or f"{flag}," in done.stdout
    assert min(seconds) < 0.3


def test_every_rank_is_told_its_place_and_the_same_job(script: Script) -> None:
    path = script(
        "names = ['WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR',\n"
        "         'OMP_NUM_THREADS', 'MINE']\n"
        "say(rank, [os.environ.get(n) for n in names], sys.argv[1:],\n"
        "    os.environ['MESHDIST_RUN_ID'], os.environ['MASTER_PORT'],\n"
        "    'MESHDIST_LISTEN_FD' in os.environ, 'TORCHELASTIC_RUN_ID' in os.environ)\n"
    )
    env = {"MINE": "kept", "OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "outer", "RANK": "9"}
    lines = said(run("-n", 3, path, "-n", "7", "--help", "--", "x", **env))
    for rank, line in enumerate(lines):
        assert line[:3] == [
            rank,
            ["3", str(rank), "3", "0", "127.0.0.1", "2", "kept"],
            ["-n", "7", "--help", "--", "x"],
        ]
        assert line[5:] == [rank == 0, False]
    run_ids, ports = {line[3] for line in lines}, {line[4] for line in lines}
    assert len(lines) == 3
    assert len(run_ids) == len(ports) == 1
    assert len(bytes.fromhex(str(run_ids.pop()))) >= 8


def test_other_ways_to_name_the_program(script: Script, tmp_path: Path) -> None:
    path = script("say(rank, sys.argv[1:])")
    expected = [[0, ["a", "-m"]], [1, ["a", "-m"]]]
    assert said(run("--nproc-per-node", 2, path, "a", "-m")) == expected
    assert said(run("--nproc_per_node=2", "--", path, "a", "-m")) == expected
    assert said(run("-n", 2, "-m", "script", "a", "-m", cwd=tmp_path)) == expected
    assert said(run("-n2", "--no-python", sys.executable, path, "a", "-m")) == expected


def test_output_is_prefixed_on_request(script: Script) -> None:
    done = run("-n", 2, "--prefix", script("print('one\\ntwo'); print('bad', file=sys.stderr)"))
    lines = [f"[rank {rank}] {word}" for rank in range(2) for word in ("one", "two")]
    assert sorted(done.stdout.splitlines()) == lines
    assert sorted(done.stderr.splitlines()) == ["[rank 0] bad", "[rank 1] bad"]


@pytest.mark.parametrize("prefix", [[], ["--prefix"]])
def test_output_is_shown_while_the_rank_goes_on(script: Script, prefix: list[str]) -> None:
    path = script("print('begun'); print('here', file=sys.stderr); sys.stdin.readline()")
    with start("-n", 1, *prefix, path) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        assert job.stdout.readline().endswith("begun\n")
        assert job.stderr.readline().endswith("here\n")
        job.communicate("\n", timeout=20)
        assert job.returncode == 0


def test_a_rank_may_end_early(script: Script) -> None:
    assert said(run("-n", 2, script("time.sleep(0.4 * rank); say(rank)"))) == [[0], [1]]


def test_launchers_on_two_hosts_make_one_job(script: Script) -> None:
    path = script("say(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'],\n"
                  "    os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])")  # fmt: skip
    lines = []
    for node, heard in [(0, ["port 29500", "host0"]), (1, [])]:
        words = ["-n", 2, "--nnodes", 2, "--node-rank", node, "--master-addr", "host0", path]
        done = run(*words)
        assert done.returncode == 0
        assert all(word in done.stderr for word in heard)
        assert len(done.stderr.splitlines()) == (node == 0)
        lines += [json.loads(line) for line in done.stdout.splitlines()]
    place = ["host0", "29500"]
    assert sorted(lines) == [[rank, "4", str(rank // 2), *place] for rank in range(4)]


def test_a_port_can_be_named_on_one_host(script: Script) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = script("say(os.environ['MASTER_PORT'])")
    assert said(run("--master-port", port, path)) == [[str(port)]]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--master-port", port, path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"meshdist run: rank 0 cannot listen on 127.0.0.1, port {port}:")


# -- failures -----------------------------------------------------------------------------------


def test_the_failing_ranks_traceback_comes_last_with_its_exit_code(script: Script) -> None:
    path = script(
        "print('noise of rank', rank, file=sys.stderr)\n"
        "if rank != 1:\n"
        "    signal.signal(15, lambda *_: sys.exit('rank goes, too'))\n"
        "    time.sleep(60)\n"
        "time.sleep(0.3)\n"
        "raise ValueError('rank one is unwell')\n"
    )
    done = run("-n", 3, path)
    assert done.returncode == 1
    *before, header, again = done.stderr.partition("meshdist: rank 1 (pid ")
    assert before[0].count("rank goes, too") == 2
    assert before[0].count("noise of rank") == 3
    header, _, tail = again.partition("\n")
    assert header.endswith("stopped 2 other rank(s) on this host. The end of its stderr:")
    assert "failed with exit code 1" in header
    assert tail.splitlines()[0] == "Traceback (most recent call last):"
    assert tail.splitlines()[-1] == "ValueError: rank one is unwell"


@pytest.mark.parametrize(
    ("death", "code", "text"),
    [
        ("sys.exit(3)", 3, "failed with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was ended by SIGKILL"),
    ],
)
def test_exit_codes_and_signals_by_name(script: Script, death: str, code: int, text: str) -> None:
    done = run("-n", 2, script(f"if rank == 0: {death}\ntime.sleep(60)"))
    assert done.returncode == code
    assert text in done.stderr.splitlines()[-1]


# -- nothing is left behind ---------------------------------------------------------------------

# Each rank starts one child in its own session and one outside it, and tells all three numbers.
FAMILY = """
sleep = [sys.executable, "-S", "-c",
         "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(60)"]
children = [subprocess.Popen(sleep, start_new_session=alone) for alone in (False, True)]
say(os.getpid(), *[child.pid for child in children])
"""


@contextlib.contextmanager
def start(*words: object) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        [*RUN, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
        job.communicate(timeout=20)


def numbers(job: subprocess.Popen[str], nprocs: int) -> list[int]:
    assert job.stdout is not None
    return [pid for _ in range(nprocs) for pid in json.loads(job.stdout.readline())]


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_a_deaf_rank_and_all_grandchildren_end_within_five_seconds(script: Script) -> None:
    path = script(
        "signal.signal(15, signal.SIG_IGN)\n" + FAMILY + "if rank == 0:\n"
        "    sys.stdin.readline()\n"
        "    sys.exit(4)\n"
        "time.sleep(60)\n"
    )
    with start("-n", 2, path) as job:
        pids = numbers(job, 2)
        assert alive(pids) == pids
        begin = time.monotonic()
        job.communicate("\n", timeout=30)
        assert is_within(time.monotonic() - begin, 5)
        assert job.returncode == 4
        assert alive(pids) == []


@linux
def test_what_a_rank_left_running_ends_with_the_job(script: Script) -> None:
    begin = time.monotonic()
    done = run("-n", 2, script(FAMILY))
    assert is_within(time.monotonic() - begin, 5)
    pids = [pid for line in said(done) for pid in line]
    assert len(pids) == 6
    assert alive([int(str(pid)) for pid in pids]) == []


@linux
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_to_the_launcher_ends_all(
    script: Script, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    path = script(
        "def tidy_up(*_):\n"
        f"    open(f'{tmp_path}/{{rank}}', 'w').close()\n"
        "    sys.exit(0)\n"
        f"signal.signal({int(number)}, tidy_up)\n" + FAMILY + "time.sleep(60)\n"
    )
    with start("-n", 2, path) as job:
        pids = numbers(job, 2)
        job.send_signal(number)
        _, errors = job.communicate(timeout=20)
        how = "interrupted" if number == signal.SIGINT else number.name
        line, *reports = [line for line in errors.splitlines() if line.startswith("meshdist:")]
        assert line.startswith(f"meshdist: {how}; stopping 2 rank(s) on this host")
        assert all(line.endswith(" reported:") for line in reports)  # of a child that still starts
        assert job.returncode == code
        assert alive(pids) == []
    assert [(tmp_path / str(rank)).exists() for rank in range(2)] == [True, True]


@linux
def test_it_says_which_rank_it_killed(script: Script) -> None:
    path = script("if rank: signal.signal(15, signal.SIG_IGN)\nsay(rank)\ntime.sleep(60)\n")
    with start("-n", 2, "--shutdown-timeout", 0.5, path) as job:
        numbers(job, 2)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=20)
    wanted = "meshdist: killed rank 1, still running after the signal; pass a longer"
    assert wanted in errors
    assert "rank 0" not in errors


@linux
def test_a_second_interrupt_does_not_wait(script: Script) -> None:
    deaf = "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\n"
    with start("-n", 1, script(deaf + FAMILY + "time.sleep(60)")) as job:
        pids = numbers(job, 1)
        begin = time.monotonic()
        job.send_signal(signal.SIGINT)
        time.sleep(0.2)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=20)
        assert is_within(time.monotonic() - begin, 1.8)
        assert (job.returncode, alive(pids)) == (130, [])


@linux
def test_a_killed_launcher_leaves_nothing(script: Script) -> None:
    with start("-n", 2, script(FAMILY + "time.sleep(60)")) as job:
        pids = numbers(job, 2)
        job.kill()
        job.wait(10)
        deadline = time.monotonic() + 5
        while alive(pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert alive(pids) == []


# -- the store ----------------------------------------------------------------------------------


def test_rank_0_inherits_the_socket_of_the_master_port(script: Script) -> None:
    path = script(
        "import socket\n"
        "address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if rank == 0:\n"
        "    with socket.socket(fileno=int(os.environ['MESHDIST_LISTEN_FD'])) as server:\n"
        "        assert server.getsockname() == address\n"
        "        server.listen()\n"
        "        with server.accept()[0] as peer:\n"
        "            say(peer.recv(5).decode())\n"
        "else:\n"
        "    deadline = time.monotonic() + 10\n"
        "    while time.monotonic() < deadline:\n"
        "        with socket.socket() as client:\n"
        "            if client.connect_ex(address) == 0:\n"
        "                client.sendall(b'hello')\n"
        "                break\n"
        "        time.sleep(0.01)\n"
    )
    assert said(run("-n", 2, path)) == [["hello"]]


def test_the_port_rejects_connections_when_rank_0_has_gone(script: Script) -> None:
    path = script(
        "import socket\n"
        "def is_open():\n"
        "    with socket.socket() as client:\n"
        "        return client.connect_ex(('127.0.0.1', int(os.environ['MASTER_PORT']))) == 0\n"
        "def wait_until(state):\n"
        "    deadline = time.monotonic() + 10\n"
        "    while is_open() != state and time.monotonic() < deadline:\n"
        "        time.sleep(0.01)\n"
        "    say(is_open() == state)\n"
        "if rank == 0:\n"
        "    server = socket.socket(fileno=int(os.environ['MESHDIST_LISTEN_FD']))\n"
        "    server.listen()\n"
        "    for _ in range(2):  # the other has seen it open, and has said so\n"
        "        server.accept()\n"
        "    os._exit(0)\n"
        "wait_until(True)\n"
        "wait_until(False)\n"
    )
    assert said(run("-n", 2, path)) == [[True], [True]]


TORCH = """
import warnings
import torch
import torch.distributed as dist
port = int(os.environ["MASTER_PORT"])
store = None
if "given" in sys.argv:
    listener = int(os.environ.get("MESHDIST_LISTEN_FD", -1)) if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, master_listen_fd=listener)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
else:
    dist.init_process_group("gloo")
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
listening = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(table):
        words = line.split()
        if words[1].endswith(f":{port:04X}") and words[3] == "0A":
            listening.add(words[1].split(":")[0])
say(rank, x.item(), sorted(listening))
dist.barrier()
dist.destroy_process_group()
"""


@linux
@pytest.mark.parametrize("kind", ["plain", pytest.param("given", marks=pytest.mark.soak)])
def test_torch_programs_find_each_other(script: Script, kind: str) -> None:
    done = run("-n", 2, script(TORCH), kind)
    lines = said(done)
    assert [line[:2] for line in lines] == [[0, 3.0], [1, 3.0]]
    if kind == "given":
        # 127.0.0.1 as the kernel writes it: on one host nothing listens beyond loopback.
        assert lines[0][2] == ["0100007F"]


# -- mpiexec as the launcher ----------------------------------------------------------------------

BY_MPI = """
import os, sys
import meshdist as md
md.init_process_group("mpi")
line = f"{md.get_rank()} {md.get_world_size()} {sys.argv[1:]} {os.environ.get('MARK')}\\n"
os.write(1, line.encode())
md.barrier()
md.destroy_process_group()
sys.exit(3 if "fail" in sys.argv else 0)
"""


def run_by_mpi(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(BY_MPI)
    command = [*RUN, "--launcher", "mpi", *(path if word == "SCRIPT" else word for word in words)]
    env = {k: v for k, v in ENV.items() if not k.startswith(("OMPI_", "PMI"))}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=100, env=env
    )


@pytest.mark.soak
@pytest.mark.mpi
def test_mpiexec_starts_the_ranks_more_than_cores_too(tmp_path: Path) -> None:
    done = run_by_mpi(tmp_path, "-n", 3, "--mpi-args=-x MARK=here", "SCRIPT", "--steps", "4")
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"{rank} 3 ['--steps', '4'] here" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected


@pytest.mark.mpi
@pytest.mark.soak
def test_mpiexecs_exit_code_is_the_commands(tmp_path: Path) -> None:
    assert run_by_mpi(tmp_path, "-n", 2, "SCRIPT", "fail").returncode == 3


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        (["--nnodes", 2], "with --launcher mpi, mpiexec controls the placement, hosts and output"),
        (
            ["--log-dir", "x"],
            "with --launcher mpi, mpiexec controls the placement, hosts and output",
        ),
        (["--prefix"], "with --launcher mpi, mpiexec controls the placement, hosts and output"),
        (["-n", 0], "cannot start 0 processes"),
    ],
)
def test_what_mpiexec_does_by_itself_is_rejected(
    tmp_path: Path, words: list[object], summary: str
) -> None:
    done = run_by_mpi(tmp_path, *words, "SCRIPT")
    assert done.returncode == 2
    assert done.stderr.startswith(f"meshdist run: {summary}")


def test_options_of_mpiexec_stand_before_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(run_command, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(os, "execve", lambda path, words, environment: started.append(words))
    run_command.main(["--launcher", "mpi", "-n", "2", "--mpi-args=--host a,b", __file__, "-n", "5"])
    program = [sys.executable, "-u", __file__, "-n", "5"]
    assert started == [["mpiexec", "-n", "2", "--host", "a,b", *program]]


def test_arguments_for_mpiexec_without_it(tmp_path: Path) -> None:
    done = run("--mpi-args=--bind-to core", "script.py")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "meshdist run: --mpi-args requires --launcher mpi",
        "  fix:      add --launcher mpi, or remove --mpi-args",
    ]


def test_an_open_quotation_in_the_arguments_for_mpiexec(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("pass")
    assert run_command.main(["--launcher", "mpi", "--mpi-args=--host 'a", str(path)]) == 2
    told = capsys.readouterr().err
    assert "meshdist run: cannot parse --mpi-args: No closing quotation" in told
    assert "  found:    --host 'a" in told


def test_without_an_mpiexec(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_command, "find_mpiexec", lambda: None)
    assert run_command.main(["--launcher", "mpi", "-n", "2", script("")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "meshdist run: mpiexec was not found",
        f"  where:    next to {sys.executable}, and on the PATH",
        "  expected: mpiexec of Open MPI or MPICH",
        '  fix:      pip install "meshdist[mpi]", which installs Open MPI',
    ]


@linux
def test_ctrl_c_shows_tracebacks_of_ranks_without_a_world_once(script: Script) -> None:
    # Whenever the signal comes, it is taken at one place, so that the tracebacks are equal.
    path = script(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [2])\n"
        "say(rank)\n"
        "signal.sigwait([2])\n"
        "raise KeyboardInterrupt\n"
    )
    with start("-n", 3, path) as job:
        assert job.stdout is not None
        for _ in range(3):
            job.stdout.readline()
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=20)
    first, title, *report = errors.splitlines()
    assert first == (
        "meshdist: interrupted; stopping 3 rank(s) on this host (press Ctrl-C again to kill "
        "them immediately)"
    )
    assert title == "meshdist: ranks 0-2 reported:"
    assert report[0] == "Traceback (most recent call last):"
    assert report.count("KeyboardInterrupt") == 1 and report[-1] == "KeyboardInterrupt"
    assert job.returncode == 130


def test_the_output_of_chosen_ranks_is_shown(script: Script) -> None:
    path = script("say(rank); print('bad', rank, file=sys.stderr)")
    done = run("-n", 4, "--ranks", "0,3", path)
    assert sorted(done.stdout.splitlines()) == ["[0]", "[3]"]
    assert sorted(done.stderr.splitlines()) == ["bad 0", "bad 3"]


@pytest.mark.parametrize("launcher", ["meshdist", "mpi"])
@pytest.mark.parametrize("value", ["LOUD", ""])
def test_a_wrong_debug_level(
    value: str,
    launcher: str,
    script: Script,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", value)
    assert run_command.main(["-n", "2", "--launcher", launcher, script("")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"meshdist run: {value!r} is not a debug level",
        "  where:    the environment variable TORCH_DISTRIBUTED_DEBUG",
        "  expected: OFF, INFO or DETAIL",
        "  fix:      set it to one of these values, or unset it, which means OFF",
    ]


@pytest.mark.parametrize(
    ("flag", "summary"),
    [
        ("--ranks=0-3", "'0-3' is not a list of ranks"),
        ("--terminal=first", "'first' is not a rank"),
        ("--ranks=0,4", "rank 4 does not exist in a job of 4 rank(s)"),
        ("--terminal=4", "rank 4 does not exist in a job of 4 rank(s)"),
        ("--local-ranks-filter=0,4", "local rank 4 does not exist on a host of 4 rank(s)"),
        ("--redirects=0:1,5:3", "local rank 5 does not exist on a host of 4 rank(s)"),
        ("--tee=4:3", "local rank 4 does not exist on a host of 4 rank(s)"),
    ],
)
def test_wrong_ranks(
    flag: str, summary: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command.main(["-n", "4", flag, script("")]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"meshdist run: {summary}"
    assert rest[0].endswith(flag.split("=")[0])

"""The address of the store among the processes of one mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest

import meshdist as md
from meshdist.bootstrap import mpi_library
from meshdist.bootstrap.launch_environment import LaunchEnvironment
from meshdist.bootstrap.mpi_library import directory_of_mpiexec
from tests.inner import Deadline, wait_until

ROOT = Path(__file__).resolve().parents[2]
LONG = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def ranks(size: int) -> list[LaunchEnvironment]:
    return [LaunchEnvironment("Hydra", rank, size, is_one_host=True) for rank in range(size)]


def test_the_ranks_of_one_mpiexec_meet_in_one_private_directory(tmp_path: Path) -> None:
    first, second = ranks(2)
    folder = Path(directory_of_mpiexec(first))
    assert str(folder) == directory_of_mpiexec(second)
    assert list(tmp_path.iterdir()) == [folder]
    assert folder.name.startswith(f"meshdist-{os.getuid()}-{os.getppid()}-")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_directory_goes_with_the_launching_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as launcher:
        monkeypatch.setattr(mpi_library, "launching_process", lambda: launcher.pid)
        folder = Path(directory_of_mpiexec(ranks(1)[0]))
        (folder / "store").write_text("")
        time.sleep(0.3)
        assert folder.exists()
        launcher.kill()
    assert wait_until(lambda: not folder.exists(), Deadline(20.0))
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_a_launching_process_start_no_remover(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks whose mpiexec has died are children of process 1, which no remover should wait for."""
    monkeypatch.setattr(mpi_library, "launching_process", lambda: 1)
    monkeypatch.setattr(mpi_library, "remove_after", lambda *_: pytest.fail("a process more"))
    first, second = ranks(2)
    assert directory_of_mpiexec(first) == directory_of_mpiexec(second)


def test_a_directory_that_others_may_enter_is_rejected() -> None:
    folder = Path(directory_of_mpiexec(ranks(2)[0]))
    folder.chmod(0o755)
    with pytest.raises(
        md.RendezvousError, match="is not a private directory of this user"
    ) as caught:
        directory_of_mpiexec(ranks(2)[1])
    assert "mode 0755" in str(caught.value)


def test_a_link_in_its_place_is_rejected(tmp_path: Path) -> None:
    folder = Path(directory_of_mpiexec(ranks(2)[0]))
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    with pytest.raises(md.RendezvousError, match="is not a private directory of this user"):
        directory_of_mpiexec(ranks(2)[1])


# -- with mpiexec -------------------------------------------------------------------------------

MPIEXEC = shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")
PROGRAM = """
import sys, torch
import meshdist as md
from meshdist.bootstrap.world import get_world
for _ in range(2):
    md.init_process_group("gloo")
    x = torch.tensor([md.get_rank() + 1])
    md.all_reduce(x)
    world = get_world()
    line = [md.get_rank(), md.get_world_size(), x.item(), world.local_rank, world.local_size]
    origin = world.origin
    md.destroy_process_group()
print(*line, origin, "mpi4py.MPI" in sys.modules, flush=True)
"""


def run_under_mpiexec(
    program: str, folder: Path, *, is_one_host: bool = True, has_mpi4py: bool = True
) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT)]
    if not has_mpi4py:
        (folder / "mpi4py").mkdir()
        (folder / "mpi4py" / "__init__.py").write_text("raise ImportError('blocked by a test')\n")
        paths.insert(0, str(folder))
    assert MPIEXEC is not None
    # What tells Open MPI's number of ranks on this host, changed behind its back.
    disguise = [] if is_one_host else ["env", "OMPI_COMM_WORLD_LOCAL_SIZE=1"]
    options = ["-n", "2", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    return subprocess.run(
        [MPIEXEC, *options, *disguise, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(folder),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        check=False,
    )


@pytest.mark.soak
@pytest.mark.mpi
@pytest.mark.parametrize("has_mpi4py", [True, False])
def test_mpiexec_on_one_host_leaves_mpi_alone(tmp_path: Path, has_mpi4py: bool) -> None:
    done = run_under_mpiexec(PROGRAM, tmp_path, has_mpi4py=has_mpi4py)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} 2 3 {rank} 2 env://, started by Open MPI False" for rank in range(2)
    ]
    assert wait_until(lambda: not list(tmp_path.glob("*meshdist*")), Deadline(20.0))


@pytest.mark.mpi
@pytest.mark.soak
def test_mpiexec_across_hosts_goes_by_mpi4py(tmp_path: Path) -> None:
    done = run_under_mpiexec(PROGRAM, tmp_path, is_one_host=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank} 2 3 {rank} 2 env://, started by Open MPI True" for rank in range(2)
    ]


@pytest.mark.mpi
@pytest.mark.soak
def test_across_hosts_without_mpi4py_is_an_error(tmp_path: Path) -> None:
    done = run_under_mpiexec(PROGRAM, tmp_path, is_one_host=False, has_mpi4py=False)
    assert done.returncode != 0
    assert (
        "cannot find rank 0: the ranks may run on several hosts, and mpi4py is not usable"
        in done.stderr
    )
    assert "mpi4py cannot load an MPI library: blocked by a test" in done.stderr
    assert "; or set MASTER_ADDR and MASTER_PORT for all ranks" in done.stderr


@pytest.mark.mpi
def test_a_job_that_ends_before_all_have_joined_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        "import os, sys, time, meshdist as md\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        f"    while not any('meshdist' in name for name in os.listdir({str(tmp_path)!r})):\n"
        "        time.sleep(0.01)\n"
        "    sys.exit('rank 1 has had enough')\n"
        "md.init_process_group('gloo')\n"
    )
    done = run_under_mpiexec(program, tmp_path)
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    deadline = time.monotonic() + 30
    while list(tmp_path.glob("meshdist*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir() if "meshdist" in path.name] == []


@pytest.mark.mpi
@pytest.mark.soak
@pytest.mark.parametrize("backend", ["mpi", "shm"])
def test_a_forked_child_may_leave_by_exit(tmp_path: Path, backend: str) -> None:
    program = (
        "import os, sys, torch, meshdist as md\n"
        f"md.init_process_group({backend!r})\n"
        "backend = {0: md.AxisOptions(backend='mpi')}\n"
        "mesh = md.init_device_mesh('cpu', (2,), axis_options=backend)\n"
        "md.all_reduce(torch.ones(1), group=mesh)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(7)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "x = torch.ones(1)\n"
        "md.all_reduce(x, group=mesh)\n"
        "os.write(1, f'{code} {x.item()}\\n'.encode())\n"
    )
    done = run_under_mpiexec(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["7 2.0", "7 2.0"]


@pytest.mark.soak
@pytest.mark.mpi
def test_an_uncaught_error_ends_the_job_instead_of_waiting_in_finalize(tmp_path: Path) -> None:
    program = PROGRAM + (
        "if line[0] == 1:\n    raise ValueError('by rank one')\nimport time\ntime.sleep(600)\n"
    )
    done = run_under_mpiexec(program, tmp_path, is_one_host=False)
    assert done.returncode != 0
    assert "ValueError: by rank one" in done.stderr

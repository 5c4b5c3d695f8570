"""Ranks that leave, fail or freeze while others need them, above all the one with the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.inner import Deadline, wait_until
from tests.load import is_within
from tests.pool import free_port

SIZE = 3
# Every rank is a process that imports torch, and rank 0 serves the store on both wires alike.
BACKENDS = ["shm", pytest.param("gloo", marks=pytest.mark.soak)]
OPENING = """
import os, signal, sys, time
from datetime import timedelta
import torch
import meshdist as md

rank = int(sys.argv[1])

def init():
    md.init_process_group(
        {backend!r}, {url!r}, timeout=timedelta(seconds={timeout_s}), world_size={size}, rank=rank
    )

def told(call):
    begin = time.monotonic()
    try:
        call()
    except md.MeshdistError as error:
        text = f"{{type(error).__name__}}: {{error}}"
        print(text, f"after {{time.monotonic() - begin:.1f}} s", sep=chr(10), flush=True)

md.init_process_group, md.all_reduce  # imports what they need
print("ready", flush=True)
sys.stdin.readline()
init()
"""


@contextmanager
def started(
    body: str, url: str, backend: str, timeout_s: float = 30.0
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process per rank that begins a world and executes ``body``.

    They begin when all are ready, so that a short timeout is not spent on imports.
    """
    opening = OPENING.format(backend=backend, url=url, timeout_s=timeout_s, size=SIZE)
    code = opening + textwrap.dedent(body)
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What each of them writes to its standard output until it ends, which it does with code 0."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        found.append(out)
    return found


def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


CALLS = {
    "init": "",
    "group": "md.new_group()",
    "two groups": "md.new_group()\nmd.new_group()",
    "mesh": "md.init_device_mesh('cpu', (3,))",
    "monitored barrier": "md.monitored_barrier()",
    "again": "md.destroy_process_group()\ninit()",
}


OFTEN = ("mesh",)
"""The call of the suite; the others take the same way out."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "call",
    [call if call in OFTEN else pytest.param(call, marks=pytest.mark.soak) for call in CALLS],
)
def test_rank_0_may_end_at_once_when_its_own_call_is_done(call: str, backend: str) -> None:
    body = f"""
if rank:
    time.sleep(0.2 * rank)
{CALLS[call]}
if rank == 0:
    os._exit(0)
print("went on", flush=True)
"""
    with started(body, address(), backend) as processes:
        assert outputs(processes)[1:] == ["went on\n"] * 2


@pytest.mark.parametrize(
    "ending", [pytest.param("", marks=pytest.mark.soak), "md.destroy_process_group()"]
)
def test_a_normal_end_of_rank_0_leaves_the_others_what_they_need(ending: str) -> None:
    body = f"""
if rank:
    time.sleep(0.5)
    group = md.new_group([1, 2])
    x = torch.ones(2)
    md.all_reduce(x, group=group)
    print(x.tolist(), flush=True)
{ending}
"""
    with started(body, address(), "gloo") as processes:
        assert outputs(processes)[1:] == ["[2.0, 2.0]\n"] * 2


def test_rank_0_waits_at_its_end_no_longer_than_its_timeout() -> None:
    body = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    with started(body, address(), "gloo", timeout_s=2.0) as processes:
        for rank in (0, 2):
            assert processes[rank].wait(60) == 0


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_frozen_rank_0_ends_no_wait_late_and_is_named(backend: str) -> None:
    body = """
if rank == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
told(lambda: md.all_reduce(torch.ones(3)))
told(lambda: md.new_group(timeout=timedelta(seconds=2)))
told(lambda: md.monitored_barrier(timeout=timedelta(seconds=2)))
"""
    with started(body, address(), backend, timeout_s=2.0) as processes:
        for process in processes[1:]:
            out, err = process.communicate(timeout=100)
            seconds = [float(line.split()[1]) for line in out.splitlines() if line[:6] == "after "]
            assert len(seconds) == 3, err
            assert is_within(sum(seconds), 10.0), out  # together: their waits do not add up
            assert out.count("rank 0, which serves the store, does not answer") == 3, out
            assert "rank 0: arrived" not in out


FAILURES = {
    "raises": ("raise ValueError('no data')", "rank 0 ended by ValueError: no data (<string>:"),
    "ends": ("", "rank 0 ended without an exception"),
    "leaves": ("md.destroy_process_group()", "rank 0 destroyed its process group"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "how", ["raises", *(pytest.param(how, marks=pytest.mark.soak) for how in ("leaves", "ends"))]
)
def test_the_others_learn_how_rank_0_has_left(how: str, backend: str) -> None:
    body = f"""
if rank == 0:
    time.sleep(0.3)
    {FAILURES[how][0] or "sys.exit()"}
else:
    told(lambda: md.all_reduce(torch.ones(3)))
"""
    with started(body, address(), backend) as processes:
        for process in processes[1:]:
            out, err = process.communicate(timeout=100)
            assert FAILURES[how][1] in out, (out, err)


def test_ranks_of_one_launch_meet_in_a_file_that_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, stat, sys\n"
        "import meshdist as md\n"
        "folder = os.environ['MESHDIST_DIRECTORY']\n"
        "for _ in range(3):\n"
        "    md.init_process_group()\n"
        "    md.new_group()\n"
        "    md.destroy_process_group()\n"
        "assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700\n"
        "sys.stdout.write(folder + '\\n')\n"  # one write: print makes two, and lines may mix
    )
    command = [sys.executable, "-m", "meshdist", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split()
    assert first == second
    assert not os.path.exists(first)


def test_a_killed_launcher_leaves_no_directory(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, time\nprint(os.environ['MESHDIST_DIRECTORY'], flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-m", "meshdist", "run", "-n", "1", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = launcher.stdout.readline().strip()
        assert os.path.isdir(folder)
        launcher.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not os.path.exists(folder), Deadline(30.0))

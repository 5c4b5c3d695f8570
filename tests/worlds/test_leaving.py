"""Ranks that leave, fail or freeze while others need them, above all the one with the store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.inner import Deadline, wait_until
from tests.load import is_within
from tests.pool import Pool, free_port

SIZE = 3
BACKENDS = ["shm", pytest.param("gloo", marks=pytest.mark.soak)]
OPENING = """
import os, signal, subprocess, sys, time
from datetime import timedelta
import torch
import meshdist as md

rank = int(os.environ["PLACE"])

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

def freeze(frozen):
    "Stop the process of a rank, and kill it once those of the others have ended."
    pids = [None] * {size}
    md.all_gather_object(pids, os.getpid())
    if rank == frozen:
        alive = " || ".join(f"kill -0 {{pid}}" for pid in pids if pid != os.getpid())
        loop = f"while {{alive}}; do sleep 0.1; done 2> /dev/null; kill -9 {{os.getpid()}}"
        subprocess.Popen(["sh", "-c", loop])
        os.kill(os.getpid(), signal.SIGSTOP)

init()
"""


def ended(
    pool: Pool, body: str, url: str, backend: str, timeout_s: float = 30.0
) -> list[subprocess.CompletedProcess[str]]:
    """How each rank of a world ends that executes ``body``."""
    opening = OPENING.format(backend=backend, url=url, timeout_s=timeout_s, size=SIZE)
    return pool.start(
        opening + textwrap.dedent(body),
        [{"PLACE": str(rank)} for rank in range(SIZE)],
        timeout_s=100.0,
    )


def outputs(pool: Pool, body: str, url: str, backend: str, timeout_s: float = 30.0) -> list[str]:
    """What each rank writes to its standard output until it ends, which it does with code 0."""
    found = ended(pool, body, url, backend, timeout_s)
    assert [done.returncode for done in found] == [0] * SIZE, found
    return [done.stdout for done in found]


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
def test_rank_0_may_end_at_once_when_its_own_call_is_done(
    pool: Pool, call: str, backend: str
) -> None:
    body = f"""
if rank:
    time.sleep(0.2 * rank)
{CALLS[call]}
if rank == 0:
    os._exit(0)
print("went on", flush=True)
"""
    assert outputs(pool, body, address(), backend)[1:] == ["went on\n"] * 2


@pytest.mark.parametrize(
    "ending", [pytest.param("", marks=pytest.mark.soak), "md.destroy_process_group()"]
)
def test_a_normal_end_of_rank_0_leaves_the_others_what_they_need(pool: Pool, ending: str) -> None:
    body = f"""
if rank:
    time.sleep(0.5)
    group = md.new_group([1, 2])
    x = torch.ones(2)
    md.all_reduce(x, group=group)
    print(x.tolist(), flush=True)
{ending}
"""
    assert outputs(pool, body, address(), "gloo")[1:] == ["[2.0, 2.0]\n"] * 2


def test_rank_0_waits_at_its_end_no_longer_than_its_timeout(pool: Pool) -> None:
    found = ended(pool, "freeze(1)", address(), "gloo", timeout_s=2.0)
    assert [done.returncode for done in found] == [0, -signal.SIGKILL, 0], found


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_frozen_rank_0_ends_no_wait_late_and_is_named(pool: Pool, backend: str) -> None:
    body = """
freeze(0)
told(lambda: md.all_reduce(torch.ones(3)))
told(lambda: md.new_group(timeout=timedelta(seconds=2)))
told(lambda: md.monitored_barrier(timeout=timedelta(seconds=2)))
"""
    for done in ended(pool, body, address(), backend, timeout_s=2.0)[1:]:
        out = done.stdout
        seconds = [float(line.split()[1]) for line in out.splitlines() if line[:6] == "after "]
        assert len(seconds) == 3, done.stderr
        assert is_within(sum(seconds), 10.0), out  # together: their waits do not add up
        assert out.count("rank 0, which hosts the store, does not answer") == 3, out
        assert "rank 0: reached" not in out


FAILURES = {
    "raises": (
        "raise ValueError('no data')",
        r"rank 0 ended by ValueError: no data \(\S+program\.py:\d+\)",
    ),
    "ends": ("", "rank 0 ended without an exception"),
    "leaves": ("md.destroy_process_group()", "rank 0 destroyed its process group"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "how", ["raises", *(pytest.param(how, marks=pytest.mark.soak) for how in ("leaves", "ends"))]
)
def test_the_others_learn_how_rank_0_has_left(pool: Pool, how: str, backend: str) -> None:
    body = f"""
if rank == 0:
    time.sleep(0.3)
    {FAILURES[how][0] or "sys.exit()"}
else:
    told(lambda: md.all_reduce(torch.ones(3)))
"""
    for done in ended(pool, body, address(), backend)[1:]:
        assert re.search(FAILURES[how][1], done.stdout), done


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

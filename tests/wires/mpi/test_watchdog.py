"""A process that stays in a blocking call of MPI's, since another was stopped there, ends."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks._mpi import environment, job_command
from tests.load import is_within

# So much data that the rank is still in MPI's call when it is stopped. Complex numbers take the
# way of Python.
STOPPED = """
import os, signal, threading, time
from datetime import timedelta
import torch
import meshdist as md
from meshdist.wires.mpi import arrivals, opening

md.init_process_group("mpi", timeout=timedelta(seconds=2))
pids = [None, None]
md.all_gather_object(pids, os.getpid())


def stop() -> None:
    (group,) = opening._watched
    theirs = group.others[0]
    for is_inside in (False, True):  # the moment at which it goes in
        while bool(theirs[arrivals._INSIDE]) is not is_inside:
            time.sleep(0.0001)
    os.kill(pids[1], signal.SIGSTOP)


if md.get_rank() == 0:
    threading.Timer(1.0, stop).start()
x = torch.zeros(32 << 20, dtype=torch.{dtype})
while True:
    md.all_reduce(x)
"""


STOPPED_IN_OPENING = """
import os, signal
from datetime import timedelta
import meshdist as md
from meshdist.wires.mpi import opening

md.init_process_group("mpi", timeout=timedelta(seconds=2))
if md.get_rank() == 1:
    opening._check = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
md.barrier(md.new_group([0, 1], timeout=timedelta(seconds=2)))
"""


STOPPED_IN_START = """
import os, signal
from datetime import timedelta
import meshdist as md
from meshdist.wires.mpi import opening

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    opening.start_mpi = lambda: os.kill(os.getpid(), signal.SIGSTOP)
md.init_process_group("mpi", timeout=timedelta(seconds=6))
"""


def run(folder: Path, text: str) -> str:
    """What two ranks write to stderr until the job is ended."""
    program = folder / "program.py"
    program.write_text(text)
    begin = time.monotonic()
    done = subprocess.run(
        [*job_command(2), str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(TMPDIR=str(folder)),
        check=False,
    )
    assert is_within(time.monotonic() - begin, 30)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.soak
def test_a_rank_that_is_stopped_while_mpi_starts_is_named(tmp_path: Path) -> None:
    told = run(tmp_path, STOPPED_IN_START)
    assert "CollectiveTimeoutError: the world was not opened on wire 'mpi' within 6 s\n" in told
    assert re.search(r"  found:    rank 1, process \d+ on \S+, is stopped\n", told)


@pytest.mark.soak
def test_a_rank_that_is_stopped_while_a_group_opens_is_named(tmp_path: Path) -> None:
    told = run(tmp_path, STOPPED_IN_OPENING)
    assert (
        "CollectiveTimeoutError: group of ranks 0-1 was not opened on wire 'mpi' within 2 s\n"
        "  where:    rank 0, among ranks 0-1\n"
    ) in told, told
    assert re.search(r"found:    rank 1, process \d+ on .*, is stopped\n", told), told


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_rank_that_is_stopped_in_mpis_call_is_named(tmp_path: Path, dtype: str) -> None:
    told = run(tmp_path, STOPPED.format(dtype=dtype))
    assert (
        "meshdist: rank 0 ends: nothing else can end the call of MPI's that it is in, and under "
        "MPI the other ranks end with it\nCollectiveTimeoutError: all_reduce on "
    ) in told, told
    assert "was not finished within 2 s" in told
    assert "rank 1: is stopped, by SIGSTOP or a debugger" in told

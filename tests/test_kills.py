"""A rank ends, raises or stops in the middle of a collective over shared memory: all others get
out.

Within a second of the end every rank that waits raises, and names the rank; nothing stays behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import meshdist as md
from tests.load import is_within
from tests.pool import Failure, Pool, places

ROOT = Path(__file__).resolve().parents[1]
SIZE = 3
PROMISE_S = 1.0
SLACK_S = 0.7  # of a busy machine, until a process that could run does
MIB = 1 << 20

# -- collectives, called again and again until one fails -------------------------------------------


def calls(num_bytes: int) -> dict[str, Callable[[], Any]]:
    """Every collective, on tensors of about ``num_bytes``."""
    rank, size = md.get_rank(), md.get_world_size()
    part = num_bytes // 4 // size
    x = torch.ones(part * size)
    mine, parts = x[:part].clone(), list(x.chunk(size))
    more = [torch.zeros(part) for _ in range(size)]

    def message() -> None:
        if rank == 1:
            works = [md.isend(x, 2), md.irecv(torch.empty_like(x), 0)]
            for work in works:
                work.wait()
        elif rank == 0:
            md.send(x, 1)
        else:
            md.recv(x, 1)

    def from_anyone() -> None:
        if rank == 1:
            md.send(x, 0)
            md.send(x, 2)
        else:
            md.recv(x)

    return {
        "all_reduce": lambda: md.all_reduce(x),
        "all_reduce in the background": lambda: md.all_reduce(x, async_op=True).wait(),
        "all_reduce_coalesced": lambda: md.all_reduce_coalesced(parts),
        "reduce": lambda: md.reduce(x, 0),
        "broadcast": lambda: md.broadcast(x, 1),
        "all_gather": lambda: md.all_gather(more, mine),
        "all_gather_into_tensor": lambda: md.all_gather_into_tensor(x, mine),
        "gather": lambda: md.gather(mine, more if rank == 0 else None, 0),
        "scatter": lambda: md.scatter(mine, parts if rank == 1 else None, 1),
        "reduce_scatter": lambda: md.reduce_scatter(mine, parts),
        "reduce_scatter_tensor": lambda: md.reduce_scatter_tensor(mine, x),
        "all_to_all": lambda: md.all_to_all(more, parts),
        "all_to_all_single": lambda: md.all_to_all_single(torch.empty_like(x), x),
        "barrier": lambda: md.barrier(),
        "send and recv": message,
        "recv from anyone": from_anyone,
    }


OPERATIONS = [
    "all_reduce",
    "all_reduce in the background",
    "all_reduce_coalesced",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send and recv",
    "recv from anyone",
]

WAYS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
}


class Enough(Exception):
    """What a rank raises in the middle."""


def until_it_fails(operation: str, num_bytes: int, way: str, after_s: float, note: str) -> Any:
    """Rank 1 ends in its ``way`` while all call; the others' error, and when it came."""
    call = calls(num_bytes)[operation]
    md.barrier()
    if md.get_rank() == 1:

        def end() -> None:
            Path(note).write_text(str(time.monotonic()))
            WAYS[way]()

        if way != "raises":
            threading.Timer(after_s, end).start()
    begin = time.monotonic()
    while time.monotonic() < begin + 30.0:
        if md.get_rank() == 1 and way == "raises" and time.monotonic() > begin + after_s:
            Path(note).write_text(str(time.monotonic()))
            raise Enough
        try:
            call()
        except md.MeshdistError as error:
            return time.monotonic(), type(error).__name__, str(error)
    return None


def judge(found: list[Any], operation: str, note: Path, told: str) -> None:
    ended = float(note.read_text())
    assert isinstance(found[1], Failure)
    for rank in (0, 2):
        assert not isinstance(found[rank], Failure), found[rank].exception
        assert found[rank] is not None, f"rank {rank} went on without rank 1"
        when, kind, text = found[rank]
        assert kind == "BackendError", text
        assert told in text or told.replace("rank 1 ", "rank 1: ") in text  # beside what others say
        assert when - ended < PROMISE_S + SLACK_S, f"rank {rank} needed {when - ended:.2f} s"


def shared_names() -> set[str]:
    """What of ours lies where others can see it; the tests' own folder aside."""
    names = [name for folder in ("/dev/shm", "/tmp") for name in os.listdir(folder)]
    # Of tests that run beside this one; that a launch leaves nothing is tested with it.
    others = ("meshdist-pool", "meshdist-mpi-", "meshdist-launch-", f"meshdist-{os.getuid()}-")
    return {name for name in names if "meshdist" in name and not name.startswith(others)}


def kill_one(
    pool: Pool,
    operation: str,
    way: str,
    folder: Path,
    num_bytes: int = 16 * MIB,
    after_s: float = 0.1,
) -> None:
    there = shared_names()
    note = folder / f"ended-{time.monotonic_ns()}"
    found = pool.outcomes(
        until_it_fails, SIZE, operation, num_bytes, way, after_s, str(note), backend="shm"
    )
    told = "rank 1 ended by Enough" if way == "raises" else "rank 1 has ended"
    judge(found, operation, note, told)
    if way == "raises":
        assert isinstance(found[1].exception, Enough)
    assert shared_names() <= there


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_is_named_by_every_other(operation: str, pool: Pool, tmp_path: Path) -> None:
    kill_one(pool, operation, "killed", tmp_path)


@pytest.mark.parametrize("way", ["exits", "raises"])
@pytest.mark.parametrize("operation", ["all_reduce", "gather", "send and recv"])
def test_a_rank_that_ends_otherwise_is_named_as_well(
    operation: str, way: str, pool: Pool, tmp_path: Path
) -> None:
    kill_one(pool, operation, way, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_rank_killed_in_the_middle_of_256_mib(operation: str, pool: Pool, tmp_path: Path) -> None:
    kill_one(pool, operation, "killed", tmp_path, 256 * MIB, 1.0)


def test_a_rank_is_missed_although_its_forked_child_lives(pool: Pool, tmp_path: Path) -> None:
    def program(note: str) -> Any:
        if md.get_rank() == 1 and os.fork() == 0:
            time.sleep(2.5)  # with everything open that the rank had open
            os._exit(0)
        return until_it_fails("all_reduce", MIB, "killed", 0.1, note)

    note = tmp_path / "ended"
    found = pool.outcomes(program, SIZE, str(note), backend="shm")
    judge(found, "all_reduce", note, "rank 1 has ended")


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "send and recv"])
def test_a_stopped_rank_is_a_timeout_that_names_it(operation: str, pool: Pool) -> None:
    def program() -> Any:
        rank = md.get_rank()
        pids: list[Any] = [None] * SIZE
        md.all_gather_object(pids, os.getpid())
        group = md.new_group(timeout=timedelta(seconds=0.8))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        x = torch.ones(MIB)
        begin = time.monotonic()
        try:
            if operation == "all_reduce":
                md.all_reduce(x, group=group)
            elif operation == "broadcast":
                md.broadcast(x, 1, group=group)
            elif rank == 0:
                md.send(x, 1, group=group)
            else:
                md.recv(x, 1, group=group)
        except md.MeshdistError as error:
            told = time.monotonic() - begin, type(error).__name__, str(error)
            md.new_group([0, 2]).close()  # another group goes on
            md.barrier(md.new_group([0, 2]))
            if rank == 0:
                os.kill(pids[1], signal.SIGKILL)
            return told
        return None

    found = pool.outcomes(program, SIZE, backend="shm", timeout_s=20.0)
    assert isinstance(found[1], Failure)
    for rank in (0, 2):
        seconds, kind, text = found[rank]
        if kind == "AbortedError":  # of a message; the other rank was a moment earlier
            assert operation == "send and recv"
            assert re.search("found:    rank [02] failed first, in .*rank 1.*: not finished", text)
        else:
            assert kind == "CollectiveTimeoutError", text
            assert "timed out after 0.8 s" in text
            assert "rank 1: is stopped by SIGSTOP or a debugger" in text
        assert is_within(seconds, 0.8 + 3.0)


# -- whole programs -------------------------------------------------------------------------------

OPENING = "import os, signal, sys, time\nimport torch\nimport meshdist as md\n"


def launch(tmp_path: Path, body: str, size: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "program.py"
    script.write_text(OPENING + textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, "-m", "meshdist", "run", "-n", str(size), str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MESHDIST_KILL_TEST": str(tmp_path)},
        cwd=tmp_path,
    )


def processes_of(mark: str) -> list[int]:
    """The processes that have ``mark`` in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_the_launcher_tells_how_the_rank_ended(victim: int, tmp_path: Path) -> None:
    there = shared_names()
    done = launch(
        tmp_path,
        f"""
        md.init_process_group()
        assert md.get_backend() == "shm"
        x = torch.ones(1_000_000)
        md.all_reduce(x)
        if md.get_rank() == {victim}:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            md.all_reduce(x)
        finally:
            os.write(2, f"after {{time.monotonic() - begin:.2f}} s\\n".encode())
        """,
        size=2,
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert f"rank {victim} " in done.stderr
    assert "SIGKILL" in done.stderr
    told = re.findall(r"after ([0-9.]+) s", done.stderr)
    assert all(float(seconds) < PROMISE_S + SLACK_S for seconds in told)
    assert not processes_of(str(tmp_path))
    assert shared_names() <= there


IN_FLIGHT = """
md.init_process_group()
x = torch.ones(1000)
md.all_reduce(x)
if md.get_rank():
    works = [md.all_reduce(x, async_op=True) for _ in range(10)]
    works.append(md.irecv(torch.ones(5), 0))
    works.append(md.isend(torch.ones(5), 0))
os.write(1, b"done")
"""


def test_an_interpreter_ends_with_work_in_flight(pool: Pool) -> None:
    begin = time.monotonic()
    for done in pool.start(OPENING + IN_FLIGHT, places(SIZE)):
        assert (done.returncode, done.stdout, done.stderr) == (0, "done", "")
    assert time.monotonic() - begin < 30

"""A rank that returns has ended in good order: whoever receives from anyone goes on waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.pool import QUICK_NAMES

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import multiprocessing, os, sys, time
import torch
import meshdist as md

def work():
    if not md.is_initialized():
        md.init_process_group(os.environ["BACKEND"])
    rank = md.get_rank()
    x = torch.full((3,), float(rank))
    md.barrier()
    if rank == 0:
        try:
            print("got", [md.recv(x), md.recv(x)], flush=True)
        except md.BackendError as error:
            print("told", [line.strip() for line in str(error).splitlines() if "has ended" in line])
        return
    if rank == 2:
        time.sleep(1.5)
    elif sys.argv[2] == "fails":
        raise ValueError("of no account")
    elif sys.argv[2] == "is killed":
        os._exit(0)
    md.send(x, 0)

def forked(rank, path):
    store = f"file://{path}"
    md.init_process_group(os.environ["BACKEND"], init_method=store, rank=rank, world_size=3)
    work()

if __name__ == "__main__":
    if sys.argv[1] == "spawned":
        md.spawn(work, nprocs=3)
    else:
        path = sys.argv[3]
        context = multiprocessing.get_context(sys.argv[1])
        ranks = [context.Process(target=forked, args=(rank, path)) for rank in range(3)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
"""


def output_of(folder: Path, backend: str, *words: str) -> str:
    path = folder / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), *words, str(folder / "store")]
    environment = {**QUICK_NAMES, "PYTHONPATH": str(ROOT), "PATH": "", "BACKEND": backend}
    program = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        told, errors = program.communicate(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # its ranks as well, where one hangs
    return told or errors


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("kind", ["spawned", "fork", "spawn"])
def test_a_rank_that_returns_ends_in_good_order(kind: str, backend: str, tmp_path: Path) -> None:
    assert output_of(tmp_path, backend, kind, "returns") == "got [1, 2]\n"


@pytest.mark.parametrize("way", ["fails", "is killed"])
@pytest.mark.parametrize("kind", ["fork", "spawn"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_fails_does_not(backend: str, kind: str, way: str, tmp_path: Path) -> None:
    assert output_of(tmp_path, backend, kind, way) == "told ['found:    rank 1 has ended']\n"

"""A rank that returns has ended in good order: whoever receives from anyone goes on waiting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pool import Pool

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
            lines = [line.strip() for line in str(error).splitlines()]
            print("told", [line for line in lines if " ended" in line and "found" in line] or lines)
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


def output_of(pool: Pool, folder: Path, backend: str, *words: str) -> str:
    (done,) = pool.start(PROGRAM, [{"BACKEND": backend}], *words, str(folder / "store"))
    return done.stdout or done.stderr


# Processes that are spawned import all anew, which takes its time: two in every run will do.
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("shm", "spawned"),
        ("shm", "fork"),
        pytest.param("shm", "spawn", marks=SOAK),
        pytest.param("gloo", "spawned", marks=SOAK),
        ("gloo", "fork"),
        pytest.param("gloo", "spawn", marks=SOAK),
    ],
)
def test_a_rank_that_returns_ends_in_good_order(
    backend: str, kind: str, pool: Pool, tmp_path: Path
) -> None:
    assert output_of(pool, tmp_path, backend, kind, "returns") == "got [1, 2]\n"


@pytest.mark.parametrize(
    ("backend", "kind", "way"),
    [
        ("shm", "fork", "fails"),
        ("shm", "fork", "is killed"),
        pytest.param("shm", "spawn", "fails", marks=SOAK),
        pytest.param("shm", "spawn", "is killed", marks=SOAK),
        ("gloo", "fork", "fails"),
        ("gloo", "fork", "is killed"),
        pytest.param("gloo", "spawn", "fails", marks=SOAK),
        pytest.param("gloo", "spawn", "is killed", marks=SOAK),
    ],
)
def test_a_rank_that_fails_does_not(
    backend: str, kind: str, way: str, pool: Pool, tmp_path: Path
) -> None:
    told = output_of(pool, tmp_path, backend, kind, way)
    how = "has ended" if way == "is killed" else r"ended by ValueError: of no account \(.*\)"
    assert re.fullmatch(rf"told \['found:    rank 1 {how}'\]\n", told)

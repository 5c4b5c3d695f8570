"""Ranks under mpiexec for tests: one job for each number of ranks, started once and used again.

``job_of(pool, 4).run_in_world(fn, x)`` calls ``fn(x)`` on the four ranks of a fresh world over MPI
and returns the results by rank. A job of which a rank hangs or dies is ended, and started anew for
whoever asks next.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks._mpi import environment, job_command
from tests.inner import end_with_parent
from tests.pool import QUICK_NAMES, Pool, Worker, worker_main

START_S = 180.0  # on a busy machine


class MpiJob(Pool):
    """Ranks that one mpiexec has started, all of which take part in every call.

    Args:
        size: how many.
        is_mpich: whether by MPICH's, instead of Open MPI's.
    """

    def __init__(self, size: int, *, is_mpich: bool = False) -> None:
        super().__init__()
        self.size = size
        self._is_mpich = is_mpich
        self._mpiexec: subprocess.Popen[bytes] | None = None

    def run_in_world(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **settings: Any
    ) -> list[Any]:
        """Return what ``fn(*args)`` returned on each rank of a fresh world over MPI."""
        more = (fn, args, timeout_s)
        return self.call(in_world, self.size, *more, timeout_s=timeout_s, **settings)

    def close(self) -> None:
        self._end_job()
        super().close()

    def _grow(self, nprocs: int) -> None:
        if self.workers:
            return
        with tempfile.TemporaryDirectory(prefix="meshdist-mpi-") as folder:
            address = os.path.join(folder, "ranks")
            with Listener(address, "AF_UNIX") as listener:
                self._mpiexec = subprocess.Popen(
                    [
                        *job_command(self.size, is_mpich=self._is_mpich),
                        *(__file__, address, self._folder.name),
                    ],
                    env=environment(**QUICK_NAMES),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=functools.partial(end_with_parent, os.getpid()),
                )
                listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
                found = {}
                for _ in range(self.size):
                    connection = listener.accept()
                    rank, pid, stacks = connection.recv()
                    found[rank] = Worker(pid, connection, Path(stacks))
        self.workers = [found[rank] for rank in range(self.size)]

    def _replace(self, worker: Worker) -> None:
        self._end_job()  # the others of its world go with it

    def _end_job(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []
        if self._mpiexec is not None:
            try:
                self._mpiexec.wait(10.0)
            except subprocess.TimeoutExpired:
                self._mpiexec.kill()
                self._mpiexec.wait()
            self._mpiexec = None


def job_of(pool: Pool, size: int) -> MpiJob:
    """The job of ``size`` ranks that ends with ``pool``."""
    job = pool.jobs.get(size)
    if job is None:
        job = pool.jobs[size] = MpiJob(size)
    assert isinstance(job, MpiJob)
    return job


def in_world(rank: int, fn: Callable[..., Any], args: Sequence[Any], timeout_s: float) -> Any:
    import meshdist as md

    md.init_process_group("mpi", timeout=timedelta(seconds=timeout_s))
    try:
        return fn(*args)
    finally:
        if md.is_initialized():
            md.destroy_process_group()


def main(address: str, folder: str) -> None:
    from multiprocessing.connection import Client

    end_with_parent(os.getppid())
    gc.disable()  # what is imported is there to stay
    import tests.inner  # noqa: F401 - what most tests need is imported once

    gc.freeze()
    gc.enable()
    connection = Client(address)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    stacks = os.path.join(folder, f"stacks-{os.getpid()}")
    connection.send((rank, os.getpid(), stacks))
    assert isinstance(connection, Connection)
    worker_main(connection, stacks)


if __name__ == "__main__":
    main(*sys.argv[1:])

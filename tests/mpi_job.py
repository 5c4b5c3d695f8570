"""Ranks under mpiexec for tests: one job for each number of ranks, started once and used again.

``job_of(pool, 4).run_in_world(fn, x)`` calls ``fn(x)`` on the four ranks of a fresh world over MPI
and returns the results by rank. A job of which a rank hangs or dies is ended, and started anew for
whoever asks next.

Under Open MPI mpiexec starts only stand-ins, and each rank is a fork of the pool's warm parent that
has its stand-in's environment: four imports of torch took six seconds of CPU, four forks take 0.1.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._mpi import environment, job_command
from tests.inner import end_with_parent
from tests.pool import QUICK_NAMES, Pool, Worker, worker_main

START_S = 180.0  # on a busy machine

# Its end ends the rank, and it ends as this process closes the connection.
STAND_IN = """
import os, signal, sys
from multiprocessing.connection import Client
job = Client(sys.argv[1])
job.send((int(os.environ["OMPI_COMM_WORLD_RANK"]), dict(os.environ)))
pid = job.recv()
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL) or os._exit(1))
job.poll(None)
"""


class MpiJob(Pool):
    """Ranks that one mpiexec has started, all of which take part in every call.

    Args:
        size: how many.
        pool: whose parent the ranks are forked from; this job's own where there is none.
        is_mpich: whether by MPICH's, instead of Open MPI's: its ranks are programs of their own.
    """

    def __init__(self, size: int, pool: Pool | None = None, *, is_mpich: bool = False) -> None:
        super().__init__()
        self.size = size
        self._fork_rank = (pool or super())._fork
        self._is_mpich = is_mpich
        self._stand_ins: list[Connection] = []
        self._of_ranks: list[dict[str, str]] = [{}] * size  # the environment of each
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
            program = [__file__, address, self._folder.name]
            if not self._is_mpich:
                program = ["-I", "-S", "-c", STAND_IN, address]
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(self.size)
                listener.settimeout(START_S)
                self._mpiexec = subprocess.Popen(
                    [*job_command(self.size, is_mpich=self._is_mpich), *program],
                    env=environment(**QUICK_NAMES),
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=functools.partial(end_with_parent, os.getpid()),
                )
                accepted = [listener.accept()[0] for _ in range(self.size)]
                connections = [Connection(one.detach()) for one in accepted]
        found = {}
        for connection in connections:
            rank, *more = connection.recv()
            if self._is_mpich:
                found[rank] = Worker(more[0], connection, Path(more[1]))
            else:
                found[rank] = self._fork_rank()
                connection.send(found[rank].pid)
                self._stand_ins.append(connection)
                self._of_ranks[rank] = more[0]
        self.workers = [found[rank] for rank in range(self.size)]

    def _environment_on(self, hosts: str, rank: int) -> dict[str, str]:
        return self._of_ranks[rank]

    def _replace(self, worker: Worker) -> None:
        self._end_job()  # the others of its world go with it

    def _end_job(self) -> None:
        for worker in self.workers:
            worker.end()
        for connection in self._stand_ins:
            connection.close()
        self.workers, self._stand_ins = [], []
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
        job = pool.jobs[size] = MpiJob(size, pool)
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
    """Be a rank under MPICH."""
    from multiprocessing.connection import Client

    end_with_parent(os.getppid())
    gc.disable()  # what is imported is there to stay
    import tests.inner  # noqa: F401 - what most tests need is imported once

    gc.freeze()
    gc.enable()
    connection = Client(address)
    rank = int(os.environ["PMI_RANK"])
    stacks = os.path.join(folder, f"stacks-{os.getpid()}")
    connection.send((rank, os.getpid(), stacks))
    assert isinstance(connection, Connection)
    worker_main(connection, stacks)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Worker processes for tests: started once, forked from a warm parent, reused by every test.

``pool.run(fn, 4, x)`` calls ``fn(x)`` on ranks 0 to 3 of a fresh world over Gloo and returns the
results by rank. The function travels by cloudpickle, so a test's own inner function will do. A
worker that hangs or dies is replaced; all of them end with the test session, however it ends.

The warm parent (this file, run as a script) has imported torch and meshdist and has one thread, so
that a worker is ready in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

TESTS = Path(__file__).resolve().parent
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
# Torch asks the name server for the name of every peer of a store, loopback included; where that
# does not answer at once a test should not wait for it.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerLost(Exception):
    """A worker ended, or did not finish in time."""


class Worker:
    """One worker process, as the tests' process sees it."""

    def __init__(self, pid: int, connection: Connection, stacks: Path) -> None:
        self.pid = pid
        self.connection = connection
        self.stacks = stacks

    def end(self) -> None:
        if not self.connection.closed:
            # Its end of the connection is open, hence it lives, and the number is still its own.
            if not has_ended(self.connection):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                wait([self.connection], 5.0)
            self.connection.close()

    def show_stacks(self) -> str:
        """Return where each of the worker's threads is."""
        self.stacks.write_bytes(b"")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stacks.read_text(errors="replace")


def host_environment(hosts: str, rank: int) -> dict[str, str]:
    """What lets a rank take itself to be on a host, which others reach by loopback all the same."""
    return {"MESHDIST_HOST_ID": hosts[rank], "GLOO_SOCKET_IFNAME": "lo"} if hosts else {}


def has_ended(connection: Connection) -> bool:
    try:
        return connection.poll() and not connection.recv_bytes()
    except (EOFError, OSError):
        return True


class Pool:
    """A pool of worker processes, empty at first, that grows as tests ask for ranks."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.jobs: dict[int, Pool] = {}  # of ranks under mpiexec, by their number
        self._parent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._store: Any = None
        self._runs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="meshdist-pool-")

    def run(
        self,
        fn: Callable[..., Any],
        nprocs: int,
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        backend: str | None = "gloo",
        hosts: str = "",
    ) -> list[Any]:
        """Return what ``fn(*args)`` returned on each rank of a fresh world of ``nprocs`` ranks.

        Raises the exception of the first rank that failed, its rank in the attribute ``rank``; the
        others then have five seconds to come to an end.
        """
        outcomes = self.outcomes(
            fn,
            nprocs,
            *args,
            timeout_s=timeout_s,
            env=env,
            grace_s=GRACE_S,
            backend=backend,
            hosts=hosts,
        )
        failed = [one for one in outcomes if isinstance(one, Failure)]
        if failed:
            first = min(failed, key=lambda failure: failure.order)
            raise first.exception
        return outcomes

    def outcomes(
        self,
        fn: Callable[..., Any],
        nprocs: int,
        *args: Any,
        timeout_s: float = 60.0,
        grace_s: float | None = None,
        env: Mapping[str, str] | None = None,
        has_world: bool = True,
        backend: str | None = "gloo",
        hosts: str = "",
    ) -> list[Any]:
        """Return by rank what ``fn(*args)`` returned, or a ``Failure``.

        Args:
            fn: called in each worker; without a world as ``fn(rank, *args)``.
            nprocs: how many ranks.
            args: sent by cloudpickle.
            timeout_s: a worker that has not answered by then is killed.
            grace_s: as ``timeout_s``, but from the first failure on.
            env: environment variables for the duration of the call.
            has_world: whether the ranks are in a world when ``fn`` is called.
            backend: that world's.
            hosts: a letter for each rank, the host that it takes itself to be on.
        """
        self._grow(nprocs)
        self._runs += 1
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and Path(path).is_relative_to(TESTS) and Path(path) != Path(__file__):
                cloudpickle.register_pickle_by_value(module)
        team = self.workers[:nprocs]
        calls = [
            {
                "fn": fn,
                "args": args,
                "rank": rank,
                "size": nprocs,
                "backend": backend,
                "run": self._runs,
                "port": self._store_port() if has_world else None,
                "env": {**QUICK_NAMES, **(env or {}), **host_environment(hosts, rank)},
                "timeout_s": timeout_s,
            }
            for rank in range(nprocs)
        ]
        # All of them before the first is sent: what cannot be sent to one rank is sent to none.
        for worker, data in zip(team, list(map(cloudpickle.dumps, calls)), strict=True):
            worker.connection.send_bytes(data)
        return self._collect(team, timeout_s, grace_s)

    def call(self, fn: Callable[..., Any], nprocs: int, *args: Any, **settings: Any) -> list[Any]:
        """Return what ``fn(rank, *args)`` returned in each of ``nprocs`` workers, without a world.

        Raises as ``run`` does.
        """
        settings.setdefault("grace_s", GRACE_S)
        outcomes = self.outcomes(fn, nprocs, *args, has_world=False, **settings)
        failed = [one for one in outcomes if isinstance(one, Failure)]
        if failed:
            raise min(failed, key=lambda failure: failure.order).exception
        return outcomes

    def close(self) -> None:
        """End all workers and their parent, and the jobs under mpiexec."""
        for job in self.jobs.values():
            job.close()
        self.jobs.clear()
        for worker in self.workers:
            worker.end()
        self.workers.clear()
        if self._parent is not None:
            assert self._control is not None
            self._control.close()
            self._parent.kill()
            self._parent.wait()
            self._parent = None
        self._store = None
        self._folder.cleanup()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _collect(self, team: list[Worker], timeout_s: float, grace_s: float | None) -> list[Any]:
        outcomes: list[Any] = [None] * len(team)
        waiting = {worker.connection: rank for rank, worker in enumerate(team)}
        end = time.monotonic() + timeout_s
        order = 0
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    kind, value = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    kind, value = "lost", None
                if kind == "result":
                    outcomes[rank] = value
                    continue
                if kind == "lost":
                    exception: BaseException = WorkerLost(f"rank {rank}'s process ended")
                    self._replace(team[rank])
                else:
                    exception, text = value
                    exception.__cause__ = RemoteTraceback(f"\n\nrank {rank}:\n{text}")
                outcomes[rank] = Failure(rank, exception, order)
                order += 1
                if grace_s is not None:
                    end = min(end, time.monotonic() + grace_s)
        stuck = list(waiting.values())
        stacks = {rank: team[rank].show_stacks() for rank in stuck}
        for rank in stuck:
            text = f"rank {rank} did not finish; its threads were here:\n{stacks[rank]}"
            outcomes[rank] = Failure(rank, WorkerLost(text), order)
            order += 1
            self._replace(team[rank])
        return outcomes

    def _store_port(self) -> int:
        if self._store is None:
            from meshdist.runtime.stores import bind_listener, serve_store

            listener = bind_listener("127.0.0.1", 0)
            assert listener is not None
            port = listener.getsockname()[1]
            self._store = serve_store(listener, "127.0.0.1", port, timedelta(minutes=5))
        return int(self._store.port)

    def _grow(self, nprocs: int) -> None:
        while len(self.workers) < nprocs:
            self.workers.append(self._fork())

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self.workers.remove(worker)

    def _fork(self) -> Worker:
        if self._parent is None:
            self._control, theirs = socket.socketpair()
            self._parent = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env={
                    **os.environ,
                    **QUICK_NAMES,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(TESTS.parent), *filter(None, sys.path)]),
                },
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
        assert self._control is not None
        mine, theirs = socket.socketpair()
        stacks = Path(self._folder.name) / f"stacks-{time.monotonic_ns()}"
        socket.send_fds(self._control, [os.fsencode(stacks)], [theirs.fileno()])
        theirs.close()
        answer = self._control.recv(64)
        if not answer:
            raise WorkerLost("the parent of the workers ended: see its output")
        return Worker(int(answer), Connection(mine.detach()), stacks)


class Failure:
    """How a rank failed: its exception, and the how-manieth failure of the run it was."""

    def __init__(self, rank: int, exception: BaseException, order: int) -> None:
        self.rank = rank
        self.exception = exception
        self.order = order
        exception.rank = rank  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"Failure(rank {self.rank}: {self.exception!r})"


# -- in the workers and their parent ------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def parent_main(descriptor: int, parent: int) -> None:
    end_with_parent(parent)
    import meshdist
    import meshdist.collectives.verbs
    import meshdist.mesh.device_mesh  # noqa: F401 - what most tests need is imported once

    control = socket.socket(fileno=descriptor)
    # Children that end are forgotten at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    me = os.getpid()
    while True:
        path, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent(me)
            worker_main(Connection(descriptors[0]), os.fsdecode(path))
            os._exit(0)
        os.close(descriptors[0])
        control.sendall(str(pid).encode())


def worker_main(connection: Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                call = cloudpickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            try:
                answer = ("result", perform(call))
            except BaseException as error:
                answer = ("error", (error, traceback.format_exc()))
            connection.send_bytes(packed(answer))


def packed(answer: Any) -> bytes:
    try:
        data = cloudpickle.dumps(answer)
        cloudpickle.loads(data)
        return data
    except Exception as error:
        kind, value = answer
        text = value[1] if kind == "error" else f"a result of type {type(value).__name__}"
        failure = RuntimeError(f"cannot be sent back: {error!r}: {text}")
        return cloudpickle.dumps(("error", (failure, text)))


def perform(call: dict[str, Any]) -> Any:
    import torch

    before = dict(os.environ)
    folder = os.getcwd()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    os.environ.update(call["env"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if call["port"] is None:
                return call["fn"](call["rank"], *call["args"])
            return perform_in_world(call)
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)


def perform_in_world(call: dict[str, Any]) -> Any:
    from torch.distributed import PrefixStore

    import meshdist as md
    from meshdist.runtime.stores import connect_store, keep_store

    port, timeout = call["port"], timedelta(seconds=call["timeout_s"])
    store = keep_store("pool", lambda: connect_store("127.0.0.1", port, timeout))
    md.init_process_group(
        call["backend"],
        timeout=timeout,
        rank=call["rank"],
        world_size=call["size"],
        store=PrefixStore(f"run {call['run']}", store),
    )
    try:
        return call["fn"](*call["args"])
    finally:
        if md.is_initialized():
            md.destroy_process_group()


if __name__ == "__main__":
    sys.modules["tests.pool"] = sys.modules["__main__"]
    parent_main(int(sys.argv[1]), int(sys.argv[2]))

"""Worker processes for tests: started once, forked from a warm parent, reused by every test.

``pool.run(fn, 4, x)`` calls ``fn(x)`` on ranks 0 to 3 of a fresh world over Gloo and returns the
results by rank. The function travels by cloudpickle, so a test's own inner function will do. A
worker that hangs or dies is replaced; all of them end with the test session, however it ends.

The warm parent (this file, run as a script) has imported torch and meshdist and has one thread, so
that a worker is ready in milliseconds.

``pool.start(text, places(3))`` runs a program on three processes, each of which ends as programs
do: by its last line, an exception, ``sys.exit`` or a signal, and with what the interpreter does
then. They too are forked from the warm parent: what starts a program is not tested by them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import cloudpickle

from tests.inner import end_with_parent
from tests.load import load_factor

TESTS = Path(__file__).resolve().parent
GRACE_S = 5.0
OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_", "MESHDIST_")
# Torch asks the name server for the name of every peer of a store, loopback included; where that
# does not answer at once a test should not wait for it.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}
NO_NAME = re.compile(r".*The hostname of the client socket cannot be retrieved.*\n")
"""What torch says where the name server gives no answer at all."""


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it raised."""

    def __str__(self) -> str:
        return str(self.args[0])


class WorkerLost(Exception):
    """A worker ended, or did not finish in time."""


class Worker:
    """One worker process, as the tests' process sees it."""

    def __init__(self, pid: int, connection: Connection, stacks: Path, host: str = "") -> None:
        self.pid = pid
        self.host = host
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


_known_modules: set[str] = set()


def send_new_modules_by_value() -> None:
    """Let the tests' own modules travel with the functions in them: workers have not got them."""
    new = sys.modules.keys() - _known_modules
    _known_modules.update(new)
    for module in [sys.modules[name] for name in new]:
        path = getattr(module, "__file__", None)
        if path and Path(path).is_relative_to(TESTS) and Path(path) != Path(__file__):
            cloudpickle.register_pickle_by_value(module)


def host_environment(hosts: str, rank: int) -> dict[str, str]:
    """What lets a rank take itself to be on a host, which others reach by loopback all the same."""
    return {"MESHDIST_HOST_ID": hosts[rank], "GLOO_SOCKET_IFNAME": "lo"} if hosts else {}


def has_ended(connection: Connection) -> bool:
    try:
        return connection.poll() and not connection.recv_bytes()
    except (EOFError, OSError):
        return True


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def places(size: int) -> list[dict[str, str]]:
    """What tells each of ``size`` processes its place in a world, as a launcher does."""
    port = str(free_port())
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**world, "RANK": str(rank)} for rank in range(size)]


class Pool:
    """A pool of worker processes, empty at first, that grows as tests ask for ranks."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.jobs: dict[int | str, Pool] = {}  # under mpiexec, by the number of ranks; on hosts
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
            timeout_s: a worker that has not answered by then is killed; a busy machine gives more.
            grace_s: as ``timeout_s``, but from the first failure on.
            env: environment variables for the duration of the call.
            has_world: whether the ranks are in a world when ``fn`` is called.
            backend: that world's.
            hosts: a letter for each rank, the host that it takes itself to be on.
        """
        team = self._team(nprocs, hosts)
        self._runs += 1
        send_new_modules_by_value()
        # Before the first is sent: what cannot be sent to one rank is sent to none.
        program = cloudpickle.dumps((fn, args))
        calls = [
            {
                "program": program,
                "rank": rank,
                "size": nprocs,
                "backend": backend,
                "run": self._runs,
                "store": self._store_address() if has_world else None,
                "env": {**QUICK_NAMES, **(env or {}), **self._environment_on(hosts, rank)},
                "timeout_s": timeout_s,
            }
            for rank in range(nprocs)
        ]
        for worker, call in zip(team, calls, strict=True):
            worker.connection.send(call)
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

    def start(
        self,
        program: str | Path,
        environments: Sequence[Mapping[str, str]] = ({},),
        *words: str,
        is_strict: bool = False,
        has_teardown: bool = True,
        timeout_s: float = 60.0,
        hosts: str = "",
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a program to its end as one process or several; return how each ended.

        Nobody ends the others when one fails, but all of them end with the test.

        Args:
            program: its text, or the file that it is in.
            environments: of each process, the variables beside those of this one. Those that a
                launcher has set here are left out.
            words: what the program finds in ``sys.argv`` after its own name.
            is_strict: whether warnings are errors, as with ``python -W error``.
            has_teardown: whether the interpreter comes to its end behind the exit handlers. That
                takes 0.36 s of CPU, since it writes to all that was imported before the fork:
                False where the test is about what the program says.
            timeout_s: who has not ended by then is killed, which raises WorkerLost.
            hosts: a letter for each process, its host, where the pool has several.
        """
        limit_s = timeout_s * load_factor()
        folder = tempfile.mkdtemp(dir=self._folder.name)
        path = program
        if isinstance(program, str):
            path = Path(folder) / "program.py"
            path.write_text(program)
        kept = {name: x for name, x in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        here = {**kept, **QUICK_NAMES, **self._for_programs, "PYTHONPATH": str(TESTS.parent)}
        programs = [
            Program(
                str(path), words, {**here, **of_rank}, f"{folder}/{rank}", is_strict, has_teardown
            )
            for rank, of_rank in enumerate(environments)
        ]
        value = self._run_programs(programs, hosts, limit_s)
        said = [
            [NO_NAME.sub("", Path(f"{one.output}.{kind}").read_text()) for kind in ("out", "err")]
            for one in programs
        ]
        late = {number: said[number] for number, code in enumerate(value) if code is None}
        if late:
            raise WorkerLost(f"did not end within {timeout_s} s; what they had said: {late}")
        return [
            subprocess.CompletedProcess([str(path), *words], code, *texts)
            for code, texts in zip(value, said, strict=True)
        ]

    @contextlib.contextmanager
    def running(self, program: str) -> Iterator[RunningProgram]:
        """Run a program beside the test, by pipes and signals; it ends with the block."""
        folder = tempfile.mkdtemp(dir=self._folder.name)
        output, worker = f"{folder}/0", self._fork()
        Path(f"{folder}/program.py").write_text(program)
        for kind in ("in", "out"):
            os.mkfifo(f"{output}.{kind}")
        environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
        chosen = Program(f"{folder}/program.py", (), environment, output, is_strict=False)
        data = cloudpickle.dumps((run_programs, ([chosen], 600.0)))
        worker.connection.send({"program": data, "rank": 0, "env": {}, "store": None})
        # Each waits here until the program opens its end, in the same order.
        with open(f"{output}.in", "w") as stdin, open(f"{output}.out") as stdout:
            pid = int(Path(f"{output}.pid").read_text())
            try:
                yield RunningProgram(pid, stdin, stdout, worker)
            finally:
                worker.end()  # and the program with it

    def _run_programs(
        self, programs: Sequence[Program], hosts: str, limit_s: float
    ) -> list[int | None]:
        """The exit codes of the programs, each a child of one new worker of its host."""
        where = hosts or " " * len(programs)
        found: dict[int, int | None] = {}
        workers = {host: self._fork(host.strip()) for host in sorted(set(where))}
        try:
            for host, worker in workers.items():
                mine = [one for one, there in zip(programs, where, strict=True) if there == host]
                data = cloudpickle.dumps((run_programs, (mine, limit_s)))
                worker.connection.send({"program": data, "rank": 0, "env": {}, "store": None})
            for host, worker in workers.items():
                if not worker.connection.poll(limit_s + 10.0):
                    raise WorkerLost(f"nobody tells how they ended:\n{worker.show_stacks()}")
                kind, value = cloudpickle.loads(worker.connection.recv_bytes())
                if kind == "error":
                    raise value[0]
                numbers = [number for number, there in enumerate(where) if there == host]
                found |= zip(numbers, value, strict=True)
        finally:
            for worker in workers.values():
                worker.end()
        return [found[number] for number in range(len(programs))]

    def close(self) -> None:
        """End all workers and their parent, the jobs under mpiexec and those on hosts."""
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
        waiting = {worker.connection: rank for rank, worker in enumerate(team)}
        try:
            return self._answers(team, waiting, timeout_s, grace_s)
        except BaseException:  # Ctrl-C, or the time limit of the test
            for rank in waiting.values():
                print(f"rank {rank} was here:\n{team[rank].show_stacks()}", file=sys.stderr)
            for rank in waiting.values():
                self._replace(team[rank])
            raise

    def _answers(
        self,
        team: list[Worker],
        waiting: dict[Connection, int],
        timeout_s: float,
        grace_s: float | None,
    ) -> list[Any]:
        """Return the outcomes; take from ``waiting`` each that has come."""
        outcomes: list[Any] = [None] * len(team)
        begin, has_more = time.monotonic(), True
        end = begin + timeout_s
        order = 0
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready and has_more:  # as much more as a busy machine takes
                has_more, end = False, begin + (end - begin) * load_factor()
                continue
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

    _for_programs: Mapping[str, str] = {}
    """The environment that programs have besides."""

    def _environment_on(self, hosts: str, rank: int) -> dict[str, str]:
        return host_environment(hosts, rank)

    def _store_address(self) -> tuple[str, int]:
        if self._store is None:
            self._store = serve_any_port("127.0.0.1")
        return "127.0.0.1", int(self._store.port)

    def _team(self, nprocs: int, hosts: str) -> list[Worker]:
        self._grow(nprocs)
        return self.workers[:nprocs]

    def _grow(self, nprocs: int) -> None:
        while len(self.workers) < nprocs:
            self.workers.append(self._fork())

    def _replace(self, worker: Worker) -> None:
        worker.end()
        self.workers = [one for one in self.workers if one is not worker]

    def _fork(self, host: str = "") -> Worker:
        """A new worker; ``host`` says where, if this pool has several."""
        mine, theirs = socket.socketpair()
        stacks = Path(self._folder.name) / f"stacks-{time.monotonic_ns()}"
        pid = self._ask_parent(f"{host}:{stacks}", theirs)
        return Worker(pid, Connection(mine.detach()), stacks, host)

    def _ask_parent(self, text: str, theirs: socket.socket) -> int:
        """Let the parent of the workers fork a process that is given a socket; its number."""
        self._start_parent()
        assert self._control is not None
        socket.send_fds(self._control, [os.fsencode(text)], [theirs.fileno()])
        theirs.close()
        answer = self._control.recv(64)
        if not answer:
            raise WorkerLost("the parent of the workers ended: see its output")
        return int(answer)

    def _start_parent(self) -> None:
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


@dataclass
class RunningProgram:
    """A program beside the test: its number, its pipes, and how it ended, as Popen has them."""

    pid: int
    stdin: TextIO
    stdout: TextIO
    worker: Worker
    returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Return its exit code; raise TimeoutExpired if it does not end in time."""
        if self.returncode is None:
            if not self.worker.connection.poll(timeout_s):
                raise subprocess.TimeoutExpired(str(self.pid), timeout_s)
            kind, value = cloudpickle.loads(self.worker.connection.recv_bytes())
            assert kind == "result", value
            self.returncode = value[0]
        return self.returncode


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


def parent_main(descriptor: int, parent: int) -> None:
    end_with_parent(parent)
    gc.disable()  # what is imported is there to stay
    # What many tests need is imported once. An optimizer imports the compiler: half a second.
    import torch._dynamo  # noqa: F401

    import meshdist as md
    import tests.inner  # noqa: F401

    assert md.checkpoint

    gc.freeze()  # else each process would look through all of it, and have it copied for that
    gc.enable()
    serve_forks(socket.socket(fileno=descriptor), fork_here)


def fork_here(host: str) -> int:
    """Fork; the child ends with this process. There is one host alone."""
    assert not host, "the pool of tests.two_hosts has several hosts"
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_parent(me)
    return pid


def serve_forks(control: socket.socket, fork: Callable[[str], int]) -> None:
    """Fork a worker for each request, until the process that asks has ended.

    Args:
        control: from where a request comes as "host:file of stacks", with the worker's socket; a
            pool of several hosts asks for the parent of its workers as "hosts:folder".
        fork: forks onto a host.
    """
    # Children that end are forgotten at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        host, _, path = os.fsdecode(message).partition(":")
        pid = fork("" if host == "hosts" else host)
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if host == "hosts":
                serve_hosts(socket.socket(fileno=descriptors[0]), path)
            else:
                worker_main(Connection(descriptors[0]), path)
            os._exit(0)
        os.close(descriptors[0])
        control.sendall(str(pid).encode())


def serve_hosts(control: socket.socket, folder: str) -> None:
    """Make hosts, serve a store on the first, and fork workers onto them; see tests.two_hosts."""
    from tests.namespaces import ADDRESSES, Hosts, NoNamespaces, end_with, wait_for_ever

    try:
        hosts = Hosts.make(folder)
        hosts.enter()
    except NoNamespaces as refusal:
        control.sendall(str(refusal).encode())
        return
    end_with()  # once more, since new rights undo it
    if hosts.fork("A") == 0:
        store = serve_any_port(ADDRESSES["A"])
        control.sendall(str(store.port).encode())
        control.close()
        wait_for_ever()
    serve_forks(control, hosts.fork)


def serve_any_port(address: str) -> Any:
    """A store for the worlds of a pool, at a free port of this host."""
    from tests.inner import bind_listener, serve_store

    listener = bind_listener(address, 0)
    assert listener is not None
    return serve_store(listener, address, listener.getsockname()[1], timedelta(minutes=5))


def worker_main(connection: Connection, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                call = connection.recv()
            except (EOFError, OSError):
                return
            try:
                answer = ("result", perform(call, *cloudpickle.loads(call["program"])))
            except Becoming:
                connection.close()
                faulthandler.unregister(signal.SIGUSR1)
                raise
            except BaseException as error:
                answer = ("error", (error, traceback.format_exc()))
            connection.send_bytes(packed(answer))


@dataclass(frozen=True)
class Program:
    """A program as a process: its file and words, what its environment is, where it writes."""

    path: str
    words: tuple[str, ...]
    environment: dict[str, str]
    output: str
    is_strict: bool
    has_teardown: bool = True

    def run_without_teardown(self) -> None:
        """Run it and its exit handlers, and end this process with its exit code."""
        code: object = 0
        try:
            self.run()
        except SystemExit as end:
            code = 0 if end.code is None else end.code
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            code = 1
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # waits for its threads, as the interpreter does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def run(self) -> None:
        """Become that process, which Python has started with the program as ``__main__``."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(os.path.dirname(self.output))
        if os.path.exists(f"{self.output}.in"):
            Path(f"{self.output}.pid").write_text(str(os.getpid()))
            with open(f"{self.output}.in", "rb") as file:
                os.dup2(file.fileno(), 0)
        for descriptor, kind in ((1, "out"), (2, "err")):
            with open(f"{self.output}.{kind}", "wb") as file:
                os.dup2(file.fileno(), descriptor)
        if self.is_strict:
            warnings.simplefilter("error")
            sys.warnoptions = ["error"]  # which the processes that it starts are given
        sys.argv = [self.path, *self.words]
        sys.path[0] = os.path.dirname(self.path)
        # It stays the main module, so that what it holds lives until the interpreter ends.
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = self.path
        exec(compile(Path(self.path).read_bytes(), self.path, "exec"), main.__dict__)


class Becoming(BaseException):
    """Takes a process that has been forked for a program out of all that its parent was in."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.program = program


def run_programs(rank: int, programs: list[Program], timeout_s: float) -> list[int | None]:
    """Fork a process for each of the programs; return their exit codes, None for who was late."""
    me, pids = os.getpid(), []
    for program in programs:
        pids.append(os.fork())
        if pids[-1] == 0:
            end_with_parent(me)
            raise Becoming(program)
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        is_late = time.monotonic() > deadline
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif is_late:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


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


def perform(call: dict[str, Any], fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch

    before = dict(os.environ)
    folder = os.getcwd()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    os.environ.update(call["env"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if call["store"] is None:
                return fn(call["rank"], *args)
            return perform_in_world(call, fn, args)
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(folder)


def perform_in_world(call: dict[str, Any], fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    from torch.distributed import PrefixStore

    import meshdist as md
    from tests.inner import connect_store, keep_store

    timeout = timedelta(seconds=call["timeout_s"])
    store = keep_store("pool", lambda: connect_store(*call["store"], timeout))
    md.init_process_group(
        call["backend"],
        timeout=timeout,
        rank=call["rank"],
        world_size=call["size"],
        store=PrefixStore(f"run {call['run']}", store),
    )
    try:
        return fn(*args)
    finally:
        if md.is_initialized():
            md.destroy_process_group()


if __name__ == "__main__":
    sys.modules["tests.pool"] = sys.modules["__main__"]
    chosen: Program | None = None
    try:
        parent_main(int(sys.argv[1]), int(sys.argv[2]))
    except Becoming as becoming:
        chosen = becoming.program
    if chosen is not None and chosen.has_teardown:
        chosen.run()
    elif chosen is not None:
        chosen.run_without_teardown()

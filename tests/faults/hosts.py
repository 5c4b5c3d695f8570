"""The process that runs one case: it forks the ranks, sends signals, and sees what is left behind.

Every process that a rank leaves behind becomes its child, its files lie in a folder of their own,
and shared memory with a name in a file system of its own, so that nothing of others is counted.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks._mpi import MPIEXEC, OPEN_MPI
from tests.faults.cases import Case
from tests.faults.outcomes import GRACE_S, Outcome
from tests.faults.ranks import Rank
from tests.load import load_factor
from tests.namespaces import Hosts, end_with as end_with_parent
from tests.pool import OF_LAUNCHERS, QUICK_NAMES
from tests.two_hosts import places_on

__all__ = ["Becoming", "run_case"]

PATIENCE_S = 10.0
"""How much longer it is watched, to tell a rank that is late from one that hangs."""
BUILD_S = 30.0
"""How long a program may take without a fault."""
CLEAN_S = 2.0
"""How long what the ranks have started may outlive them."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _MS_REC_PRIVATE = 0x00020000, (1 << 14) | (1 << 18)
_libc = ctypes.CDLL(None, use_errno=True)


class Becoming(BaseException):
    """Takes a forked process out of all that its parent was in; then ``run`` is its program."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def run_case(case: Case, parent: int, answer: int) -> None:
    """Run one case in this process, a child of ``parent``; write its outcome, and end."""
    end_with(parent)
    os.setsid()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = tempfile.mkdtemp(prefix="faults-")
    try:
        outcome = (OnTwoHosts if case.hosts else Host)(case, folder).run()
    finally:
        if not isinstance(sys.exc_info()[1], Becoming):
            shutil.rmtree(folder, ignore_errors=True)
    with open(answer, "w") as file:
        json.dump(outcome.to_json(), file)
    os._exit(0)


def own_shared_memory() -> bool:
    """Give this process and its children an empty /dev/shm; whether the system allows it."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        return False
    _libc.mount(None, b"/", None, _MS_REC_PRIVATE, None)
    return _libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0


@dataclass
class Host:
    """One case while it runs."""

    case: Case
    folder: str
    pids: dict[int, int] = field(default_factory=dict)  # by rank
    shims: dict[int, socket.socket] = field(default_factory=dict)  # by rank
    timers: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    is_stopped: bool = False

    def run(self) -> Outcome:
        self.outcome = Outcome(self.case.size, self.pids)
        self.files = os.path.join(self.folder, "tmp")
        os.mkdir(self.files)
        self._settle()
        self.inlet, self.outlet = os.pipe()
        self.rest = b""
        self.listener: socket.socket | None = None
        self.mpiexec: subprocess.Popen[bytes] | None = None
        self.begin = time.monotonic()
        if self.case.backend == "mpi":
            self._start_mpiexec()
        else:
            self._fork_all()
        self._watch()
        outcome = self.outcome
        last_at = max((at for at, _ in outcome.ends.values()), default=0.0)
        if last_at > outcome.fault_at + self.case.timeout_s + GRACE_S:
            outcome.load = max(outcome.load, load_factor())
        self._end_all()
        self._look_for_leftovers()
        return self.outcome

    # -- starting ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Make what the ranks have to themselves."""
        self.memories = ["/dev/shm"] if own_shared_memory() else []
        self.folders = [self.files]
        self.others: set[int] = set()  # children of this process that are no ranks

    def _fork_all(self) -> None:
        for rank, place in enumerate(self._places()):
            streams = [os.open(os.devnull, os.O_RDONLY), *map(self._output, (rank, rank))]
            server = f"{place['MASTER_ADDR']}:{place['MASTER_PORT']}"
            address = {"tcp": f"tcp://{server}", "file": f"file://{self.files}/meeting"}
            self._fork(rank, place, streams, address.get(self.case.init_method, ""))

    def _places(self) -> list[dict[str, str]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        places = places_on("A" * self.case.size, port)
        return [{**place, "MASTER_ADDR": "127.0.0.1"} for place in places]

    def _fork_process(self, rank: int) -> int:
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(me)
        return pid

    def _output(self, name: int | str) -> int:
        return os.open(f"{self.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        kept = {name: x for name, x in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
        return {**kept, **QUICK_NAMES, "OMP_NUM_THREADS": "1", "TMPDIR": self.files, **more}

    def _fork(self, rank: int, more: dict[str, str], streams: list[int], address: str = "") -> None:
        pid = self._fork_process(rank)
        if pid:
            self.pids[rank] = pid
            for descriptor in streams:
                os.close(descriptor)
            return
        os.setsid()
        os.environ.clear()
        os.environ.update(self._environment(more))
        tempfile.tempdir = None
        os.chdir(self.folder)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # also when Python has ended its handlers
        stacks = open(f"{self.folder}/stacks-{rank}", "w")  # noqa: SIM115 - until the process ends
        faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)
        raise Becoming(Rank(self.case, rank, self.outlet, address).run)

    def _start_mpiexec(self) -> None:
        path = f"{self.folder}/shims"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        shim = os.path.join(os.path.dirname(__file__), "shim.py")
        output = self._output("mpiexec")
        self.mpiexec = subprocess.Popen(
            [str(MPIEXEC), "-n", str(self.case.size), sys.executable, "-I", "-S", shim, path],
            env=self._environment(OPEN_MPI),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        os.close(output)

    def _accept(self) -> None:
        assert self.listener is not None
        connection, _ = self.listener.accept()
        head, streams, _, _ = socket.recv_fds(connection, 4, 3)
        text = b""
        while len(text) < int.from_bytes(head, "big"):
            text += connection.recv(1 << 16)
        environment = dict(entry.split("=", 1) for entry in text.decode().split("\0"))
        rank = int(environment["OMPI_COMM_WORLD_RANK"])
        self.shims[rank] = connection
        self._fork(rank, environment, streams)
        connection.sendall(self.pids[rank].to_bytes(4, "big"))

    # -- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._is_over():
            now = time.monotonic()
            for at, act in [one for one in self.timers if one[0] <= now]:
                self.timers.remove((at, act))
                act()
            next_at = min((at for at, _ in self.timers), default=now + 0.02)
            watched: list[Any] = [self.inlet, *self.shims.values()]
            watched += [self.listener] if self.listener is not None else []
            ready, _, _ = select.select(watched, [], [], min(0.02, max(0.0, next_at - now)))
            for one in ready:
                if one is self.inlet:
                    self._read_notes()
                elif one is self.listener:
                    self._accept()
                else:
                    self._lose_shim(one)
            self._reap()
        self._read_rest()

    def _is_over(self) -> bool:
        """Whether all ranks have ended, or have been watched for long enough."""
        outcome, now = self.outcome, time.monotonic()
        if len(outcome.ends) == self.case.size:
            return True
        is_job_over = self.mpiexec is not None and self.mpiexec.returncode is not None
        if is_job_over and len(outcome.ends) == len(self.pids):
            return True  # mpiexec ended it before all ranks were there
        self._go_on_after_stop(now)
        if self.is_stopped:
            return False
        begin = outcome.fault_at or self.begin + BUILD_S
        if outcome.released_at:
            begin = outcome.released_at
        limit_s = (self.case.timeout_s + GRACE_S) * outcome.load
        return now > begin + limit_s + PATIENCE_S

    def _go_on_after_stop(self, now: float) -> None:
        """Let the stopped rank go on, or kill it, once the others have ended."""
        if not self.is_stopped:
            return
        outcome, rank = self.outcome, self.case.fault.rank
        others = set(range(self.case.size)) - {rank}
        limit_s = self.case.timeout_s + GRACE_S
        if now > outcome.fault_at + limit_s * outcome.load:
            outcome.load = max(outcome.load, load_factor())
        are_through = outcome.through >= others and now > outcome.fault_at + 1.0
        if others <= outcome.ends.keys() or (self.case.backend == "mpi" and are_through):
            pass
        elif now < outcome.fault_at + limit_s * outcome.load + 1.0:
            return
        else:
            for one in others - outcome.ends.keys():
                outcome.frozen[one] = self._stacks(one)
        self.is_stopped = False
        outcome.released_at = now
        is_killed = self.case.fault.kind.endswith("SIGKILL")
        self._send(rank, signal.SIGKILL if is_killed else signal.SIGCONT)

    def _send(self, rank: int, number: int) -> None:
        if rank in self.pids and rank not in self.outcome.ends:
            os.kill(self.pids[rank], number)

    def _read_notes(self) -> None:
        self.rest += os.read(self.inlet, 1 << 16)
        *lines, self.rest = self.rest.split(b"\n")
        for line in lines:
            note = json.loads(line)
            self.outcome.take(note)
            self._act_on(note)

    def _read_rest(self) -> None:
        while select.select([self.inlet], [], [], 0)[0]:
            self._read_notes()

    def _act_on(self, note: dict[str, Any]) -> None:
        what, rank, late = note["what"], note["rank"], self.case.late
        if what == "strike":
            self._later(self.case.fault.delay_s, self._strike)
        elif what == "stop":
            self.is_stopped = True
        elif what == "pause":
            self._later(0.4, lambda: self._send(rank, signal.SIGCONT))
        elif (
            late
            and late.is_stopped
            and (what, rank, note.get("step"))
            == (
                "begin",
                late.rank,
                late.step,
            )
        ):
            self._later(late.delay_s, lambda: self._pause(rank, late.pause_s))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.timers.append((time.monotonic() + delay_s, act))

    def _pause(self, rank: int, seconds: float) -> None:
        def send(number: int) -> None:
            if rank != self.case.fault.rank or not self.is_stopped:
                self._send(rank, number)

        send(signal.SIGSTOP)
        self._later(seconds, lambda: send(signal.SIGCONT))

    def _strike(self) -> None:
        fault = self.case.fault
        if fault.rank in self.outcome.ends:
            return
        self._read_rest()
        self.outcome.fault_at = time.monotonic()
        if fault.kind == "raise in a handler":
            self._send(fault.rank, signal.SIGUSR1)
        elif fault.kind == "pause":
            self._pause(fault.rank, 0.4)
        else:
            self._send(fault.rank, getattr(signal, fault.kind.split(",")[0]))
            self.is_stopped = "STOP" in fault.kind

    def _reap(self) -> None:
        ranks = {pid: rank for rank, pid in self.pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if self.mpiexec is not None and pid == self.mpiexec.pid:
                self.mpiexec.returncode = code
            elif pid in ranks:
                self.outcome.ends[ranks[pid]] = (time.monotonic(), code)
                shim = self.shims.pop(ranks[pid], None)
                if shim is not None:
                    with suppress(OSError):  # where mpiexec has ended it
                        shim.sendall(code.to_bytes(4, "big", signed=True))
                    shim.close()

    def _lose_shim(self, shim: socket.socket) -> None:
        """Mpiexec has killed a rank's shim: the rank ends with it."""
        rank = next(rank for rank, one in self.shims.items() if one is shim)
        self.shims.pop(rank).close()
        self.outcome.by_mpiexec.add(rank)
        self._send(rank, signal.SIGKILL)

    # -- the end ----------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Show the stacks of the ranks that hang, and kill them."""
        for rank in self.pids.keys() - self.outcome.ends.keys():
            self._send(rank, signal.SIGCONT)
            self.outcome.hung[rank] = self._stacks(rank)
            self._send(rank, signal.SIGKILL)

    def _stacks(self, rank: int) -> str:
        """Where the threads of a rank are."""
        self._send(rank, signal.SIGUSR2)
        time.sleep(0.3)
        with open(f"{self.folder}/stacks-{rank}") as file:
            return file.read()[-6000:]

    def _look_for_leftovers(self) -> None:
        end = time.monotonic() + CLEAN_S
        while (left := self._processes()) and time.monotonic() < end:
            self._reap()
            time.sleep(0.01)
        for pid in left:
            with open(f"/proc/{pid}/cmdline") as file:
                command = file.read().replace("\0", " ")
            self.outcome.left.append(f"process {command}")
            os.kill(pid, signal.SIGKILL)
        self._reap()
        for files in self.folders:
            for top, folders, names in os.walk(files):
                self.outcome.left += [os.path.relpath(f"{top}/{x}", files) for x in names]
                self.outcome.left += [os.path.relpath(f"{top}/{x}", files) for x in folders]
        for memory in self.memories:
            self.outcome.left += [f"/dev/shm/{name}" for name in os.listdir(memory)]
        for rank in [*range(self.case.size), "mpiexec"]:
            path = f"{self.folder}/{rank}"
            if os.path.exists(path):
                with open(path, errors="replace") as file:
                    self.outcome.said[str(rank)] = file.read()[-8000:]

    def _processes(self) -> list[int]:
        """The processes that live still."""
        return [pid for pid in children(os.getpid()) if pid not in self.others]


class OnTwoHosts(Host):
    """One case on two hosts made of namespaces, which are its own; what they share is a folder."""

    def _settle(self) -> None:
        self.hosts = Hosts.make(self.folder)
        self.hosts.enter()
        end_with_parent()  # once more, since new rights undo it
        self.others = {self.hosts.pid}
        roots = [f"/proc/{init}/root" for init in self.hosts.inits.values()]
        self.memories = [f"{root}/dev/shm" for root in roots]
        self.folders = [self.files, *(f"{root}{self.hosts.files}" for root in roots)]

    def _places(self) -> list[dict[str, str]]:
        return places_on(self.case.hosts)

    def _fork_process(self, rank: int) -> int:
        return self.hosts.fork(self.case.hosts[rank])

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**super()._environment(more), "TMPDIR": self.hosts.files}

    def _processes(self) -> list[int]:
        orphans = [pid for init in self.hosts.inits.values() for pid in children(init)]
        return super()._processes() + orphans


def children(pid: int) -> list[int]:
    """The processes of which this one is the parent."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]

"""Starts the processes of a job on one host, watches them, and leaves none behind.

What a started process finds in its environment:

    RANK, WORLD_SIZE               its number in the job, and how many there are
    LOCAL_RANK, LOCAL_WORLD_SIZE   the same on this host
    GROUP_RANK                     the number of this host
    MASTER_ADDR, MASTER_PORT       where rank 0 serves the job's store
    MESHDIST_RUN_ID                one random hexadecimal number for all ranks of a job on one host
    MESHDIST_LISTEN_FD             rank 0 of a job on one host: an inherited TCP socket, bound to
                                   MASTER_ADDR and MASTER_PORT, on which it shall listen
    MESHDIST_LAUNCH                the launch's mark, by which its processes are found at the end

Several launchers (one a host) make one job; they do not talk to each other. This module imports
neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TextIO

from meshdist.error_text import explain
from meshdist.runtime import guard
from meshdist.runtime.guard import MARK, Family, mark_value

__all__ = [
    "DEFAULT_PORT",
    "GRACE_S",
    "Child",
    "Ending",
    "Guard",
    "LaunchError",
    "Reservation",
    "Watch",
    "exit_code_of",
    "foreign_rank_variables",
    "rank_environment",
    "reserve_port",
    "run_processes",
    "signal_name",
]

DEFAULT_PORT = 29500
"""The port of rank 0's store where several hosts must agree on one in advance; torch's."""

GRACE_S = 3.0
"""How long a process that was asked to end may take before it is killed."""

_POLL_S = 0.02
_KEPT_BYTES = 32 * 1024
_DRAIN_S = 0.5


class LaunchError(ValueError):
    """The job cannot be started as asked; nothing of it runs."""


# -- the environment of a rank ------------------------------------------------------------------

_AGREED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# What other launchers say about a process. The first two names of each are its rank and the number
# of ranks (PMIx has none); the pattern covers every variable that speaks of one process.
_FOREIGN = (
    ("SLURM_PROCID", "SLURM_NTASKS", r"SLURM_(PROCID|LOCALID|GTIDS|NTASKS|NPROCS|STEP_NUM_TASKS)"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", r"OMPI_COMM_WORLD_.*"),
    ("PMIX_RANK", "", r"PMIX_(?!MCA_).*"),
    ("PMI_RANK", "PMI_SIZE", r"PMI_.*|MPI_LOCAL(RANKID|NRANKS)"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", r"MV2_COMM_WORLD_.*"),
)
_OF_ANOTHER_LAUNCH = re.compile(
    r"TORCHELASTIC_.*|ROLE_(NAME|RANK|WORLD_SIZE)|GROUP_WORLD_SIZE|MESHDIST_(LISTEN_FD|RUN_ID)"
)


def foreign_rank_variables(
    environment: Mapping[str, str], *, nprocs: int, nnodes: int, node_rank: int
) -> list[str]:
    """Return the names in environment by which a started process would mistake its rank.

    What torchrun says always belongs to another job. What Slurm or MPI say holds only where their
    processes are the ranks of this job: one rank for each of their processes, in their order.
    """
    names = [name for name in environment if _OF_ANOTHER_LAUNCH.fullmatch(name)]
    for rank, size, pattern in _FOREIGN:
        if rank not in environment:
            continue
        is_ours = (
            nprocs == 1
            and environment[rank] == str(node_rank)
            and environment.get(size, str(nnodes)) == str(nnodes)
        )
        if not is_ours:
            names += [name for name in environment if re.fullmatch(pattern, name)]
    return sorted(names)


def rank_environment(
    base: Mapping[str, str],
    *,
    local_rank: int,
    nprocs: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str,
    master_port: int,
    mark: str,
    listen_fd: int | None = None,
) -> dict[str, str]:
    """Return the environment of one rank: base, told its place in the job.

    Args:
        base: the launcher's own environment; what contradicts the rank's place is left out.
        local_rank: the rank's number on this host.
        nprocs: how many ranks each host has.
        nnodes: how many hosts the job has.
        node_rank: the number of this host.
        master_addr: where rank 0 serves the store.
        master_port: its port there.
        mark: the name of this launch, random hexadecimal digits.
        listen_fd: the inherited socket on which this rank shall listen, for rank 0 alone.
    """
    foreign = foreign_rank_variables(base, nprocs=nprocs, nnodes=nnodes, node_rank=node_rank)
    environment = {name: value for name, value in base.items() if name not in foreign}
    place = (node_rank * nprocs + local_rank, nnodes * nprocs, local_rank, nprocs, node_rank)
    environment.update(zip(_AGREED, map(str, place), strict=True))
    environment["MASTER_ADDR"] = master_addr
    environment["MASTER_PORT"] = str(master_port)
    environment[MARK] = mark_value(base.get(MARK), mark)
    if nnodes == 1:
        # Launchers on several hosts have nothing by which to agree on a random number.
        environment["MESHDIST_RUN_ID"] = mark
    if listen_fd is not None:
        environment["MESHDIST_LISTEN_FD"] = str(listen_fd)
    if nprocs > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


# -- the port -----------------------------------------------------------------------------------


@dataclass
class Reservation:
    """A port that only rank 0 of this job will get: it is bound, and nothing listens on it yet.

    A bound port is given to nobody who asks the system for a free one. It must not listen before
    rank 0 does, because a plain torch.distributed program binds it again, which Linux permits
    (SO_REUSEADDR on both sides) as long as nobody listens.

    Attributes:
        address: what goes into MASTER_ADDR.
        port: what goes into MASTER_PORT.
        listener: bound to address and port, for rank 0 to inherit; close it once rank 0 has it, so
            that the port refuses connections when rank 0 has gone.
    """

    address: str
    port: int
    listener: socket.socket
    _everywhere: socket.socket | None = None

    def close(self) -> None:
        """Give the port back."""
        self.listener.close()
        if self._everywhere is not None:
            self._everywhere.close()


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _bound_everywhere() -> socket.socket:
    with contextlib.suppress(OSError):
        return _bound(socket.AF_INET6, ("::", 0))
    return _bound(socket.AF_INET, ("0.0.0.0", 0))


def reserve_port(address: str = "127.0.0.1", port: int | None = None) -> Reservation:
    """Bind a port of this host for rank 0's store; the system chooses it unless port is given.

    Raises:
        LaunchError: address is not one of this host, or something listens on the port already.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        everywhere = None
        if port is None:
            # A port that is free on every interface: torch's own store listens on all of them.
            everywhere = _bound_everywhere()
            port = int(everywhere.getsockname()[1])
            if sys.platform != "linux":
                # Elsewhere a second socket on every interface is refused even when none listens.
                everywhere.close()
                everywhere = None
        try:
            bound = _bound(family, (target[0], port, *target[2:]))
        except BaseException:
            if everywhere is not None:
                everywhere.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        place = address if port is None else f"{address}, port {port}"
        raise LaunchError(
            explain(
                f"rank 0 cannot listen on {place}: {reason}",
                where=f"host {socket.gethostname()}",
                expected="an address of this host and a port that nobody uses",
                fix="leave out --master-port and --master-addr on one host, or name others",
            )
        ) from None
    return Reservation(address, port, bound, everywhere)


# -- how a process ended ------------------------------------------------------------------------


def signal_name(number: int) -> str:
    """Return the name of a signal, as in SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(code: int) -> int:
    """Return a shell's exit code for a subprocess return code: 128 + N for signal N."""
    return 128 - code if code < 0 else code


@dataclass(frozen=True)
class Ending:
    """How one process ended. code is an exit code, or minus the signal that ended it."""

    rank: int
    pid: int
    code: int

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + N for signal N."""
        return exit_code_of(self.code)

    def __str__(self) -> str:
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        hint = " (the system does this when memory runs out)" if self.code == -9 else ""
        return f"was ended by {signal_name(-self.code)}{hint}"


class Child(Protocol):
    """A started process: subprocess.Popen has this form."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return None while it runs, then its exit code, or minus the signal that ended it."""


# -- watching -----------------------------------------------------------------------------------


class Watch:
    """Watches child processes: tells in which order they end, and stops them.

    Where the system has process file descriptors (Linux), the order is the true one. Not safe for
    use by several threads.

    Attributes:
        running: the children that have not ended, by rank.
        failed: how the first child that failed has ended; None as long as none has.
        hurried: set it to make stop() kill without waiting.
    """

    def __init__(self) -> None:
        self.running: dict[int, Child] = {}
        self.failed: Ending | None = None
        self.hurried = False
        self._handles: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def add(self, rank: int, child: Child) -> None:
        """Watch child as the given rank."""
        self.running[rank] = child
        with contextlib.suppress(AttributeError, OSError):
            handle = os.pidfd_open(child.pid)
            self._handles[rank] = handle
            self._selector.register(handle, selectors.EVENT_READ, rank)

    def attend(self, file: BinaryIO | int, read: Callable[[], bool]) -> None:
        """Call read() whenever file is readable, until it returns False."""
        self._selector.register(file, selectors.EVENT_READ, (file, read))

    def step(self, timeout_s: float | None = None) -> list[Ending]:
        """Wait until something happens, at most timeout_s; return who ended, first one first."""
        is_polling = len(self._handles) < len(self.running)
        if is_polling:
            timeout_s = _POLL_S if timeout_s is None else min(timeout_s, _POLL_S)
        ended = []
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, int):
                ended += self._look_at(key.data)
            else:
                file, read = key.data
                if not read():
                    self._selector.unregister(file)
        if is_polling:
            for rank in sorted(self.running.keys() - self._handles.keys()):
                ended += self._look_at(rank)
        return ended

    def _look_at(self, rank: int) -> list[Ending]:
        child = self.running[rank]
        code = child.poll()
        if code is None:
            return []
        del self.running[rank]
        self._forget_handle(rank)
        ending = Ending(rank, child.pid, code)
        if code != 0 and self.failed is None:
            self.failed = ending
        return [ending]

    def _forget_handle(self, rank: int) -> None:
        handle = self._handles.pop(rank, None)
        if handle is not None:
            self._selector.unregister(handle)
            os.close(handle)

    def stop(
        self,
        signals: Sequence[tuple[int, float]] = ((signal.SIGTERM, GRACE_S),),
        family: Family | None = None,
    ) -> list[Ending]:
        """End all children that still run, and with a family all that belongs to it.

        Args:
            signals: what to send in turn, and how many seconds to wait after each; SIGKILL follows
                by itself. A child that leads a process group is signalled with its whole group.
            family: the processes of the launch; its members are killed when the children are gone.

        Returns:
            Who ended meanwhile, first one first.
        """
        ended = []
        for number, patience_s in signals:
            self._send(number)
            end = time.monotonic() + patience_s
            while self.running and not self.hurried and (rest := end - time.monotonic()) > 0:
                ended += self.step(rest)
        self._send(signal.SIGKILL)
        if family is not None:
            family.kill()
        end = time.monotonic() + 1.0
        while self.running and (rest := end - time.monotonic()) > 0:
            ended += self.step(rest)
        return ended

    def _send(self, number: int) -> None:
        for child in self.running.values():
            # Not reaped yet, so that nobody else can have this number.
            with contextlib.suppress(OSError):
                if os.getpgid(child.pid) == child.pid:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)

    def close(self) -> None:
        """Release what watching needs; the children are left as they are."""
        for rank in list(self._handles):
            self._forget_handle(rank)
        self._selector.close()


class Guard:
    """A helper process that ends a launch's family if this process dies, however it dies.

    Args:
        mark: the name of the launch, which must stand in the environment of its processes.
    """

    def __init__(self, mark: str) -> None:
        # Without the mark of an outer launch, which could end the guard before its work is done.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
            bufsize=0,
        )

    def adopt(self, pid: int) -> None:
        """Tell the guard about a started process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{pid}\n".encode())

    def dismiss(self) -> None:
        """End the guard, which then harms nobody: the family must have ended before."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()


# -- what the ranks write -----------------------------------------------------------------------

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?!\n|\Z))")


class _Stream:
    """Shows what one rank writes into a pipe, and keeps the end of it."""

    def __init__(self, pipe: BinaryIO, screen: TextIO, prefix: bytes) -> None:
        self._kept = bytearray()
        self._pipe = pipe
        self._screen = screen
        self._prefix = prefix
        self._partial = b""
        self._is_whole = True
        self.has_ended = False
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Show what there is to read; return False at the end."""
        try:
            data = os.read(self._pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            self.has_ended = True
            return False
        self._kept += data
        if len(self._kept) > _KEPT_BYTES:
            del self._kept[: len(self._kept) - _KEPT_BYTES]
            self._is_whole = False
        if self._prefix:
            data = self._prefixed(data)
        _show(self._screen, data)
        return True

    def _prefixed(self, data: bytes) -> bytes:
        data = self._partial + data
        lines = _LINE.findall(data)
        self._partial = data[sum(map(len, lines)) :]
        return b"".join(self._prefix + line for line in lines)

    def flush(self) -> None:
        """Show a last line that has no end."""
        if self._partial:
            _show(self._screen, self._prefix + self._partial + b"\n")
            self._partial = b""

    def close(self) -> None:
        """Close the pipe."""
        self._pipe.close()

    def tail(self) -> bytes:
        """Return the last lines, whole ones."""
        if self._is_whole:
            return bytes(self._kept)
        return bytes(self._kept).partition(b"\n")[2]


def _show(screen: TextIO, data: bytes) -> None:
    # A reader that has gone away must not end the job.
    with contextlib.suppress(OSError, ValueError):
        binary = getattr(screen, "buffer", None)
        if binary is None:
            screen.write(data.decode(errors="replace"))
        else:
            screen.flush()
            binary.write(data)
        screen.flush()


# -- signals to the launcher --------------------------------------------------------------------


class _Signals:
    """Notes the first signal that asks the launcher to end; a second one makes it hurry."""

    def __init__(self, watch: Watch) -> None:
        self.received: int | None = None
        self._watch = watch
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        watch.attend(self._reader, lambda: bool(os.read(self._reader, 64)))

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals while the block runs. Only the main thread can."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            wanted = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                wanted.append(signal.SIGHUP)
            before = {number: signal.signal(number, self._note) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.close(self._writer)
            os.close(self._reader)

    def _note(self, number: int, frame: object) -> None:
        if self.received is not None:
            self._watch.hurried = True
        self.received = self.received or number
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")


# Python programs end tidily on SIGINT; those that were started deaf to it hear SIGTERM.
_ON_INTERRUPT = ((signal.SIGINT, 2.0), (signal.SIGTERM, 1.5))


# -- the launch ---------------------------------------------------------------------------------


def _check(
    command: object, nprocs: int, nnodes: int, node_rank: int, address: str | None, port: int | None
) -> None:
    if not command:
        raise LaunchError(
            explain(
                "there is no command to start",
                expected="a script, or -m and a module",
                fix="meshdist run -n 4 script.py",
            )
        )
    if nprocs < 1:
        raise LaunchError(
            explain(
                f"cannot start {nprocs} processes",
                where="-n (nprocs)",
                expected="at least 1",
                found=str(nprocs),
                fix="meshdist run -n 4 script.py",
            )
        )
    if nnodes < 1:
        raise LaunchError(
            explain(
                f"a job cannot run on {nnodes} hosts",
                where="--nnodes",
                expected="at least 1",
                found=str(nnodes),
            )
        )
    if not 0 <= node_rank < nnodes:
        raise LaunchError(
            explain(
                f"host number {node_rank} does not exist in a job on {nnodes} host(s)",
                where="--node-rank",
                expected=f"0 to {nnodes - 1}: less than --nnodes",
                found=str(node_rank),
                fix="give each host its own number, from 0",
            )
        )
    if nnodes > 1 and not address:
        raise LaunchError(
            explain(
                f"a job on {nnodes} hosts needs the address of host 0",
                where="--master-addr",
                expected="a name or address by which every host reaches host 0",
                found="nothing",
                fix=f"meshdist run --nnodes {nnodes} --node-rank {node_rank} "
                "--master-addr HOST0 -n 4 script.py",
            )
        )
    if port is not None and not 0 <= port < 65536:
        raise LaunchError(
            explain(
                f"{port} is no port",
                where="--master-port",
                expected="1 to 65535, or nothing to have one chosen on a single host",
                found=str(port),
            )
        )


def _say_where_the_store_listens(address: str, port: int, nnodes: int) -> None:
    if address == "localhost" or address.startswith("127.") or address == "::1":
        if nnodes == 1:
            return
        place = f"{address}, port {port}"
    elif nnodes == 1:
        place = f"{address}, port {port}"
    else:
        place = f"every interface of this host, port {port}, for the others to reach as {address}"
    print(
        f"meshdist: rank 0's store listens on {place}; whoever reaches it can join or disturb "
        "the job (it asks for no password), so keep the port inside the cluster",
        file=sys.stderr,
        flush=True,
    )


def run_processes(
    command: Sequence[str] | Callable[[int], Sequence[str]],
    nprocs: int,
    *,
    env: Mapping[str, str] | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    prefix: bool = False,
) -> int:
    """Run command as nprocs ranks on this host, and return when all have ended.

    When a rank fails, the others are stopped within five seconds and the end of its stderr is shown
    once more, last. Whatever the ranks have started ends with them. Standard output of the ranks
    goes where the caller's goes, standard input too; stderr is shown as it comes.

    Args:
        command: program and arguments; or a function that gives them for a local rank.
        nprocs: how many ranks this host, and every other one of the job, starts.
        env: the environment to start from (default: this process's).
        nnodes: how many hosts take part, each with a launcher of its own.
        node_rank: the number of this host, from 0.
        master_addr: where every host reaches host 0; not needed on a single host.
        master_port: the port there; a free one is chosen on a single host, else 29500.
        prefix: whether every line of output begins with the rank that wrote it.

    Returns:
        0 if all ranks succeeded; the exit code of the rank that failed first, 128 + N if signal N
        ended it; 130, 143 or 129 if this process was asked to end by SIGINT, SIGTERM or SIGHUP
        (which is noticed in the main thread only).

    Raises:
        LaunchError: the job cannot be started as asked; nothing is left running.
    """
    _check(command, nprocs, nnodes, node_rank, master_addr, master_port)
    address = master_addr or "127.0.0.1"
    # Port 0 asks for a free one, as it does everywhere.
    port = master_port or None
    with contextlib.ExitStack() as stack:
        reservation = None
        if nnodes == 1:
            reservation = stack.enter_context(contextlib.closing(reserve_port(address, port)))
            port = reservation.port
        elif port is None:
            port = DEFAULT_PORT
        if node_rank == 0:
            _say_where_the_store_listens(address, port, nnodes)
        job = stack.enter_context(contextlib.closing(_Job(command, prefix)))
        for local_rank in range(nprocs):
            listener = reservation.listener if reservation and local_rank == 0 else None
            environment = rank_environment(
                os.environ if env is None else env,
                local_rank=local_rank,
                nprocs=nprocs,
                nnodes=nnodes,
                node_rank=node_rank,
                master_addr=address,
                master_port=port,
                mark=job.mark,
                listen_fd=None if listener is None else listener.fileno(),
            )
            job.start(local_rank, environment, listener)
        return job.finish()


class _Job:
    """The ranks of one launch on this host."""

    def __init__(
        self, command: Sequence[str] | Callable[[int], Sequence[str]], prefix: bool
    ) -> None:
        self.mark = secrets.token_hex(8)
        self._command = command
        self._prefix = prefix
        self._watch = Watch()
        self._family = Family(self.mark)
        self._errors: dict[int, _Stream] = {}
        self._streams: list[_Stream] = []
        self._signals = _Signals(self._watch)
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._watch.close)
        self._cleanup.enter_context(self._signals.noted())
        try:
            self._guard = Guard(self.mark)
        except BaseException:
            self._cleanup.close()
            raise
        self._cleanup.callback(self._guard.dismiss)

    def start(
        self, local_rank: int, environment: Mapping[str, str], listener: socket.socket | None
    ) -> None:
        """Start one rank, which inherits listener; this process then gives it up."""
        if self._signals.received:
            return
        rank = int(environment["RANK"])
        command = self._command(local_rank) if callable(self._command) else self._command
        try:
            child = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE if self._prefix else None,
                stderr=subprocess.PIPE,
                pass_fds=() if listener is None else (listener.fileno(),),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise LaunchError(
                explain(
                    f"cannot start {command[0]!r}: {error.strerror}",
                    where=f"rank {rank}, the command: {shlex.join(command)}",
                    expected="a program that can be executed",
                    fix="check its path and its permissions",
                )
            ) from None
        if listener is not None:
            listener.close()
        self._guard.adopt(child.pid)
        self._family.add(child.pid)
        self._watch.add(rank, child)
        prefix = f"[rank {rank}] ".encode() if self._prefix else b""
        if child.stdout is not None:
            self._show(child.stdout, sys.stdout, prefix)
        if child.stderr is not None:
            self._errors[rank] = self._show(child.stderr, sys.stderr, prefix)

    def _show(self, pipe: Any, screen: TextIO, prefix: bytes) -> _Stream:
        stream = _Stream(pipe, screen, prefix)
        self._streams.append(stream)
        self._watch.attend(pipe, stream.read)
        return stream

    def finish(self) -> int:
        """Wait until the ranks have ended, stop all at the first failure; return the exit code."""
        watch = self._watch
        while watch.running and watch.failed is None and self._signals.received is None:
            watch.step()
        failed, received = watch.failed, self._signals.received
        others = len(watch.running)
        if failed is None and received == signal.SIGINT:
            watch.stop(_ON_INTERRUPT, self._family)
        elif failed is None and received is not None:
            watch.stop(((received, GRACE_S),), self._family)
        else:
            watch.stop(family=self._family)
        self._drain()
        if failed is not None:
            self._report(failed, others)
            return failed.exit_code
        return 0 if received is None else 128 + received

    def _drain(self) -> None:
        # A process that left the family may hold a pipe open: it is not waited for.
        end = time.monotonic() + _DRAIN_S
        while (rest := end - time.monotonic()) > 0 and not all(s.has_ended for s in self._streams):
            self._watch.step(rest)
        for stream in self._streams:
            stream.flush()

    def _report(self, failed: Ending, others: int) -> None:
        tail = self._errors[failed.rank].tail()
        summary = f"meshdist: rank {failed.rank} (pid {failed.pid}) {failed}"
        if others:
            summary += f"; stopped {others} other rank(s) of this host"
        summary += ". The end of its stderr:" if tail.strip() else ". It wrote nothing to stderr."
        _show(sys.stderr, f"{summary}\n".encode() + tail)
        if tail and not tail.endswith(b"\n"):
            _show(sys.stderr, b"\n")

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self._watch.running:
            self._watch.stop((), self._family)
        for stream in self._streams:
            stream.close()
        self._cleanup.close()

"""Start the processes of a job on one host, monitor them, and stop all of them at the end.

Each host of a job has its own launcher; launchers do not communicate. The module and its imports
load neither torch nor numpy.

If a rank fails, the launcher stops the others within five seconds; in the first two they may end by
themselves. It prints the end of the first failed rank's stderr again, as the last output. It also
stops processes that ranks started. Ranks share its standard input. Their output is printed in
complete lines as it arrives. Tracebacks are held for up to three seconds, so that equal tracebacks
are printed once.

The exit code is 0 if all ranks succeeded, else the first failed rank's (128 + N for signal N), or
128 + N if signal N ended the launcher.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..error_text import ranks_text
from ..runtime.deadlines import Deadline
from ..runtime.hosts import MORE_DESCRIPTORS, raise_descriptor_limit
from .child_processes import GRACE_S, Launch, ProcessExit
from .failed_ranks import Failure, Report, find_cause, grouped, stacks_text, summary_of, text_of
from .output import LOOK_S, Console, Destination, Output, Stream, open_terminal, show
from .rank_environment import (
    JobNode,
    LaunchError,
    check_environment,
    rank_environment,
    reserve_port,
)

DEFAULT_PORT = 29500
"""The default port of rank 0's store on several hosts, as in torch."""

_DESCRIPTORS = 8  # at most, in addition to the ranks' descriptors
_DRAIN_S = 0.5
# How long ranks may end by themselves after a failure: they then report their errors, and the cause
# may be a rank that ends later. Then the grace period after SIGTERM.
_ENDING_S = 2.0
_STOPPING_S = 2.0


# -- signals to the launcher --------------------------------------------------------------------


class _Signals:
    """Record of the first signal that ends the launcher; a second signal makes it hurry."""

    def __init__(self, launch: Launch) -> None:
        self.received: int | None = None
        self._launch = launch
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        launch.attend(self._reader, lambda: bool(os.read(self._reader, 64)))

    @contextlib.contextmanager
    def noted(self, numbers: Sequence[int] | None) -> Iterator[None]:
        """Record ``numbers`` signals (None: INT, TERM, HUP) in the context, on the main thread."""
        before = {}
        if threading.current_thread() is threading.main_thread():
            if numbers is None:
                is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
                numbers = [signal.SIGINT, signal.SIGTERM, *([] if is_nohup else [signal.SIGHUP])]
            before = {number: signal.signal(number, self._note) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            os.close(self._writer)
            os.close(self._reader)

    def _note(self, number: int, frame: object) -> None:
        if self.received is not None:
            self._launch.hurried = True
        self.received = self.received or number
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")


# Python programs end cleanly on SIGINT; programs that ignore it get SIGTERM.
_ON_INTERRUPT = ((signal.SIGINT, 2.0), (signal.SIGTERM, 1.5))


# -- the launch ---------------------------------------------------------------------------------


def _check(command: object, nprocs: int, node: JobNode) -> None:
    nnodes, node_rank, port = node.nnodes, node.node_rank, node.master_port
    if not command:
        raise LaunchError(
            "no command to start",
            expected="a script, or -m and a module",
            fix="meshdist run -n 4 script.py",
        )
    counts = (
        (nprocs, f"cannot start {nprocs} processes", "-n (nprocs)", "meshdist run -n 4 script.py"),
        (nnodes, f"a job cannot run on {nnodes} hosts", "--nnodes", "pass --nnodes 1 or more"),
    )
    for count, problem, where, fix in counts:
        if count < 1:
            expected, found = "at least 1", str(count)
            raise LaunchError(problem, where=where, expected=expected, found=found, fix=fix)
    if not 0 <= node_rank < nnodes:
        raise LaunchError(
            f"host number {node_rank} does not exist in a job on {nnodes} host(s)",
            where="--node-rank",
            expected=f"0 to {nnodes - 1}: less than --nnodes",
            found=str(node_rank),
            fix="pass a different --node-rank on each host, from 0",
        )
    if nnodes > 1 and not node.master_addr:
        raise LaunchError(
            f"a job on {nnodes} hosts needs the address of host 0",
            where="--master-addr",
            expected="a name or address of host 0 that every host can reach",
            found="nothing",
            fix=f"meshdist run --nnodes {nnodes} --node-rank {node_rank} "
            "--master-addr HOST0 -n 4 script.py",
        )
    if port is not None and not 0 <= port < 65536:
        raise LaunchError(
            f"{port} is not a port",
            where="--master-port",
            expected="1 to 65535",
            found=str(port),
            fix="pass a port from 1 to 65535, or omit --master-port on a single host",
        )


def _warn_of_open_store(address: str, port: int, nnodes: int) -> None:
    is_loopback = address in ("localhost", "::1") or address.startswith("127.")
    if is_loopback and nnodes == 1:
        return
    endpoint = f"{address}, port {port}"
    if not is_loopback and nnodes > 1:
        endpoint = f"every interface of this host, port {port} (other hosts connect to {address})"
    print(
        f"meshdist: rank 0's store listens on {endpoint}; any process that reaches it can join or "
        "disturb the job (there is no password), so keep the port inside the cluster",
        file=sys.stderr,
        flush=True,
    )


def run_processes(
    command: Sequence[str] | Callable[[int], Sequence[str]],
    nprocs: int,
    *,
    env: Mapping[str, str] | None = None,
    node: JobNode = JobNode(),  # noqa: B008 - it is frozen
    output: Output = Output(),  # noqa: B008 - it is frozen
    signals: Sequence[int] | None = None,
    stopping_s: float | None = None,
) -> int:
    """Run ``command`` as ``nprocs`` ranks on this host; return the job's exit code.

    Args:
        command: program and arguments, or a function that returns them for a local rank.
        nprocs: the number of ranks on each host.
        env: the base environment (default: this process's).
        node: this host's part of the job; the default port is free on a single host, else 29500.
        signals: the signals that end the job; None for SIGINT, SIGTERM and, unless ignored, SIGHUP.
        stopping_s: grace period in seconds before SIGKILL; None for 2 after a failure and 3 to 3.5
            after a signal.
    """
    _check(command, nprocs, node)
    nnodes = node.nnodes
    output.check_ranks(nprocs, nnodes)
    check_environment(os.environ if env is None else env)
    per_rank = 5 if output.tee or output.redirects else 3  # two pipes, a handle, and two files
    if lack := raise_descriptor_limit(_DESCRIPTORS + nprocs * per_rank):
        raise LaunchError(f"cannot start {nprocs} processes: {lack}", fix=MORE_DESCRIPTORS)
    address = node.master_addr or "127.0.0.1"
    # Port 0 asks for a free port.
    port = node.master_port or None
    meets_here = nnodes == 1 and node.master_addr is None and port is None
    with contextlib.ExitStack() as stack:
        reservation = None
        if nnodes == 1:
            reservation = stack.enter_context(contextlib.closing(reserve_port(address, port)))
            port = reservation.port
        elif port is None:
            port = DEFAULT_PORT
        if node.node_rank == 0:
            _warn_of_open_store(address, port, nnodes)
        node = replace(node, master_addr=address, master_port=port)
        launch = stack.enter_context(contextlib.closing(Launch()))
        asked = _Signals(launch)
        stack.enter_context(asked.noted(signals))
        job = stack.enter_context(
            contextlib.closing(_LocalRanks(launch, asked, command, output, stopping_s))
        )
        for local_rank in range(nprocs):
            listener = reservation.listener if reservation and local_rank == 0 else None
            environment = rank_environment(
                os.environ if env is None else env,
                node,
                local_rank=local_rank,
                nprocs=nprocs,
                mark=launch.mark,
                listen_fd=None if listener is None else listener.fileno(),
                directory=launch.directory if meets_here else None,
            )
            job.start(local_rank, environment, listener)
        return job.finish()


@dataclass
class _LocalRanks:
    _launch: Launch
    _signals: _Signals
    _command: Sequence[str] | Callable[[int], Sequence[str]]
    _output: Output
    _stopping_s: float | None
    _errors: dict[int, Stream] = field(default_factory=dict)
    _streams: list[Stream] = field(default_factory=list)
    _late: dict[int, Report] = field(default_factory=dict)  # the last such report of each rank
    _late_at: int = -1
    _console: Console = field(default_factory=Console)
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(
        self, local_rank: int, environment: Mapping[str, str], listener: socket.socket | None
    ) -> None:
        """Start a rank with ``listener``, unless a signal ends the launcher."""
        if self._signals.received:
            return
        rank = int(environment["RANK"])
        command = self._command(local_rank) if callable(self._command) else self._command
        destinations = {
            kind: self._files.enter_context(
                contextlib.closing(self._output.destination(kind, rank=rank, local_rank=local_rank))
            )
            for kind in ("stdout", "stderr")
        }
        ends = {kind: self._open(destination) for kind, destination in destinations.items()}
        try:
            self._launch.start(
                rank,
                command,
                environment,
                listener=listener,
                stdout=ends["stdout"][1],
                stderr=ends["stderr"][1],
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {command[0]!r}: {error.strerror}",
                where=f"rank {rank}, the command: {shlex.join(command)}",
                expected="a program that can be executed",
                fix="check its path and its permissions",
            ) from None
        finally:
            for _, writer in ends.values():
                os.close(writer)
        self._errors[rank] = ends["stderr"][0]

    def _open(self, destination: Destination) -> tuple[Stream, int]:
        """Return a stream that prints a rank's output, and the rank's descriptor for it."""
        reader, writer = -1, -1
        if destination.is_terminal and destination.screen is not None:
            with contextlib.suppress(OSError):
                reader, writer = open_terminal(destination.screen)
        if reader < 0:
            reader, writer = os.pipe()
            destination = replace(destination, is_terminal=False)
        pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 - closed with the job
        stream = Stream(
            pipe, destination, self._console, holds_reports=destination.kind == "stderr"
        )
        self._streams.append(stream)
        self._launch.attend(pipe, stream.read)
        return stream, writer

    def finish(self) -> int:
        """Wait for all ranks, stop them after a failure or signal; return the exit code."""
        launch, signals = self._launch, self._signals
        while launch.running and launch.failed is None and signals.received is None:
            self._step()
        received = signals.received
        if launch.failed is not None:
            grace = Deadline(_ENDING_S)
            while launch.running and signals.received is None and not grace.is_over:
                self._step(grace.left_s)
            ended, stopped = tuple(launch.endings), len(launch.running)
            launch.stop(((signal.SIGTERM, self._patience_s(_STOPPING_S)),))
            self._drain()
            return self._report(ended, stopped)
        stacks: dict[int, bytes] = {}
        if received is not None:
            self._report_ending(received)
        if received == signal.SIGINT:
            stacks = launch.ask_where()
            show(sys.stderr, stacks_text(stacks))
        is_quick = received == signal.SIGINT and self._stopping_s is None
        by_signal = ((received or signal.SIGTERM, self._patience_s(GRACE_S)),)
        launch.stop(_ON_INTERRUPT if is_quick else by_signal)
        if launch.killed and not launch.hurried:
            self._report_killed(launch.killed)
        self._drain()
        # A rank that reported its stack would only repeat it in its KeyboardInterrupt.
        self._show([it for it in self._take_reports() if not it.is_of_interrupt(stacks)])
        self._flush()
        return 0 if received is None else 128 + received

    def _patience_s(self, default_s: float) -> float:
        return default_s if self._stopping_s is None else self._stopping_s

    def _report_ending(self, received: int) -> None:
        how = "interrupted" if received == signal.SIGINT else signal.Signals(received).name
        text = f"meshdist: {how}; stopping {len(self._launch.running)} rank(s) on this host"
        if received == signal.SIGINT:
            text += " (press Ctrl-C again to kill them immediately)"
        show(sys.stderr, f"{text}\n".encode())

    def _report_killed(self, ranks: Sequence[int]) -> None:
        text = f"meshdist: killed {ranks_text(ranks)}, still running after the signal"
        show(sys.stderr, f"{text}; pass a longer --shutdown-timeout to wait longer\n".encode())

    def _step(self, timeout_s: float | None = None) -> None:
        """Wait for the launch's next event, and print output that is due."""
        if any(stream.is_holding() for stream in self._streams):
            timeout_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
        self._launch.step(timeout_s)
        for stream in self._streams:
            stream.show_late_line()
        if self._launch.failed is None:
            self._show_late_reports()

    def _show_late_reports(self) -> None:
        """Print held tracebacks that are due, with other ranks' equal tracebacks."""
        late = {rank for rank, stream in self._errors.items() if stream.has_late_report()}
        waiting = [Report(rank, stream.report) for rank, stream in sorted(self._errors.items())]
        for group in grouped([report for report in waiting if report.text]) if late else ():
            if late.isdisjoint(report.rank for report in group):
                continue
            self._late |= {report.rank: report for report in group}
            if len(group) == 1:
                self._errors[group[0].rank].show_report()
                continue
            for report in group:
                self._errors[report.rank].take_report()
            self._show(group)
        self._late_at = self._console.num_shown if late else self._late_at

    def _drain(self) -> None:
        # A process outside the process tree may hold a pipe open: do not wait for it.
        grace = Deadline(_DRAIN_S)
        while not grace.is_over and not all(stream.has_ended for stream in self._streams):
            self._launch.step(grace.left_s)

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()

    def _take_reports(self) -> list[Report]:
        """Return the held tracebacks in rank order, and drop them."""
        taken = ((rank, self._errors[rank].take_report()) for rank in sorted(self._errors))
        return [Report(rank, text) for rank, text in taken if text]

    def _show(self, reports: Sequence[Report]) -> None:
        for group in grouped([report for report in reports if self._errors[report.rank].is_shown]):
            title = f"meshdist: {ranks_text(report.rank for report in group)} reported:\n"
            show(sys.stderr, title.encode() + text_of(group))

    def _report(self, endings: Sequence[ProcessExit], num_stopped: int) -> int:
        """Print the ranks' reports, the first failure last; return that rank's exit code."""
        failures = [self._failure(ending) for ending in endings if ending.code != 0]
        cause = find_cause(failures)
        ending = cause.ending
        taken = self._take_reports()
        self._flush()
        last = [
            report
            for report in self._late.values()
            if self._errors[report.rank].ends_with(report.text)
        ]
        reports = sorted(
            [*taken, *last], key=lambda report: (report.rank != ending.rank, report.rank)
        )
        has_reported = bool(reports) and reports[0].rank == ending.rank
        same = grouped(reports)[0] if has_reported else [Report(ending.rank, cause.text)]
        others = [report for report in taken if report not in same]
        self._show(others)
        text = text_of(same)
        if (
            all(report in last for report in same)
            and self._console.num_shown == self._late_at
            and not others
        ):
            end, text = ". Its report is above.", b""
        else:
            end = ". The end of its stderr:" if text.strip() else ". It wrote nothing to stderr."
        equal = [report.rank for report in same]
        summary = summary_of(cause, failures, endings, equal, num_stopped)
        show(sys.stderr, f"{summary}{end}\n".encode() + text)
        return ending.exit_code

    def _failure(self, ending: ProcessExit) -> Failure:
        stream, at = self._errors[ending.rank], ending.at
        # A process killed by a signal raised no exception; ignore tracebacks it logged earlier.
        if ending.code > 0 and stream.reported_at is not None:
            at = min(at, stream.reported_at)
        return Failure(ending, at, stream.tail())

    def close(self) -> None:
        """Stop running ranks, and close the pipes and files."""
        if self._launch.running:
            self._launch.stop(())
        for stream in self._streams:
            stream.pipe.close()
        self._files.close()

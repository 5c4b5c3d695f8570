"""Measure all sides in turn; idle sides' ranks sleep.

For each collective and size, every round measures each side once, in random order. A sample is the
slowest rank's time per call; a cell is the median over rounds.
"""

from __future__ import annotations

import hmac
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ..error_text import ExplainedError
from ..operation_table import OPERATIONS
from ..runtime.deadlines import Deadline
from .worker import ADDRESS, say

_SAMPLE_S = 0.03
_MOST_CALLS = 2000
_START_S = 60.0
# NumPy requests huge pages for large arrays by default, torch only on request, and they make copies
# up to a third faster in any library. glibc may release and fault in the end of the heap in each
# step, depending on which small object is last there: unrelated code changes made a DDP step 20 %
# slower.
_ALIKE = {
    "OMP_NUM_THREADS": "1",
    "NUMPY_MADVISE_HUGEPAGE": "0",
    "THP_MEM_ALLOC_ENABLE": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),  # the most that glibc would choose by itself
}
_LOOK_S = 0.2
_GREETING_S = 1.0  # a rank sends its greeting as soon as it has connected
_GREETING_BYTES = 4096
_SPARE_PLACES = 64  # for connections of other processes


class SideFailedError(ExplainedError, RuntimeError):
    """The ranks of a side do not start, or have ended."""


@dataclass(frozen=True)
class Entrant:
    """A side to measure.

    Args:
        label: the name in the report.
        side: the name in ``sides.SIDES``.
        launch: the launcher's command, with {n} for the number of ranks; () starts one process per
            rank with the variables of ``env://``.
        python: the interpreter.
        environment: further variables.
        program: the interpreter's arguments: ``worker``, or a program with its protocol.
    """

    label: str
    side: str
    launch: tuple[str, ...] = ()
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "meshdist.bench.worker")


@dataclass
class Cell:
    """Samples of each entrant for a collective at a size, in seconds per call."""

    operation: str
    num_bytes: int
    dtype: str = "float32"
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, label: str) -> float | None:
        """Return the median of an entrant's samples, or None without samples."""
        samples = self.samples.get(label)
        return statistics.median(samples) if samples else None

    def ratio(self, label: str, to: str) -> float | None:
        """Return the median over rounds of ``label``'s time divided by ``to``'s, or None."""
        both = (self.samples.get(label), self.samples.get(to))
        if not both[0] or not both[1]:
            return None
        return statistics.median(a / b for a, b in zip(both[0], both[1], strict=True))


@dataclass
class _Ranks:
    """Running ranks of one side."""

    _label: str
    _talks: list[Any]
    _calls: dict[tuple[str, int, str], int | None] = field(default_factory=dict)

    def sample(self, operation: str, num_bytes: int, dtype: str) -> float | None:
        """Return the slowest rank's seconds per call; None if the side has no such call."""
        call = operation, num_bytes, dtype
        if call not in self._calls:
            first = self._ask(*call, 2)
            self._calls[call] = (
                None
                if first is None
                else max(1, min(_MOST_CALLS, int(_SAMPLE_S / max(first, 1e-9))))
            )
        calls = self._calls[call]
        return None if calls is None else self._ask(*call, calls)

    def end(self) -> None:
        for talk in self._talks:
            say(talk, {"operation": "end"})

    def _ask(self, operation: str, num_bytes: int, dtype: str, calls: int) -> float | None:
        order = {
            "operation": operation,
            "bytes": num_bytes,
            "dtype": dtype,
            "warm_up": 1,
            "calls": calls,
        }
        for talk in self._talks:
            say(talk, order)
        lines = [talk.readline() for talk in self._talks]
        if "" in lines:
            raise SideFailedError(
                f"a rank of {self._label} ended while it was measured",
                where=f"{operation} of {num_bytes} bytes, rank {lines.index('')}",
                fix="check the stderr of the rank for an error",
            )
        answers = [json.loads(line)["seconds"] for line in lines]
        return None if answers[0] is None else max(answers)


@contextmanager
def running(entrants: Sequence[Entrant], num_ranks: int) -> Iterator[dict[str, _Ranks]]:
    """Start each entrant's ranks, yield them by label, and stop them."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        path, secret = os.path.join(folder, "socket"), secrets.token_hex(16)
        listener.bind(path)
        listener.listen(len(entrants) * num_ranks + _SPARE_PLACES)
        listener.settimeout(_LOOK_S)
        ranks = {}
        for entrant in entrants:
            processes = stack.enter_context(_started(entrant, num_ranks, f"{path} {secret}"))
            talks: dict[int, Any] = {}
            while len(talks) < num_ranks:
                with _accepted(listener, processes, entrant.label) as connection:
                    rank = rank_of(connection, secret)
                    if rank is not None:
                        talks[rank] = stack.enter_context(connection.makefile("rw"))
            in_order = [talks[rank] for rank in range(num_ranks)]
            ranks[entrant.label] = _Ranks(entrant.label, in_order)
        yield ranks
        for each in ranks.values():
            each.end()


def measure(
    ranks: dict[str, _Ranks],
    operations: Sequence[str],
    sizes: Sequence[int],
    rounds: int,
    show: Callable[[Cell], None],
    dtype: str = "float32",
) -> list[Cell]:
    """Return a Cell for each collective and size, with ``rounds`` samples per entrant.

    Args:
        show: called with each complete cell.
    """
    cells = []
    order = list(ranks)
    shuffler = random.Random(0)
    for operation in operations:
        # Some names are not collectives: ``send_recv``, and combinations in other benchmarks.
        for num_bytes in (
            sizes if operation not in OPERATIONS or OPERATIONS[operation].parameters else (0,)
        ):
            cell = Cell(operation, num_bytes, dtype)
            for _ in range(rounds):
                shuffler.shuffle(order)
                for label in order:
                    sample = ranks[label].sample(operation, num_bytes, dtype)
                    if sample is not None:
                        cell.samples.setdefault(label, []).append(sample)
            cells.append(cell)
            show(cell)
    return cells


def rank_of(connection: socket.socket, secret: str) -> int | None:
    """Return the rank that connected with ``secret``, or None."""
    connection.settimeout(_GREETING_S)
    greeting = b""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        while not greeting.endswith(b"\n") and len(greeting) < _GREETING_BYTES:
            greeting += (more := connection.recv(_GREETING_BYTES))
            if not more:
                return None
        message = json.loads(greeting)
        if hmac.compare_digest(message["secret"], secret):
            connection.settimeout(None)
            return int(message["rank"])
    return None


def _start(entrant: Entrant, num_ranks: int, address: str) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, **_ALIKE, **entrant.environment, ADDRESS: address}
    command = [entrant.python, *entrant.program, entrant.side, entrant.label]
    if entrant.launch:
        launch = [word.replace("{n}", str(num_ranks)) for word in entrant.launch]
        try:
            return [subprocess.Popen([*launch, *command], env=environment)]
        except FileNotFoundError:
            raise SideFailedError(
                f"cannot start {entrant.label}: command {launch[0]!r} was not found",
                fix=f"install {launch[0]!r}, or remove {entrant.label} from --sides",
            ) from None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    return [
        subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]


@contextmanager
def _started(
    entrant: Entrant, num_ranks: int, address: str
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start an entrant's processes, which connect to ``address``, and stop them."""
    processes = _start(entrant, num_ranks, address)
    try:
        yield processes
    except BaseException:
        for process in processes:  # they were not asked to exit
            process.terminate()
        raise
    finally:
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _accepted(
    listener: socket.socket, processes: list[subprocess.Popen[bytes]], label: str
) -> socket.socket:
    """Return the next rank's connection; raise SideFailedError if a rank ended or is late."""
    grace = Deadline(_START_S)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            codes = [process.poll() for process in processes]
            if any(code is not None for code in codes):
                raise SideFailedError(
                    f"a rank of {label} ended before it could be measured",
                    found=f"exit codes {[code for code in codes if code is not None]}",
                    fix="check the stderr of the rank for an error",
                ) from None
            if grace.is_over:
                raise SideFailedError(
                    f"the ranks of {label} were not ready within {_START_S:g} s",
                    fix="check their stderr for an error, and run the benchmark on an idle machine",
                ) from None
        else:
            return connection

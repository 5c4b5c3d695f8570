"""Processes started from Python: ``spawn(fn, args, nprocs)`` returns what each rank returned.

Each rank is a fresh interpreter with the environment that ``meshdist run`` would give it. It
imports the main module under another name than ``__main__``, as the start method "spawn" of
multiprocessing does, so that functions and classes of a script mean the same in every process; what
is defined in no file (a notebook's cells) travels by cloudpickle. A pipe carries back the result
or the exception.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import cloudpickle

from ..arguments import check_timeout, get_integer
from ..checking.call_sites import one_frame
from ..error_text import ranks_text
from ..errors import (
    ArgumentError,
    CollectiveTimeoutError,
    KindError,
    RankFailedError,
    WorldError,
)
from ..launching.child_processes import Launch, ProcessExit, open_closed_streams
from ..launching.failed_ranks import places_text
from ..launching.output import show
from ..launching.rank_environment import JobPlace, rank_environment, reserve_port
from ..runtime.deadlines import Deadline
from .spawn_child import is_loading_main

__all__ = ["spawn"]

T = TypeVar("T")

_COMMAND = """
import sys
given, sys.path = sys.path, [place for place in sys.path if place] + [{root!r}]
from meshdist.worlds.spawn_child import serve_rank  # not one that lies in the current folder
sys.path = [*given, {root!r}]
serve_rank({call}, {answer}, {parent})
"""
_ROOT = str(Path(__file__).resolve().parents[2])
_FOLLOWERS_S = 0.3
"""How long after a failure to look for another that came before it."""


@one_frame
def spawn(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    *,
    timeout: timedelta | None = None,
) -> list[T]:
    """Call ``fn(*args)`` in each of ``nprocs`` new processes and return the results by rank.

    A rank finds itself in the environment that ``meshdist run`` sets: ``init_process_group()`` and
    ``init_device_mesh(...)`` need no arguments about it. When one rank fails, the others are
    stopped within five seconds; none outlives this call, or this process.

    Args:
        fn: a function of a module, of the script that runs, or of a notebook's cell. A script must
            guard its main part with ``if __name__ == "__main__":``, since every process imports it.
        args: its arguments; each process gets a copy.
        nprocs: how many processes.
        timeout: how long all of them may take together; None means for ever.

    Returns:  what ``fn`` returned, by rank; sent by pickle.

    Raises:
        ArgumentError, KindError: bad arguments, before any process starts.
        RankFailedError: a rank raised, or its process ended; the first is in ``rank``. The cause
            is its exception, and the text holds its traceback.
        CollectiveTimeoutError: not all ranks have returned in time.
        WorldError: called while a spawned process imports the main module.

    Example:
        >>> import meshdist as md
        >>> md.spawn(pow, (2, 10), nprocs=2)
        [1024, 1024]
    """
    _check(fn, args, timeout)
    nprocs = get_integer(nprocs, "nprocs", 1)
    open_closed_streams()
    with contextlib.ExitStack() as stack:
        call = stack.enter_context(_call_file(fn, tuple(args)))
        launch = stack.enter_context(contextlib.closing(Launch()))
        team = stack.enter_context(contextlib.closing(_Team(launch)))
        reservation = stack.enter_context(contextlib.closing(reserve_port()))
        place = JobPlace(master_addr=reservation.address, master_port=reservation.port)
        for rank in range(nprocs):
            listener = reservation.listener if rank == 0 else None
            environment = rank_environment(
                os.environ,
                place,
                local_rank=rank,
                nprocs=nprocs,
                mark=launch.mark,
                listen_fd=None if listener is None else listener.fileno(),
                directory=launch.directory,
            )
            team.start(rank, environment, call.fileno(), listener)
        # Only rank 0 listens from now on, so that the port rejects connections once it has ended.
        reservation.close()
        return team.results(timeout)


def _check(fn: object, args: object, timeout: object) -> None:
    if is_loading_main():
        raise WorldError(
            "spawn was called while a spawned process imports the module that calls it",
            where=f"process {os.getpid()}, which was about to load the function it shall call",
            expected="spawn called by the program, not by the import of its module",
            fix='put the main part of the script under: if __name__ == "__main__":',
        )
    if not callable(fn):
        raise KindError(
            "spawn needs a function",
            found=f"{fn!r}",
            fix="pass the function itself, its arguments as args: spawn(fn, args=(x,), nprocs=4)",
        )
    if not isinstance(args, (tuple, list)):
        raise KindError(
            "args must be a tuple",
            found=f"{args!r}",
            fix="for one argument write args=(x,)",
        )
    check_timeout(timeout)


# -- what a rank gets ---------------------------------------------------------------------------


def _preparation() -> dict[str, Any]:
    """Return multiprocessing's data by which a new process finds this program's modules."""
    main = sys.modules["__main__"]
    data: dict[str, Any] = {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "sys_argv": sys.argv,
        "dir": os.getcwd(),
        "orig_dir": os.getcwd(),
    }
    name = getattr(getattr(main, "__spec__", None), "name", None)  # pdb's has none
    path = getattr(main, "__file__", None)
    if name is not None:
        # What runs by `python -m package` is not imported again: its file is named __main__.
        if name.rpartition(".")[2] != "__main__":
            data["init_main_from_name"] = name
    elif path is not None and os.path.isfile(path):
        data["init_main_from_path"] = os.path.abspath(path)
    return data


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that sends only the names of what the ranks find in the main module they import."""

    def __init__(self, file: BinaryIO, has_main: bool) -> None:
        super().__init__(file)
        self._has_main = has_main

    def reducer_override(self, obj: Any) -> Any:
        if self._has_main and isinstance(obj, (type, types.FunctionType)):
            main = sys.modules["__main__"]
            if obj.__module__ == "__main__" and vars(main).get(obj.__qualname__) is obj:
                return NotImplemented
        return super().reducer_override(obj)


def _call_file(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return an open file without a name that holds the call, for every rank to read."""
    data = _preparation()
    has_main = "init_main_from_name" in data or "init_main_from_path" in data
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, has_main).dump((fn, args))
    except Exception as failure:
        raise ArgumentError(
            "the function and its arguments cannot be sent to other processes",
            where=f"fn={fn!r}",
            expected="what cloudpickle can write",
            found=f"{type(failure).__name__}: {failure}",
            fix="make the object inside fn; or run simulated ranks, which share this process: "
            "meshdist.simulate(fn, nprocs, args)",
        ) from failure
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    pickle.dump(data, file)
    file.write(buffer.getvalue())
    file.flush()
    return file


# -- the processes ------------------------------------------------------------------------------


class _RankResult:
    """The message that one rank sends through its pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._data = bytearray()
        self.is_whole = False

    def read(self) -> bool:
        """Read the bytes that have come; return False at the pipe's end."""
        part = os.read(self.descriptor, 1 << 20)
        self._data += part
        self.is_whole = not part
        return bool(part)

    @property
    def is_missing(self) -> bool:
        """Return whether the rank has closed its pipe without an answer."""
        return self.is_whole and not self._data

    def find(self) -> tuple[str, Any]:
        """Return the answer: its kind and its value; kind "none" as long as it is incomplete."""
        if not self.is_whole or not self._data:
            return "none", None
        try:
            kind, value = pickle.loads(self._data)
        except Exception as failure:
            text = f"its answer cannot be read: {type(failure).__name__}: {failure}"
            return "failure", (time.monotonic(), failure, text, False)
        return kind, value


class _Team:
    """The ranks of one call of spawn."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._answers: dict[int, _RankResult] = {}
        self._endings: dict[int, ProcessExit] = {}

    def start(
        self, rank: int, environment: dict[str, str], call: int, listener: socket.socket | None
    ) -> None:
        """Start a rank, which inherits ``listener``; it reads the call from the file ``call``."""
        reader, writer = os.pipe()
        answer = self._answers[rank] = _RankResult(reader)
        # The interpreter with its options, as multiprocessing would call it.
        interpreter = multiprocessing.spawn.get_command_line()[:-3]
        command = _COMMAND.format(root=_ROOT, call=call, answer=writer, parent=os.getpid())
        try:
            self._launch.start(
                rank,
                [*interpreter, "-c", command],
                environment,
                listener=listener,
                inherited=(call, writer),
            )
        finally:
            os.close(writer)
        self._launch.attend(reader, answer.read)

    def results(self, timeout: timedelta | None) -> list[Any]:
        """Wait for all ranks and return their results by rank; raise at a failure or a timeout."""
        deadline = Deadline(timeout)
        try:
            while self._launch.running and not self._launch.failed and self._find_mute() is None:
                if deadline.is_over:
                    self._raise_timeout(timeout)
                self._step(None if timeout is None else deadline.left_s)
        except KeyboardInterrupt:
            self._show_places()
            raise
        self._collect_followers()
        if self._launch.failed is not None:
            self._raise_first_failure()
        mute = self._find_mute()
        if mute is not None:
            summary = f"rank {mute} ended with exit code 0, and without an answer"
            fix = "let the function return: os._exit ends a process before it answers"
            self._raise_failure(mute, None, summary, "", fix)
        return [self._result(rank) for rank in sorted(self._answers)]

    def _show_places(self) -> None:
        """Show where the ranks are, and end them by the interrupt that this process has got."""
        places = self._launch.ask_where()
        self._launch.stop(((signal.SIGINT, 1.0), (signal.SIGTERM, 1.0)))
        for rank, answer in self._answers.items():  # a rank without a world has its traceback
            kind, value = answer.find()
            if kind == "failure" and isinstance(value[1], KeyboardInterrupt):
                places[rank] = places.get(rank) or value[2].encode()
        show(sys.stderr, places_text(places))

    def _find_mute(self) -> int | None:
        """Return the first rank that has ended without an answer, if any."""
        mute = (rank for rank in self._endings if self._answers[rank].is_missing)
        return next(mute, None)

    def _step(self, seconds: float | None) -> None:
        for ending in self._launch.step(seconds):
            self._endings[ending.rank] = ending

    def _collect_followers(self) -> None:
        """Read answers that are on their way, for seconds, and note other ranks that end."""
        grace = Deadline(_FOLLOWERS_S)
        while not grace.is_over:
            are_whole = all(answer.is_whole for answer in self._answers.values())
            if not self._launch.running and are_whole:
                return
            self._step(grace.left_s)

    def _result(self, rank: int) -> Any:
        kind, value = self._answers[rank].find()
        if kind == "result":
            return value
        _, exception, text, _ = value
        self._raise_failure(rank, exception, f"rank {rank}: {text}", text)

    def _raise_timeout(self, timeout: timedelta | None) -> NoReturn:
        assert timeout is not None
        late = sorted(self._launch.running)
        raise CollectiveTimeoutError(
            f"{ranks_text(late)} did not return within {timeout.total_seconds():g} s",
            where=f"spawn of {len(self._answers)} processes",
            fix="look for what they wait for, or give them more time: spawn(..., timeout=...)",
        )

    def _raise_first_failure(self) -> NoReturn:
        found = {rank: answer.find() for rank, answer in self._answers.items()}
        raised = {rank: value for rank, (kind, value) in found.items() if kind == "failure"}
        silent = (end for end in self._endings.values() if end.code and end.rank not in raised)
        # A process that died can be the cause of what others raise, not the reverse.
        if first := next(silent, None):
            summary = f"rank {first.rank} (process {first.pid}) {first}"
            self._raise_failure(first.rank, None, summary, "")
        rank = min(raised, key=lambda rank: (raised[rank][0], rank))
        _, exception, text, is_loading = raised[rank]
        if is_loading and isinstance(exception, WorldError):
            raise exception  # the main module is not guarded: that is all there is to say
        lines = text.strip().splitlines()
        summary = f"rank {rank} raised {lines[-1] if lines else 'an exception'}"
        if isinstance(exception, BaseException):
            message = str(exception).splitlines() or [""]
            summary = f"rank {rank} raised {type(exception).__name__}: {message[0]}"
        fix = None
        if is_loading:
            summary = f"rank {rank} could not load the function: {summary.partition(' raised ')[2]}"
            fix = (
                "define the function where every process can import it, or run simulated ranks, "
                "which share this process: meshdist.simulate(fn, nprocs, args)"
            )
        self._raise_failure(rank, exception, summary, text, fix)

    def _raise_failure(
        self,
        rank: int,
        exception: BaseException | None,
        summary: str,
        text: str,
        fix: str | None = None,
    ) -> NoReturn:
        error = RankFailedError(
            summary.rstrip(": "),
            where=f"spawn of {len(self._answers)} processes",
            found=text.strip() or None,
            fix=fix,
        )
        error.rank = rank
        raise error from exception

    def close(self) -> None:
        """End every process, and close the pipes from them."""
        self._launch.stop(((signal.SIGTERM, 1.0),))
        for answer in self._answers.values():
            os.close(answer.descriptor)

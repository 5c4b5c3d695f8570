"""Run a function in a new process for each rank and return the results.

Like multiprocessing's "spawn", a rank's interpreter imports the main module under a name other than
``__main__``, so that a script's functions and classes resolve. cloudpickle sends definitions
without a file, such as notebook cells. A pipe returns the result or exception.
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
from ..launching.failed_ranks import stacks_text
from ..launching.output import show
from ..launching.rank_environment import JobNode, rank_environment, reserve_port
from ..runtime.deadlines import Deadline
from .spawn_child import is_loading_main

__all__ = ["spawn"]

T = TypeVar("T")

_COMMAND = """
import sys
given, sys.path = sys.path, [place for place in sys.path if place] + [{root!r}]
from meshdist.worlds.spawn_child import serve_rank  # not a module of the current folder
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

    Each process has the environment of ``meshdist run``, so ``init_process_group()`` and
    ``init_device_mesh(...)`` find the rank and the world size. If one rank fails, the others are
    stopped within five seconds. No process outlives this call or this process.

    Args:
        fn: A function of a module, the running script or a notebook cell. A script must guard its
            main part with ``if __name__ == "__main__":``, because every process imports it.
        args: The arguments of ``fn``. Each process gets a copy.
        nprocs: The number of processes.
        timeout: The time limit for all processes together; None means no limit.

    Returns:
        The results of ``fn`` by rank, sent with pickle.

    Raises:
        ArgumentError, KindError: An argument is invalid; no process has started.
        RankFailedError: A rank raised or its process exited. ``rank`` is the first such rank, the
            cause is its exception, and the text contains its traceback.
        CollectiveTimeoutError: Some ranks did not return in time.
        WorldError: A spawned process called this while importing the main module.

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
        node = JobNode(master_addr=reservation.address, master_port=reservation.port)
        for rank in range(nprocs):
            listener = reservation.listener if rank == 0 else None
            environment = rank_environment(
                os.environ,
                node,
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
            where=f"process {os.getpid()}, which was loading the function to call",
            expected="spawn() called by the program, not when its module is imported",
            fix='put the main part of the script under: if __name__ == "__main__":',
        )
    if not callable(fn):
        raise KindError(
            "spawn needs a function",
            found=f"{fn!r}",
            fix="pass the function and its arguments: spawn(fn, args=(x,), nprocs=4)",
        )
    if not isinstance(args, (tuple, list)):
        raise KindError(
            "args must be a tuple",
            found=f"{args!r}",
            fix="pass args=(x,) for one argument",
        )
    check_timeout(timeout)


# -- a rank's input -----------------------------------------------------------------------------


def _preparation() -> dict[str, Any]:
    """Return multiprocessing's data for finding the program's modules in a new process."""
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
        # Do not import a program of `python -m package` again: its file has the name __main__.
        if name.rpartition(".")[2] != "__main__":
            data["init_main_from_name"] = name
    elif path is not None and os.path.isfile(path):
        data["init_main_from_path"] = os.path.abspath(path)
    return data


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that sends objects of an importable main module by name."""

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
    """Return an unnamed file with the call, for every rank."""
    data = _preparation()
    has_main = "init_main_from_name" in data or "init_main_from_path" in data
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, has_main).dump((fn, args))
    except Exception as failure:
        raise ArgumentError(
            "the function and its arguments cannot be sent to other processes",
            where=f"fn={fn!r}",
            expected="objects that cloudpickle can serialize",
            found=f"{type(failure).__name__}: {failure}",
            fix="create the object inside fn, or simulate the ranks in this process: "
            "meshdist.simulate(fn, nprocs, args)",
        ) from failure
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    pickle.dump(data, file)
    file.write(buffer.getvalue())
    file.flush()
    return file


# -- the processes ------------------------------------------------------------------------------


class _RankResult:
    """A rank's message through its pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._data = bytearray()
        self.is_whole = False

    def read(self) -> bool:
        """Read the available bytes; return False at the end of the pipe."""
        part = os.read(self.descriptor, 1 << 20)
        self._data += part
        self.is_whole = not part
        return bool(part)

    @property
    def is_missing(self) -> bool:
        """Return whether the rank exited without an answer."""
        return self.is_whole and not self._data

    def find(self) -> tuple[str, Any]:
        """Return the answer's kind and value; the kind is "none" until it is complete."""
        if not self.is_whole or not self._data:
            return "none", None
        try:
            kind, value = pickle.loads(self._data)
        except Exception as failure:
            text = f"its answer cannot be read: {type(failure).__name__}: {failure}"
            return "failure", (time.monotonic(), failure, text, False)
        return kind, value


class _Team:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._answers: dict[int, _RankResult] = {}
        self._endings: dict[int, ProcessExit] = {}

    def start(
        self, rank: int, environment: dict[str, str], call: int, listener: socket.socket | None
    ) -> None:
        """Start a rank that inherits ``listener`` and reads the call from ``call``."""
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
        """Wait for all ranks and return their results; raise at a failure or a timeout."""
        deadline = Deadline(timeout)
        try:
            while self._launch.running and not self._launch.failed and self._find_mute() is None:
                if deadline.is_over:
                    self._raise_timeout(timeout)
                self._step(None if timeout is None else deadline.left_s)
        except KeyboardInterrupt:
            self._show_stacks()
            raise
        self._collect_followers()
        if self._launch.failed is not None:
            self._raise_first_failure()
        mute = self._find_mute()
        if mute is not None:
            summary = f"rank {mute} exited with code 0 without returning a result"
            fix = "return from the function instead of calling os._exit()"
            self._raise_failure(mute, None, summary, "", fix)
        return [self._result(rank) for rank in sorted(self._answers)]

    def _show_stacks(self) -> None:
        """Print the ranks' stacks and interrupt them."""
        stacks = self._launch.ask_where()
        self._launch.stop(((signal.SIGINT, 1.0), (signal.SIGTERM, 1.0)))
        for rank, answer in self._answers.items():  # a rank without a world has its traceback
            kind, value = answer.find()
            if kind == "failure" and isinstance(value[1], KeyboardInterrupt):
                stacks[rank] = stacks.get(rank) or value[2].encode()
        show(sys.stderr, stacks_text(stacks))

    def _find_mute(self) -> int | None:
        mute = (rank for rank in self._endings if self._answers[rank].is_missing)
        return next(mute, None)

    def _step(self, seconds: float | None) -> None:
        for ending in self._launch.step(seconds):
            self._endings[ending.rank] = ending

    def _collect_followers(self) -> None:
        """Briefly read further answers and record other exits."""
        grace = Deadline(_FOLLOWERS_S)
        while not grace.is_over:
            are_complete = all(answer.is_whole for answer in self._answers.values())
            if not self._launch.running and are_complete:
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
            fix="check what these ranks wait for, or pass a longer timeout to spawn(timeout=...)",
        )

    def _raise_first_failure(self) -> NoReturn:
        found = {rank: answer.find() for rank, answer in self._answers.items()}
        raised = {rank: value for rank, (kind, value) in found.items() if kind == "failure"}
        silent = (end for end in self._endings.values() if end.code and end.rank not in raised)
        # A process that died can cause errors on other ranks, but no such error kills a process.
        if first := next(silent, None):
            summary = f"rank {first.rank} (process {first.pid}) {first}"
            self._raise_failure(first.rank, None, summary, "")
        rank = min(raised, key=lambda rank: (raised[rank][0], rank))
        _, exception, text, is_loading = raised[rank]
        if is_loading and isinstance(exception, WorldError):
            raise exception  # the main module is not guarded; the traceback adds nothing
        lines = text.strip().splitlines()
        summary = f"rank {rank} raised {lines[-1] if lines else 'an exception'}"
        if isinstance(exception, BaseException):
            message = str(exception).splitlines() or [""]
            summary = f"rank {rank} raised {type(exception).__name__}: {message[0]}"
        fix = None
        if is_loading:
            summary = f"rank {rank} could not load the function: {summary.partition(' raised ')[2]}"
            fix = (
                "define the function where every process can import it, or simulate the ranks in "
                "this process: meshdist.simulate(fn, nprocs, args)"
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
        self._launch.stop(((signal.SIGTERM, 1.0),))
        for answer in self._answers.values():
            os.close(answer.descriptor)

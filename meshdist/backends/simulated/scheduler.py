"""Schedule simulated ranks: threads of one process, of which exactly one runs at a time.

A rank runs until it waits; then the next runnable rank, in rank order, runs. Random generators and
the default dtype switch with it. So runs are deterministic, and deadlocks are detected immediately.
"""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...checking.call_sites import call_site, is_between, show_site
from ...error_text import grouped_text
from ...errors import DeadlockError, RankFailedError, WorldError
from ...runtime.generators import ProcessState, start_as
from ..futures import Completion, collecting_by_need

T = TypeVar("T")


class RankReleased(BaseException):  # not caught by ``except Exception`` in the program
    """Exception that ends a simulated rank after another has failed."""


class Waiting(Protocol):
    """An event that a rank awaits."""

    def is_ready(self) -> bool:
        """Return whether the rank can continue; fast, without side effects."""

    def describe(self) -> str:
        """Return the end of the sentence "rank 0 waits in"."""


_MOST_VAIN_POLLS = 100_000


class Rank:
    """Simulated rank: a thread, and its wait while stopped."""

    def __init__(self, index: int, scheduler: Scheduler[Any]) -> None:
        self.index = index
        self.scheduler = scheduler
        self.thread_id: int | None = None
        self.is_over = False
        self.is_released = False
        self.num_vain_polls = 0
        self.ending = ""
        self.waiting: Waiting | None = None
        self.interruption: BaseException | None = None
        self._watched: list[Completion] = []
        self._is_polling = False
        self.may_run = threading.Lock()  # held by the scheduler while the rank does not run
        self.may_run.acquire()

    def __repr__(self) -> str:
        return f"<simulated rank {self.index} of {self.scheduler.size}>"

    def check_here(self) -> None:
        """Raise unless called by this rank's thread during the run."""
        if threading.get_ident() != self.thread_id:
            raise WorldError(
                f"simulated rank {self.index} was used from another thread",
                where=f"thread {threading.current_thread().name!r}, called at "
                f"{show_site(call_site())}",
                expected="collectives and store waits on the rank's own thread, since only one "
                "simulated rank runs at a time",
                fix="call it on the rank's own thread, or run the program as processes "
                "(meshdist run, meshdist.spawn)",
            )
        if self.is_released:
            raise RankReleased

    def wait(self, waiting: Waiting) -> None:
        """Let other ranks run until ``waiting`` is ready, or raise DeadlockError."""
        self.check_here()
        self.num_vain_polls = 0
        if waiting.is_ready():
            return
        self.waiting = waiting
        try:
            self.scheduler.switch_from(self)
        finally:
            self.waiting = None
        if self._watched:
            self.complete_watched()

    def poll(self, awaited: Waiting) -> None:
        """Let other ranks run after a failed poll; after many, wait for ``awaited``."""
        if self._is_polling:
            return
        self.num_vain_polls += 1
        if self.num_vain_polls > _MOST_VAIN_POLLS:  # a wait detects a deadlock
            self.wait(awaited)
        else:
            self.check_here()
            self.scheduler.switch_from(self)
            self.complete_watched()

    def watch(self, poll: Callable[[], bool], complete: Callable[[], None]) -> None:
        """Call ``complete`` after one of this rank's waits, once ``poll()`` is true."""
        self._watched.append((poll, complete))

    def complete_watched(self) -> None:
        """Call and drop each watched ``complete`` whose ``poll()`` is true."""
        if not self._watched or self._is_polling:
            return
        due: list[Callable[[], None]] = []
        later: list[Completion] = []
        self._is_polling = True
        try:
            for poll, complete in self._watched:
                if poll():
                    due.append(complete)
                else:
                    later.append((poll, complete))
        finally:
            self._is_polling = False
        self._watched = later
        for complete in due:
            complete()


_here = threading.local()


def find_rank_here() -> Rank | None:
    """Return this thread's simulated rank, or None."""
    return getattr(_here, "rank", None)


class Scheduler(Generic[T]):
    """Runner of ``size`` ranks, of which exactly one rank runs at any time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Rank(index, self) for index in range(size)]
        self.tables: dict[str, Any] = {}
        """The objects that the ranks of this run share, by name."""
        self._results: list[Any] = [None] * size
        self._failure: tuple[Rank, BaseException] | None = None
        self._running = self.ranks[0]
        self._has_begun = False
        self._switching = threading.Lock()
        self._is_all_over = False
        self._asked: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.is_profiled = torch.autograd._profiler_enabled()
        """Whether a profiler of torch's watches the caller's thread, and no rank's."""

    def run(
        self, body: Callable[[int], T], interrupted: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Call ``body(rank)`` on every rank; return the results, or raise the first failure.

        Args:
            interrupted: called at Ctrl-C while ranks are stopped.
        """
        callers = ProcessState()
        threads = [
            threading.Thread(
                target=self._live,
                args=(rank, body, callers),
                name=f"simulated rank {rank.index}",
                daemon=True,
            )
            for rank in self.ranks
        ]
        try:
            with collecting_by_need():
                self._run_threads(threads, interrupted)
        finally:
            callers.restore()
        if self._failure is not None:
            rank, error = self._failure
            self._failure = None  # the traceback would keep this frame alive in a circle
            try:
                raise _with_rank(error, rank.index, self.size)
            finally:
                del error
        return self._results

    def _run_threads(
        self, threads: list[threading.Thread], interrupted: Callable[[], object]
    ) -> None:
        started: list[threading.Thread] = []
        try:
            for rank, thread in zip(self.ranks, threads, strict=True):
                thread.start()
                started.append(thread)
                rank.thread_id = thread.ident
            self._has_begun = True
            self._resume(self.ranks[0])
            # In slices: a nested simulation waits here on a rank's thread, which an
            # interruption of the outer simulation reaches between two slices only.
            while not self._serve(0.5):
                pass
        except BaseException as error:
            try:
                if isinstance(error, KeyboardInterrupt):
                    interrupted()
            finally:
                self._stop(started)
            raise
        finally:
            for thread in started:
                thread.join()

    def call_outside(self, function: Callable[[], object]) -> None:
        """Run ``function`` on the thread that called ``run``, and wait."""
        is_done = threading.Event()
        self._asked.put(function)
        self._asked.put(is_done.set)
        while not is_done.wait(0.5):  # in slices, for interruptions
            pass

    def _serve(self, seconds: float) -> bool:
        """Run a rank's request within ``seconds``; return whether all ranks are over."""
        with suppress(Empty):
            self._asked.get(timeout=seconds)()
        return self._is_all_over

    def _stop(self, started: list[threading.Thread]) -> None:
        """End all ranks by RankReleased, the running rank at its next Python line."""
        for rank in self.ranks[len(started) :]:
            rank.is_over = True
        if not started:
            return
        with self._switching:
            self._release_all()
            if self._has_begun:
                thread_id = ctypes.c_ulong(self._running.thread_id or 0)
                released = ctypes.py_object(RankReleased)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, released)
            else:
                self._resume(self.ranks[0])
        while not self._serve(0.05):
            with self._switching:  # an interruption between two ranks may have left none to run
                if not started[self._running.index].is_alive():
                    self._running.is_over = True
                    self._resume(self._choose(self._running.index))

    def _live(self, rank: Rank, body: Callable[[int], T], callers: ProcessState) -> None:
        """Run ``body`` here once the rank may run; then let the next run."""
        try:
            rank.may_run.acquire()
            if not rank.is_released:
                _here.rank = rank
                self._call(rank, body, callers)
            with self._switching:
                rank.is_over = True
                if self._failure is not None:
                    self._release_all()
                self._resume(self._choose(rank.index))
        except RankReleased:
            pass

    def _call(self, rank: Rank, body: Callable[[int], T], callers: ProcessState) -> None:
        if torch.get_default_dtype() is not callers.dtype:
            torch.set_default_dtype(callers.dtype)
        callers.hooks.restore()
        start_as(rank.index)
        try:
            # Use a new context, and run backward on this thread for every device: all ranks share
            # autograd's device threads, and a rank that waits in a collective would block them.
            with torch.autograd.set_multithreading_enabled(False):
                self._results[rank.index] = contextvars.Context().run(body, rank.index)
            rank.ending = "returned"
        except RankReleased:
            rank.ending = "was released"
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):  # an end in good order
                rank.ending = f"called sys.exit({'' if error.code is None else 0})"
                return
            rank.ending = f"raised {type(error).__name__}"
            if self._failure is None and not rank.is_released:
                self._failure = (rank, error)

    def switch_from(self, rank: Rank) -> None:
        """Let the next runnable rank run; return when ``rank`` continues."""
        with self._switching:
            _let_pending_exceptions_out()
            chosen = self._choose(rank.index)
            assert chosen is not None  # the rank that calls is not over
            if chosen is not rank:
                state = _call_hidden_from_modes(ProcessState)
                self._resume(chosen)
        if chosen is not rank:
            rank.may_run.acquire()
            _call_hidden_from_modes(state.restore)
        interruption, rank.interruption = rank.interruption, None
        if interruption is not None:
            raise interruption

    def _resume(self, rank: Rank | None) -> None:
        """Let ``rank`` run; None (no rank is left) ends the simulation."""
        if rank is None:
            self._is_all_over = True
            self._asked.put(bool)  # which does nothing
        else:
            self._running = rank
            rank.may_run.release()

    def _choose(self, after: int) -> Rank | None:
        """Return the next runnable rank after ``after``, or None; a deadlock interrupts all."""
        for step in range(1, self.size + 1):
            rank = self.ranks[(after + step) % self.size]
            if not rank.is_over and (
                rank.waiting is None or rank.interruption is not None or rank.waiting.is_ready()
            ):
                return rank
        stuck = [rank for rank in self.ranks if not rank.is_over]
        if not stuck:
            return None
        report = self._report()
        for rank in stuck:
            rank.interruption = DeadlockError(
                "deadlock: no simulated rank can continue",
                where=f"{self.size} simulated ranks, one at a time",
                expected="at least one rank that can run",
                found=report,
                fix="call the same collectives in the same order on every rank, start a send for "
                "every receive, and set every store key that a rank waits for",
            )
        return stuck[0]

    def _report(self) -> str:
        """Describe each rank's wait or end; group equal texts."""
        return grouped_text(
            (
                rank.index,
                rank.ending if rank.waiting is None else f"waits in {rank.waiting.describe()}",
            )
            for rank in self.ranks
        )

    def _release_all(self) -> None:
        """Let every rank end at its next wait; raise a deadlock first, if any."""
        for rank in self.ranks:
            if not rank.is_over and not rank.is_released:
                rank.is_released = True
                if rank.interruption is None:
                    rank.interruption = RankReleased()


def _call_hidden_from_modes(function: Callable[[], T]) -> T:
    """Return ``function()``, hiding its torch operators from dispatch modes."""
    if not torch._C._len_torch_dispatch_stack():
        return function()
    with _disable_current_modes():
        return function()


def _let_pending_exceptions_out() -> None:
    """Raise any exception sent to this thread here, before a change."""


def _with_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """Return ``error`` with its rank, and a traceback from the program's code on."""
    text = f"raised on simulated rank {rank} of {size}"
    error.rank = rank  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        first = error
        while (before := first.__cause__ or first.__context__) is not None:
            first = before
        first.__cause__ = RankFailedError(f"the exception below was {text}")
    traceback = error.__traceback__
    while traceback and is_between[traceback.tb_frame.f_code.co_filename]:
        traceback = traceback.tb_next
    return error.with_traceback(traceback or error.__traceback__)

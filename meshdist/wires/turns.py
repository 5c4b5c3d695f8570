"""Who has the turn: ranks of one process, each a thread, of which exactly one runs.

A rank keeps the turn until it waits; then the next rank that can go on, in rank order, has it.
What a process would have for itself and a thread has not (the random generators, the default
dtype) changes hands with the turn. So a run depends on nothing but the program, and "nobody can
go on" is known at once.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import random
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from ..error_text import grouped_text
from ..errors import DeadlockError, RankFailedError, WorldError
from .futures import Errand, collecting_by_need

__all__ = [
    "Rank",
    "RankReleased",
    "Scheduler",
    "Site",
    "Waiting",
    "call_site",
    "find_rank_here",
    "show_site",
]

T = TypeVar("T")

Site: TypeAlias = tuple[str, int] | None
"""A line of the program, as file and line number."""

_NOT_THE_PROGRAM = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    threading.__file__,
)


def call_site() -> Site:
    """The innermost line of the program (neither meshdist nor torch) that led here."""
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


def show_site(site: Site) -> str:
    """``file:line``, as editors and terminals link it."""
    return "an unknown place" if site is None else f"{site[0]}:{site[1]}"


class RankReleased(BaseException):
    """Ends a simulated rank after another one failed.

    Not an ``Exception``, so that ``except Exception`` in the program lets it through.
    """


class Waiting(Protocol):
    """What a rank waits for."""

    def is_ready(self) -> bool:
        """Whether the rank can go on; quick, and without effect."""

    def describe(self) -> str:
        """What it waits for, with what, and where: completes the sentence "rank 0 waits in"."""


_WORDS: Any = vars(np.random.MT19937)["state"]


class _NumpyGenerator(np.random.MT19937):
    """NumPy's global bit generator for one rank, exchanged as a whole.

    Exchanging the object takes half a microsecond where copying its 624 words takes a hundred.
    The second half of a drawn pair of normals lies beside it, in the global RandomState: to move
    that alone through RandomState's own get_state and set_state, the words are left out while
    ``is_exchanged``.
    """

    is_exchanged = False

    @property
    def state(self) -> Any:
        if self.is_exchanged:
            return {"bit_generator": "MT19937", "state": None}
        return _WORDS.__get__(self)

    @state.setter
    def state(self, value: Any) -> None:
        if not self.is_exchanged:
            _WORDS.__set__(self, value)


_NumpyGenerator.__name__ = "MT19937"  # NumPy writes it into a state, and compares it there


class _ProcessState:
    """The random generators and the default dtype, as one rank (or the caller) left them."""

    __slots__ = (
        "cuda_states",
        "dtype",
        "numpy_generator",
        "numpy_rest",
        "random_state",
        "torch_state",
    )

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self.torch_state = torch.default_generator.get_state()
        self.random_state = random.getstate()
        generator = self.numpy_generator = get_bit_generator()
        if isinstance(generator, _NumpyGenerator):
            generator.is_exchanged = True
        self.numpy_rest = np.random.get_state(legacy=False)
        self.cuda_states = (
            [g.get_state() for g in torch.cuda.default_generators] if _is_cuda_up() else None
        )

    def restore(self) -> None:
        """Put everything back, for the thread that has the turn now."""
        seed_before = torch.initial_seed()
        if torch.get_default_dtype() is not self.dtype:
            torch.set_default_dtype(self.dtype)
        torch.default_generator.set_state(self.torch_state)
        random.setstate(self.random_state)
        set_bit_generator(self.numpy_generator)
        np.random.set_state(self.numpy_rest)
        if isinstance(self.numpy_generator, _NumpyGenerator):
            self.numpy_generator.is_exchanged = False
        if self.cuda_states is not None:
            for generator, state in zip(
                torch.cuda.default_generators, self.cuda_states, strict=True
            ):
                generator.set_state(state)
        else:
            _seed_cuda(seed_before)


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _is_cuda_up() -> bool:
    return bool(torch.cuda.is_initialized())


def _seed_cuda(noted_seed: int) -> None:
    """Seed the CUDA generators as this rank's CPU generator was seeded.

    ``torch.manual_seed`` before CUDA is initialised only notes the seed for later; without this
    the note would be that of the rank that seeded last, which left ``noted_seed``.
    """
    seed = torch.initial_seed()
    if _has_cuda() and (_is_cuda_up() or seed != noted_seed):
        torch.cuda.manual_seed_all(seed)


def _seed(rank: int) -> None:
    """Give the generators the fixed states with which a rank starts."""
    seed_before = torch.initial_seed()
    torch.default_generator.manual_seed(rank)
    _seed_cuda(seed_before)
    random.seed(rank)
    set_bit_generator(_NumpyGenerator(0))
    np.random.seed(rank)


_MOST_VAIN_POLLS = 100_000


class Rank:
    """One simulated rank: a thread, and what it waits for while it has not the turn."""

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
        self._errands: list[Errand] = []
        self._is_looking = False
        self.turn = threading.Lock()
        self.turn.acquire()

    def __repr__(self) -> str:
        return f"<simulated rank {self.index} of {self.scheduler.size}>"

    def can_go_on(self) -> bool:
        """Whether the turn may come to this rank."""
        if self.is_over:
            return False
        return self.waiting is None or self.interruption is not None or self.waiting.is_ready()

    def check_here(self) -> None:
        """Raise unless called by this rank's own thread, in a run that goes on."""
        if threading.get_ident() != self.thread_id:
            raise WorldError(
                f"simulated rank {self.index} was used from another thread",
                where=f"thread {threading.current_thread().name!r}, called at "
                f"{show_site(call_site())}",
                expected="verbs and store waits on the rank's own thread, since only one "
                "simulated rank runs at a time",
                fix="call it on the rank's own thread, or run the program as processes "
                "(meshdist run, meshdist.spawn)",
            )
        if self.is_released:
            raise RankReleased

    def wait(self, waiting: Waiting) -> None:
        """Hand the turn on until ``waiting`` is ready; raises DeadlockError if it cannot be."""
        self.check_here()
        self.num_vain_polls = 0
        if waiting.is_ready():
            return
        self.waiting = waiting
        try:
            self.scheduler.hand_on(self)
        finally:
            self.waiting = None
        self.run_errands()

    def poll(self, awaited: Waiting) -> None:
        """Hand the turn on, keeping a claim to it: this rank asked for ``awaited`` in vain.

        A rank that asks in vain without end waits in truth: then this waits, too, so that a
        deadlock is found.
        """
        if self._is_looking:
            return
        self.num_vain_polls += 1
        if self.num_vain_polls > _MOST_VAIN_POLLS:
            self.wait(awaited)
        else:
            self.check_here()
            self.scheduler.hand_on(self)
            self.run_errands()

    def watch(self, errand: Errand) -> None:
        """Run ``errand`` when it is due, after one of this rank's waits."""
        self._errands.append(errand)

    def run_errands(self) -> None:
        """Run what is due, here and now; the turn stays with this rank while it looks."""
        if not self._errands or self._is_looking:
            return
        due: list[Errand] = []
        later: list[Errand] = []
        self._is_looking = True
        try:
            for errand in self._errands:
                (due if errand.is_due() else later).append(errand)
        finally:
            self._is_looking = False
        self._errands = later
        for errand in due:
            errand.run()

    def take_interruption(self) -> None:
        """Raise what the scheduler left for this rank, once."""
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            raise interruption


_here = threading.local()


def find_rank_here() -> Rank | None:
    """Return the simulated rank whose thread this is, or None."""
    return getattr(_here, "rank", None)


class Scheduler(Generic[T]):
    """Runs ``size`` ranks, exactly one at a time.

    Args:
        size: how many ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Rank(index, self) for index in range(size)]
        self.tables: dict[str, Any] = {}
        """What the ranks of this run share, by name."""
        self._results: list[Any] = [None] * size
        self._failure: tuple[Rank, BaseException] | None = None
        self._running = self.ranks[0]
        self._has_begun = False
        self._switching = threading.Lock()
        self._all_over = threading.Event()

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Call ``body(rank)`` on every rank and return the results by rank.

        Raises:
            The first exception of a rank itself, with the rank as its attribute ``rank``, after
            all other ranks were released.
        """
        callers = _ProcessState()
        threads = [
            threading.Thread(
                target=self._live,
                args=(rank, body, callers.dtype),
                name=f"simulated rank {rank.index}",
                daemon=True,
            )
            for rank in self.ranks
        ]
        try:
            with collecting_by_need():
                self._run_threads(threads)
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

    def _run_threads(self, threads: list[threading.Thread]) -> None:
        started: list[threading.Thread] = []
        try:
            for rank, thread in zip(self.ranks, threads, strict=True):
                thread.start()
                started.append(thread)
                rank.thread_id = thread.ident
            self._has_begun = True
            self._give_turn(self.ranks[0])
            # In slices: a nested simulation waits here on a rank's thread, which an
            # interruption of the outer one reaches between two slices only.
            while not self._all_over.wait(0.5):
                pass
        except BaseException:
            self._stop(started)
            raise
        finally:
            for thread in started:
                thread.join()

    def _stop(self, started: list[threading.Thread]) -> None:
        """End all ranks from the caller's thread, the running one at its next line."""
        for rank in self.ranks[len(started) :]:
            rank.is_over = True
        if not started:
            return
        with self._switching:
            self._release_all()
            if self._has_begun:
                _raise_in_thread(self._running.thread_id, RankReleased)
            else:
                self._give_turn(self.ranks[0])
        while not self._all_over.wait(0.05):
            with self._switching:  # an interruption between two turns may have lost the turn
                if not started[self._running.index].is_alive():
                    self._running.is_over = True
                    self._give_turn(self._choose(self._running.index))

    def _live(self, rank: Rank, body: Callable[[int], T], dtype: torch.dtype) -> None:
        """A rank's thread, from its first turn to its end."""
        try:
            rank.turn.acquire()
            if not rank.is_released:
                _here.rank = rank
                self._call(rank, body, dtype)
            with self._switching:
                rank.is_over = True
                if self._failure is not None:
                    self._release_all()
                self._give_turn(self._choose(rank.index))
        except RankReleased:
            pass

    def _call(self, rank: Rank, body: Callable[[int], T], dtype: torch.dtype) -> None:
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        _seed(rank.index)
        try:
            # A context of its own, and the backward on this thread on every device: the engine's
            # device threads serve all ranks, and one that waits in a verb would stop them all.
            with torch.autograd.set_multithreading_enabled(False):
                self._results[rank.index] = contextvars.Context().run(body, rank.index)
            rank.ending = "returned"
        except RankReleased:
            rank.ending = "was released"
        except BaseException as error:
            rank.ending = f"raised {type(error).__name__}"
            if self._failure is None and not rank.is_released:
                self._failure = (rank, error)

    def hand_on(self, rank: Rank) -> None:
        """Give the turn of ``rank`` to the next rank that can go on; returns with the turn."""
        with self._switching:
            _let_pending_exceptions_out()
            chosen = self._choose(rank.index)
            assert chosen is not None  # the rank that calls is not over
            if chosen is not rank:
                state = _ProcessState()
                self._give_turn(chosen)
        if chosen is not rank:
            rank.turn.acquire()
            state.restore()
        rank.take_interruption()

    def _give_turn(self, rank: Rank | None) -> None:
        if rank is None:
            self._all_over.set()
        else:
            self._running = rank
            rank.turn.release()

    def _choose(self, after: int) -> Rank | None:
        """The next rank that can go on; None when all are over."""
        for step in range(1, self.size + 1):
            rank = self.ranks[(after + step) % self.size]
            if rank.can_go_on():
                return rank
        stuck = [rank for rank in self.ranks if not rank.is_over]
        if not stuck:
            return None
        report = self._report()
        for rank in stuck:
            rank.interruption = DeadlockError(
                "deadlock: no simulated rank can go on",
                where=f"{self.size} simulated ranks, one at a time",
                expected="at least one rank that waits for nobody",
                found=report,
                fix="make every member call the same verbs in the same order, give every receive "
                "its send, and set every key that a rank waits for",
            )
        return stuck[0]

    def _report(self) -> str:
        """What each rank waits for, ranks that wait for the same joined."""
        return grouped_text(
            (
                rank.index,
                rank.ending if rank.waiting is None else f"waits in {rank.waiting.describe()}",
            )
            for rank in self.ranks
        )

    def _release_all(self) -> None:
        """Let every rank end at its next wait; one that is told of a deadlock hears that first."""
        for rank in self.ranks:
            if not rank.is_over and not rank.is_released:
                rank.is_released = True
                if rank.interruption is None:
                    rank.interruption = RankReleased()


def _let_pending_exceptions_out() -> None:
    """An interruption sent to this thread is raised in this call, before anything changes."""


def _raise_in_thread(thread_id: int | None, kind: type[BaseException]) -> None:
    """Raise ``kind`` in another thread at its next line of Python."""
    if thread_id is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread_id), ctypes.py_object(kind)
        )


def _with_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """Attach the rank to ``error``; its traceback then begins at the program's own lines."""
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
    while traceback and traceback.tb_frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
        traceback = traceback.tb_next
    return error.with_traceback(traceback or error.__traceback__)

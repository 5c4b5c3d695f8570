"""Messages between the processes of a world that arrive while they wait in a verb.

Each process has one thread, the sentinel, that looks at the store four times a second. A signal
is of one of three kinds:

* ``abort`` frees the ranks that wait in the named groups;
* ``ask`` is a question what each rank called last, which the sentinel answers even while its rank
  is stuck elsewhere. That is how a timeout can tell who is missing and where;
* ``clock`` says that the clocks of all ranks shall stand, or go on, as the table of holds has it.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypedDict

from torch.distributed import Store

from ..runtime.clock import clock
from ..runtime.handles import check_store_served, store_of_thread
from ..runtime.lifelines import find_lifelines
from ..runtime.world import World
from .holds import Holds, add_hold, remove_hold

__all__ = ["Answer", "Sentinel", "ask", "clocks_stopped", "heard_key", "post"]

_PERIOD_S = 0.25
_ANSWER_S = 2.0
# A store may be slow to answer (a name server that its accepting side asks, a loaded machine), and
# Python must not end before the thread is back from it.
_END_S = 20.0


class Answer(TypedDict):
    """What a rank tells who asks it."""

    calls: list[dict[str, Any]]
    """What it called last on each communicator, the most recent last."""
    about: dict[str, Any] | None
    """The one call or message that was asked about, if it has come there and is remembered."""
    is_forgotten: bool
    """Whether it has come there, and is no longer remembered."""


class Sentinel:
    """Posts signals of this rank and acts on those of others.

    Args:
        store: a handle of its own, used by the sentinel's thread alone.
        rank: this rank.
        answer: answers a question, given what it is about.
        abort: acts on an abort, given its message.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        answer: Callable[[dict[str, Any]], Answer],
        abort: Callable[[dict[str, Any]], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._answer = answer
        self._abort = abort
        self._seen = int(store.add("signal/count", 0))
        self._holds = Holds(store, rank)
        self._holds.read()  # the clock may stand already
        self._lifelines = find_lifelines(store)
        self._asking = threading.Lock()
        self._stopping, self._stop = os.pipe()
        self._process_id = os.getpid()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="meshdist-sentinel", daemon=True)
        self._thread.start()
        # A thread that Python ends inside torch's C++ would take the process down with it.
        atexit.register(self.stop)

    def is_store_served(self) -> bool:
        """Whether the process that serves the store is still there."""
        try:
            return not _ended(self._lifelines, 0.0)
        except (OSError, ValueError):  # closed: it has hung up, or this sentinel has ended
            return False

    @contextmanager
    def asking(self) -> Iterator[bool]:
        """Whether the store may be asked: it ends in good order only when that has been done."""
        with self._asking:
            yield self.is_store_served()

    def stop(self) -> None:
        """End the thread; in a forked child, where it does not run, do nothing."""
        atexit.unregister(self.stop)
        if self._process_id != os.getpid() or self._is_stopped:
            return
        self._is_stopped = True
        os.write(self._stop, b"x")  # closing would not do: a forked child holds this end, too
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        if not self._thread.is_alive():
            os.close(self._stop)
            os.close(self._stopping)

    def _run(self) -> None:
        try:
            self._watch([self._stopping, *self._lifelines])
        finally:
            self._holds.release()
            with self._asking:
                for line in self._lifelines:
                    with suppress(OSError):  # a forked child holds this end, too
                        line.shutdown(socket.SHUT_RDWR)
                    line.close()

    def _watch(self, ends: list[Any]) -> None:
        while not _ended(ends, _PERIOD_S):
            try:
                count = int(self._store.add("signal/count", 0))
                while self._seen < count:
                    self._seen += 1
                    self._act(self._seen)
                self._holds.check()
            except RuntimeError:  # the store is gone: the job ends, and verbs will say so
                return

    def _act(self, number: int) -> None:
        message = json.loads(self._store.get(f"signal/{number}"))
        kind = message["kind"]
        if kind == "ask":
            answer = json.dumps(self._answer(message["about"]))
            self._store.set(f"signal/{number}/answer/{self._rank}", answer)
        elif kind == "abort":
            self._abort({**message, "number": number})
            self._store.add(heard_key(number), 1)
        elif kind == "clock":
            self._holds.read()


def _ended(ends: Sequence[Any], seconds: float) -> bool:
    """Whether any of some files or sockets has something to tell, within so many seconds."""
    poll = select.poll()  # unlike select, for descriptors of any number
    for end in ends:
        poll.register(end, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def heard_key(number: int) -> str:
    """Under which the sentinels count who has heard of an abort."""
    return f"signal/{number}/heard"


def post(store: Store, message: dict[str, Any]) -> int:
    """Post ``message`` to all sentinels; returns its number.

    A message that is counted and does not come would keep every sentinel waiting. So a thread does
    both, which no signal's handler interrupts.
    """
    done: Future[int] = Future()

    def do() -> None:
        try:
            number = int(store.add("signal/count", 1))
            store.set(f"signal/{number}", json.dumps(message))
            done.set_result(number)
        except RuntimeError as error:  # the store is lost
            done.set_exception(error)

    threading.Thread(target=do, name="meshdist-post").start()
    return done.result()


@contextmanager
def clocks_stopped(world: World, limit_s: float) -> Iterator[None]:
    """Let no timeout of a verb run down on any rank, for ``limit_s`` at most.

    The others hear of it within a quarter of a second, and of its end. Where the store is lost it
    is this rank's clock alone. Simulated ranks have no timeouts.
    """
    if world.is_simulated or world.is_closed:
        yield
        return
    here = object()
    clock.stop(here)
    name = ""
    try:
        with suppress(RuntimeError):
            check_store_served(world)
            name = add_hold(store_of_thread(world), world.rank, limit_s)
            post(store_of_thread(world), {"kind": "clock"})
        yield
    finally:
        clock.go(here)
        clock.go(name)  # the sentinel would, too, a little later
        if name:
            with suppress(RuntimeError):
                check_store_served(world)
                remove_hold(store_of_thread(world), name)
                post(store_of_thread(world), {"kind": "clock"})


def ask(
    world: World,
    ranks: tuple[int, ...],
    about: dict[str, Any] | None = None,
    *,
    patience_s: float = _ANSWER_S,
) -> dict[int, Answer]:
    """Ask what each of ``ranks`` called last; ranks that do not answer in time are left out.

    Args:
        world: the world of all of them.
        ranks: whom to ask.
        about: a call or message of one communicator that the answer shall describe as well.
        patience_s: how long to wait for answers.
    """
    check_store_served(world)
    store = store_of_thread(world)
    number = post(store, {"kind": "ask", "about": about or {}})
    deadline = time.monotonic() + patience_s
    answers: dict[int, Answer] = {}
    while len(answers) < len(ranks) and time.monotonic() < deadline:
        for rank in ranks:
            key = f"signal/{number}/answer/{rank}"
            if rank not in answers and store.check([key]):
                answers[rank] = json.loads(store.get(key))
        if len(answers) < len(ranks):
            time.sleep(0.05)
            check_store_served(world)
    return answers

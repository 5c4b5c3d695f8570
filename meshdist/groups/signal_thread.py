"""Messages between the processes of a world that arrive while they wait in a verb.

Each process has one signal thread, which looks at the store four times a second. A signal is of
one of three kinds:

* ``abort`` frees the ranks that wait in the named groups;
* ``ask`` asks what each rank called last; the thread answers even while its rank is stuck
  elsewhere. So a timeout can name the ranks that are missing, and where they are;
* ``clock`` pauses or resumes the clocks of all ranks, as the table in the store says.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypedDict
from uuid import uuid4

from torch.distributed import Store

from ..bootstrap.server_watch import ServerWatch, find_readable
from ..bootstrap.thread_stores import check_store_served, store_of_thread
from ..bootstrap.world import World
from ..runtime.deadlines import Deadline, Grace, clock, wait_until
from .paused_clocks import PausedClocks, change_pause

__all__ = ["Answer", "SignalThread", "ask", "clocks_paused", "collect", "post", "receipts_key"]

_PERIOD_S = 0.25
_ANSWER_S = 2.0
# A store may be slow to answer (a name server that its accepting side asks, a loaded machine), and
# Python must not end before the thread is back from it.
_END_S = 20.0


class Answer(TypedDict):
    """What a rank answers to a question."""

    calls: list[dict[str, Any]]
    """Its last call on each communicator (label, sequence, text), the most recent last."""
    about: str | None
    """The one call that was asked about; None where it has not come there yet."""


class SignalThread:
    """Acts on the signals of other ranks.

    Args:
        store: a connection that this thread alone uses.
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
        self._paused_clocks = PausedClocks(store, rank)
        self._paused_clocks.read()  # a rank may have paused the clocks already
        self._server = ServerWatch(store)
        self._asking = threading.Lock()
        self._stopping, self._stop = os.pipe()
        self._process_id = os.getpid()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="meshdist-signals", daemon=True)
        self._thread.start()
        # A thread that Python ends inside torch's C++ would take the process down with it.
        atexit.register(self.stop)

    def is_store_served(self) -> bool:
        """Whether the process that serves the store is still there."""
        return self._server.is_served()

    @contextmanager
    def asking(self) -> Iterator[bool]:
        """Whether the store is served; the serving process exits only after this context."""
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
        ends = [self._stopping, *self._server.connections]
        try:
            while not (ended := find_readable(ends, _PERIOD_S)):
                self._act_on_all()
                self._paused_clocks.check()
            if ended == {self._stopping}:  # rank 0 may be waiting for this one's receipt
                self._act_on_all()
        except RuntimeError:  # the store is lost: the job ends, and verbs raise
            pass
        finally:
            self._paused_clocks.release()
            with self._asking:
                self._server.close()

    def _act_on_all(self) -> None:
        count = int(self._store.add("signal/count", 0))
        while self._seen < count:
            self._seen += 1
            self._act(self._seen)

    def _act(self, number: int) -> None:
        message = json.loads(self._store.get(f"signal/{number}"))
        kind = message["kind"]
        if kind == "ask":
            answer = json.dumps(self._answer(message["about"]))
            self._store.set(f"signal/{number}/answer/{self._rank}", answer)
        elif kind == "abort":
            self._abort({**message, "number": number})
            self._store.add(receipts_key(number), 1)
        elif kind == "clock":
            self._paused_clocks.read()


def receipts_key(number: int) -> str:
    """Under which the signal threads count the ranks that have acted on an abort."""
    return f"signal/{number}/received"


def post(store: Store, message: dict[str, Any]) -> int:
    """Post ``message`` to all signal threads; returns its number.

    A message that is counted and does not come would keep every signal thread waiting. So both are
    done in a thread, which no handler of a Unix signal interrupts.
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
def clocks_paused(world: World, limit_s: float) -> Iterator[None]:
    """Pause the timeouts of all verbs on all ranks, for ``limit_s`` at most.

    The clocks of the others are paused and resumed up to a quarter of a second later. Where the
    store is lost this rank's clock is paused alone. Simulated ranks have no timeouts.
    """
    if world.is_simulated or world.is_closed:
        yield
        return
    here, name = object(), uuid4().hex

    def change(pause: tuple[int, float] | None) -> None:
        with suppress(RuntimeError):
            check_store_served(world)
            change_pause(store_of_thread(world), name, pause)
            post(store_of_thread(world), {"kind": "clock"})

    clock.pause(here)
    try:
        change((world.rank, limit_s))
        yield
    finally:
        clock.resume(here)
        clock.resume(name)  # the signal thread would, too, a little later
        change(None)


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
        ranks: the ranks to ask.
        about: a call or message of one communicator that the answer describes as well.
        patience_s: how long to wait for answers.
    """
    check_store_served(world)
    store = store_of_thread(world)
    number = post(store, {"kind": "ask", "about": about or {}})
    answers: dict[int, Answer] = {}
    keys = {rank: f"signal/{number}/answer/{rank}" for rank in ranks}
    collect(store, keys, answers, Grace(patience_s), lambda: check_store_served(world))
    return answers


def collect(
    store: Store,
    keys: dict[int, str],
    found: dict[int, Any],
    deadline: Deadline,
    check: Callable[[], object] | None = None,
) -> None:
    """Add to ``found`` what each rank writes in JSON under its key, until all have written."""

    def is_complete() -> bool:
        for rank in keys.keys() - found.keys():
            if store.check([keys[rank]]):
                found[rank] = json.loads(store.get(keys[rank]))
        return found.keys() >= keys.keys()

    wait_until(is_complete, deadline, check)

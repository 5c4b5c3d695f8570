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
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypedDict, TypeVar
from uuid import uuid4

from torch.distributed import Store

from ..bootstrap.bounded_store import BoundedStore, read_json
from ..bootstrap.server_watch import find_readable
from ..bootstrap.world import World
from ..errors import StoreError
from ..runtime.deadlines import Deadline, Grace, clock, wait_until
from .paused_clocks import PausedClocks, change_pause

__all__ = [
    "Answer",
    "SignalThread",
    "ask",
    "clocks_paused",
    "collect",
    "last_call_text",
    "post",
    "receipts_key",
]

_log = logging.getLogger("meshdist.signals")
T = TypeVar("T")

_PERIOD_S = 0.25
_ANSWER_S = 2.0
_END_S = 20.0  # a request to the store ends in a few seconds


class Answer(TypedDict):
    """A rank's answer to a question."""

    calls: list[dict[str, Any]]
    """Its last call on each communicator (label, sequence, text), the most recent last."""
    about: str | None
    """The one call that was asked about; None where it has not come there yet."""
    now: str
    """The place of the program where it is; "" where that is in its last call."""


def last_call_text(answer: Answer | None) -> str:
    """The last call in a rank's answer, or that it gave none (None)."""
    if answer is None:
        return "gives no answer: it has ended or is stopped"
    calls = answer["calls"]
    text = f"last {calls[-1]['text']}" if calls else "runs, and has called no verb"
    return f"{text}; now at {answer['now']}" if answer["now"] else text


class SignalThread:
    """Acts on the signals of other ranks.

    Args:
        answer: answers a question, given what it is about.
        abort: acts on an abort, given its message.
        look: called at each look at the store; must not wait.
    """

    def __init__(
        self,
        world: World,
        handle: BoundedStore,
        answer: Callable[[dict[str, Any]], Answer],
        abort: Callable[[dict[str, Any]], None],
        look: Callable[[], None],
    ) -> None:
        self._world = world
        self._look = look
        self._store = store = world.store
        self._rank = rank = world.rank
        self._answer = answer
        self._abort = abort
        self._handle = handle
        self._seen = 0
        self._paused_clocks = PausedClocks(store, rank)
        self._paused_clocks.read()  # a rank may have paused the clocks already
        self._stopping, self._stop = os.pipe()
        self._process_id = os.getpid()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="meshdist-signals", daemon=True)
        self._thread.start()
        # A thread that Python ends inside torch's C++ would take the process down with it.
        atexit.register(self.stop)

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
        ends = [self._stopping, *self._handle.ends]
        while not (ended := find_readable(ends, _PERIOD_S)):
            self._act_on_all()
            self._look()
        if ended == {self._stopping}:  # another rank may be waiting for this one's receipt
            self._act_on_all()
        else:
            self._handle.let_server_end()
        self._paused_clocks.release()

    def _act_on_all(self) -> None:
        # A store that does not answer may do so later; one that is lost ends this thread.
        with suppress(RuntimeError):
            while self._store.check([_signal_key(self._seen + 1)]):
                self._seen += 1
                self._world.latest_signal = max(self._world.latest_signal, self._seen)
                try:
                    self._act(self._seen, read_json(self._store, _signal_key(self._seen), dict))
                except (KeyError, TypeError, AttributeError, ValueError, StoreError) as junk:
                    _log.warning("rank %d ignores signal %d: %s", self._rank, self._seen, junk)
            self._paused_clocks.check()

    def _act(self, number: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "ask":
            answer = json.dumps(self._answer(message["about"]))
            self._store.set(f"{_signal_key(number)}/answer/{self._rank}", answer)
        elif kind == "abort":
            self._abort({**message, "number": number})
            self._store.add(receipts_key(number), 1)
        elif kind == "clock":
            self._paused_clocks.read()


def receipts_key(number: int) -> str:
    """Under which the signal threads count the ranks that have acted on an abort."""
    return f"{_signal_key(number)}/received"


def _signal_key(number: int) -> str:
    return f"signal/{number}"


def post(world: World, message: dict[str, Any]) -> int:
    """Post ``message`` to all signal threads; returns its number, the next from 1."""
    text = json.dumps({**message, "by": uuid4().hex})
    number = world.latest_signal + 1
    while world.store.compare_set(_signal_key(number), "", text) != text.encode():
        number += 1
    world.latest_signal = max(world.latest_signal, number)
    return number


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
            change_pause(world.store, name, pause)
            post(world, {"kind": "clock"})

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
    """Ask what each of ``ranks`` called last, and ``about`` a call or message; ranks that do not
    answer in time are left out.
    """
    number = post(world, {"kind": "ask", "about": about or {}})
    answers: dict[int, Answer] = {}
    keys = {rank: f"{_signal_key(number)}/answer/{rank}" for rank in ranks}
    collect(world.store, keys, answers, Grace(patience_s), parse_answer)
    return answers


def parse_answer(value: Any) -> Answer:
    """Return an answer as its rank gave it; raises where it is none."""
    calls = [
        {"label": str(one["label"]), "sequence": int(one["sequence"]), "text": str(one["text"])}
        for one in value["calls"]
    ]
    about = None if value["about"] is None else str(value["about"])
    return {"calls": calls, "about": about, "now": str(value["now"])}


def collect(
    store: Store,
    keys: dict[int, str],
    found: dict[int, T],
    deadline: Deadline,
    parse: Callable[[Any], T],
) -> None:
    """Add to ``found`` what each rank writes in JSON under its key, until all have written."""

    def is_complete() -> bool:
        for rank in keys.keys() - found.keys():
            if store.check([keys[rank]]):
                found[rank] = read_json(store, keys[rank], parse)
        return found.keys() >= keys.keys()

    wait_until(is_complete, deadline)

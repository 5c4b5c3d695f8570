"""Send control messages between a world's processes, even while they wait in a collective.

Each process has a control thread. On each host, the lowest live rank's thread watches the store by
an alarm of its server, or polls it eight times a second; the others poll that thread's shared
flags. There are two kinds of messages:

* ``abort`` releases waits in the named groups;
* ``ask`` requests each rank's last call. The thread answers even if its rank is blocked, so a
  timeout can name the missing ranks' source lines.

A rank that exits normally or by an exception writes that to the store. If a rank is killed, its
host's other processes detect that.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypedDict, TypeVar
from uuid import uuid4

from torch.distributed import Store

from ..bootstrap.store_liveness import AlarmLost, KeyAlarm, find_readable
from ..bootstrap.timeout_store import TimeoutStore, read_json, read_jsons, read_number
from ..bootstrap.world import World
from ..checking.shared_flags import Heartbeats
from ..errors import StoreError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import IN_GOOD_ORDER, ProcessInfo, is_alive, is_stopped, my_process_info

_log = logging.getLogger("meshdist.signals")
T = TypeVar("T")

_PERIOD_S = 0.125
SURE_S = 30.0  # after which the store is asked though no alarm rings: its connection may be lost
_LENT_S = 0.5  # between looks while a wait of this process has the alarm
ALARM_DELAY_S = 1.0  # before this process makes an alarm: a lower rank may be about to start
_ANSWER_S = 2.0
_MOST_NAMED = 64  # ranks that a question names; where it is for more, it names none, and all answer
_END_S = 20.0  # a request to the store ends in a few seconds
_NUM_EXITED = "ended"


class ControlReply(TypedDict):
    """A rank's answer to an ``ask`` message."""

    calls: list[dict[str, Any]]
    """The last call on each communicator (label, sequence, text), most recent last."""
    about: str | None
    """The requested call; None if the rank has not reached it."""
    now: str
    """The current source line; "" inside the last call."""


def last_call_text(answer: ControlReply | None) -> str:
    """Format a rank's last call and line; None means that it did not answer."""
    if answer is None:
        return "does not respond: it has exited or is stopped"
    calls = answer["calls"]
    text = f"last {calls[-1]['text']}" if calls else "is running and has called no collective"
    return f"{text}; now at {answer['now']}" if answer["now"] else text


class ControlThread:
    """A daemon thread that handles other ranks' control messages.

    Args:
        answer: Answers an ``ask`` message.
        abort: Handles an ``abort`` message.
        look: Called at least eight times a second; may make store requests but must not wait for
            ranks. If it returns a call that waits for ranks, a separate thread runs that call.
        signs: Heartbeats of this host's processes.
    """

    def __init__(
        self,
        world: World,
        handle: TimeoutStore,
        answer: Callable[[dict[str, Any]], ControlReply],
        abort: Callable[[dict[str, Any]], None],
        look: Callable[[], Callable[[], None] | None],
        signs: Heartbeats,
    ) -> None:
        self._world = world
        self._signs = signs
        self._alarm: KeyAlarm | None = None  # while this process looks for others
        self._awaited, self._is_proven = "", False
        self._next_alarm, self._next_look = Deadline(ALARM_DELAY_S), Deadline(0.0)
        self._look = look
        self._waits: list[threading.Thread] = []
        self._store = world.store
        self._rank = world.rank
        self._answer = answer
        self._abort = abort
        self._handle = handle
        self._seen = 0
        self._woken, self._wake = os.pipe()
        self._process_id = os.getpid()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="meshdist-signals", daemon=True)
        self._thread.start()
        # If Python ends a thread inside torch's C++, the process aborts.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread and the calls that it has started; do nothing in a forked child."""
        atexit.unregister(self.stop)
        if self._process_id != os.getpid() or self._is_stopped:
            return
        self._is_stopped = True
        os.write(self._wake, b"x")  # closing would not do: a forked child holds this end, too
        if self._thread is not threading.current_thread():
            self._thread.join(_END_S)
        for wait in self._waits:
            wait.join(_END_S)
        if not self._thread.is_alive():
            os.close(self._wake)
            os.close(self._woken)

    def _run(self) -> None:
        has_ended = False
        while not (has_ended or self._is_stopped):
            self._start_wait()
            self._act_on_all(self._signs.find_published())
            alarms = [self._alarm.connection] if self._alarm is not None else []
            ready = find_readable([self._woken, *{*self._handle.ends, *alarms}], _PERIOD_S)
            if self._woken in ready:
                os.read(self._woken, 1 << 16)
            has_ended = self._handle.has_ended()
        if not has_ended:  # another rank may be waiting for this one's receipt
            self._drop_alarm(ALARM_DELAY_S)
            self._act_on_all(None)
        else:
            self._handle.let_server_end()
        self._drop_alarm(ALARM_DELAY_S)

    def _start_wait(self) -> None:
        """Call ``look``, and run the call that it returns in a thread that ``stop`` waits for."""
        if (call := self._look()) is not None:
            wait = threading.Thread(target=call, name="meshdist-waits", daemon=True)
            wait.start()
            self._waits = [*filter(threading.Thread.is_alive, self._waits), wait]

    def _act_on_all(self, announced: int | None) -> None:
        """Handle new messages up to number ``announced``; None: look in the store."""
        try:
            if announced is not None:
                self._drop_alarm(ALARM_DELAY_S)
            latest = self._find_latest() if announced is None else announced
            self._signs.beat(latest)  # before this process acts, which may take long
            while self._seen < latest:
                self._seen += 1
                self._world.latest_control_message = max(
                    self._world.latest_control_message, self._seen
                )
                try:
                    read_json(self._store, _signal_key(self._seen), self._act)
                except StoreError as junk:
                    _log.warning(
                        "rank %d ignores control message %d: %s", self._rank, self._seen, junk
                    )
        except (RuntimeError, OSError):  # the store may answer later, or its end ends this thread
            self._drop_alarm(SURE_S)

    def _find_latest(self) -> int:
        """Return the latest message's number; query the store after an alarm or when due."""
        latest, alarm = self._seen, self._alarm
        has_rung = False if alarm is None else alarm.poll(self._awaited)
        if has_rung is None and self._next_look.left_s > _LENT_S:
            self._next_look = Deadline(_LENT_S)
        if not (has_rung or self._next_look.is_over):
            return latest
        while self._store.check([_signal_key(latest + 1)]):
            latest += 1
        if has_rung:
            self._awaited, self._is_proven = _alarm_key(self._store, latest + 1), True
            self._next_look = Deadline(SURE_S)
        elif has_rung is None:
            self._next_look = Deadline(_LENT_S)
        elif latest > self._seen:  # an alarm that has not rung is worth nothing
            self._drop_alarm(ALARM_DELAY_S)
        elif self._is_proven:
            self._next_look = Deadline(SURE_S)
        elif alarm is None and self._next_alarm.is_over:
            self._next_alarm = Deadline(SURE_S)
            self._awaited = _alarm_key(self._store, 0)
            self._handle.set_bare(self._awaited)
            self._alarm = self._handle.alarm  # rings at once if the server knows it
        return latest

    def _drop_alarm(self, pause_s: float) -> None:
        """Drop the alarm and poll the store; create a new alarm after ``pause_s``."""
        self._next_alarm, self._next_look = Deadline(pause_s), Deadline(0.0)
        if self._alarm is not None:
            with suppress(AlarmLost):
                self._alarm.poll("")
        self._alarm, self._is_proven = None, False

    def _act(self, message: dict[str, Any]) -> None:
        number, kind = self._seen, message["kind"]
        if kind == "ask":
            if self._rank in message.get("ranks", [self._rank]):
                answer = json.dumps(self._answer(message["about"]))
                self._store.set(f"{_signal_key(number)}/answer/{self._rank}", answer)
                self._store.add(receipts_key(number), 1)
        elif kind == "abort":
            self._abort({**message, "number": number})
            self._store.add(receipts_key(number), 1)


def receipts_key(number: int) -> str:
    """Return the key that counts the ranks that handled message ``number``."""
    return f"{_signal_key(number)}/received"


def _signal_key(number: int) -> str:
    return f"signal/{number}"


def _alarm_key(store: Store, number: int) -> str:
    """Return the key, without the world's prefix, that announces message ``number``."""
    word = store.compare_set("signal/alarms", "", uuid4().hex).decode(errors="replace")
    return f"meshdist/alarm/{word}/{number}"


def post(world: World, message: dict[str, Any]) -> int:
    """Store ``message`` for all control threads; return its number, from 1."""
    text = json.dumps({**message, "by": uuid4().hex})
    number = world.latest_control_message + 1
    while world.store.compare_set(_signal_key(number), "", text) != text.encode():
        number += 1
    world.latest_control_message = max(world.latest_control_message, number)
    if world.handle is not None:
        world.handle.set_bare(_alarm_key(world.store, number))
    return number


def ask(
    world: World,
    ranks: tuple[int, ...],
    about: dict[str, Any] | None = None,
    *,
    patience_s: float = _ANSWER_S,
) -> dict[int, ControlReply]:
    """Ask ``ranks`` for their last calls; return timely answers by rank.

    Args:
        about: A further call or message to report.
    """
    if not ranks:
        return {}
    named = {"ranks": ranks} if len(ranks) <= _MOST_NAMED else {}
    number = post(world, {"kind": "ask", "about": about or {}, **named})
    keys = {rank: f"{_signal_key(number)}/answer/{rank}" for rank in ranks}
    grace, received = Deadline(patience_s), receipts_key(number)
    wait_until(lambda: read_number(world.store, received) >= len(ranks), grace)
    return collect(world.store, keys, grace, parse_answer)


def parse_answer(value: Any) -> ControlReply:
    """Parse ``value`` from the store as a ControlReply; raise if it is malformed."""
    calls = [
        {"label": str(it["label"]), "sequence": int(it["sequence"]), "text": str(it["text"])}
        for it in value["calls"]
    ]
    about = None if value["about"] is None else str(value["about"])
    return {"calls": calls, "about": about, "now": str(value["now"])}


def collect(
    store: Store, keys: dict[int, str], deadline: Deadline, parse: Callable[[Any], T]
) -> dict[int, T]:
    """Wait for ``keys``; return, by rank, the parsed JSON of keys set by ``deadline``."""
    if not wait_until(lambda: store.check([*keys.values()]), deadline):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    values = read_jsons(store, [*keys.values()], parse) if keys else ()
    return dict(zip(keys, values, strict=True))


class Endings:
    """Tracker of how ranks left their world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process_infos: dict[int, ProcessInfo] = {}
        self._exited: dict[int, tuple[str, dict[str, int]]] = {}
        self._looked: dict[int, int] = {}  # how many had left when each was last looked for

    def announce(self, **more: Any) -> None:
        """Store this rank's process information, with ``more`` fields."""
        process_info = {**my_process_info().to_json(), **more}
        self._world.store.set(process_info_key(self._world.rank), json.dumps(process_info))

    def leave(self, how: str, num_calls: dict[str, int]) -> None:
        """Store how this rank leaves and its collectives per communicator label."""
        with suppress(StoreError):
            self._world.store.set(_ending_key(self._world.rank), json.dumps([how, num_calls]))
            self._world.store.add(_NUM_EXITED, 1)

    def find(self, rank: int, label: str = "") -> str:
        """Return how ``rank`` left the world, or ""."""
        return self.find_all((rank,), label).get(rank, "")

    def find_all(self, ranks: Collection[int], label: str = "") -> dict[int, str]:
        """Return, by rank, how ``ranks`` left the world, for example "has ended".

        Args:
            label: A communicator, whose number of collectives a normal exit's text then has.

        Raises:
            StoreError: The store is lost.
        """
        store, found = self._world.store, dict[int, str]()
        if not self._world.has_processes:
            return found
        for rank in ranks:  # first, since a process stores its data before it ends
            if (process_info := self._find_process_info(rank)) is not None and is_alive(
                process_info
            ) is False:
                found[rank] = "has ended"
        num_exited = read_number(store, _NUM_EXITED)
        for rank in ranks:
            if rank not in self._exited and self._looked.get(rank, 0) < num_exited:
                if store.check([key := _ending_key(rank)]):
                    self._exited[rank] = read_json(store, key, lambda it: (str(it[0]), dict(it[1])))
                self._looked[rank] = num_exited
            if rank in self._exited:
                how, counts = self._exited[rank]
                if how in IN_GOOD_ORDER and (number := counts.get(label)) is not None:
                    how += f"; it made {number} collective{'s' * (number != 1)} on this group"
                found[rank] = how
        return found

    def has_died(self, rank: int) -> bool:
        """Return whether ``rank``, whose connection is lost, failed or was killed."""
        try:
            if how := self.find(rank):
                return not how.startswith(IN_GOOD_ORDER)
            # A rank that was killed on another host stores nothing. One that answers has only left
            # the group.
            return rank not in ask(self._world, (rank,))
        except StoreError:  # the process that hosts the store has ended, too
            return True

    def is_stopped(self, rank: int) -> bool:
        """Return whether a process of this host is stopped, as by SIGSTOP."""
        process_info = self._find_process_info(rank) if self._world.has_processes else None
        return process_info is not None and is_stopped(process_info)

    def _find_process_info(self, rank: int) -> ProcessInfo | None:
        world = self._world
        if world.hosts[rank] != world.hosts[world.rank]:
            return None
        if rank not in self._process_infos and world.store.check([process_info_key(rank)]):
            self._process_infos[rank] = read_json(
                world.store, process_info_key(rank), ProcessInfo.from_json
            )
        return self._process_infos.get(rank)


def _ending_key(rank: int) -> str:
    return f"ended/{rank}"


def process_info_key(rank: int) -> str:
    return f"process/{rank}"

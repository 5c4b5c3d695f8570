"""The communicators that this rank has open in its world, shared where equal.

Two groups with equal ranks in equal order, on the same wire with the same options, use one
communicator; private groups never share. Whether one can be shared is for all members to say, since
one of them may have closed it, or seen it fail, before the others: they tell each other when they
agree on what they make, and the agreement gives the communicator its label.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from ..runtime.boards import Board, BoardAddress, BoardView, find_board, find_view
from ..runtime.handles import (
    check_store_served,
    cloned,
    store_of_thread,
    telling_lost_store,
)
from ..runtime.ledger import Ledger
from ..runtime.message_log import MessageLog
from ..runtime.recorder import Recorder
from ..runtime.world import World
from ..wires.base import Communicator, Opening, Wire
from ..wires.core import core
from .matching import Matching
from .signals import Answer, Sentinel, heard_key, post

__all__ = ["OpenCommunicator", "Registry", "get_registry"]

_making = threading.Lock()
_PATIENCE_S = 5.0
_HEARD_S = 1.0
_NOTING_S = 0.01
_NUM_OPENING = "group/opening"


class Handle(Protocol):
    """A group that uses communicators of the registry."""

    def forget_channels(self) -> None:
        """Reach no communicator any more."""


@dataclass
class OpenCommunicator:
    """One communicator, its label (equal on all members), and how many groups use it."""

    label: str
    communicator: Communicator
    recorder: Recorder
    aborts: dict[str, dict[str, Any]]
    ledger: Ledger | None = None
    matching: Matching | None = None
    spans_hosts: bool = False
    options: Any = None  # kept, since equal options are known by their identity
    num_users: int = 1

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.recorder.ranks)

    def leave(self) -> None:
        """Tell the other members that this process comes to its end in good order."""
        self.communicator.leave()
        if self.ledger is not None:
            self.ledger.leave()

    def close(self) -> None:
        """End this member's part; what waits fails."""
        if self.matching is not None:
            self.matching.close()
        self.communicator.close()


@dataclass
class Registry:
    """What one rank has open; made on first use and closed with the world."""

    world: World
    handles: dict[int, Handle] = field(default_factory=dict)
    aborts: dict[str, dict[str, Any]] = field(default_factory=dict)
    beside_wires: Recorder = field(default_factory=Recorder)
    """Calls that go through the store instead of a communicator."""
    _by_key: dict[Any, OpenCommunicator] = field(default_factory=dict)
    _by_label: dict[str, OpenCommunicator] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _sentinel: Sentinel | None = None
    _board: Board | None = None
    _views: dict[int, BoardView | None] = field(default_factory=dict)
    _last_abort: int = 0

    def acquire(
        self,
        wire: Wire,
        ranks: tuple[int, ...],
        device_type: str,
        timeout: timedelta,
        options: Any,
        *,
        device: torch.device | None,
        name: str,
        label: str,
        is_private: bool,
    ) -> OpenCommunicator:
        """Return the communicator called ``label``; opening a new one waits for all members.

        Raises:
            WireFailure: the wire could not open it.
        """
        world = self.world
        key = (wire.name, ranks, id(options))
        with self._lock:
            shared = self._by_label.get(label)
            if shared is not None:
                shared.num_users += 1
                return shared
        opening = Opening(
            store=PrefixStore(label, store_of_thread(world)),
            ranks=ranks,
            rank=ranks.index(world.rank),
            device_type=device_type,
            timeout=timeout,
            is_one_host=not world.spans_hosts(ranks),
            options=options,
            device=device,
            name=name,
            num_local=world.local_size,
            hosts=tuple(world.hosts[rank] for rank in ranks) if world.hosts else (),
        )
        # The ledger comes first, so that members who are done find it.
        ledger = None if wire.compares_calls else self._make_ledger(label, ranks)
        try:
            communicator = wire.open(opening)
        except BaseException:
            self._drop_ledger(label, ledger)
            raise
        recorder = Recorder(ranks)
        matching = None
        if ledger is not None and communicator.wants_senders:
            matching = Matching(communicator, ledger, recorder, lambda: label in self.aborts)
        opened = OpenCommunicator(
            label,
            communicator,
            recorder,
            self.aborts,
            ledger,
            matching,
            world.spans_hosts(ranks),
            options,
        )
        if self._is_among_processes:
            try:
                with telling_lost_store(world):
                    store_of_thread(world).add(f"{label}/opened", 1)
            except BaseException:
                opened.close()
                self._drop_ledger(label, ledger)
                raise
        with self._lock:
            self._by_label[label] = opened
            if not is_private:
                self._by_key[key] = opened
        return opened

    def find_label(
        self, wire: Wire, ranks: tuple[int, ...], options: Any, *, is_private: bool
    ) -> str:
        """The label of the communicator that a new group could share, or ""."""
        with self._lock:
            found = None if is_private else self._by_key.get((wire.name, ranks, id(options)))
        return "" if found is None else found.label

    def release(self, opened: OpenCommunicator) -> None:
        """Give up one use; the last one closes the communicator."""
        with self._lock:
            opened.num_users -= 1
            if opened.num_users > 0 or self._by_label.pop(opened.label, None) is None:
                return
            self.forget(opened)
        self._await_members([opened])
        opened.close()
        self._drop_ledger(opened.label, opened.ledger)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Let the rank that serves the store not end while this one opens groups."""
        if not self._is_among_processes:
            yield
            return
        check_store_served(self.world)
        store = store_of_thread(self.world)
        store.add(_NUM_OPENING, 1)
        try:
            yield
        finally:
            with suppress(RuntimeError):  # the store is lost: whoever waits for it knows
                check_store_served(self.world)
                store.add(_NUM_OPENING, -1)

    def forget(self, opened: OpenCommunicator) -> None:
        """Never share a broken communicator with a group that is made later."""
        with self._lock:
            for key in [key for key, value in self._by_key.items() if value is opened]:
                del self._by_key[key]

    def abort(self, labels: list[str], message: dict[str, Any]) -> None:
        """Free whoever waits in the named communicators, on every rank of the world."""
        message = {**message, "kind": "abort", "rank": self.world.rank, "labels": labels}
        store = store_of_thread(self.world)
        try:
            check_store_served(self.world)
            for label in labels:
                store.set(f"{label}/abort", json.dumps(message))
            if self._sentinel is not None:
                message["number"] = post(store, message)
        finally:
            self._abort_here(message)

    def break_here(self, opened: OpenCommunicator, reason: str, **more: Any) -> None:
        """Let every later verb of this rank on a failed communicator tell why it is broken."""
        message = {"rank": self.world.rank, "labels": [opened.label], "reason": reason, **more}
        self._abort_here(message)

    def find_abort(self, label: str) -> dict[str, Any] | None:
        """Who aborted a communicator and why, if somebody did; asks the store."""
        known = self.aborts.get(label)
        if known is None:
            check_store_served(self.world)
            store = store_of_thread(self.world)
            if store.check([f"{label}/abort"]):
                known = json.loads(store.get(f"{label}/abort"))
                # Its signal may be under way still, and the next verb must not run into the wire.
                self._abort_here(known)
        return known

    def start_sentinel(self) -> None:
        """Watch for signals of other processes; simulated ranks need none."""
        if not self._is_among_processes or self._sentinel is not None:
            return
        store = cloned(self.world.store)
        self._board = find_board()
        address = None if self._board is None else self._board.address.to_json()
        store.set(_board_key(self.world.rank), json.dumps(address))
        self._sentinel = Sentinel(store, self.world.rank, self.answer, self._abort_here)
        self.world.rooms["store probe"] = self._sentinel.is_store_served
        atexit.register(self._end)  # runs before the sentinel's own, which was registered before
        if multiprocessing.parent_process() is not None:  # a forked worker runs no such handlers
            multiprocessing.util.Finalize(None, self._end, exitpriority=0)

    def answer(self, about: dict[str, Any]) -> Answer:
        """What this rank called last on each communicator and beside them; what is asked about."""
        with self._lock:
            recorders = [(entry.label, entry.recorder) for entry in self._by_label.values()]
            asked = self._by_label.get(about.get("label", ""))
        recorders.append(("", self.beside_wires))
        used = [(label, recorder) for label, recorder in recorders if recorder.moment]
        used.sort(key=lambda one: one[1].moment)
        calls = [{"label": label, **recorder.describe()} for label, recorder in used]
        if not about or asked is None:
            return {"calls": calls, "about": None, "is_forgotten": False}
        if not asked.recorder.has_noted(about):
            time.sleep(_NOTING_S)  # a message may be on its way and not noted yet
        found = asked.recorder.find_about(about)
        is_forgotten = found is None and asked.recorder.has_noted(about)
        return {"calls": calls, "about": found, "is_forgotten": is_forgotten}

    def close(self) -> None:
        """Close all communicators and stop watching."""
        self._leave()
        if self._sentinel is not None:
            self._sentinel.stop()
            self._sentinel = None
        for handle in list(self.handles.values()):
            handle.forget_channels()
        with self._lock:
            opened = list(self._by_label.values())
            self._by_label.clear()
            self._by_key.clear()
        for entry in opened:
            if self.world.process_id != os.getpid():  # a forked child has no part in it
                entry.communicator.close()
                continue
            entry.leave()
            entry.close()
            if entry.ledger is not None:
                entry.ledger.close()
        self._views.clear()
        if self._board is not None:
            self._board.close()
            self._board = None

    @property
    def _is_among_processes(self) -> bool:
        return self.world.size > 1 and not self.world.is_simulated

    def _make_ledger(self, label: str, ranks: tuple[int, ...]) -> Ledger | None:
        """The headers of a new communicator, shared with its members on this host."""
        world, board = self.world, self._board
        if board is None or len(ranks) == 1:
            return None
        hosts = world.hosts or (0,) * world.size
        me = ranks.index(world.rank)
        others = [
            member
            for member, rank in enumerate(ranks)
            if member != me and hosts[rank] == hosts[world.rank]
        ]
        if not others:
            return None
        key = _board_region(label)
        try:
            region = board.reserve(key, Ledger.num_words(len(ranks)))
        except MemoryError:
            return None

        def find_region(member: int, num_words: int) -> memoryview | None:
            view = self._find_view(ranks[member])
            return None if view is None else view.find(key, num_words)

        def is_current(member: int) -> bool:
            view = self._views.get(ranks[member])
            return view is not None and view.has(key)

        def is_alive(member: int) -> bool:
            view = self._views.get(ranks[member])
            return view is not None and view.is_kept() and view.has(key)

        new_log = MessageLog if core is None else core.MessageLog
        size = len(ranks)
        return Ledger(region, me, others, size, find_region, is_current, is_alive, new_log)

    def _drop_ledger(self, label: str, ledger: Ledger | None) -> None:
        if ledger is not None:
            ledger.close()
        if self._board is not None:
            self._board.release(_board_region(label))

    def _find_view(self, rank: int) -> BoardView | None:
        """The board of a rank of this host, or None where it cannot be reached, or not yet."""
        if rank not in self._views:
            with telling_lost_store(self.world):
                store = store_of_thread(self.world)
                if not store.check([_board_key(rank)]):
                    return None
                address = json.loads(store.get(_board_key(rank)))
            self._views[rank] = address and find_view(BoardAddress.from_json(address))
        return self._views[rank]

    def _leave(self) -> None:
        """Wait, a little, for ranks that still need this one to open what it has open already."""
        atexit.unregister(self._end)
        if not self._is_among_processes or self.world.process_id != os.getpid():
            return
        with self._lock:
            opened = list(self._by_label.values())
        self._await_members(opened)
        if self.world.rank == 0:  # it serves the store as a rule
            store = store_of_thread(self.world)
            if self._last_abort:
                key, deadline = heard_key(self._last_abort), time.monotonic() + _HEARD_S
                self._wait_until(partial(_has_counted, store, key, self.world.size), deadline)
            self._wait_until(lambda: int(store.add(_NUM_OPENING, 0)) <= 0)

    def _end(self) -> None:
        """Tell the others that this process has come to its end, unless an exception ends it."""
        self._leave()
        has_failed = hasattr(sys, "last_value") or sys.exc_info()[0] is not None
        if self.world.process_id == os.getpid() and not has_failed:
            with self._lock:
                opened = list(self._by_label.values())
            for entry in opened:
                entry.leave()

    def _await_members(self, opened: list[OpenCommunicator]) -> None:
        """Wait until every member has opened its side.

        A member that ends first takes its connections along, and Gloo then fails on the members
        that are still connecting to each other.
        """
        if not self._is_among_processes:
            return
        store = store_of_thread(self.world)
        deadline = time.monotonic() + _PATIENCE_S  # for all of them together
        for entry in opened:
            if entry.label not in self.aborts and entry.size > 1:
                key = f"{entry.label}/opened"
                self._wait_until(partial(_has_counted, store, key, entry.size), deadline)

    def _wait_until(self, is_so: Callable[[], bool], deadline: float | None = None) -> None:
        """Return when ``is_so()``, after a few seconds, or when the store is lost."""
        deadline = deadline or time.monotonic() + _PATIENCE_S
        pause = 0.0005
        with suppress(RuntimeError):
            while True:
                asking = nullcontext(True) if self._sentinel is None else self._sentinel.asking()
                with asking as is_served:
                    if not is_served or is_so() or time.monotonic() > deadline:
                        return
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)

    def _abort_here(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._last_abort = max(self._last_abort, message.get("number", 0))
            for label in message["labels"]:
                self.aborts.setdefault(label, message)
            opened = [self._by_label[x] for x in message["labels"] if x in self._by_label]
        for entry in opened:
            self.forget(entry)
            entry.communicator.abort()


def _board_key(rank: int) -> str:
    return f"board/{rank}"


def _board_region(label: str) -> int:
    """The key of a communicator's headers on every member's board; never 0."""
    digest = hashlib.sha1(label.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") | 1


def _has_counted(store: Store, key: str, count: int) -> bool:
    return int(store.add(key, 0)) >= count


def get_registry(world: World) -> Registry:
    """Return the world's registry, made on first use."""
    registry: Registry | None = world.rooms.get("registry")
    if registry is None:
        with _making:
            registry = world.rooms.get("registry")
            if registry is None:
                registry = world.rooms["registry"] = Registry(world)
                world.closers.append(registry.close)
                registry.start_sentinel()
    return registry

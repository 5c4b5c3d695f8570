"""Track this rank's open communicators, and share them between equal groups.

Groups with equal ranks, order, backend and options share a communicator; private groups never
share. A member may have closed it or seen it fail before the others, so each member offers its
communicators in the agreement, which assigns the label.

Garbage collection drops groups at different times on different ranks, so communicators stay open
until all members offer to close them in a later agreement.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

from ..backends.communicator import Communicator
from ..backends.registry import BackendType, Opening
from ..bootstrap.timeout_store import find_value, read_json, read_number, within
from ..bootstrap.world import World
from ..checking.call_sites import find_call_site, stack_text
from ..checking.fingerprint_table import CHECK_EVERY, FingerprintTable
from ..checking.recorder import Recorder
from ..errors import MeshdistError, StoreError
from ..launching.stack_dump import StackDumper
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.fork_safe_locks import ForkSafeLock
from ..runtime.hosts import (
    DESTROYED,
    call_at_end,
    do_not_call_at_end,
    ending_text,
    find_failure,
    find_last_exception,
    is_ending_by_exception,
)
from .agreement import NO_OFFERS, Agreement, Agreements, Offers
from .control_messages import ControlReply, ControlThread, Endings, post, receipts_key
from .host_comparison import (
    DISAGREEMENT,
    FingerprintTables,
    HostComparison,
    parse_abort,
    parse_disagreement,
    reason_of,
)
from .liveness import Liveness, key_of_opened

_log = logging.getLogger("meshdist.groups")
_making = ForkSafeLock()
_PATIENCE = timedelta(seconds=5)
_RECEIPTS_S = 1.0
_NOTING_S = 0.01
_LAST = timedelta(seconds=2)


@dataclass(eq=False)
class OpenCommunicator:
    """An open communicator, its label (equal on all members) and its groups."""

    label: str
    communicator: Communicator
    recorder: Recorder
    aborts: dict[str, dict[str, Any]]
    fingerprint_table: FingerprintTable | None = None
    spans_hosts: bool = False
    # whether every member sees all members' calls; equal on all of them
    sees_all_calls: bool = False
    options: Any = None  # kept, since equal options are known by their identity
    share_key: tuple[str, tuple[int, ...], int] | None = None  # None: for one group alone
    users: dict[int, Callable[[], Any]] = field(default_factory=dict)
    """By ``id``: weak references, and functions that hold the groups that were dropped."""
    ranks: tuple[int, ...] = ()
    is_closed: bool = False
    comparison: HostComparison | None = None  # if members are on several hosts
    is_leaving: bool = False  # whether this member has offered to close it
    compares_first: bool = False  # whether calls are compared before data moves, as at DETAIL

    @property
    def is_in_use(self) -> bool:
        """Return whether the program still holds a group of this communicator."""
        return any(isinstance(refer, ref) for refer in list(self.users.values()))

    def leave(self) -> None:
        """Announce this process's normal exit to the other members."""
        self.communicator.leave()
        if self.fingerprint_table is not None:
            self.fingerprint_table.leave()

    def close(self) -> None:
        """Close the communicator and its table."""
        self.is_closed = True
        self.communicator.close()
        if self.fingerprint_table is not None:
            self.fingerprint_table.close()


class Registry:
    """Open communicators of a rank, closed with the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.aborts: dict[str, dict[str, Any]] = {}
        """The abort message of each unusable communicator, by label."""
        self.store_calls = Recorder()
        """Records calls that use the store instead of a communicator."""
        self.fingerprint_tables = FingerprintTables(world)
        self.endings = Endings(world)
        self.liveness = Liveness(world, self.endings)
        self.look: Callable[[], Callable[[], None] | None] | None = None
        """The function that the control thread calls regularly; see ``ControlThread``."""
        self.stall_warning_s: float | None = None
        """The limit of the ``stall_warning`` block; 0 disables the warning."""
        self._agreements = Agreements(world, self.endings)
        self._by_label: dict[str, OpenCommunicator] = {}
        self._lock = threading.RLock()
        self._num_openings = 0
        self._signals: ControlThread | None = None

    def start(self) -> None:
        """Start this rank's control thread and register its end, except on simulated ranks."""
        world = self.world
        if world.is_simulated:
            return
        if world.has_processes and world.handle is not None:
            self.endings.announce(words=self.fingerprint_tables.make_words())
            self._answerer = StackDumper(self.where)
            signs = self.fingerprint_tables.signs_of_life()
            arguments = self.answer, lambda it: self._abort_here(parse_abort(it)), self._look, signs
            self._signals = ControlThread(world, world.handle, *arguments)
        call_at_end(self._end)  # runs before the signals' handler, which was registered earlier

    @contextmanager
    def opening(self, agreement: Agreement | None = None) -> Iterator[Callable[..., Agreement]]:
        """Yield ``Agreements.agree``; then wait for members, and close dropped communicators.

        Args:
            agreement: An earlier agreement, whose members are awaited, too.
        """
        # Wait briefly for the other members, and longer on the rank that hosts the store: a member
        # that exited now would make the others' connects fail.
        made = [] if agreement is None else [agreement]
        leaving: list[OpenCommunicator] = []

        def agree(*what: Any, offers: Offers = NO_OFFERS, lack: str = "") -> Agreement:
            dropped = self._find_dropped(what[0], offers)
            leaving.extend(dropped)
            ends = {f"end/{each.label}": (each.label, each.ranks) for each in dropped}
            made.append(self._agreements.agree(*what, offers=offers, ends=ends, lack=lack))
            return made[-1]

        has_failed = True
        with self._lock:
            self._num_openings += 1
        try:
            yield agree
            has_failed = False
        finally:
            for each in made:
                patience = self.liveness.patience_of_server() or (
                    _PATIENCE if each.opened else None
                )
                self._finish_opening(each, None if has_failed else patience)
            agreed = {label for each in made for label in each.shared.values()}
            with self._lock:
                self._num_openings -= 1
                for opened in leaving:
                    opened.is_leaving = opened.label in agreed
            self._close([opened for opened in leaving if opened.is_leaving])

    def _find_dropped(self, here: Collection[int], offers: Offers) -> list[OpenCommunicator]:
        """Mark and return unused communicators as leaving; none during other openings.

        Args:
            here: The next agreement's members; only communicators within them leave.
            offers: Communicators that it may share, which stay.
        """
        found, kept = [], {label for label, _ in offers.values()}
        with self._lock:
            if self._num_openings > 1:  # they may be in use there
                return []
            for label, opened in sorted(self._by_label.items()):
                is_kept = label in kept or opened.is_leaving or opened.is_in_use
                if not is_kept and {*here} >= {*opened.ranks}:
                    opened.is_leaving = True
                    found.append(opened)
        return found

    def drop(self, group: Any) -> bool:
        """Remove a dropped group; return whether it is a communicator's last user."""
        with self._lock:
            opened = {device_group.opened for device_group in group.device_groups}
            for communicator in opened:
                communicator.users.pop(id(group), None)
                if not communicator.is_in_use:
                    communicator.users[id(group)] = lambda: group
        return any(id(group) in communicator.users for communicator in opened)

    def _finish_opening(self, agreement: Agreement, patience: timedelta | None) -> None:
        """Mark this rank as connected and wait up to ``patience`` for the others."""
        world, members = self.world, agreement.members
        if not world.has_processes or len(members) < 2:
            return
        with suppress(StoreError):  # the next call that needs the store raises
            are_open = self.liveness.count(key_of_opened(agreement), members, patience)
            for opened in agreement.opened if are_open else ():
                table = opened.fingerprint_table
                if opened.communicator.on_stream and table is not None and table.sees_all():
                    is_blind = find_value(world.store, f"{opened.label}/blind") is not None
                    opened.sees_all_calls = not is_blind

    def acquire(
        self, backend: BackendType, opening: Opening, agreement: Agreement, label: str, user: Any
    ) -> OpenCommunicator:
        """Return communicator ``label``, opened if needed, and register ``user``.

        Args:
            user: The group; if private, no other group may share the communicator.
        """
        with self._lock:
            shared = self._by_label.get(label)
            if shared is not None:
                shared.users[id(user)] = ref(user)
                return shared
        world, ranks, options = self.world, opening.ranks, opening.options
        # Make the table first, so that members that have opened their side find it.
        table = None if backend.compares_calls else self.fingerprint_tables.make(label, ranks)
        communicator = None
        try:
            with within(Deadline(opening.timeout)):
                communicator = backend.open(opening)
                reaches = table is not None and self.fingerprint_tables.reaches(ranks)
                is_one_host = len(ranks) > 1 and not world.spans_hosts(ranks)
                # it will not see the other members' calls
                if communicator.on_stream and is_one_host and not reaches:
                    world.store.set(f"{label}/blind", "")  # all of its members read this
        except BaseException:
            for each in (communicator, table):
                if each is not None:
                    each.close()
            raise
        spans_hosts = world.spans_hosts(ranks)
        # A round names the first call that differs, of as many as it compares.
        recorder = Recorder(2 * CHECK_EVERY) if spans_hosts else Recorder()
        of_calls = label, communicator, recorder, self.aborts, table
        facts = spans_hosts, communicator.on_stream and len(ranks) == 1, options
        connection = backend.connection_for(opening.device_type)
        share_key = None if user.is_private else (connection, ranks, id(options))
        users: dict[int, Callable[[], Any]] = {id(user): ref(user)}
        opened = OpenCommunicator(*of_calls, *facts, share_key, users, ranks)
        if spans_hosts and not communicator.on_stream:
            opened.comparison = HostComparison(communicator)
        agreement.opened.append(opened)
        with self._lock:
            self._by_label[label] = opened
        return opened

    def find_label(self, connection: str, ranks: tuple[int, ...], options: Any) -> str:
        """Return the label of an open, sharable communicator, or "".

        Args:
            connection: as from ``BackendType.connection_for``.
        """
        key = (connection, ranks, id(options))
        with self._lock:
            found = [each for each in self._by_label.values() if each.share_key == key]
            return next((each.label for each in reversed(found) if not each.is_leaving), "")

    def release(self, opened: OpenCommunicator, user: Any) -> None:
        """Remove ``user``; the last user closes the communicator."""
        with self._lock:
            opened.users.pop(id(user), None)
            if opened.users or opened.label not in self._by_label:
                return
            opened.is_leaving = True  # so that no thread shares it
        self._close([opened])

    def _close(self, opened: list[OpenCommunicator]) -> None:
        for each in opened:
            self._by_label.pop(each.label, None)
            each.users.clear()
            each.close()

    def abort(self, labels: list[str], message: dict[str, Any]) -> None:
        """Abort the communicators ``labels`` on every rank; ``message`` has the reason."""
        message = {**message, "kind": "abort", "rank": self.world.rank, "labels": labels}
        world = self.world
        try:
            for label in labels:
                world.store.set(f"{label}/abort", json.dumps(message))
            number = post(world, message) if self._signals is not None else 0
        finally:
            self._abort_here(message)
        if number and world.server == world.rank:  # it may end right after this call
            received, limit = receipts_key(number), Deadline(_RECEIPTS_S)
            with suppress(StoreError):
                wait_until(lambda: read_number(world.store, received) >= world.size, limit)

    def break_here(self, label: str, reason: str, **more: Any) -> None:
        """Abort communicator ``label``, on this rank only, with ``reason``."""
        self._abort_here({"rank": self.world.rank, "labels": [label], "reason": reason, **more})

    def find_abort(self, label: str) -> dict[str, Any] | None:
        """Return ``label``'s abort message or None; abort on the store's abort or mismatch."""
        known, store, key = self.aborts.get(label), self.world.store, f"{label}/abort"
        if known is None and store.check([key]):
            known = read_json(store, key, parse_abort)
            # Its signal may not have arrived yet, and the next collective must not use the backend.
            self._abort_here(known)
        elif known is None and store.check([abort_key := f"{label}/{DISAGREEMENT}"]):
            # Of the members that have read it, some may have left before the first aborts.
            fields = read_json(store, abort_key, parse_disagreement)
            self.break_here(label, reason_of(fields), disagreement=fields)
            known = self.aborts.get(label)
        return known

    def answer(self, about: dict[str, Any]) -> ControlReply:
        """Return each communicator's last call, the call ``about`` and the current line."""
        asked = self._by_label.get(about.get("label", ""))
        recorders = [(opened.label, opened.recorder) for opened in self.all_opened()]
        recorders.append(("", self.store_calls))
        used = sorted(
            (pair for pair in recorders if pair[1].moment), key=lambda pair: pair[1].moment
        )
        calls: list[dict[str, Any]] = [
            {"label": label, "sequence": recorder.sequence, "text": call.heading}
            for label, recorder in used
            if (call := recorder.find_note()) is not None
        ]
        text = None
        if about and asked is not None:  # a message may be on its way and not noted yet
            text = wait_until(partial(asked.recorder.text_about, about), Deadline(_NOTING_S))
        now = find_call_site(self.world.thread_id, calls[-1]["text"] if calls else "")
        return {"calls": calls, "about": text, "now": now}

    def where(self) -> str:
        """Return lines with this rank's stack and last collective."""
        answer = self.answer({})
        last = answer["calls"][-1]["text"] if answer["calls"] else "none so far"
        operation = (
            f"last collective: {last}" if answer["now"] or not answer["calls"] else f"in {last}"
        )
        return f"{stack_text(self.world.thread_id)}  {operation}\n"

    def _look(self) -> Callable[[], None] | None:
        self._answerer.look()
        return None if self.look is None else self.look()

    def compare_last(self, device_groups: Iterable[Any]) -> MeshdistError | None:
        """Compare last calls with other hosts as ``device_groups`` close; return an error."""
        # It waits two seconds at most for the other members. Without them nothing is compared.
        world, error, limit = self.world, None, Deadline(_LAST)
        if find_failure(world.handled_before) is not None or world.process_id != os.getpid():
            return None

        def meet(key: str) -> bool:
            return self.liveness.count(key, device_group.opened.ranks, limit.left)

        for device_group in sorted(device_groups, key=lambda each: each.opened.label):
            try:
                device_group.compare_last(meet, _LAST)
            except MeshdistError as found:
                error = error or found
        return error

    def close(self) -> None:
        """Close all communicators and stop the control thread; raise if last calls differ."""
        failure = find_failure(self.world.handled_before)
        users = [refer() for entry in self.all_opened() for refer in entry.users.values()]
        of_users = [
            device_group for user in filter(None, users) for device_group in user.device_groups
        ]
        error = self.compare_last(
            {device_group.opened: device_group for device_group in of_users}.values()
        )
        self._leave(DESTROYED if failure is None else ending_text(failure))
        if self._signals is not None:
            self._signals.stop()
            self._signals = None
            self._answerer.close()
        for entry in (opened := self.all_opened()):
            for user in filter(None, [refer() for refer in entry.users.values()]):
                user.forget_device_groups()
        self._by_label.clear()
        for entry in opened:
            if self.world.process_id != os.getpid():  # a forked child has no part in it
                entry.communicator.close()
                continue
            try:
                if failure is None:
                    entry.leave()
                entry.close()
            except Exception:  # the others are to be closed as well
                _log.exception("%s could not be closed", entry.label)
        self.fingerprint_tables.close()
        if error is not None:
            raise error

    def all_opened(self) -> list[OpenCommunicator]:
        """Return a list of the open communicators."""
        with self._lock:
            return list(self._by_label.values())

    def _leave(self, how: str) -> None:
        """Store how this rank leaves."""
        do_not_call_at_end(self._end)
        if self.world.has_processes and self.world.process_id == os.getpid():
            opened = self.all_opened()
            self.endings.leave(how, {each.label: each.recorder.sequence for each in opened})

    def _end(self) -> None:
        """Store how this rank ended, at Python's exit."""
        if self.world.process_id != os.getpid():
            return
        self._leave(ending_text(find_last_exception()))
        for entry in self.all_opened():
            if not is_ending_by_exception():
                entry.leave()
            if self.world.server == self.world.rank:  # others may need this process for long
                entry.close()

    def _abort_here(self, message: dict[str, Any]) -> None:
        with self._lock:
            for label in message["labels"]:
                self.aborts.setdefault(label, message)
            opened = [self._by_label[x] for x in message["labels"] if x in self._by_label]
            for entry in opened:
                entry.share_key = None  # so that no later group shares this broken communicator
        communicators = [entry.communicator for entry in opened]
        for kind in {type(each) for each in communicators}:
            kind.abort_together([each for each in communicators if type(each) is kind])


def get_registry(world: World) -> Registry:
    """Return the world's registry, made on first use."""
    if not isinstance(world.registry, Registry):
        with _making.current:
            if not isinstance(world.registry, Registry):
                world.registry = Registry(world)
                world.closers.append(world.registry.close)
                world.registry.start()
    return world.registry

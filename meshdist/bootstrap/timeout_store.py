"""Store client with a timeout for every request, even if the server is stopped or dead.

Torch's clients wait for answers without a timeout, print a stack to stderr if the server is lost,
and block all other threads on the same connection. A TimeoutStore first checks that the server is
alive, waits for keys on a separate connection, and sends requests from its own thread, so that the
caller can give up. Requests to a file, or to a server in this process, need no thread; files locked
by a stopped process are detected beforehand. Values are validated, because other processes may have
written them.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError as NoAnswerYet
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, Store, TCPStore

from ..errors import StoreError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.hosts import ProcessInfo, name_locker, take_lock
from .store_liveness import AlarmLost, KeyAlarm, StoreLiveness, find_readable
from .stores import NamedPrefixStore, cloned, root_of

T = TypeVar("T")

ANSWER_S = 5.0
"""How long a server may take to respond, unless a longer deadline applies."""
# A server may be slow (name resolution on accept, a loaded machine), and Python must not end before
# the thread has returned from it.
_END_S = 20.0
POLL_S = 0.2
_CLOSING_S = 1.0
_LONGEST_KEY = 2000  # characters of up to four bytes; the server's limit is 8,192 bytes
CHECK_S = 1.0  # between requests of a long wait: the server may stop responding meanwhile
_TURN_S = 0.1  # that a wait may wait for another wait's use of the alarm
_NOT_PARSED = (ValueError, ArithmeticError, RecursionError, TypeError, LookupError, AttributeError)
_NO_VALUE = b"?"
"""A value that no rank writes."""

_silent_since: dict[tuple[str, int] | None, float] = {}
"""The time since which a server, by host and port, has not answered an abandoned request."""
os.register_at_fork(after_in_child=_silent_since.clear)

_deadline: ContextVar[Deadline | None] = ContextVar("meshdist_store_deadline", default=None)
_look: ContextVar[Callable[[], object] | None] = ContextVar("meshdist_store_look", default=None)
"""Called regularly by this thread's waits for keys; may raise."""


class _NotInTime(StoreError):
    """A key was not set before the deadline of a wait."""


@contextmanager
def within(deadline: Deadline) -> Iterator[None]:
    """Set the deadline of this thread's requests and waits for keys."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def looking(look: Callable[[], object] | None) -> Iterator[None]:
    """Make this thread's waits for keys call ``look``, which may raise."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def _answer_limit_s() -> float:
    """Return a request's time limit: until ``within``'s deadline, at least 5 s."""
    deadline = _deadline.get()
    return ANSWER_S if deadline is None else max(ANSWER_S, deadline.left_s)


class TimeoutStore(Store):
    """Client of ``raw`` for all threads of this process, with a timeout for every request.

    Args:
        raw: the store, on a connection that is not shared.
        timeout: how long to wait for a key without a deadline from ``within``.
    """

    # Keep a reference while torch's PrefixStore uses it, which holds only the C++ part.

    def __init__(
        self,
        raw: Store,
        timeout: timedelta,
        *,
        is_hosted_here: bool = False,
        server: str = "the process that hosts the store",
    ) -> None:
        super().__init__()
        self._patience = timeout
        self.is_hosted_here = is_hosted_here
        self._path = path = getattr(raw, "path", "")  # a FileStore's
        self.server = server
        self.client = f"process {os.getpid()}"
        """This process's name in messages."""
        self._raw: Store | None = raw
        self._watch: StoreLiveness | None = None
        self._file = os.open(path, os.O_RDONLY) if path else None
        self._process_id = os.getpid()
        self._is_closed = False
        self._requests: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._requests = SimpleQueue()
        self._busy_since: float | None = None
        root = root_of(raw)
        self.address = (root.host, root.port) if isinstance(root, TCPStore) else None
        """The host and port of the server, or None."""
        # Waits share the last alarm: accepting a new connection may be slow (name resolution).
        self._alarms: list[KeyAlarm] = []
        self._knows_prefix = isinstance(raw, (TCPStore, NamedPrefixStore))
        self._prefix = f"{raw.prefix}/" if isinstance(raw, NamedPrefixStore) else ""
        self._thread: threading.Thread | None = None
        if self._file is None and not is_hosted_here:
            self._thread = threading.Thread(target=self._run, name="meshdist-store", daemon=True)
            self._thread.start()
        atexit.register(self.close)
        if is_hosted_here:
            return
        try:
            self._watch = self.ask(self._watched)
            if self._watch.connection is not None:
                self._alarms.append(KeyAlarm(self._watch.connection))
        except BaseException:
            self.close()
            raise

    # -- torch's methods ---------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        self.ask(lambda raw: raw.set(key, value))  # type: ignore[arg-type] # bytes work, too

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self.ask(lambda raw: raw.add(key, amount)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self.ask(lambda raw: raw.check(list(keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for ``keys`` until ``within``'s deadline or ``timeout``; raise if any is unset."""
        # The deadline also overrides the timeout that C++ passes.
        deadline, look = _deadline.get() or Deadline(timeout or self._patience), _look.get()
        next_check = Deadline(CHECK_S)

        def slice_s() -> float:
            nonlocal next_check
            self._check_hosted()
            if look is not None:
                look()
            elif next_check.is_over:
                next_check = Deadline(CHECK_S)
                self.check(keys)
            return min(POLL_S, deadline.left_s)

        is_set = self._await_alarm(keys[0], slice_s) if len(keys) == 1 else None
        if is_set is None:
            is_set = wait_until(lambda: self.check(keys), deadline, look)
        if not is_set and not self.check(keys):
            raise _NotInTime(
                "a wait for the store ended: wait timeout",  # as torch words it
                expected=f"the keys {', '.join(keys)}",
                found="no process set them in time",
            )

    def _await_alarm(self, key: str, slice_s: Callable[[], float]) -> bool | None:
        """Return whether ``key`` was set in time, or None if alarms are not supported.

        Args:
            slice_s: returns the seconds until its next call; 0 ends the wait.
        """
        self._check_usable()
        key, kept, alarm = self._prefix + key, self.alarm, None
        # torch's server closes a connection that sends a longer key.
        if self.address is None or not self._knows_prefix or len(key) > _LONGEST_KEY:
            return None
        try:
            is_mine = kept is not None and kept.turn.acquire(timeout=_TURN_S)
            alarm = kept if is_mine and kept is not None else KeyAlarm(self.address)
            alarm.reset(key)
            while (seconds := slice_s()) > 0:
                find_readable([alarm.connection, *self.ends], seconds)
                if alarm.has_rung(key):
                    return True
            return False
        except AlarmLost:
            return None
        finally:
            if alarm is not None and alarm is not kept:
                alarm.connection.close()
            elif alarm is not None:
                try:
                    with suppress(AlarmLost):
                        alarm.reset("")
                finally:
                    alarm.turn.release()

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # An absent key equals an empty ``expected``.
        return self.ask(lambda raw: raw.compare_set(key, expected, desired))  # type: ignore[arg-type]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        missing_keys = list(keys)
        values = self.ask(
            lambda raw: raw.multi_get(missing_keys) if raw.check(missing_keys) else None
        )
        if values is None:
            self.wait(missing_keys)
            return self.ask(lambda raw: raw.multi_get(missing_keys))
        return values

    def delete_key(self, key: str) -> bool:
        return bool(self.ask(lambda raw: raw.delete_key(key)))

    deleteKey = delete_key  # the name that torch's PrefixStore calls

    def has_extended_api(self) -> bool:
        """Return False: torch's classes need only the methods above."""
        return False

    def clone(self) -> TimeoutStore:
        """Return this store: a waiting thread does not block other threads."""
        return self

    # -- the server --------------------------------------------------------------------------------

    @property
    def alarm(self) -> KeyAlarm | None:
        """The alarm shared by this process's waits, reopened if lost; None if not supported."""
        if self.address is not None and (not self._alarms or self._alarms[-1].is_lost):
            with suppress(AlarmLost):
                self._alarms.append(KeyAlarm(self.address))
        return self._alarms[-1] if self._alarms else None

    def watch(self, server: ProcessInfo) -> None:
        """Set the server's process, to detect when it ends or is stopped."""
        if self._watch is not None:
            self._watch.server = server

    @property
    def ends(self) -> list[Any]:
        """The watch's socket, readable once the server ends or an alarm fires, in a list; or []."""
        return [] if self._watch is None or not self._watch.connection else [self._watch.connection]

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Return whether the server closes this connection within ``seconds``."""
        for alarm in self._alarms:  # an unread answer would hide the end
            with suppress(AlarmLost):
                alarm.poll()
        return self._watch is not None and self._watch.has_ended(seconds)

    @property
    def is_hosted(self) -> bool:
        """Return whether the server is alive; True if no process hosts the store."""
        return not self.has_ended() and (self._watch is None or self._watch.is_hosted())

    def raw_clone(self) -> Store:
        """Return the raw store on a new connection, for torch's threads."""
        return self.ask(cloned)

    def set_bare(self, key: str) -> tuple[str, int] | None:
        """Set ``key`` without a prefix in a TCPStore; return its host and port, or None."""
        if self.address is not None:
            self.ask(lambda raw: root_of(raw).set(key, ""))
        return self.address

    def let_server_end(self) -> None:
        """Close this client's watch after pending requests, so that the server can end."""
        if self._watch is not None and self._thread is not None:
            watch = self._watch
            self._requests.put((lambda _: watch.close(), Future()))

    def close(self) -> None:
        """End the thread and close all connections; do nothing in a forked child."""
        atexit.unregister(self.close)
        if self._process_id != os.getpid() or self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join(0.0 if self._silent_s() > ANSWER_S else _END_S)
        for alarm in self._alarms:
            alarm.connection.close()
        if self._watch is not None:
            self._watch.close()
        if self._file is not None:
            os.close(self._file)
        if self._thread is None or not self._thread.is_alive():
            self._raw = None  # closes its socket; the last FileStore would recreate its file

    # -- the requests ------------------------------------------------------------------------------

    def ask(self, request: Callable[[Store], T]) -> T:
        """Return the result of ``request`` on the raw store; raise StoreError if it times out."""
        raw = self._check_usable()
        self._check_hosted()
        if self._thread is None:
            self._await_unlocked()
            return request(raw)
        answer: Future[T] = Future()
        self._requests.put((request, answer))
        # Counted from when the server stopped responding, so consecutive waits do not add up.
        limit = Deadline(_answer_limit_s() - self._silent_s())
        while True:
            try:
                return answer.result(POLL_S)
            except NoAnswerYet:
                if limit.is_over:
                    answer.cancel()
                    if self.address is not None:
                        _silent_since[self.address] = time.monotonic() - self._silent_s()
                    raise self._lost("does not answer") from None
            except DistNetworkError:
                raise (self._rejected() if self.is_hosted else self._lost("has ended")) from None

    def _check_usable(self) -> Store:
        if self._raw is None or self._is_closed or self._process_id != os.getpid():
            raise StoreError(
                "the store of this world is closed in this process",
                fix="use the store in the process that opened it, before destroy_process_group()",
            )
        return self._raw

    def _check_hosted(self) -> None:
        if not self.is_hosted:
            raise self._lost("has ended")

    def _await_unlocked(self) -> None:
        """Wait until the store's file is unlocked; raise if it was removed."""
        if self._file is None:
            return
        if os.fstat(self._file).st_nlink == 0:  # torch would create it again, or wait for it
            raise self._lost(
                "was removed",
                f"the file {self._path}",
                fix="restart the job with a file that no other program removes",
            )
        if _is_unlocked(self._file):
            return
        if not wait_until(partial(_is_unlocked, self._file), Deadline(_answer_limit_s())):
            raise self._lost("keeps its file locked", name_locker(self._path))

    def _run(self) -> None:
        while (asked := self._requests.get()) is not None:
            (request, answer), raw = asked, self._raw
            assert raw is not None  # as long as this thread runs
            if not answer.set_running_or_notify_cancel():
                continue
            self._busy_since = time.monotonic()
            try:
                answer.set_result(request(raw))
            except DistNetworkError as error:
                # A server that is ending may close this connection first. A running server closes
                # it because of an invalid request.
                if not self.has_ended(_CLOSING_S):
                    with suppress(RuntimeError, NotImplementedError):
                        self._raw = cloned(raw)
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._busy_since = None
                _silent_since.pop(self.address, None)

    def _silent_s(self) -> float:
        """Return for how many seconds the server has not answered, or was stopped."""
        stopped = None if self._watch is None else self._watch.stopped_since
        since = (_silent_since.get(self.address, self._busy_since), stopped)
        return max(0.0 if moment is None else time.monotonic() - moment for moment in since)

    def _watched(self, raw: Store) -> StoreLiveness:
        watch = StoreLiveness(raw)
        if self._is_closed:  # it was opened too late
            watch.close()
        return watch

    def _lost(
        self,
        problem: str,
        server: str = "",
        fix: str = "check that process's output for a failure, and whether it is stopped",
    ) -> StoreError:
        return StoreError(
            f"{server or self.server} {problem}",
            where=self.client,
            expected="a store that responds as long as other ranks need it",
            fix=fix,
        )

    def _rejected(self) -> StoreError:
        return StoreError(
            f"{self.server} has closed this process's connection",
            where=self.client,
            expected="only the ranks of this job to write to the store",
            found="a counter key may hold a value that is not a number",
            fix="stop other programs that write to the store, or use another store",
        )


def _is_unlocked(file: int) -> bool:
    if found := take_lock(file):
        fcntl.flock(file, fcntl.LOCK_UN)
    return found


def read_json(store: Store, key: str, parse: Callable[[Any], T]) -> T:
    """Return ``parse`` of the JSON value of ``key``; raise StoreError if ``parse`` fails."""
    return read_jsons(store, [key], parse)[0]


def read_jsons(store: Store, keys: Sequence[str], parse: Callable[[Any], T]) -> list[T]:
    """Return ``parse`` of each key's JSON value with one request; raise StoreError."""
    values = zip(keys, store.multi_get(list(keys)), strict=True)
    return [parse_value(key, value, parse) for key, value in values]


def parse_value(key: str, value: bytes, parse: Callable[[Any], T]) -> T:
    """Return ``parse`` of the JSON ``value``; raise StoreError if it fails."""
    try:
        return parse(json.loads(value))
    except _NOT_PARSED:
        raise _junk(key, value) from None


def read_number(store: Store, key: str) -> int:
    """Return the number under ``key``, or 0 if unset; raise StoreError for other values."""
    value = find_value(store, key)
    try:
        return 0 if value is None else int(value)
    except ValueError:
        assert value is not None
        raise _junk(key, value) from None


def find_value(store: Store, key: str) -> bytes | None:
    """Return the value of ``key`` with one request, or None if unset."""
    # Do not use it for a key that others wait for: torch's server would wake them.
    value = store.compare_set(key, _NO_VALUE.decode(), _NO_VALUE.decode())
    return None if value == _NO_VALUE else value


def await_key(
    store: Store, key: str, deadline: Deadline, look: Callable[[], object] | None = None
) -> bool:
    """Wait for ``key`` until ``deadline``, calling ``look`` regularly; return whether it is set."""
    if not isinstance(root_of(store), TimeoutStore):
        return bool(wait_until(lambda: store.check([key]), deadline, look))
    try:
        with within(deadline), looking(look):
            store.wait([key])
        return True
    except _NotInTime:
        return False


def _junk(key: str, value: bytes) -> StoreError:
    return StoreError(
        f"the store holds a value under {key!r} that no rank of this job wrote",
        expected="a value in the format that a rank writes",
        found=f"{value[:80]!r}" + (", ..." if len(value) > 80 else ""),
        fix="stop other programs that write to the store; docs/explanation/security.md lists "
        "who can",
    )

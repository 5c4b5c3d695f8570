"""Provide the store of simulated ranks."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import QueueEmptyError, Store

from ...checking.call_sites import Site, call_site, show_site
from ...errors import ArgumentError, WorldError
from .scheduler import find_rank_here


@dataclass
class CallWait:
    """A rank's wait in ``call`` until ``is_ready()``; ``show_more`` adds to its text."""

    call: str
    site: Site
    is_ready: Callable[[], bool]
    show_more: Callable[[], str] = lambda: ""

    def describe(self) -> str:
        return f"{self.call}, called at {show_site(self.site)}{self.show_more()}"


class SimulatedStore(Store):
    """The store of simulated ranks: a wait lets other ranks run."""

    # Implements every store method that torch documents, with the semantics of HashStore, and works
    # under torch's PrefixStore, except ``list_keys`` and the queues, which torch does not forward
    # to stores written in Python. Timeouts never expire; waiting for a key that no rank can set
    # raises DeadlockError. Keep a reference while a PrefixStore is in use: it holds only the C++
    # half.

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        self._wait_for([key], f"store.get({key!r})")
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under ``key``, initially 0; return the sum."""
        if amount == 0:  # a program that only reads may be polling
            before = self._values.get(key)
            self._poll(lambda: self._values.get(key) != before, f"store.add({key!r}, 0)")
        present = self._values.get(key, b"0")
        try:
            total = int(present) + amount
        except ValueError:
            raise ArgumentError(
                f"store.add cannot add to key {key!r}",
                expected="a key that is absent or holds an integer",
                found=f"{present!r}",
                fix="use different keys for texts and for counters",
            ) from None
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all ``keys`` are set; if not, let other ranks run first."""
        return self._poll(lambda: self._has(keys), f"store.check({list(keys)!r})")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all ``keys``; ``timeout`` never expires."""
        created = re.match(r"(?:.*/)?agree/(\w+)/", keys[0]) if len(keys) == 1 else None
        call = f"store.wait({list(keys)!r})"
        self._wait_for(keys, f"the creation of a {created[1]}" if created else call)

    def peek(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None, without running other ranks."""
        return self._values.get(key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if it holds ``expected``; return its final value."""
        expected_bytes = _to_bytes(expected)  # an absent key equals an empty value
        call = f"store.compare_set({key!r})"
        if self._poll(lambda: self._values.get(key, b"") == expected_bytes, call):
            self._values[key] = _to_bytes(desired)
        return self._values.get(key, expected_bytes)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._wait_for(keys, f"store.multi_get({list(keys)!r})")
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ArgumentError(
                "store.multi_set needs one value for each key",
                found=f"{len(keys)} keys, {len(values)} values",
                fix="pass as many values as keys",
            )
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def list_keys(self) -> list[str]:
        """Return all keys, in insertion order."""
        return list(self._values)

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._queues.setdefault(key, deque()).append(_to_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return queue ``key``'s first value; if empty, wait, or raise."""
        act = self._wait if block else self._poll
        if not act(lambda: bool(self._queues.get(key)), f"store.queue_pop({key!r})"):
            raise QueueEmptyError(f"queue {key!r} is empty")
        return self._queues[key].popleft()

    def queue_len(self, key: str) -> int:
        return len(self._queues.get(key, ()))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> SimulatedStore:
        """Return this store: a waiting rank blocks no other."""
        return self

    # The names under which torch's PrefixStore looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def _wait_for(self, keys: Sequence[str], call: str) -> None:
        self._wait(lambda: self._has(keys), call)

    def _wait(self, is_ready: Callable[[], bool], call: str) -> bool:
        """Wait until ``is_ready()``; return True; raise on a thread without a rank."""
        if is_ready():
            return True
        rank = find_rank_here()
        if rank is None:
            raise WorldError(
                f"{call} cannot wait because this thread is not a simulated rank",
                where=f"called at {show_site(call_site())}",
                expected="a call on the thread of a simulated rank",
                fix="set the key first, or test for it with store.check",
            )
        rank.wait(CallWait(call, call_site(), is_ready))
        return True

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def _poll(self, is_ready: Callable[[], bool], call: str) -> bool:
        """Return ``is_ready()``; if false, let the other ranks run first."""
        rank = find_rank_here()
        if rank is not None and not is_ready():
            rank.poll(CallWait(call, call_site(), is_ready))
        return is_ready()


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

"""Deliver a rank's messages to itself, and map large tags to small numbers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import Store

from ..arrays import shape_text
from ..dtypes import dtype_name
from ..errors import MismatchError
from ..runtime.deadlines import Deadline, wait_until
from .operation_args import writing
from .requests import BackendAborted, BackendTimeout, Request

_LONGEST_PAUSE_S = 0.001


@dataclass(eq=False, slots=True)
class SelfTransfer(Request):
    """A send or receive of a rank to itself; done once its counterpart starts."""

    mailbox: Mailbox
    tensor: torch.Tensor
    is_send: bool
    is_done: bool = False

    def finish(self, timeout: timedelta) -> None:
        self.mailbox.finish(self, timeout)

    def poll(self) -> bool:
        return self.is_done

    def source(self) -> int:
        return self.mailbox.rank


class Mailbox:
    """A rank's sends and receives to itself, by tag, in starting order."""

    # Starting the second of a pair copies the data. A wait for a send whose receive has not started
    # buffers the data, because no other rank could start the receive. If sizes or dtypes differ,
    # the second raises and the first keeps waiting.

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._waiting: dict[tuple[bool, int], deque[SelfTransfer]] = {}  # sends and receives by tag
        self._is_aborted = False
        self._lock = threading.Lock()  # several threads may send and receive

    def send(self, tensor: torch.Tensor, tag: int) -> SelfTransfer:
        """Start a send of ``tensor`` to this rank under ``tag``."""
        return self._start(SelfTransfer(self, tensor, is_send=True), tag)

    def recv(self, tensor: torch.Tensor, tag: int) -> SelfTransfer:
        """Start a receive into ``tensor`` from this rank under ``tag``."""
        return self._start(SelfTransfer(self, tensor, is_send=False), tag)

    def finish(self, transfer: SelfTransfer, timeout: timedelta) -> None:
        """Copy a send's tensor, or wait until a receive's message is sent."""
        with self._lock:
            if transfer.is_send and not transfer.is_done:
                transfer.tensor = transfer.tensor.clone()
                transfer.is_done = True
        deadline = Deadline(timeout)
        if not wait_until(transfer.poll, deadline, self._check, longest_pause_s=_LONGEST_PAUSE_S):
            raise BackendTimeout("no matching send or receive for a message of this rank to itself")

    def abort(self) -> None:
        """Make every thread that waits in ``finish`` raise BackendAborted."""
        self._is_aborted = True

    def has_sent(self, tag: int) -> bool:
        """Return whether a message of this rank to itself under ``tag`` is pending."""
        return bool(self._waiting.get((True, tag)))

    def _start(self, transfer: SelfTransfer, tag: int) -> SelfTransfer:
        with self._lock:
            waiting = self._waiting.get((not transfer.is_send, tag))
            if not waiting:
                self._waiting.setdefault((transfer.is_send, tag), deque()).append(transfer)
                return transfer
            sent, received = waiting[0], transfer
            if transfer.is_send:
                sent, received = received, sent
            _copy(sent.tensor, received.tensor, tag)
            waiting.popleft()
            sent.is_done = received.is_done = True
        return transfer

    def _check(self) -> None:
        if self._is_aborted:
            raise BackendAborted("aborted while waiting for a message of this rank to itself")


def _copy(source: torch.Tensor, target: torch.Tensor, tag: int) -> None:
    if source.dtype is not target.dtype or source.numel() != target.numel():
        raise MismatchError(
            "a message of a rank to itself does not fit the tensor that receives it",
            where=f"tag {tag}; nothing was copied",
            expected="equal dtype and number of elements on both sides",
            found=f"sent: {shape_text(source.shape)} {dtype_name(source.dtype)}\n"
            f"received: {shape_text(target.shape)} {dtype_name(target.dtype)}",
            fix="receive into a tensor like the one that is sent",
        )
    with writing():
        target.copy_(source.reshape(target.shape))


DRAWING_S = 10.0


class TagNumbers:
    """Small numbers for a group's large tags, equal on all members."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._numbers: dict[int, int] = {}
        self._numbering = threading.Lock()

    def number_of(self, tag: int, is_aborted: Callable[[], bool]) -> int:
        """Return the number of ``tag`` in the store; raise if ``is_aborted()``."""
        number = self._numbers.get(tag)
        if number is not None:
            return number
        with self._numbering:  # another thread may start a receive meanwhile
            number = self._numbers[tag] = self._drawn(f"tag/{tag}", is_aborted)
        return number

    def _drawn(self, key: str, is_aborted: Callable[[], bool]) -> int:
        store = self._store
        if store.add(f"{key}/users", 1) == 1:
            number = int(store.add("tags", 1)) - 1
            store.set(key, str(number))
            return number

        def check() -> None:
            if is_aborted():
                raise BackendAborted("aborted while waiting for the number of a tag")

        def is_drawn() -> bool:  # polls, because other threads need the store meanwhile
            return bool(store.check([key]))

        if not wait_until(is_drawn, Deadline(DRAWING_S), check):
            raise BackendTimeout("the rank that must assign a number to a tag did not respond")
        return int(store.get(key))

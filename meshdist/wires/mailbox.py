"""Messages of a rank to itself, for wires that cannot carry them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch

from ..arrays import dtype_name, shape_text
from ..errors import AgreementError
from ..runtime.clock import clock
from .base import WireAborted, WireTimeout

__all__ = ["Mailbox", "SelfTransfer"]


class SelfTransfer:
    """One send or receive of a rank to itself; done once its counterpart was started."""

    __slots__ = ("done", "is_send", "tensor")

    def __init__(self, tensor: torch.Tensor, *, is_send: bool) -> None:
        self.tensor = tensor
        self.is_send = is_send
        self.done = False


class Mailbox:
    """Pairs sends and receives of one rank to itself, by tag, in the order they were started.

    Starting the second of a pair copies the data. A send that is waited for before its receive has
    started is buffered, so that it is done: nobody else could start the receive. Where sizes or
    dtypes of a pair differ, the second is refused and the first stays as it was.
    """

    def __init__(self) -> None:
        self._sends: dict[int, deque[SelfTransfer]] = {}
        self._receives: dict[int, deque[SelfTransfer]] = {}
        self._lock = threading.Lock()  # a receive from anyone may start on another thread

    def send(self, tensor: torch.Tensor, tag: int) -> SelfTransfer:
        """Start sending ``tensor`` to this rank under ``tag``."""
        with self._lock:
            return self._start(tensor, tag, self._sends, self._receives, is_send=True)

    def recv(self, tensor: torch.Tensor, tag: int) -> SelfTransfer:
        """Start receiving into ``tensor`` what this rank sends itself under ``tag``."""
        with self._lock:
            return self._start(tensor, tag, self._receives, self._sends, is_send=False)

    def buffer(self, transfer: SelfTransfer) -> None:
        """Keep a copy of what is sent, for a sender who waits; the send is done."""
        with self._lock:
            if transfer.is_send and not transfer.done:
                transfer.tensor = transfer.tensor.clone()
                transfer.done = True

    def finish(
        self, transfer: SelfTransfer, timeout: timedelta, is_aborted: Callable[[], bool]
    ) -> None:
        """Wait for its counterpart, which can only come from another thread; raises WireFailure."""
        self.buffer(transfer)
        deadline = clock.now() + timeout.total_seconds()
        while not transfer.done:
            if is_aborted():
                raise WireAborted("aborted while waiting for a message of this rank to itself")
            if clock.now() > deadline:
                raise WireTimeout("no counterpart for a message of this rank to itself")
            time.sleep(0.001)

    def has_sent(self, tag: int) -> bool:
        """Whether a message under ``tag`` waits to be received."""
        return bool(self._sends.get(tag))

    @staticmethod
    def _start(
        tensor: torch.Tensor,
        tag: int,
        mine: dict[int, deque[SelfTransfer]],
        others: dict[int, deque[SelfTransfer]],
        *,
        is_send: bool,
    ) -> SelfTransfer:
        transfer = SelfTransfer(tensor, is_send=is_send)
        waiting = others.get(tag)
        if not waiting:
            mine.setdefault(tag, deque()).append(transfer)
            return transfer
        counterpart = waiting[0]
        source, target = (tensor, counterpart.tensor) if is_send else (counterpart.tensor, tensor)
        if source.dtype is not target.dtype or source.numel() != target.numel():
            raise AgreementError(
                "a message of a rank to itself does not fit the tensor that receives it",
                where=f"tag {tag}; nothing was copied",
                expected="equal dtype and number of elements on both sides",
                found=f"sent: {shape_text(source.shape)} {dtype_name(source.dtype)}\n"
                f"received: {shape_text(target.shape)} {dtype_name(target.dtype)}",
                fix="receive into a tensor like the one that is sent",
            )
        waiting.popleft()
        with torch.inference_mode():  # it may be a parameter, or an inference tensor
            target.copy_(source.reshape(target.shape))
        transfer.done = counterpart.done = True
        return transfer

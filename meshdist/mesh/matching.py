"""Receives that name no sender, on wires that want one: they start when a member has noted a send.

Gloo ends the process that receives more than its tensor holds, and leaves part of a larger tensor
unwritten without a word. Who names the sender compares the message first, so nothing is received
from "anyone" as long as all members note their messages where all can read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch

from ..errors import AgreementError
from ..runtime.ledger import Ledger
from ..runtime.recorder import Recorder
from ..wires.base import Communicator, MemberLost, MembersDisagree, WireAborted, WireFailure
from ..wires.pending import Deferred

__all__ = ["Matching"]

_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.002
_CHECK_S = 0.1


@dataclass(frozen=True, eq=False)
class _Receive:
    deferred: Deferred
    tensor: torch.Tensor
    peer: int | None
    tag: int
    header: int
    note: int
    timeout: timedelta


class Matching:
    """The receives of one communicator that wait for their sender, in the order of their start.

    Args:
        communicator: what receives.
        ledger: where members note what they send.
        recorder: where this member's calls are noted.
        is_broken: whether the communicator failed or was aborted.
    """

    def __init__(
        self,
        communicator: Communicator,
        ledger: Ledger,
        recorder: Recorder,
        is_broken: Callable[[], bool],
    ) -> None:
        self._communicator = communicator
        self._ledger = ledger
        self._recorder = recorder
        self._is_broken = is_broken
        self._receives: list[_Receive] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._checked = 0.0

    def takes(self, peer: int | None, tag: int) -> bool:
        """Whether a receive is to go this way: who names a sender does behind one who does not."""
        if peer is None:
            return self._ledger.can_find_sender(tag)
        return bool(self._receives) and any(one.tag == tag for one in self._receives)

    def add(
        self,
        tensor: torch.Tensor,
        peer: int | None,
        tag: int,
        header: int,
        note: int,
        timeout: timedelta,
        *,
        waits: bool,
    ) -> Deferred:
        """Receive ``tensor`` as soon as its sender is known.

        Args:
            tensor: what is written.
            peer: the sender, where the program named it.
            tag: of the message.
            header: the fingerprint of the message that ``tensor`` takes.
            note: under which the recorder noted the call.
            timeout: how long the message may take once it has started.
            waits: whether the caller waits for it at once, so that no other thread has to look.
        """
        deferred = Deferred(self._look)
        with self._lock:
            self._receives.append(_Receive(deferred, tensor, peer, tag, header, note, timeout))
            self._look()
            if self._receives and not waits and self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_again, name="meshdist-matching", daemon=True
                )
                self._thread.start()
        return deferred

    def close(self) -> None:
        """End what waits still."""
        self._fail_all(WireAborted("the group was closed while a receive waited for its sender"))

    def _look_again(self) -> None:
        pause = _PAUSE_S
        while True:
            time.sleep(pause)
            with self._lock:
                num_receives = len(self._receives)
                self._look()
                if not self._receives:
                    self._thread = None
                    return
                has_found = len(self._receives) < num_receives
            pause = _PAUSE_S if has_found else min(2 * pause, _LONGEST_PAUSE_S)

    def _look(self) -> None:
        """Start every receive whose sender is known by now."""
        with self._lock:
            if not self._receives:
                return
            if self._is_broken():
                self._fail_all(WireAborted("aborted while a receive waited for its sender"))
                return
            waiting = set()
            for receive in tuple(self._receives):
                if receive.deferred.is_cancelled:
                    self._receives.remove(receive)
                elif receive.tag not in waiting and not self._start_if_sent(receive):
                    waiting.add(receive.tag)
            if waiting and time.monotonic() - self._checked > _CHECK_S:
                self._checked = time.monotonic()
                self._check()

    def _start_if_sent(self, receive: _Receive) -> bool:
        peer, tag = receive.peer, receive.tag
        if peer is None:
            is_mine = self._communicator.has_sent_itself(tag)
            peer = self._communicator.rank if is_mine else self._ledger.find_sender(tag)
            if peer is None:
                return False
        self._recorder.name_sender(receive.note, peer, tag)
        number = self._ledger.recv(peer, tag, receive.header)
        if number is None:
            self._start(receive, peer)
        else:
            self._end(receive, MembersDisagree("", number, (False, peer, tag)))
        return True

    def _start(self, receive: _Receive, peer: int | None) -> None:
        try:
            started = self._communicator.recv(receive.tensor, peer, receive.tag, receive.timeout)
        except (WireFailure, AgreementError) as failure:
            self._end(receive, failure)
        else:
            self._receives.remove(receive)
            receive.deferred.started = started

    def _check(self) -> None:
        """End all where a sender may have died; ask the wire where messages may go unseen."""
        lost = self._ledger.find_lost()
        if lost is not None:
            self._fail_all(MemberLost("has ended", lost))
            return
        for receive in tuple(self._receives):
            if receive.peer is None and not self._ledger.can_find_sender(receive.tag):
                self._ledger.recv_any(receive.tag)
                self._start(receive, None)

    def _fail_all(self, failure: WireFailure) -> None:
        with self._lock:
            for receive in tuple(self._receives):
                self._end(receive, failure)

    def _end(self, receive: _Receive, failure: Exception) -> None:
        self._receives.remove(receive)
        receive.deferred.failure = failure

"""Receives without a named sender, on wires that need it: each starts when a send is noted for it.

Gloo ends the process that receives more than its tensor holds, and leaves part of a larger tensor
unwritten without an error. A receive that names its sender compares the message first, so nothing
is received from any member as long as all members note their messages where all can read it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from ..checking.header_table import HeaderTable
from ..checking.recorder import Recorder
from ..wires.communicator import Communicator
from ..wires.operations import Deferred, MemberLost, MembersDisagree, WireAborted
from ..wires.prepared import PreparedCall

_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.002
_CHECK_S = 0.1
_REST_PER_LOOK = 20.0  # times what a look took, as long as that is no hold-up
_LONGEST_REST_S = 0.02


@dataclass(eq=False)
class UnnamedReceive:
    """A receive that starts once a member is known to have sent a message for it.

    Args:
        peer: the sender, where the program named it.
        header: the fingerprint of the message that ``tensor`` takes.
        note: under which the recorder noted the call, without a number.
        explain: notifies all members that a message does not fit, and makes the error.
    """

    tensor: torch.Tensor
    peer: int | None
    tag: int
    header: int
    note: int
    timeout: timedelta
    explain: Callable[[MembersDisagree], Exception]
    # What its caller has, who may drop it: the receive takes its message all the same.
    deferred: Deferred = field(init=False)


@dataclass(eq=False)
class Matching:
    """Receives of a communicator that wait until their sender is known, in the order of calls.

    Attributes:
        receives: those that wait; while there are none, a receive that names its sender starts
            at once.
    """

    communicator: Communicator
    header_table: HeaderTable
    recorder: Recorder
    is_broken: Callable[[], bool]

    def __post_init__(self) -> None:
        self.receives: list[UnnamedReceive] = []
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._checked = 0.0

    def takes(self, peer: int | None, tag: int) -> bool:
        """Return whether a receive waits here, since it or an earlier receive names no sender."""
        if peer is not None and not self.receives:
            return False  # the common case
        with self._lock:
            if any(receive.tag == tag for receive in self.receives):
                return True
            return peer is None and self.header_table.can_find_sender(tag)

    def add(self, receive: UnnamedReceive, *, waits: bool) -> Deferred:
        """Queue a receive, return its operation; a thread starts it unless the caller ``waits``."""
        deferred = receive.deferred = Deferred(self._look, self.communicator.wait_for)
        with self._lock:
            is_first = all(other.tag != receive.tag for other in self.receives)
            self.receives.append(receive)
            if is_first:
                self._start_if_sent(receive)
            if self.receives and not waits and self._thread is None:
                self._thread = threading.Thread(
                    target=self._look_again, name="meshdist-matching", daemon=True
                )
                self._thread.start()
        return deferred

    def close(self) -> None:
        """Let the receives that still wait fail with WireAborted."""
        self._end_all(
            lambda: WireAborted("the group was closed while a receive waited for its sender")
        )

    def _look_again(self) -> None:
        pause = _PAUSE_S
        while True:
            time.sleep(pause)
            with self._lock:
                num_receives, begin = len(self.receives), time.perf_counter()
                self._look()
                took = time.perf_counter() - begin
                if not self.receives:
                    self._thread = None
                    return
                has_found = len(self.receives) < num_receives
            pause = _PAUSE_S if has_found else min(2 * pause, _LONGEST_PAUSE_S)
            pause = max(pause, min(_REST_PER_LOOK * took, _LONGEST_REST_S))

    def _look(self) -> None:
        """Start each receive whose sender is known; end all receives if the group is broken."""
        with self._lock:
            if not self.receives:
                return
            if self.is_broken():
                self._end_all(lambda: WireAborted("aborted while a receive waited for its sender"))
                return
            self.receives[:] = [each for each in self.receives if not each.deferred.is_cancelled]
            waiting = set()
            for receive in tuple(self.receives):
                if receive.tag not in waiting and not self._start_if_sent(receive):
                    waiting.add(receive.tag)
            if waiting and time.monotonic() - self._checked > _CHECK_S:
                self._checked = time.monotonic()
                self._check()

    def _start_if_sent(self, receive: UnnamedReceive) -> bool:
        peer, tag = receive.peer, receive.tag
        try:
            if peer is None:
                is_mine = self.communicator.has_sent_itself(tag)
                peer = self.communicator.rank if is_mine else self.header_table.find_sender(tag)
                if peer is None:
                    return False
            self.recorder.name_sender(receive.note, peer, tag)
            number = self.header_table.note(peer, tag, receive.header, is_send=False)
            if number is not None:
                raise receive.explain(MembersDisagree("", number, (False, peer, tag)))
        except Exception as failure:  # of any kind: raised where the receive is waited for
            self._end(receive, failure)
            return True
        self._start(receive, peer)
        return True

    def _start(self, receive: UnnamedReceive, peer: int | None) -> None:
        try:
            into = [receive.tensor]
            prepared = PreparedCall("recv", "recv", (), into, root=peer, tag=receive.tag)
            prepared.timeout = receive.timeout
            started = self.communicator.start(prepared)
        except Exception as failure:
            self._end(receive, failure)
            return
        self.receives.remove(receive)
        receive.deferred.started = started

    def _check(self) -> None:
        """Fail all waiting receives if a member died; start those whose sender stays unknown."""
        lost = self.header_table.find_lost()
        if lost is not None:
            self._end_all(lambda: MemberLost("has ended", lost))
            return
        tags = {receive.tag for receive in self.receives if receive.peer is None}
        unseen = {tag for tag in tags if not self.header_table.can_find_sender(tag)}
        for tag in unseen:
            self.header_table.recv_any(tag)
        for receive in tuple(self.receives):  # in the order of their start
            if receive.tag in unseen:
                self._start(receive, receive.peer)

    def _end_all(self, failure: Callable[[], Exception]) -> None:
        with self._lock:
            for receive in tuple(self.receives):
                self._end(receive, failure())

    def _end(self, receive: UnnamedReceive, failure: Exception) -> None:
        self.receives.remove(receive)
        receive.deferred.failure = failure

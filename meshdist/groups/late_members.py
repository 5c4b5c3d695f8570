"""A line on stderr where a rank has waited in a verb for long: which members have not come to it.

A wait ends with an error only at its timeout, half an hour as a rule. Of the ranks that wait in one
call, one writes. ``wait_notice`` says of the calls inside that they are meant to wait.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed

from ..bootstrap.world import World, get_usable_world
from ..checking.calls import Call
from ..errors import ArgumentError, StoreError
from ..runtime.deadlines import Deadline
from ..runtime.untraced import leave_untraced
from .other_members import MembersOfWorld
from .registry import OpenCommunicator, get_registry

__all__ = ["VARIABLE", "LateMembers", "wait_notice"]

VARIABLE = "MESHDIST_WAIT_NOTICE_S"
"""The variable that says after how many seconds; 0 for never."""

_DEFAULT_S = 30.0
_VERBS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), torch.distributed.__file__)
)
_log = logging.getLogger("meshdist.waits")


class LateMembers:
    """Looks whether this rank has waited in one call for long, and says once for whom."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._default_s = _read_limit()
        self._limit_s = 0.0  # of the call that is looked at; 0 for never
        self._moment = 0
        self._is_told = False
        self._deadline = Deadline(0)

    def look(self) -> None:
        """To be called every now and then, on a thread that must not wait."""
        registry = get_registry(self._world)
        opened = max(registry.all_opened(), key=_moment, default=None)
        if opened is None:
            return
        if _moment(opened) != self._moment:
            given_s = registry.wait_notice_s
            self._moment, self._is_told = _moment(opened), False
            self._limit_s = self._default_s if given_s is None else given_s
            self._deadline = Deadline(self._limit_s)
        elif self._limit_s and not self._is_told and self._deadline.is_over and _is_in_a_verb():
            self._is_told = True
            call = opened.recorder.find_note()
            if call is not None:
                told = threading.Thread(
                    target=self._tell, args=(opened, call), name="meshdist-waits", daemon=True
                )
                told.start()

    def _tell(self, opened: OpenCommunicator, call: Call) -> None:
        members = MembersOfWorld(self._world, call.group, opened)
        lines = [line for line in members.report(call).splitlines() if ": arrived; " not in line]
        if call.message is not None and call.message[1] is not None:
            peer = f"rank {call.group.ranks[call.message[1]]}: "
            lines = [line for line in lines if line.startswith(peer)]
        if not lines or _moment(opened) != self._moment:
            return
        store, mine = self._world.store, str(self._world.rank)
        with suppress(StoreError):
            key = f"{opened.label}/waits/{call.sequence}"
            if call.message is None and store.compare_set(key, "", mine) != mine.encode():
                return
            text = f"rank {mine} has waited for {self._limit_s:g} s in {call.heading}"
            _log.warning("%s", "\n  ".join([f"meshdist: {text}", *lines]))


@contextmanager
@leave_untraced
def wait_notice(after_s: float | None) -> Iterator[None]:
    """Let this rank tell of the waits inside after ``after_s`` seconds; None: never.

    Put it around a verb to which some ranks come long before the others, as they are meant to. It
    stands in for ``MESHDIST_WAIT_NOTICE_S``; timeouts run on.

    Raises:
        ArgumentError: ``after_s`` is no number of seconds above 0.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.wait_notice(None):  # rank 1 may come an hour later
        ...         md.barrier()
        >>> md.simulate(program, 2)
        [None, None]
    """
    is_number = isinstance(after_s, (int, float))
    if after_s is not None and not (is_number and 0 < after_s < threading.TIMEOUT_MAX):
        raise ArgumentError(
            f"after_s is {after_s!r}",
            expected="after how many seconds a wait is told of, above 0; None: never",
        )
    registry = get_registry(get_usable_world())
    before, registry.wait_notice_s = registry.wait_notice_s, after_s or 0.0
    try:
        yield
    finally:
        registry.wait_notice_s = before


def _moment(opened: OpenCommunicator) -> int:
    return opened.recorder.moment


def _is_in_a_verb() -> bool:
    """Whether the main thread is in code of this package, or of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_VERBS)


def _read_limit() -> float:
    text = os.environ.get(VARIABLE, "")
    try:
        limit_s = float(text) if text else _DEFAULT_S
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"{VARIABLE} is {text!r}",
            expected="after how many seconds a wait is told of, as in 30; 0: never",
        )
    return limit_s

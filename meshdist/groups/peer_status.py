"""Query and notify a group's other members when a call fails or stalls.

If a collective stalls, a waiting rank logs the missing members long before the timeout; see
``stall_warning``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch.distributed

from ..bootstrap.timeout_store import await_key, read_json
from ..bootstrap.world import World, get_usable_world
from ..checking.calls import CallRecord, GroupFacts
from ..checking.recorder import FORGOTTEN
from ..error_text import UNUSABLE_GROUP, grouped_text, ranks_by_text, ranks_text
from ..errors import ArgumentError, StoreError
from ..runtime.deadlines import Deadline, wait_until
from ..runtime.graph_breaks import untraced
from ..runtime.integers import from_runs, to_runs
from .communicators import OpenCommunicator, get_registry
from .control_messages import Endings, ask, last_call_text
from .failure_diagnosis import STORE_LOST, PeerStatus
from .host_comparison import DISAGREEMENT, parse_disagreement, reason_of

__all__ = ["LatePeers", "WorldPeers", "silent_ranks", "stall_warning"]

T = TypeVar("T")

FIRST_ANSWER_S = 4.0  # it asks for two seconds at most
_LIFE_SIGN_S = 1.0
LEAVING_S = 1.0
_REACHED = "reached"
_STOPPED = "is stopped by SIGSTOP or a debugger"


class WorldPeers(PeerStatus):
    """A communicator's other members, asked through the world's store."""

    # Simulated ranks, which fail together, are not asked.

    # the backend reports mismatches that the comparison of headers has missed
    compare_mismatches = False

    def __init__(self, world: World, group: GroupFacts, opened: OpenCommunicator) -> None:
        self._world = world
        self._group = group
        self._opened = opened
        self.others = tuple(rank for rank in group.ranks if rank != world.rank)
        self._failure_key = f"{opened.label}/failure"

    @property
    def is_closed(self) -> bool:
        return self._opened.is_closed

    def find_abort(self) -> dict[str, Any] | None:
        try:
            return get_registry(self._world).find_abort(self._opened.label)
        except StoreError:
            return None

    def break_here(self, reason: str) -> None:
        get_registry(self._world).break_here(self._opened.label, reason)

    def give_up(self, reason: str) -> None:
        if not self._world.is_simulated:
            registry, message = get_registry(self._world), {"reason": reason}
            with suppress(StoreError):  # the others will see that it is lost
                registry.abort([self._opened.label], {**message, "group": self._group.name})

    def report(self, call: CallRecord, but: int | None = None) -> str:
        if self._world.is_simulated or not self.others:
            return ""
        try:
            if not call.is_message and but is None:  # many may give up together
                name, ask_all = f"late/{call.sequence}", partial(self._find_grouped, call)
                texts, _ = self._first_answer(name, ask_all, self._parse_grouped)
            else:
                missing = None if but is None else self._group.ranks[but]
                texts = self.find_texts(call, [rank for rank in self.others if rank != missing])
        except StoreError as lost:
            return f"{STORE_LOST}: {lost.summary}"
        return grouped_text((rank, texts[rank]) for rank in self.others if rank in texts)

    def _find_grouped(self, call: CallRecord) -> Any:
        """Ask all ranks; return ``[text, runs of ranks]`` for each text of ``find_texts``."""
        grouped = ranks_by_text(self.find_texts(call, self._group.ranks).items())
        return [[text, to_runs(ranks)] for text, ranks in grouped.items()]

    def _parse_grouped(self, grouped: Any) -> dict[int, str]:
        size = self._world.size
        return {r: str(text) for text, runs in grouped for r in from_runs(runs, size)}

    def find_texts(self, call: CallRecord, ranks: Sequence[int]) -> dict[int, str]:
        """Ask ``ranks``; return a text for each: whether it reached ``call``, and its last call.

        Args:
            call: a collective; for a message the texts have only the last calls.
            ranks: global ranks; ranks that have left or do not answer get a text, too.
        """
        endings, label, texts = get_registry(self._world).endings, self._opened.label, {}
        silent = _silence(endings, ranks, label)
        about = {} if call.is_message else {"label": label, "sequence": call.sequence}
        answers = ask(self._world, tuple(rank for rank in ranks if rank not in silent), about)
        for rank in ranks:
            answer = answers.get(rank)
            line = silent.get(rank) or last_call_text(answer)
            if answer is not None:
                line = line.removeprefix("is running and ")
                here = [each for each in answer["calls"] if each["label"] == label]
                if not call.is_message:
                    last = here[-1]["sequence"] if here else 0
                    reached = f"{_REACHED if last >= call.sequence else 'did not reach'} this call"
                    if last > call.sequence and answer["about"]:
                        reached = f"{_REACHED} this call as {answer['about']}"
                    line = f"{reached}; {line}"
            texts[rank] = line
        return texts

    def _first_answer(
        self, name: str, make_answer: Callable[[], T], parse_answer: Callable[[Any], T]
    ) -> tuple[T, bool]:
        """Return the first caller's answer, stored as ``name``, and whether that is this rank."""
        # The others read it: n members that ask all others would get n * n answers.
        store, key, mine = self._world.store, f"{self._opened.label}/{name}", str(self._world.rank)
        is_first = store.compare_set(f"{key}/by", "", mine) == mine.encode()
        if is_first or not await_key(store, key, Deadline(FIRST_ANSWER_S)):
            text = json.dumps(make_answer())
            is_first = store.compare_set(key, "", text) == text.encode()
        return read_json(store, key, parse_answer), is_first

    def ending(self, member: int) -> str:
        try:
            rank, label = self._group.ranks[member], self._opened.label
            return get_registry(self._world).endings.find(rank, label)
        except StoreError:
            return ""

    def silent(self) -> str:
        is_failure_stored = partial(self._world.store.check, [self._failure_key])
        return silent_ranks(self._world, self.others, is_failure_stored, self._opened.label)

    def find_first_failure(self, call: CallRecord, text: str) -> str:
        if self._world.is_simulated:
            return ""
        mine = json.dumps({"rank": self._world.rank, "text": text, "call": call.heading})
        key, store = self._failure_key, self._world.store
        try:
            if store.compare_set(key, "", mine) == mine.encode():
                return ""
            return read_json(
                store,
                key,
                lambda it: f"rank {it['rank']} failed first, in {it['call']}: {it['text']}",
            )
        except StoreError as lost:
            return f"{STORE_LOST}: {lost.summary}"

    def agree_on_error(
        self, disagreement: dict[str, str], mine: CallRecord | None, about: dict[str, Any]
    ) -> dict[str, str]:
        registry, label = get_registry(self._world), self._opened.label
        rank, asked = self._world.rank, self.others
        if "asked" in about:
            asked = tuple(self._group.ranks[member] for member in about["asked"])
        where, fix = disagreement["where"], f"{disagreement['fix']}; {UNUSABLE_GROUP}"
        if "sequence" in about:
            me, last = f"{self._group.here} detected it", self._opened.recorder.sequence
            if about["sequence"] < last:
                me = f"{me} at call {last}; results since then may be wrong"
            else:
                me = f"{me} before it sent any data"
            where = f"{where}, {ranks_text(self._group.ranks)}; {me}"
        disagreement = {**disagreement, "where": where, "fix": fix}
        calls = {rank: FORGOTTEN if mine is None else mine.text}

        def ask_others() -> dict[str, str]:
            answers = ask(self._world, asked, {"label": label, **about})
            for other in asked:
                answer = answers.get(other)
                calls[other] = (
                    (answer["about"] or "has not reached this call")
                    if answer
                    else last_call_text(None)
                )
            found = "\n".join(
                filter(None, (disagreement["found"], grouped_text(sorted(calls.items()))))
            )
            return {**disagreement, "found": found}

        try:
            disagreement, is_first = self._first_answer(
                DISAGREEMENT, ask_others, parse_disagreement
            )
            reason = reason_of(disagreement)
            if is_first:
                message = {"reason": reason, "group": self._group.name}
                registry.abort([label], {**message, "disagreement": disagreement})
            else:
                # This rank must not use the backend before the other rank's abort arrives.
                registry.break_here(label, reason, disagreement=disagreement)
        except StoreError as lost:  # then no rank can report the other ranks' calls
            found = f"rank {rank}: {calls[rank]}\nother ranks: unknown, because {lost.summary}"
            disagreement = {**disagreement, "found": found}
            registry.break_here(label, str(lost), disagreement=disagreement)
        return disagreement


def _silence(endings: Endings, ranks: Collection[int], label: str) -> dict[int, str]:
    """Return text for each of ``ranks`` that is stopped or has left."""
    stopped = {rank: _STOPPED for rank in ranks if endings.is_stopped(rank)}
    return stopped | endings.find_all(ranks, label)


def silent_ranks(
    world: World,
    ranks: tuple[int, ...],
    is_explained: Callable[[], bool] = lambda: False,
    label: str = "",
) -> str:
    """Return text about ranks that have left or give no sign of life, or "".

    Args:
        is_explained: ends the wait for ranks about to leave.
        label: a communicator's, whose number of calls the text reports.
    """
    # A rank that has just given up may still answer, so wait for it to leave until the failure is
    # explained otherwise.
    others = tuple(rank for rank in ranks if rank != world.rank)
    if world.is_simulated or not others:
        return ""
    endings = get_registry(world).endings

    def find_exited() -> str:
        found = sorted(_silence(endings, others, label).items())
        return "\n".join(f"rank {rank} {text}" for rank, text in found)

    try:
        if found := find_exited():
            return found
        answers = ask(world, others, patience_s=_LIFE_SIGN_S)
        silent = [rank for rank in others if rank not in answers]
        if not silent:
            grace = Deadline(LEAVING_S)
            wait_until(
                lambda: find_exited() or is_explained(), grace, longest_pause_s=LEAVING_S / 5
            )
            return find_exited()
    except StoreError as lost:
        return f"{STORE_LOST}: {lost.summary}"
    if len(silent) == 1:
        return f"rank {silent[0]}: {last_call_text(None)}"
    return f"{ranks_text(silent)}: do not respond: they have exited or are stopped"


STALL_WARNING_VARIABLE = "MESHDIST_STALL_WARNING_S"
"""The environment variable for the number of seconds; 0 disables the warning."""

_DEFAULT_S = 30.0
_OPERATIONS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (os.path.dirname(__file__), torch.distributed.__file__)
)
_log = logging.getLogger("meshdist.waits")


class LatePeers:
    """Watcher that logs once which members this rank's latest call waits for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._default_s = _read_limit()
        self._limit_s = 0.0  # of the call that is looked at; 0 for never
        self._moment = 0
        self._deadline = Deadline(None)

    def look(self) -> Callable[[], None] | None:
        """Return a call that logs which ranks a late call waits for, once for each late call."""
        registry = get_registry(self._world)
        opened = max(registry.all_opened(), key=lambda each: each.recorder.moment, default=None)
        if opened is None:
            return None
        if opened.recorder.moment != self._moment:
            given_s = registry.stall_warning_s
            self._moment = opened.recorder.moment
            self._limit_s = self._default_s if given_s is None else given_s
            self._deadline = Deadline(self._limit_s or None)
        elif self._deadline.is_over and _is_in_a_operation():
            self._deadline = Deadline(None)  # log it only once
            call = opened.recorder.find_note()
            if call is not None:
                return partial(self._log_late_ranks, opened, call)
        return None

    def _log_late_ranks(self, opened: OpenCommunicator, call: CallRecord) -> None:
        members, store = WorldPeers(self._world, call.group, opened), self._world.store
        mine, key = str(self._world.rank), f"{opened.label}/waits/{call.sequence}"
        with suppress(StoreError):
            if not call.is_message and store.compare_set(key, "", mine) != mine.encode():
                return
            ranks = members.others
            if (peer := call.call.peer) is not None:
                ranks = (call.group.ranks[peer],)
            texts = members.find_texts(call, ranks).items()
            late = grouped_text(((r, t) for r, t in texts if not t.startswith(_REACHED)), "\n  ")
            if late and opened.recorder.moment == self._moment:
                text = f"rank {mine} has waited for {self._limit_s:g} s in {call.heading}"
                _log.warning("meshdist: %s\n  %s", text, late)


@contextmanager
@untraced
def stall_warning(after_s: float | None) -> Iterator[None]:
    """Set the stall warning of the block's calls to ``after_s`` seconds; None: never.

    Use it around a collective that some ranks reach long before others. It overrides
    ``MESHDIST_STALL_WARNING_S``, not timeouts.

    Raises:
        ArgumentError: ``after_s`` is not a positive number.

    Example:
        >>> import meshdist as md
        >>> def program():
        ...     with md.stall_warning(None):  # rank 1 may arrive an hour later
        ...         md.barrier()
        >>> md.simulate(program, 2)
        [None, None]
    """
    is_number = isinstance(after_s, (int, float))
    if after_s is not None and not (is_number and 0 < after_s < threading.TIMEOUT_MAX):
        raise ArgumentError(
            f"after_s is {after_s!r}",
            expected="a number of seconds above 0, or None to turn the warning off",
            fix="pass a number of seconds, for example md.stall_warning(60)",
        )
    registry = get_registry(get_usable_world())
    before, registry.stall_warning_s = registry.stall_warning_s, after_s or 0.0
    try:
        yield
    finally:
        registry.stall_warning_s = before


def _is_in_a_operation() -> bool:
    """Return whether the main thread is inside this package or torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OPERATIONS)


def _read_limit() -> float:
    text = os.environ.get(STALL_WARNING_VARIABLE, "")
    try:
        limit_s = float(text) if text else _DEFAULT_S
    except ValueError:
        limit_s = -1.0
    if not 0 <= limit_s < threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"{STALL_WARNING_VARIABLE} is {text!r}",
            expected="a number of seconds, for example 30, or 0 to turn the warning off",
            fix=f"set {STALL_WARNING_VARIABLE}=30, or unset it",
        )
    return limit_s

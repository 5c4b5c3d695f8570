"""Represent a torch process group as a meshdist group.

If the backend does not compare calls, members on one host write fingerprints of collectives to
shared memory. If calls differ, the later member detects that immediately, the earlier member in its
wait or next call. There is no control thread: a member that detects a mismatch writes its call to
the store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import ref

import torch
from torch.distributed import Store

from ..backends.operation_args import Layout, OperationArgs
from ..backends.registry import BackendType, Opening
from ..backends.requests import RanksMismatch
from ..backends.work import Work
from ..bootstrap.timeout_store import read_json, within
from ..bootstrap.world import World
from ..checking.calls import CallRecord, GroupFacts
from ..checking.fingerprint_table import WINDOW, FingerprintTable
from ..checking.recorder import FORGOTTEN, Recorder
from ..checking.shared_flags import words_of_process
from ..error_text import UNUSABLE_GROUP, grouped_text, ranks_text
from ..errors import AbortedError
from ..groups.communicators import OpenCommunicator
from ..groups.control_messages import Endings, collect
from ..groups.device_group import DeviceGroup
from ..groups.failure_diagnosis import PeerStatus, explained_opening
from ..groups.host_comparison import FingerprintTables
from ..groups.process_group import ProcessGroup
from ..runtime.deadlines import Deadline
from ..runtime.hosts import forks

ANSWERS_S = 1.0
_ABORT = "abort"


class InnerGroup(ProcessGroup):
    """A torch group as a meshdist group; creation opens the backend and is collective."""

    def __init__(self, backend: BackendType, opening: Opening) -> None:
        ranks, timeout, label = opening.ranks, opening.timeout, opening.name
        # Opening is collective and calls need not be, so open everything that a call may need here.
        kinds = {opening.device_type, *(["cuda"] if torch.cuda.is_available() else [])}
        backends = dict.fromkeys(sorted(backend.device_types & kinds), backend.name)
        size, hosts = max(ranks) + 1, dict(zip(ranks, opening.hosts, strict=False))
        world = World(ranks[opening.rank], size, opening.store, backends, timeout)
        world.hosts = tuple(
            hosts.get(rank, -1) for rank in range(size)
        )  # one host, if none is known
        super().__init__(world, ranks, name=f"group {label!r} ({ranks_text(ranks)})")
        facts = GroupFacts(self.name, ranks, opening.rank, label, backend.name, timeout)
        self.here, self.recorder, self._label = facts.here, Recorder(), label
        self._aborts: dict[str, dict[str, Any]] = {}
        words = None if backend.compares_calls else words_of_process()
        table = FingerprintTables(world, words).make(label, ranks, compares_messages=False)
        others = TorchGroupPeers(facts, opening.store, self.recorder, table, ref(self))
        if table is not None and words is not None:
            Endings(world).announce(words=words.address)
            opening = replace(opening, look=others.compare_again)
        try:
            for kind in backends:
                terms = opening
                if kind != opening.device_type:
                    terms = opening.below(kind, device_type=kind)
                explained = explained_opening(self.name, ranks, backend, self.here)
                with explained, within(Deadline(timeout)):
                    communicator = backend.open(replace(terms, name=f"group {label!r}"))
                of_calls = label, communicator, self.recorder, self._aborts, table
                opened = OpenCommunicator(*of_calls)
                self._device_groups[kind] = _SharedDeviceGroup(facts, backend, opened, kind, others)
        except BaseException:
            self.close()
            if table is not None:
                table.close()
            raise

    def __del__(self) -> None:
        """Do nothing: torch's group ends it."""

    @property
    def is_over(self) -> bool:
        """Return whether the group was closed or belongs to a forked process's parent."""
        return self._closed or self._num_forks != forks[0]

    def check_unbroken(self) -> None:
        """Raise if the group was closed, has failed or belongs to a parent's process."""
        if self._closed or self._num_forks != forks[0]:
            self.check_usable()
        if self._aborts:
            raise AbortedError(
                f"{self.name} cannot be used after a failure",
                where=self.here,
                found=self._aborts[self._label]["reason"],
                fix="create a new group with the remaining ranks",
            )

    def break_here(self, reason: str) -> None:
        """Make all later calls raise with ``reason``, and end every wait."""
        # After a timeout the members may be out of step: a late member would match a different
        # call. A backend that does not compare calls has already started the calls of some members.
        self._aborts.setdefault(self._label, {"reason": reason})
        self.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        self.own_timeout = timeout
        for device_group in self._device_groups.values():
            device_group.timeout = timeout

    def abort(self, reason: str = "") -> None:
        """End every wait, here and on the other members."""
        for device_group in self._device_groups.values():
            device_group.communicator.abort()

    def leave(self) -> None:
        """Announce to the other members that this process exits normally."""
        for device_group in () if self.is_over else self._device_groups.values():
            device_group.opened.leave()

    def close(self) -> None:
        self.leave()
        self._closed = True
        for device_group in self._device_groups.values():
            device_group.opened.close()


class _SharedDeviceGroup(DeviceGroup):
    """A device group on which several threads may run collectives concurrently."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._starting = threading.RLock()
        self._warn_dropped = None  # torch also lets a program drop a Work

    def run(self, prepared: OperationArgs, *, is_async: bool = False) -> Work | None:
        if not is_async:
            return super().run(prepared)
        # Asynchronous calls start in the order in which they are recorded.
        with self._starting:
            return super().run(prepared, is_async=True)

    def enter(self, prepared: OperationArgs, layouts: Sequence[Layout] = ()) -> None:
        with self._starting:
            super().enter(prepared, layouts)
        if self.fingerprint_table is not None:
            try:
                self._others.compare_again(is_thorough=False)
            except RanksMismatch as failure:
                raise self.explain(failure, prepared.number) from None


@dataclass
class TorchGroupPeers(PeerStatus):
    """A torch group's other members.

    Args:
        table: has the members' calls; None if calls are not compared, or the backend compares them.
        inner: a weak reference, since the group's device groups reference this object.
    """

    group: GroupFacts
    store: Store
    recorder: Recorder
    table: FingerprintTable | None
    inner: Callable[[], InnerGroup | None]
    _num_compared: int = 0

    def compare_again(self, *, is_thorough: bool = True) -> None:
        if self.table is None:
            return
        latest, is_compared = self.recorder.sequence, True
        for number in range(max(self._num_compared, latest - WINDOW) + 1, latest + 1):
            differing = self.table.look_again(number)
            if differing:
                others = ranks_text(sorted(self.group.ranks[member] for member in differing))
                text = f"this member's call differs from that of {others}"
                raise RanksMismatch(text, number)
            is_compared = is_compared and differing is not None
            if is_compared:
                self._num_compared = number
            elif not is_thorough:
                return

    def find_abort(self) -> dict[str, Any] | None:
        with suppress(RuntimeError):  # the store is lost
            if self.store.check([_ABORT]):
                return read_json(self.store, _ABORT, _parse_abort)
        return None

    def break_here(self, reason: str) -> None:
        if (group := self.inner()) is not None:
            group.break_here(reason)

    def give_up(self, reason: str) -> None:
        mine = {"rank": self.group.ranks[self.group.rank], "reason": reason}
        with suppress(RuntimeError):
            self.store.set(_ABORT, json.dumps(mine))
        self.break_here(reason)

    def agree_on_error(
        self, disagreement: dict[str, str], mine: CallRecord | None, about: dict[str, Any]
    ) -> dict[str, str]:
        # A backend that compares calls does so before any data moves, so the group stays usable.
        text = FORGOTTEN if mine is None else mine.text
        where, fix = disagreement["where"], disagreement["fix"]
        if "sequence" not in about:
            found = f"{self.group.here}: {text}"
        else:
            found = self._what_each_called(about["sequence"], text)
            if self.table is None:
                where += "; no data was moved"
            else:
                where += "; this member's tensors may have been written"
                fix += f"; {UNUSABLE_GROUP}"
                self.break_here(disagreement["summary"])
        found = "\n".join(filter(None, (disagreement["found"], found)))
        return {**disagreement, "where": where, "found": found, "fix": fix}

    def _what_each_called(self, sequence: int, text: str) -> str:
        texts, members = {self.group.rank: text}, range(len(self.group.ranks))
        keys = {member: f"disagreement/{sequence}/{member}" for member in members}
        with suppress(RuntimeError):  # the store is lost: each member reports only its own call
            self.store.set(keys[self.group.rank], json.dumps(text))
            texts |= collect(self.store, keys, Deadline(ANSWERS_S), str)
        return grouped_text(
            (rank, texts.get(member, "has not reported"))
            for member, rank in enumerate(self.group.ranks)
        )


def _parse_abort(value: dict[str, Any]) -> dict[str, Any]:
    """Parse the rank and reason of a member's abort message."""
    return {"rank": int(value["rank"]), "reason": str(value["reason"])}

"""Members compare what they are about to make before anything is opened.

Every member publishes its definition in the store and waits for the others'. Where two differ,
every member raises the same error, which shows both. A member that waits for this rank in another
agreement can never come: that is found too, and raised on every rank that waits.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from ..bootstrap.bounded_store import read_json, read_jsons, within
from ..bootstrap.world import World
from ..error_text import grouped_text, ranks_text
from ..errors import AgreementError, BackendError, CollectiveTimeoutError, JoinError
from ..runtime.deadlines import Deadline, Grace, wait_until
from ..runtime.hosts import MORE_DESCRIPTORS
from ..wires.simulated.store import SimulatedStore
from .endings import Endings
from .signal_thread import ask, last_call_text

__all__ = ["Agreement", "Agreements", "digest_of_ranks", "lack_error"]

_SLICE_S = 1.0
_SURE_AFTER_SLICES = 3
_SURE_AMONG_THREADS = 20
_ALL_HAVE_COME = "all have come"
_LACK = "lack"


def digest_of_ranks(ranks: Sequence[int]) -> str:
    """A short name for a list of ranks, equal on all of them."""
    return hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()[:16]


@dataclass(frozen=True)
class Agreement:
    """One agreement of the members of a group, and what they offered there.

    Args:
        name: its name in the store, equal on all members, and no other agreement's.
        offers: for each member the communicators that it has open and could share, by slot.
    """

    name: str
    offers: Mapping[int, Mapping[str, str]]

    def label_for(self, ranks: Sequence[int], slot: str) -> str:
        """The label of the communicator that ``ranks`` will use, equal on all of them.

        That of the one they have open already, if all of them have it open still; else a new one.
        """
        offered = {self.offers[rank].get(slot, "") for rank in ranks}
        if len(offered) == 1 and "" not in offered:
            return offered.pop()
        return f"group/{digest_of_ranks(ranks)}/{slot}/{self.name}"


@dataclass(frozen=True)
class _Meeting:
    """One agreement in the making; ``text`` is this rank's definition, for messages."""

    name: str
    kind: str
    text: str
    members: tuple[int, ...]
    timeout: timedelta

    def key(self, rank: int) -> str:
        """Under which ``rank`` publishes its definition."""
        return f"{self.name}/{rank}"

    @property
    def outcome_key(self) -> str:
        """Under which the first member to find out writes how the meeting ended."""
        return f"{self.name}/outcome"


class Agreements:
    """The agreements of one world, as one rank takes part in them.

    Args:
        world: whose they are.
        find_joined: which of some ranks have no data left in the join context that this rank is
            in, so that they come to no agreement before it ends.
    """

    def __init__(
        self, world: World, find_joined: Callable[[Collection[int]], list[int]] = lambda _: []
    ) -> None:
        self._world = world
        self._find_joined = find_joined
        self._endings = Endings(world)
        self._has_notice = False  # whether the store shows what this rank waits for

    def agree(
        self,
        ranks: Sequence[int],
        kind: str,
        definition: Mapping[str, Any],
        timeout: timedelta,
        offer: Mapping[str, str] | None = None,
        lack: str = "",
    ) -> Agreement:
        """Return when all of ``ranks`` have come with an equal ``definition``.

        Args:
            ranks: the ranks that take part, this one among them, in any order.
            kind: what is being made, for messages and keys ("mesh", "group").
            definition: plain values; its "text" entry is shown where members differ.
            timeout: how long to wait for the last member.
            offer: what this rank could share with the others, by slot; may differ between members.
            lack: why this process cannot open what is made, or ""; then no member opens anything.

        Raises:
            AgreementError: the definitions differ, or members wait for each other in different
                ones.
            BackendError: a member that did not come has ended; or one has a lack.
            CollectiveTimeoutError: a member did not come; the text names it.
            JoinError: a member has no data left in a join context; nothing is left of the call.
        """
        world, members = self._world, tuple(sorted(ranks))
        count = world.next_number((kind, members))
        name = f"agree/{kind}/{digest_of_ranks(members)}/{count}"
        offer = dict(offer or {})
        if len(members) == 1:
            return Agreement(name, {world.rank: offer})
        if lack:
            offer[_LACK] = lack
        meeting = _Meeting(name, kind, definition["text"], members, timeout)
        store, deadline = world.store, Deadline(timeout)
        with within(deadline):
            store.set(meeting.key(world.rank), json.dumps([definition, offer]))
            try:
                self._await_all(meeting, deadline)
            except JoinError:  # on all members that come, so that they count alike
                world.take_back_number((kind, members))
                store.delete_key(meeting.key(world.rank))
                raise
            outcome = _first(store, meeting, _ALL_HAVE_COME)
            if outcome != _ALL_HAVE_COME:
                raise CollectiveTimeoutError(
                    f"others gave up to wait before rank {world.rank} came to make a {kind}",
                    where=f"rank {world.rank}, {meeting.text}, for {ranks_text(members)}",
                    expected=f"the same call on {ranks_text(members)}, at about the same time",
                    found=outcome,
                    fix=f"look at what kept rank {world.rank}, or raise the timeout",
                )
            entries = read_jsons(store, [meeting.key(rank) for rank in members], _entry)
        mine = entries[members.index(world.rank)][0]
        if any(one != mine for one, _ in entries):
            raise AgreementError(
                f"the ranks do not define the same {kind}",
                where=f"rank {world.rank}, among {ranks_text(members)}",
                expected=f"one and the same {kind} on every rank",
                found=_grouped(members, [one for one, _ in entries]),
                fix=f"make the {kind} from equal arguments on all of its ranks, in the same order",
            )
        found = dict(zip(members, [offer for _, offer in entries], strict=True))
        if lacks := [(rank, offer[_LACK]) for rank, offer in found.items() if _LACK in offer]:
            raise lack_error(world, meeting.text, members, lacks)
        return Agreement(name, found)

    def _await_all(self, meeting: _Meeting, deadline: Deadline) -> None:
        """Return when all members have published their definitions."""
        world, members = self._world, meeting.members
        store = world.store
        keys = list(map(meeting.key, members))
        if isinstance(store, SimulatedStore):
            store.wait_unless(keys, lambda: bool(self._joined_before(meeting, store.has)))
            self._refuse_joined(meeting, store.has)
            return
        self._show_notice(None)
        suspicion, times = "", 0

        def check() -> None:
            self._refuse_joined(meeting, lambda keys: store.check(list(keys)))

        # Not store.wait, whose expiry torch reports on stderr.
        while not wait_until(lambda: store.check(keys), Grace(deadline.slice_s(_SLICE_S)), check):
            missing = [rank for rank in members if not store.check([meeting.key(rank)])]
            if not missing:
                break
            self._check_alive(meeting, missing)
            if deadline.is_over:
                seconds = meeting.timeout.total_seconds()
                outcome = f"rank {world.rank} waited {seconds:g} s for {meeting.text}"
                if _first(store, meeting, outcome) == _ALL_HAVE_COME:
                    break
                raise self._late(meeting, missing)
            self._show_notice(meeting)
            found, patience = self._find_crossing(meeting, missing)
            times = times + 1 if found == suspicion else 1
            suspicion = found
            if found and times >= patience:
                # The notice stays in the store, so that the ranks that it names see it too.
                raise AgreementError(
                    f"the ranks do not define the same {meeting.kind}: they wait for each other",
                    where=f"rank {world.rank}, among {ranks_text(members)}",
                    expected="one and the same definition on every rank, in the same order",
                    found=f"rank {world.rank}: {meeting.text}, for {ranks_text(members)}\n{found}",
                    fix="make meshes and groups from equal arguments on all of their ranks",
                )
        self._show_notice(None)

    def _joined_before(self, meeting: _Meeting, has: Callable[[Sequence[str]], bool]) -> list[int]:
        """The members that have no data left and had not come before; ``has`` looks for keys."""
        joined = self._find_joined(meeting.members)  # first: one may come and then join meanwhile
        return [rank for rank in joined if not has([meeting.key(rank)])]

    def _refuse_joined(self, meeting: _Meeting, has: Callable[[Sequence[str]], bool]) -> None:
        """Raise where members do not come since they have no data left."""
        joined = self._joined_before(meeting, has)
        if not joined:
            return
        self._show_notice(None)
        raise JoinError(
            f"a {meeting.kind} cannot be made with {ranks_text(joined)}, which "
            f"{'has' if len(joined) == 1 else 'have'} no data left",
            where=f"rank {self._world.rank}, {meeting.text}, for {ranks_text(meeting.members)}",
            expected=f"the same call on {ranks_text(meeting.members)}",
            fix="make meshes and groups, and use each once, before the loop",
        )

    def _check_alive(self, meeting: _Meeting, missing: list[int]) -> None:
        """Raise where some of the ``missing`` have ended, before they came."""
        store, ended = self._world.store, {rank: self._endings.find(rank) for rank in missing}
        # In this order: one may come and end meanwhile.
        lost = [rank for rank in missing if ended[rank] and not store.check([meeting.key(rank)])]
        if lost:
            raise BackendError(
                f"{ranks_text(lost)} cannot come to make a {meeting.kind}",
                where=f"rank {self._world.rank}, {meeting.text}, for {ranks_text(meeting.members)}",
                expected=f"the same call on {ranks_text(meeting.members)}",
                found="\n".join(f"rank {rank} {ended[rank]}" for rank in lost),
                fix=f"look at what ended {ranks_text(lost)}; make it on the ranks that are left",
            )

    def _show_notice(self, meeting: _Meeting | None) -> None:
        """Show in the store what this rank waits for; None takes an older notice away."""
        if self._has_notice == (meeting is not None):
            return
        notice = meeting and {
            "name": meeting.name,
            "ranks": meeting.members,
            "text": meeting.text,
            "has_threads": _has_other_threads(),
        }
        self._world.store.set(_notice_key(self._world.rank), json.dumps(notice))
        self._has_notice = meeting is not None

    def _find_crossing(self, meeting: _Meeting, missing: list[int]) -> tuple[str, int]:
        """Describe a missing rank that waits, elsewhere, for a rank that waits here; or "".

        Returns as well how many equal findings in a row are proof: a rank with several threads may
        yet come by another one.
        """
        store = self._world.store
        arrived = set(meeting.members) - set(missing)
        for rank in missing:
            key = _notice_key(rank)
            other = read_json(store, key, _notice) if store.check([key]) else None
            if other is None or other["name"] == meeting.name:
                continue
            for awaited in arrived.intersection(other["ranks"]):
                if not store.check([f"{other['name']}/{awaited}"]):
                    text = f"rank {rank}: {other['text']}, for {ranks_text(other['ranks'])}"
                    has_threads = other["has_threads"] or _has_other_threads()
                    return text, _SURE_AMONG_THREADS if has_threads else _SURE_AFTER_SLICES
        return "", 1

    def _late(self, meeting: _Meeting, missing: list[int]) -> CollectiveTimeoutError:
        answers = ask(self._world, tuple(missing))
        lines = []
        for rank in missing:
            text = "gives no answer; it has not opened a group, or has ended"
            if (answer := answers.get(rank)) is not None:
                text = last_call_text(answer).removeprefix("last ")
            lines.append(f"rank {rank}: {text}")
        return CollectiveTimeoutError(
            f"{ranks_text(missing)} did not come within {meeting.timeout.total_seconds():g} s "
            f"to make a {meeting.kind}",
            where=f"rank {self._world.rank}, {meeting.text}, for {ranks_text(meeting.members)}",
            expected=f"the same call on {ranks_text(meeting.members)}",
            found="\n".join(lines),
            fix=f"look at what {ranks_text(missing)} does instead, or raise the timeout",
        )


def lack_error(
    world: World, text: str, members: Sequence[int], lacks: list[tuple[int, str]]
) -> BackendError:
    """The error where ``lacks`` keep some of the members from opening what ``text`` names."""
    return BackendError(
        f"{text} cannot be opened: a member can open too few files and sockets, or threads",
        where=f"rank {world.rank}, among {ranks_text(members)}",
        found=grouped_text(lacks),
        fix=f"{MORE_DESCRIPTORS} (of threads: pids.max of the control group, --pids-limit of "
        "Docker); or close groups that are not needed any more",
    )


def _first(store: Store, meeting: _Meeting, outcome: str) -> str:
    """How the meeting ended, as the first member says that does; this one says ``outcome``."""
    return store.compare_set(meeting.outcome_key, "", outcome).decode(errors="replace")


def _entry(value: tuple[dict[str, Any], dict[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """A member's definition and its offer."""
    definition, offer = value
    return {**definition, "text": str(definition["text"])}, {
        slot: str(label) for slot, label in offer.items()
    }


def _notice(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The agreement for which a member waits, in words; None where it waits for none."""
    if value is None:
        return None
    ranks = [int(rank) for rank in value["ranks"]]
    texts = {name: str(value[name]) for name in ("name", "text")}
    return {**texts, "ranks": ranks, "has_threads": bool(value["has_threads"])}


def _grouped(members: tuple[int, ...], definitions: list[dict[str, Any]]) -> str:
    """One line per distinct definition: its ranks, and every entry in which they differ."""
    keys = sorted({key for definition in definitions for key in definition} - {"text"})
    differing = [k for k in keys if len({json.dumps(d.get(k)) for d in definitions}) > 1]
    lines = []
    for rank, definition in zip(members, definitions, strict=True):
        details = ", ".join(f"{key} {definition.get(key)}" for key in differing)
        lines.append((rank, f"{definition['text']} ({details})" if details else definition["text"]))
    return grouped_text(lines)


def _notice_key(rank: int) -> str:
    return f"agree/waiting/{rank}"


def _has_other_threads() -> bool:
    """Whether another thread of this process might open a group of its own."""
    return any(
        thread is not threading.current_thread() and not thread.name.startswith("meshdist-")
        for thread in threading.enumerate()
    )

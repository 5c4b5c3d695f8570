"""Agree on the definition of a group or mesh before its communicators open.

Every member counts itself in the store under a digest of its definition and waits for one key, the
outcome, which the last member writes. If digests differ, the last member reads the definitions, and
all raise the same error, which shows both. The first members to wait look for missing members, ever
less often, and write an exit as the outcome. The other members' numbers of requests do not depend
on the group's size. Members that wait in different agreements time out; each error shows the
definition and the missing ranks' source lines.

Worked example: ranks 0 and 2 create a mesh of size 3; rank 1 passes size 4 by mistake. Their
definitions have the digests A and B. Keys have the agreement's name as prefix; time runs downwards:

    rank 0                     rank 1                     rank 2
    A/0.0 += 0b001: 001
    first with A: A/about
    came += 1: 1               B/0.0 += 0b010: 010
    waits for outcome          first with B: B/about
         |                     came += 1: 2               A/0.0 += 0b100: 101, so not the first
         |                     waits for outcome          came += 1: 3 of 3, so the last
         |                          |                     digests: A and B: reads all below both
    outcome, raises            outcome, raises       <--  writes outcome: differ; raises

With one digest the outcome is "agreed", and no member reads definitions. If rank 1 were missing,
101 would show that, and the first waiting rank would look for the reason.

    >>> import meshdist as md; from ..bootstrap.world import find_world
    >>> def program():
    ...     world, mesh = find_world(), {"text": "a mesh", "size": 4 if md.get_rank() == 1 else 3}
    ...     with suppress(MismatchError):
    ...         Agreements(world, Endings(world)).agree((0, 1, 2), "mesh", mesh, timedelta(1))
    ...     found = {key: world.store.peek(key) for key in world.store.list_keys()}
    ...     return [found[key] for key in found if key.endswith(("/0.0", "/came", "/outcome"))]
    >>> md.simulate(program, 3)[0]  # 5 is 0b101
    [b'5', b'3', b'2', b'{"how": "differ", ... 0, 2: a mesh (size 3)...rank 1: a mesh (size 4)"}']
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

from ..backends.registry import lack_error
from ..backends.simulated.store import SimulatedStore
from ..bootstrap.arrival_counters import (
    ArrivalCounter,
    arrival_counter_of,
    digest_of,
    digest_of_ranks,
)
from ..bootstrap.timeout_store import await_key, find_value, parse_value, within
from ..bootstrap.world import World
from ..error_text import grouped_text, ranks_text
from ..errors import (
    BackendError,
    CollectiveTimeoutError,
    MeshdistError,
    MismatchError,
    StoreError,
)
from ..runtime.deadlines import Deadline, Looks
from .control_messages import Endings, ask, last_call_text

__all__ = ["NO_OFFERS", "Agreement", "Agreements", "Offers"]

Offers: TypeAlias = Mapping[str, tuple[str, Sequence[int]]]
"""The labels of communicators, by slot, each with the ranks of the slot's group."""
NO_OFFERS: Offers = {}
_MOST_MISSING = 8
"""How many missing members to check at most, at one or two requests each."""
_TELLING_S = 5.0
"""How long the first member that times out may take to report the missing ranks."""
_MOST_ENDS = 8


@dataclass(frozen=True)
class Agreement:
    """The result of an agreement: shared or opened communicators.

    Args:
        name: Unique in the store, equal on all members.
        shared: ``{slot: label}`` of communicators that all ranks of a group have open; each rank
            offered its communicator under the slot.
        opened: This rank's communicators for this agreement.
    """

    name: str
    members: tuple[int, ...]
    shared: Mapping[str, str] = field(default_factory=dict)
    opened: list[Any] = field(default_factory=list)

    def label_for(self, ranks: Sequence[int], slot: str) -> str:
        """Return the label shared under ``slot``, or a new label."""
        # If all members still have a communicator of these ranks open, they share it.
        return self.shared.get(slot) or f"group/{digest_of_ranks(ranks)}/{slot}/{self.name}"


@dataclass(frozen=True)
class Agreements:
    """Factory of this rank's agreements with ranks of ``world``.

    Args:
        endings: Exited ranks.
    """

    world: World
    endings: Endings

    def agree(
        self,
        ranks: Sequence[int],
        kind: str,
        definition: Mapping[str, Any],
        timeout: timedelta,
        *,
        offers: Offers = NO_OFFERS,
        ends: Offers = NO_OFFERS,
        lack: str = "",
    ) -> Agreement:
        """Return the Agreement once all ``ranks`` have passed an equal ``definition``.

        Args:
            kind: "mesh" or "group", for messages and keys.
            definition: Plain values; errors show its "text" entry.
            offers: Communicators that this rank could share; may differ between members.
            ends: Communicators that it could close, of which it offers a few.
            lack: The reason why this process cannot open the group, so that no member does; or "".

        Raises:
            MismatchError: The definitions differ.
            BackendError: A missing member has exited, or a member has a lack.
            CollectiveTimeoutError: A member is late; the text names it.
        """
        world, members = self.world, tuple(sorted(ranks))
        name = f"agree/{kind}/{digest_of_ranks(members)}/{world.next_number((kind, members))}"
        # The choice depends on the agreement's name, so that members choose the same ones.
        some = sorted(ends, key=lambda slot: digest_of(f"{name} {slot}"))[:_MOST_ENDS]
        offers = {**offers, **{slot: ends[slot] for slot in some}}
        shared = {slot: label for slot, (label, _) in offers.items()}
        if len(members) == 1:
            return Agreement(name, members, shared)
        keys = {
            slot: f"{name}/offer/{digest_of(f'{slot} {label} {tuple(offers[slot][1])}')}"
            for slot, label in shared.items()
            if len(offers[slot][1]) > 1
        }
        about = name, kind, definition, members, timeout
        meeting = _PendingAgreement(world, self.endings, *about)
        with within(meeting.deadline):
            try:
                meeting.arrive(keys.values(), lack)
                meeting.await_outcome()
            except BaseException as error:
                meeting.leave(error)
                raise
            meeting.raise_unless_agreed()
            counts = world.store.multi_get(list(keys.values())) if keys else []
        for slot, number in zip(keys, counts, strict=True):
            if number != str(len(offers[slot][1])).encode():
                del shared[slot]
        return Agreement(name, members, shared)


@dataclass(eq=False)
class _PendingAgreement:
    """State of this rank in an agreement."""

    # The keys below its ``name``: ``DIGEST/...`` counts members by definition, ``came`` all of
    # them; ``DIGEST/about`` is a definition, ``digest/NUMBER`` lists the digests; ``outcome``.

    world: World
    endings: Endings
    name: str
    kind: str
    definition: Mapping[str, Any]
    members: tuple[int, ...]
    timeout: timedelta

    def __post_init__(self) -> None:
        self._store, self._rank = self.world.store, self.world.rank
        self.deadline = Deadline(self.timeout)
        self._text = str(self.definition["text"])
        self._whom = f"{self._text}, for {ranks_text(self.members)}"
        self._about = json.dumps(self.definition)
        self._digest = digest_of(self._about)
        self._all = arrival_counter_of(self.members, self.world.hosts)
        self._block = self._all.block_of(self._rank)
        self._is_last = False
        self._looks: dict[ArrivalCounter, Looks] = {}

    def arrive(self, offer_keys: Iterable[str], lack: str) -> None:
        """Store any ``lack``; count ``offer_keys`` and this rank; the last writes the outcome."""
        store, name, below = self._store, self.name, f"{self.name}/{self._digest}"
        if lack:
            store.set(f"{name}/lack/{self._rank}", lack)
            store.set(f"{name}/lack", "")
        for key in offer_keys:
            store.add(key, 1)
        position, _ = self._all.count(store.add, below, self._rank)
        if position == 1 and store.add(below, 1) == 1:  # no member had this definition before
            store.set(f"{below}/about", self._about)
            store.set(f"{name}/digest/{store.add(f'{name}/digests', 1)}", self._digest)
        size, number = len(self.members), store.add(f"{name}/came", 1)
        self._is_last = number == size and self._is_first_to("conclude")
        if self._is_last:
            self._conclude()
        # The first member of a block looks for the block's members, the first of all for all.
        self._looks = {self._block: Looks(size, position), self._all: Looks(size, number)}

    def _is_first_to(self, end: str) -> bool:
        """Claim the right to write the outcome as ``end``; return whether this succeeded."""
        return self._store.compare_set(f"{self.name}/end", "", end) == end.encode()

    def _conclude(self) -> None:
        name, found = self.name, dict[int, dict[str, Any]]()
        digests = self._digests()
        for digest in digests if len(digests) > 1 else ():
            definition = self._read_about(digest)
            absent = self._all.find_absent(self._read, [f"{name}/{digest}"])
            found |= dict.fromkeys(set(self.members).difference(absent), definition)
        if len({json.dumps(definition) for definition in found.values()}) > 1:
            self._decide("differ", found=_grouped(self.members, [found[r] for r in self.members]))
            return
        ranks = self.members if self._peek(f"{name}/lack") is not None else ()
        values = {rank: self._peek(f"{name}/lack/{rank}") for rank in ranks}
        lacks = [(rank, lack.decode(errors="replace")) for rank, lack in values.items() if lack]
        self._decide("lack" if lacks else "agreed", found=grouped_text(lacks))

    def _decide(self, how: str, **more: Any) -> None:
        text = json.dumps({"how": how, "by": self._rank, **more})
        self._store.compare_set(f"{self.name}/outcome", "", text)

    def await_outcome(self) -> None:
        """Wait for the outcome; write it if members are missing at the deadline."""
        store, key = self._store, f"{self.name}/outcome"
        if self._is_last:
            return
        if isinstance(store, SimulatedStore):
            store.wait([key])
            return
        if await_key(store, key, self.deadline, self._look):
            return
        # Claim the outcome first, so that a member that arrives now does not continue alone.
        is_first = self._is_first_to(f"give up by {self._rank}")
        if not is_first and await_key(store, key, Deadline(_TELLING_S)):
            return
        if not (missing := self._find_missing(self._all)):
            self._conclude()
            return
        unknown = "does not respond: it has not opened a group yet, or has exited"
        texts = dict.fromkeys(missing, unknown)
        answers = ask(self.world, tuple(missing))
        texts |= {rank: last_call_text(it).removeprefix("last ") for rank, it in answers.items()}
        self._decide("late", missing=missing, found=grouped_text(texts.items()))

    def leave(self, error: BaseException) -> None:
        """Write ``error`` as the outcome, unless the store is lost."""
        if isinstance(self._store, SimulatedStore):  # its ranks end together
            return
        if isinstance(error, StoreError):
            return
        with suppress(RuntimeError):  # the store may be lost
            why = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            why = f"rank {self._rank} was interrupted by {why}"
            self._decide("left", missing=[self._rank], found=why)

    def _look(self) -> None:
        """Look for missing members when due."""
        for counted, looks in self._looks.items():
            looks.take(partial(self._look_at, counted))

    def _look_at(self, counted: ArrivalCounter) -> None:
        """Write the outcome if all members arrived or one of ``counted`` has exited."""
        missing = self._find_missing(counted, most=_MOST_MISSING)
        if not missing and counted is self._all:  # the last may have ended before it concluded
            self._conclude()
            return
        if self.endings.find_all(missing):
            ended = self.endings.find_all(self._find_missing(counted))
            # Count after looking for exits: a member may arrive and exit in between.
            if lost := self._find_missing(counted, ended):
                found = "\n".join(f"rank {rank} {ended[rank]}" for rank in lost)
                self._decide("ended", missing=lost, found=found)

    def _find_missing(
        self, counted: ArrivalCounter, among: Collection[int] | None = None, most: float = math.inf
    ) -> list[int]:
        """Return ``counted``'s ranks that have not arrived."""
        keys = [f"{self.name}/{digest}" for digest in self._digests()]
        return counted.find_absent(self._read, keys, among, most)

    def raise_unless_agreed(self) -> None:
        """Raise the outcome's error unless it is "agreed"."""
        key, kind, rank = f"{self.name}/outcome", self.kind, self._rank
        outcome = parse_value(key, self._peek(key) or b"", _parse_outcome)
        how, found, missing = outcome["how"], outcome["found"], outcome["missing"]
        if how == "agreed":
            return
        where, same = f"rank {rank}, {self._whom}", f"the same call on {ranks_text(self.members)}"
        seconds = f"{self.timeout.total_seconds():g} s"
        if how == "differ":
            raise MismatchError(
                f"the ranks do not define the same {kind}",
                where=f"rank {rank}, among {ranks_text(self.members)}",
                expected=f"the same {kind} on every rank",
                found=found,
                fix=f"create the {kind} with the same arguments on all of its ranks, "
                "in the same order",
            )
        if how == "lack":
            raise lack_error(self._rank, self._text, self.members, found)
        them = ranks_text(missing)
        kind_of_error: type[MeshdistError] = CollectiveTimeoutError
        if how == "ended":
            summary, kind_of_error = f"{them} left before creating a {kind}", BackendError
            fix = f"check why {them} left, or create it with the remaining ranks"
        elif how == "left":
            summary, kind_of_error = f"{them} was interrupted while creating a {kind}", BackendError
            fix = f"check what interrupted {them}, and create it again on all ranks"
        elif rank in missing:
            summary = f"the other ranks timed out before rank {rank} started to create a {kind}"
            same = f"{same}, at about the same time"
            fix = f"check what delayed rank {rank}, or pass a longer timeout"
            found = f"rank {outcome['by']} waited {seconds} for {self._text}"
        else:
            summary = f"{them} did not arrive within {seconds} to create a {kind}"
            fix = f"check what {them} does instead, or pass a longer timeout"
        raise kind_of_error(summary, where=where, expected=same, found=found, fix=fix)

    def _peek(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None, without waiting or switching simulated ranks."""
        store = self._store
        return store.peek(key) if isinstance(store, SimulatedStore) else find_value(store, key)

    def _read(self, key: str) -> int:
        return parse_value(key, self._peek(key) or b"0", int)

    def _digests(self) -> list[str]:
        """Return the digests of all stored definitions."""
        keys = [f"{self.name}/digest/{k + 1}" for k in range(self._read(f"{self.name}/digests"))]
        if len(keys) < 2:
            return [self._digest]
        return [value.decode() for key in keys if (value := self._peek(key)) is not None]

    def _read_about(self, digest: str) -> dict[str, Any]:
        """Return the stored definition with ``digest``, or raise."""
        key = f"{self.name}/{digest}/about"
        return parse_value(key, self._peek(key) or b"", lambda it: {**it, "text": str(it["text"])})


def _parse_outcome(value: dict[str, Any]) -> dict[str, Any]:
    """Parse an outcome's JSON into checked fields; raise if some are missing or wrong."""
    return {
        "how": str(value["how"]),
        "by": int(value["by"]),
        "found": str(value["found"]),
        "missing": [int(rank) for rank in value.get("missing", ())],
    }


def _grouped(members: tuple[int, ...], definitions: list[dict[str, Any]]) -> str:
    """Return a line per distinct definition, with the differing entries."""
    keys = sorted({key for definition in definitions for key in definition} - {"text"})
    differing = [k for k in keys if len({json.dumps(d.get(k)) for d in definitions}) > 1]
    lines = []
    for rank, definition in zip(members, definitions, strict=True):
        details = ", ".join(f"{key} {definition.get(key)}" for key in differing)
        lines.append((rank, f"{definition['text']} ({details})" if details else definition["text"]))
    return grouped_text(lines)

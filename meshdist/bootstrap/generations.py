"""How the ranks of one world find each other in a store that may have served worlds before.

A store counts generations. In each, every rank claims its number, leaves its card and is counted.
When all have come, each confirms that it is still there; the last one closes the generation as
complete, and says on which hosts the ranks are and which wires all of them can use. (Without the
second step a world could begin with the claim of a process that has died.) A generation that cannot
become complete (a rank is missing at the timeout, two processes claim one rank, ranks disagree
about the size) is closed as failed, and every rank in it raises the same error. What comes later
begins the next generation, so that a world can be made again and again at one address, and nothing
of an earlier one is taken for its own.

Keys of a generation, below its number: ``size``, ``arrived``, ``claim/RANK``, ``card/RANK``,
``joined``, ``joined/NUMBER`` (the rank that was counted), ``full``, ``confirmed``,
``confirmed/NUMBER``, ``state``; the world's own keys lie below ``world``.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from ..error_text import fields_among, first_line, ranks_text
from ..errors import RendezvousError
from ..runtime.deadlines import Deadline, Grace, wait_until
from ..runtime.hosts import ProcessCard, is_alive, my_card
from ..runtime.whole_numbers import find_whole_number
from .bounded_store import BoundedStore, read_json, read_jsons, read_number, within
from .stores import PrefixStore, Store

__all__ = ["SERVER", "Attempt", "Joined", "lost_while_joining"]

SERVER = "rank {}, which serves the store,"
"""The name in messages of a rank whose process serves the store."""

_CARD_S = 2.0
"""How long a process that has claimed a rank may take to leave its card."""


@dataclass(frozen=True)
class Joined:
    """A world in which every rank has joined.

    Args:
        rank: this process's rank.
        size: how many ranks there are.
        generation: how many generations the store had before.
        store: a store for this world alone, on ``handle``.
        make_torch_store: returns the same keys on a connection of its own, for torch's classes,
            which use a store in threads of theirs.
        handle: makes the requests to the store. Keep it as long as the store: a PrefixStore does
            not keep alive a store that is written in Python.
        server: the rank whose process serves the store; None where no rank does.
        hosts: for each rank the number of its host, numbered as they first appear.
        local_rank: this process's number among the ranks of its host.
        wires: what all ranks said that they could use.
        origin: how the ranks met, for messages.
        leave: call it once, when this process has closed the world and all that used its store.
    """

    rank: int
    size: int
    generation: int
    store: Store
    make_torch_store: Callable[[], Store]
    handle: BoundedStore
    server: int | None
    hosts: tuple[int, ...]
    local_rank: int
    wires: frozenset[str]
    origin: str
    leave: Callable[[], None] = lambda: None

    @property
    def local_size(self) -> int:
        """How many ranks this process's host has."""
        return self.hosts.count(self.hosts[self.rank])


@dataclass
class Attempt:
    """One process's way into the world of ``size`` ranks that meets in a store.

    Args:
        handle: makes the requests to what all ranks share.
        rank: this process's rank, or None to be given one in the order of arrival.
        size: how many ranks there are.
        timeout: how long to wait for the others.
        origin: how the ranks came here, for messages.
        wires: the names of what this process could use to communicate.
        local_rank: this process's number on its host, where its launcher numbers them.
        is_unique: whether a launcher sees to it that no rank runs twice at once.
        prefix: what the keys of the attempt begin with.
        serves: whether this process serves the store.
    """

    handle: BoundedStore
    rank: int | None
    size: int
    timeout: timedelta
    origin: str
    wires: Collection[str] = ()
    local_rank: int | None = None
    is_unique: bool = False
    prefix: str = "meshdist"
    serves: bool = False

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.timeout)
        self._card = my_card()
        self.store = PrefixStore(self.prefix, self.handle)

    def join(self) -> Joined:
        """Return the world, once every rank has joined.

        Raises:
            RendezvousError: a rank did not join in time, a rank was claimed twice, or ranks
                disagree about the size. Every rank that waits raises the same text.
        """
        try:
            with within(self._deadline):
                generation = read_number(self.store, "resolved")
                while (joined := self.try_generation(generation)) is None:
                    generation += 1
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's store errors
            raise lost_while_joining(self.origin, error) from error
        return joined

    def try_generation(self, generation: int) -> Joined | None:
        """Return the world of this generation; None where the next one has to be tried."""
        keys = PrefixStore(f"{self.prefix}/{generation}", self.handle)
        if keys.check(["state"]):
            return None
        keys.compare_set("size", "", str(self.size))
        agreed = read_number(keys, "size")
        if agreed != self.size:
            return self._conclude(keys, generation, -1, self._disagreement(agreed))
        mine = self._claim_next(keys) if self.rank is None else self._claim(keys, self.rank)
        if mine is None:
            return None
        try:
            about = {
                "local_rank": self.local_rank,
                "wires": sorted(self.wires),
                "serves": self.serves,
            }
            card = {**self._card.to_json(), **about}
            keys.set(f"card/{mine}", json.dumps(card))
            number = keys.add("joined", 1)
            keys.set(f"joined/{number}", str(mine))
            if number == self.size:
                keys.set("full", "1")
            outcome = None
            if not self._wait_for(keys, "full"):
                outcome = self._missing(keys)
            elif not keys.check(["state"]):
                number = keys.add("confirmed", 1)
                keys.set(f"confirmed/{number}", str(mine))
                if number == self.size:
                    outcome = self._layout(keys)
                elif not self._wait_for(keys, "state"):
                    outcome = self._silent(keys)
            return self._conclude(keys, generation, mine, outcome)
        except KeyboardInterrupt:
            self._resolve(keys, _failure(f"rank {mine} was interrupted", where=str(self._card)))
            raise

    def _claim(self, keys: Store, rank: int) -> int | None:
        if keys.add(f"claim/{rank}", 1) == 1:
            return rank
        other = self._card_of(keys, rank)
        if keys.check(["state"]):
            return None
        if self.is_unique or (other is not None and is_alive(other) is False):
            # Left by a process that has ended: this generation can never be complete.
            self._resolve(keys, {"kind": "stale"})
            return None
        self._resolve(
            keys,
            _failure(
                f"rank {rank} was claimed by two processes",
                where=self.origin,
                expected=f"every rank from 0 to {self.size - 1} once",
                found=f"{other or 'a process that left no card'}; {self._card}",
                fix="give each process its own rank; or, if a job that has crashed used this "
                "store, start with a new address, file or store",
            ),
        )
        self._raise(_state(keys, self.size))
        return None

    def _claim_next(self, keys: Store) -> int | None:
        while True:
            rank = keys.add("arrived", 1) - 1
            if rank >= self.size:
                if not self._wait_for(keys, "state"):
                    self._raise(self._missing(keys))
                return None
            if keys.add(f"claim/{rank}", 1) == 1:
                return rank

    def _wait_for(self, keys: Store, key: str) -> bool:
        """Wait until the key is there; return whether it came in time."""
        # Store.wait would write to stderr where no time is left, and let no Ctrl-C through.
        return bool(wait_until(lambda: keys.check([key]), self._deadline))

    def _resolve(self, keys: Store, outcome: dict[str, Any]) -> None:
        """Close the generation with ``outcome``, unless another rank has done so."""
        text = json.dumps({**outcome, "by": secrets.token_hex(8)})
        if keys.compare_set("state", "", text) == text.encode():
            self.store.add("resolved", 1)
            keys.set("full", "1")  # ranks that wait for the others look at the state now

    def _conclude(
        self, keys: Store, generation: int, rank: int, outcome: dict[str, Any] | None
    ) -> Joined | None:
        if outcome is not None:
            self._resolve(keys, outcome)
        state = _state(keys, self.size)
        if state["kind"] == "stale":
            return None
        self._raise(state)
        below = f"{self.prefix}/{generation}/world"
        server = state["server"]
        self.handle.client = f"rank {rank} of {self.size}"
        if server is not None:
            self.handle.server = SERVER.format(server)
        return Joined(
            rank,
            self.size,
            generation,
            PrefixStore(below, self.handle),
            lambda: PrefixStore(below, self.handle.raw_clone()),
            self.handle,
            server,
            tuple(state["hosts"]),
            state["local_ranks"][rank],
            frozenset(state["wires"]),
            self.origin,
        )

    def _raise(self, state: dict[str, Any]) -> None:
        if state["kind"] == "failed":
            raise RendezvousError(state["summary"], **state["fields"])

    def _card_of(self, keys: Store, rank: int) -> ProcessCard | None:
        key = f"card/{rank}"
        grace = Grace(min(_CARD_S, self._deadline.left_s))
        wait_until(lambda: keys.check([key]) or keys.check(["state"]), grace)
        return read_json(keys, key, ProcessCard.from_json) if keys.check([key]) else None

    def _layout(self, keys: Store) -> dict[str, Any]:
        """Return the outcome of a generation in which every rank has left its card."""
        seen = read_jsons(keys, [f"card/{rank}" for rank in range(self.size)], _seen)
        cards = [card for card, _ in seen]
        values = [value for _, value in seen]
        if any(is_alive(card) is False for card in cards):
            return {"kind": "stale"}
        numbers: dict[str, int] = {}
        hosts = [numbers.setdefault(card.host, len(numbers)) for card in cards]
        local_ranks = [value["local_rank"] for value in values]
        places = set(zip(hosts, local_ranks, strict=True))
        if None in local_ranks or len(places) < self.size:
            # Not every launcher numbers them, or several launchers of one host do, each from 0.
            numbering: defaultdict[int, count[int]] = defaultdict(count)
            local_ranks = [next(numbering[host]) for host in hosts]
        return {
            "kind": "complete",
            "hosts": hosts,
            "local_ranks": local_ranks,
            "wires": sorted(set.intersection(*(set(value["wires"]) for value in values))),
            "server": next((rank for rank, value in enumerate(values) if value["serves"]), None),
        }

    def _missing(self, keys: Store) -> dict[str, Any]:
        present, absent = self._with_and_without(keys, "joined")
        if not absent:
            return _failure(
                f"the last ranks of the world of {self.size} came after "
                f"{self.timeout.total_seconds():g} s, when others had given up",
                where=self.origin,
                expected="all ranks within the timeout",
                fix="give more time: init_process_group(timeout=timedelta(minutes=30))",
            )
        ranks = ranks_text(absent)
        verb = "has" if len(absent) == 1 else "have"
        cards = [f"rank {rank}: {self._card_of(keys, rank)}" for rank in present[:8]]
        more = ["..."] if len(present) > 8 else []
        return _failure(
            f"{ranks} {verb} not joined the world of {self.size} within "
            f"{self.timeout.total_seconds():g} s",
            where=self.origin,
            expected=f"{self.size} ranks, all at the same address",
            found="\n".join([f"joined: {ranks_text(present)}", *cards, *more]),
            fix=f"look at the output of {ranks}: it may have failed before it came here; or give "
            "more time: init_process_group(timeout=timedelta(minutes=30))",
        )

    def _silent(self, keys: Store) -> dict[str, Any]:
        _, absent = self._with_and_without(keys, "confirmed")
        ranks = ranks_text(absent)
        cards = [f"rank {rank}: {self._card_of(keys, rank)}" for rank in absent[:8]]
        return _failure(
            f"{ranks} came to the world of {self.size}, and then fell silent",
            where=self.origin,
            expected=f"{self.size} ranks that live",
            found="\n".join(cards),
            fix=f"look at the output of {ranks}, and start the job again at a new address",
        )

    def _with_and_without(self, keys: Store, counter: str) -> tuple[list[int], list[int]]:
        """The ranks that were counted, and the others; asks nothing for those, who may be many."""
        count = min(read_number(keys, counter), self.size)
        names = [f"{counter}/{number}" for number in range(1, count + 1)]
        texts = [keys.get(name).decode() for name in names if keys.check([name])]
        present = {find_whole_number(text, most=self.size - 1) for text in texts}
        ranks = range(self.size)
        return [rank for rank in ranks if rank in present], [
            rank for rank in ranks if rank not in present
        ]

    def _disagreement(self, agreed: int) -> dict[str, Any]:
        process = "a process" if self.rank is None else f"rank {self.rank}"
        return _failure(
            "the ranks disagree about the size of the world",
            where=self.origin,
            expected="the same world_size on every rank",
            found=f"{process} ({self._card}): {self.size}; the first that came: {agreed}",
            fix="give every rank the same world_size (or WORLD_SIZE)",
        )


def lost_while_joining(origin: str, error: RuntimeError) -> RendezvousError:
    """The error of a rank that comes to the store, by ``origin``, and finds none that answers."""
    return RendezvousError(
        f"the store was lost while the ranks were joining: {first_line(error)}",
        where=f"{origin}; {my_card()}",
        expected="the process that serves the store (rank 0, as a rule) to live",
        fix="look at the output of rank 0, and start the job again",
    )


def _seen(value: dict[str, Any]) -> tuple[ProcessCard, dict[str, Any]]:
    """A rank's card, and what it says besides."""
    return ProcessCard.from_json(value), {
        "local_rank": None if value["local_rank"] is None else int(value["local_rank"]),
        "wires": [str(wire) for wire in value["wires"]],
        "serves": bool(value["serves"]),
    }


def _state(keys: Store, size: int) -> dict[str, Any]:
    """How a generation was closed."""

    def parse(value: dict[str, Any]) -> dict[str, Any]:
        kind, server = value["kind"], value.get("server")
        if kind == "stale":
            return {"kind": kind}
        if kind == "failed":
            summary, fields = str(value["summary"]), fields_among(value["fields"])
            return {"kind": kind, "summary": summary, "fields": fields}
        return {
            "kind": "complete",
            "hosts": [int(value["hosts"][rank]) for rank in range(size)],
            "local_ranks": [int(value["local_ranks"][rank]) for rank in range(size)],
            "wires": [str(wire) for wire in value["wires"]],
            "server": None if server is None else int(server),
        }

    return read_json(keys, "state", parse)


def _failure(summary: str, **fields: str) -> dict[str, Any]:
    return {"kind": "failed", "summary": summary, "fields": fields}

"""How the ranks of one world find each other in a store that may have served worlds before.

A store counts generations: ``open`` holds the number of the last, and the size of its world. In
each, every rank claims its number with its card and is counted. When all have come, each confirms
that it is still there; the last rank closes the generation as complete, and says on which hosts the
ranks are and which backends all of them can use. (Without the second step a world could begin with
the claim of a process that has died.) A generation that cannot become complete (a rank is missing
at the timeout, two processes claim one rank, ranks disagree about the size) is closed as failed,
and every rank in it raises the same error. What comes later begins the next generation, so that a
world can be made again and again at one address, and nothing of an earlier world is taken for its
own.

A job that crashed while its ranks met leaves an open generation with claims of processes that have
ended. A rank of the next job that finds such a claim closes the generation as stale, and all ranks
that joined it go on to the next. For example, ranks 0 and 1 of a job of 3 are killed::

    next job's rank 2   claims 2, is counted as the third, waits for ``state``
    next job's rank 0   finds rank 0 claimed by an ended process, writes ``state``: stale
    all ranks           meet in the next generation

An ended process is recognized on its own host only. Elsewhere the claim is a failure, and the job
after that begins in a new generation.

Keys of a generation, below its number: ``arrived``, ``process_info/RANK``, ``joined/...`` and
``confirmed/...``, which count heads; ``full``, ``gave up``, ``state``; the world's own keys lie
below ``world``. However many ranks there are, each makes as many requests.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from ..error_text import fields_among, first_line, ranks_text
from ..errors import RendezvousError
from ..runtime.deadlines import Deadline
from ..runtime.hosts import ProcessInfo, is_alive, my_process_info
from ..runtime.integers import from_runs, to_runs
from .arrival_counters import arrival_counter_of
from .stores import PrefixStore, Store
from .timeout_store import (
    TimeoutStore,
    await_key,
    find_value,
    parse_value,
    read_jsons,
    read_number,
    within,
)

SERVER = "rank {}, which serves the store,"
"""The name in messages of a rank whose process serves the store."""

_log = logging.getLogger("meshdist.waits")
NOTICE_S = 30.0
_TELLING_S = 5.0
"""How long the first rank that gives up may take to say so for all."""
_MOST_TRIES = 8  # generations that end while this process comes


@dataclass(frozen=True)
class Rendezvous:
    """A world in which every rank has joined.

    Args:
        generation: how many generations the store had before.
        store: a store for this world alone, on ``handle``.
        make_torch_store: returns the same keys on a connection of its own, for torch's classes,
            which use a store in threads of theirs.
        handle: makes the requests to the store. Keep it as long as the store: a PrefixStore does
            not keep alive a store that is written in Python.
        server: the rank whose process serves the store; None where no rank does.
        hosts: for each rank the number of its host, numbered as they first appear.
        local_rank: this process's number among the ranks of its host.
        backends: what all ranks said that they could use.
        origin: how the ranks met, for messages.
        leave: call it once, when this process has closed the world and all that used its store.
    """

    rank: int
    size: int
    generation: int
    store: Store
    make_torch_store: Callable[[], Store]
    handle: TimeoutStore
    server: int | None
    hosts: tuple[int, ...]
    local_rank: int
    backends: frozenset[str]
    origin: str
    leave: Callable[[], None] = lambda: None

    @property
    def local_size(self) -> int:
        """The number of ranks on this process's host."""
        return self.hosts.count(self.hosts[self.rank])


@dataclass
class RendezvousRound:
    """Attempt of this process to join a world of ``size`` ranks that meets in a store.

    Args:
        handle: makes the requests to what all ranks share.
        rank: this process's rank; None lets it follow the order of arrival.
        timeout: how long to wait for the others.
        origin: how the ranks came here, for messages.
        backends: the names of what this process could use to communicate.
        local_rank: this process's number on its host, where its launcher numbers them.
        is_unique: whether a launcher sees to it that no rank runs twice at once.
        prefix: what the keys of the attempt begin with.
        serves: whether this process serves the store, or is thought to.
    """

    handle: TimeoutStore
    rank: int | None
    size: int
    timeout: timedelta
    origin: str
    backends: Collection[str] = ()
    local_rank: int | None = None
    is_unique: bool = False
    prefix: str = "meshdist"
    serves: bool = False

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.timeout)
        self.process_info = my_process_info()
        self._init_arguments = ""
        self._heads = arrival_counter_of(tuple(range(self.size)), (0,) * self.size)
        self.store = PrefixStore(self.prefix, self.handle)

    def join(self) -> Rendezvous:
        """Return the world once all ranks joined; ranks that wait in vain raise the same error."""
        try:
            with within(self._deadline):
                while (joined := self.try_generation(generation := self._enter())) is None:
                    self._pass_over(generation)
        except RendezvousError:
            raise
        except RuntimeError as error:  # torch's store errors
            raise lost_while_joining(self.origin, error) from error
        return joined

    def _enter(self) -> int:
        """Return the open generation's number; raise if its first rank gave another world size."""
        held, init_arguments = b"", [0]
        for _ in range(_MOST_TRIES):
            opened = f"[{init_arguments[0]}, {self.size}]"
            held = self.store.compare_set("open", held.decode(), opened)
            init_arguments = parse_value("open", held, lambda it: [int(it[0]), *map(int, it[1:2])])
            if len(init_arguments) == 2:
                break
        else:
            raise RendezvousError(
                f"{_MOST_TRIES} worlds of the store have ended while this process came to join one",
                where=f"{self.origin}; {self.process_info}",
                expected="a world that waits for this process",
                found=f"worlds up to number {init_arguments[0]}, each of which other processes have closed",
                fix="end the processes that make worlds at this address again and again, or give "
                "this job another address, file or store",
            )
        generation, agreed = parse_value("open", held, lambda it: (int(it[0]), int(it[1])))
        self._init_arguments = held.decode()
        if agreed != self.size:
            generation_store = PrefixStore(f"{self.prefix}/{generation}", self.handle)
            is_stale = self._has_ended_claim(generation_store, agreed)
            outcome = {"kind": "stale"} if is_stale else self._disagreement(agreed)
            self._fail(generation_store, generation, outcome, agreed)
            return self._enter()
        return generation

    def _pass_over(self, generation: int) -> None:
        """Make the next generation the open generation, for the processes that come later."""
        self.store.compare_set("open", self._init_arguments, f"[{generation + 1}]")

    def try_generation(self, generation: int) -> Rendezvous | None:
        """Return the world, None if it is stale or closed; raise RendezvousError if it failed."""
        generation_store = PrefixStore(f"{self.prefix}/{generation}", self.handle)
        mine = self._claim(generation_store, generation)
        if mine is None:
            return None
        try:
            outcome = None
            _, is_last = self._heads.count(generation_store.add, "joined", mine)
            if is_last:
                generation_store.set("full", "1")
            if not is_last and not self._wait_for(generation_store, "full"):
                outcome = self._give_up(generation_store, self._missing)
            elif self._heads.count(generation_store.add, "confirmed", mine)[1]:
                outcome = self._complete(generation_store)
            elif not self._wait_for(generation_store, "state"):
                outcome = self._give_up(generation_store, self._silent)
            return self._conclude(generation_store, generation, mine, outcome)
        except KeyboardInterrupt:
            self._resolve(
                generation_store,
                _failure(f"rank {mine} was interrupted", where=str(self.process_info)),
            )
            self._pass_over(generation)
            raise

    def _claim(self, generation_store: Store, generation: int) -> int | None:
        """Claim a rank by this process's card; return the rank, or None in a closed generation."""
        about = {
            "local_rank": self.local_rank,
            "backends": sorted(self.backends),
            "serves": self.serves,
        }
        about["is_server"] = self.handle.is_served_here
        text = json.dumps({**self.process_info.to_json(), **about, "by": secrets.token_hex(8)})
        while True:
            rank = generation_store.add("arrived", 1) - 1 if self.rank is None else self.rank
            if rank >= self.size:
                if self._has_ended_claim(generation_store, self.size):
                    self._resolve(generation_store, {"kind": "stale"})
                elif not self._wait_for(generation_store, "state"):
                    self._raise(self._missing(generation_store))
                return None
            found = generation_store.compare_set(f"card/{rank}", "", text)
            if found == text.encode():
                return rank
            if self.rank is not None:
                break
        other = parse_value(f"card/{rank}", found, ProcessInfo.from_json)
        if generation_store.check(["state"]):
            return None
        if self.is_unique or is_alive(other) is False:
            # Left by a process that has ended: this generation can never be complete.
            self._resolve(generation_store, {"kind": "stale"})
            return None
        failure = _failure(
            f"rank {rank} was claimed by two processes",
            where=self.origin,
            expected=f"every rank from 0 to {self.size - 1} once",
            found=f"{other}; {self.process_info}",
            fix="give each process its own rank; or, if a job that has crashed used this "
            "store, start with a new address, file or store",
        )
        self._fail(generation_store, generation, failure, self.size)
        return None

    def _has_ended_claim(self, generation_store: Store, size: int) -> bool:
        """Return whether a rank below ``size`` is claimed by a process of this host that ended."""
        process_infos = (self._process_info_of(generation_store, rank) for rank in range(size))
        return any(
            process_info is not None and is_alive(process_info) is False
            for process_info in process_infos
        )

    def _wait_for(self, generation_store: Store, key: str) -> bool:
        """Wait for ``key``; log once which ranks are missing; return whether it was set in time."""
        notice = Deadline(NOTICE_S)

        def look() -> None:
            nonlocal notice
            if notice.is_over:
                notice = Deadline(float("inf"))
                # The first of the ranks that wait tells which others are missing.
                if key == "full" and generation_store.add("noticed", 1) == 1:
                    absent = ranks_text(self._absent(generation_store, "joined"))
                    limit_s = f"{self.timeout.total_seconds():g} s"
                    text = f"{absent} to join the world of {self.size}; the timeout is {limit_s}"
                    _log.warning("meshdist: the ranks have waited for %g s for %s", NOTICE_S, text)

        return await_key(generation_store, key, self._deadline, look)

    def _give_up(
        self, generation_store: Store, make_outcome: Callable[[Store], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the made outcome; None where another rank has written an outcome first."""
        is_told = generation_store.add("gave up", 1) > 1 and await_key(
            generation_store, "state", Deadline(_TELLING_S)
        )
        return None if is_told else make_outcome(generation_store)

    def _resolve(self, generation_store: Store, outcome: dict[str, Any]) -> None:
        """Close the generation with ``outcome``, unless another rank has done so."""
        text = json.dumps({**outcome, "by": secrets.token_hex(8)})
        if generation_store.compare_set("state", "", text) == text.encode():
            generation_store.set(
                "full", "1"
            )  # ranks that wait for the others look at the state now

    def _conclude(
        self, generation_store: Store, generation: int, rank: int, outcome: dict[str, Any] | None
    ) -> Rendezvous | None:
        if outcome is not None:
            self._resolve(generation_store, outcome)
        state = _state(generation_store, self.size)
        if outcome is not None or state["kind"] != "complete":
            self._pass_over(generation)
        if state["kind"] == "stale":
            return None
        self._raise(state)
        hosts = tuple(state["hosts"])
        below = f"{self.prefix}/{generation}/world"
        server = state["server"]
        local_rank = self.local_rank if state["is_numbered"] else None
        self.handle.client = f"rank {rank} of {self.size}"
        if server is not None:
            self.handle.server = SERVER.format(server)
        if state["served_by"] is not None:
            self.handle.watch(state["served_by"])
        return Rendezvous(
            rank,
            self.size,
            generation,
            PrefixStore(below, self.handle),
            lambda: PrefixStore(below, self.handle.raw_clone()),
            self.handle,
            server,
            hosts,
            hosts[:rank].count(hosts[rank]) if local_rank is None else local_rank,
            frozenset(state["backends"]),
            self.origin,
        )

    def _fail(
        self, generation_store: Store, generation: int, failure: dict[str, Any], size: int
    ) -> None:
        """Close an open generation with ``failure``; raise the error that closed it, if any did."""
        self._resolve(generation_store, failure)
        self._pass_over(generation)
        self._raise(_state(generation_store, size))

    def _raise(self, state: dict[str, Any]) -> None:
        if state["kind"] == "failed":
            raise RendezvousError(state["summary"], **state["fields"])

    def _process_info_of(self, generation_store: Store, rank: int) -> ProcessInfo | None:
        value = find_value(generation_store, f"card/{rank}")
        if value is None:
            return None
        return parse_value(f"card/{rank}", value, ProcessInfo.from_json)

    def _complete(self, generation_store: Store) -> dict[str, Any]:
        """Return the world's facts from every rank's card, or "stale" if a process has ended."""
        seen = read_jsons(
            generation_store, [f"card/{rank}" for rank in range(self.size)], _parse_process_info
        )
        process_infos = [process_info for process_info, _ in seen]
        values = [value for _, value in seen]
        if any(is_alive(process_info) is False for process_info in process_infos):
            return {"kind": "stale"}
        numbers: dict[str, int] = {}
        hosts = [
            numbers.setdefault(process_info.host, len(numbers)) for process_info in process_infos
        ]
        local_ranks = [value["local_rank"] for value in values]
        places = set(zip(hosts, local_ranks, strict=True))
        served_by = next(
            (process_info.to_json() for process_info, value in seen if value["is_server"]), None
        )
        return {
            "kind": "complete",
            "hosts": to_runs(hosts),
            # Not every launcher numbers them, or several launchers of one host do, each from 0.
            "is_numbered": None not in local_ranks and len(places) == self.size,
            "backends": sorted(set.intersection(*(set(value["backends"]) for value in values))),
            "server": next((rank for rank, value in enumerate(values) if value["serves"]), None),
            "served_by": served_by,
        }

    def _missing(self, generation_store: Store) -> dict[str, Any]:
        absent = self._absent(generation_store, "joined")
        present = sorted(set(range(self.size)).difference(absent))
        if not absent:
            found = {rank: self._process_info_of(generation_store, rank) for rank in present}
            if ended := [
                rank
                for rank, process_info in found.items()
                if process_info and is_alive(process_info) is False
            ]:
                return self._silent(
                    generation_store, ended
                )  # they were counted, and could not say so
            return _failure(
                f"the last ranks of the world of {self.size} came after "
                f"{self.timeout.total_seconds():g} s, when others had given up",
                where=self.origin,
                expected="all ranks within the timeout",
                fix="give more time: init_process_group(timeout=timedelta(minutes=30))",
            )
        ranks = ranks_text(absent)
        operation = "has" if len(absent) == 1 else "have"
        process_infos = [
            f"rank {rank}: {self._process_info_of(generation_store, rank)}" for rank in present[:8]
        ]
        more = ["..."] if len(present) > 8 else []
        return _failure(
            f"{ranks} {operation} not joined the world of {self.size} within "
            f"{self.timeout.total_seconds():g} s",
            where=self.origin,
            expected=f"{self.size} ranks, all at the same address",
            found="\n".join([f"joined: {ranks_text(present)}", *process_infos, *more]),
            fix=f"look at the output of {ranks}: it may have failed before it came here; or give "
            "more time: init_process_group(timeout=timedelta(minutes=30))",
        )

    def _silent(self, generation_store: Store, absent: list[int] | None = None) -> dict[str, Any]:
        absent = absent or self._absent(generation_store, "confirmed")
        if not absent:  # the last rank has ended before it told the others, maybe on another host
            found = {
                rank: self._process_info_of(generation_store, rank) for rank in range(self.size)
            }
            absent = [
                rank
                for rank, process_info in found.items()
                if not (process_info and is_alive(process_info))
            ]
        ranks = ranks_text(absent)
        process_infos = [
            f"rank {rank}: {self._process_info_of(generation_store, rank)}" for rank in absent[:8]
        ]
        return _failure(
            f"{ranks} came to the world of {self.size}, and then fell silent",
            where=self.origin,
            expected=f"{self.size} ranks that live",
            found="\n".join(process_infos),
            fix=f"look at the output of {ranks}, and start the job again at a new address",
        )

    def _absent(self, generation_store: Store, counter: str) -> list[int]:
        return self._heads.find_absent(partial(read_number, generation_store), [counter])

    def _disagreement(self, agreed: int) -> dict[str, Any]:
        process = "a process" if self.rank is None else f"rank {self.rank}"
        return _failure(
            "the ranks disagree about the size of the world",
            where=self.origin,
            expected="the same world_size on every rank",
            found=f"{process} ({self.process_info}): {self.size}; the first that came: {agreed}",
            fix="give every rank the same world_size (WORLD_SIZE; -n of a launcher on each host)",
        )


def lost_while_joining(origin: str, error: RuntimeError) -> RendezvousError:
    """Return the error of a store lost while ranks join; ``origin`` says by what they had met."""
    return RendezvousError(
        f"the store was lost while the ranks were joining: {first_line(error)}",
        where=f"{origin}; {my_process_info()}",
        expected="the process that serves the store (rank 0, as a rule) to live",
        fix="look at the output of rank 0, and start the job again",
    )


def _parse_process_info(value: dict[str, Any]) -> tuple[ProcessInfo, dict[str, Any]]:
    """Return a rank's process card and the facts that it stored beside the card."""
    return ProcessInfo.from_json(value), {
        "local_rank": None if value["local_rank"] is None else int(value["local_rank"]),
        "backends": [str(backend) for backend in value["backends"]],
        "serves": bool(value["serves"]),
        "is_server": bool(value["is_server"]),
    }


def _state(generation_store: Store, size: int) -> dict[str, Any]:
    """Return a closed generation's outcome, of ``size`` ranks; raise StoreError if malformed."""

    def parse(value: dict[str, Any]) -> dict[str, Any]:
        kind, server, served_by = value["kind"], value.get("server"), value.get("served_by")
        if kind == "stale":
            return {"kind": kind}
        if kind == "failed":
            summary, fields = str(value["summary"]), fields_among(value["fields"])
            return {"kind": kind, "summary": summary, "fields": fields}
        if len(hosts := from_runs(value["hosts"], size)) != size:
            raise ValueError(f"not {size} numbers")
        return {
            "kind": "complete",
            "hosts": hosts,
            "is_numbered": bool(value["is_numbered"]),
            "backends": [str(backend) for backend in value["backends"]],
            "server": None if server is None else int(server),
            "served_by": served_by and ProcessInfo.from_json(served_by),
        }

    return parse_value("state", find_value(generation_store, "state") or b"", parse)


def _failure(summary: str, **fields: str) -> dict[str, Any]:
    return {"kind": "failed", "summary": summary, "fields": fields}

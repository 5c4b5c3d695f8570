"""Run the rendezvous in which the ranks of one world find each other in a store.

A store may host several worlds in turn, so it counts rounds: ``open`` holds the current
round's number and world size. Every rank claims its number with its process info and is
counted. When all have arrived, each confirms that it still runs, so that no world starts with a
dead process's claim. The last rank to confirm closes the round as complete, and writes the
ranks' hosts and common backends.

A round fails if a rank is missing at the timeout, two processes claim one rank, or world sizes
differ. It is closed as failed, and every rank in it raises the same error. Later ranks open the
next round and never read an earlier world's keys.

A job that crashes during the rendezvous leaves an open round. A rank of the next job that
finds a dead process's claim closes it as stale, and all its ranks continue in the next round.
For example, ranks 0 and 1 of a job of 3 are killed::

    next job's rank 2   claims 2, is counted as the third, waits for ``state``
    next job's rank 0   finds rank 0 claimed by a dead process, writes ``state``: stale
    all ranks           meet in the next round

A dead process is only recognized on its own host. On another host the claim is a failure, and the
next job opens a new round.

Keys below a round's number: ``arrived``, ``card/RANK``, the arrival counters ``joined/...``
and ``confirmed/...``, ``full``, ``gave up`` and ``state``. The world's own keys are below
``world``. A rank's number of requests does not depend on the number of ranks.
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
from .stores import NamedPrefixStore, PrefixStore, Store
from .timeout_store import (
    TimeoutStore,
    await_key,
    find_value,
    parse_value,
    read_jsons,
    read_number,
    within,
)

SERVER = "rank {}, which hosts the store,"
"""The name in messages of the rank whose process hosts the store."""

_log = logging.getLogger("meshdist.waits")
WARN_AFTER_S = 30.0
_TELLING_S = 5.0
"""How long the first rank that gives up may take to write the outcome for all ranks."""
_MOST_TRIES = 8  # rounds that may end while this process joins


@dataclass(frozen=True)
class Rendezvous:
    """Result of a completed rendezvous.

    Args:
        round_number: the number of earlier rounds in the store.
        store: a store with this world's keys only, on ``handle``.
        make_torch_store: opens the same store on a separate connection, for torch's threads.
        handle: makes the requests. Keep a reference as long as the store is used: a PrefixStore
            does not keep a store written in Python alive.
        server: the rank that hosts the store; None if no rank does.
        hosts: each rank's host number, in the order of first appearance.
        backends: the backends that all ranks can use.
        leave: call it once, after closing the world and everything that uses its store.
    """

    rank: int
    size: int
    round_number: int
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
        return self.hosts.count(self.hosts[self.rank])


@dataclass
class RendezvousRound:
    """Rendezvous of this process with ``size`` ranks in a store.

    Args:
        rank: None to assign ranks in the order of arrival.
        backends: usable on this process.
        local_rank: the rank within its host, if the launcher sets it.
        is_unique: whether the launcher guarantees that no rank runs twice at the same time.
        hosts_store: whether this process hosts the store, or is assumed to.
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
    hosts_store: bool = False

    def __post_init__(self) -> None:
        self._deadline = Deadline(self.timeout)
        self.process_info = my_process_info()
        self._init_arguments = ""
        self._heads = arrival_counter_of(tuple(range(self.size)), (0,) * self.size)
        self.store = PrefixStore(self.prefix, self.handle)

    def join(self) -> Rendezvous:
        """Return the world once all ranks have joined; if it fails, all raise the same error."""
        try:
            with within(self._deadline):
                while (joined := self.try_round(round_number := self._enter())) is None:
                    self._pass_over(round_number)
        except RendezvousError:
            raise
        except RuntimeError as error:  # an error of torch's store
            raise lost_while_joining(self.origin, error) from error
        return joined

    def _enter(self) -> int:
        """Open a round if none is open; return its number; raise if its world size differs."""
        held, init_arguments = b"", [0]
        for _ in range(_MOST_TRIES):
            opened = f"[{init_arguments[0]}, {self.size}]"
            held = self.store.compare_set("open", held.decode(), opened)
            init_arguments = parse_value("open", held, lambda it: [int(it[0]), *map(int, it[1:2])])
            if len(init_arguments) == 2:
                break
        else:
            raise RendezvousError(
                f"cannot join: {_MOST_TRIES} worlds of the store ended while this process joined",
                where=f"{self.origin}; {self.process_info}",
                expected="a world that waits for this process",
                found=f"worlds up to number {init_arguments[0]}, all closed by other processes",
                fix="stop the processes that initialize repeatedly at this address, or use another "
                "address, file or store for this job",
            )
        round_number, agreed = parse_value("open", held, lambda it: (int(it[0]), int(it[1])))
        self._init_arguments = held.decode()
        if agreed != self.size:
            round_store = PrefixStore(f"{self.prefix}/{round_number}", self.handle)
            is_stale = self._has_ended_claim(round_store, agreed)
            outcome = {"kind": "stale"} if is_stale else self._disagreement(agreed)
            self._fail(round_store, round_number, outcome, agreed)
            return self._enter()
        return round_number

    def _pass_over(self, round_number: int) -> None:
        """Open the next round, for later processes."""
        self.store.compare_set("open", self._init_arguments, f"[{round_number + 1}]")

    def try_round(self, round_number: int) -> Rendezvous | None:
        """Return the world, or None if the round is stale or closed; raise if it failed."""
        round_store = PrefixStore(f"{self.prefix}/{round_number}", self.handle)
        mine = self._claim(round_store, round_number)
        if mine is None:
            return None
        try:
            outcome = None
            _, is_last = self._heads.count(round_store.add, "joined", mine)
            if is_last:
                round_store.set("full", "1")
            if not is_last and not self._wait_for(round_store, "full"):
                outcome = self._fail_missing(round_store, self._missing)
            elif self._heads.count(round_store.add, "confirmed", mine)[1]:
                outcome = self._complete(round_store)
            elif not self._wait_for(round_store, "state"):
                outcome = self._fail_missing(round_store, self._silent)
            return self._conclude(round_store, round_number, mine, outcome)
        except KeyboardInterrupt:
            self._resolve(
                round_store,
                _failure(f"rank {mine} was interrupted", where=str(self.process_info)),
            )
            self._pass_over(round_number)
            raise

    def _claim(self, round_store: Store, round_number: int) -> int | None:
        """Claim a rank with this process's info; return the rank, None in a closed round."""
        about = {
            "local_rank": self.local_rank,
            "backends": sorted(self.backends),
            "serves": self.hosts_store,
        }
        about["is_server"] = self.handle.is_hosted_here
        text = json.dumps({**self.process_info.to_json(), **about, "by": secrets.token_hex(8)})
        while True:
            rank = round_store.add("arrived", 1) - 1 if self.rank is None else self.rank
            if rank >= self.size:
                if self._has_ended_claim(round_store, self.size):
                    self._resolve(round_store, {"kind": "stale"})
                elif not self._wait_for(round_store, "state"):
                    self._raise(self._missing(round_store))
                return None
            found = round_store.compare_set(f"card/{rank}", "", text)
            if found == text.encode():
                return rank
            if self.rank is not None:
                break
        other = parse_value(f"card/{rank}", found, ProcessInfo.from_json)
        if round_store.check(["state"]):
            return None
        if self.is_unique or is_alive(other) is False:
            # The claim is of a dead process, so this round can never be complete.
            self._resolve(round_store, {"kind": "stale"})
            return None
        failure = _failure(
            f"rank {rank} was claimed by two processes",
            where=self.origin,
            expected=f"one process for each rank from 0 to {self.size - 1}",
            found=f"{other}; {self.process_info}",
            fix="pass a different rank in each process; or, if a crashed job used this store, use "
            "a new address, file or store",
        )
        self._fail(round_store, round_number, failure, self.size)
        return None

    def _has_ended_claim(self, round_store: Store, size: int) -> bool:
        """Return whether a dead process of this host has claimed a rank below ``size``."""
        process_infos = (self._process_info_of(round_store, rank) for rank in range(size))
        return any(
            process_info is not None and is_alive(process_info) is False
            for process_info in process_infos
        )

    def _wait_for(self, round_store: Store, key: str) -> bool:
        """Wait for ``key``, logging missing ranks once; return whether it was set in time."""
        stall_warning = Deadline(WARN_AFTER_S)

        def look() -> None:
            nonlocal stall_warning
            if stall_warning.is_over:
                stall_warning = Deadline(float("inf"))
                # Only the first waiting rank logs which ranks are missing.
                if key == "full" and round_store.add("noticed", 1) == 1:
                    absent = ranks_text(self._absent(round_store, "joined"))
                    limit_s = f"{self.timeout.total_seconds():g} s"
                    text = f"{absent} to join the world of {self.size}; the timeout is {limit_s}"
                    _log.warning(
                        "meshdist: the ranks have waited for %g s for %s", WARN_AFTER_S, text
                    )

        return await_key(round_store, key, self._deadline, look)

    def _fail_missing(
        self, round_store: Store, make_outcome: Callable[[Store], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the failure's outcome, or None if another rank has written an outcome."""
        is_written = round_store.add("gave up", 1) > 1 and await_key(
            round_store, "state", Deadline(_TELLING_S)
        )
        return None if is_written else make_outcome(round_store)

    def _resolve(self, round_store: Store, outcome: dict[str, Any]) -> None:
        """Close the round with ``outcome`` unless another rank has closed it."""
        text = json.dumps({**outcome, "by": secrets.token_hex(8)})
        if round_store.compare_set("state", "", text) == text.encode():
            round_store.set("full", "1")  # wakes waiting ranks, which then read the state

    def _conclude(
        self, round_store: Store, round_number: int, rank: int, outcome: dict[str, Any] | None
    ) -> Rendezvous | None:
        if outcome is not None:
            self._resolve(round_store, outcome)
        state = _state(round_store, self.size)
        if outcome is not None or state["kind"] != "complete":
            self._pass_over(round_number)
        if state["kind"] == "stale":
            return None
        self._raise(state)
        hosts = tuple(state["hosts"])
        below = f"{self.prefix}/{round_number}/world"
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
            round_number,
            NamedPrefixStore(below, self.handle),  # a thread may use it while the world closes
            lambda: PrefixStore(below, self.handle.raw_clone()),
            self.handle,
            server,
            hosts,
            hosts[:rank].count(hosts[rank]) if local_rank is None else local_rank,
            frozenset(state["backends"]),
            self.origin,
        )

    def _fail(
        self, round_store: Store, round_number: int, failure: dict[str, Any], size: int
    ) -> None:
        """Close an open round with ``failure``; raise the error that closed it, if any."""
        self._resolve(round_store, failure)
        self._pass_over(round_number)
        self._raise(_state(round_store, size))

    def _raise(self, state: dict[str, Any]) -> None:
        if state["kind"] == "failed":
            raise RendezvousError(state["summary"], **state["fields"])

    def _process_info_of(self, round_store: Store, rank: int) -> ProcessInfo | None:
        value = find_value(round_store, f"card/{rank}")
        if value is None:
            return None
        return parse_value(f"card/{rank}", value, ProcessInfo.from_json)

    def _complete(self, round_store: Store) -> dict[str, Any]:
        """Return the round's outcome from all process infos; "stale" if a process has died."""
        seen = read_jsons(
            round_store, [f"card/{rank}" for rank in range(self.size)], _parse_process_info
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
        host_ranks = set(zip(hosts, local_ranks, strict=True))
        host_process = next(
            (process_info.to_json() for process_info, value in seen if value["is_server"]), None
        )
        return {
            "kind": "complete",
            "hosts": to_runs(hosts),
            # Some launchers set no local rank, and several launchers on one host all start at 0.
            "is_numbered": None not in local_ranks and len(host_ranks) == self.size,
            "backends": sorted(set.intersection(*(set(value["backends"]) for value in values))),
            "server": next((rank for rank, value in enumerate(values) if value["serves"]), None),
            "served_by": host_process,
        }

    def _missing(self, round_store: Store) -> dict[str, Any]:
        absent = self._absent(round_store, "joined")
        present = sorted(set(range(self.size)).difference(absent))
        if not absent:
            found = {rank: self._process_info_of(round_store, rank) for rank in present}
            if ended := [
                rank
                for rank, process_info in found.items()
                if process_info and is_alive(process_info) is False
            ]:
                # They were counted, but ended before they could confirm.
                return self._silent(round_store, ended)
            return _failure(
                f"the last ranks joined the world of {self.size} after the timeout of "
                f"{self.timeout.total_seconds():g} s, when other ranks had given up",
                where=self.origin,
                expected="all ranks within the timeout",
                fix="use a longer timeout: init_process_group(timeout=timedelta(minutes=30))",
            )
        ranks = ranks_text(absent)
        verb = "has" if len(absent) == 1 else "have"
        process_infos = [
            f"rank {rank}: {self._process_info_of(round_store, rank)}" for rank in present[:8]
        ]
        more = ["..."] if len(present) > 8 else []
        return _failure(
            f"{ranks} {verb} not joined the world of {self.size} within "
            f"{self.timeout.total_seconds():g} s",
            where=self.origin,
            expected=f"{self.size} ranks, all at the same address",
            found="\n".join([f"joined: {ranks_text(present)}", *process_infos, *more]),
            fix=f"check the output of {ranks} for an earlier failure, or use a longer timeout: "
            "init_process_group(timeout=timedelta(minutes=30))",
        )

    def _silent(self, round_store: Store, absent: list[int] | None = None) -> dict[str, Any]:
        absent = absent or self._absent(round_store, "confirmed")
        if not absent:  # the last rank ended before it wrote the state, maybe on another host
            found = {rank: self._process_info_of(round_store, rank) for rank in range(self.size)}
            absent = [
                rank
                for rank, process_info in found.items()
                if not (process_info and is_alive(process_info))
            ]
        ranks = ranks_text(absent)
        process_infos = [
            f"rank {rank}: {self._process_info_of(round_store, rank)}" for rank in absent[:8]
        ]
        return _failure(
            f"{ranks} joined the world of {self.size} and then stopped responding",
            where=self.origin,
            expected=f"{self.size} running ranks",
            found="\n".join(process_infos),
            fix=f"check the output of {ranks} for a failure, and restart the job at a new address",
        )

    def _absent(self, round_store: Store, counter: str) -> list[int]:
        return self._heads.find_absent(partial(read_number, round_store), [counter])

    def _disagreement(self, agreed: int) -> dict[str, Any]:
        process = "a process" if self.rank is None else f"rank {self.rank}"
        return _failure(
            "mismatch of world_size between the ranks",
            where=self.origin,
            expected="the same world_size on every rank",
            found=f"{process} ({self.process_info}): {self.size}; the first process: {agreed}",
            fix="pass the same world_size on every rank (WORLD_SIZE, or -n of each launcher)",
        )


def lost_while_joining(origin: str, error: RuntimeError) -> RendezvousError:
    """Return the error for a store lost while ranks joined."""
    return RendezvousError(
        f"the store was lost while the ranks were joining: {first_line(error)}",
        where=f"{origin}; {my_process_info()}",
        expected="the process that hosts the store (usually rank 0) to keep running",
        fix="check the output of rank 0 for a failure, and restart the job",
    )


def _parse_process_info(value: dict[str, Any]) -> tuple[ProcessInfo, dict[str, Any]]:
    """Return a rank's process info and the facts stored with it."""
    return ProcessInfo.from_json(value), {
        "local_rank": None if value["local_rank"] is None else int(value["local_rank"]),
        "backends": [str(backend) for backend in value["backends"]],
        "serves": bool(value["serves"]),
        "is_server": bool(value["is_server"]),
    }


def _state(round_store: Store, size: int) -> dict[str, Any]:
    """Return a closed round's outcome; raise if it is malformed."""

    def parse(value: dict[str, Any]) -> dict[str, Any]:
        kind, server, host_process = value["kind"], value.get("server"), value.get("served_by")
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
            "served_by": host_process and ProcessInfo.from_json(host_process),
        }

    return parse_value("state", find_value(round_store, "state") or b"", parse)


def _failure(summary: str, **fields: str) -> dict[str, Any]:
    return {"kind": "failed", "summary": summary, "fields": fields}

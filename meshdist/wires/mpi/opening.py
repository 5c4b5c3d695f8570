"""How the members of a group over MPI come together: through the store, then MPI itself.

A watchdog ends this process where it stays in a blocking call of MPI's for longer than the call may
take. A member makes such a call once all have come, so that it takes as long as the data do; but
where one of them is stopped inside, the others stay there, and nothing can end MPI's call. So a
thread looks after those that stay, prints the error that the call cannot raise, and ends the
process: then mpiexec ends the job, as where any rank fails.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ...bootstrap.bounded_store import read_json, read_jsons
from ...bootstrap.mpi_library import find_functions, load_mpi, start_mpi
from ...checking.shared_words import WordsAddress, find_view
from ...error_text import fields_among, first_line, ranks_text
from ...errors import BackendError, CollectiveTimeoutError, StoreError
from ...runtime.deadlines import Deadline, Timer, wait_until
from ...runtime.hosts import ProcessCard, is_stopped, my_card, num_forks
from ..communicator import Explain
from ..core import core
from ..operations import WireFailure, WireTimeout
from ..registry import Opening
from .arrivals import Arrivals, milliseconds, words_of_process
from .connection import MpiConnection, MpiOperation, left_key, report_dead_ranks_at_the_end
from .datatypes import native_reductions

if TYPE_CHECKING:
    from ..native import FastPath

FindCards = Callable[[], Sequence[ProcessCard | None]]

_PERIOD_S = 0.25

_watched: dict[Arrivals, Explain] = {}
"""The function that makes the error of a call, for each group of this process."""


def watch(arrivals: Arrivals, explain: Explain) -> None:
    """Let a watchdog thread end this process if a blocking call of the group is overdue.

    Args:
        explain: makes the error that is printed then.
    """
    _watched[arrivals] = explain
    _start(num_forks())  # threads do not follow into a forked child


def forget(arrivals: Arrivals) -> None:
    """Stop the watchdog thread's looks at ``arrivals``, whose group ends."""
    _watched.pop(arrivals, None)


@cache
def _start(_: int) -> None:
    threading.Thread(target=_look_after_all, name="meshdist-mpi-watchdog", daemon=True).start()


def _look_after_all() -> None:
    since: dict[Arrivals, tuple[int, Deadline]] = {}
    while True:
        time.sleep(_PERIOD_S)
        blocked = {group: group.find_blocked_collective() for group in tuple(_watched)}
        inside = {group: found for group, found in blocked.items() if found is not None}
        since = {
            group: since[group]
            if group in since and since[group][0] == number
            else (number, Deadline(seconds))
            for group, (number, seconds) in inside.items()
        }
        for arrivals, (_, deadline) in since.items():
            if deadline.is_over:
                _end_process(arrivals, inside[arrivals])


def _end_process(arrivals: Arrivals, blocked: tuple[int, float]) -> None:
    """Explain why a collective is not finished; end the process if it is still ``blocked``."""
    explain = _watched.get(arrivals)
    if explain is None:
        return
    error = explain(WireTimeout(f"not finished after {blocked[1]:g} s"), None)
    if arrivals.find_blocked_collective() != blocked:
        return  # the group is broken, and the next verb on it says so
    _end_with(error, arrivals.link.opening)


@contextmanager
def limited(opening: Opening, find_cards: FindCards) -> Iterator[None]:
    """End the process if MPI's calls in the context, which open a group, take too long.

    Args:
        find_cards: returns each member's process card, None if it has not come, for the error.
    """
    timer = Timer(opening.timeout, partial(_end_opening, opening, find_cards))
    try:
        yield
    finally:
        timer.cancel()


def _end_opening(opening: Opening, find_cards: FindCards) -> None:
    silent = []
    try:
        for rank, card in zip(opening.ranks, find_cards(), strict=True):
            if card is None:
                silent.append(f"rank {rank} has not come")
            elif is_stopped(card):
                silent.append(f"rank {rank}, {card}, is stopped")
    except RuntimeError as lost:  # of the store: its text names the process that serves it
        silent.append(first_line(lost))
    error = CollectiveTimeoutError(
        f"{opening.name} was not opened on wire 'mpi' within {opening.timeout.total_seconds():g} s",
        where=f"rank {opening.ranks[opening.rank]}, among {ranks_text(opening.ranks)}",
        expected="every member to make the calls of MPI's that open it",
        found="\n".join(silent) or "MPI does not say which rank is missing",
        fix="look at what keeps these ranks",
    )
    _end_with(error, opening)


def _end_with(error: BaseException, opening: Opening) -> None:
    print(
        f"meshdist: rank {opening.ranks[opening.rank]} ends: nothing else can end the call of "
        f"MPI's that it is in, and under MPI the other ranks end with it\n"
        f"{type(error).__name__}: {error}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)


_NUM_TAGS = 1 << 15  # every MPI has so many
_openings = itertools.count()


class _Region:
    """Region of this process's shared words, for this member of a group that opens."""

    def __init__(self, opening: Opening) -> None:
        self.words: memoryview | None = None
        self._opening = opening
        self._key = secrets.randbits(62) | 1
        self._shared_words = words_of_process() if opening.is_one_host else None

    def reserve(self) -> dict[str, Any]:
        """Reserve the region; return its key and address for others to read, {} without room."""
        for region in tuple(_closed):
            region.release_after_all()
        if self._shared_words is None:
            return {}
        try:
            self.words = self._shared_words.reserve(self._key, Arrivals.num_words)
        except MemoryError:
            return {}
        return {"words": {"key": self._key, "address": self._shared_words.address}}

    def release(self) -> None:
        """Free the region in this process's shared words."""
        if self._shared_words is not None and self.words is not None:
            self.words = None
            self._shared_words.release(self._key)

    def release_after_all(self) -> None:
        """Free the region if every member has closed the group; else list it, to free it later."""
        keys = [left_key(member) for member in range(len(self._opening.ranks))]
        try:
            is_over = self._opening.store.check(keys)
        except RuntimeError:  # the store is lost, and with it the world
            is_over = True
        if is_over:
            _closed.discard(self)
            self.release()
        else:
            _closed.add(self)


_closed: set[_Region] = set()
"""Regions of groups that this process has closed, and another member has not."""


def open_link(opening: Opening) -> tuple[MpiConnection, Arrivals | None]:
    """Open a group on MPI by its members' calls alone; Arrivals is None without shared memory."""
    mine: dict[str, Any] = {"card": my_card().to_json()}
    region = _Region(opening)
    try:
        MPI = _started(opening)
        place = mine["rank"] = MPI.COMM_WORLD.Get_rank()
        mine["size"] = MPI.COMM_WORLD.Get_size()
        # Two groups with a common member may open at the same time, in two threads: their tags
        # are equal once in many thousands of times.
        mine["tag"] = hash((place, next(_openings))) % _NUM_TAGS
        mine.update(region.reserve())
    except BackendError as error:
        fields = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
        mine["problem"] = {"summary": error.summary, **fields}
    except (ImportError, RuntimeError) as error:  # mpi4py finds no library; MPI does not start
        mine["problem"] = {
            "summary": "MPI cannot be used for this group",
            "where": f"rank {opening.ranks[opening.rank]}, {opening.name}",
            "found": f"{type(error).__name__}: {error}",
            "fix": "see what `meshdist doctor` says of MPI",
        }
    try:
        members = _exchanged(opening, mine)
        _check(opening, members)
    except BaseException:
        region.release()
        raise
    everyone = MPI.COMM_WORLD
    all_ranks = everyone.Get_group()
    group = all_ranks.Incl([member["rank"] for member in members])
    cards = [member["card"] for member in members]
    with limited(opening, lambda: cards):
        comm = everyone.Create_group(group, members[0]["tag"])
    group.Free()
    all_ranks.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    link = MpiConnection(MPI, comm, opening, cards, region.release_after_all)
    report_dead_ranks_at_the_end()
    words, others = region.words, _words_of_others(opening, members)
    # On a buffer: mpi4py's calls for objects can hold the GIL while they wait for other ranks, and
    # another thread of this process, which opens a group with them, waits for the GIL.
    are_seen = bytearray([words is not None and others is not None])
    with limited(opening, lambda: cards):
        comm.Allreduce(MPI.IN_PLACE, [are_seen, MPI.BYTE], op=MPI.BAND)
    if words is None or others is None or not are_seen[0]:
        return link, None
    return link, Arrivals(link, words, others)


def _started(opening: Opening) -> Any:
    """Return ``mpi4py.MPI``, started together with all ranks of its world, within the timeout."""
    if load_mpi().Is_initialized():
        return start_mpi()
    store, keys = opening.store, [f"mpi starts/{member}" for member in range(len(opening.ranks))]
    store.set(keys[opening.rank], json.dumps(my_card().to_json()))

    def cards_so_far() -> list[ProcessCard | None]:
        return [
            read_json(store, key, ProcessCard.from_json) if store.check([key]) else None
            for key in keys
        ]

    with limited(opening, cards_so_far):
        return start_mpi()


def _exchanged(opening: Opening, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Store this member's entry ``mine``; return the entries of all members in group order."""
    store = opening.store
    store.set(f"mpi/{opening.rank}", json.dumps(mine))
    keys = [f"mpi/{member}" for member in range(len(opening.ranks))]
    if not wait_until(lambda: store.check(keys), Deadline(opening.timeout), opening.check_present):
        raise WireTimeout("a member did not come to open its connection")
    try:
        return read_jsons(store, keys, parse_member)
    except StoreError as junk:
        raise WireFailure(f"{junk.summary}: {junk.found}") from None


def parse_member(value: Any) -> dict[str, Any]:
    """Return a member's entry, read from JSON, as checked values; raise if it is malformed."""
    found: dict[str, Any] = {"card": ProcessCard.from_json(value["card"])}
    if "problem" in value:
        summary = str(value["problem"]["summary"])
        found["problem"] = {"summary": summary, **fields_among(value["problem"])}
        return found
    found["rank"], found["size"] = int(value["rank"]), int(value["size"])
    found["tag"] = int(value["tag"]) % _NUM_TAGS
    if "words" in value:
        key, address = value["words"]["key"], WordsAddress(*map(int, value["words"]["address"]))
        found["words"] = {"key": int(key), "address": address}
    return found


def _check(opening: Opening, members: Sequence[dict[str, Any]]) -> None:
    for member in members:
        if "problem" in member:
            raise BackendError(**member["problem"])
    places, sizes = {member["rank"] for member in members}, {member["size"] for member in members}
    are_in_one = len(sizes) == 1 and all(0 <= place < min(sizes) for place in places)
    if len(places) < len(members) or not are_in_one:
        raise BackendError(
            "the members of this group are not in one world of MPI",
            where=f"rank {opening.ranks[opening.rank]}, {opening.name}",
            expected="processes that one mpiexec has started",
            found=f"{len(members)} processes, with {len(places)} rank(s) of MPI's among them, "
            f"in worlds of {', '.join(map(str, sorted(sizes)))} rank(s)",
            fix="mpiexec -n 4 python script.py, or `meshdist run --launcher mpi -n 4 script.py`",
        )


def _words_of_others(
    opening: Opening, members: Sequence[dict[str, Any]]
) -> list[memoryview] | None:
    """Return the other members' arrival words; None if this process cannot see a member's."""
    found = []
    for place, member in enumerate(members):
        if place == opening.rank:
            continue
        view = find_view(member["words"]["address"]) if "words" in member else None
        words = None if view is None else view.find(member["words"]["key"], Arrivals.num_words)
        if words is None:
            return None
        found.append(words)
    return found


def make_fast_path(
    link: MpiConnection,
    arrivals: Arrivals,
    entry: Any,
    explain: Explain,
    timeout: timedelta,
    *,
    largest_tag: int,
    most_bytes: int,
    works: tuple[Any, ...],
) -> FastPath | None:
    """Return the native object for plain calls; None where MPI's functions are not found.

    Args:
        entry, explain, timeout, works: as ``Communicator.fast_path`` takes them.
        largest_tag: the largest tag that it takes.
        most_bytes: the most that a call may move.
    """
    MPI, failing = link.MPI, link.MPI.Exception
    functions = _find_functions(MPI, link.comm)
    if functions is None:
        return None

    def explained(error: BaseException, note: int | None, num_bytes: int | None) -> BaseException:
        known = link.failure(error, num_bytes) if isinstance(error, failing) else error
        return explain(known, note) if isinstance(known, WireFailure) else known

    link.flights = core.MpiFlights(functions, link.comm.size)
    runner = core.MpiRunner(
        functions,
        link.flights,
        arrivals.for_core(),
        arrivals=arrivals,
        timeout=timeout,
        link=link,
        finish_message=partial(_finish, link, timeout),
        explain=explained,
        error=failing,
        rank=link.comm.rank,
        largest_tag=largest_tag,
        most_bytes=most_bytes,
        limit_ms=milliseconds(timeout),
        spin_s=link.spin_s,
    )
    reductions = native_reductions(MPI, link.comm.size)
    path: FastPath = core.FastPath(entry, runner, reductions)
    path.starting = core.FastPath(entry, runner, reductions, works)
    return path


def _find_functions(MPI: Any, comm: Any) -> Any:
    """Return MPI's own functions, for the native core; None where any is not found."""
    addresses = find_functions(MPI, *core.MPI_FUNCTIONS)
    if not addresses or not hasattr(MPI.Request, "fromhandle"):  # mpi4py has it from version 4 on
        return None
    return core.MpiFunctions(
        addresses,
        comm=comm.handle,
        byte=MPI.BYTE.handle,
        in_place=int(MPI.IN_PLACE) % (1 << 64),
        handle_bytes=MPI._sizeof(MPI.Request),
        status_bytes=MPI._sizeof(MPI.Status),
    )


def _finish(
    link: MpiConnection, timeout: timedelta, request: int, kept: Any, is_send: bool
) -> None:
    """Wait for MPI's ``request`` of a message with tensor ``kept``; raise if late or failed."""
    status = None if is_send else link.MPI.Status()
    num_bytes = 0 if is_send else kept.numel() * kept.itemsize
    started = link.MPI.Request.fromhandle(request)
    link.start(MpiOperation(link, started, kept, None, status, num_bytes)).finish(timeout)

"""Connect a group's members over MPI: through the store, then through MPI."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...bootstrap.mpi_library import load_mpi, start_mpi
from ...bootstrap.timeout_store import read_json, read_jsons
from ...error_text import fields_among, first_line, ranks_text
from ...errors import BackendError, CollectiveTimeoutError, StoreError
from ...runtime.deadlines import Deadline, Timer, wait_until
from ...runtime.hosts import ProcessInfo, is_stopped, my_process_info
from ..registry import Opening
from ..requests import BackendFailure, BackendTimeout
from .connection import MpiConnection, report_dead_ranks_at_the_end

FindProcessInfos = Callable[[], Sequence[ProcessInfo | None]]


@contextmanager
def limited(opening: Opening, find_process_infos: FindProcessInfos) -> Iterator[None]:
    """End the process if MPI's calls in the block, which open a group, take too long.

    Args:
        find_process_infos: returns each member's process info, or None, for the error.
    """
    timer = Timer(opening.timeout, partial(_end_opening, opening, find_process_infos))
    try:
        yield
    finally:
        timer.cancel()


def _end_opening(opening: Opening, find_process_infos: FindProcessInfos) -> None:
    silent = []
    try:
        for rank, process_info in zip(opening.ranks, find_process_infos(), strict=True):
            if process_info is None:
                silent.append(f"rank {rank} has not made this call")
            elif is_stopped(process_info):
                silent.append(f"rank {rank}, {process_info}, is stopped")
    except RuntimeError as lost:  # of the store: its text names the process that serves it
        silent.append(first_line(lost))
    error = CollectiveTimeoutError(
        f"{opening.name} was not opened on backend 'mpi' within "
        f"{opening.timeout.total_seconds():g} s",
        where=f"rank {opening.ranks[opening.rank]}, among {ranks_text(opening.ranks)}",
        expected="every rank to make the MPI calls that open the group",
        found="\n".join(silent) or "a missing rank, which MPI does not identify",
        fix="start or resume these ranks, or pass a longer timeout= to the group",
    )
    _end_with(error, opening)


def _end_with(error: BaseException, opening: Opening) -> None:
    print(
        f"meshdist: rank {opening.ranks[opening.rank]} exits, because nothing else can end the MPI "
        f"call that it is in; under MPI, the other ranks exit with it\n"
        f"{type(error).__name__}: {error}",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(1)


_NUM_TAGS = 1 << 15  # every MPI has so many
_openings = itertools.count()


def open_link(opening: Opening) -> MpiConnection:
    """Open a group on MPI; only its members call."""
    mine: dict[str, Any] = {"process_info": my_process_info().to_json()}
    try:
        MPI = _started(opening)
        rank = mine["rank"] = MPI.COMM_WORLD.Get_rank()
        mine["size"] = MPI.COMM_WORLD.Get_size()
        # Two groups with a common member may open concurrently, in two threads: random tags keep
        # them apart.
        mine["tag"] = hash((rank, next(_openings))) % _NUM_TAGS
    except BackendError as error:
        fields = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
        mine["problem"] = {"summary": error.summary, **fields}
    except (ImportError, RuntimeError) as error:  # mpi4py finds no library; MPI does not start
        mine["problem"] = {
            "summary": "MPI cannot be used for this group",
            "where": f"rank {opening.ranks[opening.rank]}, {opening.name}",
            "found": f"{type(error).__name__}: {error}",
            "fix": "run `meshdist doctor`, which reports what MPI lacks",
        }
    members = _exchanged(opening, mine)
    _check(opening, members)
    everyone = MPI.COMM_WORLD
    all_ranks = everyone.Get_group()
    group = all_ranks.Incl([member["rank"] for member in members])
    process_infos = [member["process_info"] for member in members]
    with limited(opening, lambda: process_infos):
        comm = everyone.Create_group(group, members[0]["tag"])
    group.Free()
    all_ranks.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    report_dead_ranks_at_the_end()
    return MpiConnection(MPI, comm, opening, process_infos)


def _started(opening: Opening) -> Any:
    """Start MPI with all ranks of its world, within the timeout; return mpi4py.MPI."""
    if load_mpi().Is_initialized():
        return start_mpi()
    store, keys = opening.store, [f"mpi starts/{member}" for member in range(len(opening.ranks))]
    store.set(keys[opening.rank], json.dumps(my_process_info().to_json()))

    def process_infos_so_far() -> list[ProcessInfo | None]:
        return [
            read_json(store, key, ProcessInfo.from_json) if store.check([key]) else None
            for key in keys
        ]

    with limited(opening, process_infos_so_far):
        return start_mpi()


def _exchanged(opening: Opening, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Store this member's entry ``mine``; return all entries in group order."""
    store = opening.store
    store.set(f"mpi/{opening.rank}", json.dumps(mine))
    keys = [f"mpi/{member}" for member in range(len(opening.ranks))]
    if not wait_until(lambda: store.check(keys), Deadline(opening.timeout), opening.check_present):
        raise BackendTimeout("a rank did not open its connection")
    try:
        return read_jsons(store, keys, parse_member)
    except StoreError as junk:
        raise BackendFailure(f"{junk.summary}: {junk.found}") from None


def parse_member(value: Any) -> dict[str, Any]:
    """Parse a member's JSON entry; raise if it is malformed."""
    found: dict[str, Any] = {"process_info": ProcessInfo.from_json(value["process_info"])}
    if "problem" in value:
        summary = str(value["problem"]["summary"])
        found["problem"] = {"summary": summary, **fields_among(value["problem"])}
        return found
    found["rank"], found["size"] = int(value["rank"]), int(value["size"])
    found["tag"] = int(value["tag"]) % _NUM_TAGS
    return found


def _check(opening: Opening, members: Sequence[dict[str, Any]]) -> None:
    for member in members:
        if "problem" in member:
            raise BackendError(**member["problem"])
    ranks, sizes = {member["rank"] for member in members}, {member["size"] for member in members}
    are_in_one = len(sizes) == 1 and all(0 <= rank < min(sizes) for rank in ranks)
    if len(ranks) < len(members) or not are_in_one:
        raise BackendError(
            "the ranks of this group do not belong to one MPI world",
            where=f"rank {opening.ranks[opening.rank]}, {opening.name}",
            expected="processes started by one mpiexec",
            found=f"{len(members)} processes, with {len(ranks)} different MPI rank(s), "
            f"in MPI worlds of {', '.join(map(str, sorted(sizes)))} rank(s)",
            fix="start the program with `mpiexec -n 4 python script.py` or "
            "`meshdist run --launcher mpi -n 4 script.py`",
        )

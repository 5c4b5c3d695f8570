"""How the members of a group over MPI come together: through the store, then MPI itself."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from ..errors import BackendError
from ..runtime.boards import BoardAddress, find_view
from ..runtime.clock import clock
from ..runtime.hosts import ProcessCard, my_card, num_cores
from ..runtime.mpi_library import start_mpi
from .base import Opening, WireTimeout
from .mailbox import Mailbox
from .mpi_buffers import Buffers
from .mpi_link import Arrivals, Link, left_key, report_at_the_end, shared_board
from .tag_numbers import TagNumbers

__all__ = ["Shared", "open_shared"]

_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.01
_NUM_TAGS = 1 << 15  # every MPI has so many
_openings = itertools.count()


class Shared:
    """What a communicator and the one for callers who wait share.

    Args:
        MPI: mpi4py's module, started.
        link: the group's.
        arrivals: of its members; None where they cannot be seen.
        opening: the group.
    """

    def __init__(self, MPI: Any, link: Link, arrivals: Arrivals | None, opening: Opening) -> None:
        self.MPI = MPI
        self.link = link
        self.arrivals = arrivals
        self.buffers = Buffers(MPI)
        self.mailbox = Mailbox()
        self.tag_numbers = TagNumbers(opening.store)
        self.largest_tag = int(link.comm.Get_attr(MPI.TAG_UB))


class _Region:
    """This member's words on its process's board, for the group that opens."""

    def __init__(self, opening: Opening) -> None:
        self.words: memoryview | None = None
        self._opening = opening
        self._key = secrets.randbits(62) | 1
        self._board = shared_board() if opening.is_one_host else None

    def reserve(self) -> dict[str, Any]:
        """Take them, and return where they are; nothing where there is no place for them."""
        for region in tuple(_closed):
            region.release_after_all()
        if self._board is None:
            return {}
        try:
            self.words = self._board.reserve(self._key, Arrivals.num_words)
        except MemoryError:
            return {}
        return {"board": {"key": self._key, **self._board.address.to_json()}}

    def release(self) -> None:
        """Give them back."""
        if self._board is not None and self.words is not None:
            self.words = None
            self._board.release(self._key)

    def release_after_all(self) -> None:
        """Give them back once every member has closed the group: till then one may look at them."""
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
"""Of groups that this process has closed, and another member has not."""


def open_shared(opening: Opening) -> Shared:
    """Open a group among its members alone.

    Raises:
        BackendError: a member cannot use MPI, or they are not in one world of MPI; all raise it.
        WireTimeout: a member did not come.
    """
    mine: dict[str, Any] = {"card": my_card().to_json()}
    region = _Region(opening)
    try:
        MPI = start_mpi()
        place = mine["rank"] = MPI.COMM_WORLD.Get_rank()
        # Two groups with a common member may open at the same time, in two threads: theirs differ
        # but by a chance of one in many thousands.
        mine["tag"] = hash((place, next(_openings))) % _NUM_TAGS
        mine.update(region.reserve())
    except BackendError as error:
        fields = {name: getattr(error, name) for name in ("where", "expected", "found", "fix")}
        mine["problem"] = {"summary": error.summary, **fields}
    except Exception as error:  # MPI's own, for example
        mine["problem"] = {
            "summary": "MPI cannot be used for this group",
            "where": f"rank {opening.ranks[opening.rank]}, {opening.name}",
            "found": f"{type(error).__name__}: {error}",
            "fix": "see what `meshdist doctor` tells of MPI",
        }
    try:
        members = _exchanged(opening, mine)
        _check(opening, members)
    except BaseException:
        region.release()
        raise
    everyone = MPI.COMM_WORLD
    all_ranks = everyone.Get_group()
    group = all_ranks.Incl([one["rank"] for one in members])
    comm = everyone.Create_group(group, members[0]["tag"])
    for one in (group, all_ranks):
        one.Free()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    cards = [ProcessCard.from_json(one["card"]) for one in members]
    link = Link(
        MPI,
        comm,
        opening.store,
        opening.ranks,
        cards,
        opening.rank,
        is_crowded=opening.num_local > num_cores(),
        end=region.release_after_all,
        look=opening.look,
    )
    report_at_the_end()
    words = region.words
    others = _words_of_others(opening, members)
    arrivals = None
    if words is not None and others is not None:
        arrivals = Arrivals(link, words, others)
    if not _is_so_everywhere(MPI, comm, arrivals is not None):
        arrivals = None
    return Shared(MPI, link, arrivals, opening)


def _is_so_everywhere(MPI: Any, comm: Any, answer: bool) -> bool:
    # On a buffer: mpi4py's calls for objects can keep Python's lock while they wait for other
    # ranks, and another thread of this process, which opens a group with them, waits for that lock.
    answers = bytearray([answer])
    comm.Allreduce(MPI.IN_PLACE, [answers, MPI.BYTE], op=MPI.BAND)
    return bool(answers[0])


def _exchanged(opening: Opening, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each member says of itself."""
    store = opening.store
    store.set(f"mpi/{opening.rank}", json.dumps(mine))
    keys = [f"mpi/{member}" for member in range(len(opening.ranks))]
    deadline = clock.now() + opening.timeout.total_seconds()
    pause = _PAUSE_S
    while not store.check(keys):
        if clock.now() > deadline:
            raise WireTimeout("a member did not come to open its connection")
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE_S)
    return [json.loads(store.get(key)) for key in keys]


def _check(opening: Opening, members: Sequence[dict[str, Any]]) -> None:
    for one in members:
        if "problem" in one:
            raise BackendError(**one["problem"])
    num_places = len({one["rank"] for one in members})
    if num_places < len(members):
        raise BackendError(
            "the members of this group are not in one world of MPI",
            where=f"rank {opening.ranks[opening.rank]}, {opening.name}",
            expected="processes that one mpiexec has started",
            found=f"{len(members)} processes, with {num_places} rank(s) of MPI's among them",
            fix="mpiexec -n 4 python script.py, or `meshdist run --launcher mpi -n 4 script.py`",
        )


def _words_of_others(
    opening: Opening, members: Sequence[dict[str, Any]]
) -> list[memoryview] | None:
    """Where the other members write when they arrive; None where that cannot be seen."""
    found = []
    for member, one in enumerate(members):
        if member == opening.rank:
            continue
        view = find_view(BoardAddress.from_json(one["board"])) if "board" in one else None
        words = None if view is None else view.find(one["board"]["key"], Arrivals.num_words)
        if words is None:
            return None
        found.append(words)
    return found

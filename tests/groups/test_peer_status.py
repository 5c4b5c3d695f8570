"""What the members of a world report of a failed call, from their answers and the store."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Timer
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.checking.calls import Call, CallRecord, GroupFacts
from meshdist.error_text import UNUSABLE_GROUP, ranks_text
from meshdist.groups import peer_status
from meshdist.groups.control_messages import Endings, last_call_text
from meshdist.groups.failure_diagnosis import STORE_LOST
from meshdist.groups.peer_status import WorldPeers, silent_ranks
from tests.inner import World
from tests.load import is_within

FACTS = GroupFacts("a group", (0, 1, 2), 0)
CALL = CallRecord(3, FACTS, Call("all_reduce", (torch.Size([2]), torch.float32)))
FIELDS = {"summary": "they differ", "where": "a group", "expected": "", "found": "", "fix": "mend"}

ABOUT = {"sequence": 4}
"""The last call."""

LOST = md.StoreError("rank 0 does not answer")


def answer(*calls: tuple[str, int], about: str | None = None) -> dict[str, Any]:
    """That a rank has called these on communicators, as label and number."""
    texts = [{"label": label, "sequence": n, "text": f"call {n} on {label}"} for label, n in calls]
    return {"calls": texts, "about": about, "now": ""}


class Asked:
    """Stands for the ranks that are asked: what they answer, or the error that asking raises."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self.calls: list[Any] = []

    def __call__(self, world: World, ranks: tuple[int, ...], *about: Any, **_: Any) -> Any:
        self.calls.append((ranks, *about))
        if isinstance(self.answers, Exception):
            raise self.answers
        return {rank: self.answers[rank] for rank in ranks if rank in self.answers}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    registry = mock.Mock()
    monkeypatch.setattr(peer_status, "get_registry", lambda world: registry)
    return registry


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked({})
    monkeypatch.setattr(peer_status, "ask", asked)
    return asked


def members(
    store: Any = None,
    rank: int = 0,
    origin: str = "env://",
    ranks: tuple[int, ...] = (0, 1, 2),
) -> WorldPeers:
    world = World(rank, len(ranks), store or HashStore(), {}, origin=origin)
    opened: Any = mock.Mock(label="label", is_closed=False, recorder=mock.Mock(sequence=4))
    return WorldPeers(world, GroupFacts("a group", ranks, rank), opened)


def test_the_last_call_of_a_rank() -> None:
    assert last_call_text(None) == "does not respond: it has exited or is stopped"
    assert last_call_text(answer()) == "is running and has called no collective"  # type: ignore[arg-type]
    two: Any = answer(("a", 1), ("b", 2))
    assert last_call_text(two) == "last call 2 on b"
    assert last_call_text({**two, "now": "x.py:3 in f"}) == "last call 2 on b; now at x.py:3 in f"


def test_a_report_says_which_members_have_arrived(asked: Asked) -> None:
    asked.answers = {1: answer(("label", 3), ("other", 9))}
    assert members().report(CALL) == (
        "rank 1: reached this call; last call 9 on other\n"
        "rank 2: does not respond: it has exited or is stopped"
    )
    asked.answers = {1: answer(("label", 2)), 2: answer()}
    assert members().report(CALL) == (
        "rank 1: did not reach this call; last call 2 on label\n"
        "rank 2: did not reach this call; has called no collective"
    )
    message = CALL._replace(call=replace(CALL.call, peer=1, tag=0), number=1)
    assert members().report(message).splitlines()[1] == "rank 2: has called no collective"
    asked.answers = LOST
    assert members().report(CALL) == f"{STORE_LOST}: rank 0 does not answer"


class Waiting(HashStore):
    """A store that notes which requests it gets, but for those of waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "add", "multi_get", "get", "compare_set"):
            self.num_requests += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_of_ranks_that_give_up_together_one_asks(size: int, asked: Asked) -> None:
    store, ranks = Waiting(), tuple(range(size))
    others = [members(store, rank, ranks=ranks) for rank in ranks]
    asked.answers = {rank: answer(("label", 3)) for rank in ranks[1:]}
    with ThreadPoolExecutor(size) as threads:
        reports = list(threads.map(lambda one: one.report(CALL), others))
    assert [call[0] for call in asked.calls] == [ranks]
    for rank, report in enumerate(reports):
        here = ranks_text([one for one in ranks[1:] if one != rank])
        lines = ["rank 0: does not respond: it has exited or is stopped"] if rank else []
        assert report.splitlines() == [*lines, f"{here}: reached this call; last call 3 on label"]
    fields = {**FIELDS, "found": ""}
    with ThreadPoolExecutor(size) as threads:
        agreed = list(threads.map(lambda one: one.agree_on_error(fields, CALL, ABOUT), others))
    assert len(asked.calls) == 2
    assert agreed == agreed[:1] * size
    assert store.num_requests <= 8 * size


def test_a_report_of_many_ranks_is_short(asked: Asked) -> None:
    """What all read: equal texts once, and no more than fifty of those that differ."""
    store, ranks = HashStore(), tuple(range(16384))
    asked.answers = {rank: answer(("label", 3)) for rank in ranks[100:]}
    asked.answers |= {rank: answer(("label", 1), ("other", rank)) for rank in ranks[:100]}
    lines = members(store, 7, ranks=ranks).report(CALL).splitlines()
    assert lines[0] == "rank 0: did not reach this call; last call 0 on other"
    assert lines[-1] == "ranks 50-16383: ... (other texts)"
    assert len(lines) == 50
    assert members(store, 60, ranks=ranks).report(CALL).splitlines()[-1] == (
        "ranks 50-59, 61-16383: ... (other texts)"
    )
    assert len(store.get("label/late/3")) < 5000


def test_where_the_first_that_gives_up_ends_another_one_asks(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_status, "FIRST_ANSWER_S", 0.1)
    store = HashStore()
    store.set("label/late/3/by", "1")
    asked.answers = {rank: answer(("label", 2)) for rank in range(3)}
    assert "ranks 1-2: did not reach this call" in members(store).report(CALL)


def test_silent_ranks_are_named(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 3, HashStore(), {})
    assert silent_ranks(world, (0, 1, 2)) == (
        "ranks 1-2: do not respond: they have exited or are stopped"
    )
    asked.answers = {2: answer()}
    assert members().silent() == "rank 1: does not respond: it has exited or is stopped"
    asked.answers = {1: answer(), 2: answer()}
    monkeypatch.setattr(peer_status, "LEAVING_S", 0.0)
    assert silent_ranks(world, (0, 1, 2)) == ""
    asked.answers = LOST
    assert silent_ranks(world, (0, 1, 2)) == f"{STORE_LOST}: rank 0 does not answer"


def test_who_has_no_other_member_asks_nobody_and_does_not_wait(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_status, "LEAVING_S", 30.0)
    start = time.monotonic()
    assert silent_ranks(World(0, 1, HashStore(), {"cpu": "shm"}), (0,)) == ""
    assert members(ranks=(0,)).report(CALL) == ""
    assert is_within(time.monotonic() - start, 10.0)
    assert asked.calls == []


def test_ranks_that_have_left_are_named_with_what_they_left(asked: Asked) -> None:
    store = HashStore()
    Endings(World(2, 3, store, {})).leave("ended by ValueError: no data (train.py:7)", {})
    assert members(store).silent() == "rank 2 ended by ValueError: no data (train.py:7)"
    assert asked.calls == []
    assert "rank 2: ended by ValueError: no data (train.py:7)" in members(store).report(CALL)


def test_ranks_that_are_seen_to_be_stopped_are_not_asked(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endings, "is_stopped", lambda self, rank: rank == 2)
    asked.answers = {1: answer()}
    told = "is stopped by SIGSTOP or a debugger"
    assert members().report(CALL) == (
        f"rank 1: did not reach this call; has called no collective\nrank 2: {told}"
    )
    assert [call[0] for call in asked.calls] == [(0, 1)]  # one member asks for all
    assert members().silent() == f"rank 2 {told}"


def test_a_rank_that_answers_and_then_leaves_is_named(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_status, "LEAVING_S", 30.0)
    store = HashStore()
    asked.answers = {1: answer(), 2: answer()}
    leave = Endings(World(1, 3, store, {})).leave
    Timer(0.1, leave, ("ended by ValueError: no data", {})).start()
    assert members(store).silent() == "rank 1 ended by ValueError: no data"
    store = HashStore()
    Timer(0.1, store.set, ("label/failure", "told")).start()
    start = time.monotonic()
    assert members(store).silent() == ""  # no one leaves: another one has told why
    assert is_within(time.monotonic() - start, 10.0)


def test_simulated_ranks_are_not_asked(asked: Asked) -> None:
    simulated = members(origin="simulated")
    assert simulated.report(CALL) == simulated.silent() == ""
    assert simulated.find_first_failure(CALL, "reset") == ""
    assert asked.calls == []


def test_the_first_failure_is_quoted_by_later_ones() -> None:
    store = HashStore()
    assert members(store).find_first_failure(CALL, "reset") == ""
    assert members(store).find_first_failure(CALL, "reset") == ""  # its own
    later = members(store, 2).find_first_failure(CALL, "closed")
    assert later == f"rank 0 failed first, in {CALL.heading}: reset"
    lost = mock.Mock()
    lost.compare_set.side_effect = LOST
    found = members(lost).find_first_failure(CALL, "reset")
    assert found == f"{STORE_LOST}: rank 0 does not answer"


def test_an_abort_is_looked_up_as_long_as_there_is_a_store(registry: mock.Mock) -> None:
    registry.find_abort.return_value = {"rank": 2, "reason": "no data"}
    assert members().find_abort() == {"rank": 2, "reason": "no data"}
    registry.find_abort.side_effect = LOST
    assert members().find_abort() is None
    members().break_here("late")
    registry.break_here.assert_called_once_with("label", "late")


def test_the_first_to_see_a_disagreement_ends_the_group(registry: mock.Mock, asked: Asked) -> None:
    store = HashStore()
    asked.answers = {1: answer(about=CALL.text), 2: answer()}
    fields = members(store).agree_on_error(FIELDS, CALL, ABOUT)
    assert fields["found"] == f"ranks 0-1: {CALL.text}\nrank 2: has not reached this call"
    assert fields["where"] == "a group, ranks 0-2; rank 0 detected it before it sent any data"
    assert fields["fix"] == f"mend; {UNUSABLE_GROUP}"
    assert asked.calls == [((1, 2), {"label": "label", **ABOUT})]
    ((labels, message), _) = registry.abort.call_args
    assert labels == ["label"] and message["disagreement"] == fields
    assert json.loads(store.get("label/disagreement")) == fields
    # Another member has seen it, too, and raises the same.
    assert members(store, 1).agree_on_error(FIELDS, None, ABOUT) == fields
    registry.abort.assert_called_once()
    assert registry.break_here.call_args.kwargs == {"disagreement": fields}


def test_what_is_seen_after_the_call_that_differs_says_so(
    registry: mock.Mock, asked: Asked
) -> None:
    fields = members().agree_on_error(FIELDS, CALL, {"sequence": 3})
    told = "rank 0 detected it at call 4; results since then may be wrong"
    assert fields["where"] == f"a group, ranks 0-2; {told}"


def test_the_peer_of_a_message_alone_is_asked(registry: mock.Mock, asked: Asked) -> None:
    about = {"message": [True, 0, 5, 1], "asked": [2]}
    fields = members().agree_on_error({**FIELDS, "found": "too long"}, None, about)
    assert [ranks for ranks, _ in asked.calls] == [(2,)]
    assert fields["where"] == "a group"
    assert fields["found"] == (
        "too long\nrank 0: its call is no longer known\n"
        "rank 2: does not respond: it has exited or is stopped"
    )


def test_without_the_store_the_others_calls_stay_unknown(registry: mock.Mock, asked: Asked) -> None:
    asked.answers = LOST
    fields = members().agree_on_error(FIELDS, CALL, {"sequence": 3})
    assert (
        fields["found"]
        == f"rank 0: {CALL.text}\nother ranks: unknown, because rank 0 does not answer"
    )
    assert registry.break_here.call_args.kwargs == {"disagreement": fields}
    registry.abort.assert_not_called()

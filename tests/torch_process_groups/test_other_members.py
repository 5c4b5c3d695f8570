"""What the members of one of torch's groups report when their calls differ."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore

from meshdist.checking.calls import Call, CallRecord, GroupFacts
from meshdist.error_text import UNUSABLE_GROUP
from meshdist.torch_process_groups import inner_group
from meshdist.torch_process_groups.inner_group import TorchGroupPeers
from tests.inner import Recorder

RANKS = (4, 6, 7)
FIELDS = {"summary": "they differ", "where": "a group", "expected": "", "found": "", "fix": "mend"}


def facts(rank: int) -> GroupFacts:
    return GroupFacts("a group", RANKS, rank)


def call(rank: int, operation: str) -> CallRecord:
    return CallRecord(3, facts(rank), Call(operation, (torch.Size([2]), torch.float32)))


def agreed(store: Any, operations: dict[int, str], **about: Any) -> list[dict[str, str]]:
    """What the members with these places agree on, all at the same time."""

    def one(rank: int, operation: str) -> dict[str, str]:
        others = TorchGroupPeers(facts(rank), store, Recorder(), None, mock.Mock())
        return others.agree_on_error(FIELDS, call(rank, operation), about)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(one, operations.keys(), operations.values()))


def test_every_member_tells_what_all_have_called() -> None:
    operations = {0: "all_reduce", 1: "broadcast", 2: "all_reduce"}
    for fields in agreed(HashStore(), operations, sequence=3):
        assert fields["found"] == (
            "ranks 4, 7: all_reduce((2,) float32) at an unknown place\n"
            "rank 6: broadcast((2,) float32) at an unknown place"
        )
        assert fields["where"] == "a group; no data was moved"
        assert fields["fix"] == "mend"


def test_a_member_that_does_not_write_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(inner_group, "ANSWERS_S", 0.05)
    (fields,) = agreed(HashStore(), {1: "barrier"}, sequence=3)
    assert "ranks 4, 7: has not reported" in fields["found"]
    assert "rank 6: barrier(" in fields["found"]


def test_without_the_store_each_member_knows_of_its_own_call() -> None:
    lost = mock.Mock()
    lost.set.side_effect = RuntimeError("connection reset")
    (fields,) = agreed(lost, {0: "barrier"}, sequence=3)
    assert "rank 4: barrier(" in fields["found"]
    assert "ranks 6-7: has not reported" in fields["found"]


def test_a_message_tells_of_this_member_alone() -> None:
    store = HashStore()
    (fields,) = agreed(store, {2: "send"}, message=[True, 0, 5, 1])
    assert fields["found"] == "rank 7: send((2,) float32) at an unknown place"
    assert fields["where"] == "a group"
    assert store.num_keys() == 0


def test_calls_that_were_compared_after_their_start_end_the_group(monkeypatch: Any) -> None:
    monkeypatch.setattr(inner_group, "ANSWERS_S", 0.05)
    table, inner = mock.Mock(), mock.Mock()
    others = TorchGroupPeers(facts(0), HashStore(), Recorder(), table, inner)
    fields = others.agree_on_error(FIELDS, None, {"sequence": 3})
    assert fields["where"] == "a group; this member's tensors may have been written"
    assert fields["fix"] == f"mend; {UNUSABLE_GROUP}"
    assert "rank 4: its call is no longer known" in fields["found"]
    inner().break_here.assert_called_once_with("they differ")

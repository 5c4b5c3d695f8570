"""What ranks without data cannot answer is told by what all members say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshdist.checking.calls import GroupFacts
from meshdist.errors import JoinError
from meshdist.groups.announcements import Announcement
from meshdist.groups.whereabouts import find_call, has_source, message_refusal

CHANNEL: Any = SimpleNamespace(group=GroupFacts("the pair", (4, 7), 1))
X = torch.ones(3)
SUM = Announcement("all_reduce", ((3, "float32"),), op="SUM")
GONE = Announcement(has_joined=True)


def broadcast(root: int) -> Announcement:
    return Announcement.of_call("broadcast", X, root=root)


def test_verbs_whose_root_gives_have_a_source() -> None:
    assert has_source(broadcast(0))
    assert has_source(Announcement.of_call("scatter", X, root=1))
    for verb in ("reduce", "gather"):
        assert not has_source(Announcement.of_call(verb, X, root=1))
    assert not has_source(SUM)


def test_the_call_is_that_of_a_member_that_goes_on() -> None:
    assert find_call(CHANNEL, [GONE, SUM], is_strict=False) is SUM
    assert find_call(CHANNEL, [GONE, GONE], is_strict=True) is None
    assert find_call(CHANNEL, [SUM, SUM], is_strict=True) is SUM
    call = broadcast(1)
    assert find_call(CHANNEL, [GONE, call], is_strict=False) is call
    source = Announcement.of_call("broadcast", X, root=0, has_joined=True)  # in its hook
    assert find_call(CHANNEL, [source, broadcast(0)], is_strict=False) == broadcast(0)


@pytest.mark.parametrize(
    ("said", "is_strict", "text"),
    [
        ([GONE, broadcast(0)], False, "cannot come from rank 4, which has no data left"),
        ([GONE, SUM], True, "a rank has no data left, and this one has"),
        ([SUM, GONE], True, "rank 7 has no data left, and others have"),
        (
            [GONE, Announcement("barrier", has_joined=True)],
            False,
            "barrier() is called on ranks that have joined alone",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    said: list[Announcement], is_strict: bool, text: str
) -> None:
    with pytest.raises(JoinError) as caught:
        find_call(CHANNEL, said, is_strict=is_strict)
    assert text in str(caught.value)
    assert "where:    rank 7, the pair" in str(caught.value)


def test_a_message_is_refused_by_name() -> None:
    text = str(message_refusal(CHANNEL, "send", X, 4))
    assert "send((3,) float32): rank 4 has no data left" in text
    assert "exchange by a collective" in text

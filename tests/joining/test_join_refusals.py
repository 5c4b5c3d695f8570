"""What ranks without data cannot answer is told by what all members say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import meshdist as md
from meshdist.checking.calls import GroupFacts, get_call
from meshdist.errors import JoinError
from meshdist.joining.statements import Statement
from meshdist.joining.whereabouts import find_call, has_source, message_refusal

CHANNEL: Any = SimpleNamespace(group=GroupFacts("the pair", (4, 7), 1))
X = torch.ones(3)
SUM = Statement(get_call("all_reduce", X, md.ReduceOp.SUM))
GONE = Statement(has_joined=True)


def broadcast(root: int) -> Statement:
    return Statement(get_call("broadcast", X, root=root))


def test_verbs_whose_root_gives_have_a_source() -> None:
    for verb in ("broadcast", "scatter"):
        assert has_source(get_call(verb, X, root=1))
    for verb in ("reduce", "gather"):
        assert not has_source(get_call(verb, X, root=1))
    assert not has_source(get_call("all_reduce", X, md.ReduceOp.SUM))


def test_the_call_is_that_of_a_member_that_goes_on() -> None:
    assert find_call(CHANNEL, [GONE, SUM], is_strict=False) is SUM
    assert find_call(CHANNEL, [GONE, GONE], is_strict=True) is None
    assert find_call(CHANNEL, [SUM, SUM], is_strict=True) is SUM
    call = broadcast(1)
    assert find_call(CHANNEL, [GONE, call], is_strict=False) is call
    source = broadcast(0)._replace(has_joined=True)  # in its hook
    assert find_call(CHANNEL, [source, broadcast(0)], is_strict=False) == broadcast(0)


@pytest.mark.parametrize(
    ("said", "is_strict", "text"),
    [
        ([GONE, broadcast(0)], False, "cannot come from rank 4, which has no data left"),
        ([GONE, SUM], True, "a rank has no data left, and this one has"),
        ([SUM, GONE], True, "rank 7 has no data left, and others have"),
        (
            [GONE, Statement(get_call("barrier", None), has_joined=True)],
            False,
            "barrier() is called on ranks that have joined alone",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(
    said: list[Statement], is_strict: bool, text: str
) -> None:
    with pytest.raises(JoinError) as caught:
        find_call(CHANNEL, said, is_strict=is_strict)
    assert text in str(caught.value)
    assert "where:    rank 7, the pair" in str(caught.value)


def test_a_message_is_refused_by_name() -> None:
    text = str(message_refusal(CHANNEL, "send", X, 4))
    assert "send((3,) float32): rank 4 has no data left" in text
    assert "exchange by a collective" in text

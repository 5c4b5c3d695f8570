"""The tables of verbs, compared with the signatures of what they name."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed

import meshdist as md
from meshdist.verb_table import (
    OBJECT_VERBS,
    REDUCING_VERBS,
    SENDING_VERBS,
    VERBS,
    WIRE_VERBS,
    Verb,
    WireVerb,
)
from meshdist.wires.communicator import Communicator


@pytest.mark.parametrize("verb", WIRE_VERBS.values(), ids=lambda verb: verb.name)
def test_a_verb_of_a_communicator_takes_what_the_table_says(verb: WireVerb) -> None:
    parameters = inspect.signature(getattr(Communicator, verb.name)).parameters
    assert ("op" in parameters) == verb.reduces == (verb.name in REDUCING_VERBS)
    assert ("root" in parameters) == bool(verb.root)
    assert verb.root in ("", "to", "from")


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_a_public_verb_takes_what_the_table_says(verb: Verb) -> None:
    parameters = inspect.signature(getattr(md, verb.name)).parameters
    assert ("op" in parameters) == verb.reduces
    assert set(verb.wire_verbs) <= WIRE_VERBS.keys()
    roots = {"dst": "to", "src": "from"}
    if set(verb.wire_verbs) <= {"reduce", "gather", "broadcast", "scatter"} and verb.is_plain:
        (root,) = {WIRE_VERBS[one].root for one in verb.wire_verbs}
        assert [roots[name] for name in parameters if name in roots] == [root]


def test_every_verb_of_a_communicator_carries_a_public_one() -> None:
    carried = {one for verb in VERBS.values() for one in verb.wire_verbs}
    assert carried == set(WIRE_VERBS)


def test_verbs_and_their_aliases_are_torchs() -> None:
    for verb in VERBS.values():
        assert not verb.alias_of or VERBS[verb.alias_of].wire_verbs == verb.wire_verbs
        assert not verb.alias_of or hasattr(torch.distributed, verb.name)


def test_what_messages_and_objects_are() -> None:
    assert {"send", "isend", "send_object_list"} == SENDING_VERBS
    assert {name for name in VERBS if "object" in name} == OBJECT_VERBS
    assert all("dst" in inspect.signature(getattr(md, name)).parameters for name in SENDING_VERBS)

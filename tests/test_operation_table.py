"""The tables of verbs, compared with the signatures of what they name."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import meshdist as md
from meshdist.operation_table import (
    OBJECT_VERBS,
    REDUCING_VERBS,
    SENDING_VERBS,
    VERBS,
    WIRE_VERBS,
    Form,
    Role,
    Verb,
    WireVerb,
)
from tests.backends.direct import Direct
from tests.inner import BUILT, DONE, Operation, PreparedCall, find_wire, wire_names


class Heard:
    """A member of two that hears which calls are started."""

    rank, size = 0, 2

    def start(self, prepared: PreparedCall) -> Operation:
        self.prepared = prepared
        return DONE


@pytest.mark.parametrize("verb", WIRE_VERBS.values(), ids=lambda verb: verb.name)
def test_a_verb_of_a_communicator_takes_what_the_table_says(verb: WireVerb) -> None:
    one, several = torch.ones(4), [torch.ones(2), torch.ones(2)]
    values: dict[str, Any] = {"op": md.ReduceOp.SUM, "root": 0, "peer": 1, "tag": 3, "device": None}
    values |= {"takes": [2, 2], "gives": [2, 2], "output": one, "tensor": one}
    values |= dict.fromkeys(("tensors", "outputs", "inputs"), several)
    heard = Heard()
    call = getattr(Direct(heard), verb.name)
    parameters = inspect.signature(call).parameters
    call(**{name: values[name] for name in parameters})
    assert ("op" in parameters) == verb.reduces == (verb.name in REDUCING_VERBS)
    assert ("root" in parameters) == bool(verb.root)
    assert verb.root in ("", "to", "from")
    found = heard.prepared
    assert found.way == verb.name
    counts = {
        **dict.fromkeys((Form.ONE, Form.PARTS), 1),
        **dict.fromkeys((Form.ANY, Form.EACH, Form.AT_ROOT), 2),
        Form.NONE: 0,
    }
    assert len(found.outputs) == counts[verb.gives]
    if verb.takes is Form.IN_PLACE:
        assert found.inputs is found.outputs
    else:
        assert len(found.inputs) == counts[verb.takes]
    assert (found.sizes is not None) >= (Form.PARTS in (verb.takes, verb.gives))


def test_every_wire_has_a_way_for_every_verb() -> None:
    for name in wire_names():
        kind = find_wire(name).communicator_kind
        assert kind.ways.keys() <= WIRE_VERBS.keys() <= kind.ways.keys() | BUILT.keys(), name
        assert all(callable(getattr(kind, method)) for method in kind.ways.values()), name
    assert {"all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"} == (
        WIRE_VERBS.keys() - BUILT.keys()
    )


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


_CORE_VERB = re.compile(r"X\((\w+), \w+, (true|false), (\w+), (\w+)\)")
_OF_LISTS = {"all_gather_v": "all_gather_list", "reduce_scatter_v": "reduce_scatter_list"}


def test_the_cores_verbs_bring_and_get_what_the_table_says() -> None:
    """There a buffer has no parts; beside a list, one tensor is a list of one part."""
    text = (Path(__file__).resolve().parents[1] / "native" / "codes.h").read_text()
    verbs = _CORE_VERB.findall(text)
    assert len(verbs) == 12
    parts = {Form.EACH: {"each"}, Form.AT_ROOT: {"at_root"}, Form.ANY: {"any"}}
    for name, reduces, outputs, inputs in verbs:
        row = WIRE_VERBS[_OF_LISTS.get(name, name)]
        assert row.reduces == (reduces == "true"), name
        assert outputs in parts.get(row.gives, {"none", "one"}), name
        assert inputs in parts.get(row.takes, {"none", "one"}), name


@pytest.mark.parametrize("row", VERBS.values(), ids=lambda row: row.name)
def test_a_row_names_parameters_of_its_verb(row: Verb) -> None:
    parameters = {*inspect.signature(getattr(md, row.name)).parameters}
    assert {one.name for one in row.parameters} <= parameters
    assert row.kind in (("I", "V") if row.writes else ("",))
    if row.is_plain and not row.sends and row.carrier.root:
        assert row.parameters[-1].role is Role.ROOT
    tensors = {name for name in parameters if "tensor" in name or name in ("output", "input")}
    tensors -= {"dst_tensor", "src_tensor"}  # numbers
    if row.writes and not row.is_of_objects:
        assert tensors <= {row.writes, *row.reads}


def asked_names(file: Path) -> list[str]:
    """Places of a file where a verb is told by its name."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            asked = {
                one.value
                for side in node.comparators
                for one in ast.walk(side)
                if isinstance(one, ast.Constant)
            }
            if asked & (VERBS.keys() | WIRE_VERBS.keys()):
                found.append(ast.unparse(node))
    return found


def test_no_room_asks_for_a_verbs_name() -> None:
    """What sets a verb apart is a fact of its row. Sides of benchmarks say what they have."""
    package = Path(md.__file__).parent
    asked = {str(file.relative_to(package)): asked_names(file) for file in package.rglob("*.py")}
    found = {name: texts for name, texts in asked.items() if texts and "bench/" not in name}
    assert found == {"annotations/axis_types.py": ["verb == 'all_gather'"]}  # that of lax

"""The tables of collectives, compared with the signatures of what they name."""

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
    BACKEND_OPERATIONS,
    OBJECT_OPERATIONS,
    OPERATIONS,
    REDUCING_OPERATIONS,
    SENDING_OPERATIONS,
    BackendOperation,
    OperationSpec,
    Role,
    TensorLayout,
)
from tests.backends.direct import Direct
from tests.inner import COMPOSED, DONE, OperationArgs, Request, backend_names, find_backend


class Heard:
    """A member of two that hears which calls are started."""

    rank, size = 0, 2

    def start(self, prepared: OperationArgs) -> Request:
        self.prepared = prepared
        return DONE


@pytest.mark.parametrize(
    "operation", BACKEND_OPERATIONS.values(), ids=lambda operation: operation.name
)
def test_a_collective_of_a_communicator_takes_what_the_table_says(
    operation: BackendOperation,
) -> None:
    one, several = torch.ones(4), [torch.ones(2), torch.ones(2)]
    values: dict[str, Any] = {"op": md.ReduceOp.SUM, "root": 0, "peer": 1, "tag": 3, "device": None}
    values |= {"takes": [2, 2], "gives": [2, 2], "output": one, "tensor": one}
    values |= dict.fromkeys(("tensors", "outputs", "inputs"), several)
    heard = Heard()
    call = getattr(Direct(heard), operation.name)
    parameters = inspect.signature(call).parameters
    call(**{name: values[name] for name in parameters})
    assert ("op" in parameters) == operation.reduces == (operation.name in REDUCING_OPERATIONS)
    assert ("root" in parameters) == bool(operation.root)
    assert operation.root in ("", "to", "from")
    found = heard.prepared
    assert found.backend_operation == operation.name
    counts = {
        **dict.fromkeys((TensorLayout.ONE, TensorLayout.PARTS), 1),
        **dict.fromkeys((TensorLayout.ANY, TensorLayout.EACH, TensorLayout.AT_ROOT), 2),
        TensorLayout.NONE: 0,
    }
    assert len(found.outputs) == counts[operation.gives]
    if operation.takes is TensorLayout.IN_PLACE:
        assert found.inputs is found.outputs
    else:
        assert len(found.inputs) == counts[operation.takes]
    assert (found.sizes is not None) >= (TensorLayout.PARTS in (operation.takes, operation.gives))


def test_every_backend_has_a_way_for_every_collective() -> None:
    for name in backend_names():
        kind = find_backend(name).communicator_kind
        assert (
            kind.implementations.keys()
            <= BACKEND_OPERATIONS.keys()
            <= kind.implementations.keys() | COMPOSED.keys()
        ), name
        assert all(callable(getattr(kind, method)) for method in kind.implementations.values()), (
            name
        )
    assert {"all_reduce", "broadcast", "all_gather", "barrier", "send", "recv"} == (
        BACKEND_OPERATIONS.keys() - COMPOSED.keys()
    )


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda operation: operation.name)
def test_a_public_collective_takes_what_the_table_says(operation: OperationSpec) -> None:
    parameters = inspect.signature(getattr(md, operation.name)).parameters
    assert ("op" in parameters) == operation.reduces
    assert set(operation.backend_operations) <= BACKEND_OPERATIONS.keys()
    roots = {"dst": "to", "src": "from"}
    if (
        set(operation.backend_operations) <= {"reduce", "gather", "broadcast", "scatter"}
        and operation.is_plain
    ):
        (root,) = {BACKEND_OPERATIONS[one].root for one in operation.backend_operations}
        assert [roots[name] for name in parameters if name in roots] == [root]


def test_every_collective_of_a_communicator_carries_a_public_one() -> None:
    carried = {one for operation in OPERATIONS.values() for one in operation.backend_operations}
    assert carried == set(BACKEND_OPERATIONS)


def test_collectives_and_their_aliases_are_torchs() -> None:
    for operation in OPERATIONS.values():
        assert (
            not operation.alias_of
            or OPERATIONS[operation.alias_of].backend_operations == operation.backend_operations
        )
        assert not operation.alias_of or hasattr(torch.distributed, operation.name)


def test_what_messages_and_objects_are() -> None:
    assert {"send", "isend", "send_object_list"} == SENDING_OPERATIONS
    assert {name for name in OPERATIONS if "object" in name} == OBJECT_OPERATIONS
    assert all(
        "dst" in inspect.signature(getattr(md, name)).parameters for name in SENDING_OPERATIONS
    )


_CORE_OPERATION = re.compile(r"X\((\w+), \w+, (true|false), (\w+), (\w+)\)")
_OF_LISTS = {"all_gather_v": "all_gather_list", "reduce_scatter_v": "reduce_scatter_list"}


def test_the_cores_collectives_bring_and_get_what_the_table_says() -> None:
    """There a buffer has no parts; beside a list, one tensor is a list of one part."""
    text = (Path(__file__).resolve().parents[1] / "native" / "codes.h").read_text()
    operations = _CORE_OPERATION.findall(text)
    assert len(operations) == 12
    parts = {
        TensorLayout.EACH: {"each"},
        TensorLayout.AT_ROOT: {"at_root"},
        TensorLayout.ANY: {"any"},
    }
    for name, reduces, outputs, inputs in operations:
        spec = BACKEND_OPERATIONS[_OF_LISTS.get(name, name)]
        assert spec.reduces == (reduces == "true"), name
        assert outputs in parts.get(spec.gives, {"none", "one"}), name
        assert inputs in parts.get(spec.takes, {"none", "one"}), name


@pytest.mark.parametrize("spec", OPERATIONS.values(), ids=lambda spec: spec.name)
def test_a_row_names_parameters_of_its_collective(spec: OperationSpec) -> None:
    parameters = {*inspect.signature(getattr(md, spec.name)).parameters}
    assert {one.name for one in spec.parameters} <= parameters
    assert spec.kind in (("I", "V") if spec.writes else ("",))
    if spec.is_plain and not spec.sends and spec.executor.root:
        assert spec.parameters[-1].role is Role.ROOT
    tensors = {name for name in parameters if "tensor" in name or name in ("output", "input")}
    tensors -= {"dst_tensor", "src_tensor"}  # numbers
    if spec.writes and not spec.is_of_objects:
        assert tensors <= {spec.writes, *spec.reads}


def asked_names(file: Path) -> list[str]:
    """Places of a file where a collective is told by its name."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            asked = {
                one.value
                for side in node.comparators
                for one in ast.walk(side)
                if isinstance(one, ast.Constant)
            }
            if asked & (OPERATIONS.keys() | BACKEND_OPERATIONS.keys()):
                found.append(ast.unparse(node))
    return found


def test_no_room_asks_for_a_collectives_name() -> None:
    """What sets a collective apart is a fact of its row. Sides of benchmarks say what they have."""
    package = Path(md.__file__).parent
    asked = {str(file.relative_to(package)): asked_names(file) for file in package.rglob("*.py")}
    found = {name: texts for name, texts in asked.items() if texts and "bench/" not in name}
    assert found == {"annotations/axis_types.py": ["operation == 'all_gather'"]}  # that of lax

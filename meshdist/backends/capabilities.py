"""Tabulate which operations, ops and dtypes each backend supports.

``meshdist doctor`` prints the table; ``python -m meshdist.backends.capabilities
docs/reference/collectives.md`` writes it between the page's markers.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..dtypes import DTYPES, dtype_name
from ..operation_table import OPERATIONS
from ..reduce_ops import PLAIN_OPS, ReduceKind, ReduceOp, find_refusal

# The backends, each of which registers itself.
from .c10d.torch_classes import C10dBackend as C10dBackend, adopt_torch_backends
from .mpi.communicator import MpiBackend as MpiBackend
from .registry import BackendType, backend_names, find_backend
from .shm.communicator import ShmBackend as ShmBackend
from .simulated.communicator import SimulatedBackend as SimulatedBackend

DTYPE_GROUPS: dict[str, tuple[torch.dtype, ...]] = {
    group: tuple(facts.dtype for facts in DTYPES.values() if facts.group == group)
    for group in dict.fromkeys(facts.group for facts in DTYPES.values())
}
"""The dtypes of the table, under the names that it gives to whole groups of them."""

OPS = (*PLAIN_OPS, ReduceOp.PREMUL_SUM)
"""The reductions of the table."""
_PREMUL_SUM = ReduceOp.PREMUL_SUM.name

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)
_Profile = tuple[str, ...]


def public_support(
    backend: BackendType,
    operation: str,
    device_type: str,
    dtype: torch.dtype,
    op: ReduceKind | None = None,
) -> str:
    """Return ``backend``'s support of a public operation: ``"native"``, ``"built"`` or ``""``.

    Example:
        >>> gloo = find_backend("gloo")
        >>> public_support(gloo, "all_reduce", "cpu", torch.int16, ReduceOp.SUM)
        'built'
        >>> public_support(gloo, "all_reduce", "cpu", torch.bool, ReduceOp.AVG)
        ''
    """
    is_plain = OPERATIONS[operation].is_plain
    if op == ReduceOp.PREMUL_SUM:  # collectives multiply first, and ask the backend for a sum
        if find_refusal(op, dtype) is not None:
            return ""
        op, is_plain = ReduceOp.SUM, False
    if device_type not in backend.device_types:
        return ""
    kinds = {
        backend.support(backend_operation, device_type, dtype, op)
        for backend_operation in OPERATIONS[operation].backend_operations
    }
    if "" in kinds:
        return ""
    return "native" if is_plain and kinds == {"native"} else "built"


def available_backends() -> list[BackendType]:
    """Return the backends, including torch plug-ins', that work on this machine."""
    adopt_torch_backends()
    backends = [backend for name in backend_names() if (backend := find_backend(name)) is not None]
    return [backend for backend in backends if backend.is_available()]


def capabilities(backends: Iterable[BackendType] | None = None) -> dict[str, Any]:
    """Return names as ``{backend: {device type: {operation: {op: {state: dtypes}}}}}``.

    Args:
        backends: None means all available.
    """
    # The op is ``""`` for operations without a reduction. Dtypes in neither state are not
    # supported.
    table: dict[str, Any] = {}
    for backend in available_backends() if backends is None else backends:
        for device_type in _in_order(backend.device_types):
            of_device = table.setdefault(backend.name, {}).setdefault(device_type, {})
            for operation in OPERATIONS:
                of_device[operation] = {
                    op: {
                        state: [dtype_name(dtype) for dtype in _with(state, states)]
                        for state in ("native", "built")
                    }
                    for op, states in _states(backend, operation, device_type)
                }
    return table


def dtypes_text(dtypes: Iterable[torch.dtype]) -> str:
    """Format dtypes, with group names for complete groups.

    Example:
        >>> dtypes_text([torch.bool, *DTYPE_GROUPS["floating"], torch.int8])
        'floating, int8, bool'
    """
    chosen = set(dtypes)
    if chosen == set(DTYPES):
        return "all"
    words: list[str] = []
    for name, group in DTYPE_GROUPS.items():
        here = [dtype for dtype in group if dtype in chosen]
        words += [name] if len(here) == len(group) else map(dtype_name, here)
    return ", ".join(words)


def overview_grid(
    backends: Sequence[BackendType], device_types: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """Return a header and rows: operations by backends; merge equal rows.

    Args:
        device_types: None means all.
    """
    columns: list[tuple[str, list[str]]] = []
    for backend in backends:
        of_devices = {
            device_type: tuple(
                _summary(_states(backend, operation, device_type)) for operation in OPERATIONS
            )
            for device_type in _in_order(backend.device_types, device_types)
        }
        for devices, cells in _joined(of_devices):
            columns.append((f"{backend.name}: {', '.join(devices)}", list(cells)))
    rows = {
        operation: tuple(cells[number] for _, cells in columns)
        for number, operation in enumerate(OPERATIONS)
    }
    head = ("operation", *(op_name for op_name, _ in columns))
    return [head, *((", ".join(operations), *cells) for operations, cells in _joined(rows))]


def table_grid(
    backends: Sequence[BackendType], device_types: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """Return a header and rows of backend, devices, operations and ops; merge equal rows.

    Args:
        device_types: None means all.
    """
    grid: list[tuple[str, ...]] = [
        ("backend", "devices", "operations", "op", "native", "built", "rejected"),
    ]
    for backend in backends:
        profiles: dict[tuple[str, tuple[str, ...]], tuple[tuple[str, _Profile], ...]] = {}
        for operation in OPERATIONS:
            of_devices = {
                device_type: tuple(_states(backend, operation, device_type))
                for device_type in _in_order(backend.device_types, device_types)
            }
            for devices, profile in _joined(of_devices):
                profiles[operation, tuple(devices)] = profile
        for keys, profile in _joined(profiles):
            for where in dict.fromkeys(devices for _, devices in keys):
                operations = ", ".join(operation for operation, devices in keys if devices == where)
                labels = (backend.name, ", ".join(where), operations)
                # Backend, devices and operations are printed only in their first row.
                for ops, states in _joined(dict(profile)):
                    texts = (dtypes_text(_with(state, states)) for state in ("native", "built", ""))
                    grid.append((*labels, ", ".join(ops), *(text or "-" for text in texts)))
                    labels = ("", "", "")
    return grid


_BEGIN, _END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
_OWN = ("gloo", "mpi", "nccl", "shm", "simulated", "ucc", "xccl")
"""The backends of this package, available here or not."""


def table_page(page: str) -> str:
    """Replace the tables between the two markers of the Markdown text ``page``."""
    backends = [backend for name in _OWN if (backend := find_backend(name)) is not None]
    parts = [_markdown(overview_grid(backends)), _markdown(table_grid(backends))]
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n" + "\n".join(parts) + f"{_END}{after}"


def _markdown(grid: Sequence[Sequence[str]]) -> str:
    head, *rows = grid
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell or " " for cell in line) + " |\n" for line in lines)


def _states(backend: BackendType, operation: str, device_type: str) -> list[tuple[str, _Profile]]:
    """Return the state of every dtype, in ``DTYPES`` order, for each op ("" for none)."""
    named = {op.name: op for op in OPS} if OPERATIONS[operation].reduces else {"": None}
    return [
        (
            name,
            tuple(public_support(backend, operation, device_type, dtype, op) for dtype in DTYPES),
        )
        for name, op in named.items()
    ]


def _with(state: str, states: _Profile) -> list[torch.dtype]:
    return [dtype for dtype, other in zip(DTYPES, states, strict=True) if other == state]


def _summary(rows: Iterable[tuple[str, _Profile]]) -> str:
    """Summarize all ops of an operation: "native", "built", "native, in part built" or "-"."""
    # PREMUL_SUM is built for every backend.
    found = {state for op, states in rows if op != _PREMUL_SUM for state in states if state}
    if len(found) == 2:
        return "native, in part built"
    return found.pop() if found else "-"


def _joined(table: Mapping[_Key, _Value]) -> list[tuple[list[_Key], _Value]]:
    """Group keys by equal value, in order of their first key."""
    keys_of: dict[_Value, list[_Key]] = {}
    for key, value in table.items():
        keys_of.setdefault(value, []).append(key)
    return [(keys, value) for value, keys in keys_of.items()]


def _in_order(device_types: Iterable[str], chosen: Collection[str] | None = None) -> list[str]:
    usual = ("cpu", "cuda")
    there = {kind for kind in device_types if chosen is None or kind in chosen}
    return [kind for kind in usual if kind in there] + sorted(there.difference(usual))


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(table_page(page.read_text(encoding="utf-8")), encoding="utf-8")

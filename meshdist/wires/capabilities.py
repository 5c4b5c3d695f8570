"""What each wire does by its own means, what is built for it, and what has no meaning: one table.

It is asked of the code (``Wire.support``), never written by hand. ``meshdist doctor`` prints it;
``python -m meshdist.wires.capabilities docs/verbs.md`` writes it into the page, between its marks.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ..arrays import dtype_name
from ..reduce_ops import ReduceKind, ReduceOp, find_refusal, op_name
from .base import REDUCING_VERBS, Wire, find_wire, wire_names

# The wires, each of which registers itself.
from .gloo import GlooWire as GlooWire
from .hierarchical import HierarchicalWire as HierarchicalWire
from .mpi import MpiWire as MpiWire
from .nccl import C10dWire as C10dWire
from .registered import adopt_torch_backends
from .shm import ShmWire as ShmWire
from .simulated import SimulatedWire as SimulatedWire

__all__ = [
    "DTYPES",
    "DTYPE_GROUPS",
    "OPS",
    "PUBLIC_VERBS",
    "Way",
    "available_wires",
    "capabilities",
    "dtypes_text",
    "overview_grid",
    "public_support",
    "table_grid",
    "table_page",
]

DTYPE_GROUPS: dict[str, tuple[torch.dtype, ...]] = {
    "floating": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "integers": (torch.int64, torch.int32, torch.int16, torch.int8),
    "unsigned": (torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    "bool": (torch.bool,),
    "complex": (torch.complex128, torch.complex64, torch.complex32),
    "float8": (
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
}
"""The dtypes of the table, under the names that it gives to whole groups of them."""

DTYPES = tuple(dtype for group in DTYPE_GROUPS.values() for dtype in group)

OPS: tuple[ReduceKind, ...] = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.PREMUL_SUM,
)
"""The reductions of the table."""


@dataclass(frozen=True)
class Way:
    """How a public verb comes to a wire.

    Args:
        verbs: the verbs of a communicator that carry it.
        is_plain: whether one call of it is one call of that verb; else it is built above the wire.
    """

    verbs: tuple[str, ...]
    is_plain: bool = True

    @property
    def reduces(self) -> bool:
        """Whether it takes an op."""
        return not REDUCING_VERBS.isdisjoint(self.verbs)


PUBLIC_VERBS: dict[str, Way] = {
    "all_reduce": Way(("all_reduce",)),
    "all_reduce_coalesced": Way(("all_reduce_list",)),
    "reduce": Way(("reduce",)),
    "reduce_scatter_tensor": Way(("reduce_scatter",)),
    "reduce_scatter_single": Way(("reduce_scatter",)),
    "reduce_scatter": Way(("reduce_scatter_list",)),
    "broadcast": Way(("broadcast",)),
    "all_gather_into_tensor": Way(("all_gather",)),
    "all_gather_single": Way(("all_gather",)),
    "all_gather": Way(("all_gather_list",)),
    "all_gather_coalesced": Way(("all_gather",), is_plain=False),
    "gather": Way(("gather",)),
    "scatter": Way(("scatter",)),
    "all_to_all": Way(("all_to_all",)),
    "all_to_all_single": Way(("all_to_all_single",)),
    "barrier": Way(("barrier",)),
    "send": Way(("send",)),
    "isend": Way(("send",)),
    "recv": Way(("recv",)),
    "irecv": Way(("recv",)),
    "batch_isend_irecv": Way(("send", "recv")),
    "all_reduce_multigpu": Way(("all_reduce",), is_plain=False),
    "reduce_multigpu": Way(("reduce",), is_plain=False),
    "broadcast_multigpu": Way(("broadcast",), is_plain=False),
    "all_gather_multigpu": Way(("all_gather",), is_plain=False),
    "monitored_barrier": Way((), is_plain=False),  # by way of the store
    "all_gather_object": Way(("all_gather", "all_gather_list"), is_plain=False),
    "gather_object": Way(("all_gather", "all_to_all_single"), is_plain=False),
    "broadcast_object_list": Way(("all_gather", "broadcast"), is_plain=False),
    "scatter_object_list": Way(("broadcast", "all_to_all_single"), is_plain=False),
    "send_object_list": Way(("send", "recv"), is_plain=False),
    "recv_object_list": Way(("send", "recv"), is_plain=False),
}
"""Every public verb, and what carries it."""

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=Hashable)
_Profile = tuple[str, ...]


def public_support(
    wire: Wire, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
) -> str:
    """How ``wire`` serves a public verb: ``"native"``, ``"built"`` or ``""``; as ``Wire.support``.

    Example:
        >>> gloo = find_wire("gloo")
        >>> public_support(gloo, "all_reduce", "cpu", torch.int16, ReduceOp.SUM)
        'built'
        >>> public_support(gloo, "all_reduce", "cpu", torch.int16, ReduceOp.AVG)
        ''
    """
    way = PUBLIC_VERBS[verb]
    is_plain = way.is_plain
    if op == ReduceOp.PREMUL_SUM:  # verbs multiply first, and ask the wire for a sum
        if find_refusal(op, dtype) is not None:
            return ""
        op, is_plain = ReduceOp.SUM, False
    if device_type not in wire.device_types:
        return ""
    served = {wire.support(one, device_type, dtype, op) for one in way.verbs}
    if "" in served:
        return ""
    return "native" if is_plain and served == {"native"} else "built"


def available_wires() -> list[Wire]:
    """The wires that work on this machine, those that plug-ins have registered too."""
    adopt_torch_backends()
    wires = [wire for name in wire_names() if (wire := find_wire(name)) is not None]
    return [wire for wire in wires if wire.is_available()]


def capabilities(
    wires: Iterable[Wire] | None = None,
) -> dict[str, dict[str, dict[str, dict[str, dict[str, list[str]]]]]]:
    """The whole table, as plain values for JSON.

    Args:
        wires: which; by default those available here.

    Returns:
        wire -> device type -> public verb -> op (``""`` where there is none) -> ``"native"`` and
        ``"built"``, each a list of dtypes. What is in neither is refused.
    """
    table: dict[str, dict[str, dict[str, dict[str, dict[str, list[str]]]]]] = {}
    for wire in available_wires() if wires is None else wires:
        for device_type in _in_order(wire.device_types):
            of_device = table.setdefault(wire.name, {}).setdefault(device_type, {})
            for verb, way in PUBLIC_VERBS.items():
                of_device[verb] = {
                    "" if op is None else op_name(op): {
                        state: [dtype_name(dtype) for dtype in _with(state, states)]
                        for state in ("native", "built")
                    }
                    for op, states in _states(wire, verb, way, device_type)
                }
    return table


def dtypes_text(dtypes: Iterable[torch.dtype]) -> str:
    """Name dtypes shortly: whole groups by their names.

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
    wires: Sequence[Wire], device_types: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """A row for each verb, a column for each wire; the first row is the head.

    PREMUL_SUM, which is built for every wire, does not count.

    Args:
        wires: which.
        device_types: which of those that they serve; by default all.
    """
    columns: list[tuple[str, list[str]]] = []
    for wire in wires:
        of_devices = {
            device_type: tuple(
                _summary(_states(wire, verb, way, device_type))
                for verb, way in PUBLIC_VERBS.items()
            )
            for device_type in _in_order(wire.device_types, device_types)
        }
        for devices, cells in _joined(of_devices):
            columns.append((f"{wire.name}: {', '.join(devices)}", list(cells)))
    rows = {
        verb: tuple(cells[number] for _, cells in columns)
        for number, verb in enumerate(PUBLIC_VERBS)
    }
    head = ("verb", *(title for title, _ in columns))
    return [head, *((", ".join(verbs), *cells) for verbs, cells in _joined(rows))]


def table_grid(
    wires: Sequence[Wire], device_types: Collection[str] | None = None
) -> list[tuple[str, ...]]:
    """The whole table, with equal rows joined; the first row is the head.

    Wire, devices and verbs stand in the first row that they hold for.

    Args:
        wires: which.
        device_types: which of those that they serve; by default all.
    """
    grid: list[tuple[str, ...]] = [
        ("wire", "devices", "verbs", "op", "native", "built", "refused"),
    ]
    for wire in wires:
        places: dict[tuple[str, tuple[str, ...]], tuple[tuple[str, _Profile], ...]] = {}
        for verb, way in PUBLIC_VERBS.items():
            of_devices = {
                device_type: tuple(
                    ("" if op is None else op_name(op), states)
                    for op, states in _states(wire, verb, way, device_type)
                )
                for device_type in _in_order(wire.device_types, device_types)
            }
            for devices, profile in _joined(of_devices):
                places[verb, tuple(devices)] = profile
        for keys, profile in _joined(places):
            for where in dict.fromkeys(devices for _, devices in keys):
                verbs = ", ".join(verb for verb, devices in keys if devices == where)
                place = (wire.name, ", ".join(where), verbs)
                for ops, states in _joined(dict(profile)):
                    told = (dtypes_text(_with(state, states)) for state in ("native", "built", ""))
                    grid.append((*place, ", ".join(ops), *(text or "-" for text in told)))
                    place = ("", "", "")
    return grid


_BEGIN, _END = "<!-- capabilities: begin -->", "<!-- capabilities: end -->"
_OWN = ("gloo", "hierarchical", "mpi", "nccl", "shm", "simulated", "ucc", "xccl")
"""The wires of this package, whether or not this machine has them."""


def table_page(page: str) -> str:
    """Return the text of a page with the table of this package's wires between its marks."""
    wires = [wire for name in _OWN if (wire := find_wire(name)) is not None]
    parts = [_markdown(overview_grid(wires)), _markdown(table_grid(wires))]
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n" + "\n".join(parts) + f"{_END}{after}"


def _markdown(grid: Sequence[Sequence[str]]) -> str:
    head, *rows = grid
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cell or " " for cell in line) + " |\n" for line in lines)


def _states(
    wire: Wire, verb: str, way: Way, device_type: str
) -> list[tuple[ReduceKind | None, _Profile]]:
    """For each op the state of every dtype, in the order of ``DTYPES``."""
    ops: tuple[ReduceKind | None, ...] = OPS if way.reduces else (None,)
    return [
        (op, tuple(public_support(wire, verb, device_type, dtype, op) for dtype in DTYPES))
        for op in ops
    ]


def _with(state: str, states: _Profile) -> list[torch.dtype]:
    return [dtype for dtype, one in zip(DTYPES, states, strict=True) if one == state]


def _summary(rows: Iterable[tuple[ReduceKind | None, _Profile]]) -> str:
    """What a verb is on the whole; refusals of an op by a dtype do not count."""
    found = {state for op, states in rows if op != ReduceOp.PREMUL_SUM for state in states if state}
    if len(found) == 2:
        return "native, in part built"
    return found.pop() if found else "-"


def _joined(table: Mapping[_Key, _Value]) -> list[tuple[list[_Key], _Value]]:
    """The values with the keys that share each, in order."""
    keys_of: dict[_Value, list[_Key]] = {}
    for key, value in table.items():
        keys_of.setdefault(value, []).append(key)
    return [(keys, value) for value, keys in keys_of.items()]


def _in_order(device_types: Iterable[str], wanted: Collection[str] | None = None) -> list[str]:
    usual = ("cpu", "cuda")
    there = {one for one in device_types if wanted is None or one in wanted}
    return [one for one in usual if one in there] + sorted(there.difference(usual))


def _main(arguments: Sequence[str]) -> None:
    for name in arguments:
        path = Path(name)
        path.write_text(table_page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1:])

"""Describe calls of collectives: the call, a record of each time it is made, and its group.

Equal calls share one object, whose fingerprint is computed once. The recorder and the native core
keep records of calls; comparisons, works and errors read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from math import prod
from types import CodeType
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch

from ..dtypes import dtype_name
from ..operation_table import OBJECT_OPERATIONS, SENDING_OPERATIONS
from ..reduce_ops import ReduceKind, ReduceOp
from .call_sites import site_text

_MOST_CALLS = 4096
_LOW = 0xFFFFFFFF
_OPS: dict[int | None, ReduceKind] = {op.value: op for op in ReduceKind.__members__.values()}
_SUM = ReduceOp.SUM
_SUM_NUMBER = ReduceOp.SUM.value  # known beforehand, since asking costs 0.1 microseconds

Data: TypeAlias = "tuple[Any, ...] | None"
"""The shape and dtype of a tensor, a tuple of them for a list of tensors, or None."""

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | None
"""The data of a call: a tensor, a list of tensors, or None."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts of a group that messages show.

    Args:
        ranks: the global ranks, in group order.
        rank: this rank's group rank.
        label: the communicator's label, equal on every rank; "" for none.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    label: str = ""
    backend: str = ""
    timeout: timedelta = timedelta()

    @property
    def here(self) -> str:
        return f"rank {self.ranks[self.rank]}"


@dataclass(frozen=True, slots=True)
class Call:
    """A collective with its arguments, shared by equal calls; ``get_call`` finds it.

    Args:
        operation: its public name.
        data: its tensors' shapes and dtypes.
        op_number: its reduction's number, or None.
        root: the group rank of its source or destination, or None.
        op_name: equal on every rank; "" for a direct call.
        is_uneven: whether the sizes sent and received may differ between ranks.
        layouts: memory layouts that must be equal on every rank; else ().
        peer: for a message, the other side's group rank; None for any.
        tag: a message's tag; None for a collective.
    """

    operation: str
    data: Data
    op_number: int | None = None
    root: int | None = None
    op_name: str = ""
    is_uneven: bool = False
    layouts: tuple[Any, ...] = ()
    peer: int | None = None
    tag: int | None = None
    fingerprint_inputs: tuple[int, ...] = field(init=False, compare=False, repr=False)
    """The numbers that must be equal on every rank, or on both sides of a message."""
    fingerprint: int = field(init=False, compare=False, repr=False)
    """A 32-bit hash of ``fingerprint_inputs``, equal in every process."""
    unseen: int = field(init=False, compare=False, repr=False)
    """The fingerprint if the call has an operation name, which backends cannot see; else 0."""
    kind: tuple[bool, int | None, int | None] = field(init=False, compare=False, repr=False)
    """The direction, peer and tag of a message, which is numbered among its kind."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint_inputs", _fingerprint_inputs(self))
        object.__setattr__(self, "fingerprint", fingerprint(*self.fingerprint_inputs))
        object.__setattr__(self, "unseen", self.fingerprint if self.op_name else 0)
        object.__setattr__(self, "kind", (self.is_send, self.peer, self.tag))

    def __hash__(self) -> int:
        return self.fingerprint  # calls are looked up often, and made once

    @property
    def op(self) -> ReduceKind | None:
        return _OPS.get(self.op_number)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each tensor's shape and dtype."""
        if self.data is None:
            return ()
        return self.data if is_list(self.data) else (self.data,)

    @property
    def is_send(self) -> bool:
        return self.operation in SENDING_OPERATIONS

    @property
    def name(self) -> str:
        """The collective and its operation name, as in ``all_reduce of the op_name``."""
        return f"{self.operation} of {self.op_name}" if self.op_name else self.operation

    @property
    def data_text(self) -> str:
        """The shapes and dtypes as in ``(2,) float32``, or ``[(2,) float32, (3,) int8]``."""
        shown = ", ".join(f"{tuple(shape)} {dtype_name(dtype)}" for shape, dtype in self.parts)
        return f"[{shown}]" if is_list(self.data) else shown

    @property
    def arguments(self) -> list[str]:
        """The argument texts, except group ranks: ``(2,) float32`` and ``SUM``."""
        return [*filter(None, [self.data_text, "" if self.op is None else self.op.name])]

    @property
    def text(self) -> str:
        """The call as in ``all_reduce((2,) float32, SUM) of the op_name``."""
        return self.with_arguments(self.arguments)

    def with_arguments(self, arguments: Sequence[str]) -> str:
        """Return ``text`` with ``arguments`` between its brackets."""
        op_name = f" of {self.op_name}" if self.op_name else ""
        return f"{self.operation}({', '.join(arguments)}){op_name}"


class CallRecord(NamedTuple):
    """A record of a call without its tensors, stored as a plain tuple until it is read.

    Args:
        sequence: the number of collectives on the communicator, including this call.
        sizes: the elements sent to, and received from, each rank of an uneven collective; else ().
        number: a message's number for its direction, peer and tag; 0 for a collective, and while
            the sender is unknown.
        code, instruction: the program location of the call.
        stack: the callers of that location, if recorded.
    """

    sequence: int
    group: GroupFacts
    call: Call
    sizes: Sequence[Sequence[int]] = ()
    number: int = 0
    code: CodeType | None = None
    instruction: int = 0
    stack: Sequence[str] = ()

    @property
    def is_message(self) -> bool:
        return self.call.tag is not None

    @property
    def arguments(self) -> str:
        """The arguments as in ``(2,) float32, SUM``, with root, sizes, layouts, peer and tag."""
        call = self.call
        parts = call.arguments
        if call.root is not None:
            parts.append(f"root rank {self.group.ranks[call.root]}")
        if self.sizes:
            sent, received = map(list, self.sizes)
            parts.append(f"sending {sent}, receiving {received} elements")
        if call.layouts:
            parts.append(f"strides {', '.join(str(strides) for _, strides in call.layouts)}")
        if call.tag is not None:
            parts.append(f"{'to' if call.is_send else 'from'} {self._peer}")
            if call.tag:
                parts.append(f"tag {call.tag}")
        return ", ".join(parts)

    @property
    def where(self) -> str:
        """The location as ``train.py:8 in step`` with its callers, or "an unknown place"."""
        if self.code is None:
            return "an unknown place"
        return "\n  called at ".join([site_text(self.code, self.instruction), *self.stack])

    @property
    def text(self) -> str:
        """The call and location: ``all_reduce((2,) float32, SUM) at train.py:8 in step``."""
        return f"{self.called} at {self.where}"

    @property
    def called(self) -> str:
        """The call as in ``Call.text``, with all arguments."""
        return self.call.with_arguments([self.arguments])

    @property
    def heading(self) -> str:
        """The call, its group, its location, and a collective's number."""
        if self.is_message:  # both sides of a message may count differently
            return f"{self.called} on {self.group.name} at {self.where}"
        return f"call {self.sequence} on {self.group.name}: {self.called} at {self.where}"

    @property
    def waits_for(self) -> str:
        """The event that a send or receive waits for; "" for a collective."""
        call = self.call
        if not self.is_message:
            return ""
        if call.operation in OBJECT_OPERATIONS:
            answer = "recv_object_list" if call.is_send else "send_object_list"
            return f"{self._peer} in {answer}, with this rank as its peer"
        if call.is_send:
            return f"{self._peer} to receive {call.data_text} from this rank with tag {call.tag}"
        return f"{self._peer} to send {call.data_text} to this rank with tag {call.tag}"

    @property
    def _peer(self) -> str:
        peer = self.call.peer
        return "any rank" if peer is None else f"rank {self.group.ranks[peer]}"


class _Calls(dict[tuple[Any, ...], Call]):
    def __missing__(self, fields: tuple[Any, ...]) -> Call:
        if len(self) >= _MOST_CALLS:
            self.clear()
        self[fields] = call = Call(*fields)
        return call


calls = _Calls()
"""Each call by a tuple of its fields, from ``operation`` to ``layouts``; a message's to ``tag``."""


def get_call(
    operation: str,
    tensors: Tensors,
    op: ReduceKind | None = None,
    root: int | None = None,
    op_name: str = "",
    is_uneven: bool = False,
    layouts: tuple[Any, ...] = (),
) -> Call:
    """Return the ``Call`` with these fields; equal calls are the same object."""
    data: Data = None
    if isinstance(tensors, torch.Tensor):
        data = tensors.shape, tensors.dtype
    elif tensors is not None:
        data = tuple([(part.shape, part.dtype) for part in tensors])
    number = _SUM_NUMBER if op is _SUM else None if op is None else op.value
    return calls[operation, data, number, root, op_name, is_uneven, layouts]


def get_message(operation: str, tensor: torch.Tensor, peer: int | None, tag: int) -> Call:
    """Return the ``Call`` of a message to or from member ``peer`` (None: any)."""
    data = tensor.shape, tensor.dtype
    return calls[operation, data, None, None, "", False, (), peer, tag]


def is_list(data: Data) -> bool:
    """Return whether ``data`` describes a list of tensors."""
    return data is not None and not (data and isinstance(data[0], torch.Size))


def _fingerprint_inputs(call: Call) -> tuple[int, ...]:
    """Return the numbers that must be equal on every rank; uneven calls have no count."""
    dtypes, counts = [_code(kind) for _, kind in call.parts], [prod(size) for size, _ in call.parts]
    dtype, count = (*dtypes, 0)[0], (*counts, 0)[0]
    if is_list(call.data):
        dtype, count = fingerprint(*dtypes), fingerprint(*counts)
    if call.tag is not None:
        return dtype, count, call.operation in OBJECT_OPERATIONS
    if call.is_uneven:
        count = 0
    op, root = (-2 if number is None else number for number in (call.op_number, call.root))
    # Do not cache the hashes of operation names: a program may have any number of them.
    op_name = crc32(call.op_name.encode()) if call.op_name else 0
    layouts = [hash(call.layouts)] if call.layouts else []
    return _code(call.operation), dtype, count, op, root, op_name, *layouts


def fingerprint(*values: int) -> int:
    """Return 32 bits, equal for equal ``values`` on every process that runs this Python."""
    return hash(values) & _LOW


@cache
def _code(name: object) -> int:
    """Return the number of a collective or dtype in headers."""
    return crc32(str(name).encode())


def likeness(note: CallRecord | None) -> str:
    """Return the ``expected`` field of a mismatch: the equal parts of all calls.

    Args:
        note: the call of this rank; None if it has been overwritten.
    """
    op_name = "" if note is None else note.call.op_name
    named = ", with the same operation name," if op_name else ""
    if op_name.startswith("lax."):
        return (
            "the same collective of lax, on leaves of equal paths, shapes and dtypes, on every rank"
        )
    if note is not None and note.sizes:
        return (
            f"the same collective and dtype{named} on every rank, and the same sizes on both sides"
        )
    return f"the same collective, dtype, number of elements, op and root{named} on every rank"

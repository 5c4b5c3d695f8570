"""One record of a call and one of its group; what of a call must be equal on all members.

The recorder keeps the records, the comparisons read them (in the header table, by a round, on
simulated ranks, inside torch's groups), and so do works and errors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from math import prod
from types import CodeType
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch

from ..dtypes import dtype_name
from ..reduce_ops import ReduceKind, ReduceOp
from ..verb_table import OBJECT_VERBS
from .program import place_text

__all__ = [
    "SUM_NUMBER",
    "Call",
    "Data",
    "GroupFacts",
    "Message",
    "Tensors",
    "collective_fingerprints",
    "data_of",
    "fingerprint",
    "fingerprint_of",
    "header",
    "header_of",
    "is_list",
    "laid_fingerprint",
    "likeness",
    "message_fingerprint",
    "message_fingerprints",
]

_MOST_FINGERPRINTS = 4096
_LOW = 0xFFFFFFFF
_SUM = ReduceOp.SUM

SUM_NUMBER = ReduceOp.SUM.value  # known beforehand, since asking costs 0.1 microseconds

Data: TypeAlias = "tuple[Any, ...] | None"
"""The shape and dtype of a tensor, a tuple of such for a list of tensors, or None."""

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor] | None
"""The data of a call: a tensor, a list of such, or nothing."""

Message: TypeAlias = "tuple[bool, int | None, int, int]"
"""Of a send or receive: whether it is a send, the peer (None: any member), the tag, and its number
among those of its direction, peer and tag (0 as long as its sender is not known)."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The facts of a group that messages tell, as one of its members sees it.

    Args:
        name: what messages call the group.
        ranks: the members' global ranks, in group order.
        rank: this member's place among them.
        label: of the communicator, equal on all members; "" for none.
        wire: the name of its wire.
        timeout: how long a verb may wait.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    label: str = ""
    wire: str = ""
    timeout: timedelta = timedelta()

    @property
    def here(self) -> str:
        """This member, for messages."""
        return f"rank {self.ranks[self.rank]}"


class Call(NamedTuple):
    """One call of a verb. Its tensors are not kept.

    The recorder, and the native core for plain calls, keep these fields as plain tuples, which cost
    less to make.

    Args:
        sequence: the number of collectives on its group's communicator so far, with this one.
        group: whose call it was.
        verb: its public name.
        data: the shapes and dtypes of what it was called on.
        op: its reduction, if it is one.
        root: the place of its source or destination in the group, if it has one.
        sizes: how many elements go to and come from each member, where members may differ in that;
            else ().
        message: for a send or receive.
        code, instruction: the place in the program.
        stack: the places of the program from which that was called, where they are kept.
        layouts: how the tensors lie in memory, where that must be equal on all members; else ().
        title: what the verb is a part of, equal on all members; "" where it stands for itself.
    """

    sequence: int
    group: GroupFacts
    verb: str
    data: Data
    op: ReduceKind | None = None
    root: int | None = None
    sizes: Sequence[Sequence[int]] = ()
    message: Message | None = None
    code: CodeType | None = None
    instruction: int = 0
    stack: Sequence[str] = ()
    layouts: Sequence[Any] = ()
    title: str = ""

    @property
    def name(self) -> str:
        """``all_reduce``, or ``all_reduce of the title``."""
        return f"{self.verb} of {self.title}" if self.title else self.verb

    @property
    def arguments(self) -> str:
        """``(2,) float32, SUM``."""
        parts = [] if self.data is None else [_data_text(self.data)]
        if self.op is not None:
            parts.append(self.op.name)
        if self.root is not None:
            parts.append(f"root rank {self.group.ranks[self.root]}")
        if self.sizes:
            sent, taken = map(list, self.sizes)
            parts.append(f"sending {sent}, taking {taken} elements")
        if self.layouts:
            parts.append(f"strides {', '.join(str(strides) for _, strides in self.layouts)}")
        if self.message is not None:
            is_send, _, tag, _ = self.message
            parts.append(f"{'to' if is_send else 'from'} {self._peer}")
            if tag:
                parts.append(f"tag {tag}")
        return ", ".join(parts)

    @property
    def where(self) -> str:
        """``train.py:8 in step``, and under it the stack."""
        if self.code is None:
            return "an unknown place"
        return "\n  called at ".join([place_text(self.code, self.instruction), *self.stack])

    @property
    def text(self) -> str:
        """``all_reduce((2,) float32, SUM) at train.py:8 in step``."""
        return f"{self.called} at {self.where}"

    @property
    def called(self) -> str:
        """``all_reduce((2,) float32, SUM)``, and behind it the title."""
        title = f" of {self.title}" if self.title else ""
        return f"{self.verb}({self.arguments}){title}"

    @property
    def heading(self) -> str:
        """As ``text``, with its group, and its number in the members' common sequence."""
        called = self.called
        if self.message is not None:  # the two ends of a message need not agree on a number
            return f"{called} on {self.group.name} at {self.where}"
        return f"call {self.sequence} on {self.group.name}: {called} at {self.where}"

    @property
    def waits_for(self) -> str:
        """The event that a send or receive waits for, in words; "" for a collective."""
        if self.message is None:
            return ""
        is_send, _, tag, _ = self.message
        if self.verb in OBJECT_VERBS:
            answer = "recv_object_list" if is_send else "send_object_list"
            return f"{self._peer} in {answer}, with this rank as its peer"
        what = _data_text(self.data)
        if is_send:
            return f"{self._peer} to receive {what} from this rank under tag {tag}"
        return f"{self._peer} to send {what} to this rank under tag {tag}"

    @property
    def _peer(self) -> str:
        peer = None if self.message is None else self.message[1]
        return "any rank" if peer is None else f"rank {self.group.ranks[peer]}"


def data_of(tensor: Tensors) -> Data:
    """The shapes and dtypes that a record keeps of a verb's tensors."""
    if tensor is None:
        return None
    if isinstance(tensor, torch.Tensor):
        return tensor.shape, tensor.dtype
    return tuple([(part.shape, part.dtype) for part in tensor])


def is_list(data: Data) -> bool:
    """Whether ``data`` is of a list of tensors."""
    return data is not None and not (data and isinstance(data[0], torch.Size))


def _compared(call: Call | tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of a call that must be equal on all members: the arguments of ``header``."""
    verb, data, op, root, sizes = call[2:7]
    number = SUM_NUMBER if op is _SUM else None if op is None else op.value
    return verb, data, number, root, bool(sizes), call[-1]


def header(
    verb: str, data: Data, op: int | None, root: int | None, is_uneven: bool, title: str = ""
) -> tuple[int, ...]:
    """The parts of a collective that must be equal on all members, as numbers.

    They are those of ``Call``, ``op`` by its number; without the number of elements where members
    may differ in that.
    """
    dtype = count = 0
    if is_list(data):
        dtype = fingerprint(*(_code(kind) for _, kind in data or ()))
        count = 0 if is_uneven else fingerprint(*(prod(shape) for shape, _ in data or ()))
    elif data is not None:
        shape, kind = data
        dtype, count = _code(kind), 0 if is_uneven else prod(shape)
    name = crc32(title.encode()) if title else 0  # not kept: a program may have any number
    return _code(verb), dtype, count, -2 if op is None else op, -2 if root is None else root, name


def fingerprint(*values: int) -> int:
    """A number of 32 bits, equal for equal values on every process that runs this Python."""
    return hash(values) & _LOW


class _Fingerprints(dict[Any, int]):
    """Fingerprints by what they are of; kept, since programs repeat their calls."""

    def __init__(self, values: Callable[..., Sequence[int]]) -> None:
        self._values = values

    def __missing__(self, key: Any) -> int:
        if len(self) >= _MOST_FINGERPRINTS:
            self.clear()
        self[key] = found = fingerprint(*self._values(*key))
        return found


@cache
def _code(name: object) -> int:
    """A number for a verb or dtype."""
    return crc32(str(name).encode())


collective_fingerprints = _Fingerprints(header)
"""By the arguments of ``header``."""


def header_of(call: Call | tuple[Any, ...]) -> tuple[int, ...]:
    """The header of a call, or of a plain tuple of its fields."""
    return header(*_compared(call))


def fingerprint_of(call: Call | tuple[Any, ...]) -> int:
    """The fingerprint of the header of a call, or of a plain tuple of its fields."""
    return collective_fingerprints[_compared(call)]


def likeness(call: Call | None) -> str:
    """The text of what must be equal on all members; ``call`` is this member's, if it is known."""
    title = "" if call is None else call.title
    under = " under the same title" if title else ""
    if title.startswith("lax."):
        return "the same verb of lax, on leaves of equal paths, shapes and dtypes, on every member"
    if call is not None and call.sizes:
        return f"the same verb and dtype{under}, and what one member takes as the other sends it"
    return f"the same verb, dtype, number of elements, op and root{under} on every member"


def laid_fingerprint(call: Call | tuple[Any, ...], layouts: Sequence[Hashable]) -> int:
    """The fingerprint of a call's header together with how its tensors lie in memory."""
    return fingerprint(*header_of(call), hash(tuple(layouts)))


message_fingerprints = _Fingerprints(
    lambda dtype, count, of_objects: (_code(dtype), count, of_objects)
)
"""By what must be equal on both sides of a message."""


def message_fingerprint(verb: str, tensor: torch.Tensor) -> int:
    """The fingerprint of a message, equal on both sides where they fit."""
    return message_fingerprints[tensor.dtype, tensor.numel(), verb in OBJECT_VERBS]


def _data_text(data: Any) -> str:
    if is_list(data):
        return f"[{', '.join(map(_data_text, data))}]"
    shape, dtype = data
    return f"{tuple(shape)} {dtype_name(dtype)}"

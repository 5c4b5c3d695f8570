"""One call of a collective: its arguments as they travel, their checks, its run, its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from ..arrays import find_hand_back, shape_text
from ..dtypes import dtype_name
from ..error_text import ranks_text
from ..errors import ArgumentError, DtypeError, KindError, LengthError, ShapeError
from ..groups.channel import Channel
from ..groups.process_group import ProcessGroup, resolve_group
from ..reduce_ops import Factor, ReduceKind, ReduceOp, split_premul
from ..verb_table import VERBS
from ..wires.communicator import Communicator
from ..wires.failures import WireFailure
from ..wires.operations import Operation, Terms
from ..wires.packing import ROW_MAJOR, find_layout, flat
from ..wires.work import Work, may_be_dropped
from .checks import (
    as_wire_tensor,
    check_flag,
    check_reducible,
    forbid_gradient,
    note_write,
    premultiplied,
)

__all__ = ["Collective", "Start", "StartOn", "find_copy_back", "run"]

_WORTH_COMPARING = 1 << 14  # bytes; smaller ones are copied in less time

Start: TypeAlias = Callable[[Communicator, Terms], Operation]
"""Starts a collective on a communicator, under the terms that it is given."""

StartOn: TypeAlias = Callable[[Communicator, Terms, list[torch.Tensor]], Operation]
"""The same, with the tensors to hand to the communicator."""

Written: TypeAlias = tuple[Any, torch.Tensor, torch.Tensor]
"""An array that a verb writes: the caller's, a tensor on its memory, and the one that travels."""


class Collective:
    """One call of a collective; what it checks raises before anything is sent.

    Args:
        name: the verb's public name.
        group: whose members call it, as the verb was given it.
        root: the place of its source or destination.
        title: what it is a part of; "" where it stands for itself.
        is_elementwise: whether its tensors correspond element by element on all members, so that
            ``run_elementwise`` may leave them as they lie in memory.

    Attributes:
        written: what it writes.
        foreign: the arrays of other libraries than torch that it reads or writes.
        op, factor: the reduction that is compared, and the factor of PREMUL_SUM.
    """

    __slots__ = (
        "factor",
        "foreign",
        "group",
        "is_elementwise",
        "name",
        "op",
        "root",
        "title",
        "written",
    )

    def __init__(
        self,
        name: str,
        group: Any,
        root: int | None = None,
        *,
        title: str = "",
        is_elementwise: bool = False,
    ) -> None:
        self.name = name
        self.title = title
        self.is_elementwise = is_elementwise
        self.root = root
        self.group: ProcessGroup = group if type(group) is ProcessGroup else resolve_group(group)
        self.written: list[Written] = []
        self.foreign: list[Any] = []
        self.op: ReduceKind | None = None
        self.factor: Factor | None = None

    @property
    def is_root(self) -> bool:
        """Whether this member is the root."""
        return self.root == self.group.rank()

    @property
    def here(self) -> str:
        """This rank and the group, for messages."""
        return f"rank {self.group.world.rank}, {self.group.name}"

    def read(self, x: Any, argument: str) -> torch.Tensor:
        """The wire tensor of an array that the verb reads."""
        data, buffer = self._as_wire_tensor(x, argument, writable=False)
        if data is not x:
            self.foreign.append(x)
        return buffer

    def write(self, x: Any, argument: str) -> torch.Tensor:
        """The wire tensor of an array that the verb writes."""
        data, buffer = self._as_wire_tensor(x, argument, writable=True)
        if data is not x:
            self.foreign.append(x)
        self.written.append((x, data, buffer))
        return buffer

    def _as_wire_tensor(
        self, x: Any, argument: str, *, writable: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keeps = self.is_elementwise
        return as_wire_tensor(x, argument, self.name, writable=writable, keeps_layout=keeps)

    def take_list(
        self,
        take: Callable[[Any, str], torch.Tensor],
        given: Any,
        argument: str,
        like: torch.Tensor,
        likes_name: str,
        role: str = "",
    ) -> list[torch.Tensor]:
        """The tensors ``read`` or ``write`` takes of a list, one per member, all like ``like``.

        Where ``role`` names the root, it alone gives a list, of entries as large as ``like``.
        """
        tensors = []
        entries = self.check_list(given, argument, self.group.size(), role=role)
        for place, one in enumerate(entries):
            entry = f"{argument}[{place}]"
            tensors.append(take(one, entry))
            self.check_alike(tensors[-1], like, (entry, likes_name))
            if role:
                self.check_same_size(tensors[-1], like, (argument, likes_name))
        return tensors

    def write_lists(
        self, given: Any, argument: str, num_lists: int, length: int
    ) -> list[torch.Tensor]:
        """The results of ``write`` for all entries of a list of lists, one list after the other."""
        rows = self.check_list(given, argument, num_lists)
        for row in rows:
            self.check_list(row, f"an entry of {argument}", length)
        return [self.write(one, argument) for row in rows for one in row]

    def take_op(self, op: Any, *tensors: torch.Tensor) -> ReduceKind:
        """The plain reduction to do on ``tensors``; ``scaled`` does the rest of PREMUL_SUM."""
        kind, self.factor = split_premul(op)
        for tensor in tensors:
            check_reducible(kind, tensor, self.name, self.factor)
        self.op = kind if self.factor is None else ReduceOp.PREMUL_SUM
        return kind

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` times the factor of PREMUL_SUM, in new memory; itself where there is none."""
        return tensor if self.factor is None else premultiplied(tensor, self.factor)

    def run(
        self,
        start: Start,
        tensor: torch.Tensor | list[torch.Tensor],
        async_op: bool = False,
        result: Sequence[Any] | None = None,
        *,
        sent: Sequence[int] = (),
        taken: Sequence[int] = (),
    ) -> Work | None:
        """Compare the call with the members', as ``Channel.enter`` does, and ``run`` it."""
        check_flag(async_op, self.name)
        self._check_apart()
        channel = self._open_channel(tensor)
        channel.enter(self.name, tensor, self.op, self.root, sent, taken, title=self.title)
        return self._run(channel, start, async_op, result)

    def run_elementwise(
        self,
        start: StartOn,
        tensor: torch.Tensor | list[torch.Tensor],
        async_op: bool = False,
        result: Sequence[Any] | None = None,
    ) -> Work | None:
        """As ``run``, with ``start`` given what to hand to the communicator for each tensor.

        What is not in row-major order is handed over as it lies, where that is right though the
        members' layouts may differ: where the wire sees to it, or the members compare them. In a
        reduction on a device they disagree where layouts differ. Else it is copied.
        """
        check_flag(async_op, self.name)
        tensors = tensor if isinstance(tensor, list) else [tensor]
        self._check_apart()
        channel = self._open_channel(tensor)
        handed = self._enter_as_they_lie(channel, tensor, tensors, async_op)
        if handed is None:
            handed = [one.contiguous() for one in tensors]
            copies = {id(one): copy for one, copy in zip(tensors, handed, strict=True)}
            self.written = [(x, data, copies[id(one)]) for x, data, one in self.written]
        return self._run(channel, lambda wire, terms: start(wire, terms, handed), async_op, result)

    def _enter_as_they_lie(
        self,
        channel: Channel,
        tensor: torch.Tensor | list[torch.Tensor],
        tensors: list[torch.Tensor],
        async_op: bool,
    ) -> list[torch.Tensor] | None:
        """Compare the call; return what to hand over of tensors that are not copied, or None."""
        asked = self.name, tensor, self.op, self.root
        if all(one.is_contiguous() for one in tensors) or self._wire_takes(channel, tensors):
            channel.enter(*asked, title=self.title)
            return tensors
        layouts = [find_layout(one) or ROW_MAJOR for one in tensors]
        if self.op is not None and channel.demands_layouts:
            channel.enter(*asked, layouts=layouts, title=self.title)
            return [flat(one) for one in tensors]
        is_large = sum(one.nbytes for one in tensors) >= _WORTH_COMPARING
        if channel.compares_layouts and is_large and not async_op:
            channel.enter(*asked, layouts=layouts, title=self.title)
            return [flat(one) for one in tensors] if channel.has_one_layout() else None
        channel.enter(*asked, title=self.title)
        return None

    def _wire_takes(self, channel: Channel, tensors: list[torch.Tensor]) -> bool:
        verb = VERBS[self.name].wire_verbs[0]
        op = self.op if self.factor is None else ReduceOp.SUM
        return channel.communicator.takes_layouts(verb, tensors, op)

    def _open_channel(self, tensor: torch.Tensor | list[torch.Tensor]) -> Channel:
        first = tensor[0] if isinstance(tensor, list) else tensor
        return self.group.open_channel(first.device.type)

    def _run(
        self, channel: Channel, start: Start, async_op: bool, result: Sequence[Any] | None
    ) -> Work | None:
        """Run the call, which the channel has let through."""
        shows_all = VERBS[self.name].is_plain and self.factor is None and not self.title
        return run(
            channel,
            self.name,
            start,
            self.written,
            async_op,
            foreign=self.foreign,
            result=result,
            shows_all=shows_all,
        )

    # -- checks -----------------------------------------------------------------------------------

    def _check_apart(self) -> None:
        """Raise where two of the arrays that the verb writes have memory in common.

        Of ``[x] * 3`` the last result alone would be left. Arrays with gaps, such as columns of one
        matrix, may lie among each other: of them the first elements are compared.
        """
        if len(self.written) < 2:
            return
        spans = sorted(
            (data.data_ptr(), data.nbytes if data.is_contiguous() else data.element_size(), place)
            for place, (_, data, _) in enumerate(self.written)
            if data.numel()
        )
        for (start, size, place), (begin, _, other) in pairwise(spans):
            if begin < start + size:
                raise ArgumentError(
                    f"{self.name} cannot write two results into the same memory",
                    where=self.here,
                    expected="arrays that do not overlap",
                    found=f"those it writes, counted from 0: {place} and {other} overlap",
                    fix="make each its own: [torch.empty_like(x) for _ in range(n)], not [x] * n",
                )

    def check_alike(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless both tensors have one dtype and one device."""
        self.check_same_dtype(output, tensor, names)
        self.check_same_device(output, tensor, names)

    def check_same_dtype(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless both tensors have one dtype."""
        if output.dtype != tensor.dtype:
            dtypes = (dtype_name(output.dtype), dtype_name(tensor.dtype))
            raise DtypeError(
                f"{self.name} has arguments of different dtypes",
                where=self.here,
                expected="one dtype",
                found=f"{names[0]} {dtypes[0]}, {names[1]} {dtypes[1]}",
                fix=f"give {names[0]} the dtype of {names[1]}, {tensor.dtype}",
            )

    def check_same_device(
        self, output: torch.Tensor, tensor: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless both tensors lie on one device."""
        if output.device != tensor.device:
            raise ArgumentError(
                f"{self.name} has arguments on different devices",
                where=self.here,
                expected="one device",
                found=f"{names[0]} on {output.device}, {names[1]} on {tensor.device}",
                fix=f"give {names[0]} the device of {names[1]}, {str(tensor.device)!r}",
            )

    def check_blocks(
        self, whole: torch.Tensor, block: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless ``whole`` is one ``block`` per member: concatenated, stacked, or flat."""
        size = self.group.size()
        if whole.dim() == 1 and whole.numel() == size * block.numel():
            return  # the common case, decided fast
        stacked = (size, *block.shape)
        joined = (size * block.shape[0], *block.shape[1:]) if block.dim() else (size,)
        if whole.shape not in (stacked, joined):
            shapes = (shape_text(whole.shape), shape_text(block.shape))
            raise ShapeError(
                f"{self.name}: {names[0]} does not hold one {names[1]} per member",
                where=self.here,
                expected=f"{names[0]} of shape {shape_text(joined)} or {shape_text(stacked)}",
                found=f"{names[0]} {shapes[0]}, {names[1]} {shapes[1]}",
            )

    def check_same_size(
        self, tensor: torch.Tensor, other: torch.Tensor, names: tuple[str, str]
    ) -> None:
        """Raise unless both have as many elements."""
        if tensor.numel() != other.numel():
            shapes = (shape_text(tensor.shape), shape_text(other.shape))
            raise ShapeError(
                f"{self.name}: {names[0]} and {names[1]} have different numbers of elements",
                where=self.here,
                found=f"{names[0]} {shapes[0]}, {names[1]} {shapes[1]}",
                fix=f"give {names[0]} {other.numel()} elements, as {names[1]} has",
            )

    def check_list(
        self,
        given: Any,
        argument: str,
        length: int | None = None,
        *,
        role: str = "",
        may_be_longer: bool = False,
    ) -> Sequence[Any]:
        """Return ``given`` if it is a list or tuple of ``length`` entries (None: at least one).

        Where ``role`` names the root, the root alone gives a list; others give none, and get ().
        """
        if role and not self.is_root:
            if given is None or (isinstance(given, (list, tuple)) and not given):
                return ()
            root = self.group.ranks[self.root or 0]
            raise (ArgumentError if isinstance(given, (list, tuple)) else KindError)(
                f"{self.name}: {argument} is given on a rank that is not the {role}",
                where=self.here,
                expected=f"None or [] on all ranks but rank {root}, the {role}",
                found=f"a {type(given).__name__}",
                fix=f"pass {argument} on the {role} alone",
            )
        each = ", one entry per member" if length == self.group.size() else ""
        if given is None:
            name = "src" if role == "source" else "dst"
            raise KindError(
                f"{self.name} needs {argument} on this rank{role and f', the {role}'}",
                where=self.here,
                expected=f"a list or tuple{each}",
                fix=f"pass {argument}{role and f' here, or name another {role} as {name}'}",
            )
        if not isinstance(given, (list, tuple)):
            raise KindError(
                f"{self.name}: {argument} must be a list",
                where=self.here,
                expected=f"a list or tuple{each}",
                found=type(given).__name__,
                fix=f"pass a list, for example list({argument}.unbind())"
                if isinstance(given, torch.Tensor)
                else None,
            )
        if may_be_longer and length is not None and len(given) > length:
            return given
        if len(given) != length if length is not None else not given:
            fix = "pass at least one entry" if length is None else f"pass a list of {length}"
            if each:
                fix = f"pass one entry for each of {ranks_text(self.group.ranks)}"
            raise LengthError(
                f"{self.name}: {argument} has {len(given)} entr{'y' if len(given) == 1 else 'ies'}",
                where=self.here,
                expected="at least one" if length is None else f"{length}{each}",
                fix=fix,
            )
        return given


def run(
    channel: Channel,
    verb: str,
    start: Start,
    written: Sequence[Written],
    async_op: bool,
    timeout: timedelta | None = None,
    *,
    foreign: Sequence[Any] = (),
    result: Sequence[Any] | None = None,
    shows_all: bool = True,
) -> Work | None:
    """Start a verb that ``channel.enter`` has let through; wait for it, or return its Work.

    Args:
        timeout: in place of the group's.
        foreign: the arrays of other libraries than torch that it reads or writes.
        result: what the Work returns as its result, where that is more than what is written.
        shows_all: whether what ``start`` calls on the communicator shows all of the call that must
            be equal on all members.

    Raises:
        CollectiveTimeoutError, AbortedError, AgreementError, BackendError: as the group explains.
    """
    for _, data, _ in written:
        note_write(data)
    limit = timeout or channel.timeout
    recorder = channel.recorder
    call = None if shows_all else recorder.find_note()
    terms = Terms(limit, verb, recorder.sequence, not async_op, call, recorder.num_notes)
    try:
        operation = start(channel.communicator, terms)
        if not async_op:
            operation.finish(limit)
    except BaseException as error:
        if isinstance(error, WireFailure):
            error.limit = timeout
        raise channel.failed(error) from None
    copy_back = find_copy_back(written, verb)
    hand_back = find_hand_back(foreign) if foreign else None
    if async_op:
        results = [original for original, _, _ in written] if result is None else list(result)
        work = channel.work(operation, results, copy_back, hand_back=hand_back, verb=verb)
        # Where this rank only sends, those that receive may tell, as of `isend`.
        return may_be_dropped(work) if results and not written else work
    if copy_back is not None:
        copy_back()
    if hand_back is not None:
        hand_back()
    return None


def find_copy_back(written: Sequence[Written], verb: str) -> Callable[[], None] | None:
    """The function that copies a result back to the caller's arrays; None where it lies there."""
    elsewhere = [one for one in written if one[0] is not one[2]]
    for _, data, _ in elsewhere:
        forbid_gradient(data, verb)

    def copy_back() -> None:
        for _, data, buffer in elsewhere:
            if data.data_ptr() != buffer.data_ptr() or data.stride() != buffer.stride():
                with torch.inference_mode():
                    data.copy_(buffer)

    return copy_back if elsewhere else None

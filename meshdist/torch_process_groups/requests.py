"""One call of a verb of torch's process groups: how it is to run, and the tensors that travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..arrays import apart, shape_text
from ..checking.calls import GroupFacts
from ..collectives.checks import (
    check_not_expanded,
    check_reducible,
    check_stored,
    premultiplied,
)
from ..dtypes import dtype_name
from ..errors import ArgumentError, DtypeError, ShapeError
from ..groups.verb_methods import Asked
from ..reduce_ops import Factor, ReduceKind, ReduceOp, multiply, split_premul
from ..verb_table import VERBS

__all__ = ["Request", "check_some", "find_tensor"]

_Tensor = torch.Tensor


class Request:
    """A call of a verb: makes what travels of what was given, and copies back what was written."""

    def __init__(self, verb: str, group: GroupFacts, asked: Asked) -> None:
        self.verb = verb
        self.asked = asked
        self.noted: Any = None
        """The tensor, or list of tensors, by which it is noted and compared."""
        self.facts: dict[str, Any] = {}
        """More fields of its ``Call``."""
        self.sizes: Sequence[Sequence[int]] = ()
        """How many elements go to and come from each member, where members may differ."""
        self.message: tuple[int | None, int] | None = None
        """The peer and the tag of a message."""
        self._factor: Factor | None = None
        self._group = group
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Those by which it is noted."""
        if self.noted is None:
            return ()
        return [self.noted] if isinstance(self.noted, torch.Tensor) else self.noted

    @property
    def shows_all(self) -> bool:
        """Whether the wire's verb shows all of the call that must be equal on all members."""
        return self.message is not None or (VERBS[self.verb].is_plain and self._factor is None)

    @property
    def title(self) -> str:
        """The verb as torch's own backends name it in a profile."""
        is_from_any = self.verb == "recv" and self.message is not None and self.message[0] is None
        return "recvAnySource" if is_from_any else self.verb

    @property
    def is_root(self) -> bool:
        """Whether this member is the root."""
        return self.asked.root == self._group.rank

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as a wire reads it."""
        is_plain = type(tensor) is _Tensor and not tensor.requires_grad
        is_plain = is_plain and (tensor.data_ptr() != 0 or not tensor.numel())
        if is_plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return tensor  # the common case, decided fast
        if tensor.layout is not torch.strided:
            raise ArgumentError(
                "a group of meshdist cannot take a sparse tensor here",
                expected="a dense tensor, layout torch.strided",
                found=f"layout {tensor.layout}",
                fix="pass tensor.to_dense()",
            )
        check_stored(tensor, "tensor", self.verb)
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that a wire writes in place of ``tensor``, with the values of that."""
        buffer = self.read(tensor)
        if buffer is tensor:
            return tensor
        check_not_expanded(tensor, "tensor", self.verb)
        if buffer.data_ptr() != tensor.data_ptr() or buffer.stride() != tensor.stride():
            self._elsewhere.append((tensor, buffer))
        return buffer

    def copy_back(self) -> None:
        """Copy what the wire wrote into other tensors back to those of the caller."""
        elsewhere, self._elsewhere = self._elsewhere, []
        if not elsewhere:
            return
        with torch.inference_mode():  # there may be inference tensors, and leaves with a gradient
            for tensor, buffer in elsewhere:
                tensor.copy_(buffer)

    def take_op(self, tensors: Sequence[torch.Tensor]) -> ReduceKind:
        """The plain reduction to do on ``tensors``; ``scaled`` does the rest of PREMUL_SUM."""
        op, self._factor = split_premul(self.asked.op)
        for tensor in tensors:
            check_reducible(op, tensor, self.verb, self._factor)
        self.facts["op"] = op if self._factor is None else ReduceOp.PREMUL_SUM
        return op

    def read_and_written(
        self, output: torch.Tensor, tensor: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that travel for one that is read and another that is written."""
        taken = self.write(output)
        return [apart(self.scaled(self.read(tensor)), taken)], [taken]

    def scaled(self, buffer: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """``buffer`` times the factor of PREMUL_SUM; itself where there is none."""
        if self._factor is None:
            return buffer
        if not in_place:
            return premultiplied(buffer, self._factor)
        multiply(buffer, self._factor)
        return buffer

    def check_place(self, place: int) -> None:
        """Raise unless ``place`` is one of the group's."""
        size = len(self._group.ranks)
        if not 0 <= place < size:
            raise ArgumentError(
                f"{self.verb}: rank {place} is outside {self._group.name}",
                where=self._group.here,
                expected=f"a group rank from 0 to {size - 1}",
            )

    def check_tag(self, tag: int) -> None:
        """Raise for a negative tag."""
        if tag < 0:
            raise ArgumentError(
                f"{self.verb}: tag {tag} is negative",
                where=self._group.here,
                expected="a tag from 0 on",
            )

    def check_list(self, tensors: Sequence[Any], *alike: torch.Tensor) -> None:
        """Raise unless there is one for each member, all like ``alike`` where that is given."""
        size = len(self._group.ranks)
        if len(tensors) != size:
            raise ArgumentError(
                f"{self.verb}: a list of {len(tensors)} tensors",
                where=f"{self._group.here}, {self._group.name}",
                expected=f"{size}, one for each member",
            )
        if alike:
            self.check_alike((*alike, *tensors))

    def check_alike(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise unless all have one dtype and one device."""
        one = tensors[0]
        for tensor in tensors:
            if tensor.dtype != one.dtype:
                raise DtypeError(
                    f"{self.verb} has arguments of different dtypes",
                    expected="one dtype",
                    found=f"{dtype_name(one.dtype)} and {dtype_name(tensor.dtype)}",
                )
            if tensor.device != one.device:
                raise ArgumentError(
                    f"{self.verb} has arguments on different devices",
                    expected="one device",
                    found=f"{one.device} and {tensor.device}",
                )

    def check_blocks(self, whole: torch.Tensor, block: torch.Tensor) -> None:
        """Raise unless ``whole`` holds one ``block`` per member."""
        size = len(self._group.ranks)
        if whole.numel() != size * block.numel():
            raise ShapeError(
                f"{self.verb}: the larger tensor does not hold one of the smaller per member",
                expected=f"{size} times {block.numel()} elements",
                found=f"shapes {shape_text(whole.shape)} and {shape_text(block.shape)}",
            )
        self.check_alike((whole, block))

    def check_count(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """Raise unless what is taken has as many elements as what is sent."""
        if output.numel() != tensor.numel():
            raise ShapeError(
                f"{self.verb}: tensors have different numbers of elements",
                expected=f"{tensor.numel()}, of shape {shape_text(tensor.shape)}",
                found=f"{output.numel()}, of shape {shape_text(output.shape)}",
            )

    def split_counts(self, tensor: torch.Tensor, sizes: Sequence[int], argument: str) -> list[int]:
        """How many elements go to or come from each member."""
        size = len(self._group.ranks)
        length = tensor.size(0) if tensor.dim() else 1
        if not sizes:
            if length % size:
                raise ShapeError(
                    f"all_to_all_single: {argument} does not divide equally among the members",
                    where=self._group.here,
                    expected=f"dim 0 a multiple of {size}",
                    found=f"{length}",
                    fix=f"give {argument}_split_sizes",
                )
            sizes = [length // size] * size
        if len(sizes) != size or sum(sizes) != length:
            raise ShapeError(
                f"all_to_all_single: {argument}_split_sizes do not fit dim 0 of {argument}",
                where=self._group.here,
                expected=f"{size} sizes whose sum is {length}",
                found=f"{list(sizes)}",
            )
        row = tensor.numel() // length if length else 0
        return [size * row for size in sizes]


def find_tensor(given: Iterable[Any]) -> torch.Tensor | None:
    """The first tensor among arguments, some of which may be lists, also of lists."""
    for one in given:
        found = find_tensor(one) if isinstance(one, (list, tuple)) else one
        if isinstance(found, torch.Tensor):
            return found
    return None


def check_some(verb: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise for an empty list."""
    if not tensors:
        raise ArgumentError(f"{verb}: an empty list of tensors", expected="at least one tensor")

"""The tensors of one call: contiguous and without gradient on the wire, as they were for torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..arrays import dtype_name, shape_text
from ..collectives.checks import check_not_expanded, check_stored
from ..errors import ArgumentError, DtypeError, ShapeError

__all__ = [
    "Buffers",
    "check_alike",
    "check_blocks",
    "check_count",
    "check_some",
    "find_tensor",
    "only",
    "only_list",
]

_Tensor = torch.Tensor


class Buffers:
    """Makes what travels of what a program gave, and brings home what was written.

    Args:
        verb: the verb that was called, for messages.
    """

    __slots__ = ("_elsewhere", "_verb")

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []

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
        check_stored(tensor, "tensor", self._verb)
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a wire writes in place of ``tensor``; it holds the tensor's values now."""
        buffer = self.read(tensor)
        if buffer is tensor:
            return tensor
        check_not_expanded(tensor, "tensor", self._verb)
        if buffer.data_ptr() != tensor.data_ptr() or buffer.stride() != tensor.stride():
            self._elsewhere.append((tensor, buffer))
        return buffer

    def settle(self) -> None:
        """Bring home what a wire wrote elsewhere."""
        elsewhere, self._elsewhere = self._elsewhere, []
        if not elsewhere:
            return
        with torch.inference_mode():  # there may be inference tensors, and leaves with a gradient
            for tensor, buffer in elsewhere:
                tensor.copy_(buffer)


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


def only(tensors: Sequence[torch.Tensor] | torch.Tensor, verb: str) -> torch.Tensor:
    """The one tensor of a list that torch's interface has for several devices of one process."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(
            f"{verb}: a list of {len(tensors)} tensors, one for each device of this process",
            expected="one tensor",
            fix="call it once for each, or the coalesced form",
        )
    return tensors[0]


def only_list(lists: Sequence[Any], verb: str) -> Sequence[torch.Tensor]:
    """The one list of tensors of a list of lists; a plain list passes for it."""
    if lists and isinstance(lists[0], torch.Tensor):
        return lists
    if len(lists) != 1:
        raise ArgumentError(
            f"{verb}: {len(lists)} lists of tensors, one for each device of this process",
            expected="one list",
            fix="pass it on the root" if not lists else "call it once for each",
        )
    return lists[0]  # type: ignore[no-any-return]


def check_alike(verb: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless all have one dtype and one device."""
    one = tensors[0]
    for tensor in tensors:
        if tensor.dtype != one.dtype:
            raise DtypeError(
                f"{verb} has arguments of different dtypes",
                expected="one dtype",
                found=f"{dtype_name(one.dtype)} and {dtype_name(tensor.dtype)}",
            )
        if tensor.device != one.device:
            raise ArgumentError(
                f"{verb} has arguments on different devices",
                expected="one device",
                found=f"{one.device} and {tensor.device}",
            )


def check_blocks(verb: str, whole: torch.Tensor, block: torch.Tensor, size: int) -> None:
    """Raise unless ``whole`` holds one ``block`` per member."""
    if whole.numel() != size * block.numel():
        raise ShapeError(
            f"{verb}: the larger tensor does not hold one of the smaller per member",
            expected=f"{size} times {block.numel()} elements",
            found=f"shapes {shape_text(whole.shape)} and {shape_text(block.shape)}",
        )
    check_alike(verb, (whole, block))


def check_count(verb: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise unless what is taken has as many elements as what is sent."""
    if output.numel() != tensor.numel():
        raise ShapeError(
            f"{verb}: tensors have different numbers of elements",
            expected=f"{tensor.numel()}, of shape {shape_text(tensor.shape)}",
            found=f"{output.numel()}, of shape {shape_text(output.shape)}",
        )

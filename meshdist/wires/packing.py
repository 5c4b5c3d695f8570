"""Tensors in memory: their layouts without gaps, and consecutive parts of flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch._C import _InferenceMode

__all__ = [
    "Layout",
    "ROW_MAJOR",
    "Sizes",
    "Tensors",
    "blocks",
    "cuts",
    "find_layout",
    "flat",
    "packed",
    "parts",
    "parts_like",
    "write",
    "write_all",
    "write_blocks",
]

Layout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""The sizes and strides of the dims that have several elements."""

ROW_MAJOR: Layout = ((), ())
"""The layout of every tensor that is contiguous."""


def find_layout(tensor: torch.Tensor) -> Layout | None:
    """The layout of a tensor; None where its memory has gaps, or elements share a place.

    Example:
        >>> find_layout(torch.empty(2, 1, 3).transpose(0, 2))
        ((3, 2), (1, 3))
        >>> find_layout(torch.empty(4, 4)[:, :2]) is None
        True
    """
    if tensor.is_contiguous():
        return ROW_MAJOR
    dims = [(n, step) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    expected = 1
    for step, n in sorted((step, n) for n, step in dims):
        if step != expected:
            return None
        expected *= n
    return tuple(n for n, _ in dims), tuple(step for _, step in dims)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that has a layout, as one dim in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


Tensors: TypeAlias = Sequence[torch.Tensor]
"""Several tensors: one for each member, or such as one verb carries together."""

Sizes: TypeAlias = Sequence[int]
"""Numbers of elements, one for each member."""


def parts(tensor: torch.Tensor, sizes: Sizes) -> list[torch.Tensor]:
    """Views of consecutive parts of a contiguous tensor, flat; sizes in elements."""
    return list(tensor.view(-1).split_with_sizes(list(sizes)))


def parts_like(whole: torch.Tensor, tensors: Tensors) -> list[torch.Tensor]:
    """Views of consecutive parts of ``whole``, each of as many elements as one of ``tensors``."""
    return parts(whole, [tensor.numel() for tensor in tensors])


def blocks(tensor: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Views of equal parts of a contiguous tensor, flat."""
    return tensor.view(num_blocks, tensor.numel() // num_blocks).unbind()


def packed(tensors: Tensors) -> torch.Tensor:
    """A new flat tensor that holds all of them."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


writing = partial(_InferenceMode, True)
"""torch.inference_mode without its Python: parameters and inference tensors can be written."""


def write(output: torch.Tensor, data: torch.Tensor) -> None:
    """Copy ``data`` into a contiguous ``output`` of as many elements."""
    with writing():
        output.view(-1).copy_(data.view(-1))


def write_all(outputs: Tensors, data: Tensors) -> None:
    """Copy each of ``data`` into the output in its place."""
    with writing():
        for output, part in zip(outputs, data, strict=True):
            output.view(-1).copy_(part.view(-1))


def write_blocks(outputs: Tensors, whole: torch.Tensor) -> None:
    """Copy the equal parts of ``whole`` into the outputs, if there are any."""
    if outputs:
        write_all(outputs, blocks(whole, len(outputs)))


def cuts(count: int, num_parts: int) -> list[int]:
    """The sizes of ``num_parts`` parts of ``count`` elements, which differ by one at most.

    Example:
        >>> cuts(7, 3)
        [3, 2, 2]
    """
    least, more = divmod(count, num_parts)
    return [least + (part < more) for part in range(num_parts)]

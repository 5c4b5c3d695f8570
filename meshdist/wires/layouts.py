"""Tensors whose elements lie in memory without gaps, in row-major order or another."""

from __future__ import annotations

from typing import TypeAlias

import torch

__all__ = ["ROW_MAJOR", "Layout", "find_layout", "flat"]

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

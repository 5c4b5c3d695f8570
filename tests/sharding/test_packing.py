"""Packing against NumPy's slicing, reshaping and transposing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from meshdist.mesh.placement import Box
from meshdist.sharding.executor import Boxes, Rearrangement, fresh_copy
from meshdist.sharding.steps import Arrangement


def lie(x: torch.Tensor, is_contiguous: bool) -> torch.Tensor:
    """``x``, as an array that begins behind others in memory, or one with gaps."""
    if is_contiguous:
        return torch.cat([torch.zeros(3, dtype=x.dtype), x.reshape(-1)])[3:].view(x.shape)
    return torch.stack([x, -x], dim=-1)[..., 0]


@st.composite
def arrays_and_boxes(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that do not overlap: the cells of some cuts along each dim, or some."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    boxes: list[Box] = [()]
    for size in shape:
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [(*box, cut) for box in boxes for cut in pairwise(cuts)]
    chosen = draw(st.lists(st.sampled_from(boxes), unique=True, max_size=len(boxes)))
    return shape, sorted(chosen) if draw(st.booleans()) else chosen


@given(arrays_and_boxes(), st.booleans())
def test_boxes_lie_one_behind_the_other(case: Any, is_contiguous: bool) -> None:
    shape, given_boxes = case
    whole = np.arange(1.0, np.prod(shape, dtype=int) + 1).reshape(shape)
    pieces = [whole[tuple(slice(*interval) for interval in box)] for box in given_boxes]
    expected = np.concatenate([piece.ravel() for piece in pieces]) if pieces else np.empty(0)
    boxes = Boxes(shape, given_boxes)
    x = lie(torch.from_numpy(whole), is_contiguous)
    flat = boxes.pack(x)
    assert flat.is_contiguous() and flat.tolist() == expected.tolist()
    out = torch.zeros(shape, dtype=x.dtype)
    packed = fresh_copy(flat)
    boxes.unpack(packed, out)
    covered = np.zeros(shape)
    for box, piece, part in zip(given_boxes, pieces, boxes.parts(packed), strict=True):
        covered[tuple(slice(*interval) for interval in box)] = piece
        assert part.shape == piece.shape and part.tolist() == piece.tolist()
    assert torch.equal(out, torch.from_numpy(covered))


@pytest.mark.parametrize(
    ("boxes", "is_run"),
    [
        ([((0, 2), (0, 3))], True),
        ([((0, 1), (0, 3)), ((1, 4), (0, 3))], True),
        ([((1, 2), (0, 1)), ((1, 2), (1, 3))], True),
        ([((1, 4), (0, 3)), ((0, 1), (0, 3))], False),  # not in the order of memory
        ([((0, 1), (0, 3)), ((2, 4), (0, 3))], False),  # something between them
        ([((0, 2), (0, 2))], False),
        ([], False),
    ],
)
def test_what_lies_so_in_memory_is_not_copied(boxes: list[Box], is_run: bool) -> None:
    x = torch.arange(12.0).view(4, 3)
    flat = Boxes((4, 3), boxes).pack(x)
    assert (flat.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) is is_run
    assert Boxes((4, 3), boxes).find_run(x.T.contiguous().T) is None


@st.composite
def arrangements(draw: Any) -> tuple[tuple[int, ...], Arrangement]:
    view = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    taken = tuple(draw(st.one_of(st.none(), st.integers(0, size - 1))) for size in view)
    kept = [size for size, one in zip(view, taken, strict=True) if one is None]
    order = tuple(draw(st.permutations(range(len(kept)))))
    sizes = [kept[dim] for dim in order]
    merged = draw(st.integers(0, max(0, len(sizes) - 1)))
    shape = (*sizes[:merged], int(np.prod(sizes[merged:], dtype=int)))
    split = draw(st.integers(1, len(view)))
    before = (*view[: split - 1], int(np.prod(view[split - 1 :])))
    return before, Arrangement(view, taken, order, shape)


@given(arrangements(), st.booleans())
def test_rearrangements_are_numpys(case: Any, is_contiguous: bool) -> None:
    before, arrangement = case
    whole = np.arange(np.prod(before), dtype=np.float64).reshape(before)
    index = tuple(slice(None) if one is None else one for one in arrangement.taken)
    expected = whole.reshape(arrangement.view)[index]
    expected = expected.transpose(arrangement.order).reshape(arrangement.shape)
    x = lie(torch.from_numpy(whole), is_contiguous)
    found = Rearrangement(arrangement)(x)
    assert found.is_contiguous() and np.array_equal(found.numpy(), expected)
    is_shared = found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert is_shared == (arrangement.is_plain and x.is_contiguous())

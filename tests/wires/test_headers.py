"""What calls say of themselves, and how they are compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from meshdist.reduce_ops import ReduceOp
from meshdist.wires.headers import Header, data_text, find_mismatch, sizes_of

F32 = (torch.float32,)
RANKS = (4, 5, 6)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (Header("barrier"), "barrier"),
        (Header("all_reduce", F32, 4, ReduceOp.SUM), "all_reduce(SUM) of 4 float32"),
        (
            Header("all_reduce_list", F32 * 2, (4, 1), ReduceOp.MAX),
            "all_reduce_list(MAX) of [4, 1] float32",
        ),
        (
            Header("all_reduce_list", (torch.int8, torch.bool), (4, 1), ReduceOp.MAX),
            "all_reduce_list(MAX) of [4 int8, 1 bool]",
        ),
        (Header("all_reduce_list", (), (), ReduceOp.MAX), "all_reduce_list(MAX) of []"),
        (Header("broadcast", F32, 4, root=1), "broadcast(from rank 5) of 4 float32"),
        (Header("reduce", F32, 4, ReduceOp.AVG, 2), "reduce(AVG, to rank 6) of 4 float32"),
        (Header("gather", F32, 4, root=0, sends=4), "gather(to rank 4) of 4 float32"),
        (
            Header("gather", F32, 4, root=0, sends=4, takes=(4, 4, 4)),
            "gather(to rank 4) of 4 float32",
        ),
        (
            Header("gather", F32, 4, root=0, sends=4, takes=(4, 3, 4)),
            "gather(to rank 4) of 4 float32, taking [4, 3, 4]",
        ),
        (Header("scatter", F32, 4, root=0, takes=4), "scatter(from rank 4) of 4 float32"),
        (
            Header("scatter", F32, 4, root=0, sends=(4, 5, 4), takes=4),
            "scatter(from rank 4) of 4 float32, sending [4, 5, 4]",
        ),
        (
            Header("all_gather_list", F32, sends=2, takes=(2, 0, 1)),
            "all_gather_list of 2 float32, taking [2, 0, 1]",
        ),
        (
            Header("reduce_scatter_list", F32, op=ReduceOp.SUM, sends=(2, 0, 1), takes=0),
            "reduce_scatter_list(SUM) of [2, 0, 1] float32, taking 0",
        ),
        (
            Header("all_to_all", F32, sends=(2, 2, 1), takes=(2, 3, 1)),
            "all_to_all of [2, 2, 1] float32, taking [2, 3, 1]",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_call_in_words(header: Header, text: str) -> None:
    assert header.show(RANKS) == text


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("verb", "all_reduce"),
        ("dtypes", (torch.int8,)),
        ("counts", 5),
        ("op", ReduceOp.MAX),
        ("root", 0),
    ],
)
def test_what_has_to_be_equal(field: str, other: Any) -> None:
    header = Header("reduce", F32, 4, ReduceOp.SUM, 1)
    assert header.agrees_with(dataclasses.replace(header))
    assert not header.agrees_with(dataclasses.replace(header, **{field: other}))


def test_sizes_that_may_differ_agree_as_headers() -> None:
    one = Header("all_to_all", F32, sends=(1, 2), takes=(1, 2))
    assert one.agrees_with(dataclasses.replace(one, sends=(5, 6), takes=(7, 8)))


def all_to_all(sends: tuple[int, ...], takes: tuple[int, ...]) -> Header:
    return Header("all_to_all", F32, sends=sends, takes=takes)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (2, 4))], None),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (5, 4))],
            "rank 4 sends 2 to rank 5, which takes 5",
        ),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((6, 4), (2, 4))],
            "rank 5 sends 6 to rank 4, which takes 3",
        ),
        (
            [all_to_all((1, 2), (1, 3)), all_to_all((3, 4), (2, 5))],
            "rank 5 sends 4 to itself, and takes 5",
        ),
        (
            [Header("g", F32, sends=2, takes=(2, 3)), Header("g", F32, sends=2, takes=(2, 2))],
            "rank 5 sends 2 to rank 4, which takes 3",
        ),
        ([Header("g", F32, sends=2, takes=(2, 2)), Header("g", F32, sends=2)], None),
        ([Header("s", F32, sends=(2, 3), takes=2), Header("s", F32, takes=3)], None),
        (
            [Header("s", F32, sends=(2, 3), takes=2), Header("s", F32, takes=2)],
            "rank 4 sends 3 to rank 5, which takes 2",
        ),
        ([Header("barrier"), Header("barrier")], None),
    ],
)
def test_pairs_that_disagree_are_named(headers: list[Header], text: str | None) -> None:
    others = dict(enumerate(headers))
    assert find_mismatch(1, headers[1], others, RANKS) == text


def test_sizes_and_data_in_words() -> None:
    assert sizes_of([torch.ones(2, 3), torch.ones(()), torch.ones(0)]) == (6, 1, 0)
    assert data_text(3, F32) == "3 float32"
    assert data_text((3, 1), F32) == "[3, 1] float32"

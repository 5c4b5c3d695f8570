"""The record of a call: its texts, and what of it must be equal on all members."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import ReduceOp

from meshdist.checking.calls import (
    Call,
    Data,
    GroupFacts,
    collective_fingerprints,
    fingerprint,
    header,
    is_list,
    likeness,
    message_fingerprint,
)

ROOT = Path(__file__).resolve().parents[2]
AXIS = GroupFacts("axis 'dp'", (4, 6), 1)
X: Data = (torch.Size([2]), torch.float32)
Y: Data = (torch.Size([3, 1]), torch.int8)


def test_a_group_in_words() -> None:
    assert AXIS.here == "rank 6"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call(1, AXIS, "barrier", None), ""),
        (Call(1, AXIS, "all_reduce", X), "(2,) float32"),
        (Call(1, AXIS, "reduce", X, ReduceOp.MAX, 1), "(2,) float32, MAX, root rank 6"),
        (
            Call(1, AXIS, "all_to_all", X, sizes=((1, 2), (3, 0))),
            "(2,) float32, sending [1, 2], taking [3, 0] elements",
        ),
        (Call(1, AXIS, "all_reduce_coalesced", (X, Y)), "[(2,) float32, (3, 1) int8]"),
        (Call(1, AXIS, "all_reduce_coalesced", ()), "[]"),
        (
            Call(1, AXIS, "irecv", X, message=(False, None, 7, 1)),
            "(2,) float32, from any rank, tag 7",
        ),
        (Call(1, AXIS, "send", X, message=(True, 0, 0, 1)), "(2,) float32, to rank 4"),
    ],
)
def test_arguments_in_words(call: Call, text: str) -> None:
    assert call.arguments == text


def test_calls_in_words() -> None:
    code = test_calls_in_words.__code__
    where = f"{__file__}:{code.co_firstlineno} in test_calls_in_words"
    call = Call(3, AXIS, "barrier", None, code=code, instruction=-1)
    assert call.text == f"barrier() at {where}"
    assert call.heading == f"call 3 on axis 'dp': barrier() at {where}"
    assert call._replace(stack=["a.py:1 in f"]).where == f"{where}\n  called at a.py:1 in f"
    send = call._replace(verb="send", data=X, message=(True, 0, 0, 1))
    assert send.heading == f"send((2,) float32, to rank 4) on axis 'dp' at {where}"
    assert Call(3, AXIS, "barrier", None).text == "barrier() at an unknown place"
    part = call._replace(title="a plan")
    assert part.heading == f"call 3 on axis 'dp': barrier() of a plan at {where}"
    assert (part.name, call.name) == ("barrier of a plan", "barrier")


def test_what_must_be_equal_in_words() -> None:
    call = Call(1, AXIS, "all_to_all", X)
    same = "the same verb, dtype, number of elements, op and root"
    assert likeness(None) == likeness(call) == f"{same} on every member"
    assert likeness(call._replace(title="a plan")) == f"{same} under the same title on every member"
    uneven = call._replace(title="a plan", sizes=((1,), (1,)))
    assert likeness(uneven) == (
        "the same verb and dtype under the same title, and what one member takes as the other "
        "sends it"
    )


@pytest.mark.parametrize(
    ("verb", "message", "expected"),
    [
        ("irecv", (False, None, 7, 1), "any rank to send (2,) float32 to this rank under tag 7"),
        ("recv", (False, 1, 0, 1), "rank 6 to send (2,) float32 to this rank under tag 0"),
        ("isend", (True, 0, 3, 1), "rank 4 to receive (2,) float32 from this rank under tag 3"),
        (
            "send_object_list",
            (True, 1, 0, 1),
            "rank 6 in recv_object_list, with this rank as its peer",
        ),
        (
            "recv_object_list",
            (False, 1, 9, 1),
            "rank 6 in send_object_list, with this rank as its peer",
        ),
        ("all_reduce", None, ""),
    ],
)
def test_what_a_call_waits_for(
    verb: str, message: tuple[bool, int | None, int, int] | None, expected: str
) -> None:
    assert Call(1, AXIS, verb, X, message=message).waits_for == expected


def test_a_list_is_told_from_a_tensor() -> None:
    scalar: Data = (torch.Size([]), torch.float32)
    assert [is_list(data) for data in (X, scalar, None)] == [False] * 3
    assert [is_list(data) for data in ((X,), (X, Y), ())] == [True] * 3


REDUCE = ("reduce", X, ReduceOp.SUM.value, 0, False, "a plan")


@pytest.mark.parametrize(
    ("place", "other"),
    [
        (0, "all_reduce"),
        (1, (torch.Size([3]), torch.float32)),
        (1, (torch.Size([2]), torch.int32)),
        (1, None),
        (2, ReduceOp.MAX.value),
        (2, None),
        (3, 1),
        (3, None),
        (5, "another"),
        (5, ""),
    ],
)
def test_headers_differ_where_calls_do(place: int, other: object) -> None:
    different = (*REDUCE[:place], other, *REDUCE[place + 1 :])
    assert header(*different) != header(*REDUCE)
    assert collective_fingerprints[different] != collective_fingerprints[REDUCE]


def test_headers_are_equal_where_calls_may_differ() -> None:
    flat: Data = (torch.Size([6]), torch.float32)
    square: Data = (torch.Size([2, 3]), torch.float32)
    assert header("all_reduce", flat, 0, None, False) == header(
        "all_reduce", square, 0, None, False
    )
    assert header("all_to_all", X, None, None, True) == header("all_to_all", flat, None, None, True)
    lists = [header("all_reduce_coalesced", data, 0, None, False) for data in ((X, Y), (Y, X))]
    assert lists[0] != lists[1]
    uneven = [header("all_to_all", data, None, None, True) for data in ((X, X), (flat, X))]
    assert uneven[0] == uneven[1]


def test_messages_fit_by_dtype_count_and_kind() -> None:
    x = torch.ones(2, 3)
    mine = message_fingerprint("send", x)
    assert mine == message_fingerprint("recv", x.view(6)) == message_fingerprint("irecv", x)
    others = [x[0], x.int()]
    assert mine not in [message_fingerprint("recv", other) for other in others]
    assert mine != message_fingerprint("recv_object_list", x)


def test_headers_are_equal_on_every_process() -> None:
    program = (
        "import torch\n"
        "from meshdist.checking.calls import collective_fingerprints\n"
        f"print(collective_fingerprints['reduce', (torch.Size([2]), torch.float32), "
        f"{ReduceOp.SUM.value}, 0, False, 'a plan'])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert int(done.stdout) == collective_fingerprints[REDUCE], done.stderr


@given(st.lists(st.integers(-2, 2**63), max_size=6), st.lists(st.integers(-2, 2**63), max_size=6))
def test_fingerprints_have_32_bits_and_tell_values_apart(first: list, second: list) -> None:
    def known(values: list[int]) -> list[int]:
        return [-2 if value == -1 else value for value in values]  # as hash() has it

    assert 0 <= fingerprint(*first) < 2**32
    if known(first) == known(second):
        assert fingerprint(*first) == fingerprint(*second)


def test_near_values_have_distinct_fingerprints() -> None:
    found = {fingerprint(3, 5, count, op, -2) for count in range(2000) for op in range(8)}
    assert len(found) > 15_990

"""The record of a call: its texts, and what of it must be equal on all members."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed import ReduceOp

from meshdist.checking.calls import (
    Call,
    CallRecord,
    Data,
    GroupFacts,
    calls,
    fingerprint,
    get_call,
    get_message,
    is_list,
    likeness,
)

ROOT = Path(__file__).resolve().parents[2]
AXIS = GroupFacts("axis 'dp'", (4, 6), 1)
X: Data = (torch.Size([2]), torch.float32)
Y: Data = (torch.Size([3, 1]), torch.int8)


def test_a_group_in_words() -> None:
    assert AXIS.here == "rank 6"


def noted(*call: Any, sizes: Any = (), number: int = 0, **more: Any) -> CallRecord:
    """A note of the call with these fields."""
    return CallRecord(1, AXIS, Call(*call, **more), sizes, number)


def message(operation: str, peer: int | None, tag: int) -> CallRecord:
    return noted(operation, X, peer=peer, tag=tag, number=1)


@pytest.mark.parametrize(
    ("note", "text"),
    [
        (noted("barrier", None), ""),
        (noted("all_reduce", X), "(2,) float32"),
        (noted("reduce", X, ReduceOp.MAX.value, 1), "(2,) float32, MAX, root rank 6"),
        (
            noted("all_to_all", X, sizes=((1, 2), (3, 0)), is_uneven=True),
            "(2,) float32, sending [1, 2], receiving [3, 0] elements",
        ),
        (
            noted("all_reduce", X, 0, layouts=(((2,), (3,)),)),
            "(2,) float32, SUM, strides (3,)",
        ),
        (noted("all_reduce_coalesced", (X, Y)), "[(2,) float32, (3, 1) int8]"),
        (noted("all_reduce_coalesced", ()), "[]"),
        (message("irecv", None, 7), "(2,) float32, from any rank, tag 7"),
        (message("send", 0, 0), "(2,) float32, to rank 4"),
    ],
)
def test_arguments_in_words(note: CallRecord, text: str) -> None:
    assert note.arguments == text


def test_calls_in_words() -> None:
    code = test_calls_in_words.__code__
    where = f"{__file__}:{code.co_firstlineno} in test_calls_in_words"
    note = CallRecord(3, AXIS, Call("barrier", None), code=code, instruction=-1)
    assert note.text == f"barrier() at {where}"
    assert note.heading == f"call 3 on axis 'dp': barrier() at {where}"
    assert note._replace(stack=["a.py:1 in f"]).where == f"{where}\n  called at a.py:1 in f"
    send = note._replace(call=Call("send", X, peer=0, tag=0), number=1)
    assert send.heading == f"send((2,) float32, to rank 4) on axis 'dp' at {where}"
    assert CallRecord(3, AXIS, Call("barrier", None)).text == "barrier() at an unknown place"
    part = note._replace(call=Call("barrier", None, op_name="a plan"))
    assert part.heading == f"call 3 on axis 'dp': barrier() of a plan at {where}"
    assert (part.call.name, note.call.name) == ("barrier of a plan", "barrier")


def test_calls_in_words_without_their_group() -> None:
    call = Call("reduce", (X, Y), ReduceOp.MAX.value, 1, "a plan")
    assert call.text == "reduce([(2,) float32, (3, 1) int8], MAX) of a plan"
    assert Call("barrier", None).text == "barrier()"


def test_what_must_be_equal_in_words() -> None:
    note = noted("all_to_all", X)
    same = "the same collective, dtype, number of elements, op and root"
    assert likeness(None) == likeness(note) == f"{same} on every rank"
    titled = noted("all_to_all", X, op_name="a plan")
    assert likeness(titled) == f"{same}, with the same operation name, on every rank"
    assert likeness(titled._replace(sizes=((1,), (1,)))) == (
        "the same collective and dtype, with the same operation name, on every rank, and the same "
        "sizes on both sides"
    )


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (message("irecv", None, 7), "any rank to send (2,) float32 to this rank with tag 7"),
        (message("recv", 1, 0), "rank 6 to send (2,) float32 to this rank with tag 0"),
        (message("isend", 0, 3), "rank 4 to receive (2,) float32 from this rank with tag 3"),
        (
            message("send_object_list", 1, 0),
            "rank 6 in recv_object_list, with this rank as its peer",
        ),
        (
            message("recv_object_list", 1, 9),
            "rank 6 in send_object_list, with this rank as its peer",
        ),
        (noted("all_reduce", X), ""),
    ],
)
def test_what_a_call_waits_for(note: CallRecord, expected: str) -> None:
    assert note.waits_for == expected


def test_a_list_is_told_from_a_tensor() -> None:
    scalar: Data = (torch.Size([]), torch.float32)
    assert [is_list(data) for data in (X, scalar, None)] == [False] * 3
    assert [is_list(data) for data in ((X,), (X, Y), ())] == [True] * 3


def test_equal_calls_are_one_object_and_cannot_be_changed() -> None:
    x, sum_ = torch.ones(2, 3), ReduceOp.SUM
    call = get_call("all_reduce", x, sum_, op_name="a plan")
    assert call is get_call("all_reduce", x + 1, sum_, op_name="a plan")
    assert (call.op, call.data, call.root) == (sum_, ((2, 3), torch.float32), None)
    assert call is not get_call("all_reduce", x, sum_) and call != get_call("all_reduce", x, sum_)
    assert get_call("all_reduce_coalesced", [x]) is get_call("all_reduce_coalesced", (x,))
    send = get_message("send", x, 1, 0)
    assert send is get_message("send", x, 1, 0) != get_message("send", x, 1, 1)
    assert (send.is_send, get_message("recv", x, 1, 0).is_send) == (True, False)
    with pytest.raises(AttributeError):
        call.operation = "reduce"  # type: ignore[misc]


def test_so_many_calls_are_kept_and_no_more() -> None:
    calls.clear()
    for count in range(5000):
        get_call(f"collective {count}", None)
    assert len(calls) == 5000 - 4096
    calls.clear()


REDUCE = Call("reduce", X, ReduceOp.SUM.value, 0, "a plan")


@pytest.mark.parametrize(
    "other",
    [
        {"operation": "all_reduce"},
        {"data": (torch.Size([3]), torch.float32)},
        {"data": (torch.Size([2]), torch.int32)},
        {"data": None},
        {"op_number": ReduceOp.MAX.value},
        {"op_number": None},
        {"root": 1},
        {"root": None},
        {"op_name": "another"},
        {"op_name": ""},
        {"layouts": (((2,), (3,)),)},
    ],
    ids=str,
)
def test_headers_differ_where_calls_do(other: dict[str, Any]) -> None:
    different = replace(REDUCE, **other)
    assert different.fingerprint_inputs != REDUCE.fingerprint_inputs
    assert different.fingerprint != REDUCE.fingerprint


def test_headers_are_equal_where_calls_may_differ() -> None:
    flat: Data = (torch.Size([6]), torch.float32)
    square: Data = (torch.Size([2, 3]), torch.float32)

    def uneven(data: Data) -> tuple[int, ...]:
        return Call("all_to_all", data, is_uneven=True).fingerprint_inputs

    assert (
        Call("all_reduce", flat, 0).fingerprint_inputs
        == Call("all_reduce", square, 0).fingerprint_inputs
    )
    assert uneven(X) == uneven(flat)
    assert uneven((X, X)) == uneven((flat, X))
    lists = [Call("all_reduce_coalesced", data, 0).fingerprint_inputs for data in ((X, Y), (Y, X))]
    assert lists[0] != lists[1]


def test_headers_of_lists_differ_where_any_of_their_tensors_does() -> None:
    wider: Data = (torch.Size([4]), torch.float32)
    lists: list[Data] = [(X,), (X, X), (X, Y), (X, wider), (X, X, X)]
    assert len({Call("all_reduce_coalesced", data, 0).fingerprint_inputs for data in lists}) == len(
        lists
    )


def test_messages_fit_by_dtype_count_and_kind() -> None:
    x = torch.ones(2, 3)
    mine = get_message("send", x, 1, 0).fingerprint
    fitting = get_message("recv", x.view(6), 0, 0), get_message("irecv", x, None, 0)
    assert [call.fingerprint for call in fitting] == [mine] * 2
    others = [get_message("recv", other, 0, 0) for other in (x[0], x.int())]
    others.append(get_message("recv_object_list", x, 0, 0))
    assert mine not in [call.fingerprint for call in others]


def test_fingerprints_are_equal_on_every_process() -> None:
    program = (
        "import torch\n"
        "from meshdist.checking.calls import Call\n"
        "x = torch.Size([2]), torch.float32\n"
        f"print(Call('reduce', x, {ReduceOp.SUM.value}, 0, 'a plan').fingerprint)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert int(done.stdout) == REDUCE.fingerprint, done.stderr


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

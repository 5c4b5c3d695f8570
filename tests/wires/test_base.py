"""The registry of wires."""

from __future__ import annotations

import pytest

import meshdist as md
import meshdist.wires.c10d
from meshdist.wires.base import find_wire, get_wire, wire_names


def test_names_in_any_case() -> None:
    assert get_wire("GLOO") is get_wire("gloo") is find_wire("Gloo")
    assert {"gloo", "nccl", "ucc", "xccl"} <= set(wire_names())


def test_an_unknown_wire_lists_those_there_are() -> None:
    assert find_wire("pigeon") is None
    with pytest.raises(md.BackendError) as caught:
        get_wire("pigeon")
    assert str(caught.value).startswith("backend 'pigeon' is not registered\n  expected: one of: ")
    assert "gloo" in caught.value.expected


def test_a_wire_that_this_machine_lacks() -> None:
    if get_wire("gloo") and find_wire("xccl").is_available():
        pytest.skip("this machine has XCCL")
    with pytest.raises(md.BackendError, match="backend 'xccl' is not available on this machine"):
        get_wire("xccl")


def test_default_timeouts_are_torchs() -> None:
    assert get_wire("gloo").default_timeout.total_seconds() == 1800
    assert find_wire("nccl").default_timeout.total_seconds() == 600

"""The registry of wires."""

from __future__ import annotations

import pytest
import torch

import meshdist as md
import meshdist.wires.c10d.communicator
import meshdist.wires.names  # registers all wires
from meshdist.bootstrap import mpi_library
from meshdist.wires.registry import find_wire, get_wire, wire_names


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
    with pytest.raises(md.BackendError) as caught:
        get_wire("XCCL")
    assert caught.value.summary == "backend 'xccl' is not available on this machine"
    assert "gloo" in caught.value.expected
    assert caught.value.found == f"torch {torch.__version__} was built without XCCL"
    assert caught.value.fix.startswith(
        "install torch's build for XPU, see https://pytorch.org; or "
    )


def test_a_misspelt_wire() -> None:
    with pytest.raises(md.BackendError) as caught:
        get_wire("glo")
    assert caught.value.fix.startswith("did you mean 'gloo'? name one of these, or None for the")
    with pytest.raises(md.BackendError) as caught:
        get_wire("pigeon")
    assert caught.value.fix.startswith("name one of these")


def test_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: None)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(md.BackendError) as caught:
        get_wire("mpi")
    assert caught.value.summary == "backend 'mpi' is not available on this machine"
    assert caught.value.found == "mpi4py is not installed"
    assert caught.value.fix.startswith('pip install "meshdist[mpi]"; or ')


def test_a_wire_that_does_not_say_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = find_wire("gloo")
    monkeypatch.setattr(gloo, "is_available", lambda: False)
    with pytest.raises(md.BackendError) as caught:
        get_wire("gloo")
    assert caught.value.found == "the wire 'gloo' says so"
    assert caught.value.fix.startswith("ask whoever registered it; or name another")


@pytest.mark.parametrize(
    ("has_nccl", "visible", "found", "fix"),
    [
        (False, None, f"torch {torch.__version__} was built without NCCL", "install a build of"),
        (True, None, "torch sees no GPU", "nvidia-smi tells whether the driver sees one; or"),
        (True, "", "CUDA_VISIBLE_DEVICES= shows no GPU", "unset CUDA_VISIBLE_DEVICES; or name"),
    ],
)
def test_why_there_is_no_nccl(
    has_nccl: bool,
    visible: str | None,
    found: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if has_nccl:
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", object, raising=False)
    else:
        monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(md.BackendError) as caught:
        get_wire("nccl")
    assert caught.value.found == found
    assert caught.value.fix.startswith(fix)


def test_default_timeouts_are_torchs() -> None:
    assert get_wire("gloo").default_timeout.total_seconds() == 1800
    assert find_wire("nccl").default_timeout.total_seconds() == 600

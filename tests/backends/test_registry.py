"""The registry of backends."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

import meshdist as md
import meshdist.backends.backend_names  # registers all backends
import meshdist.backends.c10d.communicator
from meshdist.backends.registry import (
    Needs,
    backend_names,
    find_backend,
    get_backend,
    reserve_resources,
)
from tests.few_files import room_for
from tests.inner import hosts, mpi_library


def test_names_in_any_case() -> None:
    assert get_backend("GLOO") is get_backend("gloo") is find_backend("Gloo")
    assert {"gloo", "nccl", "ucc", "xccl"} <= set(backend_names())


def test_an_unknown_backend_lists_those_there_are() -> None:
    assert find_backend("pigeon") is None
    with pytest.raises(md.BackendError) as caught:
        get_backend("pigeon")
    assert str(caught.value).startswith("backend 'pigeon' is not registered\n  expected: one of: ")
    assert "gloo" in caught.value.expected and "simulated" not in caught.value.expected


def test_an_unknown_backend_on_simulated_ranks_lists_theirs() -> None:
    def program() -> str:
        with pytest.raises(md.BackendError) as caught:
            md.new_group(backend="pigeon")
        return str(caught.value.expected)

    assert md.simulate(program, 1)[0].endswith("simulated")


def test_a_backend_that_this_machine_lacks() -> None:
    if get_backend("gloo") and find_backend("xccl").is_available():
        pytest.skip("this machine has XCCL")
    with pytest.raises(md.BackendError) as caught:
        get_backend("XCCL")
    assert caught.value.summary == "backend 'xccl' is not available on this machine"
    assert "gloo" in caught.value.expected
    assert caught.value.found == f"torch {torch.__version__} was built without XCCL"
    assert caught.value.fix.startswith(
        "install torch's build for XPU, see https://pytorch.org; or "
    )


def test_a_misspelt_backend() -> None:
    with pytest.raises(md.BackendError) as caught:
        get_backend("glo")
    assert caught.value.fix.startswith("did you mean 'gloo'? pass one of these, or None for the")
    with pytest.raises(md.BackendError) as caught:
        get_backend("pigeon")
    assert caught.value.fix.startswith("pass one of these")


def test_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_library, "find_spec", lambda name: None)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(md.BackendError) as caught:
        get_backend("mpi")
    assert caught.value.summary == "backend 'mpi' is not available on this machine"
    assert caught.value.found == "mpi4py is not installed"
    assert caught.value.fix.startswith('pip install "meshdist[mpi]"; or ')


def test_a_backend_that_does_not_say_why_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = find_backend("gloo")
    monkeypatch.setattr(gloo, "is_available", lambda: False)
    with pytest.raises(md.BackendError) as caught:
        get_backend("gloo")
    assert caught.value.found == "is_available() of backend 'gloo' returns False"
    assert caught.value.fix.startswith(
        "install what the package that registered it requires; or pass another"
    )


@pytest.mark.parametrize(
    ("has_nccl", "visible", "found", "fix"),
    [
        (False, None, f"torch {torch.__version__} was built without NCCL", "install a build of"),
        (
            True,
            None,
            "torch sees no GPU",
            "run nvidia-smi to check whether the driver sees a GPU; or",
        ),
        (True, "", "CUDA_VISIBLE_DEVICES= shows no GPU", "unset CUDA_VISIBLE_DEVICES; or pass"),
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
        get_backend("nccl")
    assert caught.value.found == found
    assert caught.value.fix.startswith(fix)


def test_default_timeouts_are_torchs() -> None:
    assert get_backend("gloo").default_timeout.total_seconds() == 1800
    assert find_backend("nccl").default_timeout.total_seconds() == 600


def test_room_is_made_where_it_is_needed_alone() -> None:
    with room_for(4, num_hard=100):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert reserve_resources({"cpu tensors": Needs(0, 0)}, 4) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        assert reserve_resources({"cpu tensors": Needs(20, 0)}, 4) == ""
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before[0]


def test_threads_are_those_of_all_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files = tmp_path / "pids.max", tmp_path / "pids.current"
    monkeypatch.setattr(hosts, "PIDS", files)
    files[0].write_text("100\n")
    files[1].write_text("90\n")
    needs = {"axis 'dp'": Needs(1, 2), "axis 'tp'": Needs(1, 2)}
    assert reserve_resources(needs, 2) == ""
    assert reserve_resources(needs, 3) == (
        "10 more threads can be started of 12 needed by 3 ranks; the limit is 100 "
        "(axis 'dp': 2, axis 'tp': 2)"
    )

"""What the doctor finds out, one answer at a time."""

from __future__ import annotations

import json
import platform
import stat
import sys
import time
from pathlib import Path

import pytest
import torch

import meshdist as md
from meshdist.cli import diagnostics
from meshdist.cli.diagnostics import (
    check_backend,
    find_backends,
    find_device_types,
    find_gpus,
    find_huge_pages,
    find_machine,
    find_mpi,
    find_shared_words_problem,
    find_untested_torch,
    find_versions,
    network_variables,
)
from tests.inner import find_backend, shared_flags
from tests.load import is_within


def test_versions() -> None:
    found = find_versions()
    assert found["python"] is not None and found["python"].startswith(platform.python_version())
    assert found["torch"] is not None and found["torch"].split("+")[0] in torch.__version__
    assert found["meshdist"] in (md.__version__, "a checkout that is not installed")
    assert list(found) == [
        *("python", "meshdist", "torch", "numpy", "cupy", "mpi4py", "einops", "optree"),
    ]


def test_a_torch_that_is_newer_than_those_tested_is_named() -> None:
    text = "torch 2.99.1+cpu is newer than 2.15, the newest that meshdist was tested with"
    assert find_untested_torch("2.99.1+cpu") == text
    assert find_untested_torch("3.0.0") is not None
    assert [find_untested_torch(one) for one in ("2.11.0", "2.15.9", None)] == [None] * 3


def test_torchs_own_world_over_shared_memory() -> None:
    found = check_backend("torch's shm", 60.0, num_calls=10)
    assert (found["backend"], found["error"]) == ("torch's shm", "") and found["latency_s"] > 0
    assert check_backend("torch's shm", 0.1)["error"]


def test_machine() -> None:
    found = find_machine()
    assert found["cores"] >= 1 and found["host"]
    assert (len(find_gpus()) > 0) == torch.accelerator.is_available()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never\n", "madvise"), ("always madvise [never]\n", "never"), ("?", None)],
)
def test_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str | None
) -> None:
    monkeypatch.setattr(diagnostics, "HUGE_PAGES", str(tmp_path / "enabled"))
    assert find_huge_pages() is None
    (tmp_path / "enabled").write_text(text)
    assert find_huge_pages() == find_machine()["huge_pages"] == expected


def test_variables_that_steer_communication() -> None:
    steering = {
        "CUDA_VISIBLE_DEVICES": "0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "29500",
        "MESHDIST_HOST_ID": "x",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "THP_MEM_ALLOC_ENABLE": "1",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_GLOO_LAZY_INIT": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "WORLD_SIZE": "1",
    }
    others = {"HOME": "/", "PATH": "/bin", "MY_RANK": "1", "RANKING": "1", "TORCH_HOME": "/"}
    assert network_variables({**steering, **others}) == dict(sorted(steering.items()))


def test_backends_that_are_here_and_why_others_are_not() -> None:
    told = {backend["name"]: backend for backend in find_backends()}
    served = [kind for kind in find_device_types() if kind in ("cpu", "cuda")]
    assert told["gloo"] == {"name": "gloo", "devices": served, "available": True}
    assert told["simulated"]["devices"] == find_device_types()
    for name, backend in told.items():
        if not backend["available"]:
            assert (backend["reason"], backend["fix"]) == find_backend(name).why_unavailable()


def test_device_types_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None
    )
    assert find_device_types() == ["cpu"]
    gloo = next(backend for backend in find_backends() if backend["name"] == "gloo")
    assert gloo["devices"] == ["cpu"]
    device = torch.device("xpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: device
    )
    assert find_device_types() == ["cpu", "xpu"]


@pytest.mark.mpi
def test_the_mpi_library() -> None:
    found = find_mpi()  # the test extra installs one
    assert found["library"].startswith("Open MPI v")
    assert found["threads"] == "MULTIPLE"
    assert found["standard"][0].isdigit()
    assert isinstance(found["cuda_aware"], bool) and isinstance(found["large_counts"], bool)
    assert Path(found["mpiexec"]).name == "mpiexec"


def interpreter(tmp_path: Path, text: str) -> str:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_mpi_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = interpreter(tmp_path, "echo ImportError: no libmpi.so >&2; exit 1")
    monkeypatch.setattr(sys, "executable", broken)
    assert find_mpi()["reason"] == "MPI does not initialize: ImportError: no libmpi.so"


def test_why_there_is_none_is_asked_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"reason": "mpi4py is not installed", "fix": 'pip install "meshdist[mpi]"'}
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, f"echo '{json.dumps(told)}'"))
    assert find_mpi() == told


def test_what_mpi_writes_at_its_end_hides_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"reason": "mpi4py is not installed", "fix": 'pip install "meshdist[mpi]"'}
    text = f"echo '{json.dumps(told)}'; echo 1 more process has ended >&2"
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, text))
    assert find_mpi() == told
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "echo hello"))
    assert find_mpi()["reason"] == "MPI does not initialize: hello"


def test_what_mpiexec_writes_at_its_end_hides_no_latency(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpiexec = interpreter(tmp_path, "echo 1e-05; echo 0.5; echo 1 more process has ended >&2")
    monkeypatch.setattr(diagnostics, "find_mpiexec", lambda: mpiexec)
    assert check_backend("mpi", 10.0)["latency_s"] == 0.5
    interpreter(tmp_path, "echo hello")
    assert check_backend("mpi", 10.0)["error"].startswith(f"{mpiexec} failed with exit code 0")


def test_an_mpi_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "sleep 30"))
    begin = time.monotonic()
    assert find_mpi(timeout_s=0.2)["reason"] == "mpi4py did not respond within 0.2 s"
    assert is_within(time.monotonic() - begin, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="shared words are memory that Linux has")
def test_headers_are_shared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_shared_words_problem() is None
    monkeypatch.setattr(shared_flags, "find_view", lambda address: None)
    assert find_shared_words_problem() == "a process cannot open another process's files in /proc"
    monkeypatch.setattr(shared_flags, "make_shared_words", lambda: None)
    assert find_shared_words_problem() == "the system does not support memfd_create"


def test_simulated_ranks_get_along() -> None:
    result = check_backend("simulated", 10.0, num_calls=20)
    assert (result["backend"], result["error"]) == ("simulated", "")
    assert result["latency_s"] is not None and 0 < result["latency_s"] < result["seconds"]


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(md, "all_reduce", lambda tensor: None)
    result = check_backend("simulated", 10.0)
    assert result["latency_s"] is None
    assert result["error"].startswith("an all-reduce over 'simulated' returned wrong values")


def test_ranks_that_take_too_long() -> None:
    begin = time.monotonic()
    result = check_backend("gloo", 0.05)
    assert result["latency_s"] is None and "0.05 s" in result["error"]
    assert is_within(time.monotonic() - begin, 15)

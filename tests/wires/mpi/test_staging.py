"""CUDA tensors over MPI: which way is chosen, and the way by host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore

import meshdist as md
from meshdist.bootstrap.world import get_world
from meshdist.wires.mpi import communicator as mpi
from meshdist.wires.mpi.staging import StagedCommunicator
from meshdist.wires.opening import Opening
from meshdist.wires.registry import find_wire, get_wire
from tests.mpi_job import job_of
from tests.pool import Pool
from tests.wires.verb_table import check_every_verb

SECONDS = timedelta(seconds=20)


def test_the_library_says_which_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        def __init__(self, *arguments: Any) -> None:
            self.wire, self.rank, self.size = "mpi", 0, 1

    class Link:
        MPI = None

    monkeypatch.setattr(mpi, "open_link", lambda opening: (Link(), None))
    monkeypatch.setattr(mpi, "MpiCommunicator", Made)
    for device_type, is_aware, kind in (
        ("cpu", False, Made),
        ("cuda", True, Made),
        ("cuda", False, StagedCommunicator),
    ):
        monkeypatch.setattr(mpi, "is_cuda_aware", lambda MPI, answer=is_aware: answer)
        opening: Any = Opening(None, None, (0,), 0, device_type, SECONDS)  # type: ignore[arg-type]
        assert type(mpi.MpiWire().open(opening)) is kind


def test_the_table_promises_no_more_than_staging() -> None:
    wire = find_wire("mpi")
    assert wire.support("all_gather", "cuda", torch.float32) == "built"
    assert wire.support("all_gather", "cpu", torch.float32) == "native"
    assert wire.support("all_gather", "xpu", torch.float32) == ""


def by_copies() -> list[str]:
    """The staging itself does not ask on which device a tensor lies."""
    world = get_world()
    members = tuple(range(world.size))
    store = PrefixStore("staged", world.store)
    wire = get_wire("mpi").open(Opening(store, lambda: store, members, world.rank, "cpu", SECONDS))
    staged = StagedCommunicator(wire)
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    found = [check_every_verb(staged, dtypes, waits=waits) for waits in (False, True)]
    staged.close()
    return found


@pytest.mark.mpi
def test_every_verb_by_copies_in_host_memory(pool: Pool) -> None:
    digests = job_of(pool, 3).run_in_world(by_copies)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1


def on_a_gpu() -> list[list[float]]:
    torch.cuda.set_device(0)
    x = torch.full((1000,), float(md.get_rank() + 1), device="cuda")
    md.all_reduce(x)
    parts = [torch.empty(2, device="cuda") for _ in range(2)]
    md.all_gather(parts, x[:2] + md.get_rank())
    y = torch.zeros(3, device="cuda")
    if md.get_rank() == 0:
        md.send(torch.full((3,), 7.0, device="cuda"), 1)
    else:
        md.recv(y, 0)
    return [x[:1].tolist(), torch.cat(parts).tolist(), y.tolist()]


@pytest.mark.gpu
@pytest.mark.mpi
def test_cuda_tensors(pool: Pool) -> None:
    found = job_of(pool, 2).run_in_world(on_a_gpu)
    gathered = [3.0, 3.0, 4.0, 4.0]
    assert found == [[[3.0], gathered, [0.0] * 3], [[3.0], gathered, [7.0] * 3]]


def of_cupy() -> list[float]:
    import cupy

    x = cupy.full(4, float(md.get_rank() + 1), dtype="float32")
    md.all_reduce(x)
    return x.get().tolist()


@pytest.mark.gpu
@pytest.mark.mpi
def test_cupy_arrays(pool: Pool) -> None:
    pytest.importorskip("cupy")
    assert job_of(pool, 2).run_in_world(of_cupy) == [[3.0] * 4] * 2

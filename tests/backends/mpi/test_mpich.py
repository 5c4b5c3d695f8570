"""MPI through MPICH, in a separate environment: collectives and differences from Open MPI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import meshdist as md
from tests.inner import describe_mpi
from tests.mpi_job import MpiJob
from tests.operations.cases import judge, perform_all, sample
from tests.operations.test_receives_from_anyone import from_all_in_any_order
from tests.promises import programs

pytestmark = [pytest.mark.mpi, pytest.mark.soak]


@pytest.fixture(scope="module")
def job() -> Iterator[MpiJob]:
    job = MpiJob(3, is_mpich=True)
    try:
        yield job
    finally:
        job.close()


def test_which_mpi_it_is(job: MpiJob) -> None:
    for found in job.run_in_world(describe_mpi):
        assert found["library"].startswith("MPICH 5.")
        assert found["threads"] == "MULTIPLE"
        assert found["large_counts"] is True


def test_a_sample_of_the_collectives(job: MpiJob) -> None:
    cases = sample(3, 3)
    judge("mpi", cases, job.run_in_world(perform_all, cases))


def least_and_greatest() -> list[float]:
    x = torch.tensor([[1.0, -0.0], [float("nan"), 0.0], [2.0, -0.0]][md.get_rank()])
    found = []
    for op in (md.ReduceOp.MIN, md.ReduceOp.MAX):
        y = x.clone()
        md.all_reduce(y, op)
        found += [y[0].isnan().item(), y[1].signbit().item()]
    return found


def test_nan_and_zeros_are_the_same_everywhere(job: MpiJob) -> None:
    assert job.run_in_world(least_and_greatest) == [[True, True, True, False]] * 3


def test_sums_are_the_same_bits_in_each_call(job: MpiJob) -> None:
    assert job.run_in_world(programs.sums_are_the_same_bits_in_each_call) == [""] * 3


def tags_above_its_own() -> list[int]:
    tags = [(1 << 29) - 1, 1 << 29, (1 << 30) - 3]
    rank, got = md.get_rank(), [torch.zeros(1, dtype=torch.int64) for _ in tags]
    if rank == 0:
        for tag in tags:
            md.send(torch.tensor([tag]), 1, tag=tag)
    elif rank == 1:
        for tag, x in reversed(list(zip(tags, got, strict=True))):
            md.recv(x, 0, tag=tag)
    return [x.item() for x in got]


def test_tags_that_it_has_not(job: MpiJob) -> None:
    found = job.run_in_world(tags_above_its_own)
    assert found[1] == [(1 << 29) - 1, 1 << 29, (1 << 30) - 3]


def test_all_messages_of_all_senders_arrive(job: MpiJob) -> None:
    found = job.run_in_world(from_all_in_any_order, 40)[0]
    for sender in (1, 2):
        assert [x for source, x in found if source == sender] == [float(n) for n in range(40)]


def mesh_and_abort() -> str:
    mesh = md.init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp", "tp"))
    x = torch.ones(4)
    md.all_reduce(x, group=mesh["dp"])
    assert x.tolist() == [3.0] * 4
    if md.get_rank() == 0:
        mesh.abort()
    try:
        md.all_reduce(x, group=mesh["dp"])
    except md.AbortedError as error:
        return error.summary
    return "nobody was told"


def test_an_abort_frees_every_rank(job: MpiJob) -> None:
    for text in job.run_in_world(mesh_and_abort):
        assert text == "all_reduce on axis 'dp' of DeviceMesh(dp=3, tp=1) was aborted"

"""The wire over MPICH, in an environment of its own: what differs from Open MPI, and the table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import meshdist as md
from tests.inner import describe_mpi
from tests.mpi_job import MpiJob
from tests.verbs.cases import judge, perform_all, sample
from tests.wires.fast_paths import (
    NUM_CALLS,
    both_paths,
    goes_on_beside_a_message,
    opened,
    sums_of_two_halves,
    waits_or_not,
)
from tests.wires.mpi.test_native_reductions import NATIVE, differing_reductions
from tests.wires.samples import legal_ops
from tests.wires.started_calls import both_ways, in_any_order, kept_by_works
from tests.wires.verb_table import check_every_verb

pytestmark = [pytest.mark.mpi, pytest.mark.soak]
SOME = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


@pytest.fixture(scope="module")
def job() -> Iterator[MpiJob]:
    job = MpiJob(3, is_mpich=True)
    try:
        yield job
    finally:
        job.close()


def of_the_wire() -> list[str]:
    wire = md.group.WORLD.open_channel("cpu").communicator
    return [check_every_verb(wire, SOME, waits=waits) for waits in (False, True)]


def test_which_mpi_it_is(job: MpiJob) -> None:
    for found in job.run_in_world(describe_mpi):
        assert found["library"].startswith("MPICH 5.")
        assert found["threads"] == "MULTIPLE"
        assert found["large_counts"] is True


def test_every_verb_matches_numpy(job: MpiJob) -> None:
    digests = job.run_in_world(of_the_wire)
    assert len({digest for of_rank in digests for digest in of_rank}) == 1


def test_a_sample_of_the_public_verbs(job: MpiJob) -> None:
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


def test_collectives_take_the_fast_path(job: MpiJob) -> None:
    for rank, (results, num_fast, _) in enumerate(job.run_in_world(both_paths, (2, 1, 2))):
        assert all(result == results[0] for result in results)
        assert num_fast == [NUM_CALLS * (turn >> rank & 1) for turn in range(8)]


def test_who_waits_meets_who_goes_on(job: MpiJob) -> None:
    assert job.run_in_world(waits_or_not, (40, 3)) == [[True] * 3] * 3


def test_started_calls_take_the_native_way(job: MpiJob) -> None:
    for found in job.run_in_world(both_ways, (40, 3)):
        assert all(found)
    assert job.run_in_world(in_any_order) == [[[1.0]] * 9] * 3
    assert job.run_in_world(kept_by_works) == [[False, False]] * 3


def test_both_ways_give_the_same_bits(job: MpiJob) -> None:
    calls = [(0, False), (1, True), (1500, True), (1500, False)]
    for differ, num_native in job.run_in_world(differing_reductions, calls):
        assert differ == []
        assert num_native == sum(len(legal_ops(dtype)) for dtype in NATIVE)


def test_what_is_started_goes_on_beside_a_message(job: MpiJob) -> None:
    assert job.run_in_world(goes_on_beside_a_message) == [1_800_000.0] * 3


def test_16_bit_floats_of_two(job: MpiJob) -> None:
    expected = [[2.0 * i + 1.0 for i in range(100)]] * 2
    assert job.run_in_world(sums_of_two_halves) == [expected, expected, []]


def fast_messages() -> list[float]:
    """Each sends to the next and receives from the one before, 0 first."""
    group, spy = opened()
    rank, size = group.rank(), group.size()
    found = []
    for count in (0, 1, 100_000):
        x, y = torch.full((count,), rank + 1.0), torch.zeros(count)
        if rank == 0:
            md.send(x, 1, tag=3)
        assert md.recv(y, (rank - 1) % size, tag=3) == (rank - 1) % size
        if rank:
            md.send(x, (rank + 1) % size, tag=3)
        found.append(y.sum().item())
    assert spy.answers == [True] * 6
    return found


def test_messages_take_the_fast_path(job: MpiJob) -> None:
    found = job.run_in_world(fast_messages)
    assert found == [[0.0, one, 100_000 * one] for one in (3.0, 1.0, 2.0)]

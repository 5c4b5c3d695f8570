"""Shares of a data set along mesh axes; torch's own sampler is the second opinion."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler as TorchSampler

import meshdist as md
from meshdist.errors import ArgumentError, KindError, NotInGroupError


def shares(num_ranks: int, length: int, **options: Any) -> list[list[int]]:
    def program() -> list[int]:
        sampler = md.DistributedSampler(range(length), **options)
        sampler.set_epoch(3)
        samples = list(sampler)
        assert len(sampler) == len(samples)
        return samples

    return md.simulate(program, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_world_shares_as_torch_does(
    num_ranks: int, length: int, shuffle: bool, drop_last: bool
) -> None:
    expected = []
    for rank in range(num_ranks):
        other = TorchSampler(range(length), num_ranks, rank, shuffle, 5, drop_last)
        other.set_epoch(3)
        expected.append(list(other))
    assert shares(num_ranks, length, shuffle=shuffle, seed=5, drop_last=drop_last) == expected


def test_without_padding_the_shares_are_the_data_set() -> None:
    found = shares(4, 12)
    assert sorted(index for share in found for index in share) == list(range(12))


def test_ranks_that_differ_only_in_other_axes_read_the_same() -> None:
    def program(over: Any, how: str) -> list[int]:
        mesh = md.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        part = mesh.get_group(over) if how == "group" else mesh[over]
        return list(md.DistributedSampler(range(8), part, shuffle=False))

    def share(number: int, of: int) -> list[int]:
        return list(range(number, 8, of))

    for how in ("mesh", "group"):
        by_dp = md.simulate(program, (2, 2, 2), ("dp", how))
        assert by_dp == [share(0, 2)] * 4 + [share(1, 2)] * 4
        by_tp = md.simulate(program, (2, 2, 2), ("tp", how))
        assert by_tp == [share(0, 2), share(1, 2)] * 4
    by_both = md.simulate(program, (2, 2, 2), (("dp", "cp"), "mesh"))
    assert by_both == [share(number, 4) for number in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_numbers_mean_what_they_mean_in_torch() -> None:
    assert list(md.DistributedSampler(range(5), 2, 1, shuffle=False)) == [1, 3, 0]
    assert isinstance(md.DistributedSampler(range(5), 2, 1), TorchSampler)


def test_a_data_loader_takes_it() -> None:
    def program() -> list[list[float]]:
        data = torch.arange(8.0)
        sampler = md.DistributedSampler(data, shuffle=False)
        return [batch.tolist() for batch in DataLoader(data, batch_size=2, sampler=sampler)]

    assert md.simulate(program, 2) == [[[0.0, 2.0], [4.0, 6.0]], [[1.0, 3.0], [5.0, 7.0]]]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((2, 2), ArgumentError, "rank 2 has no share among 2 replicas\n  expected: a rank from 0"),
        ((2, -1), ArgumentError, "rank -1 has no share among 2 replicas"),
        ((0, 0), ArgumentError, "rank 0 has no share among 0 replicas\n  expected: at least one"),
        (("dp",), KindError, "num_replicas is of type str\n  expected: a number, a mesh"),
        ((True,), KindError, "num_replicas is of type bool"),
    ],
)
def test_bad_numbers_are_refused(
    arguments: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    def program() -> None:
        md.DistributedSampler(range(4), *arguments)

    with pytest.raises(kind) as error:
        md.simulate(program, 1)
    assert text in str(error.value)


def test_a_mesh_tells_the_rank_alone() -> None:
    def program() -> None:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        md.DistributedSampler(range(4), mesh, rank=0)

    with pytest.raises(ArgumentError) as error:
        md.simulate(program, 2)
    assert "rank=0 was given beside DeviceMesh" in str(error.value)
    assert "fix:      drop rank" in str(error.value)


def test_a_rank_off_the_mesh_has_no_share() -> None:
    def program() -> list[int]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if md.get_rank() < 2:
            return list(md.DistributedSampler(range(4), mesh, shuffle=False))
        with pytest.raises(NotInGroupError) as error:
            md.DistributedSampler(range(4), mesh)
        assert "this rank has no share: it is not on the mesh\n  where:    rank 2" in str(
            error.value
        )
        return []

    assert md.simulate(program, 3) == [[0, 2], [1, 3], []]

"""Shares of a data set along mesh axes; torch's own sampler is the second opinion."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler as TorchSampler, Sampler, dataloader

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
        (
            (2, 2),
            ArgumentError,
            ("DistributedSampler: rank 2 has no share among 2 replicas\n  expected: a rank from 0"),
        ),
        ((2, -1), ArgumentError, "DistributedSampler: rank -1 has no share among 2 replicas"),
        (
            (0, 0),
            ArgumentError,
            ("DistributedSampler: rank 0 has no share among 0 replicas\n  expected: at least one"),
        ),
        (("dp",), KindError, "num_replicas must be an integer\n  expected: a number, a mesh"),
        ((True,), KindError, "True, a bool"),
    ],
)
def test_bad_numbers_are_rejected(
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
    assert "rank=0 cannot be combined with DeviceMesh" in str(error.value)
    assert "fix:      remove rank" in str(error.value)


def test_a_rank_off_the_mesh_has_no_share() -> None:
    def program() -> list[int]:
        mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if md.get_rank() < 2:
            return list(md.DistributedSampler(range(4), mesh, shuffle=False))
        with pytest.raises(NotInGroupError) as error:
            md.DistributedSampler(range(4), mesh)
        assert (
            "DistributedSampler: this rank is not on the mesh or in the group\n  where:    rank 2"
        ) in str(error.value)
        return []

    assert md.simulate(program, 3) == [[0, 2], [1, 3], []]


# -- each sample once ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_padding_each_sample_comes_once(num_ranks: int, shuffle: bool) -> None:
    for length in (0, 1, 7, 12):
        found = shares(num_ranks, length, shuffle=shuffle, pad=False)
        assert sorted(index for share in found for index in share) == list(range(length))
        assert [len(share) for share in found] == sorted(map(len, found), reverse=True)


def test_an_evaluation_of_data_that_do_not_divide_is_exact() -> None:
    def program(**options: Any) -> float:
        wrong = torch.tensor([1.0, 0, 0, 0, 0])
        sampler = md.DistributedSampler(wrong, shuffle=False, **options)
        counts = torch.zeros(2)
        for batch in DataLoader(wrong, batch_size=2, sampler=sampler):
            counts += torch.tensor([batch.sum().item(), len(batch)])
        md.all_reduce(counts)
        return (counts[0] / counts[1]).item()

    assert md.simulate(program, 3) == pytest.approx([2 / 6] * 3)
    assert md.simulate(lambda: program(pad=False), 3) == pytest.approx([1 / 5] * 3)


def test_to_drop_samples_and_to_read_each_is_rejected() -> None:
    with pytest.raises(ArgumentError) as error:
        md.DistributedSampler(range(4), 2, 0, drop_last=True, pad=False)
    assert str(error.value) == (
        "drop_last=True and pad=False cannot be combined\n"
        "  expected: at most one of them\n"
        "  fix:      pass pad=False only, to evaluate; or drop_last=True only, to train"
    )


# -- the place in an epoch -------------------------------------------------------------------------


def sampler_of(rank: int, size: int, length: int = 23, **options: Any) -> Any:
    return md.DistributedSampler(range(length), size, rank, **options)


def order_of(epoch: int, length: int = 23, **options: Any) -> list[int]:
    """The order of all samples: that of one rank."""
    one = sampler_of(0, 1, length, **options)
    one.set_epoch(epoch)
    return list(one)


def reader_of(sampler: Any, reads: str, batch_size: int) -> Any:
    """Batches, straight from the sampler, or by a DataLoader, whose workers prefetch."""
    if reads == "plain":
        return ([index] for index in sampler)
    options = {"workers": {"num_workers": 2, "prefetch_factor": 3}}.get(reads, {})
    return DataLoader(sampler.dataset, batch_size=batch_size, sampler=sampler, **options)


def interleaved(shares: list[list[int]]) -> list[int]:
    """What ranks have read, in the order of the epoch."""
    longest = max(map(len, shares), default=0)
    return [share[i] for i in range(longest) for share in shares if i < len(share)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 3), (3, 1), (3, 5), (5, 2)])
@pytest.mark.parametrize("status_flags", ["pad", "once", "drop_last"])
def test_a_state_goes_on_at_any_number_of_ranks(
    before: int, after: int, status_flags: str, shuffle: bool
) -> None:
    options = {"once": {"pad": False}, "drop_last": {"drop_last": True}}.get(status_flags, {})
    options |= {"shuffle": shuffle, "seed": 4}
    order = order_of(2, shuffle=shuffle, seed=4)
    for steps in range(4):
        states, read = [], []
        for rank in range(before):
            sampler = sampler_of(rank, before, **options)
            sampler.set_epoch(2)
            read.append([index for _, index in zip(range(steps), sampler, strict=False)])
            states.append(sampler.state_dict())
        assert states == [states[0]] * before
        assert states[0]["consumed"] == steps * before
        assert interleaved(read) == order[: steps * before]
        rest = []
        for rank in range(after):
            sampler = sampler_of(rank, after, **options)
            sampler.load_state_dict(states[0])
            sampler.set_epoch(2)  # as the loop over epochs does
            assert sampler.state_dict() == states[0]
            rest.append(list(sampler))
            sampler.set_epoch(3)
            assert list(sampler) == list(whole(rank, after, 3, options))
        left = order[steps * before :]
        if status_flags == "pad":
            left += order[: -len(left) % after]
        if status_flags == "drop_last":
            left = left[: len(left) // after * after]
        assert interleaved(rest) == left


def whole(rank: int, size: int, epoch: int, options: dict[str, Any]) -> Any:
    sampler = sampler_of(rank, size, **options)
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize("reads", ["plain", "loader", "workers"])
def test_consumed_is_what_the_program_has_taken(reads: str) -> None:
    sampler = sampler_of(1, 2)
    size = 1 if reads == "plain" else 3
    assert sampler.state_dict()["consumed"] == 0
    taken = []
    for step, batch in enumerate(reader_of(sampler, reads, size), 1):
        taken.append(sampler.state_dict()["consumed"])
        assert len(batch) == size
        if step == 3:
            break
    assert taken == [2 * size, 4 * size, 6 * size]
    assert sampler.state_dict()["consumed"] == 6 * size  # behind the loop, workers gone
    sampler.set_epoch(1)
    assert sampler.state_dict() == {
        "epoch": 1, "consumed": 0, "length": 23, "seed": 0, "shuffle": True
    }  # fmt: skip
    for _ in reader_of(sampler, reads, size):
        pass
    assert sampler.state_dict()["consumed"] == 23


def test_an_epoch_that_has_ended_leaves_nothing_and_the_next_is_whole() -> None:
    ended = sampler_of(0, 4, drop_last=True)
    list(ended)
    state = ended.state_dict()
    assert state["consumed"] == 23  # three were dropped
    resumed = sampler_of(0, 2, drop_last=True)
    resumed.load_state_dict(state)
    assert [len(list(resumed)), len(resumed)] == [0, 11]
    resumed.set_epoch(1)
    assert len(list(resumed)) == 11


def test_the_same_epoch_again_begins_from_the_top() -> None:
    sampler = sampler_of(0, 2, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "consumed": 20})
    assert list(sampler) == [20, 22]
    assert list(sampler) == list(range(0, 23, 2))
    sampler.set_epoch(0)
    assert sampler.state_dict()["consumed"] == 0
    assert list(copy.deepcopy(sampler)) == list(range(0, 23, 2))


def test_what_a_program_counts_itself_wins() -> None:
    sampler = sampler_of(0, 2)
    list(sampler)
    assert sampler.state_dict(consumed=8)["consumed"] == 8
    for wrong in (-1, 2.5, "8"):
        with pytest.raises(ArgumentError, match="a number of samples, 0 or more"):
            sampler.state_dict(consumed=wrong)


@pytest.mark.parametrize("which", ["batch_sampler", "in_order", "around"])
def test_a_loader_that_does_not_tell_is_rejected(which: str) -> None:
    sampler = sampler_of(0, 2)
    if which == "batch_sampler":
        reader = DataLoader(range(23), batch_sampler=Pairs(sampler))
    elif which == "in_order":
        reader = DataLoader(range(23), sampler=sampler, num_workers=1, in_order=False)
    else:
        reader = DataLoader(range(23), sampler=Reversed(sampler))
    next(iter(reader))
    with pytest.raises(ArgumentError) as error:
        sampler.state_dict()
    assert str(error.value) == (
        "cannot determine how many samples the program took from the DataLoader\n"
        "  expected: a DataLoader with torch's batch sampler, and in_order=True\n"
        "  fix:      call sampler.state_dict(consumed=n) with the number of samples of this "
        "epoch that all ranks have processed"
    )
    assert sampler.state_dict(consumed=2)["consumed"] == 2


class StatefulReader(dataloader._SingleProcessDataLoaderIter):
    """As torchdata's: it asks for the state while it fetches a batch."""

    __module__ = "torchdata.stateful_dataloader"

    def _next_index(self) -> Any:
        index = super()._next_index()
        self.state = self._index_sampler.sampler.state_dict()
        return index


def test_torchdatas_loader_learns_what_was_handed_out() -> None:
    sampler = sampler_of(0, 2)
    reader = StatefulReader(DataLoader(range(23), 2, sampler=sampler))
    for _ in range(3):
        next(reader)
    assert reader.state["consumed"] == 12


class Pairs:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        indices = iter(self.sampler)
        return iter(list(zip(indices, indices, strict=False)))


class Reversed(Sampler[int]):
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        return reversed(list(self.sampler))

    def __len__(self) -> int:
        return len(self.sampler)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"seed": 1}, "seed=1"),
        ({"shuffle": False}, "shuffle=False"),
        ({"length": 24}, "length=24"),
    ],
)
def test_a_state_of_another_order_is_rejected(changed: dict[str, Any], found: str) -> None:
    sampler = sampler_of(0, 2)
    with pytest.raises(ArgumentError) as error:
        sampler.load_state_dict({**sampler.state_dict(), **changed})
    text = str(error.value)
    assert text.startswith("cannot load a state of a different order of samples\n")
    assert "expected: length=23, seed=0, shuffle=True\n" in text
    assert found in text.partition("found:")[2]
    assert "fix:      create the sampler with the data set, seed" in text
    with pytest.raises(ArgumentError, match="a different order"):
        sampler.load_state_dict({"yielded": 4})


@pytest.mark.parametrize("consumed", [-3, True, "4", 2.0])
def test_what_is_no_number_of_samples_is_rejected(consumed: Any) -> None:
    sampler = sampler_of(0, 2)
    message = re.escape(f"state_dict() got consumed={consumed!r}")
    with pytest.raises(ArgumentError, match=message):
        sampler.state_dict(consumed)
    with pytest.raises(ArgumentError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), "consumed": consumed})


def test_a_state_of_rank_0_alone_lets_the_others_begin_anew() -> None:
    def program() -> list[int]:
        sampler = md.DistributedSampler(range(8), shuffle=False)
        if md.get_rank() == 0:
            sampler.load_state_dict({**sampler.state_dict(), "consumed": 4})
        return list(sampler)

    assert md.simulate(program, 2) == [[4, 6], [1, 3, 5, 7]]


# -- the axis --------------------------------------------------------------------------------------


def warned_of(program: Any, num_ranks: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        md.simulate(program, num_ranks)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


LACKS_AXIS = (
    "each of 4 ranks reads different samples, while DeviceMesh(dp=2, tp=2) has several axes: "
    "pass the axis that splits the data, DistributedSampler(data, mesh['dp']), or all ranks, "
    "DistributedSampler(data, md.distributed.group.WORLD)"
)


def mesh_of(*sizes: int, names: str = "dp tp") -> md.DeviceMesh:
    return md.init_device_mesh("cpu", sizes, mesh_dim_names=tuple(names.split()))


@pytest.mark.parametrize("how", ["before", "behind", "numbers"])
def test_a_sampler_without_its_axis_warns_once(how: str) -> None:
    def program() -> None:
        if how == "before":
            sampler = md.DistributedSampler(range(8))
            mesh = mesh_of(2, 2)
        else:
            mesh = mesh_of(2, 2)
            given = (md.get_world_size(), md.get_rank()) if how == "numbers" else ()
            sampler = md.DistributedSampler(range(8), *given)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            list(sampler)
        assert mesh.size() == 4

    assert warned_of(program, 4) == [LACKS_AXIS] * 4


def test_a_sampler_that_says_what_it_means_does_not_warn() -> None:
    def program() -> None:
        mesh = mesh_of(2, 2)
        for given in (mesh["dp"], mesh["dp", "tp"], mesh.get_group("dp"), md.group.WORLD):
            list(md.DistributedSampler(range(8), given))
        list(md.DistributedSampler(range(8), 2, mesh.get_local_rank("dp")))
        mesh.close()
        list(md.DistributedSampler(range(8)))
        flat = [mesh_of(4, 1), mesh_of(4, names="dp")]
        list(md.DistributedSampler(range(8)))
        del flat
        list(md.DistributedSampler(range(8), shuffle=False))

    assert warned_of(program, 4) == []


def test_the_axis_is_named_as_the_mesh_names_it() -> None:
    def program(names: Any) -> None:
        mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        md.DistributedSampler(range(8))
        assert mesh.size() == 4

    (named, *_), (unnamed, *_) = (
        warned_of(lambda names=names: program(names), 4) for names in (("x", "y"), None)
    )
    assert "DistributedSampler(data, mesh['x'])" in named
    assert "DistributedSampler(data, mesh.get_group(0))" in unnamed

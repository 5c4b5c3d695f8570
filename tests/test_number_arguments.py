"""Numbers of any library are taken wherever a number is; a bool is none anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import meshdist as md
from meshdist.distributed import PeriodicModelAverager


def two() -> torch.Tensor:
    return torch.ones(2)


def pair() -> md.DeviceMesh:
    return md.make_mesh((2,), ("x",))


def send_with_tag(tag: Any) -> None:
    if md.get_rank() == 0:
        md.send(two(), 1, tag=tag)
    else:
        md.recv(two(), 0, tag=tag)


def batch_with_tag(tag: Any) -> None:
    other = 1 - md.get_rank()
    sent, received = (
        md.P2POp(operation, two(), other, tag=tag) for operation in (md.isend, md.irecv)
    )
    for work in md.batch_isend_irecv([sent, received]):
        work.wait()


def gather_objects(dst: Any) -> None:
    md.gather_object(1, [None, None] if md.get_rank() == 1 else None, dst)


def sampler(**given: Any) -> md.DistributedSampler:
    return md.DistributedSampler(range(8), **{"num_replicas": 2, "rank": 0, **given})  # type: ignore[arg-type]


def begin_world(**given: Any) -> None:
    terms: dict[str, Any] = {"store": md.HashStore(), "rank": 0, "world_size": 1, **given}
    md.init_process_group("gloo", **terms)
    md.destroy_process_group()


WHOLE: dict[str, tuple[Callable[[Any], object], int]] = {
    "tag": (send_with_tag, 1),
    "tag of a batch": (batch_with_tag, 1),
    "src": (lambda n: md.broadcast(two(), n), 1),
    "group_src": (lambda n: md.broadcast(two(), group_src=n), 1),
    "dst": (lambda n: md.reduce(two(), n), 1),
    "src of objects": (lambda n: md.broadcast_object_list([1], src=n), 1),
    "dst of objects": (gather_objects, 1),
    "src_tensor": (lambda n: md.broadcast_multigpu([two(), two()], 0, src_tensor=n), 1),
    "split sizes": (lambda n: md.all_to_all_single(two(), two(), [n, n], [n, n]), 1),
    "ranks of a group": (lambda n: md.new_group([n]), 1),
    "group_size": (md.new_subgroups, 1),
    "listed subgroups": (lambda n: md.new_subgroups_by_enumeration([[0], [n]]), 1),
    "global_rank": (lambda n: md.get_group_rank(md.group.WORLD, n), 1),
    "group_rank": (lambda n: md.get_global_rank(md.group.WORLD, n), 1),
    "sizes of a mesh": (lambda n: md.make_mesh((n, 1), ("x", "y")), 2),
    "sizes of torch's": (lambda n: md.init_device_mesh("cpu", (n,), mesh_dim_names=("x",)), 2),
    "axis": (lambda n: pair().get_group(n), 0),
    "a shape": (lambda n: md.NamedSharding(pair(), md.P("x")).shard_shape((n,)), 2),
    "shard_sizes": (
        lambda n: md.NamedSharding(pair(), md.P("x"), shard_sizes={0: (n, 3)}),
        2,
    ),
    "seed": (md.seed, 1),
    "dim": (lambda n: md.lax.all_gather(torch.ones(2, 2), "x", axis=n, mesh=pair()), 1),
    "source": (lambda n: md.lax.pbroadcast(two(), "x", n, mesh=pair()), 1),
    "perm": (lambda n: md.lax.ppermute(two(), "x", [(0, n)], mesh=pair()), 1),
    "verify_every": (lambda n: md.DDP(torch.nn.Linear(2, 2), verify_every=n), 3),
    "period": (lambda n: PeriodicModelAverager(period=n), 2),
    "warmup_steps": (lambda n: PeriodicModelAverager(period=2, warmup_steps=n), 2),
    "num_replicas": (lambda n: sampler(num_replicas=n), 2),
    "rank of a sampler": (lambda n: sampler(rank=n), 1),
    "seed of a sampler": (lambda n: sampler(seed=n), 1),
    "epoch": (lambda n: sampler().set_epoch(n), 1),
}
OUTSIDE: dict[str, tuple[Callable[[Any], object], int]] = {
    "ranks of simulate": (lambda n: md.simulate(md.get_rank, n), 2),
    "nprocs": (lambda n: md.spawn(pow, (2, 3), nprocs=n), 1),
    "rank of the world": (lambda n: begin_world(rank=n), 0),
    "world_size": (lambda n: begin_world(world_size=n), 1),
}
NUMBERS: dict[str, Callable[[Any], object]] = {
    "bucket_cap_mb": lambda x: md.DDP(torch.nn.Linear(2, 2), bucket_cap_mb=x),
    "bucket_cap_mb of buckets": lambda x: md.GradientBuckets([two()], bucket_cap_mb=x),
}


def rejected(call: Callable[[Any], object], given: Any) -> str:
    try:
        call(given)
    except (md.KindError, md.AxisError) as error:
        return error.summary
    raise AssertionError(f"{given!r} was taken")


@pytest.mark.parametrize("name", WHOLE)
def test_integers_of_numpy_are_taken_and_no_bools(name: str) -> None:
    call, number = WHOLE[name]

    def program() -> list[str]:
        call(number)
        call(np.int64(number))
        bools: tuple[Any, ...] = bool(number), np.bool_(number), torch.tensor(bool(number))
        return [rejected(call, given) for given in bools]

    assert [len(told) for told in md.simulate(program, 2)] == [3, 3]


@pytest.mark.parametrize("name", OUTSIDE)
def test_so_are_those_from_which_worlds_begin(name: str) -> None:
    call, number = OUTSIDE[name]
    call(np.int64(number))
    for given in (bool(number), np.bool_(number)):
        assert "must be an integer" in rejected(call, given)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_taken_and_no_bools(name: str) -> None:
    def program() -> list[str]:
        for number in (1, 1.5, np.int64(1), np.float32(1.5), np.float64(1.5)):
            NUMBERS[name](number)
        return [rejected(NUMBERS[name], given) for given in (True, np.bool_(True), "1")]

    expected = ["bucket_cap_mb must be a number"] * 3
    assert md.simulate(program, 2) == [expected] * 2

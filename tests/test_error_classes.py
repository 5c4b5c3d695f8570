"""What a program catches of torch.distributed it catches of meshdist: both are misused alike."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import meshdist as md
from tests.pool import Pool

Misuse = Callable[[Any], object]
TICK = timedelta(milliseconds=10)


def x() -> torch.Tensor:
    return torch.ones(4)


def short() -> torch.Tensor:
    return torch.ones(3)


def whole() -> torch.Tensor:
    return torch.ones(4, dtype=torch.int64)


def destroyed(library: Any) -> Any:
    group = library.new_group([0])
    library.destroy_process_group(group)
    return group


def begin(library: Any, backend: Any = "gloo", **arguments: Any) -> None:
    store = library.HashStore()
    library.init_process_group(backend, **{"store": store, "rank": 0, "world_size": 1, **arguments})


def mesh_of(library: Any) -> Any:
    make = init_device_mesh if library is dist else library.init_device_mesh
    return make("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


WITHOUT_A_WORLD: dict[str, Misuse] = {
    "an init_method that is a number": lambda d: begin(d, store=None, init_method=3),
    "a collective": lambda d: d.all_reduce(x()),
    "a barrier": lambda d: d.barrier(),
    "get_rank": lambda d: d.get_rank(),
    "get_backend": lambda d: d.get_backend(),
    "new_group": lambda d: d.new_group([0]),
    "no variables": lambda d: d.init_process_group("gloo"),
    "a timeout that is a number": lambda d: begin(d, timeout=3),
    "an unknown scheme": lambda d: begin(d, store=None, init_method="nope://x"),
    "tcp:// without a port": lambda d: begin(d, store=None, init_method="tcp://localhost"),
    "tcp:// without a rank": lambda d: d.init_process_group("gloo", "tcp://localhost:1234"),
    "file:// without a path": lambda d: begin(d, store=None, init_method="file://"),
    "a rank outside the world": lambda d: begin(d, rank=3, world_size=2),
    "a backend that is a number": lambda d: begin(d, 3),
    "Backend of a number": lambda d: d.Backend(3),
    "a key that nobody sets": lambda d: d.HashStore().wait(["key"], TICK),
    "ReduceOp of a text": lambda d: d.ReduceOp("sum"),
}
IN_A_WORLD: dict[str, Misuse] = {
    "all_reduce of a list": lambda d: d.all_reduce([x()]),
    "all_reduce of a number": lambda d: d.all_reduce(3),
    "all_reduce of None": lambda d: d.all_reduce(None),
    "BAND of floats": lambda d: d.all_reduce(x(), d.ReduceOp.BAND),
    "BXOR of floats": lambda d: d.all_reduce(x(), d.ReduceOp.BXOR),
    "MAX of complex numbers": lambda d: d.all_reduce(x().to(torch.complex64), d.ReduceOp.MAX),
    "MAX of a sparse tensor": lambda d: d.all_reduce(x().to_sparse(), d.ReduceOp.MAX),
    "an op that is a text": lambda d: d.all_reduce(x(), "sum"),
    "a group that is a text": lambda d: d.all_reduce(x(), group="tp"),
    "get_backend of a text": lambda d: d.get_backend("tp"),
    "broadcast from outside": lambda d: d.broadcast(x(), 5),
    "broadcast from -1": lambda d: d.broadcast(x(), -1),
    "broadcast without a source": lambda d: d.broadcast(x()),
    "broadcast with two sources": lambda d: d.broadcast(x(), 0, group_src=0),
    "broadcast from a text": lambda d: d.broadcast(x(), "0"),
    "broadcast of a list": lambda d: d.broadcast([x()], 0),
    "reduce to outside": lambda d: d.reduce(x(), 5),
    "reduce without a destination": lambda d: d.reduce(x()),
    "all_gather, empty list": lambda d: d.all_gather([], x()),
    "all_gather, long list": lambda d: d.all_gather([x(), x()], x()),
    "all_gather, no list": lambda d: d.all_gather(x(), x()),
    "all_gather, another size": lambda d: d.all_gather([short()], x()),
    "all_gather, another dtype": lambda d: d.all_gather([whole()], x()),
    "all_gather_into_tensor, size": lambda d: d.all_gather_into_tensor(short(), x()),
    "all_gather_into_tensor, dtype": lambda d: d.all_gather_into_tensor(whole(), x()),
    "all_gather_into_tensor, list": lambda d: d.all_gather_into_tensor([x()], x()),
    "gather, no list": lambda d: d.gather(x(), None, 0),
    "gather, empty list": lambda d: d.gather(x(), [], 0),
    "gather, long list": lambda d: d.gather(x(), [x(), x()], 0),
    "gather, another size": lambda d: d.gather(x(), [short()], 0),
    "gather, another dtype": lambda d: d.gather(x(), [whole()], 0),
    "gather to outside": lambda d: d.gather(x(), [x()], 7),
    "scatter, no list": lambda d: d.scatter(x(), None, 0),
    "scatter, empty list": lambda d: d.scatter(x(), [], 0),
    "scatter, long list": lambda d: d.scatter(x(), [x(), x()], 0),
    "scatter, another size": lambda d: d.scatter(x(), [short()], 0),
    "scatter, another dtype": lambda d: d.scatter(x(), [whole()], 0),
    "scatter from outside": lambda d: d.scatter(x(), [x()], 9),
    "reduce_scatter, empty list": lambda d: d.reduce_scatter(x(), []),
    "reduce_scatter, long list": lambda d: d.reduce_scatter(x(), [x(), x()]),
    "reduce_scatter, another dtype": lambda d: d.reduce_scatter(x(), [whole()]),
    "reduce_scatter, no list": lambda d: d.reduce_scatter(x(), x()),
    "reduce_scatter_tensor, BAND": lambda d: d.reduce_scatter_tensor(x(), x(), d.ReduceOp.BAND),
    "all_to_all, long lists": lambda d: d.all_to_all([x(), x()], [x(), x()]),
    "all_to_all, another dtype": lambda d: d.all_to_all([whole()], [x()]),
    "all_to_all, another size": lambda d: d.all_to_all([short()], [x()]),
    "all_to_all_single, wrong sum": lambda d: d.all_to_all_single(x(), x(), [3], [4]),
    "all_to_all_single, two splits": lambda d: d.all_to_all_single(x(), x(), [2, 2], [2, 2]),
    "all_to_all_single, dtype": lambda d: d.all_to_all_single(whole(), x()),
    "all_gather_coalesced, no lists": lambda d: d.all_gather_coalesced([], [x()]),
    "send to itself": lambda d: d.send(x(), 0),
    "send of a list": lambda d: d.send([x()], 0),
    "isend to two": lambda d: d.isend(x(), 0, group_dst=0),
    "P2POp of a collective": lambda d: d.P2POp(d.all_reduce, x(), 0),
    "an empty batch": lambda d: d.batch_isend_irecv([]),
    "a batch of tensors": lambda d: d.batch_isend_irecv([x()]),
    "a barrier's timeout": lambda d: d.monitored_barrier(timeout=3),
    "all_gather_object, empty list": lambda d: d.all_gather_object([], 1),
    "all_gather_object of a lock": lambda d: d.all_gather_object([None], threading.Lock()),
    "all_gather_object of a lambda": lambda d: d.all_gather_object([None], lambda: 1),
    "gather_object, no list": lambda d: d.gather_object(1, None, 0),
    "gather_object, empty list": lambda d: d.gather_object(1, [], 0),
    "broadcast_object_list of a lambda": lambda d: d.broadcast_object_list([lambda: 1], 0),
    "broadcast_object_list from outside": lambda d: d.broadcast_object_list([1], 3),
    "scatter_object_list, empty list": lambda d: d.scatter_object_list([None], [], 0),
    "scatter_object_list into None": lambda d: d.scatter_object_list(None, [1], 0),
    "scatter_object_list into []": lambda d: d.scatter_object_list([], [1], 0),
    "scatter_object_list of None": lambda d: d.scatter_object_list([None], None, 0),
    "new_group of a rank outside": lambda d: d.new_group([0, 3]),
    "new_group of a rank twice": lambda d: d.new_group([0, 0]),
    "new_group, timeout": lambda d: d.new_group([0], timeout=3),
    "new_subgroups of 2": lambda d: d.new_subgroups(2),
    "new_subgroups of no size": lambda d: d.new_subgroups(),
    "subgroups of no ranks": lambda d: d.new_subgroups_by_enumeration([]),
    "subgroups that overlap": lambda d: d.new_subgroups_by_enumeration([[0], [0]]),
    "new_group of no ranks": lambda d: d.new_group([]),
    "ranks of a text": lambda d: d.get_process_group_ranks("tp"),
    "ranks of no member": lambda d: d.get_process_group_ranks(d.GroupMember.NON_GROUP_MEMBER),
    "all_gather, list of None": lambda d: d.all_gather([None], x()),
    "reduce_scatter, list of None": lambda d: d.reduce_scatter(x(), [None]),
    "all_gather_object, None": lambda d: d.all_gather_object(None, 1),
    "a device that is none": lambda d: d.broadcast_object_list([1], 0, device="nope"),
    "a group of an axis that is not there": lambda d: mesh_of(d).get_group(5),
    "the size of an axis that is not there": lambda d: mesh_of(d).size(5),
    "a mesh cut by a number": lambda d: mesh_of(d)[0],
    "a world twice": lambda d: d.init_process_group("gloo"),
    "get_rank of a destroyed group": lambda d: d.get_rank(destroyed(d)),
    "get_backend of a destroyed group": lambda d: d.get_backend(destroyed(d)),
    "a group destroyed twice": lambda d: d.destroy_process_group(destroyed(d)),
}
# Torch's classes that we do not follow, with what it raises, as in
# docs/reference/differences_from_torch.md.
NOT_FOLLOWED: dict[str, tuple[type[Exception], Misuse]] = {
    "no world to destroy": (AssertionError, lambda d: d.destroy_process_group()),
    "an unknown backend": (AssertionError, lambda d: begin(d, "nope")),
    "a store without a rank": (
        AssertionError,
        lambda d: d.init_process_group("gloo", store=d.HashStore()),
    ),
    "a store and a URL": (AssertionError, lambda d: begin(d, init_method="env://")),
}


def errors_of(library: Any, misuses: Mapping[str, Misuse]) -> dict[str, Exception | None]:
    """What each misuse raises; None for nothing."""
    found: dict[str, Exception | None] = {}
    for name, misuse in misuses.items():
        found[name] = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                misuse(library)
        except Exception as error:
            found[name] = error
    return found


def kinds_of(library: Any, misuses: Mapping[str, Misuse]) -> dict[str, tuple[type, ...]]:
    """The class of what each raises, and those that it derives from."""
    errors = errors_of(library, misuses)
    return {name: () if e is None else type(e).__mro__ for name, e in errors.items()}


@pytest.mark.parametrize("has_world", [False, True])
def test_ours_are_instances_of_torchs(has_world: bool, pool: Pool) -> None:
    misuses = IN_A_WORLD if has_world else WITHOUT_A_WORLD

    def program(rank: int, library: Any) -> dict[str, tuple[type, ...]]:
        if has_world:
            begin(library)
        try:
            return kinds_of(library, misuses)
        finally:
            if has_world:
                library.destroy_process_group()

    ((theirs,), (ours,)) = (pool.call(program, 1, library) for library in (dist, md))
    wrong = {
        name: (kind[0].__name__ if kind else "nothing", [one.__name__ for one in ours[name][:1]])
        for name, kind in theirs.items()
        if not kind or kind[0] not in ours[name]
    }
    assert not wrong


@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_what_torch_asserts_is_an_error_with_a_text(name: str) -> None:
    kind, misuse = NOT_FOLLOWED[name]
    theirs = errors_of(dist, {name: misuse})[name]
    ours = errors_of(md, {name: misuse})[name]
    assert type(theirs) is kind
    assert isinstance(ours, md.MeshdistError) and not isinstance(ours, AssertionError)


def test_one_backend_for_all_pairs_is_the_backend(pool: Pool) -> None:
    def program(rank: int) -> tuple[str, str]:
        begin(md, "cpu:gloo,cuda:gloo")
        try:
            return md.get_backend(), md.get_backend_config()
        finally:
            md.destroy_process_group()

    assert pool.call(program, 1) == [("gloo", "cpu:gloo,cuda:gloo")]

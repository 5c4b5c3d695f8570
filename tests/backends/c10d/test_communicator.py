"""Calls to the classes of torch's backends other than Gloo, if this machine has them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

import meshdist as md
from meshdist.backends.c10d.communicator import C10dCommunicator
from meshdist.backends.c10d.gloo import GlooCommunicator
from meshdist.backends.c10d.torch_classes import NcclBackend as NcclBackend  # registers itself
from meshdist.reduce_ops import ReduceKind, ReduceOp
from tests.backends.c10d.nccl_stand_in import StandIn, standing_in
from tests.backends.direct import Direct
from tests.backends.operations import check_every_operation
from tests.inner import BackendFailure, Opening, find_backend, is_timeout, plain_text
from tests.pool import Pool

SECONDS = timedelta(seconds=20)


def opening(rank: int = 0, size: int = 1, **more) -> Opening:
    store = HashStore()
    return Opening(store, lambda: store, tuple(range(size)), rank, "cpu", SECONDS, **more)


def test_texts_lose_their_source_positions() -> None:
    gloo = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. "
        "This is typically caused by a remote worker crashing."
    )
    assert plain_text(gloo) == "Connection closed by peer [127.0.0.1]:1"
    assert plain_text(RuntimeError("")) == "RuntimeError"
    assert is_timeout("Timed out waiting 5ms") and not is_timeout("Connection closed")


@pytest.fixture
def nccl() -> Iterator[None]:
    with standing_in():
        yield


def asked(group: StandIn) -> tuple[str, list, dict]:
    """The last call: its name, shapes and dtypes of what it was given, and the options' fields."""
    name, *arguments = group.calls.pop()

    def seen(argument):
        if isinstance(argument, torch.Tensor):
            return (tuple(argument.shape), str(argument.dtype).removeprefix("torch."))
        return [seen(one) for one in argument] if isinstance(argument, list) else argument

    options = arguments.pop()
    fields = {"rootRank", "rootTensor", "reduceOp", "timeout"} & set(dir(options))
    assert options.asyncOp
    assert options.timeout == SECONDS
    found = {field: getattr(options, field) for field in fields - {"timeout"}}
    return name, [seen(argument) for argument in arguments], found


def test_what_nccl_is_asked_for(nccl: None) -> None:
    backend = find_backend("nccl").open(opening(rank=1, size=2))
    call = Direct(backend, SECONDS)
    group = backend.torch_group
    x, y = torch.ones(2, 2), torch.ones(2, 4)
    one, two = ((4,), "float32"), ((8,), "float32")
    square = ((2, 2), "float32")
    total = ReduceOp.SUM

    call.all_reduce(x, ReduceOp.PRODUCT)
    assert asked(group) == ("allreduce", [[square]], {"reduceOp": ReduceOp.PRODUCT})
    call.all_reduce(x, ReduceOp.MAX)  # among integers, where NaN is the largest
    assert asked(group) == ("allreduce", [[((4,), "int32")]], {"reduceOp": ReduceOp.MAX})
    call.all_reduce_list([x, x], total)
    assert asked(group) == ("allreduce_coalesced", [[square, square]], {"reduceOp": total})
    call.reduce(x, ReduceOp.AVG, 1)
    options = {"rootRank": 1, "rootTensor": 0, "reduceOp": ReduceOp.AVG}
    assert asked(group) == ("reduce", [[one]], options)
    call.broadcast(x, 1)
    assert asked(group) == ("broadcast", [[one]], {"rootRank": 1, "rootTensor": 0})
    call.all_gather(y, x)
    assert asked(group) == ("_allgather_base", [two, one], {})
    call.all_gather_list([y, x], x)  # NCCL's own takes several sizes
    assert asked(group) == ("allgather", [[[two, one]], [one]], {})
    call.gather([x, x], x, 1)
    assert asked(group) == ("gather", [[[one, one]], [one]], {"rootRank": 1})
    call.gather([], x, 0)
    assert asked(group) == ("gather", [[], [one]], {"rootRank": 0})
    call.scatter(x, [x, x], 1)
    assert asked(group) == ("scatter", [[one], [[one, one]]], {"rootRank": 1})
    call.scatter(x, [], 0)
    assert asked(group) == ("scatter", [[one], []], {"rootRank": 0})
    call.reduce_scatter(x, y, total)
    assert asked(group) == ("_reduce_scatter_base", [one, two], {"reduceOp": total})
    call.reduce_scatter_list(x, [y, x], total)
    assert asked(group) == ("reduce_scatter", [[one], [[two, one]]], {"reduceOp": total})
    call.all_to_all([y, x], [x, y])
    assert asked(group) == ("alltoall", [[two, one], [one, two]], {})
    call.all_to_all_single(y, y, [3, 5], [6, 2])
    assert asked(group) == ("alltoall_base", [two, two, [3, 5], [6, 2]], {})


def explained(failure: BackendFailure, note: int | None) -> Exception:
    return ValueError(f"{note}: {failure}")


@pytest.mark.parametrize("when", ["_start_coalescing", "_end_coalescing"])
def test_a_batch_that_fails_as_a_whole_is_explained(nccl: None, when: str) -> None:
    communicator = find_backend("nccl").open(opening(size=3))

    def fail() -> None:
        raise RuntimeError("the network is down")

    setattr(communicator.torch_group, when, fail)
    with (
        pytest.raises(ValueError, match=r"^None: the network is down$"),
        communicator.batch(explained),
    ):
        Direct(communicator, SECONDS).send(torch.ones(2), 1, 0)


def test_a_batch_goes_out_as_one_call_on_nccl(nccl: None) -> None:
    communicator = find_backend("nccl").open(opening(size=3))
    x, y = torch.ones(2), torch.zeros(2)
    with communicator.batch(explained):
        sent = Direct(communicator, SECONDS).send(x, 1, 0)
        received = Direct(communicator, SECONDS).recv(y, 2, 0)
        to_myself = Direct(communicator, SECONDS).send(x, 0, 0)
        assert not to_myself.poll()
    alone = Direct(communicator, SECONDS).send(x, 1, 0)
    names = [name for name, *_ in communicator.torch_group.calls]
    assert names == ["_start_coalescing", "send", "recv", "_end_coalescing", "send"]
    assert sent.work.work is received.work.work is not alone.work.work
    assert received.source() == 2


def test_a_batch_that_fails_midway_is_ended(nccl: None) -> None:
    communicator = find_backend("nccl").open(opening(size=3))
    with pytest.raises(KeyError), communicator.batch(explained):
        raise KeyError
    Direct(communicator, SECONDS).send(torch.ones(2), 1, 0)
    names = [name for name, *_ in communicator.torch_group.calls]
    assert names == ["_start_coalescing", "_end_coalescing", "send"]


def test_what_nccl_does_not_know_travels_as_bytes(nccl: None) -> None:
    backend = find_backend("nccl").open(opening(rank=1, size=2))
    call = Direct(backend, SECONDS)
    x, y = torch.ones(2, dtype=torch.complex64), torch.ones(4, dtype=torch.complex64)
    call.all_to_all_single(y, y, [1, 3], [2, 2])
    whole = ((32,), "uint8")
    assert asked(backend.torch_group) == ("alltoall_base", [whole, whole, [8, 24], [16, 16]], {})
    call.gather([], x, 0)
    assert asked(backend.torch_group) == ("gather", [[], [((16,), "uint8")]], {"rootRank": 0})


def test_what_nccl_does_not_reduce_is_asked_for_otherwise(nccl: None) -> None:
    backend = find_backend("nccl").open(opening(rank=1, size=2))
    call = Direct(backend, SECONDS)
    group = backend.torch_group

    def asked_for(dtype: torch.dtype, op: ReduceKind) -> list:
        call.all_reduce(torch.ones(4, dtype=dtype), op)
        name, arguments, options = asked(group)
        return [name, *arguments, *options.values()]

    floats, longs = [((8,), "float32")], [((4,), "int64")]
    assert asked_for(torch.complex64, ReduceOp.SUM) == ["allreduce", floats, ReduceOp.SUM]
    assert asked_for(torch.uint64, ReduceOp.PRODUCT) == ["allreduce", longs, ReduceOp.PRODUCT]
    bools = [((4,), "bool")]
    assert asked_for(torch.bool, ReduceOp.BAND) == ["allreduce", bools, ReduceOp.MIN]
    wide = [((4,), "int32")]
    assert asked_for(torch.int16, ReduceOp.SUM) == ["allreduce", wide, ReduceOp.SUM]
    to_divide = ["allreduce", wide, ReduceOp.SUM]
    assert asked_for(torch.int32, ReduceOp.AVG) == ["allreduce", wide, ReduceOp.AVG]
    assert asked_for(torch.int16, ReduceOp.AVG) == to_divide
    # Bits are gathered, and of a block exchanged.
    blocks = ((8,), "int32")
    assert asked_for(torch.int32, ReduceOp.BXOR) == ["_allgather_base", blocks, wide[0]]
    x, y = torch.ones(4, dtype=torch.int32), torch.ones(8, dtype=torch.int32)
    call.reduce_scatter(x, y, ReduceOp.BAND)
    assert asked(group) == ("alltoall_base", [blocks, blocks, [4, 4], [4, 4]], {})
    call.reduce(x, ReduceOp.BAND, 0)
    assert asked(group) == ("_allgather_base", [blocks, wide[0]], {})
    half = torch.ones(2, dtype=torch.complex64)
    call.reduce_scatter(half, torch.cat([half, half]), ReduceOp.AVG)
    found = asked(group)
    assert found[:2] == ("_reduce_scatter_base", [((4,), "float32"), ((8,), "float32")])


def test_lists_of_several_dtypes_go_by_dtype(nccl: None) -> None:
    backend = find_backend("nccl").open(opening(rank=1, size=2))
    tensors = [torch.ones(1), torch.ones(2, dtype=torch.int32), torch.ones(3), torch.ones(())]
    Direct(backend, SECONDS).all_reduce_list(tensors, ReduceOp.SUM)
    second, first = asked(backend.torch_group), asked(backend.torch_group)
    floats = [((1,), "float32"), ((3,), "float32"), ((), "float32")]
    assert first == ("allreduce_coalesced", [floats], {"reduceOp": ReduceOp.SUM})
    assert second == ("allreduce", [[((2,), "int32")]], {"reduceOp": ReduceOp.SUM})
    assert backend.torch_group.calls == []


def test_support_on_nccl_and_its_kin() -> None:
    for name, device_type in (("nccl", "cuda"), ("xccl", "xpu")):
        support = find_backend(name).support
        assert support("all_reduce", device_type, torch.float32) == "native"
        assert support("all_reduce", device_type, torch.int32, ReduceOp.BAND) == "built"
        assert support("reduce_scatter", device_type, torch.float32) == "native"
        assert support("reduce_scatter", device_type, torch.int16) == "built"
        assert support("gather", device_type, torch.int16) == "native"
        assert support("all_reduce", device_type, torch.complex64, ReduceOp.MAX) == ""
        assert support("all_reduce", "cpu", torch.float32) == ""
    assert find_backend("ucc").support("reduce", "cpu", torch.int32, ReduceOp.BAND) == "native"


METHODS = ("allreduce", "broadcast", "allgather", "barrier", "send", "recv")


class Meagre:
    """A process group that has few methods, and rejects others as c10d's base class does."""

    def __init__(self, group) -> None:
        vars(self).update({name: getattr(group, name) for name in METHODS})
        self.rejected: set[str] = set()

    def __getattr__(self, name: str):
        def reject(*arguments: object) -> None:
            self.rejected.add(name)
            raise RuntimeError(f"Backend meagre does not support {name}")

        return reject


class Asking(GlooCommunicator):
    """Asks its process group for everything."""

    lacking = frozenset()


def test_what_a_class_lacks_is_built(pool: Pool) -> None:
    def program() -> list[str]:
        gloo = md.group.WORLD.open_device_group("cpu").communicator
        meagre = Meagre(gloo.torch_group)
        backend = Asking("meagre", gloo.rank, gloo.size, meagre, HashStore())
        check_every_operation(backend, (torch.float32, torch.uint8))
        return sorted(meagre.rejected)

    expected = ["_allgather_base", "_reduce_scatter_base", "allreduce_coalesced", "alltoall"]
    expected += ["alltoall_base", "gather", "reduce", "reduce_scatter", "scatter"]
    assert pool.run(program, 2) == [expected] * 2


def test_of_an_unknown_class_no_mean_of_integers_is_asked(pool: Pool) -> None:
    def program() -> list[int]:
        gloo = md.group.WORLD.open_device_group("cpu").communicator
        backend = C10dCommunicator("unknown", gloo.rank, gloo.size, gloo.torch_group)
        x = torch.tensor([-3, 5 + gloo.rank, 2**62])
        Direct(backend, SECONDS).all_reduce(x, ReduceOp.AVG).finish(SECONDS)
        return x.tolist()

    assert pool.run(program, 2) == [[-3, 5, -(2**62)]] * 2


def test_a_class_without_any_all_gather_is_a_failure() -> None:
    meagre = Meagre(SimpleNamespace(**dict.fromkeys(METHODS)))
    meagre.allgather = meagre._allgather_base
    backend = C10dCommunicator("meagre", 0, 1, meagre)
    with pytest.raises(BackendFailure, match="Backend meagre does not support _allgather_base"):
        Direct(backend, SECONDS).all_gather(torch.ones(1), torch.ones(1))

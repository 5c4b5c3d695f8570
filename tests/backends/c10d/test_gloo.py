"""Gloo opened for one group's members: every collective against NumPy, waits that end, devices."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import meshdist as md
from meshdist.backends.c10d.gloo import GlooCommunicator, GlooTransfer
from meshdist.backends.c10d.gloo_connections import (
    agreed_devices,
    check_interfaces,
    drop_within,
    gloo_devices,
    gloo_interfaces,
)
from meshdist.reduce_ops import ReduceOp, find_refusal
from tests.backends.direct import Direct
from tests.backends.operations import WAITING, OnDevice, check_every_operation, waiting_times
from tests.backends.samples import DTYPES, OPS
from tests.inner import (
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    BackendUnsupported,
    Opening,
    find_backend,
    get_backend,
)
from tests.load import is_within
from tests.pool import Pool, places

SECONDS = timedelta(seconds=20)
SOME = (torch.float32, torch.bfloat16, torch.uint16, torch.bool, torch.complex64)


def opening(rank: int = 0, size: int = 1, **more) -> Opening:
    store = HashStore()
    return Opening(store, lambda: store, tuple(range(size)), rank, "cpu", SECONDS, **more)


@pytest.mark.parametrize(
    ("size", "dtypes"),
    [(1, SOME), (2, DTYPES), (3, SOME[:3]), (4, SOME[:1])],
    ids=["1 member", "2 members", "3 members", "4 members"],
)
def test_every_collective_on_every_dtype_matches_numpy(
    pool: Pool, size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    def program() -> str:
        return check_every_operation(md.group.WORLD.open_device_group("cpu").communicator, dtypes)

    digests = pool.run(program, size)
    assert len(set(digests)) == 1  # the same bits on every member


@pytest.mark.soak
@pytest.mark.parametrize("size", [3, 4, 5])
def test_every_collective_on_every_dtype_matches_numpy_in_larger_groups(
    pool: Pool, size: int
) -> None:
    def program() -> str:
        return check_every_operation(md.group.WORLD.open_device_group("cpu").communicator)

    assert len(set(pool.run(program, size))) == 1


@pytest.mark.soak
def test_more_elements_than_32_bits_count(pool: Pool) -> None:
    def program() -> list[int]:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        count, limit = (1 << 31) + 8, timedelta(minutes=4)
        x = torch.full((count,), backend.rank + 3, dtype=torch.uint8)
        y = torch.zeros(count, dtype=torch.uint8)
        mine = [count - 5, 5] if backend.rank == 0 else [5, count - 5]
        Direct(backend, limit).all_to_all_single(y, x, mine, mine).finish(limit)
        Direct(backend, limit).broadcast(x, 1).finish(limit)
        return [int(one) for one in (y[4], y[5], y[-6], y[-5], x[0], x[-1])]

    expected = [[3, 3, 3, 4, 4, 4], [3, 4, 4, 4, 4, 4]]
    assert pool.run(program, 2, timeout_s=280.0) == expected


def test_a_group_that_does_not_end_is_left_to_a_thread() -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    class Stuck:
        def __del__(self) -> None:
            may_end.wait(60)
            has_ended.set()

    start = time.monotonic()
    drop_within(timedelta(seconds=0.1), [Stuck()])
    assert is_within(time.monotonic() - start, 10.0)
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(30)


ENDING_WITHOUT_THREADS = """
import threading
from datetime import timedelta

from meshdist.backends.c10d.gloo_connections import drop_within

def reject(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

class Group:
    def __del__(self):
        print(threading.current_thread().name)

threading.Thread.start = reject
drop_within(timedelta(0), [Group()])
"""


def test_a_group_ends_here_where_no_thread_can_be_started() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING_WITHOUT_THREADS], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("MainThread\n", "")


def test_an_abort_frees_whoever_waits(pool: Pool) -> None:
    answers = pool.run(lambda: waiting_times(lambda backend: backend, WAITING, "abort"), 2)[0]
    assert [(operation, how) for operation, how, _ in answers] == [
        (operation, "BackendAborted") for operation in WAITING
    ]
    assert is_within(max(seconds for _, _, seconds in answers), 1.9), answers


def test_a_member_that_does_not_come_is_a_timeout(pool: Pool) -> None:
    answers = pool.run(lambda: waiting_times(lambda backend: backend, WAITING, "timeout"), 2)[0]
    assert [(operation, how) for operation, how, _ in answers] == [
        (operation, "BackendTimeout") for operation in WAITING
    ]
    for operation, _, seconds in answers:
        assert seconds > 0.5, (operation, seconds)
        assert is_within(seconds, 1.9), (operation, seconds)


def test_a_closed_group_waits_for_what_is_in_flight_but_not_for_ever(pool: Pool) -> None:
    def program() -> float:
        world = md.group.WORLD.world
        limit = timedelta(seconds=1)
        store = PrefixStore("in flight", world.store)
        backend = get_backend("gloo").open(
            Opening(store, lambda: store, (0, 1), world.rank, "cpu", limit)
        )
        begin = time.monotonic()
        if world.rank == 0:
            Direct(backend, limit).all_reduce(torch.ones(1), ReduceOp.SUM)
            backend.close()
            world.store.set("closed", "")
        world.store.wait(["closed"])
        backend.close()
        return time.monotonic() - begin

    assert 0.9 < pool.run(program, 2)[0] < 4.0


def test_who_only_asks_for_a_message_learns_that_it_is_late(pool: Pool) -> None:
    def program() -> list[str]:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        if backend.rank == 1:
            md.group.WORLD.world.store.wait(["over"])
            return []
        limit = timedelta(seconds=0.5)
        receive = Direct(backend, limit).recv(torch.ones(1), 1, 0)
        begin = time.monotonic()
        while not receive.poll():
            time.sleep(0.05)
        took = time.monotonic() - begin
        assert took > 0.4
        assert is_within(took, 3.0)
        with pytest.raises(BackendTimeout, match=r"not finished after 0\.5 s"):
            receive.finish(limit)
        md.group.WORLD.world.store.set("over", "")
        return ["late"]

    assert pool.run(program, 2)[0] == ["late"]


def test_sums_of_many_bools_stay_bools(pool: Pool) -> None:
    def program() -> list[list[int]]:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        tensors = [torch.tensor([True, False]) for _ in range(3)]
        Direct(backend, SECONDS).all_reduce(tensors[0], ReduceOp.SUM).finish(SECONDS)
        Direct(backend, SECONDS).reduce(tensors[1], ReduceOp.SUM, 1).finish(SECONDS)
        Direct(backend, SECONDS).all_reduce_list(tensors[2:], ReduceOp.SUM).finish(SECONDS)
        return [tensor.view(torch.uint8).tolist() for tensor in tensors]

    assert pool.run(program, 3) == [[[1, 0]] * 3] * 3


def test_an_average_of_large_halves_is_no_infinity(pool: Pool) -> None:
    def program() -> list[float]:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        x = torch.full((2,), 40000.0 + 32 * backend.rank, dtype=torch.float16)
        Direct(backend, SECONDS).all_reduce(x, ReduceOp.AVG).finish(SECONDS)
        return x.tolist()

    assert pool.run(program, 3) == [[40032.0] * 2] * 3


def test_what_cannot_be_reduced_is_rejected_before_anything_is_sent(pool: Pool) -> None:
    def program() -> list[str]:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        x = torch.zeros(2, dtype=torch.float4_e2m1fn_x2)
        whole = torch.zeros(4, dtype=torch.float4_e2m1fn_x2)
        texts = []
        for call in (
            lambda: Direct(backend, SECONDS).all_reduce(x, ReduceOp.SUM),
            lambda: Direct(backend, SECONDS).reduce(x, ReduceOp.SUM, 0),
            lambda: Direct(backend, SECONDS).reduce_scatter(x, whole, ReduceOp.SUM),
        ):
            with pytest.raises(md.DtypeError) as caught:
                call()
            texts.append(str(caught.value))
        assert len(set(texts)) == 1
        return texts[0].splitlines()

    expected = [
        "backend 'gloo' cannot reduce float4_e2m1fn_x2 with SUM",
        "  expected: bool, or integers, floats and complex numbers of 8 bits and more",
        "  fix:      use another reduction, or convert the tensor",
    ]
    assert pool.run(program, 2) == [expected] * 2


OPERATIONS = ("all_reduce", "all_reduce_list", "reduce", "reduce_scatter", "reduce_scatter_list")
MOVING = ("broadcast", "all_gather", "all_gather_list", "gather", "scatter", "all_to_all_single")


def test_support_tells_what_is_gloos_own() -> None:
    support = get_backend("gloo").support
    for operation, dtype in itertools.product(MOVING, DTYPES):
        assert support(operation, "cpu", dtype) == support(operation, "cuda", dtype) == "native"
    assert support("barrier", "cpu", torch.float32) == "native"
    assert support("all_to_all", "cpu", torch.float32) == "built"
    assert (support("send", "cpu", torch.int16), support("recv", "cuda", torch.int16)) == (
        "native",
        "built",
    )
    assert support("all_reduce", "xpu", torch.float32) == ""
    for operation, dtype, name in itertools.product(OPERATIONS, DTYPES, OPS):
        op = getattr(ReduceOp, name)
        answer = support(operation, "cpu", dtype, op)
        assert (answer == "") == (find_refusal(op, dtype) is not None)
    assert support("all_reduce", "cpu", torch.float32) == "native"
    assert support("reduce", "cpu", torch.uint32, ReduceOp.SUM) == "native"
    assert support("reduce", "cpu", torch.uint32, ReduceOp.MAX) == "built"
    assert support("all_reduce", "cpu", torch.uint64, ReduceOp.MAX) == "built"
    assert support("reduce_scatter", "cpu", torch.float32, ReduceOp.SUM) == "built"
    assert support("all_reduce", "cpu", torch.float4_e2m1fn_x2, ReduceOp.SUM) == ""


def test_gloo_of_one_member() -> None:
    communicator = get_backend("gloo").open(opening())
    x = torch.ones(3)
    Direct(communicator, SECONDS).all_reduce(x, md.ReduceOp.SUM).finish(SECONDS)
    Direct(communicator, SECONDS).barrier().finish(SECONDS)
    assert x.tolist() == [1.0] * 3
    communicator.close()


def test_gloo_takes_torchs_own_options() -> None:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._threads = 1
    communicator = get_backend("gloo").open(opening(options=options))
    Direct(communicator, SECONDS).barrier().finish(SECONDS)
    assert options._timeout == SECONDS


def test_a_member_that_never_comes_is_a_timeout_of_the_opening() -> None:
    lonely = Opening(HashStore(), HashStore, (0, 1), 0, "cpu", timedelta(seconds=1))
    with pytest.raises(BackendFailure):
        get_backend("gloo").open(lonely)


def test_a_message_to_oneself_without_counterpart_times_out() -> None:
    communicator = get_backend("gloo").open(opening())
    with pytest.raises(BackendTimeout, match="no matching send or receive"):
        Direct(communicator, SECONDS).recv(torch.ones(1), 0, 0).finish(timedelta(seconds=0.05))


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interfaces(is_one_host=True) == ("127.0.0.1",)
    assert gloo_interfaces(is_one_host=False) == ()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0, eth1")
    assert gloo_interfaces(is_one_host=True) == ("eth0", "eth1")


def test_gloo_over_a_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    communicator = get_backend("gloo").open(opening())
    Direct(communicator, SECONDS).barrier().finish(SECONDS)


def test_one_device_for_each_interface_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gloo_devices(("lo",)).made) == 1
    assert len(gloo_devices(("lo", "lo")).made) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    communicator = get_backend("gloo").open(opening())
    Direct(communicator, SECONDS).barrier().finish(SECONDS)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(
        md.BackendError, match="the world could not be opened on backend 'gloo'"
    ) as e:
        md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
    assert not md.is_initialized()
    assert (
        "found:    GLOO_SOCKET_IFNAME=lo,nowhere0 names an interface without an address; "
        "this host has lo" in str(e.value)
    )


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (["nosuch0", "nosuch0"], []),
        (["nosuch0", "lo", "lo"], ["rank 0: {missing}", "ranks 1-2: lo"]),
        (["lo,lo", "lo"], ["rank 0: lo,lo", "rank 1: lo"]),
        (["lo", "lo", "lo", "lo", "lo,lo"], ["ranks 0-3: lo", "rank 4: lo,lo"]),
        ([None, "lo,lo"], ["rank 0: not set", "rank 1: lo,lo"]),
        (["lo", None], None),
        (["lo,lo", "lo,lo", "lo,lo"], None),
    ],
)
def test_interfaces_are_compared_as_a_group_opens(
    pool, tmp_path, named: list[str | None], found: list[str] | None
) -> None:
    def program(rank: int) -> str:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if named[rank] is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = named[rank]
        store = md.FileStore(str(tmp_path / "store"), len(named))
        limit = timedelta(seconds=4 if None in named and found else 30)
        try:
            md.init_process_group(
                "gloo", store=store, rank=rank, world_size=len(named), timeout=limit
            )
            x = torch.ones(1)
            md.all_reduce(x)
            md.destroy_process_group()
        except md.BackendError as error:
            return f"{error.summary}\n{error.found}\n{error.fix}"
        return str(x.item())

    missing = "GLOO_SOCKET_IFNAME=nosuch0 names an interface without an address; this host "
    for rank, text in enumerate(pool.call(program, len(named))):
        if found is None:
            assert text == str(float(len(named)))
            continue
        summary, *lines, fix = text.splitlines()
        assert summary == "the world could not be opened on backend 'gloo'"
        assert fix.endswith("the same number on every rank, or unset it")
        if named[rank] == "nosuch0":
            assert len(lines) == 1
            assert lines[0].startswith(missing)
        else:
            assert lines[0] == "GLOO_SOCKET_IFNAME lists different numbers of interfaces"
            expected = [one.format(missing=missing) for one in found]
            pairs = zip(lines[1:], expected, strict=True)
            assert all(line.startswith(one) for line, one in pairs)


@pytest.mark.parametrize("size", [2, 64])
def test_interfaces_are_compared_by_a_few_requests_however_many_members_there_are(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    class Counting(HashStore):
        num_requests = 0

        def __getattribute__(self, name: str) -> Any:
            if name in {"set", "get", "check", "multi_get", "wait", "compare_set"}:
                self.num_requests += 1
            return super().__getattribute__(name)

    store = Counting()
    ranks = tuple(range(10, 10 + size))
    opening = Opening(store, lambda: store, ranks, 0, "cpu", SECONDS)
    check_interfaces(opening, timedelta(0))  # others have not come
    for member in range(1, size):
        store.set(f"interfaces/{member}", '[1, "lo"]')
    store.num_requests = 0
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert agreed_devices(opening).made
    assert store.num_requests == 3
    store.set(f"interfaces/{size - 1}", '[2, "lo,lo"]')
    with pytest.raises(
        BackendUnsupported, match=rf"(?s)different numbers of interfaces.*rank {9 + size}: lo,lo"
    ):
        check_interfaces(opening, timedelta(0))


@pytest.mark.parametrize("lazily", ["0", "1"])
def test_groups_may_connect_on_demand(pool, lazily: str) -> None:
    def program() -> list[float]:
        mesh = md.init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("dp", "tp"),
            axis_options={"dp": md.AxisOptions(private=True)},
        )
        found = []
        for _ in range(2):
            for group in (None, mesh["tp"], mesh["dp"]):
                x = torch.tensor([2.0 ** md.get_rank()])
                md.all_reduce(x, group=group)
                found.append(x.item())
        devices = [gloo_devices(("127.0.0.1",)).made[0] for _ in range(3)]
        assert len(set(map(id, devices))) == (3 if lazily == "1" else 1)
        return found[:3] if found[:3] == found[3:] else found

    expected = [[15.0, 3.0, 5.0], [15.0, 3.0, 10.0], [15.0, 12.0, 5.0], [15.0, 12.0, 10.0]]
    assert pool.run(program, 4, env={"TORCH_GLOO_LAZY_INIT": lazily}) == expected


def test_groups_of_a_process_share_one_device() -> None:
    def listening() -> int:
        own = _open_files()
        count = 0
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as lines:
                for line in list(lines)[1:]:
                    fields = line.split()
                    count += fields[3] == "0A" and f"socket:[{fields[9]}]" in own
        return count

    first = get_backend("gloo").open(opening())
    before = listening()
    more = [get_backend("gloo").open(opening()) for _ in range(3)]
    assert listening() == before
    del first, more


def _open_files() -> set[str]:
    """What this process has open; other threads may close something meanwhile."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


class OnAGpu(torch.Tensor):
    """A tensor in host memory that says it lies on a GPU."""

    is_cpu = False


class WithoutCuda:
    """Gloo's class, whose coalesced all-reduce rejects CUDA tensors in its own words."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], options: Any) -> Any:
        if any(not tensor.is_cpu for tensor in tensors):
            text = "ProcessGroupGloo::allreduce_coalesced: unsupported device type cuda"
            raise RuntimeError(text)
        return self._group.allreduce_coalesced(tensors, options)


def reduces_lists(kind: type[torch.Tensor], waits: bool) -> list[list[float]]:
    gloo = md.group.WORLD.open_device_group("cpu").communicator
    backend = GlooCommunicator(
        "gloo", gloo.rank, gloo.size, WithoutCuda(gloo.torch_group), HashStore()
    )
    tensors = [
        torch.full((n,), backend.rank + n).to(dtype).as_subclass(kind) for n, dtype in LISTED
    ]
    Direct(backend, SECONDS, waits).all_reduce_list(tensors, ReduceOp.SUM).finish(SECONDS)
    return [x.tolist() for x in tensors]


LISTED = ((1, torch.float32), (3, torch.float32), (2, torch.int16), (0, torch.int64))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", [torch.Tensor, OnAGpu])
def test_lists_are_reduced_where_the_class_lacks_cuda(
    pool: Pool, kind: type[torch.Tensor], waits: bool
) -> None:
    assert pool.run(reduces_lists, 2, kind, waits) == [[[3], [7] * 3, [5] * 2, []]] * 2


def test_what_the_class_has_for_cpu_tensors_alone_is_built_for_others() -> None:
    support = find_backend("gloo").support
    for operation in ("all_reduce_list", "send", "recv"):
        op = ReduceOp.SUM if operation == "all_reduce_list" else None
        assert support(operation, "cpu", torch.float32, op) == "native"
        assert support(operation, "cuda", torch.float32, op) == "built"
    assert support("all_reduce", "cuda", torch.float32, ReduceOp.SUM) == "native"
    assert support("all_reduce_list", "cuda", torch.int32, ReduceOp.AVG) == "built"
    assert support("all_reduce_list", "cuda", torch.bool, ReduceOp.AVG) == ""


def test_the_table_of_another_device_copies_there_and_back(pool: Pool) -> None:
    def program() -> str:
        backend = md.group.WORLD.open_device_group("cpu").communicator
        return check_every_operation(OnDevice(backend, "cpu"), SOME[:2])

    assert len(set(pool.run(program, 2))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [False, True])
def test_every_collective_on_cuda_tensors_matches_numpy(pool: Pool, waits: bool) -> None:
    def program() -> str:
        torch.cuda.set_device(0)
        backend = md.new_group(backend="gloo").open_device_group("cuda").communicator
        return check_every_operation(OnDevice(backend, "cuda"), SOME, waits=waits)

    assert len(set(pool.run(program, 2))) == 1


@pytest.mark.gpu
def test_gloo_with_cuda_tensors_on_several_ranks(pool) -> None:
    def program() -> list:
        mesh = md.init_device_mesh("cuda", (2,), backend_override={0: "gloo"})
        x = torch.full((3,), md.get_rank() + 1.0, device="cuda")
        md.all_reduce(x, group=mesh)
        return x.tolist()

    assert pool.run(program, 2) == [[3.0] * 3] * 2


@pytest.mark.gpu
def test_messages_of_cuda_tensors_go_by_host_memory(pool: Pool) -> None:
    def program() -> tuple[list[float], int]:
        backend = md.new_group(backend="gloo").open_device_group("cuda").communicator
        x = torch.full((3,), backend.rank + 1.0, device="cuda")
        y = torch.zeros(3, device="cuda")
        other = 1 - backend.rank
        received, sent = (
            Direct(backend, SECONDS).recv(y, other, 5),
            Direct(backend, SECONDS).send(x, other, 5),
        )
        for transfer in (received, sent):
            transfer.finish(SECONDS)
        return y.tolist(), received.source()

    assert pool.run(program, 2) == [([2.0] * 3, 1), ([1.0] * 3, 0)]


def receives_less_than_is_sent(tag: int, names_sender: bool) -> str:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=1))
    if md.get_rank() == 0:
        call = lambda: md.send(torch.ones(100), 1, group=group, tag=tag)  # noqa: E731
    else:
        src = 0 if names_sender else None
        call = lambda: md.recv(torch.zeros(96), src, group=group, tag=tag)  # noqa: E731
    with pytest.raises(md.MeshdistError) as caught:
        call()
    return type(caught.value).__name__


@pytest.mark.parametrize("names_sender", [True, False])
@pytest.mark.parametrize("tag", [0, 5, 8191, 8192, 2**30 - 3])
def test_a_message_too_large_for_who_receives_it_on_another_host_ends_nobody(
    pool: Pool, tag: int, names_sender: bool
) -> None:
    outcomes = pool.run(receives_less_than_is_sent, 2, tag, names_sender, hosts="AB")
    assert set(outcomes) <= {"CollectiveTimeoutError", "BackendError"}
    assert "CollectiveTimeoutError" in outcomes


def more_large_tags_than_have_numbers() -> int:
    """How many messages were right."""
    group = md.new_group(backend="gloo")
    x, num_right = torch.empty(2, dtype=torch.int64), 0
    for tag in range(2**20, 2**20 + 4200):
        if md.get_rank() == 0:
            md.send(torch.tensor([tag, 1]), 1, group=group, tag=tag)
        else:
            md.recv(x, 0, group=group, tag=tag)
            num_right += x.tolist() == [tag, 1]
    return num_right


@pytest.mark.soak
def test_any_number_of_large_tags_works(pool: Pool) -> None:
    assert pool.run(more_large_tags_than_have_numbers, 2, hosts="AB") == [0, 4200]


def after_all_was_closed() -> str:
    backend = md.new_group(backend="gloo").open_device_group("cpu").communicator
    x = torch.ones(1)
    Direct(backend, SECONDS).all_reduce(x, ReduceOp.SUM).finish(SECONDS)
    backend.close()
    texts = set()
    for call in (
        lambda: Direct(backend, SECONDS).all_reduce(x, ReduceOp.SUM),
        lambda: Direct(backend, SECONDS).send(x, 1 - backend.rank, 0),
        lambda: Direct(backend, SECONDS).barrier(),
    ):
        with pytest.raises(BackendFailure) as caught:
            call()
        texts.add(str(caught.value))
    return "; ".join(texts)


def test_collectives_after_the_end_of_the_program_say_so(pool: Pool) -> None:
    told = "the group's connection is closed, for example because the program ends"
    assert pool.run(after_all_was_closed, 2) == [told] * 2


def works_of_a_closed_group() -> tuple[list[float], str, float]:
    group = md.new_group(backend="gloo", timeout=timedelta(seconds=20))
    other, got = 1 - md.get_rank(), torch.zeros(2)
    come, sent = md.irecv(got, other, group=group), md.isend(torch.ones(2), other, group=group)
    sent.wait()
    md.barrier(group)  # what was sent has come
    never = md.irecv(torch.zeros(3), other, group=group, tag=1)
    md.destroy_process_group(group)
    begin = time.monotonic()
    with pytest.raises(md.BackendError) as caught:
        never.wait()
    come.wait()
    return got.tolist(), str(caught.value), time.monotonic() - begin


def test_waiting_for_a_message_of_a_closed_group_ends(pool: Pool) -> None:
    for got, text, seconds in pool.run(works_of_a_closed_group, 2):
        assert got == [1.0, 1.0]
        assert "irecv on group of ranks 0-1 failed on backend 'gloo'" in text
        assert "the group was closed before this message was complete" in text
        assert is_within(seconds, 5.0)


class Message:
    """A message that comes when the test says so, or fails."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.came = threading.Event()
        self.error = error
        self.waits: list[timedelta] = []

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout)
        self.came.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error


class Connection:
    """What a transfer needs of its communicator."""

    is_aborted = is_closed = False
    num_disconnects = 0

    def own_timeout(self, timeout: timedelta) -> timedelta:
        return 2 * timeout

    def failure(self, error: RuntimeError) -> BackendFailure:
        return BackendFailure(f"cut: {error}")

    def disconnect(self) -> None:
        self.num_disconnects += 1


def transfer_of(message: Message, timeout: timedelta = SECONDS) -> tuple[Connection, GlooTransfer]:
    connection: Any = Connection()
    return connection, GlooTransfer(connection, message, 1, timeout)


def test_a_transfer_that_is_polled_is_waited_for_by_another_thread_once() -> None:
    message = Message()
    _, transfer = transfer_of(message)
    assert not transfer.poll() and not transfer.poll()
    threading.Timer(0.05, message.came.set).start()
    transfer.finish(SECONDS)
    assert transfer.poll() and message.waits == [2 * SECONDS]


def test_what_the_other_thread_met_is_raised_by_the_wait() -> None:
    message = Message(RuntimeError("connection closed"))
    message.came.set()
    _, transfer = transfer_of(message)
    while not transfer.poll():
        time.sleep(0.001)
    with pytest.raises(BackendFailure, match="cut: connection closed"):
        transfer.finish(SECONDS)


def test_a_transfer_that_is_polled_in_vain_disconnects_once_and_is_late() -> None:
    connection, transfer = transfer_of(Message(), timedelta(seconds=0.2))
    while not transfer.poll():
        time.sleep(0.01)
    assert transfer.poll() and connection.num_disconnects == 1
    with pytest.raises(BackendTimeout, match="not finished after 20 s"):
        transfer.finish(SECONDS)


def test_an_abort_frees_a_wait_beside_another_thread() -> None:
    connection, transfer = transfer_of(Message())
    transfer.poll()
    threading.Timer(0.05, lambda: setattr(connection, "is_aborted", True)).start()
    with pytest.raises(BackendAborted, match="aborted while waiting for a message"):
        transfer.finish(SECONDS)


IN_FLIGHT = """
import torch, meshdist as md
md.init_process_group("gloo")
kept = []
if md.get_rank() == 0:
    for tag in range(8):
        kept.append(md.irecv(torch.ones(4), 1, tag=tag))
        kept[-1].is_completed()
        md.irecv(torch.ones(4), 1, tag=8 + tag)
md.barrier()
"""


def test_a_program_may_end_with_messages_in_flight(pool: Pool) -> None:
    for _ in range(3):
        for done in pool.start(IN_FLIGHT, places(2)):
            assert done.returncode == 0, done.stderr

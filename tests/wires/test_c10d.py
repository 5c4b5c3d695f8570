"""torch's wires opened for one group's members. Verbs over them: tests/collectives."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import meshdist as md
from meshdist.wires.base import (
    Opening,
    WireAborted,
    WireFailure,
    WireTimeout,
    find_wire,
    get_wire,
)
from meshdist.wires.c10d import is_timeout, plain_text
from meshdist.wires.gloo import gloo_devices, gloo_interfaces

SECONDS = timedelta(seconds=20)


def opening(rank: int = 0, size: int = 1, **more) -> Opening:
    return Opening(HashStore(), tuple(range(size)), rank, "cpu", SECONDS, **more)


def test_gloo_of_one_member() -> None:
    communicator = get_wire("gloo").open(opening())
    x = torch.ones(3)
    communicator.finish(communicator.all_reduce(x, md.ReduceOp.SUM, SECONDS), SECONDS)
    communicator.finish(communicator.barrier(SECONDS), SECONDS)
    assert x.tolist() == [1.0] * 3
    communicator.close()


def test_gloo_takes_torchs_own_options() -> None:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._threads = 1
    communicator = get_wire("gloo").open(opening(options=options))
    communicator.finish(communicator.barrier(SECONDS), SECONDS)
    assert options._timeout == SECONDS


def pairs(rounds: int):
    """Two Gloo members in two threads of this process, over one HashStore."""
    store = HashStore()
    made = {}

    def make(rank: int) -> None:
        made[rank] = get_wire("gloo").open(
            Opening(PrefixStore(f"{rounds}", store), (0, 1), rank, "cpu", timedelta(seconds=30))
        )

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made[0], made[1]


@pytest.mark.parametrize("what", ["all_reduce", "recv", "recv from anyone"])
def test_abort_frees_a_thread_that_waits(what: str) -> None:
    one, two = pairs(1)
    x = torch.ones(1)
    pending = {
        "all_reduce": lambda: one.all_reduce(x, md.ReduceOp.SUM, SECONDS),
        "recv": lambda: one.recv(x, 1, 0, SECONDS),
        "recv from anyone": lambda: one.recv(x, None, 0, SECONDS),
    }[what]()
    timer = threading.Timer(0.3, one.abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises(WireAborted):
        one.finish(pending, SECONDS)
    assert time.monotonic() - start < 5
    timer.join()
    two.abort()


def test_a_timeout_of_a_collective_and_of_a_receive() -> None:
    short = timedelta(seconds=0.7)
    one, _two = pairs(2)
    with pytest.raises(WireTimeout):
        one.finish(one.all_reduce(torch.ones(1), md.ReduceOp.SUM, short), short)
    _one, two = pairs(3)  # an expiry closes a communicator's connections
    with pytest.raises(WireTimeout):
        two.finish(two.recv(torch.ones(1), 0, 0, short), short)


def test_a_member_that_never_comes_is_a_timeout_of_the_opening() -> None:
    lonely = Opening(HashStore(), (0, 1), 0, "cpu", timedelta(seconds=1))
    with pytest.raises(WireFailure):
        get_wire("gloo").open(lonely)


def test_a_message_to_oneself_without_counterpart_times_out() -> None:
    communicator = get_wire("gloo").open(opening())
    with pytest.raises(WireTimeout, match="no counterpart"):
        communicator.finish(
            communicator.recv(torch.ones(1), 0, 0, SECONDS), timedelta(seconds=0.05)
        )


def test_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_interfaces(is_one_host=True) == ("127.0.0.1",)
    assert gloo_interfaces(is_one_host=False) == ()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0, eth1")
    assert gloo_interfaces(is_one_host=True) == ("eth0", "eth1")


def test_gloo_over_a_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    communicator = get_wire("gloo").open(opening())
    communicator.finish(communicator.barrier(SECONDS), SECONDS)


def test_one_device_for_each_interface_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(gloo_devices(("lo",))) == 1
    assert len(gloo_devices(("lo", "lo"))) == 2
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    communicator = get_wire("gloo").open(opening())
    communicator.finish(communicator.barrier(SECONDS), SECONDS)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nowhere0")
    with pytest.raises(md.BackendError, match="the world could not be opened on wire 'gloo'") as e:
        md.init_process_group("gloo", store=md.HashStore(), rank=0, world_size=1)
    assert not md.is_initialized()
    assert (
        "found:    GLOO_SOCKET_IFNAME=lo,nowhere0 names an interface that has no address here; "
        "this host has lo" in str(e.value)
    )


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
        devices = [gloo_devices(("127.0.0.1",))[0] for _ in range(3)]
        assert len(set(map(id, devices))) == (3 if lazily == "1" else 1)
        return found[:3] if found[:3] == found[3:] else found

    expected = [[15.0, 3.0, 5.0], [15.0, 3.0, 10.0], [15.0, 12.0, 5.0], [15.0, 12.0, 10.0]]
    assert pool.run(program, 4, env={"TORCH_GLOO_LAZY_INIT": lazily}) == expected


def test_groups_of_a_process_share_one_device() -> None:
    def listening() -> int:
        own = {os.readlink(f"/proc/self/fd/{fd}") for fd in _fds()}
        count = 0
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as lines:
                for line in list(lines)[1:]:
                    fields = line.split()
                    count += fields[3] == "0A" and f"socket:[{fields[9]}]" in own
        return count

    first = get_wire("gloo").open(opening())
    before = listening()
    more = [get_wire("gloo").open(opening()) for _ in range(3)]
    assert listening() == before
    del first, more


def _fds() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        found.append(fd)
    return found


def test_texts_lose_their_source_positions() -> None:
    gloo = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1. "
        "This is typically caused by a remote worker crashing."
    )
    assert plain_text(gloo) == "Connection closed by peer [127.0.0.1]:1"
    assert plain_text(RuntimeError("")) == "RuntimeError('')"
    assert is_timeout("Timed out waiting 5ms") and not is_timeout("Connection closed")


class RecordedNccl:
    """What the wire asks of torch's class, without a GPU."""

    class Options:
        pass

    def __init__(self, store, rank: int, size: int, options) -> None:
        self.rank, self.size, self.options = rank, size, options
        self.connected: list[torch.device] = []
        self.barriers: list = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def barrier(self, options):
        self.barriers.append(options.device)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[RecordedNccl]:
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordedNccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return RecordedNccl


def test_nccl_connects_at_once_where_a_device_is_bound(nccl: type[RecordedNccl]) -> None:
    device = torch.device("cuda", 1)
    for bound in (None, torch.device("cpu"), device):
        group = find_wire("nccl").open(opening(device=bound))._group
        assert group.connected == ([device] if bound is device else [])


def test_nccl_takes_torchs_own_options(nccl: type[RecordedNccl]) -> None:
    given = nccl.Options()
    given.is_high_priority_stream = True
    group = find_wire("nccl").open(opening(options=given))._group
    assert group.options is given and given._timeout == SECONDS
    # Options of another wire are not its own.
    assert type(find_wire("nccl").open(opening(options=object()))._group.options) is nccl.Options


def test_a_failure_on_nccl_does_not_end_the_process(
    nccl: type[RecordedNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    find_wire("nccl").open(opening())
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_a_barrier_runs_on_the_device_named(nccl: type[RecordedNccl]) -> None:
    communicator = find_wire("nccl").open(opening())
    device = torch.device("cuda", 1)
    for one in (None, device):
        communicator.barrier(SECONDS, one)
    assert communicator._group.barriers == [None, device]


@pytest.mark.gpu
def test_nccl_with_a_bound_device_and_options(tmp_path) -> None:
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    device = torch.device("cuda", 0)
    md.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/world",
        rank=0,
        world_size=1,
        pg_options=options,
        device_id=device,
    )
    try:
        group = md.group.WORLD.communicator("cuda")._group
        assert group.options.is_high_priority_stream
        md.barrier(device_ids=[0])
        md.barrier()
        private = md.new_group(device_id=device)
        x = torch.ones(2, device=device)
        md.all_reduce(x, group=private)
        assert x.tolist() == [1.0, 1.0]
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
def test_one_world_serves_both_kinds_of_tensors(tmp_path) -> None:
    md.init_process_group(init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        assert md.get_backend() == "nccl"
        assert md.get_backend_config() == "cpu:gloo,cuda:nccl"
        for device, wire in (("cpu", "gloo"), ("cuda", "nccl")):
            x = torch.ones(2, device=device)
            md.all_reduce(x)
            assert md.group.WORLD.communicator(device).wire == wire
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
def test_nccl_with_one_rank(tmp_path) -> None:
    md.init_process_group("nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        x = torch.ones(4, device="cuda")
        work = md.all_reduce(x, async_op=True)
        work.wait()
        md.broadcast(x, src=0)
        out = torch.empty(1, 4, device="cuda")
        md.all_gather_into_tensor(out, x)
        md.barrier()
        assert out.tolist() == [[1.0] * 4]
        with pytest.raises(md.ArgumentError, match="NCCL, which has no tags"):
            md.irecv(x, 0, tag=3)
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
def test_gloo_with_cuda_tensors_on_several_ranks(pool) -> None:
    def program() -> list:
        mesh = md.init_device_mesh("cuda", (2,), backend_override={0: "gloo"})
        x = torch.full((3,), md.get_rank() + 1.0, device="cuda")
        md.all_reduce(x, group=mesh)
        return x.tolist()

    assert pool.run(program, 2) == [[3.0] * 3] * 2


@pytest.mark.gpu
def test_two_streams_as_torch_documents_them(tmp_path) -> None:
    md.init_process_group("nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        side = torch.cuda.Stream()
        x = torch.tensor([1.0], device="cuda")
        work = md.all_reduce(x, async_op=True)
        work.wait()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            x.add_(100)
        side.synchronize()
        assert x.item() == 101.0
    finally:
        md.destroy_process_group()

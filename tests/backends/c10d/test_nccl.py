"""NCCL and XCCL: how their classes are made, and programs on them, over a stand-in; and on GPUs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import DebugLevel, HashStore

import meshdist as md
from tests.backends.c10d.nccl_stand_in import Device, Nccl, Xccl, standing_in
from tests.backends.operations import OnDevice, check_every_operation
from tests.inner import (
    BackendType,
    FingerprintTable,
    Opening,
    Registry,
    find_backend,
    get_registry,
    get_world,
)
from tests.load import is_within
from tests.pool import Pool
from tests.stand_in_cupy import StandInCupy

SECONDS = timedelta(seconds=20)
SHORT = timedelta(seconds=0.5)
BACKENDS = ("gloo", "nccl")


@pytest.fixture
def device() -> Iterator[Device]:
    with standing_in() as device:
        yield device


def open_group(options: Any = None, backend: str = "nccl", **more: Any) -> Any:
    """The process group of torch's class that the backend makes."""
    store, ranks = HashStore(), more.pop("ranks", (0,))
    opening = Opening(store, lambda: store, ranks, 0, "cuda", SECONDS, options=options, **more)
    return find_backend(backend).open(opening).torch_group


@pytest.fixture
def world(device: Device, tmp_path: Any) -> Iterator[Device]:
    """A world of one, whose CPU tensors travel over the stand-in."""
    start_world(tmp_path)
    try:
        yield device
    finally:
        if md.is_initialized():
            md.destroy_process_group()


def start_world(folder: Any, **more: Any) -> None:
    method = f"file://{folder}/world"
    backends = more.pop("backend", "cpu:nccl,cuda:nccl")
    md.init_process_group(backends, init_method=method, rank=0, world_size=1, **more)


# -- how it is made -------------------------------------------------------------------------------


def test_the_programs_options_are_copied(device: Device) -> None:
    given = Nccl.Options(is_high_priority_stream=True)
    given.config.max_ctas = 4
    made = [open_group(given, name=name, ranks=(0, 2)).options for name in ("axis 'tp'", "other")]
    assert given._timeout == timedelta(minutes=10) and given.group_name == ""
    assert all(one is not given and one.is_high_priority_stream for one in made)
    assert [one.config.max_ctas for one in made] == [4, 4]
    assert made[0].group_name == "axis 'tp', ranks 0, 2"  # in torch's logs and its recorder
    assert made[1].group_name == "other, ranks 0, 2"
    assert made[0].global_ranks_in_group == [0, 2]
    assert made[0]._timeout == SECONDS + timedelta(seconds=1)
    made[0].config.max_ctas = 9
    assert (given.config.max_ctas, made[1].config.max_ctas) == (4, 4)
    # Options of another backend are not its own.
    assert type(open_group(object()).options) is Nccl.Options


def test_xccl_takes_its_options(device: Device) -> None:
    given = Xccl.Options(is_high_priority_stream=True)
    group = open_group(given, backend="xccl")
    assert type(group) is Xccl and group.options.is_high_priority_stream
    assert group.options is not given


@pytest.mark.parametrize("level", list(DebugLevel.__members__.values()))
@pytest.mark.parametrize("given", [None, "1"])
def test_c10d_leaves_failures_to_us_and_nothing_else_changes(
    device: Device, monkeypatch: pytest.MonkeyPatch, level: DebugLevel, given: str | None
) -> None:
    names = ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT"]
    for name in names:
        if given is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, given)
    before = dict(os.environ)
    torch.distributed.set_debug_level(level)
    try:
        ours = open_group()
        assert torch.distributed.get_debug_level() == level
        assert dict(os.environ) == before
        theirs = Nccl(HashStore(), 0, 1, Nccl.Options())
    finally:
        torch.distributed.set_debug_level(DebugLevel.OFF)
    assert not (ours.handling or ours.blocking_wait or ours.is_monitored or ours.rethrows)
    assert ours.dump_s == 0
    assert theirs.handling == int(given or 3) and theirs.is_monitored
    theirs.is_over = True


def test_the_environment_is_restored_after_a_failure(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    before = dict(os.environ)
    monkeypatch.setattr(Nccl, "__init__", fail)
    with pytest.raises(Exception, match="unhandled system error"):
        open_group()
    assert dict(os.environ) == before


# -- programs -------------------------------------------------------------------------------------


def test_every_collective_of_one_rank(world: Device) -> None:
    communicator = md.group.WORLD.open_device_group("cpu").communicator
    check_every_operation(communicator, (torch.float32, torch.uint8))


def test_results_are_whole_after_the_world_has_ended(world: Device) -> None:
    world.holds = True
    x = torch.ones(4)
    md.all_reduce(x)
    ending = threading.Thread(target=md.destroy_process_group)
    ending.start()
    time.sleep(0.3)
    assert ending.is_alive()
    world.kernels[-1].has_ended.set()
    ending.join(10)
    assert not any(kernel.is_cut_off for kernel in world.kernels)
    assert not world.names("abort", "destructor aborts")


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The groups that are opened, each with its backend."""
    opened: list[str] = []
    acquire = Registry.acquire

    def note(self: Registry, backend: BackendType, opening: Opening, *more: Any) -> Any:
        opened.append(f"{backend.name}: {opening.name}")
        return acquire(self, backend, opening, *more)

    monkeypatch.setattr(Registry, "acquire", note)
    return opened


def test_a_world_that_names_no_backend_opens_nccl_alone(
    device: Device, tmp_path: Any, openings: list[str]
) -> None:
    start_world(tmp_path, backend=None)
    try:
        world = md.group.WORLD
        assert openings == ["nccl: the world"]
        assert world.first_device_type() == "cpu"  # no rank has chosen its device
        mesh = md.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
        assert world.first_device_type() == mesh["dp"].get_group().first_device_type() == "cuda"
        axes = [f"nccl: axis {axis!r} of DeviceMesh(dp=1, tp=1)" for axis in ("dp", "tp")]
        for group in (None, mesh["dp"]):
            md.barrier(group)
        group = md.new_group([0])
        assert group.first_device_type() == "cpu"
        md.monitored_barrier()
        assert openings == ["nccl: the world", *axes, "nccl: group of rank 0"]
        found: list[Any] = [None]
        md.all_gather_object(found, 7, group)  # asks for the backend of CPU tensors
        md.all_reduce(torch.ones(1))
        assert found == [7] and openings[-2:] == ["shm: group of rank 0", "shm: the world"]
        assert device.names("enqueue") == ["barrier"] * 2
    finally:
        md.destroy_process_group()


def test_a_backend_that_is_named_opens_with_the_world(
    device: Device, tmp_path: Any, openings: list[str]
) -> None:
    start_world(tmp_path, backend="cpu:gloo,cuda:nccl")
    try:
        md.new_group([0])
        both = [
            f"{backend}: {group}"
            for group in ("the world", "group of rank 0")
            for backend in BACKENDS
        ]
        assert openings == both
    finally:
        md.destroy_process_group()


PROGRAM = """
import atexit, torch, meshdist as md
from tests.backends.c10d.nccl_stand_in import standing_in
with standing_in() as device:
    atexit.register(lambda: print([line[0] for line in device.log[-1:]], flush=True))
    md.init_process_group("cpu:nccl", init_method="file://{folder}/w", rank=0, world_size=1)
    md.all_reduce(torch.ones(4))
"""


def test_a_program_that_just_ends_shuts_down(pool: Pool, tmp_path: Any) -> None:
    (done,) = pool.start(PROGRAM.format(folder=tmp_path))
    assert (done.returncode, done.stdout) == (0, "['shutdown']\n")


def test_a_collective_that_nobody_waits_for_is_raised_by_the_next(
    device: Device, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    start_world(tmp_path, timeout=SHORT)
    try:
        device.holds = True
        md.all_reduce(torch.ones(4))  # goes on: its kernel never ends
        group = md.group.WORLD
        with caplog.at_level(logging.ERROR, "meshdist.nccl"):
            wait_until_broken(group)
            wait_until(lambda: "all_reduce on the world timed out" in caplog.text)
        with pytest.raises(md.CollectiveTimeoutError, match="all_reduce on the world timed out"):
            md.all_reduce(torch.ones(4))
        with pytest.raises(md.AbortedError, match="all_reduce failed before"):
            md.all_reduce(torch.ones(4))
        assert device.ends == []
    finally:
        md.destroy_process_group()
    assert not device.names("destructor aborts")


def wait_until_broken(group: Any) -> None:
    wait_until(group.open_device_group("cpu").is_broken)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("call", ["barrier", "method"])
def test_a_calls_own_timeout_is_its_bound(world: Device, call: str) -> None:
    world.holds = True
    begin = time.monotonic()

    def wait() -> None:
        if call == "barrier":
            md.barrier(timeout=SHORT)
        work = md.group.WORLD.allreduce(torch.ones(4), timeout=SHORT)
        while not work.is_completed():
            time.sleep(0.01)
        work.wait()

    with pytest.raises(md.CollectiveTimeoutError, match=r"timed out after 0.5 s"):
        wait()
    assert is_within(time.monotonic() - begin, 5.0)


def test_an_abort_raises_in_waits_and_barriers(world: Device) -> None:
    world.holds = True
    work = md.all_reduce(torch.ones(4), async_op=True)
    group = md.group.WORLD
    timer = threading.Timer(0.3, group.abort)
    timer.start()
    with pytest.raises(md.AbortedError, match="barrier on the world was aborted"):
        md.barrier()
    timer.join()
    with pytest.raises(md.AbortedError, match="all_reduce on the world was aborted"):
        work.wait()
    assert not work.is_success()


def test_a_barrier_of_both_kinds_of_backends_orders_the_device(
    device: Device, tmp_path: Any
) -> None:
    start_world(tmp_path, backend="cpu:gloo,cuda:nccl")
    try:
        group = md.group.WORLD
        group.open_device_group("cpu")
        group.open_device_group("cuda")
        device.holds = True
        threading.Timer(0.3, lambda: device.kernels[-1].has_ended.set()).start()
        md.barrier()
        assert device.names("enqueue") == ["barrier"] and device.kernels[0].has_ended.is_set()
        device.holds = False
        md.barrier(async_op=True).wait()
        md.barrier(async_op=True).wait(timedelta(seconds=5))
        assert md.barrier(async_op=True).get_future_result().wait() == 0
        assert device.names("enqueue") == ["barrier"] * 4
        device.holds = True
        work = md.barrier(async_op=True)
        result = work.get_future_result()
        group.abort()
        assert result.wait() == 2 and not work.is_success()
    finally:
        md.destroy_process_group()


@pytest.mark.parametrize("operation", ["all_reduce", "all_reduce_coalesced", "reduce", "broadcast"])
def test_dense_tensors_are_reduced_as_they_lie(world: Device, operation: str) -> None:
    images = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    before = images.clone()
    if operation == "all_reduce_coalesced":
        md.all_reduce_coalesced([images, torch.ones(2)])
    elif operation == "all_reduce":
        md.all_reduce(images)
    else:
        getattr(md, operation)(images, 0)
    *_, arguments, _ = md.group.WORLD.open_device_group("cpu").communicator.torch_group.calls[-1]
    sent = arguments[0]
    assert sent.is_contiguous() and sent.numel() == images.numel()
    assert torch.equal(images, before) and images.is_contiguous(memory_format=torch.channels_last)
    # A source may lie otherwise than what receives it.
    assert (sent.data_ptr() == images.data_ptr()) is (operation != "broadcast")


def test_members_whose_tensors_lie_otherwise_disagree(pool: Pool) -> None:
    def program() -> str:
        with standing_in() as device:
            device.holds = True
            group = md.new_group([0, 1], backend="cpu:nccl")
            x = torch.ones(4, 8) if md.get_rank() == 0 else torch.ones(8, 4).t()
            told = ""
            try:
                work = md.all_reduce(x, group=group, async_op=True)
                end = time.monotonic() + 15
                while not work.is_completed() and time.monotonic() < end:
                    time.sleep(0.01)
                work.wait()
            except md.MismatchError as error:
                told = str(error)
            md.barrier()
            return told

    for told in pool.run(program, 2):
        assert "made different calls as call 1" in told
        assert "all_reduce((4, 8) float32, SUM)" in told
        assert "all_reduce((4, 8) float32, SUM, strides (1, 4))" in told


def test_layouts_that_cannot_be_compared_are_copied(pool: Pool) -> None:
    def program() -> list[float]:
        with standing_in(), pytest.MonkeyPatch.context() as patch:
            if md.get_rank() == 1:  # it has no room for what members compare
                patch.setattr(FingerprintTable, "reserve", lambda *_: None)
            group = md.new_group([0, 1], backend="cpu:nccl")
            md.all_reduce(torch.arange(6.0).view(3, 2).t(), group=group)
            sent = group.open_device_group("cpu").communicator.torch_group.calls[-1][1][0]
            return sent.view(-1).tolist()

    assert pool.run(program, 2) == [[0.0, 2.0, 4.0, 1.0, 3.0, 5.0]] * 2


def test_where_members_do_not_see_each_others_calls_a_round_compares_them(pool: Pool) -> None:
    def program() -> list[str]:
        with standing_in() as device, pytest.MonkeyPatch.context() as patch:
            patch.setattr(FingerprintTable, "sees_all", lambda _: False)
            group = md.new_group([0, 1], backend="cpu:nccl", timeout=timedelta(seconds=20))
            its_class = group.open_device_group("cpu").communicator.torch_group
            enqueue = its_class._allgather_base

            def gather(output: torch.Tensor, *others: Any) -> Any:
                output.view(2, -1).copy_(others[0])  # both members call alike
                return enqueue(output, *others)

            patch.setattr(its_class, "_allgather_base", gather)
            md.set_debug_level(DebugLevel.INFO)
            try:
                md.all_reduce(torch.ones(3), group=group)
            finally:
                md.set_debug_level(DebugLevel.OFF)
            return device.names("enqueue")

    assert pool.run(program, 2) == [["_allgather_base", "allreduce"]] * 2


def test_a_group_can_be_destroyed_while_an_abort_begins(world: Device) -> None:
    for _ in range(50):
        group = md.new_group([0], backend="cpu:nccl")
        aborting = threading.Thread(target=group.abort)
        aborting.start()
        md.destroy_process_group(group)
        aborting.join()
    assert not world.names("destructor aborts")


def test_the_world_ends_though_a_group_of_it_does_not(
    world: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise OSError("no more descriptors")

    groups = [md.new_group([0], backend="cpu:nccl") for _ in range(2)]
    first, second = (group.open_device_group("cpu").communicator for group in groups)
    monkeypatch.setattr(first, "close", fail.__get__(first))
    md.destroy_process_group()
    assert second.is_aborted and "no more descriptors" in caplog.text


def test_signals_are_heard_after_an_abort_that_fails(device: Device, pool: Pool) -> None:
    def program() -> list[str]:
        with standing_in() as device:
            device.abort_error = "ProcessGroup abort timed out"
            first, second = (md.new_group([0, 1], backend="cpu:nccl") for _ in range(2))
            md.barrier()
            if md.get_rank() == 0:
                first.abort("the first")
                second.abort("the second")
            told = []
            for group in (first, second):
                end = time.monotonic() + 15
                while not group.open_device_group("cpu").is_broken() and time.monotonic() < end:
                    time.sleep(0.01)
                try:
                    md.all_reduce(torch.ones(1), group=group)
                except md.AbortedError as error:
                    told.append(error.found)
            md.barrier()
            return told

    assert pool.run(program, 2) == [["rank 0: the first", "rank 0: the second"]] * 2


def test_waits_for_a_future_hand_cupys_arrays_back(world: Device) -> None:
    with StandInCupy().installed() as cupy:
        x = cupy.array([1.0, 2.0])
        with cupy.streams(torchs=11, cupys=21):
            work = md.all_reduce(x, async_op=True)
            future = work.get_future()
        for torchs, cupys in ((12, 22), (13, 23)):
            with cupy.streams(torchs=torchs, cupys=cupys):
                assert future.wait() == [x]
        with cupy.streams(torchs=14, cupys=24):
            work.wait()
        assert cupy.waits_for(x)[-3:] == [(22, 12), (23, 13), (24, 14)]


def test_who_is_late_is_named(pool: Pool) -> None:
    def program() -> str:
        with standing_in() as device:
            group = md.new_group([0, 1], backend="cpu:nccl", timeout=timedelta(seconds=1))
            device.holds = True
            told = ""
            if md.get_rank() == 0:
                work = md.all_reduce(torch.ones(3), group=group, async_op=True)
                while not work.is_completed():
                    time.sleep(0.01)
                told = str(work.exception())
            md.barrier()
            return told

    told, _ = pool.run(program, 2)
    assert "all_reduce on group of ranks 0-1 timed out after 1 s" in told
    assert "rank 1: did not reach this call" in told


@pytest.mark.parametrize("level", ["OFF", "INFO"])
def test_members_that_disagree(pool: Pool, level: str) -> None:
    def program(level: str) -> tuple[str, list[str]]:
        with standing_in() as device:
            group = md.new_group([0, 1], backend="cpu:nccl")
            md.set_debug_level(DebugLevel.__members__[level])
            device.holds = True
            md.barrier()
            store = get_world().store
            try:
                if md.get_rank() == 1 and level == "OFF":
                    store.wait(["enqueued"])
                work = md.all_reduce(torch.ones(3 + md.get_rank()), group=group, async_op=True)
                store.set("enqueued", "")
                enqueued = device.names("enqueue")
                end = time.monotonic() + 15
                while not work.is_completed() and time.monotonic() < end:
                    time.sleep(0.01)
                work.wait()
                told = "no error"
            except md.MismatchError as error:
                told, enqueued = error.summary, device.names("enqueue")
            finally:
                md.set_debug_level(DebugLevel.OFF)
            md.barrier()
            return told, enqueued

    (told, enqueued), (told_late, enqueued_late) = pool.run(program, 2, level)
    assert "made different calls as call" in told and told_late == told
    assert enqueued_late == []
    assert enqueued == ([] if level == "INFO" else ["allreduce"])


# -- meshes ---------------------------------------------------------------------------------------


def test_a_mesh_connects_the_selected_device_as_it_is_made(
    device: Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    start_world(tmp_path, backend="cuda:nccl")
    try:
        mesh = md.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
        assert torch.cuda.current_device() == 2
        chosen = torch.device("cuda", 2)
        connected = [line[2] for line in device.log if line[0] == "connect"]
        assert connected and set(connected) == {chosen}
        assert {group.bound_device_id for group in mesh.get_all_groups()} == {chosen}
        mesh.flatten(name="all")
        private = md.init_device_mesh(
            "cuda", (1,), axis_options={0: md.AxisOptions(private=True)}
        ).unflatten(0, (1, 1))
        assert private.ndim == 2
        torch.cuda.set_device(0)
        for group in (*mesh.get_all_groups(), *private.get_all_groups()):
            communicator = group.open_device_group("cuda").communicator
            assert communicator.torch_group.connected == [chosen], group
        assert not device.names("connect late")
    finally:
        md.destroy_process_group()


def test_a_device_bound_to_the_world_comes_first(device: Device, tmp_path: Any) -> None:
    bound = torch.device("cuda", 3)
    start_world(tmp_path, backend="cuda:nccl")
    try:
        get_world().device = bound
        mesh = md.init_device_mesh("cuda", (1,))
        assert torch.cuda.current_device() == 3
        assert mesh.get_group().open_device_group("cuda").communicator.torch_group.connected == [
            bound
        ]
    finally:
        md.destroy_process_group()


@pytest.mark.filterwarnings("ignore:the Work of:UserWarning")  # none waits under capture
def test_warmup_connects(device: Device, tmp_path: Any) -> None:
    start_world(tmp_path, backend="cuda:nccl")
    try:
        mesh = md.init_device_mesh("cuda", (1,), open_groups=False)
        assert not device.names("connect")
        mesh.warmup()
        assert len(device.names("connect")) == 1
        device.captures = threading.current_thread()  # a first collective under capture
        work = md.barrier(async_op=True)
        assert work is not None and device.ends == [] and not device.names("connect late")
    finally:
        device.captures = None
        md.destroy_process_group()


def test_members_that_do_not_connect_are_an_error_in_time(device: Device, tmp_path: Any) -> None:
    start_world(tmp_path, backend="cuda:nccl", timeout=timedelta(seconds=1))
    try:
        device.connecting = threading.Event()
        with pytest.raises(
            md.CollectiveTimeoutError, match="could not be opened on backend 'nccl'"
        ):
            md.init_device_mesh("cuda", (1,))
        device.connecting.set()
        with pytest.raises(md.AbortedError, match=r"of DeviceMesh\(1\) did not connect"):
            md.barrier()
        mesh = md.init_device_mesh("cuda", (1,))  # shares nothing with what is broken
        md.barrier(mesh)
    finally:
        device.connecting.set()
        md.destroy_process_group()


def test_the_registry_aborts_communicators_of_one_message_together(world: Device) -> None:
    groups = [md.new_group([0], backend="cpu:nccl") for _ in range(2)]
    labels = [group.open_device_group("cpu").opened.label for group in groups]
    get_registry(get_world()).abort(labels, {"reason": "both", "group": "both"})
    end = time.monotonic() + 10
    while not world.names("group end") and time.monotonic() < end:
        time.sleep(0.01)
    kinds = [line[0] for line in world.log if line[0] in ("group start", "abort", "group end")]
    assert kinds == ["group start", "abort", "abort", "group end"]


# -- on a GPU -------------------------------------------------------------------------------------


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
        group = md.group.WORLD.open_device_group("cuda").communicator.torch_group
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
        assert md.get_backend_config() == "cpu:shm,cuda:nccl"
        for device, backend in (("cpu", "shm"), ("cuda", "nccl")):
            x = torch.ones(2, device=device)
            md.all_reduce(x)
            assert md.group.WORLD.open_device_group(device).communicator.backend == backend
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
def test_a_barrier_of_both_kinds_of_backends_waits_for_the_device(tmp_path) -> None:
    md.init_process_group(init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        tensors = [torch.ones(2, device=device) for device in ("cpu", "cuda")]
        for x in tensors:
            md.all_reduce(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(1 << 29)
        works = [md.all_reduce(x, async_op=True) for x in tensors]
        assert not torch.cuda.current_stream().query()
        md.barrier()
        assert torch.cuda.current_stream().query()
        assert all(work.is_completed() for work in works)
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


def run_on_gpu(pool: Pool, body: str, tmp_path: Any, **environment: str) -> tuple[str, str]:
    """Run a program of one rank over NCCL to its end; what it prints, and its complaints."""
    head = (
        "import os, threading, time, torch, meshdist as md\n"
        "from datetime import timedelta\n"
        f"place = 'file://{tmp_path}/world'\n"
        "def start(seconds=60, **more):\n"
        "    limit = timedelta(seconds=seconds)\n"
        "    md.init_process_group('nccl', init_method=place, rank=0, world_size=1,\n"
        "        timeout=limit, **more)\n"
    )
    (done,) = pool.start(head + body, [environment])
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.gpu
def test_the_end_waits_for_kernels_and_torch_does_not_complain(pool: Pool, tmp_path: Any) -> None:
    body = """
start()
x = torch.ones(1 << 20, device="cuda")
torch.cuda._sleep(1 << 30)
md.all_reduce(x)
md.destroy_process_group()
print(x.sum().item() == 1 << 20)
"""
    assert run_on_gpu(pool, body, tmp_path) == ("True\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_kernel_that_does_not_end_is_an_error_in_time(
    pool: Pool, tmp_path: Any, level: str, *, is_async: bool
) -> None:
    body = f"""
before = dict(os.environ)
start(seconds=1)
x = torch.ones(4, device="cuda")
md.all_reduce(x)
torch.cuda.synchronize()
assert dict(os.environ) == before
torch.cuda._sleep(8 << 30)  # some seconds
began = time.monotonic()
work = md.all_reduce(x, async_op={is_async})
try:
    while True:
        if work is not None and work.is_completed():
            work.wait()
        if work is None and md.group.WORLD.open_device_group("cuda").is_broken():
            time.sleep(0.5)
            md.all_reduce(x)
        time.sleep(0.01)
except md.CollectiveTimeoutError as error:
    print("late" if time.monotonic() - began < 4 else "too late", flush=True)
os._exit(0)
"""
    told, _ = run_on_gpu(pool, body, tmp_path, TORCH_DISTRIBUTED_DEBUG=level)
    assert told == "late\n"


@pytest.mark.gpu
def test_several_communicators_are_aborted_at_once(pool: Pool, tmp_path: Any) -> None:
    body = """
start()
x = torch.ones(4, device="cuda")
groups = [md.new_group([0], device_id=torch.device("cuda", 0)) for _ in range(3)]
torch.cuda._sleep(4 << 30)
works = [md.all_reduce(x, group=group, async_op=True) for group in groups]
for group in groups:
    group.abort()
for work in works:
    try:
        work.wait()
    except md.AbortedError:
        print("aborted", flush=True)
os._exit(0)
"""
    assert run_on_gpu(pool, body, tmp_path)[0] == "aborted\n" * 3


@pytest.mark.gpu
def test_the_first_collective_of_a_mesh_can_be_captured(pool: Pool, tmp_path: Any) -> None:
    body = """
start()
mesh = md.init_device_mesh("cuda", (1, 1), mesh_dim_names=("dp", "tp"))
x = torch.ones(4, device="cuda")
future = md.all_reduce(torch.ones(4, device="cuda"), async_op=True).get_future_result()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.mul_(2)
    md.all_reduce(x, group=mesh["tp"])
    work = md.all_reduce(x, group=mesh["dp"], async_op=True)
    work.get_future().wait()
    work.wait()
    time.sleep(0.5)  # while others' threads poll
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
print(x.tolist(), future.wait())
md.destroy_process_group()
"""
    assert run_on_gpu(pool, body, tmp_path) == ("[8.0, 8.0, 8.0, 8.0] 0\n", "")


@pytest.mark.gpu
def test_futures_are_ordered_by_their_streams(pool: Pool, tmp_path: Any) -> None:
    body = """
start()
x = torch.ones(1 << 22, device="cuda")
torch.cuda._sleep(1 << 29)
x.add_(1)
work = md.all_reduce(x, async_op=True)
half = torch.ones(64, device="cuda", dtype=torch.int16)
widened = md.all_reduce(half, async_op=True)  # reduced in int32, and copied back
doubled = work.get_future().then(lambda done: done.value()[0] * 2)
copied = widened.get_future().then(lambda done: done.value()[0] + 1)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    total = doubled.wait().sum().item()
    print(total == 4 << 22, copied.wait().sum().item())
md.destroy_process_group()
"""
    assert run_on_gpu(pool, body, tmp_path) == ("True 128\n", "")


@pytest.mark.gpu
def test_every_collective_over_nccl_of_one_rank(pool: Pool, tmp_path: Any) -> None:
    md.init_process_group("nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        communicator = md.group.WORLD.open_device_group("cuda").communicator
        on_gpu = OnDevice(communicator, "cuda")
        check_every_operation(on_gpu, (torch.float32, torch.int16, torch.uint8))
    finally:
        md.destroy_process_group()


@pytest.mark.gpu
def test_a_blocking_collective_runs_on_the_current_stream(tmp_path: Any) -> None:
    md.init_process_group("nccl", init_method=f"file://{tmp_path}/world", rank=0, world_size=1)
    try:
        x, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
        md.all_reduce(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1 << 28)
            x.add_(1)
            md.all_reduce(x)
            y = x + 1
        side.synchronize()
        assert y.sum().item() == 2 << 20
    finally:
        md.destroy_process_group()

"""The fast path on a stream does what Python's way does, over the stand-in for NCCL."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DebugLevel

import meshdist as md
from meshdist.dtypes import DTYPES
from meshdist.reduce_ops import PLAIN_OPS, ReduceKind, find_refusal
from tests.backends.c10d.nccl_stand_in import Device, Nccl, StandIn, Work, standing_in
from tests.backends.fast_paths import Spy, every_operation
from tests.inner import device_group as device_group_module, run_named, work as work_module
from tests.pool import Pool

SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=20)
OFTEN_USED = (torch.float32, torch.bfloat16, torch.int32, torch.bool)
ALL_REDUCED = ("SUM", "AVG", "MAX")

Call = Callable[[], Any]


@pytest.fixture
def device() -> Iterator[Device]:
    with standing_in() as device:
        yield device


@contextmanager
def world_of_one(folder: Path, backend: str = "cpu:nccl", **more: Any) -> Iterator[Any]:
    folder.mkdir(exist_ok=True)
    method = f"file://{folder}/world"
    md.init_process_group(backend, init_method=method, rank=0, world_size=1, **more)
    try:
        yield md.group.WORLD
    finally:
        for kernel in StandIn.in_use.kernels:
            kernel.has_ended.set()
        md.destroy_process_group()


@pytest.fixture
def group(device: Device, tmp_path: Any) -> Iterator[Any]:
    """The world of one rank, whose CPU tensors travel over the stand-in; its path is spied on."""
    with world_of_one(tmp_path) as group:
        md.all_reduce(torch.ones(1))
        group.fast_path = Spy(group.fast_path)
        yield group


def class_of(group: Any) -> Any:
    """The process group of torch's class."""
    return group.open_device_group("cpu").communicator.torch_group


def wait_until(holds: Call) -> None:
    end = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def shown(argument: Any) -> Any:
    """What a method of the class was given, so that it can be compared."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, tuple(argument.shape), argument.tolist()
    if isinstance(argument, list):
        return [shown(one) for one in argument]
    names = ("asyncOp", "timeout", "reduceOp", "rootRank", "rootTensor")
    options = {name: getattr(argument, name) for name in names if hasattr(argument, name)}
    if "reduceOp" in options:
        options["reduceOp"] = options["reduceOp"].op
    return options or argument


def traces_of(group: Any, device: Device, call: Call, waits_on: str) -> list[Any]:
    """What the class and the device see of a call by each path, and its note and result."""
    its_class, recorder = class_of(group), group.open_device_group("cpu").recorder
    spy, found = group.fast_path, []
    for group.fast_path in (spy, None):
        its_class.calls.clear()
        device.log.clear()
        result = call()
        if isinstance(result, md.Work):
            device.current = waits_on
            result.wait()
            result = result.result()
            device.current = "default"
        calls = [(name, *map(shown, given)) for name, *given in its_class.calls]
        note = recorder.find_note(recorder.num_notes)
        seen = [line for line in device.log if line[0] != "query"]
        found.append((calls, seen, (note.call, note.arguments), shown(result)))
    group.fast_path = spy
    return found


def reductions(op: ReduceKind, dtype: torch.dtype, is_async: bool) -> dict[str, Call]:
    def some(count: int) -> torch.Tensor:
        return torch.arange(1, count + 1).to(dtype)

    how = {"op": op, "async_op": is_async}
    return {
        "all_reduce": lambda: md.all_reduce(some(3).view(3, 1), **how),
        "reduce": lambda: md.reduce(some(3), 0, **how),
        "reduce_scatter_tensor": lambda: md.reduce_scatter_tensor(some(2), some(2), **how),
        "nothing": lambda: md.all_reduce(some(0), **how),
    }


def moves(dtype: torch.dtype, is_async: bool) -> dict[str, Call]:
    def some(*shape: int) -> torch.Tensor:
        return torch.arange(1, 5).to(dtype).view(shape)

    how = {"async_op": is_async}
    return {
        "broadcast": lambda: md.broadcast(some(2, 2), 0, **how),
        "all_gather_into_tensor": lambda: md.all_gather_into_tensor(some(4), some(4), **how),
        "all_gather": lambda: md.all_gather([some(2, 2)], some(2, 2), **how),
        "gather": lambda: md.gather(some(4), [some(4)], 0, **how),
        "scatter": lambda: md.scatter(some(4), [some(4)], 0, **how),
        "all_to_all_single": lambda: md.all_to_all_single(some(4), some(4), **how),
        "all_to_all": lambda: md.all_to_all([some(4)], [some(4)], **how),
    }


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", OFTEN_USED, ids=str)
def test_reductions_are_as_in_python(
    group: Any, device: Device, dtype: torch.dtype, *, is_async: bool
) -> None:
    taken = set()
    for op in PLAIN_OPS:
        if find_refusal(op, dtype) is not None:
            continue
        for name, call in reductions(op, dtype, is_async).items():
            group.fast_path.answers.clear()
            fast, slow = traces_of(group, device, call, "side")
            assert fast == slow, (name, op)
            if any(group.fast_path.answers) or is_async:
                taken.add((name, op.name))
    if dtype is not torch.bool:
        assert taken >= {("all_reduce", op) for op in ALL_REDUCED}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("dtype", [*OFTEN_USED, torch.uint16], ids=str)
def test_moves_are_as_in_python(
    group: Any, device: Device, dtype: torch.dtype, *, is_async: bool
) -> None:
    for name, call in moves(dtype, is_async).items():
        group.fast_path.answers.clear()
        fast, slow = traces_of(group, device, call, "side")
        assert fast == slow, name
        if not is_async:
            assert group.fast_path.answers == [DTYPES[dtype].is_in_c10d], name


@pytest.mark.parametrize("op", ALL_REDUCED)
def test_which_calls_take_it(group: Any, op: str) -> None:
    x, path = torch.ones(2), group.fast_path.path
    assert path.all_reduce(x, getattr(md.ReduceOp, op)) is None
    work = path.starting.all_reduce(x, getattr(md.ReduceOp, op))
    assert work.wait() and work.result()[0] is x
    group.fast_path.answers.clear()
    assert group.allreduce(torch.ones(2), getattr(md.ReduceOp, op)).wait()  # torch's method
    run_named("all_reduce", group, "a plan", x, getattr(md.ReduceOp, op))
    assert all(group.fast_path.answers)
    recorder = group.open_device_group("cpu").recorder
    assert recorder.find_note(recorder.num_notes).call.op_name == "a plan"


def test_what_is_not_plain_changes_nothing(group: Any, device: Device) -> None:
    path, x = group.fast_path.path, torch.ones(2, 2)
    recorder = group.open_device_group("cpu").recorder
    before, calls = recorder.num_notes, len(class_of(group).calls)
    declined: dict[str, Call] = {
        "strided": lambda: path.all_reduce(x.t(), md.ReduceOp.SUM),
        "on no device": lambda: path.all_reduce(x.to("meta"), md.ReduceOp.SUM),
        "with a gradient": lambda: path.broadcast(x.clone().requires_grad_(), 0),
        "complex": lambda: path.broadcast(x.to(torch.complex64), 0),
        "bits": lambda: path.all_reduce(x.int(), md.ReduceOp.BXOR),
        "a message": lambda: path.send(x, 0, 0),
        "narrow floats in order": lambda: path.reduce(x.half(), md.ReduceOp.MAX, 0),
    }
    md.set_debug_level(DebugLevel.INFO)
    try:  # calls are compared before anything is enqueued
        assert path.all_reduce(x, md.ReduceOp.SUM) is False
    finally:
        md.set_debug_level(DebugLevel.OFF)
    assert {name: call() for name, call in declined.items()} == dict.fromkeys(declined, False)
    assert (recorder.num_notes, len(class_of(group).calls)) == (before, calls)


def test_a_path_that_is_not_made_takes_no_call(group: Any) -> None:
    kind = type(group.fast_path.path)
    for call in (kind.__new__(kind).barrier, lambda: kind.barrier(group), kind.barrier):
        with pytest.raises(TypeError):
            call()


def test_xccl_has_none(device: Device, tmp_path: Any) -> None:
    with world_of_one(tmp_path, "cpu:xccl") as group:
        md.all_reduce(torch.ones(2))
        assert group.fast_path is None
        assert class_of(group).calls


# -- devices --------------------------------------------------------------------------------------


def test_tensors_of_another_device_are_rejected(device: Device, tmp_path: Any) -> None:
    with world_of_one(tmp_path, "cuda:nccl") as group:
        device_group = group.open_device_group("cuda")
        assert group.fast_path is None and group.fast_path_on_device is device_group.fast_path
        for x in (torch.ones(2), torch.ones(2, device="meta")):
            assert device_group.fast_path.all_reduce(x, md.ReduceOp.SUM) is False
            assert device_group.fast_path.starting.all_reduce(x, md.ReduceOp.SUM) is False
        assert device_group.recorder.num_notes == 0 and not device.names("enqueue")
        with pytest.raises(md.BackendError, match="no backend for cpu tensors"):
            md.all_reduce(torch.ones(2))


def test_a_device_has_a_path_beside_that_of_the_cpu(
    device: Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device_group_module.DEVICE_TYPES, "cuda", 1)  # as if CPU tensors lay there
    with world_of_one(tmp_path, "cuda:nccl") as group:
        spy = group.fast_path_on_device = Spy(group.open_device_group("cuda").fast_path)
        x, work = torch.ones(2), None
        md.all_reduce(x)
        md.broadcast(x, group_src=0)
        work = md.all_reduce(x, async_op=True)
        run_named("all_reduce", group, "a plan", x, md.ReduceOp.SUM)
        run_named("all_reduce", group, "a plan", x, md.ReduceOp.SUM, async_op=True).wait()
        assert spy.answers == [True] * 3 and work.wait()
        assert device.names("enqueue") == ["allreduce", "broadcast", *["allreduce"] * 3]
    assert group.fast_path_on_device is None


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ALL_REDUCED)
def test_a_wait_lets_the_stream_wait_and_not_the_host(
    group: Any, device: Device, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    recorded: list[str] = []

    class Stream:
        device = torch.device("cuda", 0)

        def __init__(self, name: str) -> None:
            self.name = name

        def record_event(self) -> str:
            recorded.append(f"record {self.name}")
            return self.name

        def wait_event(self, event: str) -> None:
            recorded.append(f"{self.name} waits for {event}")

    streams = {name: Stream(name) for name in ("default", "side")}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[device.current])
    monkeypatch.setattr(work_module, "cuda_devices", lambda _: [Stream.device])
    device.holds = True
    x = torch.tensor([2.0, -1.0])
    work = md.all_reduce(x, getattr(md.ReduceOp, op), async_op=True)
    device.log.clear()
    for device.current in ("default", "side", "side"):
        assert work.wait()
    assert device.log == [("wait", "allreduce", at) for at in ("default", "side", "side")]
    # What is added behind the class's call is ordered by an event, once.
    waits = ["record default", "side waits for default", "side waits for default"]
    assert recorded == (waits if op == "MAX" else [])
    assert not work.is_completed() and x.tolist() == [2.0, -1.0]
    assert not work.is_success()
    device.kernels[-1].has_ended.set()
    assert work.is_success() and work.get_future_result().wait() == 0


def test_a_wait_that_names_its_timeout_waits_for_the_device(group: Any, device: Device) -> None:
    device.holds = True
    work = md.all_reduce(torch.ones(2), async_op=True)
    threading.Timer(0.2, device.kernels[-1].has_ended.set).start()
    begin = time.monotonic()
    assert work.wait(LONG) and time.monotonic() - begin > 0.15
    late = md.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(md.CollectiveTimeoutError, match=r"timed out after 0.1 s"):
        late.wait(timedelta(seconds=0.1))


def test_several_threads_may_wait(group: Any, device: Device) -> None:
    for _ in range(20):
        x, seen = torch.tensor([3.0, -2.0]), []
        work = md.all_reduce(x, md.ReduceOp.MAX, async_op=True)
        thread = threading.Thread(target=lambda: seen.append((work.wait(), x.tolist())))  # noqa: B023
        thread.start()
        work.wait()
        thread.join()
        assert seen == [(True, [3.0, -2.0])]


def test_a_future_is_complete_at_once(group: Any, device: Device) -> None:
    device.holds = True
    x = torch.tensor([3.0, -2.0])
    future = md.all_reduce(x, md.ReduceOp.MAX, async_op=True).get_future()
    assert future.done() and future.wait()[0] is x


@pytest.mark.filterwarnings("ignore:the Work of:UserWarning")
def test_a_capture_is_left_alone(group: Any, device: Device) -> None:
    torch.cuda.set_device(0)
    earlier = md.all_reduce(torch.ones(2), async_op=True)
    communicator = group.open_device_group("cpu").communicator
    wait_until(lambda: not communicator.outcomes)
    device.log.clear()
    device.captures = threading.current_thread()
    group.fast_path.answers.clear()
    md.all_reduce(torch.ones(2))
    md.all_reduce(torch.ones(2), md.ReduceOp.MAX)
    work = md.all_reduce(torch.ones(2), md.ReduceOp.AVG, async_op=True)
    work.wait()
    work.get_future().wait()
    assert not communicator.outcomes  # nothing runs now: the watchdog does not wait for it
    time.sleep(0.3)
    device.captures = None
    assert all(group.fast_path.answers) and len(group.fast_path.answers) == 2
    assert device.ends == [] and not device.names("query")
    assert [line[:2] for line in device.log] == [
        ("enqueue", "allreduce"),
        ("enqueue", "allreduce"),
        ("stream waits", "nccl"),
        ("enqueue", "allreduce"),
        ("wait", "allreduce"),
        ("wait", "allreduce"),
    ]
    assert work.get_future_result().wait() == 0 and earlier.wait()


# -- failures -------------------------------------------------------------------------------------


def reject(*_: Any) -> None:
    raise RuntimeError("[ProcessGroupNCCL.cpp:3] NCCL error in: x.cpp:1, unhandled system error")


@pytest.mark.parametrize("is_async", [False, True])
def test_an_error_of_the_class_is_explained_as_in_python(
    device: Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    told = []
    for number, is_fast in enumerate((True, False)):
        with world_of_one(tmp_path / str(number)) as group:
            md.all_reduce(torch.ones(2))
            group.fast_path = group.fast_path if is_fast else None
            with monkeypatch.context() as patch:
                patch.setattr(Nccl, "allreduce", reject, raising=False)
                with pytest.raises(md.BackendError) as caught:
                    md.all_reduce(torch.ones(3), async_op=is_async)
            with pytest.raises(md.AbortedError) as again:
                md.all_reduce(torch.ones(3), async_op=is_async)
            told.append((str(caught.value), again.value.summary))
    assert "unhandled system error" in told[0][0] and "all_reduce on the world" in told[0][0]
    assert told[0] == told[1]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_fast", [True, False])
def test_the_watchdog_names_the_call_that_is_late(
    device: Device, tmp_path: Any, *, is_async: bool, is_fast: bool
) -> None:
    """By its own note, where others were noted since; c10d alone tells of a call without a work."""
    with world_of_one(tmp_path, timeout=SHORT) as group:
        md.all_reduce(torch.ones(2))
        group.fast_path = group.fast_path if is_fast else None
        device.holds = True
        work = md.all_gather([torch.ones(3)], torch.ones(3), async_op=is_async)
        device.holds = False
        for _ in range(3):
            md.broadcast(torch.ones(2), 0)
        communicator = group.open_device_group("cpu").communicator
        wait_until(lambda: communicator.is_aborted)
        with pytest.raises(md.CollectiveTimeoutError) as caught:
            md.all_reduce(torch.ones(2)) if work is None else work.wait()
        assert "all_gather on the world timed out after 0.5 s" in str(caught.value)
        assert "call 2 on the world: all_gather((3,) float32" in str(caught.value)


def test_an_abort_raises_in_waits(group: Any, device: Device) -> None:
    device.holds = True
    works = [
        md.all_reduce(torch.ones(2), getattr(md.ReduceOp, op), async_op=True) for op in ALL_REDUCED
    ]
    works[0].wait()
    group.abort()
    for work in works:
        with pytest.raises(md.AbortedError, match="all_reduce on the world was aborted"):
            work.wait()
        assert work.is_completed() and not work.is_success()
    with pytest.raises(md.AbortedError):
        md.all_reduce(torch.ones(2))


@pytest.mark.parametrize("is_fast", [True, False])
@pytest.mark.parametrize("backend", ["cpu:nccl", "cpu:gloo"])
def test_a_result_that_was_not_completed_is_never_there(
    device: Device, tmp_path: Path, backend: str, *, is_fast: bool
) -> None:
    def be_interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    x = torch.ones(2, dtype=torch.int16)  # which neither adds: it travels as another

    with world_of_one(tmp_path, backend) as group:
        md.all_reduce(torch.ones(2))
        group.fast_path = group.fast_path if is_fast else None
        work: Any = md.all_reduce(x, async_op=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
        for _ in range(2):
            with pytest.raises(md.BackendError, match="the result is incomplete"):
                work.wait()
        assert not work.is_success()
        md.all_reduce(torch.ones(2))


@pytest.mark.parametrize("is_fast", [True, False])
def test_what_a_signals_handler_raises_reaches_the_program(
    group: Any, monkeypatch: pytest.MonkeyPatch, *, is_fast: bool
) -> None:
    def interrupt(*_: Any) -> None:
        raise RuntimeError("enough")

    def wait(work: Work) -> bool:
        signal.raise_signal(signal.SIGUSR1)
        return wait_of_class(work)

    wait_of_class = Work.wait
    group.fast_path = group.fast_path if is_fast else None
    work = md.all_reduce(torch.ones(2), async_op=True)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Work, "wait", wait)
            for timeout in (timedelta(0), LONG):
                with pytest.raises(RuntimeError, match="enough"):
                    work.wait(timeout)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert work.wait() and work.is_success()
    md.all_reduce(torch.ones(2))


def test_a_work_that_is_dropped_is_told(group: Any) -> None:
    with pytest.warns(UserWarning, match="the Work of all_reduce was dropped"):
        md.all_reduce(torch.ones(2), async_op=True)


def test_two_groups_keep_apart(group: Any, device: Device) -> None:
    other = md.new_group([0], backend="cpu:nccl")
    md.all_reduce(torch.ones(1), group=other)
    notes = [one.open_device_group("cpu").recorder for one in (group, other)]
    before = [recorder.num_notes for recorder in notes]
    assert class_of(group) is not class_of(other)
    class_of(group).calls.clear()
    class_of(other).calls.clear()
    works = [
        md.all_reduce(torch.ones(2), group=one, async_op=True) for one in (group, other, group)
    ]
    md.broadcast(torch.ones(2), 0, group=other)
    for work in works:
        work.wait()
    assert [recorder.num_notes for recorder in notes] == [before[0] + 2, before[1] + 2]
    assert [call[0] for call in class_of(group).calls] == ["allreduce"] * 2
    assert [call[0] for call in class_of(other).calls] == ["allreduce", "broadcast"]
    other.abort()
    md.all_reduce(torch.ones(2), group=group)
    with pytest.raises(md.AbortedError):
        md.all_reduce(torch.ones(2), group=other)


# -- several ranks --------------------------------------------------------------------------------


def by_turns(is_async: bool) -> tuple[list[bool], list[int], list[Any]]:
    """Whether results are alike, how many calls took the fast path, and the notes, by turns.

    In the first turn no member takes it, in the last one all do; some do in between.
    """
    with standing_in():
        ranks = list(range(md.get_world_size()))
        group: Any = md.new_group(ranks, backend="cpu:nccl")
        md.all_reduce(torch.ones(1), group=group)
        md.barrier()  # from here on everybody's words are known
        md.all_reduce(torch.ones(1), group=group)
        spy, results, num_fast, notes = Spy(group.fast_path), [], [], []
        recorder = group.open_device_group("cpu").recorder
        for turn in range(1 << len(ranks)):
            is_fast = bool(turn >> group.rank() & 1)
            group.fast_path = spy if is_fast else None
            spy.answers.clear()
            first = recorder.num_notes
            results.append(every_operation((2, 3), goes_on=is_async, group=group))
            num_fast.append(sum(spy.answers))
            called = [recorder.find_note(k + 1) for k in range(first, recorder.num_notes)]
            notes.append([(note.call, note.arguments, note.where) for note in called])
        md.barrier()
        return [one == results[0] for one in results], num_fast, notes


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_on_both_paths_meet(pool: Pool, size: int, *, is_async: bool) -> None:
    found = pool.run(by_turns, size, is_async)
    for rank, (are_alike, num_fast, notes) in enumerate(found):
        assert all(are_alike)
        assert all(note == notes[0] for note in notes)
        # A barrier names a device, and a few calls wait for the slowest member; the spy does not
        # see what is started.
        for turn, number in enumerate(num_fast):
            is_fast = turn >> rank & 1 and not is_async
            assert number in (range(10, 14) if is_fast else (0,))


def differing(is_fast: bool) -> str:
    with standing_in() as device:
        group: Any = md.new_group([0, 1], backend="cpu:nccl")
        md.all_reduce(torch.ones(1), group=group)
        md.barrier()
        group.fast_path = group.fast_path if is_fast else None
        device.holds = True

        def go_on() -> None:
            work = md.broadcast(torch.ones(2), md.get_rank(), group=group, async_op=True)
            end = time.monotonic() + 15
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.01)
            work.wait()

        with pytest.raises(md.MismatchError) as caught:
            go_on()
        md.barrier()
        return caught.value.summary


@pytest.mark.parametrize("is_fast", [True, False])
def test_members_that_disagree_are_told(pool: Pool, *, is_fast: bool) -> None:
    for text in pool.run(differing, 2, is_fast):
        assert "made different calls as call" in text


def late(is_fast: bool) -> str:
    with standing_in() as device:
        group: Any = md.new_group([0, 1], backend="cpu:nccl", timeout=timedelta(seconds=1))
        md.all_reduce(torch.ones(1), group=group)
        md.barrier()
        group.fast_path = group.fast_path if is_fast else None
        device.holds, told = True, ""
        if md.get_rank() == 0:
            work = md.all_reduce(torch.ones(3), md.ReduceOp.MAX, group, async_op=True)
            while not work.is_completed():
                time.sleep(0.01)
            told = str(work.exception())
        md.barrier()
        return told


@pytest.mark.parametrize("is_fast", [True, False])
def test_who_is_late_is_named(pool: Pool, *, is_fast: bool) -> None:
    told, _ = pool.run(late, 2, is_fast)
    assert "all_reduce on group of ranks 0-1 timed out after 1 s" in told
    assert "all_reduce((3,) float32, MAX)" in told and "rank 1: did not reach this call" in told


# -- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_cuda_tensors_take_it(tmp_path: Path) -> None:
    method = f"file://{tmp_path}/world"
    md.init_process_group("nccl", init_method=method, rank=0, world_size=1)
    try:
        group: Any = md.group.WORLD
        x, y = torch.tensor([2.0, -1.0], device="cuda"), torch.zeros(2, device="cuda")
        md.all_reduce(x)
        path, device = group.fast_path_on_device, x.device
        for op in ALL_REDUCED:
            assert path.all_reduce(x, getattr(md.ReduceOp, op)) is None
            work = path.starting.all_reduce(x, getattr(md.ReduceOp, op))
            assert work.wait() and work.wait(LONG)
        assert path.all_gather_into_tensor(y, x) is None
        assert x.tolist() == y.tolist() == [2.0, -1.0] and x.device == device
        for other in (x.cpu(), x.to("meta"), x.clone().requires_grad_(), x.view(2, 1).expand(2, 2)):
            assert path.all_reduce(other, md.ReduceOp.SUM) is False
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            x.mul_(2)
            md.all_reduce(x)
            md.all_reduce(x, async_op=True).wait()
        graph.replay()
        torch.cuda.synchronize()
        assert x.tolist() == [4.0, -2.0]
    finally:
        md.destroy_process_group()

"""Collectives as kernels on a stream, over a stand-in for NCCL: start, end and failures."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import WorkResult
from torch.distributed import HashStore

from meshdist.backends.c10d.stream_backends import ENDS_LATER, EnqueueingCommunicator
from meshdist.distributed import Work
from meshdist.errors import BackendError, CollectiveTimeoutError
from meshdist.reduce_ops import ReduceOp
from tests.backends.c10d.nccl_stand_in import Device, standing_in
from tests.backends.direct import Direct
from tests.inner import (
    BackendAborted,
    BackendFailure,
    BackendTimeout,
    Chain,
    Opening,
    OperationArgs,
    Request,
    bound,
    find_backend,
    timeout_calls,
    work as work_module,
)
from tests.load import is_within

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)


@pytest.fixture
def device() -> Iterator[Device]:
    with standing_in() as device:
        yield device


def opened(
    timeout: timedelta = LONG, backend: str = "nccl", size: int = 1, **more: Any
) -> EnqueueingCommunicator:
    store = HashStore()
    opening = Opening(store, lambda: store, tuple(range(size)), 0, "cuda", timeout, **more)
    communicator = find_backend(backend).open(opening)
    assert isinstance(communicator, EnqueueingCommunicator)
    return communicator


def all_reduce(communicator: EnqueueingCommunicator, *, waits: bool = False, **more) -> Request:
    options = communicator.torch_group.options
    timeout = more.pop("timeout", options._timeout - ENDS_LATER)
    return Direct(communicator, timeout, waits).all_reduce(torch.ones(4), ReduceOp.SUM)


def explain(failure: BackendFailure, note: int) -> Exception:
    kind = CollectiveTimeoutError if isinstance(failure, BackendTimeout) else BackendError
    return kind(f"explained: {failure}")


def work_of(
    request: Request,
    timeout: timedelta = LONG,
    copy_back: Callable[[], None] | None = None,
    result: list[Any] | None = None,
) -> Work:
    return Work(request, timeout, explain, result or [torch.ones(4)], copy_back)


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


# -- its end --------------------------------------------------------------------------------------


def test_a_connection_ends_once_its_kernels_have(device: Device) -> None:
    communicator = opened()
    device.holds = True
    all_reduce(communicator)
    closing = threading.Thread(target=communicator.close)
    closing.start()
    wait_for(lambda: device.names("shutdown"))
    closing.join(0.2)
    assert closing.is_alive()  # the kernel runs
    (kernel,) = device.kernels
    kernel.has_ended.set()
    closing.join(10)
    del communicator
    gc.collect()
    assert not kernel.is_cut_off
    assert not device.names("abort", "destructor aborts")


@pytest.mark.parametrize("leaves", [True, False])
def test_it_is_shut_down_once(device: Device, *, leaves: bool) -> None:
    communicator = opened()
    if leaves:
        communicator.leave()
    communicator.close()
    communicator.close()
    assert len(device.names("shutdown")) == 1


def test_an_end_that_does_not_come_is_left_to_its_thread(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    communicator, device.shutting_down = opened(SHORT), threading.Event()
    begin = time.monotonic()
    communicator.close()
    assert is_within(time.monotonic() - begin, 3.0)
    gc.collect()
    assert not device.names("abort", "destructor aborts")
    assert "not finished after 0.3 s" in caplog.text
    device.shutting_down.set()


def test_what_was_aborted_is_not_shut_down(device: Device) -> None:
    communicator = opened()
    communicator.abort()
    communicator.leave()
    communicator.close()
    assert device.names("abort") and not device.names("shutdown", "destructor aborts")


def test_all_is_decided_once_it_has_ended(device: Device) -> None:
    device.holds = True
    communicator = opened()
    work = work_of(all_reduce(communicator))
    result = work.get_future_result()
    threading.Timer(0.1, device.kernels[0].has_ended.set).start()
    communicator.close()
    assert result.wait() == int(WorkResult.SUCCESS) and work.wait()
    communicator, device.shutting_down = opened(SHORT), threading.Event()
    work = work_of(all_reduce(communicator))
    communicator.close()
    with pytest.raises(BackendError, match="aborted while running on the device"):
        work.wait()
    device.shutting_down.set()


def test_it_holds_no_process_group_once_it_is_closed(device: Device) -> None:
    kept = [opened(), opened()]
    alive = [weakref.ref(one.torch_group) for one in kept]
    kept[0].abort()
    for one in kept:
        one.close()
    wait_for(lambda: gc.collect() is not None and not any(one() for one in alive))


def test_what_is_in_flight_is_aborted_where_an_exception_ends_the_process(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    device.holds = True
    communicator = opened()
    all_reduce(communicator)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    communicator.close()
    assert device.names("abort") and not device.names("shutdown")


# -- what never ends, and what was cut off --------------------------------------------------------


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_work_that_never_ends_is_late(device: Device, *, is_waited_for: bool) -> None:
    device.holds = True
    work = work_of(all_reduce(opened()), SHORT)
    if is_waited_for:
        assert work.wait()
    assert not work.is_completed() and not work.is_success() and work.exception() is None
    wait_for(work.is_completed)
    assert not work.is_success()
    assert isinstance(work.exception(), CollectiveTimeoutError)
    with pytest.raises(CollectiveTimeoutError, match=r"not finished after 0.3 s"):
        work.wait()


def test_a_work_that_ends_late_but_in_time_is_a_success(device: Device) -> None:
    device.holds = True
    work = work_of(all_reduce(opened()))
    work.wait()
    assert not work.is_success()
    device.kernels[0].has_ended.set()
    assert work.is_success() and work.wait()


def test_a_wait_that_names_its_timeout_waits_for_the_device(device: Device) -> None:
    device.holds = True
    communicator = opened()
    work = work_of(all_reduce(communicator))
    threading.Timer(0.2, device.kernels[0].has_ended.set).start()
    begin = time.monotonic()
    work.wait(timedelta(seconds=10))
    assert time.monotonic() - begin > 0.15 and work.is_success()
    with pytest.raises(CollectiveTimeoutError, match=r"not finished after 0.1 s"):
        work_of(all_reduce(communicator)).wait(timedelta(seconds=0.1))


def test_a_wait_for_a_barrier_that_names_its_timeout_is_bounded_by_it(device: Device) -> None:
    device.holds = True
    work = work_of(Direct(opened(), LONG).barrier())
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match=r"not finished after 0.3 s"):
        work.wait(SHORT)
    assert is_within(time.monotonic() - begin, 3.0)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_work_that_was_cut_off_raises(device: Device, *, is_waited_for: bool) -> None:
    communicator = opened()
    done = work_of(all_reduce(communicator))
    wait_for(lambda: not communicator.outcomes)
    device.holds = True
    work = work_of(all_reduce(communicator))
    if is_waited_for:
        work.wait()
    communicator.abort()
    wait_for(lambda: device.kernels[-1].is_cut_off)
    assert work.is_completed() and not work.is_success()
    with pytest.raises(BackendError, match="aborted while running on the device"):
        work.wait()
    assert done.wait() and done.is_success()  # it had ended before


def test_a_barrier_that_was_cut_off_raises(device: Device) -> None:
    device.holds = True
    communicator = opened()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            Direct(communicator, LONG, waits=True).barrier()
        except BackendFailure as failure:
            raised.append(failure)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_for(lambda: device.names("wait"))
    communicator.abort()
    waiting.join(10)
    assert [type(one) for one in raised] == [BackendAborted]


# -- the watchdog ---------------------------------------------------------------------------------


def watched(communicator: EnqueueingCommunicator) -> list[tuple[BackendFailure, int | None]]:
    """What the communicator lets the group explain."""
    told: list[tuple[BackendFailure, int | None]] = []

    def tell(failure: BackendFailure, note: int | None) -> Exception:
        told.append((failure, note))
        return explain(failure, 0)

    communicator.watch(tell)
    return told


def test_nobody_need_wait_for_what_is_late(device: Device) -> None:
    device.holds = True
    communicator = opened(SHORT)
    told = watched(communicator)
    prepared = OperationArgs("", "all_reduce", both := [torch.ones(4)], both, op=ReduceOp.SUM)
    prepared.timeout, prepared.number = SHORT, 7
    request = communicator.start(prepared)
    wait_for(lambda: device.names("group end"))
    ((failure, note),) = told
    assert isinstance(failure, BackendTimeout) and note == 7
    assert "query" not in [line[0] for line in device.log]
    with pytest.raises(CollectiveTimeoutError, match=r"explained: not finished after 0.3 s"):
        request.finish(LONG)
    assert communicator.take_error() is None  # it was raised


def test_a_wait_while_a_failure_is_explained_raises_it(device: Device) -> None:
    device.holds = True
    communicator = opened()
    is_explaining, goes_on = threading.Event(), threading.Event()

    def tell(failure: BackendFailure, note: int | None) -> Exception:
        is_explaining.set()
        assert goes_on.wait(10.0)
        return explain(failure, 0)

    communicator.watch(tell)
    failed = work_of(all_reduce(communicator, timeout=SHORT))
    other = work_of(all_reduce(communicator))
    assert is_explaining.wait(10.0)
    assert not communicator.is_aborted
    threading.Timer(0.2, goes_on.set).start()
    with pytest.raises(CollectiveTimeoutError, match=r"explained: not finished after 0.3 s"):
        failed.wait()
    with pytest.raises(BackendError, match="aborted while running on the device"):
        other.wait()


def test_a_collectives_own_timeout_is_its_bound(device: Device) -> None:
    device.holds = True
    communicator = opened()
    told = watched(communicator)
    with pytest.raises(CollectiveTimeoutError, match=r"not finished after 0.3 s"):
        Direct(communicator, SHORT, waits=True).barrier()
    assert len(told) == 1
    communicator = opened()
    all_reduce(communicator, waits=True, timeout=SHORT)  # goes on: nothing waits for a kernel
    wait_for(lambda: communicator.is_aborted)


def test_a_collective_without_a_work_is_bounded_by_what_c10d_tells(device: Device) -> None:
    device.holds = True
    communicator = opened(SHORT)
    told = watched(communicator)
    all_reduce(communicator, waits=True)
    assert ("enqueue", "allreduce", "default") in device.log and not communicator.outcomes
    wait_for(lambda: communicator.is_aborted)
    assert isinstance(told[0][0], BackendTimeout)
    error = communicator.take_error()
    assert isinstance(error, CollectiveTimeoutError) and communicator.take_error() is None
    assert device.ends == []


@pytest.mark.parametrize("waits", [True, False])
def test_a_failure_that_c10d_sees_is_told(device: Device, *, waits: bool) -> None:
    device.holds = True
    communicator = opened()
    told = watched(communicator)
    all_reduce(communicator, waits=waits)
    device.kernels[0].fails = True
    wait_for(lambda: communicator.is_aborted)
    assert type(told[0][0]) is BackendFailure and "reports" in str(told[0][0])


def test_a_work_that_is_bounded_later_is_watched_by_that(device: Device) -> None:
    device.holds = True
    communicator = opened()
    told = watched(communicator)
    bound(work_of(Chain([all_reduce(communicator)])), SHORT)
    wait_for(lambda: told)
    assert str(told[0][0]) == "not finished after 0.3 s"


def test_the_watchdog_outlives_whatever_it_watches(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class One:
        num_looks = 0

        def look(self) -> None:
            self.num_looks += 1
            if self.num_looks == 1:
                raise ValueError("a bad one")

    monkeypatch.setattr(timeout_calls, "PERIOD_S", 0.0)
    first = One()
    timeout_calls.watch(first)
    kept = [One() for _ in range(3000)]
    for one in kept:
        timeout_calls.watch(one)
    wait_for(lambda: first.num_looks > 3 and kept[-1].num_looks > 3)
    assert "the watchdog failed to check a communicator" in caplog.text


def test_lists_keep_a_work_that_tells_their_end(device: Device) -> None:
    communicator = opened()
    call = Direct(communicator, LONG, waits=True)
    x, y = torch.ones(2), torch.empty(2)
    call.all_gather_list([y], x).finish(LONG)
    call.reduce_scatter_list(y, [x], ReduceOp.SUM).finish(LONG)
    assert [call[-1].asyncOp for call in communicator.torch_group.calls] == [True, True]


def test_what_the_watchdog_knows_does_not_hold_a_tensor(device: Device) -> None:
    device.holds = True
    communicator = opened()
    Direct(communicator, LONG).all_reduce(torch.ones(1000), ReduceOp.SUM)
    outcome = next(iter(communicator.outcomes))
    assert not any(isinstance(one, torch.Tensor) for one in gc.get_referents(outcome))
    assert not any(type(one).__name__ == "Work" for one in gc.get_referents(outcome))


# -- aborts of several ----------------------------------------------------------------------------


def test_several_are_aborted_at_once_and_beside_the_caller(device: Device) -> None:
    some = [opened(name=f"group {number}") for number in range(3)]
    device.aborting = threading.Event()
    EnqueueingCommunicator.abort_together(some)  # returns, though the aborts wait
    assert all(one.is_aborted for one in some)
    wait_for(lambda: len(device.names("abort")) == 3)  # none waits for another
    device.aborting.set()
    wait_for(lambda: device.names("group end"))
    lines = [line for line in device.log if line[0] in ("abort", "group start", "group end")]
    assert [line[0] for line in lines] == ["group start", *["abort"] * 3, "group end"]
    assert "MainThread" not in {line[-1] for line in lines}
    some[0].abort()
    assert len(device.names("abort")) == 3  # once each


def test_an_abort_that_raises_is_logged(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.abort_error = "ProcessGroup abort timed out"
    some = [opened(), opened()]
    with caplog.at_level(logging.ERROR, "meshdist.nccl"):
        EnqueueingCommunicator.abort_together(some)
        wait_for(lambda: device.names("group end"))
    assert caplog.text.count("ProcessGroup abort timed out") == 2
    some[0].close()


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nccl", "xccl"])
def test_a_blocking_collective_goes_out_on_the_current_stream_where_c10d_bounds_it(
    device: Device, backend: str
) -> None:
    communicator = opened(backend=backend)
    all_reduce(communicator, waits=True)
    Direct(communicator, LONG, waits=True).broadcast(torch.ones(2), 0)
    is_bounded = backend == "nccl"  # XCCL tells of no error: each collective keeps its work
    waits = device.names("wait", "stream waits")
    assert (waits == []) is is_bounded
    options = [call[-1] for call in communicator.torch_group.calls]
    assert [one.asyncOp for one in options] == [not is_bounded] * 2
    all_reduce(communicator)
    assert communicator.torch_group.calls[-1][-1].asyncOp


def test_each_wait_orders_the_stream_on_which_it_is_called(device: Device) -> None:
    device.holds = True
    work = work_of(all_reduce(opened()))
    device.log.clear()
    for stream in ("default", "side"):
        device.current = stream
        work.wait()
    assert device.log == [("wait", "allreduce", "default"), ("wait", "allreduce", "side")]


class Stream:
    def __init__(self, name: str, log: list) -> None:
        self.name, self.log, self.device = name, log, torch.device("cuda", 0)

    def record_event(self) -> str:
        self.log.append(("record", self.name))
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(("wait event", self.name, event))


@pytest.fixture
def streams(device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, Stream]:
    """Let results seem to lie on a device."""
    made = {name: Stream(name, device.log) for name in ("default", "side")}
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made[device.current])
    monkeypatch.setattr(work_module, "cuda_devices", lambda _: [cuda])
    return made


def test_events_are_recorded_only_where_there_is_something_to_order(
    device: Device, streams: dict[str, Stream]
) -> None:
    work = work_of(all_reduce(opened()))
    work.wait()
    assert not device.names("record")
    copied: list[int] = []
    work = work_of(all_reduce(opened()), copy_back=lambda: copied.append(1))
    work.wait()
    device.current = "side"
    work.wait()
    assert copied == [1] and device.names("record") == ["default"]
    assert ("wait event", "side", "event of default") in device.log


# -- futures --------------------------------------------------------------------------------------


def test_a_future_is_torchs_own_and_complete_at_once(device: Device) -> None:
    device.holds = True
    result, seen = [torch.ones(4)], []
    work = work_of(all_reduce(opened()), result=result, copy_back=lambda: seen.append("copied"))
    future = work.get_future()
    assert work.get_future() is future
    assert seen == ["copied"] and future.done()
    chained = future.then(lambda done: seen.append("then") or done.value()[0] * 2)
    assert chained.wait().tolist() == [2.0] * 4 and future.value()[0] is result[0]
    work.wait()
    assert seen == ["copied", "then"] and not work.is_success()


def test_a_futures_copies_come_behind_the_kernel(device: Device) -> None:
    device.holds = True
    built = Chain([all_reduce(opened())], lambda: device.log.append(("copy", "home")))
    work = work_of(built)
    device.log.clear()
    work.get_future().wait()
    assert device.log == [("wait", "allreduce", "default"), ("copy", "home")]
    work.wait()
    assert device.log[2:] == [("wait", "allreduce", "default")]


def test_a_message_has_no_future_of_how_it_ended(device: Device) -> None:
    communicator = opened(size=2)
    request = Direct(communicator, LONG).send(torch.ones(1), 1, 0)
    work = Work(request, LONG, explain, [], None, "isend", "a group", True)
    for ask in (work.get_future, work.get_future_result):
        with pytest.raises(BackendError, match="a send or a receive has no future"):
            ask()


def test_no_thread_asks_the_device_while_another_captures_a_graph(device: Device) -> None:
    device.holds = True
    communicator = opened()
    torch.cuda.set_device(0)
    communicator.connect(torch.device("cuda", 0))
    work = work_of(all_reduce(communicator))
    future, result = work.get_future(), work.get_future_result()
    device.captures = threading.current_thread()
    captured = work_of(all_reduce(communicator))
    captured.wait()
    captured.get_future().wait()
    time.sleep(0.3)
    assert not device.names("query") and device.ends == []
    assert future.done() and not result.done()
    device.captures = None
    device.kernels[0].has_ended.set()
    assert result.wait() == int(WorkResult.SUCCESS)
    assert not device.names("query")
    assert captured.get_future_result().wait() == int(WorkResult.SUCCESS)  # nothing runs


def test_the_result_of_one_that_fails_is_told(device: Device) -> None:
    device.holds = True
    communicator = opened(SHORT)
    watched(communicator)
    work = work_of(all_reduce(communicator))
    assert work.get_future_result().wait() == int(WorkResult.TIMEOUT)
    communicator = opened()
    work = work_of(all_reduce(communicator))
    result = work.get_future_result()
    communicator.abort()
    assert result.wait() == int(WorkResult.COMM_ERROR)
    with pytest.raises(BackendError, match="aborted"):
        work.get_future().wait()


# -- connecting -----------------------------------------------------------------------------------


def test_connecting_is_bounded(device: Device) -> None:
    communicator, device.connecting = opened(SHORT), threading.Event()
    begin = time.monotonic()
    with pytest.raises(
        BackendTimeout, match=r"the ranks did not connect: not finished after 0.3 s"
    ):
        communicator.connect(torch.device("cuda", 1))
    assert is_within(time.monotonic() - begin, 3.0)
    device.connecting.set()


def test_an_abort_ends_connecting(device: Device) -> None:
    communicator, device.connecting = opened(), threading.Event()
    threading.Timer(0.3, communicator.abort).start()
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(BackendAborted, match="aborted while the ranks were connecting"):
            communicator.connect(torch.device("cuda", 1))
    assert is_within(time.monotonic() - begin, 3.0)
    device.connecting.set()


def test_it_connects_once(device: Device) -> None:
    communicator = opened()
    for _ in range(2):
        communicator.connect(torch.device("cuda", 1))
    assert communicator.torch_group.connected == [torch.device("cuda", 1)]


def test_a_barrier_names_its_device_in_the_field_that_is_read(device: Device) -> None:
    communicator = opened()
    torch.cuda.set_device(3)
    Direct(communicator, LONG).barrier()
    Direct(communicator, LONG).barrier(torch.device("cuda", 1))
    communicator.connect(torch.device("cuda", 2))
    Direct(communicator, LONG).barrier()
    xccl = opened(backend="xccl")
    Direct(xccl, LONG).barrier()
    assert xccl.torch_group.calls[-1][-1].device_ids == [3]
    asked = [call[-1].device_ids for call in communicator.torch_group.calls if call[0] == "barrier"]
    assert asked == [[3], [1], [2]]

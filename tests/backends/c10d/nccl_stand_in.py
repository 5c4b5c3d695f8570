"""A stand-in for torch's ProcessGroupNCCL, and for XCCL's, on machines without a GPU.

It reads what the real class reads, and does with it what that does, as far as meshdist depends on
it. Where C++ would end the process it notes so in ``Device.ends``. Kernels end when the test says
so; streams are a log of what waits for what.

The facts, and where they stand:

* (hpp) torch 2.13, include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp and Backend.hpp
* (pyi) torch 2.13, _C/_distributed_c10d.pyi
* (cpp) pytorch, torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, read in a copy from after 2.8
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed
from torch._C._distributed_c10d import WorkResult

from meshdist.backends.c10d import stream_backends
from meshdist.backends.c10d.torch_classes import NcclBackend as NcclBackend  # registers itself
from tests.inner import find_backend, is_between

WATCHDOG_S = 0.02  # (cpp) kWatchdogThreadSleepMillis: 100 ms
NO_TIMEOUT = timedelta(0)  # (hpp) kNoTimeout
is_between[__file__] = True  # C++ has no frames: what is raised here is no signal handler's


class ErrorType(Enum):  # (pyi)
    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


@dataclass(eq=False)
class Kernel:
    """What one collective has stream_backends."""

    name: str
    stream: str
    has_ended: threading.Event = field(default_factory=threading.Event)
    is_cut_off: bool = False
    fails: bool = False


@dataclass(eq=False)
class Device:
    """The device of one test: its log, and when kernels on it end."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Where C++ would have ended the process, or a graph's capture."""
    kernels: list[Kernel] = field(default_factory=list)
    holds: bool = False
    """Whether kernels end only when the test ends them."""
    current: str = "default"
    """The current stream of all threads."""
    captures: threading.Thread | None = None
    """The thread that captures a graph."""
    connecting: threading.Event | None = None
    """What connecting waits for."""
    aborting: threading.Event | None = None
    """What an abort waits for."""
    abort_error: str = ""
    shutting_down: threading.Event | None = None

    def enqueue(self, name: str, stream: str) -> Kernel:
        kernel = Kernel(name, stream)
        self.log.append(("enqueue", name, stream))
        self.kernels.append(kernel)
        if not self.holds:
            kernel.has_ended.set()
        return kernel

    def query(self) -> None:
        """Note that a thread asks the device, which ends another thread's capture.

        (CUDA's cudaStreamCaptureModeGlobal, torch.cuda.graph's default: pytorch/pytorch#105182)
        """
        self.log.append(("query", threading.current_thread().name))
        if self.captures is not None:
            self.ends.append("the capture of a graph")

    def names(self, *kinds: str) -> list[Any]:
        """The second entries of the log's lines of these kinds."""
        return [line[1] for line in self.log if line[0] in kinds]


class Work:
    """(cpp) WorkNCCL. Its exception is set by its own wait alone; the watchdog has a copy of it."""

    def __init__(self, group: StandIn, kernel: Kernel, outputs: Any, *, is_barrier: bool) -> None:
        self._group, self._kernel, self._outputs = group, kernel, outputs
        self._is_barrier = is_barrier
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(outputs)  # (cpp) collective(): marked at once
        self.future_result: torch.futures.Future[int] = torch.futures.Future()
        self.began = time.monotonic()
        self.timeout = group.options._timeout  # (cpp) assignTimeoutToWork: no collective's own

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        device = self._group.device
        device.log.append(("wait", self._kernel.name, device.current))
        if self._group.blocking_wait or timeout != NO_TIMEOUT:
            limit = (timeout or self.timeout).total_seconds()
            if not self._kernel.has_ended.wait(limit):
                self._group.abort()
                raise RuntimeError("Work timed out in blocking wait.")
        elif self._is_barrier:
            self._kernel.has_ended.wait()  # (cpp) currentStream.synchronize(), without limit
        return True

    def is_completed(self) -> bool:
        self._group.device.query()
        return self._kernel.has_ended.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.future_result

    def _source_rank(self) -> int:
        raise RuntimeError(
            "sourceRank() may only be called on work objects that correspond to recv"
        )


class XcclWork(Work):
    def get_future_result(self) -> torch.futures.Future[int]:  # (hpp) Work's own
        raise NotImplementedError("Work::getFutureResult not implemented.")


class Config:
    """(pyi) NCCLConfig. C++ hands out and takes copies."""

    __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")

    def __init__(self) -> None:
        self.blocking = self.cga_cluster_size = self.max_ctas = self.min_ctas = -(2**31)

    def unsafe_get_ptr(self) -> int:
        return id(self)


def flag(name: str, default: bool | int) -> int:
    return int(os.environ.get(name, default))


class BackendOptions:
    """(pyi) Backend.Options. A field that it lacks cannot be set."""

    __slots__ = (
        "_timeout",
        "global_ranks_in_group",
        "group_name",
        "is_high_priority_stream",
        "use_pg_for_symm_mem_rendezvous",
    )

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.group_name = ""
        self.global_ranks_in_group: list[int] = []
        self.use_pg_for_symm_mem_rendezvous = False

    @property
    def backend(self) -> str:
        return "nccl"


class StandIn:
    """What NCCL's and XCCL's classes have in common."""

    in_use: ClassVar[Device | None] = None
    Options: ClassVar[type] = BackendOptions
    work_kind: ClassVar[type[Work]] = Work
    supports_coalescing = True

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        if type(options) is not self.Options:  # (pyi) pybind's
            raise TypeError("__init__(): incompatible constructor arguments")
        assert self.in_use is not None
        self.device = self.in_use
        self._rank, self._size, self._options = rank, size, options
        self.blocking_wait = False
        self.connected: list[torch.device] = []
        self.is_over = self.is_aborted = False
        self.calls: list[tuple[Any, ...]] = []
        self._coalesced: list[Kernel] | None = None

    @property
    def options(self) -> Any:
        return self._options

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.device.log.append(("connect", self.options.group_name, device))
        if self.device.connecting is not None:
            self.device.connecting.wait()
        self.connected.append(device)

    def abort(self) -> None:
        self.device.log.append(("abort", self.options.group_name, threading.current_thread().name))
        if self.device.aborting is not None:
            self.device.aborting.wait()
        if self.device.abort_error:
            raise RuntimeError(self.device.abort_error)
        self.is_over = self.is_aborted = True
        for kernel in self._kernels():  # (cpp) they end, as if they were done
            kernel.is_cut_off = not kernel.has_ended.is_set()
            kernel.has_ended.set()

    def shutdown(self) -> None:
        """(cpp) Wait for all kernels, then end the connection."""
        self.device.log.append(("shutdown", self.options.group_name))
        if self.device.shutting_down is not None:
            self.device.shutting_down.wait()
        for kernel in self._kernels():
            kernel.has_ended.wait()
        self.is_over = True

    def __del__(self) -> None:
        if not self.__dict__.get("is_over", True):  # (cpp) the destructor's warning, and abort()
            self.device.log.append(("destructor aborts", self.options.group_name))

    def _start_coalescing(self) -> None:
        self.calls.append(("_start_coalescing",))
        self._coalesced = []

    def _end_coalescing(self) -> Work | None:
        self.calls.append(("_end_coalescing",))
        kernels, self._coalesced = self._coalesced, None
        if not kernels:  # (cpp) no communicator was used
            return None
        return self._new_work(self._enqueue("coalesced", "nccl"), [], is_barrier=False)

    def barrier(self, options: Any) -> Work | None:
        """(cpp) The first of ``device_ids``, else a guess; ``device`` is not read."""
        if not options.device_ids:
            raise ValueError("Failed to infer a GPU device id to perform barrier.")
        return self._collective("barrier", [], options, is_barrier=True)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work | None:
        return self._point_to_point("send", tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work | None:
        return self._point_to_point("recv", tensors, peer, tag)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in COLLECTIVES:
            raise AttributeError(name)
        return lambda *arguments: self._collective(name, arguments[:-1], arguments[-1])

    def _collective(
        self, name: str, arguments: Any, options: Any, *, is_barrier: bool = False
    ) -> Work | None:
        self.calls.append((name, *arguments, options))
        self._check()
        _compute(name, self._rank, arguments)
        # (cpp) collective(): asynchronous ones on a stream of the communicator's own, which waits
        # for the current one; others on the current stream, without a work
        stream = "nccl" if options.asyncOp else self.device.current
        if options.asyncOp:
            self.device.log.append(("stream waits", "nccl", self.device.current))
        kernel = self._enqueue(name, stream)
        work = self._new_work(kernel, list(arguments), is_barrier=is_barrier)
        return work if options.asyncOp else None

    def _point_to_point(self, name: str, tensors: Any, peer: int, tag: int) -> Work | None:
        self.calls.append((name, tensors, peer, tag))
        self._check()
        if self._coalesced is not None:
            self._coalesced.append(Kernel(name, "nccl"))
            return None
        return self._new_work(self._enqueue(name, "nccl"), tensors, is_barrier=False)

    def _check(self) -> None:
        if self.is_over:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")
        if not self.connected:  # (cpp) initNCCLComm at the first collective
            self.device.log.append(("connect late", self.options.group_name))
            if self.device.captures is not None:
                self.device.ends.append("the capture of a graph")
            self.connected.append(torch.device("cuda", 0))

    def _enqueue(self, name: str, stream: str) -> Kernel:
        kernel = self.device.enqueue(name, stream)
        self._mine().append(kernel)
        return kernel

    def _mine(self) -> list[Kernel]:
        mine: list[Kernel] = self.__dict__.setdefault("kernels", [])
        return mine

    def _kernels(self) -> list[Kernel]:
        return list(self._mine())

    def _new_work(self, kernel: Kernel, outputs: Any, *, is_barrier: bool) -> Work:
        return self.work_kind(self, kernel, outputs, is_barrier=is_barrier)


class Xccl(StandIn):
    work_kind = XcclWork


class NcclOptions(BackendOptions):
    """(pyi) ProcessGroupNCCL.Options."""

    __slots__ = ("_config", "split_color", "split_from")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        super().__init__(is_high_priority_stream)
        self._config = Config()
        self.split_from, self.split_color = None, 0

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, given: Config) -> None:
        self._config = Config()
        for name in Config.__slots__:
            setattr(self._config, name, getattr(given, name))


class Nccl(StandIn):
    """ProcessGroupNCCL."""

    Options = NcclOptions

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options)
        # (cpp) the constructors of ProcessGroupNCCL, HeartbeatMonitor and Watchdog
        is_detail = torch.distributed.get_debug_level() == torch.distributed.DebugLevel.DETAIL
        self.handling = flag("TORCH_NCCL_ASYNC_ERROR_HANDLING", 3)
        self.blocking_wait = bool(flag("TORCH_NCCL_BLOCKING_WAIT", 0))
        if (is_detail or flag("TORCH_NCCL_DESYNC_DEBUG", 0)) and self.handling == 0:
            self.handling = 3  # SkipCleanUp
        self.is_monitored = bool(
            flag("TORCH_NCCL_ENABLE_MONITORING", 1) and flag("TORCH_NCCL_DUMP_ON_TIMEOUT", 1)
        )
        self.dump_s = flag("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15000) * 4 / 1000
        self.rethrows = bool(flag("TORCH_NCCL_RETHROW_CUDA_ERRORS", 1))
        self._error = ErrorType.SUCCESS
        self._enqueued: list[Work] = []
        if not self.blocking_wait:
            alive = weakref.ref(self)  # the destructor ends the thread
            threading.Thread(
                target=_watch, args=(alive,), name="pt_nccl_watchdg", daemon=True
            ).start()

    def get_error(self) -> ErrorType:  # (hpp) getError
        return self._error

    def _group_start(self) -> None:
        self.device.log.append(("group start", threading.current_thread().name))

    def _group_end(self) -> None:
        self.device.log.append(("group end", threading.current_thread().name))

    def _new_work(self, kernel: Kernel, outputs: Any, *, is_barrier: bool) -> Work:
        work = super()._new_work(kernel, outputs, is_barrier=is_barrier)
        if self.device.captures is None:  # (cpp) what is captured is not enqueued
            self._enqueued.append(work)
        return work

    def look(self) -> bool:
        """(cpp) One round of Watchdog::runLoop; False at its end."""
        for work in list(self._enqueued):
            is_late = time.monotonic() - work.began > work.timeout.total_seconds()
            if work._kernel.fails and not self.is_over:
                self._report(work, WorkResult.COMM_ERROR)
            elif is_late and not work._kernel.has_ended.is_set():
                self._report(work, WorkResult.TIMEOUT)
            elif work._kernel.has_ended.is_set():  # also one that was cut off
                work.future_result.set_result(int(WorkResult.SUCCESS))
                self._enqueued.remove(work)
        return not self.is_over or bool(self._enqueued)

    def _report(self, work: Work, result: WorkResult) -> None:
        work.future_result.set_result(int(result))
        self._error = ErrorType[result.name]
        self._enqueued.remove(work)
        time.sleep(self.dump_s)
        if self.handling != 0:  # (cpp) handleException: rethrown in the watchdog's thread
            self.device.ends.append("the process, by the watchdog")
        if self.is_monitored:  # (cpp) HeartbeatMonitor::runLoop, eight minutes later
            self.device.ends.append("the process, by the monitor")


def _watch(alive: weakref.ref[Nccl]) -> None:
    while (group := alive()) is not None and group.look():
        del group
        time.sleep(WATCHDOG_S)


COLLECTIVES = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    }
)


def _compute(name: str, rank: int, arguments: Any) -> None:
    """Do a collective among one member, whose result is its input."""
    if name in ("_allgather_base", "_reduce_scatter_base", "alltoall_base"):
        output, given = arguments[:2]
        if output.numel() == given.numel():
            output.copy_(given)
    elif name in ("allgather", "gather", "reduce_scatter", "scatter", "alltoall"):
        outputs, inputs = (_flat(one) for one in arguments)
        if len(outputs) == len(inputs):
            for output, given in zip(outputs, inputs, strict=True):
                if output.numel() == given.numel():
                    output.copy_(given)


def _flat(tensors: Any) -> list[torch.Tensor]:
    return [one for some in tensors for one in (some if isinstance(some, list) else [some])]


@contextmanager
def standing_in(*, num_devices: int = 4) -> Iterator[Device]:
    """In this context torch seems to have NCCL and XCCL, and GPUs that no tensor lies on.

    CPU tensors travel over NCCL where a program asks for ``cpu:nccl``.
    """
    device = Device()
    backends = [find_backend("nccl"), find_backend("xccl")]
    chosen: list[int] = []
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: bool(chosen),
        "device_count": lambda: num_devices,
        "set_device": lambda index: chosen.append(torch.device("cuda", index).index),
        "current_device": lambda: chosen[-1] if chosen else chosen.append(0) or 0,
        "is_current_stream_capturing": lambda: device.captures is threading.current_thread(),
    }
    is_capturing = cuda["is_current_stream_capturing"]
    classes = {"ProcessGroupNCCL": Nccl, "ProcessGroupXCCL": Xccl}
    StandIn.in_use = device
    xpu = {"current_device": cuda["current_device"]}
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.multiple(torch.xpu, **xpu):
        patches = [mock.patch.multiple(torch.distributed, create=True, **classes)]
        patches.append(mock.patch.object(stream_backends, "is_capturing", is_capturing))
        for backend in backends:
            patches.append(
                mock.patch.object(backend, "device_types", backend.device_types | {"cpu"})
            )
        for one in patches:
            one.start()
        try:
            yield device
        finally:
            StandIn.in_use = None
            for kernel in device.kernels:
                kernel.has_ended.set()
            for one in patches:
                one.stop()

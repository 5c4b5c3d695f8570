"""Open groups on Gloo, NCCL, UCC, XCCL and torch plug-ins' backends."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import DebugLevel, ProcessGroupGloo, distributed_c10d

from ...bootstrap.timeout_store import looking
from ...error_text import first_line, ranks_text
from ...runtime.fork_safe_locks import ForkSafeLock
from ...runtime.hosts import num_cores
from ...runtime.timeout_calls import TimeoutCall
from ..communicator import Communicator
from ..registry import BackendType, Opening, find_backend, register_backend
from ..requests import BackendFailure, BackendTimeout, BackendUnsupported, failure_of, plain_text
from .communicator import C10dCommunicator
from .dtype_fallbacks import UCC
from .gloo import GlooCommunicator
from .gloo_connections import agreed_devices, check_interfaces, connects_late, reach_fix
from .stream_backends import ENDS_LATER, EnqueueingCommunicator

_GIVING_UP = timedelta(seconds=5)  # longer than Gloo, whose error names the cause
_CONNECT_TIMEOUTS = 5  # Gloo waits up to this many timeouts for connections (torch 2.13)


@dataclass(eq=False)
class RegisteredBackend(BackendType):
    """A backend made by a function with either of torch's two signatures.

    Args:
        make: returns a torch process group; called as ``make(store, rank, size, timeout)`` or, with
            extended_api, as ``make(options, backend_options)``.
    """

    # The class is unknown until the function is called: each collective is tried, and composed of
    # others if the class lacks it. ``support`` assumes that it has all of them.

    name: str
    make: Callable[..., Any]
    device_types: frozenset[str]
    extended_api: bool
    communicator_kind = C10dCommunicator
    descriptors_per_peer = 1  # an estimate

    def is_available(self) -> bool:
        return True

    def open(self, opening: Opening) -> Communicator:
        size = len(opening.ranks)
        try:
            if self.extended_api:
                options: Any = distributed_c10d._DistributedBackendOptions()
                options.store = opening.make_torch_store()
                options.group_rank = opening.rank
                options.group_size = size
                options.timeout = opening.timeout
                options.global_ranks_in_group = list(opening.ranks)
                group = self.make(options, opening.options)
            else:
                group = self.make(opening.make_torch_store(), opening.rank, size, opening.timeout)
        except RuntimeError as error:
            failure = BackendFailure(first_line(error))
            failure.fix = getattr(error, "fix", None) or ""
            raise failure from error
        if isinstance(group, ProcessGroupGloo):
            return GlooCommunicator(self.name, opening.rank, size, group, opening.store)
        return C10dCommunicator(self.name, opening.rank, size, group)


class GlooBackend(BackendType):
    """Gloo: CPU tensors over TCP, and CUDA tensors through host memory."""

    name = "gloo"
    device_types = frozenset({"cpu", "cuda"})
    communicator_kind = GlooCommunicator
    num_threads = 2  # c10d's default, for each group

    @property
    def descriptors_per_peer(self) -> int:  # type: ignore[override]
        return 0 if connects_late() else 1

    def is_available(self) -> bool:
        return True

    def open(self, opening: Opening) -> Communicator:
        kind: Any = ProcessGroupGloo
        given = isinstance(opening.options, kind._Options)
        options = opening.options if given else kind._Options()
        options._timeout = opening.timeout / _CONNECT_TIMEOUTS
        devices = None
        try:
            devices = agreed_devices(opening)
            options._devices = devices.made

            def connect() -> Any:
                with devices.hearing(), looking(opening.check_present):
                    return kind(opening.store, opening.rank, len(opening.ranks), options)

            # Gloo cannot detect an exited peer, so its connect thread may leak here.
            connecting = TimeoutCall(partial(copy_context().run, connect), "connect")
            group = connecting.wait(opening.timeout + _GIVING_UP, opening.check_present)
            options._timeout = opening.timeout
        except BackendUnsupported:
            raise
        except Exception as error:  # mismatched interfaces may cause any of them
            with suppress(RuntimeError):  # the store may be lost
                check_interfaces(opening, timedelta(0))
            if isinstance(error, TimeoutError):
                error = BackendTimeout.after(opening.timeout)
            elif isinstance(error, RuntimeError):
                error = failure_of(error)
            if isinstance(error, BackendFailure) and not opening.is_one_host:
                error.fix = reach_fix(devices)
            raise error from None
        return GlooCommunicator(
            self.name,
            opening.rank,
            len(opening.ranks),
            group,
            opening.store,
            spins=opening.num_local <= num_cores(),
            has_died=lambda member: opening.has_died(opening.ranks[member]),
        )


def adopt_torch_backends() -> None:
    """Register all backends of torch plug-ins."""
    backends: Any = distributed_c10d.Backend
    for upper, plugin in tuple(backends._plugins.items()):
        name = upper.lower()
        if find_backend(name) is None:
            kinds = frozenset(backends.backend_capability.get(name, ("cpu", "cuda")))
            register_backend(RegisteredBackend(name, plugin.creator_fn, kinds, plugin.extended_api))


class UccCommunicator(C10dCommunicator):
    """Communicator over UCC."""

    arithmetic = UCC


@dataclass(eq=False)
class C10dBackend(BackendType):
    """Backend on torch's ``class_name``; ``build`` is the fix if torch lacks it."""

    name: str
    class_name: str
    device_types: frozenset[str]
    build: str

    def is_available(self) -> bool:
        return hasattr(torch_distributed, self.class_name)

    def why_unavailable(self) -> tuple[str, str]:
        return f"torch {torch.__version__} was built without {self.name.upper()}", self.build

    def open(self, opening: Opening) -> Communicator:
        kind = getattr(torch_distributed, self.class_name)
        try:
            return self._open(kind, opening)
        except RuntimeError as error:
            raise BackendFailure(plain_text(error)) from None

    @abstractmethod
    def _open(self, kind: Any, opening: Opening) -> Communicator:
        """Open a communicator over torch's class ``kind``."""


class UccBackend(C10dBackend):
    """UCC: CPU and CUDA tensors, if torch was built with UCC."""

    communicator_kind = UccCommunicator

    def _open(self, kind: Any, opening: Opening) -> Communicator:
        rank, size = opening.rank, len(opening.ranks)
        group = kind(opening.make_torch_store(), rank, size, opening.timeout)
        return UccCommunicator(self.name, rank, size, group)


class XcclBackend(C10dBackend):
    """XCCL for Intel GPUs, and NCCL's base: members connect in ``connect``, not ``open``."""

    communicator_kind = EnqueueingCommunicator
    device_type = "xpu"
    num_threads = 2  # c10d's watchdog and its monitor; NCCL starts its own when it connects

    def _open(self, kind: Any, opening: Opening) -> Communicator:
        rank, size = opening.rank, len(opening.ranks)
        options = _options(kind.Options, opening)
        group = self._make_group(kind, opening.make_torch_store(), rank, size, options)
        more = (group, self.device_type, opening.timeout)
        return EnqueueingCommunicator(self.name, rank, size, *more)

    def _make_group(self, kind: Any, *arguments: Any) -> Any:
        return kind(*arguments)


class NcclBackend(XcclBackend):
    """NCCL: CUDA tensors on streams."""

    device_type = "cuda"
    default_timeout = timedelta(minutes=10)

    def is_available(self) -> bool:
        return super().is_available() and torch.cuda.is_available()

    def why_unavailable(self) -> tuple[str, str]:
        if not super().is_available():
            return super().why_unavailable()
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None:
            return f"CUDA_VISIBLE_DEVICES={hidden} shows no GPU", "unset CUDA_VISIBLE_DEVICES"
        return "torch sees no GPU", "run nvidia-smi to check whether the driver sees a GPU"

    def _make_group(self, kind: Any, *arguments: Any) -> Any:
        with _failures_handled_here():
            return kind(*arguments)


_changing = ForkSafeLock()

_HANDLED_HERE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else c10d has no watchdog, and reports no work's end
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # how long c10d's watchdog sleeps at a failure
}
"""Settings, read by ProcessGroupNCCL's constructor, that disable its own failure handling."""


@contextmanager
def _failures_handled_here() -> Iterator[None]:
    """Keep a ProcessGroupNCCL of the block from ending collectives or the process."""
    # meshdist raises failures in the waiting call. The settings are restored afterwards, so that
    # the program's own torch groups keep their failure handling.
    with _changing.current:
        before = {name: os.environ.get(name) for name in _HANDLED_HERE}
        level = torch_distributed.get_debug_level()
        os.environ.update(_HANDLED_HERE)
        if level == DebugLevel.DETAIL:  # it would enable c10d's failure handling again
            torch_distributed.set_debug_level(DebugLevel.INFO)
        try:
            yield
        finally:
            torch_distributed.set_debug_level(level)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _options(kind: Any, opening: Opening) -> Any:
    """Return options of class ``kind`` with the program's fields."""
    options = kind()
    given = opening.options
    if isinstance(given, kind):
        for name in dir(given):
            value = None if name.startswith("_") else getattr(given, name)
            if value is not None and not callable(value):
                with suppress(AttributeError):  # it cannot be set
                    setattr(options, name, value)
    options._timeout = opening.timeout + ENDS_LATER
    options.group_name = f"{opening.name}, {ranks_text(opening.ranks)}"
    options.global_ranks_in_group = list(opening.ranks)
    return options


register_backend(GlooBackend())
register_backend(
    NcclBackend(
        "nccl",
        "ProcessGroupNCCL",
        frozenset({"cuda"}),
        "install a build of torch for CUDA, see https://pytorch.org",
    )
)
register_backend(
    UccBackend(
        "ucc",
        "ProcessGroupUCC",
        frozenset({"cpu", "cuda"}),
        "build torch with UCC, or use gloo or nccl for the same devices",
    )
)
register_backend(
    XcclBackend(
        "xccl",
        "ProcessGroupXCCL",
        frozenset({"xpu"}),
        "install torch's build for XPU, see https://pytorch.org",
    )
)

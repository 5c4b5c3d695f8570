"""Give each simulated rank its own process groups of torch.distributed.

torch keeps its groups in a record of its Python module and in a C++ registry by name. A simulated
rank's thread has its own copies; other threads use the process's.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BackendError

_MAY_SERVE = frozenset({"simulated", "fake"})  # torch's fake backend never waits
_torchs: Any = c10d  # for private names, also in its C++ module
_core: Any = _distributed_c10d
_meshes: Any = DeviceMesh
_ensure_device_guard: Any = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
_VARIABLES = ("_world", "_new_process_group_helper", "_backend", "_default_pg_init_method")
_LACKING = [name for name in ("_World", *_VARIABLES) if not hasattr(_torchs, name)]
if not hasattr(_core, "_set_thread_isolation_mode"):
    _LACKING.append("_set_thread_isolation_mode")
"""Private names that this torch lacks; every tested version has them."""


_numbers = itertools.count(1)


class TorchWorld(getattr(_torchs, "_World", object)):  # type: ignore[misc]
    """torch's record of its process groups for one simulated rank."""

    # In torch's own these are properties, which read variables of its module.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}
        self.number = next(_numbers)


_here = threading.local()


class _NumberOfRank:
    """Torch's ``DeviceMesh._thread_id`` of a simulated rank's meshes: a number used only once."""

    # Torch caches by mesh, for all threads, how parts of a DTensor move. Without the number, meshes
    # of two ranks would be equal, but the ranks' parts may differ in size.
    def __get__(self, mesh: Any, _: type) -> Any:
        return self if mesh is None else vars(mesh)["_thread_id"]

    def __set__(self, mesh: Any, value: int | None) -> None:
        record = getattr(_here, "record", None)
        vars(mesh)["_thread_id"] = value if record is None else record.number


def begin_record() -> None:
    """Set an empty record of torch's groups for this simulated rank's thread."""
    _here.record = TorchWorld()


class _RecordOfThread:
    """Proxy for the calling thread's record, or for ``others`` if it has none."""

    def __init__(self, others: Any) -> None:
        vars(self)["others"] = others

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(_here, "record", self.others), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(getattr(_here, "record", self.others), name, value)


def isolate_names() -> None:
    """Isolate the names of torch's groups by thread; raise if this torch cannot."""
    global _is_isolated
    if _LACKING:
        raise BackendError(
            f"torch {torch.__version__} does not support process groups of simulated ranks",
            expected="a tested torch version, see docs/install.md",
            found=f"torch without its internal {', '.join(_LACKING)}",
            fix="install a tested torch version, or run the program as processes: "
            "meshdist run -n 4 script.py",
        )
    _is_isolated = True
    _core._set_thread_isolation_mode(True)


_is_isolated = False


@contextmanager
def callers_torch_world() -> Iterator[None]:
    """Enable separate torch groups for simulated ranks inside the context."""
    global _is_isolated
    was_isolated, hook = _is_isolated, sys.excepthook
    variables = {name: getattr(_torchs, name) for name in _VARIABLES if hasattr(_torchs, name)}
    if (open_group := variables.get("_new_process_group_helper")) is not None:
        _torchs._new_process_group_helper = partial(_open_checked, open_group)
    if "_world" in variables and type(variables["_world"]) is not _RecordOfThread:
        _torchs._world = _RecordOfThread(variables["_world"])
    is_inner = "_thread_id" in vars(_meshes)  # inside another simulation
    _meshes._thread_id = _NumberOfRank()
    if torch.__version__ < "2.12":  # else DTensor and torch.compile crash once a rank has used them
        _ensure_device_guard()
    try:
        yield
    finally:
        sys.excepthook = hook  # torch's puts the rank before each line, once a start
        for name, value in variables.items():
            setattr(_torchs, name, value)
        if _is_isolated and not was_isolated:
            _is_isolated = False
            _core._set_thread_isolation_mode(False)
        if not is_inner:
            del _meshes._thread_id
            for clear in _find_clearing():
                clear()


def _find_clearing() -> Iterator[Callable[[], None]]:
    """Yield functions that clear torch's redistribution caches, which hold closed groups."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    for name in ("_gen_transform_infos.cache_clear", "clear_redistribute_planner_cache"):
        with suppress(AttributeError):  # in the torches without this cache
            yield attrgetter(name)(redistribute)


def _open_checked(
    open_group: Callable[..., Any],
    size: int,
    rank: int,
    ranks: Any,
    backend: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Open a torch group; raise for a process backend on a simulated rank."""
    # A rank that waits in such a backend would block all others; Gloo waits as it opens.
    if hasattr(_here, "record"):
        wanted = _torchs.BackendConfig(backend).get_device_backend_map().values()
        if others := sorted({*wanted} - _MAY_SERVE):
            raise BackendError(
                f"torch's backend {others[0]!r} cannot run on simulated ranks, only on processes",
                expected="backend 'simulated' for each process group of torch",
                fix='torch.distributed.init_process_group("simulated", '
                'init_method="simulated://"), or run the program as processes: '
                "meshdist run -n 4 script.py",
            )
    return open_group(size, rank, ranks, backend, *rest, **named)


def end_torch_world() -> None:
    """Close torch's groups, if any."""
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()

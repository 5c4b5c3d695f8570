"""meshdist: N-D parallel programs against a named device mesh.

    import meshdist as md

    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    md.all_reduce(x, group=mesh["tp"])
    y = md.lax.psum(x, "tp", mesh=mesh)
    model = md.DistributedDataParallel(model, device_mesh=mesh["dp"])

This is the front door: it names everything public and loads a room when one of its names is
first touched.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("meshdist runs on Linux (complete) and macOS (without shared memory)")

_ROOMS = {
    "errors": (
        "AbortedError",
        "AgreementError",
        "ArgumentError",
        "AxisError",
        "BackendError",
        "CollectiveTimeoutError",
        "DeadlockError",
        "DistBackendError",
        "DistError",
        "DistNetworkError",
        "DistStoreError",
        "DtypeError",
        "GradientError",
        "GroupClosedError",
        "KindError",
        "MeshError",
        "MeshdistError",
        "NotInGroupError",
        "NotInitializedError",
        "RankFailedError",
        "RendezvousError",
        "ShapeError",
        "StoreError",
        "WorldError",
    ),
    "reduce_op": ("ReduceOp",),
    "runtime.world": ("World",),
    "runtime.stores": ("FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
    "runtime.rendezvous": ("register_rendezvous_handler", "rendezvous"),
    "wires.names": ("Backend", "BackendConfig"),
    "wires.work": ("Work",),
    "mesh.groups": ("GroupMember", "ProcessGroup", "group"),
    "mesh.group_calls": (
        "get_global_rank",
        "get_group_rank",
        "get_process_group_ranks",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
        "split_group",
    ),
    "mesh.session": (
        "destroy_process_group",
        "get_backend",
        "get_backend_config",
        "get_default_backend_for_device",
        "get_node_local_rank",
        "get_rank",
        "get_world_size",
        "init_process_group",
        "is_available",
        "is_backend_available",
        "is_gloo_available",
        "is_initialized",
        "is_mpi_available",
        "is_nccl_available",
        "is_torchelastic_launched",
        "is_ucc_available",
        "is_xccl_available",
    ),
    "mesh.layout": ("Layout",),
    "mesh.device_mesh": (
        "AxisOptions",
        "DeviceMesh",
        "find_current_mesh",
        "get_current_mesh",
        "init_device_mesh",
        "make_mesh",
    ),
    "mesh.simulation": ("simulate",),
    "mesh.spawning": ("spawn",),
    "collectives.verbs": (
        "all_gather_into_tensor",
        "all_reduce",
        "barrier",
        "broadcast",
        "reduce_scatter_tensor",
    ),
    "collectives.point_to_point": ("irecv", "isend", "recv", "send"),
    "ddp.data_parallel": ("DDP", "DistributedDataParallel"),
    "ddp.sampler": ("DistributedSampler",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_MODULES = ("lax",)

__all__ = ["__version__", *sorted([*_ROOM_OF, *_MODULES])]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = import_module(f".{name}", __name__)
    elif name in _ROOM_OF:
        value = getattr(import_module(f".{_ROOM_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

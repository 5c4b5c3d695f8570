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
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "meshdist does not run on Windows; it runs on Linux (complete) and macOS (without shared "
        "memory)"
    )

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
        "QueueEmptyError",
        "RankFailedError",
        "RendezvousError",
        "ShapeError",
        "StoreError",
        "WorldError",
    ),
    "reduce_ops": ("ReduceOp", "reduce_op"),
    "runtime.debug_levels": (
        "DebugLevel",
        "get_debug_level",
        "set_debug_level",
        "set_debug_level_from_env",
    ),
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
    "mesh.axis_options": ("AxisOptions",),
    "mesh.current_mesh": ("find_current_mesh", "get_current_mesh"),
    "mesh.device_mesh": ("DeviceMesh",),
    "mesh.making": ("init_device_mesh", "make_mesh"),
    "mesh.simulation": ("simulate",),
    "mesh.spawning": ("spawn",),
    "collectives.verbs": (
        "all_gather_into_tensor",
        "all_gather_single",
        "all_reduce",
        "barrier",
        "broadcast",
        "reduce",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    ),
    "collectives.coalesced": ("all_gather_coalesced", "all_reduce_coalesced"),
    "collectives.list_verbs": (
        "all_gather",
        "all_to_all",
        "all_to_all_single",
        "gather",
        "reduce_scatter",
        "scatter",
    ),
    "collectives.monitored": ("monitored_barrier",),
    "collectives.shared_buffers": ("shared_empty",),
    "collectives.point_to_point": ("irecv", "isend", "recv", "send"),
    "collectives.batches": ("P2POp", "batch_isend_irecv"),
    "collectives.objects": (
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    ),
    "debug.pausing": ("breakpoint",),
    "collectives.multi_device": (
        "all_gather_multigpu",
        "all_reduce_multigpu",
        "broadcast_multigpu",
        "reduce_multigpu",
    ),
    "ddp.data_parallel": ("DDP", "DistributedDataParallel"),
    "ddp.sampler": ("DistributedSampler",),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}
_MODULES = ("lax",)

# Found as attributes, but not handed out by `from meshdist import *`.
_SHADOWING_BUILTINS = ("breakpoint",)

__all__ = ["__version__", *sorted({*_ROOM_OF, *_MODULES}.difference(_SHADOWING_BUILTINS))]


if TYPE_CHECKING:  # for type checkers: the names of _ROOMS and _MODULES, a test compares them
    from . import lax as lax
    from .collectives.batches import (
        P2POp as P2POp,
        batch_isend_irecv as batch_isend_irecv,
    )
    from .collectives.coalesced import (
        all_gather_coalesced as all_gather_coalesced,
        all_reduce_coalesced as all_reduce_coalesced,
    )
    from .collectives.list_verbs import (
        all_gather as all_gather,
        all_to_all as all_to_all,
        all_to_all_single as all_to_all_single,
        gather as gather,
        reduce_scatter as reduce_scatter,
        scatter as scatter,
    )
    from .collectives.monitored import monitored_barrier as monitored_barrier
    from .collectives.multi_device import (
        all_gather_multigpu as all_gather_multigpu,
        all_reduce_multigpu as all_reduce_multigpu,
        broadcast_multigpu as broadcast_multigpu,
        reduce_multigpu as reduce_multigpu,
    )
    from .collectives.objects import (
        all_gather_object as all_gather_object,
        broadcast_object_list as broadcast_object_list,
        gather_object as gather_object,
        recv_object_list as recv_object_list,
        scatter_object_list as scatter_object_list,
        send_object_list as send_object_list,
    )
    from .collectives.point_to_point import (
        irecv as irecv,
        isend as isend,
        recv as recv,
        send as send,
    )
    from .collectives.shared_buffers import shared_empty as shared_empty
    from .collectives.verbs import (
        all_gather_into_tensor as all_gather_into_tensor,
        all_gather_single as all_gather_single,
        all_reduce as all_reduce,
        barrier as barrier,
        broadcast as broadcast,
        reduce as reduce,
        reduce_scatter_single as reduce_scatter_single,
        reduce_scatter_tensor as reduce_scatter_tensor,
    )
    from .ddp.data_parallel import DDP as DDP, DistributedDataParallel as DistributedDataParallel
    from .ddp.sampler import DistributedSampler as DistributedSampler
    from .debug.pausing import breakpoint as breakpoint
    from .errors import (
        AbortedError as AbortedError,
        AgreementError as AgreementError,
        ArgumentError as ArgumentError,
        AxisError as AxisError,
        BackendError as BackendError,
        CollectiveTimeoutError as CollectiveTimeoutError,
        DeadlockError as DeadlockError,
        DistBackendError as DistBackendError,
        DistError as DistError,
        DistNetworkError as DistNetworkError,
        DistStoreError as DistStoreError,
        DtypeError as DtypeError,
        GradientError as GradientError,
        GroupClosedError as GroupClosedError,
        KindError as KindError,
        MeshdistError as MeshdistError,
        MeshError as MeshError,
        NotInGroupError as NotInGroupError,
        NotInitializedError as NotInitializedError,
        QueueEmptyError as QueueEmptyError,
        RankFailedError as RankFailedError,
        RendezvousError as RendezvousError,
        ShapeError as ShapeError,
        StoreError as StoreError,
        WorldError as WorldError,
    )
    from .mesh.axis_options import AxisOptions as AxisOptions
    from .mesh.current_mesh import (
        find_current_mesh as find_current_mesh,
        get_current_mesh as get_current_mesh,
    )
    from .mesh.device_mesh import DeviceMesh as DeviceMesh
    from .mesh.group_calls import (
        get_global_rank as get_global_rank,
        get_group_rank as get_group_rank,
        get_process_group_ranks as get_process_group_ranks,
        new_group as new_group,
        new_subgroups as new_subgroups,
        new_subgroups_by_enumeration as new_subgroups_by_enumeration,
        split_group as split_group,
    )
    from .mesh.groups import (
        GroupMember as GroupMember,
        ProcessGroup as ProcessGroup,
        group as group,
    )
    from .mesh.layout import Layout as Layout
    from .mesh.making import init_device_mesh as init_device_mesh, make_mesh as make_mesh
    from .mesh.session import (
        destroy_process_group as destroy_process_group,
        get_backend as get_backend,
        get_backend_config as get_backend_config,
        get_default_backend_for_device as get_default_backend_for_device,
        get_node_local_rank as get_node_local_rank,
        get_rank as get_rank,
        get_world_size as get_world_size,
        init_process_group as init_process_group,
        is_available as is_available,
        is_backend_available as is_backend_available,
        is_gloo_available as is_gloo_available,
        is_initialized as is_initialized,
        is_mpi_available as is_mpi_available,
        is_nccl_available as is_nccl_available,
        is_torchelastic_launched as is_torchelastic_launched,
        is_ucc_available as is_ucc_available,
        is_xccl_available as is_xccl_available,
    )
    from .mesh.simulation import simulate as simulate
    from .mesh.spawning import spawn as spawn
    from .reduce_ops import ReduceOp as ReduceOp, reduce_op as reduce_op
    from .runtime.debug_levels import (
        DebugLevel as DebugLevel,
        get_debug_level as get_debug_level,
        set_debug_level as set_debug_level,
        set_debug_level_from_env as set_debug_level_from_env,
    )
    from .runtime.rendezvous import (
        register_rendezvous_handler as register_rendezvous_handler,
        rendezvous as rendezvous,
    )
    from .runtime.stores import (
        FileStore as FileStore,
        HashStore as HashStore,
        PrefixStore as PrefixStore,
        Store as Store,
        TCPStore as TCPStore,
    )
    from .runtime.world import World as World
    from .wires.names import Backend as Backend, BackendConfig as BackendConfig
    from .wires.work import Work as Work
else:

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

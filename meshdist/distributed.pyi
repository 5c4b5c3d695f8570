"""List the names of meshdist.distributed and their modules, for loading and type checkers."""

from .backends.backend_names import Backend as Backend, BackendConfig as BackendConfig
from .backends.work import Work as Work
from .bootstrap.init_methods import (
    register_rendezvous_handler as register_rendezvous_handler,
    rendezvous as rendezvous,
)
from .bootstrap.stores import (
    FileStore as FileStore,
    HashStore as HashStore,
    PrefixStore as PrefixStore,
    Store as Store,
    TCPStore as TCPStore,
)
from .bootstrap.world import World as World
from .checking.debug_levels import (
    DebugLevel as DebugLevel,
    get_debug_level as get_debug_level,
    set_debug_level as set_debug_level,
    set_debug_level_from_env as set_debug_level_from_env,
)
from .collectives.breakpoints import breakpoint as breakpoint
from .collectives.coalesced import (
    all_gather_coalesced as all_gather_coalesced,
    all_gather_multigpu as all_gather_multigpu,
    all_reduce_coalesced as all_reduce_coalesced,
    all_reduce_multigpu as all_reduce_multigpu,
    broadcast_multigpu as broadcast_multigpu,
    reduce_multigpu as reduce_multigpu,
)
from .collectives.list_collectives import (
    all_gather as all_gather,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    gather as gather,
    reduce_scatter as reduce_scatter,
    scatter as scatter,
)
from .collectives.monitored_barrier import monitored_barrier as monitored_barrier
from .collectives.objects import (
    all_gather_object as all_gather_object,
    broadcast_object_list as broadcast_object_list,
    gather_object as gather_object,
    recv_object_list as recv_object_list,
    scatter_object_list as scatter_object_list,
    send_object_list as send_object_list,
)
from .collectives.point_to_point import (
    P2POp as P2POp,
    batch_isend_irecv as batch_isend_irecv,
    irecv as irecv,
    isend as isend,
    recv as recv,
    send as send,
)
from .collectives.shared_buffers import shared_empty as shared_empty
from .collectives.tensor_collectives import (
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_single as all_gather_single,
    all_reduce as all_reduce,
    barrier as barrier,
    broadcast as broadcast,
    reduce as reduce,
    reduce_scatter_single as reduce_scatter_single,
    reduce_scatter_tensor as reduce_scatter_tensor,
)
from .ddp import comm_hooks as comm_hooks
from .ddp.comm_hooks.bucket import GradBucket as GradBucket
from .ddp.data_parallel import DistributedDataParallel as DistributedDataParallel
from .ddp.model_averagers import (
    HierarchicalModelAverager as HierarchicalModelAverager,
    PeriodicModelAverager as PeriodicModelAverager,
    PostLocalSGDOptimizer as PostLocalSGDOptimizer,
)
from .ddp.precision import MixedPrecision as MixedPrecision
from .ddp.sampler import DistributedSampler as DistributedSampler
from .ddp.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .errors import (
    DistBackendError as DistBackendError,
    DistError as DistError,
    DistNetworkError as DistNetworkError,
    DistStoreError as DistStoreError,
    QueueEmptyError as QueueEmptyError,
)
from .groups.group_calls import (
    GroupMember as GroupMember,
    get_global_rank as get_global_rank,
    get_group_rank as get_group_rank,
    get_process_group_ranks as get_process_group_ranks,
    group as group,
    new_group as new_group,
    new_subgroups as new_subgroups,
    new_subgroups_by_enumeration as new_subgroups_by_enumeration,
    split_group as split_group,
)
from .groups.process_group import ProcessGroup as ProcessGroup
from .join.join_context import Join as Join, Joinable as Joinable, JoinHook as JoinHook
from .mesh.constructors import init_device_mesh as init_device_mesh
from .mesh.device_mesh import DeviceMesh as DeviceMesh
from .reduce_ops import ReduceOp as ReduceOp, reduce_op as reduce_op
from .sharding.dtensors import (
    from_dtensor as from_dtensor,
    from_placements as from_placements,
    to_dtensor as to_dtensor,
    to_placements as to_placements,
)
from .worlds.initialization import (
    destroy_process_group as destroy_process_group,
    init_process_group as init_process_group,
)
from .worlds.queries import (
    get_backend as get_backend,
    get_backend_config as get_backend_config,
    get_default_backend_for_device as get_default_backend_for_device,
    get_node_local_rank as get_node_local_rank,
    get_rank as get_rank,
    get_world_size as get_world_size,
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

"""The public names, and the room of each: what the front door loads, and type checkers read."""

from . import errors as errors, lax as lax
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
from .collectives.list_verbs import (
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
from .collectives.several_tensors import (
    all_gather_coalesced as all_gather_coalesced,
    all_gather_multigpu as all_gather_multigpu,
    all_reduce_coalesced as all_reduce_coalesced,
    all_reduce_multigpu as all_reduce_multigpu,
    broadcast_multigpu as broadcast_multigpu,
    reduce_multigpu as reduce_multigpu,
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
from .ddp import comm_hooks as comm_hooks
from .ddp.accumulation import accumulate_gradients as accumulate_gradients
from .ddp.averaging import (
    HierarchicalModelAverager as HierarchicalModelAverager,
    PeriodicModelAverager as PeriodicModelAverager,
    PostLocalSGDOptimizer as PostLocalSGDOptimizer,
)
from .ddp.comm_hooks.bucket import GradBucket as GradBucket
from .ddp.data_parallel import DDP as DDP, DistributedDataParallel as DistributedDataParallel
from .ddp.gradient_buckets import GradientBuckets as GradientBuckets
from .ddp.precision import MixedPrecision as MixedPrecision
from .ddp.sampler import DistributedSampler as DistributedSampler
from .ddp.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .errors import (
    AbortedError as AbortedError,
    AgreementError as AgreementError,
    ArgumentError as ArgumentError,
    AxisError as AxisError,
    AxisTypeError as AxisTypeError,
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
    GroupKindError as GroupKindError,
    JoinError as JoinError,
    KindError as KindError,
    LengthError as LengthError,
    MeshdistError as MeshdistError,
    MeshError as MeshError,
    NestedVerbError as NestedVerbError,
    NotInGroupError as NotInGroupError,
    NotInitializedError as NotInitializedError,
    PatternError as PatternError,
    PicklingError as PicklingError,
    QueueEmptyError as QueueEmptyError,
    RankFailedError as RankFailedError,
    RendezvousError as RendezvousError,
    ShapeError as ShapeError,
    StoreError as StoreError,
    UnequalError as UnequalError,
    VaryingNumberWarning as VaryingNumberWarning,
    WorldError as WorldError,
)
from .groups.group_calls import (
    get_global_rank as get_global_rank,
    get_group_rank as get_group_rank,
    get_process_group_ranks as get_process_group_ranks,
    new_group as new_group,
    new_subgroups as new_subgroups,
    new_subgroups_by_enumeration as new_subgroups_by_enumeration,
    split_group as split_group,
)
from .groups.other_members import wait_notice as wait_notice
from .groups.process_group import (
    GroupMember as GroupMember,
    ProcessGroup as ProcessGroup,
    group as group,
)
from .joining.join import (
    Join as Join,
    Joinable as Joinable,
    JoinHook as JoinHook,
    uneven as uneven,
)
from .lax.asserting import assert_equal as assert_equal
from .mesh.current_mesh import (
    find_current_mesh as find_current_mesh,
    get_current_mesh as get_current_mesh,
)
from .mesh.definition import AxisOptions as AxisOptions
from .mesh.device_mesh import DeviceMesh as DeviceMesh
from .mesh.layout import Layout as Layout
from .mesh.making import init_device_mesh as init_device_mesh, make_mesh as make_mesh
from .mesh.partition_spec import P as P, PartitionSpec as PartitionSpec
from .mesh.spec import NamedSharding as NamedSharding
from .reduce_ops import ReduceOp as ReduceOp, reduce_op as reduce_op
from .sharding.descriptions import ArrayMetadata as ArrayMetadata
from .sharding.dtensors import (
    from_dtensor as from_dtensor,
    from_placements as from_placements,
    to_dtensor as to_dtensor,
    to_placements as to_placements,
)
from .sharding.making_arrays import (
    empty as empty,
    full as full,
    make_array_from_callback as make_array_from_callback,
    make_array_from_process_local_data as make_array_from_process_local_data,
    ones as ones,
    randn as randn,
    zeros as zeros,
)
from .sharding.placing import reshard as reshard, shard as shard, unshard as unshard
from .sharding.requests import plan as plan
from .sharding.routes import Link as Link
from .sharding.sharded_array import ShardedArray as ShardedArray
from .sharding.whole_arrays import device_put as device_put
from .typed_contexts.annotations import annotate as annotate, typeof as typeof
from .typed_contexts.mode import typed as typed, untyped as untyped
from .typed_contexts.random_draws import seed as seed
from .wires.names import Backend as Backend, BackendConfig as BackendConfig
from .wires.work import Work as Work
from .worlds.breakpoints import breakpoint as breakpoint
from .worlds.initialization import (
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
from .worlds.simulation import simulate as simulate
from .worlds.spawning import spawn as spawn

__version__: str

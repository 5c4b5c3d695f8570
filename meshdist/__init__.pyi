"""The public names, and the home of each: what the public API loads, and type checkers read."""

from . import (
    attention as attention,
    checkpoint as checkpoint,
    distributed as distributed,
    errors as errors,
    experts as experts,
    lax as lax,
    optim as optim,
    tensor_parallel as tensor_parallel,
)
from .checkpoint.preemption import preempted as preempted, restart_count as restart_count
from .ddp.accumulation import accumulate_gradients as accumulate_gradients
from .ddp.data_parallel import DDP as DDP
from .ddp.grad_norm import clip_grad_norm_ as clip_grad_norm_
from .ddp.gradient_buckets import GradientBuckets as GradientBuckets
from .distributed import (
    DeviceMesh as DeviceMesh,
    ReduceOp as ReduceOp,
    all_gather_into_tensor as all_gather_into_tensor,
    all_reduce as all_reduce,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    breakpoint as breakpoint,
    broadcast as broadcast,
    destroy_process_group as destroy_process_group,
    get_rank as get_rank,
    get_world_size as get_world_size,
    init_device_mesh as init_device_mesh,
    init_process_group as init_process_group,
    recv as recv,
    reduce_scatter_tensor as reduce_scatter_tensor,
    send as send,
)
from .errors import (
    ArgumentError as ArgumentError,
    BackendError as BackendError,
    KindError as KindError,
    MeshdistError as MeshdistError,
    MeshError as MeshError,
)
from .groups.peer_status import stall_warning as stall_warning
from .join.uneven_loops import uneven as uneven
from .lax.equality_checks import assert_equal as assert_equal
from .mesh.constructors import make_mesh as make_mesh
from .mesh.current_mesh import get_current_mesh as get_current_mesh
from .mesh.definition import AxisOptions as AxisOptions
from .mesh.layout import Layout as Layout
from .mesh.partition_spec import P as P
from .mesh.spec import NamedSharding as NamedSharding
from .sharding.api import (
    device_put as device_put,
    reshard as reshard,
    shard as shard,
    unshard as unshard,
)
from .sharding.array_creation import (
    empty as empty,
    full as full,
    make_array_from_callback as make_array_from_callback,
    make_array_from_process_local_data as make_array_from_process_local_data,
    ones as ones,
    randn as randn,
    zeros as zeros,
)
from .sharding.einsum import einsum as einsum
from .sharding.planner import plan as plan
from .sharding.routes import Link as Link
from .sharding.shard_mapping import shard_map as shard_map
from .sharding.sharded_array import ShardedArray as ShardedArray
from .tensor_parallel.parallelize import parallelize as parallelize
from .typed_mode.annotations import annotate as annotate, typeof as typeof
from .typed_mode.mode import typed as typed, untyped as untyped
from .typed_mode.random_draws import fork_rng as fork_rng, seed as seed
from .worlds.simulation import simulate as simulate
from .worlds.spawn import spawn as spawn

# What follows resolves as well, and dir() does not show it: all of torch's names, for programs
# that say `import meshdist as dist`; the other errors; P by the long name that JAX has for it.
# isort: split
from .distributed import *  # noqa: F403
from .errors import (
    AbortedError as AbortedError,
    AxisError as AxisError,
    AxisTypeError as AxisTypeError,
    CheckpointError as CheckpointError,
    CollectiveTimeoutError as CollectiveTimeoutError,
    DeadlockError as DeadlockError,
    DtypeError as DtypeError,
    GradientError as GradientError,
    GroupClosedError as GroupClosedError,
    GroupKindError as GroupKindError,
    JoinError as JoinError,
    LengthError as LengthError,
    MeshAttributeError as MeshAttributeError,
    MismatchError as MismatchError,
    NestedCollectiveError as NestedCollectiveError,
    NotInGroupError as NotInGroupError,
    NotInitializedError as NotInitializedError,
    PatternError as PatternError,
    PicklingError as PicklingError,
    RankFailedError as RankFailedError,
    RendezvousError as RendezvousError,
    ShapeError as ShapeError,
    StoreError as StoreError,
    UnequalError as UnequalError,
    VaryingNumberWarning as VaryingNumberWarning,
    WorldError as WorldError,
)
from .mesh.partition_spec import PartitionSpec as PartitionSpec
from .worlds.initialization import world as world

__version__: str

"""Explain names of torch.distributed and JAX that meshdist lacks.

Import only the standard library: a failed import must not load torch for its error.
"""

from __future__ import annotations

from .error_text import explain

__all__ = ["where_else"]

_PACKAGE = __name__.rpartition(".")[0]
_TORCH = "torch.distributed"

_NAMES = {
    "": "AllToAllOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions "
    "BroadcastOptions BuiltinCommHookType GatherOptions GroupName Logger ProcessGroupGloo "
    "ProcessGroupMPI ProcessGroupNCCL ProcessGroupUCC ProcessGroupXCCL RankType ReduceOptions "
    "ReduceScatterOptions Reducer ScatterOptions _make_nccl_premul_sum default_pg_timeout "
    "get_pg_count record_comm shrink_group supports_complex",
    "checkpoint": "FileSystemReader FileSystemWriter",
    "elastic.utils.data": "ElasticDistributedSampler",
    "fsdp": "BackwardPrefetch CPUOffload CPUOffloadPolicy DataParallelMeshDims FSDP FSDPModule "
    "FullOptimStateDictConfig FullStateDictConfig FullyShardedDataParallel "
    "LocalOptimStateDictConfig LocalStateDictConfig MixedPrecisionPolicy OffloadPolicy "
    "OptimStateDictConfig OptimStateKeyType ShardedOptimStateDictConfig ShardedStateDictConfig "
    "ShardingStrategy StateDictConfig StateDictSettings StateDictType UnshardHandle fully_shard "
    "register_fsdp_forward_method share_comm_ctx",
    "fsdp.sharded_grad_scaler": "ShardedGradScaler",
    "nn": "RemoteModule",
    "optim": "DistributedOptimizer ZeroRedundancyOptimizer as_functional_optim",
    "optim.named_optimizer": "NamedOptimizer",
    "pipelining": "Pipe PipelineStage Schedule1F1B ScheduleDualPipeV ScheduleGPipe "
    "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS "
    "ScheduleZBVZeroBubble SplitPoint build_stage pipe_split pipeline",
    "rpc": "RRef init_rpc remote rpc_async rpc_sync shutdown",
    "tensor": "DTensor Partial Placement Replicate Shard distribute_module distribute_tensor rand",
    "tensor.parallel": "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput "
    "PrepareModuleOutput RowwiseParallel SequenceParallel loss_parallel parallelize_module",
}
_MODULES = (
    "algorithms argparse_util autograd c10d_logger collective_utils config constants "
    "device_mesh distributed_c10d elastic flight_recorder fsdp launcher logging_handlers nn "
    "pipelining remote_device rpc run tensor utils"
)
# torch has these in the same module, under other names.
_THERE = {"FSDP": "FullyShardedDataParallel as FSDP", "NamedOptimizer": "_NamedOptimizer"}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
_HOMES |= dict.fromkeys(_MODULES.split(), "")

# Alternatives in meshdist to names of torch.
OURS = {
    "DTensor": "meshdist.ShardedArray; meshdist.distributed.to_dtensor and from_dtensor convert "
    "between the two",
    "Partial": "{U:axis} in a pattern, or meshdist.P; meshdist.distributed.from_placements",
    "Placement": "meshdist.P; meshdist.distributed.to_placements and from_placements",
    "Replicate": "meshdist.P; meshdist.distributed.to_placements and from_placements",
    "Shard": "meshdist.P; meshdist.distributed.to_placements and from_placements",
    "algorithms": "Join, comm_hooks and PeriodicModelAverager of meshdist.distributed",
    "_make_nccl_premul_sum": "meshdist.ReduceOp.premul_sum(factor)",
    "device_mesh": "DeviceMesh and init_device_mesh of meshdist",
    "distribute_tensor": "meshdist.device_put",
    "distributed_c10d": "the same names from meshdist.distributed; names that begin with _ exist "
    "only in torch",
    "loss_parallel": "meshdist.tensor_parallel.cross_entropy",
    "nn": "meshdist.lax, whose collectives have gradients, instead of nn.functional",
    "parallelize_module": "meshdist.parallelize, with the names of styles",
    "rand": "meshdist.randn, or meshdist.make_array_from_callback",
    "run": "the command meshdist run, which takes torchrun's flags",
    "tensor": "meshdist.ShardedArray",
}
# Alternatives to names of JAX, of meshdist's modules and of torch's imports.
_INSTEAD = {
    "meshdist.lax.{}": "axis_index axis_size pbroadcast pcast pmax pmean pmin ppermute pshuffle "
    "psum psum_scatter pswapaxes pvary ragged_all_to_all",
    "meshdist.distributed.comm_hooks.{}": "DDPCommHookType PostLocalSGDState PowerSGDState "
    "allreduce_hook batched_powerSGD_hook bf16_compress_hook bf16_compress_wrapper "
    "fp16_compress_hook fp16_compress_wrapper noop_hook "
    "post_localSGD_hook powerSGD_hook quantization_perchannel_hook quantization_pertensor_hook "
    "register_ddp_comm_hook",
    "meshdist.shard_map": "pmap",
    "torch.compile, which breaks the graph at each collective": "jit pjit",
    "torch.func.{}, or backward()": "grad value_and_grad vjp",
    "torch.func.{}": "jvp vmap",
    "meshdist.make_mesh; meshdist.Layout is a mesh without processes": "AbstractMesh Mesh",
    "meshdist.get_world_size()": "device_count process_count size world_size",
    "meshdist.get_rank()": "process_index rank",
    "meshdist.distributed.get_node_local_rank()": "local_rank",
    "meshdist.init_process_group(), or the first collective or mesh": "init",
    "meshdist.get_current_mesh(), which raises without a current mesh": "find_current_mesh",
    "meshdist.seed": "manual_seed",
    "meshdist.all_reduce": "allreduce",
    "meshdist.distributed.all_gather": "allgather",
    "meshdist.DDP": "DataParallel",
    "the method of the wrapper: with ddp_model.no_sync():": "no_sync",
    "meshdist.reshard": "with_sharding_constraint",
    "meshdist.checkpoint.{}": "load save",
    "meshdist.checkpoint.save_async": "async_save",
    "typing_extensions.deprecated": "deprecated",
}
PLACES = {name: place for place, names in _INSTEAD.items() for name in names.split()}
# The collectives of lax for the names of torch or MPI.
IN_LAX = {
    "all_reduce": "psum",
    "allreduce": "psum",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "pbroadcast",
    "permute": "ppermute",
    "reduce_scatter": "psum_scatter",
    "reduce_scatter_tensor": "psum_scatter",
}
# torch modules that communicate on torch process groups, which meshdist's backends support.
_IN_A_WORLD = [
    "algorithms",
    "device_mesh",
    "fsdp",
    "nn",
    "optim",
    "pipelining",
    "tensor",
]


def where_else(name: str, module: str = _PACKAGE) -> str | None:
    """Return a message on where torch or JAX has ``name``; None for others.

    Args:
        module: the module of meshdist that lacks it.

    Example:
        >>> print(where_else("fully_shard"))
        meshdist has no fully_shard
          expected: the name in torch, on a torch process group with a backend of meshdist
          fix:      from torch.distributed.fsdp import fully_shard, after \
torch.distributed.init_process_group('shm')
    """
    if module == f"{_PACKAGE}.lax" and name in IN_LAX:
        return explain(f"{module} has no {name}", fix=f"use {module}.{IN_LAX[name]}")
    if name in PLACES:
        return explain(f"{_PACKAGE} has no {name}", fix=f"use {PLACES[name].format(name)}")
    home = _HOMES.get(name)
    if home is None:
        return None
    expected = "the name in torch"
    fix = f"from {'.'.join(filter(None, (_TORCH, home)))} import {_THERE.get(name, name)}"
    if (home or name).partition(".")[0] in _IN_A_WORLD:
        expected += ", on a torch process group with a backend of meshdist"
        fix += f", after {_TORCH}.init_process_group('shm')"
    if name in OURS:
        expected = f"the equivalent in meshdist, or {expected}"
        fix = f"use {OURS[name]}; or use torch: {fix}"
    return explain(f"{_PACKAGE} has no {name}", expected=expected, fix=fix)

"""What bears torch's name has torch's signature: names, order, kinds and defaults of parameters.

``DIFFERENCES`` lists what deliberately differs, and why.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

import meshdist as md

with warnings.catch_warnings():  # torch's own module calls what torch calls deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import PostLocalSGDOptimizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "differences_from_torch.md"

# Names here and in torch.distributed. Every room adds its own.
NAMES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
)

# What is torch's own class or function here.
SAME = (
    "DebugLevel",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
    "register_rendezvous_handler",
)

# Classes of torch's names: the methods that both have are compared, the constructor too.
CLASSES: dict[str, tuple[Any, Any]] = {
    "Backend": (md.Backend, dist.Backend),
    "BackendConfig": (md.BackendConfig, distributed_c10d.BackendConfig),
    "DeviceMesh": (md.DeviceMesh, device_mesh.DeviceMesh),
    "DistributedDataParallel": (md.DistributedDataParallel, DistributedDataParallel),
    "P2POp": (md.P2POp, dist.P2POp),
    "DistributedSampler": (md.DistributedSampler, DistributedSampler),
    "HierarchicalModelAverager": (md.HierarchicalModelAverager, HierarchicalModelAverager),
    "PeriodicModelAverager": (md.PeriodicModelAverager, PeriodicModelAverager),
    "PostLocalSGDOptimizer": (md.PostLocalSGDOptimizer, PostLocalSGDOptimizer),
    "SyncBatchNorm": (md.SyncBatchNorm, SyncBatchNorm),
}
METHODS = (
    "Backend.register_backend",
    "BackendConfig.__init__",
    "BackendConfig.get_device_backend_map",
    "DeviceMesh.__init__",
    "DeviceMesh.from_group",
    "DeviceMesh.get_all_groups",
    "DeviceMesh.get_coordinate",
    "DeviceMesh.get_group",
    "DeviceMesh.get_local_rank",
    "DeviceMesh.get_rank",
    "DeviceMesh.size",
    "DistributedDataParallel.__init__",
    "DistributedDataParallel._check_reducer_finalized",
    "DistributedDataParallel._get_data_parallel_params",
    "DistributedDataParallel._register_buffer_comm_hook",
    "DistributedDataParallel._remove_autograd_hooks",
    "DistributedDataParallel._set_ddp_sink_clone",
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "DistributedDataParallel._set_static_graph",
    "DistributedDataParallel._update_process_group",
    "DistributedDataParallel.forward",
    "DistributedDataParallel.join",
    "DistributedDataParallel.join_hook",
    "DistributedDataParallel.no_sync",
    "DistributedDataParallel.register_comm_hook",
    "DistributedSampler.__init__",
    "DistributedSampler.set_epoch",
    "HierarchicalModelAverager.__init__",
    "HierarchicalModelAverager.average_parameters",
    "P2POp.__init__",
    "PeriodicModelAverager.__init__",
    "PeriodicModelAverager.average_parameters",
    "PostLocalSGDOptimizer.__init__",
    "PostLocalSGDOptimizer.add_param_group",
    "PostLocalSGDOptimizer.load_state_dict",
    "PostLocalSGDOptimizer.state_dict",
    "PostLocalSGDOptimizer.step",
    "PostLocalSGDOptimizer.zero_grad",
    "SyncBatchNorm.__init__",
    "SyncBatchNorm.convert_sync_batchnorm",
    "SyncBatchNorm.forward",
)
# What torch writes in C++, which has no signature; and names without a call.
WITHOUT_SIGNATURES = (
    "GradBucket",
    "GroupMember",
    "ProcessGroup",
    "ReduceOp",
    "Work",
    "get_debug_level",
    "group",
    "reduce_op",
    "set_debug_level",
    "set_debug_level_from_env",
)

# name -> (parameters of torch that we leave out, parameters that we add or that differ in kind or
# default, why). Each is told in docs/reference/differences_from_torch.md.
DIFFERENCES: dict[str, tuple[set[str], set[str], str]] = {
    "init_process_group": ({"_ranks"}, set(), "private to torch"),
    "init_device_mesh": (
        set(),
        {"axis_options", "open_groups", "timeout"},
        "keyword-only additions",
    ),
    "DeviceMesh.__init__": (
        {
            "_init_backend",
            "_layout",
            "_rank",
            "_rank_map",
            "_root_mesh",
            "backend_override",
            "mesh",
        },
        {"axis_options", "mesh", "open_groups"},
        "what is private to torch; per-axis backends go by axis_options; mesh has no default",
    ),
    "DistributedDataParallel.__init__": (
        {"gradient_as_bucket_view"},
        {"gradient_as_bucket_view", "verify_every", "experts_over"},
        "gradients are views by default; keyword-only additions",
    ),
    "DistributedSampler.__init__": (set(), {"pad"}, "a keyword-only addition"),
}


def torchs(name: str) -> Callable[..., Any]:
    for module in (dist, distributed_c10d, device_mesh):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    raise AssertionError(f"this torch has no {name}")


def form(function: Callable[..., Any], without: set[str]) -> list[tuple[str, Any, Any]]:
    """Return name, kind and default of each parameter."""
    return [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in without
    ]


def is_static(kind: type[Any], method: str) -> bool:
    return isinstance(inspect.getattr_static(kind, method), staticmethod)


def compare(name: str, ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    left_out, added, _ = DIFFERENCES.get(name, (set(), set(), ""))
    assert form(ours, added) == form(theirs, left_out)
    assert left_out <= set(inspect.signature(theirs).parameters)
    assert added <= set(inspect.signature(ours).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    compare(name, getattr(md, name), torchs(name))


@pytest.mark.parametrize("name", METHODS)
def test_method(name: str) -> None:
    kind, method = name.split(".")
    ours, theirs = CLASSES[kind]
    compare(name, getattr(ours, method), getattr(theirs, method))
    assert is_static(ours, method) == is_static(theirs, method)


@pytest.mark.parametrize("name", SAME)
def test_torchs_own(name: str) -> None:
    assert getattr(md, name) is torchs(name)


def test_methods_of_work() -> None:
    """torch writes Work in C++ and tells the signatures in its docstrings."""
    for name, ours in inspect.getmembers(md.Work, inspect.isfunction):
        if name.startswith("_"):
            continue
        text = getattr(dist.Work, name).__doc__
        told = re.search(rf"{name}\((?P<arguments>[^\n]*)\) *->", text)
        assert told is not None, text
        expected = re.findall(r"(\w+): ", told["arguments"].replace("torch._C", ""))
        expected = [word for word in expected if word != "self"]
        assert [p for p in inspect.signature(ours).parameters if p != "self"] == expected, name
    default = inspect.signature(md.Work.wait).parameters["timeout"].default
    assert default.total_seconds() == 0


def test_every_name_of_torchs_is_compared() -> None:
    def has_torchs_name(name: str) -> bool:
        return any(hasattr(module, name) for module in (dist, distributed_c10d, device_mesh))

    ours = {*md.__all__, *md.distributed.__all__} - {
        "checkpoint",
        "optim",
    }  # torch has other modules
    shared = {name for name in ours if not name.startswith("_") and has_torchs_name(name)}
    compared = {*NAMES, *SAME, *CLASSES, *WITHOUT_SIGNATURES}
    assert shared - compared == set()
    public = {
        f"{kind}.{name}"
        for kind, (ours, theirs) in CLASSES.items()
        for name in vars(ours)
        if not name.startswith("_")
        and inspect.isroutine(getattr(ours, name))
        and name in vars(theirs)
    }
    assert public - set(METHODS) == set()


def test_every_difference_is_told() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, (left_out, added, _) in DIFFERENCES.items():
        for parameter in left_out | added:
            assert parameter.startswith("_") or f"`{parameter}`" in page, (name, parameter)

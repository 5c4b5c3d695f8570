"""What bears torch's name has torch's signature: names, order, kinds and defaults of parameters.

``DIFFERENCES`` lists what deliberately differs, and why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

import meshdist as md

# Names here and in torch.distributed. Every room adds its own.
NAMES = (
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
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
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "reduce_scatter_tensor",
    "register_rendezvous_handler",
    "rendezvous",
    "send",
    "split_group",
)

# name -> (parameters of torch that we leave out, parameters that we add, why)
DIFFERENCES: dict[str, tuple[set[str], set[str], str]] = {
    "init_process_group": ({"_ranks"}, set(), "private to torch"),
    "init_device_mesh": (
        set(),
        {"axis_options", "open_groups", "timeout"},
        "keyword-only additions",
    ),
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


@pytest.mark.parametrize("name", NAMES)
def test_signature(name: str) -> None:
    left_out, added, _ = DIFFERENCES.get(name, (set(), set(), ""))
    ours, theirs = getattr(md, name), torchs(name)
    assert form(ours, added) == form(theirs, left_out)
    assert left_out <= set(inspect.signature(theirs).parameters)
    assert added <= set(inspect.signature(ours).parameters)


def test_register_backend() -> None:
    ours, theirs = md.Backend.register_backend, dist.Backend.register_backend
    assert form(ours, set()) == form(theirs, set())

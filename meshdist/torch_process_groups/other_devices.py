"""Tensors on a device that a wire does not serve, carried by torch's own class for it.

In a text such as ``cpu:shm,cuda:nccl`` torch gives the whole group to a backend that is a process
group itself, and drops the other half. So that half is opened here, on the same store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import PrefixStore, ProcessGroup, Store

from ..checking.calls import GroupFacts
from ..errors import BackendError

__all__ = ["other_group"]


def other_group(group: GroupFacts, name: str, store: Store, kind: str, timeout: timedelta) -> Any:
    """Return torch's group of the same members for tensors of a device type.

    It connects at its first verb.

    Args:
        group: our group.
        name: what torch calls it.
        store: its keys belong to the group.
        kind: the device type.
        timeout: how long a verb may wait.

    Raises:
        BackendError: this torch, or this machine, has nothing for that device type.
    """
    if kind != "cuda" or not torch_distributed.is_nccl_available() or not torch.cuda.is_available():
        raise BackendError(
            f"{group.name} cannot carry {kind} tensors",
            where=group.here,
            expected=f"tensors that the wire {group.wire!r} serves, or CUDA tensors by NCCL",
            found="a torch without NCCL, or no GPU" if kind == "cuda" else f"a {kind} tensor",
            fix="move the tensor to the CPU, or make a group of another backend for it",
        )
    store = PrefixStore(kind, store)
    place, size = group.rank, len(group.ranks)
    options: Any = torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(group.ranks)
    options.group_name = name
    backend = torch_distributed.ProcessGroupNCCL(store, place, size, options)
    backend._set_sequence_number_for_group()
    made: Any = ProcessGroup(store, place, size)
    made._set_default_backend(ProcessGroup.BackendType.NCCL)
    made._register_backend(torch.device(kind), ProcessGroup.BackendType.NCCL, backend)
    made._set_group_name(f"{name}/{kind}")
    return made

"""Tensors on a device that a wire does not serve, carried by torch's own class for it.

In a text such as ``cpu:shm,cuda:nccl`` torch gives the whole group to whoever comes with a process
group of its own, and forgets the other half. So that half is opened here, on the same store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import PrefixStore, ProcessGroup

from ..errors import BackendError
from .calls import Members

__all__ = ["other_group"]


def other_group(members: Members, kind: str, timeout: timedelta) -> Any:
    """Return torch's group of the same members for tensors of a device type.

    It connects at its first verb.

    Raises:
        BackendError: this torch, or this machine, has nothing for that device type.
    """
    if kind != "cuda" or not torch_distributed.is_nccl_available() or not torch.cuda.is_available():
        raise BackendError(
            f"{members} cannot carry {kind} tensors",
            where=members.here,
            expected=f"tensors that the wire {members.wire!r} serves, or CUDA tensors by NCCL",
            found="a torch without NCCL, or no GPU" if kind == "cuda" else f"a {kind} tensor",
            fix="move the tensor to the CPU, or make a group of another backend for it",
        )
    store = PrefixStore(kind, members.store)
    place, size = members.rank, len(members.ranks)
    options: Any = torch_distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(members.ranks)
    options.group_name = members.name
    backend = torch_distributed.ProcessGroupNCCL(store, place, size, options)
    backend._set_sequence_number_for_group()
    group: Any = ProcessGroup(store, place, size)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device(kind), ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(f"{members.name}/{kind}")
    return group

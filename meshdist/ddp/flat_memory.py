"""Memory for buckets: shared among the group where its wire shares any, else ordinary."""

from __future__ import annotations

import torch

from ..collectives.shared_buffers import shared_empty
from ..collectives.verbs import all_reduce
from ..errors import BackendError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import ReduceOp

__all__ = ["flat_memory"]


def flat_memory(
    count: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup
) -> torch.Tensor:
    """Return uninitialised memory for ``count`` numbers; collective over ``group`` on the CPU.

    On the CPU it is memory that the group reduces where it lies, if its wire shares any. Where that
    is refused, for want of memory, every member has ordinary memory: verbs take either, but on
    memory that only some members share they would copy on all.

    All arguments are equal on all members, but for the index of the device.

    Cost: on the CPU one handshake of the members, and one all-reduce of a byte.
    """
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = shared_empty(count, dtype, group)
        is_refused = torch.tensor([0], dtype=torch.uint8)
    except BackendError:
        memory = torch.empty(0, dtype=dtype)
        is_refused = torch.tensor([1], dtype=torch.uint8)
    # A wire refuses on all members alike, but the store may be lost on one alone.
    all_reduce(is_refused, ReduceOp.MAX, group)
    return torch.empty(count, dtype=dtype) if is_refused.item() else memory

"""Allocate tensors in memory shared by a group, so that collectives copy less."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..backends.native_core import core
from ..backends.operation_args import OperationArgs
from ..backends.requests import BackendUnsupported
from ..checking.call_sites import never_nested
from ..error_text import first_line
from ..errors import ArgumentError, BackendError, KindError
from ..groups.process_group import GroupLike, ProcessGroup, resolve_group
from ..reduce_ops import ReduceOp
from .tensor_collectives import all_reduce
from .torch_private import untransformed

__all__ = ["shared_empty"]


@never_nested
@untransformed
def shared_empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, group: GroupLike = None
) -> torch.Tensor:
    """Return an uninitialized tensor in memory that every rank of the group maps; collective.

    If every rank passes such a tensor to a collective of the group, the collective skips copies. It
    behaves like any CPU tensor, and uses ordinary memory if the backend does not share memory.

    Args:
        shape: the same on every rank.
        dtype: the same on every rank; None uses torch's default.
        group: a ProcessGroup, a mesh, or None for the world.

    Returns:
        A contiguous CPU tensor, valid while any rank uses its memory, also after the group is
        closed.

    Cost: one store handshake; memory for all ranks' tensors is reserved immediately.

    Raises:
        KindError, ArgumentError: a wrong shape or dtype. MismatchError: they differ between ranks.
        BackendError: not enough memory (the group stays usable), or a lost store.

    Example:
        >>> import meshdist as md
        >>> import meshdist.distributed as dist
        >>> def program():
        ...     x = dist.shared_empty((2, 3)).fill_(1.0)
        ...     md.all_reduce(x)
        ...     return x.sum().item()
        >>> md.simulate(program, 2)
        [12.0, 12.0]
    """
    target = resolve_group(group)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise KindError(
            f"shared_empty: {dtype!r} is not a dtype", fix="pass for example dtype=torch.float32"
        )
    try:
        like = torch.empty(shape, dtype=dtype, device="meta")
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(
            f"shared_empty: {shape!r} is not a shape",
            found=first_line(error),
            fix="pass for example (2, 3)",
        ) from None
    device_group = target.open_device_group("cpu")
    count = torch.tensor([like.nbytes], device="cpu")
    counts = torch.empty(target.size(), dtype=torch.int64, device="cpu")
    # The addresses follow from the sizes, so the sizes must be equal first.
    prepared = OperationArgs("shared_empty", "all_gather", [count], [counts], like)
    prepared.shows_all = False
    device_group.run(prepared)
    if bool((counts != count).any()):
        raise device_group.disagree(device_group.recorder.sequence)
    try:
        memory = device_group.communicator.shared_bytes(like.nbytes, device_group.timeout)
    except BackendUnsupported as refusal:  # on every rank, which have freed the memory
        raise BackendError(
            f"shared_empty on {target.name} cannot allocate shared memory",
            where=f"rank {target.world.rank}",
            found=str(refusal),
            fix="request less, or use torch.empty: collectives accept ordinary tensors too",
        ) from None
    except BaseException as error:
        raise device_group.explained(error) from None
    return memory.view(dtype).view(like.shape)


def flat_memory(
    count: int, dtype: torch.dtype, device: torch.device, group: ProcessGroup
) -> torch.Tensor:
    """Return memory for ``count`` numbers, shared by the group on a CPU; collective."""
    # If the backend does not share memory, or a rank has lost the store, all ranks use ordinary
    # memory.
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    try:
        memory = shared_empty(count, dtype, group)
        is_rejected = torch.tensor([0], dtype=torch.uint8, device=device)
    except BackendError:
        memory = torch.empty(0, dtype=dtype, device=device)
        is_rejected = torch.tensor([1], dtype=torch.uint8, device=device)
    # A backend raises on every rank, but a single rank may lose the store. If only some ranks
    # shared memory, collectives would copy on every rank.
    all_reduce(is_rejected, ReduceOp.MAX, group)
    return torch.empty(count, dtype=dtype, device=device) if is_rejected.item() else memory


def copy_past_caches(
    target: torch.Tensor, source: torch.Tensor, scale: float | None = None
) -> None:
    """Copy ``source``, times ``scale`` if any, to dense memory of its shape, past the caches."""
    # A plain copy reads each cache line of the target before it writes it, although the data leave
    # the caches again before they are sent. A copy past the caches takes half the time. It needs
    # CPU tensors with the same strides; other tensors are copied plainly.
    have_equal_layouts = (
        type(source) is torch.Tensor
        and source.device.type == "cpu"
        and source.dtype is target.dtype
        and source.shape == target.shape
        and source.stride() == target.stride()
        and not (source.is_conj() or source.is_neg() or source._is_zerotensor())
    )
    if core is not None and have_equal_layouts and scale is None:
        core.stream(target.data_ptr(), source.data_ptr(), source.nbytes)
    elif core is not None and have_equal_layouts and source.dtype is torch.float32:
        core.stream_scaled(target.data_ptr(), source.data_ptr(), source.numel(), scale)
    elif scale is None:
        target.copy_(source)
        return
    else:
        torch.mul(source, scale, out=target)  # one pass
        return
    increment_version(target)

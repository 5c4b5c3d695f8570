"""Check arguments before anything is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ..arguments import get_integer
from ..arrays import as_tensor, describe, shape_text
from ..backends.operation_args import find_layout
from ..dtypes import dtype_name
from ..error_text import ranks_text, with_article
from ..errors import ArgumentError, DtypeError, GradientError, KindError, NotInGroupError
from ..groups.process_group import ProcessGroup
from ..reduce_ops import (
    Factor,
    ReduceKind,
    ReduceOp,
    find_factor_refusal,
    find_refusal,
    multiply,
)
from .torch_private import are_transforms_active, is_wrapped

SUM: ReduceKind = ReduceOp.SUM


def premultiplied(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return ``tensor`` times the factor of PREMUL_SUM, in its dtype and new memory."""
    product = tensor.detach().clone()
    multiply(product, factor)
    return product


def check_reducible(
    op: ReduceKind, tensor: torch.Tensor, operation: str, factor: Factor | None = None
) -> None:
    """Raise DtypeError if the tensor's dtype does not support ``op`` or its factor."""
    if op is SUM and factor is None:
        return
    dtype = tensor.dtype
    refusal = find_refusal(op, dtype) if factor is None else find_factor_refusal(factor, dtype)
    if refusal is not None:
        name = (op if factor is None else ReduceOp.PREMUL_SUM).name
        raise DtypeError(
            f"{operation} cannot reduce {dtype_name(dtype)} with {name}",
            where=f"argument of shape {shape_text(tensor.shape)}",
            expected=refusal,
            fix="convert the tensor, for example to torch.int32"
            if dtype is torch.bool
            else "use another reduction, or convert the tensor",
        )


def as_backend_tensor(
    x: Any, argument: str, operation: str, *, writable: bool, keeps_layout: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` as a tensor, and the plain tensor to send; or raise.

    Args:
        keeps_layout: send a tensor without gaps in its layout, not as a contiguous copy.
    """
    if forward_ad._current_level >= 0:
        _check_no_tangent(x, argument, operation)
    if are_transforms_active():
        _check_unwrapped(x, argument, operation)
    tensor = as_tensor(x, argument=argument, operation=operation, writable=writable)
    check_stored(tensor, argument, operation)
    if writable:
        _check_writable(tensor, argument, operation)
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_contiguous() or (keeps_layout and find_layout(plain) is not None):
        return tensor, plain
    return tensor, plain.contiguous()


def _check_unwrapped(x: Any, argument: str, operation: str) -> None:
    if isinstance(x, torch.Tensor) and is_wrapped(x):
        raise KindError(
            f"torch.func cannot transform {operation}, which works in place",
            where=f"argument {argument} of {operation}, {describe(x)}",
            expected="a tensor that no transform of torch.func has wrapped",
            fix="call a function of meshdist.lax that returns its result, for example "
            "psum(x, axis, mesh=mesh) instead of all_reduce",
        )


def _check_no_tangent(x: Any, argument: str, operation: str) -> None:
    is_seen = isinstance(x, torch.Tensor) and torch._C._is_fwd_grad_enabled()
    if is_seen and forward_ad.unpack_dual(x).tangent is not None:
        raise GradientError(
            f"{operation} has no forward derivative, and {argument} is a dual tensor",
            where=f"argument {argument} of {operation}, {describe(x)}",
            expected="a tensor without a tangent, or a collective that differentiates",
            fix="call a function of meshdist.lax instead, for example psum(x, axis, mesh=mesh) "
            "instead of all_reduce, or pass x.detach(), which has no tangent",
        )


def check_stored(tensor: torch.Tensor, argument: str, operation: str) -> None:
    if tensor.numel() and not tensor.is_meta and not tensor.data_ptr():
        raise ArgumentError(
            f"{operation} cannot use {argument} because it has no memory",
            where=f"argument {argument} of {operation}, {describe(tensor)}",
            found="a storage that was resized to 0 bytes, or zeros that are not stored",
            fix=f"pass a copy, {argument} = {argument}.clone(), or resize the storage to its "
            "former size first",
        )


def check_not_expanded(tensor: torch.Tensor, argument: str, operation: str) -> None:
    layout = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and step == 0 for size, step in layout):
        raise ArgumentError(
            f"{operation} cannot write into {argument} because its elements share memory",
            where=f"argument {argument} of {operation}, {describe(tensor)}",
            found=f"strides {tensor.stride()}: an expanded tensor",
            fix=f"pass a copy, {argument} = {argument}.clone(), and read the result from it",
        )


def _check_writable(tensor: torch.Tensor, argument: str, operation: str) -> None:
    """Raise if torch forbids writing into ``tensor``."""
    check_not_expanded(tensor, argument, operation)
    base = tensor._base
    if torch.is_grad_enabled() and base is not None and base.is_leaf and base.requires_grad:
        raise GradientError(
            f"{operation} cannot write into {argument} because it is a view of a leaf that "
            "requires a gradient",
            where=f"argument {argument} of {operation}, {describe(tensor)}",
            fix=f"call it under torch.no_grad(), or pass {argument}.detach()",
        )


def find_peer(
    group: ProcessGroup, global_rank: int | None, group_rank: int | None, operation: str, role: str
) -> int | None:
    """Return the group rank of a global or group rank; None for neither; or raise."""
    if group_rank is not None:
        if global_rank is not None:
            raise ArgumentError(
                f"{operation} got both {role} and group_{role}",
                found=f"{role}={global_rank}, group_{role}={group_rank}",
                fix=f"pass either {role} (a global rank) or group_{role} (a rank in the group)",
            )
        group_rank = _plain_int(group_rank, f"group_{role}", operation)
        if not 0 <= group_rank < group.size():
            raise NotInGroupError(
                f"group_{role}={group_rank} is outside the group",
                where=f"rank {group.world.rank}, {group.name}",
                expected=f"a group rank from 0 to {group.size() - 1}",
                fix=f"pass a rank of the group, or pass a global rank as {role}",
            )
        return group_rank
    if global_rank is None:
        return None
    global_rank = _plain_int(global_rank, role, operation)
    if global_rank not in group.ranks:
        raise NotInGroupError(
            f"{operation}: {role}={global_rank!r} is not a member of {group.name}",
            where=f"rank {group.world.rank}",
            expected=f"a global rank of the group: {ranks_text(group.ranks)}",
            fix=f"pass a global rank of the group, or pass a rank in the group as group_{role}",
        )
    return group.ranks.index(global_rank)


def _plain_int(rank: Any, argument: str, operation: str) -> int:
    if type(rank) is int:
        return rank
    return get_integer(rank, f"{operation}: {argument}", expected="a rank")


def check_flag(async_op: object, operation: str) -> None:
    """Raise KindError unless the type of ``async_op`` defines ``__bool__``."""
    if not hasattr(type(async_op), "__bool__"):
        raise KindError(
            f"{operation}: async_op must be True or False",
            found=f"{async_op!r}, {with_article(type(async_op).__name__)}",
            fix="pass async_op=True for a Work, or omit it",
        )


def get_peer(
    group: Any, global_rank: int | None, group_rank: int | None, operation: str, role: str
) -> int:
    """Return the group rank of a global or group rank; raise for neither."""
    if type(global_rank) is int and group_rank is None and global_rank in group.ranks:
        member: int = group.ranks.index(global_rank)
        return member  # the common case, decided fast
    peer = find_peer(group, global_rank, group_rank, operation, role)
    if peer is None:
        raise ArgumentError(
            f"{operation} needs {role} or group_{role}",
            fix=f"pass a global rank, {role}=0, or a rank in the group, group_{role}=0",
        )
    return peer


def get_root(
    group: Any, global_rank: int | None, group_rank: int | None, operation: str, role: str
) -> int:
    """Return the root's group rank (default: global rank 0); or raise."""
    if global_rank is None and group_rank is None:
        global_rank = 0
    return get_peer(group, global_rank, group_rank, operation, role)


def first_cuda_device(device_ids: object, operation: str) -> torch.device | None:
    """Return the first device of ``device_ids``; None if empty or without CUDA."""
    if not isinstance(device_ids, list) or not all(type(number) is int for number in device_ids):
        raise KindError(
            f"{operation}: device_ids must be a list of integers, not {device_ids!r}",
            fix="pass for example device_ids=[0]",
        )
    count = torch.cuda.device_count()  # without CUDA any numbers are valid, as in torch
    if count and any(not 0 <= number < count for number in device_ids):
        raise ArgumentError(
            f"{operation}: device_ids={device_ids} names a CUDA device that does not exist",
            expected=f"numbers below {count}, the number of CUDA devices of this host",
            fix="pass device_ids=[torch.cuda.current_device()], or omit it",
        )
    return torch.device("cuda", device_ids[0]) if device_ids and count else None

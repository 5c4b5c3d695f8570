"""Reduce the accumulated gradients of several backwards once: ``md.accumulate_gradients``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..annotations.axis_types import (
    KINDS,
    find_owner_axes,
    kinds_in,
    set_type,
    type_of,
    with_kinds,
)
from ..collectives.flat_sums import assign_buckets, items_of, reduce_together, sparse_psum
from ..collectives.tensor_collectives import all_reduce
from ..collectives.torch_private import hidden_from_modes
from ..error_text import with_article
from ..errors import ArgumentError, AxisTypeError, KindError
from ..groups.process_group import ProcessGroup, resolve_group
from ..lax.axes import AxisName, get_axes
from ..mesh.device_mesh import DeviceMesh
from ..reduce_ops import ReduceOp
from ..runtime.graph_breaks import untraced
from ..typed_mode.casts import BUCKET_BYTES
from ..typed_mode.type_errors import tensor_text, where
from .gradient_hooks import find_reducing_world

__all__ = ["accumulate_gradients"]

# Codes of gradients, exchanged before the sums: 0 for none, else the number of sparse dims.
_DENSE = 255


def accumulate_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    axis_name: AxisName,
    *,
    mesh: DeviceMesh | None = None,
) -> AbstractContextManager[None]:
    """Accumulate gradients of several backwards locally, and sum them over the axis once.

    Use it for microbatches. Inside the context the parameters are reduced over the axis; their
    ``.grad`` starts as None and is this rank's partial sum, which no optimizer inside ``md.typed``
    accepts. At the end, the sum over the ranks is added to earlier gradients, and types are
    restored. Each rank's loss, including terms of parameters alone, is the mean or the sum over all
    ranks: ``lax.pmean(loss, axis)``.

    If the body raises, both are restored and nothing is sent; other ranks must not reach the end of
    their context.

    Args:
        parameters: leaf tensors, in the same order on every rank; frozen leaves are ignored.
        axis_name, mesh: as for ``lax.psum``.

    Returns:
        A context manager; leaving it is collective over the axis. A parameter without a gradient on
        any rank keeps its earlier ``.grad``.

    Cost: one byte per parameter (whether it has a gradient), and one all-reduce per bucket of 25
        MiB. Sparse gradients are sent separately.

    Raises:
        KindError: ``parameters`` has an object that is not a tensor.
        ArgumentError: a parameter is not a leaf, or none requires a gradient.
        AxisTypeError: a parameter is not invariant over the axis, or DDP reduces it.
        AxisError, MeshError: as ``lax.psum``.

    Example:
        >>> import torch, meshdist as md
        >>> def program():
        ...     mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     layer = torch.nn.Linear(1, 1, bias=False)
        ...     batches = [torch.full((1, 1), 1.0 + md.get_rank() + step) for step in range(3)]
        ...     with md.typed(mesh), md.accumulate_gradients(layer.parameters(), "dp"):
        ...         for batch in batches:
        ...             loss = layer(md.annotate(batch, varying="dp")).sum()
        ...             md.lax.pmean(loss, "dp").backward()
        ...     return layer.weight.grad.item()          # 1.5 + 2.5 + 3.5
        >>> md.simulate(program, 2)
        [7.5, 7.5]
    """
    axes = get_axes("accumulate_gradients", axis_name, mesh)
    leaves = _leaves(parameters)
    _check(leaves, axes)
    return _accumulating(leaves, axes)


@contextmanager
@untraced
def _accumulating(leaves: Sequence[torch.Tensor], axes: DeviceMesh) -> Iterator[None]:
    group = resolve_group(axes)
    texts = [type_of(leaf) for leaf in leaves]
    previous = _set_aside(leaves, axes.axis_names)
    try:
        yield
        _add_up(leaves, previous, group)
    except BaseException:
        _put_back(leaves, previous)
        raise
    finally:
        for leaf, text in zip(leaves, texts, strict=True):
            set_type(leaf, text)


def _leaves(parameters: Any) -> list[torch.Tensor]:
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    has_several = isinstance(given, Iterable) and not isinstance(given, (str, dict))
    found: list[Any] = [given]
    if has_several:
        found = list({id(leaf): leaf for leaf in given}.values())
    for leaf in found:
        if not isinstance(leaf, torch.Tensor):
            raise KindError(
                "accumulate_gradients requires parameters",
                expected="tensors, such as those of model.parameters()",
                found=with_article(type(leaf).__name__) + (" among them" if has_several else ""),
                fix="pass model.parameters()",
            )
        if not leaf.is_leaf:
            raise ArgumentError(
                "accumulate_gradients requires leaves, which have a .grad",
                found=f"{tensor_text(leaf)}, computed by {type(leaf.grad_fn).__name__}",
                fix="pass the parameters that it was computed from",
            )
    leaves = [leaf for leaf in found if leaf.requires_grad]
    if not leaves:
        raise ArgumentError(
            "accumulate_gradients has no parameter that requires a gradient",
            found=f"{len(found)} tensor{'s' * (len(found) != 1)} without requires_grad",
            fix="call requires_grad_() on the parameters to train, and pass them",
        )
    return leaves


def _check(leaves: Sequence[torch.Tensor], axes: DeviceMesh) -> None:
    """Raise if a leaf is not invariant over ``axes``, or reduced by a DDP wrapper."""
    for index, leaf in enumerate(leaves):
        owned = find_owner_axes(leaf)
        for axis in axes.axis_names:
            kind = kinds_in(type_of(leaf)).get(axis, "I")
            if find_reducing_world(leaf) and (not owned or axis in owned):
                raise AxisTypeError(
                    f"accumulate_gradients over {axis!r} of a parameter that DDP reduces there",
                    where=where(axes, [axis]),
                    expected="gradients that are reduced once over each axis",
                    found=f"parameter {index}: {tensor_text(leaf)}",
                    fix="run all but the last microbatch in `with ddp.no_sync():`, or use the "
                    "module without DDP",
                )
            if kind != "I":
                raise AxisTypeError(
                    f"accumulate_gradients over {axis!r} of a parameter that is {KINDS[kind]} "
                    "there",
                    where=where(axes, [axis]),
                    expected=f"parameters that are invariant over {axis!r}",
                    found=f"parameter {index}: {tensor_text(leaf)}",
                    fix="do not pass this parameter",
                )


@hidden_from_modes
def _set_aside(leaves: Sequence[torch.Tensor], axes: Sequence[str]) -> list[torch.Tensor | None]:
    """Annotate leaves as reduced over ``axes``, clear ``.grad``, return earlier gradients."""
    previous = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
        set_type(leaf, with_kinds(type_of(leaf), dict.fromkeys(axes, "R")))
    return previous


@hidden_from_modes
def _put_back(leaves: Sequence[torch.Tensor], previous: Sequence[torch.Tensor | None]) -> None:
    for leaf, grad in zip(leaves, previous, strict=True):
        leaf.grad = grad


@hidden_from_modes
@torch.no_grad()
def _add_up(
    leaves: Sequence[torch.Tensor], previous: Sequence[torch.Tensor | None], group: ProcessGroup
) -> None:
    """Set ``.grad`` to ``previous`` plus the sum of ``.grad`` over ``group``."""
    found = [leaf.grad for leaf in leaves]
    sums = _sums(leaves, found, group)
    for leaf, old, new in zip(leaves, previous, sums, strict=True):
        if old is None or new is None:
            leaf.grad = new if old is None else old
        else:  # in place for dense gradients, as autograd does
            leaf.grad = old.add_(new) if old.layout is torch.strided else new + old


def _sums(
    leaves: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], group: ProcessGroup
) -> list[torch.Tensor | None]:
    """Return each leaf's sum of all ranks' gradients; None if no rank has a gradient."""
    own = [0] * len(leaves)
    for index, grad in enumerate(grads):
        if grad is not None:
            own[index] = grad.sparse_dim() if grad.layout is torch.sparse_coo else _DENSE
    layouts = torch.tensor(own, dtype=torch.uint8, device=leaves[0].device)
    all_reduce(layouts, ReduceOp.MAX, group)
    sums: list[torch.Tensor | None] = [None] * len(leaves)
    dense = []
    for index, layout in enumerate(layouts.tolist()):
        leaf, grad = leaves[index], grads[index]
        if layout == _DENSE:
            dense.append(index)
        elif layout:
            if grad is None:
                grad = torch.sparse_coo_tensor(
                    leaf.new_empty((layout, 0), dtype=torch.int64),
                    leaf.new_empty((0, *leaf.shape[layout:])),
                    leaf.shape,
                    check_invariants=False,
                )
            sums[index] = sparse_psum(grad, group)
    items = items_of(leaves)
    for bucket in assign_buckets(items, dense, (BUCKET_BYTES,)):
        members = [leaves[index] for index in bucket]
        parts = [
            torch.zeros_like(leaf) if grad is None else grad.to_dense()
            for leaf, grad in ((leaves[index], grads[index]) for index in bucket)
        ]
        found = reduce_together(parts, group, likes=members)
        for index, total in zip(bucket, found, strict=True):
            sums[index] = total.data  # with a separate version counter
    return sums

"""Provide gradient buckets for communication hooks, and hooks that do not compress.

A hook uses the group in its state. In torch None means torch's default group, in meshdist the
wrapper's group. The state stores that group while the hook runs, so that torch's functions find it.
A pickled state has no group: the wrapper that registers it next provides it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ...arrays import shape_text
from ...collectives.flat_sums import sum_sparse
from ...collectives.tensor_collectives import all_reduce
from ...dtypes import dtype_name
from ...errors import ShapeError
from ...groups.process_group import ProcessGroup, resolve_group
from ...reduce_ops import ReduceKind, ReduceOp

__all__ = ["GradBucket", "allreduce_hook", "noop_hook", "post_localSGD_hook"]


class GradBucket:
    """Gradients sent together, which a communication hook averages.

    In each backward a hook gets each bucket once, in the same order on all ranks. The gradients are
    this rank's, undivided.

    Args:
        buffer: the gradients as one flat tensor; or a single sparse gradient.
        parameters: the parameters of these gradients.
        views: each parameter's gradient in ``buffer``, or a tensor of its shape and strides.
        index: the bucket's index in sending order, from 0.
        is_last: whether it is the last bucket of its backward.
        group: the group over which the hook averages.

    Example:
        >>> import meshdist as md, torch
        >>> def average(state, bucket):
        ...     group = bucket.group()
        ...     work = md.all_reduce(bucket.buffer(), md.ReduceOp.AVG, group, async_op=True)
        ...     return work.get_future().then(lambda done: done.value()[0])
        >>> def program():
        ...     model = md.DDP(torch.nn.Linear(1, 1, bias=False))
        ...     model.register_comm_hook(None, average)
        ...     model(torch.tensor([[1.0 + md.get_rank()]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> md.simulate(program, 4)
        [2.5, 2.5, 2.5, 2.5]
    """

    __slots__ = ("_buffer", "_group", "_index", "_is_last", "_parameters", "_views")

    def __init__(
        self,
        buffer: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        index: int,
        is_last: bool,
        group: ProcessGroup,
    ) -> None:
        self._buffer = buffer
        self._parameters = list(parameters)
        self._views = views
        self._index = index
        self._is_last = is_last
        self._group = group

    def __repr__(self) -> str:
        kind = "sparse " if self._buffer.is_sparse else ""
        numbers = f"{self._buffer.numel():,} {dtype_name(self._buffer.dtype)}"
        return f"<GradBucket {self._index}: {len(self._parameters)} gradients, {kind}{numbers}>"

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one flat tensor, or one sparse gradient.

        Values that you write to it appear in ``gradients()``.
        """
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the tensor that ``buffer()`` and ``gradients()`` return; any dtype."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Return each parameter's gradient, a view of ``buffer()`` in the parameter's shape.

        Raises:
            ShapeError: the tensor passed to ``set_buffer`` has a different number of elements.
        """
        buffer = self._buffer
        if buffer.is_sparse:
            return [buffer]
        counts = [view.numel() for view in self._views]
        if buffer.numel() != sum(counts):
            raise ShapeError(
                f"the buffer of bucket {self._index} does not match its gradients",
                expected=f"{sum(counts)} elements",
                found=f"shape {shape_text(buffer.shape)}, passed to set_buffer()",
                fix=f"pass a tensor of {sum(counts)} elements to set_buffer()",
            )
        parts = zip(buffer.view(-1).split(counts), self._views, strict=True)
        return [part.as_strided(view.shape, view.stride()) for part, view in parts]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of ``gradients()``."""
        return list(self._parameters)

    def index(self) -> int:
        """Return the bucket's index in sending order, from 0; equal on all ranks."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last bucket of its backward."""
        return self._is_last

    def group(self) -> ProcessGroup:
        """Return the group over which the wrapper averages; not in torch's buckets."""
        return self._group


_GROUPS = ("process_group", "subgroup")


def group_for(given: Any, bucket: GradBucket) -> ProcessGroup:
    """Return the group of ``given``, a group or mesh; the wrapper's for None."""
    return bucket.group() if given is None else resolve_group(given)


def is_mesh(given: object) -> bool:
    return hasattr(given, "open_group")


@contextmanager
def group_in_state(state: object, group: ProcessGroup) -> Iterator[None]:
    """Set the group of a torch state: ``group`` for None, a mesh's for a mesh; restore it after."""
    given = getattr(state, "process_group", None)
    if not isinstance(state, (PowerSGDState, PostLocalSGDState)) or not (
        given is None or is_mesh(given)
    ):
        yield
        return
    state.process_group = group if given is None else resolve_group(given)
    try:
        yield
    finally:
        state.process_group = given


def restored(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a state of torch's class ``kind`` with pickled fields; its groups are None."""
    state = kind.__new__(kind)
    for name in kind.__slots__:
        setattr(state, name, fields.get(name))
    return state


def _reduce_state(state: Any) -> tuple[Any, ...]:
    fields = {name: getattr(state, name) for name in state.__slots__ if name not in _GROUPS}
    return restored, (type(state), fields)


# PowerSGDState needs torch's default group to be unpickled; PostLocalSGDState cannot pickle groups.
copyreg.pickle(PowerSGDState, _reduce_state)
copyreg.pickle(PostLocalSGDState, _reduce_state)


def allreduce_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average with one all-reduce, as the wrapper does without a hook.

    Args:
        process_group: a group or mesh; None for the wrapper's.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory.

    Cost: one all-reduce of the bucket.
    """
    return averaged(bucket.buffer(), group_for(process_group, bucket))


def noop_hook(_: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave gradients local, to measure a step without communication.

    Args:
        bucket: the gradients.

    Returns:
        A Future of the gradients.
    """
    return done_with(bucket.buffer())


def averaged(tensor: torch.Tensor, group: ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Start to average ``tensor`` in place over ``group``; return a Future of it."""
    return reduced(tensor, ReduceOp.AVG, group).then(lambda done: done.value()[0])


def reduced(
    tensor: torch.Tensor, op: ReduceKind, group: ProcessGroup
) -> torch.futures.Future[list[torch.Tensor]]:
    """Start to reduce ``tensor`` in place (sparse: also wait); return a Future of ``[tensor]``."""
    if not tensor.is_sparse:
        return all_reduce(tensor, op, group, async_op=True).get_future()  # type: ignore[union-attr]
    sum_sparse(group, tensor, ReduceOp.SUM)  # synchronous
    if op == ReduceOp.AVG:
        tensor.div_(group.size())
    return done_with([tensor])


def done_with(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def post_localSGD_hook(
    state: PostLocalSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average over the group for some steps, and over ``state.subgroup`` afterwards.

    Args:
        state: torch's. ``process_group`` (None: the wrapper's) and ``subgroup`` (None: its ranks on
            this host) are groups or meshes. If ``post_local_gradient_allreduce`` is False,
            gradients stay local after these steps.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory.

    Cost: one all-reduce of the bucket, or nothing.
    """
    group = group_for(state.process_group, bucket)
    buffer = bucket.buffer()
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return averaged(buffer, group)
    if not state.post_local_gradient_allreduce:
        return done_with(buffer)
    if state.subgroup is None:
        state.subgroup = _on_this_host(group)
    return averaged(buffer, resolve_group(state.subgroup))


def _on_this_host(group: ProcessGroup) -> ProcessGroup:
    """Return a new group of the ranks on this host; ``group`` if it spans only this host."""
    # All ranks of a host call this at the same step.
    world = group.world
    if not world.spans_hosts(group.ranks):
        return group
    here = world.hosts[world.rank]
    ranks = tuple(rank for rank in group.ranks if world.hosts[rank] == here)
    name = f"the ranks of {group.name} on one host"
    return ProcessGroup(world, ranks, name=name, timeout=group.own_timeout)

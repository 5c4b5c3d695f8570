"""The argument of a communication hook: gradients of several parameters, as one flat tensor.

A hook works on the group that its state names. Torch's states say None for torch's world. Here that
means the group of the wrapper: it stands in the state while the hook runs, so that torch's own
functions find it there too. A state that is pickled names no group: it belongs to the wrapper that
it is registered with next.
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
from ...dtypes import dtype_name
from ...errors import ShapeError
from ...groups.process_group import ProcessGroup, resolve_group

__all__ = [
    "GradBucket",
    "PostLocalSGDState",
    "PowerSGDState",
    "group_for",
    "group_in_state",
    "is_mesh",
]


class GradBucket:
    """Gradients that travel together; a communication hook averages them.

    A hook gets one of each backward, bucket and rank. They come in one order on all ranks. The
    gradients are this rank's own: nothing has been divided.

    Args:
        buffer: the gradients, one after the other; or one sparse gradient.
        parameters: whose gradients they are.
        views: for each parameter its gradient in ``buffer``, or a tensor of its shape and strides.
        index: its place in the order of the buckets, from 0.
        is_last: whether it is the last one of its backward.
        group: over which the hook is to average.

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
        """The gradients, one after the other, as one flat tensor; a sparse gradient as it is.

        What is written there is seen in ``gradients()``.
        """
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Let ``buffer()`` and ``gradients()`` give ``tensor``, of any dtype, from now on."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The gradient of each parameter, as a view of ``buffer()`` with the parameter's shape.

        Raises:
            ShapeError: ``set_buffer`` was given a tensor of another number of elements.
        """
        buffer = self._buffer
        if buffer.is_sparse:
            return [buffer]
        counts = [view.numel() for view in self._views]
        if buffer.numel() != sum(counts):
            raise ShapeError(
                f"the buffer of bucket {self._index} does not hold its gradients",
                expected=f"{sum(counts)} elements",
                found=f"shape {shape_text(buffer.shape)}, given to set_buffer",
                fix="set a tensor of as many elements, or keep it to yourself",
            )
        parts = zip(buffer.view(-1).split(counts), self._views, strict=True)
        return [part.as_strided(view.shape, view.stride()) for part, view in parts]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of ``gradients()``."""
        return list(self._parameters)

    def index(self) -> int:
        """Its place in the order of the buckets, from 0; equal on all ranks."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of its backward."""
        return self._is_last

    def group(self) -> ProcessGroup:
        """The group over which the wrapper averages; torch's buckets do not have it."""
        return self._group


_GROUPS = ("process_group", "subgroup")


def group_for(given: Any, bucket: GradBucket) -> ProcessGroup:
    """The group that a hook's state names: a group or a mesh; None is that of the wrapper."""
    return bucket.group() if given is None else resolve_group(given)


def is_mesh(given: object) -> bool:
    """Whether this is a mesh of ours, and so stands for a group."""
    return hasattr(given, "open_group")


@contextmanager
def group_in_state(state: object, group: ProcessGroup) -> Iterator[None]:
    """In this context one of torch's states names a group, also where it says None, or a mesh."""
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
    """Make a state of torch's again of what was pickled of it."""
    state = kind.__new__(kind)
    for name in kind.__slots__:
        setattr(state, name, fields.get(name))
    return state


def _reduced(state: Any) -> tuple[Any, ...]:
    fields = {name: getattr(state, name) for name in state.__slots__ if name not in _GROUPS}
    return restored, (type(state), fields)


# PowerSGDState's own way asks for torch's world when it is loaded; the other has none for groups.
copyreg.pickle(PowerSGDState, _reduced)
copyreg.pickle(PostLocalSGDState, _reduced)

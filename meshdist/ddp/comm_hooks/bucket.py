"""The argument of a communication hook: gradients of several parameters, as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...arrays import shape_text
from ...dtypes import dtype_name
from ...errors import ShapeError
from ...groups.process_group import ProcessGroup

__all__ = ["GradBucket"]


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

"""CUDA tensors over an MPI that knows host memory alone: by way of pinned copies."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from ..reduce_ops import ReduceKind
from .base import Communicator, Pending
from .pending import Chain, Deferred

__all__ = ["StagedCommunicator"]


class StagedCommunicator(Communicator):
    """The verbs of ``host``, for tensors that lie on a device.

    Args:
        host: carries tensors in host memory.
    """

    wants_senders = True

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.wire, host.rank, host.size)
        self._host = host
        self._waiting = None if host.waiting is host else StagedCommunicator(host.waiting)

    @property
    def waiting(self) -> Communicator:
        return self._waiting or self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        (copy,) = _down([tensor])
        started = self._host.all_reduce(copy, op, timeout)
        return Chain([started], lambda: _up([tensor], [copy]))

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        (copy,) = _down([tensor])
        started = self._host.reduce(copy, op, root, timeout)
        return Chain([started], lambda: _up([tensor], [copy]) if self.rank == root else None)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        (result,), (copy,) = _places([output]), _down([tensor])
        started = self._host.reduce_scatter(result, copy, op, timeout)
        return Chain([started], lambda: _up([output], [result]))

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        (result,) = _places([output])
        started = self._host.reduce_scatter_list(result, _down(inputs), op, timeout)
        return Chain([started], lambda: _up([output], [result]))

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        (copy,) = _down([tensor])
        started = self._host.broadcast(copy, root, timeout)
        return Chain([started], lambda: _up([tensor], [copy]) if self.rank != root else None)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        (result,), (copy,) = _places([output]), _down([tensor])
        started = self._host.all_gather(result, copy, timeout)
        return Chain([started], lambda: _up([output], [result]))

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        results, (copy,) = _places(outputs), _down([tensor])
        started = self._host.all_gather_list(results, copy, timeout)
        return Chain([started], lambda: _up(outputs, results))

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        results, (copy,) = _places(outputs), _down([tensor])
        started = self._host.gather(results, copy, root, timeout)
        return Chain([started], lambda: _up(outputs, results))

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        (result,) = _places([tensor])
        started = self._host.scatter(result, _down(inputs), root, timeout)
        return Chain([started], lambda: _up([tensor], [result]))

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        results = _places(outputs)
        started = self._host.all_to_all(results, _down(inputs), timeout)
        return Chain([started], lambda: _up(outputs, results))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        (result,), (copy,) = _places([output]), _down([tensor])
        sizes = output_sizes, input_sizes
        started = self._host.all_to_all_single(result, copy, *sizes, timeout)
        return Chain([started], lambda: _up([output], [result]))

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self._host.barrier(timeout)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        (copy,) = _down([tensor])
        return self._host.send(copy, peer, tag, timeout)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        (result,) = _places([tensor])
        received = self._host.recv(result, peer, tag, timeout)
        return Chain([received], lambda: _up([tensor], [result]))

    def has_sent_itself(self, tag: int) -> bool:
        return self._host.has_sent_itself(tag)

    def batch(self) -> AbstractContextManager[None]:
        return self._host.batch()

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        self._host.finish(pending, timeout)

    def is_finished(self, pending: Pending) -> bool:
        return self._host.is_finished(pending)

    def source(self, pending: Pending) -> int:
        if type(pending) is Deferred:
            pending = pending.get_started()
        return self._host.source(pending.pendings[0] if type(pending) is Chain else pending)

    def abort(self) -> None:
        self._host.abort()

    def leave(self) -> None:
        self._host.leave()

    def close(self) -> None:
        self._host.close()


def _places(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Host memory for each, pinned where there is a GPU to copy from it."""
    is_pinned = torch.cuda.is_available()
    return [torch.empty(x.shape, dtype=x.dtype, pin_memory=is_pinned) for x in tensors]


def _down(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory, complete."""
    copies = _places(tensors)
    _copy(copies, tensors)
    _wait_for(tensors)
    return copies


def _up(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy back; complete, since the copies' memory is used again."""
    _copy(tensors, copies)
    _wait_for(tensors)


def _copy(outputs: Sequence[torch.Tensor], data: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for output, x in zip(outputs, data, strict=True):
            output.copy_(x, non_blocking=True)


def _wait_for(tensors: Sequence[torch.Tensor]) -> None:
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()

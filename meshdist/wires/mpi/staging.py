"""CUDA tensors over an MPI that knows host memory alone: by way of pinned copies."""

from __future__ import annotations

from typing import Any

import torch

from ...reduce_ops import ReduceKind
from ..communicator import Communicator, handed_to
from ..operations import Chain, Operation, Terms

__all__ = ["StagedCommunicator"]


def _staged(verb: str) -> Any:
    """A verb that writes its first argument and reads its second, by way of host memory."""

    def start(self: StagedCommunicator, output: Any, data: Any, *more: Any) -> Operation:
        result, copy = _places(output), _down(data)
        started = getattr(self.host, verb)(result, copy, *more)
        return Chain([started], lambda: _copy(output, result))

    return start


class StagedCommunicator(Communicator):
    """The verbs of ``host``, for tensors that lie on a device.

    Args:
        host: carries tensors in host memory.
    """

    wants_senders = True
    holds_callers = True

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.wire, host.rank, host.size)
        self.host = host

    all_gather = _staged("all_gather")
    all_gather_list = _staged("all_gather_list")
    all_to_all = _staged("all_to_all")
    all_to_all_single = _staged("all_to_all_single")
    gather = _staged("gather")
    reduce_scatter = _staged("reduce_scatter")
    reduce_scatter_list = _staged("reduce_scatter_list")
    scatter = _staged("scatter")

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, terms: Terms) -> Operation:
        copy = _down(tensor)
        return Chain([self.host.all_reduce(copy, op, terms)], lambda: _copy(tensor, copy))

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int, terms: Terms) -> Operation:
        copy = _down(tensor)
        started = self.host.reduce(copy, op, root, terms)
        return Chain([started], (lambda: _copy(tensor, copy)) if self.rank == root else None)

    def broadcast(self, tensor: torch.Tensor, root: int, terms: Terms) -> Operation:
        copy = _down(tensor)
        started = self.host.broadcast(copy, root, terms)
        return Chain([started], (lambda: _copy(tensor, copy)) if self.rank != root else None)

    def barrier(self, terms: Terms, device: torch.device | None = None) -> Operation:
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return self.host.barrier(terms)

    def send(self, tensor: torch.Tensor, peer: int, tag: int, terms: Terms) -> Operation:
        return self.host.send(_down(tensor), peer, tag, terms)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, terms: Terms) -> Operation:
        result = _places(tensor)
        received = self.host.recv(result, peer, tag, terms)
        return Chain([received], lambda: _copy(tensor, result))

    has_sent_itself = handed_to("host", "has_sent_itself")
    batch = handed_to("host", "batch")
    wait_for = handed_to("host", "wait_for")
    watch = handed_to("host", "watch")
    abort = handed_to("host", "abort")
    leave = handed_to("host", "leave")
    close = handed_to("host", "close")


def _places(x: Any) -> Any:
    """Host memory for a tensor, or each of several, pinned where there is a GPU to copy from it."""
    if isinstance(x, torch.Tensor):
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=torch.cuda.is_available())
    return [_places(one) for one in x]


def _down(x: Any) -> Any:
    """Copies in host memory, complete."""
    copies = _places(x)
    _copy(copies, x)
    return copies


def _copy(output: Any, data: Any) -> None:
    """Copy one tensor, or each of several; complete, since the copies' memory is used again."""
    outputs, sources = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (output, data))
    with torch.inference_mode():  # they may be parameters, or inference tensors
        for one, source in zip(outputs, sources, strict=True):
            one.copy_(source, non_blocking=True)
    for device in {x.device for x in (*outputs, *sources) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()

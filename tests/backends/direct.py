"""A communicator's collectives called as a channel calls them, without a group around."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from meshdist.backends.operation_args import OperationArgs, Sizes, Tensors
from meshdist.backends.requests import Request
from meshdist.checking.calls import GroupFacts, get_call, get_message
from meshdist.reduce_ops import ReduceKind
from tests.inner import Recorder, is_between

is_between[__file__] = True  # the line that calls a collective is the test's


@dataclass
class Direct:
    """Starts calls of plain tensors on a backend.

    Args:
        backend: the communicator, or a stand-in that has its ``start``.
        timeout, waits, collective, sequence: of the calls.
    """

    backend: Any
    timeout: timedelta = timedelta(seconds=20)
    waits: bool = False
    operation: str = ""
    sequence: int = 0

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind) -> Request:
        return self._start("all_reduce", both := [tensor], both, tensor, op=op)

    def all_reduce_list(self, tensors: Tensors, op: ReduceKind) -> Request:
        return self._start("all_reduce_list", tensors, tensors, tensors, op=op)

    def reduce(self, tensor: torch.Tensor, op: ReduceKind, root: int) -> Request:
        return self._start("reduce", both := [tensor], both, tensor, op=op, root=root)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Request:
        return self._start("broadcast", both := [tensor], both, tensor, root=root)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Request:
        return self._start("all_gather", [tensor], [output], tensor)

    def all_gather_list(self, outputs: Tensors, tensor: torch.Tensor) -> Request:
        sizes = [tensor.numel()] * len(outputs), [output.numel() for output in outputs]
        return self._start("all_gather_list", [tensor], outputs, tensor, sizes=sizes)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Request:
        return self._start("gather", [tensor], outputs, tensor, root=root)

    def scatter(self, tensor: torch.Tensor, inputs: Tensors, root: int) -> Request:
        return self._start("scatter", inputs, [tensor], tensor, root=root)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind) -> Request:
        return self._start("reduce_scatter", [tensor], [output], tensor, op=op)

    def reduce_scatter_list(self, output: torch.Tensor, inputs: Tensors, op: ReduceKind) -> Request:
        return self._start("reduce_scatter_list", inputs, [output], output, op=op)

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Request:
        sizes = [part.numel() for part in inputs], [output.numel() for output in outputs]
        return self._start("all_to_all", inputs, outputs, inputs, sizes=sizes)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, takes: Sizes, gives: Sizes
    ) -> Request:
        return self._start("all_to_all_single", [tensor], [output], tensor, sizes=(gives, takes))

    def barrier(self, device: torch.device | None = None) -> Request:
        return self._start("barrier", (), (), on=device)

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Request:
        return self._start("send", [tensor], (), tensor, root=peer, tag=tag)

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> Request:
        return self._start("recv", (), [tensor], tensor, root=peer, tag=tag)

    def _start(
        self,
        way: str,
        inputs: Tensors,
        outputs: Tensors,
        noted: Any = None,
        on: torch.device | None = None,
        **more: Any,
    ) -> Request:
        prepared = OperationArgs(self.operation or way, way, inputs, outputs, noted, **more)
        prepared.device, prepared.is_message = on, way in ("send", "recv")
        prepared.timeout, prepared.waits = self.timeout, self.waits
        recorder = prepared.recorder = Recorder()
        facts = GroupFacts("direct", tuple(range(self.backend.size)), self.backend.rank)
        if prepared.is_message:
            recorder.note(
                facts, get_message(prepared.operation, noted, prepared.root, prepared.tag)
            )
        else:
            call = get_call(prepared.operation, noted, prepared.op, prepared.root)
            recorder.note(facts, call, prepared.sizes or ())
        prepared.sequence, prepared.number = self.sequence, recorder.num_notes
        return self.backend.start(prepared)  # type: ignore[no-any-return]

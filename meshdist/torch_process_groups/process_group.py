"""The verbs of torch's process groups over one of our wires.

``VerbMethods`` has the methods, in the forms in which torch's front end, its C++ and its older
versions call them; what each verb does is described in ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from ..arrays import apart, apart_from_all
from ..collectives.sparse_sums import sum_sparse
from ..errors import ShapeError
from ..groups.verb_methods import Asked, VerbMethods, read_options
from .group import GroupOfWire
from .requests import Request, check_some, find_tensor
from .works import TorchWork

__all__ = ["WireGroup"]

Tensors = Sequence[torch.Tensor]


def _for_its_wire(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` for tensors of the wire; others go on to torch's own group, as they were given."""

    @wraps(method)
    def called(self: WireGroup, *given: Any, **named: Any) -> Any:
        other = self.other_for(find_tensor((*given, *named.values())))
        if other is not None:
            return getattr(other, method.__name__)(*given, **named)
        return method(self, *given, **named)

    return called


class WireGroup(GroupOfWire):
    """One group of torch's over one wire. Making one is collective over its members."""

    # -- reducing --------------------------------------------------------------------------------

    def _all_reduce(self, request: Request, tensor: torch.Tensor, op: Any) -> TorchWork:
        kind = request.take_op([tensor])
        if tensor.layout is not torch.strided:
            sum_sparse(self, tensor, kind)
            return self._handed_out(TorchWork([], [tensor], self._completer))
        buffer = request.scaled(request.write(tensor), in_place=True)
        pairs = [([buffer], [buffer])]
        return self._run(request, buffer, [tensor], "all_reduce", pairs, op=kind)

    def _all_reduce_coalesced(self, request: Request, tensors: Tensors, op: Any) -> TorchWork:
        check_some("all_reduce_coalesced", tensors)
        buffers = [request.write(tensor) for tensor in tensors]
        kind = request.take_op(buffers)
        for buffer in buffers:
            request.scaled(buffer, in_place=True)
        pairs = [(buffers, buffers)]
        return self._run(request, buffers, list(tensors), "all_reduce_list", pairs, op=kind)

    def _reduce(self, request: Request, tensor: torch.Tensor, **asked: Any) -> TorchWork:
        buffer = request.write(tensor) if request.is_root else request.read(tensor)
        kind = request.take_op([buffer])
        buffer = request.scaled(buffer, in_place=request.is_root)
        return self._run(request, buffer, [tensor], "reduce", [([buffer], [buffer])], op=kind)

    def _reduce_scatter_tensor(
        self, request: Request, output: torch.Tensor, whole: torch.Tensor, op: Any
    ) -> TorchWork:
        return self._reduce_scatter_tensors(request, [output], [whole])

    def _reduce_scatter_tensors(
        self, request: Request, outputs: Tensors, inputs: Tensors
    ) -> TorchWork:
        check_some("reduce_scatter_tensor_coalesced", outputs)
        kind = request.take_op(inputs)
        pairs = []
        for output, whole in zip(outputs, inputs, strict=True):
            request.check_blocks(whole, output)
            pairs.append(request.read_and_written(output, whole))
        noted = [sent for (sent,), _ in pairs]
        return self._run(request, noted, list(outputs), "reduce_scatter", pairs, op=kind)

    def _reduce_scatter(
        self, request: Request, output: torch.Tensor, parts: Tensors, op: Any
    ) -> TorchWork:
        request.check_list(parts, output)
        request.check_count(output, parts[self.rank()])
        taken = request.write(output)
        kind = request.take_op([taken])
        sent = [apart(request.scaled(request.read(part)), taken) for part in parts]
        return self._run(
            request,
            sent,
            [output],
            "reduce_scatter_list",
            [(sent, [taken])],
            op=kind,
            sizes=(_counts(sent), [taken.numel()] * self.size()),
        )

    # -- moving ----------------------------------------------------------------------------------

    def _broadcast(self, request: Request, tensor: torch.Tensor, **asked: Any) -> TorchWork:
        buffer = request.read(tensor) if request.is_root else request.write(tensor)
        return self._run(request, buffer, [tensor], "broadcast", [([buffer], [buffer])])

    def _all_gather_into_tensor(
        self, request: Request, output: torch.Tensor, tensor: torch.Tensor
    ) -> TorchWork:
        return self._all_gather_into_tensors(request, [output], [tensor])

    def _all_gather_into_tensors(
        self, request: Request, outputs: Tensors, inputs: Tensors
    ) -> TorchWork:
        check_some("all_gather_into_tensor_coalesced", outputs)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            request.check_blocks(output, tensor)
            pairs.append(request.read_and_written(output, tensor))
        noted = [sent for (sent,), _ in pairs]
        return self._run(request, noted, list(outputs), "all_gather", pairs)

    def _all_gather(self, request: Request, into: Tensors, tensor: torch.Tensor) -> TorchWork:
        return self._gather_lists(request, [into], [tensor], [into])

    def _all_gather_coalesced(
        self, request: Request, output_lists: Any, inputs: Tensors
    ) -> TorchWork:
        check_some("all_gather_coalesced", inputs)
        request.check_list(output_lists)
        return self._gather_lists(
            request, list(zip(*output_lists, strict=True)), inputs, output_lists
        )

    def _gather_lists(
        self, request: Request, lists: Sequence[Tensors], inputs: Tensors, result: Any
    ) -> TorchWork:
        """Write member j's tensor into the j-th of its list, for each tensor and its list."""
        pairs = []
        for into, tensor in zip(lists, inputs, strict=True):
            request.check_list(into, tensor)
            request.check_count(into[self.rank()], tensor)
            sent = request.read(tensor)
            taken = [request.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
            pairs.append(([sent], taken))
        mine = sum(sent.numel() for (sent,), _ in pairs)
        takes = [sum(taken[j].numel() for _, taken in pairs) for j in range(self.size())]
        return self._run(
            request,
            [sent for (sent,), _ in pairs],
            [list(into) for into in result],
            "all_gather_list",
            pairs,
            sizes=([mine] * self.size(), takes),
        )

    def _gather(
        self, request: Request, tensor: torch.Tensor, given: Tensors | None, **asked: Any
    ) -> TorchWork:
        sent = request.read(tensor)
        into: Tensors = ()
        taken: list[torch.Tensor] = []
        if request.is_root:
            into = given or ()
            request.check_list(into, tensor)
            for output in into:
                request.check_count(output, tensor)
            taken = [request.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
        result = [list(into)] if taken else []
        return self._run(request, sent, result, "gather", [([sent], taken)])

    def _scatter(
        self, request: Request, output: torch.Tensor, given: Tensors | None, **asked: Any
    ) -> TorchWork:
        taken = request.write(output)
        sent: list[torch.Tensor] = []
        if request.is_root:
            parts = given or ()
            request.check_list(parts, output)
            for part in parts:
                request.check_count(output, part)
            sent = [apart(request.read(part), taken) for part in parts]
        return self._run(request, taken, [output], "scatter", [(sent, [taken])])

    def _all_to_all(
        self, request: Request, output_tensors: Tensors, input_tensors: Tensors
    ) -> TorchWork:
        request.check_list(output_tensors)
        request.check_list(input_tensors, *output_tensors)
        request.check_count(output_tensors[self.rank()], input_tensors[self.rank()])
        taken = [request.write(output) for output in output_tensors]
        sent = apart_from_all([request.read(part) for part in input_tensors], taken)
        sizes = _counts(sent), _counts(taken)
        result = list(output_tensors)
        return self._run(request, sent, result, "all_to_all", [(sent, taken)], sizes=sizes)

    def _all_to_all_single(
        self,
        request: Request,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
    ) -> TorchWork:
        request.check_alike([output, input])
        takes = request.split_counts(output, output_split_sizes or (), "output")
        gives = request.split_counts(input, input_split_sizes or (), "input")
        if takes[self.rank()] != gives[self.rank()]:
            raise ShapeError(
                "all_to_all_single: this member keeps another number of elements than it has",
                where=self._facts.here,
                found=f"{gives[self.rank()]} of the input for {takes[self.rank()]} of the output",
            )
        pair, sizes = request.read_and_written(output, input), (gives, takes)
        return self._run(request, pair[0][0], [output], "all_to_all_single", [pair], sizes=sizes)

    def _barrier(self, request: Request, **asked: Any) -> TorchWork:
        return self._run(request, None, [], "barrier", [((), ())])

    # -- messages --------------------------------------------------------------------------------

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> TorchWork:
        return self._message("send", tensor, peer, tag)

    def _recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> TorchWork:
        return self._message("recv", tensor, peer, tag)

    def _message(self, verb: str, tensor: torch.Tensor, peer: int | None, tag: int) -> TorchWork:
        request = self._request(verb, Asked())
        if peer is not None:
            request.check_place(peer)
        request.check_tag(tag)
        request.message = peer, tag
        buffer = request.read(tensor) if verb == "send" else request.write(tensor)
        pair: Any = ([buffer], ()) if verb == "send" else ((), [buffer])
        return self._run(request, buffer, [tensor], verb, [pair])

    # -- several pairs at once -------------------------------------------------------------------

    @_for_its_wire
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``reduce_scatter_single`` for each pair."""
        request = self._request("reduce_scatter_tensor", read_options((), opts=opts))
        return self._reduce_scatter_tensors(request, outputs, inputs)

    @_for_its_wire
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``all_gather_single`` for each pair."""
        request = self._request("all_gather_into_tensor", read_options((), opts=opts))
        return self._all_gather_into_tensors(request, outputs, inputs)

    # The names of torch before 2.13, by which its C++ and programs call as well.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start(self, verb: str, asked: Asked, *given: Any, **named: Any) -> TorchWork:
        work: TorchWork = getattr(self, f"_{verb}")(self._request(verb, asked), *given, **named)
        return work


for _name, _method in vars(VerbMethods).items():
    if callable(_method):
        setattr(WireGroup, _name, _for_its_wire(_method))


def _counts(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]

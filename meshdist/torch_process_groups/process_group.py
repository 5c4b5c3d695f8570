"""The verbs of torch's process groups over one of our wires.

The methods have the names under which torch's front end, its C++ and its older versions call them;
what each verb does is described in ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch

from ..arrays import apart, apart_from_all
from ..errors import ShapeError
from .group import GroupOfWire
from .requests import check_some, find_tensor, only, only_list
from .sparse import sum_sparse
from .works import TorchWork

__all__ = ["WireGroup"]

Tensors = Sequence[torch.Tensor]
OneTensor = Tensors | torch.Tensor
Limit = timedelta | None


def _verb(**also: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a method that torch's programs can call in every form that torch's own method has.

    Tensors that the wire does not serve go on to torch's own group, as they were given.

    Args:
        also: what torch's other forms call an argument, and what the method does.
    """

    def made(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(self: WireGroup, *given: Any, **named: Any) -> Any:
            other = self.other_for(find_tensor((*given, *named.values())))
            if other is not None:
                return getattr(other, method.__name__)(*given, **named)
            if named:
                named = {also.get(name, name): value for name, value in named.items()}
            return method(self, *given, **named)

        return called

    return made


class WireGroup(GroupOfWire):
    """One group of torch's over one wire. Making one is collective over its members."""

    # -- reducing --------------------------------------------------------------------------------

    @_verb(tensor="tensors")
    def allreduce(
        self,
        tensors: OneTensor,
        opts: Any = None,
        timeout: Limit = None,
        *,
        op: Any = None,
    ) -> Any:
        """Reduce the tensor in place on every member."""
        request = self._request("all_reduce", opts, "op", op=op, timeout=timeout)
        tensor = only(tensors, "all_reduce")
        kind = request.take_op([tensor])
        if tensor.layout is not torch.strided:
            sum_sparse(self, tensor, kind)
            return self._handed_out(TorchWork([], [tensor], self._completer))
        buffer = request.scaled(request.write(tensor), in_place=True)
        return self._run(request, buffer, [tensor], "all_reduce", [(buffer, kind)])

    @_verb()
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce each tensor in place on every member."""
        request = self._request("all_reduce_coalesced", opts, "op")
        check_some("all_reduce_coalesced", tensors)
        buffers = [request.write(tensor) for tensor in tensors]
        kind = request.take_op(buffers)
        for buffer in buffers:
            request.scaled(buffer, in_place=True)
        return self._run(request, buffers, list(tensors), "all_reduce_list", [(buffers, kind)])

    @_verb(tensor="tensors")
    def reduce(
        self,
        tensors: OneTensor,
        opts: Any = None,
        op: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Reduce the tensor in place on the root; the others keep theirs."""
        request = self._request("reduce", opts, "root", op=op, timeout=timeout, root=root)
        tensor, to = only(tensors, "reduce"), request.asked.root
        buffer = request.write(tensor) if request.is_root else request.read(tensor)
        kind = request.take_op([buffer])
        buffer = request.scaled(buffer, in_place=request.is_root)
        return self._run(request, buffer, [tensor], "reduce", [(buffer, kind, to)])

    @_verb()
    def reduce_scatter_single(
        self, outputTensor: torch.Tensor, inputTensor: torch.Tensor, opts: Any = None
    ) -> Any:
        """``outputTensor`` is this member's block of the reduced ``inputTensor``."""
        return self.reduce_scatter_single_coalesced([outputTensor], [inputTensor], opts)

    @_verb()
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``reduce_scatter_single`` for each pair."""
        request = self._request("reduce_scatter_tensor", opts, "op")
        check_some("reduce_scatter_tensor_coalesced", outputs)
        kind = request.take_op(inputs)
        pairs = []
        for output, whole in zip(outputs, inputs, strict=True):
            request.check_blocks(whole, output)
            pairs.append(request.written_and_read(output, whole))
        calls = [(*pair, kind) for pair in pairs]
        return self._run(
            request, [sent for _, sent in pairs], list(outputs), "reduce_scatter", calls
        )

    @_verb(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Limit = None,
        *,
        op: Any = None,
    ) -> Any:
        """``output`` is the reduction of what the members' lists have in this member's place."""
        request = self._request("reduce_scatter", opts, "op", op=op, timeout=timeout)
        output = only(output_tensors, "reduce_scatter")
        parts = only_list(input_tensors, "reduce_scatter")
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
            [(taken, sent, kind)],
            sizes=(_counts(sent), [taken.numel()] * self.size()),
        )

    # -- moving ----------------------------------------------------------------------------------

    @_verb(tensor="tensors")
    def broadcast(
        self,
        tensors: OneTensor,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give every member the root's tensor."""
        request = self._request("broadcast", opts, "root", timeout=timeout, root=root)
        tensor, source = only(tensors, "broadcast"), request.asked.root
        buffer = request.read(tensor) if request.is_root else request.write(tensor)
        return self._run(request, buffer, [tensor], "broadcast", [(buffer, source)])

    @_verb()
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Write the members' tensors one after the other into ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @_verb()
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``all_gather_single`` for each pair."""
        request = self._request("all_gather_into_tensor", opts, "timeout")
        check_some("all_gather_into_tensor_coalesced", outputs)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            request.check_blocks(output, tensor)
            pairs.append(request.written_and_read(output, tensor))
        return self._run(request, [sent for _, sent in pairs], list(outputs), "all_gather", pairs)

    @_verb(input_tensor="input_tensors", timeout="opts")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Write member j's tensor into the j-th output; sizes may differ between members."""
        into, tensor = only_list(output_tensors, "all_gather"), only(input_tensors, "all_gather")
        return self._gather_lists([into], [tensor], opts, [into])

    @_verb()
    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> Any:
        """Write the i-th tensor of member j into ``output_lists[j][i]``."""
        check_some("all_gather_coalesced", input_list)
        self._request("all_gather_coalesced", opts, "timeout").check_list(output_lists)
        lists = list(zip(*output_lists, strict=True))
        return self._gather_lists(lists, input_list, opts, output_lists)

    def _gather_lists(
        self, lists: Sequence[Tensors], inputs: Tensors, opts: Any, result: Any
    ) -> TorchWork:
        """Write member j's tensor into the j-th of its list, for each tensor and its list."""
        request = self._request("all_gather", opts, "timeout")
        pairs = []
        for into, tensor in zip(lists, inputs, strict=True):
            request.check_list(into, tensor)
            request.check_count(into[self.rank()], tensor)
            sent = request.read(tensor)
            taken = [request.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
            pairs.append((taken, sent))
        mine = sum(sent.numel() for _, sent in pairs)
        takes = [sum(taken[j].numel() for taken, _ in pairs) for j in range(self.size())]
        return self._run(
            request,
            [sent for _, sent in pairs],
            [list(into) for into in result],
            "all_gather_list",
            pairs,
            sizes=([mine] * self.size(), takes),
        )

    @_verb(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give the root everyone's tensor."""
        request = self._request("gather", opts, "root", timeout=timeout, root=root)
        tensor, to = only(input_tensors, "gather"), request.asked.root
        sent = request.read(tensor)
        into: Tensors = ()
        taken: list[torch.Tensor] = []
        if request.is_root:
            into = only_list(output_tensors, "gather")
            request.check_list(into, tensor)
            for output in into:
                request.check_count(output, tensor)
            taken = [request.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
        result = [list(into)] if taken else []
        return self._run(request, sent, result, "gather", [(taken, sent, to)])

    @_verb(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: Limit = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give every member its tensor of those on the root."""
        request = self._request("scatter", opts, "root", timeout=timeout, root=root)
        output, source = only(output_tensors, "scatter"), request.asked.root
        taken = request.write(output)
        sent: list[torch.Tensor] = []
        if request.is_root:
            parts = only_list(input_tensors, "scatter")
            request.check_list(parts, output)
            for part in parts:
                request.check_count(output, part)
            sent = [apart(request.read(part), taken) for part in parts]
        return self._run(request, taken, [output], "scatter", [(taken, sent, source)])

    @_verb()
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Any:
        """Send the j-th input to member j, and receive member j's into the j-th output."""
        request = self._request("all_to_all", opts, "timeout")
        request.check_list(output_tensors)
        request.check_list(input_tensors, *output_tensors)
        request.check_count(output_tensors[self.rank()], input_tensors[self.rank()])
        taken = [request.write(output) for output in output_tensors]
        sent = apart_from_all([request.read(part) for part in input_tensors], taken)
        sizes = _counts(sent), _counts(taken)
        result = list(output_tensors)
        return self._run(request, sent, result, "all_to_all", [(taken, sent)], sizes=sizes)

    @_verb(timeout="opts")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """As ``alltoall`` over parts along dim 0; no sizes means equal parts."""
        request = self._request("all_to_all_single", opts, "timeout")
        request.check_alike([output, input])
        takes = request.split_counts(output, output_split_sizes, "output")
        gives = request.split_counts(input, input_split_sizes, "input")
        if takes[self.rank()] != gives[self.rank()]:
            raise ShapeError(
                "all_to_all_single: this member keeps another number of elements than it has",
                where=self._facts.here,
                found=f"{gives[self.rank()]} of the input for {takes[self.rank()]} of the output",
            )
        taken, sent = request.written_and_read(output, input)
        calls, sizes = [(taken, sent, takes, gives)], (gives, takes)
        return self._run(request, sent, [output], "all_to_all_single", calls, sizes=sizes)

    def barrier(self, opts: Any = None, timeout: Limit = None) -> Any:
        """Done on a member when every member has come to it."""
        request = self._request("barrier", opts, "timeout", timeout=timeout)
        return self._run(request, None, [], "barrier", [()])

    # -- messages --------------------------------------------------------------------------------

    @_verb()
    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Any:
        """Send the tensor to member ``dstRank``."""
        return self._message("send", tensors, dstRank, tag)

    @_verb()
    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Any:
        """Receive the tensor from member ``srcRank``."""
        return self._message("recv", tensors, srcRank, tag)

    @_verb()
    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive the tensor from the first member that sends one."""
        return self._message("recv", tensors, None, tag)

    def _message(self, verb: str, tensors: Tensors, peer: int | None, tag: int) -> TorchWork:
        request = self._request(verb, None, "timeout")
        tensor = only(tensors, verb)
        if peer is not None:
            request.check_place(peer)
        request.check_tag(tag)
        request.message = peer, tag
        buffer = request.read(tensor) if verb == "send" else request.write(tensor)
        return self._run(request, buffer, [tensor], verb, [(buffer, peer, tag)])

    # The names of torch before 2.13, by which its C++ and programs call as well.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _counts(tensors: Tensors) -> list[int]:
    return [tensor.numel() for tensor in tensors]

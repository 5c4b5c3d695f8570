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
from ..collectives.checks import check_reducible, premultiplied
from ..errors import ShapeError
from ..reduce_ops import Factor, ReduceKind, multiply, split_premul
from ..wires.base import Communicator, Pending
from ..wires.pending import Chain
from .buffers import (
    Buffers,
    check_alike,
    check_blocks,
    check_count,
    check_some,
    find_tensor,
    only,
    only_list,
)
from .calls import Asked, Call, read_options
from .group import GroupOfWire, Start
from .sparse import sum_sparse
from .works import TorchWork

__all__ = ["WireGroup"]

Tensors = Sequence[torch.Tensor]


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
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        """Reduce the tensor in place on every member."""
        tensor = only(tensors, "all_reduce")
        asked = read_options(opts, "op", op=op, timeout=timeout)
        kind, factor = self._checked_op(asked, [tensor], "all_reduce")
        if tensor.layout is not torch.strided:
            sum_sparse(self, tensor, kind)
            return self._finished([tensor])
        buffers = Buffers("all_reduce")
        buffer = buffers.write(tensor)
        if factor is not None:
            multiply(buffer, factor)
        return self._run(
            Call("all_reduce", (buffer,), kind),
            asked,
            lambda wire, limit: wire.all_reduce(buffer, kind, limit),
            buffers,
            [tensor],
        )

    @_verb()
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce each tensor in place on every member."""
        check_some("all_reduce_coalesced", tensors)
        asked = read_options(opts, "op")
        buffers = Buffers("all_reduce_coalesced")
        some = [buffers.write(tensor) for tensor in tensors]
        kind, factor = self._checked_op(asked, some, "all_reduce_coalesced")
        if factor is not None:
            for buffer in some:
                multiply(buffer, factor)
        return self._run(
            Call("all_reduce_coalesced", some, kind),
            asked,
            lambda wire, limit: wire.all_reduce_list(some, kind, limit),
            buffers,
            list(tensors),
        )

    @_verb(tensor="tensors")
    def reduce(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Reduce the tensor in place on the root; the others keep theirs."""
        tensor = only(tensors, "reduce")
        asked = read_options(opts, "root", op=op, timeout=timeout, root=root)
        buffers = Buffers("reduce")
        is_root = asked.root == self.rank()
        buffer = buffers.write(tensor) if is_root else buffers.read(tensor)
        self._check_place(asked.root, "reduce")
        kind, factor = self._checked_op(asked, [buffer], "reduce")
        if factor is not None:
            if is_root:
                multiply(buffer, factor)
            else:
                buffer = premultiplied(buffer, factor)
        return self._run(
            Call("reduce", (buffer,), kind, asked.root),
            asked,
            lambda wire, limit: wire.reduce(buffer, kind, asked.root, limit),
            buffers,
            [tensor],
        )

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
        check_some("reduce_scatter_tensor_coalesced", outputs)
        asked = read_options(opts, "op")
        kind, factor = self._checked_op(asked, inputs, "reduce_scatter_tensor")
        buffers = Buffers("reduce_scatter_tensor")
        pairs = []
        for output, whole in zip(outputs, inputs, strict=True):
            check_blocks("reduce_scatter_tensor", whole, output, self.size())
            taken, sent = buffers.write(output), buffers.read(whole)
            sent = apart(sent, taken) if factor is None else premultiplied(sent, factor)
            pairs.append((taken, sent))
        return self._run(
            Call("reduce_scatter_tensor", [sent for _, sent in pairs], kind),
            asked,
            _each(lambda wire, limit, a, b: wire.reduce_scatter(a, b, kind, limit), pairs),
            buffers,
            list(outputs),
        )

    @_verb(output="output_tensors", input="input_tensors")
    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        """``output`` is the reduction of what the members' lists have in this member's place."""
        output = only(output_tensors, "reduce_scatter")
        parts = only_list(input_tensors, "reduce_scatter")
        asked = read_options(opts, "op", op=op, timeout=timeout)
        self._check_list(parts, "reduce_scatter")
        check_alike("reduce_scatter", [output, *parts])
        check_count("reduce_scatter", output, parts[self.rank()])
        buffers = Buffers("reduce_scatter")
        taken, sent = buffers.write(output), [buffers.read(part) for part in parts]
        kind, factor = self._checked_op(asked, [taken], "reduce_scatter")
        if factor is not None:
            sent = [premultiplied(part, factor) for part in sent]
        else:
            sent = [apart(part, taken) for part in sent]
        return self._run(
            Call(
                "reduce_scatter",
                sent,
                kind,
                sizes=([part.numel() for part in sent], [taken.numel()] * self.size()),
            ),
            asked,
            lambda wire, limit: wire.reduce_scatter_list(taken, sent, kind, limit),
            buffers,
            [output],
        )

    # -- moving ----------------------------------------------------------------------------------

    @_verb(tensor="tensors")
    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give every member the root's tensor."""
        tensor = only(tensors, "broadcast")
        asked = read_options(opts, "root", timeout=timeout, root=root)
        self._check_place(asked.root, "broadcast")
        buffers = Buffers("broadcast")
        is_root = asked.root == self.rank()
        buffer = buffers.read(tensor) if is_root else buffers.write(tensor)
        return self._run(
            Call("broadcast", (buffer,), peer=asked.root),
            asked,
            lambda wire, limit: wire.broadcast(buffer, asked.root, limit),
            buffers,
            [tensor],
        )

    @_verb()
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """Lay the members' tensors one after the other into ``output``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @_verb()
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``all_gather_single`` for each pair."""
        check_some("all_gather_into_tensor_coalesced", outputs)
        buffers = Buffers("all_gather_into_tensor")
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_blocks("all_gather_into_tensor", output, tensor, self.size())
            taken = buffers.write(output)
            pairs.append((taken, apart(buffers.read(tensor), taken)))
        return self._run(
            Call("all_gather_into_tensor", [sent for _, sent in pairs]),
            read_options(opts, "timeout"),
            _each(lambda wire, limit, a, b: wire.all_gather(a, b, limit), pairs),
            buffers,
            list(outputs),
        )

    @_verb(input_tensor="input_tensors", timeout="opts")
    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Any:
        """Write member j's tensor into the j-th output; sizes may differ between members."""
        into, tensor = only_list(output_tensors, "all_gather"), only(input_tensors, "all_gather")
        return self._gather_lists([into], [tensor], opts, [into])

    @_verb()
    def allgather_coalesced(self, output_lists: Any, input_list: Tensors, opts: Any = None) -> Any:
        """Write the i-th tensor of member j into ``output_lists[j][i]``."""
        check_some("all_gather_coalesced", input_list)
        self._check_list(output_lists, "all_gather_coalesced")
        lists = list(zip(*output_lists, strict=True))
        return self._gather_lists(lists, input_list, opts, output_lists)

    def _gather_lists(
        self, lists: Sequence[Tensors], inputs: Tensors, opts: Any, result: Any
    ) -> TorchWork:
        """Write member j's tensor into the j-th of its list, for each tensor and its list."""
        buffers = Buffers("all_gather")
        pairs = []
        for into, tensor in zip(lists, inputs, strict=True):
            self._check_list(into, "all_gather")
            check_alike("all_gather", [tensor, *into])
            check_count("all_gather", into[self.rank()], tensor)
            sent = buffers.read(tensor)
            taken = [buffers.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
            pairs.append((taken, sent))
        return self._run(
            Call("all_gather", [sent for _, sent in pairs], sizes=_gathered_sizes(pairs)),
            read_options(opts, "timeout"),
            _each(lambda wire, limit, a, b: wire.all_gather_list(a, b, limit), pairs),
            buffers,
            [list(into) for into in result],
        )

    @_verb(input_tensor="input_tensors")
    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give the root everyone's tensor."""
        tensor = only(input_tensors, "gather")
        asked = read_options(opts, "root", timeout=timeout, root=root)
        self._check_place(asked.root, "gather")
        buffers = Buffers("gather")
        sent = buffers.read(tensor)
        into: Tensors = ()
        taken: list[torch.Tensor] = []
        if asked.root == self.rank():
            into = only_list(output_tensors, "gather")
            self._check_list(into, "gather")
            check_alike("gather", [tensor, *into])
            for output in into:
                check_count("gather", output, tensor)
            taken = [buffers.write(output) for output in into]
            (sent,) = apart_from_all([sent], taken)
        return self._run(
            Call("gather", (sent,), peer=asked.root),
            asked,
            lambda wire, limit: wire.gather(taken, sent, asked.root, limit),
            buffers,
            [list(into)] if taken else [],
        )

    @_verb(output_tensor="output_tensors")
    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Any:
        """Give every member its tensor of those on the root."""
        output = only(output_tensors, "scatter")
        asked = read_options(opts, "root", timeout=timeout, root=root)
        self._check_place(asked.root, "scatter")
        buffers = Buffers("scatter")
        taken = buffers.write(output)
        sent: list[torch.Tensor] = []
        if asked.root == self.rank():
            parts = only_list(input_tensors, "scatter")
            self._check_list(parts, "scatter")
            check_alike("scatter", [output, *parts])
            for part in parts:
                check_count("scatter", output, part)
            sent = [apart(buffers.read(part), taken) for part in parts]
        return self._run(
            Call("scatter", (taken,), peer=asked.root),
            asked,
            lambda wire, limit: wire.scatter(taken, sent, asked.root, limit),
            buffers,
            [output],
        )

    @_verb()
    def alltoall(self, output_tensors: Tensors, input_tensors: Tensors, opts: Any = None) -> Any:
        """Send the j-th input to member j, and receive member j's into the j-th output."""
        self._check_list(output_tensors, "all_to_all")
        self._check_list(input_tensors, "all_to_all")
        check_alike("all_to_all", [*output_tensors, *input_tensors])
        check_count("all_to_all", output_tensors[self.rank()], input_tensors[self.rank()])
        buffers = Buffers("all_to_all")
        taken = [buffers.write(output) for output in output_tensors]
        sent = apart_from_all([buffers.read(part) for part in input_tensors], taken)
        return self._run(
            Call(
                "all_to_all",
                sent,
                sizes=([part.numel() for part in sent], [part.numel() for part in taken]),
            ),
            read_options(opts, "timeout"),
            lambda wire, limit: wire.all_to_all(taken, sent, limit),
            buffers,
            list(output_tensors),
        )

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
        check_alike("all_to_all_single", [output, input])
        takes = self._split_counts(output, output_split_sizes, "output")
        gives = self._split_counts(input, input_split_sizes, "input")
        if takes[self.rank()] != gives[self.rank()]:
            raise ShapeError(
                "all_to_all_single: this member keeps another number of elements than it has",
                where=self._members.here,
                found=f"{gives[self.rank()]} of the input for {takes[self.rank()]} of the output",
            )
        buffers = Buffers("all_to_all_single")
        taken = buffers.write(output)
        sent = apart(buffers.read(input), taken)
        return self._run(
            Call("all_to_all_single", (sent,), sizes=(gives, takes)),
            read_options(opts, "timeout"),
            lambda wire, limit: wire.all_to_all_single(taken, sent, takes, gives, limit),
            buffers,
            [output],
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Done on a member when every member has come to it."""
        asked = read_options(opts, "timeout", timeout=timeout)
        return self._run(
            Call("barrier"), asked, lambda wire, limit: wire.barrier(limit), Buffers("barrier"), []
        )

    # -- messages --------------------------------------------------------------------------------

    @_verb()
    def send(self, tensors: Tensors, dstRank: int, tag: int) -> Any:
        """Send the tensor to member ``dstRank``."""
        tensor = only(tensors, "send")
        self._check_place(dstRank, "send")
        self._check_tag(tag, "send")
        buffers = Buffers("send")
        buffer = buffers.read(tensor)
        return self._run(
            Call("send", (buffer,), peer=dstRank, tag=tag),
            Asked(),
            lambda wire, limit: wire.send(buffer, dstRank, tag, limit),
            buffers,
            [tensor],
        )

    @_verb()
    def recv(self, tensors: Tensors, srcRank: int, tag: int) -> Any:
        """Receive the tensor from member ``srcRank``."""
        tensor = only(tensors, "recv")
        self._check_place(srcRank, "recv")
        return self._receive(tensor, srcRank, tag)

    @_verb()
    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        """Receive the tensor from whoever sends one."""
        tensor = only(tensors, "recv")
        return self._receive(tensor, None, tag)

    def _receive(self, tensor: torch.Tensor, src: int | None, tag: int) -> TorchWork:
        self._check_tag(tag, "recv")
        buffers = Buffers("recv")
        buffer = buffers.write(tensor)
        return self._run(
            Call("recv", (buffer,), peer=src, tag=tag),
            Asked(),
            lambda wire, limit: wire.recv(buffer, src, tag, limit),
            buffers,
            [tensor],
        )

    def _checked_op(
        self, asked: Asked, tensors: Tensors, verb: str
    ) -> tuple[ReduceKind, Factor | None]:
        """The plain reduction to do, and the factor to multiply by before it, or None."""
        self._check_usable()  # before the factor changes a tensor
        kind, factor = split_premul(asked.op)
        for tensor in tensors:
            check_reducible(kind, tensor, verb, factor)
        return kind, factor

    # The names of torch before 2.13, by which its C++ and programs call as well.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _gathered_sizes(pairs: Sequence[tuple[Tensors, torch.Tensor]]) -> tuple[list[int], list[int]]:
    """How many elements go to and come from each member where all gather lists of tensors."""
    size = len(pairs[0][0])
    sent = sum(tensor.numel() for _, tensor in pairs)
    return [sent] * size, [sum(into[j].numel() for into, _ in pairs) for j in range(size)]


def _each(
    start: Callable[[Communicator, timedelta, Any, Any], Pending], pairs: Sequence[tuple[Any, Any]]
) -> Start:
    """Starts the same verb on each of several pairs, as one."""
    if len(pairs) == 1:
        ((first, second),) = pairs
        return lambda wire, limit: start(wire, limit, first, second)
    return lambda wire, limit: Chain([start(wire, limit, *pair) for pair in pairs])

"""The verbs of torch's process groups over one of our wires: those of our own groups.

``VerbMethods`` has the methods, in the forms in which torch's front end, its C++ and its older
versions call them; what each verb does is described in ``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from inspect import unwrap
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as profiler

from ..collectives.checks import find_peer
from ..collectives.collective import Collective
from ..collectives.point_to_point import open_channel, prepare_message
from ..collectives.prepare import prepare
from ..collectives.sparse_sums import sum_sparse
from ..groups.verb_methods import Asked, VerbMethods, read_options, verbs
from ..reduce_ops import ReduceOp, split_premul
from ..verb_table import VERBS, Form, Role
from ..wires.work import Work, joined
from .group import GroupOfWire
from .works import TorchWork, find_tensor

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

    def _start(self, verb: str, asked: Asked, given: dict[str, Any]) -> TorchWork:
        self.check_usable()
        form = _form_of(verb)
        written: Any = given.get(form.written)
        noted = given.get(form.noted)
        if form.is_sum and written.layout is not torch.strided:
            kind, factor = split_premul(asked.op)
            sum_sparse(self, written, kind if factor is None else ReduceOp.PREMUL_SUM)
            return self.handed_out(TorchWork([], [written], self._completer))
        for name in form.tensors:
            x = given[name]
            bare = x.data if type(x) is torch.Tensor else _bare(x)
            given[name] = _flat(bare) if form.has_blocks else bare
        waits = not (asked.is_async or asked.timeout or profiler._is_profiler_enabled)
        start = partial(form.run, **given, group=self.inner, async_op=not waits)
        result = [written] if isinstance(written, torch.Tensor) else list(written or ())
        if result and form.is_nested:
            result = [result]
        return self.run(verb, asked, start, [noted], result)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> TorchWork:
        return self._message("send", "dst", tensor, peer, tag)

    def _recv(self, tensor: torch.Tensor, peer: int | None, tag: int) -> TorchWork:
        return self._message("recv", "src", tensor, peer, tag)

    def _message(
        self, verb: str, role: str, tensor: torch.Tensor, peer: int | None, tag: int
    ) -> TorchWork:
        self.check_usable()
        place = find_peer(self.inner, None, peer, verb, role)
        given = verb, self.inner, place, _bare(tensor), tag
        message = prepare_message(*given, is_send=VERBS[verb].sends)
        channel = open_channel(self.inner, message)
        start = partial(channel.run, message, is_async=True)
        title = "recvAnySource" if peer is None else verb
        return self.run(verb, Asked(), start, [tensor], [tensor], title)

    # -- several pairs at once -------------------------------------------------------------------

    @_for_its_wire
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``reduce_scatter_single`` for each pair."""
        return self._start_pairs("reduce_scatter_tensor", outputs, inputs, opts)

    @_for_its_wire
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """As ``all_gather_single`` for each pair."""
        return self._start_pairs("all_gather_into_tensor", outputs, inputs, opts)

    # The names of torch before 2.13, by which its C++ and programs call as well.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_pairs(self, verb: str, outputs: Tensors, inputs: Tensors, opts: Any) -> TorchWork:
        self.check_usable()
        asked = read_options((), opts=opts)
        ops = [asked.op] if VERBS[verb].reduces else []
        Collective(verb, self.inner).check_list(inputs, "inputs")
        calls = [
            prepare(verb, self.inner, _flat(_bare(output)), _flat(_bare(tensor)), *ops)
            for output, tensor in zip(outputs, inputs, strict=True)
        ]

        def start() -> Work | None:
            return joined(list(filter(None, [call.run(True) for call in calls])))

        return self.run(verb, asked, start, inputs, list(outputs))


for _name, _method in vars(VerbMethods).items():
    if callable(_method):
        setattr(WireGroup, _name, _for_its_wire(_method))


def _bare(given: Any) -> Any:
    """An argument with tensors on the same memory that have no gradient, nor torch's version.

    As torch's own groups do, ours let a program write where autograd has saved values: FSDP gathers
    parameters again into the memory where a forward has seen them.
    """
    if isinstance(given, torch.Tensor):
        return (given if type(given) is torch.Tensor else given.detach()).data
    return list(map(_bare, given)) if isinstance(given, (list, tuple)) else given


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with one dim: of blocks torch compares the numbers of elements alone."""
    return tensor.view(-1) if tensor.dim() != 1 and tensor.is_contiguous() else tensor


class _Form(NamedTuple):
    """How torch's groups call a verb of ours.

    Args:
        run: the verb, without its marks: no fast path, which is for one thread, no record of its
            own in a profile, and nothing for typed contexts, as torch's own verbs.
        tensors: its parameters of tensors.
        written, noted: those that it writes, and that a profile shows.
        has_blocks: whether it has one larger tensor, with a block for each member.
        is_nested: whether torch's result is a list of the list that it writes.
        is_sum: whether it reduces one tensor for all members, which may be sparse.
    """

    run: Callable[..., Any]
    tensors: tuple[str, ...]
    written: str
    noted: str
    has_blocks: bool
    is_nested: bool
    is_sum: bool


@cache
def _form_of(verb: str) -> _Form:
    row, run = VERBS[verb], unwrap(verbs[verb])
    carrier = row.carrier
    tensors = row.named(Role.IN_PLACE, Role.OUTPUT, Role.INPUT)
    noted = tensors[0] if carrier.root == "from" else "".join(tensors[-1:])
    has_blocks = row.is_plain and carrier.takes is carrier.gives is Form.ONE
    is_nested = row.is_plain and carrier.takes is Form.ONE and carrier.gives is not Form.ONE
    is_sum = carrier.reduces and carrier.gives is Form.ONE and not carrier.root
    is_sum = is_sum and carrier.takes is Form.IN_PLACE
    return _Form(run, tensors, row.writes, noted, has_blocks, is_nested, is_sum)

"""MPI, by mpi4py: the ranks that mpiexec has started.

A collective is one call of MPI's, in its blocking form where all members wait for it (``Arrivals``
tells), and else in the one that goes on by itself as far as MPI lets it: while anybody asks. What
MPI does not reduce itself is done in another dtype (``mpi_ops``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ..arrays import apart
from ..reduce_ops import ReduceKind, ReduceOp
from ..runtime.mpi_library import find_functions, find_mpi_problem, is_cuda_aware
from . import fallbacks
from .base import (
    LARGEST_TAG,
    REDUCING_VERBS,
    Communicator,
    Opening,
    Pending,
    PlainCalls,
    Wire,
    WireAborted,
    WireFailure,
    register_wire,
)
from .core import core
from .mailbox import SelfTransfer
from .mpi_buffers import packed, unpacked
from .mpi_link import Meeting, Started
from .mpi_opening import Shared, open_shared
from .mpi_ops import (
    Plan,
    find_plan,
    mpi_type,
    op_of,
    plain_reductions,
    plain_sums,
    plan_of,
)
from .mpi_staging import StagedCommunicator
from .pending import Chain, Deferred

__all__ = ["MpiCommunicator", "MpiWire"]

_SUM = ReduceOp.SUM
_MOST_NUMBERED_TAGS = 1 << 12
_EVEN = Meeting.EVEN
_COLLECTIVES = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "broadcast": "bcast",
    "all_gather": "allgather",
    "all_gather_list": "allgatherv",
    "reduce_scatter": "reduce_scatter_block",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "alltoallv",
    "all_to_all_even": "alltoall",
    "barrier": "barrier",
}
"""MPI's names of what native callers do."""
_MESSAGES = {
    "MPI_Isend": "isend",
    "MPI_Irecv": "irecv",
    "MPI_Test": "test",
    "MPI_Get_count": "get_count",
}


class MpiCommunicator(Communicator):
    """One member's part of a group over MPI.

    Args:
        opening: the group.
        shared: what belongs to it.
        is_waiting: whether its collectives wait, and return None where MPI's blocking call did it.
    """

    wants_senders = True

    def __init__(self, opening: Opening, shared: Shared, *, is_waiting: bool = False) -> None:
        super().__init__("mpi", opening.rank, len(opening.ranks))
        self._shared = shared
        self._link = shared.link
        self._comm = shared.link.comm
        self._buffers = shared.buffers
        self._mailbox = shared.mailbox
        self._arrivals = shared.arrivals
        self._in_place = shared.MPI.IN_PLACE
        self._failing = shared.MPI.Exception
        self._sum = shared.MPI.SUM
        self._kinds = plain_sums(shared.MPI)
        self._is_cuda = opening.device_type == "cuda"
        self._is_waiting = is_waiting
        self._waiting = None if is_waiting else MpiCommunicator(opening, shared, is_waiting=True)
        self.posts_at_once = True

    @property
    def waiting(self) -> Communicator:
        return self._waiting or self

    @classmethod
    def support(cls, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if verb in REDUCING_VERBS and not find_plan("mpi", op, dtype).is_plain:
            return "built"
        return super().support(verb, device_type, dtype, op)

    # -- verbs that reduce --------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta) -> Pending:
        kind = self._kinds.get(tensor.dtype) if op is _SUM else None
        if kind is not None and tensor.numel() <= self._buffers.most:  # the common case
            buffers = self._in_place, self._buffers.numbers(tensor, kind), self._sum
            return self._collective("Allreduce", timeout, tensor, None, *buffers)
        plan = plan_of(op, tensor.dtype, self.size)
        data = tensor if plan.is_plain else plan.encode(tensor, self.scratch)
        if data.numel() > self._buffers.most:
            parts = data.view(-1).split(self._buffers.most)
            started = [self.all_reduce(part, plan.op, timeout) for part in parts]
            return Chain(started, self._settle(plan, data, tensor))
        settle = None if plan.is_plain else self._settle(plan, data, tensor)
        buffers = self._in_place, self._numbers(data), self._op(plan)
        return self._collective("Allreduce", timeout, (tensor, data), settle, *buffers)

    def reduce(
        self, tensor: torch.Tensor, op: ReduceKind, root: int, timeout: timedelta
    ) -> Pending:
        plan = plan_of(op, tensor.dtype, self.size)
        data = tensor if plan.is_plain else plan.encode(tensor, self.scratch)
        if data.numel() > self._buffers.most:
            return fallbacks.reduce(self, tensor, op, root, timeout)
        kept, op_and_root = (tensor, data), (self._op(plan), root)
        numbers = self._numbers(data)
        if self.rank != root:
            return self._collective("Reduce", timeout, kept, None, numbers, None, *op_and_root)
        settle = None if plan.is_plain else self._settle(plan, data, tensor)
        buffers = self._in_place, numbers
        return self._collective("Reduce", timeout, kept, settle, *buffers, *op_and_root)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceKind, timeout: timedelta
    ) -> Pending:
        return self._reduce_blocks(output, tensor, None, op, timeout)

    def reduce_scatter_list(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        whole, give_back = packed(inputs, self.scratch)
        sizes = [part.numel() for part in inputs]
        started = self._reduce_blocks(output, whole, sizes, op, timeout)
        return Chain([started], give_back)

    def _reduce_blocks(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        sizes: list[int] | None,
        kind: ReduceKind,
        timeout: timedelta,
    ) -> Pending:
        """Reduce each member's block of ``whole``; ``sizes`` are theirs where they may differ."""
        plan = plan_of(kind, whole.dtype, self.size)
        if whole.numel() > self._buffers.most:
            given = sizes or [output.numel()] * self.size
            return fallbacks.reduce_scatter_by_exchange(self, output, whole, given, kind, timeout)
        mine, data = output, apart(whole, output)
        if not plan.is_plain:
            data = plan.encode(data, self.scratch)
            mine = (
                plan.encode(output, self.scratch)
                if plan.is_in_place
                else data.new_empty(output.numel())
            )
        settle = None if plan.is_plain else self._settle(plan, mine, output, data)
        kept = (output, mine, data)
        result, op = self._numbers(mine), self._op(plan)
        if sizes is None:
            buffers = self._numbers(data, self.size), result
            return self._collective("Reduce_scatter_block", timeout, kept, settle, *buffers, op)
        buffers = self._numbers(data), result
        return self._collective("Reduce_scatter", timeout, kept, settle, *buffers, sizes, op)

    # -- verbs that move ----------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, timeout: timedelta) -> Pending:
        return self._collective("Bcast", timeout, tensor, None, self._buffers.moved(tensor), root)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, timeout: timedelta) -> Pending:
        tensor = apart(tensor, output)
        moved = self._buffers.moved
        buffers = moved(tensor), moved(output, self.size)
        return self._collective("Allgather", timeout, (output, tensor), None, *buffers)

    def all_gather_list(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, timeout: timedelta
    ) -> Pending:
        sizes = [output.numel() for output in outputs]
        if not self._fits(sum(sizes), tensor):
            return super().all_gather_list(outputs, tensor, timeout)
        whole, settle = unpacked(outputs, self.scratch)
        tensor = apart(tensor, whole)
        buffers = self._buffers.moved(tensor), self._buffers.cut(whole, sizes)
        return self._collective("Allgatherv", timeout, (whole, tensor), settle, *buffers)

    def gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        root: int,
        timeout: timedelta,
    ) -> Pending:
        mine = self._buffers.moved
        if self.rank != root:
            return self._collective("Gather", timeout, tensor, None, mine(tensor), None, root)
        whole, settle = unpacked(outputs, self.scratch)
        tensor = apart(tensor, whole)
        buffers = mine(tensor), mine(whole, self.size)
        return self._collective("Gather", timeout, (whole, tensor), settle, *buffers, root)

    def scatter(
        self,
        tensor: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        root: int,
        timeout: timedelta,
    ) -> Pending:
        mine = self._buffers.moved
        if self.rank != root:
            return self._collective("Scatter", timeout, tensor, None, None, mine(tensor), root)
        whole, give_back = packed(inputs, self.scratch)
        whole = apart(whole, tensor)
        buffers = mine(whole, self.size), mine(tensor)
        return self._collective("Scatter", timeout, (whole, tensor), give_back, *buffers, root)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: timedelta,
    ) -> Pending:
        # A member may have much for one and little for another, who knows of that little alone. So
        # each pair decides for itself whether its part goes with the others.
        most = self._most_for_one(inputs[0])
        large = [
            self.recv(output, peer, fallbacks.EXCHANGE_TAG, timeout)
            for peer, output in enumerate(outputs)
            if output.numel() > most
        ]
        large += [
            self.send(part, peer, fallbacks.EXCHANGE_TAG, timeout)
            for peer, part in enumerate(inputs)
            if part.numel() > most
        ]
        whole, settle = unpacked(_without_large(outputs, most), self.scratch)
        together, give_back = packed(_without_large(inputs, most), self.scratch)
        started = self._exchange(
            whole,
            apart(together, whole),
            [_if_at_most(output.numel(), most) for output in outputs],
            [_if_at_most(part.numel(), most) for part in inputs],
            timeout,
        )

        def bring_home() -> None:
            for act in (settle, give_back):
                if act is not None:
                    act()

        return Chain([*large, started], bring_home)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        if max(*output_sizes, *input_sizes) <= self._most_for_one(tensor):
            tensor = apart(tensor, output)
            return self._exchange(output, tensor, output_sizes, input_sizes, timeout)
        outputs = fallbacks.parts(output, output_sizes)
        return self.all_to_all(outputs, fallbacks.parts(tensor, input_sizes), timeout)

    def _exchange(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        timeout: timedelta,
    ) -> Pending:
        cut, is_even = self._buffers.cut, len({*input_sizes, *output_sizes}) == 1
        return self._collective(
            "Alltoallv",
            timeout,
            (output, tensor),
            None,
            cut(tensor, input_sizes),
            cut(output, output_sizes),
            is_even=is_even,
        )

    def barrier(self, timeout: timedelta, device: torch.device | None = None) -> Pending:
        return self._collective("Barrier", timeout, None, None)

    # -- messages -----------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        if self._is_cuda:
            _synchronize(tensor)
        buffer = self._buffers.moved(tensor)
        request = self._started(self._comm.Isend, buffer, peer, self._tag(tag))
        return self._link.keep(Started(request, tensor))

    def recv(self, tensor: torch.Tensor, peer: int | None, tag: int, timeout: timedelta) -> Pending:
        if peer == self.rank or (peer is None and (self.size == 1 or self.has_sent_itself(tag))):
            return self._mailbox.recv(tensor, tag)
        if self._is_cuda:
            _synchronize(tensor)
        MPI = self._shared.MPI
        source = MPI.ANY_SOURCE if peer is None else peer
        buffer = self._buffers.moved(tensor)
        request = self._started(self._comm.Irecv, buffer, source, self._tag(tag))
        num_bytes = tensor.numel() * tensor.itemsize
        return self._link.keep(Started(request, tensor, None, MPI.Status(), num_bytes))

    def has_sent_itself(self, tag: int) -> bool:
        return self._mailbox.has_sent(tag)

    def source(self, pending: Pending) -> int:
        if type(pending) is SelfTransfer:
            return self.rank
        if type(pending) is Deferred:
            return self.source(pending.get_started())
        if type(pending) is Started and pending.status is not None:
            return int(pending.status.Get_source())
        return super().source(pending)

    # -- short ways ---------------------------------------------------------------------------

    def plain_calls(self, noting: dict[str, Any], timeout: timedelta) -> PlainCalls | None:
        link, arrivals = self._link, self._arrivals
        if core is None or arrivals is None or self._is_cuda or not noting:
            return None
        MPI, failing, explain = self._shared.MPI, self._failing, noting["explain"]
        functions = _functions(MPI, self._comm)
        if functions is None:
            return None

        def explained(
            error: BaseException, note: int | None = None, num_bytes: int | None = None
        ) -> BaseException:
            known = link.failure(error, num_bytes) if isinstance(error, failing) else error
            return explain(known, note)  # type: ignore[no-any-return]

        facts = {
            **noting,
            **arrivals.insides(),
            "link": link,
            "most": self._buffers.most,
            "reductions": plain_reductions(MPI, self.size),
            "wait_for_all": partial(arrivals.wait_for_all, timeout),
            "finish_collective": partial(self._finish_collective, timeout),
            "leave": arrivals.leave,
            "end": arrivals.end,
            "strand": link.strand,
            "finish_message": partial(self._finish_message, timeout),
            "functions": functions,
            "error": failing,
            "largest_tag": min(LARGEST_TAG, self._shared.largest_tag - _MOST_NUMBERED_TAGS),
            "explain": explained,
            "spin_ns": int(link.spin_s * 1e9),
        }
        return core.MpiCalls(facts)  # type: ignore[no-any-return]

    # -- waiting ------------------------------------------------------------------------------

    def finish(self, pending: Pending, timeout: timedelta) -> None:
        kind = type(pending)
        if kind is Started:
            self._link.finish(pending, timeout)
        elif kind is Chain:
            self.finish_chain(pending, timeout)
        elif kind is SelfTransfer:
            self._mailbox.finish(pending, timeout, lambda: self._link.is_aborted)
        elif kind is Deferred:
            self.finish_deferred(pending, timeout, self._wait_until)

    def is_finished(self, pending: Pending) -> bool:
        kind = type(pending)
        if kind is Started:
            return self._link.is_finished(pending)
        if kind is Chain:
            return self.is_chain_finished(pending)
        if kind is Deferred:
            return self.is_deferred_finished(pending)
        return pending is None or bool(pending.done)

    def abort(self) -> None:
        self._link.is_aborted = True

    def leave(self) -> None:
        self._link.leave()

    def close(self) -> None:
        self._link.close()

    # -- how it is done -----------------------------------------------------------------------

    def _settle(
        self, plan: Plan, result: torch.Tensor, output: torch.Tensor, *used: torch.Tensor
    ) -> Callable[[], None]:
        """What writes a reduction into ``output``, and gives back the memory that it took."""

        def settle() -> None:
            plan.decode(result, output, self.size)
            if plan.wide is not None and plan.in_order is None:
                for one in used or (result,):
                    self.scratch.give(one)

        return settle

    def _op(self, plan: Plan) -> Any:
        return op_of(self._shared.MPI, plan)

    def _numbers(self, data: torch.Tensor, num_blocks: int = 1) -> tuple[Any, int, Any]:
        kind = mpi_type(self._shared.MPI, data.dtype)
        return self._buffers.numbers(data, kind, num_blocks)

    def _collective(
        self,
        name: str,
        timeout: timedelta,
        kept: Any,
        settle: Callable[[], None] | None,
        *buffers: Any,
        is_even: bool = False,
    ) -> Pending:
        """Do a collective of MPI's, or start it.

        Args:
            name: mpi4py's, of the blocking form.
            timeout: how long the others may take to come, for a caller who waits.
            kept: the tensors that it uses.
            settle: brings the result home, or None.
            buffers: its arguments.
            is_even: whether all parts of an exchange of this member's are of one size.
        """
        if self._is_cuda and kept is not None:
            _synchronize(kept if isinstance(kept, torch.Tensor) else kept[0])
        link, arrivals = self._link, self._arrivals
        if link.is_aborted:
            raise WireAborted("the communicator was aborted")
        try:
            if arrivals is None:
                return self._start(name, kept, settle, buffers)
            started = None
            call, arguments = getattr(self._comm, name), buffers
            even = tuple(map(_of_one_size, buffers)) if is_even else ()
            even_call = self._comm.Alltoall
            meeting = arrivals.enter(self._is_waiting, timeout, is_even=is_even)
            if meeting:  # from here to MPI's call no handler of a signal runs
                if meeting is _EVEN:  # faster than with sizes for each
                    call, arguments = even_call, even
                call(*arguments)
                if settle is not None:
                    settle()
            else:
                started = self._start(name, kept, settle, buffers)
            arrivals.end()
            return started
        except self._failing as error:
            raise link.failure(error) from None

    def _start(
        self, name: str, kept: Any, settle: Callable[[], None] | None, buffers: Sequence[Any]
    ) -> Started:
        request = getattr(self._comm, "I" + name.lower())(*buffers)
        return self._link.keep(Started(request, kept, settle))

    def _finish_collective(self, timeout: timedelta, request: int, kept: Any) -> None:
        """Wait for a plain collective that had to be started."""
        started = Started(self._shared.MPI.Request.fromhandle(request), kept)
        self._link.finish(self._link.keep(started), timeout)

    def _finish_message(
        self, timeout: timedelta, request: int, kept: torch.Tensor, is_send: bool
    ) -> None:
        """Wait for a plain message that was not done soon."""
        MPI, num_bytes = self._shared.MPI, kept.numel() * kept.itemsize
        status = None if is_send else MPI.Status()
        started = Started(MPI.Request.fromhandle(request), kept, None, status, num_bytes)
        self._link.finish(self._link.keep(started), timeout)

    def _started(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._link.is_aborted:
            raise WireAborted("the communicator was aborted")
        try:
            return call(*arguments)
        except self._failing as error:
            raise self._link.failure(error) from None

    def _tag(self, tag: int) -> int:
        """MPI's tag for a program's: the same, but for those that this MPI has not."""
        largest = self._shared.largest_tag
        if tag <= largest - _MOST_NUMBERED_TAGS:
            return tag
        link = self._link
        try:
            number = self._shared.tag_numbers.number_of(tag, lambda: link.is_aborted)
        except RuntimeError as error:
            raise WireFailure(f"the store is lost, and tag {tag} has no number: {error}") from None
        if number >= _MOST_NUMBERED_TAGS:
            raise WireFailure(f"more than {_MOST_NUMBERED_TAGS} different tags above {largest}")
        return largest - number

    def _most_for_one(self, x: torch.Tensor) -> int:
        """How many elements one member may have for another in an exchange of all."""
        return self._buffers.most // (self.size * x.itemsize)

    def _fits(self, count: int, like: torch.Tensor) -> bool:
        return count * like.itemsize <= self._buffers.most

    def _wait_until(self, is_so: Callable[[], bool], timeout: timedelta) -> None:
        def goes_on() -> bool:
            self._link.progress()
            return is_so()

        self._link.wait(goes_on, timeout)


class MpiWire(Wire):
    """MPI, by mpi4py: CPU tensors, and CUDA tensors directly or by way of host memory."""

    name = "mpi"
    device_types = frozenset({"cpu", "cuda"})
    communicator_kind = MpiCommunicator

    def support(
        self, verb: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
    ) -> str:
        """As for any wire; CUDA tensors are staged, unless a library says that it takes them."""
        found = super().support(verb, device_type, dtype, op)
        return "built" if found and device_type != "cpu" else found

    def is_available(self) -> bool:
        """Whether mpi4py and an MPI library load."""
        return find_mpi_problem() is None

    def why_unavailable(self) -> tuple[str, str]:
        """Why this machine cannot use the wire, and what mends it."""
        return find_mpi_problem() or super().why_unavailable()

    def open(self, opening: Opening) -> Communicator:
        """Open the group among its members alone; the first one of all starts MPI."""
        shared = open_shared(opening)
        if opening.device_type == "cpu" or is_cuda_aware(shared.MPI):
            return MpiCommunicator(opening, shared)
        return StagedCommunicator(MpiCommunicator(replace(opening, device_type="cpu"), shared))


def _of_one_size(cut: tuple[Any, Any, Any]) -> tuple[Any, int, Any]:
    """Parts of one size, as MPI's alltoall takes them, which counts for one member."""
    memory, (counts, _), kind = cut
    return memory, counts[0], kind


def _functions(MPI: Any, comm: Any) -> dict[str, Any] | None:
    """What a native caller needs to call MPI's own functions, or None."""
    starting = [f"MPI_I{name}" for name in _COLLECTIVES.values()]
    blocking = [f"MPI_{name.capitalize()}" for name in _COLLECTIVES.values()]
    found = find_functions(MPI, *blocking, *starting, *_MESSAGES)
    if not found or not hasattr(MPI.Request, "fromhandle"):  # which mpi4py has from version 4 on
        return None
    count = len(_COLLECTIVES)
    return {
        "blocking": dict(zip(_COLLECTIVES, found[:count], strict=True)),
        "starting": dict(zip(_COLLECTIVES, found[count : 2 * count], strict=True)),
        **dict(zip(_MESSAGES.values(), found[2 * count :], strict=True)),
        "comm": comm.handle,
        "size": comm.size,
        "byte": MPI.BYTE.handle,
        "in_place": ctypes.c_void_p(int(MPI.IN_PLACE)).value,
        "handle_bytes": MPI._sizeof(MPI.Request),
        "status_bytes": MPI._sizeof(MPI.Status),
    }


def _synchronize(tensor: torch.Tensor) -> None:
    """Let what its stream is to do be done: MPI knows nothing of streams."""
    torch.cuda.current_stream(tensor.device).synchronize()


def _without_large(tensors: Sequence[torch.Tensor], most: int) -> list[torch.Tensor]:
    return [x if x.numel() <= most else x.new_empty(0) for x in tensors]


def _if_at_most(count: int, most: int) -> int:
    return count if count <= most else 0


register_wire(MpiWire())

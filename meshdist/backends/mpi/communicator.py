"""Run operations over MPI through mpi4py.

A collective is a nonblocking MPI call, which advances in polls. Reductions that MPI lacks run in
another dtype (``datatypes``).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...arrays import apart
from ...bootstrap.mpi_library import find_mpi_problem, is_cuda_aware
from ...dtypes import DTYPES
from ...operation_table import REDUCING_OPERATIONS
from ...reduce_ops import ReduceKind, ReduceOp
from ..communicator import (
    ANY_SIZE,
    FAST_REDUCTIONS,
    NUMBERED_OPS,
    Communicator,
    Explain,
    explained,
)
from ..composed_collectives import reduce_scatter_by_exchange
from ..messages import Mailbox, TagNumbers
from ..native_core import core
from ..operation_args import EXCHANGE_TAG, OperationArgs, Sizes, Tensors, write_all
from ..registry import BackendType, Opening, register_backend
from ..requests import DONE, BackendAborted, BackendFailure, Chain, Request, followed
from .connect import open_link
from .connection import MpiConnection, MpiRequest
from .datatypes import (
    MpiBuffers,
    MpiReduction,
    find_plan,
    mpi_op,
    mpi_type,
    plain_sums,
    view_or_pack,
    view_or_unpack,
)

if TYPE_CHECKING:
    from ..native import FastPath

_SUM = ReduceOp.SUM
_MOST_NUMBERED_TAGS = 1 << 12
_LARGE = 1 << 16
"""The size from which a reduce runs as an all-reduce, and an all-gather as an all-to-all: Open MPI
splits a reduce into many small steps that each wait for a poll, and copies an all-gather."""
_AWAITING_ALL = frozenset({"all_gather", "all_reduce", "barrier", "reduce_scatter"})
"""The collectives from which no member returns before all members have called them."""
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class MpiCommunicator(Communicator):
    """Communicator over MPI."""

    posts_at_once = True
    leaves_early = True

    def __init__(self, opening: Opening, link: MpiConnection) -> None:
        super().__init__("mpi", opening.rank, len(opening.ranks))
        MPI = self._MPI = link.MPI
        self._link = link
        self._comm = link.comm
        self.buffers = MpiBuffers(MPI)
        self._mailbox = Mailbox(opening.rank)
        self._tag_numbers = TagNumbers(opening.store)
        self._largest_tag = int(link.comm.Get_attr(MPI.TAG_UB))
        self._others = [member for member in range(self.size) if member != self.rank]
        self._each = [[member] for member in self._others]
        self._in_place = MPI.IN_PLACE
        self._failing = MPI.Exception
        self._sum = MPI.SUM
        self._kinds = plain_sums(MPI)
        self._is_cuda = opening.device_type == "cuda"

    @classmethod
    def support(cls, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind) -> str:
        if operation in REDUCING_OPERATIONS and not find_plan(op, dtype).is_plain:
            return "built"
        return super().support(operation, device_type, dtype, op)

    def fast_path(
        self, entry: Any, explain: Explain, timeout: timedelta, works: tuple[Any, ...]
    ) -> FastPath | None:
        if core is None or self._is_cuda:
            return None
        runner = core.PythonRunner(
            self,
            partial(self._find_shortcut, timeout),
            partial(_finish, timeout),
            partial(explained, explain, timeout),
        )
        path: FastPath = core.FastPath(entry, runner, FAST_REDUCTIONS)
        return path

    def _find_shortcut(self, timeout: timedelta, operation: str, op: int, *_: Any) -> Any:
        """Return the shortcut of calls that the native core checks, else None."""
        if operation not in _AWAITING_ALL:
            return None
        return (
            partial(self._start_checked, operation, NUMBERED_OPS.get(op)),
            timeout,
            None,
            ANY_SIZE,
        )

    def _start_checked(self, operation: str, op: ReduceKind | None, *given: Any) -> Request | None:
        """Start a call on checked tensors with its timeout; return None if it is over."""
        *tensors, timeout = given
        if len(tensors) == 1:  # a list, which is read and written
            (outputs,), (inputs,) = tensors, tensors
        else:
            outputs, inputs = tensors[:1], tensors[1:]
        request = self.start(
            OperationArgs(operation, operation, inputs, outputs, None, op).as_own(timeout)
        )
        return None if request is DONE else request

    # -- collectives that reduce -------------------------------------------------------------------

    def _all_reduce(self, prepared: OperationArgs) -> Request:
        (tensor,), op = prepared.outputs, prepared.op
        assert op is not None
        kind = self._kinds.get(tensor.dtype) if op is _SUM else None
        if kind is not None and tensor.numel() <= self.buffers.most:  # the common case
            buffers = self._in_place, self.buffers.numbers(tensor, kind), self._sum
            return self._collective("Iallreduce", prepared, tensor, None, *buffers)
        plan = find_plan(op, tensor.dtype)
        data = tensor if plan.is_plain else plan.encode(tensor, self.scratch)
        if data.numel() > self.buffers.most:
            pieces = data.view(-1).split(self.buffers.most)
            started = [
                self.start(prepared.by("all_reduce", [piece], [piece], plan.op)) for piece in pieces
            ]
            return Chain(started, self._copy_back(plan, data, tensor))
        then = None if plan.is_plain else self._copy_back(plan, data, tensor)
        buffers = self._in_place, self._numbers(data), self._op(plan)
        return self._collective("Iallreduce", prepared, (tensor, data), then, *buffers)

    def _reduce(self, prepared: OperationArgs) -> Request:
        (tensor,), op, root = prepared.outputs, prepared.op, prepared.root
        assert op is not None
        if tensor.nbytes >= _LARGE:
            return self.build(prepared)
        plan = find_plan(op, tensor.dtype)
        data = tensor if plan.is_plain else plan.encode(tensor, self.scratch)
        keep_alive, op_and_root = (tensor, data), (self._op(plan), root)
        numbers = self._numbers(data)
        if self.rank != root:
            return self._collective(
                "Ireduce", prepared, keep_alive, None, numbers, None, *op_and_root
            )
        then = None if plan.is_plain else self._copy_back(plan, data, tensor)
        buffers = self._in_place, numbers
        return self._collective("Ireduce", prepared, keep_alive, then, *buffers, *op_and_root)

    def _reduce_scatter(self, prepared: OperationArgs) -> Request:
        return self._reduce_blocks(prepared, prepared.inputs[0], None)

    def _reduce_scatter_list(self, prepared: OperationArgs) -> Request:
        whole, give_back = view_or_pack(prepared.inputs, self.scratch)
        sizes = [part.numel() for part in prepared.inputs]
        return followed(self._reduce_blocks(prepared, whole, sizes), give_back)

    def _reduce_blocks(
        self, prepared: OperationArgs, whole: torch.Tensor, sizes: list[int] | None
    ) -> Request:
        """Reduce-scatter ``whole`` in blocks of ``sizes`` (None: equal)."""
        (output,), kind = prepared.outputs, prepared.op
        assert kind is not None
        plan = find_plan(kind, whole.dtype)
        if whole.numel() > self.buffers.most:
            given = sizes or [output.numel()] * self.size
            return reduce_scatter_by_exchange(self, prepared, output, whole, given)
        mine, data = output, apart(whole, output)
        if not plan.is_plain:
            data = plan.encode(data, self.scratch)
            is_ours = plan.is_in_place
            mine = plan.encode(output, self.scratch) if is_ours else data.new_empty(output.numel())
        then = None if plan.is_plain else self._copy_back(plan, mine, output, data)
        keep_alive = (output, mine, data)
        result, op = self._numbers(mine), self._op(plan)
        if sizes is None:
            buffers = self._numbers(data, self.size), result
            return self._collective(
                "Ireduce_scatter_block", prepared, keep_alive, then, *buffers, op
            )
        buffers = self._numbers(data), result
        return self._collective("Ireduce_scatter", prepared, keep_alive, then, *buffers, sizes, op)

    # -- collectives that move ---------------------------------------------------------------------

    def _broadcast(self, prepared: OperationArgs) -> Request:
        (tensor,) = prepared.outputs
        buffers = self.buffers.moved(tensor), prepared.root
        return self._collective("Ibcast", prepared, tensor, None, *buffers)

    def _all_gather(self, prepared: OperationArgs) -> Request:
        (output,), (tensor,) = prepared.outputs, prepared.inputs
        tensor, moved = apart(tensor, output), self.buffers.moved
        if tensor.nbytes >= _LARGE and output.nbytes <= self.buffers.most:
            memory, num_bytes, byte = moved(tensor)
            for_each = memory, ([num_bytes] * self.size, [0] * self.size), byte
            taken = self.buffers.cut(output, [tensor.numel()] * self.size)
            return self._collective("Ialltoallv", prepared, (output, tensor), None, for_each, taken)
        buffers = moved(tensor), moved(output, self.size)
        return self._collective("Iallgather", prepared, (output, tensor), None, *buffers)

    def _all_gather_list(self, prepared: OperationArgs) -> Request:
        outputs, (tensor,) = prepared.outputs, prepared.inputs
        sizes = [output.numel() for output in outputs]
        if sum(sizes) * tensor.itemsize > self.buffers.most:
            return self.build(prepared)
        whole, unpack = view_or_unpack(outputs, self.scratch)
        tensor = apart(tensor, whole)
        buffers = self.buffers.moved(tensor), self.buffers.cut(whole, sizes)
        return self._collective("Iallgatherv", prepared, (whole, tensor), unpack, *buffers)

    def _gather(self, prepared: OperationArgs) -> Request:
        (tensor,), root = prepared.inputs, prepared.root
        mine = self.buffers.moved
        if self.rank != root:
            return self._collective("Igather", prepared, tensor, None, mine(tensor), None, root)
        whole, unpack = view_or_unpack(prepared.outputs, self.scratch)
        tensor = apart(tensor, whole)
        buffers = mine(tensor), mine(whole, self.size)
        return self._collective("Igather", prepared, (whole, tensor), unpack, *buffers, root)

    def _scatter(self, prepared: OperationArgs) -> Request:
        (tensor,), root = prepared.outputs, prepared.root
        mine = self.buffers.moved
        if self.rank != root:
            return self._collective("Iscatter", prepared, tensor, None, None, mine(tensor), root)
        whole, give_back = view_or_pack(prepared.inputs, self.scratch)
        whole = apart(whole, tensor)
        buffers = mine(whole, self.size), mine(tensor)
        return self._collective("Iscatter", prepared, (whole, tensor), give_back, *buffers, root)

    def _all_to_all(self, prepared: OperationArgs) -> Request:
        # A member knows only its own sizes, so each pair of members decides independently whether
        # its part is too large for the joint call and is sent as a message.
        outputs, inputs = prepared.outputs, prepared.inputs
        most = self._most_for_one(inputs[0])
        large = [
            prepared.by("recv", (), [x], root=peer, tag=EXCHANGE_TAG)
            for peer, x in enumerate(outputs)
            if x.numel() > most
        ]
        large += [
            prepared.by("send", [x], (), root=peer, tag=EXCHANGE_TAG)
            for peer, x in enumerate(inputs)
            if x.numel() > most
        ]
        messages = [self.start(message) for message in large]
        outputs, inputs = _without_large(outputs, most), _without_large(inputs, most)
        takes, gives = ([x.numel() for x in some] for some in (outputs, inputs))
        whole, unpack = view_or_unpack(outputs, self.scratch)
        together, give_back = view_or_pack(inputs, self.scratch)
        started = self._exchange(prepared, whole, apart(together, whole), takes, gives)

        return followed(Chain([*messages, started], unpack), give_back)

    def _all_to_all_single(self, prepared: OperationArgs) -> Request:
        (output,), (tensor,), sizes = prepared.outputs, prepared.inputs, prepared.sizes
        assert sizes is not None
        gives, takes = sizes
        if max(*takes, *gives) <= self._most_for_one(tensor):
            return self._exchange(prepared, output, apart(tensor, output), takes, gives)
        return self.build(prepared)

    def _exchange(
        self,
        prepared: OperationArgs,
        output: torch.Tensor,
        tensor: torch.Tensor,
        takes: Sizes,
        gives: Sizes,
    ) -> Request:
        cut = self.buffers.cut
        keep_alive, buffers = (output, tensor), (cut(tensor, gives), cut(output, takes))
        return self._collective("Ialltoallv", prepared, keep_alive, None, *buffers)

    def _barrier(self, prepared: OperationArgs) -> Request:
        return self._collective("Ibarrier", prepared, None, None)

    # -- messages -----------------------------------------------------------------------------

    def _send(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.inputs, prepared.root, prepared.tag
        if peer == self.rank:
            return self._mailbox.send(tensor, tag)
        assert peer is not None  # a receiver is always named
        return self._message(self._comm.Isend, tensor, peer, tag, [peer])

    def _recv(self, prepared: OperationArgs) -> Request:
        (tensor,), peer, tag = prepared.outputs, prepared.root, prepared.tag
        if peer == self.rank or (peer is None and (self.size == 1 or self._mailbox.has_sent(tag))):
            return self._mailbox.recv(tensor, tag)
        arguments = (self._MPI.Status(), tensor.numel() * tensor.itemsize)
        if peer is None:
            peer, senders = self._MPI.ANY_SOURCE, self._others
        else:
            senders = [peer]
        return self._message(self._comm.Irecv, tensor, peer, tag, senders, *arguments)

    # -- waiting and the end ------------------------------------------------------------------

    def abort(self) -> None:
        self._link.is_aborted = True
        self._mailbox.abort()

    def leave(self) -> None:
        self._link.leave()

    def close(self) -> None:
        self._link.close()

    # -- how it is done -----------------------------------------------------------------------

    def _copy_back(
        self, plan: MpiReduction, result: torch.Tensor, output: torch.Tensor, *used: torch.Tensor
    ) -> Callable[[], None]:
        """Return a function that decodes ``result`` into ``output`` and frees ``used``."""

        def copy_back() -> None:
            plan.decode(result, output, self.size)
            if plan.wide is not None and plan.in_order is None:
                for tensor in used or (result,):
                    self.scratch.give(tensor)

        return copy_back

    def _op(self, plan: MpiReduction) -> Any:
        return mpi_op(self._MPI, plan.op)

    def _numbers(self, data: torch.Tensor, num_blocks: int = 1) -> tuple[Any, int, Any]:
        kind = mpi_type(self._MPI, data.dtype)
        return self.buffers.numbers(data, kind, num_blocks)

    def _collective(
        self,
        name: str,
        prepared: OperationArgs,
        keep_alive: Any,
        then: Callable[[], None] | None,
        *buffers: Any,
    ) -> Request:
        """Start mpi4py's method ``name``; finish it if the caller waits.

        Args:
            keep_alive: tensors to keep alive while it runs.
            then: copies the result back.
        """
        if self._is_cuda and keep_alive is not None:
            _synchronize(keep_alive if isinstance(keep_alive, torch.Tensor) else keep_alive[0])
        link = self._link
        if link.is_aborted:
            raise BackendAborted("the communicator was aborted")
        try:
            native_request = getattr(self._comm, name)(*buffers)
        except self._failing as error:
            raise link.failure(error) from None
        request = MpiRequest(link, native_request, keep_alive, self._each, then)
        if not prepared.waits:
            return link.start(request)
        link.finish_at_once(request, prepared.timeout)
        return DONE

    def _message(
        self,
        call: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int,
        tag: int,
        others: list[int],
        *arguments: Any,
    ) -> Request:
        """Start a message by mpi4py's Isend or Irecv.

        Args:
            others: the possible peers.
            arguments: a receive's MPI status and number of bytes.
        """
        link = self._link
        if self._is_cuda:
            _synchronize(tensor)
        number = self._tag(tag, tensor.dtype)
        if link.is_aborted:
            raise BackendAborted("the communicator was aborted")
        try:
            native_request = call(self.buffers.moved(tensor), peer, number)
        except self._failing as error:
            raise link.failure(error) from None
        return link.start(MpiRequest(link, native_request, tensor, [others], None, *arguments))

    def _tag(self, tag: int, dtype: torch.dtype) -> int:
        """Return MPI's tag for ``dtype`` and a program's ``tag``, or the large tag's number."""
        # MPI sends bytes: the dtype in the tag keeps a receive from any member from interpreting
        # them as another dtype.
        num_tags, link = (self._largest_tag + 1) // len(_CODES), self._link
        if tag >= (num_direct := max(0, num_tags - _MOST_NUMBERED_TAGS)):
            try:
                number = self._tag_numbers.number_of(tag, lambda: link.is_aborted)
            except RuntimeError as error:
                lack = f"the store is lost, so tag {tag} cannot get a number: {error}"
                raise BackendFailure(lack) from None
            if (tag := num_direct + number) >= num_tags:
                raise BackendFailure(
                    f"more than {_MOST_NUMBERED_TAGS} different tags of {num_direct} or more"
                )
        return tag * len(_CODES) + _CODES[dtype]

    def _most_for_one(self, x: torch.Tensor) -> int:
        """Return the most elements that a member may send to another in an all-to-all."""
        return self.buffers.most // (self.size * x.itemsize)


class StagedMpiCommunicator(MpiCommunicator):
    """Communicator for CUDA tensors over an MPI that is not CUDA-aware."""

    def start(self, prepared: OperationArgs) -> Request:
        """Start ``prepared``, and its composing collectives, on copies in host memory."""
        inputs, outputs = prepared.inputs, prepared.outputs
        if not any(x.is_cuda for x in (*inputs, *outputs)):
            return super().start(prepared)
        copies = {id(x): x.cpu() for x in (*inputs, *outputs)}
        given, received = ([copies[id(x)] for x in some] for some in (inputs, outputs))
        of_call = prepared.op, prepared.root, prepared.sizes, prepared.tag
        host = prepared.by(prepared.backend_operation, given, received, *of_call)
        return followed(super().start(host), partial(write_all, outputs, received))


class MpiBackend(BackendType):
    """MPI through mpi4py: CPU tensors, and CUDA tensors directly or staged."""

    name = "mpi"
    device_types = frozenset({"cpu", "cuda"})
    communicator_kind = MpiCommunicator

    def support(
        self, operation: str, device_type: str, dtype: torch.dtype, op: ReduceKind | None = None
    ) -> str:
        """Return the support; "built" for CUDA tensors, which may be staged."""
        found = super().support(operation, device_type, dtype, op)
        return "built" if found and device_type != "cpu" else found

    def connection_for(self, device_type: str) -> str:
        """Return the backend's name, with the device type if not "cpu"."""
        return self.name if device_type == "cpu" else f"{self.name}-{device_type}"

    def is_available(self) -> bool:
        return find_mpi_problem() is None

    def why_unavailable(self) -> tuple[str, str]:
        return find_mpi_problem() or super().why_unavailable()

    def open(self, opening: Opening) -> Communicator:
        """Open the group with only its members; a process's first group starts MPI."""
        link = open_link(opening)
        is_staged = opening.device_type == "cuda" and not is_cuda_aware()
        return (StagedMpiCommunicator if is_staged else MpiCommunicator)(opening, link)


def _synchronize(tensor: torch.Tensor) -> None:
    """Wait for the current stream of a CUDA tensor's device, which MPI does not order."""
    if not tensor.is_cuda:  # a copy in host memory
        return
    torch.cuda.current_stream(tensor.device).synchronize()


def _finish(timeout: timedelta, request: Request, _: int) -> None:
    request.finish(timeout)


def _without_large(tensors: Tensors, most: int) -> list[torch.Tensor]:
    return [x if x.numel() <= most else x.new_empty(0) for x in tensors]


register_backend(MpiBackend())

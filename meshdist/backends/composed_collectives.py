"""Compose collectives of basic collectives, and reduce tensors in this process.

Reductions of equal inputs are bitwise equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch

from ..dtypes import DTYPES, IN_ORDER, SIGNED, dtype_name
from ..errors import DtypeError
from ..reduce_ops import ON_BOOL, ReduceKind, ReduceOp, find_refusal
from ..runtime.memory import Scratch
from .native_core import DTYPE_CODES, REDUCTION_CODES, core
from .operation_args import (
    EXCHANGE_TAG,
    OperationArgs,
    Sizes,
    Tensors,
    blocks,
    packed,
    parts,
    write,
    write_all,
    write_blocks,
    writing,
)
from .requests import Chain, Request, followed


class ComposingCommunicator(Protocol):
    """A communicator that composes collectives."""

    backend: str
    rank: int
    size: int
    scratch: Scratch

    def start(self, prepared: OperationArgs) -> Request:
        """Start ``prepared``, and return its request."""


_EXACT = (torch.float32, torch.float64)
"""Dtypes that are reduced without conversion."""

_PIECE = 1 << 15  # elements: they fit a core's cache, and torch starts no threads for them

_SMALL_BYTES = 1 << 16
"""The largest size that the native core reduces; torch uses several cores for more."""

_ORDERED = (ReduceOp.MIN, ReduceOp.MAX)

_TURNS = {
    kind: torch.tensor([info.bits - 1, info.max], dtype=kind, device="cpu").unbind()
    for kind, info in [(kind, torch.iinfo(kind)) for kind in IN_ORDER.values()]
}
"""The shift that leaves only the sign, and the mask of all other bits. They are tensors, which
torch combines with small tensors in half the time of Python numbers."""

_IN_PLACE: dict[ReduceKind, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, part: torch.minimum(total, part, out=total),
    ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def find_lack(op: ReduceKind, dtype: torch.dtype) -> str | None:
    """Return None if ``reduced`` supports ``op`` on ``dtype``, else a text of supported dtypes."""
    if dtype not in DTYPES:
        return "bool, or integers, floats and complex numbers of 8 bits and more"
    return find_refusal(op, dtype)


def check_reducible(backend: str, op: ReduceKind, dtype: torch.dtype) -> None:
    """Raise DtypeError for ``backend`` if ``reduced`` lacks ``op`` on ``dtype``."""
    lack = find_lack(op, dtype)
    if lack is not None:
        raise DtypeError(
            f"backend {backend!r} cannot reduce {dtype_name(dtype)} with {op.name}",
            expected=lack,
            fix="use another reduction, or convert the tensor",
        )


def reduce_into(output: torch.Tensor, parts: Tensors, op: ReduceKind) -> None:
    """Reduce flat ``parts``, in order, into ``output``, which does not overlap."""
    dtype = output.dtype
    if dtype in _EXACT and output.is_cpu:
        output.copy_(parts[0])
        for part in parts[1:]:
            _IN_PLACE[op](output, part)
        if op == ReduceOp.AVG:
            divide(output, len(parts))
    else:
        output.copy_(reduced(parts, op))


def reduce_parts(output: torch.Tensor, whole: torch.Tensor, num_parts: int, op: ReduceKind) -> None:
    """Reduce ``num_parts`` equal parts of flat ``whole`` into ``output``."""
    codes = REDUCTION_CODES.get((output.dtype, op.value))
    if codes is not None and whole.is_cpu and whole.nbytes <= _SMALL_BYTES:
        core.reduce_parts(output, whole, num_parts, *codes)
        return
    with writing():
        reduce_into(output.view(-1), blocks(whole, num_parts), op)


def reduced(parts: Tensors, op: ReduceKind) -> torch.Tensor:
    """Reduce flat tensors into a new tensor; narrow floats reduce in float32."""
    dtype = parts[0].dtype
    device = parts[0].device
    if dtype is torch.bool:
        op = ON_BOOL[op]
    if dtype in SIGNED:
        return _reduced_unsigned(parts, op)
    facts = DTYPES[dtype]
    wide = (None if facts.is_whole else facts.wide) or dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _IN_PLACE[op](total, part.to(device, wide))
    if op == ReduceOp.AVG:
        divide(total, len(parts))
    return total.to(dtype)


def divide(total: torch.Tensor, num: int) -> None:
    """Divide ``total`` by ``num`` in place; integers are rounded toward zero."""
    facts = DTYPES[total.dtype]
    with writing():
        if not facts.is_whole:
            total.div_(num)
        elif total.dtype is torch.uint64:
            _divide_unsigned(total.view(torch.int64), num)
        elif facts.wide is not None:  # ``num`` may not fit in the narrow dtype
            total.copy_(total.to(facts.wide).div_(num, rounding_mode="trunc"))
        else:
            total.div_(num, rounding_mode="trunc")


def to_order(x: torch.Tensor, op: ReduceKind) -> torch.Tensor:
    """Map floats to integers of equal order, NaN as ``op``'s choice; in place except on CUDA."""
    bits = x.view(IN_ORDER[x.dtype])
    if x.is_cuda:  # one kernel, which writes a new tensor
        return _cuda_kernel("to_max" if op == ReduceOp.MAX else "to_min")(bits)
    info = torch.iinfo(bits.dtype)
    end = info.max if op == ReduceOp.MAX else info.min
    with writing():
        for numbers, some in zip(x.unsafe_split(_PIECE), bits.unsafe_split(_PIECE), strict=True):
            is_nan = numbers.isnan()
            _flip(some).masked_fill_(is_nan, end)
    return bits


def flip(bits: torch.Tensor) -> torch.Tensor:
    """Invert ``to_order``, in place except on CUDA."""
    if bits.is_cuda:
        return _cuda_kernel("flip")(bits)
    with writing():
        for some in bits.unsafe_split(_PIECE):
            _flip(some)
    return bits


@cache
def _cuda_kernel(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the kernel "flip", "to_max" or "to_min" on float bits, compiled at first call."""
    # With torch's operations the conversions would take ten kernels, each of which reads all bits.
    most = "~(T(1) << (8 * sizeof(T) - 1))"
    infinity = f"({most} ^ ((T(1) << (sizeof(T) == 4 ? 23 : 52)) - 1))"
    flipped = f"bits < 0 ? bits ^ {most} : bits"
    ordered = f"(bits & {most}) > {infinity} ? {{end}} : {flipped}"
    values = {
        "flip": flipped,
        "to_max": ordered.format(end=most),
        "to_min": ordered.format(end=f"~{most}"),
    }
    code = f"template <typename T> T {name}(T bits) {{ return {values[name]}; }}"
    kernel = torch.cuda.jiterator._create_jit_fn(code)

    def run(bits: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(bits.device):  # the kernel runs on the current device
            return kernel(bits)  # type: ignore[no-any-return]

    return run


def _flip(bits: torch.Tensor) -> torch.Tensor:
    # In a negative float, larger remaining bits mean a smaller number.
    to_sign, magnitude = _TURNS[bits.dtype]
    return bits.bitwise_xor_((bits >> to_sign).bitwise_and_(magnitude))


def _divide_unsigned(bits: torch.Tensor, num: int) -> None:
    """Divide uint64 numbers, viewed as int64, by ``num`` in place."""
    # torch has no wider dtype for the division.
    halves = (bits >> 1).bitwise_and_(torch.iinfo(bits.dtype).max)
    quotient = halves.div_(num, rounding_mode="trunc").mul_(2)
    rest = bits - quotient * num  # from 0 to 2 * num
    bits.copy_(quotient.add_(rest >= num))


def _reduced_unsigned(parts: Tensors, op: ReduceKind) -> torch.Tensor:
    """Reduce flat unsigned tensors, in signed integers of their size."""
    dtype = parts[0].dtype
    signed = SIGNED[dtype]
    # Wrapping sums and bitwise ops ignore the sign; ordering needs it, so flip the sign bit.
    flip = torch.iinfo(signed).min if op in _ORDERED else 0
    step = ReduceOp.SUM if op == ReduceOp.AVG else op
    total = reduced([part.view(signed).bitwise_xor(flip) for part in parts], step)
    whole = total.bitwise_xor_(flip).view(dtype)
    if op == ReduceOp.AVG:
        divide(whole, len(parts))
    return whole


def all_reduce_by_gathering(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-gather, then reduce in this process."""
    (tensor,), op = prepared.outputs, prepared.op
    assert op is not None
    check_reducible(backend.backend, op, tensor.dtype)
    whole = tensor.new_empty(backend.size * tensor.numel())
    gathered = backend.start(prepared.by("all_gather", [tensor], [whole]))
    return followed(gathered, partial(reduce_parts, tensor, whole, backend.size, op))


def all_reduce_dividing(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start a sum, then divide it."""
    (tensor,) = prepared.outputs
    check_reducible(backend.backend, ReduceOp.AVG, tensor.dtype)
    summed = backend.start(prepared.by("all_reduce", [tensor], [tensor], ReduceOp.SUM))
    return followed(summed, lambda: divide(tensor, backend.size))


def all_reduce_widened(
    backend: ComposingCommunicator, prepared: OperationArgs, dtype: torch.dtype
) -> Request:
    """Start an all-reduce in ``dtype``, which holds all values; convert back."""
    (tensor,), op = prepared.outputs, prepared.op
    assert op is not None
    # Send a copy, so that a failed call leaves the caller's floats unchanged.
    if dtype in IN_ORDER.values() and tensor.dtype.is_floating_point:
        (sent,), then = in_order(op, [tensor])  # NaN is kept
    else:
        copy = tensor.to(dtype, copy=True)
        sent, then = [copy], partial(write, tensor, copy)
    return followed(backend.start(prepared.by("all_reduce", sent, sent, op)), then)


def in_order(
    op: ReduceKind, tensors: Tensors
) -> tuple[tuple[list[torch.Tensor]], Callable[[], None]]:
    """Return floats as integers of the same order, and a function to write them back.

    Args:
        tensors: a single tensor, as for a fast path's ``prepare``.
    """
    (tensor,) = tensors
    held = DTYPES[tensor.dtype].wide or tensor.dtype
    if core is None or not tensor.is_cpu or tensor.itemsize == 1:  # the core has no float8
        bits = to_order(tensor.to(held, copy=not tensor.is_cuda).view(-1), op)
        return ([bits],), lambda: write(tensor, flip(bits).view(held))
    bits = torch.empty(tensor.numel(), dtype=IN_ORDER[held], device="cpu")
    code = DTYPE_CODES[tensor.dtype]
    core.to_order(code, bits, tensor, op == ReduceOp.MAX)
    return ([bits],), partial(core.from_order, code, tensor, bits)


def reduce_scatter_by_exchange(
    backend: ComposingCommunicator,
    prepared: OperationArgs,
    output: torch.Tensor,
    tensor: torch.Tensor,
    sizes: Sizes,
) -> Request:
    """Exchange parts of ``sizes[j]`` elements for member j; reduce into ``output``."""
    op = prepared.op
    assert op is not None
    check_reducible(backend.backend, op, tensor.dtype)
    count = output.numel()
    mine = backend.scratch.take(backend.size * count, tensor)
    cuts = sizes, [count] * backend.size
    exchanged = backend.start(prepared.by("all_to_all_single", [tensor], [mine], sizes=cuts))
    return followed(exchanged, partial(reduce_scratch, backend, output, mine, op))


def reduce_scratch(
    backend: ComposingCommunicator, output: torch.Tensor, mine: torch.Tensor, op: ReduceKind
) -> None:
    """Reduce ``mine``, a part per member, into ``output``; return ``mine`` to the pool."""
    reduce_parts(output, mine, backend.size, op)
    backend.scratch.give(mine)


def all_to_all_by_packing(
    backend: ComposingCommunicator, prepared: OperationArgs, outputs: Tensors, inputs: Tensors
) -> Request:
    """Exchange ``inputs`` packed in a flat tensor; unpack to ``outputs``."""
    together = packed(inputs)
    sizes = [part.numel() for part in inputs], [output.numel() for output in outputs]
    whole = together.new_empty(sum(sizes[1]))
    exchanged = backend.start(prepared.by("all_to_all_single", [together], [whole], sizes=sizes))
    return followed(exchanged, lambda: write_all(outputs, parts(whole, sizes[1])))


# -- operations that a backend does not implement --------------------------------------------------


def all_reduce_list(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-reduce of each tensor in turn."""
    op = prepared.op
    return Chain([backend.start(prepared.by("all_reduce", [x], [x], op)) for x in prepared.outputs])


def reduce(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-reduce, on a copy except on the root."""
    (tensor,) = prepared.outputs
    taking = [tensor if backend.rank == prepared.root else tensor.clone()]
    return backend.start(prepared.by("all_reduce", taking, taking, prepared.op))


def gather(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-gather; only the root copies the result."""
    (tensor,), outputs = prepared.inputs, prepared.outputs
    whole = tensor.new_empty(backend.size * tensor.numel())
    gathered = backend.start(prepared.by("all_gather", [tensor], [whole]))
    return followed(gathered, lambda: write_blocks(outputs, whole))


def scatter(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start a broadcast of all inputs; each member keeps its part."""
    (tensor,), root = prepared.outputs, prepared.root
    count = tensor.numel()
    is_root = backend.rank == root
    whole = packed(prepared.inputs) if is_root else tensor.new_empty(backend.size * count)
    sent = backend.start(prepared.by("broadcast", [whole], [whole], root=root))
    return followed(sent, lambda: write(tensor, whole[backend.rank * count :][:count]))


def all_gather_list(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-gather if sizes are equal, else a broadcast from each member."""
    (tensor,), outputs = prepared.inputs, prepared.outputs
    if all(output.numel() == tensor.numel() for output in outputs):
        return gather(backend, prepared)
    write(outputs[backend.rank], tensor)
    return Chain(
        [
            backend.start(prepared.by("broadcast", [output], [output], root=root))
            for root, output in enumerate(outputs)
        ]
    )


def reduce_scatter(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start ``reduce_scatter_list`` on equal blocks of the input."""
    parts = blocks(prepared.inputs[0], backend.size)
    return backend.start(prepared.by("reduce_scatter_list", parts, prepared.outputs, prepared.op))


def reduce_scatter_list(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-reduce of all inputs; each member keeps its part."""
    (output,), inputs = prepared.outputs, prepared.inputs
    whole = packed(inputs)
    start = sum(part.numel() for part in inputs[: backend.rank])
    reduction = backend.start(prepared.by("all_reduce", [whole], [whole], prepared.op))
    return followed(reduction, lambda: write(output, whole[start:][: output.numel()]))


def all_to_all(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start messages to and from each other member, and a local copy."""
    outputs, inputs = prepared.outputs, prepared.inputs
    write(outputs[backend.rank], inputs[backend.rank])
    others = [peer for peer in range(backend.size) if peer != backend.rank]
    messages = [prepared.by("recv", (), [outputs[j]], root=j, tag=EXCHANGE_TAG) for j in others]
    messages += [prepared.by("send", [inputs[j]], (), root=j, tag=EXCHANGE_TAG) for j in others]
    # Start them asynchronously: a blocking receive would prevent the sends.
    return Chain([backend.start(message.as_async()) for message in messages])


def all_to_all_single(backend: ComposingCommunicator, prepared: OperationArgs) -> Request:
    """Start an all-to-all on consecutive parts of input and output."""
    assert prepared.sizes is not None
    gives, takes = prepared.sizes
    inputs, outputs = parts(prepared.inputs[0], gives), parts(prepared.outputs[0], takes)
    return backend.start(prepared.by("all_to_all", inputs, outputs))


COMPOSED: dict[str, Callable[[ComposingCommunicator, OperationArgs], Request]] = {
    build.__name__: build
    for build in (
        all_reduce_list,
        reduce,
        gather,
        scatter,
        all_gather_list,
        reduce_scatter,
        reduce_scatter_list,
        all_to_all,
        all_to_all_single,
    )
}
"""The composition of each operation that a backend may lack."""

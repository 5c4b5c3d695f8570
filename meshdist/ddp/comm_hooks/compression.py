"""Compress gradients in communication hooks: 16 bits, 8 bits, PowerSGD.

*16 bits.* On the CPU a large bucket is converted in its own memory, piece by piece in the cache:
new memory would cost more than the saved bytes.

*8 bits.* A gradient is sent as a step between minimum and maximum. All ranks gather all steps and
sum them in the same order, piece by piece in the cache, so all compute the same averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from ...collectives.tensor_collectives import all_gather_into_tensor, all_reduce
from ...groups.process_group import ProcessGroup
from ...reduce_ops import ReduceOp
from .bucket import GradBucket, averaged, done_with, group_for, reduced

__all__ = [
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

PIECE = 1 << 17  # elements that fit in the cache; fewer for 8 bits
_QUANTIZED_PIECE = 1 << 16
_STEPS = 255
_LEAST_SCALE = torch.finfo(torch.float32).eps
_CHANNEL_SIZE = 512

Hook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def fp16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in float16: half the bytes of float32, 11 bits of precision, at most 65,504.

    Each rank divides its gradients by the number of ranks before the sum.

    Args:
        process_group: a group or mesh; None for the wrapper's.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory and dtype.

    Cost: one all-reduce of 2 bytes per element.
    """
    return _compressed(torch.float16, process_group, bucket)


def bf16_compress_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in bfloat16: half the bytes of float32, 8 bits of precision, float32's range.

    Args:
        process_group: a group or mesh; None for the wrapper's.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory and dtype.

    Cost: one all-reduce of 2 bytes per element.
    """
    return _compressed(torch.bfloat16, process_group, bucket)


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Run ``hook`` on float16: convert its bucket before, and its result after.

    Args:
        hook: any communication hook, such as ``powerSGD_hook``.

    Returns:
        A hook for ``register_comm_hook``, with the state of ``hook``.
    """

    def fp16_compress_wrapper_hook(
        state: Any, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _converted(torch.float16, hook, state, bucket)

    return fp16_compress_wrapper_hook


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Run ``hook`` on bfloat16: convert its bucket before, and its result after.

    Args:
        hook: any communication hook, such as ``powerSGD_hook``.

    Returns:
        A hook for ``register_comm_hook``, with the state of ``hook``.
    """

    def bf16_compress_wrapper_hook(
        state: Any, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        return _converted(torch.bfloat16, hook, state, bucket)

    return bf16_compress_wrapper_hook


def _compressed(
    dtype: torch.dtype, process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    group = group_for(process_group, bucket)
    buffer = bucket.buffer()
    if _fits_inside(buffer, dtype):
        half = _shrunk(buffer, dtype, group.size())
        return reduced(half, ReduceOp.SUM, group).then(lambda _: _grown(half, buffer))
    half = buffer.to(dtype, copy=True).div_(group.size())
    return reduced(half, ReduceOp.SUM, group).then(lambda done: buffer.copy_(done.value()[0]))


def _fits_inside(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``buffer`` is large and can be converted in its memory."""
    is_large = buffer.layout is torch.strided and buffer.numel() > PIECE
    has_room = buffer.element_size() >= 2 * dtype.itemsize and not buffer.is_complex()
    return is_large and has_room and buffer.is_cpu and buffer.is_contiguous()


def _shrunk(buffer: torch.Tensor, dtype: torch.dtype, num_ranks: int) -> torch.Tensor:
    """Write ``buffer / num_ranks`` in ``dtype`` over the start of ``buffer``; return that part."""
    half = buffer.view(dtype)[: buffer.numel()]
    for is_first, part, into in _pieces(buffer, half):
        # Only the first piece overlaps its source.
        into.copy_(part.to(dtype) if is_first else part).div_(num_ranks)
    return half


def _grown(half: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Expand ``half``, at the start of ``buffer``, to all of ``buffer``; return it."""
    for is_first, into, part in reversed([*_pieces(buffer, half)]):
        into.copy_(part.clone() if is_first else part)
    return buffer


def _pieces(
    buffer: torch.Tensor, half: torch.Tensor
) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """Iterate over (is_first, piece of ``buffer``, same piece of ``half``) in order."""
    pairs = zip(buffer.split(PIECE), half.split(PIECE), strict=True)
    return ((index == 0, *pair) for index, pair in enumerate(pairs))


def _converted(
    dtype: torch.dtype, hook: Hook, state: Any, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    bucket.set_buffer(buffer.to(dtype, copy=True))

    def convert_back(done: torch.futures.Future[Any]) -> torch.Tensor:
        value = done.value()
        return buffer.copy_(value[0] if isinstance(value, (list, tuple)) else value)

    return hook(state, bucket).then(convert_back)


def quantization_pertensor_hook(
    process_group: ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average in 8 bits, with one scale for the whole bucket.

    Args:
        process_group: a group or mesh; None for the wrapper's.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory and dtype.

    Cost: one all-gather of one byte per element: less than a float32 all-reduce on up to 8 ranks.
    """
    return _averaged(process_group, bucket, _CHANNEL_SIZE, shares_scale=True)


def quantization_perchannel_hook(
    process_group: ProcessGroup | None, bucket: GradBucket, bucket_size: int = _CHANNEL_SIZE
) -> torch.futures.Future[torch.Tensor]:
    """Average in 8 bits, with one scale per ``bucket_size`` elements, so more precisely.

    Args:
        process_group: a group or mesh; None for the wrapper's.
        bucket: the gradients.
        bucket_size: the number of elements that share a scale.

    Returns:
        A Future of the averages, in the bucket's memory and dtype.

    Cost: one all-gather of one byte per element, and 8 per scale.
    """
    return _averaged(process_group, bucket, bucket_size, shares_scale=False)


def _averaged(
    process_group: ProcessGroup | None, bucket: GradBucket, size: int, *, shares_scale: bool
) -> torch.futures.Future[torch.Tensor]:
    group = group_for(process_group, bucket)
    buffer = bucket.buffer()
    if not buffer.numel():
        return done_with(buffer)
    mine = _packed(buffer, size, shares_scale)
    gathered = mine.new_empty(group.size() * mine.numel())

    def add_up(_: object) -> torch.Tensor:
        parts = [_parts(packed, buffer.numel()) for packed in gathered.split(mine.numel())]
        for channels, elements in _channels(buffer.numel(), size):
            total = buffer.new_zeros(elements.stop - elements.start, dtype=torch.float32)
            for facts, steps in parts:
                scale, zero = facts if shares_scale else facts[:, channels]
                total += (_rows(steps[elements], channels) - zero).mul_(scale).view(-1)
            buffer[elements] = total.div_(group.size())
        return buffer

    work = all_gather_into_tensor(gathered, mine, group, async_op=True)
    return work.get_future().then(add_up)  # type: ignore[union-attr]


def _packed(values: torch.Tensor, size: int, shares_scale: bool) -> torch.Tensor:
    """Quantize ``values`` to 8 bits; return bytes: scales and zero points, then the values.

    Args:
        size: the number of consecutive values, a channel, that share a scale and a zero point.
        shares_scale: whether all channels share them.
    """
    ends = [
        _rows(values[elements], channels).aminmax(dim=1)
        for channels, elements in _channels(values.numel(), size)
    ]
    least = torch.cat([end.min for end in ends]).float()
    greatest = torch.cat([end.max for end in ends]).float()
    if shares_scale:
        least, greatest = least.amin(0, keepdim=True), greatest.amax(0, keepdim=True)
    least, greatest = least.clamp(max=0), greatest.clamp(min=0)
    scale = ((greatest - least) / _STEPS).clamp(min=_LEAST_SCALE)
    zero = (-least / scale).round().clamp(0, _STEPS)
    facts = torch.stack([scale, zero])[..., None]
    packed = torch.empty(facts.nbytes + values.numel(), dtype=torch.uint8, device=values.device)
    packed[: facts.nbytes] = facts.view(-1).view(torch.uint8)
    steps = packed[facts.nbytes :]
    for channels, elements in _channels(values.numel(), size):
        scale, zero = facts if shares_scale else facts[:, channels]
        # A non-finite value may get any step: its scale makes the sum NaN or infinite.
        found = (_rows(values[elements], channels) / scale).round_().add_(zero)
        steps[elements] = found.clamp_(0, _STEPS).view(-1)
    return packed


def _parts(packed: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split ``_packed``'s bytes into scales and zero points (2, channels, 1), and 8-bit values.

    Args:
        numel: the number of 8-bit values.
    """
    facts, steps = packed.split([packed.numel() - numel, numel])
    return facts.clone().view(torch.float32).view(2, -1, 1), steps


def _channels(numel: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices (of channels, of elements) piece by piece; a channel has ``size`` elements."""
    whole = numel - numel % size
    step = max(_QUANTIZED_PIECE // size, 1) * size
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield slice(start // size, stop // size), slice(start, stop)
    if whole < numel:
        yield slice(whole // size, whole // size + 1), slice(whole, numel)


def _rows(elements: torch.Tensor, channels: slice) -> torch.Tensor:
    return elements.view(channels.stop - channels.start, -1)


def batched_powerSGD_hook(
    state: PowerSGDState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a low-rank approximation of the bucket; add its error to the next gradient.

    The first ``state.start_powerSGD_iter`` backwards average exactly.

    Args:
        state: torch's; its ``process_group`` is a group, a mesh, or None for the wrapper's.
        bucket: the gradients.

    Returns:
        A Future of the averages, in the bucket's memory and dtype.

    Cost: two all-reduces of ``matrix_approximation_rank * sqrt(n)`` elements, for n in the bucket.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD", NeurIPS 2019, algorithm 1.
    """
    group = group_for(state.process_group, bucket)
    buffer, index = bucket.buffer(), bucket.index()
    if state.iter < state.start_powerSGD_iter or not buffer.numel():
        state.maybe_increase_iter(bucket)
        return averaged(buffer, group)

    numel = buffer.numel()
    side = math.ceil(math.sqrt(numel))
    rank = min(state.matrix_approximation_rank, side)
    state.total_numel_before_compression += numel
    state.total_numel_after_compression += 2 * side * rank
    needed = buffer.new_zeros(side * side)
    needed[:numel] = buffer
    if state.use_error_feedback and index in state.error_dict:
        needed += state.error_dict[index]
    matrix = needed.view(side, side)
    q = state.q_memory_dict.get(index) if state.warm_start else None
    if q is None:
        seed = state.rng.randint(1_000_000_000)  # equal on all ranks, different in each step
        q = torch.randn(side, rank, generator=torch.Generator().manual_seed(seed), device="cpu")
    p = matrix @ _orthogonal(q.to(buffer))

    def approximate(_: object) -> torch.Tensor:
        columns = _orthogonal(p)
        rows = matrix.t() @ columns
        all_reduce(rows, ReduceOp.AVG, group)
        found = (columns @ rows.t()).view(-1)
        if state.use_error_feedback:
            state.error_dict[index] = needed - found
        if state.warm_start:
            state.p_memory_dict[index], state.q_memory_dict[index] = columns, rows
        state.maybe_increase_iter(bucket)
        return buffer.copy_(found[:numel])

    work = all_reduce(p, ReduceOp.SUM, group, async_op=True)
    return work.get_future().then(approximate)  # type: ignore[union-attr]


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return orthonormal columns that span the columns of ``matrix``, which may be zero."""
    wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    columns: torch.Tensor = torch.linalg.qr(wide).Q
    return columns.to(matrix.dtype)

"""Compute attention around a ring, in which keys and values pass from rank to rank.

Each rank merges one block of attention after another. A block returns its output and the logarithm
of the sum of its exponentials (lse). Two blocks of the same queries merge exactly:

    lse = log(exp(lse1) + exp(lse2))
    out = out1 + (out2 - out1) * sigmoid(lse2 - lse1)

The gradient of a block needs only the final ``out`` and ``lse``, so the backward passes keys and
values around again. Their gradients start one rank after their owner, follow them, and end there.

Worked example: 8 chunks of tokens on 4 ranks in a zigzag. For each rank's queries, these chunks of
keys of each source are earlier, so a causal block has no mask, except a rank's own block:

    rank  chunks    source 0 (0, 7)   source 1 (1, 6)   source 2 (2, 5)   source 3 (3, 4)
    0     0, 7      own               7 sees both       7 sees both       7 sees both
    1     1, 6      both see 0        own               6 sees both       6 sees both
    2     2, 5      both see 0        both see 1        own               5 sees both
    3     3, 4      both see 0        both see 1        both see 2        own

So each block has half of the products, and the ranks have equal work. In contiguous shards, rank 0
has one block and rank 3 has four. With a token in each chunk, rank 1 meets sources 0, 3 and 2:

    >>> import meshdist as md
    >>> def program():
    ...     group = md.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)).open_group()
    ...     call = AttentionCall(group, "", is_causal=True, is_zigzag=True, scale=1.0)
    ...     return [call.meeting(step, 2) for step in (1, 2, 3)]
    >>> for rows, keys in md.simulate(program, 4)[1]:
    ...     print([1, 6][rows], "to chunks", [0, 1][keys], "of the source")
    [1, 6] to chunks [0] of the source
    [6] to chunks [0, 1] of the source
    [6] to chunks [0, 1] of the source
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from ..arrays import describe
from ..backends.work import Work
from ..collectives.normalize_args import run_named
from ..collectives.torch_private import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    FLASH_ATTENTION_BACKWARD_FOR_CPU,
    FLASH_ATTENTION_FOR_CPU,
    call_function,
)
from ..dtypes import dtype_name
from ..error_text import with_article
from ..errors import DtypeError, GradientError
from ..groups.process_group import ProcessGroup
from ..runtime.memory import new_like

_CALL = "attention.context_parallel"
_DTYPES_OF_KERNELS = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.float16, torch.bfloat16),
}


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of a call that are equal on all ranks."""

    group: ProcessGroup
    name: str
    is_causal: bool
    is_zigzag: bool
    scale: float

    def send(self, block: torch.Tensor, arriving: torch.Tensor) -> Work:
        """Start to send ``block`` to the next rank, and to receive ``arriving``."""
        me, size = self.group.rank(), self.group.size()
        sent, received = [0] * size, [0] * size
        sent[(me + 1) % size] = received[me - 1] = block.numel()
        # A collective instead of messages: ranks compare their calls, so a mismatch cannot hang.
        given = arriving.view(-1), block.view(-1), received, sent
        work = run_named("all_to_all_single", self.group, self.name, *given, async_op=True)
        assert work is not None
        return work

    def blocks(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield [k, v] of this rank, of the rank before it, and so on around the ring."""
        # While the caller uses a block, the next one arrives in the memory of the previous block.
        size = self.group.size()
        block = torch.stack([k, v])
        arriving = new_like(block) if size > 1 else block
        for _ in range(size - 1):
            work = self.send(block, arriving)
            yield block
            work.wait()
            block, arriving = arriving, block
        yield block

    def meeting(self, step: int, length: int) -> tuple[slice, slice] | None:
        """Return the own queries and the received keys that meet in a step; None without any."""
        every, half = slice(None), length // 2
        if not self.is_causal:
            return every, every
        is_earlier = step <= self.group.rank()  # else the source's rank is higher
        if not self.is_zigzag:
            return (every, every) if is_earlier else None
        return (every, slice(half)) if is_earlier else (slice(half, None), every)


def check_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ProcessGroup, causal: bool
) -> None:
    """Raise unless torch has a flash attention kernel for the tensors."""
    device = q.device.type
    has_kernel = q.dtype in _DTYPES_OF_KERNELS.get(device, ())
    if has_kernel and device == "cuda":  # torch pads other widths, but only in its public function
        params = SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
        has_kernel = q.shape[3] % 8 == 0 and can_use_flash_attention(params)
    if not has_kernel:
        raise DtypeError(
            f"{_CALL} has no flash attention kernel for {dtype_name(q.dtype)} on "
            f"{with_article(device)} device",
            where=f"rank {group.world.rank}, {group.name}",
            expected="for method='ring', a floating dtype on cpu; float16 or bfloat16 and a "
            "d divisible by 8, up to 256, on a cuda device that supports flash attention",
            found=f"q {describe(q)} on {q.device}",
            fix="pass method='heads', which calls F.scaled_dot_product_attention",
        )


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Return the attention of this rank's queries to all ranks' keys and values; collective."""
    out: torch.Tensor
    out, *_ = call_function(_Ring, q, k, v, call)
    return out


class _Ring(Function):
    """Autograd function of attention around a ring: the output, and what its backward needs."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, ...]:
        blocks = call.blocks(k, v)
        out, lse, *random = _block(q, next(blocks), call.is_causal, call.scale)
        out = out.to(lse.dtype)
        for step, kv in enumerate(blocks, 1):
            if (met := call.meeting(step, q.shape[2])) is None:
                continue
            rows, keys = met
            more, its_lse, *_ = _block(q[:, :, rows], kv[:, :, :, keys], False, call.scale)
            own_lse = lse[:, :, rows]
            weight = (its_lse - own_lse).sigmoid().unsqueeze(-1)
            out[:, :, rows].lerp_(more.to(out.dtype), weight)
            lse[:, :, rows] = torch.logaddexp(own_lse, its_lse)
        return out.to(q.dtype), lse, *random

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        *tensors, ctx.call = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return *call_function(_RingGradient, grad, ctx.call, *ctx.saved_tensors), None


class _RingGradient(Function):
    """Autograd function of the backward of ``_Ring``, which has no derivative."""

    @staticmethod
    def forward(
        grad: torch.Tensor,
        call: AttentionCall,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        *random: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        blocks = call.blocks(k, v)
        of_rows = grad, q, out, lse
        of_q, *of_own = _block_gradient(of_rows, next(blocks), random, call.is_causal, call.scale)
        of_q, own = of_q.to(lse.dtype), torch.stack(of_own).to(lse.dtype)
        of_kv = arriving = own  # of the other ranks' keys and values, from step 1 on
        work: Work | None = None
        for step, kv in enumerate(blocks, 1):
            met = call.meeting(step, q.shape[2])
            if met is not None:
                rows, keys = met
                met_rows = [x[:, :, rows] for x in of_rows]
                block = _block_gradient(met_rows, kv[:, :, :, keys], random, False, call.scale)
            if work is None:
                of_kv, arriving = torch.zeros_like(own), new_like(own)
            else:
                work.wait()
                of_kv, arriving = arriving, of_kv
            if met is not None:
                of_q[:, :, rows] += block[0]
                of_kv[0][:, :, keys] += block[1]
                of_kv[1][:, :, keys] += block[2]
            work = call.send(of_kv, arriving)
        if work is not None:
            work.wait()
            own += arriving
        return of_q.to(q.dtype), *own.to(k.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        group = ctx.call.group
        raise GradientError(
            f"{_CALL} has no second derivative with method='ring'",
            where=f"rank {group.world.rank}, {group.name}",
            expected="a single backward through the call",
            fix="pass method='heads' inside torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        )


def _block(
    q: torch.Tensor, kv: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Return one block's output and lse; on CUDA also the state of its random numbers."""
    given = *map(_dense, (q, *kv)), 0.0, is_causal
    if q.device.type == "cpu":
        out, lse = FLASH_ATTENTION_FOR_CPU(*given, scale=scale)
        return out, lse
    out, lse, _, _, _, _, seed, offset, _ = FLASH_ATTENTION(*given, False, scale=scale)
    return out, lse, seed, offset


def _block_gradient(
    of_rows: Sequence[torch.Tensor],
    kv: torch.Tensor,
    random: Sequence[torch.Tensor],
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Return one block's gradients of q, k and v.

    Args:
        of_rows: for the queries of the block, the gradient, q, and the final output and lse.
        random: on CUDA, the state that ``_block`` returned.
    """
    grad, q, out, lse = of_rows
    given = *map(_dense, (grad, q, *kv, out)), lse.contiguous()
    if q.device.type == "cpu":
        of_cpu: tuple[torch.Tensor, ...] = FLASH_ATTENTION_BACKWARD_FOR_CPU(
            *given, 0.0, is_causal, scale=scale
        )
        return of_cpu
    lengths = None, None, q.shape[2], kv.shape[3]
    found: tuple[torch.Tensor, ...] = FLASH_ATTENTION_BACKWARD(
        *given, *lengths, 0.0, is_causal, *random, scale=scale
    )
    return found


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, copied unless its last dim is contiguous, as the kernels assume."""
    return x if x.stride(-1) == 1 else x.contiguous()

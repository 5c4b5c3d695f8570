"""DDP raises where torch would leave gradients local: in-backward steps, distributed autograd."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from meshdist.errors import GradientError
from tests.pool import Pool

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own deprecated imports
    from torch.distributed.optim import _apply_optimizer_in_backward


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("has_hooks", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_optimizers_inside_the_backward_raise(is_wrapped: bool, has_hooks: bool, size: int) -> None:
    def program() -> None:
        model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        last = model[1]
        if is_wrapped:
            model = md.DDP(model)
        _apply_optimizer_in_backward(
            torch.optim.SGD, last.parameters(), {"lr": 0.1}, register_hook=has_hooks
        )
        if not is_wrapped:
            model = md.DDP(model)
        with pytest.raises(GradientError) as caught:
            model(torch.ones(1, 2))
        assert str(caught.value) == (
            "an optimizer steps during the backward, before gradients are averaged\n"
            "  expected: parameters without _apply_optimizer_in_backward\n"
            "  found:    Sequential has parameters with _in_backward_optimizers\n"
            "  fix:      call optimizer.step() after backward(); to shard optimizer states, "
            "use torch's ZeroRedundancyOptimizer or fully_shard on mesh.to_torch()"
        )

    md.simulate(program, size)


def in_a_context(meeting: str) -> list[Any]:
    """Run a forward in a context, and a step outside."""
    from torch.distributed import autograd, rpc

    rank = md.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's RPC warns of its own calls
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        found: list[Any] = []
        try:
            net = nn.Linear(1, 1)
            model = md.DDP(net)
            with autograd.context(), pytest.raises(GradientError) as caught:
                model(torch.ones(1, 1))
            found.append(str(caught.value))
            model(torch.full((1, 1), 1.0 + rank)).sum().backward()  # outside of a context
            found.append(net.weight.grad.item())
        finally:
            rpc.shutdown()
    return found


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_forward_in_a_context_of_distributed_autograd_raises(
    backend: str, pool: Pool, tmp_path: Path
) -> None:
    found = pool.run(in_a_context, 2, str(tmp_path / "meeting"), backend=backend)
    for rank, (text, gradient) in enumerate(found):
        assert text == (
            "DistributedDataParallel cannot average gradients of torch.distributed.autograd\n"
            f"  where:    rank {rank}, in the world\n"
            "  expected: forward and backward outside torch.distributed.autograd.context()\n"
            "  found:    a distributed autograd context, whose gradients are not in .grad\n"
            "  fix:      call loss.backward() outside the context, or pass activations "
            "between ranks with lax.ppermute, which is differentiable"
        )
        assert gradient == 1.5

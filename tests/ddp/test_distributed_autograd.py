"""Backwards of ``torch.distributed.autograd`` average the gradients in their context."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.pool import Pool


class Net(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(size), torch.ones(1), torch.ones(1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.weights[0].sum() + self.weights[1] + self.weights[2]).sum()


def over_rpc(*args: Any, **options: Any) -> list[Any]:
    with warnings.catch_warnings():  # torch's RPC warns of its own calls
        warnings.simplefilter("ignore")
        return steps_over_rpc(*args, **options)


def steps_over_rpc(
    meeting: str, wraps: str, size: int, is_outside: bool = False, **options: Any
) -> list[Any]:
    """Three steps whose losses pass the other rank, an ordinary one, and one more."""
    from torch.distributed import autograd, rpc

    rank = md.get_rank()
    opened = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=opened)
    try:
        net = Net(size)
        kind = md.DDP if wraps == "ours" else nn.parallel.DistributedDataParallel
        model = kind(net, **options)
        seen: list[Any] = []

        def step(x: float) -> None:
            before = model(torch.tensor(x * (1 + rank))) if is_outside else None
            with autograd.context() as context:
                out = model(torch.tensor(x * (1 + rank))) if before is None else before
                loss = rpc.rpc_sync(f"rank{1 - rank}", torch.mul, args=(out, torch.tensor(2.0)))
                autograd.backward(context, [loss])
                grads = autograd.get_gradients(context)
                seen.append([grads[one].unique().item() for one in net.parameters()])

        try:
            for x in (1.0, 10.0, 100.0):
                step(x)
            seen.append([one.grad for one in net.parameters()])
            model(torch.tensor(3.0 + rank)).backward()
            step(1000.0)
            seen.append([one.grad.unique().item() for one in net.parameters()])
        except Exception as error:
            seen = [str(error)]
        md.barrier()
        return seen
    finally:
        rpc.shutdown()


def torchs(meeting: str, size: int) -> list[Any]:
    rank = md.get_rank()
    torch.distributed.init_process_group("gloo", f"file://{meeting}.0", rank=rank, world_size=2)
    try:
        return over_rpc(meeting, "torch's", size)
    finally:
        torch.distributed.destroy_process_group()


EXPECTED = [[3.0] * 3, [30.0] * 3, [300.0] * 3, [None] * 3, [3000.0] * 3, [3.5] * 3]


@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("wire", ["shm", "gloo"])
def test_gradients_in_the_context_are_averages(
    size: int, wire: str, pool: Pool, tmp_path: Path
) -> None:
    meeting = str(tmp_path / "meeting")
    assert pool.run(over_rpc, 2, meeting, "ours", size, backend=wire) == [EXPECTED] * 2


def test_torch_does_the_same(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(torchs, 2, str(tmp_path / "meeting"), 1) == [EXPECTED] * 2


@pytest.mark.parametrize("is_outside", [False, True])
def test_what_a_context_cannot_hold_is_refused_on_all_ranks(
    is_outside: bool, pool: Pool, tmp_path: Path
) -> None:
    def program(meeting: str) -> list[Any]:
        options = {} if is_outside else {"find_unused_parameters": True}
        return over_rpc(meeting, "ours", 1, is_outside=is_outside, **options)

    for found in pool.run(program, 2, str(tmp_path / "meeting")):
        (text,) = found
        assert "torch.distributed.autograd.backward cannot average these gradients" in text
        if is_outside:
            assert "expected: a forward inside the context" in text
            assert "fix:      run forward and backward in one `with torch.distributed" in text
        else:
            assert "expected: a gradient of every parameter in its context" in text
            assert "fix:      wrap without them" in text

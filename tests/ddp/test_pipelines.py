"""Pipeline stages of torch's over dp replicas: what a wrapped stage averages, and what it rejects.

Two stages a schedule or four, on two ranks of pp; each has two replicas along dp.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import meshdist as md
from meshdist.errors import GradientError
from tests.pool import Pool

AVERAGED = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B"]
SPLIT = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
"""Those whose last part of a step is the weights' part of a backward."""
NUM_STEPS, NUM_PARTS, WIDTH = 3, 4, 4


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 4 * NUM_PARTS, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def largest_error(name: str, wrapping: str) -> float:
    """Train under the schedule; return by how much gradients differ from the whole batch's."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torchs, dp, pp = mesh.to_torch(), mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    is_single = name in ("GPipe", "1F1B")
    opposite = 3 - pp if name in ("ZBVZeroBubble", "DualPipeV") else pp + 2
    mine, num_stages = ([pp], 2) if is_single else ([pp, opposite], 4)
    layers = {index: layer(index) for index in mine}

    def wrapped(module: nn.Module) -> Any:
        if wrapping == "DDP":
            return md.DDP(module, device_mesh=mesh["dp"])
        if wrapping == "fully_shard":
            from torch.distributed.fsdp import fully_shard

            return fully_shard(module, mesh=torchs["dp"])
        return module

    stages: Any = [
        pipelining.PipelineStage(
            wrapped(layers[index]),
            index,
            num_stages,
            torch.device("cpu"),
            group=torchs.get_group("pp"),
        )
        for index in mine
    ]
    make = getattr(schedules, f"Schedule{name}")
    schedule = make(stages[0] if is_single else stages, NUM_PARTS, loss_fn=F.mse_loss)
    whole = nn.Sequential(*[layer(index) for index in range(num_stages)])
    errors = []
    for step in range(NUM_STEPS):
        whole.zero_grad()
        for one in layers.values():
            one.zero_grad()
        x, y = batch(step)
        F.mse_loss(whole(x), y).backward()
        given = (x[dp::2].contiguous(),) if pp == 0 else ()  # torch 2.11 compares strides
        schedule.step(*given, **({"target": y[dp::2]} if num_stages - 1 in mine else {}))
        gradients = [p.grad for one in layers.values() for p in one.parameters()]
        if wrapping == "bare":
            md.distributed.all_reduce_coalesced(gradients, md.ReduceOp.AVG, mesh["dp"])
        expected = [p.grad for index in layers for p in whole[index].parameters()]
        for one, other in zip(gradients, expected, strict=True):
            full = one.full_tensor() if wrapping == "fully_shard" else one
            errors.append((full - other).abs().max().item())
    return max(errors)


def test_a_wrapped_stage_averages_the_last_backward(pool: Pool) -> None:
    def program() -> list[float]:
        return [largest_error(name, "DDP") for name in ("GPipe", "Interleaved1F1B")]

    assert max(max(errors) for errors in pool.run(program, 4, backend="shm")) < 1e-15


def refusal(name: str) -> str:
    """What this rank raises; one that waits for the stage of another is told that it is gone."""
    try:
        largest_error(name, "DDP")
    except GradientError as error:
        return str(error)
    except RuntimeError as error:
        return f"cut off: {error}"
    finally:
        torch.distributed.destroy_process_group()
    return "trained"


def test_a_schedule_that_splits_backwards_is_rejected_and_the_way_out_works(pool: Pool) -> None:
    def program() -> tuple[float, str]:
        return largest_error("DualPipeV", "bare"), refusal("DualPipeV")

    found = pool.run(program, 4, backend="shm")
    assert max(error for error, _ in found) < 1e-15
    for rank in (1, 3):
        text = found[rank][1]
        assert text.startswith(
            "prepare_for_backward() got outputs without a graph: no backward can reach them\n"
            f"  where:    rank {rank}, in "
        )
        assert text.endswith(
            "  expected: a last backward that runs from the stage's outputs to its "
            "parameters\n"
            "  found:    outputs that were computed without gradients or detached; or cut "
            "off their graph by a schedule that accumulates weight gradients separately, "
            "such as InterleavedZeroBubble, ZBVZeroBubble or DualPipeV\n"
            "  fix:      in a hand-written schedule, pass the outputs of the wrapped forward "
            "unchanged; with such a schedule do not wrap the stage: after schedule.step() "
            "call md.distributed.all_reduce_coalesced(gradients, md.ReduceOp.AVG, "
            "mesh['dp']); or use torch's fully_shard"
        )


def by_hand(num_steps: int = 3, is_told: bool = True) -> float:
    """GPipe by hand; return by how much gradients differ from the whole batch's."""
    mesh = md.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    pp, mine = mesh["pp"], mesh.get_local_rank("pp")
    net = layer(mine)
    model = md.DDP(net, device_mesh=mesh["dp"])
    whole = nn.Sequential(layer(0), layer(1))
    errors = []
    for step in range(num_steps):
        whole.zero_grad()
        net.zero_grad()
        x, y = batch(step)
        F.mse_loss(whole(x), y).backward()
        parts = [one[mesh.get_local_rank("dp") :: 2].chunk(NUM_PARTS) for one in (x, y)]
        ends = []
        for x, _ in zip(*parts, strict=True):
            if mine:
                x = torch.empty_like(x)
                md.recv(x, group=pp, group_src=0)
                x.requires_grad_()
            with model.no_sync():
                out = model(x)
            if not mine:
                md.send(out.detach(), group=pp, group_dst=1)
            ends.append((x, out))
        for part, (x, out) in enumerate(ends):
            if is_told and part == NUM_PARTS - 1:
                model.prepare_for_backward([out] if step else out)
            if mine:
                (F.mse_loss(out, parts[1][part]) / NUM_PARTS).backward()
                md.send(x.grad, group=pp, group_dst=0)
            else:
                gradient = torch.empty_like(out)
                md.recv(gradient, group=pp, group_src=1)
                out.backward(gradient)
        pairs = zip(net.parameters(), whole[mine].parameters(), strict=True)
        errors += [(one.grad - other.grad).abs().max().item() for one, other in pairs]
    return max(errors)


def test_gpipe_by_hand(pool: Pool) -> None:
    assert max(md.simulate(by_hand, 4)) < 1e-15
    assert max(pool.run(by_hand, 4, backend="shm")) < 1e-15
    assert min(md.simulate(by_hand, 4, (1, False))) > 1e-3  # forgotten: each replica's own


def test_outputs_without_a_graph_cannot_be_prepared() -> None:
    def program() -> str:
        model = md.DDP(layer(0))
        with torch.no_grad():
            out = model(torch.ones(1, WIDTH, dtype=torch.float64))
        with pytest.raises(GradientError) as caught:
            model.prepare_for_backward(out)
        return str(caught.value)

    for text in md.simulate(program, 2):
        assert text.startswith("prepare_for_backward() got outputs without a graph: ")


@pytest.mark.parametrize("name", AVERAGED + SPLIT)
def test_every_schedule_on_simulated_ranks(name: str) -> None:
    wrappings = ["bare", "fully_shard", *(["DDP"] if name in AVERAGED else [])]
    for wrapping in wrappings:
        assert max(md.simulate(largest_error, 4, args=(name, wrapping))) < 1e-15
    if name in SPLIT:
        with pytest.raises(GradientError, match="got outputs without a graph"):
            md.simulate(largest_error, 4, args=(name, "DDP"))


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("wrapping", ["DDP", "bare", "fully_shard"])
def test_all_schedules(wrapping: str, backend: str, pool: Pool) -> None:
    names = AVERAGED if wrapping == "DDP" else AVERAGED + SPLIT

    def program() -> list[float]:
        return [largest_error(name, wrapping) for name in names]

    assert max(max(errors) for errors in pool.run(program, 4, backend=backend)) < 1e-15
    if wrapping == "DDP":
        for name in SPLIT:
            texts = pool.run(refusal, 4, name, backend=backend)
            assert "trained" not in texts[1::2]
            assert any(text.startswith("outputs without a graph") for text in texts)

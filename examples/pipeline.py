"""Train a small network in pipeline stages on a (pp, dp) mesh, under any of torch's schedules.

    python examples/pipeline.py --schedule 1F1B --mesh pp=2,dp=2 --simulate 4 --check
    meshdist run -n 4 examples/pipeline.py --schedule ZBVZeroBubble --mesh pp=2,dp=2 --check
    torchrun --nproc-per-node 4 examples/pipeline.py --schedule Interleaved1F1B --mesh pp=4,dp=1

Along `pp` each rank holds one stage or two of the network, and torch's schedule moves activations
and gradients between them; along `dp` each rank reads its share of every batch, and the gradients
of a stage are averaged: by `md.DDP`, or by torch's `fully_shard` where the schedule adds up the
weights' gradients apart from its backwards. `--simulate` runs all ranks in this process. `--check`
trains on one process as well, with the whole network, and fails unless all weights agree.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import meshdist as md
import meshdist.torch_backends  # torch's groups by shared memory too, where they are on one host

ONE_STAGE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first stage and the last
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)  # weights' gradients apart from the backwards
SCHEDULES = (*ONE_STAGE, "LoopedBFS", "Interleaved1F1B", *SPLIT)
LIMIT = 1e-12  # largest difference of a weight that --check allows, in float64


def layer(index: int, width: int) -> nn.Module:
    """Return one layer of the network, equal on every rank that makes it."""
    torch.manual_seed(index)
    block = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    return block.double()


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets [batch, width] of each step, the same on every rank."""
    teacher = torch.randn(
        args.width, args.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    for step in range(args.steps):
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(args.batch, args.width, generator=generator, dtype=torch.float64)
        yield x, (x @ teacher / args.width**0.5).tanh()


def stages_of(schedule: str, rank: int, num_ranks: int) -> tuple[list[int], int]:
    """Return the stages of a rank along pp, and how many there are."""
    if schedule in ONE_STAGE:
        return [rank], num_ranks
    second = 2 * num_ranks - 1 - rank if schedule in V_SHAPED else rank + num_ranks
    return [rank, second], 2 * num_ranks


def train(
    mesh: md.DeviceMesh, args: argparse.Namespace
) -> tuple[dict[int, nn.Module], list[float]]:
    """Train; return this rank's layers by their place, and the losses where the last stage is."""
    torchs = mesh.to_torch()
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    mine, num_stages = stages_of(args.schedule, pp, mesh.size("pp"))
    per_stage = args.layers // num_stages
    layers: dict[int, nn.Module] = {}
    stages = []
    for stage in mine:
        places = range(stage * per_stage, (stage + 1) * per_stage)
        layers |= {place: layer(place, args.width) for place in places}
        module: Any = nn.Sequential(*[layers[place] for place in places])
        if args.schedule in SPLIT:
            fully_shard(module, mesh=torchs["dp"])
        else:
            module = md.DDP(module, device_mesh=mesh["dp"])
        group = torchs.get_group("pp")
        stages.append(PipelineStage(module, stage, num_stages, torch.device("cpu"), group=group))
    schedule: Any = get_schedule_class(args.schedule)(
        stages[0] if args.schedule in ONE_STAGE else stages,  # type: ignore[arg-type]
        n_microbatches=args.microbatches,
        loss_fn=F.mse_loss,
    )
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=args.lr, momentum=0.9)
    losses: list[float] = []
    for x, y in batches(args):
        x, y = (whole.chunk(mesh.size("dp"))[dp] for whole in (x, y))
        parts: list[Tensor] = []
        inputs = (x,) if 0 in mine else ()
        targets = {"target": y, "losses": parts} if num_stages - 1 in mine else {}
        optimizer.zero_grad()
        schedule.step(*inputs, **targets)
        optimizer.step()
        if parts:
            mean = torch.stack(parts).mean().detach()
            md.all_reduce(mean, op=md.ReduceOp.AVG, group=mesh["dp"])
            losses.append(mean.item())
    return layers, losses


def train_alone(args: argparse.Namespace) -> list[nn.Module]:
    """Train the whole network on whole batches; return its layers."""
    layers = [layer(place, args.width) for place in range(args.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for x, y in batches(args):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return layers


def largest_difference(layers: dict[int, nn.Module], args: argparse.Namespace) -> float:
    """Return by how much any weight, on any rank, differs from that of one process."""
    alone, worst = train_alone(args), torch.zeros(1, dtype=torch.float64)
    for place, module in layers.items():
        for ours, theirs in zip(module.parameters(), alone[place].parameters(), strict=True):
            whole = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
            worst = torch.maximum(worst, (whole.detach() - theirs.detach()).abs().max())
    md.all_reduce(worst, op=md.ReduceOp.MAX)
    return worst.item()


def run(args: argparse.Namespace) -> int:
    """Train as this rank; return 1 where weights differ."""
    size = args.mesh["pp"] * args.mesh["dp"]
    if size != md.get_world_size():
        raise SystemExit(f"--mesh has {size} ranks, and {md.get_world_size()} were started")
    mesh = md.init_device_mesh("cpu", tuple(args.mesh.values()), mesh_dim_names=tuple(args.mesh))
    layers, losses = train(mesh, args)
    if losses and mesh.get_local_rank("dp") == 0:
        print(f"{args.schedule}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")
    difference = largest_difference(layers, args) if args.check else 0.0
    if args.check and md.get_rank() == 0:
        outcome = "equal" if difference < LIMIT else "DIFFERENT"
        print(f"check: largest difference {difference:.1e} (limit {LIMIT:.0e}): {outcome}")
    md.destroy_process_group()
    return 0 if difference < LIMIT else 1


def axes(text: str) -> dict[str, int]:
    """Return {"pp": 2, "dp": 2} for "pp=2,dp=2"; an axis that is left out has one rank."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    if not sizes.keys() <= {"pp", "dp"} or min(sizes.values()) < 1:
        raise ValueError
    return {"pp": 1, "dp": 1} | sizes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1F1B")
    add("--mesh", type=axes, default="pp=2,dp=1", metavar="pp=N,dp=N", help="the mesh's axes")
    add("--simulate", type=int, metavar="N", help="run N ranks in this process")
    add("--check", action="store_true", help="compare with one process; exit 1 on a difference")
    add("--steps", type=int, default=20)
    add("--batch", type=int, default=32, help="rows a step, over all ranks of dp")
    add("--microbatches", type=int, default=4)
    add("--layers", type=int, default=8)
    add("--width", type=int, default=16)
    add("--lr", type=float, default=0.5)
    args = parser.parse_args(argv)
    pp, dp = args.mesh["pp"], args.mesh["dp"]
    if min(args.steps, args.batch, args.microbatches, args.layers, args.width) < 1:
        parser.error("steps, batch, microbatches, layers and width are at least 1")
    if args.simulate not in (None, pp * dp):
        parser.error(f"--mesh has {pp * dp} ranks, and --simulate {args.simulate}")
    _, num_stages = stages_of(args.schedule, 0, pp)
    if args.layers % num_stages:
        parser.error(f"--layers {args.layers} must divide among the {num_stages} stages")
    if args.batch % (dp * args.microbatches):
        parser.error(
            f"--batch must be a multiple of {dp} dp ranks x {args.microbatches} microbatches"
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return max(md.simulate(run, args.simulate, (args,))) if args.simulate else run(args)


if __name__ == "__main__":
    sys.exit(main())

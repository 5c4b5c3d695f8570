"""The demo's training step over (dp=2, tp=2), and the same step by torch's own parallelism.

    python benchmarks/demo_step.py [REPORT.json] [--rounds 7] [--steps 4]

Four processes with one thread each, over Gloo. Both sides train the model of examples/train_lm.py
from the same weights on the same batch: ours with its layers and DistributedDataParallel, torch's
with ColwiseParallel and RowwiseParallel on its DeviceMesh and its DistributedDataParallel. Torch's
world is started first, and meshdist adopts it. Rounds are interleaved; a sample is the slowest
rank's time a step, a row holds medians over rounds. Before that, the two losses are compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import distributed as torch_dist, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_lm

import meshdist as md
from benchmarks._report import spread, write_report

DP = TP = 2
AXES = ("dp", "tp")


def our_model(args: argparse.Namespace) -> nn.Module:
    mesh = md.init_device_mesh("cpu", (DP, TP), mesh_dim_names=AXES)
    torch.manual_seed(args.seed)
    model = train_lm.GPT(args.layers, args.width, args.heads, mesh["tp"])
    return md.DistributedDataParallel(model, device_mesh=mesh["dp"])


def torch_model(args: argparse.Namespace, **options: bool) -> nn.Module:
    """The whole model from the same seed, its matrices then split by torch."""
    alone = md.DeviceMesh("cpu", [md.get_rank()], mesh_dim_names=("tp",))
    torch.manual_seed(args.seed)
    model = train_lm.GPT(args.layers, args.width, args.heads, alone)
    mesh = torch_dist.init_device_mesh("cpu", (DP, TP), mesh_dim_names=AXES)
    for block in model:
        if not isinstance(block, train_lm.Block):
            continue
        plan = {}
        for name, layer in list(block.named_modules()):
            if isinstance(layer, train_lm.ColumnParallel | train_lm.RowParallel):
                num_out, num_in = layer.weight.shape
                linear = nn.Linear(num_in, num_out, bias=False)
                linear.weight = layer.weight
                block.set_submodule(name, linear)
                is_column = isinstance(layer, train_lm.ColumnParallel)
                plan[name] = ColwiseParallel() if is_column else RowwiseParallel()
        parallelize_module(block, mesh["tp"], plan)
    return TorchDDP(model, device_mesh=mesh["dp"], **options)


class Side:
    """One model and its optimizer; a step is the demo's."""

    def __init__(self, model: nn.Module, args: argparse.Namespace) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def seconds_per_step(self, batch: torch.Tensor, steps: int) -> float:
        """The slowest rank's."""
        md.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        taken = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        md.all_reduce(taken, md.ReduceOp.MAX)
        return taken.item()


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", f"file://{folder}/store", world_size=DP * TP, rank=rank)
    md.init_process_group()
    args = train_lm.parse(options.demo)
    text = train_lm.read_text(None)[: args.batch * (args.context + 1)]
    share = text.view(args.batch, -1).long().tensor_split(DP)[rank // TP]
    sides = {
        "torch": Side(torch_model(args), args),
        "torch, views": Side(torch_model(args, gradient_as_bucket_view=True), args),
        "meshdist": Side(our_model(args), args),
    }
    with md.init_device_mesh("cpu", (DP, TP), mesh_dim_names=AXES):
        losses = {name: [side.step(share) for _ in range(3)] for name, side in sides.items()}
        for name in sides:
            torch.testing.assert_close(losses[name], losses["torch"], rtol=1e-4, atol=0)
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                samples[name].append(side.seconds_per_step(share, options.steps) * 1e3)
    if rank == 0:
        medians = {name: spread(taken)["median"] for name, taken in samples.items()}
        rows = [
            {
                "side": name,
                "ms per step": medians[name],
                "min ms": min(taken),
                "max ms": max(taken),
                "tokens/s": args.batch * args.context / medians[name] * 1e3,
                "torch / this": medians["torch"] / medians[name],
            }
            for name, taken in samples.items()
        ]
        notes = (
            f"mesh dp={DP}, tp={TP} over Gloo, one thread a rank; {args.layers} layers of width "
            f"{args.width}, batch {args.batch} x {args.context}; {options.rounds} interleaved "
            f"rounds of {options.steps} steps; losses of the first 3 steps agreed to 1e-4"
        )
        sys.argv[1:] = [options.report] if options.report else []  # where write_report looks
        write_report("demo_step", rows, notes)
    md.destroy_process_group()
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", help="where the JSON report goes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a side in a round")
    parser.add_argument("--demo", default="", help="options of train_lm.py, in one text")
    options = parser.parse_args()
    options.demo = options.demo.split()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (folder, options), DP * TP)


if __name__ == "__main__":
    main()

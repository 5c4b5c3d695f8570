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
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from torch import distributed as torch_dist, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._demo import (
    AXES,
    DP,
    TP,
    arguments_of,
    make_mesh,
    our_model,
    share_of_batch,
    step_of,
    train_lm,
)
from benchmarks._report import (
    interleaved,
    ms_per_step,
    parser_of,
    spread,
    start_ranks,
    write_report,
)


def torch_model(args: argparse.Namespace, **options: bool) -> nn.Module:
    """The whole model from the same seed, its matrices then split by torch."""
    torch.manual_seed(args.seed)
    model = train_lm.GPT(args.layers, args.width, args.heads)
    mesh = torch_dist.init_device_mesh("cpu", (DP, TP), mesh_dim_names=AXES)
    styles = {"column": ColwiseParallel(), "row": RowwiseParallel()}
    plan = {name.removeprefix("*."): styles[word] for name, word in train_lm.PLAN.items()}
    for block in model:
        if isinstance(block, train_lm.Block):
            parallelize_module(block, mesh["tp"], plan)
    return TorchDDP(model, device_mesh=mesh["dp"], **options)


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    torch_dist.init_process_group("gloo", f"file://{folder}/store", world_size=DP * TP, rank=rank)
    md.init_process_group()
    args = arguments_of(options.demo.split())
    models = {
        "torch": torch_model(args),
        "torch, views": torch_model(args, gradient_as_bucket_view=True),
        "meshdist": our_model(args, make_mesh()),
    }
    share = share_of_batch(args, rank)
    steps = {side: step_of(model, share, args.lr) for side, model in models.items()}
    with make_mesh():
        losses = {side: [step() for _ in range(3)] for side, step in steps.items()}
        for side in steps:
            torch.testing.assert_close(losses[side], losses["torch"], rtol=1e-4, atol=0)
        samplers = {side: partial(ms_per_step, step, options.steps) for side, step in steps.items()}
        samples = interleaved(samplers, options.rounds, warm_up=0)
    if rank == 0:
        medians = {side: statistics.median(taken) for side, taken in samples.items()}
        rows = [
            {
                "side": side,
                **spread(taken, "ms per step"),
                "tokens/s": args.batch * args.context / medians[side] * 1e3,
                "torch / this": medians["torch"] / medians[side],
            }
            for side, taken in samples.items()
        ]
        notes = (
            f"mesh dp={DP}, tp={TP} over Gloo, one thread a rank; {args.layers} layers of width "
            f"{args.width}, batch {args.batch} x {args.context}; {options.rounds} interleaved "
            f"rounds of {options.steps} steps; losses of the first 3 steps agreed to 1e-4"
        )
        write_report("demo_step", rows, notes, options.report)
    md.destroy_process_group()
    torch_dist.barrier()
    torch_dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=4, help="steps of a side in a round")
    parser.add_argument("--demo", default="", help="options of train_lm.py, in one text")
    start_ranks(measure, DP * TP, parser.parse_args())


if __name__ == "__main__":
    main()

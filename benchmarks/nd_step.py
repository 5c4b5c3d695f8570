"""A transformer of 10.6 million parameters on mesh (dp, tp) = (2, 2), beside torch's layers.

    python benchmarks/nd_step.py [REPORT.json] [--rounds 11]
    python benchmarks/nd_step.py --profile "md, tensor, shm"

Four processes with one thread each on one world of torch's, which meshdist adopts. Every side has
the same model of six blocks of width 384 (those of ``transformer_block.py``, whose norms have
weights here), the same weights and batch. A step is a forward and a backward. Ours is
``md.parallelize`` and ``md.DDP`` over dp, torch's ``parallelize_module`` and its DDP over dp.
"tensor" splits layers over tp; "sequence" the activations between them as well: then our DDP sums
the gradients of norms over tp, too. Ours are compared before anything is timed.

"local" is the model's work on one rank without messages or wrappers; what a step takes above it in
the same round is its exposed time. Rounds are interleaved, each begins with another side; a target
is compared with the median over rounds of the quotients of each round.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
from benchmarks._ddp_profile import show_profile
from benchmarks._report import interleaved, parser_of, start_ranks, write_report
from benchmarks._step_times import sample_of
from benchmarks.transformer_block import (
    BACKENDS,
    DP,
    MODES,
    TP,
    TorchBlock,
    comparisons,
    open_meshes,
    side_rows,
)

NUM_BLOCKS, WIDTH, ROWS, PLACES = 6, 384, 4, 64
OVER_TORCH = {"shm": 0.3, "gloo": 0.7}  # of torch's exposed time over the same backend
PLANS = {
    "tensor": {
        "*.attention.[qkv]": "column",
        "*.attention.out": "row",
        "*.feed_forward.up": "column",
        "*.feed_forward.down": "row",
    },
    "sequence": {
        "*.norm?": "reduced",
        "*.attention.[qkv]": "column_sequence",
        "*.attention.out": "row_sequence",
        "*.feed_forward.up": "column_sequence",
        "*.feed_forward.down": "row_sequence",
    },
}


def make_model() -> nn.Sequential:
    """The whole model, with equal weights at every call."""
    torch.manual_seed(0)
    blocks = [TorchBlock(WIDTH) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        block.norm1, block.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    return nn.Sequential(*blocks)


def our_model(mesh: md.DeviceMesh, mode: str) -> nn.Module:
    """The model in our parallel layers, wrapped."""
    model = make_model()
    md.parallelize(model, mesh["tp"], PLANS[mode])
    return md.DDP(model, device_mesh=mesh["dp"])


def torchs_model(mesh: Any, mode: str) -> nn.Module:
    """The model in torch's parallel layers, wrapped."""
    model = make_model()
    end: dict[str, Any] = {} if mode == "tensor" else {"output_layouts": Shard(1)}
    plan: dict[str, Any] = {}
    for name in map(str, range(NUM_BLOCKS)):
        for part, first, last in (("attention", "qkv", "out"), ("feed_forward", ("up",), "down")):
            if mode == "sequence":
                plan[f"{name}.{part}"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
            plan |= {f"{name}.{part}.{layer}": ColwiseParallel() for layer in first}
            plan[f"{name}.{part}.{last}"] = RowwiseParallel(**end)
        if mode == "sequence":
            for norm in ("norm1", "norm2"):
                plan[f"{name}.{norm}"] = SequenceParallel(use_local_output=True)
    dp, tp = mesh.mesh_dim_names
    parallelize_module(model, mesh[tp], plan)
    return TorchDDP(model, device_mesh=mesh[dp])


class Gathered(nn.Module):
    """A part of a block on one rank, whose input and output are this rank's places: it copies."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.part(torch.cat([y] * TP, 1)).chunk(TP, 1)[0]  # type: ignore[no-any-return]


def local_model(mode: str) -> nn.Module:
    """The model's work on one rank without messages."""
    model = make_model()
    for block in model:
        for layers in (block.attention, block.feed_forward):
            for name, layer in layers.named_children():
                dim = 1 if name in ("out", "down") else 0
                layer.weight = nn.Parameter(layer.weight.detach().chunk(TP, dim)[0].clone())
        if mode == "sequence":
            block.attention = Gathered(block.attention)
            block.feed_forward = Gathered(block.feed_forward)
    return model


def gradient_of(name: str, parameter: nn.Parameter, mesh: md.DeviceMesh) -> torch.Tensor:
    """A parameter's gradient, whole: of ours by its name, of torch's as it lies."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor):
        return grad.full_tensor()
    columns = any(f".{layer}." in name for layer in ("q", "k", "v", "up"))
    lies = "f@tp d -> f d" if columns else "f d@tp -> f d"
    if grad.ndim == 1 or grad.shape == make_shapes()[name]:
        return grad
    whole: torch.Tensor = md.reshard(grad, lies, mesh)
    return whole


def make_shapes() -> dict[str, torch.Size]:
    """The whole shape of each parameter."""
    with torch.device("meta"):
        return {name: x.shape for name, x in make_model().named_parameters()}


def make_sides(meshes: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """One step of each side; raises unless all have equal gradients; collective."""
    torch.manual_seed(1)
    batch, gradient = (torch.randn(ROWS, PLACES, WIDTH) for _ in range(2))
    mesh = meshes["md", "shm"]
    sides: dict[str, Callable[[], None]] = {}
    for mode in MODES:
        text = "b@dp s d" if mode == "tensor" else "b@dp s@tp d"
        x, g = (md.shard(whole, text, mesh).detach() for whole in (batch, gradient))
        made: dict[str, nn.Module] = {f"local, {mode}": local_model(mode)}
        for backend in BACKENDS:
            made[f"md, {mode}, {backend}"] = our_model(meshes["md", backend], mode)
            made[f"torch, {mode}, {backend}"] = torchs_model(meshes["torch", backend], mode)
        first: dict[str, torch.Tensor] = {}
        for side, model in made.items():
            named = {n.removeprefix("module."): p for n, p in model.named_parameters()}
            sides[side] = partial(step, model, x, g)
            for _ in range(3):  # a wrapper lays its buckets anew
                sides[side]()
            if not side.startswith("md"):
                continue
            found = {name: gradient_of(name, p, mesh) for name, p in named.items()}
            first = first or found
            for name, value in found.items():
                torch.testing.assert_close(value, first[name], rtol=1e-3, atol=1e-4)
    return sides


def step(model: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    """A forward and a backward."""
    model.zero_grad()
    model(x).backward(gradient)


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/world", world_size=DP * TP, rank=rank)
    sides = make_sides(open_meshes())
    if options.profile:
        show_profile(sides[options.profile], 40, is_shown=rank == 0)
    else:
        load = f"{os.getloadavg()[0]:.1f}"
        samplers = {side: partial(sample_of, one, 2) for side, one in sides.items()}
        samples = interleaved(samplers, options.rounds)
        rows = side_rows(str(WIDTH), samples)
        targets = comparisons(str(WIDTH), samples, OVER_TORCH)
        if rank == 0:
            notes = (
                f"{DP * TP} ranks, one thread each, {options.rounds} interleaved rounds; {ROWS} "
                f"rows of {PLACES} places in all; load average before and after {load}, "
                f"{os.getloadavg()[0]:.1f}"
            )
            write_report("nd_step", rows, notes, options.report, targets=targets)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = parser_of(__doc__, rounds=11)
    parser.add_argument("--profile", metavar="SIDE", help="show where a step's CPU time goes")
    start_ranks(measure, DP * TP, parser.parse_args())


if __name__ == "__main__":
    main()

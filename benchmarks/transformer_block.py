"""A transformer block on mesh (dp, tp) = (2, 2) by ``md.einsum``, beside torch's parallel layers.

    python benchmarks/transformer_block.py [REPORT.json] [--rounds 21] [--sizes 128,256]
    python benchmarks/transformer_block.py --profile "md, tensor, shm" 128

Four processes with one thread each on one world of torch's, which meshdist adopts. Every side has
the same block, weights and batch: attention with 8 heads, two norms without weights, two layers of
four times the width. A step is a forward and a backward of input and weights. "tensor" splits
layers over tp; "sequence" splits the activations between them by position as well. The gradients of
weights are averaged over dp by DDP, ours or torch's. Ours is written in lines of ``md.einsum``,
torch's by ``parallelize_module`` with ColwiseParallel, RowwiseParallel and SequenceParallel, as its
tutorial has them. Each goes over shared memory ("shm", in torch by ``meshdist.torch_backends``) and
over Gloo. Gradients are compared before anything is timed.

"local" is the block's work on one rank without messages or wrappers: where others gather, it copies
its own. What a step takes above it in the same round is its exposed time. Rounds are interleaved,
each begins with another side. A target is compared with the median over rounds of the quotients of
each round, in CPU time, of all threads of all ranks, and in wall time of the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
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
import meshdist.torch_backends  # offers "shm" to torch
from benchmarks._ddp_profile import show_profile
from benchmarks._report import interleaved, parser_of, some_of, start_ranks, write_report
from benchmarks._step_times import Sample, sample_of, verdict

DP = TP = 2
HEADS = 8
MODES, BACKENDS = ("tensor", "sequence"), ("shm", "gloo")
MOST = {"shm": 0.3, "gloo": 0.8}  # of torch's exposed time over the same backend
NAMES = ("q", "k", "v", "out", "up", "down")


@dataclass(frozen=True)
class Size:
    """The whole batch's rows and places, the block's width, and the steps of a sample."""

    rows: int
    places: int
    width: int
    num_steps: int


SIZES = {"128": Size(4, 64, 128, 10), "256": Size(4, 64, 256, 5)}

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Made = tuple[nn.Module, list[torch.Tensor]]
"""A module to train, and this rank's parts of its weights, in the order of ``NAMES``."""


def norm(x: torch.Tensor) -> torch.Tensor:
    """Each place's values with mean 0 and variance 1."""
    return F.layer_norm(x, x.shape[-1:])


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Causal attention by heads, which lie side by side in the last dim."""
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


class Block(nn.Module):
    """The block on this rank's shards of weights, with products that say how they lie.

    Args:
        gather: makes of a norm's result what the products of columns take.
        column, row: the products whose weight is cut by columns, and by rows.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        gather: Callable[[torch.Tensor], torch.Tensor],
        column: Product,
        row: Product,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: w.clone() for name, w in weights.items()})
        self.gather, self.column, self.row = gather, column, row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weights
        y = self.gather(norm(x))
        q, k, v = (self.column(y, w[name]) for name in "qkv")
        x = x + self.row(attention(q, k, v, HEADS // TP), w["out"])
        y = self.gather(norm(x))
        return x + self.row(F.gelu(self.column(y, w["up"])), w["down"])


def our_block(weights: Mapping[str, torch.Tensor], mesh: md.DeviceMesh, mode: str) -> Made:
    """The block in lines of ``md.einsum``, wrapped."""
    line = partial(partial, md.einsum)
    if mode == "tensor":
        block = Block(
            weights,
            lambda y: y,
            line("b@dp s d, d f@tp -> b@dp s f@tp", mesh=mesh),
            line("b@dp s f@tp, f@tp d -> b@dp s d", mesh=mesh),
        )
    else:
        block = Block(
            weights,
            lambda y: md.reshard(y, "b@dp s@tp d -> b@dp s d {R:tp}", mesh),
            line("b@dp s d {R:tp}, d f@tp -> b@dp s f@tp", mesh=mesh),
            line("b@dp s f@tp, f@tp d -> b@dp s@tp d", mesh=mesh),
        )
    return md.DDP(block, device_mesh=mesh["dp"]), [block.weights[name] for name in NAMES]


def local_block(weights: Mapping[str, torch.Tensor], mode: str) -> Made:
    """The block's work on one rank without messages."""
    if mode == "tensor":
        block = Block(weights, lambda y: y, torch.matmul, torch.matmul)
    else:
        block = Block(
            weights,
            lambda y: torch.cat([y] * TP, 1),
            torch.matmul,
            lambda y, w: torch.matmul(y, w).chunk(TP, 1)[0],
        )
    return block, [block.weights[name] for name in NAMES]


class Attention(nn.Module):
    """Attention of torch's layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.out(attention(self.q(y), self.k(y), self.v(y), HEADS // TP))


class FeedForward(nn.Module):
    """The two layers of torch's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(y)))


class TorchBlock(nn.Module):
    """The block in torch's layers, as its tutorial of tensor parallelism has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.feed_forward = Attention(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))

    def layers(self) -> list[nn.Linear]:
        of_attention, of_feed_forward = self.attention, self.feed_forward
        return [
            *(getattr(of_attention, name) for name in NAMES[:4]),
            *(getattr(of_feed_forward, name) for name in NAMES[4:]),
        ]


def torchs_block(wholes: Mapping[str, torch.Tensor], mesh: Any, mode: str) -> Made:
    """The block in torch's parallel layers, wrapped."""
    block = TorchBlock(wholes["q"].shape[0])
    with torch.no_grad():
        for name, layer in zip(NAMES, block.layers(), strict=True):
            layer.weight.copy_(wholes[name].T)
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan["feed_forward.up"] = ColwiseParallel()
    if mode == "tensor":
        plan |= {"attention.out": RowwiseParallel(), "feed_forward.down": RowwiseParallel()}
    else:
        for part, last in (("attention", "out"), ("feed_forward", "down")):
            plan[part] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            plan[f"{part}.{last}"] = RowwiseParallel(output_layouts=Shard(1))
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    dp, tp = mesh.mesh_dim_names
    parallelize_module(block, mesh[tp], plan)
    wrapped = TorchDDP(block, device_mesh=mesh[dp])
    # Between forward and backward the layers have DTensors made of these.
    return wrapped, [layer.weight for layer in block.layers()]


# -- the run --------------------------------------------------------------------------------------


def make_sides(size: Size, meshes: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """One step of each side; raises unless all have equal gradients; collective."""
    torch.manual_seed(0)
    of_layers = dict.fromkeys(NAMES[:4], (size.width, size.width))
    of_layers |= {"up": (size.width, 4 * size.width), "down": (4 * size.width, size.width)}
    wholes = {name: torch.randn(shape) / size.width**0.5 for name, shape in of_layers.items()}
    batch, gradient = (torch.randn(size.rows, size.places, size.width) for _ in range(2))
    mesh = meshes["md", "shm"]
    shards = {
        name: md.shard(w, "f@tp d" if name in ("out", "down") else "d f@tp", mesh).detach()
        for name, w in wholes.items()
    }
    sides: dict[str, Callable[[], None]] = {}
    for mode in MODES:
        text = "b@dp s d" if mode == "tensor" else "b@dp s@tp d"
        x, g = (md.shard(whole, text, mesh).detach() for whole in (batch, gradient))
        made: dict[str, Made] = {f"local, {mode}": local_block(shards, mode)}
        for backend in BACKENDS:
            made[f"md, {mode}, {backend}"] = our_block(shards, meshes["md", backend], mode)
            made[f"torch, {mode}, {backend}"] = torchs_block(wholes, meshes["torch", backend], mode)
        first: list[torch.Tensor] = []
        for side, (model, weights) in made.items():
            given = x.clone().requires_grad_()
            sides[side] = partial(step, model, [given, *weights], given, g)
            for _ in range(3):  # a wrapper lays its buckets anew
                sides[side]()
            if side.startswith("local"):
                continue
            gradients = [w.grad for w in weights]
            if side.startswith("torch"):
                gradients = [w.T for w in gradients]
            found = [given.grad, *gradients]
            first = first or found
            torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-4)
    return sides


def step(
    model: nn.Module, leaves: Sequence[torch.Tensor], x: torch.Tensor, gradient: torch.Tensor
) -> None:
    """A forward and a backward; ``leaves`` are those that get gradients."""
    for leaf in leaves:
        leaf.grad = None
    model(x).backward(gradient)


def side_rows(size: str, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """One row for each side: medians over rounds."""
    rows = []
    for side, taken in samples.items():
        row: dict[str, Any] = {"width": size, "side": side}
        for clock, name in (("cpu", "CPU"), ("wall", "wall")):
            row[f"{name} ms"] = statistics.median(getattr(it, clock) for it in taken)
            if not side.startswith("local"):
                row[f"exposed {name}"] = statistics.median(exposed(samples, side, clock))
        rows.append(row)
    return rows


def exposed(samples: Mapping[str, Sequence[Sample]], side: str, clock: str) -> list[float]:
    """What a side takes above the local step of its mode, round by round."""
    local = samples[f"local, {side.split(', ')[1]}"]
    pairs = zip(samples[side], local, strict=True)
    return [getattr(mine, clock) - getattr(base, clock) for mine, base in pairs]


def comparisons(
    size: str, samples: Mapping[str, Sequence[Sample]], most: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Our exposed time over torch's; infinite in a round where torch's is not above zero."""
    rows = []
    for mode in MODES:
        for backend in BACKENDS:
            found = []
            for clock in ("cpu", "wall"):
                ours, theirs = (
                    exposed(samples, f"{whose}, {mode}, {backend}", clock)
                    for whose in ("md", "torch")
                )
                of_rounds = zip(ours, theirs, strict=True)
                quotients = [a / b if b > 0 else math.inf for a, b in of_rounds]
                found.append(statistics.median(quotients))
            rows.append(
                {
                    "width": size,
                    "what": f"exposed: md / torch, {mode}, {backend}",
                    "CPU": found[0],
                    "wall": found[1],
                    "verdict": verdict(most[backend], found),
                }
            )
    return rows


def open_meshes() -> dict[tuple[str, str], Any]:
    """Our mesh and torch's over each backend; collective."""
    names = ("dp", "tp")
    meshes: dict[tuple[str, str], Any] = {}
    for backend in BACKENDS:
        over = {name: md.AxisOptions(backend=backend) for name in names}
        shape = (DP, TP)
        meshes["md", backend] = md.init_device_mesh(
            "cpu", shape, mesh_dim_names=names, axis_options=over
        )
        # Of its own names: DTensor takes the groups of the first of several equal meshes for all.
        torchs = tuple(f"{name}_{backend}" for name in names)
        meshes["torch", backend] = init_device_mesh(
            "cpu", shape, mesh_dim_names=torchs, backend_override=dict.fromkeys(torchs, backend)
        )
    return meshes


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/world", world_size=DP * TP, rank=rank)
    meshes = open_meshes()
    if options.profile:
        side, size = options.profile
        sides = make_sides(SIZES[size], meshes)
        show_profile(sides[side], 20 * SIZES[size].num_steps, is_shown=rank == 0)
    else:
        rows: list[dict[str, Any]] = []
        targets: list[dict[str, Any]] = []
        loads = [f"{os.getloadavg()[0]:.1f}"]
        for name in options.sizes:
            size = SIZES[name]
            samplers = {
                side: partial(sample_of, one, size.num_steps)
                for side, one in make_sides(size, meshes).items()
            }
            samples = interleaved(samplers, options.rounds)
            rows += side_rows(name, samples)
            targets += comparisons(name, samples, MOST)
            loads.append(f"{os.getloadavg()[0]:.1f}")
        if rank == 0:
            about = "; ".join(
                f"width {it.width}: {it.rows} rows of {it.places} places in all"
                for it in SIZES.values()
            )
            notes = (
                f"{DP * TP} ranks, one thread each, {options.rounds} interleaved rounds; {about}; "
                f"load average before and after each size {', '.join(loads)}"
            )
            write_report("transformer_block", rows, notes, options.report, targets=targets)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    parser = parser_of(__doc__, rounds=21)
    parser.add_argument("--sizes", type=some_of(SIZES), default=[*SIZES])
    parser.add_argument(
        "--profile", nargs=2, metavar=("SIDE", "SIZE"), help="show where a step's CPU time goes"
    )
    start_ranks(measure, DP * TP, parser.parse_args())


if __name__ == "__main__":
    main()

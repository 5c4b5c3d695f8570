"""Long sequences, experts and pipelines on four ranks: CPU time beside what each is compared with.

    python benchmarks/parallelism.py [REPORT.json] [--rounds 15]

Four processes with one thread each on one world of torch's, which meshdist adopts, with groups over
shared memory and over Gloo; all rounds are interleaved. A sample is a forward and a backward: the
CPU time of all ranks together, of 1F1B the wall time of the slowest. What one device does, rank 0
does while the others wait in the kernel.

* attention: causal, 4,096 tokens, 8 heads of 64, float32, by ``md.attention.context_parallel``: the
  ring in a zigzag, by heads in contiguous shards. "gathered" gathers keys and values, and masks
  later tokens.
* experts: 2,048 tokens of 512 on each rank, 2 of 8 experts each. "by ragged_all_to_all" is the same
  written with that collective. The layer has experts of 512 x 1,024 x 512 by ``grouped_mm``, and is
  compared with these products alone, on the rows that came.
* 1F1B: torch's, on two ranks a stage of two linear layers each, 8 microbatches of 16 rows;
  five steps a sample.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import meshdist as md
import meshdist.torch_backends  # offers "shm" to torch
from benchmarks._report import interleaved, parser_of, spread, start_ranks, write_report

NUM_RANKS = 4
NUM_TOKENS, HEADS, HEAD_WIDTH = 4096, 8, 64
TOKENS, WIDTH, HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 2048, 512, 1024, 8, 2
NUM_STAGES, MICROBATCHES, ROWS, STEPS = 2, 8, 16, 5
WIDTHS = (64, 512)  # of the stages
# The side, what it is compared with, and the quotient to reach.
TARGETS = (
    ("ring", "one device", 1.25),
    ("heads", "one device", 1.1),
    ("gathered", "one device", None),
    ("experts, shm", "by ragged_all_to_all, shm", 0.65),
    ("experts, gloo", "by ragged_all_to_all, gloo", 0.7),
    ("layer, shm", "products alone", 1.1),
    ("1F1B 64, shm", "1F1B 64, gloo", 0.5),
    ("1F1B 512, shm", "1F1B 512, gloo", 0.8),
)
SLOWEST = 1.05  # of both methods, the slowest rank over the mean

Step = Callable[[], Any]


def attention_sides(mesh: md.DeviceMesh) -> dict[str, Step]:
    """Attention of one device, around the ring, by heads, and by gathering."""
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, NUM_TOKENS, HEAD_WIDTH) for _ in range(4)]

    def run(call: Callable[..., torch.Tensor], tokens: torch.Tensor) -> Step:
        gradient, *given = (x[:, :, tokens] for x in whole)
        leaves = [x.requires_grad_() for x in given]

        def step() -> None:
            torch.autograd.grad(call(*leaves), leaves, gradient)

        return step

    def gathered(q: Any, k: Any, v: Any) -> torch.Tensor:
        k, v = (md.lax.all_gather(x, mesh, axis=2, tiled=True) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    shard, zigzag = (
        md.attention.positions(NUM_TOKENS, mesh, layout) for layout in ("contiguous", "zigzag")
    )
    every = torch.arange(NUM_TOKENS)
    mask = shard.unsqueeze(1) >= every
    parallel = partial(md.attention.context_parallel, axis=mesh, causal=True)
    alone = run(partial(F.scaled_dot_product_attention, is_causal=True), every)
    return {
        "one device": alone if md.get_rank() == 0 else lambda: None,
        "ring": run(partial(parallel, method="ring", layout="zigzag"), zigzag),
        "heads": run(partial(parallel, method="heads"), shard),
        "gathered": run(gathered, shard),
    }


def dispatch_by_ragged(tokens: Any, experts: Any, mesh: md.DeviceMesh) -> Any:
    """The rows of my experts, expert after expert, by ``lax.ragged_all_to_all``."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=NUM_EXPERTS)
    theirs = md.lax.all_to_all(counts, mesh, 0, 0, tiled=True)
    sent, taken = (x.view(NUM_RANKS, -1).sum(1) for x in (counts, theirs))
    starts, places = sent.cumsum(0) - sent, taken.cumsum(0) - taken
    rows = tokens[order // NUM_CHOSEN]
    arrived = md.lax.ragged_all_to_all(
        rows,
        rows.new_zeros(int(taken.sum()), WIDTH),
        starts,
        sent,
        md.lax.all_to_all(places, mesh, 0, 0, tiled=True),
        taken,
        axis_name=mesh,
    )
    of_rows = torch.arange(NUM_EXPERTS // NUM_RANKS).repeat(NUM_RANKS).repeat_interleave(theirs)
    by_expert = of_rows.argsort(stable=True)
    return arrived[by_expert], (order, by_expert, sent, taken, starts, places)


def combine_by_ragged(rows: Any, route: Any, weights: Any, mesh: md.DeviceMesh) -> torch.Tensor:
    """The weighted sum of what came of each token, by ``lax.ragged_all_to_all``."""
    order, by_expert, sent, taken, starts, places = route
    back = torch.empty_like(by_expert)
    back[by_expert] = torch.arange(len(by_expert))
    came = md.lax.ragged_all_to_all(
        rows[back],
        rows.new_zeros(int(sent.sum()), WIDTH),
        places,
        taken,
        md.lax.all_to_all(starts, mesh, 0, 0, tiled=True),
        sent,
        axis_name=mesh,
    )
    weighted = came * weights.flatten()[order].unsqueeze(1)
    return came.new_zeros(TOKENS, WIDTH).index_add(0, order // NUM_CHOSEN, weighted)


def expert_sides(meshes: dict[str, md.DeviceMesh]) -> dict[str, Step]:
    """Dispatch and combine over each backend, written both ways; the layer, and its products
    alone."""
    torch.manual_seed(md.get_rank())
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
    experts = torch.randn(TOKENS, NUM_EXPERTS).topk(NUM_CHOSEN).indices
    weights = torch.rand(TOKENS, NUM_CHOSEN, requires_grad=True)
    gradient = torch.randn(TOKENS, WIDTH)
    num_own = NUM_EXPERTS // NUM_RANKS
    up = (torch.randn(num_own, WIDTH, HIDDEN) / WIDTH**0.5).requires_grad_()
    down = (torch.randn(num_own, HIDDEN, WIDTH) / HIDDEN**0.5).requires_grad_()

    def products(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)

    def ours(mesh: md.DeviceMesh) -> None:
        rows, route = md.experts.dispatch(tokens, experts, mesh, NUM_EXPERTS)
        value = md.experts.combine(rows, route, weights)
        torch.autograd.grad(value, (tokens, weights), gradient)

    def by_ragged(mesh: md.DeviceMesh) -> None:
        rows, route = dispatch_by_ragged(tokens, experts, mesh)
        value = combine_by_ragged(rows, route, weights, mesh)
        torch.autograd.grad(value, (tokens, weights), gradient)

    def layer(mesh: md.DeviceMesh) -> None:
        rows, route = md.experts.dispatch(tokens, experts, mesh, NUM_EXPERTS)
        value = md.experts.combine(products(rows, route.counts), route, weights)
        torch.autograd.grad(value, (tokens, weights, up, down), gradient)

    def products_alone() -> None:
        torch.autograd.grad(products(arrived, counts), (arrived, up, down), of_arrived)

    rows, route = md.experts.dispatch(tokens, experts, meshes["shm"], NUM_EXPERTS)
    arrived, counts = rows.detach().requires_grad_(), route.counts
    of_arrived = torch.randn(arrived.shape)
    sides: dict[str, Step] = {}
    for backend, mesh in meshes.items():
        sides[f"experts, {backend}"] = partial(ours, mesh)
        sides[f"by ragged_all_to_all, {backend}"] = partial(by_ragged, mesh)
    return {
        **sides,
        "layer, shm": partial(layer, meshes["shm"]),
        "products alone": products_alone,
    }


def pipeline_sides(groups: dict[str, dist.ProcessGroup]) -> dict[str, Step]:
    """torch's 1F1B over each backend, for stages of two widths."""
    rank = md.get_rank()
    if rank >= NUM_STAGES:
        return {f"1F1B {width}, {backend}": lambda: None for width in WIDTHS for backend in groups}
    sides: dict[str, Step] = {}
    for width in WIDTHS:
        batch = torch.randn(MICROBATCHES * ROWS, width)
        for backend, group in groups.items():
            torch.manual_seed(rank)
            module = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            stage = PipelineStage(module, rank, NUM_STAGES, torch.device("cpu"), group=group)
            schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)

            def step(
                module: nn.Module = module,
                schedule: Schedule1F1B = schedule,
                batch: torch.Tensor = batch,
            ) -> None:
                for _ in range(STEPS):
                    module.zero_grad()
                    if rank == 0:
                        schedule.step(batch)
                    else:
                        schedule.step(target=batch, losses=[])

            sides[f"1F1B {width}, {backend}"] = step
    return sides


def sample(step: Step) -> dict[str, Any]:
    """The CPU time of each rank in ms, and the wall time of the slowest."""
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    step()
    wall = time.perf_counter() - wall
    # Over Gloo ranks that have ended wait in the kernel, for a rank that computes alone, too.
    taken = torch.tensor([time.process_time() - cpu, wall], dtype=torch.float64) * 1e3
    everywhere = [torch.empty_like(taken) for _ in range(NUM_RANKS)]
    dist.all_gather(everywhere, taken)
    of_ranks, walls = torch.stack(everywhere).unbind(1)
    return {"cpu": of_ranks.tolist(), "wall": walls.max().item()}


def measure(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/world", world_size=NUM_RANKS, rank=rank)
    stages = list(range(NUM_STAGES))
    groups = {backend: dist.new_group(stages, backend=backend) for backend in ("shm", "gloo")}
    meshes = {
        backend: md.init_device_mesh(
            "cpu",
            (NUM_RANKS,),
            mesh_dim_names=("a",),
            axis_options={"a": md.AxisOptions(backend=backend)},
        )
        for backend in ("shm", "gloo")
    }
    steps = {
        **attention_sides(meshes["shm"]),
        **expert_sides(meshes),
        **pipeline_sides(groups),
    }
    sides = {name: partial(sample, step) for name, step in steps.items()}
    samples = interleaved(sides, options.rounds)
    found = {
        name: [each["wall"] if name.startswith("1F1B") else sum(each["cpu"]) for each in taken]
        for name, taken in samples.items()
    }
    medians = {name: statistics.median(taken) for name, taken in found.items()}
    rows = [
        {
            "side": name,
            "time": "wall" if name.startswith("1F1B") else "CPU, all ranks",
            **spread(taken, "ms"),
        }
        for name, taken in found.items()
    ]
    targets: list[dict[str, Any]] = [
        {
            "what": side,
            "beside": other,
            "quotient": medians[side] / medians[other],
            "to reach": most,
        }
        for side, other, most in TARGETS
    ]
    for side in ("ring", "heads"):
        shares = [max(each["cpu"]) / statistics.mean(each["cpu"]) for each in samples[side]]
        targets.append(
            {
                "what": f"{side}, slowest rank",
                "beside": "mean rank",
                "quotient": statistics.median(shares),
                "to reach": SLOWEST,
            }
        )
    for target in targets:
        most = target["to reach"]
        target["reached"] = "" if most is None else target["quotient"] <= most
    if rank == 0:
        notes = (
            f"{NUM_RANKS} ranks, one thread each, {options.rounds} interleaved rounds; a forward "
            "and a backward; see the docstring of the benchmark"
        )
        write_report("parallelism", rows, notes, options.report, targets=targets)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Read the command line and start the ranks."""
    start_ranks(measure, NUM_RANKS, parser_of(__doc__, rounds=15).parse_args())


if __name__ == "__main__":
    main()

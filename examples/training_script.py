"""One whole training script: mixed precision, accumulation, evaluation, checkpoints, any mesh.

    meshdist run -n 4 examples/training_script.py --mesh dp=2,tp=2 --root run --steps 60
    meshdist run -n 2 examples/training_script.py --mesh dp=2 --root run      # goes on, elsewhere
    torchrun --nproc-per-node 4 examples/training_script.py --mesh dp=4 --root other
    python examples/training_script.py --simulate 4 --mesh dp=2,tp=2 --root checked --check

``--check`` stops within an epoch, goes on with all ranks along dp, trains on one rank without a
stop, and exits with 1 if the losses differ. docs/tutorials/training_script.md explains it.
"""

import argparse
import math
import os
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshdist as md

NUM_TRAIN, NUM_TEST, FEATURES, CLASSES, WIDTH = 1000, 203, 32, 10, 64
PLAN = {"*.up": "column", "*.down": "row"}  # which layers are split over tp, and how
LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}  # largest relative difference that --check allows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(mesh: md.DeviceMesh, options: argparse.Namespace) -> nn.Module:
    """Return the model, split over tp, with gradients averaged over dp."""
    md.seed(options.seed)  # equal weights on every rank, before parallelize() and DDP compare them
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), Block(), Block(), nn.Linear(WIDTH, CLASSES))
    md.parallelize(model.to(mesh.device_type), mesh["tp"], PLAN)
    return md.DDP(model, device_mesh=mesh["dp"])


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return samples to train on and to test on, labelled by a random network."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_TRAIN + NUM_TEST, FEATURES, generator=draws)
    teacher = torch.randn(FEATURES, CLASSES, generator=draws)
    y = (x.tanh() @ teacher).argmax(1)
    return TensorDataset(x[:NUM_TRAIN], y[:NUM_TRAIN]), TensorDataset(x[NUM_TRAIN:], y[NUM_TRAIN:])


def rate(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warmup, then a cosine to a tenth."""
    return min((step + 1) / 10, 0.55 + 0.45 * math.cos(math.pi * min(step / steps, 1.0)))


def train(mesh: md.DeviceMesh, options: argparse.Namespace, root: str, last: int) -> list[float]:
    """Train from the newest checkpoint below ``root`` to step ``last``; return these losses."""
    (train_data, test_data), model = datasets(), build(mesh, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: rate(n, options.steps))
    sampler = md.DistributedSampler(train_data, mesh["dp"], seed=options.seed, drop_last=True)
    per_rank = options.batch // mesh["dp"].size()
    loader = DataLoader(train_data, per_rank, sampler=sampler, drop_last=True)

    state = md.checkpoint.State(
        model=model, optimizer=optimizer, sampler=sampler, schedule=schedule, step=0, epoch=0
    )
    checkpoints = md.checkpoint.Checkpointer(root, keep=2, mesh=mesh) if root else None
    if checkpoints is not None:
        found = checkpoints.load(state)
        report(f"starts at step {found or 0}, epoch {state.epoch}, on {mesh!r}")
    losses: list[float] = []
    while state.step < last:
        sampler.set_epoch(state.epoch)  # a new order for each epoch, equal on all ranks
        for x, y in loader:
            loss = train_step(model, x.to(mesh.device_type), y.to(mesh.device_type), options)
            norm = md.clip_grad_norm_(model.parameters(), 1.0, mesh=mesh)  # of the whole model
            optimizer.step()
            schedule.step()
            state.step += 1
            md.all_reduce(loss, md.ReduceOp.AVG, group=mesh["dp"])  # all ranks, then one prints
            losses.append(loss.item())
            if not state.step % options.log_every:
                lr = schedule.get_last_lr()[0]
                report(f"step {state.step:4}  loss {losses[-1]:.4f}  norm {norm:.2f}  lr {lr:.1e}")
            is_last = state.step == last or (checkpoints is not None and md.preempted())
            if checkpoints is not None and (is_last or not state.step % options.save_every):
                checkpoints.save(state, state.step)
            if is_last:
                break
        else:
            state.epoch += 1
            continue  # with the next epoch; after the last step, leave this loop too
        break
    mean, accuracy = evaluate(model, mesh, test_data, options)
    report(f"step {state.step:4}  test loss {mean:.4f}  accuracy {accuracy:.1%} of {NUM_TEST}")
    return [*losses, mean]


def train_step(model: nn.Module, x: Tensor, y: Tensor, options: argparse.Namespace) -> Tensor:
    """Accumulate the gradients of one batch in microbatches; return this rank's loss."""
    model.train()
    model.zero_grad()
    total = torch.zeros((), device=x.device)
    for number in range(options.accumulate):
        part, labels = (both.chunk(options.accumulate)[number] for both in (x, y))
        is_last = number == options.accumulate - 1
        with nullcontext() if is_last else model.no_sync():  # one average a batch
            with precision(x.device.type, options):
                loss = F.cross_entropy(model(part), labels) / options.accumulate
            loss.backward()
        total += loss.detach()
    return total


def precision(device: str, options: argparse.Namespace) -> torch.autocast:
    """Compute in bfloat16; parameters, gradients and the optimizer's state stay in float32."""
    return torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bfloat16")


@torch.no_grad()
def evaluate(
    model: nn.Module, mesh: md.DeviceMesh, data: TensorDataset, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over all samples, each counted once."""
    model.eval()
    sampler = md.DistributedSampler(data, mesh["dp"], shuffle=False, pad=False)
    totals = torch.zeros(3, dtype=torch.float64, device=mesh.device_type)
    for x, y in DataLoader(data, 64, sampler=sampler):
        x, y = x.to(mesh.device_type), y.to(mesh.device_type)
        with precision(mesh.device_type, options):
            logits = model.module(x).float()  # ranks of dp may have unequal numbers of batches
        totals[0] += F.cross_entropy(logits, y, reduction="sum")
        totals[1] += (logits.argmax(1) == y).sum()
        totals[2] += len(y)
    md.all_reduce(totals, group=mesh["dp"])
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def report(line: str) -> None:
    if md.get_rank() == 0:
        print(line, flush=True)


def run(options: argparse.Namespace) -> int:
    """Train on the mesh; with ``--check`` also in two parts on two meshes, and on one rank."""
    names = ("dp", "tp")
    with md.init_device_mesh(options.device, options.mesh, mesh_dim_names=names) as mesh:
        if not options.check:
            train(mesh, options, options.root, options.steps)
            return 0
        losses = train(mesh, options, options.root, options.steps // 2)[:-1]
    other = (md.get_world_size(), 1)
    with md.init_device_mesh(options.device, other, mesh_dim_names=names) as mesh:
        losses += train(mesh, options, options.root, options.steps)
    with md.DeviceMesh(options.device, [[md.get_rank()]], mesh_dim_names=names) as mesh:
        alone = train(mesh, options, "", options.steps)
    off = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    limit = LIMIT[options.dtype]
    report(f"largest relative difference from one rank: {off:.1e} (limit {limit:.0e})")
    return int(not off <= limit)  # also for NaN


def shape(text: str) -> tuple[int, int]:
    """Return (2, 1) for "dp=2"."""
    sizes = dict(part.split("=") for part in text.split(","))
    return int(sizes.pop("dp", 1)), int(sizes.pop("tp", 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--mesh", type=shape, default=(1, 1), metavar="dp=N,tp=N")
    add("--root", required=True, help="the folder of the run's checkpoints")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    numbers = {"steps": 100, "batch": 24, "accumulate": 2, "lr": 3e-3, "seed": 0}
    for name, number in {**numbers, "log-every": 20, "save-every": 25}.items():
        add(f"--{name}", type=type(number), default=number, help=f"default: {number}")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--simulate", type=int, metavar="N", help="run N ranks in this process")
    add("--check", action="store_true", help="stop, go on elsewhere, and compare with one rank")
    options = parser.parse_args()
    if options.check and os.path.isdir(options.root) and os.listdir(options.root):
        parser.error(f"--check needs an empty --root, and {options.root} has files")
    torch.set_num_threads(1)
    if options.simulate:
        return max(md.simulate(run, options.simulate, args=(options,)))
    outcome = run(options)
    md.destroy_process_group()
    return outcome


if __name__ == "__main__":
    sys.exit(main())

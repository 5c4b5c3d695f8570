"""Train with checkpoints, lose a rank, and end as if nothing had happened; on any number of ranks.

    torchrun --nproc-per-node 3 --max-restarts 2 examples/resume.py --root a --kill 1:12 --check
    meshdist run -n 4 examples/resume.py --root b --tp 2 --steps 10     # some steps,
    meshdist run -n 3 examples/resume.py --root b --check               # the rest elsewhere
    python examples/resume.py --root c --simulate 4 --check             # in one process

The newest whole step is loaded as the program begins; a signal (SIGTERM, SIGUSR1) lets all ranks
save and leave after the same step. ``--kill RANK:STEP`` lets a rank end by SIGKILL in its first
life. ``--check`` trains all steps on one rank too, and exits with 1 where the weights differ.
"""

import argparse
import os
import signal
import sys

import torch
from torch import nn

import meshdist as md

BATCH, WIDTH, EVERY = 12, 16, 5
LIMIT = 1e-12  # largest difference allowed; the numbers are float64


def model_on(mesh: md.DeviceMesh) -> nn.Module:
    """Return two layers, split over tp and averaged over dp."""
    md.seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1)).double()
    md.parallelize(model, mesh["tp"], {"0": "column", "2": "row"})
    return md.DDP(model, device_mesh=mesh["dp"])


def batch(step: int, mesh: md.DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's batch, and its targets."""
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=draws, dtype=torch.float64)
    mine = md.shard(x, "b@dp d", mesh)
    return mine, mine.sum(1, keepdim=True).sin()


def train(
    mesh: md.DeviceMesh, steps: int, root: str = "", kill: tuple[int, int] = (-1, -1)
) -> nn.Module:
    """Train to a number of steps, from the newest checkpoint under ``root`` if there is one."""
    model = model_on(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = md.checkpoint.State(model=model, optimizer=optimizer, step=0)
    checkpoints = md.checkpoint.Checkpointer(root, mesh=mesh) if root else None
    if checkpoints is not None:
        found = checkpoints.load(state)
        if md.get_rank() == 0 and found is not None:
            print(f"life {md.restart_count()}: goes on after step {found}", flush=True)
    while state.step < steps:
        x, y = batch(state.step, mesh)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        state.step += 1
        if (md.get_rank(), state.step) == kill and md.restart_count() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        is_last = md.preempted() if checkpoints is not None else False
        if checkpoints is not None and (is_last or not state.step % EVERY or state.step == steps):
            checkpoints.save(state, state.step)
        if is_last:
            break
    return model


def difference(model: nn.Module, steps: int) -> float:
    """Return the largest difference of weights from those that one rank has, on all ranks."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=("dp", "tp"))
    off = [0.0]
    for mine, whole in zip(model.parameters(), train(alone, steps).parameters(), strict=True):
        spec = md.typeof(mine).spec
        part = whole.detach()
        if spec is not None:
            part = md.shard(part, md.NamedSharding(md.get_current_mesh(), md.P(*spec.partitions)))
        off.append((mine.detach() - part).abs().max().item())
    found = torch.tensor(max(off), dtype=torch.float64)
    md.all_reduce(found, md.ReduceOp.MAX)
    return found.item()


def run(options: argparse.Namespace) -> int:
    """Make the mesh, train, and compare where that is asked for."""
    if md.get_world_size() % options.tp:
        raise SystemExit(f"--tp={options.tp} does not divide {md.get_world_size()} ranks")
    shape = md.get_world_size() // options.tp, options.tp
    with md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) as mesh:
        model = train(mesh, options.steps, options.root, options.kill)
        off = difference(model, options.steps) if options.check else 0.0
        if md.get_rank() == 0 and options.check:
            print(f"dp={shape[0]}, tp={shape[1]}: difference from one rank: {off:.1e}", flush=True)
    return int(not off <= LIMIT)  # NaN, too


def place(text: str) -> tuple[int, int]:
    """Read RANK:STEP."""
    rank, step = text.split(":")
    return int(rank), int(step)


def main() -> int:
    """Read the command line, and run on the ranks that there are, or on simulated ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", required=True, help="the folder of the run's checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="how many steps in all")
    parser.add_argument("--tp", type=int, default=1, help="parts of each layer")
    parser.add_argument("--backend", help="the backend: shm, gloo, ...; the best one if left out")
    parser.add_argument("--kill", type=place, default=(-1, -1), metavar="RANK:STEP")
    parser.add_argument("--simulate", type=int, metavar="N", help="run N ranks in this process")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.simulate:
        return max(md.simulate(run, options.simulate, args=(options,)))
    md.init_process_group(options.backend)
    outcome = run(options)
    md.destroy_process_group()
    return outcome


if __name__ == "__main__":
    sys.exit(main())

"""Train a small GPT on a (dp, tp) mesh: one script for any number of ranks.

    meshdist run -n 4 examples/train_lm.py --mesh dp=2,tp=2 --check
    torchrun --nproc-per-node 4 examples/train_lm.py --mesh dp=4,tp=1
    mpiexec -n 4 python examples/train_lm.py --mesh dp=1,tp=4
    mpiexec -n 4 python examples/train_lm.py --mesh dp=2,tp=2 --axis-backend dp=mpi,tp=shm
    meshdist run -n 4 examples/train_lm.py --mesh dp=2,tp=2 --optimizer muon --check
    python examples/train_lm.py --mesh dp=1,tp=1               # one process, no launcher

Along `tp` each rank holds some attention heads and some MLP columns of every layer; along `dp` each
rank reads its share of every batch, and gradients are averaged. The text is Python's own
documentation (or --text FILE), byte by byte. `--check` repeats the run on one process, with the
whole model and the whole batch, and fails unless the loss curves agree.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshdist as md
import meshdist.distributed as dist

LIMIT = 1e-4  # largest relative difference that --check allows, in float32

# -- the model: plain torch, and a plan that says of which layers each rank has a part -------------

PLAN = {
    "*.attention.heads": "column",  # outputs are split: the backward sums x's gradient over tp
    "*.attention.out": "row",  # inputs are split: each rank's part is added, all hold the sum
    "*.up": "column",
    "*.down": "row",
}


def linear(num_in: int, num_out: int) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, num_in, num_out, bias=False)
    nn.init.normal_(layer.weight, std=num_in**-0.5)  # every rank draws it from one seed
    return layer


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.heads = linear(width, 3 * width)  # q, k, v of one head after the other
        self.out = linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2).unbind(3)
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the place in the text (Su et al. 2021)."""
    places = torch.arange(x.shape[-2], device=x.device)
    angles = torch.outer(places, 1e4 ** -torch.linspace(0, 1, x.shape[-1] // 2, device=x.device))
    real, imaginary = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Sequential):
    """Bytes [batch, place] -> logits [batch, place, 256], equal on all ranks of tp."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        blocks = [Block(width, heads) for _ in range(layers)]
        super().__init__(
            nn.Embedding(256, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 256)
        )
        nn.init.normal_(self[0].weight, std=0.2)


# -- the data: one global batch a step, of which each rank of dp reads its share -------------------


def read_text(path: Path | None) -> Tensor:
    """Return the bytes of `path`, or of the documentation that every CPython carries."""
    text = path.read_bytes() if path else "\n\n".join(topics.topics.values()).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(dp: md.DeviceMesh, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield this rank's share of each batch, for ever; on any mesh the shares make up the same."""
    text = read_text(args.text)
    if len(text) <= args.batch * args.context:
        raise SystemExit(f"the text has {len(text)} bytes: too few for one batch")
    windows = text.unfold(0, args.context + 1, args.context)
    windows = windows[: len(windows) // args.batch * args.batch]  # whole batches only
    sampler = dist.DistributedSampler(windows, dp, seed=args.seed)  # ranks along tp read the same
    loader = DataLoader(windows, args.batch // dp.size(), sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


# -- training --------------------------------------------------------------------------------------


def train(
    mesh: md.DeviceMesh, args: argparse.Namespace, title: str
) -> tuple[nn.Module, list[float]]:
    """Train on `mesh`; return this rank's part of the model, and the loss of each step."""
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.width, args.heads).to(args.device)
    md.parallelize(model, mesh["tp"], PLAN)
    model = md.DDP(model, device_mesh=mesh["dp"])
    optimizers = optimizers_of(model.module, mesh, args)
    decays = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=args.steps)
        for optimizer in optimizers
    ]
    losses: list[float] = []
    with mesh, progress(title, args) as show:  # "tp" in md.lax.psum(x, "tp"): the mesh's axis
        for _, batch in zip(range(args.steps), batches(mesh["dp"], args), strict=False):
            batch = batch.to(args.device, torch.long)
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            model.zero_grad()
            loss.backward()  # averages gradients over dp as they arrive
            for each in (*optimizers, *decays):
                each.step()
            mean = loss.detach()
            md.all_reduce(mean, op=md.ReduceOp.AVG, group=mesh["dp"])
            losses.append(mean.item())
            show(losses)
    return model.module, losses


def optimizers_of(
    model: GPT, mesh: md.DeviceMesh, args: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Return AdamW; or Muon for the matrices of the blocks, and AdamW for all else."""
    matrices: list[nn.Parameter] = []
    if args.optimizer == "muon":
        matrices = [p for block in list(model)[1:-2] for p in block.parameters() if p.ndim == 2]
    taken = set(matrices)
    others = [p for p in model.parameters() if p not in taken]
    found: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, args.lr, betas=(0.9, 0.95))]
    if matrices:  # each rank holds a part of them, and updates its part of the whole step
        lr = {"lr": args.lr, "adjust_lr_fn": "match_rms_adamw"}
        found.append(md.optim.Muon(matrices, **lr, mesh=mesh))
    return found


@torch.no_grad()
def generate(model: nn.Module, mesh: md.DeviceMesh, args: argparse.Namespace) -> str:
    """Return a text that the model writes; every rank draws the same bytes."""
    text = torch.tensor([list(b"The ")], device=args.device)
    dice = torch.Generator(args.device).manual_seed(args.seed)
    with mesh:
        for _ in range(args.sample):
            chances = F.softmax(model(text[:, -args.context :])[:, -1] / 0.7, -1)
            text = torch.cat([text, torch.multinomial(chances, 1, generator=dice)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def repeat_alone(losses: list[float], args: argparse.Namespace) -> tuple[list[float], float]:
    """Train again on rank 0 alone; return its losses there, and on all ranks the difference."""
    alone, difference = [], torch.zeros(1, device=args.device)
    if md.get_rank() == 0:
        mesh = md.DeviceMesh(args.device, [[0]], mesh_dim_names=("dp", "tp"))
        _, alone = train(mesh, args, "one process")
        ours, theirs = torch.tensor([losses, alone], dtype=torch.float64)
        difference[0] = ((ours - theirs) / theirs).abs().max()
    with md.stall_warning(None):  # here the other ranks wait, as they are meant to
        md.broadcast(difference, src=0)
    return alone, difference.item()


# -- what the user says and sees -------------------------------------------------------------------


@contextmanager
def progress(title: str, args: argparse.Namespace) -> Iterator[Callable[[list[float]], None]]:
    """On rank 0 a progress bar, or a line now and then where the output is no terminal."""
    console = Console(quiet=md.get_rank() != 0, highlight=False, soft_wrap=True)
    columns = TextColumn(title), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task(title, total=args.steps, now="")
    start = time.perf_counter()

    def show(losses: list[float]) -> None:
        done = len(losses)
        speed = done * args.batch * args.context / (time.perf_counter() - start)
        now = f"loss {losses[-1]:.3f}  tokens/s {speed:,.0f}"
        bar.update(task, completed=done, now=now)
        if bar.disable and (done in (1, args.steps) or done % max(args.steps // 10, 1) == 0):
            console.print(f"{title}  step {done:>{len(str(args.steps))}}/{args.steps}  {now}")

    with bar:
        yield show


def plot(path: Path, curves: dict[str, list[float]]) -> None:
    """Draw the loss curves into `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (label, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(range(1, len(losses) + 1), losses, style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, dpi=150)


def axes(text: str) -> dict[str, int]:
    """Return {"dp": 2, "tp": 2} for "dp=2,tp=2"; an axis that is left out has one rank."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    if not sizes.keys() <= {"dp", "tp"}:
        raise ValueError
    return sizes | {name: 1 for name in ("dp", "tp") if name not in sizes}


def backends(text: str) -> dict[str, md.AxisOptions]:
    """Read --axis-backend."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if not all(axis in ("dp", "tp") and name for axis, name in pairs):
        raise ValueError
    return {axis: md.AxisOptions(backend=name) for axis, name in pairs}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    lines = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(description=lines[0], epilog=lines[2])
    add = parser.add_argument
    add("--mesh", type=axes, default="dp=1,tp=1", metavar="dp=N,tp=N", help="the mesh's axes")
    add("--check", action="store_true", help="compare with one process; exit 1 on a difference")
    add("--plot", type=Path, metavar="FILE", help="draw the loss curve (PNG, SVG or PDF)")
    add("--text", type=Path, metavar="FILE", help="train on this text")
    add("--steps", type=int, default=120)
    add("--batch", type=int, default=8, help="windows of text a step, over all ranks")
    add("--context", type=int, default=128, help="bytes in a window")
    add("--layers", type=int, default=3)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--seed", type=int, default=0)
    add("--sample", type=int, default=200, help="bytes to write at the end")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--backend", help="how to move bytes: gloo, nccl, ...; chosen by the device if absent")
    add(
        "--axis-backend", type=backends, default={}, metavar="dp=NAME,tp=NAME", help="along an axis"
    )
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.context, args.layers, args.heads, args.sample) < 1:
        parser.error("steps, batch, context, layers, heads and sample are at least 1")
    if args.width < 1 or args.width % (2 * args.heads):
        parser.error(f"--width must be a multiple of 2 x {args.heads} heads")
    return args


def join(args: argparse.Namespace) -> md.DeviceMesh:
    """Join the other ranks, as many as the launcher started, and arrange them in the mesh."""
    if args.backend is not None:
        md.init_process_group(args.backend)
    mesh = md.init_device_mesh(
        args.device,
        tuple(args.mesh.values()),
        mesh_dim_names=tuple(args.mesh),
        axis_options=args.axis_backend,
    )
    if mesh.size() != md.get_world_size():
        raise SystemExit(f"--mesh has {mesh.size()} ranks, and {md.get_world_size()} were started")
    for option, axis in (("heads", "tp"), ("batch", "dp")):
        if getattr(args, option) % mesh.axis_sizes[axis]:
            raise SystemExit(f"--{option} must be a multiple of {axis}={mesh.axis_sizes[axis]}")
    return mesh


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    mesh = join(args)
    title = ", ".join(f"{name}={size}" for name, size in mesh.axis_sizes.items())
    say = print if md.get_rank() == 0 else lambda _: None
    say(mesh)
    model, losses = train(mesh, args, title)
    sample = generate(model, mesh, args)
    say(f"parameters on this rank: {sum(p.numel() for p in model.parameters()):,}")
    say(f"a sample:\n{sample}\n")
    curves, difference = {title: losses}, 0.0
    if args.check:
        curves["one process"], difference = repeat_alone(losses, args)
        outcome = "equal" if difference < LIMIT else "DIFFERENT"
        say(f"check: largest relative difference {difference:.1e} (limit {LIMIT:.0e}): {outcome}")
    if args.plot and md.get_rank() == 0:
        plot(args.plot, curves)
    md.destroy_process_group()
    return 0 if difference < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

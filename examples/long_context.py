"""Train with a long sequence that is sharded along an axis: context parallelism.

    meshdist run -n 4 examples/long_context.py --method ring --check
    torchrun --nproc-per-node 4 examples/long_context.py --method heads --check
    meshdist run -n 4 examples/long_context.py --method ring --no-causal --sequence 4096

A small transformer learns to copy. Each rank has all parameters and a part of one long sequence;
only attention, ``md.attention.context_parallel``, communicates in the forward. In a *ring*, keys
and values pass from rank to rank, and the tokens are in a zigzag, so that all ranks have equal
work. By *heads*, an all-to-all exchanges tokens for heads. ``--check`` also trains on one process,
in float64, and exits with 1 if losses or weights differ.
"""

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshdist as md

HEADS, GROUPS, WIDTH, WORDS, STEPS = 8, 4, 16, 32, 8  # two heads of queries for each of keys
LIMIT = 1e-9  # largest difference allowed; the numbers of --check are float64
LAYOUTS = {"ring": "zigzag", "heads": "contiguous"}


class Copier(nn.Module):
    """One layer of grouped attention with rotary positions, between an embedding and a head."""

    def __init__(self, axis: md.DeviceMesh, method: str, is_causal: bool) -> None:
        super().__init__()
        self.axis, self.method, self.is_causal = axis, method, is_causal
        self.words = nn.Embedding(WORDS, HEADS * WIDTH)
        self.queries = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.keys_values = nn.Linear(HEADS * WIDTH, 2 * GROUPS * WIDTH, bias=False)
        self.head = nn.Linear(HEADS * WIDTH, WORDS)

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return scores for words of shape [batch, tokens] at ``positions`` of the sequence."""
        x = self.words(words)
        q = self.queries(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = self.keys_values(x).unflatten(-1, (2, GROUPS, WIDTH)).permute(2, 0, 3, 1, 4)
        angle = positions.unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, WIDTH // 2, dtype=x.dtype)
        y = md.attention.context_parallel(
            rotated(q, angle),
            rotated(k, angle),
            v,
            self.axis,
            causal=self.is_causal,
            method=self.method,
            layout=LAYOUTS[self.method],
        )
        return self.head(x + y.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of numbers by the angles of their positions."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def train(mesh: md.DeviceMesh, method: str, is_causal: bool, length: int, dtype: Any) -> Any:
    """Train on a sequence sharded along 'cp'; return the model and the losses of all tokens."""
    own = md.attention.positions(length, mesh["cp"], LAYOUTS[method])
    torch.manual_seed(0)  # every rank draws the same batches, and then takes its own tokens
    model = Copier(mesh["cp"], method, is_causal).to(dtype)
    wrapped = md.DDP(model, device_mesh=mesh["cp"])  # each rank has the loss of its own tokens
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (2, length))
        scores = wrapped(words[:, own], own)
        loss = F.cross_entropy(scores.flatten(0, 1), words.roll(1, 1)[:, own].flatten())
        losses.append(md.lax.pmean(loss.detach(), mesh["cp"]).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


def main() -> int:
    """Make the mesh, train, and compare if the command line asks for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=LAYOUTS, default="ring")
    parser.add_argument("--no-causal", action="store_true", help="let queries see later keys, too")
    parser.add_argument("--sequence", type=int, default=64, help="its length")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    size = md.get_world_size()
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    dtype = torch.float64 if options.check else torch.float32
    args = (options.method, not options.no_causal, options.sequence, dtype)
    model, losses = train(mesh, *args)
    off = 0.0
    if options.check:
        mesh = md.DeviceMesh("cpu", [md.get_rank()], mesh_dim_names=("cp",))
        alone, its = train(mesh, "heads", *args[1:])  # there it is torch's own attention
        pairs = [*zip(model.parameters(), alone.parameters(), strict=True)]
        pairs.append((torch.tensor(losses, dtype=dtype), torch.tensor(its, dtype=dtype)))
        worst = torch.stack([(a - b).detach().abs().max() for a, b in pairs]).max()
        md.all_reduce(worst, md.ReduceOp.MAX)
        off = worst.item()
    if md.get_rank() == 0:
        print(f"cp={size}, {options.method}: loss {losses[0]:.6f} to {losses[-1]:.6f}")
        if options.check:
            print(f"difference from one process: {off:.1e}")
    md.destroy_process_group()
    return int(not off <= LIMIT)


if __name__ == "__main__":
    sys.exit(main())

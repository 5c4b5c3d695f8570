"""Attention over a sequence that is cut along an axis: around a ring, or by heads.

    meshdist run -n 4 examples/long_context.py --method ring --check
    torchrun --nproc-per-node 4 examples/long_context.py --method ulysses --check
    meshdist run -n 4 examples/long_context.py --method ring --no-causal --sequence 4096

A small transformer learns to copy: each rank holds its places of one long sequence, and all
parameters. *ring* (arXiv:2310.01889): keys and values go round, one message a step, and each rank
adds up the attention of its own queries; places lie in a zigzag, so that the masked work is equal.
*ulysses* (arXiv:2309.14509): an all-to-all makes whole sequences of some heads, and another turns
it round. ``--check`` trains on one process too, in float64, and exits with 1 where losses or
weights differ.

The ring calls the kernels of PyTorch's flash attention for CPUs, whose names are private: on
another device the two calls in ``attend`` and ``attend_backward`` have other names.
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
Pair = tuple[torch.Tensor, torch.Tensor]


def positions_of(length: int, size: int, rank: int, method: str) -> torch.Tensor:
    """The places of the sequence that a rank holds, of 8 on 2 ranks: 0 1 2 3, in a ring 0 1 6 7."""
    chunks = torch.arange(length).chunk(2 * size if method == "ring" else size)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if method == "ring" else chunks[rank]


def ulysses(q: Any, k: Any, v: Any, axis: str, is_causal: bool) -> torch.Tensor:
    """Attention of this rank's places: [batch, groups, heads of a group, places, width]."""
    q, k, v = (md.reshard(x, f"b g h s@{axis} d -> b g@{axis} h s d") for x in (q, k, v))
    k, v = (x.expand_as(q).flatten(1, 2) for x in (k, v))
    out = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=is_causal)
    return md.reshard(out.view_as(q), f"b g@{axis} h s d -> b g h s@{axis} d")


def attend(q: Any, kv: Any, is_causal: bool) -> Pair:
    """Attention of some queries to some keys, and the log of the sum of its exponentials."""
    k, v = (x.expand(*q.shape[:3], *x.shape[3:]).flatten(1, 2) for x in kv)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.flatten(1, 2), k, v, 0.0, is_causal
    )
    return out.view_as(q), lse.unflatten(1, q.shape[1:3])


def attend_backward(grad: Any, q: Any, out: Any, lse: Any, kv: Any, is_causal: bool) -> Pair:
    """The gradients of queries, and of keys and values, given the final ``out`` and ``lse``."""
    k, v = (x.expand(*q.shape[:3], *x.shape[3:]).flatten(1, 2) for x in kv)
    flat = [x.flatten(1, 2).contiguous() for x in (grad, q, out, lse)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        flat[0], flat[1], k.contiguous(), v.contiguous(), *flat[2:], 0.0, is_causal
    )
    per_head = (x.unflatten(1, q.shape[1:3]).sum(2, keepdim=True) for x in (dk, dv))
    return dq.view_as(q), torch.stack(list(per_head))


def meeting(me: int, source: int, length: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """Which of my queries meet which keys of ``source``, and whether they need a mask."""
    # Of 4 ranks rank 1 has the chunks 1 and 6 of 8, rank 2 has 2 and 5. The keys of chunk 2 lie
    # before the queries of 6 alone, those of 5 too: my later half meets all that a later rank has.
    # For rank 2 the keys of chunk 1 lie before both of its chunks, and those of 6 before none.
    # So each block but the own has half of the work, and the own, masked, has as much.
    everything, half = slice(None), length // 2
    if not is_causal or source == me:
        return everything, everything, is_causal
    if source < me:
        return everything, slice(0, half), False
    return slice(half, None), everything, False


class Ring(torch.autograd.Function):
    """Attention around a ring, with a backward of its own, which sends keys and values again."""

    @staticmethod
    def forward(ctx: Any, q: Any, kv: Any, axis: Any, is_causal: bool) -> torch.Tensor:
        """Begin with the own block; add each block that comes by its share of the exponentials."""
        size, me = axis.size(), axis.get_local_rank()
        shift = [(rank, (rank + 1) % size) for rank in range(size)]
        out, lse = attend(q, own := kv, is_causal)
        out = out.to(lse.dtype)
        for step in range(1, size):
            kv = md.lax.ppermute(kv, axis, shift)
            rows, keys, _ = meeting(me, (me - step) % size, q.shape[3], is_causal)
            more, its_lse = attend(q[..., rows, :], kv[..., keys, :], is_causal=False)
            old = lse[..., rows]
            out[..., rows, :].lerp_(more.to(out.dtype), (its_lse - old).sigmoid().unsqueeze(-1))
            lse[..., rows] = torch.logaddexp(old, its_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own, out, lse)
        ctx.rest = axis, is_causal, shift
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """With the final sums each block's gradient is exact; that of keys travels with them."""
        q, kv, out, lse = ctx.saved_tensors
        axis, is_causal, shift = ctx.rest
        size, me = axis.size(), axis.get_local_rank()
        dq, dkv = torch.zeros_like(out), torch.zeros_like(kv)
        for step in range(size):
            rows, keys, masked = meeting(me, (me - step) % size, q.shape[3], is_causal)
            of_rows = (x[..., rows, :] for x in (grad, q, out))
            of_queries, of_keys = attend_backward(
                *of_rows, lse[..., rows], kv[..., keys, :], masked
            )
            dq[..., rows, :] += of_queries
            dkv[..., keys, :] += of_keys
            dkv = md.lax.ppermute(dkv, axis, shift)  # the last one brings it home
            if step < size - 1:
                kv = md.lax.ppermute(kv, axis, shift)
        return dq, dkv, None, None


def ring(q: Any, k: Any, v: Any, axis: str, is_causal: bool) -> torch.Tensor:
    """Attention of this rank's places in a zigzag; shapes as in ``ulysses``."""
    out: torch.Tensor = Ring.apply(q, torch.stack([k, v]), md.get_current_mesh()[axis], is_causal)
    return out


METHODS = {"ring": ring, "ulysses": ulysses}


class Copier(nn.Module):
    """One layer of grouped attention with rotary places, between an embedding and a head."""

    def __init__(self, method: str, is_causal: bool) -> None:
        super().__init__()
        self.method, self.is_causal = method, is_causal
        self.words = nn.Embedding(WORDS, HEADS * WIDTH)
        self.queries = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False)
        self.keys_values = nn.Linear(HEADS * WIDTH, 2 * GROUPS * WIDTH, bias=False)
        self.head = nn.Linear(HEADS * WIDTH, WORDS)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Scores for words of shape [batch, places]; ``places`` says where in the sequence."""
        x = self.words(words)
        q = self.queries(x).unflatten(-1, (GROUPS, HEADS // GROUPS, WIDTH)).permute(0, 2, 3, 1, 4)
        k, v = self.keys_values(x).unflatten(-1, (2, GROUPS, 1, WIDTH)).permute(2, 0, 3, 4, 1, 5)
        angle = places.unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, WIDTH // 2, dtype=x.dtype)
        q, k = (turned(y, angle) for y in (q, k))
        out = METHODS[self.method](q, k, v, "cp", self.is_causal)
        return self.head(x + out.permute(0, 3, 1, 2, 4).flatten(2))


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """Turn pairs of numbers by the angles of their places."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def train(mesh: md.DeviceMesh, method: str, is_causal: bool, length: int, dtype: Any) -> Any:
    """Train on a sequence cut along 'cp'; return the model and the losses of the whole."""
    torch.manual_seed(0)  # every rank draws alike, and then takes its places
    model = Copier(method, is_causal).to(dtype)
    wrapped = md.DDP(model, device_mesh=mesh["cp"])  # averages gradients over the places, too
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    places = positions_of(length, mesh["cp"].size(), mesh["cp"].get_local_rank(), method)
    losses = []
    for _ in range(STEPS):
        words = torch.randint(WORDS, (2, length))
        with mesh:
            scores = wrapped(words[:, places], places)
            loss = F.cross_entropy(scores.flatten(0, 1), words.roll(1, 1)[:, places].flatten())
            losses.append(md.lax.pmean(loss.detach(), "cp").item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, losses


def main() -> int:
    """Make the mesh, train, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="ring")
    parser.add_argument("--no-causal", action="store_true", help="let queries see later keys, too")
    parser.add_argument("--sequence", type=int, default=64, help="its length")
    parser.add_argument("--check", action="store_true", help="compare with one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    size = md.get_world_size()
    parts = 2 * size if options.method == "ring" else size
    if options.sequence % parts or options.sequence < parts:
        raise SystemExit(f"a sequence of {options.sequence} does not divide by {parts}")
    if options.method == "ulysses" and size > GROUPS:
        raise SystemExit(f"{GROUPS} heads of keys cannot be cut over {size} ranks; --method ring")
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    dtype = torch.float64 if options.check else torch.float32
    args = (options.method, not options.no_causal, options.sequence, dtype)
    model, losses = train(mesh, *args)
    off = 0.0
    if options.check:
        mesh = md.DeviceMesh("cpu", [md.get_rank()], mesh_dim_names=("cp",))
        alone, its = train(mesh, "ulysses", *args[1:])  # which is PyTorch's attention there
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

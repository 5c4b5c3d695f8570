"""A transformer block split over (dp, tp), in fifteen lines: each product says how it lies.

    meshdist run -n 4 examples/megatron_block.py --check
    torchrun --nproc-per-node 8 examples/megatron_block.py --tp 4 --sequence

Heads and hidden units are split over tp, the batch over dp. With ``--sequence`` the activations
between the products are split by position. ``--check`` compares the result and all gradients with
the whole block on one rank, and exits with 1 if they differ.
"""

import argparse
import sys

import torch
import torch.nn.functional as F

import meshdist as md

BATCH, LENGTH, WIDTH, HEADS = 8, 16, 32, 8
LIMIT = 1e-9  # largest difference allowed; the numbers are float64
LIES = {
    "q": "d h@tp k",
    "k": "d h@tp k",
    "v": "d h@tp k",
    "out": "h@tp k d",
    "up": "d f@tp",
    "down": "f@tp d",
}


def block(x: torch.Tensor, w: dict[str, torch.Tensor], s: str) -> torch.Tensor:
    """Return the block's output, which lies as ``x`` does: ``b@dp s d``, or ``b@dp s@tp d``."""
    # Gathered once for all three: einsum keeps nothing that it gathers.
    y = md.reshard(F.layer_norm(x, (WIDTH,)), f"b@dp {s} d -> b@dp s d {{R:tp}}")
    project = "b@dp s d {R:tp}, d h@tp k -> b@dp h@tp s k"
    q, k, v = (md.einsum(project, y, w[name]) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + md.einsum(f"b@dp h@tp s k, h@tp k d -> b@dp {s} d", y, w["out"])
    y = F.layer_norm(x, (WIDTH,))
    y = md.einsum(f"b@dp {s} d, d f@tp -> b@dp s f@tp", y, w["up"])
    return x + md.einsum(f"b@dp s f@tp, f@tp d -> b@dp {s} d", F.gelu(y), w["down"])


def draw() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the batch and the weights as wholes, which every rank draws alike."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"d": WIDTH, "h": HEADS, "k": WIDTH // HEADS, "f": 4 * WIDTH}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / WIDTH**0.5

    dims = {name: lies.replace("@tp", "").split() for name, lies in LIES.items()}
    weights = {name: randn(*(sizes[dim] for dim in each)) for name, each in dims.items()}
    return randn(BATCH, LENGTH, WIDTH), weights


def run(mesh: md.DeviceMesh, *, sequence: bool) -> dict[str, torch.Tensor]:
    """Return this rank's output, and its gradients of the batch and of each weight."""
    s = "s@tp" if sequence else "s"
    batch, wholes = draw()
    with mesh:
        x = md.shard(batch, f"b@dp {s} d").requires_grad_()
        w = {name: md.shard(wholes[name], lies).requires_grad_() for name, lies in LIES.items()}
        y = block(x, w, s)
        y.backward(y.detach())  # of half the squares
        found = {"output": y.detach(), "batch": x.grad, **{name: w[name].grad for name in w}}
        lies = {"output": f"b@dp {s} d", "batch": f"b@dp {s} d", **LIES}
        return {name: md.unshard(found[name], lies[name]) for name in found}


def difference(mesh: md.DeviceMesh, *, sequence: bool) -> float:
    """Return the largest difference from the block on one rank, over output and gradients."""
    alone = md.DeviceMesh("cpu", [[md.get_rank()]], mesh_dim_names=("dp", "tp"))
    mine, whole = run(mesh, sequence=sequence), run(alone, sequence=False)
    off = torch.stack([(mine[name] - whole[name]).abs().max() for name in mine]).max()
    md.all_reduce(off, md.ReduceOp.MAX)
    return off.item()


def main() -> int:
    """Make the mesh, run the block, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="parts of each layer")
    parser.add_argument("--sequence", action="store_true", help="split activations by position")
    parser.add_argument("--check", action="store_true", help="compare with one rank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    shape = md.get_world_size() // options.tp, options.tp
    if md.get_world_size() % options.tp:
        raise SystemExit(f"--tp={options.tp} does not divide {md.get_world_size()} ranks")
    mesh = md.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    output = run(mesh, sequence=options.sequence)["output"]
    off = difference(mesh, sequence=options.sequence) if options.check else 0.0
    if md.get_rank() == 0:
        print(f"dp={shape[0]}, tp={shape[1]}: mean square {output.square().mean():.6f}")
        if options.check:
            print(f"difference from one rank: {off:.1e}")
    md.destroy_process_group()
    return int(not off <= LIMIT)  # NaN, too


if __name__ == "__main__":
    sys.exit(main())

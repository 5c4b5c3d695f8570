"""Every collective as one pattern, and what has no name besides: forward, backward, bytes.

    meshdist run -n 4 examples/reshard.py --check
    torchrun --nproc-per-node 6 examples/reshard.py --tp 3 --rows 1200

Each row is carried out on real data. The table says what ``md.plan`` finds for it and for its
gradient, and how much all ranks receive together. ``--check`` compares results with slices of the
whole array, and results and gradients with those of the collective that the pattern stands for; it
exits with 1 where they differ.
"""

import argparse
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange

import meshdist as md
from meshdist import lax

COLUMNS = 48
LINE = "{:28}{:30}{:24}{:>9}   {:24}{:>9}"


class Row(NamedTuple):
    """One way from a pattern to another; the collective, where there is one, does the same."""

    name: str
    pattern: str
    operation: Callable[[torch.Tensor], torch.Tensor] | None = None


def transpose_ranks(x: torch.Tensor) -> torch.Tensor:
    """Send each part from the rank with its number in the order (dp, tp) to that in (tp, dp)."""
    dp, tp = lax.axis_size("dp"), lax.axis_size("tp")
    moves = [(j * dp + i, i * tp + j) for i in range(dp) for j in range(tp)]
    return lax.ppermute(x, ("dp", "tp"), moves)


ROWS = (
    Row(
        "all-gather", "a@tp b -> a b", lambda x: lax.all_gather(x, "tp", tiled=True, to="invarying")
    ),
    Row(
        "all-gather, used in p ways",
        "a@tp b -> a b {R:tp}",
        lambda x: lax.all_gather(x, "tp", tiled=True, to="reduced"),
    ),
    Row("all-reduce", "a b {U:tp} -> a b", lambda x: lax.psum(x, "tp")),
    Row(
        "reduce-scatter",
        "a b {U:tp} -> a@tp b",
        lambda x: lax.psum_scatter(x, "tp", tiled=True),
    ),
    Row("all-to-all", "a@tp b -> a b@tp", lambda x: lax.all_to_all(x, "tp", 1, 0, tiled=True)),
    Row("permutation", "a@(dp,tp) b -> a@(tp,dp) b", transpose_ranks),
    Row("cast to reduced", "a b -> a b {R:tp}", lambda x: lax.pcast(x, "tp", to="reduced")),
    Row("slice", "a b -> a@tp b"),
    Row("become unreduced", "a b -> a b {U:tp}"),
    Row("all-reduce, two axes", "a b {U:dp,tp} -> a b", lambda x: lax.psum(x, ("dp", "tp"))),
    Row("gather the major axis", "a@(dp,tp) b -> a@tp b"),
    Row("change axes", "a@dp b -> a@tp b"),
    Row("exchange axes", "a@dp b@tp -> a@tp b@dp"),
    Row("sum and move", "a@dp b {U:tp} -> a b@(tp,dp)"),
    Row("move and transpose", "a@tp b -> b@tp a"),
)


def unreduced_axes(side: str) -> tuple[str, ...]:
    """Return the axes over which a side of a pattern holds partial sums."""
    found = re.search(r"U:([\w,]+)", side)
    return tuple(found[1].split(",")) if found else ()


def sum_of(partial_sum: torch.Tensor, side: str, mesh: md.DeviceMesh) -> torch.Tensor:
    """Return what this rank's tensor means: itself, or the sum of all partial sums."""
    meant = partial_sum.clone()
    if axes := unreduced_axes(side):
        md.all_reduce(meant, group=mesh[axes])
    return meant


def difference(row: Row, whole: torch.Tensor, mesh: md.DeviceMesh) -> float:
    """Return by how much this rank's result and gradient are off."""
    left, right = row.pattern.split(" -> ")
    left_dims, right_dims = (side.partition("{")[0] for side in (left, right))
    share = torch.tensor(1.0 + sum(map(mesh.get_local_rank, unreduced_axes(left))))
    x = (md.shard(whole, left_dims, mesh) * share).requires_grad_()
    y = md.reshard(x, row.pattern, mesh)

    names = re.sub(r"@(\w+|\([\w,]+\))", "", right_dims)
    total = rearrange(whole * sum_of(share, left, mesh), f"a b -> {names}")
    expected = md.shard(total, right_dims, mesh)
    off = (sum_of(y.detach(), right, mesh) - expected).abs().max().item()
    if row.operation is not None:
        x_of_operation = x.detach().requires_grad_()
        with mesh:
            y_of_operation = row.operation(x_of_operation)
        y.backward(y_of_operation.detach())
        y_of_operation.backward(y_of_operation.detach())
        for one, other in ((y, y_of_operation), (x.grad, x_of_operation.grad)):
            off = max(off, (one - other).abs().max().item())
    return off


def line(row: Row, rows: int, mesh: md.DeviceMesh) -> str:
    """Return what the plans say: steps of forward and backward, bytes that all ranks receive."""
    plans = [md.plan(row.pattern, mesh=mesh, a=rows, b=COLUMNS, rank=r) for r in range(mesh.size())]
    words = [row.name, row.pattern]
    for one_way in (plans, [plan.T for plan in plans]):
        steps = dict.fromkeys(step.name for plan in one_way for step in plan.steps)
        received = sum(plan.bytes_received() for plan in one_way)
        words += [" ".join(steps) or "-", f"{received:,}"]
    return LINE.format(*words)


def main() -> int:
    """Make the mesh, show each row, and compare where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks along tp")
    parser.add_argument("--rows", type=int, default=96, help="of the array")
    parser.add_argument("--check", action="store_true", help="compare with slices and collectives")
    options = parser.parse_args()
    torch.set_num_threads(1)
    md.init_process_group()
    num_ranks = md.get_world_size()
    if num_ranks % options.tp or options.rows % num_ranks or COLUMNS % num_ranks:
        raise SystemExit(f"{num_ranks} ranks cannot share {options.rows} rows, {COLUMNS} columns")
    mesh = md.init_device_mesh(
        "cpu", (num_ranks // options.tp, options.tp), mesh_dim_names=("dp", "tp")
    )
    whole = torch.arange(float(options.rows * COLUMNS)).view(options.rows, COLUMNS)
    if md.get_rank() == 0:
        print(f"{options.rows} x {COLUMNS} float32 on {mesh!r}; bytes: received, by all ranks")
        print(LINE.format("", "pattern", "forward", "bytes", "backward", "bytes").rstrip())
    worst = 0.0
    for row in ROWS:
        if md.get_rank() == 0:
            print(line(row, options.rows, mesh))
        off = torch.tensor(difference(row, whole, mesh) if options.check else 0.0)
        md.all_reduce(off, md.ReduceOp.MAX)
        worst = max(worst, off.item())
    if md.get_rank() == 0 and options.check:
        print(f"largest difference: {worst:.1e}")
    md.destroy_process_group()
    return int(worst > 0)


if __name__ == "__main__":
    sys.exit(main())

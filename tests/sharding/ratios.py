"""How near plans with sums come to the bound: ``python -m tests.sharding.ratios`` writes the table.

The bound is, per element, partial sums + destinations - 1, less one if a destination holds a
partial sum: what must be sent however it is done. It may not be reachable itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np

from meshdist.mesh.placement import Placement
from meshdist.sharding.plans import make_plan
from tests.sharding.cases import (
    ends_on_one_rank,
    extends_or_shortens,
    fewest_received,
    placed,
    summed_axes,
)
from tests.sharding.interpreter import coordinates

TABLE = Path(__file__).with_suffix(".md")
MESHES = ((2, 2), (2, 4), (4, 2), (3, 2), (4, 4), (2, 8), (2, 2, 2), (2, 3, 2), (2, 2, 4))
KINDS = ("each element ends on one rank", "axes extend or shorten the source's", "all others")
CASES = 3000
TABLE_MESHES = ((2, 2), (2, 4), (4, 2))


def kind_of(source: Placement, target: Placement) -> str:
    if ends_on_one_rank(source, target):
        return KINDS[0]
    return KINDS[1] if extends_or_shortens(source, target) else KINDS[2]


def received(source: Placement, target: Placement) -> int:
    ranks = coordinates(source.mesh_sizes)
    return sum(make_plan(source, target, rank).bytes_received(1) for rank in ranks)


def random_cases(seed: int, count: int) -> Iterator[tuple[Placement, Placement]]:
    """Random pairs with a sum, of even and of uneven sizes."""
    drawn = random.Random(seed)
    while count:
        mesh = drawn.choice(MESHES)
        sizes = drawn.choice([(4, 8, 12, 16), (1, 2, 3, 5, 7, 10)])
        shape = tuple(drawn.choice(sizes) for _ in range(drawn.randint(1, 3)))
        source, target = (
            drawn_placement(drawn, mesh, shape, unreduced) for unreduced in (0.35, 0.1)
        )
        if summed_axes(source, target) and 0 not in shape:
            count -= 1
            yield source, target


def drawn_placement(
    drawn: random.Random, mesh: tuple[int, ...], shape: tuple[int, ...], unreduced: float
) -> Placement:
    axes = drawn.sample(range(len(mesh)), len(mesh))
    partial_sums = [axis for axis in axes if drawn.random() < unreduced]
    homes = {axis: drawn.randint(-1, len(shape) - 1) for axis in axes if axis not in partial_sums}
    cut = [tuple(axis for axis in homes if homes[axis] == dim) for dim in range(len(shape))]
    return placed(mesh, shape, *cut, unreduced=tuple(sorted(partial_sums)))


def ratios(seed: int, count: int) -> dict[str, list[float]]:
    """Received elements over the bound, by kind of transition."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for source, target in random_cases(seed, count):
        bound = fewest_received(source, target)
        ratio = received(source, target) / bound if bound else 1.0
        found[kind_of(source, target)].append(ratio)
    return found


TRANSITIONS = {
    "[S0,S1]->[S1,S0]": (((0,), (1,)), ((1,), (0,)), ()),
    "[S0,R]->[R,S0]": (((0,), ()), ((1,), ()), ()),
    "[S0,S0]->[S1,S1]": (((0, 1), ()), ((), (0, 1)), ()),
    "[P,S0]->[S0,S0]": (((1,), ()), ((0, 1), ()), (0,)),
    "[S0,R]->[S1,R]": (((0,), ()), ((), (0,)), ()),
    "[S0,S0]->[R,S0]": (((0, 1), ()), ((1,), ()), ()),
    "[P,P]->[R,R]": (((), ()), ((), ()), (0, 1)),
    "[S0,S0]->[R,R]": (((0, 1), ()), ((), ()), ()),
    "[P,S0]->[S1,R]": (((1,), ()), ((), (0,)), (0,)),
    "[P,S0]->[R,S1]": (((1,), ()), ((), (1,)), (0,)),
    "[P,S0]->[R,R]": (((1,), ()), ((), ()), (0,)),
    "[P,R]->[R,R]": (((), ()), ((), ()), (0,)),
    "[P,P]->[S0,S0]": (((), ()), ((0, 1), ()), (0, 1)),
}


def written() -> str:
    """The table as text."""
    lines = [
        "# Received elements over the bound",
        "",
        "Written by `python -m tests.sharding.ratios`. The bound is, per element, partial sums +",
        "destinations - 1, less one if a destination holds a partial sum.",
        "",
        f"{CASES} random transitions with a sum, on meshes of up to 3 axes and 16 ranks, arrays of",
        "up to 3 dims, half of them of uneven sizes:",
        "",
        "| transitions | cases | at the bound | mean | 90 % below | largest |",
        "|---|---|---|---|---|---|",
    ]
    for kind, listed in ratios(1, CASES).items():
        values = np.array(listed)
        share = np.mean(values == 1)
        lines.append(
            f"| {kind} | {len(values)} | {share:.1%} | {values.mean():.3f} | "
            f"{np.quantile(values, 0.9):.3f} | {values.max():.3f} |"
        )
    lines += [
        "",
        "Of an array T of 48 x 48 (S0: dim 0 is cut along this axis, R: ranks are equal, P: each",
        "holds a partial sum), received per rank, as a mean, and over the bound:",
        "",
        "| transition | " + " | ".join(f"mesh {mesh}" for mesh in TABLE_MESHES) + " |",
        "|---|" + "---|" * len(TABLE_MESHES),
    ]
    shape = (48, 48)
    for name, (rows, there, unreduced) in TRANSITIONS.items():
        cells = []
        for mesh in TABLE_MESHES:
            source = placed(mesh, shape, *rows, unreduced=unreduced)
            target = placed(mesh, shape, *there)
            total, bound = received(source, target), fewest_received(source, target)
            mean = total / len(list(product(*map(range, mesh)))) / (48 * 48)
            cells.append(f"{mean:.4f} T, {total / bound:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(written(), encoding="utf-8")

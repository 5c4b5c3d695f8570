"""``md.shard_map`` by examples: products by several shardings, ring attention, experts, a pipeline.

    meshdist run -n 4 examples/shard_map_tutorial.py --check
    torchrun --nproc-per-node 2 examples/shard_map_tutorial.py

Each function below works on one rank's shards, and ``shard_map`` makes of it a function of whole
arrays, after JAX's tutorial of that name. A row of the table says how far its value and gradients
are from those of one device; ``--check`` exits with 1 where that is more than rounding.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import meshdist as md
from meshdist import P, lax, shard_map

LIMIT = 1e-10  # largest difference allowed, relative to the largest element; all is float64
AXIS = "i"  # the one axis of the mesh, over all ranks


def ring() -> list[tuple[int, int]]:
    """Return the moves that send each rank's shard to its right neighbour."""
    size = lax.axis_size(AXIS)
    return [(place, (place + 1) % size) for place in range(size)]


# -- products by several shardings ----------------------------------------------------------------


@shard_map(in_specs=(P("i"), P()), out_specs=P("i"))
def by_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows of a times all of b: nothing is sent forward; b's gradient is summed."""
    return a @ b


@shard_map(in_specs=(P(None, "i"), P("i")), out_specs=P())
def by_partial_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Columns of a times rows of b are partial sums of the product."""
    return lax.psum(a @ b, AXIS)


@shard_map(in_specs=(P(None, "i"), P("i")), out_specs=P(None, "i"))
def by_scattered_partial_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same, where each rank needs a part of the sum alone."""
    return lax.psum_scatter(a @ b, AXIS, scatter_dimension=1, tiled=True)


@shard_map(in_specs=(P("i"), P("i")), out_specs=P("i"))
def by_gathered_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows of both: each rank needs all rows of b."""
    return a @ lax.all_gather(b, AXIS, tiled=True)


@shard_map(in_specs=(P("i"), P("i")), out_specs=P("i"))
def around_a_ring(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same in steps: b's rows go round, and each rank multiplies those that it has."""
    size, place = lax.axis_size(AXIS), lax.axis_index(AXIS)
    columns = a.tensor_split(size, 1)
    out = columns[place] @ b
    for step in range(1, size):
        b = lax.ppermute(b, AXIS, ring())
        out = out + columns[(place - step) % size] @ b
    return out


# -- ring attention -------------------------------------------------------------------------------


@shard_map(in_specs=P(None, "i"), out_specs=P(None, "i"))
def ring_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over a sequence that is cut: keys and values go round (arXiv 2310.01889).

    Of each block that passes come the largest score so far, and sums of exponentials below it.
    """
    best = (q @ k.mT).amax(-1, keepdim=True).detach() - torch.inf
    weight, out = torch.zeros_like(best), torch.zeros_like(q)
    for step in range(lax.axis_size(AXIS)):
        if step:
            k, v = lax.ppermute((k, v), AXIS, ring())
        scores = q @ k.mT / q.shape[-1] ** 0.5
        higher = torch.maximum(best, scores.amax(-1, keepdim=True).detach())
        exponentials, shrunk = (scores - higher).exp(), (best - higher).exp()
        weight = weight * shrunk + exponentials.sum(-1, keepdim=True)
        out = out * shrunk + exponentials @ v
        best = higher
    return out / weight


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same on one device."""
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


# -- an uneven all-to-all -------------------------------------------------------------------------


def experts_of(tokens: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return each token's expert: the numbers of tokens differ between experts."""
    return (tokens.detach().sum(-1).abs() * 7).long() % num_experts


@shard_map(in_specs=(P("i"), P("i")), out_specs=P("i"))
def mixture(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One expert a rank: tokens go to their experts, as many as there are, and come back."""
    size, place = lax.axis_size(AXIS), lax.axis_index(AXIS)
    expert = experts_of(tokens, size)
    order = expert.argsort(stable=True)
    with md.untyped():  # numbers of tokens are data: they size the exchange
        counts = lax.all_gather(expert.bincount(minlength=size), AXIS).tolist()
    sent, came = counts[place], [row[place] for row in counts]
    # Where each rank's tokens begin: on the expert behind those of earlier ranks, at home sorted.
    there = [sum(counts[rank][to] for rank in range(place)) for to in range(size)]
    back = [sum(counts[rank][:place]) for rank in range(size)]
    starts = [sum(sent[:to]) for to in range(size)], [sum(came[:rank]) for rank in range(size)]
    room = lax.pvary(tokens.new_zeros(sum(came), tokens.shape[1]), AXIS)
    mine = lax.ragged_all_to_all(tokens[order], room, starts[0], sent, there, came, axis_name=AXIS)
    done = torch.tanh(mine @ weights[0])
    home = lax.ragged_all_to_all(
        done, torch.zeros_like(tokens), starts[1], came, back, sent, axis_name=AXIS
    )
    return home[order.argsort()]


def mixture_alone(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same on one device."""
    expert = experts_of(tokens, len(weights))
    return torch.tanh(torch.einsum("td,tde->te", tokens, weights[expert]))


# -- a pipeline -----------------------------------------------------------------------------------


@shard_map(in_specs=(P("i"), P()), out_specs=P())
def pipeline(layers: torch.Tensor, batches: torch.Tensor) -> torch.Tensor:
    """One stage a rank: microbatches enter at the first rank, and move on by one rank a step.

    A mask, and no ``if``, says which rank takes what: all ranks then have one backward.
    """
    size, place = lax.axis_size(AXIS), lax.axis_index(AXIS)
    first, last = (md.annotate(torch.tensor(place == at), varying=AXIS) for at in (0, size - 1))
    state, done = lax.pvary(torch.zeros_like(batches[0]), AXIS), []
    for step in range(len(batches) + size - 1):
        state = torch.where(first, batches[min(step, len(batches) - 1)], state)
        for layer in layers:
            state = torch.tanh(state @ layer)
        if step >= size - 1:
            done.append(state * last)
        state = lax.ppermute(state, AXIS, ring())
    return lax.psum(torch.stack(done), AXIS)


def stages(layers: torch.Tensor, batches: torch.Tensor) -> torch.Tensor:
    """The same on one device."""
    for layer in layers:
        batches = torch.tanh(batches @ layer)
    return batches


class Row(NamedTuple):
    """A mapped function, the same on one device, and the shapes of the arguments, by ranks."""

    name: str
    mapped: Callable[..., md.ShardedArray]
    alone: Callable[..., torch.Tensor]
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]


def matrices(size: int) -> tuple[tuple[int, ...], ...]:
    return (2 * size + 1, 3 * size), (3 * size, 2 * size)


ROWS = (
    Row("rows", by_rows, torch.matmul, matrices),
    Row("partial_sums", by_partial_sums, torch.matmul, matrices),
    Row("scattered partial sums", by_scattered_partial_sums, torch.matmul, matrices),
    Row("gathered rows", by_gathered_rows, torch.matmul, matrices),
    Row("around a ring", around_a_ring, torch.matmul, matrices),
    Row("ring attention", ring_attention, attention, lambda size: ((2, 4 * size, 8),) * 3),
    Row("experts", mixture, mixture_alone, lambda size: ((6 * size + 1, 4), (size, 4, 4))),
    Row("pipeline", pipeline, stages, lambda size: ((2 * size, 4, 4), (5, 3, 4))),
)


def difference(row: Row, size: int) -> float:
    """Return how far value and gradients are from one device's, of the largest element."""
    generator = torch.Generator().manual_seed(0)
    shapes = row.shapes(size)
    args = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found: list[Any] = []
    for call in (lambda *wholes: row.mapped(*wholes).full(), row.alone):
        leaves = [x.clone().requires_grad_() for x in args]
        y = call(*leaves)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    pairs = [(a.detach(), b.detach()) for a, b in zip(*found, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where values differ")
    options = parser.parse_args(argv)
    md.init_process_group()
    size, worst = md.get_world_size(), 0.0
    with md.init_device_mesh("cpu", (size,), mesh_dim_names=(AXIS,)):
        for row in ROWS:
            off = difference(row, size)
            worst = max(worst, off)  # on every rank: both sides are whole
            if md.get_rank() == 0:
                print(f"{row.name:20} difference {off:.1e}")
    md.destroy_process_group()
    return int(options.check and worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

"""Ranks make the same collectives, whatever sizes their parts have, forward and backward.

Sizes are drawn uneven, below the number of ranks, and 0: a rank that decides by its own part
whether a collective follows then decides otherwise than the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import meshdist as md
from tests.operations.cases import BACKENDS
from tests.pool import Pool

Profile = torch.profiler.profile
CPU = [torch.profiler.ProfilerActivity.CPU]

LINES = [
    "b d, d f -> b@x f",
    "b d, d f -> b f@x",
    "b@x d, d@x f -> b@x f",
    "b@x d, d f -> b f",
    "b d@x, d@x f -> b f",
    "b d@x, d f@x -> b f@x",
    "b@x d, d f -> f",
    "b@x d, d f -> f {U:x}",
    "b@x d, b@x f -> d f@x",
    "b@x d, d@x f -> d",
]
"""Of sizes that a rank sees 1 and another 2, torch.einsum makes other operations."""

PATTERNS = [
    "b@x d -> b d@x",
    "b@x d -> b d",
    "b d -> b@x d",
    "b d {U:x} -> b d",
    "b d {U:x} -> b@x d",
    "b d -> b d {R:x}",
    "b d {R:x} -> b d {U:x}",
    "b@x d -> b d {U:x}",
    "b d {U:x} -> d b@x",
]


def leaf(draws: Random, *shape: int) -> torch.Tensor:
    values = [float(draws.randint(-3, 3)) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(values).reshape(shape).requires_grad_()


def sizes_of(draws: Random, names: str, most: int = 6) -> dict[str, Any]:
    return {name: draws.choice((0, 1, *range(most))) for name in names}


def lines_of_einsum(draws: Random, mesh: Any) -> None:
    """Several lines with the same activations, of which some gather again."""
    for line in draws.sample(LINES, 4):
        sizes = sizes_of(draws, "bdf")
        left, _ = line.split(" -> ")
        operands = []
        for side in left.split(", "):
            whole = leaf(draws, *(sizes[dim[0]] for dim in side.split()))
            operands.append(1 * md.shard(whole.detach(), side, mesh).requires_grad_())
        lines = [
            md.einsum(line, *operands, mesh=mesh, regather=regather, **sizes)
            for regather in (False, True, True)
        ]
        torch.stack([y.square().sum() for y in lines]).sum().backward()


def reshards(draws: Random, mesh: Any) -> None:
    for pattern in PATTERNS:
        sizes, (left, _) = sizes_of(draws, "bd"), pattern.split(" -> ")
        x = md.shard(leaf(draws, sizes["b"], sizes["d"]).detach(), left, mesh).requires_grad_()
        for source in (x, 1 * x):
            md.reshard(source, pattern, mesh, **sizes).square().sum().backward()


def operations(draws: Random, mesh: Any) -> None:
    """Every function of lax, on arrays that can be empty."""
    lax, size = md.lax, mesh.size()
    with mesh:
        pairs = [(place, (place + 1) % size) for place in range(draws.randint(0, size))]
        order = draws.sample(range(size), size)
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda x: lax.psum(x, "x"),
            lambda x: lax.pmean(x, "x"),
            lambda x: lax.pmax(x, "x"),
            lambda x: lax.pmin(x, "x"),
            lambda x: lax.pvary(x, "x"),
            lambda x: lax.pcast(x, "x", to="reduced"),
            lambda x: lax.all_gather(x, "x"),
            lambda x: lax.all_gather(x, "x", tiled=True, axis=1, to="invarying"),
            lambda x: lax.all_gather(x, "x", to="reduced"),
            lambda x: lax.psum_scatter(x, "x", tiled=True),
            lambda x: lax.all_to_all(x, "x", 0, 1, tiled=True),
            lambda x: lax.ppermute(x, "x", pairs),
            lambda x: lax.pshuffle(x, "x", order),
            lambda x: lax.pbroadcast(x, "x", draws.randrange(size)),
        ]
        for call in calls:
            x = leaf(draws, size * draws.randint(0, 2), draws.randint(0, 2))
            call(1 * x).square().sum().backward()
        x = leaf(draws, size, draws.randint(0, 2))
        lax.pswapaxes(1 * x, "x", 0).square().sum().backward()


def ragged(draws: Random, mesh: Any) -> None:
    size, rank = mesh.size(), mesh.get_local_rank()
    sent = [[draws.randint(0, 2) for _ in range(size)] for _ in range(size)]
    taken = [[row[place] for row in sent] for place in range(size)]
    operand, output = leaf(draws, sum(sent[rank]), 2), leaf(draws, sum(taken[rank]), 2)
    result = md.lax.ragged_all_to_all(
        1 * operand,
        1 * output,
        [sum(sent[rank][:to]) for to in range(size)],
        sent[rank],
        [sum(taken[to][:rank]) for to in range(size)],
        taken[rank],
        axis_name="x",
        mesh=mesh,
    )
    result.square().sum().backward()


def experts(draws: Random, mesh: Any) -> None:
    """Ranks without tokens, and ranks without experts."""
    size, rank = mesh.size(), mesh.get_local_rank()
    num_experts, num_chosen = draws.randint(1, size + 1), draws.randint(1, 2)
    counts = [draws.randint(0, 3) for _ in range(size)]
    of_all = [[draws.randint(-1, num_experts - 1) for _ in range(n * num_chosen)] for n in counts]
    chosen = torch.tensor(of_all[rank], dtype=torch.int64).reshape(-1, num_chosen)
    tokens, weights = leaf(draws, counts[rank], 3), leaf(draws, counts[rank], num_chosen)
    rows, route = md.experts.dispatch(1 * tokens, chosen, "x", num_experts, mesh=mesh)
    mine = [nn.Linear(3, 2) for _ in route.counts]
    blocks = rows.split(route.counts.tolist())
    done = [expert(block) for expert, block in zip(mine, blocks, strict=True)]
    made = torch.cat([torch.zeros(0, 2, requires_grad=True), *done])
    md.experts.combine(made, route, weights).square().sum().backward()


def layers(draws: Random, mesh: Any) -> None:
    """Split layers of uneven parts, whole and cut along the sequence."""
    size = mesh.size()
    width, hidden = (size + draws.randint(0, 3) for _ in range(2))
    torch.manual_seed(0)
    for first, second in (
        ("column", "row"),
        ("column_sequence", "row_sequence"),
        ("column_whole", "row_whole"),
    ):
        model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))
        md.parallelize(model, mesh, {"0": first, "2": second})
        length = 2 if "sequence" in first else draws.randint(0, 2)
        h = 1 * leaf(draws, length, width)
        (model(h) + model(h)).square().sum().backward()
    table = nn.Embedding(width, 2)
    md.parallelize(table, mesh, {"": "vocab"})
    index = torch.tensor([draws.randrange(width) for _ in range(draws.randint(0, 3))])
    table(index.long()).square().sum().backward()
    num_classes = size + draws.randint(0, 2)
    whole, target = leaf(draws, 2, num_classes).detach(), torch.tensor([0, num_classes - 1])
    logits = md.shard(whole, "n c@x", mesh).requires_grad_()
    md.tensor_parallel.cross_entropy(
        logits, target, "x", num_classes=num_classes, label_smoothing=0.1, mesh=mesh
    ).backward()


def mapped(draws: Random, mesh: Any) -> None:
    sizes = sizes_of(draws, "bd")

    @md.shard_map(mesh=mesh, in_specs=(md.P("x"), md.P()), out_specs=(md.P("x"), md.P()))
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = x * w
        return y, md.lax.psum(y.sum(0), "x")

    x, w = leaf(draws, sizes["b"], sizes["d"]), leaf(draws, sizes["d"])
    ys, total = f(x, w)
    (ys.full().square().sum() + total.local.square().sum()).backward()


def typed(draws: Random, mesh: Any) -> None:
    """Casts of leaves one by one, in a bucket, and where ranks have no rows."""
    w, v = leaf(draws, 2, 3), leaf(draws, 3)
    counts = [draws.randint(0, 2) for _ in range(mesh.size())]
    x = md.annotate(torch.ones(counts[mesh.get_local_rank()], 2), varying="x", mesh=mesh)
    for _ in range(3):
        with md.typed(mesh):
            md.lax.psum(((x @ w + v) ** 2).sum(), "x").backward()


def sharded_arrays(draws: Random, mesh: Any) -> None:
    rows = md.NamedSharding(mesh, md.P("x"))
    sizes = sizes_of(draws, "bd")
    whole = leaf(draws, sizes["b"], sizes["d"])
    array = md.device_put(whole, rows)
    for made in (array.full(), array.sum().full(), array[1:].full(), array.mean(0).full()):
        made.sum().backward(retain_graph=True)
    array.reshard(md.P(None, "x")).local.square().sum().backward()
    from_root = md.device_put(whole if md.get_rank() == 0 else None, rows, root=0)
    from_root.local.square().sum().backward()
    md.unshard(array.local.detach(), rows, root=0, shape=array.shape)


def clips(draws: Random, mesh: Any) -> None:
    parts = []
    for size in sizes_of(draws, "abc").values():
        part = nn.Parameter(md.shard(torch.ones(size, 2), "f@x d", mesh))
        part.grad = torch.ones_like(part)
        parts.append(md.annotate(part, "f@x d", mesh=mesh))
    whole = leaf(draws, 2)
    whole.grad = torch.ones(2)
    for order in (2.0, float("inf")):
        md.clip_grad_norm_([*parts, whole], 1.0, order, mesh=mesh)


def replicas(draws: Random, mesh: Any) -> None:
    """DDP with a batch norm over all ranks, of batches that differ in size, and empty leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    empty = nn.Parameter(torch.zeros(0))
    model.register_parameter("empty", empty)
    ddp = md.DDP(md.SyncBatchNorm.convert_sync_batchnorm(model, mesh["x"].get_group()))
    counts = [2, *(draws.randint(0, 3) for _ in range(mesh.size() - 1))]
    for _ in range(3):
        x = torch.randn(counts[md.get_rank()], 2)
        (ddp(x).square().sum() + empty.sum()).backward()
        md.clip_grad_norm_(ddp.parameters(), 1.0, mesh=mesh)


CASES = (
    lines_of_einsum,
    reshards,
    operations,
    ragged,
    experts,
    layers,
    mapped,
    typed,
    sharded_arrays,
    clips,
    replicas,
)


def run(case: Callable[..., None], seed: int, size: int) -> list[str]:
    """Run a case on this rank; return the names of its collectives."""
    mesh = md.init_device_mesh("cpu", (size,), mesh_dim_names=("x",))
    if md.get_rank() < 0:
        return []
    with Profile(activities=CPU, acc_events=True) as profile:
        case(Random(seed), mesh)
    return operations_in(profile)


def operations_in(profile: Any, prefix: str = "") -> list[str]:
    """Return the names of the collectives in a profile, in order."""
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    begin = re.compile(rf"{prefix}meshdist::(\w+)")
    return [found[1] for event in events if (found := begin.match(event.name))]


def on_simulated_ranks(case: Callable[..., None], seed: int, size: int) -> list[list[str]]:
    def program() -> None:
        case(Random(seed), md.init_device_mesh("cpu", (size,), mesh_dim_names=("x",)))

    with Profile(activities=CPU, acc_events=True) as profile:
        md.simulate(program, size)
    return [operations_in(profile, f"rank {rank}: ") for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_simulated_ranks_make_the_same_calls(case: Callable[..., None], size: int) -> None:
    for seed in range(4 if size == 2 else 2):
        first, *others = on_simulated_ranks(case, seed, size)
        assert first, "a case without a collective compares nothing"
        for other in others:
            assert other == first, (case.__name__, seed)


@pytest.mark.parametrize(
    ("backend", "size"),
    [("shm", 3), ("gloo", 2), ("gloo across hosts", 3), ("mpi", 2), ("two hosts", 2)],
)
def test_processes_make_the_same_calls(pool: Pool, backend: str, size: int) -> None:
    def every(size: int) -> dict[str, list[str]]:
        return {case.__name__: run(case, size, size) for case in CASES}

    first, *others = BACKENDS[backend](pool, every, size, size)
    for other in others:
        assert other == first

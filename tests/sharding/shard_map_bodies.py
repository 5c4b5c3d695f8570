"""Random bodies of mapped functions: lists of steps that mean the same on shards and on the whole.

A step is a tuple of its name and its arguments, so that a body travels to other processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import meshdist as md

AXES = ("a", "b", "c")
SIZES = ((2,), (3,), (2, 2), (2, 3), (4, 2), (2, 1), (2, 2, 2))
Step = tuple[Any, ...]


@dataclass(frozen=True)
class Body:
    """A body on a mesh: how x lies before and behind it, by the axes of each of its two dims."""

    sizes: tuple[int, ...]
    shape: tuple[int, int]
    before: tuple[tuple[str, ...], ...]
    steps: tuple[Step, ...]
    behind: tuple[tuple[str, ...], ...]

    @property
    def size_of(self) -> dict[str, int]:
        return dict(zip(AXES, self.sizes, strict=False))


@st.composite
def bodies(draw: Any) -> Body:
    sizes = draw(st.sampled_from(SIZES))
    names = AXES[: len(sizes)]
    size_of = dict(zip(names, sizes, strict=True))
    is_even = draw(st.booleans())
    whole = math.prod(sizes)
    shape = (whole, 2 * whole) if is_even else (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    dims: list[tuple[str, ...]] = [(), ()]
    for name in draw(st.permutations(names)):
        place = draw(st.integers(0, 2))
        if place < 2:
            dims[place] += (name,)
    before, lengths, steps = tuple(dims), list(shape), list[Step]()
    for _ in range(draw(st.integers(1, 5))):
        step = draw(st.sampled_from(possible(dims, lengths, size_of, is_even=is_even)))
        steps.append(step)
        follow(step, dims, lengths)
    return Body(sizes, shape, before, tuple(steps), tuple(dims))


def possible(
    dims: list[tuple[str, ...]], lengths: list[int], size_of: dict[str, int], *, is_even: bool
) -> list[Step]:
    """The steps that an array that lies so can take; collectives of parts only where these are
    equal."""
    found: list[Step] = [("shift",), ("scale",), ("closed",), ("product",), ("sum", 0), ("sum", 1)]
    if not is_even:
        return found
    free = [name for name in size_of if name not in dims[0] + dims[1]]
    for d, e in ((0, 1), (1, 0)):
        parts = math.prod(size_of[name] for name in dims[e])
        found += [("cut", e, name) for name in free if lengths[e] % (parts * size_of[name]) == 0]
        if not dims[d]:
            continue
        last = dims[d][-1]
        found.append(("gather", d, last))
        if len(dims[d]) == 1:
            found.append(("roll", d, last))
        if lengths[e] % (parts * size_of[last]) == 0:
            found.append(("swap", d, e, last))
            if len(dims[d]) == 1:
                found.append(("scatter", d, e, last))
    return found


def follow(step: Step, dims: list[tuple[str, ...]], lengths: list[int]) -> None:
    """Change how the array lies, and its shape, as the step does."""
    name, *at = step
    if name in ("sum", "scatter"):
        dims[at[0]], lengths[at[0]] = (), 1
    if name in ("gather", "swap"):
        dims[at[0]] = dims[at[0]][:-1]
    if name in ("swap", "scatter"):
        dims[at[1]] += (at[2],)
    if name == "cut":
        dims[at[0]] += (at[1],)


def on_shards(body: Body, x: torch.Tensor, w: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
    """The body as ranks run it; ``w`` is whole, and ``closed`` was never an argument."""
    lax, dims, lengths = md.lax, list(body.before), list(body.shape)
    for step in body.steps:
        name, *at = step
        if name == "sum":
            x = x.sum(at[0], keepdim=True)
            x = lax.psum(x, dims[at[0]]) if dims[at[0]] else x
        elif name == "gather":
            x = lax.all_gather(x, at[1], axis=at[0], tiled=True, to="invarying")
        elif name == "swap":
            x = lax.all_to_all(x, at[2], split_axis=at[1], concat_axis=at[0], tiled=True)
        elif name == "scatter":
            x = x.sum(at[0], keepdim=True)
            x = lax.psum_scatter(x, at[2], scatter_dimension=at[1], tiled=True)
        elif name == "roll":
            size = lax.axis_size(at[1])
            x = lax.ppermute(x, at[1], [(place, (place + 1) % size) for place in range(size)])
        elif name == "cut":
            x = lax.pvary(x, at[1]).chunk(lax.axis_size(at[1]), at[0])[lax.axis_index(at[1])]
        else:
            x = plain(name, x, w, closed)
        follow(step, dims, lengths)
    return x


def on_one_device(
    body: Body, x: torch.Tensor, w: torch.Tensor, closed: torch.Tensor
) -> torch.Tensor:
    """What the body means on the whole."""
    for name, *at in body.steps:
        if name in ("sum", "scatter"):
            x = x.sum(at[0], keepdim=True)
        elif name == "roll":
            x = x.roll(x.shape[at[0]] // body.size_of[at[1]], at[0])
        elif name not in ("gather", "swap", "cut"):
            x = plain(name, x, w, closed)
    return x


def plain(name: str, x: torch.Tensor, w: torch.Tensor, closed: torch.Tensor) -> torch.Tensor:
    """A step without collectives, the same on shards and on the whole."""
    if name == "shift":
        return 2 * x - 1
    if name == "scale":
        return x * w
    return x + closed if name == "closed" else x * w + closed * x


def leaves_of(body: Body) -> list[torch.Tensor]:
    """Integers for x, w and closed, as leaves."""
    count = math.prod(body.shape)
    x = (torch.arange(count, dtype=torch.float64) * 5 % 7 - 3).view(body.shape)
    w, closed = torch.tensor([2.0, -3.0], dtype=torch.float64)
    return [each.clone().requires_grad_() for each in (x, w, closed)]


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """A loss with a gradient that differs between elements."""
    weights = torch.arange(float(y.numel()), dtype=torch.float64) % 5 - 2
    return (y * y.detach() * weights.view(y.shape)).sum()


def expected(body: Body) -> list[torch.Tensor]:
    """The value and the gradients on one device."""
    leaves = leaves_of(body)
    y = on_one_device(body, *leaves)
    return [y.detach(), *torch.autograd.grad(loss_of(y), leaves, materialize_grads=True)]


def found(body: Body, is_sharded: bool = False) -> list[torch.Tensor]:
    """The value and the gradients by a mapped function on this rank, as wholes.

    Args:
        is_sharded: whether x is a ShardedArray, else it is a whole.
    """
    mesh = md.init_device_mesh("cpu", body.sizes, mesh_dim_names=AXES[: len(body.sizes)])
    x, w, closed = leaves_of(body)
    before = md.NamedSharding(mesh, md.P(*body.before))
    given: Any = x
    if is_sharded:
        given = md.device_put(x.detach(), before)
        given.local.requires_grad_()
    in_specs = (before.spec, md.P())
    f = md.shard_map(
        lambda x, w: on_shards(body, x, w, closed),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=md.P(*body.behind),
    )
    y = f(given, w).full()
    inputs = [given.local if is_sharded else x, w, closed]
    first, *rest = torch.autograd.grad(loss_of(y), inputs, materialize_grads=True)
    if is_sharded:
        first = md.ShardedArray(first, before, body.shape).full()
    return [y.detach(), first, *rest]

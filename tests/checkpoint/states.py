"""Drawn states of arrays that lie on a mesh in any way; the oracle slices wholes."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import meshdist as md
from meshdist.mesh.layout import Layout

MESHES = ((1,), (2,), (3,), (5,), (2, 2), (4, 2), (2, 3), (2, 2, 2), (4, 4), (16,), (2, 1, 3))
DTYPES = ("float32", "float64", "bfloat16", "int64", "uint8", "bool", "complex64", "float8_e5m2")


@dataclass(frozen=True)
class Lying:
    """How an array lies on a mesh: the axes that cut each dim, and sizes of their parts."""

    dims: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def sharding(self, mesh: Any) -> md.NamedSharding:
        names = mesh.names if isinstance(mesh, Layout) else mesh.axis_names
        spec = md.P(*(tuple(names[axis] for axis in axes) for axes in self.dims))
        return md.NamedSharding(mesh, spec, shard_sizes=dict(self.sizes))


def layout_of(shape: tuple[int, ...]) -> Layout:
    return Layout.from_shape(shape, tuple("abc"[: len(shape)]))


def whole(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """An array of random bits that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "complex64":
        return torch.randn(shape, generator=generator, dtype=kind)
    numbers = torch.randint(-9, 10, shape, generator=generator).float()
    return numbers.abs().to(kind) if dtype in ("uint8", "bool") else numbers.to(kind)


@st.composite
def lyings(draw: Any, mesh: tuple[int, ...], shape: tuple[int, ...]) -> Lying:
    """Any way to lie: each axis cuts a dim or none, in balanced parts or others."""
    dims: list[list[int]] = [[] for _ in shape]
    for axis in draw(st.permutations(range(len(mesh)))):
        place = draw(st.integers(-1, len(shape) - 1))
        if place >= 0:
            dims[place].append(axis)
    sizes = []
    for dim, axes in enumerate(dims):
        if axes and draw(st.booleans()):
            count = math.prod(mesh[axis] for axis in axes)
            ends = sorted(
                draw(st.lists(st.integers(0, shape[dim]), min_size=count - 1, max_size=count - 1))
            )
            edges = [0, *ends, shape[dim]]
            sizes.append((dim, tuple(b - a for a, b in itertools.pairwise(edges))))
    return Lying(tuple(map(tuple, dims)), tuple(sizes))


@dataclass(frozen=True)
class Case:
    """Arrays by name: shape, dtype, and how each lies on the mesh that saves and that loads."""

    saves: tuple[int, ...]
    loads: tuple[int, ...]
    arrays: dict[str, tuple[tuple[int, ...], str, Lying, Lying]]

    def wholes(self) -> dict[str, torch.Tensor]:
        return {
            name: whole(shape, dtype, seed)
            for seed, (name, (shape, dtype, _, _)) in enumerate(self.arrays.items())
        }


@st.composite
def cases(draw: Any, max_ranks: int = 16, max_loads: int = 16, large: bool = False) -> Case:
    saves = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh) <= max_ranks]))
    loads = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh) <= max_loads]))
    arrays = {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        if large and shape and draw(st.booleans()):
            shape = (draw(st.integers(130, 300)), *shape[1:], 140)
        dtype = draw(st.sampled_from(DTYPES))
        arrays[f"x{number}"] = (
            shape,
            dtype,
            draw(lyings(saves, shape)),
            draw(lyings(loads, shape)),
        )
    return Case(saves, loads, arrays)

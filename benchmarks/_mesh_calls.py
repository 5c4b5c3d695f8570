"""Small calls along an axis of a mesh, as training programs make them, for the count of frames."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import meshdist as md

__all__ = ["MESH_CALLS", "calls_on_mesh"]

Call = Callable[[], Any]

MESH_CALLS = (
    "lax.psum",
    "lax.psum, with gradient",
    "lax.psum, typed",
    "lax.all_gather",
    "lax.psum_scatter",
    "lax.all_to_all",
    "lax.ppermute",
    "x * x, typed",
    "a known reshard",
    "a known reshard, typed",
    "a known einsum",
    "a known einsum, typed",
    "shard_map of lax.psum",
)
"""Calls that were made before, so that plans, groups and types are known; of two ranks each."""


def calls_on_mesh() -> dict[str, tuple[AbstractContextManager[Any], Call]]:
    """Return each call of ``MESH_CALLS``, and the context that it is made inside of."""
    mesh = md.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, weight = torch.ones(2, 4), torch.ones(4, 2)
    leaf = x.clone().requires_grad_()
    varying, columns = (md.annotate(each.clone(), varying="tp") for each in (x, weight))
    reshard, einsum = "s@tp d -> s d@tp", "s d@tp, d@tp f -> s f"
    specs = {"in_specs": md.P("tp"), "out_specs": md.P()}
    mapped = md.shard_map(lambda x: md.lax.psum(x, "tp"), mesh=mesh, **specs)
    calls: dict[str, Call] = {
        "lax.psum": lambda: md.lax.psum(x, "tp"),
        "lax.psum, with gradient": lambda: md.lax.psum(leaf, "tp"),
        "lax.psum, typed": lambda: md.lax.psum(varying, "tp"),
        "lax.all_gather": lambda: md.lax.all_gather(x, "tp"),
        "lax.psum_scatter": lambda: md.lax.psum_scatter(x, "tp", tiled=True),
        "lax.all_to_all": lambda: md.lax.all_to_all(x, "tp", 0, 0, tiled=True),
        "lax.ppermute": lambda: md.lax.ppermute(x, "tp", [(0, 1), (1, 0)]),
        "x * x, typed": lambda: varying * varying,
        "a known reshard": lambda: md.reshard(x, reshard),
        "a known reshard, typed": lambda: md.reshard(varying, reshard),
        "a known einsum": lambda: md.einsum(einsum, x, weight),
        "a known einsum, typed": lambda: md.einsum(einsum, varying, columns),
        "shard_map of lax.psum": lambda: mapped(x),
    }
    return {
        name: (md.typed(mesh) if name.endswith("typed") else mesh, calls[name])
        for name in MESH_CALLS
    }
